"""The folder of a run: what it holds, written by the run and read by whatever comes after it."""

from __future__ import annotations

import csv
import json
import math
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.torch
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from yaml import YAMLError  # type: ignore[import-untyped]

from medfed.common.errors import CheckpointError, first_line
from medfed.common.files import replacing, write_json, write_text
from medfed.common.scores import Record
from medfed.config.compose import changed_keys
from medfed.config.old_names import relocate
from medfed.config.plugins import fingerprints
from medfed.federation.wire.ledger import Ledger

if TYPE_CHECKING:
    from medfed.models.contours import Case

PACKAGES = (
    *("medfed", "torch", "pytorch-lightning", "monai", "torchmetrics", "numpy", "scikit-learn"),
)
# What may differ between a run and its continuation: where and how it runs, not what it computes.
NOT_THE_EXPERIMENT = ("resume", "folder", "trainer", "logger", "progress", "plugins")


def git_commit(folder: Path) -> str:
    """Returns the commit of a clone, marked where it has been changed; elsewhere ``unknown``."""
    if not (folder / ".git").exists():
        return "unknown"  # an installed package may lie within a repository of the user's
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that a result depends on."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def open_folder(
    config: DictConfig, splits: Mapping[str, Any], preprocessing: Mapping[str, Any]
) -> None:
    """Writes what is known before the first round, or checks it against a run to be continued.

    Args:
        config: The resolved configuration.
        splits: The data's splits.
        preprocessing: What becomes of each client's scans before its network sees them.

    Raises:
        CheckpointError: If the run to resume does not exist or has another configuration.
    """
    folder = Path(config.folder)
    if config.resume is not None:
        changed = changed_keys(read_config(folder), config, NOT_THE_EXPERIMENT)
        if changed:
            raise CheckpointError(
                f"The run in {folder} has another configuration ({'; '.join(changed[:5])}); "
                "resume with the same overrides or start a new run."
            )
        return
    code = {"commit": git_commit(Path(__file__).parents[2]), "plugins": fingerprints(config)}
    write_json(folder / "versions.json", {**versions(), **code})
    write_json(folder / "splits.json", splits)
    write_json(folder / "preprocessing.json", preprocessing)
    # Last, as a run is continued by whoever finds it.
    write_text(folder / "config.yaml", OmegaConf.to_yaml(config, resolve=True))


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors as safetensors, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    copies = {n: t.detach().cpu().clone().contiguous() for n, t in tensors.items()}
    with replacing(path) as partial:
        safetensors.torch.save_file(copies, partial)


def save_prediction(folder: Path, client: str, image: Tensor, truth: Tensor, prob: Tensor) -> None:
    """Writes one slice of a client with its prediction, for pictures that compare methods."""
    path = folder / "predictions" / f"{client}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        np.savez_compressed(
            partial,
            image=image.cpu().numpy(),
            truth=truth.to(torch.uint8).cpu().numpy(),
            probability=prob.float().cpu().numpy(),
        )


def read_config(folder: Path) -> DictConfig:
    """Reads the configuration of a run.

    Raises:
        CheckpointError: If it is no run folder, or the file cannot be read.
    """
    path = _config_file(folder)
    try:
        config = OmegaConf.load(path)
    except (OSError, YAMLError) as error:
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}.") from error
    assert isinstance(config, DictConfig)
    relocate(config)
    return config


def _config_file(folder: Path) -> Path:
    path = folder / "config.yaml"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} is no run folder (it has no config.yaml); name one that a run has printed."
        )
    return path


def read_json(path: Path) -> dict[str, Any]:
    """Reads one of a run's JSON files.

    Raises:
        CheckpointError: If it is missing or torn.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    return content


def finished(folder: Path) -> dict[str, Any]:
    """Returns the summary of a finished run.

    Args:
        folder: The run folder.

    Raises:
        CheckpointError: If there is no run or it has not finished.
    """
    _config_file(folder)
    if not (folder / "summary.json").is_file():
        raise CheckpointError(
            f"The run in {folder} has not finished (it has no summary.json); finish it with the "
            f"overrides that started it and resume={folder}."
        )
    return read_json(folder / "summary.json")


def read_history(folder: Path) -> list[Record]:
    """Returns the validation metrics of every evaluated round."""
    fixed = ("round", "client", "split")
    with (folder / "metrics.csv").open() as file:
        return [
            Record(
                int(row["round"]),
                row["client"],
                {n: float(v) if v else math.nan for n, v in row.items() if n not in fixed},
            )
            for row in csv.DictReader(file)
            if row["split"] == "val"
        ]


def read_ledger(folder: Path) -> Ledger:
    """Reads what a run sent.

    Raises:
        CheckpointError: If ``ledger.csv`` is missing or has other columns.
    """
    path = folder / "ledger.csv"
    try:
        return Ledger.from_csv(path.read_text())
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); repeat the run.") from error


def read_predictions(folders: Mapping[str, Path]) -> dict[str, Case]:
    """Reads the predictions of several runs on the same slices.

    Args:
        folders: Method to run folder.

    Returns:
        Per client the image, its truth and each method's probabilities.
    """
    cases: dict[str, Case] = {}
    for method, folder in folders.items():
        for path in sorted((folder / "predictions").glob("*.npz")):
            with np.load(path) as saved:
                image, truth, prob = (torch.from_numpy(saved[k]).float() for k in saved.files)
            known = cases.get(path.stem, (image, truth, {}))
            if torch.equal(known[1], truth):
                cases[path.stem] = (known[0], truth, {**known[2], method: prob})
    return cases
