"""The personal part of a network: its default names, and its layers, which can be taken out.

The personal part is also the part that canonical models have several times. Networks of MONAI and
torchvision are recognised by the path of their class (personal.yaml). For an unknown network, the
layers next to its outputs are personal: from each output back along the graph of a forward pass, up
to the first layer with a weight of two or more dimensions, with the parameters on the way. If paths
are added, each has such a layer. A parameter that is only added or multiplied ends no path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]
from torch import Tensor, nn

from medfed.common.streams import seeded
from medfed.federation import split
from medfed.federation.other_state import copied
from medfed.standalone.errors import ConfigError
from medfed.standalone.mixture import positions

_ELEMENTWISE = ("Add", "Addcmul", "Sub", "Rsub", "Mul", "Div", "Lerp", "Pow")
# Operations that change no value, or only the grid.
_PASSED = ("View", "UnsafeView", "ReshapeAlias", "Alias", "AsStrided", "Squeeze", "Unsqueeze", "T",
           "Transpose", "Permute", "Expand", "Slice", "Select", "Unbind", "Split", "SplitWithSizes",
           "Stack", "Clone", "ToCopy")  # fmt: skip
_ACTIVATIONS = ("Sigmoid", "Softmax", "Tanh", "Relu")


Outputs = Callable[[nn.Module, Tensor], Sequence[Tensor]]
Places = dict[int, list[str]]  # all names of a layer, by its id
Graph = dict[Any, list[Any]]  # nodes of autograd, each with those that it is computed from


def nearest(network: nn.Module, outputs: Outputs, image: Tensor) -> tuple[str, ...]:
    """Finds patterns of the layers next to the outputs of any network, on a copy of it."""
    network = copied(network).requires_grad_(True).train()
    for norm in split.fixed_statistics(network, "frozen"):
        norm.eval()
    with torch.enable_grad(), seeded():
        image = image.detach().clone().requires_grad_(True)
        answers = outputs(network, image)
    leaves = {id(p): n for n, p in network.named_parameters()}
    layers = (m for m in network.modules() if isinstance(m, split.NORMALIZATION))
    norms = {id(p) for m in layers for p in m.parameters()}
    met = {leaves[i] for i in _met([t.grad_fn for t in answers], image, norms) if i in leaves}
    return tuple(dict.fromkeys(_pattern(network, n) for n in leaves.values() if n in met))


def last_activation(output: Tensor) -> str | None:
    """Names the activation that an output ends in, if it is one that a loss of logits repeats."""
    node = output.grad_fn
    while node is not None:
        name = _name(node)
        if name in _ACTIVATIONS:
            return name
        if name not in _PASSED and not name.startswith("Upsample"):
            return None
        node = node.next_functions[0][0]
    return None


def _met(roots: Sequence[Any], image: Tensor, norms: set[int]) -> Iterator[int]:
    """Yields the ids of the parameters between outputs and the first layers, theirs included."""
    inputs = _inputs([n for n in roots if n is not None])
    alone = _parameters_alone(inputs, image)
    todo, visited = [n for n in roots if n is not None], set()
    while todo:
        node = todo.pop()
        if node in visited:
            continue
        visited.add(node)
        inside = {id(p): p for n in inputs[node] for p in alone.get(n, {}).values()}
        yield from inside
        layer = any(p.ndim > 1 and i not in norms for i, p in inside.items())
        if not layer or _name(node) in _ELEMENTWISE:
            todo += [n for n in inputs[node] if n not in alone]


def _inputs(todo: list[Any]) -> Graph:
    """Returns the graph behind some nodes."""
    inputs: Graph = {}
    while todo:
        if (node := todo.pop()) not in inputs:
            inputs[node] = [n for n, _ in node.next_functions if n is not None]
            todo += inputs[node]
    return inputs


def _parameters_alone(inputs: Graph, image: Tensor) -> dict[Any, dict[int, Tensor]]:
    """Returns the nodes that nothing of the image reaches, with the parameters that do."""
    parameters: dict[Any, dict[int, Tensor]] = {}
    for node in TopologicalSorter(inputs).static_order():
        leaf = getattr(node, "variable", None)
        if leaf is not image and all(n in parameters for n in inputs[node]):
            below = {i: p for n in inputs[node] for i, p in parameters[n].items()}
            parameters[node] = below if leaf is None else {id(leaf): leaf}
    return parameters


def _name(node: Any) -> str:
    """The operation of a node: ``Tanh`` of ``TanhBackward0``."""
    return str(node.name()).partition("Backward")[0]


def _pattern(network: nn.Module, name: str) -> str:
    """A layer's pattern, or the name alone where the module holds more than a layer."""
    # Weights under a parametrisation stand below their layer.
    layer = name.rpartition(".")[0].partition(".parametrizations.")[0]
    children = network.get_submodule(layer).named_children()
    larger = any(n != "parametrizations" and any(True for _ in m.parameters()) for n, m in children)
    return name if larger or not layer else f"{layer}.*"


