"""From a configuration to the task module, with canonical parts where they were chosen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from omegaconf import DictConfig
from torch import nn

from medfed.config import build
from medfed.errors import ConfigError
from medfed.federation.seeding import derive_seed
from medfed.models.networks import Canonical, default_personal
from medfed.models.networks.canonical import Mix
from medfed.models.task import TaskModule


@dataclass(frozen=True)
class CanonicalParts:
    """What of a network is canonical, and how its instances are mixed.

    Attributes:
        count: K, the instances.
        mix: ``outputs`` or ``parameters``.
        parts: Patterns of parameter names; ``None``: what the model calls personal, its head.

    Raises:
        ConfigError: If the count is below 1.
    """

    count: int = 4
    mix: Mix = "outputs"
    parts: list[str] | None = None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"canonical.count must be 1 or more, not {self.count}.")


def mixes_models(config: DictConfig) -> bool:
    """Says whether a run has canonical parts.

    With another algorithm, what an experiment says about their number has no section to change and
    means nothing.

    Example:
        >>> from omegaconf import OmegaConf
        >>> mixes_models(OmegaConf.create({"canonical": {"count": 2}}))
        False
    """
    return "_target_" in (config.get("canonical") or {})


def build_task(config: DictConfig) -> TaskModule:
    """Builds the task of a run from initial weights that depend on the seed alone.

    With ``canonical=...`` the network is built anew for each further instance, under a seed of its
    own; the first one, and all that is common, is the network of a run without canonical parts.

    Args:
        config: The configuration, facts of the data filled in.

    Raises:
        ConfigError: If the model has no such part, or its instances would be equal.
    """
    torch.manual_seed(derive_seed(config.seed, "initial weights"))
    task: TaskModule = build(config.model)
    if not mixes_models(config):
        return task
    chosen: CanonicalParts = build(config.canonical)
    networks = [task.network]
    for k in range(1, chosen.count):
        torch.manual_seed(derive_seed(config.seed, "initial weights", k))
        further: nn.Module = build(config.model.network)
        networks.append(further)
    patterns = task.personal if chosen.parts is None else chosen.parts
    task.network = Canonical(networks, patterns, chosen.mix, task.activation)
    task.personal = default_personal(task.network)
    return task
