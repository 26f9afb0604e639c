"""PPFL: all clients train K canonical models; each mixes them by its membership vector.

PPFL (one of the project's source papers), its objective and Algorithms 1 and 3:

    min over theta, C of sum_i p_i f_i(theta, c_i) + (lambda/2) sum_ij w_ij |c_i - c_j|^2,
    c_i in the simplex

| symbol | here |
|---|---|
| theta = theta_com, {theta_k} | ``server["shared"]`` |
| C = [c_1 ... c_N] | ``server["membership"]``, one row per client; c_i in the client's state |
| C after each round | ``server["history"]`` |
| lambda, w_ij, L | ``strength``, ``affinity``, ``server["laplacian"]`` |
| p_i | ``weighting``, over the cohort |
| eta_2 | ``membership_lr`` |
| E, eta_1 | the round's budget of steps, the optimizer |

Algorithm 3 (``blocks=both``): every client takes one exponentiated-gradient step on c_i, then E
steps on theta at the new c_i, all from the theta that it received. Algorithm 1 (``random``): the
seed and the round's number determine which block a round updates.

Deviations:
- The step on c is eta_2 times the number of clients in the cohort (``membership_step=scaled``), so
  that p_i = 1/N does not make the memberships N times slower than local steps. The whole gradient
  is scaled; the objective is the same. ``literal`` is the printed step with p_i, which one of the
  paper's two forms omits.
- A client's description (label counts) comes with its first reply. Until then nothing ties it;
  while all memberships are 1/K, the coupling has no force.
- The gradient for c does not count towards the round's steps: one batch, or ``membership_batches``.
- For more than 500 clients the server keeps the rows that L is computed from, not L, so that memory
  and time do not grow quadratically; there is then no warning of too strong a coupling.
- ``membership_start`` rounds may pass before memberships move (0 in the paper). Randomly
  initialised models are not equally good, and the best one attracts every client. Once theta has
  settled at c_i = 1/K, the clients' gradients sum to about 0, and their differences separate the
  clients.
"""

from __future__ import annotations

from typing import Literal

from medfed.functional.mixing import coupling, exponentiated_gradient, spread_coupling
from medfed.method import *
from medfed.personalize.canonical_base import MEMBERSHIP, CanonicalMethod, one_hot
from medfed.personalize.similarity import Affinity

PAIRS = 500  # clients, at most, of which a matrix has every pair


