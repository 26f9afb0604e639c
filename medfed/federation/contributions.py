"""How unlike the others' updates each client's are: FedCE's contribution in gradient space.

Jiang, Roth, Li, Yang, Zhao, Nath, Xu, Dou, Xu: Fair federated medical image segmentation via client
contribution estimation, CVPR 2023:

    g_i = max(0, 1 - mean over rounds of cos(Delta_i, sum over j != i of p_j Delta_j))

Delta_i are the averaged parameters' displacements that the server receives from client i, p_j the
weights of the mean; only rounds in which i took part count. It is reported, and weighs nothing:
noise has the largest g, and wrong labels raise it, too. The paper's other factor, the error of the
model without a client on its validation cases, needs further messages and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from medfed.common.tensors import State, Tensors, flatten, weighted_mean
from medfed.federation.algorithm import Algorithm
from medfed.federation.split import ParameterSplit
from medfed.federation.wire.channel import Channel
from medfed.federation.wire.packet import Message
from medfed.standalone.errors import ConfigError

COSINES = "cosines"  # what the server's state calls them: (R,) of each client, NaN where absent
_KEY = "evaluation.contributions=true compares each client's update with the others'"


def check_contributions(algorithm: Algorithm, channel: Channel, split: ParameterSplit) -> None:
    """Refuses methods and channels that show the server no updates of single clients."""
    if channel.sums is not None:
        raise ConfigError(
            f"{_KEY}, and channel.secure=masks shows the server their sum alone; leave one of both "
            "out."
        )
    if not (algorithm.parts_averaged and split.parameters("shared")):
        raise _refusal(algorithm)


def cosines_with_others(updates: Sequence[Tensors], weights: Sequence[float]) -> list[float]:
    """Returns the cosine of each update and the weighted sum of the others; NaN where one is 0.

    Example:
        >>> updates = [{"w": torch.tensor(v)} for v in ([1.0, 0.0], [3.0, 0.0], [0.0, 2.0])]
        >>> cosines_with_others(updates, [1, 1, 1])[2], cosines_with_others([], [])
        (0.0, [])
    """
    if not weights:
        return []
    total, found = float(sum(weights)), list[float]()
    doubled = ({n: t.double() for n, t in update.items()} for update in updates)
    mean = weighted_mean(doubled, weights)
    for update, weight in zip(updates, weights, strict=True):
        others = flatten({n: mean[n] - weight / total * t.double() for n, t in update.items()})
        own = flatten({n: t.double() for n, t in update.items()})
        found.append(float(own @ others / (own.norm() * others.norm())))
    return found


def cosines_in(
    replies: Mapping[str, Message], algorithm: Algorithm, server: State, parameters: Collection[str]
) -> dict[str, float]:
    """Returns the cosine of each client of a phase; none where no update is to be averaged."""
    for part in algorithm.parts_averaged:
        sent = [m.parts.get(part, {}) for m in replies.values() if m.kind(part) == "update"]
        updates = [{n: t for n, t in named.items() if n in parameters} for named in sent]
        if all(updates) and len(updates) == len(replies):
            found = cosines_with_others(updates, algorithm.weights(server, replies))
            # The last bits of a long sum depend on the number of threads.
            return {c: round(cosine, 6) for c, cosine in zip(replies, found, strict=True)}
    return {}


def with_round(
    server: State, cosines: Mapping[str, float], clients: Sequence[str], algorithm: Algorithm
) -> State:
    """Returns the part of the server's state that holds all rounds' cosines, and a new one."""
    before = server.get(COSINES, {})
    if not before and not cosines:
        raise _refusal(algorithm)
    now = {c: torch.tensor([cosines.get(c, math.nan)], dtype=torch.float64) for c in clients}
    return {COSINES: {c: torch.cat([before[c].cpu(), now[c]]) if before else now[c] for c in now}}


def _refusal(algorithm: Algorithm) -> ConfigError:
    why = f"{algorithm.title} averages no updates of this model"
    return ConfigError(f"{_KEY}, and {why}; leave it out.")


def contributions(server: State) -> dict[str, dict[str, Any]]:
    """Returns g of each client, and its cosines over rounds, as a summary has them."""

    def known(values: Tensor) -> dict[str, Any]:
        g, each = 1 - float(values.nanmean()), [v if v == v else None for v in values.tolist()]
        return {"contribution": max(0.0, g) if g == g else None, "cosines": each}

    return {client: known(values) for client, values in server.get(COSINES, {}).items()}
