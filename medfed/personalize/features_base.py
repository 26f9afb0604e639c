"""What methods that send features have in common: sums that leave a client, and their floor.

A client sends, for each class y of K, the sum of its features z over the samples of y and their
number, both divided by its n samples; or, with one row for all, their mean and 1. So the server
learns the means of all hospitals from means of replies alone, which masks may hide. A row of fewer
than ``least_patients`` patients is zero in both, and counts as absent.
"""

from __future__ import annotations

from medfed.method import *

SUMS, SHARES = "class_sums", "class_shares"


@dataclass(frozen=True)
class SendsFeatures(Algorithm):
    """A method whose clients send sums of what enters the head, by class or of all.

    Attributes:
        least_patients: The fewest patients behind a row that leaves a client.
    """

    least_patients: Annotated[int, check_count] = 20
    parts_sent: ClassVar[tuple[str, ...]] = ("features",)
    exact: ClassVar[tuple[str, ...]] = (SUMS, SHARES)
    supports_missing_channels: ClassVar[bool] = False
    needs: ClassVar[Needs | None] = "features"

    def init(self, weights: Tensors, split: ParameterSplit, clients: Sequence[ClientInfo]) -> Start:
        server, client = super().init(weights, split, clients)  # type: ignore[safe-super]
        return {**server, "num_samples": client_sizes(clients), "features": {}}, client

    def outgoing(self, server: State) -> dict[str, Tensors]:
        """Returns the parts that go out: what is shared, and features once they are known."""
        return {name: server[name] for name in ("shared", "features") if server.get(name)}

    def vectors(self, split: ParameterSplit, weights: Tensors) -> dict[str, int]:
        rows, width = head_shape(split, weights)
        rows = rows if self.by_class else 1
        return {**super().vectors(split, weights), "features": rows * (width + 1)}

    def summaries(self, data: ClientData) -> Sequence[Statistic]:
        """The features of a row, of which none of fewer patients leaves."""
        what = "mean features of a class" if self.by_class else "mean features"
        return [Statistic(data.id, what, "algorithm.least_patients", 1, self.least_patients)]

    def sums_of(self, client: Client, cases: Features, center: Tensor | None = None) -> Tensors:
        """Returns a client's sums and shares, of features less the center of their class."""
        z = cases.z if center is None else cases.z - center.to(cases.z)[cases.labels]
        rows = len(client.data.label_counts) if self.by_class else 1
        labels = cases.labels if self.by_class else torch.zeros_like(cases.patients)
        sums, counts = class_sums(z, labels, cases.patients, rows, self.least_patients)
        return {SUMS: (sums / len(z)).to(z), SHARES: (counts / len(z)).to(z)}

    def with_features(self, reply: Message, sums: Tensors) -> Message:
        """Returns a reply with them."""
        kinds = {**reply.kinds, "features": "update"}
        return replace(reply, parts={**reply.parts, "features": sums}, kinds=kinds)

    def mean_sums(self, server: State, replies: Replies) -> Tensors:
        """Returns the mean sums and shares; says if all are absent while nothing is known."""
        sums = self.mean(server, replies, "features")
        if not server["features"] and not sums[SHARES].any():
            warn(
                f"No hospital of the first round has {self.least_patients} patients"
                f"{' of a class' * self.by_class}, so that {self.title} shares no "
                "features; choose another algorithm, or lower algorithm.least_patients where "
                "nobody's patients are at risk."
            )
        return sums


def class_sums(
    z: Tensor, labels: Tensor, patients: Tensor, classes: int, least: int
) -> tuple[Tensor, Tensor]:
    """Returns sums of features ``(K, d)`` and counts ``(K,)`` by class; 0 of too few patients.

    Example:
        >>> z, labels = torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([0, 0, 1])
        >>> sums, counts = class_sums(z, labels, torch.tensor([7, 8, 9]), classes=2, least=2)
        >>> sums.tolist(), counts.tolist()
        ([[4.0], [0.0]], [2.0, 0.0])
    """
    member = nn.functional.one_hot(labels, classes).double()
    behind = torch.tensor([len(patients[labels == k].unique()) for k in range(classes)])
    member *= (behind >= least).to(member)
    return member.T @ z.double(), member.sum(0)


def means_of(sums: Tensors) -> tuple[Tensor, Tensor]:
    """Returns the mean features of each class ``(K, d)``, and which classes are known ``(K,)``.

    Example:
        >>> sums = {SUMS: torch.tensor([[1.0], [0.0]]), SHARES: torch.tensor([0.5, 0.0])}
        >>> [found.tolist() for found in means_of(sums)]
        [[[2.0], [0.0]], [True, False]]
    """
    known = sums[SHARES] > 0
    return sums[SUMS] / torch.where(known, sums[SHARES], 1)[:, None], known


def newest(sums: Tensors, before: Tensors) -> Tensors:
    """Returns sums and shares; of a class that is absent now those from before, if any."""
    known = sums[SHARES] > 0
    where = {SUMS: known[:, None], SHARES: known}
    return {n: torch.where(where[n], sums[n], before[n]) if before else sums[n] for n in sums}


def apart(z: Tensor, labels: Tensor, sums: Tensors) -> Tensor:
    """Returns the mean squared distance of features to their class's mean, 0 where it is unknown.

    Example:
        >>> sums = {SUMS: torch.tensor([[1.0], [0.0]]), SHARES: torch.tensor([0.5, 0.0])}
        >>> apart(torch.tensor([[5.0], [7.0]]), torch.tensor([0, 1]), sums)
        tensor(4.5000)
    """
    means, known = means_of(sums)
    return ((z - means[labels]).square().mean(1) * known[labels]).mean()


def alignment(strength: float, sums: Tensors) -> BatchPenalty | None:
    """Returns the term that draws features to their class's mean, if any mean may be known."""
    if not sums or not strength:
        return None

    def term(batch: Batch, live: Mapping[str, Tensor], forward: Forward) -> Tensor:
        return strength * apart(forward(live, features=True), batch["label"], sums)

    return term


def head_shape(split: ParameterSplit, weights: Tensors) -> tuple[int, int]:
    """Returns how many outputs K and features d a head has."""
    first = next((weights[n] for n in split.head if weights[n].ndim > 1), None)
    return (0, 0) if first is None else (len(weights[split.head[-1]]), first.shape[1])
