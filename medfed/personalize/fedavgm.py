"""FedAvgM: FedAvg whose server keeps the momentum of earlier rounds.

Hsu, Qi, Brown: Measuring the effects of non-identical data distribution for federated visual
classification, 2019, Section 4.2; with a server step size as in Reddi et al., ICLR 2021:

    m <- beta m + Delta,   w <- w + eta_g m

| symbol | here |
|---|---|
| w, m (the paper's v, negative) | ``server["shared"]``, ``server["momentum"]`` |
| Delta | the mean displacement of the cohort, weighted as ``weighting`` says |
| beta, eta_g | ``beta``, ``server_lr`` |

The sum has no factor 1 - beta: under a constant Delta the steps grow to Delta / (1 - beta).

Deviation: m covers parameters; averaged statistics are averaged as in FedAvg.
"""

from __future__ import annotations

from medfed.method import *
from medfed.personalize.fedopt import ServerOptimizer


@dataclass(frozen=True)
class FedAvgM(ServerOptimizer):
    """FedAvg with momentum at the server.

    Attributes:
        beta: The share of m that remains after a round, in [0, 1); 0 with eta_g = 1 is FedAvg.
    """

    beta: Annotated[float, within("[0, 1)")] = 0.9
    card: ClassVar[Card] = gradients_only(
        "Hsu et al. 2019",
        server={"shared": 1, "weights": 1},
        tune={"beta": Range(0.5, 0.97, log=False)},
    )

    def direction(self, server: State, delta: Tensors) -> tuple[State, Tensors]:
        """Beta m + Delta."""
        m = add(delta, server["momentum"], self.beta)
        return {"momentum": m}, m
