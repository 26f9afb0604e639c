"""Shared by all methods with quantised personal models, which differ in their local steps.

A client has 2^bits centres per quantised parameter, initialised by k-means of the initial weights.
The first and the last layer, biases and normalisation stay in full precision; clients may have
different bits. After the main phase the weights move to their centres once; the remaining rounds
train the unquantised parameters and the centres, and each weight keeps its centre. The quantised
model is always the one that is evaluated and exported.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import TypeVar

from torch.nn.modules.conv import _ConvNd

from medfed.federation.split import aliases, frozen_names, match
from medfed.functional import quantize as maths
from medfed.functional.kmeans import initial_centers
from medfed.method import *

FULL = 32
LARGEST = 8
Bits = Mapping[str, int]
Model = Mapping[str, Tensor]
_V = TypeVar("_V")


def layer_weights(network: nn.Module) -> tuple[str, ...]:
    """Names the weights of convolutions and linear layers, in the order in which they were added.

    Layers are recognised by their type; biases and normalisation are not included. If a layer
    trains an adapter in place of its weight, the adapter's two matrices are named.

    Example:
        >>> layer_weights(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)))
        ('0.weight', '2.weight')
    """
    return tuple(name for layer in _layers(network) for name in layer)


def _layers(network: nn.Module) -> list[tuple[str, ...]]:
    frozen = frozen_names(network)
    trained = [n for n, _ in network.named_parameters() if n not in frozen]
    layers = []
    for name, module in network.named_modules():
        if isinstance(module, _ConvNd | nn.Linear):
            prefix = f"{name}." if name else ""
            weight, inside = f"{prefix}weight", f"{prefix}parametrizations.weight."
            if names := tuple(n for n in trained if n == weight or n.startswith(inside)):
                layers.append(names)
    return layers


def quantized_names(network: nn.Module, full_precision: Sequence[str] | None) -> tuple[str, ...]:
    """Names the quantised parameters: all weights but those of the patterns, or of both end layers.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
        >>> quantized_names(net, None), quantized_names(net, ["2.*"])
        (('1.weight',), ('0.weight', '1.weight'))
    """
    if full_precision is None:
        return tuple(name for layer in _layers(network)[1:-1] for name in layer)
    weights = layer_weights(network)
    trained = {n for n, _ in network.named_parameters()}
    known = {n: entry for n, entry in aliases(network).items() if entry in trained}
    patterns = dict.fromkeys(full_precision, True)
    exact = {known[n] for n in matching(patterns, known, "full_precision")}
    return tuple(n for n in weights if n not in exact)


def matching(patterns: Mapping[str, _V], names: Iterable[str], key: str) -> dict[str, _V]:
    """Gives every matched name the value of the first pattern that matches it.

    Example:
        >>> matching({"a.*": 2, "*": 3}, ["a.weight", "b.weight"], "layer_bits")
        {'a.weight': 2, 'b.weight': 3}
    """
    kind = "quantised weight" if key == "layer_bits" else "parameter"
    matched = match(patterns, names, f"The pattern {{!r}} of algorithm.{key} matches no {kind}")
    return {n: next(v for p, v in patterns.items() if fnmatchcase(n, p)) for n in matched}


def check_bits(key: str, value: object, fractional: bool = False) -> None:
    """Checks a number of bits: 1 to 8, or 32 for full precision.

    Example:
        >>> check_bits("algorithm.bits", 9)
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.ConfigError: algorithm.bits must be a whole number from 1 to 8 or \
32, not 9.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        allowed = 1 <= value <= LARGEST or value == FULL
        if allowed and (fractional or value == int(value)):
            return
    kind = "a number" if fractional else "a whole number"
    ends = f"from 1 to {LARGEST} or {FULL}"
    raise ConfigError(f"{key} must be {kind} {ends}, not {value!r}.")


def check_each(key: str, bits: Bits) -> None:
    """Checks the bits of each name."""
    for name, value in bits.items():
        check_bits(f"{key}.{name}", value)


def assign_bits(bits: float, clients: Sequence[str], fixed: Bits | None = None) -> dict[str, int]:
    """Assigns whole numbers of bits whose mean is ``bits``, or as close as possible.

    Clients get the whole number below or above, spread evenly over their order, so that neighbours
    in the order, which may be similar, get both.

    Example:
        >>> assign_bits(2.75, ["a", "b", "c", "d"])
        {'a': 3, 'b': 3, 'c': 2, 'd': 3}
        >>> assign_bits(2.5, ["a", "b", "c"], {"a": 8})
        {'a': 8, 'b': 3, 'c': 2}
    """
    fixed = fixed or {}
    for client in fixed:
        if client not in clients:
            hint = did_you_mean(client, clients) or f"; the clients are {', '.join(clients)}"
            raise ConfigError(f"algorithm.client_bits names no client {client!r}{hint}.")
    low, assigned = math.floor(bits), dict(fixed)
    for i, client in enumerate(c for c in clients if c not in fixed):
        above = math.floor((i + 1) * (bits - low) + 0.5) - math.floor(i * (bits - low) + 0.5)
        assigned[client] = low + above
    return {c: assigned[c] for c in clients}


