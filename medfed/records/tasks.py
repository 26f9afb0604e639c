"""Tasks from sections of a configuration: at weights that the seed alone decides."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from torch import nn

from medfed.common.seeding import derive_seed
from medfed.common.streams import globals_seeded, own_stream
from medfed.config.compose import build
from medfed.config.sections import Section
from medfed.models.networks.canonical import Canonical, Mix
from medfed.models.task import TaskModule
from medfed.standalone.errors import ConfigError


@dataclass(frozen=True)
class CanonicalParts:
    """What of a network is canonical, and how its instances are mixed."""

    count: int = 4  # K, the instances
    mix: Mix = "outputs"  # ``outputs``, ``parameters`` or ``sum``
    # Patterns of parameter names; ``None``: what the model calls personal, its head.
    parts: list[str] | None = None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"canonical.count must be 1 or more, not {self.count}.")


def build_task(model: Section, canonical: Section | None, seed: int) -> TaskModule:
    """Builds the task of a run from initial weights that depend on the seed alone."""
    # With canonical parts, each further instance is another network under another seed. The
    # first instance and the common parts are those of a run without canonical parts.
    return mixed(plain_task(model, seed), model, canonical, seed)


def plain_task(model: Section, seed: int) -> TaskModule:
    """Builds the task without canonical parts; see :func:`build_task`."""
    start = derive_seed(seed, "initial weights")
    with own_stream(start), globals_seeded(start), warnings.catch_warnings():
        # Data whose channels do not fit are refused with a sentence of medfed's.
        warnings.filterwarnings("ignore", "Initializing zero-element")
        task: TaskModule = build(model)
    return task


def mixed(task: TaskModule, model: Section, canonical: Section | None, seed: int) -> TaskModule:
    """Gives a task canonical parts, if there are any; see :func:`build_task`."""
    if canonical is None:
        return task
    chosen: CanonicalParts = build(canonical)
    networks = [task.network]
    for k in range(1, chosen.count):
        start = derive_seed(seed, "initial weights", k)
        with own_stream(start), globals_seeded(start):
            further: nn.Module = build(model.network, _convert_="all")
        networks.append(further)
    patterns = task.personal if chosen.parts is None else chosen.parts
    task.network = Canonical(networks, patterns, chosen.mix, task.activation)
    task.personal = task.network.personal_part(task.personal)
    return task
