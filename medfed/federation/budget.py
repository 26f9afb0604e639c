"""How much a client trains in one round, and what it costs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from medfed.common.arguments import check_arguments
from medfed.standalone.checks import check_not_negative, check_positive, within

if TYPE_CHECKING:
    from medfed.federation.client import ClientData

ChannelsLast = bool | Literal["auto"]


class Passes(NamedTuple):
    """Passes of batches through the network: the cost of training.

    A gradient step takes one gradient; a method may use more, or losses without gradients.
    """

    gradient: int = 0  # forward and backward
    forward: int = 0  # forward only


MANY = within("[1, 1000000000]")  # steps, epochs or batches; with more, no round would end.


@dataclass(frozen=True)
class LocalBudget:
    """How much a client trains in one round, for every algorithm.

    Example:
        >>> LocalBudget(epochs=2).of(num_samples=33, batch_size=16)
        6
        >>> LocalBudget(epochs=2, accumulate=2).of(num_samples=33, batch_size=16)
        4
    """

    steps: Annotated[int | None, MANY] = None  # gradient steps per round; ``None`` uses ``epochs``
    # Passes over the client's training data per round, if ``steps`` is ``None``.
    epochs: Annotated[int, MANY] = 1
    # Batches per step, whose gradients are averaged by their samples. For a loss that is a mean
    # over samples this equals one larger batch. Each is a separate gradient pass, and layers that
    # normalise batches process each by itself.
    accumulate: Annotated[int, MANY] = 1
    # Largest norm of a step's gradient, penalties included; ``None`` for no clipping.
    clip: Annotated[float | None, check_positive] = None
    # ``fresh`` for each call of ``train``, ``kept`` by the client, or ``averaged`` by the server
    # (:mod:`medfed.federation.round`).
    optimizer_state: Literal["fresh", "kept", "averaged"] = "fresh"
    # ``equal``: a method that trains several models or parts in a round divides the steps among
    # them; ``paper``: each gets all steps, as papers count.
    budget: Literal["equal", "paper"] = "equal"
    # Whether convolutions compute in channels-last layout, which changes results by rounding;
    # ``auto``: on a CPU if it is probably faster.
    channels_last: ChannelsLast = False
    # Whether ``torch.compile`` compiles the loss for batches of full size, which changes results by
    # rounding and takes minutes before the first step.
    compile: bool = False
    # Most GiB of a GPU for clients' training samples, which then stay there; changes no bit.
    resident_gib: Annotated[float, check_not_negative] = 8.0
    # Whether clients' states stay on a GPU between turns, too, up to as many GiB; changes no bit.
    resident_states: bool = False
    # Whether whole steps are CUDA graphs where they can be. ``auto``: not before it was tried on a
    # GPU.
    graphs: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        check_arguments(type(self), vars(self), "local.")

    def of(self, num_samples: int, batch_size: int) -> int:
        """Returns the gradient steps of one round for a client of this size."""
        return self.of_batches(math.ceil(num_samples / batch_size))

    def of_batches(self, batches: int) -> int:
        """Returns the gradient steps of one round for a client whose epoch has these batches."""
        return self.steps or self.epochs * math.ceil(batches / self.accumulate)


def batches_of(data: ClientData) -> int:
    """Returns the training batches of an epoch."""
    return getattr(data, "num_batches", None) or math.ceil(data.num_samples / data.batch_size)


def share_of(steps: int, index: int, parts: int) -> int:
    """Divides a budget of steps so that the parts sum to it and each takes at least one.

    Example:
        >>> [share_of(10, i, 3) for i in range(3)]
        [3, 3, 4]
        >>> [share_of(1, i, 2) for i in range(2)]
        [1, 1]
    """
    return max(1, (index + 1) * steps // parts - index * steps // parts)
