"""The personal part of a network: its names by default, and its layers, which can be taken out.

What stays with a client is also what exists several times where models are canonical.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from medfed.common.errors import ConfigError, did_you_mean


def default_personal(network: nn.Module) -> tuple[str, ...]:
    """Names the part of a network that stays with its client in the published experiments.

    Args:
        network: A network whose class says so by its ``personal``, one of MONAI's, or any other.

    Returns:
        ``fnmatch`` patterns on names relative to ``network``: the classifier of a DenseNet or a
        small CNN, the up-sampling path and output layer of a U-Net, all of a logistic or
        linear regression, the membership vector of a canonical model.
        An empty tuple (nothing personal) for other networks.

    Example:
        >>> from medfed.models.networks.densenet import densenet_bc
        >>> from medfed.models.networks.unet import unet
        >>> default_personal(densenet_bc(2, 1, 2))
        ('class_layers.*',)
        >>> default_personal(unet(2, 1, 1, channels=(4, 8, 16), strides=(2, 2)))
        ('model.2.*', 'model.1.submodule.2.*')
    """
    if isinstance(own := getattr(network, "personal", None), tuple):
        return own
    # By name: a run without MONAI's networks need not import them.
    kinds = {c.__name__ for c in type(network).__mro__ if c.__module__.startswith("monai.")}
    if "DenseNet" in kinds:
        return ("class_layers.*",)
    if "BasicUNet" in kinds:
        return ("upcat_*", "final_conv.*")
    if "UNet" in kinds:
        # Each level is Sequential(0 down, 1 SkipConnection(submodule = next level), 2 up).
        levels = len(network.strides)  # type: ignore[arg-type]
        return tuple(f"model.{'1.submodule.' * level}2.*" for level in range(levels))
    return ()


def part_roots(network: nn.Module, parts: Sequence[str]) -> list[str]:
    """Names the largest layers of which all parameters match the patterns.

    Args:
        network: Any module.
        parts: Globs of parameter names; ``*`` also spans dots.

    Returns:
        Module names; ``[""]`` where the whole network matches.

    Raises:
        ConfigError: If a pattern matches nothing, or part of a layer only.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 1)))
        >>> part_roots(net, ["1.1.*"]), part_roots(net, ["*"])
        (['1'], [''])
    """
    names = [name for name, _ in network.named_parameters()]
    for pattern in parts:
        if not any(fnmatchcase(n, pattern) for n in names):
            roots = dict.fromkeys([*(f"{n.rsplit('.', 1)[0]}.*" for n in names), *names])
            hint = did_you_mean(pattern, roots) or f"; the parameters are {', '.join(names[:6])}"
            raise ConfigError(f"The canonical part {pattern!r} matches no parameter{hint}.")
    matched = {n for n in names if any(fnmatchcase(n, p) for p in parts)}
    if not matched:
        raise ConfigError(
            "This network says nothing of its head, so that canonical.parts must name the "
            f"canonical part; the parameters are {', '.join(names[:6])}."
        )
    return list(_roots(network, "", matched))


def _roots(module: nn.Module, name: str, matched: set[str]) -> Iterator[str]:
    prefix = f"{name}." if name else ""
    own = {prefix + n for n, _ in module.named_parameters()}
    if own and own <= matched:
        yield name
        return
    for leaf in module._parameters:
        if prefix + leaf in matched:
            raise ConfigError(
                f"Canonical parts are whole layers, and {prefix + leaf!r} is half of one; name it "
                f"by {prefix + '*'!r}."
            )
    for child, inner in module.named_children():
        yield from _roots(inner, prefix + child, matched)


def take(network: nn.Module, places: Iterable[str]) -> dict[str, nn.Module]:
    """Removes layers from a network and returns them by name.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        >>> take(net, ["1"]), [name for name, _ in net.named_parameters()]
        ({'1': Linear(in_features=3, out_features=1, bias=True)}, ['0.weight', '0.bias'])
    """
    layers = {}
    for name in places:
        children, leaf = place(network, name)
        layer = children[leaf]
        assert layer is not None
        layers[name], children[leaf] = layer, None
    return layers


def place(network: nn.Module, name: str) -> tuple[dict[str, nn.Module | None], str]:
    """Returns where a layer is kept: its parent's children, and its name among them.

    Example:
        >>> children, leaf = place(nn.Sequential(nn.Linear(2, 3)), "0")
        >>> children[leaf]
        Linear(in_features=2, out_features=3, bias=True)
    """
    parent, _, leaf = name.rpartition(".")
    return network.get_submodule(parent)._modules, leaf


def remainder(network: nn.Module, places: Sequence[str], name: str = "") -> Iterator[nn.Module]:
    """Yields the largest layers that hold none of the places.

    Example:
        >>> net = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Tanh(), nn.Linear(3, 1)))
        >>> list(remainder(net, ["1.1"]))
        [ReLU(), Tanh()]
    """
    prefix = f"{name}." if name else ""
    for child, layer in network.named_children():
        if any(p.startswith(f"{prefix}{child}.") for p in places):
            yield from remainder(layer, places, prefix + child)
        elif prefix + child not in places:
            yield layer
