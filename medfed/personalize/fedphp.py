"""FedPHP: each client's private model inherits over the rounds and teaches the received one.

Li, Zhan, Shao, Li, Song: FedPHP: Federated personalization with inherited private models, ECML-PKDD
2021, Algorithm 1 and Equation 5:

    f_i(w) = (1 - lambda) task loss + lambda MMD(features under w, features under h_i)
    h_i <- mu_i h_i + (1 - mu_i) w_i,   mu_i = mu k_i / (Q T) in [0, 1]

| symbol | here |
|---|---|
| h_i | ``state["inherited"]``, the client's model for prediction |
| k_i | ``state["count"]``, rounds that the client has taken part in, this one included |
| Q, T | ``fraction`` of the clients in a round, ``rounds`` of the run: Q T rounds are expected |
| lambda, mu | ``strength``, ``inheritance`` |

So h_i inherits more and more. The rule follows ports of the authors' code, as the paper was not
available; here T is the number of rounds of the run, in the ports the current round.

Deviations:
- In a client's first round nothing is inherited: no MMD, and h_i is w_i.
- Features are the head's input, averaged over positions; h_i computes them in evaluation mode. MMD
  uses five Gaussian kernels around the mean squared distance. The paper's alternative, transfer of
  outputs, is left out.
"""

from __future__ import annotations

from medfed.federation.other_state import OTHER
from medfed.method import *
from medfed.personalize.fedavg import WithLocalModel


@dataclass(frozen=True)
class FedPHP(TrainsOn, WithLocalModel):
    """FedAvg whose clients keep a running mean of their models and learn from it.

    Attributes:
        strength: lambda in [0, 1), the share of the transfer in the loss.
        inheritance: mu in [0, 1], how much h_i keeps by the end.
        rounds: T, rounds of the run.
        fraction: Q, the share of the clients in a round.
    """

    strength: Annotated[float, within("[0, 1)"), Range(0.01, 0.9)] = 0.1
    inheritance: Annotated[float, within("[0, 1]")] = 0.9
    rounds: Annotated[int, check_count] = 10
    fraction: float = 1.0
    local_model: ClassVar[str] = "inherited"
    needs: ClassVar[Needs | None] = "features"
    card: ClassVar[Card] = Card(
        "Li et al. 2021", "second model", "a running mean of its models",
        extra_passes="a forward pass a step", client={"personal": 1, "model": 1},
        privacy_exposure="outputs",
    )  # fmt: skip

    def client_start(self, weights: Tensors, split: ParameterSplit) -> State:
        count = {"count": torch.zeros((), dtype=torch.float64)}
        return {**super().client_start(weights, split), "count": count}

    def local_steps(self, client: Client, start: Tensors) -> Tensors:
        before = client.state["inherited"]

        def transfer(batch: Batch, live: Mapping[str, Tensor], forward: Forward) -> Tensor:
            pair = forward(live, features=True), forward(before, features=True)
            return self.strength * (discrepancy(*pair) - forward.loss)

        end = client.train(start, batch_penalty=transfer if before and self.strength else None)
        count = client.state["count"]["count"] + 1
        share = min(self.inheritance * float(count) / (self.fraction * self.rounds), 1.0)
        mixture = {n: share * t + (1 - share) * end[n] for n, t in before.items() if n != OTHER}
        client.state |= {"inherited": {**end, **mixture}, "count": {"count": count}}
        return end


def discrepancy(x: Tensor, y: Tensor) -> Tensor:
    """Returns the squared maximum mean discrepancy (MMD) of two samples, the biased estimate.

    The kernel is a sum of five Gaussians, exp(-d / b) of squared distances d, whose bandwidths b
    are 1/4 to 4 times the mean d of all pairs.

    Example:
        >>> points = torch.tensor([[0.0], [1.0]])
        >>> float(discrepancy(points, points)), bool(discrepancy(points, points + 3) > 1)
        (0.0, True)
    """
    every = torch.cat([x, y])
    gaps = (every[:, None] - every[None]).square().sum(2)
    width = gaps.detach().sum() / (len(every) * (len(every) - 1)) + 1e-8
    kernel = torch.stack([torch.exp(-gaps / (width * 2.0**k)) for k in range(-2, 3)]).sum(0)
    n = len(x)
    return kernel[:n, :n].mean() + kernel[n:, n:].mean() - 2 * kernel[:n, n:].mean()
