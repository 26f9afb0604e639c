"""Builds the federation, its training loop and its channel from a configuration, data and task."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from medfed.common.console import shown, size
from medfed.common.floors import Statistic
from medfed.common.tensors import Tensors
from medfed.config.compose import build, part_of
from medfed.config.description import RunDescription
from medfed.config.sections import Section
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.one_site import Exchanged
from medfed.federation.aggregation import Aggregation
from medfed.federation.algorithm import Algorithm, ClientInfo
from medfed.federation.client import Batch, ClientData
from medfed.federation.engine.loop import LocalTrainer
from medfed.federation.federation import Federation, assemble
from medfed.federation.inputs import cannot_average
from medfed.federation.lightning.collect import inform, warn
from medfed.federation.local_client import Pool
from medfed.federation.optimizers import learning_rates, remembers_elsewhere
from medfed.federation.split import ParameterSplit, float_entries
from medfed.federation.wire.channel import Channel, Link
from medfed.federation.wire.codecs.base import Codec
from medfed.federation.wire.fixed_point import FEWEST, FixedPoint
from medfed.federation.wire.ledger import Entry, Ledger
from medfed.models.task import TaskModule
from medfed.records.tasks import build_task
from medfed.run.privacy import hide_clients, protect
from medfed.run.start import Account, Start
from medfed.standalone.errors import ConfigError, did_you_mean, few, first_line


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
    federation.ledger = Ledger(preprocessing(data.exchanged))
    hide_clients(config, federation, across=everyone is not None)
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
            gaps.append(f"{shown(name)} ({few(lost)})")
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
        if config.local.optimizer_state != "fresh" and remembers_elsewhere(optimizer):
            raise ConfigError(
                "medfed cannot keep all of its state; choose local.optimizer_state=fresh"
            )
    except Exception as error:
        raise ConfigError(
            f"The optimizer or its scheduler cannot be used as it is: {first_line(error)}."
        ) from error
    if config.local.optimizer_state == "averaged":
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
        measure=partial(mean_loss, task),
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


def mean_loss(task: TaskModule, batches: Iterable[Batch]) -> float:
    """Returns the loss of evaluation batches, computed as in every evaluation."""
    return task.evaluate(batches)["loss"]


def build_channel(config: RunDescription, algorithm: Algorithm, clients: int) -> Channel:
    """Builds both directions of the channel, from the sections ``codec`` and ``channel``."""
    codecs, links = config.codec, config.channel
    codec = build(codecs["up"])
    only = _only(algorithm, codec, links["up"])
    up = build(links["up"], codec=codec, place="channel.up", **only)
    down = build(links["down"], codec=build(codecs["down"]), place="channel.down")
    if up.parts is not None:
        check_parts(up.parts, algorithm.parts_sent, "channel.up.parts")
    return Channel(up, down, seed=config.seed, sums=sums_of(config, algorithm, up, clients))


def sums_of(
    config: RunDescription, algorithm: Algorithm, up: Link, clients: int
) -> FixedPoint | None:
    """Returns the parts that the server receives only as sums; None without ``channel.secure``."""
    if (secure := config.channel.get("secure")) is None:
        return None
    if secure != "masks":
        raise ConfigError(f"channel.secure must be masks or null, not {secure!r}.")
    name = algorithm.title
    parts = tuple(part for part in algorithm.parts_sent if part in algorithm.parts_averaged)
    if not parts or algorithm.trains_centrally:
        why = f"{name} needs more of what each client sends than a mean over all clients"
        hint = "choose another algorithm (medfed methods METHOD says which take means)"
    elif algorithm.mask_aware:
        why = "algorithm.mask_aware=true averages each weight over other clients"
        hint = "set algorithm.mask_aware=false"
    elif type(algorithm.aggregation) is not Aggregation:
        why = f"aggregation={type(algorithm.aggregation).__name__.lower()} compares the clients"
        hint = "choose aggregation=mean"
    elif not up.direct or not up.codec.lossless or up.shift is not None or up.zstd is not None:
        why = "codec.up and channel.up make messages of single clients smaller"
        hint = "set codec.up=fp32, and channel.up.cer.gamma=0, channel.up.shift=null and "
        hint += "channel.up.zstd=null"
    elif clients < FEWEST:
        why = f"{clients} clients are too few to hide one in a sum of {FEWEST}"
        hint = "let more take part"
    else:
        if others := [part for part in algorithm.parts_sent if part not in parts]:
            warn(
                f"channel.secure=masks covers the part {' and '.join(parts)} of what clients send "
                f"by {name}; the server receives {' and '.join(others)} of each client."
            )
        return FixedPoint(parts, config.channel["range"])
    raise ConfigError(
        f"channel.secure=masks does not go with this: {why}. Either {hint}, or set "
        "channel.secure=null."
    )


def _only(algorithm: Algorithm, codec: Codec, link: Section) -> dict[str, Any]:
    """Restricts a lossy codec to the parts of a method that stalls if others lose anything."""
    name, coded = algorithm.title, algorithm.parts_compressible
    if coded is None or codec.lossless or codec.cast:
        return {}
    if not coded:
        raise ConfigError(
            f"{name} compresses its messages itself and does not converge with a lossy codec on "
            "top; set codec.up=fp32, and choose the share of the entries by algorithm.keep."
        )
    if not codec.unbiased or link.feedback or link.shift is not None:
        raise ConfigError(
            f"{name} converges only with an unbiased codec, without error feedback and shift; set "
            "codec.up to randomk, qsgd or terngrad, and channel.up.feedback and shift to null."
        )
    if {str(part).rpartition("/")[2] for part in link.parts or coded} != set(coded):
        raise ConfigError(
            f"{name} converges only if the codec encodes nothing but {', '.join(coded)}; set "
            "channel.up.parts=null."
        )
    return {"parts": list(coded), "feedback": False}


def check_parts(patterns: Iterable[str], known: Iterable[str], key: str) -> None:
    """Checks that each pattern can match a part.

    Example:
        >>> check_parts(["fit/shared"], ["shared"], "channel.up.parts")
        >>> check_parts(["share"], ["shared"], "channel.up.parts")
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.ConfigError: channel.up.parts names 'share', which never travels (did you mean shared?); the parts are shared.
    """  # noqa: E501
    names = list(known)
    for pattern in patterns:
        part = pattern.rpartition("/")[2]
        if not any(Link(parts=[part]).compresses("", name) for name in names):
            parts = f"the parts are {', '.join(names)}" if names else "nothing travels"
            hint = did_you_mean(part, names)
            raise ConfigError(f"{key} names {pattern!r}, which never travels{hint}; {parts}.")
