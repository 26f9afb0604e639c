"""QuPeL: a shared model in full precision pulls quantised personal models together.

Ozkara, Singh, Data, Diggavi: QuPeL: Quantized personalization with applications to federated
learning, 2021, Algorithm 2:

    min over w, x_i, c_i of the mean over i of F_i,
    F_i = f_i(x_i) + f_i(Q_{c_i}(x_i)) + lambda R(x_i, c_i) + (lambda_p / 2) |x_i - w|^2

| symbol | here |
|---|---|
| w | ``server["shared"]`` |
| x_i, c_i | ``state["model"]``, ``state["centers"]`` of client i |
| lambda_p, eta_3 | ``proximity``, ``global_lr`` |
| tau | the local steps of a round |
| lambda, eta_1, eta_2, P | as in :mod:`medfed.personalize.quantized` |

A local step is that of Algorithm 1 with lambda_p (x - w) in the gradient, then
w <- w - eta_3 lambda_p (w - x) on the client's own copy of w. After tau steps clients send their w
and receive the mean; x_i and c_i continue.

Deviations:
- The printed step of w (line 8) has the opposite sign, which makes w diverge from x.
- Clients send the displacement of w; the mean is the same, and a lossy codec acts on small values.
- Statistics of BatchNorm that are averaged are those of x_i; they go with w, and x_i keeps its own.
- The weights p_i of the mean may be ``samples`` (n_i / n) instead of the paper's 1 / N.

In the fine-tuning rounds at the end clients send only numbers, no tensors: each client trains the
free parameters of its quantised model; w does not change.
"""

from __future__ import annotations

from medfed.method import *
from medfed.personalize.fedavg import displacement
from medfed.personalize.quantized import Quantized
from medfed.personalize.quantized_base import TUNE


@dataclass(frozen=True)
class QuPeL(Quantized):
    """Quantised personal models, tied to a shared one.

    Attributes:
        proximity: lambda_p >= 0, how strongly x_i and w are tied.
        global_lr: eta_3 >= 0, the step size of w.
    """

    weighting: Weighting = "uniform"
    strength: float = 1e-6
    proximity: Annotated[float, check_not_negative, Range(0.5, 10.0)] = 0.025
    global_lr: Annotated[float, check_not_negative] = 5.0
    parts_sent: ClassVar[tuple[str, ...]] = ("shared",)
    parts_averaged: ClassVar[tuple[str, ...]] = parts_sent
    card: ClassVar[Card] = gradients_only(
        "Ozkara et al. 2021", "quantised model", "a quantised model", passes=2, client={"model": 1}
    )

    def init(self, weights: Tensors, split: ParameterSplit, clients: Sequence[ClientInfo]) -> Start:
        """The server holds w, each client x_i; both start from the same weights."""
        if self.global_lr * self.proximity > 1:
            warn(
                "Each step of the shared model overshoots (global_lr * proximity is "
                f"{self.global_lr * self.proximity:.3g}, more than 1); lower one of them."
            )
        server, client = super().init(weights, split, clients)
        shared = {"shared": select(weights, split.shared), "num_samples": client_sizes(clients)}
        return {**server, **shared}, client

    def round(self, server: State, cohort: Sequence[str], round: int) -> ServerRound:
        """Sends w and adds the mean of its displacements, except in fine-tuning."""
        if self.phases(round) == (TUNE,):
            return (yield from super().round(server, cohort, round))
        scalars, parts = self.scalars(round), {"shared": server["shared"]}
        replies = yield {
            c: Message("fit", parts, {**scalars, **self.scalars_of(server, c)}) for c in cohort
        }
        return {**server, "shared": add(server["shared"], self.mean(server, replies, "shared"))}

    def fit(self, client: Client, message: Message) -> Message:
        """Runs Algorithm 2 at one client; replies with the displacement of w."""
        if message.phase == TUNE:
            return super().fit(client, message)
        received = message.parts["shared"]
        tie = self.tie(select(received, client.split.parameters("shared")), message)
        self.train_tied(client, message, tie)
        return displacement(select({**client.state["model"], **tie.w}, received), received)

    def tie(self, w: Tensors, message: Message) -> Tie:
        """Returns what couples the client's model and its copy of w."""
        return Tie(w, self.proximity, self.global_lr * self.proximity)

    def train_tied(self, client: Client, message: Message, tie: Tie) -> None:
        """Takes the local steps on x and c; the tie moves w."""
        step = self.step(client, message, self.present_centers(client, message))

        def after(weights: Mapping[str, Tensor], grad_at: GradientAt) -> None:
            step(weights, tie.gradients(grad_at))
            tie.follow(weights, grad_at, step.centers)

        how: TrainOptions = {**tie.how, "after_step": after}
        end = client.train(client.state["model"], **how)
        client.state["model"], client.state["centers"] = end, step.centers


class Tie:
    """The client's copy of w; it and the client's model pull each other.

    ``how`` is what steps of x need of ``client.train``.
    """

    def __init__(self, w: Tensors, strength: float, rate: float) -> None:
        # Clones, as `follow` changes them in place, and the message is the channel's.
        self.w = {n: t.clone() for n, t in w.items()}
        self.strength, self.rate = strength, rate
        self.how: TrainOptions = {"penalty": Proximity(strength, self.w)} if strength else {}

    def gradients(self, grad_at: GradientAt) -> GradientAt:
        """Returns what gives the gradients of a quantised model."""
        return grad_at

    def follow(self, weights: Mapping[str, Tensor], grad_at: GradientAt, centers: Tensors) -> None:
        """Takes w <- w - eta_3 lambda_p (w - x), in place, so that the penalty sees it."""
        if self.w and self.rate:
            present = [weights[n].detach() for n in self.w]
            torch._foreach_lerp_(list(self.w.values()), present, self.rate)
