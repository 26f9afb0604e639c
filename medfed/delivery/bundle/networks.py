"""Networks as plain data, from which MONAI and ``medfed predict`` build them again.

Most of the project's builders return MONAI's networks. The others are put together from MONAI's
parts in ``scripts/networks.py``, which every bundle holds. Names of the weights are the same.

A class or function of a library is described by its name and arguments. One from a plugin folder
becomes ``scripts.plugins.MODULE.NAME``, and its source goes into the bundle
(:mod:`medfed.delivery.bundle.source_code`). Only two kinds are built: what the allow-list
(:mod:`medfed.config.allowed`) permits of libraries, and accepted source.
"""

from __future__ import annotations

import inspect
import reprlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from medfed.common.errors import CheckpointError, ConfigError, first_line
from medfed.common.streams import own_stream
from medfed.config.allowed import LIBRARIES, check_targets
from medfed.delivery.bundle import scripts
from medfed.delivery.bundle.source_code import (
    PACKAGE,
    check_accepted,
    describe_code,
    installed_by_module,
    source_of,
)
from medfed.federation.split import float_entries

_TARGET, _MODE = "_target_", "_mode_"
_LARGEST, _LONGEST, _DEEPEST = 1 << 20, 256, 16  # of numbers, lists and what is in what
_SPARE = 4  # a network may register so many times the layers and numbers that it keeps


def describe_foreign(node: Mapping[str, Any]) -> Plain:
    """Translates a configuration's network into plain data that MONAI can build, too.

    Args:
        node: ``model.network`` of a run, resolved: ``_target_`` of a library or a plugin folder.

    Returns:
        ``_target_`` and arguments, as JSON has them; a partial has ``_mode_: callable``.

    Raises:
        ConfigError: If it cannot be written so.

    Example:
        >>> describe_foreign({"_target_": "torch.nn.Linear", "_args_": [2, 3], "bias": False})
        {'_target_': 'torch.nn.Linear', 'in_features': 2, 'out_features': 3, 'bias': False}
        >>> describe_foreign({"_target_": "mine.Network", "width": (4, 8)})
        {'_target_': 'scripts.plugins.mine.Network', 'width': [4, 8]}
    """
    plain: Plain = _plain(node, "model.network")
    return plain


def is_library(target: object) -> bool:
    """Says whether a name begins as those of the libraries do.

    Example:
        >>> is_library("monai.networks.nets.SegResNet"), is_library("mine.Network")
        (True, False)
    """
    return isinstance(target, str) and target.startswith(tuple(LIBRARIES))


def bundled_targets(plain: Any) -> list[str]:
    """Names what a description takes from the source in the bundle, without ``scripts.plugins``.

    Example:
        >>> act = {"_target_": "torch.nn.ReLU"}
        >>> bundled_targets({"_target_": "scripts.plugins.a.B", "act": act})
        ['a.B']
    """
    names = [node[_TARGET] for node in _nodes(plain)]
    return [n.removeprefix(f"{PACKAGE}.") for n in names if str(n).startswith(f"{PACKAGE}.")]


def code_of(plain: Any) -> tuple[Plain | None, dict[str, Path]]:
    """Describes the source that a network needs in addition to libraries; None without any.

    Raises:
        ConfigError: See :func:`medfed.delivery.bundle.source_code.describe_code`.
    """
    targets = bundled_targets(plain)
    return describe_code(targets) if targets else (None, {})


def packages_of(plain: Any) -> dict[str, str]:
    """Returns the versions of the packages, other than PyTorch, whose code a network runs.

    MONAI imports some packages on demand; they are attributes of the modules of its classes.

    Example:
        >>> list(packages_of({"_target_": "monai.networks.nets.SegResNet"}))
        ['monai']
    """
    modules = []
    for node in _nodes(plain):
        if is_library(node[_TARGET]):
            thing = _found(node[_TARGET])
            modules.append(import_module(thing.__module__))
    held = [value for module in modules for value in vars(module).values()]
    names = [str(getattr(v, "__module__", None) or getattr(v, "__name__", "")) for v in held]
    tops = {name.partition(".")[0] for name in [*names, *(m.__name__ for m in modules)]}
    known = installed_by_module()
    distributions = {known[top][0] for top in tops & set(known)} - {"torch", "numpy"}
    return {name: version(name) for name in sorted(distributions)}