@contextmanager
def finite(weights: Mapping[str, Tensor], centers: Mapping[str, Tensor]) -> Iterator[None]:
    """Raises an error that training diverged, if this makes the body fail."""
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
    """x <- prox_x(x), c <- prox_c(c - eta_2 h), h at the quantised new x on the same batch."""

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
        """Takes the part of a local step that follows the optimizer's step."""
        if not self.centers:
            return
        with finite(weights, self.centers):
            if self._before:
                self._soft_loss(weights, grad_at)
            tau, nearest = self._strength * self._lr / 2, {}
            for name, centers in self.centers.items():
                x, nearest[name] = maths.prox_quantize(weights[name], centers, tau)
                weights[name].copy_(x)
            if self._center_lr > 0:
                self._move_centers(weights, nearest, grad_at)
        if self._before:
            self._before = {n: t.clone() for n, t in weights.items()}

    def _softly(self, weights: Mapping[str, Tensor]) -> Tensors:
        """The quantised parameters as the soft quantiser gives them."""
        assert self._sharpness is not None
        live, sharpness = select(weights, self.centers), self._sharpness
        return {
            n: maths.soft_quantize(x.detach(), self.centers[n], sharpness) for n, x in live.items()
        }

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
            value = maths.soft_quantize(x, c, self._sharpness)
            by_x, by_c = torch.autograd.grad(value, (x, c), gradient)
        return by_x, by_c

    def _move_centers(self, weights: Model, nearest: Tensors, grad_at: GradientAt) -> None:
        """A gradient step of the centres, then towards the medians of their weights."""
        soft, lr = self._sharpness is not None, self._center_lr
        gradients = grad_at({**weights, **(self._softly(weights) if soft else nearest)})
        tau = self._strength * lr / 2
        for name, centers in self.centers.items():
            x = weights[name].detach()
            if not soft:
                self.centers[name] = maths.step_centers(centers, gradients[name], x, lr, tau)
                continue
            _, h = self._pulled_back(x, centers, gradients[name])
            self.centers[name] = maths.prox_centers(centers - lr * h, x, centers, tau).sort().values


class FixedAssignment:
    """Fine-tuning: centres follow the gradients of their weights, whose assignment is fixed."""

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
        return {n: maths.assign(model[n], c).to(torch.uint8) for n, c in centers.items()}


def on_centers(centers: Tensors, codes: Tensors) -> Tensors:
    """Returns the weights that the codes stand for."""
    return {n: centers[n][codes[n].long()] for n in codes}


FIT, TUNE = "fit", "tune"


