"""IFCA: every client picks the model that fits it best, and models are averaged within clusters.

Ghosh, Chung, Yin, Ramchandran: An efficient framework for clustered federated learning, NeurIPS
2020, Algorithm 1 with model averaging. If the canonical part is not the whole network, this is the
paper's variant in which clusters share the first layers (Section 6).

| symbol | here |
|---|---|
| theta_1 ... theta_k | ``server["shared"]``, instances 0 to K - 1 of the canonical part |
| F_i(theta_j) | ``client.loss_at`` with all weight on instance j |
| s_ij, one-hot | the membership vector of client i |
| tau, gamma | the round's budget of steps, the optimizer |

    j_i = argmin_j F_i(theta_j),   theta_j <- sum_{i: j_i = j} p_i theta_i / sum_{i: j_i = j} p_i

Parameters that are not canonical are averaged over the whole cohort. An instance that no client
picked stays.

Deviations:
- Clients send displacements; of the canonical part they send only their instance's.
- p_i are sample shares unless ``weighting=uniform``; the paper weights clients equally.
- Before its first round a client has chosen nothing: its membership is 1/K, as in PPFL.
"""

from __future__ import annotations

import math
import re

from medfed.method import *
from medfed.personalize.canonical_base import MEMBERSHIP, CanonicalMethod, one_hot


@dataclass(frozen=True)
class IFCA(CanonicalMethod):
    """Assigns clients to clusters by the smallest loss, over a canonical model.

    Attributes:
        choice_batches: Batches for computing the losses, the same for all instances;
            ``None``: the whole epoch.
    """

    choice_batches: Annotated[int | None, check_optional_count] = None
    parts_sent: ClassVar[tuple[str, ...]] = ("common", "canonical")
    parts_averaged: ClassVar[tuple[str, ...]] = ()
    card: ClassVar[Card] = Card(
        "Ghosh et al. 2020", "several models", "the choice of one of K",
        up={"common": 1, "instance": 1}, extra_passes="K losses of an epoch",
        privacy_exposure="losses",
    )  # fmt: skip

    def closed(self, server: State, replies: Replies) -> State:
        """All instances go out; the common part and the chosen instance come back."""
        server = dict(server)
        before = server["membership"]
        chosen = {c: one_hot(before[c], choice_of(m)) for c, m in replies.items()}
        server["membership"] = {**before, **chosen}
        server["shared"] = self._averaged(server, replies)
        self.record(server)
        return server

    def _averaged(self, server: State, replies: Replies) -> Tensors:
        """Averages over the cohort, and each instance over the clients that chose it."""
        groups: dict[tuple[str, int], dict[str, Message]] = {}
        for client, message in replies.items():
            for part in message.parts:
                choice = choice_of(message) if part == "canonical" else 0
                groups.setdefault((part, choice), {})[client] = message
        shared = dict(server["shared"])
        for (part, _), members in groups.items():
            mean = self.mean(server, members, part)
            shared |= add(select(shared, mean), mean)
        return shared

    def fit(self, client: Client, message: Message) -> Message:
        """Picks an instance, trains it with the common part, and replies with the displacements."""
        received = message.parts["shared"]
        at = {**received, **client.state["personal"]}
        choice = self.choose(client, at)
        start = {**at, MEMBERSHIP: one_hot(at[MEMBERSHIP], choice)}
        shared, client.state["personal"] = client.split.split(self.shared_steps(client, start))
        count = at[MEMBERSHIP].numel()
        common, chosen = parts_of(client.split.shared, count, choice)
        moved = subtract(shared, received)
        parts = {"common": select(moved, common), "canonical": select(moved, chosen)}
        parts = {part: named for part, named in parts.items() if named}
        scalars = {"choice": float(choice)} if count > 1 else {}
        return Message("fit", parts, scalars, dict.fromkeys(parts, "update"))

    def fit_membership(self, client: Client, start: Tensors, steps: int) -> Tensor:
        """An onboarded client picks like all others; it needs no gradient step."""
        return one_hot(start[MEMBERSHIP], self.choose(client, start))

    def fine_tune(self, client: Client, message: Message) -> Tensors:
        """All steps train the chosen instance and the common part."""
        return self.shared_steps(client, self.onboard(client, message))

    def choose(self, client: Client, at: Tensors) -> int:
        """Returns argmin_k of the training loss with instance k alone, the first of ties."""
        count = at[MEMBERSHIP].numel()
        if count == 1:
            return 0
        models = ({**at, MEMBERSHIP: one_hot(at[MEMBERSHIP], k)} for k in range(count))
        losses = [client.loss_at(model, batches=self.choice_batches) for model in models]
        finite = [k for k in range(count) if math.isfinite(losses[k])]
        if not finite:
            raise NonFiniteError("the loss is NaN or infinite under every canonical model")
        return min(finite, key=losses.__getitem__)


def choice_of(message: Message) -> int:
    """Returns the instance that a client has picked, of one model the only one."""
    return int(message.scalars.get("choice", 0))


def parts_of(names: Sequence[str], count: int, choice: int) -> tuple[list[str], list[str]]:
    """Splits the names of a canonical model into common ones and those of an instance.

    Example:
        >>> names = ["common.w", "canonical.0.v", "canonical.0.mean", "canonical.1.v"]
        >>> parts_of(names, 2, choice=1)
        (['common.w', 'canonical.0.mean'], ['canonical.1.v'])
    """
    known = set(names)
    common, chosen = [], []
    for name in names:
        match = re.match(r"canonical\.(\d+)\.", name)
        if match and all(f"canonical.{k}.{name[match.end() :]}" in known for k in range(count)):
            if int(match[1]) == choice:
                chosen.append(name)
        else:
            common.append(name)
    return common, chosen
