"""SCAFFOLD: control variates correct the local steps for client drift.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic controlled averaging for
federated learning, ICML 2020, Algorithm 1:

    y_i <- y_i - eta (grad f_i(y_i) - c_i + c),  K times from y_i = w
    c_i+ = grad f_i(w)                      option I, an epoch more
    c_i+ = c_i - c + (w - y_i) / (K eta)    option II
    w <- w + eta_g sum_S p_i (y_i - w) / sum_S p_i,   c <- c + sum_S p_i (c_i+ - c_i)

| symbol | here |
|---|---|
| w (the paper's x), c | ``server["shared"]``, ``server["control"]`` |
| c_i | ``state["control"]`` |
| eta_g, option | ``server_lr``, ``option`` |
| K | the round's budget of steps |
| p_i | ``weighting``, over all clients; the paper's are 1/N |

Deviations:
- K eta is ``client.effective_step_length(K)``: with momentum the same gradients lead farther, and
  K eta itself would make the method diverge. Option II refuses optimizers whose steps are not
  proportional to the gradient, such as Adam; option I takes any.
- Control variates cover shared parameters. Personal entries are trained as in FedPer; averaged
  statistics are averaged as in FedAvg, for every eta_g.
- Behind a lossy codec c is no longer the mean of the c_i; ``channel.up.parts=[shared]`` sends
  control variates uncompressed.
"""

from __future__ import annotations

from typing import Literal

from medfed.functional.prox import Linear
from medfed.method import *
from medfed.personalize.fedavg import FedAvg


@dataclass(frozen=True)
class Scaffold(FedAvg):
    """FedAvg whose local steps approximate the gradient of all clients.

    Attributes:
        server_lr: eta_g >= 0, the share of the mean displacement that the server goes.
        option: ``I`` computes control variates from extra gradients, ``II`` from displacements.
    """

    server_lr: Annotated[float, check_not_negative, Range(0.3, 1.0)] = 1.0
    option: Literal["I", "II"] = "II"
    parts_sent: ClassVar[tuple[str, ...]] = ("shared", "control")
    parts_averaged: ClassVar[tuple[str, ...]] = parts_sent
    fresh_optimizer: ClassVar[bool] = True
    supports_missing_channels: ClassVar[bool] = False
    server_zeros: ClassVar[tuple[str, ...]] = ("control",)
    client_zeros: ClassVar[tuple[str, ...]] = ("control",)
    card: ClassVar[Card] = gradients_only(
        "Karimireddy et al. 2020", down={"shared": 1, "weights": 1}, up={"shared": 1, "weights": 1},
        server={"shared": 1, "weights": 1}, client={"personal": 1, "weights": 1},
    )  # fmt: skip

    def round(self, server: State, cohort: Sequence[str], round: int) -> ServerRound:
        """Sends w and c; moves w by the cohort's mean, c by its part of all clients."""
        parts = {"shared": server["shared"], "control": server["control"]}
        replies = yield {c: Message("fit", parts) for c in cohort}
        before, moved = server["shared"], self.mean(server, replies, "shared")
        # eta_g scales parameters only; averaged statistics move fully.
        scaled = add(select(before, server["control"]), moved, self.server_lr)
        rest = add(select(before, [n for n in before if n not in scaled]), moved)
        shared = select({**rest, **scaled}, before)
        del moved, rest, scaled  # of a large model
        # c is the mean of all c_i. Those of absent clients do not change: only the cohort's count.
        change, part = self.mean(server, replies, "control"), self.part(server, replies)
        control = add(server["control"], change, part)
        return {**server, "shared": shared, "control": control}

    def max_batches_drawn(self, steps: int, epoch: int) -> int:
        return steps + epoch if self.option == "I" else steps

    def fit(self, client: Client, message: Message) -> Message:
        """Trains along grad f_i - c_i + c and updates c_i."""
        received, before = message.parts["shared"], client.state["control"]
        # The gradient of a linear term is its slope, so each step is along grad f_i - c_i + c.
        shift = Linear(subtract(message.parts["control"], before))
        end = client.train({**received, **client.state["personal"]}, penalty=shift)
        del shift  # of a large model
        shared, client.state["personal"] = client.split.split(end)
        update = weighted_sum(shared, received, -1)  # in the memory of new tensors
        if self.option == "I":
            at = {**received, **client.state["personal"]}
            change = subtract(client.gradient(at, update="shared"), before)
        else:
            # c_i+ - c_i = (w - w_i) / reach - c, and `update` is w_i - w: hence the sign below.
            rate = 1 / client.effective_step_length(client.steps)
            change = add(message.parts["control"], update, rate)
            change = {n: t.neg_() for n, t in change.items()}
        client.state["control"] = add(before, change)
        parts = {"shared": update, "control": change}
        return Message("fit", parts, kinds={"shared": "update", "control": "update"})
