"""Networks as plain data, from which MONAI and ``medfed predict`` build them again.

A network is described by the name and arguments that the run's configuration gives it. The
project's builders stand in modules that every bundle holds in ``scripts`` as they are; so
``medfed.models.networks.unet.unet`` becomes ``scripts.unet.unet``. A class or function of a library
keeps its name, and so does one from a plugin folder, whose code is in no bundle: it is built where
the user names that folder. Of both the allow-list (:mod:`medfed.config.allowed`) decides; nothing
else is built.
"""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from importlib.metadata import packages_distributions, version
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as registering

from medfed.common.streams import own_stream
from medfed.config.allowed import LIBRARIES, check_targets, is_plugin
from medfed.federation.split import float_entries
from medfed.standalone.errors import CheckpointError, ConfigError, first_line

Plain = dict[str, Any]
MIXTURE = "scripts.networks.CanonicalMixture"
_BUILDERS = (
    *("small.LinearRegression", "small.LogisticRegression", "small.SmallCNN"),
    *("unet.unet", "unet.basic_unet", "unet.planned_unet", "densenet.densenet_bc"),
    "detector.Detector",
)
TARGETS = {
    MIXTURE: "medfed.standalone.networks.CanonicalMixture",
    **{f"scripts.{name}": f"medfed.models.networks.{name}" for name in _BUILDERS},
}
"""What bundles carry of medfed: names in a bundle, and here."""
_distributions = cache(packages_distributions)  # reading their files takes 0.2 seconds
_TARGET, _MODE = "_target_", "_mode_"
_LARGEST, _LONGEST, _DEEPEST = 1 << 20, 256, 16  # of numbers, lists and what is in what
_SPARE = 4  # a network may register so many times the layers and numbers that it keeps
_QUOTES = "'\""


def describe(node: Mapping[str, Any], place: str = "model.network") -> Plain:
    """Translates a configuration's network into plain data that MONAI can build, too.

    Example:
        >>> describe({"_target_": "torch.nn.Linear", "_args_": [2, 3], "bias": False})
        {'_target_': 'torch.nn.Linear', 'in_features': 2, 'out_features': 3, 'bias': False}
        >>> describe({"_target_": "mine.Network", "width": (4, 8)})
        {'_target_': 'mine.Network', 'width': [4, 8]}
        >>> describe({"_target_": "medfed.models.networks.unet.unet", "in_channels": 4})
        {'_target_': 'scripts.unet.unet', 'in_channels': 4}
    """
    target = str(node[_TARGET])
    if target not in TARGETS.values() and target.partition(".")[0] in ("medfed", target):
        raise ConfigError(
            f"Bundles know no network {target}; they know {', '.join(_BUILDERS)}, classes of MONAI "
            "and PyTorch, and those of a plugin folder."
        )
    return _plain_node(node, place)


def describe_mixture(plain: Plain, places: Sequence[str], count: int, activation: str) -> Plain:
    """Describes several instances of a part of a network, whose outputs are mixed.

    Example:
        >>> import torch
        >>> one = {"_target_": "scripts.small.LinearRegression", "in_channels": 3}
        >>> build_network(describe_mixture(one, ["linear"], 2, "identity"))(torch.ones(4, 3)).shape
        torch.Size([4, 1])
    """
    rest = {"places": list(places), "count": count, "activation": activation}
    return {_TARGET: MIXTURE, "network": dict(plain), **rest}


