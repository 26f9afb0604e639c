"""What a run folder holds of its clients' models; reading it needs no patient data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError
from torch import Tensor

from medfed.config import build
from medfed.delivery.codebook import Codebook, from_centers
from medfed.delivery.networks import describe
from medfed.errors import CheckpointError, ConfigError, did_you_mean
from medfed.evaluation import finished
from medfed.federation.split import float_entries
from medfed.models.networks import Canonical
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

    def network(self) -> dict[str, Any]:
        """Returns the ordinary network as plain data, see `networks.describe`."""
        node = OmegaConf.to_container(self.config.model.network)
        assert isinstance(node, dict)
        return describe({str(k): v for k, v in node.items()})

    def task(self) -> TaskModule:
        """Builds the task around the ordinary network, in single precision."""
        task: TaskModule = build(self.config.model)
        return task

    def weights(self, client: str) -> Tensors:
        """Returns all float entries of a client's model, in single precision.

        Canonical models that mix parameters become the one network that they are.

        Raises:
            CheckpointError: If the file is missing, torn or of another model.
            ConfigError: If the model mixes outputs, which no single network does.
        """
        loaded = _load(self.folder / "models" / f"{client}.safetensors")
        if mixes_models(self.config):
            loaded = self._collapsed(client, loaded)
        weights = {n: t.float() for n, t in loaded.items()}
        expected = float_entries(self.task().network)
        if set(weights) != set(expected):
            raise CheckpointError(
                f"The model of {client} in {self.folder} has other entries than its configuration "
                "says; the run folder is mixed up."
            )
        return {n: weights[n] for n in expected}

    def learned(self, client: str, weights: Mapping[str, Tensor]) -> dict[str, Codebook]:
        """Returns the codebooks of the parameters whose centres were learned; empty without."""
        path = self.folder / "centers" / f"{client}.safetensors"
        if not path.is_file():
            return {}
        centers = _load(path)
        return {n: from_centers(weights[n], c.float()) for n, c in centers.items()}

    def _collapsed(self, client: str, loaded: Tensors) -> Tensors:
        if self.config.canonical.mix != "parameters":
            raise ConfigError(
                f"The model of {client} mixes the outputs of {self.config.canonical.count} "
                "canonical models, and a bundle holds one network; train with canonical=parameters "
                "to export one."
            )
        network = build_task(self.config).network
        assert isinstance(network, Canonical)
        network.to(next(iter(loaded.values())).dtype)
        counters = {n: t for n, t in network.state_dict().items() if not t.is_floating_point()}
        network.load_state_dict({**counters, **loaded})
        return collapse(network)


def collapse(network: Canonical) -> Tensors:
    """Returns the float entries of the one network that mixed parameters amount to.

    Args:
        network: A canonical model with ``mix="parameters"``.

    Returns:
        Entries under the names of the ordinary network.

    Example:
        >>> from torch import nn
        >>> nets = [nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)) for _ in range(2)]
        >>> both = torch.stack([n[1].weight.detach() for n in nets])
        >>> state = collapse(Canonical(nets, ["1.*"], mix="parameters"))
        >>> list(state), torch.allclose(state["1.weight"], both.mean(0))
        (['0.weight', '0.bias', '1.weight', '1.bias'], True)
    """
    with torch.no_grad(), network._instance(0):
        state = {n: t.detach().clone() for n, t in float_entries(network.common).items()}
        state |= network.mixed()
    boxed = all(name.startswith("network.") for name in state)
    return {n.removeprefix("network.") if boxed else n: t for n, t in state.items()}


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
