"""Which entries of a model are shared and which stay with the client: w = Mx + Nz by name.

M and N select named entries, whole tensors or parts of them (:class:`Entries`). It also lists a
network's blocks, so that a user can choose the personal ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import EllipsisType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from medfed.common.arguments import kind
from medfed.common.tensors import Tensors, select
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
    entries = network.state_dict(keep_vars=True)
    first = set(aliases(network).values())
    return {n: t for n, t in entries.items() if n in first}


def aliases(network: nn.Module) -> dict[str, str]:
    """Returns, for every name of a float entry, the name under which it is an entry.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> net[1].weight = net[0].weight
        >>> {n: entry for n, entry in aliases(net).items() if n != entry}
        {'1.weight': '0.weight'}
    """
    first: dict[int, str] = {}
    entries = network.state_dict(keep_vars=True)
    return {n: first.setdefault(id(t), n) for n, t in entries.items() if t.is_floating_point()}


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
    ids = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if strangers := set(ids).difference(map(id, network.parameters())):
        raise ConfigError(
            f"The optimizer moves {len(strangers)} tensors that are not of the network that "
            "trains, which may be a copy of yours; take the parameters from the factory's "
            "arguments: lambda params: SGD(params, lr=0.1), or lambda params, network: ...."
        )
    if left := [n for i, n in names.items() if i not in set(ids)]:
        raise ConfigError(
            f"The optimizer leaves out {left[0]}; give it all parameters, and freeze those that "
            "should not train by requires_grad_(False)."
        )
    usual, groups = optimizer.defaults.get("lr"), []
    for group in optimizer.param_groups:
        factor = group["lr"] / usual if usual and "lr" in group else 1.0
        for part in ("shared", "personal"):
            mine = [p for p in group["params"] if id(p) in names]
            mine = [p for p in mine if (names[id(p)] in personal) == (part == "personal")]
            if mine:
                groups.append({**group, "params": mine, "name": part, OWN_RATE: factor})
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
        private = {known[n] for n in match(personal, known)} - base
        if personal and not private:
            raise ConfigError(
                f"The personal part {', '.join(personal)} is all frozen; let some of it train by "
                "adapters.train or requires_grad, or choose adapters.part=personal."
            )
        # Neither local nor frozen statistics are sent.
        if policy != "averaged":
            private |= buffers
        return cls(
            tuple(n for n in entries if n not in private),
            tuple(n for n in entries if n in private),
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
        personal_size = tensor.numel() if name in personal else 0
        by_place[head] = old._replace(
            parameters=old.parameters + tensor.numel(), personal=old.personal + personal_size
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


_INDEXED = re.compile(r"(?P<name>[^\[\]]+)\[(?P<index>[^\[\]]+)\]")
_ITEM = re.compile(r"-?\d+|(?:-?\d+)?:(?:-?\d+)?(?::-?\d+)?|\.\.\.")
_PLACE = "parametrizations."


class Entries(nn.Module):
    """A tensor from the vector of its shared entries and that of its personal ones.

    ``linear.weight[:, 3]`` names the entries of a tensor as PyTorch indexes it: a column of a first
    layer is what its outputs read of one input, a row is all that leads to one output. Such a
    tensor becomes two parameters of the network, from which each forward pass puts it together.
    All else, such as codecs, checkpoints and methods, sees named parameters as ever. pFedNet,
    Equation 1: M and N are 0/1 selection matrices.

    Example:
        >>> entries = Entries(torch.tensor([[False, True], [False, True]]))
        >>> shared, personal = entries.right_inverse(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> shared.tolist(), personal.tolist(), entries(shared, personal).tolist()
        ([1.0, 3.0], [2.0, 4.0], [[1.0, 2.0], [3.0, 4.0]])
    """

    personal: Tensor
    order: Tensor

    def __init__(self, personal: Tensor) -> None:
        super().__init__()
        self.register_buffer("personal", personal, persistent=False)
        # A stable sort of the mask lists the shared entries first; its inverse puts them back.
        order = personal.flatten().int().argsort(stable=True).argsort()
        self.register_buffer("order", order, persistent=False)

    def forward(self, shared: Tensor, personal: Tensor) -> Tensor:
        """Returns the tensor."""
        return torch.cat([shared, personal])[self.order].view(self.personal.shape)

    def right_inverse(self, whole: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the vectors of its shared and of its personal entries."""
        return whole[~self.personal], whole[self.personal]


class Shift(nn.Module):
    """The bias of a layer whose inputs are shifted: W(z + u) + b is Wz + (b + Wu).

    The layer is linear, or a convolution of single positions.
    """

    layer: nn.Module

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.zeros_like(layer.weight.detach()[0].flatten()))  # type: ignore[operator,index]
        object.__setattr__(self, "layer", layer)  # not as a part of this module

    def forward(self, bias: Tensor) -> Tensor:
        """Returns the bias of the unshifted layer."""
        return self.added(bias, self.layer.weight, self.u)  # type: ignore[arg-type]

    @staticmethod
    def added(bias: Tensor, weight: Tensor, u: Tensor) -> Tensor:
        """Returns b + Wu.

        Example:
            >>> Shift.added(torch.ones(1), torch.tensor([[2.0, 3.0]]), torch.tensor([1.0, -1.0]))
            tensor([0.])
        """
        return bias + weight.flatten(1) @ u


