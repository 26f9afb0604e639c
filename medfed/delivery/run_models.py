"""What a run folder holds of its clients' models; reading it needs no patient data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError
from torch import Tensor

from medfed.config import build
from medfed.delivery.client_model import ClientModel, checked, collapse, used_instances
from medfed.delivery.codebook import Codebook, from_centers
from medfed.delivery.networks import describe
from medfed.errors import CheckpointError, ConfigError, did_you_mean
from medfed.evaluation import finished
from medfed.models.networks import Canonical
from medfed.models.networks.parts import part_roots
from medfed.models.task import TaskModule
from medfed.tasks import build_task, mixes_models

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class RunRecord:
    """A finished run, as its folder has it.

    Attributes:
        folder: The run folder.
        config: The resolved configuration, facts of the data filled in.
        summary: ``summary.json``.
        splits: ``splits.json``.
        versions: ``versions.json``.
        preprocessing: ``preprocessing.json``, by client.
    """

    folder: Path
    config: DictConfig
    summary: dict[str, Any]
    splits: dict[str, Any]
    versions: dict[str, Any]
    preprocessing: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> RunRecord:
        """Reads a run folder.

        Raises:
            CheckpointError: If there is no finished run, or one of its files is missing or torn.
        """
        summary = finished(folder)
        try:
            config = OmegaConf.load(folder / "config.yaml")
            assert isinstance(config, DictConfig)
            OmegaConf.resolve(config)
        except Exception as error:  # whatever YAML or OmegaConf raise
            raise CheckpointError(f"{folder}/config.yaml cannot be read: {error}.") from error
        names = ("splits", "versions", "preprocessing")
        return cls(folder, config, summary, *(_read_json(folder / f"{n}.json") for n in names))

    def clients(self, wanted: str | Sequence[str]) -> list[str]:
        """Returns the chosen clients: ``all``, a name, several names, or names joined by commas.

        Raises:
            ConfigError: If a client is unknown.
        """
        known = list(self.summary["clients"])
        if wanted == "all":
            return known
        names = wanted.split(",") if isinstance(wanted, str) else [str(n) for n in wanted]
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"The run in {self.folder} has no client {name}{did_you_mean(name, known)}; it "
                    f"has {', '.join(known)}."
                )
        return list(dict.fromkeys(names))

    def task(self) -> TaskModule:
        """Builds the task around the ordinary network, in single precision."""
        task: TaskModule = build(self.config.model)
        return task

    def model(self, client: str) -> ClientModel:
        """Returns a client's model in the form that a bundle holds.

        Raises:
            CheckpointError: If the file is missing, torn or of another model.
            ConfigError: If bundles know no such network.
        """
        loaded = _load(self.folder / "models" / f"{client}.safetensors")
        node = OmegaConf.to_container(self.config.model.network)
        assert isinstance(node, dict)
        plain = describe({str(k): v for k, v in node.items()})
        if mixes_models(self.config):
            network = build_task(self.config).network
            assert isinstance(network, Canonical)
            _fill(network, loaded, f"{client} in {self.folder}")
            if network.mix == "parameters":
                loaded = collapse(network)
            else:
                plain, loaded = used_instances(plain, self._places(), network.activation, loaded)
        return checked(plain, loaded, f"{client} in {self.folder}")

    def learned(self, client: str, weights: Mapping[str, Tensor]) -> dict[str, Codebook]:
        """Returns the codebooks of the parameters whose centres were learned; empty without."""
        path = self.folder / "centers" / f"{client}.safetensors"
        if not path.is_file():
            return {}
        centers = _load(path)
        return {n: from_centers(weights[n], c.float()) for n, c in centers.items()}

    def _places(self) -> list[str]:
        """The layers of the canonical part."""
        task, parts = self.task(), self.config.canonical.parts
        return part_roots(task.network, task.personal if parts is None else parts)


def _fill(network: Canonical, loaded: Tensors, source: str) -> None:
    network.to(next(iter(loaded.values())).dtype)
    counters = {n: t for n, t in network.state_dict().items() if not t.is_floating_point()}
    try:
        network.load_state_dict({**counters, **loaded})
    except RuntimeError as error:
        raise CheckpointError(
            f"The model of {source} has other entries than its configuration says; the run folder "
            "is mixed up."
        ) from error


def _load(path: Path) -> Tensors:
    try:
        return safetensors.torch.load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; repeat the run.") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is truncated or damaged ({error}); copy it again."
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing; the run was made by an older version: repeat it."
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    return content
