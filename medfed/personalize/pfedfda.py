"""pFedFDA: a generative head, Gaussian features with one covariance, interpolated by each client.

McLaughlin, Su: Personalized federated learning via feature distribution adaptation, NeurIPS 2024,
Algorithm 1. With z the d features that enter the head, the head of class y is linear in z:

    logit_y = z^T A m_y - m_y^T A m_y / 2 + log pi_y,   A = ((1 - e) S + e (tr S / d) I)^-1

| symbol | here |
|---|---|
| m_g, S_g | ``server["features"]``: means of the classes, and the covariance within them |
| m_i, S_i | the same of a client's training samples, S_i with ``floor`` on its diagonal |
| beta_i | in [0, 1], by 2-fold cross-validation of the log loss |
| pi, e | the client's shares of the classes, plus e = 1e-4 |

A client trains the body under the head of m_g, S_g and its pi; then it sends beta_i (m_i - m_g) and
beta_i (S_i - S_g), which the server adds in the mean. It predicts by the head of
beta_i m_i + (1 - beta_i) m_g and the same of S, at the newest body, which takes no gradient step.

Deviations:
- The authors add e to every entry of S, and take features of training batches.
- The mean of m_i - m_g over hospitals is weighed by their samples of the class: else a class that
  few hospitals have moves slowly.
- beta_i is found on a grid and refined, as the loss need not be convex; folds divide patients, not
  samples. The authors take beta_i = 0 if folds fail, as here for fewer than 4 samples.
- A class of fewer than ``least_patients`` patients does not leave a client, nor S_i of fewer than 5
  patients for each class.
- S_g starts at I, m_g at uniform random numbers.
"""

from __future__ import annotations

from medfed.common.floors import TIMES
from medfed.method import *
from medfed.personalize.features_base import SUMS, SendsFeatures, head_shape, means_of
from medfed.personalize.fedavg import FedAvg

EPSILON = 1e-4
GRID = 20
SCATTER = "scatter"


@dataclass(frozen=True)
class PFedFDA(OnboardingRules, SendsFeatures, FedAvg):
    """FedAvg of the body under a head that follows from the features' Gaussians.

    Attributes:
        floor: What is added to the diagonal of a client's covariance, >= 0.
        share: beta of all clients; ``None``: each finds its own.
        least_patients: The fewest patients behind a class that leaves a hospital.
        seed: Of the first means.
    """

    personal: str | tuple[str, ...] = "task"
    floor: Annotated[float, check_not_negative, Range(0.001, 1.0)] = 1.0
    share: Annotated[float | None, within("[0, 1]")] = None
    seed: int = 0
    averages_moments: ClassVar[bool] = False
    by_class: ClassVar[bool] = True
    trains_shared: ClassVar[bool] = True
    parts_sent: ClassVar[tuple[str, ...]] = ("shared", "features")
    parts_averaged: ClassVar[tuple[str, ...]] = ("shared", "features")
    exact: ClassVar[tuple[str, ...]] = (*SendsFeatures.exact, "means", SCATTER)
    card: ClassVar[Card] = Card(
        "McLaughlin, Su 2024", "personal part", "the head, computed from features",
        {"shared": 1, "means": 1, SCATTER: 1}, {"shared": 1, "features": 1, SCATTER: 1},
        extra_passes="a pass of the training samples a round",
        server={"shared": 1, "means": 1, SCATTER: 1}, tasks="classification",
        note="means and covariances of features travel; channel.secure=masks hides each hospital's",
        privacy_exposure="outputs",
    )  # fmt: skip

    def vectors(self, split: ParameterSplit, weights: Tensors) -> dict[str, int]:
        classes, width = head_shape(split, weights)
        more = {"means": classes * width, SCATTER: width**2}
        return {**super().vectors(split, weights), **more}

    def summaries(self, data: ClientData) -> Sequence[Statistic]:
        classes, key = len(data.label_counts), "algorithm.least_patients"
        least = max(self.least_patients, TIMES * classes)
        scatter = Statistic(data.id, "the covariance of features", key, classes, least)
        return [*super().summaries(data), scatter]

    def init(self, weights: Tensors, split: ParameterSplit, clients: Sequence[ClientInfo]) -> Start:
        if [weights[n].ndim for n in split.head] != [2, 1]:
            raise ConfigError(
                "pFedFDA computes the model's head, which must be one linear layer with a bias, "
                f"and here is {', '.join(split.head)}; name such a layer by model.personal."
            )
        return super().init(weights, split, clients)

    def closed(self, server: State, replies: Replies) -> State:
        """Adds what hospitals sent to the means and the covariance."""
        sums = self.mean_sums(server, replies)
        means, scatter = (server["features"] or self.first(sums[SUMS])).values()
        after = {"means": means + means_of(sums)[0], SCATTER: scatter + sums[SCATTER]}
        return {**super().closed(server, replies), "features": after}

    def first(self, like: Tensor) -> Tensors:
        """Returns the means (K, d) and the covariance with which training starts."""
        means = torch.rand(like.shape, generator=torch_rng(self.seed, "means")).to(like)
        return {"means": means, SCATTER: torch.eye(like.shape[1]).to(like)}

    def fit(self, client: Client, message: Message) -> Message:
        """Trains the body under the common head, and replies with its change and the Gaussians'."""
        start, common = super().personal_model(client, message), self.common(client, message)
        head = self.head(client, *common)
        end = client.train({**start, **head}, update="shared", statistics=True)
        rows = client.features(end)
        share, _, scatter = self.fitted(client, rows, *common)
        (behind,) = self.summaries(client.data)[1:]
        enough = len(rows.patients.unique()) >= behind.patients
        sums = self.sums_of(client, rows, common[0])
        moved = share * enough * (scatter - common[1]).to(rows.z)
        sums |= {SUMS: share * sums[SUMS], SCATTER: moved}
        return self.with_features(self.displaced(client, message, end), sums)

    def common(self, client: Client, message: Message) -> tuple[Tensor, Tensor]:
        """Returns m_g and S_g, in double precision."""
        like = client.weights[client.split.head[0]]
        means, scatter = (message.parts.get("features") or self.first(like)).values()
        return means.double(), scatter.double()

    def fitted(
        self, client: Client, rows: Features, means: Tensor, scatter: Tensor
    ) -> tuple[float, Tensor, Tensor]:
        """Returns beta_i, m_i and S_i, given m_g and S_g."""
        rows, share = rows._replace(z=rows.z.double()), self.share
        if share is None:
            share = best_share(rows, (means, scatter), prior(client.data), self.floor)
        return share, *gaussians(rows.z, rows.labels, means, self.floor)

    def head(self, client: Client, means: Tensor, scatter: Tensor) -> Tensors:
        """Returns the head's weight and bias."""
        names = client.split.head
        made = discriminant(means, scatter, prior(client.data))
        return {n: t.to(client.weights[n]) for n, t in zip(names, made, strict=True)}

    def personal_model(self, client: Client, message: Message) -> Tensors:
        model, common = super().personal_model(client, message), self.common(client, message)
        share, *local = self.fitted(client, client.features(model), *common)
        mixed = [torch.lerp(a, b, share) for a, b in zip(common, local, strict=True)]
        return {**model, **self.head(client, *mixed)}

    def onboarding_start(self, client: Client, message: Message) -> Tensors:
        return self.personal_model(client, message)

    def onboard(self, client: Client, message: Message) -> Tensors:
        return self.onboarding_start(client, message)


