"""What a run leaves behind: configuration, versions, splits, metrics, ledger, hashes, models."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from medfed.config import changed_keys
from medfed.errors import CheckpointError
from medfed.federation.callbacks.evaluation import Record
from medfed.federation.tensors import Tensors

PACKAGES = (
    "medfed",
    "torch",
    "pytorch-lightning",
    "monai",
    "torchmetrics",
    "numpy",
    "scikit-learn",
)
# What may differ between a run and its continuation: where and how it runs, not what it computes.
NOT_THE_EXPERIMENT = ("resume", "folder", "trainer", "logger", "progress")


def write_text(path: Path, text: str) -> None:
    """Writes a file that is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    os.replace(partial, path)


def write_json(path: Path, content: object) -> None:
    """Writes JSON that is whole or not there."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def git_commit(folder: Path) -> str:
    """Returns the commit of the code, marked where it has been changed, or ``unknown``."""
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
) -> Path:
    """Writes what is known before the first round, or checks it against a run to be continued.

    Args:
        config: The resolved configuration.
        splits: The data's splits.
        preprocessing: What becomes of each client's scans before its network sees them.

    Returns:
        The run folder.

    Raises:
        CheckpointError: If the run to resume does not exist or has another configuration.
    """
    folder = Path(config.folder)
    saved = folder / "config.yaml"
    if config.resume is not None:
        if not saved.is_file():
            raise CheckpointError(
                f"resume={config.resume} is no run folder (it has no config.yaml); name the folder "
                "that the interrupted run printed."
            )
        changed = changed_keys(OmegaConf.load(saved), config, NOT_THE_EXPERIMENT)  # type: ignore[arg-type]
        if changed:
            raise CheckpointError(
                f"The run in {folder} has another configuration ({'; '.join(changed[:5])}); "
                "resume with the same overrides or start a new run."
            )
        return folder
    write_text(saved, OmegaConf.to_yaml(config, resolve=True))
    write_json(
        folder / "versions.json", {**versions(), "commit": git_commit(Path(__file__).parent)}
    )
    write_json(folder / "splits.json", splits)
    write_json(folder / "preprocessing.json", preprocessing)
    return folder


def metrics_csv(history: Sequence[Record], test: Sequence[Record]) -> str:
    """Returns all metrics as CSV: round, client, split and a column per metric.

    Args:
        history: Validation metrics of every evaluated round.
        test: Test metrics of the selected round.
    """
    rows = [("val", r) for r in history] + [("test", r) for r in test]
    names = list(dict.fromkeys(n for _, r in rows for n in r.metrics))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["round", "client", "split", *names])
    for split, r in rows:
        writer.writerow([r.round, r.client, split, *(repr(r.metrics.get(n, "")) for n in names)])
    return text.getvalue()


def federation_statistics(values: Sequence[float], falls: bool = False) -> dict[str, float]:
    """Returns mean, standard deviation, worst client and worst decile over clients.

    Args:
        values: One value per client; NaN where undefined.
        falls: Whether smaller is better.

    Example:
        >>> federation_statistics([0.5, 1.0])
        {'mean': 0.75, 'sd': 0.25, 'worst': 0.5, 'worst_decile': 0.5}
    """
    finite = sorted((v for v in values if math.isfinite(v)), reverse=falls)
    if not finite:
        return dict.fromkeys(("mean", "sd", "worst", "worst_decile"), math.nan)
    tenth = max(1, len(finite) // 10)
    return {
        "mean": float(np.mean(finite)),
        "sd": float(np.std(finite)),
        "worst": finite[0],
        "worst_decile": float(np.mean(finite[:tenth])),
    }


def save_models(folder: Path, models: Mapping[str, Tensors]) -> None:
    """Writes each client's personal model as safetensors, all entries by name."""
    for client, weights in models.items():
        save_tensors(folder / "models" / f"{client}.safetensors", weights)


def save_centers(folder: Path, centers: Mapping[str, Tensors]) -> None:
    """Writes the centres of each client's quantised parameters, where there are some."""
    for client, named in centers.items():
        if named:
            save_tensors(folder / "centers" / f"{client}.safetensors", named)


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors as safetensors, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    safetensors.torch.save_file(
        {n: t.detach().cpu().clone().contiguous() for n, t in tensors.items()}, partial
    )
    os.replace(partial, path)
