"""FedDBE: each client shifts its features by a vector of its own, and their mean is tied to all.

Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan: Eliminating domain bias for federated learning in
representation space, NeurIPS 2023, Algorithm 1. With z the d features that enter the head g:

    f_i = task loss of g(z + u_i)  +  kappa / (2 d) |r - r_bar|^2
    r <- (1 - mu) r + mu mean of z over the batch, differentiated through the newest batch

| symbol | here |
|---|---|
| u_i (the paper's z-bar_i^p) | the personal part, a parameter before the head, 0 at the start |
| r_bar (z-bar^g) | ``server["features"]`` |
| kappa, mu | ``strength``, ``newest_share`` |

The first round is one of FedAvg; its replies hold the mean features, whose mean r_bar then stays.
For a linear head u_i is an intercept of the hospital's own, W u_i, and the delivered model has it
in its bias.

Deviations:
- u_i takes steps of the run's optimizer, as all else does.
- The authors throw the weights of the first round away, so that r_bar is not of the next start.
- For mu < 1 r is divided by 1 - (1 - mu)^t, as it starts at 0: else r_bar depends on how many
  batches there are.
- r_bar is the mean of one pass in evaluation mode, of hospitals of ``least_patients`` and more.
- In segmentation u_i is one number per channel, and z is averaged over positions.
"""

from __future__ import annotations

from medfed.federation.split import shift_inputs
from medfed.method import *
from medfed.personalize.features_base import SendsFeatures, means_of
from medfed.personalize.fedavg import FedAvg


@dataclass(frozen=True)
class FedDBE(SendsFeatures, FedAvg):
    """FedAvg with a personal shift of the features, whose mean is tied to that of all hospitals.

    Attributes:
        strength: kappa >= 0; 0 ties nothing.
        newest_share: mu in (0, 1], the weight of the newest batch in the running mean.
        least_patients: A hospital of fewer patients does not send its mean.
    """

    strength: Annotated[float, check_not_negative, Range(0.1, 100.0)] = 50.0
    newest_share: Annotated[float, within("(0, 1]")] = 1.0
    averages_moments: ClassVar[bool] = False
    parts_sent: ClassVar[tuple[str, ...]] = ("shared", "features")
    parts_averaged: ClassVar[tuple[str, ...]] = ("shared", "features")
    trains_shared: ClassVar[bool] = True
    card: ClassVar[Card] = Card(
        "Zhang et al. 2023", "personal part", "a shift of the features",
        {"shared": 1, "features": 1}, server={"shared": 1, "features": 1},
        note="in the first round each hospital sends the mean of its features",
        privacy_exposure="outputs",
    )  # fmt: skip

    def split(
        self, network: nn.Module, task_patterns: str | Sequence[str], buffers: BufferPolicy
    ) -> ParameterSplit:
        shift = shift_inputs(network, task_patterns, "FedDBE")
        named = replace(self, personal=(shift,))
        return super(FedDBE, named).split(network, task_patterns, buffers)

    def scalars(self, round: int) -> dict[str, float]:
        return {} if round else {"first": 1.0}

    def closed(self, server: State, replies: Replies) -> State:
        """After the first round, the mean of the features stays."""
        more = {} if server["features"] else {"features": self.mean_sums(server, replies)}
        return {**super().closed(server, replies), **more}

    def fit(self, client: Client, message: Message) -> Message:
        """Trains the shared part, and after the first round the shift."""
        start = self.personal_model(client, message)
        if "first" in message.scalars:
            end = client.train(start, update="shared", statistics=True)
            sums = self.sums_of(client, client.features(end))
            return self.with_features(self.displaced(client, message, end), sums)
        (aim,), known = means_of(message.parts["features"])
        term = self.tie(aim) if self.strength and known.any() else None
        return self.displaced(client, message, client.train(start, batch_penalty=term))

    def tie(self, aim: Tensor) -> BatchPenalty:
        """Returns the term that ties the running mean of the features to r_bar."""
        target, weight = torch.zeros(()), 0.0

        def term(batch: Batch, live: Mapping[str, Tensor], forward: Forward) -> Tensor:
            nonlocal target, weight
            z = forward(live, features=True).mean(0)
            running = (1 - self.newest_share) * target + self.newest_share * z
            target = running.detach()
            weight = (1 - self.newest_share) * weight + self.newest_share
            return self.strength / 2 * (running / weight - aim).square().mean()

        return term
