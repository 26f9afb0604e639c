"""MOCHA: multi-task learning, where the server learns which clients' models resemble each other.

Smith, Chiang, Sanjabi, Talwalkar: Federated multi-task learning, NeurIPS 2017, Equation 1 with the
probabilistic regulariser (its Appendix B; Zhang, Yeung, UAI 2010):

    min over W = [w_1 ... w_N], M of sum_i f_i(w_i) + lambda1 tr(W M W^T) + lambda2 |W|^2,
    M^-1 positive definite with trace 1

In turn, as in the paper: M for fixed W is the inverse of (W^T W)^(1/2) / tr((W^T W)^(1/2)); W for
fixed M by rounds in which clients train at the same time, each on f_i and a bound of the rest that
makes simultaneous steps safe, L the largest eigenvalue of M:

    f_i(w) + 2 lambda1 <(W M)_i, w> + lambda1 L |w - w_i|^2 + lambda2 |w|^2

which is a tie of weight 2 (lambda1 L + lambda2) to a_i = w_i - (lambda1 (W M)_i + lambda2 w_i) /
(lambda1 L + lambda2).

| symbol | here |
|---|---|
| w_i; a_i | ``server["model/ID"]``; the part ``model`` that goes down |
| lambda1, lambda2 | ``strength``, ``ridge`` |
| M | computed from all models in every round |

Deviations:
- Clients take gradient steps of the primal problem, for any network, where the paper's take dual
  coordinate steps for linear models; L has the part of its sigma'.
- W^T W is smoothed by ``smoothing``^2 times the mean of its diagonal: else clients with equal
  models could never part.
- ``personal`` entries and running statistics stay with their client and are not coupled.
"""

from __future__ import annotations

from medfed.method import *
from medfed.personalize.anchored_base import AnchoredMethod, mean_of, mixtures, models_of, rows_of
from medfed.personalize.client_pictures import draw_matrix


@dataclass(frozen=True)
class MOCHA(AnchoredMethod):
    """Models of all clients under a learned relation.

    Attributes:
        strength: lambda1 >= 0.
        ridge: lambda2 >= 0; with lambda1 = 0 too it is local training.
        smoothing: How far models can part at once; more than 0.
    """

    strength: Annotated[float, check_not_negative, Range(1e-5, 0.1)] = 0.001
    ridge: Annotated[float, check_not_negative] = 0.0
    smoothing: Annotated[float, check_positive] = 0.1
    card: ClassVar[Card] = replace(
        AnchoredMethod.card, paper="Smith et al. 2017",
        keeps="a model, pulled to those that it resembles",
    )  # fmt: skip

    def scalars(self, server: State) -> dict[str, float]:
        return {"tie": 2 * self._bound(self._precision(server))}

    def anchors(self, server: State, cohort: Sequence[str]) -> dict[str, Tensors]:
        models, precision = models_of(server), self._precision(server)
        eye = torch.eye(len(models), dtype=torch.float64)
        if bound := self._bound(precision):
            eye = eye - (self.strength * precision + self.ridge * eye) / bound
        places = {c: row for row, c in enumerate(models)}
        weights = eye[[places[c] for c in cohort]]
        return dict(zip(cohort, mixtures(list(models.values()), weights), strict=True))

    def anchor_of(self, server: State, model: Tensors) -> Tensors:
        """The mean of all models: the relation to an onboarded client is unknown."""
        return mean_of([*models_of(server).values(), model])

    def _bound(self, precision: Tensor) -> float:
        return self.strength * float(torch.linalg.eigvalsh(precision)[-1]) + self.ridge

    def _precision(self, server: State) -> Tensor:
        return relation(rows_of(models_of(server).values()), self.smoothing).inverse()

    def pictures(self, server: State, clients: Sequence[str]) -> dict[str, Any]:
        models = models_of(server)
        covariance = relation(rows_of(models.values()), self.smoothing)
        scale = covariance.diagonal().rsqrt()
        matrix = scale[:, None] * covariance * scale
        title = "Correlation of clients' models in the learned relation"
        return {"relation": draw_matrix(list(models), matrix.fill_diagonal_(torch.nan), title)}


def relation(rows: Tensor, smoothing: float) -> Tensor:
    """The covariance of tasks R ``(N, d)``: (R R^T + e^2 I)^(1/2), divided by its trace.

    Example:
        >>> relation(torch.eye(2), 0.1)
        tensor([[0.5000, 0.0000],
                [0.0000, 0.5000]], dtype=torch.float64)
    """
    wide = rows.double().cpu()
    gram = wide @ wide.T
    if not gram.any():  # no model has moved from 0
        gram = torch.eye(len(gram), dtype=torch.float64)
    gram = gram + smoothing**2 * gram.diagonal().mean() * torch.eye(len(gram)).double()
    values, vectors = torch.linalg.eigh(gram)
    roots = values.sqrt()
    covariance: Tensor = vectors * (roots / roots.sum()) @ vectors.T
    return covariance
