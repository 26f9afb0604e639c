"""How a server combines the clients' tensors of one part: by their mean, or robustly.

- Clipping to the median norm: Nguyen et al.: FLAME: Taming backdoors in federated learning, USENIX
  Security 2022, section 4.3.
- Trimmed mean and median: Yin, Chen, Ramchandran, Bartlett: Byzantine-robust distributed learning:
  Towards optimal statistical rates, ICML 2018, definitions 1 and 2.
- Krum, multi-Krum: Blanchard, El Mhamdi, Guerraoui, Stainer: Machine learning with adversaries:
  Byzantine tolerant gradient descent, NIPS 2017, section 3.

Deviations: the papers' clients weigh the same. Here clients that remain after clipping, trimming or
Krum keep their weights; the median ignores weights, as a client may claim any number of samples.
Every part is combined separately, so Krum may choose other clients for another part.

Running variances of BatchNorm become those of all patients together. The mean of the hospitals'
variances lacks the variance between their means. With v_k and m_k of hospital k and weights p_k,
the variance of all is Σ p_k (v_k + m_k²) − (Σ p_k m_k)², or with a centre c that all know
Σ p_k (v_k + (m_k − c)²) − (Σ p_k m_k − c)². A hospital sends v_k + (m_k − c)² in the place of v_k,
where c is the mean that it has received; so sums and masks need no other message, and nothing
cancels. Its displacement is sent as v_k − v + (m_k − c)².
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from medfed.common.console import short
from medfed.common.tensors import Tensors, flatten, parted, weighted_mean, weighted_sum
from medfed.federation.wire.packet import EncodedPart, Message
from medfed.standalone import checks
from medfed.standalone.errors import ConfigError

Items = Sequence[Mapping[str, Tensor]]
Start = Mapping[str, Tensor] | None
FAR = 5.0  # times the median norm of a part; a longer one is noted.


class Outlier(NamedTuple):
    """A part of a client's message that is far longer than those of the other clients."""

    round: int
    phase: str
    client: str
    part: str
    norm: float
    median: float

    def __str__(self) -> str:
        ratio = f"{self.norm / self.median:.3g}" if self.norm < _MOST else "at least 1e19"
        return (
            f"Round {self.round + 1}: the part {self.part} of {short(self.client)} is {ratio} "
            "times as long as the median client's; aggregation=clip, trimmed, median or krum "
            "bounds what one client changes."
        )


Norms = Mapping[str, Mapping[str, float]]
"""The norms of replies, by part and client."""


def find_outliers(norms: Norms, round: int, phase: str) -> list[Outlier]:
    """Finds the parts whose norm is more than :data:`FAR` times the median over clients.

    Example:
        >>> norms = {"shared": {"a": 1.0, "b": 2.0, "c": 40.0}}
        >>> [(far.client, far.norm, far.median) for far in find_outliers(norms, 0, "fit")]
        [('c', 40.0, 2.0)]
    """
    return [
        Outlier(round, phase, client, part, norm, usual)
        for part, known in norms.items()
        if len(known) >= _FEWEST and (usual := statistics.median_low(known.values())) > 0
        for client, norm in known.items()
        if norm > FAR * usual
    ]


_FEWEST = 3  # of two clients, neither is the unusual one
_MOST = 1e19  # about where squares overflow in single precision


class PhaseReplies(dict[str, Message]):
    """The decoded replies of a phase by client, in the order of the cohort.

    Parts that the method only averages are added up as they arrive, and not kept: so the replies of
    a large model are never in memory together. `weights`: of each client in these means.
    `averaged`: the names of these parts.
    """

    def __init__(self, weights: Mapping[str, float], averaged: Collection[str]) -> None:
        super().__init__()
        self._weights, self._total = weights, float(sum(weights.values()))
        self._averaged = averaged if self._total > 0 else ()
        self._sums: dict[str, tuple[dict[Any, Tensor], int]] = {}
        self.norms: dict[str, dict[str, float]] = {}  # of all parts
        # Of the parts that a secure channel reveals as sums alone.
        self.means: dict[str, Tensors] = {}

    def add(self, client: str, message: Message, sent: Mapping[str, EncodedPart]) -> None:
        """Takes the next client's reply, as it was decoded and as it was sent."""
        parts = _Single()
        parts.sums = ChainMap[str, Any](self._sums, self.means)
        for part, named in message.parts.items():
            few, norm = sent[part].few(named)
            if named:
                self.norms.setdefault(part, {})[client] = min(norm, _MOST)
            if part not in self._averaged:
                parts[part] = named
                continue
            before, count = self._sums.get(part, (None, 0))
            if before is not None and before.keys() != few.keys():
                before, few = parted(before), named
            share = self._weights[client] / self._total
            self._sums[part] = weighted_sum(before, few, share), count + 1
        self[client] = Message(message.phase, parts, message.scalars, message.kinds)

    def summed(self, part: str) -> Tensors | None:
        """Returns the weighted mean of a part that is added up; None if it is not."""
        if part not in self._sums:
            return None
        mean, count = self._sums[part]
        if count < len(self):
            raise AbsentPartError(part)
        return parted(mean)


