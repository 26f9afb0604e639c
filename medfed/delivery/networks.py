"""A network as plain data: MONAI's class and its arguments, from which it is built again.

The project's builders are thin, and most of their networks are MONAI's own. The others are put
together of MONAI's parts in ``scripts/networks.py``, which travels with every bundle. Names of the
weights are the same in both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from monai.networks.nets import BasicUNet, DenseNet, UNet
from torch import nn

from medfed.delivery.bundle_scripts import networks as scripts
from medfed.errors import CheckpointError, ConfigError

Plain = dict[str, Any]
TARGETS: dict[str, Callable[..., nn.Module]] = {
    "monai.networks.nets.UNet": UNet,
    "monai.networks.nets.BasicUNet": BasicUNet,
    "monai.networks.nets.DenseNet": DenseNet,
    "scripts.networks.small_stem_densenet": scripts.small_stem_densenet,
    "scripts.networks.halving_unet": scripts.halving_unet,
    "scripts.networks.SmallCNN": scripts.SmallCNN,
    "scripts.networks.LogisticRegression": scripts.LogisticRegression,
    "scripts.networks.LinearRegression": scripts.LinearRegression,
    "scripts.networks.CanonicalMixture": scripts.CanonicalMixture,
}
_INSTANCE = ["instance", {"affine": True}]
_SMALL_NORMS: dict[str, Any] = {
    "group": ["group", {"num_groups": 4}],
    "batch": "batch",
    "instance": _INSTANCE,
    "none": None,
}


def describe(node: Mapping[str, Any]) -> Plain:
    """Translates a configuration's network into plain data that need no medfed.

    Args:
        node: ``model.network`` of a run, resolved: ``_target_`` and the builder's arguments.

    Returns:
        ``_target_``, one of :data:`TARGETS`, and its arguments, as JSON has them.

    Raises:
        ConfigError: If bundles know no such network.

    Example:
        >>> describe({"_target_": "medfed.models.networks.logistic_regression",
        ...           "in_channels": 3, "out_channels": 2, "spread": 0.1})
        {'_target_': 'scripts.networks.LogisticRegression', 'in_channels': 3, 'out_channels': 2}
    """
    arguments = {k: v for k, v in node.items() if not k.startswith("_")}
    builder = str(node["_target_"]).rpartition(".")[2]
    if builder not in _TRANSLATIONS:
        raise ConfigError(
            f"Bundles know no network {node['_target_']}; they know {', '.join(_TRANSLATIONS)}."
        )
    return _TRANSLATIONS[builder](arguments)


def describe_mixture(
    plain: Mapping[str, Any], places: Sequence[str], count: int, activation: str
) -> Plain:
    """Describes several instances of a part of a network, whose outputs are mixed.

    Args:
        plain: The ordinary network, from :func:`describe`.
        places: Layers of the part, from :func:`medfed.models.networks.parts.part_roots`.
        count: Instances.
        activation: What makes probabilities of outputs: ``softmax``, ``sigmoid`` or ``identity``.

    Example:
        >>> import torch
        >>> one = {"_target_": "scripts.networks.LinearRegression", "in_channels": 3}
        >>> build_network(describe_mixture(one, ["linear"], 2, "identity"))(torch.ones(4, 3)).shape
        torch.Size([4, 1])
    """
    rest = {"places": list(places), "count": count, "activation": activation}
    return {"_target_": "scripts.networks.CanonicalMixture", "network": dict(plain), **rest}


def ordinary(plain: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the network that a mixture is made of, or the network itself.

    Example:
        >>> ordinary({"_target_": "a", "network": {"_target_": "b"}}), ordinary({"_target_": "b"})
        ({'_target_': 'b'}, {'_target_': 'b'})
    """
    inner = plain.get("network", plain)
    assert isinstance(inner, Mapping)
    return inner


