"""Runs any algorithm on a small federation under each runtime."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
from torch import nn

from medfed.common.streams import own_stream
from medfed.config.compose import build
from medfed.federation.algorithm import Algorithm, Cohort
from medfed.federation.engine.loop import LocalTrainer
from medfed.federation.federation import Federation
from medfed.federation.lightning.callbacks import (
    CommunicationLogger,
    FederatedRounds,
    PersonalEvaluation,
)
from medfed.federation.lightning.checkpoint import RoundCheckpoint
from medfed.federation.lightning.module import FederatedModule
from medfed.federation.reference import run_reference
from medfed.federation.split import BufferPolicy
from medfed.federation.wire.channel import CER, Channel, Link
from medfed.federation.wire.codecs.qsgd import QSGD
from medfed.federation.wire.codecs.stc import STC
from medfed.federation.wire.packet import Message, Packet
from medfed.models.networks.canonical import Canonical
from tests.contract.names import algorithm_yamls, load_algorithm
from tests.toys import ToyTask, toy_federation

NAMES = sorted(algorithm_yamls())
ROUNDS = 3
POLICIES: tuple[BufferPolicy, ...] = ("averaged", "local", "frozen")
# Between them: residuals, shifts, references, factors, random choices both ways, CER both ways.
LOSSY: dict[str, Callable[[], dict[str, Link]]] = {
    "stc": lambda: {
        "up": Link(STC(0.2), cer=CER(0.1)),
        "down": Link(QSGD(levels=4)),
    },
    "shifted": lambda: {
        "up": Link(QSGD(levels=4), shift="auto"),
        "down": Link(STC(0.2), cer=CER(0.1)),
    },
}
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


class Serialising(Channel):
    """Takes every packet through bytes; no message shares a tensor with another."""

    def encode(self, message, *where):
        parts = {p: {n: t.clone() for n, t in named.items()} for p, named in message.parts.items()}
        packet, memory = super().encode(dataclasses.replace(message, parts=parts), *where)
        return Packet.from_bytes(packet.to_bytes()), memory


class Recording(Channel):
    """Remembers all messages, with their direction."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[tuple[str, Message]] = []

    def encode(self, message, direction, *where):
        self.messages.append((direction, message))
        return super().encode(message, direction, *where)


class Recorded(NamedTuple):
    """A federation that has run in the plain loop, and what travelled; tests only read it."""

    federation: Federation
    local: LocalTrainer
    messages: list[tuple[str, Message]]


@functools.cache
def recorded(name: str, policy: BufferPolicy = "averaged") -> Recorded:
    """Runs a method once under a policy for buffers, for all that is asserted of such a run."""
    channel = Recording()
    _, fed, local = federation(name, channel=channel, buffers=policy)
    return Recorded(run_reference(fed, ROUNDS), local, channel.messages)


@functools.cache
def algorithm(name: str) -> Algorithm:
    """The algorithm as its yaml ships it, for a run of ROUNDS."""
    built = build(load_algorithm(name, ROUNDS))
    assert isinstance(built, Algorithm)
    # The small federation has few patients of a class; tests/references have the floor.
    few = {"least_patients": 1} if hasattr(built, "least_patients") else {}
    return dataclasses.replace(built, **few)


def network(seed: int = 0, outputs: int = 1) -> nn.Module:
    """A small network with dropout and normalisation, so that randomness and buffers matter.

    It has a layer that is neither the first nor the last.
    """
    with own_stream(seed):  # threads build networks at once
        layers: dict[str, nn.Module] = {
            "body": nn.Linear(3, 4),
            "norm": nn.BatchNorm1d(4),
            "middle": nn.Linear(4, 4),
            "drop": nn.Dropout(0.2),
            "head": nn.Linear(4, outputs),
        }
    return nn.Sequential(OrderedDict(layers))


def task(name: str = "") -> ToyTask:
    """The network; three heads where an algorithm mixes them, two networks where it adds them."""
    toy = ToyTask()
    toy.network = network(outputs=2 if name and algorithm(name).by_class else 1)
    if name and algorithm(name).sums:
        return two_bodied(toy, network(1))
    if name and algorithm(name).mixes:
        nets = [toy.network, network(1), network(2)]
        toy.network = Canonical(nets, ["head.*"], activation="identity")
        toy.personal = ("membership",)
    return toy


def two_bodied(toy: ToyTask, second: nn.Module) -> ToyTask:
    """Adds the outputs of a second network."""
    toy.network = Canonical([toy.network, second], ["*"], "sum")
    toy.personal = toy.network.personal_part(toy.personal)
    return toy


def federation(name: str, **changes: Any) -> tuple[ToyTask, Federation, Any]:
    """A federation of three unequal clients, each with several batches and momentum.

    Statistics of what is evaluated are estimated again; ``NAME+averaged`` averages momenta, too.
    """
    name, _, state = name.partition("+")
    method = algorithm(name)
    settings: dict[str, Any] = {"rounds": ROUNDS, "steps": 4, "momentum": 0.9}
    settings["kept"] = state or not method.fresh_optimizer
    if method.card.full_cohort and getattr(changes.get("cohort"), "fraction", 1) < 1:
        changes["cohort"] = None  # a fraction is refused: test_cards.py
    made = toy_federation(method, task(name), **{**settings, **changes})
    made[2].normalization = "reestimated"
    return made


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


def lossy(setting: str) -> Channel:
    """A channel of its own, because a channel belongs to one federation."""
    return Channel(**LOSSY[setting]())
