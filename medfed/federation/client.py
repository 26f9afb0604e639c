"""What a method may ask of one client, and what methods often do with it.

:class:`Client` is the contract. Where a client's data and training are in this process,
:class:`medfed.federation.local_client.LocalClient` fulfils it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypedDict, Unpack

from torch import Tensor

from medfed.common.tensors import State, Tensors, overwrite
from medfed.federation.other_state import OTHER
from medfed.federation.split import ParameterSplit, Update

Batch = dict[str, Any]
Penalty = Callable[[Mapping[str, Tensor]], Tensor]


class GradientAt(Protocol):
    """Gives gradients of the loss within a local step."""

    def __call__(
        self, at: Mapping[str, Tensor], *, fresh: int = 0, term: BatchPenalty | None = None
    ) -> Tensors:
        """Returns the gradient at other values of all trained parameters, in new tensors.

        `fresh`: of which batch: 0 is the step's own, 1 the next one, and so on; no other step sees
        them. `term`: added to the loss; its live parameters have the values `at`.
        """


class Forward(Protocol):
    """The forward passes of one batch.

    Attributes:
        loss: The batch's loss under the live weights, to be differentiated.
    """

    loss: Tensor

    def __call__(self, weights: Mapping[str, Tensor], *, features: bool = False) -> Tensor:
        """Returns the network's outputs, or its features (B, C).

        Features are what enters the head (``model.personal``), averaged over positions. The live
        weights, as they are handed to the penalty, cost nothing and can be differentiated; others
        are passed in evaluation mode, without gradients.

        Args:
            weights: The live trained parameters, or entries; those that are not named are live.
            features: Whether features are asked for.
        """

    def at(self, inputs: Tensor) -> Tensor:
        """Returns the outputs of other inputs, (n, ...), under the live weights.

        They pass in evaluation mode and can be differentiated.
        """


BatchPenalty = Callable[[Batch, Mapping[str, Tensor], Forward], Tensor]
Descent = Callable[[Mapping[str, Tensor], GradientAt], Tensors]
Outputs = Callable[[Any], Any]
Split = Literal["train", "val"]
AfterStep = Callable[[Mapping[str, Tensor], GradientAt], None]


class TrainOptions(TypedDict, total=False):
    """How :meth:`Client.train` takes its steps; everything may be left out.

    Attributes:
        update: Which part may change; the other comes back as it was given.
        rates: Step sizes of the parts; by default the round's for both.
        penalty: A differentiable term added to the loss, of the trained parameters.
        batch_penalty: Another one, which also sees each batch and its forward passes.
        outputs: Changes the network's outputs before each step's loss; not applied to gradients
            that the method requests separately.
        direction: Replaces the gradient of each step; gets the live trained parameters and the
            function that gives gradients; without penalties, which it may add itself.
        after_step: Called after each step with the live trained parameters, which it may change in
            place, and the function that gives gradients.
        statistics: Whether running statistics that stay with the client follow the batches, too,
            where ``update`` is the shared part.
    """

    update: Update
    rates: Mapping[Literal["shared", "personal"], float] | None
    penalty: Penalty | None
    batch_penalty: BatchPenalty | None
    outputs: Outputs | None
    direction: Descent | None
    after_step: AfterStep | None
    statistics: bool


class GradientOptions(TypedDict, total=False):
    """What a gradient is of."""

    update: Update  # the part whose gradient is returned; by default all
    batches: int | None  # stop after this many; None, the default, for the whole epoch


class Features(NamedTuple):
    """What a network makes of a client's samples, in a fixed order.

    Attributes:
        z: What enters the head, ``(n, d)``, averaged over positions; ``(n, 0)`` without a head.
        labels: The classes or outcomes, ``(n,)``; ``(n, 0)`` in tasks of other labels.
        patients: The patient of each sample, ``(n,)``; where the data name none, each has its own.
        outputs: The network's outputs, ``(n, ...)``.
    """

    z: Tensor
    labels: Tensor
    patients: Tensor
    outputs: Tensor


class ClientData(Protocol):
    """The interface of a client's data; the data modules implement it.

    An attribute ``num_batches`` gives the batches of an epoch where the samples and the batch size
    do not: of loaders that skip or repeat samples.
    """

    id: str

    @property
    def num_samples(self) -> int:
        """Number of training samples."""

    @property
    def label_counts(self) -> Tensor:
        """Training samples per class, shape (K,)."""

    @property
    def channels(self) -> Tensor:
        """Which input channels the client has, shape (C,)."""

    @property
    def batch_size(self) -> int:
        """Samples per training batch."""

    def train_batches(self, seed: int) -> Iterator[Batch]:
        """Yields one epoch in an order that depends on the seed only."""

    def train_inputs(self, limit: int) -> Tensor:
        """Returns up to ``limit`` training inputs in a fixed order, shape (n, ...)."""

    def patients_behind(self, limit: int) -> int:
        """Returns how many patients these inputs are of."""

    def eval_batches(self, split: Literal["train", "val", "test"]) -> Iterator[Batch]:
        """Yields a split in a fixed order."""


class AmongOthers:
    """A client's data as they are, beside those of all clients, from which subclasses take more."""

    def __init__(self, data: ClientData, everyone: Sequence[ClientData]) -> None:
        self._data, self._everyone = data, [*everyone]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of a copy that is not made yet
            raise AttributeError(name)
        return getattr(self._data, name)