def build_network(plain: Mapping[str, Any]) -> nn.Module:
    """Builds a network of plain data; nothing but the targets above is ever called.

    Args:
        plain: From :func:`describe`.

    Raises:
        CheckpointError: If the target is another one, or does not take the arguments.

    Example:
        >>> build_network({"_target_": "os.system", "command": "true"})
        Traceback (most recent call last):
        ...
        medfed.errors.CheckpointError: The bundle names the network os.system, which is not among \
those that are built: monai.networks.nets.UNet, monai.networks.nets.BasicUNet, \
monai.networks.nets.DenseNet, scripts.networks.small_stem_densenet, scripts.networks.halving_unet, \
scripts.networks.SmallCNN, scripts.networks.LogisticRegression, \
scripts.networks.LinearRegression, scripts.networks.CanonicalMixture.
    """
    target = plain.get("_target_")
    if not isinstance(target, str) or target not in TARGETS:
        raise CheckpointError(
            f"The bundle names the network {target}, which is not among those that are built: "
            f"{', '.join(TARGETS)}."
        )
    arguments = {k: v for k, v in plain.items() if k != "_target_"}
    if isinstance(arguments.get("network"), Mapping):
        arguments["network"] = build_network(arguments["network"])
    try:
        return TARGETS[target](**arguments)
    except Exception as error:  # whatever MONAI raises on arguments that do not fit
        raise CheckpointError(
            f"The bundle's network {target} cannot be built of its arguments: {error}."
        ) from error


def _sizes(a: Mapping[str, Any]) -> Plain:
    return {name: a[name] for name in ("spatial_dims", "in_channels", "out_channels")}


def _unet(a: Mapping[str, Any]) -> Plain:
    widths = {"channels": list(a["channels"]), "strides": list(a["strides"])}
    rest = {"num_res_units": a["num_res_units"], "norm": _norm(a["norm"]), "dropout": a["dropout"]}
    return {"_target_": "monai.networks.nets.UNet", **_sizes(a), **widths, **rest}


def _basic_unet(a: Mapping[str, Any]) -> Plain:
    halving = bool(a["published"])
    target = "scripts.networks.halving_unet" if halving else "monai.networks.nets.BasicUNet"
    rest = {"norm": _norm(a["norm"]), "bias": not halving, "dropout": a["dropout"]}
    return {"_target_": target, **_sizes(a), "features": list(a["features"]), **rest}


def _densenet_bc(a: Mapping[str, Any]) -> Plain:
    small = a["stem"] == "small"
    target = "scripts.networks.small_stem_densenet" if small else "monai.networks.nets.DenseNet"
    return {
        "_target_": target,
        **_sizes(a),
        "init_features": a["init_features"],
        "growth_rate": a["growth_rate"],
        "block_config": list(a["block_config"]),
        "bn_size": a["bn_size"],
        "dropout_prob": a["dropout"],
    }


def _densenet121(a: Mapping[str, Any]) -> Plain:
    fixed = {"growth_rate": 32, "block_config": [6, 12, 24, 16], "init_features": 64, "bn_size": 4}
    return _densenet_bc({**a, **fixed})


def _small_cnn(a: Mapping[str, Any]) -> Plain:
    widths = {"channels": list(a["channels"]), "strides": list(a["strides"])}
    rest = {"norm": _SMALL_NORMS[a["norm"]], "dropout": a["dropout"]}
    return {"_target_": "scripts.networks.SmallCNN", **_sizes(a), **widths, **rest}


def _logistic(a: Mapping[str, Any]) -> Plain:
    sizes = {"in_channels": a["in_channels"], "out_channels": a["out_channels"]}
    return {"_target_": "scripts.networks.LogisticRegression", **sizes}


def _linear(a: Mapping[str, Any]) -> Plain:
    return {"_target_": "scripts.networks.LinearRegression", "in_channels": a["in_channels"]}


def _norm(name: str) -> Any:
    return _INSTANCE if name == "instance" else name


_TRANSLATIONS: dict[str, Callable[[Mapping[str, Any]], Plain]] = {
    "unet": _unet,
    "basic_unet": _basic_unet,
    "densenet_bc": _densenet_bc,
    "densenet121": _densenet121,
    "small_cnn": _small_cnn,
    "logistic_regression": _logistic,
    "linear_regression": _linear,
}