@dataclass(frozen=True)
class PPFL(CanonicalMethod):
    """FedAvg over a canonical model whose membership vector stays personal.

    Attributes:
        strength: lambda >= 0, how strongly the memberships of similar clients are pulled together.
        membership_lr: eta_2 >= 0, the step on memberships.
        membership_step: ``scaled`` or ``literal``.
        membership_batches: Batches for the gradient of c; ``None``: the whole epoch.
        membership_start: Number of first rounds in which c_i stays 1/K and only theta learns.
        blocks: ``both`` in every round, or ``random``: one of them.
        clusters: The model that a client uses: its mixture (``soft``), or by the max rule the
            canonical model of its largest membership (``hard``).
        output: The iterate that clients use: the ``last``, or as in the paper's theorem one of a
            round that the seed draws (``random``); until that round the last.
        rounds: Of the run, among which ``output=random`` draws.
        affinity: Which clients are similar; not used if lambda is 0.
        seed: The run's seed, for the random blocks.
    """

    strength: Annotated[float, check_not_negative] = 1e-5
    membership_lr: Annotated[float, check_not_negative, Range(0.05, 5.0)] = 0.5
    membership_step: Literal["scaled", "literal"] = "scaled"
    membership_batches: Annotated[int | None, check_optional_count] = 1
    membership_start: Annotated[int, check_not_negative] = 0
    blocks: Literal["both", "random"] = "both"
    clusters: Literal["soft", "hard"] = "soft"
    output: Literal["last", "random"] = "last"
    rounds: Annotated[int, check_count] = 1
    affinity: Affinity = field(default_factory=Affinity)
    seed: int = 0
    parts_sent: ClassVar[tuple[str, ...]] = ("sketch", "shared", "membership")
    card: ClassVar[Card] = gradients_only(
        "PPFL", "several models", "K membership numbers", down={"shared": 1, "personal": 1},
        up={"shared": 1, "personal": 1}, extra_passes="a batch, for the memberships",
    )  # fmt: skip

    def summaries(self, data: ClientData) -> Sequence[Statistic]:
        """The sketch that clients send before the first round, if memberships are coupled."""
        return self.affinity.summaries(data) if self.strength else ()

    def phases(self, round: int) -> tuple[str, ...]:
        """``fit`` for both blocks; else the round's coin chooses ``shared`` or ``membership``."""
        if self.blocks == "both":
            return ("fit",)
        if round < self.membership_start:
            return ("shared",)
        return (("shared", "membership")[derive_seed(self.seed, round, "block") % 2],)

    def max_batches_drawn(self, steps: int, epoch: int) -> int:
        """Those of the steps, and of the gradient for the memberships."""
        return steps + (self.membership_batches or epoch)

    def init(self, weights: Tensors, split: ParameterSplit, clients: Sequence[ClientInfo]) -> Start:
        server, client = super().init(weights, split, clients)
        server |= {"sketches": {}, "laplacian": {}, "output": {}, "chosen": {}}
        if self.strength and not self.affinity.needs_sketches:
            self._tie(server)
        return server, client

    def round(self, server: State, cohort: Sequence[str], round: int) -> ServerRound:
        """Algorithms 1 and 3: sends theta and 2 lambda (LC)_i, receives theta and c_i."""
        (phase,) = self.phases(round)
        server = dict(server)
        replies = yield self._outbox(server, cohort, phase, round)
        if phase != "membership":
            server["shared"] = add(server["shared"], self.mean(server, replies, "shared"))
        self._receive(server, replies)
        self.record(server)
        if self.output == "random" and round == derive_seed(self.seed, "output") % self.rounds:
            server |= {"output": server["shared"], "chosen": server["membership"]}
        return server

    def broadcast(self, server: State, client: str) -> Message:
        """The last theta, or theta and c_i of the drawn round."""
        if not server["output"]:
            return super().broadcast(server, client)
        chosen = {MEMBERSHIP: server["chosen"][client]}
        return Message("deliver", {"shared": server["output"], "membership": chosen})

    def personal_model(self, client: Client, message: Message) -> Tensors:
        """Mixes the canonical models by c_i, or takes the one with the largest part of it."""
        model = super().personal_model(client, message) | message.parts.get("membership", {})
        if self.clusters == "hard":
            c = model[MEMBERSHIP]
            model[MEMBERSHIP] = one_hot(c, int(c.argmax()))
        return model

    def _outbox(self, server: State, cohort: Sequence[str], phase: str, round: int) -> Outbox:
        order, sizes = list(server["num_samples"]), self.weights(server, cohort)
        scale = len(cohort) if self.membership_step == "scaled" else 1
        several = len(server["membership"][order[0]]) > 1
        # With a single canonical model the membership is 1: there is nothing to learn.
        learns = several and phase != "shared" and round >= self.membership_start
        asks = several and self.strength > 0 and self.affinity.needs_sketches
        pull: Tensor | None = None
        if learns and server["laplacian"]:
            rows = torch.stack([server["membership"][c] for c in order])
            ((name, tie),) = server["laplacian"].items()
            couple = coupling if name == "L" else spread_coupling
            pull = scale * couple(tie.to(rows.device), rows, self.strength)
        place = {c: n for n, c in enumerate(order)}
        outbox = {}
        for client, size in zip(cohort, sizes, strict=True):
            parts, scalars = {"shared": server["shared"]}, {}
            if learns:
                scalars["weight"] = scale * size / sum(sizes)
            if pull is not None:
                like = server["membership"][client]
                parts["coupling"] = {MEMBERSHIP: pull[place[client]].to(like)}
            if asks and client not in server["sketches"]:
                scalars["sketch"] = 1.0
            outbox[client] = Message(phase, parts, scalars)
        return outbox

    def _receive(self, server: State, replies: Replies) -> None:
        """Keeps the cohort's memberships; absent clients keep theirs."""
        server["membership"] = {**server["membership"], **sent_by_each(replies, "membership")}
        if sketches := sent_by_each(replies, "sketch"):
            server["sketches"] = {**server["sketches"], **sketches}
            self._tie(server)

    def _tie(self, server: State) -> None:
        """Updates the Laplacian; warns if its coupling is too strong for explicit steps."""
        clients = list(server["num_samples"])
        like = next(iter(server["shared"].values()))
        if len(clients) > PAIRS and self.affinity.needs_sketches:
            unit = self.affinity.spread(clients, server["sketches"])
            server["laplacian"] = {"U": unit.to(like.device)}
            return
        laplacian = self.affinity.laplacian(clients, server["sketches"])
        before = self._stiffness(server["laplacian"].get("L", torch.zeros(1, 1)))
        now = self._stiffness(laplacian)
        if before <= 1 < now:
            warn(
                "The coupling of memberships is too strong for explicit steps (membership_lr * "
                f"strength * |L|{' * clients' * (self.membership_step == 'scaled')} is {now:.3g}, "
                f"more than 1), so that they may swing; lower one of them {now:.3g} times."
            )
        server["laplacian"] = {"L": laplacian.to(like.device)}

    def _stiffness(self, laplacian: Tensor) -> float:
        """Returns eta_2 lambda |L|; the explicit step is stable up to about 1."""
        scale = len(laplacian) if self.membership_step == "scaled" else 1
        norm = float(torch.linalg.matrix_norm(laplacian, ord=2))
        return scale * self.membership_lr * self.strength * norm

    def fit(self, client: Client, message: Message) -> Message:
        """Algorithm 3: first c_i, then theta; Algorithm 1: the block that the phase names."""
        phase, received = message.phase, message.parts["shared"]
        parts: dict[str, Tensors] = {}
        if "sketch" in message.scalars:
            parts["sketch"] = self.affinity.describe(client)
        if "weight" in message.scalars:
            pull = message.parts["coupling"][MEMBERSHIP] if "coupling" in message.parts else None
            at = {**received, **client.state["personal"]}
            moved = {MEMBERSHIP: self._step(client, at, message.scalars["weight"], pull)}
            parts["membership"] = moved
            client.state["personal"] = {**client.state["personal"], **moved}
        # theta trains under the updated c_i.
        if phase != "membership":
            end = self.shared_steps(client, {**received, **client.state["personal"]})
            shared, client.state["personal"] = client.split.split(end)
            parts["shared"] = subtract(shared, received)
        kinds = {"shared": "update"} if "shared" in parts else {}
        return Message(phase, parts, kinds=kinds)  # type: ignore[arg-type]

    def _step(self, client: Client, at: Tensors, weight: float, pull: Tensor | None) -> Tensor:
        """c_i <- softmax(log c_i - eta_2 (p_i grad_c f_i + 2 lambda (LC)_i))."""
        slopes = client.gradient(at, update="personal", batches=self.membership_batches)
        if not bool(torch.isfinite(slopes[MEMBERSHIP]).all()):
            raise NonFiniteError("the loss became NaN or infinite; lower optimizer.lr")
        gradient = weight * slopes[MEMBERSHIP]
        if pull is not None:
            gradient = gradient + pull
        return exponentiated_gradient(at[MEMBERSHIP], gradient, self.membership_lr)

    def fit_membership(self, client: Client, start: Tensors, steps: int) -> Tensor:
        """Steps of eta_2 on f_i alone: an onboarded client is not coupled and sends nothing."""
        at = start
        for _ in range(steps):
            at = {**at, MEMBERSHIP: self._step(client, at, 1.0, None)}
        return at[MEMBERSHIP]
