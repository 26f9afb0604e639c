"""SuPerFed-MM: trains a federated and a local model so that every mixture of them is good.

Hahn, Jeong, Lee: Connecting low-loss subspace for personalized federated learning, KDD 2022,
Algorithm 1, model mixing. From round L R of R on, every batch draws lambda ~ U(0, 1):

    f_i((1 - lambda) w_f + lambda w_l) + mu |w_f - w|^2 + nu cos^2(w_f, w_l)

| symbol | here |
|---|---|
| w, w_f | ``server["shared"]``, and the client's trained copy of it |
| w_l | ``state["own"]``, parameters |
| L | ``start`` |
| mu, nu | ``proximity``, ``orthogonality``; cos is of all weights as one vector |
| lambda at evaluation | ``state["share"]``: the grid's value with the smallest validation loss |

With g the gradient at the mixture and c the cosine, w_f follows (1 - lambda) g + 2 mu (w_f - w) +
2 nu c (w_l / (|w_f| |w_l|) - c w_f / |w_f|^2), and w_l likewise lambda g + ... The authors' code
uses |w_f - w| without the square and chooses lambda on test data.

Deviations:
- w_l starts at the initial weights, permuted at random within each tensor and for each client:
  another sample from the same distribution, for any network.
- w_f takes the optimizer's steps, w_l plain gradient steps.
- lambda is chosen at the end of the client's round, with its w_f.
- Running statistics come from the mixtures during training and fit no single lambda; ``norm=group``
  fits better.
"""

from __future__ import annotations

from medfed.functional.mixing import cosine_slopes, mixed, shuffled
from medfed.method import *
from medfed.personalize.fedavg import FedAvg


@dataclass(frozen=True)
class SuPerFed(OnboardingRules, FedAvg):
    """FedAvg for w_f, with a local model w_l and a share of the mix.

    Attributes:
        start: L in [0, 1], the share of the rounds before mixing starts.
        proximity: mu >= 0.
        orthogonality: nu >= 0.
        grid: How many mixtures are tried on validation data, at least 2.
        rounds: R, rounds of the run.
        seed: Seed of the local models.
    """

    start: Annotated[float, within("[0, 1]")] = 0.4
    proximity: Annotated[float, check_not_negative, Range(0.001, 0.1)] = 0.01
    orthogonality: Annotated[float, check_not_negative] = 1.0
    grid: Annotated[int, within("[2, inf)")] = 5
    rounds: Annotated[int, check_count] = 10
    seed: int = 0
    card: ClassVar[Card] = Card(
        "Hahn et al. 2022", "second model", "a model, mixed in",
        extra_passes="losses of the mixtures on validation",
        client={"personal": 1, "parameters": 1}, privacy_exposure="losses",
    )  # fmt: skip

    def client_start(self, weights: Tensors, split: ParameterSplit) -> State:
        return {"own": {}, "share": {"share": torch.zeros(())}}

    def scalars(self, round: int) -> dict[str, float]:
        return {"mix": 1.0} if round >= int(self.start * self.rounds) else {}

    def fit(self, client: Client, message: Message) -> Message:
        """As in FedAvg before mixing starts; then trains both models."""
        mixes = "mix" in message.scalars
        return super().fit(client, message) if mixes else FedAvg().fit(client, message)

    def local_steps(self, client: Client, start: Tensors) -> Tensors:
        """Trains w_f and w_l, and chooses the share by the client's validation data."""
        w, rate = select(start, client.split.parameters("all")), client.learning_rate
        mu, nu = self.proximity, self.orthogonality
        rng = torch_rng(self.seed, client.id, "another model")
        local = client.state["own"] or shuffled(select(client.weights, w), rng)

        def direction(w_f: Mapping[str, Tensor], grad_at: GradientAt) -> Tensors:
            nonlocal local
            share = draw()
            g = grad_at(mixed(w_f, local, share))
            to_f, to_local = cosine_slopes(w_f, local)
            local = add(local, {n: share * g[n] + nu * t for n, t in to_local.items()}, -rate)
            gap = subtract(w_f, w)
            return {n: (1 - share) * g[n] + 2 * mu * gap[n] + nu * t for n, t in to_f.items()}

        end = client.train(start, direction=direction)
        shares = [k / (self.grid - 1) for k in range(self.grid)]
        models = ({**end, **mixed(end, local, s)} for s in shares)
        losses = [client.loss_at(model, split="val") for model in models]
        best = shares[losses.index(min(losses))]
        client.state |= {"own": local, "share": {"share": torch.tensor(best)}}
        return end

    def personal_model(self, client: Client, message: Message) -> Tensors:
        return mixture(client, super().personal_model(client, message))

    def onboard(self, client: Client, message: Message) -> Tensors:
        """An onboarded client trains both, from the shared model and a new local model."""
        return mixture(client, self.local_steps(client, self.onboarding_start(client, message)))


def draw() -> float:
    """Returns a share from U(0, 1), from the random stream of the local steps."""
    return float(torch.rand(()))


def mixture(client: Client, w: Tensors) -> Tensors:
    """Returns a client's mixture, given w_f."""
    return {**w, **mixed(w, client.state["own"], float(client.state["share"]["share"]))}