def prior(data: ClientData) -> Tensor:
    """Returns the logarithms of a client's shares of the classes, none of them 0."""
    shares = data.label_counts.double() / data.label_counts.sum() + EPSILON
    return (shares / shares.sum()).log()


def gaussians(z: Tensor, labels: Tensor, means: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Returns the means of the classes ``(K, d)`` and the covariance within them ``(d, d)``.

    Example:
        >>> z, labels = torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([0, 0, 1])
        >>> m, scatter = gaussians(z, labels, torch.zeros(3, 1), floor=0.5)
        >>> m.flatten().tolist(), scatter.item()
        ([2.0, 5.0, 0.0], 1.5)
    """
    member = nn.functional.one_hot(labels, len(means)).to(z)
    counts = member.sum(0)[:, None]
    means = torch.where(counts > 0, member.T @ z / counts.clamp(min=1), means)
    residual = z - means[labels]
    scatter = residual.T @ residual / max(1, len(z) - 1)
    return means, scatter + floor * torch.eye(len(scatter)).to(scatter)


def discriminant(means: Tensor, scatter: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the weight ``(K, d)`` and the bias ``(K,)`` of the linear discriminant.

    Example:
        >>> weight, bias = discriminant(torch.tensor([[2.0]]), torch.eye(1), torch.zeros(1))
        >>> weight.item(), bias.item()
        (2.0, -2.0)
    """
    size = len(scatter)
    ridge = EPSILON * scatter.trace() / size * torch.eye(size).to(scatter)
    weight = torch.linalg.solve((1 - EPSILON) * scatter + ridge, means.T).T
    return weight, prior.to(means) - (weight * means).sum(1) / 2


def best_share(rows: Features, common: tuple[Tensor, Tensor], prior: Tensor, floor: float) -> float:
    """Returns the beta of the least log loss by cross-validation on two halves of the patients."""
    from scipy.optimize import minimize_scalar  # slow to import

    half = halves(rows)
    if min(int(half.sum()), int((~half).sum())) < 2:
        return 0.0
    sides = [
        (gaussians(rows.z[side], rows.labels[side], common[0], floor), rows.z[~side], ~side)
        for side in (half, ~half)
    ]

    def loss(share: float) -> float:
        total = 0.0
        for local, z, side in sides:
            means, scatter = (torch.lerp(a, b, share) for a, b in zip(common, local, strict=True))
            weight, bias = discriminant(means, scatter, prior)
            logits = z @ weight.T + bias
            total += float(nn.functional.cross_entropy(logits, rows.labels[side], reduction="sum"))
        return total

    best = min((n / GRID for n in range(GRID + 1)), key=loss)
    ends = max(0.0, best - 1 / GRID), min(1.0, best + 1 / GRID)
    return min(best, float(minimize_scalar(loss, bounds=ends, method="bounded").x), key=loss)


def halves(rows: Features) -> Tensor:
    """Returns which samples are in the first half: every other patient of each class."""
    first, turns = dict[int, bool](), dict[int, bool]()
    for label, patient in zip(rows.labels.tolist(), rows.patients.tolist(), strict=True):
        if patient not in first:
            first[patient] = turns[label] = not turns.get(label, False)
    return torch.tensor([first[p] for p in rows.patients.tolist()]).to(rows.labels.device)
