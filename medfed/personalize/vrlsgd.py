"""VRL-SGD: local steps, each corrected by how far the client's earlier rounds went astray.

Liang, Shen, Liu, Pan, Chen, Cheng: Variance reduced local SGD with lower communication complexity,
2019 (arXiv:1912.12844), Algorithm 1:

    d_i <- d_i + (w - y_i) / (K eta),   y_i the client's end of the last round, w the new mean
    y_i <- y_i - eta (grad f_i(y_i) - d_i),  K times from y_i = w
    w <- sum_i p_i y_i

| symbol | here |
|---|---|
| w (the paper's x-hat), y_i | ``server["shared"]``, ``state["end"]`` |
| d_i (the paper's Delta_i) | ``state["shift"]``; they sum to 0 |
| K eta | ``client.effective_step_length(K)``; ``state["reach"]`` |
| p_i | ``weighting``; the paper's are 1/N |

Its models are those of SCAFFOLD with option II and a server step of 1 (d_i = c_i - c), at half of
its traffic: every client must take part in every round.

Deviations: K eta is the way of the run's optimizer along a constant gradient, so that momentum
leads no farther. Personal entries are trained as in FedPer.
"""

from __future__ import annotations

from medfed.functional.prox import Linear
from medfed.method import *
from medfed.personalize.fedavg import FedAvg


@dataclass(frozen=True)
class VRLSGD(FedAvg):
    """FedAvg whose clients correct their steps without further messages."""

    supports_missing_channels: ClassVar[bool] = False
    client_zeros: ClassVar[tuple[str, ...]] = ("shift",)
    fresh_optimizer: ClassVar[bool] = True
    card: ClassVar[Card] = gradients_only(
        "Liang et al. 2019", client={"personal": 1, "weights": 2}, full_cohort=True
    )

    def client_start(self, weights: Tensors, split: ParameterSplit) -> State:
        reach = {"steps": torch.ones((), dtype=torch.float64)}
        return {"end": select(weights, split.parameters("shared")), "reach": reach}

    def local_steps(self, client: Client, start: Tensors) -> Tensors:
        """Updates the correction by the mean that has arrived, then trains along it."""
        before, reach = client.state["end"], float(client.state["reach"]["steps"])
        astray = subtract(select(start, before), before)
        shift = add(client.state["shift"], astray, 1 / reach)
        # The gradient of a linear term is its slope, so each step is along grad f_i - d_i.
        end = client.train(start, penalty=Linear({n: -t for n, t in shift.items()}))
        steps = torch.tensor(client.effective_step_length(client.steps), dtype=torch.float64)
        client.state |= {"end": select(end, before), "shift": shift, "reach": {"steps": steps}}
        return end
