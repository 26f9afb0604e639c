"""FedMGDA+: the server looks for a step that lowers every client's loss.

Hu, Shaloudegi, Zhang, Yu: Federated learning meets multi-objective optimization, IEEE Transactions
on Network Science and Engineering 2022, Algorithm 1 with Equation 11 (FedMGDA+):

    u_i = Delta_i / |Delta_i|
    lambda = argmin |sum_S lambda_i u_i|^2,  sum_S lambda_i = 1, |lambda_i - p_i| <= epsilon
    w <- w + eta_g sum_S lambda_i u_i

| symbol | here |
|---|---|
| w | ``server["shared"]`` |
| Delta_i | what client i sends, its displacement; the paper's u_i has the other sign |
| p_i (the paper's lambda_0) | ``weighting``, over the cohort |
| epsilon, eta_g | ``epsilon``, ``server_lr`` times ``decay`` to the power of the round |

With epsilon = 1 no client's loss rises to first order; with 0 it is the mean of the normalised
displacements. A displacement of 0 says that its client is at its optimum: then w stays.

A step is at most eta_g long, however short the displacements are: eta_g has to fall in the end.

Deviation: directions and norms are of parameters. Averaged statistics are averaged as in FedAvg.
"""

from __future__ import annotations

import numpy as np

from medfed.functional.mixing import minimum_norm
from medfed.method import *
from medfed.personalize.fedavg import FedAvg


@dataclass(frozen=True)
class FedMGDA(FedAvg):
    """FedAvg's clients; a server that looks for common descent.

    Attributes:
        epsilon: How far a client's weight may be from its p_i, in [0, 1].
        server_lr: eta_g >= 0, the length of a step on which all agree.
        decay: Its factor from round to round, in (0, 1].
    """

    epsilon: Annotated[float, within("[0, 1]"), Range(0.01, 1.0)] = 0.1
    server_lr: Annotated[float, check_not_negative] = 1.0
    decay: Annotated[float, within("(0, 1]")] = 0.99
    supports_missing_channels: ClassVar[bool] = False
    parts_averaged: ClassVar[tuple[str, ...]] = ()
    card: ClassVar[Card] = gradients_only("Hu et al. 2022")

    def init(self, weights: Tensors, split: ParameterSplit, clients: Sequence[ClientInfo]) -> Start:
        server, client = super().init(weights, split, clients)
        names = dict.fromkeys(split.parameters("shared"), torch.empty(0))
        return {**server, "parameters": names}, client

    def round(self, server: State, cohort: Sequence[str], round: int) -> ServerRound:
        replies = yield {c: Message("fit", {"shared": server["shared"]}) for c in cohort}
        moves = [select(m.parts["shared"], server["parameters"]) for m in replies.values()]
        rows = torch.stack([flatten(move) for move in moves]).double()
        norms = rows.norm(dim=1, keepdim=True)
        step = torch.zeros_like(rows[0])
        if bool((norms > 0).all()):
            units, prior = rows / norms, np.array(self.weights(server, replies))
            gram = (units @ units.T).cpu().numpy()
            convex = minimum_norm(gram, prior / prior.sum(), self.epsilon)
            step = self.server_lr * self.decay**round * (torch.from_numpy(convex).to(units) @ units)
        shared = add(server["shared"], self.mean(server, replies, "shared"))
        moved = add(select(server["shared"], server["parameters"]), cut(step, layout_of(moves[0])))
        return {**server, "shared": {**shared, **moved}}
