"""FedAlt: every round first trains the personal part, then the shared part.

Pillutla, Malik, Mohamed, Rabbat, Sanjabi, Xiao: Federated learning with partial model
personalization, ICML 2022, Algorithm 2 (FedAlt):

    v_i <- v_i - gamma_v grad_v f_i(u, v_i),  K_v times at the received u
    u_i <- u_i - gamma_u grad_u f_i(u_i, v_i),  K_u times from u, at the new v_i
    u <- mean of u_i

| symbol | here |
|---|---|
| u, v_i | the shared and the personal part, set by ``personal`` |
| K_v, K_u | ``personal_share`` of the round's steps, and the rest |
| gamma_v / gamma_u | ``personal_rate``; gamma_u is the optimizer's step size |

With a personal head and equal rates this is FedRep. Blocks of steps alternate, not single steps.
"""

from __future__ import annotations

from medfed.method import *
from medfed.personalize.fedavg import FedAvg


@dataclass(frozen=True)
class FedAlt(FedAvg):
    """FedAvg over the shared part with alternating blocks of local steps.

    Attributes:
        personal_share: Share of the local steps that go to the personal part, in (0, 1).
        personal_rate: Step size of the personal part over that of the shared one, >= 0.
    """

    personal: str | tuple[str, ...] = "task"
    personal_share: Annotated[float, within("(0, 1)")] = 0.5
    personal_rate: Annotated[float, check_not_negative, Range(0.1, 10.0)] = 1.0
    trains_shared: ClassVar[bool] = True
    card: ClassVar[Card] = gradients_only("Pillutla et al. 2022", "personal part", "any part")

    def least_steps(self, steps: int) -> int:
        return max(1, steps - round(self.personal_share * steps))

    def local_steps(self, client: Client, start: Tensors) -> Tensors:
        first, rest = client.shares(self.personal_share)
        rate = self.personal_rate * client.learning_rate
        adapted = client.train(start, update="personal", steps=first, rates={"personal": rate})
        return client.train(adapted, update="shared", steps=rest)
