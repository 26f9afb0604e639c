"""Reads the sources of ``init.weights``: state dicts, safetensors, bundles, and finished runs.

No code in them runs: PyTorch's files are read with ``weights_only=True``.

Runs and the bundles of ``medfed export`` also say which network the weights belong to and how their
training data were prepared; ``init.adopt`` takes this over as keys of a configuration.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from medfed.common.schemas import fit
from medfed.common.tensors import Tensors
from medfed.common.untrusted import read_checkpoint, read_tensors
from medfed.delivery.bundle.bundle import read_bundle
from medfed.delivery.bundle.weights import check_archive
from medfed.records.folder import RunFolder
from medfed.run.start import Weights
from medfed.standalone.errors import CheckpointError, ConfigError, few, first_line, quoted
from medfed.standalone.files import sha256
from medfed.standalone.neighbours import without_store

# What the present data decide, by the names that networks have for it.
_FACTS = {
    **dict.fromkeys(("in_channels", "n_input_channels", "in_chans"), "${in_channels}"),
    **dict.fromkeys(("out_channels", "num_classes"), "${out_channels}"),
}
# How volumes are prepared, as the data sections call it; other sections have none of them.
_PREPARED = ("spatial_dims", "normalize", "spacing", "crop_foreground", "slices", "patch_size")


class _Model(msgspec.Struct):
    """What is read of a run's task module."""

    network: dict[str, Any]
    target: str = msgspec.field(name="_target_")


class _Training(msgspec.Struct):
    """What is read of a run's configuration."""

    model: _Model
    data: dict[str, Any] = {}
    outcome_scale: list[float] | None = None


def _of_training(config: Any) -> dict[str, Any]:
    """Returns what a run's configuration says of its network and its data.

    Example:
        >>> network = {"_target_": "a.Net", "in_channels": 4, "width": 8}
        >>> model = {"_target_": "Task", "network": network}
        >>> adopted = _of_training({"model": model, "data": {"spacing": [2, 2]}})
        >>> for key, value in adopted.items():
        ...     print(key, value)
        model._target_ Task
        model.network {'_target_': 'a.Net', 'in_channels': '${in_channels}', 'width': 8}
        data.spacing [2, 2]
    """
    try:
        trained = fit(config, _Training)
    except ValueError as error:
        raise CheckpointError(
            "init.weights does not say of which network it is; set init.adopt=[] and choose model."
        ) from error
    target = trained.model.target
    prepared = {f"data.{key}": trained.data[key] for key in _PREPARED if key in trained.data}
    if planning := trained.data.get("planning"):
        prepared = {"data.planning": planning}  # with which `Pretrained` refuses to adopt the data
    if str(trained.data.get("_target_")).endswith(".ImageDataModule"):
        prepared["data.scaling"] = trained.data.get("scaling", "range")
    if target.rpartition(".")[2] == "RegressionTask":
        prepared["data.outcome_scale"] = trained.outcome_scale or [0, 1]
    dims = {"spatial_dims": "${spatial_dims}"} if "spatial_dims" in trained.data else {}
    here = {**_FACTS, **dims}
    network = {key: here.get(key, value) for key, value in trained.model.network.items()}
    return {"model._target_": target, "model.network": network, **prepared}


# Keys under which checkpoints keep weights; others hold an optimizer and the like.
_CONTAINERS = ("state_dict", "model_state_dict", "model", "network", "net", "weights", "teacher")


def read_file(path: Path) -> Tensors:
    """Reads a state dict, as PyTorch or safetensors write one."""
    is_ours = False
    if path.suffix == ".safetensors":
        tensors = read_tensors(path)
    else:
        try:
            if zipfile.is_zipfile(path):
                check_archive(path, path.stat().st_size)
            with torch.serialization.safe_globals(_numbers()):
                content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever PyTorch raises on bad bytes
            raise CheckpointError(_why(path, str(error), error)) from error
        tensors, is_ours = _tensors(content), isinstance(content, dict) and "federation" in content
    if not tensors:
        what = "a medfed checkpoint: name the run folder" if is_ours else "no weights"
        raise CheckpointError(
            f"{path} holds {what}; name a state_dict (.pt, .pth, .safetensors), or "
            "for init.weights a bundle or a run folder."
        )
    for name, tensor in tensors.items():
        dense = tensor.layout == torch.strided and tensor.device.type == "cpu"
        if dense and tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise CheckpointError(f"{path} is damaged: {name} is larger than its part of the file.")
        if dense and not tensor.isfinite().all():
            raise CheckpointError(f"{path} is damaged: {name} has NaN or infinity.")
    return tensors


def _why(path: Path, text: str, error: Exception) -> str:
    if "TorchScript" in text:
        return f"{path} is TorchScript, a program; name the state_dict that it was made of."
    if "GLOBAL" in text:
        return (
            f"{path} holds more than weights: to read it would run code of its own; save the "
            "network's state_dict() and name that."
        )
    reason = "it is no file of PyTorch's" if "Weights only" in text else first_line(error)
    return f"{path} cannot be read as weights ({reason}); copy it again."


