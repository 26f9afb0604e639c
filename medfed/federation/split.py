"""Which entries of a model are shared and which stay with the client: w = Mx + Nz by name.

It also lists a network's blocks, so that a user can choose the personal ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from medfed.common.tensors import Tensors, select
from medfed.federation.entries import patterns_of
from medfed.federation.other_state import OTHER
from medfed.standalone.checks import check_known
from medfed.standalone.errors import ConfigError, did_you_mean, few

BufferPolicy = Literal["averaged", "local", "frozen"]
BUFFER_POLICIES = ("averaged", "local", "frozen")
Normalization = Literal["reestimated", "kept"]
Update = Literal["all", "shared", "personal"]
Needs = Literal["head", "features", "statistics"]
NORMALIZATION = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.LocalResponseNorm)


def float_entries(network: nn.Module) -> Tensors:
    """Returns live parameters and persistent floating-point buffers by name.

    A tensor with several names (tied weights, layers in two places) is one entry, under its first
    name, so that it is trained, sent and counted once. All else that training changes is
    :mod:`medfed.federation.other_state`.

    Example:
        >>> list(float_entries(nn.BatchNorm1d(2)))
        ['weight', 'bias', 'running_mean', 'running_var']
    """
    for name, module in network.named_modules():
        if any(map(is_lazy, (*module._parameters.values(), *module._buffers.values()))):
            raise ConfigError(
                f"Layer {name or 'network'} ({type(module).__name__}) has no weights yet: pass one "
                "batch through the network before it is federated."
            )
    kept = network.state_dict(keep_vars=True)
    first = set(aliases(network).values())
    return {n: t for n, t in kept.items() if n in first}


def aliases(network: nn.Module) -> dict[str, str]:
    """Returns, for every name of a float entry, the name under which it is an entry.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> net[1].weight = net[0].weight
        >>> {n: entry for n, entry in aliases(net).items() if n != entry}
        {'1.weight': '0.weight'}
    """
    first: dict[int, str] = {}
    kept = network.state_dict(keep_vars=True)
    return {n: first.setdefault(id(t), n) for n, t in kept.items() if t.is_floating_point()}


def frozen_names(network: nn.Module) -> frozenset[str]:
    """Returns the entries that never change: marked by ``requires_grad``, or ``frozen_entries``.

    Example:
        >>> net = nn.Linear(2, 2)
        >>> _ = net.bias.requires_grad_(False)
        >>> frozen_names(net)
        frozenset({'bias'})
    """
    known = {id(t) for t in network.parameters() if not t.requires_grad}
    marked = (n for n, t in float_entries(network).items() if id(t) in known)
    return frozenset(marked).union(getattr(network, "frozen_entries", ()))


def normalization_patterns(network: nn.Module) -> tuple[str, ...]:
    """Returns a pattern for each normalisation layer, recognised by its type, not its name.

    Example:
        >>> normalization_patterns(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        ('1.*',)
    """
    return tuple(
        f"{name}.*"
        for name, module in network.named_modules()
        if isinstance(module, NORMALIZATION) and any(True for _ in module.parameters())
    )


def remainder(network: nn.Module, patterns: str | Sequence[str]) -> tuple[str, ...]:
    """Returns a pattern for each entry that matches none of the given patterns.

    Example:
        >>> remainder(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)), ["2.*"])
        ('0.weight', '0.bias')
    """
    left = ParameterSplit.of(network, patterns).shared
    return tuple(re.sub(r"([*?[])", r"[\1]", n) for n in left)


def of_one_sample(error: Exception) -> str | None:
    """Says what follows where a BatchNorm layer got one value per channel; else ``None``."""
    if "more than 1 value per channel" not in str(error):
        return None
    return (
        "trains on batches of one sample, whose variance BatchNorm cannot compute; give it batches "
        "of two or more, choose buffers=frozen or a network with another normalisation, or leave "
        "out a hospital with one sample"
    )


def fixed_statistics(
    network: nn.Module, policy: BufferPolicy, base: Container[str] = ()
) -> list[nn.Module]:
    """Returns the layers whose running statistics never change, and normalise in training, too."""
    return [
        module
        for name, module in network.named_modules()
        if isinstance(module, _NormBase)
        and module.track_running_stats
        # The network itself has an empty name.
        and (policy == "frozen" or f"{name}.running_mean".lstrip(".") in base)
    ]


def gathering(network: nn.Module) -> dict[str, _NormBase]:
    """Returns the layers that gather running statistics in the network's present mode, by name.

    Example:
        >>> list(gathering(nn.Sequential(nn.BatchNorm1d(2), nn.InstanceNorm1d(2))))
        ['0']
    """
    modules = network.named_modules()
    return {
        n: m
        for n, m in modules
        if isinstance(m, _NormBase) and m.training and m.track_running_stats
    }


def match(
    patterns: str | Iterable[str],
    names: Iterable[str],
    missing: str = "The personal pattern {!r} matches no parameter",
) -> list[str]:
    """Returns the names that match any of the glob patterns, in the order of ``names``.

    `patterns`: globs such as ``class_layers.*``; ``*`` also spans dots. `missing`: what the error
    says of a pattern that matches nothing; near misses follow.

    Example:
        >>> match(["head.*"], ["body.weight", "head.weight", "head.bias"])
        ['head.weight', 'head.bias']
    """
    known, patterns = list(names), patterns_of(patterns)
    for pattern in patterns:
        if not isinstance(pattern, str) or not any(fnmatchcase(n, pattern) for n in known):
            roots = dict.fromkeys([*(f"{n.rsplit('.', 1)[0]}.*" for n in known), *known])
            hint = did_you_mean(pattern, roots) or f"; there are {few(known, 6) or 'none'}"
            raise ConfigError(f"{missing.format(pattern)}{hint}.")
    return [n for n in known if any(fnmatchcase(n, p) for p in patterns)]


def modules_of(network: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Returns the network's modules whose parameters are all among the names."""
    # By identity, as a tied parameter is an entry under its first name alone.
    known = {id(p) for n, p in network.named_parameters(remove_duplicate=False) if n in set(names)}
    return {
        name: module
        for name, module in network.named_modules()
        if name and (inside := list(module.parameters())) and all(id(p) in known for p in inside)
    }


