"""Shared by methods over canonical models: memberships, their history, and the local steps.

A network with canonical parts (:class:`medfed.models.networks.canonical.Canonical`) has one
more parameter, the membership vector c in the simplex. It is personal; all other parameters are
shared.
"""

from __future__ import annotations

from medfed.method import *
from medfed.personalize.fedavg import FedAvg

MEMBERSHIP = "membership"


@dataclass(frozen=True)
class CanonicalMethod(OnboardingRules, FedAvg):
    """FedAvg over a canonical model whose membership vector stays personal.

    ``server["membership"]`` holds a row per client, ``server["history"]`` all rows of the start
    and of every round so far.
    """

    personal: str | tuple[str, ...] = MEMBERSHIP
    mixes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.personal != (MEMBERSHIP,):
            raise ConfigError(
                f"algorithm.personal is {MEMBERSHIP} in {type(self).__name__}; what exists K times "
                "is chosen by canonical.parts."
            )

    def split(
        self, network: nn.Module, task_patterns: Sequence[str], buffers: BufferPolicy
    ) -> ParameterSplit:
        """The membership vector is personal, all else is shared."""
        if MEMBERSHIP not in dict(network.named_parameters()):
            raise ConfigError(
                f"algorithm={type(self).__name__.lower()} needs a model with a canonical part, and "
                "this one has none; choose canonical=outputs or canonical=parameters (in Python, "
                "give medfed.federate a list of networks)."
            )
        return super().split(network, task_patterns, buffers)

    def vectors(self, split: ParameterSplit, weights: Tensors) -> dict[str, int]:
        """Adds ``instance``, one of K, and ``common``, the part that all share."""
        lengths = super().vectors(split, weights)
        common = sum(t.numel() for n, t in weights.items() if n.startswith("common."))
        instance = (lengths["shared"] - common) // weights[MEMBERSHIP].numel()
        return {**lengths, "common": common, "instance": instance}

    def init(self, weights: Tensors, split: ParameterSplit, clients: Sequence[ClientInfo]) -> Start:
        start = torch.full_like(weights[MEMBERSHIP], 1 / weights[MEMBERSHIP].numel())
        server, client = super().init({**weights, MEMBERSHIP: start}, split, clients)
        if start.numel() > len(clients):
            warn(
                f"There are {start.numel()} canonical models for {len(clients)} clients: more than "
                "the data can distinguish."
            )
        server["membership"] = {c.id: start for c in clients}
        server["history"] = {MEMBERSHIP: start.expand(1, len(clients), -1).clone()}
        return server, client

    def closed(self, server: State, replies: Replies) -> State:
        """All models go out and come back; each is averaged over the whole cohort."""
        server = {**server, "shared": add(server["shared"], self.mean(server, replies, "shared"))}
        server["membership"] = {**server["membership"], **sent_by_each(replies, "membership")}
        self.record(server)
        return server

    def record(self, server: State) -> None:
        """Appends the present memberships to the history."""
        rows = torch.stack([server["membership"][c] for c in server["num_samples"]])
        server["history"] = {MEMBERSHIP: torch.cat([server["history"][MEMBERSHIP], rows[None]])}

    def shared_steps(self, client: Client, start: Tensors, steps: int | None = None) -> Tensors:
        """Trains everything except the membership, by default for the round's whole budget."""
        return client.train(start, update="shared", steps=steps, statistics=True)

    def fit_membership(self, client: Client, start: Tensors, steps: int) -> Tensor:
        """Returns the membership (K,) of an onboarded client; the models do not change."""
        return start[MEMBERSHIP]

    def onboarding_start(self, client: Client, message: Message) -> Tensors:
        start = super().onboarding_start(client, message)
        return {**start, MEMBERSHIP: torch.full_like(start[MEMBERSHIP], 1 / len(start[MEMBERSHIP]))}

    def onboard(self, client: Client, message: Message) -> Tensors:
        """An onboarded client fits its membership and nothing else."""
        start = self.onboarding_start(client, message)
        membership = self.fit_membership(client, start, client.steps)
        return with_statistics(client, {**start, MEMBERSHIP: membership})

    def fine_tune(self, client: Client, message: Message) -> Tensors:
        """Half of the steps fit the membership as in :meth:`onboard`, half train the rest."""
        start = self.onboarding_start(client, message)
        membership = self.fit_membership(client, start, share_of(client.steps, 0, 2))
        rest = share_of(client.steps, 1, 2)
        return self.shared_steps(client, {**start, MEMBERSHIP: membership}, rest)

    def alone(self, client: Client) -> Tensors:
        """Selects instance 0: the network that a method without canonical parts starts from."""
        first = one_hot(client.weights[MEMBERSHIP], 0)
        return self.shared_steps(client, {**client.weights, MEMBERSHIP: first})

    def memberships(self, server: State) -> Tensor:
        """The memberships after every round; an absent client keeps its last ones."""
        return server["history"][MEMBERSHIP]


def one_hot(like: Tensor, position: int) -> Tensor:
    """Returns the membership (K,) that has all its weight on one instance.

    Example:
        >>> one_hot(torch.zeros(3), 1)
        tensor([0., 1., 0.])
    """
    chosen = torch.zeros_like(like)
    chosen[position] = 1
    return chosen
