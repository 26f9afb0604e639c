"""What ``medfed adopt`` does: a MONAI bundle from elsewhere becomes one of medfed's.

Nothing of the bundle is executed. Its network must be one of MONAI's with plain arguments, and its
weights are read without pickle. The user says by keys what the bundle's code does to an input.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hydra.utils import get_object
from monai.bundle import ConfigParser

from medfed.common.console import Terminal, say
from medfed.common.schemas import parse_json
from medfed.common.untrusted import read_yaml, reading
from medfed.config.allowed import check_targets
from medfed.config.compose import build
from medfed.config.sections import Section
from medfed.delivery.bundle.bundle import COPY_AGAIN, Bundle, write_bundle
from medfed.delivery.bundle.metadata import FORMAT_VERSION, check_facts
from medfed.delivery.bundle.networks import describe, packages_of
from medfed.delivery.start.pretrained import read_file
from medfed.records.bundles import MODEL
from medfed.records.places import METADATA
from medfed.standalone.checks import check_fields, check_known
from medfed.standalone.errors import ConfigError
from medfed.standalone.normalization import rules_of
from medfed.standalone.preparation import Preparation

_CONFIGS = ("configs/inference.json", "configs/inference.yaml", "configs/inference.yml")
_NETS = "monai.networks.nets."
_EVALUATED = re.compile(r'"[$@%]|"_\w+_"')  # in JSON what MONAI does not take as it stands
_SCALES = {"unit": [0, 1], "symmetric": [-1, 1]}  # black and white of images
_UNKNOWN = ("patch_size", "threshold", "orientation", "card", "spacing", "site", "test_metrics")
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

    def __post_init__(self) -> None:
        check_fields("", self)


def adopt(config: Section) -> None:
    """Writes a bundle of medfed from one of MONAI's, and prints what was not taken."""
    options: AdoptOptions = build(config)
    folder = Path(options.bundle)
    path = next((p for p in map(folder.joinpath, _CONFIGS) if p.is_file()), folder / _CONFIGS[0])
    with reading(path, COPY_AGAIN):
        content = parse_json(path, Facts) if path.suffix == ".json" else read_yaml(path)
    classes = [k for k, v in content.items() if isinstance(v, Mapping) and "_target_" in v]
    check_known("network", options.network, classes)
    place = f"{path}: {options.network}"
    node = _resolved(content[options.network], ConfigParser(content), place)
    if not str(node["_target_"]).startswith(_NETS):
        why = "is no network of MONAI, and no code of a bundle is run; choose another bundle."
        raise ConfigError(f"{place}._target_={node['_target_']!s:.100} {why}")
    check_targets(node, place, exists=True)
    facts, state = _facts(options, describe(node, place)), read_file(folder / options.weights)
    check_facts(facts, path, "mend the keys of medfed adopt")
    Bundle(folder, {"medfed": facts}, state, {}).network()  # whose refusals name this folder
    write_bundle(Path(options.out), facts, state, {})
    what = f"{facts['task']} of {', '.join(facts['labels'])} from {', '.join(facts['channels'])}"
    others = ", ".join(name for name in classes if name != options.network) or "nothing"
    say(Terminal(), f"{options.out}: {what}. Of {path}, the keys replace: {others}.")


def _resolved(value: Any, parser: ConfigParser, place: str) -> Any:
    """Replaces references to plain values, and short names of MONAI's classes; runs nothing."""
    if isinstance(value, list):
        return [_resolved(v, parser, place) for v in value]
    if isinstance(value, Mapping):
        if odd := {*value} & {"_mode_", "_disabled_", "_requires_", "_args_"}:
            raise ConfigError(f"{place} has {min(odd)}, which is not taken; choose another bundle.")
        inside = {k: _resolved(v, parser, place) for k, v in value.items()}
        short = "." not in str(inside.get("_target_", "."))  # MONAI finds classes by that, too
        return inside | ({"_target_": f"{_NETS}{inside['_target_']}"} if short else {})
    if not isinstance(value, str) or not value.startswith("@"):
        return value
    other = parser.get(value[1:])
    return value if other is None or _EVALUATED.search(json.dumps(other, default=str)) else other


def _facts(options: AdoptOptions, plain: Facts) -> Facts:
    """Returns what the bundle says of its model: by the keys first, by the metadata second."""
    path, segments = Path(options.bundle) / METADATA, options.task == "segmentation"
    with reading(path, COPY_AGAIN):
        stated: Facts = parse_json(path)
        if "medfed" in stated:
            raise ConfigError(f"{options.bundle} is a bundle of medfed already; use it as it is.")
        first = [next(iter(p.values())) for _, p in sorted(stated["network_data_format"].items())]
        defs = [port.get("channel_def", {}) for port in first]  # of inputs, and of outputs
        read, answered = ([str(each[str(n)]) for n in range(len(each))] for each in defs)
        shape = [n for n in first[0].get("spatial_shape", ()) if type(n) is int]
    parameters = inspect.signature(get_object(plain["_target_"])).parameters
    arguments = {name: each.default for name, each in parameters.items()} | plain
    channels, labels = list(options.channels or read), list(options.labels or answered)
    if segments and [*map(str.lower, labels[:1])] == ["background"]:
        labels = labels[1:]
    if not (channels and labels):
        raise ConfigError(f"{path} names no channels or no labels; write channels=[A] labels=[B].")
    sides, dims = list(options.sides or shape), arguments.get("spatial_dims")
    facts = {
        **dict.fromkeys(_UNKNOWN),
        "format_version": FORMAT_VERSION,
        "task": options.task,
        "client": Path(options.bundle).resolve().name,
        "method": "none of medfed's",
        "network": plain,
        "packages": packages_of(plain),
        "spatial_dims": dims,
        "slices": segments and dims == 2,
        "channels": channels,
        "present": channels,
        "labels": labels,
        "versions": {},
        "adopted": f"Adopted from {stated.get('name', 'a bundle')} {stated.get('version', '')}, "
        "which was trained elsewhere and not tested here.",
    }
    if segments:
        outputs = arguments.get("out_channels", arguments.get("num_classes"))
        try:
            rules, mm = rules_of(options.normalize, channels), options.spacing
            facts |= Preparation(rules, None if mm is None else tuple(mm)).record()
        except ConfigError as error:  # which names the keys of a training
            raise ConfigError(str(error).removeprefix("data.")) from error
        regions = {name: [n] for n, name in enumerate(labels, start=1)}
        window = {"patch_size": sides if len(sides) == dims else None, "overlap": 0.25}
        activation = "softmax" if outputs == len(labels) + 1 else "sigmoid"
        facts |= {**window, "window_batch": 4, "threshold": 0.5, "activation": activation}
        return facts | {"orientation": "RAS", "input": {"kind": "volumes", "regions": regions}}
    check_known("normalize", str(options.normalize), _SCALES)
    if options.spacing or len(sides) != dims:
        raise ConfigError("Images have no spacing, but sides; write sides=[HEIGHT,WIDTH] alone.")
    scale = {"name": "range", "range": [0, 255], "to": _SCALES[str(options.normalize)]}
    color = "rgb" if len(channels) == 3 else "grey"
    source = {"kind": "images", "color": color, "size": sides, "converted": True}
    return facts | {"normalization": scale, "input": source}
