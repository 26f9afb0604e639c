"""From a configuration, its data and its task to the federation, its training loop and channel."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from medfed.common.console import size
from medfed.common.errors import ConfigError, did_you_mean, first_line
from medfed.config.compose import build
from medfed.config.description import RunDescription
from medfed.datamodules.base import Exchanged, FederatedDataModule
from medfed.federation.algorithm import Algorithm, ClientInfo
from medfed.federation.budget import learning_rates, remembers_elsewhere
from medfed.federation.client import Batch, ClientData
from medfed.federation.engine.loop import LocalTrainer
from medfed.federation.federation import Federation
from medfed.federation.local_client import Pool
from medfed.federation.reference import assemble
from medfed.federation.wire.channel import Channel, Link
from medfed.federation.wire.ledger import Entry, Ledger
from medfed.models.task import TaskModule

_log = logging.getLogger(__name__)


def federate(
    config: RunDescription,
    data: FederatedDataModule,
    task: TaskModule,
    everyone: Sequence[ClientInfo] | None = None,
) -> tuple[Federation, LocalTrainer]:
    """Builds the federation of all clients and their common training loop.

    Args:
        config: What the run is to do.
        data: The data.
        task: The task, its network at its initial weights.
        everyone: All clients, in order, where the data are of one alone.

    Raises:
        ConfigError: If the algorithm does not fit the model, or the optimizer cannot be used.
    """
    clients = list(data.clients.values())
    federation, local = federation_of(config, task, clients, everyone)
    federation.absent_folder = folder_of_absent(federation, Path(config.folder))
    local.device_gb = data.device_gb
    federation.ledger = Ledger(preprocessing(data.exchanged))
    return federation, local


def folder_of_absent(federation: Federation, folder: Path) -> Path | None:
    """Returns where absent clients keep their states; nowhere, if there is room in memory.

    Args:
        federation: Its cohort says how much room there is.
        folder: The run folder.
    """
    room, count = federation.cohort.memory_gb, len(federation.clients)
    needed = count * federation.kept_bytes()
    if room is None or needed <= 1e9 * room or os.name != "posix":
        return None
    _log.info(
        "What %s clients keep between rounds comes to about %s, more than cohort.memory_gb=%g: it "
        "lies on the disk of the run folder, mapped into memory.",
        f"{count:,}",
        size(needed),
        room,
    )
    return folder


def preprocessing(exchanged: Iterable[Exchanged]) -> list[Entry]:
    """Returns the entries of a ledger for what clients told each other before the first round."""
    name = "preprocessing"
    return [Entry(0, name, client, way, name, size, size) for client, way, size in exchanged]


def federation_of(
    config: RunDescription,
    task: TaskModule,
    clients: Sequence[ClientData],
    everyone: Sequence[ClientInfo] | None = None,
    shape: Sequence[int] | None = None,
) -> tuple[Federation, LocalTrainer]:
    """Builds a federation of the clients of this process, all of them or one or none.

    Args:
        config: What the run is to do.
        task: The task, its network at its initial weights.
        clients: Those of this process.
        everyone: All clients, in order, where they are not all in this process.
        shape: Of one input, where no client is.

    Raises:
        ConfigError: See :func:`federate`; also if a method that trains on the data of all clients
            does not have them.
    """
    algorithm = build(config.algorithm)
    if config.canonical is not None and not algorithm.mixes:
        raise ConfigError(
            f"{type(algorithm).__name__} would train the membership vectors of canonical models as "
            "if they were weights; choose canonical=none, or algorithm=ppfl or ifca."
        )
    optimizer, scheduler = build(config.optimizer), build(config.scheduler)
    try:
        rates = learning_rates(optimizer, scheduler, config.rounds)
        if not all(map(math.isfinite, rates)):
            raise ConfigError("a learning rate is not finite")
        if config.local.optimizer_state == "kept" and remembers_elsewhere(optimizer):
            raise ConfigError(
                "it remembers more than is kept of it; choose local.optimizer_state=fresh"
            )
    except Exception as error:
        raise ConfigError(
            f"The optimizer or its scheduler cannot be used as it is: {first_line(error)}."
        ) from error
    if algorithm.pools:
        if everyone is not None:
            raise ConfigError(
                f"{type(algorithm).__name__} trains on the data of all clients in one place, which "
                "sites do not give away; choose another algorithm."
            )
        clients = [Pool(client, clients) for client in clients]
    return assemble(
        algorithm,
        task.network,
        task.loss,
        clients,
        personal=task.personal,
        buffers=config.buffers,
        optimizer=optimizer,
        scheduler=scheduler,
        rounds=config.rounds,
        budget=build(config.local),
        channel=lambda adapted: build_channel(config, adapted),
        cohort=build(config.cohort),
        seed=config.seed,
        measure=partial(mean_loss, task),
        everyone=everyone,
        shape=shape,
    )


def mean_loss(task: TaskModule, batches: Iterable[Batch]) -> float:
    """Returns the loss of evaluation batches as every evaluation measures it."""
    return task.evaluate(batches)["loss"]


def build_channel(config: RunDescription, algorithm: Algorithm) -> Channel:
    """Builds both directions of the channel, from the sections ``codec`` and ``channel``.

    Args:
        config: What the run is to do.
        algorithm: Whose parts travel.

    Raises:
        ConfigError: If a value is out of range, or the patterns of parts match nothing.
    """
    up, down = (
        build(config.channel[way], codec=build(config.codec[way]), place=f"channel.{way}")
        for way in ("up", "down")
    )
    if up.parts is not None:
        check_parts(up.parts, algorithm.leaves, "channel.up.parts")
    return Channel(up, down, seed=config.seed)


def check_parts(patterns: Iterable[str], known: Iterable[str], key: str) -> None:
    """Checks that each pattern can match a part.

    Args:
        patterns: Patterns as ``PART`` or ``PHASE/PART``.
        known: The parts that there are.
        key: What an error calls the patterns.

    Raises:
        ConfigError: If one matches nothing.

    Example:
        >>> check_parts(["fit/shared"], ["shared"], "channel.up.parts")
        >>> check_parts(["share"], ["shared"], "channel.up.parts")
        Traceback (most recent call last):
        ...
        medfed.common.errors.ConfigError: channel.up.parts names 'share', which never travels \
(did you mean shared?); the parts are shared.
    """
    names = list(known)
    for pattern in patterns:
        part = pattern.rpartition("/")[2]
        if not any(Link(parts=[part]).compresses("", name) for name in names):
            parts = f"the parts are {', '.join(names)}" if names else "nothing travels"
            hint = did_you_mean(part, names)
            raise ConfigError(f"{key} names {pattern!r}, which never travels{hint}; {parts}.")