# The key of a group of parameters whose step size is this multiple of the round's.
OWN_RATE = "own_rate"


def keep_groups(
    optimizer: torch.optim.Optimizer,
    trained: Mapping[str, Tensor],
    personal: Container[str],
    network: nn.Module,
) -> None:
    """Fits a user's groups of parameters to what trains, in place; each is of one part."""
    names = {id(t): n for n, t in trained.items()}
    given = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if strangers := set(given).difference(map(id, network.parameters())):
        raise ConfigError(
            f"The optimizer moves {len(strangers)} tensors that are not of the network that "
            "trains, which may be a copy of yours; take the parameters from the factory's "
            "arguments: lambda params: SGD(params, lr=0.1), or lambda params, network: ...."
        )
    if left := [n for i, n in names.items() if i not in set(given)]:
        raise ConfigError(
            f"The optimizer leaves out {left[0]}; give it all parameters, and freeze those that "
            "should not train by requires_grad_(False)."
        )
    usual, groups = optimizer.defaults.get("lr"), []
    for group in optimizer.param_groups:
        own = group["lr"] / usual if usual and "lr" in group else 1.0
        for part in ("shared", "personal"):
            mine = [p for p in group["params"] if id(p) in names]
            mine = [p for p in mine if (names[id(p)] in personal) == (part == "personal")]
            if mine:
                groups.append({**group, "params": mine, "name": part, OWN_RATE: own})
    optimizer.param_groups = groups