def build_foreign(
    plain: Mapping[str, Any],
    code: Mapping[str, Any] | None,
    folder: Path | None,
    accepted: Sequence[str] = (),
) -> nn.Module:
    """Builds a network of plain data.

    Args:
        plain: From :func:`describe_foreign`.
        code: What its metadata say of source in the bundle, if any.
        folder: The bundle; None where the plugin folder itself is at hand.
        accepted: Hashes of source that the user has accepted.

    Raises:
        CheckpointError: If something else than a library's class or accepted source is named, or it
            does not take the arguments.
    """
    target = plain.get(_TARGET)
    _check_sizes(plain, str(target))
    nodes = list(_nodes(plain))
    sources = bundled_targets(plain)
    for node in nodes:
        if not is_library(node[_TARGET]) and not str(node[_TARGET]).startswith(f"{PACKAGE}."):
            raise CheckpointError(
                f"The bundle's network names {node[_TARGET]!s:.100}, which is not among those that "
                "are built: classes of MONAI and PyTorch, and the bundle's own source."
            )
    try:
        for node in nodes:
            if is_library(node[_TARGET]):
                check_targets({k: v for k, v in node.items() if not _is_node(v)}, found=True)
    except ConfigError as error:
        raise CheckpointError(f"The bundle's network cannot be built: {error}") from error
    if sources and folder is not None:
        if code is None:
            raise CheckpointError(f"{folder} names source of its own, but says nothing of it.")
        check_accepted(code, accepted, folder)
        with source_of(folder, code):
            network: nn.Module = _called(plain)
    else:
        network = _called(plain)
    return network


@contextmanager
def bounded(entries: int, numbers: int) -> Iterator[None]:
    """Stops a network that registers far more than it has weights for, before memory is filled.

    Args:
        entries: Tensors of the weights.
        numbers: Elements in all of them.

    Raises:
        CheckpointError: If layers or parameters exceed what the weights could be of.
    """
    left = {"layers": 1000 + 50 * entries, "numbers": 1_000_000 + _SPARE * numbers}

    def count(what: str, by: int) -> None:
        left[what] -= by
        if left[what] < 0:
            raise CheckpointError("its network is far larger than its weights")

    def of_module(parent: nn.Module, name: str, module: nn.Module | None) -> None:
        count("layers", 1)

    def of_parameter(parent: nn.Module, name: str, tensor: Tensor | None) -> None:
        count("numbers", 0 if tensor is None else tensor.numel())

    hooks = [
        register_module_module_registration_hook(of_module),
        register_module_parameter_registration_hook(of_parameter),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _plain(value: Any, place: str) -> Any:
    if isinstance(value, str) and value.startswith(("$", "@", "%")):
        raise ConfigError(
            f"{place}={value} cannot go into a bundle, where MONAI would evaluate it; write it "
            "otherwise."
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
    if given := node.get("_args_"):
        arguments = _named(target, given, place) | arguments
    name = target if is_library(target) else f"{PACKAGE}.{target}"
    mode = {_MODE: "callable"} if node.get("_partial_") else {}
    return {_TARGET: name, **mode, **{k: _plain(v, f"{place}.{k}") for k, v in arguments.items()}}


def _named(target: str, given: Sequence[Any], place: str) -> Plain:
    """Positional arguments by their names, as MONAI wants them."""
    signature = inspect.signature(_found(target))
    kinds = {p.kind for p in list(signature.parameters.values())[: len(given)]}
    if not kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}:
        raise ConfigError(
            f"{place}._args_ of {target} have no names, which a bundle needs; build it in a "
            "function of your own, in a folder that you add by plugins=FOLDER."
        )
    return dict(zip(signature.parameters, given, strict=False))


def _found(target: str) -> Any:
    module, _, name = target.rpartition(".")
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
    thing = _found(str(value[_TARGET]).removeprefix(f"{PACKAGE}."))
    return partial(thing, **arguments) if value.get(_MODE) == "callable" else thing(**arguments)


def _is_node(value: Any) -> bool:
    return isinstance(value, Mapping | list)


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
            f"The bundle's network {target:.100} has an argument beyond all measure; export the "
            "bundle anew."
        )
    for inner in entries:
        _check_sizes(inner, target, depth + 1)


