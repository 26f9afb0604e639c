"""pFedMac (FedMac): sparse personal models that correlate with the shared one.

Liu, Li, Wang, Zhang, Shao, Geng: Sparse personalized federated learning, IEEE TNNLS 2023
(arXiv:2107.05330). As pFedMe (:mod:`medfed.personalize.pfedme`), with its symbols, but

    theta <- about argmin f_i(theta) - lambda <theta, w_i> + gamma phi(theta)

| symbol | here |
|---|---|
| lambda, gamma | ``strength``, ``sparsity`` |
| phi(theta), a smooth norm ‖theta‖_1 | sum of rho log cosh(theta_n / rho), rho ``width`` |

At the fixed point w is the mean of the theta_i, and without phi grad f_i(theta_i) = lambda w. The
inner product is unbounded: f_i must be more convex than lambda. A network's loss is not convex
enough far from 0, so weights slowly grow unless ``optimizer.weight_decay`` is lambda or more.

Deviations: those of pFedMe; the paper's additional phi(w) at the server is left out.
"""

from __future__ import annotations

import math

from torch.nn.functional import softplus

from medfed.method import *
from medfed.personalize.pfedme import PFedMe


@dataclass(frozen=True)
class PFedMac(PFedMe):
    """pFedMe with an inner product in place of the squared distance.

    Attributes:
        strength: lambda >= 0.
        sparsity: gamma >= 0.
        width: rho > 0; weights much smaller than it are hardly pulled to 0.
    """

    strength: Annotated[float, Range(0.001, 0.1)] = 0.01
    sparsity: Annotated[float, check_not_negative, Range(1e-5, 1e-3)] = 1e-4
    width: Annotated[float, check_positive] = 0.01
    card: ClassVar[Card] = replace(PFedMe.card, paper="Liu et al. 2023")

    def tie(self, w: Tensors) -> Penalty:
        return Correlation(w, self.strength, self.sparsity, self.width)


@dataclass(frozen=True)
class Correlation:
    """The penalty -lambda <theta, w> + gamma phi(theta).

    Attributes:
        w: The anchor.
        strength: lambda.
        sparsity: gamma.
        width: rho of phi.
    """

    w: Tensors
    strength: float
    sparsity: float
    width: float

    def __call__(self, theta: Mapping[str, Tensor]) -> Tensor:
        terms = [torch.zeros(())]
        for name, tensor in self.w.items():
            terms.append(self.sparsity * smooth_l1(theta[name], self.width))
            terms.append(-self.strength * (theta[name] * tensor).sum())
        return sum(terms[1:], terms[0])


def smooth_l1(x: Tensor, width: float) -> Tensor:
    """The sum of rho log cosh(x / rho), at most |x|_1 and no more than rho log 2 per entry below.

    Example:
        >>> float(smooth_l1(torch.tensor([3.0, -4.0]), 1e-3))
        6.998...
        >>> float(smooth_l1(torch.zeros(2), 1.0))
        0.0
    """
    size = x.abs() / width
    return width * (size + softplus(-2 * size) - math.log(2)).sum()
