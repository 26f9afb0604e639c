"""Personal entries of a tensor: w = Mx + Nz where M and N select single entries, not whole tensors.

``linear.weight[:, 3]`` names the entries of a tensor as PyTorch indexes it: a column of a first
layer is what its outputs read of one input, a row is all that leads to one output. Such a tensor
becomes two parameters of the network, vectors of its shared and of its personal entries, from which
each forward pass puts it together. All else, such as codecs, checkpoints and methods, sees named
parameters as ever. pFedNet, Equation 1: M and N are 0/1 selection matrices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from types import EllipsisType

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from medfed.common.tensors import Tensors
from medfed.standalone.errors import ConfigError, did_you_mean

_INDEXED = re.compile(r"(?P<name>[^\[\]]+)\[(?P<index>[^\[\]]+)\]")
_ITEM = re.compile(r"-?\d+|(?:-?\d+)?:(?:-?\d+)?(?::-?\d+)?|\.\.\.")
_PLACE = "parametrizations."


class Entries(nn.Module):
    """A tensor from the vector of its shared entries and that of its personal ones.

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
        found = _INDEXED.fullmatch(pattern) if isinstance(pattern, str) else None
        if not found or any(fnmatchcase(entry, pattern) for entry in known):
            globs.append(pattern)  # in a glob, brackets are a set of characters
            continue
        name = found["name"]
        if name not in known:
            raise ConfigError(
                f"The personal pattern {pattern!r} names entries of {name}, which is no tensor of "
                f"the model{did_you_mean(name, known)}."
            )
        mask = masks.get(name, torch.zeros(known[name].shape, dtype=torch.bool))
        masks[name] = mask | _mask(pattern, found["index"], mask.shape)
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
    found = {}
    for place, module in network.named_modules():
        prefix = f"{place}." if place else ""
        for leaf, chain in getattr(module, "parametrizations", {}).items():
            if isinstance(chain[0], Entries):
                found[prefix + leaf] = (f"{prefix}{_PLACE}{leaf}.original", chain[0])
    return found


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
    found = _INDEXED.fullmatch(pattern)
    if not found:
        return pattern
    items = [item.strip() for item in found["index"].split(",")]
    unknown = [item for item in items if not _ITEM.fullmatch(item) and item not in inputs]
    if unknown and len(items) > 1:
        raise ConfigError(
            f"The personal pattern {pattern!r} names {unknown[0]}, which is no input of these data"
            f"{did_you_mean(unknown[0], inputs)}; the inputs are {', '.join(inputs)}."
        )
    places = [str(inputs.index(item)) if item in inputs else item for item in items]
    return f"{found['name']}[{', '.join(places)}]"
