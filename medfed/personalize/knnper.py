"""kNN-Per: each client's nearest training cases vote beside FedAvg's model.

Marfoq, Neglia, Kameni, Vidal: Personalized federated learning through local memorization, ICML
2022. With z the d features that enter the head of FedAvg's model, and p_w its probabilities:

    p(y|x) = lambda p_kNN(y|x) + (1 - lambda) p_w(y|x)
    p_kNN(y|x) ~ sum over the k nearest training cases j of exp(-|z - z_j|^2 / (d s)) 1[y_j = y]

Nothing travels but FedAvg's weights, and no step is taken besides its own.

| symbol | here |
|---|---|
| z_j, y_j | buffers of the head in the delivered model, see :mod:`medfed.standalone.neighbours` |
| k, s, lambda | `KNNPer.best_vote`; of ``COUNTS``, of ``SCALES``, and of [0, ``MOST``] |

What is chosen has the least log loss over the training cases, each of which is predicted without
the cases of its own patient. So no case is chosen on that stands in the store, and validation cases
stay for the selection of rounds.

Deviations:
- The authors choose lambda and k on test cases, or on validation cases. By the latter, with lambda
  up to 1, the log loss is worse than FedAvg's: a class without a neighbour has probability 0.
- The authors' code mixes logits with probabilities.
- lambda is at most 0.9; a client without two patients, or without a gain, has FedAvg's model.
- Of a case of the store itself, probabilities are too good: metrics of training cases mean nothing.
- Outcomes, for which a weighted mean would be defined, and regions are refused.
"""

from __future__ import annotations

from itertools import product

from medfed.federation.split import modules_of
from medfed.method import *
from medfed.personalize.fedavg import FedAvg
from medfed.standalone import neighbours
from medfed.standalone.neighbours import FEATURES, LABELS, VOTE

COUNTS, SCALES, MOST = (1, 3, 10, 30), (0.01, 0.1, 1.0, 10.0), 0.9


@dataclass(frozen=True)
class KNNPer(OnboardingRules, FedAvg):
    """FedAvg whose delivered models remember the features of the client's training cases."""

    by_class: ClassVar[bool] = True
    needs: ClassVar[Needs | None] = "features"
    card: ClassVar[Card] = Card(
        "Marfoq et al. 2022", "personal part", "features of its training cases, which vote",
        tasks="classification",
        note="the model of each client holds features of its training patients: keep it there",
        privacy_exposure="outputs",
    )  # fmt: skip

    @property
    def title(self) -> str:
        return "kNN-Per"

    def split(
        self, network: nn.Module, task_patterns: str | Sequence[str], buffers: BufferPolicy
    ) -> ParameterSplit:
        """Gives the head a store, which is no entry of the model."""
        split = super().split(network, task_patterns, buffers)
        head, *others = modules_of(network, split.head) or [""]
        if not head or any(not name.startswith(f"{head}.") for name in others):
            raise ConfigError(
                f"{self.title} remembers what enters the head, which must be one module of the "
                f"network, and here is {', '.join(split.head)}; name such a module by "
                "model.personal."
            )
        neighbours.remembering(network, head)
        return replace(split, base=split.base | {f"{head}.{FEATURES}", f"{head}.{VOTE}"})

    def personal_model(self, client: Client, message: Message) -> Tensors:
        return self.with_store(client, super().personal_model(client, message))

    def onboard(self, client: Client, message: Message) -> Tensors:
        return self.with_store(client, super().onboard(client, message))

    def with_store(self, client: Client, model: Tensors) -> Tensors:
        """Returns a model that remembers the client's training cases, if they improve it."""
        rows, head = client.features(model), neighbours.store_in(client.split.base)
        vote = self.best_vote(rows)
        if not vote[2]:
            return model
        store = {FEATURES: rows.z, LABELS: rows.labels, VOTE: vote.to(rows.z)}
        return client.with_buffers(model, {f"{head}.{name}": t for name, t in store.items()})

    def best_vote(self, rows: Features) -> Tensor:
        """Returns k, s and lambda of the least log loss over cases without their own patients.

        Example:
            >>> z, labels = torch.tensor([[0.0], [0.0], [9.0], [9.0]]), torch.tensor([0, 0, 1, 1])
            >>> seen = Features(z, labels, torch.arange(4), outputs=torch.zeros(4, 2))
            >>> KNNPer().best_vote(seen).tolist()
            [1.0, 0.01, 0.9]
        """
        if len(rows.patients.unique()) < 2:
            return torch.zeros(3)
        truth, classes = rows.labels.cpu()[:, None], rows.outputs.shape[1]
        plain = rows.outputs.double().cpu().softmax(1).gather(1, truth)
        shares = torch.linspace(0, MOST, 91, dtype=torch.float64)
        near, labels = neighbours_of_others(rows, max(COUNTS))
        tried = list[tuple[float, list[float]]]()
        for k, s in product(COUNTS, SCALES):
            voted = neighbours.votes(near, labels, torch.tensor(k), torch.tensor(s), classes)
            mixed = plain + shares * (voted.gather(1, truth) - plain)
            losses = -mixed.log().mean(0)
            tried.append((float(losses.min()), [k, s, float(shares[losses.argmin()])]))
        return torch.tensor(min(tried, key=lambda one: one[0])[1], dtype=torch.float64)


def neighbours_of_others(cases: Features, most: int) -> tuple[Tensor, Tensor]:
    """Returns distances and labels of each case's nearest among other patients' cases, ``(n, k)``.

    Example:
        >>> z, patients = torch.tensor([[0.0], [1.0], [4.0]]), torch.tensor([5, 5, 6])
        >>> near, labels = neighbours_of_others(Features(z, torch.arange(3), patients, z), 1)
        >>> near.flatten().tolist(), labels.flatten().tolist()
        ([16.0, 9.0, 9.0], [2, 2, 1])
    """
    z, who, distances = cases.z.double().cpu(), cases.patients.cpu(), []
    for rows in torch.arange(len(z)).split(256):  # not all distances at once
        near, order = neighbours.nearest(z[rows], z, who[rows, None] == who)
        distances.append((near[:, :most], cases.labels.cpu()[order[:, :most]]))
    near, labels = map(torch.cat, zip(*distances, strict=True))
    return near, labels
