"""The network that weights are of, and how the data were prepared that they were trained on.

Both as keys of a configuration. medfed's own bundles and run folders hold theirs. A MONAI Bundle
says it in ``network_def`` and ``preprocessing`` of its inference or training configuration, of
which values and references between them are read and no expression is evaluated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from omegaconf import OmegaConf

from medfed.common.errors import CheckpointError, ConfigError, first_line
from medfed.common.strict_json import read_strict_json
from medfed.common.untrusted import read_yaml
from medfed.run.folder import read_config

NETWORK, DATA = "network", "data"
WHAT = (NETWORK, DATA)
# What the present data decide, by the names that networks have for it.
_FACTS = {
    **dict.fromkeys(("in_channels", "n_input_channels", "in_chans"), "${in_channels}"),
    **dict.fromkeys(("out_channels", "num_classes"), "${out_channels}"),
}
# How volumes are prepared, as the data sections call it; other sections have none of them.
_PREPARED = ("spatial_dims", "normalize", "spacing", "crop_foreground", "slices", "patch_size")
_CONFIGS = tuple(f"configs/{n}.{e}" for n in ("inference", "train") for e in ("json", "yaml"))
_NETS = "monai.networks.nets"
_DEEPEST = 16  # references to references


def of_run(folder: Path) -> dict[str, Any]:
    """Returns what a run was trained with.

    Raises:
        CheckpointError: If it is no run folder.
    """
    return of_training(OmegaConf.to_container(read_config(folder)))


def of_training(config: Any) -> dict[str, Any]:
    """Returns what a run's configuration says of its network and its data.

    Args:
        config: Plain mappings, as a run folder or the metadata of a bundle have them.

    Raises:
        CheckpointError: If it names no network.

    Example:
        >>> network = {"_target_": "a.Net", "in_channels": 4, "width": 8}
        >>> model = {"_target_": "Task", "network": network}
        >>> found = of_training({"model": model, "data": {"spacing": [2, 2]}})
        >>> for key, value in found.items():
        ...     print(key, value)
        model._target_ Task
        model.network {'_target_': 'a.Net', 'in_channels': '${in_channels}', 'width': 8}
        data.spacing [2, 2]
    """
    model = config.get("model") if isinstance(config, Mapping) else None
    network = model.get("network") if isinstance(model, Mapping) else None
    if not isinstance(model, Mapping) or not isinstance(network, Mapping):
        raise CheckpointError(
            "init.weights does not say of which network it is; set init.adopt=[] and choose model."
        )
    _check_values(model)
    data = config.get("data")
    prepared = data if isinstance(data, Mapping) else {}
    _check_values(prepared)
    return {
        "model._target_": model.get("_target_"),
        "model.network": _of_these_data(network, dims="spatial_dims" in prepared),
        **{f"data.{key}": prepared[key] for key in _PREPARED if key in prepared},
        **_units(config, model),
    }


def _units(config: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """In which units a regression answers; before they were agreed on, in the outcome's own."""
    if str(model.get("_target_")).rpartition(".")[2] != "RegressionTask":
        return {}
    _check_values(config.get("outcome_scale"))
    return {"data.outcome_scale": config.get("outcome_scale") or [0, 1]}


def _check_values(node: Any) -> None:
    # What stands for a value could read the environment of whoever trains.
    if "${" in repr(node):
        raise CheckpointError(
            "init.weights holds an interpolation (${...}), which no run writes; set init.adopt=[]."
        )


def _of_these_data(network: Mapping[str, Any], dims: bool) -> dict[str, Any]:
    facts = {**_FACTS, **({"spatial_dims": "${spatial_dims}"} if dims else {})}
    return {key: facts.get(key, value) for key, value in network.items()}


