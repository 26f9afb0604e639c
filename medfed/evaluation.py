"""Measures a finished run again: the round that validation selected, on any split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import torch
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from medfed.errors import CheckpointError, ConfigError, MedfedError, did_you_mean
from medfed.experiment import Experiment, reopen, test_selected
from medfed.federation.callbacks.checkpoint import BEST, is_whole
from medfed.federation.callbacks.evaluation import smaller_is_better
from medfed.federation.module import EvalSplit
from medfed.reports.results import load_summary
from medfed.run_folder import federation_statistics, write_json


def evaluate_run(folder: Path, split: str = "test") -> dict[str, Any]:
    """Evaluates every client's selected personal model and writes ``evaluation_<split>.json``.

    Args:
        folder: The folder of a finished run.
        split: ``test``, ``val`` or ``train``.

    Returns:
        The run's summary with ``split``, ``clients`` and ``federation`` as measured now.

    Raises:
        ConfigError: If the split is unknown.
        CheckpointError: If the run is unfinished, its checkpoint torn or its data changed.
    """
    known = get_args(EvalSplit)
    if split not in known:
        raise ConfigError(
            f"Unknown split={split}{did_you_mean(split, known)}; choose one of {', '.join(known)}."
        )
    summary = finished(folder)
    experiment = _reopened(folder)
    experiment.module.test_split = split  # type: ignore[assignment]
    test_selected(experiment)
    clients = experiment.evaluation.test
    names = next(iter(clients.values()))
    measured = {
        "split": split,
        "clients": clients,
        "federation": {
            n: federation_statistics([m[n] for m in clients.values()], smaller_is_better(n))
            for n in names
        },
    }
    kept = {k: summary[k] for k in ("name", "algorithm", "selection", "selected_round")}
    write_json(folder / f"evaluation_{split}.json", kept | measured)
    return summary | measured


def finished(folder: Path) -> dict[str, Any]:
    """Returns the summary of a finished run.

    Args:
        folder: The run folder.

    Raises:
        CheckpointError: If there is no run or it has not finished.
    """
    if not (folder / "config.yaml").is_file():
        raise CheckpointError(f"{folder} is no run folder (it has no config.yaml).")
    if not (folder / "summary.json").is_file():
        raise CheckpointError(
            f"The run in {folder} has not finished (it has no summary.json); finish it with the "
            f"overrides that started it and resume={folder}."
        )
    try:
        return load_summary(folder)
    except ValueError as error:
        raise CheckpointError(f"{folder}/summary.json cannot be read: {error}.") from error


def selected(folder: Path) -> Experiment:
    """Reopens a run in the states of the round that validation selected, on its device.

    Args:
        folder: The folder of a finished run.

    Raises:
        CheckpointError: If the checkpoint is torn or the data have changed.
    """
    experiment = _reopened(folder)
    best = folder / "checkpoints" / BEST
    if not is_whole(best):
        raise CheckpointError(f"{best} is missing or torn; resume or repeat the run.")
    experiment.module.to(experiment.trainer.strategy.root_device)
    experiment.module.restore(torch.load(best, weights_only=True, map_location="cpu"))
    return experiment


def _reopened(folder: Path) -> Experiment:
    try:
        experiment = reopen(folder)
        kept = json.loads((folder / "splits.json").read_text())["files"]
    except MedfedError:
        raise
    except (OSError, ValueError, KeyError, YAMLError, OmegaConfBaseException) as error:
        first = str(error).splitlines()[0]
        raise CheckpointError(f"The run folder {folder} cannot be read: {first}.") from error
    # The data may have moved, so only the contents count.
    if sorted(kept.values()) != sorted(experiment.data.splits()["files"].values()):
        raise CheckpointError(
            f"The data files are not those that {folder}/splits.json records; the numbers would "
            "not be of the same data."
        )
    return experiment
