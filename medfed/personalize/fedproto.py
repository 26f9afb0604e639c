"""FedProto: hospitals exchange the mean features of each class, and no weights.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang: FedProto: Federated prototype learning across heterogeneous
clients, AAAI 2022, Algorithm 1. With z the d features that enter the head:

    f_i = task loss + lambda mean over the batch of |z - C_y|^2 / d
    C_y <- sum_i n_iy C_iy / sum_i n_iy,   C_iy the mean of z over the n_iy samples of class y

| symbol | here |
|---|---|
| C_y | the quotient of ``server["features"]``'s sums and shares; a class keeps its last ones |
| C_iy | from one pass over the training samples after the local steps, in evaluation mode |
| lambda | ``strength``; 0 is local training |

Deviations:
- The authors average z over training batches while the weights change.
- The paper weighs C_iy by n_iy, the authors' code equally. ``weighting=uniform`` weighs by the
  class's share at the hospital, n_iy / n_i.
- A class of fewer than ``least_patients`` patients is not sent, and counts as absent.
- Clients predict by their heads; the nearest C_y is left out.
- All networks are alike.
"""

from __future__ import annotations

from medfed.method import *
from medfed.personalize.features_base import SendsFeatures, alignment, newest
from medfed.personalize.local import Local


@dataclass(frozen=True)
class FedProto(OnboardingRules, SendsFeatures, Local):
    """Local training that draws the features of each class to their mean over hospitals.

    Attributes:
        strength: lambda >= 0; 0 is local training.
        least_patients: The fewest patients behind a class that leaves a hospital.
    """

    strength: Annotated[float, check_not_negative, Range(0.01, 10.0)] = 1.0
    parts_averaged: ClassVar[tuple[str, ...]] = ("features",)
    by_class: ClassVar[bool] = True
    card: ClassVar[Card] = Card(
        "Tan et al. 2022", "similar clients", "everything", {"features": 1}, {"features": 1},
        extra_passes="a pass of the training samples a round", server={"features": 1},
        client={"model": 1}, tasks="classification",
        note="mean features of each class travel instead of weights", privacy_exposure="outputs",
    )  # fmt: skip

    def round(self, server: State, cohort: Sequence[str], round: int) -> ServerRound:
        """Sends the means of all classes, and averages those that come back."""
        replies = yield dict.fromkeys(cohort, Message("fit", self.outgoing(server)))
        return {**server, "features": newest(self.mean_sums(server, replies), server["features"])}

    def fit(self, client: Client, message: Message) -> Message:
        """Trains the client's model towards the means, and replies with its own."""
        model = self.train_near_means(client, client.state["model"], message)
        client.state["model"] = model
        return self.with_features(Message(), self.sums_of(client, client.features(model)))

    def train_near_means(self, client: Client, start: Tensors, message: Message) -> Tensors:
        """Trains from a start with the term that draws features to the means."""
        aims = message.parts.get("features", {})
        return client.train(start, batch_penalty=alignment(self.strength, aims))

    def onboard(self, client: Client, message: Message) -> Tensors:
        return self.train_near_means(client, client.weights, message)
