"""Builds the federation and its training loop from a configuration, data and task."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from medfed.common.console import short, size
from medfed.common.floors import Statistic
from medfed.common.tensors import Tensors
from medfed.config.compose import build, part_of
from medfed.config.description import RunDescription
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.one_site import Exchanged
from medfed.federation.aggregation import Aggregation
from medfed.federation.algorithm import Algorithm, ClientInfo
from medfed.federation.assemble import assemble
from medfed.federation.client import ClientData
from medfed.federation.engine.loop import LocalTrainer
from medfed.federation.federation import Federation
from medfed.federation.inputs import Pool, cannot_average
from medfed.federation.lightning.collect import inform, warn
from medfed.federation.optimizers import learning_rates, remembers_elsewhere
from medfed.federation.split import ParameterSplit, float_entries
from medfed.federation.wire.ledger import Entry
from medfed.models.task import TaskModule
from medfed.records.tasks import build_task
from medfed.run.channel import build_channel
from medfed.run.privacy import hide_clients, protect
from medfed.run.start import Account, Start
from medfed.standalone.errors import ConfigError, few, first_line


def federate(
    config: RunDescription,
    data: FederatedDataModule,
    task: TaskModule,
    everyone: Sequence[ClientInfo] | None = None,
) -> tuple[Federation, LocalTrainer]:
    """Builds the federation of all clients and their common training loop."""
    clients = list(data.clients.values())
    federation, local = federation_of(config, task, clients, everyone)
    federation.absent_folder = folder_of_absent(federation, Path(config.folder))
    federation.ledger.add(*preprocessing(data.exchanged))
    if config.privacy.client is not None:
        hide_clients(config.privacy.client, config.seed, federation, across=everyone is not None)
    say_untrained(federation.algorithm, local.split, data)
    if config.privacy.example is not None:
        sent = statistics_of(federation.algorithm, data)
        protect(config, data.clients, task, federation, local, sent, across=everyone is not None)
    return federation, local


def say_untrained(algorithm: Algorithm, split: ParameterSplit, data: FederatedDataModule) -> None:
    """Names the labels that a client's personal head never learns, as it does not annotate them."""
    keeps_head = not algorithm.parts_sent or {*split.head} & {*split.parameters("personal")}
    gaps = []
    for name, plan in data.plans.items():
        if lost := [n for n in data.class_names if n not in (plan.annotated or data.class_names)]:
            gaps.append(f"{short(name)} ({few(lost)})")
    if keeps_head and gaps:
        warn(
            "A head that stays with its client never learns labels that the client does not "
            f"annotate; do not use these outputs: {few(gaps)}."
        )


def statistics_of(algorithm: Algorithm, data: FederatedDataModule) -> list[Statistic]:
    """Returns the statistics of patients that clients send before and while they train."""
    statistics: list[Statistic] = []
    for name, client in data.clients.items():
        statistics += data.summaries(name) if data.exchanged and name in data.plans else ()
        statistics += algorithm.summaries(client)
    return statistics


def folder_of_absent(federation: Federation, folder: Path) -> Path | None:
    """Returns the folder for the states of absent clients; None if they fit into memory."""
    room, count = federation.cohort.memory_gb, len(federation.clients)
    needed = count * federation.bytes_between_rounds()
    if room is None or needed <= 1e9 * room or os.name != "posix":
        return None
    inform(
        f"The states of {count:,} clients between rounds take about {size(needed)}, more than "
        f"cohort.memory_gb={room:g}, so they are kept on the disk of the run folder and mapped "
        "into memory."
    )
    return folder


def preprocessing(exchanged: Iterable[Exchanged]) -> list[Entry]:
    """Returns the ledger's entries for what clients exchanged before the first round."""
    name = "preprocessing"
    return [Entry(0, name, client, way, name, size, size) for client, way, size in exchanged]


def federation_of(
    config: RunDescription,
    task: TaskModule,
    clients: Sequence[ClientData],
    everyone: Sequence[ClientInfo] | None = None,
    shape: Sequence[int] | None = None,
) -> tuple[Federation, LocalTrainer]:
    """Builds a federation of the clients of this process: all clients, one or none."""
    algorithm = method_of(config, len(everyone or clients), everyone is not None)
    say_unprotected(algorithm)
    if config.canonical is not None and not (algorithm.mixes or algorithm.sums):
        raise ConfigError(
            f"{algorithm.title} would train the membership vectors of canonical models as "
            "if they were weights; choose canonical=none, or algorithm=ppfl or ifca."
        )
    optimizer, scheduler = build(config.optimizer), build(config.scheduler)
    try:
        learning_rates(optimizer, scheduler, config.rounds)
        if config.local["optimizer_state"] != "fresh" and remembers_elsewhere(optimizer):
            raise ConfigError(
                "medfed cannot keep all of its state; choose local.optimizer_state=fresh"
            )
    except Exception as error:
        raise ConfigError(
            f"The optimizer or its scheduler cannot be used as it is: {first_line(error)}."
        ) from error
    if config.local["optimizer_state"] == "averaged":
        if everyone is not None:
            raise cannot_average("sites send weights alone")
        if config.privacy.client is not None:
            raise cannot_average("privacy.client adds noise to displacements alone")
    if algorithm.trains_centrally:
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
        budget=part_of(config, "local"),
        channel=lambda adapted: build_channel(config, adapted, len(everyone or clients)),
        cohort=part_of(config, "cohort"),
        seed=config.seed,
        measure=lambda batches: task.evaluate(batches)["loss"],
        everyone=everyone,
        shape=shape,
        normalization=config.evaluation.normalization,
        compares=config.evaluation.contributions,
    )


def server_half(
    config: RunDescription,
    start: Start,
    everyone: Sequence[ClientInfo],
    shape: Sequence[int],
    names: Mapping[str, Sequence[str]] | None = None,
) -> tuple[TaskModule, Tensors, Account | None, Federation, LocalTrainer]:
    """Builds the task and the server of clients elsewhere.

    Also returns the weights that all begin with, before the method makes other entries of them, and
    which of them the start gave.
    """
    task: TaskModule = build_task(config.model, config.canonical, config.seed)
    if str(config.trainer.precision).startswith("64"):
        task.double()
    account = start.begin(config, task, names)
    begun = {n: t.detach().clone() for n, t in float_entries(task.network).items()}
    return task, begun, account, *federation_of(config, task, [], everyone, shape)


def method_of(config: RunDescription, clients: int, are_sites: bool = False) -> Algorithm:
    """Builds a run's method, with its aggregation; `are_sites`: whether clients are apart."""
    algorithm: Algorithm = part_of(config, "algorithm")
    if algorithm.trains_centrally and are_sites:
        raise ConfigError(
            f"{algorithm.title} trains on the data of all clients in one place, but sites do not "
            "give their data away; choose another algorithm."
        )
    if config.aggregation is None:
        return algorithm
    return algorithm.aggregating(part_of(config, "aggregation"), clients)


def say_unprotected(algorithm: Algorithm) -> None:
    """Names the parts of messages that a robust aggregation does not cover."""
    others = [part for part in algorithm.parts_sent if part not in algorithm.parts_averaged]
    if type(algorithm.aggregation) is not Aggregation and others:
        warn(
            f"aggregation covers the part {' and '.join(algorithm.parts_averaged)} of what clients "
            f"send by {algorithm.title}; the server takes {' and '.join(others)} as each "
            "client sends it."
        )