def ordinary(plain: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the network that a mixture is made of, or the network itself.

    Example:
        >>> one = {"_target_": "b"}
        >>> ordinary(describe_mixture(one, ["head"], 2, "softmax")), ordinary(one)
        ({'_target_': 'b'}, {'_target_': 'b'})
    """
    if plain.get(_TARGET) != MIXTURE:
        return plain
    inner = plain.get("network")
    return inner if isinstance(inner, Mapping) else {}


def is_known(plain: Mapping[str, Any]) -> bool:
    """Returns whether all of a network is code of medfed, which computes nothing as it is built.

    Example:
        >>> is_known({"_target_": "scripts.unet.unet"}), is_known({"_target_": "torch.nn.Linear"})
        (True, False)
    """
    return all(str(node[_TARGET]) in TARGETS for node in _nodes(plain))


def _is_library(target: object) -> bool:
    """Says whether a name begins as those of the libraries do.

    Example:
        >>> _is_library("monai.networks.nets.SegResNet"), _is_library("mine.Network")
        (True, False)
    """
    return isinstance(target, str) and target.startswith(tuple(LIBRARIES))


def is_own(plain: Mapping[str, Any]) -> bool:
    """Says whether a part of a network is from a plugin folder, of which a bundle has no code.

    Example:
        >>> act = {"_target_": "torch.nn.ReLU"}
        >>> is_own({"_target_": "mine.Network", "act": act}), is_own(act)
        (True, False)
    """
    targets = [str(node[_TARGET]) for node in _nodes(plain)]
    return not all(target in TARGETS or _is_library(target) for target in targets)


def packages_of(plain: Any) -> dict[str, str]:
    """Returns the versions of the packages, other than PyTorch, whose code a network runs.

    MONAI imports some packages on demand; they are attributes of the modules of its classes.

    Example:
        >>> list(packages_of({"_target_": "monai.networks.nets.SegResNet"}))
        ['monai']
    """
    modules = [import_module(_imported(str(n[_TARGET])).__module__) for n in _nodes(plain)]
    objects = [value for module in modules for value in vars(module).values()]
    names = [str(getattr(v, "__module__", None) or getattr(v, "__name__", "")) for v in objects]
    names += [type(layer).__module__ for layer in build_network(plain).modules()]
    tops = {name.partition(".")[0] for name in [*names, *(m.__name__ for m in modules)]}
    known = _distributions()
    distributions = {known[top][0] for top in tops & {*known}} - {"torch", "numpy", "medfed"}
    return {name: version(name) for name in sorted(distributions)}


@own_stream(0)  # all that is drawn is overwritten
def build_network(plain: Mapping[str, Any]) -> nn.Module:
    """Builds a network of plain data; nothing but the following is ever imported and called.

    :data:`TARGETS`, the libraries' classes that a configuration may build, and what is in a folder
    that the user has named by ``plugins=FOLDER``.

    Example:
        >>> build_network({"_target_": "os.system", "command": "true"})
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.CheckpointError: The bundle names the network os.system, which is \
not among those that are built: networks of MONAI and PyTorch, and code of your own in a folder \
that you add by plugins=FOLDER.
    """
    name = reprlib.repr(plain.get(_TARGET)).strip(_QUOTES)
    _check_sizes(plain, name)
    nodes = list(_nodes(plain))
    for target in [node[_TARGET] for node in nodes] or [None]:
        if not (str(target) in TARGETS or _is_library(target) or is_plugin(str(target))):
            raise CheckpointError(
                f"The bundle names the network {reprlib.repr(target).strip(_QUOTES)}, which is not "
                "among those that are built: networks of MONAI and PyTorch, and code of your own "
                "in a folder that you add by plugins=FOLDER."
            )
    if any(node[_TARGET] == MIXTURE for node in nodes[1:]):
        raise CheckpointError(f"The bundle's network {name} holds another mixture.")
    try:
        for node in nodes:
            if node[_TARGET] not in TARGETS:
                plain_values = {k: v for k, v in node.items() if not isinstance(v, Mapping | list)}
                check_targets(plain_values, exists=True)
        return _called(plain)  # type: ignore[no-any-return]
    except Exception as error:  # whatever MONAI raises on arguments that do not fit
        raise CheckpointError(
            f"The bundle's network {name} cannot be built of its arguments: {first_line(error)}."
        ) from error


@contextmanager
def bounded(entries: int, numbers: int) -> Iterator[None]:
    """Stops a network that registers far more than it has weights for, before memory is filled."""
    left = {"layers": 1000 + 50 * entries, "numbers": 1_000_000 + _SPARE * numbers}

    def count(what: str, by: int) -> None:
        left[what] -= by
        if left[what] < 0:
            raise CheckpointError("its network is far larger than its weights")

    def register(_: nn.Module, __: str, tensor: Tensor | None) -> None:
        count("numbers", 0 if tensor is None else tensor.numel())

    # Whose handles remove the hooks when they are left.
    with (
        registering.register_module_module_registration_hook(lambda *_: count("layers", 1)),
        registering.register_module_parameter_registration_hook(register),
    ):
        yield


def check_state(network: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Compares shapes, so that a network of other sizes is refused before it takes memory."""
    entries = network.state_dict(keep_vars=True)
    filled = {id(entries[name]) for name in state if name in entries}
    absent = [n for n, t in float_entries(network).items() if id(t) not in filled]
    for name in (*absent, *state):
        ends = _form(entries.get(name)), _form(state.get(name))
        if ends[0] != ends[1]:
            raise RuntimeError(f"{name} is {ends[0]} in the network and {ends[1]} in the file")


def _form(tensor: Tensor | None) -> str:
    if tensor is None:
        return "None"
    return f"{tuple(tensor.shape)}{'' if tensor.is_floating_point() else f' {tensor.dtype}'}"


def _plain(value: Any, place: str) -> Any:
    if isinstance(value, str) and value.startswith(("$", "@", "%")):
        raise ConfigError(
            f"{place}={value} cannot go into a bundle, where MONAI would evaluate it; change it."
        )
    if isinstance(value, Mapping):
        if _TARGET in value:
            return _plain_node(value, place)
        return {str(k): _plain(v, f"{place}.{k}") for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(v, f"{place}[{i}]") for i, v in enumerate(value)]
    if value is None or isinstance(value, str | int | float):
        return value
    raise ConfigError(f"{place} is a {type(value).__name__}, which a bundle cannot hold.")


def _plain_node(node: Mapping[str, Any], place: str) -> Plain:
    target = str(node[_TARGET])
    arguments = {str(k): v for k, v in node.items() if not str(k).startswith("_")}
    if positional := node.get("_args_"):
        arguments = _named(target, positional, place) | arguments
    ours = {here: there for there, here in TARGETS.items()}
    mode = {_MODE: "callable"} if node.get("_partial_") else {}
    values = {k: _plain(v, f"{place}.{k}") for k, v in arguments.items()}
    return {_TARGET: ours.get(target, target), **mode, **values}


def _named(target: str, positional: Sequence[Any], place: str) -> Plain:
    """Positional arguments by their names, as MONAI wants them."""
    signature = inspect.signature(_imported(target))
    kinds = {p.kind for p in list(signature.parameters.values())[: len(positional)]}
    if not kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}:
        raise ConfigError(
            f"{place}._args_ of {target} have no names, which a bundle needs; build it in a "
            "function of your own, in a folder that you add by plugins=FOLDER."
        )
    return dict(zip(signature.parameters, positional, strict=False))


