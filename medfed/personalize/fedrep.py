"""FedRep: trains the head with the body frozen, then the body with the head frozen.

Collins, Hassani, Mokhtari, Shakkottai: Exploiting shared representations for personalized
federated learning, ICML 2021, Algorithm 1.

Symbols: φ the shared body, h_i the personal head, τ_h ``head_share`` of the round's budget.
"""

from __future__ import annotations

from medfed.method import *
from medfed.personalize.fedavg import FedAvg


@dataclass(frozen=True)
class FedRep(FedAvg):
    """FedAvg over the body with alternating local steps.

    Attributes:
        head_share: Share of the local steps that go to the head, in (0, 1).
    """

    personal: str | tuple[str, ...] = "task"
    head_share: Annotated[float, within("(0, 1)"), Range(0.1, 0.9, log=False)] = 0.5
    trains_shared: ClassVar[bool] = True
    card: ClassVar[Card] = gradients_only("Collins et al. 2021", "personal part", "the head")

    def least_steps(self, steps: int) -> int:
        return max(1, steps - round(self.head_share * steps))

    def local_steps(self, client: Client, start: Tensors, **more: Any) -> Tensors:
        """Trains the head first, then the body."""
        head, body = client.shares(self.head_share)
        # Two calls, not one with two step sizes: the body must train under the finished head.
        adapted = client.train(start, update="personal", steps=head)
        return client.train(adapted, update="shared", steps=body, **more)
