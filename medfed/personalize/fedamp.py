"""FedAMP: every client is pulled towards a mixture of all models, most towards similar ones.

Huang, Chu, Zhou, Wang, Liu, Pei, Zhang: Personalized cross-silo federated learning on non-IID
data, AAAI 2021, objective Eq. 1 and 2, Algorithm 1; HeurFedAMP, its Eq. 8:

    u_i = (1 - sum_{j != i} xi_ij) w_i + sum_{j != i} xi_ij w_j
    w_i <- about argmin f_i(w) + (lambda / (2 alpha)) |w - u_i|^2

    distance:  xi_ij = alpha A'(|w_i - w_j|^2),  A(t) = 1 - exp(-t / sigma)
    cosine:    xi_ij = (1 - xi_ii) exp(sigma cos(w_i, w_j)) / sum_{h != i} exp(sigma cos(w_i, w_h))

| symbol | here |
|---|---|
| w_i | ``state["model"]``; at the server ``server["model/ID"]`` |
| u_i | the part ``model`` that goes down |
| lambda / alpha | ``strength`` |
| alpha | the largest that leaves every client a weight of ``own`` in its mixture, see below |
| xi_ii of HeurFedAMP | ``own`` |
| sigma | ``sigma`` |

With a fixed sigma the fixed point is grad f_i + lambda sum_j A'(|w_i - w_j|^2) (w_i - w_j) = 0: the
printed objective has lambda where this iteration has lambda / 2, as a square has twice the slope.

Deviations:
- alpha = sigma (1 - own) / max_i sum_{j != i} exp(-|w_i - w_j|^2 / sigma): the paper requires an
  alpha without negative weights; this is the largest that leaves every client ``own``.
- ``sigma=null`` follows the models: a quarter of the median of |w_i - w_j|^2 over all pairs; for
  HeurFedAMP the inverse of a quarter of the median of 1 - cos. Distances grow with the network, and
  a sigma that does not fit makes all weights equal or all 0.
- w_i continues from its last value, so inexact steps have the same fixed point as exact ones.
- ``personal`` entries and running statistics are neither mixed nor compared.
"""

from __future__ import annotations

from typing import Literal

from medfed.method import *
from medfed.personalize.anchored_base import AnchoredMethod, mixtures, models_of, rows_of
from medfed.personalize.client_pictures import draw_matrix

Kind = Literal["distance", "cosine"]


@dataclass(frozen=True)
class FedAMP(AnchoredMethod):
    """Every client is tied to a mixture of all clients' models.

    Attributes:
        strength: lambda / alpha >= 0, how strongly w_i is tied to u_i (0 is local training).
        attention: ``distance`` (FedAMP) or ``cosine`` (HeurFedAMP).
        own: The weight of a client's model in its mixture, in [0, 1]; with ``distance`` the
            minimum.
        sigma: sigma > 0; ``None`` follows the models.
    """

    strength: Annotated[float, check_not_negative, Range(0.01, 10.0)] = 1.0
    attention: Kind = "distance"
    own: Annotated[float, within("[0, 1]"), Range(0.2, 0.9, log=False)] = 0.5
    sigma: Annotated[float | None, check_positive] = None
    card: ClassVar[Card] = replace(
        AnchoredMethod.card, paper="Huang et al. 2021", keeps="a model, pulled to similar ones"
    )

    def anchors(self, server: State, cohort: Sequence[str]) -> dict[str, Tensors]:
        models = models_of(server)
        places = {c: row for row, c in enumerate(models)}
        weights = self._weights(models.values())[[places[c] for c in cohort]]
        return dict(zip(cohort, mixtures(list(models.values()), weights), strict=True))

    def anchor_of(self, server: State, model: Tensors) -> Tensors:
        """Returns the mixture of an onboarded client, whose model is the last row."""
        models = [*models_of(server).values(), model]
        return mixtures(models, self._weights(models)[-1:])[0]

    def _weights(self, models: Iterable[Tensors]) -> Tensor:
        return attention(rows_of(models), self.attention, self.own, self.sigma)

    def pictures(self, server: State, clients: Sequence[str]) -> dict[str, Any]:
        models = models_of(server)
        weights = self._weights(models.values()).fill_diagonal_(torch.nan)
        title = "Weights of the other clients' models that each client (row) is tied to"
        return {"attention": draw_matrix(list(models), weights, title)}


def attention(rows: Tensor, kind: Kind, own: float, sigma: float | None) -> Tensor:
    """The weights xi ``(N, N)`` of all models ``(N, d)`` in every client's mixture; rows sum to 1.

    Example:
        >>> rows = torch.tensor([[0.0, 1.0], [0.0, 1.1], [3.0, 0.0]])
        >>> attention(rows, "distance", own=0.5, sigma=1.0).round(decimals=2)
        tensor([[0.5000, 0.5000, 0.0000],
                [0.5000, 0.5000, 0.0000],
                [0.0000, 0.0000, 1.0000]], dtype=torch.float64)
    """
    count = len(rows)
    if count == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    if kind == "cosine":
        rows = torch.nn.functional.normalize(rows, dim=1)
    # Computed from differences: the expanded square would cancel where models are close.
    gap = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").double().square()
    if kind == "cosine":
        gap, sigma = gap / 2, None if sigma is None else 1 / sigma  # 1 - cos
    typical = float(gap[*torch.triu_indices(count, count, 1)].median())
    # If all models are equal, all are near for every width.
    width = sigma or typical / 4 or 1.0
    gap.fill_diagonal_(torch.inf)
    if kind == "cosine":
        weights = (-gap / width).softmax(1)
    else:
        near = torch.exp(-gap / width)
        most = near.sum(1).max()
        weights = near / most if most > 0 else near
    weights = (1 - own) * weights
    return weights + torch.diag(1 - weights.sum(1))