def patterns_of(patterns: str | Iterable[str]) -> tuple[str, ...]:
    """Returns patterns of names; a text is one pattern.

    Example:
        >>> patterns_of("head.*"), patterns_of(["head.*", "neck.*"])
        (('head.*',), ('head.*', 'neck.*'))
    """
    if not isinstance(patterns, str | Iterable):
        raise ConfigError(f"A pattern of parameter names must be a text, not {patterns!r}.")
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def divide(network: nn.Module, patterns: str | Iterable[str]) -> tuple[str, ...]:
    """Makes parameters of the entries that patterns such as ``head.weight[0]`` name, in place.

    The network computes what it did. A network that is divided so already stays as it is.

    Example:
        >>> network = nn.Linear(3, 1)
        >>> divide(network, ["bias", "weight[:, 2]"])
        ('bias', 'parametrizations.weight.original1')
        >>> [(name, len(entry)) for name, entry in network.named_parameters()]
        [('bias', 1), ('parametrizations.weight.original0', 2), \
('parametrizations.weight.original1', 1)]
    """
    globs, masks = [], dict[str, Tensor]()
    known = _tensors(network)
    for pattern in patterns_of(patterns):
        match = _INDEXED.fullmatch(pattern) if isinstance(pattern, str) else None
        if not match or any(fnmatchcase(entry, pattern) for entry in known):
            globs.append(pattern)  # in a glob, brackets are a set of characters
            continue
        name = match["name"]
        if name not in known:
            raise ConfigError(
                f"The personal pattern {pattern!r} names entries of {name}, which is no tensor of "
                f"the model{did_you_mean(name, known)}."
            )
        mask = masks.get(name, torch.zeros(known[name].shape, dtype=torch.bool))
        masks[name] = mask | _mask(pattern, match["index"], mask.shape)
    for name, mask in masks.items():
        if bool(mask.all()):
            raise ConfigError(
                f"The personal patterns of {name} name all of its {mask.numel()} entries; write "
                f"{name!r} alone."
            )
        globs.append(_registered(network, name, mask))
    return tuple(globs)


