"""Losses and gradients of batches: the only place that calls ``backward``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from medfed.common.errors import NonFiniteError
from medfed.federation.budget import Passes
from medfed.federation.client import Batch, Penalty
from medfed.federation.plan import forget

FIRST_SCALE = 2.0**16  # of the losses in float16, as PyTorch's GradScaler begins


class Looking(Protocol):
    """Sees the network while it computes a loss; see :class:`medfed.federation.step.Look`."""

    def looking(self) -> AbstractContextManager[None]:
        """Returns the context in which a loss is computed."""

    def penalty(self, batch: Batch, loss: Tensor) -> Tensor | None:
        """Returns a term to be added to the loss of a batch."""


@runtime_checkable
class Closed(Protocol):
    """A penalty whose gradient is known, so that autograd need not find it."""

    def add_gradient(self, parameters: Mapping[str, Tensor]) -> None:
        """Adds the gradient to those of the parameters."""


class Gradients:
    """Adds the gradients of batches to a network's parameters, in any precision, and counts passes.

    Args:
        loss: Gives the scalar loss of a batch under the network.

    Attributes:
        backward: Computes gradients of a loss.
        precision: The context in which losses are computed, such as one of mixed precision;
            weights, penalties and whatever else a method computes stay as they are.
        half: Whether it computes in float16, whose small gradients need a scaled loss.
        quick: The loss compiled, for batches of ``full`` samples into whose passes nobody looks.
        full: See there.
    """

    def __init__(self, loss: Callable[[Batch], Tensor]) -> None:
        self.loss = loss
        self.quick: Callable[[Batch], Tensor] | None = None
        self.full = 0
        self.backward: Callable[[Tensor], None] = torch.Tensor.backward
        self.precision: Callable[[], AbstractContextManager[None]] = nullcontext
        self.half = False
        self._gradient_passes = self._forward_passes = 0
        self._scale = FIRST_SCALE

    @property
    def passes(self) -> Passes:
        """Passes of batches through the network so far, of all clients."""
        return Passes(self._gradient_passes, self._forward_passes)

    def begin(self) -> None:
        """Starts the scale of float16 anew, lest a result depend on whoever trained before it."""
        self._scale = FIRST_SCALE

    def count_forward(self, passes: int = 1) -> None:
        """Counts forward passes that are made elsewhere."""
        self._forward_passes += passes

    def loss_of(self, batch: Batch) -> Tensor:
        """Returns the loss of a batch, a forward pass alone."""
        self.count_forward()
        with self.precision():
            return self.loss(batch)

    def add(
        self,
        group: Sequence[Batch],
        trained: Mapping[str, Tensor],
        buffers: Sequence[Tensor],
        penalty: Penalty | None = None,
        look: Looking | None = None,
    ) -> Tensor:
        """Adds the gradients of the mean loss over a group's samples, and of the penalty.

        In float16 a gradient that overflows is computed again from a loss of half the scale, so
        that a step remains a step.

        Args:
            group: Batches; each counts by its samples.
            trained: The parameters, without gradients where ``half``.
            buffers: What a pass changes beside them, and a repeated one must not change twice.
            penalty: A term added to the loss.
            look: Looks into the network meanwhile; its term is added, too.

        Returns:
            The mean loss, without the penalties.

        Raises:
            NonFiniteError: If gradients overflow at any scale.
        """
        if not self.half:
            return self._add(group, trained, penalty, look)
        before = [t.clone() for t in buffers]
        while self._scale >= 1:
            loss = self._add(group, trained, penalty, look, self._scale)
            found = [t.grad for t in trained.values() if t.grad is not None]
            torch._foreach_div_(found, self._scale)
            if not bool(loss.isfinite()) or bool(_finite(found)):
                return loss
            self._scale /= 2
            forget(trained.values())
            for tensor, value in zip(buffers, before, strict=True):
                tensor.copy_(value)
        raise NonFiniteError(
            "the gradients overflow in float16; choose trainer.precision=bf16-mixed"
        )

    def _add(
        self,
        group: Sequence[Batch],
        trained: Mapping[str, Tensor],
        penalty: Penalty | None,
        look: Looking | None,
        scale: float = 1.0,
    ) -> Tensor:
        if len(group) == 1:
            return self._backward(group[0], trained, penalty, look, scale)
        sizes = [_size(batch) for batch in group]
        losses = []
        for batch, size in zip(group, sizes, strict=True):
            share = size / sum(sizes)
            loss = self._backward(batch, trained, penalty, look, scale * size / sum(sizes))
            losses.append(loss * share)
        return torch.stack(losses).sum()

    def _backward(
        self,
        batch: Batch,
        trained: Mapping[str, Tensor],
        penalty: Penalty | None,
        look: Looking | None,
        factor: float,
    ) -> Tensor:
        forward = self.loss
        if self.quick is not None and look is None and _size(batch) == self.full:
            forward = self.quick
        with torch.enable_grad():
            with self.precision(), nullcontext() if look is None else look.looking():
                loss = forward(batch)
            # Of a scaled loss autograd adds it, so that its share is rounded as it always was.
            closed = None
            if penalty is not None and factor == 1 and isinstance(penalty, Closed):
                closed = penalty
            whole = loss if penalty is None or closed else loss + penalty(trained)
            if look is not None and (term := look.penalty(batch, loss)) is not None:
                whole = whole + term
            self.backward(whole if factor == 1 else whole * factor)
        if closed is not None:
            with torch.no_grad():
                closed.add_gradient(trained)
        self._gradient_passes += 1
        return loss.detach()


def _size(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def _finite(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([t.isfinite().all() for t in tensors]).all()
