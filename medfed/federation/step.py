"""What a method may ask for within a local step: gradients elsewhere, and forward passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from medfed.common.errors import ConfigError
from medfed.common.tensors import Tensors, gradient_of
from medfed.federation.channels_last import ordinary
from medfed.federation.client import Batch, BatchPenalty, Outputs
from medfed.federation.gradients import Gradients
from medfed.federation.plan import forget


class StepGradient:
    """Gives the gradient of a step's batches, or of the next ones, at other parameters.

    The live parameters are put back after each call. The running statistics are, too, where the
    step itself has taken those of its batches; else the first call leaves them.

    Args:
        gradients: Computes them.
        group: The step's batches.
        stream: Those of the steps to come.
        trained: The live parameters.
        buffers: The live running statistics.
        taken: Whether the step itself has passed its batches through the network.

    Attributes:
        loss: Of the first call, where the step itself computes none.
    """

    def __init__(
        self,
        gradients: Gradients,
        group: Sequence[Batch],
        stream: Iterator[Sequence[Batch]],
        trained: Mapping[str, Tensor],
        buffers: Sequence[Tensor],
        taken: bool = True,
    ) -> None:
        self.loss: Tensor | None = None
        self._gradients, self._groups, self._stream = gradients, [group], stream
        self._trained, self._buffers, self._taken = trained, list(buffers), taken

    def __call__(self, at: Mapping[str, Tensor], *, fresh: int = 0) -> Tensors:
        """See :class:`medfed.federation.client.GradientAt`."""
        names = list(self._trained)
        live = [self._trained[n] for n in names]
        statistics = [t.clone() for t in self._buffers]
        kept = [t.detach().clone() for t in live]
        with torch.no_grad():
            torch._foreach_copy_(live, [at[n] for n in names])
        forget(live)
        while len(self._groups) <= fresh:
            self._groups.append(next(self._stream))
        loss = self._gradients.add(self._groups[fresh], self._trained, self._buffers)
        found = {n: ordinary(gradient_of(t)) for n, t in zip(names, live, strict=True)}
        with torch.no_grad():
            torch._foreach_copy_(live, kept)
            if statistics and (self._taken or self.loss is not None):
                torch._foreach_copy_(self._buffers, statistics)
        self.loss = loss if self.loss is None else self.loss
        return found


class Look:
    """Looks into the network while it computes the loss of a batch.

    Args:
        network: The network, in training mode.
        trained: The live parameters.
        head: Names of the parameters of its head, whose input are the features.
        penalty: A term that sees the batch and the forward pass.
        outputs: What becomes of the network's outputs before the loss.
        gradients: Knows the precision, and counts forward passes of its own.

    Attributes:
        loss: Of the batch, under the live weights.
    """

    loss: Tensor

    def __init__(
        self,
        network: nn.Module,
        trained: Mapping[str, Tensor],
        head: Sequence[str],
        penalty: BatchPenalty | None,
        outputs: Outputs | None,
        gradients: Gradients,
    ) -> None:
        self._network, self._trained, self._gradients = network, trained, gradients
        self._penalty, self._outputs = penalty, outputs
        self._heads = _modules(network, head) if penalty is not None else []
        self._inputs: tuple[Any, Any] = ((), {})
        self._seen: dict[str, Tensor] = {}

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Keeps what passes through the network, and has its outputs changed, meanwhile."""

        def called(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._inputs, self._seen = (args, kwargs), {}

        def answered(_: nn.Module, args: Any, output: Any) -> Any:
            self._seen["outputs"] = output
            return None if self._outputs is None else self._outputs(output)

        hooks = [
            self._network.register_forward_pre_hook(called, with_kwargs=True),
            self._network.register_forward_hook(answered),
            *self._watch_heads(),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _watch_heads(self) -> Iterator[Any]:
        def entered(_: nn.Module, args: Any) -> None:
            self._seen.setdefault("features", args[0])  # of the head's first layer

        for module in self._heads:
            yield module.register_forward_pre_hook(entered)

    def penalty(self, batch: Batch, loss: Tensor) -> Tensor | None:
        """Returns the term of a batch whose loss was computed while looking."""
        self.loss = loss
        return None if self._penalty is None else self._penalty(batch, self._trained, self)

    def __call__(self, weights: Mapping[str, Tensor], *, features: bool = False) -> Tensor:
        """See :class:`medfed.federation.client.Forward`."""
        seen = self._seen if weights is self._trained else self._under(weights)
        if not features:
            return seen["outputs"]
        if "features" not in seen:
            raise ConfigError(
                "No layer of the network is known as its head, whose input are the features; name "
                "its layers by model.personal."
            )
        found = seen["features"]
        return found.flatten(2).mean(2) if found.ndim > 2 else found

    def _under(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Passes the batch through the network with other weights, in evaluation mode."""
        flags = {m: m.training for m in self._network.modules()}
        live, self._seen = self._seen, {}
        hooks = list(self._watch_heads())
        args, kwargs = self._inputs
        self._network.eval()
        try:
            with torch.no_grad(), self._gradients.precision():
                output = functional_call(self._network, dict(weights), args, kwargs)
            self._gradients.count_forward()
            return {**self._seen, "outputs": output}
        finally:
            self._seen = live
            for hook in hooks:
                hook.remove()
            for module, flag in flags.items():
                module.training = flag


def _modules(network: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Returns the modules below the network all of whose parameters are among the names."""
    known = {id(p) for n, p in network.named_parameters(remove_duplicate=False) if n in set(names)}
    return [
        module
        for name, module in network.named_modules()
        if name and (own := list(module.parameters())) and all(id(p) in known for p in own)
    ]
