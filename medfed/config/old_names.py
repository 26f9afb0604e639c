"""What classes and keys are called now that configurations of older runs, and of users, name."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

_RANDOM: dict[str, Any] = {
    "_target_": "medfed.delivery.start.pretrained.Pretrained",
    "_convert_": "all",
    "weights": None,
    "part": "all",
    "client": None,
    "strict": False,
    "rename": {},
    "adopt": [],
    "spread": 0.1,
}
_TABLES = "medfed.datamodules.tables.datamodule.TabularDataModule"


@cache
def renamed() -> dict[str, str]:
    """Returns the new names of classes and keys by their old ones."""
    table: dict[str, str] = yaml.safe_load(Path(__file__).with_name("renamed.yaml").read_text())
    return table


def relocate(node: Any) -> None:
    """Replaces old names of classes and keys in a configuration, in place.

    Example:
        >>> node = DictConfig({"link": {"_target_": "medfed.federation.link.Link"}})
        >>> relocate(node)
        >>> node.link._target_
        'medfed.federation.wire.link.Link'
    """
    if isinstance(node, DictConfig):
        for key in list(node):
            if OmegaConf.is_missing(node, key):
                continue
            if key == "_target_":
                node[key] = renamed().get(str(node[key]), node[key])
            else:
                relocate(node._get_node(str(key)))
                if key in renamed():
                    with open_dict(node):
                        node[renamed()[key]] = node.pop(key)
    elif isinstance(node, ListConfig):
        for index in range(len(node)):
            relocate(node._get_node(index))


def _cohort_as_it_was(data: DictConfig) -> None:
    """What became a parameter of generated cohorts had one value before."""
    made = data.get("generated")
    kind = str(made.get("_target_")).rpartition(".")[2] if isinstance(made, DictConfig) else ""
    if kind in ("BratsCohort", "LunaCohort", "OrgansCohort"):
        made.setdefault("test_patients", 0)
        made.setdefault("sample", 0)
    if kind == "BratsCohort":
        made.setdefault("outline", 1.0)
        made.setdefault("strength", [0.6, 1.0])
        made.setdefault("blur", [0.1, 0.9])


def as_it_was(config: DictConfig) -> None:
    """Adds to the configuration of an older run what had no key, in place.

    Example:
        >>> config = DictConfig({"data": {"_target_": _TABLES}})
        >>> as_it_was(config)
        >>> config.data.normalization
        'minmax'
    """
    if isinstance(config.get("local"), DictConfig):
        config.local.setdefault("accumulate", 1)
        config.local.setdefault("budget", "equal")
    data = config.get("data")
    if isinstance(data, DictConfig) and data.get("_target_") == _TABLES:
        data.setdefault("normalization", "minmax")
    if isinstance(data, DictConfig):
        _cohort_as_it_was(data)
    with open_dict(config):
        config.setdefault("init", _RANDOM)  # no run could start from weights
