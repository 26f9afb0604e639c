"""What the quantising methods do after each gradient step of a client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from medfed.common.errors import ConfigError, NonFiniteError
from medfed.common.tensors import Tensors, gradient_of, select
from medfed.federation.client import GradientAt
from medfed.functional.quantize import assign, prox_quantize, soft_quantize
from medfed.functional.quantize_centers import prox_centers, step_centers


@contextmanager
def finite(weights: Mapping[str, Tensor], centers: Mapping[str, Tensor]) -> Iterator[None]:
    """Says that training diverged where that is why its body fails."""
    try:
        yield
    except ValueError as error:
        values = [*weights.values(), *centers.values()]
        if isinstance(error, ConfigError) and all(bool(t.isfinite().all()) for t in values):
            raise
        raise NonFiniteError(
            "the weights or their centres became NaN or infinite; lower optimizer.lr or "
            "algorithm.center_lr, or set local.clip"
        ) from error


class ProximalStep:
    """x <- prox_x(x), c <- prox_c(c - eta_2 h), h at the quantised new x on the same batch.

    Args:
        start: The model before the first step.
        centers: The centres of each quantised parameter; replaced by step after step.
        strength: lambda.
        lr: eta_1, the optimizer's step size.
        center_lr: eta_2.
        sharpness: P of the soft quantiser; ``None``: hard.
    """

    def __init__(
        self,
        start: Mapping[str, Tensor],
        centers: Tensors,
        strength: float,
        lr: float,
        center_lr: float = 0.0,
        sharpness: float | None = None,
    ) -> None:
        self.centers = dict(centers)
        self._strength, self._lr, self._center_lr = strength, lr, center_lr
        self._sharpness = sharpness
        self._before: Tensors = {}
        if centers and sharpness is not None:
            self._before = {n: t.clone() for n, t in start.items()}

    def __call__(self, weights: Mapping[str, Tensor], grad_at: GradientAt) -> None:
        """Takes the part of a local step that follows the optimizer's."""
        if not self.centers:
            return
        with finite(weights, self.centers):
            if self._before:
                self._soft_loss(weights, grad_at)
            tau, nearest = self._strength * self._lr / 2, {}
            for name, centers in self.centers.items():
                live = weights[name].detach()
                _, nearest[name] = prox_quantize(live, centers, tau, out=live)
            if self._center_lr > 0:
                self._move_centers(weights, nearest, grad_at)
        if self._before:
            self._before = {n: t.clone() for n, t in weights.items()}

    def _softly(self, weights: Mapping[str, Tensor]) -> Tensors:
        """The quantised parameters as the soft quantiser gives them."""
        assert self._sharpness is not None
        live, sharpness = select(weights, self.centers), self._sharpness
        return {n: soft_quantize(x.detach(), self.centers[n], sharpness) for n, x in live.items()}

    def _soft_loss(self, weights: Mapping[str, Tensor], grad_at: GradientAt) -> None:
        """Subtracts eta_1 times the gradient of f(Q(x)) at the x before the optimizer's step."""
        before = {n: self._before[n] for n in weights}
        gradients = grad_at({**before, **self._softly(before)})
        for name, tensor in weights.items():
            gradient = gradients[name]
            if name in self.centers:
                gradient, _ = self._pulled_back(before[name], self.centers[name], gradient)
            tensor.sub_(gradient, alpha=self._lr)

    def _pulled_back(self, x: Tensor, centers: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient at soft Q(x) as one with respect to x and to the centres."""
        assert self._sharpness is not None
        with torch.enable_grad():
            x, c = x.detach().requires_grad_(), centers.detach().requires_grad_()
            value = soft_quantize(x, c, self._sharpness)
            by_x, by_c = torch.autograd.grad(value, (x, c), gradient)
        return by_x, by_c

    def _move_centers(
        self, weights: Mapping[str, Tensor], nearest: Tensors, grad_at: GradientAt
    ) -> None:
        """A gradient step of the centres, then towards the medians of their weights."""
        soft, lr = self._sharpness is not None, self._center_lr
        gradients = grad_at({**weights, **(self._softly(weights) if soft else nearest)})
        tau = self._strength * lr / 2
        for name, centers in self.centers.items():
            x = weights[name].detach()
            if not soft:
                self.centers[name] = step_centers(centers, gradients[name], x, lr, tau)
                continue
            _, h = self._pulled_back(x, centers, gradients[name])
            self.centers[name] = prox_centers(centers - lr * h, x, centers, tau).sort().values


class FixedAssignment:
    """Fine-tuning: centres follow the gradients of their weights, whose assignment is fixed.

    Args:
        centers: The centres of each quantised parameter; they need not stay in order.
        codes: The index of each weight's centre.
        lr: Step size of the centres.
    """

    def __init__(self, centers: Tensors, codes: Tensors, lr: float) -> None:
        self.centers = dict(centers)
        self._codes = {n: t.long() for n, t in codes.items()}
        self._lr = lr

    def __call__(self, weights: Mapping[str, Tensor], grad_at: GradientAt) -> None:
        """Puts every quantised weight on its centre, moved by the step's own gradient."""
        for name, codes in self._codes.items():
            centers = self.centers[name]
            h = torch.zeros(len(centers), dtype=torch.float64, device=centers.device)
            h.index_add_(0, codes.flatten(), gradient_of(weights[name]).flatten().double())
            self.centers[name] = (centers.double() - self._lr * h).to(centers.dtype)
            weights[name].copy_(self.centers[name][codes])


def coded(model: Mapping[str, Tensor], centers: Tensors) -> Tensors:
    """Returns the index of each quantised weight's centre as one byte, by parameter."""
    with finite(model, centers):
        return {n: assign(model[n], c).to(torch.uint8) for n, c in centers.items()}


def on_centers(centers: Tensors, codes: Tensors) -> Tensors:
    """Returns the weights that the codes stand for."""
    return {n: centers[n][codes[n].long()] for n in codes}