class Client(Protocol):
    """The interface of one hospital for algorithms.

    Attributes:
        id: The client's name.
        data: Its data, for sketches; training goes through :meth:`train`.
        weights: The initial model that all clients start from.
        state: The client's state, which persists between rounds.
        phase_index: Position of the current phase within the round, from 0.
        passes_move_state: Whether passes of this phase's gradients have moved other state of the
            network, which :meth:`gradient` itself leaves as it was.
    """

    id: str
    data: ClientData
    weights: Tensors
    state: State
    phase_index: int
    passes_move_state: bool

    @property
    def split(self) -> ParameterSplit:
        """The shared and the personal names."""

    @property
    def steps(self) -> int:
        """The round's budget of local gradient steps, to be divided among its phases."""

    @property
    def learning_rate(self) -> float:
        """The optimizer's step size in this round."""

    def effective_step_length(self, steps: int, along: Callable[[], Tensor] | None = None) -> float:
        """Returns how far this many steps of one ``train`` go along a constant unit gradient.

        A displacement divided by this number is a mean of the gradients on the way.

        Args:
            steps: Their number.
            along: Gives a gradient for optimizers that need one; see
                :func:`medfed.federation.optimizers.effective_step_length`.

        Raises:
            ConfigError: If the optimizer needs a gradient and ``along`` is missing.
        """

    def share(self, index: int, parts: int) -> int:
        """Returns the steps of one of several phases or models that train in a round.

        They share the round's budget; with ``local.budget=paper`` each has the whole budget.

        Args:
            index: The phase or model, from 0.
            parts: Their number.
        """

    def shares(self, first: float) -> tuple[int, int]:
        """Returns the steps of two phases or models, as :meth:`share` does.

        Args:
            first: The share of the first one, in (0, 1); each gets at least one step.
        """

    def train(
        self, start: Mapping[str, Tensor], *, steps: int | None = None, **how: Unpack[TrainOptions]
    ) -> Tensors:
        """Runs local gradient steps from ``start`` and returns all entries of the model.

        Those of the trained part are new tensors, which the caller alone has; others are the same.

        Args:
            start: All entries, parameters and float buffers.
            steps: Number of steps; by default the round's whole budget.
            how: See :class:`TrainOptions`.

        Raises:
            NonFiniteError: If a loss is NaN or infinite; client, round and phase are named.
        """

    def gradient(
        self, at: Mapping[str, Tensor], *, same: bool = False, **over: Unpack[GradientOptions]
    ) -> Tensors:
        """Returns the mean gradient over one epoch at fixed entries, without a step.

        Args:
            at: All entries, parameters and float buffers.
            same: Whether all such calls of the phase, and :meth:`loss_at`, use the same batches;
                otherwise every call uses new ones.
            over: See :class:`GradientOptions`.
        """

    def loss_at(
        self, at: Mapping[str, Tensor], *, batches: int | None = None, split: Split = "train"
    ) -> float:
        """Returns the mean loss over one epoch at fixed entries.

        All calls of one phase use the same batches, so that their losses can be compared. Training
        batches pass in training mode, validation batches as in every evaluation.

        Args:
            at: All entries, parameters and float buffers.
            batches: Stop after this many batches; ``None`` for the whole epoch.
            split: Training or validation data.

        Raises:
            ConfigError: If the client has no validation data.
        """

    def features(
        self, at: Mapping[str, Tensor], split: Split = "train", limit: int | None = None
    ) -> Features:
        """Returns features and outputs of the samples of a split, from one pass at fixed entries.

        The samples pass as in every evaluation: without augmentation, dropout and batch statistics.

        Args:
            at: All entries, parameters and float buffers.
            split: Training or validation data.
            limit: Of the first so many; ``None``: of all.
        """

    def with_buffers(self, model: Tensors, buffers: Tensors) -> Tensors:
        """Returns a model with other values, of any size, of buffers that are no entries.

        Args:
            model: All entries.
            buffers: By name.
        """


def with_statistics(client: Client, model: Tensors) -> Tensors:
    """Returns a model with the client's running statistics fitted to its data.

    They follow the batches of ``client.steps`` steps; every parameter is restored after each.
    """
    if not client.split.buffers.intersection(client.split.personal):
        return model
    # Shared statistics do not change.
    moved = statistics_at(client, model)
    return {**model, **{n: t for n, t in moved.items() if n not in client.split.shared}}


def statistics_at(client: Client, model: Tensors) -> Tensors:
    """Returns all running statistics and other state after the batches of ``client.steps`` steps.

    Every parameter is restored after each step. Without statistics that may change, nothing is
    done.
    """
    still = client.split.policy == "frozen" or not client.split.buffers
    if still and not client.passes_move_state:
        return {}
    end = client.train(model, after_step=put_back(model))
    return {n: t for n, t in end.items() if n in client.split.buffers or n == OTHER}


def put_back(fixed: Mapping[str, Tensor]) -> AfterStep:
    """Returns an ``after_step`` that puts some parameters back to values after each step."""
    return lambda weights, _: overwrite(weights, fixed)