@dataclass(frozen=True)
class QuantizedMethod(OnboardingRules, Algorithm):
    """Trains every client's quantised model alone.

    Attributes:
        bits: Bits per quantised weight, 1 to 8, or 32 for full precision. A mean such as 2.75 gives
            3 bits to some clients and 2 to others, spread evenly over their order.
        client_bits: Bits of named clients, which do not count in the mean.
        layer_bits: Bits of the weights that match a pattern, at every client that quantises.
        full_precision: Patterns of weights that are not quantised; ``None``: those of the first and
            the last layer. Biases and normalisation are never quantised.
        finetune_share: The share of last rounds, in [0, 1), that keeps the assignments.
        rounds: Rounds of the run.
        names: The quantised parameters; :meth:`adapted` finds them in the network.
    """

    parts_sent: ClassVar[tuple[str, ...]] = ()
    card: ClassVar[Card] = gradients_only(
        family="quantised model", keeps="everything, quantised", down={}, up={}, server={},
        client={"model": 1},
    )  # fmt: skip
    bits: Annotated[float, partial(check_bits, fractional=True)] = 3
    client_bits: Annotated[Bits | None, check_each] = None
    layer_bits: Annotated[Bits | None, check_each] = None
    full_precision: tuple[str, ...] | None = None
    finetune_share: Annotated[float, within("[0, 1)")] = 0.2
    rounds: int = 10
    names: tuple[str, ...] = ()

    def adapted(self, split: ParameterSplit, network: nn.Module) -> Self:
        """Finds the parameters to quantise; warns if there is none."""
        names = quantized_names(network, self.full_precision)
        matching(self.layer_bits or {}, names, "layer_bits")
        if not names:
            warn(
                "Nothing is quantised, as no layer is left between the first and the last one; "
                "choose a deeper model, or algorithm.full_precision=[] to quantise all layers."
            )
        return replace(self, names=names)

    @property
    def _quantises(self) -> bool:
        """Whether any client may quantise anything."""
        several = {self.bits, *(self.client_bits or {}).values()}
        return bool(self.names) and several != {FULL}

    def vectors(self, split: ParameterSplit, weights: Tensors) -> dict[str, int]:
        quantised = sum(weights[n].numel() for n in self.names)
        return {**super().vectors(split, weights), "quantised": quantised}

    def phases(self, round: int) -> tuple[str, ...]:
        """``fit``, and ``tune`` in the last share of the rounds."""
        tail = min(int(self.finetune_share * self.rounds + 0.5), self.rounds - 1)
        return (TUNE,) if self._quantises and round >= self.rounds - tail else (FIT,)

    def init(self, weights: Tensors, split: ParameterSplit, clients: Sequence[ClientInfo]) -> Start:
        """The server knows the bits of each client; every client starts from the same weights."""
        assigned = assign_bits(self.bits, [c.id for c in clients], self.client_bits)
        bits = {c: torch.tensor(float(b)) for c, b in assigned.items()}
        return {"bits": bits}, {"model": weights, "centers": {}, "codes": {}}

    def scalars(self, round: int) -> dict[str, float]:
        """The numbers that clients receive in a round."""
        return {}

    def scalars_of(self, server: State, client: str) -> dict[str, float]:
        """The bits of a client, which every message to it carries."""
        return {"bits": float(server["bits"][client])} if client in server["bits"] else {}

    def round(self, server: State, cohort: Sequence[str], round: int) -> ServerRound:
        (phase,) = self.phases(round)
        scalars = self.scalars(round)
        yield {c: Message(phase, scalars={**scalars, **self.scalars_of(server, c)}) for c in cohort}
        return server

    def fit(self, client: Client, message: Message) -> Message:
        """Trains x and its centres, or fine-tunes at fixed assignments."""
        if message.phase == TUNE:
            self.tune(client, message)
        else:
            self.advance(client, message, self.present_centers(client, message))
        return Message(message.phase)

    @abstractmethod
    def advance(self, client: Client, message: Message, centers: Tensors) -> None:
        """Takes the local steps of the main phase; reads and updates the client's state."""

    def tune(self, client: Client, message: Message) -> None:
        """Fixes the assignments, then trains unquantised parameters and centres."""
        state = client.state
        centers = self.present_centers(client, message)
        codes = state["codes"] or coded(state["model"], centers)
        start = {**state["model"], **on_centers(centers, codes)}
        after = FixedAssignment(centers, codes, message.scalars.get("center_lr", 0.0))
        state["model"] = client.train(start, after_step=after)
        state["centers"], state["codes"] = after.centers, codes

    def layer_bits_of(self, message: Message) -> dict[str, int]:
        """Returns the bits of the parameters that a client quantises."""
        bits = int(message.scalars.get("bits", self.bits))
        if bits == FULL:
            return {}
        widths = matching(self.layer_bits or {}, self.names, "layer_bits")
        every = {n: widths.get(n, bits) for n in self.names}
        return {n: b for n, b in every.items() if b != FULL}

    def present_centers(self, client: Client, message: Message) -> Tensors:
        """Returns a client's centres, initially those of the initial weights."""
        return client.state["centers"] or {
            n: self.first_centers(client.state["model"][n], b)
            for n, b in self.layer_bits_of(message).items()
        }

    def first_centers(self, x: Tensor, bits: int) -> Tensor:
        """Returns the initial centres of a parameter."""
        return initial_centers(x, bits)

    def broadcast(self, server: State, client: str) -> Message:
        return Message("deliver", scalars=self.scalars_of(server, client))

    def personal_model(self, client: Client, message: Message) -> Tensors:
        model, state = client.state["model"], client.state
        centers = self.present_centers(client, message)
        if state["codes"]:
            return {**model, **on_centers(centers, state["codes"])}
        return {**model, **{n: maths.quantize(model[n], c) for n, c in centers.items()}}

    def onboard(self, client: Client, message: Message) -> Tensors:
        """Quantises the received model and trains its free parameters, or trains from the start."""
        client.state["model"] = self.onboarding_start(client, message)
        if message.parts:
            self.tune(client, Message("onboard", scalars=self.scalars(self.rounds - 1)))
        else:
            opening = Message("onboard", scalars=self.scalars(0))
            self.advance(client, opening, self.present_centers(client, opening))
        return self.personal_model(client, message)

    def centers(self, client: Client, message: Message) -> Tensors:
        """The centres of the quantised parameters, in ascending order."""
        present = self.present_centers(client, message)
        return {n: c.sort().values for n, c in present.items()}


def scaled_centers(x: Tensor, bits: int) -> Tensor:
    """Returns centres for a weight tensor: the scaled signs for one bit, else its k-means.

    The scaled signs nearest to x in the Euclidean norm are plus and minus mean |x|.

    Example:
        >>> scaled_centers(torch.tensor([-3.0, 1.0]), bits=1)
        tensor([-2.,  2.])
    """
    if bits > 1:
        return initial_centers(x, bits)
    scale = x.detach().abs().mean()
    return torch.stack([-scale, scale])
