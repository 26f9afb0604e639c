"""EASGD: clients' models and a central model attract each other.

Zhang, Choromanska, LeCun: Deep learning with elastic averaging SGD, NeurIPS 2015, Section 3,
Equations 5 and 6, and Algorithm 1. After every tau local steps, all at the old values:

    e_i = x_i - c
    c <- c + alpha N sum_S p_i e_i
    x_i <- x_i - eta grad f_i(x_i) - alpha e_i    the next step; tau - 1 more without the last term

| symbol | here |
|---|---|
| c (the paper's x with a tilde) | ``server["shared"]`` |
| x_i, e_i | ``state["model"]``, ``state["gap"]`` |
| alpha, beta = N alpha | ``alpha``, ``beta``; rho = alpha / (tau eta) |
| tau | the round's budget of steps |
| p_i | ``weighting``; the paper's are 1/N |

What is evaluated is the centre, as in the paper. A client that was away is pulled by its last gap
when it comes back: the method was made for clients out of step.

Deviations:
- alpha is a separate key: with many clients the paper's beta / N (alpha=null) hardly moves one.
- With p_i, which need not be 1/N, the centre is that of sum p_i (f_i + (rho / 2) |x_i - c|^2).
- Steps are those of the run's optimizer. (The paper's own momentum is Nesterov's: EAMSGD.)
- Averaged statistics of the centre move towards the clients' as its parameters do; each client's
  model keeps its own, and a personal part is trained as in FedPer.
- A hospital that joins later trains from the centre, tied to it by rho.
"""

from __future__ import annotations

from functools import partial

from medfed.method import *
from medfed.personalize.fedavg import FedAvg


@dataclass(frozen=True)
class EASGD(OnboardingRules, FedAvg):
    """Every client has its model; the centre follows their mean, and they follow the centre.

    Attributes:
        beta: In (0, 1]: the share of the way to the mean that the centre goes.
        alpha: In (0, 1]: the share of its gap that a client goes back; None is the paper's beta/N.
    """

    beta: Annotated[float, within("(0, 1]"), Range(0.3, 1.0, log=False)] = 0.9
    alpha: Annotated[float | None, within("(0, 1]")] = 0.5
    supports_missing_channels: ClassVar[bool] = False
    client_zeros: ClassVar[tuple[str, ...]] = ("gap",)
    card: ClassVar[Card] = gradients_only("Zhang et al. 2015", client={"model": 1, "weights": 1})

    def init(self, weights: Tensors, split: ParameterSplit, clients: Sequence[ClientInfo]) -> Start:
        server, client = super().init(weights, split, clients)
        return server, {"model": weights, "gap": client["gap"]}

    def round(self, server: State, cohort: Sequence[str], round: int) -> ServerRound:
        """C <- c + beta sum_S p_i e_i; clients receive alpha."""
        message = Message("fit", {"shared": server["shared"]}, self.pull(server))
        replies = yield dict.fromkeys(cohort, message)
        mean = self.mean(server, replies, "shared")
        shared = add(server["shared"], mean, self.beta * self.part(server, replies))
        return {**server, "shared": shared}

    def pull(self, server: State) -> dict[str, float]:
        """What clients receive: alpha."""
        alpha = self.beta / len(server["num_samples"]) if self.alpha is None else self.alpha
        return {"alpha": alpha}

    def fit(self, client: Client, message: Message) -> Message:
        """Steps of x_i, the first of them with the pull of the last gap; then the new gap."""
        # The gap is of the x before the first step: its pull and its gradient are of one point.
        pulls = [client.state["gap"]]

        def pull(weights: Mapping[str, Tensor], _: GradientAt) -> None:
            for gap in pulls:
                for name, tensor in gap.items():
                    weights[name].sub_(tensor, alpha=message.scalars["alpha"])
            pulls.clear()

        end = client.train(client.state["model"], after_step=pull)
        gap = subtract(select(end, client.split.shared), message.parts["shared"])
        client.state = {"model": end, "gap": select(gap, client.state["gap"])}
        return Message("fit", {"shared": gap}, kinds={"shared": "update"})

    def personal_model(self, client: Client, message: Message) -> Tensors:
        """The centre, completed by what is personal of the client's model."""
        return {**message.parts["shared"], **client.split.split(client.state["model"])[1]}

    def onboarding(self, server: State, client: ClientInfo) -> Exchange:
        yield from ()
        return Message("deliver", {"shared": server["shared"]}, self.pull(server))

    def onboard(self, client: Client, message: Message) -> Tensors:
        """An onboarded client trains from the centre and is tied to it by rho."""
        start = self.onboarding_start(client, message)
        first = partial(client.gradient, start, batches=1)
        reach = client.effective_step_length(client.steps, lambda: flatten(first()))
        centre = select(start, client.split.parameters("shared"))
        return client.train(start, penalty=Proximity(message.scalars["alpha"] / reach, centre))
