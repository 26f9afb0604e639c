"""Gradients of batches: the only module that calls ``backward``, and a method's view of a step.

:class:`Gradients` adds the gradient of a step's batches to the network's parameters.
Methods may use :class:`StepGradient` for gradients at other weights, and :class:`WatchedForward`
for the forward passes of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from medfed.common.tensors import Tensors, forget, gradient_of, overwrite
from medfed.federation.budget import Passes
from medfed.federation.client import Batch, BatchPenalty, Outputs, Penalty
from medfed.federation.other_state import OTHER
from medfed.federation.split import modules_of
from medfed.standalone.errors import ConfigError, NonFiniteError, first_line

if TYPE_CHECKING:
    from medfed.federation.engine.private import PrivateGradients
    from medfed.federation.engine.working_network import WorkingNetwork

FIRST_SCALE = 2.0**16  # of the losses in float16, as PyTorch's GradScaler begins
_NOTHING = nullcontext()


@runtime_checkable
class KnownGradient(Protocol):
    """A penalty with a known gradient, so that autograd need not compute it."""

    def add_gradient(self, parameters: Mapping[str, Tensor]) -> None:
        """Adds the gradient to those of the parameters."""


class Gradients:
    """Adds the gradients of batches to a network's parameters, in any precision, and counts passes.

    With `compile`, ``torch.compile`` compiles the loss for full batches that no method watches.
    """

    def __init__(self, loss: Callable[[Batch], Tensor], compile: bool = False) -> None:
        self.loss = loss
        self.compiled_loss = compiled(loss) if compile else None
        self.full_size = 0  # samples of a full batch
        self.backward: Callable[..., None] = torch.Tensor.backward
        # In which losses are computed, not weights, penalties and what a method computes besides.
        self.precision: Callable[[], AbstractContextManager[None]] = nullcontext
        self.half = False  # whether that is float16, whose small gradients need a scaled loss
        self.private: PrivateGradients | None = None  # computes them if noise protects patients
        # Of all clients: passes forward and back, and forward alone.
        self.gradient_passes = self.forward_passes = 0
        self._scale = FIRST_SCALE

    @property
    def passes(self) -> Passes:
        """Passes of batches through the network so far, of all clients."""
        return Passes(self.gradient_passes, self.forward_passes)

    def begin(self, full_size: int) -> None:
        """Starts one client's training."""
        self.full_size = full_size
        self._scale = FIRST_SCALE  # else a result would depend on whoever trained before

    def loss_of(self, batch: Batch) -> Tensor:
        """Returns the loss of a batch, by a forward pass only."""
        self.forward_passes += 1
        with self.precision():
            return self.loss(batch)

    def add(
        self,
        group: Sequence[Batch],
        trained: Mapping[str, Tensor],
        network: WorkingNetwork,
        penalty: Penalty | None = None,
        watch: WatchedForward | None = None,
    ) -> Tensor:
        """Adds the gradients of the mean loss over a group's samples, and of the penalty.

        In float16 a gradient that overflows is computed again from a loss of half the scale, so
        that no step is lost; the repeated pass leaves nothing else in `network`. `trained` has no
        gradients then. Returns the mean loss without penalty and the term of `watch`.
        """
        if self.private is not None:
            return self._add_private(self.private, group, trained, penalty)
        if len(group) == 1 and not self.half:
            return self._backward(group[0], 1.0, trained, penalty, watch)
        backward = partial(self._backward, trained=trained, penalty=penalty, watch=watch)
        if not self.half:
            return _mean(group, backward)
        # A pass updates running statistics even if its gradients overflow and are discarded.
        before = network.statistics()
        while self._scale >= 1:
            loss = _mean(group, backward, self._scale)
            gradients = [t.grad for t in trained.values() if t.grad is not None]
            torch._foreach_div_(gradients, self._scale)
            # No smaller scale helps if the loss is infinite: the end of the call raises the error.
            finite = torch.stack([t.isfinite().all() for t in gradients]).all()
            if not bool(loss.isfinite()) or bool(finite):
                return loss
            self._scale /= 2
            forget(trained.values())
            network.put_back(before)
        raise NonFiniteError(
            "the gradients overflow in float16; choose trainer.precision=bf16-mixed"
        )

    def _add_private(
        self,
        private: PrivateGradients,
        group: Sequence[Batch],
        trained: Mapping[str, Tensor],
        penalty: Penalty | None,
    ) -> Tensor:
        """Adds noisy gradients of the data, then the exact ones of terms of the weights."""
        with self.precision():
            # The sizes of draws are secret, so every draw of a step weighs the same.
            losses = [private.add(batch, trained, 1 / len(group)) for batch in group]
        self.gradient_passes += len(group)
        loss = torch.stack(losses).sum()
        if isinstance(penalty, KnownGradient):
            with torch.no_grad():
                penalty.add_gradient(trained)
            penalty = None
        with torch.enable_grad():
            terms = [] if private.penalty is None else [private.penalty()]
            loss = loss + sum(t.detach() for t in terms)
            if penalty is not None:
                terms.append(_checked_term(penalty(trained), "penalty"))
            if terms:
                self._differentiate(torch.stack(terms).sum())
        return loss

    def is_full(self, batch: Batch) -> bool:
        """Returns whether a batch has the size of all but the last ones."""
        return size_of(batch) == self.full_size

    def _differentiate(self, loss: Tensor) -> None:
        self.backward(loss)  # the one place where it is called

    def _backward(
        self,
        batch: Batch,
        factor: float,
        trained: Mapping[str, Tensor],
        penalty: Penalty | None,
        watch: WatchedForward | None,
    ) -> Tensor:
        forward = self.loss
        if self.compiled_loss is not None and watch is None and self.is_full(batch):
            forward = self.compiled_loss
        with _NOTHING if torch.is_grad_enabled() else torch.enable_grad():
            with self.precision(), _NOTHING if watch is None else watch.watching():
                loss = forward(batch)
            # Its gradient is added below, which spares autograd a graph over all parameters. Of a
            # scaled loss, or one of several batches, it is a part, so that the factor reaches it.
            closed = None
            if penalty is not None and factor == 1 and isinstance(penalty, KnownGradient):
                closed = penalty
            whole = loss
            if penalty is not None and closed is None:
                whole = loss + _checked_term(penalty(trained), "penalty")
            if watch is not None and (term := watch.penalty(batch, loss)) is not None:
                whole = whole + _checked_term(term, "batch_penalty")
            self._differentiate(whole if factor == 1 else whole * factor)
        if closed is not None:
            with torch.no_grad():
                closed.add_gradient(trained)
        self.gradient_passes += 1
        return loss.detach()