class AbsentPartError(ConfigError):
    """A method reads a part of replies that a client has not sent."""

    def __init__(self, part: str) -> None:
        self.part = part
        super().__init__(
            f"The method reads the part {part} of replies, and not every client has sent it in "
            f"this phase; let fit reply with it, or read it only where {part!r} in reply.parts."
        )


class _Single(dict[str, Tensors]):
    """The parts of one reply without those that are added up, which it refuses to give."""

    sums: Mapping[str, Any]

    def __missing__(self, part: str) -> Tensors:
        if part not in self.sums:
            raise AbsentPartError(part)
        raise ConfigError(
            f"The method reads the part {part} of a single reply, and its parts_averaged says that "
            f"it reads only the mean; take {part} out of parts_averaged."
        )

    def get(self, part: str, default: Any = None) -> Any:
        """As of a dictionary, but for parts that are added up."""
        return self[part] if part in self or part in self.sums else default


@dataclass(frozen=True)
class Aggregation:
    """The weighted mean, which one client can move to any value.

    Example:
        >>> Aggregation().combine([{"w": torch.zeros(1)}, {"w": torch.ones(1)}], [1, 3])
        {'w': tensor([0.7500])}
    """

    def __post_init__(self) -> None:
        checks.check_fields("aggregation", self)

    @property
    def least(self) -> int:
        """The smallest number of clients that it can combine."""
        return 1

    def combine(self, items: Items, weights: Sequence[float], start: Start = None) -> Tensors:
        """Combines the tensors of clients.

        `start`: where the items are models, the server's model; ``None`` for displacements.
        """
        if len(items) < self.least:
            raise ConfigError(
                f"aggregation={type(self).__name__.lower()} needs at least {self.least} clients in "
                f"a round, and here are {len(items)}; let more take part, or choose another."
            )
        return weighted_mean(items, weights)


@dataclass(frozen=True)
class Clip(Aggregation):
    """The weighted mean of displacements, of which none is much longer than the median one.

    Example:
        >>> items = [{"w": torch.tensor([x])} for x in (1.0, 1.0, -20.0)]
        >>> Clip().combine(items, [1, 1, 1])
        {'w': tensor([0.3333])}
    """

    # The largest norm, in multiples of the (lower) median norm, positive; ``inf`` is the mean.
    times: Annotated[float, checks.check_positive] = 1.0

    def combine(self, items: Items, weights: Sequence[float], start: Start = None) -> Tensors:
        """Shortens displacements that are too long, then takes the mean."""
        zero = {n: torch.zeros_like(t) for n, t in items[0].items()} if start is None else start
        moves = ([t.double() - zero[n] for n, t in one.items()] for one in items)
        norms = [math.sqrt(sum(float(t.square().sum()) for t in move)) for move in moves]
        most = self.times * statistics.median_low(norms)
        shorter = [
            {n: zero[n] + ((t.double() - zero[n]) * (most / norm)).to(t) for n, t in one.items()}
            if norm > most
            else one
            for one, norm in zip(items, norms, strict=True)
        ]
        return super().combine(shorter, weights)