def shift_inputs(network: nn.Module, patterns: str | Iterable[str], method: str) -> str:
    """Makes a parameter, zero, that is added to what enters the head; returns its name.

    The network changes in place. `patterns` are of the head's parameters; its first layer must be
    linear at each position, and have a bias.

    Example:
        >>> network = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        >>> shift_inputs(network, "1.*", "FedDBE")
        '1.parametrizations.bias.0.u'
    """
    globs = patterns_of(patterns)
    for place, layer in network.named_modules():
        weight = f"{place}.weight".lstrip(".")
        if hasattr(layer, "weight") and any(fnmatchcase(weight, glob) for glob in globs):
            linear = isinstance(layer, nn.Linear) or (
                isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)
                and layer.weight[0, 0].numel() == 1
                and not any(layer.padding)
                and layer.groups == 1
            )
            if not linear or layer.bias is None:
                break
            if not parametrize.is_parametrized(layer, "bias"):
                parametrize.register_parametrization(layer, "bias", Shift(layer))
            return f"{place}.{_PLACE}bias.0.u".lstrip(".")
    raise ConfigError(
        f"{method} shifts what enters the head, whose first layer must be linear, or a convolution "
        "of single positions, with a bias; name such a last layer by model.personal, or choose "
        "another algorithm."
    )


def joined(network: nn.Module, weights: Mapping[str, Tensor]) -> Tensors:
    """Returns entries of a divided network under the names of the plain one.

    Example:
        >>> network = nn.Linear(3, 1)
        >>> _ = divide(network, ["weight[:, 2]"])
        >>> weights = {n: t.detach() for n, t in network.named_parameters()}
        >>> {n: tuple(t.shape) for n, t in joined(network, weights).items()}
        {'bias': (1,), 'weight': (1, 3)}
    """
    whole = dict(weights)
    for name, (place, entries) in _divided(network).items():
        if f"{place}0" in whole:
            shared, personal = whole.pop(f"{place}0"), whole.pop(f"{place}1")
            order = entries.order.to(shared.device)
            whole[name] = torch.cat([shared, personal])[order].view(entries.personal.shape)
    for name, place in _shifted(network).items():
        if f"{place}original" in whole:
            bias, u = whole.pop(f"{place}original"), whole.pop(f"{place}0.u")
            whole[name] = Shift.added(bias, whole[f"{name.removesuffix('bias')}weight"], u)
    return whole


def parted(network: nn.Module, weights: Mapping[str, Tensor]) -> Tensors:
    """Undoes :func:`joined`."""
    parts = dict(weights)
    for name, (place, entries) in _divided(network).items():
        if name in parts:
            vectors = entries.cpu().right_inverse(parts.pop(name).cpu())
            parts |= {f"{place}{n}": vector for n, vector in enumerate(vectors)}
    for name, place in _shifted(network).items():
        if name in parts:
            u = torch.zeros_like(parts[f"{name.removesuffix('bias')}weight"][0].flatten())
            parts |= {f"{place}original": parts.pop(name), f"{place}0.u": u}
    return parts


def _shifted(network: nn.Module) -> dict[str, str]:
    """The biases of layers with shifted inputs by name, and where their parts stand."""
    places = [p for p, module in network.named_modules() if isinstance(module, Shift)]
    layers = [place.removesuffix(f"{_PLACE}bias.0") for place in places]
    return {f"{layer}bias": f"{layer}{_PLACE}bias." for layer in layers}


def _divided(network: nn.Module) -> dict[str, tuple[str, Entries]]:
    """The divided tensors by name: where their vectors stand, and how they are put together."""
    parts = {}
    for place, module in network.named_modules():
        prefix = f"{place}." if place else ""
        for leaf, chain in getattr(module, "parametrizations", {}).items():
            if isinstance(chain[0], Entries):
                parts[prefix + leaf] = (f"{prefix}{_PLACE}{leaf}.original", chain[0])
    return parts


def _tensors(network: nn.Module) -> dict[str, Tensor]:
    """The parameters, with those that are divided already."""
    named = dict(network.named_parameters(remove_duplicate=False))
    return named | {name: entries.personal for name, (_, entries) in _divided(network).items()}