_TABLE = Path(__file__).with_name("personal.yaml")
PERSONAL = {k: tuple(v) for k, v in yaml.safe_load(_TABLE.read_text("utf-8")).items()}


def known_personal(network: nn.Module) -> tuple[str, ...]:
    """Returns the table's patterns for a network's class, or its base, that match something."""
    paths = (f"{c.__module__}.{c.__qualname__}" for c in type(network).__mro__)
    patterns = next((PERSONAL[path] for path in paths if path in PERSONAL), ())
    return tuple(p for p in patterns if any(fnmatchcase(n, p) for n in split.aliases(network)))


def default_personal(network: nn.Module) -> tuple[str, ...]:
    """Names the part of a network that stays with its client in the published experiments.

    Returns ``fnmatch`` patterns: the classifier of a DenseNet or a small CNN, the up-sampling path
    of a U-Net, all of a regression, the membership of a canonical model; nothing for unknown
    networks.

    Example:
        >>> from medfed.models.networks.densenet import densenet_bc
        >>> from medfed.models.networks.unet import unet
        >>> default_personal(densenet_bc(2, 1, 2))
        ('class_layers.*',)
        >>> default_personal(unet(2, 1, 1, channels=(4, 8, 16), strides=(2, 2)))
        ('model.2.*', '*.submodule.2.*')
    """
    if isinstance(declared := getattr(network, "personal", None), tuple):
        return declared
    return known_personal(network)


def part_roots(network: nn.Module, parts: Sequence[str]) -> list[str]:
    """Names the largest layers of which all parameters match the patterns."""
    named = dict(network.named_parameters(remove_duplicate=False))
    matched = split.match(parts, named, "The canonical part {!r} matches no parameter")
    hit = {id(named[n]) for n in matched}
    if not hit:
        raise split.nothing_personal(network, "A canonical model")
    whole = {name for name, t in named.items() if id(t) in hit}
    root_of: dict[int, str] = {}
    for root in _roots(network, "", whole, positions(network)):
        root_of.setdefault(id(network.get_submodule(root)), root)
    return list(root_of.values())


def _roots(module: nn.Module, name: str, matched: set[str], places: Places) -> Iterator[str]:
    prefix = f"{name}." if name else ""
    names = {prefix + n for n, _ in module.named_parameters(remove_duplicate=False)}
    if names and names <= matched and _closed(module, places):
        yield name
        return
    for leaf in module._parameters:
        if prefix + leaf in matched:
            what = f"Canonical parts are whole layers, and {prefix + leaf!r} is half of one"
            raise ConfigError(f"{what}; name it by {prefix + '*'!r}.")
    for child, inner in module.named_children():
        yield from _roots(inner, prefix + child, matched, places)


def _closed(module: nn.Module, places: Places) -> bool:
    """Whether no layer within also stands outside, where it would be forgotten."""
    homes = tuple(home and f"{home}." for home in places[id(module)])
    inner = (m for m in module.modules() if m is not module)
    return all(name.startswith(homes) for m in inner for name in places[id(m)])
