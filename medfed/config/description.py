"""The description of a run: what its configuration says, checked once, typed and frozen.

A command composes a configuration, describes the run by it, and hands the description on; nothing
below the commands sees what composes it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from medfed.common.errors import ConfigError, first_line
from medfed.config.allowed import check_targets
from medfed.config.check import check_missing, check_types, check_values
from medfed.config.sections import Section, optional, put

# ${either:a,b} is a where it is set and b where it is null.
OmegaConf.register_new_resolver("either", lambda a, b: b if a is None else a, replace=True)


def written(config: Any) -> dict[str, Any]:
    """Returns a configuration as it is written, interpolations included, as plain mappings.

    Args:
        config: What Hydra composed, or mappings and lists.
    """
    if isinstance(config, DictConfig):
        config = OmegaConf.to_container(config)
    elif isinstance(config, RunDescription):
        config = config.source
    plain = config.plain() if isinstance(config, Section) else copy.deepcopy(dict(config))
    return {str(key): value for key, value in plain.items()}


def resolved(node: Any, place: str = "") -> dict[str, Any]:
    """Returns a configuration as it will be built, every interpolation replaced.

    Args:
        node: What Hydra composed, or mappings and lists.
        place: Its key, for errors.

    Raises:
        ConfigError: If an interpolation has no value, or is another interpolation.

    Example:
        >>> resolved({"a": 1, "b": "${a}"})
        {'a': 1, 'b': 1}
    """
    if not isinstance(node, DictConfig):
        node = OmegaConf.create(written(node))
    place = place or node._get_full_key(None)
    try:
        plain: dict[str, Any] = OmegaConf.to_container(node, resolve=True)  # type: ignore[assignment]
    except (OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(f"{place} cannot be resolved: {first_line(error)}.") from error
    if "${" in repr(plain):  # Hydra would resolve once more what has been looked at
        raise ConfigError(f"{place} holds an interpolation of an interpolation; write its value.")
    return plain


def checked(config: Any) -> Section:
    """Checks all that can be told from the configuration of any command alone.

    Args:
        config: What Hydra composed, or mappings and lists.

    Returns:
        Its values.

    Raises:
        ConfigError: If a value is missing, of another type or out of range; the key is named.
        DataError: If a file or folder that must be there is not.
        CheckpointError: If a run folder or bundle is none.
    """
    source = written(config)
    check_targets(source)
    check_missing(source)
    values = resolved(source)
    check_values(values)
    check_types(source, paths=True)
    return Section(values)


class LacksKeyError(ConfigError):
    """A configuration that is no run's."""


@dataclass(frozen=True)
class Facts:
    """What the data decide of a model; ``None`` until they are read, unless it is set."""

    in_channels: int | None = None
    out_channels: int | None = None
    spatial_dims: int | None = None
    regions: list[str] | None = None
    exclusive: bool | None = None
    millimetres: bool | None = None
    outcome_scale: list[float] | None = None
    patch_size: list[int] | None = None


@dataclass(frozen=True)
class Evaluation:
    """When clients' models are evaluated.

    Attributes:
        every: Rounds between evaluations on the validation split.
        patience: Evaluations without improvement before the run stops.
    """

    every: int
    patience: int | None = None


@dataclass(frozen=True)
class Checkpoints:
    """Which rounds are kept.

    Attributes:
        keep: How many of the last ones, beside the best.
        every: Rounds between them.
    """

    keep: int
    every: int


@dataclass(frozen=True)
class RunDescription:
    """What a run is to do; the keys are described in ``configs/train.yaml``.

    Sections of which something is built are checked: whatever they name may be built.

    Attributes:
        overrides: What was typed; ``None`` where no command line was.
        source: The configuration as it is written, interpolations included.
        values: All of it, every interpolation replaced.
    """

    name: str
    folder: str
    resume: str | None
    rounds: int
    seed: int
    threads: int
    buffers: Literal["averaged", "local", "frozen"]
    progress: bool
    pictures: str
    keep_out: tuple[str, ...]
    plugins: tuple[str, ...]
    facts: Facts
    evaluation: Evaluation
    checkpoint: Checkpoints
    data: Section
    model: Section
    algorithm: Section
    optimizer: Section
    scheduler: Section
    local: Section
    cohort: Section
    codec: Section
    channel: Section
    trainer: Section
    logger: Section
    init: Section
    canonical: Section | None
    adapters: Section | None
    source: Mapping[str, Any] = field(repr=False, compare=False)
    values: Section = field(repr=False)
    overrides: tuple[str, ...] | None = None

    def replacing(self, values: Mapping[str, Any]) -> RunDescription:
        """Returns the description with other values; those that depend on them change with them.

        Args:
            values: By key, such as ``model.personal``.

        Raises:
            ConfigError: If one names what a configuration may not build.
        """
        source = written(self.source)
        for key, value in values.items():
            put(source, key, value)
        named = {key: value for key, value in values.items() if isinstance(value, Mapping)}
        check_targets(named, found=True)
        return _typed(source, resolved(source), self.overrides)

    def yaml(self) -> str:
        """Returns its values as the run folder keeps them."""
        return as_yaml(self.values.plain())


def as_yaml(plain: dict[str, Any] | list[Any]) -> str:
    r"""Returns mappings and lists as yaml.

    Example:
        >>> as_yaml({"seed": 0})
        'seed: 0\n'
    """
    return OmegaConf.to_yaml(OmegaConf.create(plain))


def describe(config: Any, overrides: tuple[str, ...] | None = None) -> RunDescription:
    """Describes a run, once its configuration is checked, and all that it names.

    Args:
        config: What Hydra composed, or mappings and lists, such as a run folder holds.
        overrides: What was typed, if it was.

    Raises:
        MedfedError: See :func:`checked`; also if something is named that may not be built.
    """
    source, values = written(config), checked(config)
    check_targets(values.plain(), found=True)
    return _typed(source, values.plain(), overrides)


def _typed(
    source: dict[str, Any], values: dict[str, Any], overrides: tuple[str, ...] | None
) -> RunDescription:
    whole = Section(values, checked=True)
    try:
        return RunDescription(
            **{key: whole[key] for key in _PLAIN + _SECTIONS},
            canonical=optional(whole, "canonical"),
            adapters=optional(whole, "adapters"),
            folder=str(whole["folder"]),
            pictures=str(whole["pictures"]["format"]),
            keep_out=tuple(map(str, whole.get("keep_out") or ())),
            plugins=tuple(map(str, whole.get("plugins") or ())),
            facts=Facts(**{key: whole.get(key) for key in Facts.__dataclass_fields__}),
            evaluation=Evaluation(**whole["evaluation"]),
            checkpoint=Checkpoints(**whole["checkpoint"]),
            source=source,
            values=whole,
            overrides=overrides,
        )
    except (KeyError, TypeError) as error:
        raise LacksKeyError(first_line(error)) from error


_PLAIN = ("name", "resume", "rounds", "seed", "threads", "buffers", "progress")
_SECTIONS = (
    *("data", "model", "algorithm", "optimizer", "scheduler", "local", "cohort"),
    *("codec", "channel", "trainer", "logger", "init"),
)
