"""Mixtures of a global and local models, by Jacobi ADMM.

The objective of Hanzely, Richtarik: Federated learning of a mixture of global and local models,
2020, Equation 2, solved as proposed in a survey of personalization (there is no paper):

    min sum_i p_i (f_i(x_i) + (lambda/2) |x_i - xbar|^2),   xbar = sum_i p_i x_i

It is sum_i p_i (f_i(x_i) + (lambda/2) |x_i|^2) - (lambda/2) |z|^2 with the constraint z = xbar. All
clients step in parallel, then the server:

    x_i <- argmin f_i(x) + (lambda/2) |x|^2 - <lambda z + rho r, x> + (rho_i/2) |x - x_i|^2
    z <- (rho N xbar - lambda z) / (rho N - lambda)
    r <- N (z - xbar)

| symbol | here |
|---|---|
| x_i | ``state["model"]``; what is evaluated |
| z, r | ``server["shared"]``, ``server["residual"]`` |
| lambda, rho | ``strength``, ``rho`` |
| rho_i = rho N p_i | in the message |
| p_i | ``weighting``; the survey's are 1/N |

The constraint's dual variable is lambda z at every step, so it need not be stored. The survey
requires rho N > lambda, which is not enough: with lambda = 3 and five clients rho = 0.9 diverges.
This method requires rho >= lambda.

Deviations:
- The quadratic terms are combined into one around (lambda z + rho r + rho_i x_i) / (lambda +
rho_i).
- lambda z + rho r is sent as one vector.
- The round's steps of the run's optimizer from x_i approximate the minimum.
- z and r cover shared parameters.
"""

from __future__ import annotations

from medfed.method import *
from medfed.personalize.fedavg import KeepsModel
from medfed.personalize.mixture_base import MixtureMethod


@dataclass(frozen=True)
class MixtureADMM(KeepsModel, MixtureMethod):
    """Personal models, pulled to their mean.

    Attributes:
        rho: At least lambda; ``None`` uses lambda. A large rho converges slowly.
    """

    strength: Annotated[float, check_positive, Range(0.01, 10.0)] = 1.0  # 0: local training
    rho: float | None = None
    server_zeros: ClassVar[tuple[str, ...]] = ("residual",)
    card: ClassVar[Card] = gradients_only(
        "survey; Hanzely, Richtárik 2020", "second model", "all, pulled to the mean",
        down={"weights": 1}, server={"shared": 1, "weights": 1}, client={"model": 1},
        full_cohort=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rho is not None and not self.rho >= self.strength:
            raise ConfigError(
                f"algorithm.rho must be at least algorithm.strength={self.strength}, below which "
                f"the method may diverge, not {self.rho}."
            )

    def round(self, server: State, cohort: Sequence[str], round: int) -> ServerRound:
        count, rho = len(cohort), self.strength if self.rho is None else self.rho
        z, r = server["shared"], server["residual"]
        sizes = dict(zip(cohort, self.weights(server, cohort), strict=True))
        pull = {n: self.strength * z[n] + rho * r[n] for n in r}
        replies = yield {
            c: Message("fit", {"pull": pull}, {"rho": rho * count * s / sum(sizes.values())})
            for c, s in sizes.items()
        }
        mean = self.mean(server, replies, "shared")
        whole = rho * count
        z = {n: (whole * mean[n] - self.strength * z[n]) / (whole - self.strength) for n in r}
        r = {n: count * t for n, t in subtract(z, mean).items()}
        return {**server, "shared": {**mean, **z}, "residual": r}

    def fit(self, client: Client, message: Message) -> Message:
        pull, rho = message.parts["pull"], message.scalars["rho"]
        model, weight = client.state["model"], self.strength + rho
        anchor = {n: t / weight for n, t in add(pull, model, rho).items()}
        end = client.train(model, penalty=Proximity(weight, anchor))
        client.state["model"] = end
        return Message("fit", {"shared": select(end, client.split.shared)})
