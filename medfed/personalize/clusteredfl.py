"""Clustered FL: one model for all, until its clients' updates disagree; then two, and so on.

Sattler, Mueller, Samek: Clustered federated learning: Model-agnostic distributed multitask
optimization under privacy constraints, IEEE TNNLS 2020, Algorithms 1 to 3. FedAvg within every
cluster C; after a round C is split in two if

    |sum_C p_i Delta_i / sum_C p_i| < epsilon_1   and   max_C |Delta_i| > epsilon_2:

its model has come to rest, its clients have not. The parts C_1, C_2 are those whose largest cosine
similarity of displacements across, max <Delta_i, Delta_j> / |Delta_i| |Delta_j|, is smallest.

| symbol | here |
|---|---|
| theta of cluster k | ``server["cluster/K"]``, K from 0; both children of a split start with it |
| k of client i | ``server["of"]`` |
| Delta_i | what client i moved in the round, parameters alone |
| epsilon_1, epsilon_2 | ``epsilon_1``, ``epsilon_2`` |

The cut is found by single linkage: the most similar pair is joined until two groups are left, which
is optimal for this criterion (complete linkage is not).

Deviations:
- Both epsilons are multiples of the largest |Delta_i| of the first round, so that one value fits
  networks of any size; the paper's rule of thumb is epsilon_1 of about a tenth of it.
- The paper's optional test of how pure a split is, which needs the gradients' noise, is left out.
- Every split keeps its model and the difference of both parts' mean directions, not every
  displacement. One that joins later trains at the model of each split that it meets, and goes with
  the part it is more like.
"""

from __future__ import annotations

from medfed.functional.graph import bipartition, cosines, direction
from medfed.method import *
from medfed.personalize.client_pictures import draw_clusters
from medfed.personalize.fedavg import FedAvg


@dataclass(frozen=True)
class ClusteredFL(OnboardingRules, FedAvg):
    """FedAvg within clusters that split.

    Attributes:
        epsilon_1: A cluster whose mean displacement is shorter has come to rest; 0 is FedAvg.
        epsilon_2: It is split if one of its clients is displaced farther. Both in units of the
            largest displacement of the first round.
    """

    epsilon_1: Annotated[float, check_not_negative, Range(0.1, 0.9)] = 0.2
    epsilon_2: Annotated[float, check_not_negative, Range(0.1, 0.9)] = 0.3
    parts_averaged: ClassVar[tuple[str, ...]] = ()
    card: ClassVar[Card] = replace(
        FedAvg.card, paper="Sattler et al. 2020", family="similar clients",
        keeps="the model of its cluster", full_cohort=True,
    )  # fmt: skip

    def init(self, weights: Tensors, split: ParameterSplit, clients: Sequence[ClientInfo]) -> Start:
        server, client = super().init(weights, split, clients)
        server["cluster/0"] = server.pop("shared")
        server["of"] = {c.id: torch.tensor(0) for c in clients}
        server["compared"] = {n: weights[n].new_zeros(0) for n in split.parameters("shared")}
        return {**server, "children": {}, "first": {}, "alike": {}}, client

    def round(self, server: State, cohort: Sequence[str], round: int) -> ServerRound:
        of = {c: int(server["of"][c]) for c in cohort}
        replies = yield {c: Message("fit", {"shared": server[f"cluster/{of[c]}"]}) for c in cohort}
        rows = {c: self._row(server, m.parts["shared"]) for c, m in replies.items()}
        cosine = cosines(torch.stack(list(rows.values())))
        first = server["first"] or {"length": max(row.norm() for row in rows.values())}
        server = {**server, "alike": dict(zip(rows, cosine, strict=True)), "first": first}
        for cluster in dict.fromkeys(of[c] for c in replies):
            members = {c: m for c, m in replies.items() if of[c] == cluster}
            mean = self.mean(server, members, "shared")
            server[f"cluster/{cluster}"] = add(server[f"cluster/{cluster}"], mean)
            self._split_if_torn(server, cluster, mean, {c: rows[c] for c in members})
        return server

    def _row(self, server: State, moved: Tensors) -> Tensor:
        return flatten(select(moved, server["compared"]))

    def _split_if_torn(self, server: State, cluster: int, mean: Tensors, rows: Tensors) -> None:
        """Splits a cluster whose mean has converged while its clients' updates are large.

        The part that leaves gets a new number; the split between the two is kept.
        """
        unit = float(server["first"]["length"])
        far = any(float(row.norm()) > self.epsilon_2 * unit for row in rows.values())
        if far and len(rows) > 1 and float(self._row(server, mean).norm()) < self.epsilon_1 * unit:
            names, moved = list(rows), torch.stack(list(rows.values()))
            stays, leaves = bipartition(cosines(moved))
            new = len(server["children"]) + 1
            server["children"] = {**server["children"], f"{new}": torch.tensor([cluster, new])}
            server[f"cluster/{new}"] = server[f"split/{new}"] = server[f"cluster/{cluster}"]
            server[f"between/{new}"] = {"axis": direction(moved[stays]) - direction(moved[leaves])}
            server["of"] = {**server["of"], **{names[i]: torch.tensor(new) for i in leaves}}

    def broadcast(self, server: State, client: str) -> Message:
        return Message("deliver", {"shared": server[f"cluster/{int(server['of'][client])}"]})

    def onboarding(self, server: State, client: ClientInfo) -> Exchange:
        """Asks at every split of the cluster that it is in so far which part it is most like."""
        cluster = 0
        for old, new in (pair.tolist() for pair in server["children"].values()):
            if cluster == old:
                reply = yield Message("fit", {"shared": server[f"split/{new}"]})
                moved = self._row(server, reply.parts["shared"])
                cluster = old if moved @ server[f"between/{new}"]["axis"] >= 0 else new
        return Message("deliver", {"cluster": server[f"cluster/{cluster}"]})

    def onboarding_start(self, client: Client, message: Message) -> Tensors:
        """The model of the cluster that it came to, completed by what is its own."""
        return {**client.weights, **message.parts["cluster"]}

    def pictures(self, server: State, clients: Sequence[str]) -> dict[str, Any]:
        of = {c: int(server["of"][c]) for c in server["alike"]}
        rows = torch.stack(list(server["alike"].values()))
        return {"clusters": draw_clusters(of, rows, "Cosines of the clients' last displacements")}
