"""FPFC: a concave penalty fuses pairs of clients, so that clusters of equal models appear.

Yu, Liu, Wang, Sun: Clustered personalized federated learning by fusion penalty, Information
Sciences 2024, Algorithm 1 (an ADMM):

    min over w_1 ... w_N of sum_i f_i(w_i) + (1 / 2N) sum_ij P_a(|w_i - w_j|; lambda)

    zeta_i = (1/N) sum_j (w_j + theta_ij - v_ij / rho),  j = i included: w_i
    w_i <- about argmin f_i(w) + (rho/2) |w - zeta_i|^2, from w_i          i in S
    delta = w_i - w_j + v_ij / rho,  theta_ij <- shrink(|delta|) delta     {i, j} that meets S, once
    v_ij <- v_ij + rho (w_i - w_j - theta_ij)

P_a is SCAD: linear up to lambda, constant from a lambda on, so that distant models do not pull each
other. theta_ij = -theta_ji approximates w_i - w_j, v_ij = -v_ji is its dual.

| symbol | here |
|---|---|
| w_i | ``state["model"]``; at the server ``server["model/ID"]`` |
| zeta_i | the part ``model`` that goes down |
| theta_ij, v_ij, i < j | rows of ``server["pairs"]``, pairs as in ``complete_edges`` |
| lambda, rho, a | ``strength``, ``rho``, ``a`` |
| xi, the smoothing at 0 | ``smoothing`` |

lambda is a force: all clients agree if it exceeds every |grad f_i - grad f_j| at the common
optimum. Groups separate if their gradients differ by more than lambda and their models by more than
a lambda.

Deviations:
- All models start equal (theta = v = 0), so that clusters appear by splitting; the paper starts
  from local models and raises lambda.
- Pairs of two absent clients do not change; a pair of two present clients takes one dual step.
- ``personal`` entries and running statistics are not fused.

The server keeps N (N - 1) vectors of the model's size.
"""

from __future__ import annotations

from medfed.functional import graph
from medfed.functional.prox import check_scad, shrink_scad
from medfed.method import *
from medfed.personalize.anchored_base import AnchoredMethod, mean_of, models_of, rows_of
from medfed.personalize.client_pictures import draw_clusters


@dataclass(frozen=True)
class FPFC(AnchoredMethod):
    """Every client is tied to an anchor that its pairs with all other clients determine.

    Attributes:
        strength: lambda >= 0, the largest force between two clients (0 is local training).
        rho: The ADMM's penalty, above 1 / (a - 1).
        a: Models farther apart than a lambda do not attract each other; above 2.
        smoothing: xi > 0; a pair whose theta is no longer than xi is fused.
    """

    strength: Annotated[float, check_not_negative, Range(0.01, 10.0)] = 0.5
    rho: float = 1.0
    a: float = 3.7
    smoothing: float = 1e-4
    tied_by: ClassVar[str] = "rho"
    card: ClassVar[Card] = replace(
        AnchoredMethod.card, paper="Yu et al. 2024", keeps="a model, fused within clusters",
        server={"weights": "N N + 1"},
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        check_scad("algorithm", self.rho, self.a, self.smoothing)

    def init(self, weights: Tensors, split: ParameterSplit, clients: Sequence[ClientInfo]) -> Start:
        """All theta and v start at 0: no pair differs, none pulls."""
        server, client = super().init(weights, split, clients)
        start = flatten(server["start"])
        zero = start.new_zeros(len(graph.complete_edges(len(clients))), start.numel())
        return {**server, "pairs": {"theta": zero, "v": zero}}, client

    def anchors(self, server: State, cohort: Sequence[str]) -> dict[str, Tensors]:
        """zeta_i; theta and v are 0 for clients that have not taken part."""
        models, order = models_of(server), {c: i for i, c in enumerate(server["num_samples"])}
        rows, pairs = rows_of(models.values()), server["pairs"]
        # +1 where a client is the first of a pair, -1 where it is the second.
        signs = graph.incidence(len(order), graph.complete_edges(len(order))).to(rows)
        sums = signs @ (pairs["theta"] - pairs["v"] / self.rho)
        mean = rows.mean(0)
        zeta = {c: mean + sums[order[c]] / len(models) for c in cohort}
        return {c: cut(flat, layout_of(models[c])) for c, flat in zeta.items()}

    def round(self, server: State, cohort: Sequence[str], round: int) -> ServerRound:
        """Updates the models, then theta and v of all pairs with a client of the cohort."""
        server = yield from super().round(server, cohort, round)
        models, (rows, ends) = models_of(server), pairs_of(server)
        flat, present = rows_of(models.values()), {*cohort}
        theta, v = (server["pairs"][name].clone() for name in ("theta", "v"))
        meets = torch.tensor([c in present for c in models])[ends].any(1)
        # In pieces, so that large models need little beside theta and v.
        for part in meets.nonzero().flatten().split(max(1, 2**20 // max(1, flat.shape[1]))):
            row, (i, j) = rows[part], ends[part].unbind(1)
            delta = flat[i] - flat[j] + v[row] / self.rho
            theta[row] = self.shrink(delta.norm(dim=1)).unsqueeze(1) * delta
            v[row] = self.rho * (delta - theta[row])  # v + rho (w_i - w_j - theta)
        return {**server, "pairs": {"theta": theta, "v": v}}

    def shrink(self, length: Tensor) -> Tensor:
        """The factors of delta that solve argmin P_a(|theta|) + (rho/2) |theta - delta|^2."""
        return shrink_scad(length, self.strength, self.rho, self.a, self.smoothing)

    def clusters(self, server: State) -> dict[str, int]:
        """Returns the cluster, from 0, of every client that has taken part."""
        models, (rows, ends) = models_of(server), pairs_of(server)
        fused = server["pairs"]["theta"].norm(dim=1)[rows] <= self.smoothing * (1 + 1e-4)
        # Clusters are the connected components of the fused pairs.
        labels = graph.connected_components(len(models), ends[fused.cpu()])
        return dict(zip(models, labels.tolist(), strict=True))

    def anchor_of(self, server: State, model: Tensors) -> Tensors:
        """The mean of the cluster nearest to the onboarded client's model."""
        models, of = models_of(server), self.clusters(server)
        means = [mean_of([models[c] for c in of if of[c] == k]) for k in set(of.values())]
        return min(means, key=lambda mean: float((flatten(mean) - flatten(model)).norm()))

    def pictures(self, server: State, clients: Sequence[str]) -> dict[str, Any]:
        title = "Distances between the clients' models"
        rows = rows_of(models_of(server).values()).cpu()
        return {"clusters": draw_clusters(self.clusters(server), torch.cdist(rows, rows), title)}


def pairs_of(server: State) -> tuple[Tensor, Tensor]:
    """Returns the rows of theta and v whose two clients have taken part, and these in models_of."""
    known = torch.tensor([f"model/{c}" in server for c in server["num_samples"]])
    ends = graph.complete_edges(len(known))
    rows = known[ends].all(1).nonzero().flatten()
    return rows, (known.cumsum(0) - 1)[ends[rows]]