@dataclass(frozen=True)
class _Ordered(Aggregation, ABC):
    """Combines each number from its sorted values over clients."""

    def combine(self, items: Items, weights: Sequence[float], start: Start = None) -> Tensors:
        """Combines each number separately, in double precision."""
        mean = super().combine(items, weights)
        shares = torch.tensor([float(w) for w in weights], dtype=torch.float64)
        for name, like in mean.items():
            values = torch.stack([one[name] for one in items]).double()
            ordered, order = values.sort(dim=0, stable=True)
            mean[name] = self._middle(ordered, shares.to(values.device)[order]).to(like)
        return mean

    @abstractmethod
    def _middle(self, ordered: Tensor, weights: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Trimmed(_Ordered):
    """The weighted mean without the largest and smallest values of each number.

    Example:
        >>> items = [{"w": torch.tensor([x])} for x in (1.0, 2.0, 3.0, -1e30, 3.0)]
        >>> Trimmed(faulty=1).combine(items, [1, 1, 1, 1, 1])
        {'w': tensor([2.])}
    """

    # How many values to leave out at each end; 0 is the mean.
    faulty: Annotated[int, checks.check_not_negative] = 1

    @property
    def least(self) -> int:
        """One value must remain."""
        return 2 * self.faulty + 1

    def combine(self, items: Items, weights: Sequence[float], start: Start = None) -> Tensors:
        """Trims, where there is anything to trim."""
        if self.faulty == 0:
            return Aggregation.combine(self, items, weights)
        return super().combine(items, weights)

    def _middle(self, ordered: Tensor, weights: Tensor) -> Tensor:
        inner = slice(self.faulty, len(ordered) - self.faulty)
        return (ordered[inner] * weights[inner]).sum(0) / weights[inner].sum(0)


@dataclass(frozen=True)
class Median(_Ordered):
    """The median of each number; every client counts the same.

    Example:
        >>> items = [{"w": torch.tensor([x])} for x in (1.0, 2.0, -1e30)]
        >>> Median().combine(items, [1, 1, 1_000_000])
        {'w': tensor([1.])}
    """

    def _middle(self, ordered: Tensor, weights: Tensor) -> Tensor:
        last = len(ordered) - 1
        return (ordered[last // 2] + ordered[(last + 1) // 2]) / 2


@dataclass(frozen=True)
class Krum(Aggregation):
    """The weighted mean of the clients that are closest to most others.

    Example:
        >>> items = [{"w": torch.tensor([x])} for x in (1.0, 2.0, 3.0, -1e30, 2.0)]
        >>> Krum(faulty=1).combine(items, [1, 1, 1, 1, 1])
        {'w': tensor([2.])}
    """

    # f, how many clients may send anything; needs at least 2 f + 3 clients.
    faulty: Annotated[int, checks.check_not_negative] = 1
    # m, how many clients remain: 1 is Krum, more is multi-Krum; ``None``: all but f.
    keep: Annotated[int | None, checks.check_optional_count] = None

    @property
    def least(self) -> int:
        """The paper's bound, and as many as remain."""
        return max(2 * self.faulty + 3, self.keep or 0)

    def combine(self, items: Items, weights: Sequence[float], start: Start = None) -> Tensors:
        """Chooses by the sum of squared distances to the n - f - 2 closest others."""
        mean = super().combine(items, weights)
        keep = len(items) - self.faulty if self.keep is None else self.keep
        if keep == len(items):
            return mean
        rows = torch.stack([flatten(one).double() for one in items])
        distances = torch.stack([(rows - row).square().sum(1) for row in rows])
        # The smallest of each row is the distance of a client to itself.
        near = distances.sort(dim=1).values[:, 1 : len(items) - self.faulty - 1]
        chosen = sorted(near.sum(1).sort(stable=True).indices[:keep].tolist())
        return weighted_mean([items[i] for i in chosen], [weights[i] for i in chosen])


def _pairs(names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yields the names of a running variance and its mean."""
    for variance in [name for name in names if name.endswith("running_var")]:
        if f".{variance}".endswith(".running_var") and (mean := f"{variance[:-3]}mean") in names:
            yield variance, mean


def second_moments(reply: Message, received: Message, averaged: Collection[str]) -> Message:
    """Replaces variances that the server averages by second moments about what was received.

    `averaged`: the parts whose weights the server averages; displacements it always does.

    Example:
        >>> import torch
        >>> own = {"running_var": torch.tensor(1.0), "running_mean": torch.tensor(3.0)}
        >>> reply = Message(parts={"shared": own}, kinds={"shared": "update"})
        >>> second_moments(reply, Message(), ()).parts["shared"]["running_var"]
        tensor(10.)
    """
    changed: dict[str, Tensors] = {}
    for part, tensors in reply.parts.items():
        update = reply.kinds.get(part) == "update"
        start = {} if update or part not in averaged else received.parts.get(part, {})
        pairs = [pair for pair in _pairs(tensors) if update or pair[1] in start]
        if pairs:
            centred = [_from(tensors[mean], start.get(mean)) for _, mean in pairs]
            squares = torch._foreach_mul(centred, centred)
            moments = torch._foreach_add([tensors[variance] for variance, _ in pairs], squares)
            changed[part] = tensors | dict(zip((v for v, _ in pairs), moments, strict=True))
    return replace(reply, parts={**reply.parts, **changed}) if changed else reply


def pooled_variances(mean: Tensors, start: Mapping[str, Tensor] | None) -> Tensors:
    """Returns the mean of a part with the variances of all hospitals' patients together.

    `start`: the model that the replies started from; ``None`` if they are displacements from it.

    Example:
        >>> import torch
        >>> mean = {"running_var": torch.tensor(10.0), "running_mean": torch.tensor(0.0)}
        >>> pooled_variances(mean, None)["running_var"]
        tensor(10.)
    """
    variances = {
        variance: mean[variance] - _from(mean[of], (start or {}).get(of)).square()
        for variance, of in _pairs(mean)
        if start is None or of in start
    }
    return {**mean, **variances} if variances else mean


def _from(tensor: Tensor, centre: Tensor | None) -> Tensor:
    return tensor if centre is None else tensor - centre
