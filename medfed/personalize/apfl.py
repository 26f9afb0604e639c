"""APFL: every client learns how to mix its local model with the shared one.

Deng, Kamani, Mahdavi: Adaptive personalized federated learning, 2020, Algorithm 1. A local step
uses one batch; all its gradients are at the old values. The mix is m = alpha v + (1 - alpha) w:

    w <- w - eta grad f(w)
    v <- v - eta alpha grad f(m)
    alpha <- alpha - eta_alpha <v - w, grad f(m)>, cut to [0, 1]

| symbol | here |
|---|---|
| w | ``server["shared"]``, averaged as in FedAvg |
| v_i | ``state["own"]``, parameters |
| alpha_i | ``state["alpha"]``; the last reported values, for the figure, ``server["alphas"]`` |
| eta | the optimizer's step size |
| eta_alpha | ``alpha_lr``; the paper's is eta |

Models are mixed, not their gradients or outputs: alpha grad f(v) + (1 - alpha) grad f(w) is not the
gradient at the mix.

Deviations:
- w takes the optimizer's steps; v takes plain gradient steps.
- BatchNorm's statistics belong to w; the mix has none. ``norm=group`` fits better.
- Clients send their alpha_i, a number that only the figure uses.
- The second gradient of each step does not count towards the round's steps.
"""

from __future__ import annotations

from medfed.method import *
from medfed.personalize.client_pictures import draw_shares
from medfed.personalize.fedavg import FedAvg


@dataclass(frozen=True)
class APFL(OnboardingRules, FedAvg):
    """FedAvg for w, with a local model v and its share of the mix.

    Attributes:
        alpha: The share of v at the start, in [0, 1].
        alpha_lr: eta_alpha >= 0; ``None`` for the optimizer's step size, 0 for a fixed share.
    """

    alpha: Annotated[float, within("[0, 1]"), Range(0.1, 0.9, log=False)] = 0.5
    alpha_lr: Annotated[float | None, check_not_negative] = None
    card: ClassVar[Card] = gradients_only(
        "Deng et al. 2020", "second model", "a model, mixed in", passes=2,
        client={"personal": 1, "parameters": 1},
    )  # fmt: skip

    @property
    def gradients_per_batch(self) -> int:
        return 2

    def init(self, weights: Tensors, split: ParameterSplit, clients: Sequence[ClientInfo]) -> Start:
        server, client = super().init(weights, split, clients)
        model = select(weights, split.parameters("all"))
        alpha = torch.tensor(self.alpha, dtype=torch.float64)
        server["alphas"] = {c.id: alpha for c in clients}
        return server, {**client, "own": model, "alpha": {"alpha": alpha}}

    def closed(self, server: State, replies: Replies) -> State:
        """As in FedAvg; also records the shares that clients report."""
        new = {c: torch.tensor(m.scalars["alpha"], dtype=torch.float64) for c, m in replies.items()}
        return {**super().closed(server, replies), "alphas": {**server["alphas"], **new}}

    def fit(self, client: Client, message: Message) -> Message:
        reply = super().fit(client, message)
        return replace(reply, scalars={"alpha": float(client.state["alpha"]["alpha"])})

    def local_steps(self, client: Client, start: Tensors) -> Tensors:
        """Steps of w, each followed by one of v and alpha."""
        mix = Mix(self, client, {n: t.clone() for n, t in start.items()})
        end = client.train(start, after_step=mix.follow)
        client.state["own"], client.state["alpha"] = mix.v, {"alpha": mix.alpha}
        return end

    def personal_model(self, client: Client, message: Message) -> Tensors:
        w = super().personal_model(client, message)
        return {**w, **Mix(self, client, w)}

    def onboard(self, client: Client, message: Message) -> Tensors:
        """An onboarded client's v starts as w, which stays; v and alpha take the steps."""
        w = self.onboarding_start(client, message)
        client.state["own"] = select(w, client.split.parameters("all"))
        mix = Mix(self, client, w)
        for _ in range(client.steps):
            mix.step(lambda at: client.gradient({**w, **at}, batches=1))
        return with_statistics(client, {**w, **mix})

    def pictures(self, server: State, clients: Sequence[str]) -> dict[str, Any]:
        """A bar per client: the share of the local model in its mix."""
        return {"alphas": draw_shares(server["alphas"], "Share of the local model in the mix")}


class Mix:
    """The mix of one client while it trains, from v, w and alpha; made when it is read."""

    def __init__(self, method: APFL, client: Client, w: Mapping[str, Tensor]) -> None:
        self.v, self.alpha = client.state["own"], client.state["alpha"]["alpha"]
        self.w = select(w, self.v)
        rate = client.learning_rate
        self._rates = rate, rate if method.alpha_lr is None else method.alpha_lr

    def keys(self) -> Iterable[str]:
        """Returns the names of its tensors."""
        return self.v.keys()

    def __getitem__(self, name: str) -> Tensor:
        alpha = float(self.alpha)
        return (alpha * self.v[name]).add_((1 - alpha) * self.w[name])

    def step(self, grad_at: Callable[[Any], Tensors]) -> None:
        """Moves v and alpha at the present w."""
        gradient, alpha, (lr, alpha_lr) = grad_at(self), float(self.alpha), self._rates
        # Uses v and w before the step: alpha and v descend from the same point.
        slope = sum((t - self.w[n]).mul_(gradient[n]).sum().double() for n, t in self.v.items())
        # In the memory of the gradient, as the client keeps the v of its last round until the end.
        self.v = {n: gradient[n].mul_(-lr * alpha).add_(t) for n, t in self.v.items()}
        self.alpha = (self.alpha - alpha_lr * slope).clamp(0, 1)

    def follow(self, weights: Mapping[str, Tensor], grad_at: GradientAt) -> None:
        """Takes the step at the old w, then copies the optimizer's new w."""
        self.step(grad_at)
        overwrite(self.w, weights)
