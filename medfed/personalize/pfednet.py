"""pFedNet: a shared part, and personal parts that a similarity network pulls together.

pFedNet (the first of the project's source papers), objective Eq. 1, Z step Eq. 6 to 8, Algorithm 5:

    min over x, Z of (1/N) Σ_n f_n(Mx + N z_n) + λ Σ_{(i,j)∈E} ‖z_i − z_j‖_p

| symbol | here |
|---|---|
| x | ``server["shared"]`` |
| Z = [z_1 ... z_N] | ``server["personal"]``, one row per client |
| λ, p | ``strength``, ``p`` |
| E | ``server["graph"]["edges"]`` |
| I, J, E | ``shared_rounds``, ``personal_rounds``, ``local_steps`` |
| W, Ω, ρ of the ADMM | ``server["admm"]`` |

Deviations, each because the printed form is incorrect or slow:
- the proximal maps for p = 1 and ∞ are the true ones (printed Eq. 8 is right for p = 2 only);
- V = Z_t − Δ_n is taken at Z_t and held through all ADMM iterations; the displacement Δ_n of E
  local steps replaces the printed η∇;
- the step of z is Nη by default, so that λ = 0 is local training of z; ``z_step=literal`` is the
  printed η, which moves z N times slower;
- the coupling grows with the displacement: the printed λη_z would make λ weaker with more local
  steps. Let T_n be the client optimizer's way along a constant unit gradient in its steps (plain
  SGD: Eη). Then Z minimises Σ_n T/T_n ½‖z_n − V_n‖² + λNT Σ ‖z_i − z_j‖ (literal: λT), T their
  mean, so that λ is the objective's λ for every E, momentum and client size. For steps that are not
  proportional to the gradient, such as Adam's, T is estimated along the first gradient;
- after the Z step clients receive Z_{j+1}, not Z_j.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from medfed.functional.graph import edge_similarity
from medfed.functional.network_lasso import LassoState, solve_network_lasso
from medfed.functional.prox import check_norm
from medfed.method import *
from medfed.personalize.client_pictures import draw_graph
from medfed.personalize.similarity import SimilarityGraph


@dataclass(frozen=True)
class PFedNet(OnboardingRules, Algorithm):
    """Alternates rounds of the shared part and proximal steps of the personal parts.

    Attributes:
        strength: λ ≥ 0, how strongly neighbours are pulled together.
        p: Norm of the coupling: 1, 2 or ∞.
        shared_rounds: I, phases per round that update x.
        personal_rounds: J, phases per round that update Z.
        local_steps: E, gradient steps per phase; ``None`` divides the round's budget.
        z_step: ``scaled`` (by Nη) or ``literal`` (by η).
        graph: The similarity graph.
        rho: The ADMM's penalty ρ, held fixed; ``None`` balances the residuals.
        tolerance: Residual tolerance of the ADMM.
        max_iter: The most ADMM iterations per Z step.
    """

    personal: str | tuple[str, ...] = "task"
    weighting: Weighting = "uniform"
    strength: Annotated[float, check_not_negative, Range(1e-4, 1.0)] = 0.003
    p: float = 2.0
    shared_rounds: int = 1
    personal_rounds: int = 1
    local_steps: Annotated[int | None, check_optional_count] = None
    z_step: Literal["scaled", "literal"] = "scaled"
    graph: SimilarityGraph = field(default_factory=SimilarityGraph)
    rho: Annotated[float | None, check_positive] = None
    tolerance: Annotated[float, check_positive] = 1e-6
    max_iter: Annotated[int, check_count] = 500
    parts_sent: ClassVar[tuple[str, ...]] = ("sketch", "shared", "personal")
    parts_averaged: ClassVar[tuple[str, ...]] = ("shared",)
    card: ClassVar[Card] = gradients_only(
        "pFedNet", "similar clients", "the head, pulled to neighbours",
        down={"shared": 1, "personal": 1}, up={"shared": 1, "personal": 1},
        server={"shared": 1, "personal": "N + M"},
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        check_norm(self.p)
        rounds = self.shared_rounds, self.personal_rounds
        if min(rounds) < 0 or not any(rounds):
            raise ConfigError(
                "algorithm.shared_rounds and algorithm.personal_rounds must be 0 or more, and one "
                "of them positive for a part that the model has."
            )

    @property
    def _phases_per_round(self) -> int:
        return self.shared_rounds + self.personal_rounds

    @property
    def _opening(self) -> tuple[str, ...]:
        # In later rounds only clients that take part for the first time send a sketch.
        return ("sketch",) if self.graph.needs_sketches else ()

    def adapted(self, split: ParameterSplit, network: nn.Module) -> PFedNet:
        """Drops the phases of a part that the model lacks, such as x in logistic regression."""
        shared, personal = split.parameters("shared"), split.parameters("personal")
        rounds = self.shared_rounds * bool(shared), self.personal_rounds * bool(personal)
        return replace(self, shared_rounds=rounds[0], personal_rounds=rounds[1])

    def summaries(self, data: ClientData) -> Sequence[Statistic]:
        return self.graph.summaries(data)

    def least_steps(self, steps: int) -> int:
        return self.local_steps or share_of(steps, 0, self._phases_per_round)

    def max_batches_drawn(self, steps: int, epoch: int) -> int:
        """Those of all phases, and of each reach; a sketch may be a trained model."""
        phases, each = self._phases_per_round, self.local_steps
        work = max(steps, phases) if each is None else each * phases
        return work + self.personal_rounds + steps * self.graph.needs_sketches

    def phases(self, round: int) -> tuple[str, ...]:
        """Phases: missing sketches, then I times x, then J times Z."""
        work = ("shared",) * self.shared_rounds + ("personal",) * self.personal_rounds
        return self._opening + work

    def init(self, weights: Tensors, split: ParameterSplit, clients: Sequence[ClientInfo]) -> Start:
        rows, count = select(weights, split.parameters("personal")), len(clients)
        server: State = {
            "shared": select(weights, split.shared),
            "personal": {n: t.expand(count, *t.shape).clone() for n, t in rows.items()},
            "num_samples": client_sizes(clients),
            "lacks": {p: torch.zeros(count, dtype=torch.bool) for p in ("shared", "personal")},
            **{group: {} for group in ("sketches", "graph", "admm", "diagnostics")},
        }
        if not self.graph.needs_sketches:
            server["graph"] = self.graph.build([c.id for c in clients], {})
        return server, {"model": weights}

    def round(self, server: State, cohort: Sequence[str], round: int) -> ServerRound:
        # Clones, as flags change in place and states never do.
        server = {**server, "lacks": {p: t.clone() for p, t in server["lacks"].items()}}
        if self.graph.needs_sketches:
            unsketched = [c for c in cohort if c not in server["sketches"]]
            replies = yield self._outbox(server, unsketched, "sketch")
            self._receive_sketches(server, replies)
        for _ in range(self.shared_rounds):
            replies = yield self._outbox(server, cohort, "shared")
            server["shared"] = add(server["shared"], self.mean(server, replies, "shared"))
            # All clients lack the new x, including those that have just sent their part of it.
            server["lacks"]["shared"].fill_(True)
        for _ in range(self.personal_rounds):
            replies = yield self._outbox(server, cohort, "personal")
            self._z_step(server, replies)
            server["lacks"]["personal"].fill_(True)
        return server

    def _receive_sketches(self, server: State, replies: Replies) -> None:
        if replies:
            server["sketches"] = {**server["sketches"], **sent_by_each(replies, "sketch")}
            server["graph"] = self.graph.build(list(server["num_samples"]), server["sketches"])
            # The edges are new, and the dual has a row per edge.
            server["admm"] = {}

    def _z_step(self, server: State, replies: Replies) -> None:
        """The proximal step of the module's docstring; an absent client has V_i = z_i, T_i = T."""
        order, before, count = _places(server), server["personal"], len(server["num_samples"])
        mean = sum(m.scalars["reach"] for m in replies.values()) / len(replies)
        move, scale = (count * mean, 1.0) if self.z_step == "scaled" else (mean, 1 / count)
        # A copy, as it changes in place below. Rows are in the order of all clients, like edges.
        v = torch.cat([t.reshape(len(order), -1) for t in before.values()], dim=1)
        mass = torch.ones(len(order), dtype=torch.float64)
        for client, reply in replies.items():
            row = order[client]
            v[row].add_(flatten(reply.parts["personal"]), alpha=scale)
            # A row of the objective is divided by its client's reach T_n, the coupling by the mean
            # reach; the ratio of the two is the row's mass.
            mass[row] = mean / reply.scalars["reach"] if mean else 1.0  # a schedule may end at 0
        z = self._solve(v, mass, server, move)
        columns = z.split([t[0].numel() for t in before.values()], dim=1)
        pairs = zip(before.items(), columns, strict=True)
        server["personal"] = {n: column.reshape(t.shape) for (n, t), column in pairs}

    def _solve(self, v: Tensor, mass: Tensor, server: State, move: float) -> Tensor:
        """Returns Z; keeps the ADMM's state for a warm start and its convergence record."""
        graph, warm = server["graph"], server["admm"]
        weight: float | Tensor = self.strength * move
        if self.graph.weighted:
            weight = weight * edge_similarity(graph["distance"].cpu())
        done = solve_network_lasso(
            v,
            graph["edges"].cpu(),
            weight,
            self.p,
            mass=mass,
            state=LassoState(**warm) if warm else None,
            # The solver's problem is the paper's times the step, and so is its penalty.
            rho=None if self.rho is None else self.rho * move,
            tol=self.tolerance,
            max_iter=self.max_iter,
        )
        server["admm"] = done.state._asdict()
        names = "iterations", "primal_residual", "dual_residual", "converged"
        values = done.iterations, done.primal, done.dual, done.converged
        report = zip(names, map(float, values), strict=True)
        server["diagnostics"] = {n: torch.tensor(x, dtype=torch.float64) for n, x in report}
        return done.z

    def _lacking(self, server: State, index: int) -> dict[str, Tensors]:
        """Returns the current values that a client, by its place, has not received yet, by part."""
        parts = {}
        if server["lacks"]["shared"][index]:
            parts["shared"] = server["shared"]
        if server["lacks"]["personal"][index]:
            parts["personal"] = {n: t[index] for n, t in server["personal"].items()}
        return parts

    def _outbox(self, server: State, cohort: Sequence[str], phase: str) -> Outbox:
        """Sends the values that clients lack and records that they have them."""
        order = _places(server)
        outbox = {c: Message(phase, self._lacking(server, order[c])) for c in cohort}
        for client, message in outbox.items():
            for part in message.parts:
                server["lacks"][part][order[client]] = False
        return outbox

    def fit(self, client: Client, message: Message) -> Message:
        """Trains the phase's part and replies with its displacement."""
        model = self.personal_model(client, message)
        client.state["model"] = model
        if message.phase == "sketch":
            return Message("sketch", {"sketch": self.graph.describe(client, model)})
        index = client.phase_index - len(self._opening)
        steps = self.local_steps or client.share(index, self._phases_per_round)
        part: Update = "shared" if message.phase == "shared" else "personal"
        # If no personal phase follows, nothing else updates the statistics that stay here.
        end = client.train(model, update=part, steps=steps, statistics=not self.personal_rounds)
        # Buffers of the personal part are never sent; parameters wait for the server.
        waiting = client.split.parameters("personal")
        personal = {n: t for n, t in client.split.split(end)[1].items() if n not in waiting}
        client.state["model"] = {**model, **personal}
        names, scalars = client.split.shared, dict[str, float]()
        if part == "personal":
            names = client.split.parameters(part)
            first = partial(client.gradient, model, update="personal", batches=1)
            scalars["reach"] = client.effective_step_length(steps, lambda: flatten(first()))
        update = weighted_sum(select(end, names), model, -1)  # in the memory of new tensors
        return Message(part, {part: update}, scalars, {part: "update"})

    def broadcast(self, server: State, client: str) -> Message:
        """Returns the values of x and of its z that the client lacks."""
        # One place is found sooner than the table of all, which each client would build anew.
        return Message("deliver", self._lacking(server, [*server["num_samples"]].index(client)))

    def onboarding(self, server: State, client: ClientInfo) -> Exchange:
        """Takes a sketch; returns x and the mean of the nearest neighbours' z.

        If the graph does not use sketches, all clients are neighbours.
        """
        order = _places(server)
        near = yield from self.graph.find_neighbours(list(order), server["sketches"])
        rows = [order[c] for c in near]
        mean = {n: t[rows].mean(0) for n, t in server["personal"].items()}
        parts = {"shared": server["shared"], "personal": mean}
        return Message("deliver", {part: named for part, named in parts.items() if named})

    def onboard(self, client: Client, message: Message) -> Tensors:
        """The onboarded client takes the neighbours' mean as its z and does not train it.

        A few patients would move z farther from the neighbours than so little data can justify.
        :meth:`fine_tune` continues training from there.
        """
        return with_statistics(client, self.onboarding_start(client, message))

    def pictures(self, server: State, clients: Sequence[str]) -> dict[str, Any]:
        graph = server["graph"]
        return {"graph": draw_graph(clients, graph)} if graph else {}

    def personal_model(self, client: Client, message: Message) -> Tensors:
        received = message.parts
        return client.state["model"] | received.get("shared", {}) | received.get("personal", {})


def _places(server: State) -> dict[str, int]:
    """Returns the row of each client: their order is that of the first round."""
    return {client: row for row, client in enumerate(server["num_samples"])}