def of_monai(folder: Path) -> dict[str, Any]:
    """Returns what a MONAI Bundle says of its network and its preprocessing.

    Raises:
        CheckpointError: If it has no configuration that names a network, or one that is torn.
        ConfigError: If the network's arguments are expressions.
    """
    for name in _CONFIGS:
        path = folder / name
        if path.is_file():
            whole = _read(path)
            for key in ("network_def", "network", "net"):
                if isinstance(node := whole.get(key), Mapping) and "_target_" in node:
                    network = _network(node, whole, path)
                    prepared = _preprocessing(whole, network.get("spatial_dims"))
                    return {"model.network": network, **prepared}
    raise CheckpointError(
        f"{folder} names no network in {', '.join(_CONFIGS)}; set model.network yourself and "
        "init.adopt=[]."
    )


def _read(path: Path) -> dict[str, Any]:
    if path.suffix == ".yaml":
        return read_yaml(path)
    try:
        whole = read_strict_json(path)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({first_line(error)}); copy the bundle again."
        ) from error
    return whole if isinstance(whole, dict) else {}


def _network(node: Mapping[str, Any], whole: Mapping[str, Any], path: Path) -> dict[str, Any]:
    target = str(node["_target_"])
    plain = {k: _plain(v, whole, path, k) for k, v in node.items() if not k.startswith("_")}
    named = target if "." in target else f"{_NETS}.{target}"
    return {"_target_": named, **_of_these_data(plain, dims=False)}


def _plain(value: Any, whole: Mapping[str, Any], path: Path, key: str, depth: int = 0) -> Any:
    """A value with its references replaced."""
    if isinstance(value, list):
        return [_plain(v, whole, path, key, depth) for v in value]
    if isinstance(value, Mapping):
        return {str(k): _plain(v, whole, path, key, depth) for k, v in value.items()}
    if not isinstance(value, str) or value[:1] not in ("@", "$", "%"):
        _check_values(value)
        return value
    found: Any = whole if value.startswith("@") and depth < _DEEPEST else None
    for name in value[1:].replace("::", "#").split("#"):
        found = found.get(name) if isinstance(found, Mapping) else None
    if found is None:
        raise ConfigError(
            f"{path} computes {key} of its network by {value!r:.80}, which is not run; set "
            "model.network yourself and init.adopt=[]."
        )
    return _plain(found, whole, path, key, depth + 1)


def _preprocessing(whole: Mapping[str, Any], dims: Any) -> dict[str, Any]:
    """What medfed's data sections have a key for, of transforms with plain values."""
    found: dict[str, Any] = {}
    if dims in (2, 3):
        found["data.spatial_dims"] = dims
    inferer = whole.get("inferer")
    window = inferer.get("roi_size") if isinstance(inferer, Mapping) else None
    if _are_numbers(window) and len(window) == dims:
        found["data.patch_size"] = window
    for step in _steps(whole.get("preprocessing")):
        name = str(step.get("_target_", "")).rpartition(".")[2]
        numbers = [step.get(k) for k in ("a_min", "a_max")]
        if name == "Spacingd" and _are_numbers(step.get("pixdim")):
            found["data.spacing"] = [float(mm) for mm in step["pixdim"][:dims]]
        elif name == "NormalizeIntensityd" and isinstance(step.get("nonzero", False), bool):
            found["data.normalize"] = "zscore_nonzero" if step.get("nonzero") else "zscore"
        elif name == "ScaleIntensityRanged" and _are_numbers(numbers):
            if (step.get("b_min"), step.get("b_max")) == (0.0, 1.0):
                found["data.normalize"] = {"window": numbers}
        elif name == "CropForegroundd":
            found["data.crop_foreground"] = True
    return found


def _steps(node: Any) -> Iterator[Mapping[str, Any]]:
    inner = node.get("transforms") if isinstance(node, Mapping) else None
    for step in inner if isinstance(inner, list) else []:
        if isinstance(step, Mapping) and not step.get("_disabled_"):
            yield step


def _are_numbers(values: Any) -> TypeGuard[list[float]]:
    return (
        isinstance(values, list)
        and bool(values)
        and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    )
