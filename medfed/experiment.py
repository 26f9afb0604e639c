"""From a configuration to a finished run: build the objects, fit, test once, write it all down."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig, OmegaConf

from medfed.assembly import federate, prepare
from medfed.config import build
from medfed.config_checks import check_values
from medfed.datamodules.base import FederatedDataModule
from medfed.errors import CheckpointError, ConfigError
from medfed.federation.callbacks import (
    CommunicationLogger,
    FederatedRounds,
    Patience,
    PersonalEvaluation,
    RoundCheckpoint,
    RoundProgress,
)
from medfed.federation.callbacks.checkpoint import BEST, is_whole, last_whole
from medfed.federation.collect import rank
from medfed.federation.module import FederatedModule
from medfed.models.task import TaskModule
from medfed.reports import results
from medfed.run_folder import open_folder

_log = logging.getLogger(__name__)
PRECISIONS = ("32-true", "bf16-mixed", "64-true", "32", "bf16", "64")


@dataclass
class Experiment:
    """The objects of a run, for whoever wants to look closer than its folder."""

    config: DictConfig
    data: FederatedDataModule
    task: TaskModule
    module: FederatedModule
    evaluation: PersonalEvaluation
    trainer: pl.Trainer
    folder: Path


def build_experiment(config: DictConfig) -> Experiment:
    """Builds all objects of a run and opens its folder.

    Args:
        config: The composed configuration.

    Raises:
        MedfedError: If something in the configuration, the data or the run folder does not fit.
    """
    check_values(config)
    check_runtime(config)
    data, task = prepare(config)
    federation, local = federate(config, data, task)
    module = FederatedModule(task, federation, local)
    folder = Path(config.folder)
    metric, mode = task.selection
    evaluation = PersonalEvaluation(metric, mode)
    trainer: pl.Trainer = build(
        config.trainer,
        max_epochs=config.rounds,
        callbacks=_callbacks(config, folder, evaluation),
        logger=build(config.logger),
        check_val_every_n_epoch=config.evaluation.every,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        enable_progress_bar=bool(config.progress),
        default_root_dir=str(folder),
    )
    if rank() == 0:
        open_folder(config, data.splits(), {c: data.preprocessing(c) for c in data.plans})
    if trainer.logger and rank() == 0:
        resolved: Any = OmegaConf.to_container(config, resolve=True)
        trainer.logger.log_hyperparams(resolved)
    return Experiment(config, data, task, module, evaluation, trainer, folder)


def check_runtime(config: DictConfig) -> None:
    """Checks what Lightning would refuse late, or silently change.

    Raises:
        ConfigError: If precision, accelerator or the rounds of evaluation cannot be used.
    """
    precision = str(config.trainer.precision)
    if precision not in PRECISIONS:
        raise ConfigError(
            f"trainer.precision={precision} is not supported (float16 would need scaled losses); "
            f"choose {', '.join(PRECISIONS[:3])}."
        )
    if config.trainer.accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"trainer.accelerator={config.trainer.accelerator} finds no GPU on this machine; "
            "choose trainer=cpu or trainer=ddp."
        )
    if config.evaluation.every > config.rounds:
        raise ConfigError(
            f"evaluation.every={config.evaluation.every} is more than rounds={config.rounds}, so "
            "that no round could be selected; evaluate more often."
        )


def _callbacks(
    config: DictConfig, folder: Path, evaluation: PersonalEvaluation
) -> list[pl.Callback]:
    checkpoints = RoundCheckpoint(
        folder / "checkpoints", config.checkpoint.keep, config.checkpoint.every, evaluation
    )
    callbacks: list[pl.Callback] = [
        FederatedRounds(),
        evaluation,
        CommunicationLogger(),
        checkpoints,
    ]
    if config.progress:
        callbacks.append(RoundProgress(evaluation))
    if config.evaluation.patience is not None:
        callbacks.append(Patience(evaluation, config.evaluation.patience))
    return callbacks


def train(config: DictConfig) -> tuple[dict[str, Any], Experiment]:
    """Runs or resumes an experiment.

    The round with the best validation score is selected; the test split is read once, at the end.

    Args:
        config: The composed configuration.

    Returns:
        The summary that ``summary.json`` holds, and the objects.

    Raises:
        MedfedError: If something does not fit; see :func:`build_experiment`.
    """
    experiment = build_experiment(config)
    checkpoints = experiment.folder / "checkpoints"
    start = last_whole(checkpoints) if config.resume is not None else None
    experiment.trainer.fit(experiment.module, ckpt_path=start, weights_only=True)
    results.write_hashes(experiment.module, experiment.folder)
    # Of all rounds: the state of the selected round knows none of the later ones.
    federation = experiment.module.federation
    memberships = federation.algorithm.memberships(federation.server)
    test_selected(experiment)
    return results.write(experiment, memberships), experiment


def test_selected(experiment: Experiment) -> None:
    """Loads the round that validation selects and measures it on the test split."""
    best = experiment.folder / "checkpoints" / BEST
    if not is_whole(best):
        raise CheckpointError(f"{best} is missing or torn; resume or repeat the run.")
    # The checkpoint brings the record up to its own round; that of later rounds must stay.
    history = experiment.evaluation.history
    experiment.trainer.test(experiment.module, ckpt_path=best, weights_only=True, verbose=False)
    experiment.evaluation.history = history or experiment.evaluation.history


def reopen(folder: Path) -> Experiment:
    """Rebuilds the objects of a finished run from its folder, for evaluation.

    Args:
        folder: The run folder.

    Raises:
        CheckpointError: If it is no run folder or its splits have changed since.
    """
    saved = folder / "config.yaml"
    if not saved.is_file():
        raise CheckpointError(f"{folder} is no run folder (it has no config.yaml).")
    config = OmegaConf.load(saved)
    assert isinstance(config, DictConfig)
    config.resume, config.folder = str(folder), str(folder)
    config.logger = OmegaConf.create({"_target_": "medfed.tracking.no_logger"})
    config.trainer.devices, config.trainer.strategy = 1, "auto"  # however many ranks trained it
    config.progress = False
    experiment = build_experiment(config)
    kept = json.loads((folder / "splits.json").read_text())
    if kept["clients"] != experiment.data.splits()["clients"]:
        raise CheckpointError(
            f"The data do not give the splits that {folder}/splits.json records; the test "
            "patients would not be the same."
        )
    return experiment
