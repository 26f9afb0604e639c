"""Builds the objects of a run, from a configuration or from the folder of a finished run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import WandbLogger

from medfed.common.floors import remark
from medfed.common.scores import failed
from medfed.common.tensors import Tensors
from medfed.config.check import no_gpu, several
from medfed.config.compose import build
from medfed.config.description import RunDescription
from medfed.config.sections import without_places
from medfed.datamodules.base import FederatedDataModule
from medfed.federation.lightning import callbacks, checkpoint
from medfed.federation.lightning.collect import rank
from medfed.federation.lightning.module import FederatedModule
from medfed.federation.lightning.strategy import ClientSharding, environment
from medfed.federation.split import float_entries
from medfed.models.task import TaskModule
from medfed.records.folder import RunFolder
from medfed.run.assembly import read_data, task_for
from medfed.run.chooser import chooser_of
from medfed.run.claim import SameEverywhere
from medfed.run.cohort import cohort_record, print_cohort, print_plan
from medfed.run.federating import federate, statistics_of
from medfed.run.intervals import SplitCases
from medfed.run.loggers import remember
from medfed.run.privacy import print_hidden, print_protections, protections
from medfed.run.start import Account, Start, add_adapters, base_entries
from medfed.standalone.errors import ConfigError


@dataclass
class Experiment:
    """The objects of a run, for a closer look than its folder allows."""

    config: RunDescription
    data: FederatedDataModule
    task: TaskModule
    module: FederatedModule
    evaluation: callbacks.PersonalEvaluation
    trainer: pl.Trainer
    folder: Path

    def tested_cases(self) -> SplitCases:
        """Returns the cases that the last test has kept, by client."""
        cases, lost = self.evaluation.cases, failed(self.evaluation.test)
        return SplitCases.of(self.task, self.data, cases, self.module.test_split, lost)


def build_experiment(config: RunDescription) -> Experiment:
    """Builds all objects of a run and opens its folder."""
    start, config = read_start(config)
    if config.resume is not None:
        RunFolder(Path(config.folder)).check_typed(config)
    data = read_data(config)
    try:
        config, task, entries, account = begin(config, data, start)
    except ConfigError:
        if config.resume is not None:  # the keys are those of the run, so its data may be others
            RunFolder(Path(config.folder)).check_data(data.splits())
        raise
    federation, local = federate(config, data, task)
    federation.ledger.add(*base_entries(config, task, federation.ids))
    module = FederatedModule(task, federation, local)
    module.chooser = chooser_of(config, task)
    folder = Path(config.folder)
    evaluation = callbacks.PersonalEvaluation(*task.selection)
    called = [SameEverywhere(folder, data), callbacks.FederatedRounds()]
    trainer = trainer_of(config, [*called, *callbacks_of(config, evaluation)])
    if trainer.world_size > len(federation.ids):
        raise ConfigError(
            f"trainer.devices={config.trainer.devices} means {trainer.world_size} devices for "
            f"{len(federation.ids)} clients; set it to at most {len(federation.ids)}."
        )
    if rank() == 0:
        cohort: dict[str, Any] = {}
        if config.resume is None:
            data.remarks += remark(statistics_of(federation.algorithm, data))
            record = cohort_record(data)
            print_cohort(record)
            print_plan(data, type(task.network).__name__)
            cohort = record.record()
            start.write(folder, entries, account)
            if local.gradients.private is not None:
                print_protections(config, protections(config, data.clients, federation))
            if federation.noise is not None:
                print_hidden(config, federation)
        steps = {c: data.preprocessing(c) for c in data.plans}
        RunFolder(folder).open(config, data.splits(), steps, cohort)
    if trainer.logger and rank() == 0:
        remember(trainer.logger, folder)
        if config.resume is None or isinstance(trainer.logger, WandbLogger):
            # MLflow refuses changed values, and W&B begins an offline record anew.
            trainer.logger.log_hyperparams(without_places(config.values.plain()))
    return Experiment(config, data, task, module, evaluation, trainer, folder)


def read_start(config: RunDescription) -> tuple[Start, RunDescription]:
    """Reads the weights that a run starts from, before any object is built."""
    if config.trainer.accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise no_gpu(config.trainer.accelerator)
    return Start.read(config)


def begin(
    config: RunDescription, data: FederatedDataModule, start: Start
) -> tuple[RunDescription, TaskModule, Tensors, Account | None]:
    """Builds the task of a run, with the weights that it starts from.

    Also returns the network's entries before adapters, and which weights of the start it took.
    """
    config, task = task_for(config, data)
    names = {"channels": data.channel_names, "labels": data.class_names}
    account = start.begin(config, task, names)
    entries = float_entries(task.network)
    add_adapters(config, task, data)
    return config, task, entries, account


def trainer_of(config: RunDescription, called: list[pl.Callback]) -> pl.Trainer:
    """Builds the Lightning Trainer of a run."""
    parallel = several(config.trainer)
    starts, strategy = environment(parallel), config.trainer.get("strategy", "auto")
    sharded = {"strategy": ClientSharding()} if parallel and strategy == "auto" else {}
    trainer: pl.Trainer = build(
        config.trainer,
        **sharded,
        max_epochs=config.rounds,
        callbacks=called,
        plugins=[checkpoint.InPlace(), *([] if starts is None else [starts])],
        logger=build(config.logger),
        check_val_every_n_epoch=config.evaluation.every,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        enable_progress_bar=bool(config.progress),
        default_root_dir=str(config.folder),
    )
    return trainer


def callbacks_of(
    config: RunDescription, evaluation: callbacks.PersonalEvaluation
) -> list[pl.Callback]:
    """Returns the callbacks that record, show and save the rounds of a run."""
    keys, run = config.checkpoint, RunFolder(Path(config.folder))
    evaluation.shows_all = False
    saves = checkpoint.RoundCheckpoint(run.checkpoints, keys.keep, keys.every, evaluation)
    unusual = callbacks.UnusualRounds(run.unusual_json, evaluation)
    called: list[pl.Callback] = [evaluation, callbacks.CommunicationLogger(), unusual, saves]
    if config.progress:
        called.append(callbacks.RoundProgress(evaluation))
    if config.evaluation.patience is not None:
        called.append(callbacks.Patience(config.evaluation.patience))
    return called