def _imported(target: str) -> Any:
    module, _, name = TARGETS.get(target, target).rpartition(".")
    return getattr(import_module(module), name)


def _called(value: Any) -> Any:
    """Builds what nodes describe, the innermost first."""
    if isinstance(value, list):
        return [_called(v) for v in value]
    if not isinstance(value, Mapping):
        return value
    arguments = {k: _called(v) for k, v in value.items() if k not in (_TARGET, _MODE)}
    if _TARGET not in value:
        return arguments
    thing = _imported(str(value[_TARGET]))
    return partial(thing, **arguments) if value.get(_MODE) == "callable" else thing(**arguments)


def _nodes(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        if _TARGET in value:
            yield value
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _nodes(inner)


def _check_sizes(value: Any, target: str, depth: int = 0) -> None:
    """Refuses descriptions that would fill memory or time before weights are found not to fit."""
    entries = list(value.values()) if isinstance(value, Mapping) else value
    entries = entries if isinstance(entries, list) else []
    huge = isinstance(value, int) and abs(value) > _LARGEST
    if huge or len(entries) > _LONGEST or depth > _DEEPEST:
        raise CheckpointError(
            f"The network {target:.100} has an argument beyond all measure; export it anew."
        )
    for inner in entries:
        _check_sizes(inner, target, depth + 1)
