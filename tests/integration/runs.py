"""Runs of the shipped experiments, made small."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from medfed.config.compose import described
from medfed.config.description import RunDescription
from medfed.datamodules.base import FederatedDataModule
from medfed.models.task import TaskModule
from medfed.run.assembly import read_data, task_for
from medfed.run.experiment import Experiment
from medfed.run.train import train
from tests import processes

ROOT = Path(__file__).resolve().parents[2]
UNDRAWN = ("pictures.format=none",)  # they cost as much as a small run; tests of them ask for them
CLINICAL = (
    "experiment=clinical_pfednet",
    "rounds=3",
    "local.steps=2",
    "logger=none",
    "progress=false",
)


IMAGING = (
    "experiment=brats_pfednet",
    "rounds=2",
    "local.steps=2",
    "logger=none",
    "progress=false",
    "data.patch_size=[16,16]",
    "data.patches_per_patient=4",
    "data.batch_size=4",
    "model.network.channels=[4,8]",
    "model.network.strides=[2]",
)


def imaging(root: Path, hospitals: int = 2) -> tuple[str, ...]:
    """The imaging experiment on a cohort of a few small heads, generated once below ``root``."""
    return (
        *IMAGING,
        f"data.root={root}",
        f"data.generated.hospitals={hospitals}",
        "data.generated.patients=4",
        "data.generated.shape=[32,32,8]",
        "data.val_fraction=0.25",
        "data.test_fraction=0.25",
    )


def run(folder: Path, *overrides: str) -> tuple[dict[str, Any], Experiment]:
    """Runs an experiment in this process, without pictures unless they are asked for."""
    return train(described([*UNDRAWN, *overrides, f"folder={folder}"]))


def typed(overrides: Sequence[str]) -> RunDescription:
    """What ``medfed prepare`` gets of its command line."""
    return replace(described(overrides, "prepare"), overrides=tuple(overrides))


def resume(folder: Path, *overrides: str) -> tuple[dict[str, Any], Experiment]:
    """Continues a run in this process."""
    return run(folder, *overrides, f"resume={folder}")


def script(*overrides: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs ``scripts/train.py`` as a user does."""
    return processes.run(ROOT / "scripts" / "train.py", *overrides, cwd=cwd)


def outcome(folder: Path) -> dict[str, Any]:
    """What two equal runs have in common, byte for byte."""
    models = sorted((folder / "models").glob("*.safetensors"))
    return {
        "hashes": json.loads((folder / "hashes.json").read_text()),
        "metrics": (folder / "metrics.csv").read_text(),
        "ledger": (folder / "ledger.csv").read_text(),
        "summary": json.loads((folder / "summary.json").read_text()),
        "models": {p.name: p.read_bytes() for p in models},
    }


def left_in(folder: Path) -> list[str]:
    """The files below a folder."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def data_and_task(config: RunDescription) -> tuple[FederatedDataModule, TaskModule]:
    """Reads the data and builds the task, whose channels and classes the data decide."""
    data = read_data(config)
    return data, task_for(config, data)[1]
