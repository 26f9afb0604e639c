"""FENDA: a shared body and a personal one side by side, under a personal head that reads both.

Tavakoli, Emerson, Ayromlou et al.: FENDA-FL: Personalized federated learning on heterogeneous
clinical datasets, 2023 (arXiv:2309.16825). With phi_s the shared body, phi_p a client's and W_p its
head,

    prediction = W_p [phi_s(x), phi_p(x)],   joint steps on all three, mean of phi_s

| symbol | here |
|---|---|
| phi_s | ``server["shared"]``; the body of the first of two networks (``canonical=two_bodies``) |
| phi_p, W_p | ``state["personal"]``: the second network, and the head of the first |

A linear head of both features is the sum of a linear head of each, so two complete networks whose
outputs are added are FENDA's. The second has no last bias. The bodies start apart, as they would
else stay equal under equal heads. With phi_p = 0 (after ReLU) it is FedPer, with phi_s = 0 local
training.

Deviation: a head of several layers, such as a U-Net's decoder, is one for each body.
"""

from __future__ import annotations

from medfed.method import *
from medfed.personalize.fedavg import FedAvg


@dataclass(frozen=True)
class FENDA(FedAvg):
    """FedPer over the first of two networks; the second is personal."""

    personal: str | tuple[str, ...] = "task"
    sums: ClassVar[bool] = True
    trains_shared: ClassVar[bool] = True
    card: ClassVar[Card] = gradients_only(
        "Tavakoli et al. 2023", "personal part", "the head and a second body",
        note="a pass goes through two networks",
    )  # fmt: skip

    def split(
        self, network: nn.Module, task_patterns: str | Sequence[str], buffers: BufferPolicy
    ) -> ParameterSplit:
        """The second network and the first one's head are personal."""
        if getattr(network, "mix", None) != "sum":
            raise ConfigError(
                "algorithm=fenda needs two networks whose outputs are added; leave out canonical, "
                "or set canonical=two_bodies (in Python, give medfed.federate a list of two "
                "networks)."
            )
        return super().split(network, task_patterns, buffers)
