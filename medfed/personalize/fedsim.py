"""FedSim: every local step moves the personal and the shared part, with two step sizes.

Pillutla, Malik, Mohamed, Rabbat, Sanjabi, Xiao: Federated learning with partial model
personalization, ICML 2022, Algorithm 3 (FedSim), both gradients at the old (u_i, v_i):

    v_i <- v_i - gamma_v grad_v f_i(u_i, v_i),   u_i <- u_i - gamma_u grad_u f_i(u_i, v_i)

| symbol | here |
|---|---|
| u, v_i | the shared and the personal part, set by ``personal`` |
| gamma_v / gamma_u | ``personal_rate``; gamma_u is the optimizer's step size |

With equal step sizes it is FedPer, so the default differs; the paper tunes both.
"""

from __future__ import annotations

from medfed.method import *
from medfed.personalize.fedavg import FedAvg


@dataclass(frozen=True)
class FedSim(FedAvg):
    """FedAvg over the shared part; the personal part has another step size.

    Attributes:
        personal_rate: Step size of the personal part over that of the shared one, >= 0.
    """

    personal: str | tuple[str, ...] = "task"
    personal_rate: Annotated[float, check_not_negative, Range(0.1, 10.0)] = 0.5
    card: ClassVar[Card] = gradients_only("Pillutla et al. 2022", "personal part", "any part")

    def local_steps(self, client: Client, start: Tensors) -> Tensors:
        rate = client.learning_rate
        return client.train(start, rates={"shared": rate, "personal": self.personal_rate * rate})
