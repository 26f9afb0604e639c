"""MOON: a loss pulls features to the server model's and away from the client's last model's.

Li, He, Song: Model-contrastive federated learning, CVPR 2021, Algorithm 1 and Equations 3 and 4:

    f_i(w) = task loss + mu * l,
    l = -log exp(s_g / tau) / (exp(s_g / tau) + exp(s_p / tau)) = softplus((s_p - s_g) / tau)
    s_g = cos(z, z_glob),  s_p = cos(z, z_prev), averaged over the samples of a batch

| symbol | here |
|---|---|
| z, z_glob, z_prev | features under the live, the received and the client's previous model |
| w_i of the client's last round | ``state["previous"]`` |
| mu, tau | ``mu``, ``temperature`` |

Deviations:
- Features are the head's input, averaged over positions, so that segmentation has features, too;
  the paper puts a projection of two layers between them and the head.
- Both fixed models are in evaluation mode, so that dropout does not make equal models differ.
- In a client's first round l is left out: z_prev would be z_glob, and l the constant log 2.
"""

from __future__ import annotations

from medfed.method import *
from medfed.personalize.fedavg import FedAvg


@dataclass(frozen=True)
class MOON(FedAvg):
    """FedAvg with a contrastive loss on features.

    Attributes:
        mu: Weight of the term, >= 0; 0 is FedAvg.
        temperature: tau > 0.
    """

    mu: Annotated[float, check_not_negative, Range(0.1, 10.0)] = 1.0
    temperature: Annotated[float, check_positive] = 0.5
    needs: ClassVar[Needs | None] = "features"
    card: ClassVar[Card] = Card(
        "Li et al. 2021", extra_passes="two forward passes a step",
        client={"personal": 1, "model": 1}, privacy_exposure="outputs",
    )  # fmt: skip

    def client_start(self, weights: Tensors, split: ParameterSplit) -> State:
        return {"previous": {}}

    def local_steps(self, client: Client, start: Tensors) -> Tensors:
        """Trains on the loss with the contrastive term."""
        previous = client.state["previous"]

        def contrast(batch: Batch, live: Mapping[str, Tensor], forward: Forward) -> Tensor:
            z = forward(live, features=True)
            near, far = (forward(w, features=True) for w in (start, previous))
            gap = torch.cosine_similarity(z, far) - torch.cosine_similarity(z, near)
            return self.mu * torch.nn.functional.softplus(gap / self.temperature).mean()

        end = client.train(start, batch_penalty=contrast if previous and self.mu else None)
        client.state["previous"] = end
        return end