def _mask(pattern: str, index: str, shape: Sequence[int]) -> Tensor:
    items = [item.strip() for item in index.split(",")]
    sizes = " x ".join(map(str, shape))
    if wrong := [item for item in items if not _ITEM.fullmatch(item)]:
        raise ConfigError(
            f"The personal pattern {pattern!r} has the index {wrong[0]!r}; write numbers and "
            f"ranges such as [:, 3] for a tensor of {sizes} entries, or the name of an input of a "
            "table, in model.personal."
        )
    mask = torch.zeros(tuple(shape), dtype=torch.bool)
    try:
        mask[tuple(map(_item, items))] = True
    except (IndexError, ValueError):
        mask.zero_()
    if not bool(mask.any()):
        raise ConfigError(
            f"The personal pattern {pattern!r} names no entry: the tensor has {sizes} entries, "
            "numbered from 0."
        )
    return mask


def _item(text: str) -> int | slice | EllipsisType:
    if text == "...":
        return ...
    if ":" not in text:
        return int(text)
    return slice(*(int(end) if end else None for end in text.split(":")))


def _registered(network: nn.Module, name: str, mask: Tensor) -> str:
    """Divides a tensor unless it is divided so; returns the name of its personal entries."""
    place, _, leaf = name.rpartition(".")
    module = network.get_submodule(place)
    if parametrize.is_parametrized(module, leaf):
        if torch.equal(_divided(network)[name][1].personal.cpu(), mask):
            return f"{place}.{_PLACE}{leaf}.original1".lstrip(".")
        parametrize.remove_parametrizations(module, leaf)
    tensor = getattr(module, leaf)
    named = network.named_parameters(remove_duplicate=False)
    names = [n for n, t in named if t is tensor]
    if len(names) > 1 or not tensor.requires_grad or name in getattr(network, "frozen_entries", ()):
        why = f"is also called {names[1]}" if len(names) > 1 else "is frozen"
        raise ConfigError(f"Entries of {name} cannot be personal: this tensor {why}.")
    parametrize.register_parametrization(module, leaf, Entries(mask.to(tensor.device)))
    return f"{place}.{_PLACE}{leaf}.original1".lstrip(".")


def numbered(pattern: str, inputs: Sequence[str]) -> str:
    """Replaces the name of an input in an index by its number.

    Example:
        >>> numbered("linear.weight[:, sex=m]", ["age", "sex=m"]), numbered("head.*", ["age"])
        ('linear.weight[:, 1]', 'head.*')
    """
    match = _INDEXED.fullmatch(pattern)
    if not match:
        return pattern
    items = [item.strip() for item in match["index"].split(",")]
    unknown = [item for item in items if not _ITEM.fullmatch(item) and item not in inputs]
    if unknown and len(items) > 1:
        raise ConfigError(
            f"The personal pattern {pattern!r} names {unknown[0]}, which is no input of these data"
            f"{did_you_mean(unknown[0], inputs)}; the inputs are {', '.join(inputs)}."
        )
    places = [str(inputs.index(item)) if item in inputs else item for item in items]
    return f"{match['name']}[{', '.join(places)}]"


def check_whole(entries: Tensors, model: Any, who: str, why: str = "") -> None:
    """Raises ConfigError if what a method gives for a model is no whole one of this network.

    `who`: the function that gives or takes it. `why`: what the missing tensors are.
    """
    if not isinstance(model, Mapping):
        raise ConfigError(f"{who} has {kind(model)} as a model, which is {{name: tensor}}.")
    if lost := [name for name in entries if name not in model]:
        raise lacks(who, lost, why)
    for name, entry in entries.items():
        if model[name].shape != entry.shape:
            shapes = f"{[*model[name].shape]}, and the network's is {[*entry.shape]}"
            raise ConfigError(f"{who} has {name} of shape {shapes}.")


def lacks(who: str, lost: list[str], why: str) -> ConfigError:
    """Returns the error of a model that lacks entries."""
    return ConfigError(
        f"{who} lacks {few(lost, 3)}{why}; keep what Client.train returns as a whole, or in two "
        "parts by client.split.split, and put a part into a model by {**model, **part}."
    )
