"""What ``medfed adopt`` does: a MONAI bundle from elsewhere becomes one of medfed's.

Nothing of the bundle is executed. Its network must be one of MONAI's with plain arguments, and its
weights are read without pickle. The user says by keys what the bundle's code does to an input.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from medfed.common.checks import check_fields, check_known
from medfed.common.console import Terminal, say
from medfed.common.errors import CheckpointError, ConfigError
from medfed.common.schemas import parse_json
from medfed.common.untrusted import read_yaml, reading
from medfed.config.allowed import check_targets
from medfed.config.compose import build
from medfed.config.sections import Section
from medfed.delivery.bundle import networks
from medfed.delivery.bundle.bundle import COPY_AGAIN, read_bundle, write_bundle
from medfed.delivery.bundle.metadata import FORMAT_VERSION, check_facts
from medfed.delivery.start.pretrained import read_file
from medfed.records.bundles import METADATA, MODEL
from medfed.standalone.preparation import Preparation, rules_of

_CONFIGS = ("configs/inference.json", "configs/inference.yaml", "configs/inference.yml")
_NETS = "monai.networks.nets."
_SCALES = {"unit": [0, 1], "symmetric": [-1, 1]}  # black and white of images
_PLAIN = "is no plain value, and no code of a bundle is run; write the value itself in a copy."
_PORTS = ("inputs", "outputs")
_NOT_KNOWN = ("patch_size", "threshold", "orientation", "card", "spacing", "site", "test_metrics")
Facts = dict[str, Any]


@dataclass(frozen=True)
class AdoptOptions:
    """The keys of ``configs/adopt.yaml``, described there."""

    bundle: str
    out: str
    task: Literal["segmentation", "classification", "findings"]
    normalize: str | Mapping[str, Any]
    network: str = "network_def"
    weights: str = MODEL
    channels: Sequence[str] | None = None
    labels: Sequence[str] | None = None
    sides: Sequence[int] | None = None
    spacing: Sequence[float] | None = None
    kind: Literal["volumes", "pictures"] = "volumes"

    def __post_init__(self) -> None:
        check_fields("", self)


def adopt(config: Section) -> None:
    """Writes a bundle of medfed from one of MONAI's, and prints what was not taken."""
    options: AdoptOptions = build(config)
    folder, out = Path(options.bundle), Path(options.out)
    path = next((p for p in map(folder.joinpath, _CONFIGS) if p.is_file()), folder / _CONFIGS[0])
    with reading(path, COPY_AGAIN):
        content = parse_json(path, Facts) if path.suffix == ".json" else read_yaml(path)
    classes = [k for k, v in content.items() if isinstance(v, Mapping) and "_target_" in v]
    check_known("network", options.network, classes)
    place = f"{path}: {options.network}"
    plain = _plain(content[options.network], place, content)
    if not str(plain["_target_"]).startswith(_NETS):
        raise ConfigError(
            f"{place}::_target_={plain['_target_']!s:.100} is no network of MONAI, and no code of "
            "a bundle is run; only bundles of MONAI's own networks can be adopted."
        )
    check_targets(plain, place, found=True)
    plain, file = networks.describe(plain), folder / options.weights
    if not file.is_file():
        raise CheckpointError(f"{file} is missing; name the bundle's state_dict by weights=FILE.")
    state = read_file(file)
    try:
        with networks.bounded(len(state), sum(t.numel() for t in state.values())):
            network = networks.build_network(plain)
        networks.check_state(network, state)
        if odd := [name for name, t in state.items() if not t.isfinite().all()]:
            raise RuntimeError(f"{odd[0]} has NaN or infinity")
    except RuntimeError as error:
        why = f"{file} does not fit the network of {path} ({error})"
        raise CheckpointError(f"{why}; name its own state_dict by weights=FILE.") from error
    facts = _facts(options, plain, inspect.signature(type(network)))
    check_facts(facts, path, "mend the keys of medfed adopt")
    write_bundle(out, facts, state, {})
    read_bundle(out)
    what = f"{facts['task']} of {', '.join(facts['labels'])} by {type(network).__name__}"
    how = f"{facts['input']['kind']} of {', '.join(facts['channels'])}, {options.normalize}"
    say(Terminal(), f"{out}: {what}, from {how}.")
    if others := [name for name in classes if name != options.network]:
        say(Terminal(), f"Not taken: {', '.join(others)} of {path}; the keys say it instead.")