@dataclass(frozen=True)
class ParameterSplit:
    """The names of a model's entries, in a shared part, a personal part and a frozen base.

    Attributes:
        shared: Names that are sent: parameters and averaged buffers.
        personal: Names that stay with the client, including buffers.
        buffers: Names (of either part) that are buffers and not parameters.
        policy: The policy of buffers: ``averaged`` (they belong to the part of their pattern),
            ``local`` (they stay with the client) or ``frozen`` (they never change).
        base: Names that never change: parameters with ``requires_grad=False``, and the network's
            ``frozen_entries``. All clients know these values before the first round; no state,
            message or training result holds them.
        head: Parameters that the task proposes as personal, in either part.
    """

    shared: tuple[str, ...]
    personal: tuple[str, ...]
    buffers: frozenset[str] = frozenset()
    policy: BufferPolicy = "averaged"
    base: frozenset[str] = frozenset()
    head: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        network: nn.Module,
        personal: str | Sequence[str] = (),
        policy: BufferPolicy = "averaged",
    ) -> ParameterSplit:
        """Splits a network by name patterns.

        Args:
            network: Any module.
            personal: Globs of the personal part. An entry with several names is personal if any of
                them matches.
            policy: The buffer policy.

        Raises:
            ConfigError: If a pattern matches nothing, or nothing that trains, or the policy is
                unknown.

        Example:
            >>> net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
            >>> ParameterSplit.of(net, ["1.*"]).shared
            ('0.weight', '0.bias')
        """
        check_known("buffers", policy, BUFFER_POLICIES)
        personal = patterns_of(personal)
        base = frozen_names(network)
        entries = {n: t for n, t in float_entries(network).items() if n not in base}
        buffers = frozenset(n for n, t in entries.items() if not isinstance(t, nn.Parameter))
        known = aliases(network)
        kept = {known[n] for n in match(personal, known)} - base
        if personal and not kept:
            raise ConfigError(
                f"The personal part {', '.join(personal)} is all frozen; let some of it train by "
                "adapters.train or requires_grad, or choose adapters.part=personal."
            )
        # Neither local nor frozen statistics are sent.
        if policy != "averaged":
            kept |= buffers
        return cls(
            tuple(n for n in entries if n not in kept),
            tuple(n for n in entries if n in kept),
            buffers,
            policy,
            base,
        )

    def check(self, needs: Needs | None, method: str) -> None:
        """Checks that the model has what a method needs.

        Args:
            needs: A ``head``, layers before one, which compute ``features``, or ``statistics`` of
                normalisation.
            method: Its name, as users write it.

        Raises:
            ConfigError: If it is missing.
        """
        whole = needs == "features" and set(self.head) == set(self.parameters("all"))
        if needs in ("head", "features") and (whole or not self.head):
            layers = {n.rpartition(".")[0] for n in self.parameters("all")}
            ways = ["choose a model of several layers, for tables model=mlp"]
            ways += ["name its head alone by model.personal"] * (len(layers) > 1)
            raise ConfigError(
                f"{method} needs the head of the model{', and what enters it' * whole}, and here "
                f"{'the head is the whole model' if whole else 'no part is known as its head'}; "
                f"{', or '.join(ways)}."
            )
        if needs == "statistics" and not any(n.endswith("running_mean") for n in self.buffers):
            raise ConfigError(
                f"{method} needs running statistics of normalisation, and no layer of "
                "this network has any; choose algorithm=fedavg, or a network with BatchNorm, such "
                "as model.network.norm=batch."
            )

    def names(self, update: Update) -> tuple[str, ...]:
        """Returns the names of one part, or of both for ``all``."""
        if update == "all":
            return self.shared + self.personal
        return self.shared if update == "shared" else self.personal

    def parameters(self, update: Update) -> tuple[str, ...]:
        """Returns the names of one part without its buffers."""
        return tuple(n for n in self.names(update) if n not in self.buffers)

    def split(self, tensors: Mapping[str, Tensor]) -> tuple[Tensors, Tensors]:
        """Returns the shared and the personal entries; these with the client's other state.

        Example:
            >>> import torch
            >>> t = {"a": torch.ones(1), "b": torch.zeros(1)}
            >>> ParameterSplit(("a",), ("b",)).split(t)
            ({'a': tensor([1.])}, {'b': tensor([0.])})
        """
        personal = [*self.personal, *({OTHER} & tensors.keys())]
        return select(tensors, self.shared), select(tensors, personal)