def _tensors(content: Any) -> Tensors:
    """The tensors of a state dict, or of the first container that holds one."""
    if not isinstance(content, Mapping):
        return {}
    tensors = {str(n): t for n, t in content.items() if isinstance(t, Tensor)}
    inside = (_tensors(content[key]) for key in _CONTAINERS if key in content)
    return next((inner for inner in inside if inner), tensors)


def _numbers() -> list[Any]:
    """NumPy's plain numbers, which checkpoints hold with the weights: a best score, an epoch."""
    import numpy as np
    from numpy._core import multiarray

    kinds = ("Float64", "Float32", "Int64", "Int32", "Bool")
    return [multiarray.scalar, np.dtype, *(getattr(np.dtypes, f"{k}DType") for k in kinds)]


_ADOPTED = {"network": "model.", "data": "data."}


@dataclass(frozen=True)
class Pretrained:
    """Weights to start from."""

    weights: str | None = None  # a file or folder; ``None``: random weights
    # ``all``, ``shared``, ``personal``, or name patterns of entries that may be set.
    part: str | Sequence[str] = "all"
    # Of a run folder, whose model; ``None``: what its clients have in common.
    client: str | None = None
    strict: bool = False  # whether everything must match
    rename: Mapping[str, str] = field(default_factory=dict)  # old prefixes of names to new ones
    # Noise on canonical instances but the first, as a share of each entry's size.
    spread: float = 0.1
    # What else a bundle or run gives: its ``network``, how its ``data`` were prepared.
    adopt: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.adopt, str) or not {*self.adopt} <= {*_ADOPTED}:
            raise ConfigError(f"init.adopt={self.adopt} is no list of {' and '.join(_ADOPTED)}.")
        if not self.part:
            raise ConfigError("init.part is empty; give all, shared, personal or name patterns.")
        if not isinstance(self.rename, Mapping):
            raise ConfigError("init.rename must map old prefixes to new ones: {old.: new.}.")
        if not 0 < self.spread < math.inf:
            raise ConfigError(f"init.spread must be a positive number, not {self.spread}.")

    def read(self) -> Weights:
        """Reads and checks the source."""
        assert self.weights is not None
        path = Path(self.weights).expanduser()
        if RunFolder(path).config_yaml.is_file():
            weights = _read_run(path, self.client)
        elif self.client is not None:
            raise ConfigError(f"init.client={self.client} is for run folders, and {path} is none.")
        elif path.is_dir():
            bundle = read_bundle(path)
            hashes = bundle.hashes.items()
            files = {str((path / n).resolve()): h for n, h in hashes if n.startswith("models/")}
            adopted = _of_training(bundle.facts.get("training_config")) if self.adopt else {}
            names = {key: bundle.facts[key] for key in ("channels", "labels")}
            weights = Weights(bundle.state, "a bundle of medfed", files, adopted, names)
        else:
            weights = Weights(read_file(path), "a file of weights", _hashes(path))
            if self.adopt:
                raise ConfigError(
                    f"init.adopt is for bundles of medfed export and run folders; {path} is "
                    "neither. Set init.adopt=[], the network by model and the preparation by data."
                )
        if "data" in self.adopt and "data.planning" in weights.adopted:
            raise ConfigError(
                f"{path} prepared its data by a plan, which init.adopt=[data] cannot take over; "
                "set init.adopt=[network], data.spacing and data.patch_size as its plan.json says, "
                "and data.normalize."
            )
        starts = tuple(_ADOPTED[what] for what in self.adopt)
        entries = {k: v for k, v in weights.adopted.items() if k.startswith(starts)}
        return replace(weights, adopted=entries)


def _read_run(folder: Path, client: str | None) -> Weights:
    """Reads the models of a finished run, as of the round that validation selected."""
    run = RunFolder(folder)
    clients = list(run.clients)
    if client is not None:
        run.check_client(client)
    files = run.files("models", clients)
    paths = [files[c] for c in (clients if client is None else [client])]
    # Counters and other state are of the hospital that has trained.
    every = map(without_store, map(read_tensors, paths))
    first, *others = ({n: t for n, t in of.items() if t.is_floating_point()} for of in every)
    hashes, trained = _hashes(*paths), _of_training(run.config.plain())
    if client is not None:
        return Weights(first, f"the model of {client} in a run", hashes, trained)
    same = {n: [n in o and torch.equal(o[n], t) for o in others] for n, t in first.items()}
    common = {n: first[n] for n, equal in same.items() if all(equal)}
    best = run.best_ckpt
    if len(common) < len(first) and best.is_file():
        hashes |= _hashes(best)
        server = read_checkpoint(best).get("federation", {}).get("server", {})
        shared = server.get("shared") if isinstance(server, Mapping) else {}
        pairs = shared.items() if isinstance(shared, Mapping) else ()
        fits = {n: t for n, t in pairs if n in first and t.shape == first[n].shape}
        common = {**fits, **common}
    if not common:
        raise CheckpointError(
            f"The clients of the run in {folder} have no weights in common; choose one's by "
            f"init.client=NAME, of {few(quoted(clients))}."
        )
    return Weights(common, "what the clients of a run have in common", hashes, trained)


def _hashes(*paths: Path) -> dict[str, str]:
    return {str(path.resolve()): sha256(path) for path in paths}
