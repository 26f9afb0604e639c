"""FedAvgM, FedAdagrad, FedAdam and FedYogi: the server steps with an optimizer.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan: Adaptive federated optimization,
ICLR 2021, Algorithm 2. With Delta the mean displacement of the cohort, element by element:

    m <- beta1 m + (1 - beta1) Delta
    v <- v + Delta^2                                          FedAdagrad
    v <- beta2 v + (1 - beta2) Delta^2                        FedAdam
    v <- v - (1 - beta2) Delta^2 sign(v - Delta^2)            FedYogi
    w <- w + eta_g m / (sqrt(v) + tau)

and FedAvgM of Hsu, Qi, Brown: Measuring the effects of non-identical data distribution for
federated visual classification, 2019, Section 4.2, whose sum has no factor 1 - beta, so that under
a constant Delta the steps grow to Delta / (1 - beta):

    m <- beta m + Delta,   w <- w + eta_g m

| symbol | here |
|---|---|
| w (the paper's x), m, v | ``server["shared"]``, ``server["momentum"]``, ``server["square"]`` |
| Delta | the mean of the replies, weighted as ``weighting`` says |
| eta_g (the paper's eta), beta1, beta2, tau | ``server_lr``, ``beta1``, ``beta2``, ``tau`` |
| beta, m (v of Hsu et al., negative) | ``beta``, ``server["momentum"]`` |

This differs from PyTorch's Adam: v averages the square of Delta, not of m; tau is outside the root,
and bias is not corrected. v starts at tau^2, the least that the paper allows.

Deviations:
- m and v cover parameters. Averaged statistics are averaged as in FedAvg: with an adaptive step a
  running variance could become negative.
- The paper's clients use plain SGD; here the run's optimizer produces Delta.
"""

from __future__ import annotations

from abc import abstractmethod

from medfed.method import *
from medfed.personalize.fedavg import FedAvg


@dataclass(frozen=True)
class ServerOptimizer(FedAvg):
    """FedAvg that passes the mean displacement of the parameters to an optimizer as a gradient.

    Attributes:
        server_lr: eta_g >= 0, the server's step size.
    """

    server_lr: Annotated[float, check_not_negative, Range(0.001, 1.0)] = 1.0
    server_zeros: ClassVar[tuple[str, ...]] = ("momentum",)
    card: ClassVar[Card] = gradients_only(server={"shared": 1, "weights": 1})

    def closed(self, server: State, replies: Replies) -> State:
        """Moves parameters by eta_g times the optimizer's direction, statistics by their mean."""
        mean = self.mean(server, replies, "shared")
        known, direction = self.direction(server, select(mean, server["momentum"]))
        # Added: displacements already point downhill, whereas gradients point uphill.
        moved = add(select(server["shared"], direction), direction, self.server_lr)
        return {**server, **known, "shared": {**add(server["shared"], mean), **moved}}

    @abstractmethod
    def direction(self, server: State, delta: Tensors) -> tuple[State, Tensors]:
        """Returns the optimizer's new memory and its direction."""


@dataclass(frozen=True)
class FedAvgM(ServerOptimizer):
    """FedAvg with momentum at the server.

    Attributes:
        beta: The share of m that remains after a round, in [0, 1); 0 with eta_g = 1 is FedAvg.
    """

    server_lr: float = 1.0  # not tuned
    beta: Annotated[float, within("[0, 1)"), Range(0.5, 0.97, log=False)] = 0.9
    card: ClassVar[Card] = gradients_only("Hsu et al. 2019", server={"shared": 1, "weights": 1})

    def direction(self, server: State, delta: Tensors) -> tuple[State, Tensors]:
        """Beta m + Delta."""
        m = add(delta, server["momentum"], self.beta)
        return {"momentum": m}, m


@dataclass(frozen=True)
class AdaptiveServer(ServerOptimizer):
    """Algorithm 2; each method updates v in its way.

    Attributes:
        beta1: Memory of m, in [0, 1).
        tau: Damps small steps, > 0.
    """

    server_lr: Annotated[float, Range(0.001, 1.0)] = 0.1
    beta1: Annotated[float, within("[0, 1)")] = 0.9
    tau: Annotated[float, check_positive] = 1e-3
    card: ClassVar[Card] = gradients_only("Reddi et al. 2021", server={"shared": 1, "weights": 2})

    def init(self, weights: Tensors, split: ParameterSplit, clients: Sequence[ClientInfo]) -> Start:
        server, client = super().init(weights, split, clients)
        start = {n: torch.full_like(t, self.tau**2) for n, t in server["momentum"].items()}
        return {**server, "square": start}, client

    def direction(self, server: State, delta: Tensors) -> tuple[State, Tensors]:
        """M / (sqrt(v) + tau)."""
        b, m = self.beta1, server["momentum"]
        m = {n: b * m[n] + (1 - b) * d for n, d in delta.items()}
        v = {n: self.second(server["square"][n], d.square()) for n, d in delta.items()}
        way = {n: t / (v[n].sqrt() + self.tau) for n, t in m.items()}
        return {"momentum": m, "square": v}, way

    @abstractmethod
    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """Returns the new v from the old one and Delta^2."""


@dataclass(frozen=True)
class FedAdagrad(AdaptiveServer):
    """Divides steps by the sum of all displacements so far."""

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """V + Delta^2."""
        return v + square


@dataclass(frozen=True)
class FedAdam(AdaptiveServer):
    """Divides steps by the recent displacements.

    Attributes:
        beta2: Memory of v, in [0, 1).
    """

    beta2: Annotated[float, within("[0, 1)")] = 0.99

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """beta2 v + (1 - beta2) Delta^2."""
        return self.beta2 * v + (1 - self.beta2) * square


@dataclass(frozen=True)
class FedYogi(FedAdam):
    """FedAdam whose v changes by at most (1 - beta2) Delta^2, so that it falls slowly."""

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """V - (1 - beta2) Delta^2 sign(v - Delta^2)."""
        return v - (1 - self.beta2) * square * torch.sign(v - square)
