"""FedNova: displacements are divided by the steps behind them before they are averaged.

Wang, Liu, Liang, Joshi, Poor: Tackling the objective inconsistency problem in heterogeneous
federated optimization, NeurIPS 2020, Equation 8:

    w <- w + tau_eff sum_i p_i (w_i - w) / a_i,   tau_eff = sum_i p_i a_i

A client that takes more steps pulls FedAvg's model to its own optimum. Here each counts by p_i.

| symbol | here |
|---|---|
| w, w_i - w | ``server["shared"]``, the reply's ``shared``, divided by a_i |
| a_i, the length of the client's coefficients | ``client.effective_step_length(steps)`` / eta |
| p_i | ``weighting``, over the clients of the round |

Where all clients take equally many steps (``local.steps``), it is FedAvg; with ``local.epochs`` it
is not.

Deviations: a_i is how far the run's optimizer goes along a constant gradient of length eta, which
with momentum beta is the paper's sum over k of (1 - beta^k) / (1 - beta). Only parameters are
divided: an extrapolated running variance may become negative. Optimizers whose steps are not
proportional to the gradient, such as Adam, are refused.
"""

from __future__ import annotations

import numpy as np

from medfed.method import *
from medfed.personalize.fedavg import FedAvg


@dataclass(frozen=True)
class FedNova(FedAvg):
    """FedAvg of displacements per step.

    Attributes:
        statistics: The averaged buffers; :meth:`adapted` finds them in the network.
    """

    statistics: tuple[str, ...] = ()
    supports_missing_channels: ClassVar[bool] = False
    fresh_optimizer: ClassVar[bool] = True
    card: ClassVar[Card] = gradients_only("Wang et al. 2020", tasks="all, with optimizer=sgd")

    def adapted(self, split: ParameterSplit, network: nn.Module) -> Self:
        return replace(self, statistics=tuple(n for n in split.shared if n in split.buffers))

    def fit(self, client: Client, message: Message) -> Message:
        """Replies with the displacement per step, and with the number of steps."""
        reply = super().fit(client, message)
        rate = client.learning_rate
        steps = client.effective_step_length(client.steps) / rate if rate else float(client.steps)
        parts = {"shared": self.scaled(reply.parts["shared"], 1 / steps)}
        return replace(reply, parts=parts, scalars={"steps": steps})

    def closed(self, server: State, replies: Replies) -> State:
        """Adds tau_eff times the mean displacement per step."""
        steps = [message.scalars["steps"] for message in replies.values()]
        effective = float(np.average(steps, weights=self.weights(server, replies)))
        update = self.scaled(self.mean(server, replies, "shared"), effective)
        return {**server, "shared": add(server["shared"], update)}

    def scaled(self, update: Tensors, factor: float) -> Tensors:
        """Returns a displacement whose parameters are multiplied.

        Example:
            >>> method = FedNova(statistics=("running_var",))
            >>> method.scaled({"w": torch.ones(1), "running_var": torch.ones(1)}, 3.0)
            {'w': tensor([3.]), 'running_var': tensor([1.])}
        """
        return {n: t if n in self.statistics else t * factor for n, t in update.items()}