Plain = dict[str, Any]
_NETS, _OWN = "monai.networks.nets", "scripts.networks"
TARGETS = (
    f"{_NETS}.UNet",
    f"{_NETS}.BasicUNet",
    f"{_NETS}.DenseNet",
    f"{_OWN}.small_stem_densenet",
    f"{_OWN}.halving_unet",
    f"{_OWN}.SmallCNN",
    f"{_OWN}.LogisticRegression",
    f"{_OWN}.LinearRegression",
    f"{_OWN}.CanonicalMixture",
)
_SIZES = ("spatial_dims", "in_channels", "out_channels")
_LEVELS = ("channels", "strides")
_DENSE = ("init_features", "growth_rate", "block_config", "bn_size", "dropout_prob")
# Of each of the project's builders: what it builds, and the arguments that this takes.
_BUILDERS = {
    "unet": (f"{_NETS}.UNet", (*_SIZES, *_LEVELS, "num_res_units", "norm", "dropout")),
    "basic_unet": (f"{_NETS}.BasicUNet", (*_SIZES, "features", "norm", "bias", "dropout")),
    "densenet_bc": (f"{_NETS}.DenseNet", (*_SIZES, *_DENSE)),
    "densenet121": (f"{_NETS}.DenseNet", (*_SIZES, *_DENSE)),
    "SmallCNN": (f"{_OWN}.SmallCNN", (*_SIZES, *_LEVELS, "norm", "dropout")),
    "LogisticRegression": (f"{_OWN}.LogisticRegression", ("in_channels", "out_channels")),
    "LinearRegression": (f"{_OWN}.LinearRegression", ("in_channels",)),
}
# The arguments that a description in a bundle may name, and the largest numbers of parts: a larger
# network would fill the memory before its weights are compared with it.
_TAKES = {
    **{t: {n for other, names in _BUILDERS.values() if other == t for n in names} for t in TARGETS},
    f"{_OWN}.small_stem_densenet": {*_SIZES, *_DENSE},
    f"{_OWN}.halving_unet": {*_SIZES, "features", "norm", "bias", "dropout"},
    f"{_OWN}.CanonicalMixture": {"network", "places", "count", "activation"},
}
_MOST = {"spatial_dims": 3, "count": 4096, "num_res_units": 64, "block_config": 1024}
_MOST_LEVELS = 64
_QUOTES = "'\""
_DENSE_121 = {
    "growth_rate": 32,
    "block_config": [6, 12, 24, 16],
    "init_features": 64,
    "bn_size": 4,
}
_NORMS: dict[str, Any] = {
    "group": ["group", {"num_groups": 4}],
    "instance": ["instance", {"affine": True}],
    "batch": "batch",
    "none": None,
}


def describe(node: Mapping[str, Any]) -> Plain:
    """Translates a configuration's network into plain data that need no medfed.

    Args:
        node: ``model.network`` of a run, resolved: ``_target_`` and the builder's arguments.

    Returns:
        ``_target_`` and its arguments, as JSON has them: one of :data:`TARGETS` for the project's
        own builders, or what :func:`describe_foreign` makes of another network.

    Raises:
        ConfigError: If bundles know no such network.

    Example:
        >>> describe({"_target_": "medfed.models.networks.small.LogisticRegression",
        ...           "in_channels": 3, "out_channels": 2, "spread": 0.1})
        {'_target_': 'scripts.networks.LogisticRegression', 'in_channels': 3, 'out_channels': 2}
    """
    module, _, builder = str(node["_target_"]).rpartition(".")
    if module and not module.startswith("medfed."):
        return describe_foreign(node)
    if builder not in _BUILDERS:
        raise ConfigError(
            f"Bundles know no network {node['_target_']}; they know {', '.join(_BUILDERS)}, "
            "classes of MONAI and PyTorch, and those of a plugin folder."
        )
    target, names = _BUILDERS[builder]
    a: Plain = {
        k: list(v) if isinstance(v, Sequence) and not isinstance(v, str) else v
        for k, v in node.items()
    }
    if builder == "densenet121":
        a |= _DENSE_121
    if a.get("stem") == "small":
        target = f"{_OWN}.small_stem_densenet"
    if a.get("published"):
        target = f"{_OWN}.halving_unet"
    a |= {"bias": not a.get("published"), "dropout_prob": a.get("dropout")}
    a["norm"] = _NORMS[a.get("norm", "none")]
    return {"_target_": target, **{name: a[name] for name in names}}


def describe_mixture(
    plain: Mapping[str, Any], places: Sequence[str], count: int, activation: str
) -> Plain:
    """Describes several instances of a part of a network, whose outputs are mixed.

    Args:
        plain: The ordinary network, from :func:`describe`.
        places: Layers of the part, from :func:`medfed.models.networks.personal_part.part_roots`.
        count: Instances.
        activation: What makes probabilities of outputs: ``softmax``, ``sigmoid`` or ``identity``.

    Example:
        >>> import torch
        >>> one = {"_target_": "scripts.networks.LinearRegression", "in_channels": 3}
        >>> build_network(describe_mixture(one, ["linear"], 2, "identity"))(torch.ones(4, 3)).shape
        torch.Size([4, 1])
    """
    rest = {"places": list(places), "count": count, "activation": activation}
    return {"_target_": f"{_OWN}.CanonicalMixture", "network": dict(plain), **rest}


