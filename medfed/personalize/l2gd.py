"""L2GD: gradient steps on personal models, and at random times a step towards their mean.

Hanzely, Richtarik: Federated learning of a mixture of global and local models, 2020, Equation 2
and Algorithm 1 (Loopless Local Gradient Descent):

    min sum_i p_i (f_i(x_i) + (lambda/2) |x_i - xbar|^2),   xbar = sum_i p_i x_i

At every step one coin decides for all clients. With eta = alpha / (N (1 - p)), kappa = alpha lambda
/ (N p):

    tails, 1 - p:   x_i <- x_i - eta grad f_i(x_i)
    heads, p:       x_i <- (1 - kappa) x_i + kappa xbar,   kappa = eta lambda (1 - p) / p

M heads in a row do not change xbar and give x_i = xbar + (1 - kappa)^M (x_i - xbar): one exchange.
So a round is some tails followed by some heads.

| symbol | here |
|---|---|
| x_i, (1 - kappa)^M | ``state["model"]`` before the heads, ``state["pull"]`` |
| xbar | ``server["shared"]`` |
| lambda | ``strength`` |
| p | 1 / (K + 1) with K the round's budget of steps |
| p_i | ``weighting``; the paper's are 1/N |

Deviations:
- With ``coins=mean`` a round is K tails and one head, the expected numbers, so that budgets are
  equal; ``random`` tosses the coins as in the paper, from ``seed`` and the round.
- eta K, and so kappa = eta K lambda, is ``client.effective_step_length(K)``: momentum leads
  farther. Optimizers whose steps are not proportional to the gradient, such as Adam, are refused.
- kappa is at most 1, as in the paper: a stronger coupling is FedAvg.
"""

from __future__ import annotations

import math
from typing import Literal

from medfed.method import *
from medfed.personalize.fedavg import displacement
from medfed.personalize.mixture_base import MixtureMethod


@dataclass(frozen=True)
class L2GD(MixtureMethod):
    """Personal models, which step towards their mean together.

    Attributes:
        strength: lambda >= 0; 0 is local training.
        coins: How many tails and heads a round has: ``mean``, the expected numbers, or ``random``.
        seed: The run's seed, for the coins.
    """

    strength: Annotated[float, Range(0.01, 10.0)] = 0.1
    coins: Literal["mean", "random"] = "mean"
    seed: int = 0
    fresh_optimizer: ClassVar[bool] = True
    card: ClassVar[Card] = Card(
        "Hanzely, Richtárik 2020", "second model", "all, pulled to the mean", client={"model": 1},
        full_cohort=True, privacy_exposure="several",
    )  # fmt: skip

    def init(self, weights: Tensors, split: ParameterSplit, clients: Sequence[ClientInfo]) -> Start:
        server, client = super().init(weights, split, clients)
        return server, {**client, "pull": {"left": torch.ones((), dtype=torch.float64)}}

    def scalars(self, round: int) -> dict[str, float]:
        tails, heads = numpy_rng(self.seed, round, "coins").random(2)
        return {"tails": tails, "heads": heads} if self.coins == "random" else {}

    def least_steps(self, steps: int) -> int:
        return 1 if self.coins == "random" else steps

    def fit(self, client: Client, message: Message) -> Message:
        """Takes the last round's heads, now that xbar has arrived, then this round's tails."""
        chance, scalars = 1 / (client.steps + 1), message.scalars
        tails = run_of(1 - chance, scalars["tails"]) if scalars else client.steps
        heads = run_of(chance, scalars["heads"]) if scalars else 1
        end = client.train(self.personal_model(client, message), steps=tails)
        kappa = min(1.0, self.strength * client.effective_step_length(client.steps))
        left = torch.tensor((1 - kappa) ** heads, dtype=torch.float64)
        client.state = {"model": end, "pull": {"left": left}}
        return displacement(select(end, client.split.shared), message.parts["shared"])

    def personal_model(self, client: Client, message: Message) -> Tensors:
        """x_i after the heads: xbar + (1 - kappa)^M (x_i - xbar)."""
        model, left = client.state["model"], float(client.state["pull"]["left"])
        mean = select(message.parts["shared"], client.split.parameters("shared"))
        return {**model, **add(mean, subtract(select(model, mean), mean), left)}


def run_of(chance: float, draw: float) -> int:
    """Returns how often a side falls in a row, at least once.

    Example:
        >>> [run_of(0.5, draw) for draw in (0.0, 0.49, 0.51, 0.76)]
        [1, 1, 2, 3]
    """
    return max(1, math.ceil(math.log1p(-draw) / math.log(chance)))