def _checked_term(term: Any, whose: str) -> Any:
    """Returns a term of the loss; 0 without a gradient is none, any other constant a mistake."""
    if isinstance(term, Tensor) and term.requires_grad and not term.ndim:
        return term
    if isinstance(term, Tensor) and term.ndim:
        raise ConfigError(f"The {whose} has shape {[*term.shape]}; return one number, by sum().")
    if not isinstance(term, Tensor | float | int):
        kind = "None" if term is None else f"a {type(term).__name__}"
        raise ConfigError(f"The {whose} returns {kind}; return a tensor with one number.")
    if float(term) != 0:
        raise ConfigError(
            f"The {whose} has no gradient, so that no step would feel it; compute it from the "
            "weights that it is called with, without detach, item and float."
        )
    return term


def _mean(
    group: Sequence[Batch], backward: Callable[[Batch, float], Tensor], scale: float = 1.0
) -> Tensor:
    """The mean loss over a group's samples, whose gradients are added times a scale."""
    sizes = [size_of(batch) for batch in group]
    losses = []
    for batch, size in zip(group, sizes, strict=True):
        loss = backward(batch, scale * size / sum(sizes))
        losses.append(loss * (size / sum(sizes)))
    return torch.stack(losses).sum()


def size_of(batch: Batch) -> int:
    """Returns the number of samples of a batch."""
    return len(next(iter(batch.values())))


@dataclass(eq=False)
class StepGradient:
    """Computes the gradient of a step's batches, or of the next ones, at other parameters.

    Each call restores the live parameters. It also restores the running statistics if the step has
    already updated them; otherwise the first call updates them.
    """

    gradients: Gradients
    groups: list[Sequence[Batch]]  # the step's batches, and those of later steps once they are used
    stream: Iterator[Sequence[Batch]]  # the batches of later steps
    trained: Mapping[str, Tensor]  # the live parameters
    network: WorkingNetwork
    watch: Callable[[BatchPenalty], WatchedForward]
    taken: bool = True  # whether the step itself has passed its batches through the network
    loss: Tensor | None = None  # of the first call, if the step computes none

    def __call__(
        self, at: Mapping[str, Tensor], *, fresh: int = 0, term: BatchPenalty | None = None
    ) -> Tensors:
        """See :class:`medfed.federation.client.GradientAt`."""
        # The values are put into the live tensors, and not passed by functional_call: so the loss
        # may be any function that knows the network.
        statistics = self.network.statistics()
        forget(self.trained.values())
        others = {n: other for n, t in self.trained.items() if (other := at[n]) is not t}
        before = {n: self.trained[n].detach().clone() for n in others}
        overwrite(self.trained, others)
        del others  # `at` may have made them for this call alone
        # Fresh batches come from the stream of the steps, so no later step uses them again.
        while len(self.groups) <= fresh:
            self.groups.append(next(self.stream))
        watch = None if term is None else self.watch(term)
        loss = self.gradients.add(self.groups[fresh], self.trained, self.network, watch=watch)
        result = {n: gradient_of(t).contiguous() for n, t in self.trained.items()}
        forget(self.trained.values())  # the result has their memory
        overwrite(self.trained, before)
        if self.taken or self.loss is not None:
            self.network.put_back(statistics)
        self.loss = loss if self.loss is None else self.loss
        return result