def ordinary(plain: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the network that a mixture is made of, or the network itself.

    Example:
        >>> one = {"_target_": "b"}
        >>> ordinary(describe_mixture(one, ["head"], 2, "softmax")), ordinary(one)
        ({'_target_': 'b'}, {'_target_': 'b'})
    """
    if plain.get("_target_") != f"{_OWN}.CanonicalMixture":
        return plain
    inner = plain.get("network")
    return inner if isinstance(inner, Mapping) else {}


def is_foreign(plain: Mapping[str, Any]) -> bool:
    """Returns whether a network comes from a library or a plugin folder.

    Example:
        >>> unet = {"_target_": "monai.networks.nets.UNet", "strides": [2]}
        >>> is_foreign(unet), is_foreign({**unet, "act": "relu"}), is_foreign({"_target_": "a.B"})
        (False, True, False)
    """
    target = plain.get("_target_")
    if not isinstance(target, str):
        return False
    if target in TARGETS and {*plain} - {"_target_"} <= _TAKES[target]:
        return False
    return is_library(target) or target.startswith(f"{PACKAGE}.")


@own_stream(0)  # all that is drawn is overwritten
def build_network(
    plain: Mapping[str, Any],
    code: Mapping[str, Any] | None = None,
    folder: Path | None = None,
    accepted: Sequence[str] = (),
) -> nn.Module:
    """Builds a network of plain data; nothing but the following is ever imported and called.

    :data:`TARGETS`, the libraries' classes that a configuration may build, and source of the
    bundle's own that the user has accepted.

    Args:
        plain: From :func:`describe`.
        code: What the metadata say of source in the bundle.
        folder: The bundle; None where a plugin folder itself is at hand.
        accepted: Hashes of source that the user has accepted.

    Raises:
        CheckpointError: If the target is another one, or does not take the arguments.

    Example:
        >>> build_network({"_target_": "os.system", "command": "true"})
        Traceback (most recent call last):
        ...
        medfed.common.errors.CheckpointError: The bundle names the network os.system, which is \
not among those that are built: networks of MONAI and PyTorch, and the bundle's own.
    """
    target = plain.get("_target_")
    foreign = is_foreign(plain)
    if not foreign and target not in TARGETS:
        raise CheckpointError(
            f"The bundle names the network {reprlib.repr(target).strip(_QUOTES)}, which is not "
            "among those that are built: networks of MONAI and PyTorch, and the bundle's own."
        )
    assert isinstance(target, str)
    arguments = {k: v for k, v in plain.items() if k != "_target_"}
    if not foreign:
        _check_arguments(target, arguments)
    inner = arguments.get("network")
    if not foreign and isinstance(inner, Mapping):
        if ordinary(inner) is not inner:
            raise CheckpointError(f"The bundle's network {target} holds another mixture.")
        arguments["network"] = build_network(inner, code, folder, accepted)
    try:
        if foreign:
            return build_foreign(plain, code, folder, accepted)
        module, _, name = target.rpartition(".")
        if module == _OWN:
            module = f"{scripts.__name__}.networks"
        network: nn.Module = getattr(import_module(module), name)(**arguments)
    except CheckpointError:
        raise
    except Exception as error:  # whatever MONAI raises on arguments that do not fit
        raise CheckpointError(
            f"The bundle's network {target} cannot be built of its arguments: {first_line(error)}."
        ) from error
    return network


def check_state(network: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Compares shapes, so that a network of other sizes is refused before it takes memory.

    Args:
        network: May be on the device ``meta``.
        state: Its weights and float buffers.

    Raises:
        RuntimeError: Naming the first entry that differs.
    """
    wanted = {n: t.shape for n, t in float_entries(network).items()}
    given = {n: t.shape for n, t in state.items()}
    for name in (*wanted, *given):
        if wanted.get(name) != given.get(name):
            shapes = [None if s is None else tuple(s) for s in (wanted.get(name), given.get(name))]
            raise RuntimeError(f"{name} is {shapes[0]} in the network and {shapes[1]} in the file")


def _check_arguments(target: str, arguments: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        entries = value if isinstance(value, list) else [value]
        numbers = [n for n in entries if isinstance(n, int)]
        most = _MOST.get(name, sys.maxsize)
        if name not in _TAKES[target]:
            what = f"takes no {name}"
        elif name != "places" and (len(entries) > _MOST_LEVELS or any(n > most for n in numbers)):
            what = f"cannot have so many {name}"
        else:
            continue
        raise CheckpointError(f"The bundle's network {target} {what}; export the bundle anew.")
