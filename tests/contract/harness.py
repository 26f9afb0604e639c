"""Runs any algorithm of configs/algorithm on a small federation under each runtime."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from omegaconf import OmegaConf
from torch import nn

from medfed.config import CONFIG_DIR, build
from medfed.federation.algorithm import Algorithm
from medfed.federation.callbacks import (
    CommunicationLogger,
    FederatedRounds,
    PersonalEvaluation,
    RoundCheckpoint,
)
from medfed.federation.cohort import Cohort
from medfed.federation.federation import Federation
from medfed.federation.module import FederatedModule
from tests.toys import ToyTask, toy_federation

NAMES = sorted(p.stem for p in (CONFIG_DIR / "algorithm").glob("*.yaml"))
ROUNDS = 3
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


@functools.cache
def algorithm(name: str) -> Algorithm:
    """The algorithm as its yaml ships it."""
    built = build(OmegaConf.load(CONFIG_DIR / "algorithm" / f"{name}.yaml"))
    assert isinstance(built, Algorithm)
    return built


def task() -> ToyTask:
    """A small network with dropout and normalisation, so that randomness and buffers matter."""
    toy = ToyTask()
    torch.manual_seed(0)
    toy.network = nn.Sequential()
    for name, layer in {
        "body": nn.Linear(3, 4),
        "norm": nn.BatchNorm1d(4),
        "drop": nn.Dropout(0.2),
        "head": nn.Linear(4, 1),
    }.items():
        toy.network.add_module(name, layer)
    return toy


def federation(name: str, **changes: Any) -> tuple[ToyTask, Federation, Any]:
    """A federation of three unequal clients, each with several batches and momentum."""
    settings: dict[str, Any] = {"rounds": ROUNDS, "steps": 4, "momentum": 0.9, "kept": True}
    return toy_federation(algorithm(name), task(), **{**settings, **changes})


def lightning(
    name: str,
    folder: Path | None = None,
    rounds: int = ROUNDS,
    resume: Path | None = None,
    evaluate: bool = True,
    trainer: dict[str, Any] | None = None,
    **changes: Any,
) -> tuple[FederatedModule, PersonalEvaluation]:
    """Runs the federation under one Lightning Trainer."""
    module = FederatedModule(*federation(name, **changes))
    evaluation = PersonalEvaluation("loss", "min")
    callbacks: list[pl.Callback] = [FederatedRounds(), evaluation, CommunicationLogger()]
    if folder is not None:
        callbacks.append(RoundCheckpoint(folder, evaluation=evaluation))
    pl.Trainer(
        accelerator="cpu",
        max_epochs=rounds,
        logger=False,
        enable_checkpointing=folder is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=1.0 if evaluate else 0,
        callbacks=callbacks,
        **{"devices": 1, **(trainer or {})},
    ).fit(module, ckpt_path=resume, weights_only=True)
    return module, evaluation


def half() -> Cohort:
    """Two of the three clients take part in each round."""
    return Cohort(fraction=0.67)
