"""pFedMe: personal models tied to an anchor, which follows them and is averaged.

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
- theta goes on from where it was, also over rounds, and every inner step draws its own batch; the
  paper asks for an accuracy only. K steps that begin at w_i each time have another fixed point.
- The gradient of F_i is lambda (w_i - theta) at the exact theta alone; with K steps it is near it.
- Running statistics belong to theta; those of w, where they are averaged, are the mean of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from medfed.common.checks import check_count, check_not_negative
from medfed.common.errors import ConfigError
from medfed.common.tensors import State, Tensors, add, select, subtract
from medfed.federation.algorithm import ClientInfo, ServerRound, Start
from medfed.federation.card import Card, Range
from medfed.federation.client import Client, GradientAt, Penalty
from medfed.federation.onboarding import OnboardingRules
from medfed.federation.split import ParameterSplit
from medfed.federation.wire.message import Message
from medfed.functional.prox import Proximity
from medfed.personalize.fedavg import FedAvg


@dataclass(frozen=True)
class PFedMe(OnboardingRules, FedAvg):
    """FedAvg of anchors w_i, each of which follows a personal model theta_i.

    Attributes:
        strength: lambda >= 0, how strongly theta is tied to its anchor.
        inner_steps: K, gradient steps of theta between two steps of its anchor.
        outer_step: eta lambda in (0, 2); 1 takes the anchor all the way to theta.
        server_lr: beta > 0, the share of the mean displacement that the server goes.

    Raises:
        ConfigError: If a value is out of range.
    """

    strength: float = 1.0
    inner_steps: int = 5
    outer_step: float = 1.0
    server_lr: float = 1.0
    card: ClassVar[Card] = Card(
        "T. Dinh et al. 2020",
        "second model",
        "a model, which an anchor follows",
        client={"model": 1},
        tune={"strength": Range(0.1, 10.0)},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative("algorithm.strength", self.strength)
        check_count("algorithm.inner_steps", self.inner_steps)
        if not 0 < self.outer_step < 2:
            raise ConfigError(
                f"algorithm.outer_step must be in (0, 2), not {self.outer_step}: from 2 on the "
                "anchor swings ever farther about its client's model."
            )
        if not self.server_lr > 0:
            raise ConfigError(f"algorithm.server_lr must be positive, not {self.server_lr}.")

    def init(self, weights: Tensors, split: ParameterSplit, clients: Sequence[ClientInfo]) -> Start:
        """All theta_i start as w. The server goes beta of the way with parameters alone."""
        server, _ = super().init(weights, split, clients)
        steps = {n: 1.0 if n in split.buffers else self.server_lr for n in split.shared}
        server["server_lr"] = {n: torch.tensor(step) for n, step in steps.items()}
        return server, {"model": weights}

    def round(self, server: State, cohort: Sequence[str], round: int) -> ServerRound:
        """W goes out, and moves beta of the way to the mean of the anchors."""
        replies = yield {c: Message("fit", {"shared": server["shared"]}) for c in cohort}
        mean = self.mean(server, replies, "shared")
        moved = {n: t * server["server_lr"][n] for n, t in mean.items()}
        return {**server, "shared": add(server["shared"], moved)}

    def fit(self, client: Client, message: Message) -> Message:
        """Trains theta; its anchor starts at w, follows it, and is what the reply is about."""
        w = message.parts["shared"]
        anchor = Anchor(self, client, w)
        end = client.train(client.state["model"], penalty=anchor.tie, after_step=anchor.follow)
        client.state["model"] = end
        update = subtract({**select(end, w), **anchor.w}, w)
        return Message("fit", {"shared": update}, kinds={"shared": "update"})

    def tie(self, w: Tensors) -> Penalty:
        """What ties theta to its anchor: (lambda/2) |theta - w|^2."""
        return Proximity(self.strength, w)

    def personal_model(self, client: Client, message: Message) -> Tensors:
        """theta_i."""
        return client.state["model"]

    def onboard(self, client: Client, message: Message) -> Tensors:
        """An onboarded client's theta starts from w and is tied to it, which stays."""
        start = self.onboarding_start(client, message)
        return client.train(start, penalty=self.tie(Anchor(self, client, start).w))

    def broadcast(self, server: State, client: str) -> Message:
        """Nothing is lacking: the personal model is already at the client."""
        return Message("deliver")


class Anchor:
    """w_i of one client while its theta trains.

    Args:
        method: The tie, K and eta lambda.
        client: Which parameters are tied, and the round's budget.
        w: All entries, or the shared ones.
    """

    def __init__(self, method: PFedMe, client: Client, w: Mapping[str, Tensor]) -> None:
        shared = client.split.parameters("shared")
        self.w = {n: t.clone() for n, t in select(w, shared).items()}
        self.tie = method.tie(self.w)
        self._method, self._left, self._done = method, client.steps, 0

    def follow(self, theta: Mapping[str, Tensor], _: GradientAt) -> None:
        """After K steps of theta, or the last one, moves the anchor."""
        self._done, self._left = self._done + 1, self._left - 1
        if self._done % self._method.inner_steps == 0 or not self._left:
            way = subtract(select(theta, self.w), self.w)
            # In place, so that the tie sees it.
            torch._foreach_add_(
                list(self.w.values()), list(way.values()), alpha=self._method.outer_step
            )
