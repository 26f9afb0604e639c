"""FedBABU: the head keeps its initial values while the body trains; then all fine-tune.

Oh, Kim, Yun: FedBABU: Toward enhanced representation for federated image classification, ICLR 2022,
Algorithm 1 and the personalisation after it.

Symbols: theta_ext the body, the shared part, averaged; theta_cls the head, the personal part, which
keeps its initial value, common to all, in every federated round. Then each client trains body and
head on its own data.

Deviations:
- As in ``algorithm=finetune``, the last ``local_share`` of the run's rounds is local, so that
  methods are compared on equal budgets; earlier rounds are evaluated with the initial head.
- Running statistics that stay with the client follow its batches, including those of the head.
"""

from __future__ import annotations

from medfed.method import *
from medfed.personalize.finetune import FineTune


@dataclass(frozen=True)
class FedBABU(FineTune):
    """FedAvg over the body under a head that does not move, then fine-tuning of both.

    Attributes:
        local_share: See `FineTune`; above 0, as only local rounds train the head.
    """

    personal: str | tuple[str, ...] = "task"
    local_share: Annotated[float, within("(0, 1]"), Range(0.05, 0.5, log=False)] = 0.2
    trains_shared: ClassVar[bool] = True
    card: ClassVar[Card] = gradients_only(
        "Oh et al. 2022", "personal part", "a copy, in the last rounds; until then the first head",
        client={"model": 1},
    )  # fmt: skip

    def local_steps(self, client: Client, start: Tensors) -> Tensors:
        return client.train(start, update="shared", statistics=True)
