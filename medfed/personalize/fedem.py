"""FedEM: every client's data mix K distributions, and each distribution has a model.

Marfoq, Neglia, Bellet, Kameni, Vidal: Federated multi-task learning under a mixture of
distributions, NeurIPS 2021, Algorithm 1, over a canonical model with ``mix=outputs``:

    E:  q_k(s) ~ pi_ik exp(-l(theta_k; s)) for every sample s of client i, normalised over k
    M:  pi_ik <- mean over s of q_k(s)
        theta_ik <- steps on sum_s q_k(s) l(theta_ik; s), from theta_k
    theta_k <- sum_S p_i theta_ik / sum_S p_i

| symbol | here |
|---|---|
| theta_1 ... theta_K | ``server["shared"]``, instances 0 to K - 1 of the canonical part |
| pi_i | the membership vector of client i |
| p_i | ``weighting``, over the cohort |

No sum over samples is needed. If l is a negative log-likelihood, the mixture's loss L is -log
sum_k pi_k exp(-l_k), whose gradients are grad_theta_k L = mean_s q_k(s) grad l_k(s) and -pi_k
dL/dpi_k = mean_s q_k(s). With probabilities that the loss normalises again, E and M together are

    pi_k <- pi_k (1 - dL/dpi_k + sum_j pi_j dL/dpi_j),   the sum being 0

Deviations:
- q is recomputed at every step from the current models; the paper keeps it for the round.
- The pass for pi does not count towards the round's steps: an epoch, or ``membership_batches``.
- Cross-entropy of classes or voxels is a negative log-likelihood. For other losses (Dice, focal,
  squared errors) the formula for pi is a natural-gradient step of length 1 on the simplex, cut at
  0.
- ``canonical=models``, the default here, gives K whole models; ``canonical=outputs`` gives K heads
  on one body.
- Clients also send pi_i, K numbers, for the record; before a client's first round pi_i is 1/K.
"""

from __future__ import annotations

import math

from medfed.method import *
from medfed.personalize.canonical_base import MEMBERSHIP, CanonicalMethod


@dataclass(frozen=True)
class FedEM(CanonicalMethod):
    """FedAvg over a mixture of models, whose weights each client learns by EM.

    Attributes:
        membership_batches: Batches of the pass for pi; ``None``: the whole epoch.
    """

    membership_batches: Annotated[int | None, check_optional_count] = None
    parts_sent: ClassVar[tuple[str, ...]] = ("shared", "membership")
    card: ClassVar[Card] = Card(
        "Marfoq et al. 2021", "several models", "K membership numbers",
        up={"shared": 1, "personal": 1}, extra_passes="an epoch, for the memberships",
        tasks="all; EM in classification", privacy_exposure="several",
    )  # fmt: skip

    def split(
        self, network: nn.Module, task_patterns: Sequence[str], buffers: BufferPolicy
    ) -> ParameterSplit:
        if getattr(network, "mix", "outputs") != "outputs":
            raise ConfigError(
                "algorithm=fedem mixes the outputs of several models, not their parameters; choose "
                "canonical=models, or canonical=outputs for several heads."
            )
        return super().split(network, task_patterns, buffers)

    def fit(self, client: Client, message: Message) -> Message:
        """Takes E and M steps of pi at the received models, then trains these models."""
        received = message.parts["shared"]
        at = {**received, **client.state["personal"]}
        mixed = {**at, MEMBERSHIP: self.em_step(client, at)}
        shared, client.state["personal"] = client.split.split(self.shared_steps(client, mixed))
        parts = {
            "shared": subtract(shared, received), "membership": {MEMBERSHIP: mixed[MEMBERSHIP]}
        }  # fmt: skip
        return Message("fit", parts, kinds={"shared": "update"})

    def em_step(self, client: Client, at: Tensors) -> Tensor:
        """Returns pi (K,) after one E and one M step."""
        pi = at[MEMBERSHIP]
        if len(pi) == 1:
            return pi
        gradient = client.gradient(at, update="personal", batches=self.membership_batches)
        slope = gradient[MEMBERSHIP].double()
        wide = pi.double()
        raised = wide * (1 - slope + (wide * slope).sum()).clamp(min=0)
        if not float(raised.sum()) > 0 or not math.isfinite(float(raised.sum())):
            raise NonFiniteError("the loss became NaN or infinite; lower optimizer.lr")
        return (raised / raised.sum()).to(pi)

    def fit_membership(self, client: Client, start: Tensors, steps: int) -> Tensor:
        """Fits pi alone by EM, with as many passes as the steps have batches for."""
        epoch = batches_of(client.data)
        at = start
        for _ in range(max(1, steps // min(epoch, self.membership_batches or epoch))):
            at = {**at, MEMBERSHIP: self.em_step(client, at)}
        return at[MEMBERSHIP]