def _plain(value: Any, place: str, content: Mapping[str, Any] | None) -> Any:
    """Resolves references to plain values of the `content`; refuses what else MONAI evaluates."""
    if isinstance(value, list):
        return [_plain(v, f"{place}::{n}", content) for n, v in enumerate(value)]
    if isinstance(value, Mapping):
        kept = {k: v for k, v in value.items() if k != "_desc_"}
        if odd := [k for k in kept if k[:1] == "_" and (content is None or k != "_target_")]:
            raise ConfigError(f"{place}::{odd[0]} {_PLAIN}")
        if str(target := kept.get("_target_")).isidentifier() and target:
            kept["_target_"] = f"{_NETS}{target}"  # MONAI finds its classes by their names alone
        return {k: _plain(v, f"{place}::{k}", content) for k, v in kept.items()}
    if not isinstance(value, str) or not value.startswith(("$", "@", "%")):
        return value
    found: Any = content if value[0] == "@" else None
    for part in value[1:].replace("#", "::").split("::"):
        inside = {str(n): v for n, v in enumerate(found)} if isinstance(found, list) else found
        found = inside.get(part) if isinstance(inside, Mapping) else None
    if found is None:
        raise ConfigError(f"{place}={value:.100} {_PLAIN}")
    return _plain(found, f"{place}={value}", None)


def _facts(options: AdoptOptions, plain: Facts, signature: inspect.Signature) -> Facts:
    """Returns what the bundle says of its model: by the keys first, by the metadata second."""
    path = Path(options.bundle) / METADATA
    with reading(path, COPY_AGAIN):
        stated = parse_json(path)
        if "medfed" in stated:
            raise ConfigError(f"{options.bundle} is a bundle of medfed already; use it as it is.")
        ports = [next(iter(stated["network_data_format"][p].values())) for p in _PORTS]
        defs = [port.get("channel_def", {}) for port in ports]
        read, answered = ([str(each[str(n)]) for n in range(len(each))] for each in defs)
        shape = [n for n in ports[0].get("spatial_shape", ()) if type(n) is int]
    arguments = {name: p.default for name, p in signature.parameters.items()} | plain
    dims, segments = arguments.get("spatial_dims"), options.task == "segmentation"
    channels, labels = list(options.channels or read), list(options.labels or answered)
    if segments and [*map(str.lower, labels[:1])] == ["background"]:
        labels = labels[1:]
    if not (channels and labels):
        raise ConfigError(f"{path} names no channels or no labels; write channels=[A] labels=[B].")
    exclusive = arguments.get("out_channels", arguments.get("num_classes")) == len(labels) + 1
    size = list(options.sides or shape)
    if not segments and len(size) != dims:
        raise ConfigError(f"{path} has no size of images; write sides=[HEIGHT,WIDTH].")
    origin = f"{stated.get('name', 'a MONAI bundle')} {stated.get('version', '')}".strip()
    facts = {
        "format_version": FORMAT_VERSION,
        "task": options.task,
        "client": Path(options.bundle).resolve().name,
        "method": origin,
        "network": plain,
        "packages": networks.packages_of(plain),
        "spatial_dims": dims,
        "slices": segments and dims == 2,
        "channels": channels,
        "present": channels,
        "labels": labels,
        "versions": {},
        "adopted": f"Adopted from {origin}, which was trained elsewhere; nobody tested it here.",
        **dict.fromkeys(_NOT_KNOWN),
    }
    if segments:
        facts |= {"patch_size": size if len(size) == dims else None, "overlap": 0.25}
        facts |= {"threshold": 0.5, "activation": "softmax" if exclusive else "sigmoid"}
    regions = {name: [n] for n, name in enumerate(labels, start=1)}
    if segments and options.kind == "volumes":
        try:
            rules, mm = rules_of(options.normalize, channels), options.spacing
            record = Preparation(rules, None if mm is None else tuple(mm)).record()
        except ConfigError as error:  # which names the keys of a training
            raise ConfigError(str(error).removeprefix("data.")) from error
        source = {"kind": "volumes", "regions": regions}
        return {**facts, **record, "orientation": "RAS", "input": source, "window_batch": 4}
    if options.spacing:
        raise ConfigError("spacing is for volumes; leave it out.")
    check_known("normalize", str(options.normalize), ["zscore", "unit"] if segments else _SCALES)
    source = {"kind": "images", "color": "rgb" if len(channels) == 3 else "grey"}
    if segments:
        source |= {"kind": "pictures", "scale": 1.0, "regions": regions}
        return {**facts, "normalization": {"name": options.normalize}, "input": source}
    scale = {"name": "range", "range": [0, 255], "to": _SCALES[str(options.normalize)]}
    source |= {"size": size, "converted": True}
    return {**facts, "normalization": scale, "input": source}