@dataclass(eq=False)
class WatchedForward:
    """The forward passes of a batch, watched while the network computes its loss."""

    network: nn.Module  # in training mode
    trained: Mapping[str, Tensor]  # the live parameters
    head: Sequence[str]  # names of the parameters whose input are the features
    term: BatchPenalty | None  # a penalty of the batch and the forward pass
    outputs: Outputs | None  # changes the network's outputs before the loss
    gradients: Gradients  # gives the precision, and counts the additional forward passes
    loss: Tensor = field(init=False)  # of the batch, under the live weights
    _inputs: tuple[Any, Any] = field(default=((), {}), init=False)
    _tensors: dict[str, Tensor] = field(default_factory=dict, init=False)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Records the passes through the network and changes its outputs within the block."""

        def called(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._inputs, self._tensors = (args, kwargs), {}

        def answered(_: nn.Module, args: Any, output: Any) -> Any:
            self._tensors["outputs"] = output
            return None if self.outputs is None else self.outputs(output)

        hooks = [
            self.network.register_forward_pre_hook(called, with_kwargs=True),
            self.network.register_forward_hook(answered),
            *self._watch_heads(),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _watch_heads(self) -> Iterator[Any]:
        def entered(_: nn.Module, args: Any) -> None:
            if args:  # nothing enters what puts a layer's divided weights together
                self._tensors.setdefault("features", args[0])  # of the head's first layer

        for module in modules_of(self.network, self.head).values() if self.term else ():
            yield module.register_forward_pre_hook(entered)

    def penalty(self, batch: Batch, loss: Tensor) -> Tensor | None:
        """Returns the term of a batch whose loss was computed while watching."""
        self.loss = loss
        return None if self.term is None else self.term(batch, self.trained, self)

    def at(self, inputs: Tensor) -> Tensor:
        """See :class:`medfed.federation.client.Forward`."""
        return self._passed(self.trained, (inputs,), {})

    def __call__(self, weights: Mapping[str, Tensor], *, features: bool = False) -> Tensor:
        """See :class:`medfed.federation.client.Forward`."""
        tensors = self._tensors if weights is self.trained else self._under(weights)
        if not features:
            return tensors["outputs"]
        if "features" not in tensors:
            raise ConfigError(
                "The method needs the input of the network's head, and no layer is known as its "
                "head; name its layers by model.personal."
            )
        entering = tensors["features"]
        return entering.flatten(2).mean(2) if entering.ndim > 2 else entering

    def _under(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Passes the batch through the network with other weights, in evaluation mode."""
        # The head's hooks write to _tensors: the live pass's record is kept aside.
        live, self._tensors = self._tensors, {}
        hooks = list(self._watch_heads())
        try:
            with torch.no_grad():
                output = self._passed(weights, *self._inputs)
            return {**self._tensors, "outputs": output}
        finally:
            self._tensors = live
            for hook in hooks:
                hook.remove()

    def _passed(self, weights: Mapping[str, Tensor], args: Any, kwargs: Any) -> Tensor:
        """Passes inputs through the network, in evaluation mode."""
        flags = {m: m.training for m in self.network.modules()}
        self.network.eval()
        self.gradients.forward_passes += 1
        entries = {n: t for n, t in weights.items() if n != OTHER}
        try:
            with self.gradients.precision():
                return functional_call(self.network, entries, args, kwargs)  # type: ignore[no-any-return]
        finally:
            for module, flag in flags.items():
                module.training = flag


def compiled(loss: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
    """Returns a loss that is compiled on first use, once per structure of its batches.

    Shapes are fixed, so the code for a batch depends only on the batch, not on earlier ones: a
    resumed run gives equal results. Random numbers equal those of uncompiled code.
    """
    from torch._dynamo.exc import TorchDynamoException  # slow to import
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ConfigError(
            "local.compile=true needs a C++ compiler on this machine; install g++ (Debian: "
            "apt-get install g++) or choose local.compile=false."
        ) from error
    quick = torch.compile(loss, dynamic=False, options={"fallback_random": True})

    def tried(batch: Batch) -> Tensor:
        try:
            return quick(batch)
        except TorchDynamoException as error:
            raise ConfigError(
                f"PyTorch cannot compile the loss of this model ({first_line(error)}); choose "
                "local.compile=false."
            ) from error

    return tried
