"""pFedMe: each personal model is tied to an anchor that follows it; the anchors are averaged.

T. Dinh, Tran, Nguyen: Personalized federated learning with Moreau envelopes, NeurIPS 2020,
objective Eq. 2 and 3, Algorithm 1:

    min_w sum_i p_i F_i(w),   F_i(w) = min_theta f_i(theta) + (lambda/2) |theta - w|^2

    theta <- about argmin f_i(theta) + (lambda/2) |theta - w_i|^2       K steps
    w_i <- w_i - eta lambda (w_i - theta)                                R times, from w_i = w
    w <- (1 - beta) w + beta sum_S p_i w_i / sum_S p_i

| symbol | here |
|---|---|
| w | ``server["shared"]`` |
| theta_i, which is evaluated | ``state["model"]`` |
| lambda, beta | ``strength``, ``server_lr`` |
| eta lambda | ``outer_step``, the share of the way to theta that w_i goes |
| K; R | ``inner_steps``; as many as the round's budget allows |

Deviations:
- theta continues from its last value, also over rounds, and every inner step uses a new batch; the
  paper only requires an accuracy. K steps that restart at w_i have another fixed point.
- lambda (w_i - theta) is the gradient of F_i only at the exact theta; with K steps it is close.
- Running statistics belong to theta; if they are averaged, those of w are their mean.
"""

from __future__ import annotations

from medfed.method import *
from medfed.personalize.fedavg import FedAvg, KeepsModel, displacement


@dataclass(frozen=True)
class PFedMe(KeepsModel, OnboardingRules, FedAvg):
    """FedAvg of anchors w_i, each of which follows a personal model theta_i.

    Attributes:
        strength: lambda >= 0, how strongly theta is tied to its anchor.
        inner_steps: K, gradient steps of theta between two steps of its anchor.
        outer_step: eta lambda in (0, 2); 1 takes the anchor all the way to theta.
        server_lr: beta > 0, the share of the mean displacement that the server goes.
    """

    strength: Annotated[float, check_not_negative, Range(0.1, 10.0)] = 1.0
    inner_steps: Annotated[int, check_count] = 5
    # From 2 on the anchor diverges from its client's model.
    outer_step: Annotated[float, within("(0, 2)")] = 1.0
    server_lr: Annotated[float, check_positive] = 1.0
    card: ClassVar[Card] = gradients_only(
        "T. Dinh et al. 2020", "second model", "a model, which an anchor follows",
        client={"model": 1},
    )  # fmt: skip

    def init(self, weights: Tensors, split: ParameterSplit, clients: Sequence[ClientInfo]) -> Start:
        """All theta_i start as w. The server moves only parameters by the factor beta."""
        server, _ = super().init(weights, split, clients)
        steps = {n: 1.0 if n in split.buffers else self.server_lr for n in split.shared}
        server["server_lr"] = {n: torch.tensor(step) for n, step in steps.items()}
        return server, {"model": weights}

    def closed(self, server: State, replies: Replies) -> State:
        """Moves w by the factor beta towards the mean of the anchors."""
        mean = self.mean(server, replies, "shared")
        moved = {n: t * server["server_lr"][n] for n, t in mean.items()}
        return {**server, "shared": add(server["shared"], moved)}

    def fit(self, client: Client, message: Message) -> Message:
        """Trains theta; its anchor starts at w and follows it. The reply holds the anchor."""
        w = message.parts["shared"]
        anchor = Anchor(self, client, w)
        end = client.train(client.state["model"], penalty=anchor.tie, after_step=anchor.follow)
        client.state["model"] = end
        return displacement({**select(end, w), **anchor.w}, w)

    def tie(self, w: Tensors) -> Penalty:
        """The penalty (lambda/2) |theta - w|^2, which ties theta to its anchor."""
        return Proximity(self.strength, w)

    def onboard(self, client: Client, message: Message) -> Tensors:
        """An onboarded client's theta starts from w and is tied to the fixed w."""
        start = self.onboarding_start(client, message)
        return client.train(start, penalty=self.tie(Anchor(self, client, start).w))


class Anchor:
    """w_i of one client while its theta trains."""

    def __init__(self, method: PFedMe, client: Client, w: Mapping[str, Tensor]) -> None:
        shared = client.split.parameters("shared")
        self.w = {n: t.clone() for n, t in select(w, shared).items()}
        self.tie = method.tie(self.w)
        self._method, self._left, self._done = method, client.steps, 0

    def follow(self, theta: Mapping[str, Tensor], _: GradientAt) -> None:
        """Moves the anchor after K steps of theta, or after the last step."""
        self._done, self._left = self._done + 1, self._left - 1
        if self._done % self._method.inner_steps == 0 or not self._left:
            way = subtract(select(theta, self.w), self.w)
            # In place, so that the penalty sees it.
            present = list(self.w.values())
            torch._foreach_add_(present, list(way.values()), alpha=self._method.outer_step)
