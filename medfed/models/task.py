"""The base of tasks: a loss for training, probabilities, and an evaluation without side effects.

Training uses three members of a task: its ``network``, its ``loss`` and its ``evaluate``.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from medfed.common.scores import limits_of, smaller_is_better
from medfed.common.streams import seeded
from medfed.federation.split import patterns_of
from medfed.functional.scores import Floats
from medfed.models import meters
from medfed.models.custom_losses import Tried
from medfed.models.meters import Batch, Columns, Meter, WholeSplit
from medfed.models.networks.personal_part import default_personal
from medfed.standalone.checks import check_known
from medfed.standalone.errors import ConfigError
from medfed.standalone.inference import Inference
from medfed.standalone.mixture import Activation
from medfed.standalone.outputs import heads, last_counts, resized, shares

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Batch", "Meter", "TaskModule", "WholeSplit", "l2_penalty"]


MakeOptimizer = Callable[..., Optimizer]
MakeScheduler = Callable[[Optimizer], Any]


class TaskOptions(TypedDict, total=False):
    """What every task takes by name, see :class:`TaskModule`."""

    personal: str | Sequence[str] | None
    selection: Sequence[str] | None
    metrics: Mapping[str, meters.CustomMetric] | None
    l2: float


class TaskModule(nn.Module):
    """A network with a loss and metrics.

    All parameters and buffers are in ``network``, so names relative to it are those of the plain
    PyTorch network (``class_layers.out.weight``) and a checkpoint holds only weights.

    Args:
        network: The network, from ``image`` to logits.
        optimizer: Called with the parameters, returns the optimizer (a Hydra partial).
        scheduler: Called with the optimizer, returns a schedule stepped once per epoch, or None.
        personal: A pattern of the names that stay with each client, or several; by default those of
            :func:`medfed.models.networks.personal_part.default_personal`.
        selection: Metric and mode (``"max"`` or ``"min"``) that choose a model on validation data;
            by default the class's choice.
        metrics: The user's metrics by name, in addition to the task's.
        l2: The training loss gains ``l2 / 2`` times the squared norm of all weights except biases
            and memberships; the ``loss`` metric does not.

    Raises:
        ConfigError: If ``selection`` names no metric of this task, or the wrong mode, ``l2`` is
            negative, or a metric has the name of one of the task's.
    """

    network: nn.Module
    inference: Inference  # what outputs mean; a task without one overrides `probabilities`
    personal: tuple[str, ...]
    selection: tuple[str, str]
    activation: Activation = "identity"  # turns logits into probabilities
    default_selection: ClassVar[tuple[str, str]] = ("loss", "min")
    highest_loss: float = math.inf  # of a model that has not diverged, once the model was tried
    by_case: ClassVar[bool] = False  # whether the user's metrics get case by case

    def __init_subclass__(cls) -> None:
        never = ("evaluate", "training_step", "validation_step", "configure_optimizers")
        if lost := [name for name in never if name in vars(cls)]:
            raise ConfigError(
                f"A task cannot override {lost[0]}, as {cls.__name__} does; write the loss as "
                "criterion and the metrics as meter, and set optimizer."
            )

    def __init__(
        self,
        network: nn.Module,
        optimizer: MakeOptimizer,
        scheduler: MakeScheduler | None = None,
        *,
        personal: str | Sequence[str] | None = None,
        selection: Sequence[str] | None = None,
        metrics: Mapping[str, meters.CustomMetric] | None = None,
        l2: float = 0.0,
    ) -> None:
        super().__init__()
        if not isinstance(network, nn.Module):
            raise ConfigError(f"model.network={network} is no network; set model=OPTION.")
        if not 0 <= l2 < math.inf:
            raise ConfigError(f"l2 must not be negative or infinite, not {l2}.")
        self.l2 = l2
        self.network = network
        self._first: tuple[nn.Module, nn.Parameter] | None = None  # a pair is no part of a module
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.personal = default_personal(network) if personal is None else patterns_of(personal)
        self.custom_metrics = dict(metrics or {})
        meters.check_metrics(self.custom_metrics, tuple(self.meter(test=True).compute()))
        self.selection = self._checked_selection(selection or self.default_selection)

    @abstractmethod
    def criterion(self, logits: Tensor, label: Tensor) -> Tensor:
        """Returns the scalar loss of logits and labels, without terms on the parameters."""

    def training_criterion(self, logits: Tensor, batch: Batch) -> Tensor:
        """Returns the scalar loss of a training batch, by default the criterion."""
        return self.criterion(logits, batch["label"])

    def output_shape(self, image: Tensor) -> tuple[int, ...] | None:
        """Returns the shape of the logits of an image, without the batch; None for any."""
        return None

    def check_parts(self, batch: Batch) -> None:
        """Tries the user's losses and metrics, before training and evaluation.

        Args:
            batch: A training batch.

        Raises:
            ConfigError: If one does not fit the task's outputs.
        """
        if self.meter() is self.meter():
            raise ConfigError(f"{type(self).__name__}.meter must return a new meter at each call.")
        if self.custom_metrics and (tried := self.measurable(batch)) is not None:
            meters.try_metrics(self.custom_metrics, tried)

    def metric_inputs(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the predictions and labels for the user's metrics."""
        return self.probabilities(logits), batch["label"]

    def measurable(self, batch: Batch) -> Tried | None:
        """Returns right and wrong predictions in the form of `metric_inputs`, to try metrics."""
        return None

    def probabilities(self, logits: Tensor) -> Tensor:
        """Turns logits into probabilities, or into the outcome; by default as `inference` does."""
        return self.inference.probabilities(logits)

    @abstractmethod
    def meter(self, *, test: bool = False) -> Meter:
        """Returns an empty meter; ``test`` may add metrics that are too slow for every round."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The keys of ``evaluate(batches)``."""
        return (*self.meter().compute(), *self.custom_metrics)

    def forward(self, image: Tensor) -> Tensor:
        """Returns the network's logits of a batch of images or features."""
        return self.outputs(self.network, image)[0]

    def outputs(self, network: nn.Module, image: Tensor) -> list[Tensor]:
        """Returns the logits, under deep supervision of all heads; evaluation uses the first one.

        Args:
            network: The task's network, or a copy of it.
            image: ``(B, C, *spatial)`` or ``(B, F)``.
        """
        # Data are float32; a network in double precision gets double.
        image = image if image.dtype == (dtype := self._dtype_of(network)) else image.to(dtype)
        outputs = heads(network(image), image)
        return outputs[::-1] if len(outputs) > 1 and last_counts(network) else outputs

    def _dtype_of(self, network: nn.Module) -> torch.dtype:
        # The walk to the first parameter takes as long as a small layer.
        if self._first is None or self._first[0] is not network:
            self._first = network, next(network.parameters())
        return self._first[1].dtype

    def loss(self, batch: Batch) -> Tensor:
        """Returns the scalar training loss of a batch."""
        loss = self.data_loss(batch)
        return loss if self.l2 == 0 else loss + l2_penalty(self.network, self.l2)

    def data_loss(self, batch: Batch) -> Tensor:
        """Returns the training loss without terms of the weights.

        Under deep supervision it is the mean over the heads, weighted by
        :func:`medfed.standalone.outputs.shares`; the label is resized to a smaller head by
        nearest voxels.
        """
        outputs = self.outputs(self.network, batch["image"])
        loss = self.training_criterion(outputs[0], batch)
        if len(outputs) > 1:
            parts = [loss, *(self.training_criterion(h, resized(batch, h)) for h in outputs[1:])]
            weighted = zip(shares(len(parts)), parts, strict=True)
            loss = torch.stack([weight * part for weight, part in weighted]).sum()
        return loss

    def logits(self, batch: Batch) -> Tensor:
        """Returns the logits of an evaluation batch, which may be larger than training patches."""
        return self.forward(batch["image"])

    def predict(self, batch: Batch) -> Tensor:
        """Returns probabilities in evaluation mode, without gradients.

        Args:
            batch: A batch with ``image``, on any device.

        Returns:
            ``(B, K)`` class probabilities, or ``(B, R, *spatial)`` region probabilities.
        """
        with self._evaluating():
            return self.probabilities(self.logits(self._to_network(batch)).float())

    def sample_outputs(self, image: Tensor) -> Tensor:
        """Returns the logits of training images, in evaluation mode, without gradients."""
        with self._evaluating():
            return self.forward(self._to_network({"image": image})["image"])

    def losses(self, batch: Batch) -> Tensor:
        """Returns the criterion of each sample alone, in evaluation mode, without gradients.

        Args:
            batch: An evaluation batch, on any device.

        Returns:
            ``(B,)``.
        """
        with self._evaluating():
            batch = self._to_network(batch)
            parts = (batch[name] for name in ("label", "annotated") if name in batch)
            rows = zip(self.logits(batch).float(), *parts, strict=True)
            return torch.stack([self.criterion(*(part[None] for part in row)) for row in rows])

    def evaluate(self, batches: Iterable[Batch], *, test: bool = False) -> dict[str, float]:
        """Evaluates a split, without changing module, training flags or random streams.

        Args:
            batches: The split, e.g. a DataLoader, on any device.
            test: Also compute metrics that are too slow for validation (Hausdorff distance).

        Returns:
            Metrics under short names such as ``iou`` or ``auroc``: NaN if the data leave one
            undefined, the worst possible value if the network's outputs are not finite.
        """
        return self.measured(batches, test=test).compute()

    def measured(
        self, batches: Iterable[Batch], *, test: bool = False, **more: Any
    ) -> meters.FiniteOnly:
        """Returns the meter of :meth:`evaluate`, which may also have results of every case.

        Args:
            batches: The split.
            test: As :meth:`evaluate`.
            more: Further arguments of the task's :meth:`meter`.
        """
        inputs = self.custom_metrics, self.metric_inputs, self.by_case
        custom = meters.CustomMetrics(*inputs) if self.custom_metrics else None
        meter = meters.FiniteOnly(self.meter(test=test, **more), custom)
        with self._evaluating():
            for batch in batches:
                batch = self._to_network(batch)
                meter.update(self.logits(batch).float(), batch)
        return meter

    def scores(self, cases: Columns, weights: Floats) -> dict[str, Floats]:
        """Computes metrics of a table of cases with weighted rows, for many weightings together.

        Args:
            cases: N rows of the meter's ``cases()``, by column.
            weights: (W, N): rows of one patient have the same weight.

        Returns:
            (W,) per metric; nothing if the task has no such metrics.
        """
        return {}

    def constants(self, cases: Columns, training: Batch) -> dict[str, Columns]:
        """Returns the cases with predictions from the training labels only.

        Args:
            cases: N rows of the meter's ``cases()``, by column.
            training: ``label`` of all training samples, or ``label_counts`` of classes.

        Returns:
            The columns by the name of the prediction; nothing if there is none.
        """
        return {}

    def picture(self, cases: Mapping[str, Any]) -> Figure | None:
        """Returns a figure of predictions per client and method, if the task has one."""
        return None

    def _checked_selection(self, selection: Sequence[str]) -> tuple[str, str]:
        metric, *modes = selection
        check_known("model.selection", metric, self.metric_names)
        right = ["min" if smaller_is_better(metric) else "max"]
        if limits_of(metric) == (-math.inf, math.inf) and metric not in self.custom_metrics:
            right = ["max", "min"]  # of a user's task, whose names do not tell
        if len(modes) != 1 or modes[0] not in right:
            chosen = f"model.selection=[{','.join(map(str, selection))}]"
            raise ConfigError(f"{chosen} must be [{metric},{' or '.join(right)}].")
        return metric, modes[0]

    def _to_network(self, batch: Batch) -> dict[str, Tensor]:
        # Not self.device: the runtime may have moved only the network.
        device = next(self.network.parameters()).device
        return {name: value.to(device) for name, value in batch.items()}

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Evaluation mode without gradients; restores flags of single layers (frozen norms)."""
        flags = [(module, module.training) for module in self.modules()]
        self.eval()
        try:
            # Starting a DataLoader draws a seed, too.
            with torch.no_grad(), seeded():
                yield
        finally:
            for module, training in flags:
                module.training = training


def l2_penalty(network: nn.Module, l2: float) -> Tensor:
    """Half of ``l2`` times the squared norm of all parameters except biases and memberships.

    Example:
        >>> network = nn.Linear(2, 1)
        >>> _ = nn.init.constant_(network.weight, 3.0)
        >>> l2_penalty(network, 0.5).item()
        4.5
    """
    left_out = ("bias", "membership")
    every = [p for p in network.named_parameters() if ".bias.original" not in p[0]]
    weights = [weight for name, weight in every if not name.endswith(left_out)]
    return l2 / 2 * torch.stack([weight.square().sum() for weight in weights]).sum()
