"""What of a configuration must be equal at all ends, and what each has for itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

OWN = (
    *("resume", "folder", "trainer", "threads", "logger", "progress", "plugins", "pictures"),
    *("tuned", "source", "checkpoint", "init.weights"),  # the weights themselves are compared
    *("data.path", "data.root", "data.workers", "data.memory_gb", "data.cache"),
)
"""Keys that each end has for itself: paths, devices, how much is shown."""


def agreed(config: DictConfig) -> dict[str, Any]:
    """Returns the leaves of a configuration that all ends must have alike, by key.

    Args:
        config: As it is composed, facts of the data not filled in.

    Example:
        >>> agreed(OmegaConf.create({"seed": 1, "data": {"path": "a", "batch_size": 2}}))
        {'seed': 1, 'data.batch_size': 2}
    """
    leaves: dict[str, Any] = {}
    _collect(OmegaConf.to_container(config), "", leaves)
    return {k: v for k, v in leaves.items() if not _is_own(k)}


def fingerprints(config: DictConfig) -> dict[str, str]:
    """Returns a hash of each agreed leaf, by key; what is said to others.

    Args:
        config: As for :func:`agreed`.

    Example:
        >>> fingerprints(OmegaConf.create({"seed": 1}))
        {'seed': 'f6fc42039fba3776'}
    """
    return {
        key: hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()
        for key, value in agreed(config).items()
    }


def _is_own(key: str) -> bool:
    return any(f"{key}.".startswith(f"{own}.") for own in OWN)


def _collect(node: Any, path: str, leaves: dict[str, Any]) -> None:
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            _collect(value, f"{path}.{key}" if path else str(key), leaves)
    else:
        leaves[path] = node
