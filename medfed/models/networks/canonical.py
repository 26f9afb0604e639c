"""Canonical models: K instances of a part of any network, mixed by a membership vector.

PPFL (one of the project's source papers), its two architectures, with r the network, theta_k the
instances of the canonical part, c the membership vector in the simplex; and FENDA's:

=============  ==============================  ==============================================
``outputs``    sum_k c_k r(theta_k)            probabilities are mixed: of classes by softmax,
                                               of regions by sigmoid, outputs as they are else
``parameters`` r(sum_k c_k theta_k)            one network, whose part is the mixture
``sum``        sum_k r(theta_k)                outputs are added; nothing is learned but theta
=============  ==============================  ==============================================

A mixture of probabilities is returned as log-probabilities or logits, so that losses and metrics
stay as they are. They normalise what they get: off the simplex the loss is that of c / sum c, and
its gradient differs from that of the plain mixture by a multiple of the all-ones vector, which no
step on the simplex notices.

The instances are built independently. Copies of one part would have equal gradients for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call

from medfed.federation.split import patterns_of
from medfed.models.networks.personal_part import part_roots
from medfed.standalone.checks import check_known
from medfed.standalone.errors import ConfigError
from medfed.standalone.mixture import Activation, Mixture, take

Mix = Literal["outputs", "parameters", "sum"]


class Canonical(Mixture):
    """A network of which a part exists K times.

    Shapes:
        As the network's. Parameters: ``membership (K,)``, ``common.*``, ``canonical.k.*``.
    """

    personal: ClassVar[tuple[str, ...]] = ("membership",)
    membership: nn.Parameter

    def __init__(
        self,
        networks: Sequence[nn.Module],
        parts: str | Sequence[str],
        mix: Mix = "outputs",
        activation: Activation = "softmax",
    ) -> None:
        check_known("canonical.mix", mix, get_args(Mix))
        check_known("activation", activation, get_args(Activation))
        if not networks:
            raise ConfigError("canonical.count must be 1 or more.")
        parts = patterns_of(parts)
        places, like = part_roots(networks[0], parts), next(networks[0].parameters())
        taken = [take(network, places) for network in networks]
        sums = mix == "sum"
        activation = "identity" if sums else activation
        super().__init__(taken[0], [one.layers for one in taken], activation)
        self.mix = mix
        share = torch.full((len(networks),), 1.0 if sums else 1 / len(networks))
        self.membership = nn.Parameter(share.to(like), requires_grad=not sums)
        self._boxed = places == [""]
        self._names = list(taken[0].layers)
        _check_distinct(self.canonical, parts)
        for other in self.canonical[1:] if sums else ():  # one last bias is enough for all
            *_, last = other.parameters()
            if last.ndim == 1:
                nn.init.zeros_(last).requires_grad_(False)
        if mix == "parameters":  # one network runs, with the statistics of the first instance
            for module in (m for other in self.canonical[1:] for m in other.modules()):
                module._buffers.update(dict.fromkeys(module._buffers))

    def forward(self, x: Tensor) -> Any:
        """Returns the mixture for a batch; see the base class."""
        if self.mix != "parameters":
            return super().forward(x)
        with self._instance(0):
            return functional_call(self.common, self.mixed(), (x,))

    def mixed(self) -> dict[str, Tensor]:
        """Returns sum_k c_k theta_k under the names that it has within the network."""
        weights: dict[str, Tensor] = {}
        done: set[int] = set()  # for tied weights the first name is enough
        for i, name in enumerate(self._names):
            parts = [dict(list(k.children())[i].named_parameters()) for k in self.canonical]
            for inner in parts[0]:
                if id(parts[0][inner]) in done:
                    continue
                done.add(id(parts[0][inner]))
                stacked = torch.stack([p[inner] for p in parts])
                full = f"{name}.{inner}" if inner else name
                weights[full] = torch.tensordot(self.membership, stacked, dims=1)
        return weights

    def personal_part(self, head: str | Sequence[str]) -> tuple[str, ...]:
        """Returns patterns of what stays with a client.

        Example:
            >>> nets = [nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)) for _ in range(2)]
            >>> Canonical(nets, ["*"], "sum").personal_part("1.*")
            ('canonical.1.*', 'canonical.0.network.1.*')
        """
        if self.mix != "sum":
            return self.personal
        others = (f"canonical.{k}.*" for k in range(1, len(self.canonical)))
        return (*others, *(f"canonical.0.network.{pattern}" for pattern in patterns_of(head)))

    def ordinary(self, name: str) -> str | None:
        """Returns an entry's name in the ordinary network; ``None`` for the membership.

        Example:
            >>> nets = [nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)) for _ in range(2)]
            >>> net = Canonical(nets, ["1.*"])
            >>> net.ordinary("common.0.bias"), net.ordinary("canonical.1.1.bias")
            ('0.bias', '1.bias')
        """
        kind, _, rest = name.partition(".")
        if kind == "canonical":
            _, layer, inner = rest.split(".", 2)
            rest = next(f"{n}.{inner}" for n in self._names if n.replace(".", "_") == layer)
        elif kind != "common":
            return None
        return rest.removeprefix("network.") if self._boxed else rest


def _check_distinct(instances: nn.ModuleList, parts: Sequence[str]) -> None:
    flat = [torch.cat([p.detach().flatten() for p in i.parameters()]) for i in instances]
    for k, one in enumerate(flat):
        if any(torch.equal(one, other) for other in flat[:k]):
            what = (
                f"The canonical instances of {', '.join(parts)} start as equals and would stay so"
            )
            such = "(a logistic regression does with model.network.spread=0.1)"
            raise ConfigError(f"{what}; choose a model that starts at random {such}.")