_LISTED = 12


class Block(NamedTuple):
    """A part of a network."""

    name: str  # the module's name, or that of a parameter outside modules
    pattern: str  # a pattern that matches only its entries
    parameters: int  # how many numbers its parameters have, tied ones counted once
    personal: int = 0  # how many of these stay with the client


def blocks(network: nn.Module, personal: Container[str] = (), within: str = "") -> list[Block]:
    """Returns the modules of one level, in the order in which they were added.

    `within`: the module to look into; the whole network by default.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> for block in blocks(net, ["2.weight"]):
        ...     print(block)
        Block(name='0', pattern='0.*', parameters=9, personal=0)
        Block(name='2', pattern='2.*', parameters=4, personal=3)
    """
    prefix = f"{within}." if within else ""
    by_place: dict[str, Block] = {}
    for name, tensor in float_entries(network).items():
        if not isinstance(tensor, nn.Parameter) or not name.startswith(prefix):
            continue
        head, inner, _ = name[len(prefix) :].partition(".")
        old = by_place.get(head, Block(prefix + head, f"{prefix}{head}{'.*' if inner else ''}", 0))
        kept = tensor.numel() if name in personal else 0
        by_place[head] = old._replace(
            parameters=old.parameters + tensor.numel(), personal=old.personal + kept
        )
    return list(by_place.values())


def main_blocks(network: nn.Module) -> list[Block]:
    """Returns the blocks of the first level that has several.

    Example:
        >>> net = nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
        >>> [block.pattern for block in main_blocks(net)]
        ['0.0.*', '0.1.*']
    """
    outer = blocks(network)
    while len(outer) == 1 and (inner := blocks(network, within=outer[0].name)):
        outer = inner
    return outer


def proposal(network: nn.Module, least: float = 0.0) -> str:
    """Returns an override that makes the last blocks personal, to paste into a shell.

    Example:
        >>> net = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, 1))
        >>> print(proposal(net), proposal(net, 0.3))
        'model.personal=["2.*"]' 'model.personal=["1.*","2.*"]'
    """
    candidates = main_blocks(network)
    total, chosen = sum(b.parameters for b in candidates), candidates[-1:]
    while sum(b.parameters for b in chosen) < least * total and len(chosen) + 1 < len(candidates):
        chosen = candidates[-len(chosen) - 1 :]
    return f"'model.personal={json.dumps([b.pattern for b in chosen], separators=(',', ':'))}'"


def listed(network: nn.Module) -> str:
    """Returns the blocks with their numbers of parameters, in words.

    Example:
        >>> listed(nn.Sequential(nn.Linear(99, 30), nn.Linear(30, 1)))
        '0.* (3,000), 1.* (31)'
    """
    lines = [f"{b.pattern} ({b.parameters:,})" for b in main_blocks(network)]
    if len(lines) > _LISTED:
        half = _LISTED // 2
        lines = [*lines[:half], f"{len(lines) - _LISTED} more", *lines[-half:]]
    return ", ".join(lines)


def nothing_personal(network: nn.Module, method: str) -> ConfigError:
    """Returns the error of a method that needs a personal part, which no one has named."""
    return ConfigError(
        f"{method} keeps a part of the model at each client, but no part of this "
        f"{type(network).__name__} is named: set for example {proposal(network)}; its blocks and "
        f"their parameters are {listed(network)}."
    )


def nothing_to_train(part: str) -> ConfigError:
    """Returns the error of a method that trains a part of the model which is empty."""
    if part == "all":
        return ConfigError("No parameter of the model trains: all are frozen by requires_grad.")
    return ConfigError(
        f"The model has no {part} part, which the algorithm trains; choose a model of several "
        "layers, or another algorithm.personal."
    )
