"""The description of a run: its configuration, checked once, typed and frozen.

Code below the commands gets it, and never sees Hydra or OmegaConf.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from medfed.common.schemas import fit
from medfed.config.allowed import check_targets
from medfed.config.check import check_chosen, check_missing, check_values
from medfed.config.sections import Section, leaves, put
from medfed.standalone.errors import ConfigError, first_line


def _selected(key: str, default: Any = None, *, _root_: DictConfig, _parent_: Any) -> Any:
    """As OmegaConf's ``oc.select``, but a value in the place of a map is a mistake."""
    names = key.split(".")
    for count in range(1, len(names)):
        place = ".".join(names[:count])
        above = OmegaConf.select(_root_, place) if names[0] else None
        if above is not None and not isinstance(above, DictConfig):
            keys = f"keys such as {place}.{names[count]}"
            raise ConfigError(f"{place}={above} stands where {keys} belong; set these")
    return oc.select(key, default, _parent_=_parent_)


OmegaConf.register_new_resolver("oc.select", _selected, replace=True)
# ${either:a,b} is a, or b if a is null; ${when:a,b,c,d} is c if a is b, else d.
OmegaConf.register_new_resolver("either", lambda a, b: b if a is None else a, replace=True)
OmegaConf.register_new_resolver("when", lambda a, b, c, d: c if a == b else d, replace=True)


def written(config: Any) -> dict[str, Any]:
    """Returns a configuration as it is written, with its interpolations, as plain mappings."""
    if isinstance(config, DictConfig):
        config = OmegaConf.to_container(config)
    elif isinstance(config, RunDescription):
        config = config.source
    plain = config.plain() if isinstance(config, Section) else copy.deepcopy(dict(config))
    return {str(key): value for key, value in plain.items()}


def resolved(node: Any, place: str = "") -> dict[str, Any]:
    """Returns a configuration with every interpolation replaced."""
    if not isinstance(node, DictConfig):
        node = OmegaConf.create(written(node))
    place = place or node._get_full_key(None)
    try:
        plain: dict[str, Any] = OmegaConf.to_container(node, resolve=True)  # type: ignore[assignment]
    except (OmegaConfBaseException, RecursionError) as error:
        place = place or getattr(error, "full_key", None) or "The configuration"
        why = first_line(error).removeprefix("ConfigError raised while resolving interpolation: ")
        raise ConfigError(f"{place} cannot be resolved: {why}.") from error
    if "${" in repr(plain):  # Hydra would resolve it again
        raise ConfigError(f"{place} holds an interpolation of an interpolation; write its value.")
    return plain


def checked(config: Any, overrides: Iterable[str] = ()) -> Section:
    """Checks everything that needs only the configuration, for any command."""
    return Section(_checked(written(config), overrides))


def _checked(source: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    check_targets(source)
    check_missing(source)
    values = resolved(source)
    check_values(values)
    check_chosen(source, overrides)
    return values


_Keys = TypeVar("_Keys", bound=msgspec.Struct)


class LacksKeyError(ConfigError):
    """The configuration does not describe a run."""


@dataclass(frozen=True)
class Facts:
    """Facts of the data that a model needs; ``None`` until the data are read, unless set."""

    in_channels: int | None = None
    out_channels: int | None = None
    spatial_dims: int | None = None
    regions: list[str] | None = None
    exclusive: bool | None = None
    millimetres: bool | None = None
    outcome_scale: list[float] | None = None
    patch_size: list[int] | None = None
    plan: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Evaluation:
    """When clients' models are evaluated."""

    every: int  # rounds between evaluations on the validation split
    patience: int | None = None  # evaluations without improvement before the run stops
    # By which rule validation chooses the threshold of two classes; None leaves those of regions,
    # too.
    operating_point: str | Mapping[str, float] | None = None
    calibration: str | None = None  # ``shift``, ``temperature`` or ``platt``
    coverage: float | None = None  # at what rate sets of classes and intervals hold the truth
    # Of the statistics of normalisation that a client's model has.
    normalization: Literal["reestimated", "kept"] = "kept"
    contributions: bool = False  # whether clients' updates are compared with the others'


@dataclass(frozen=True)
class Checkpoints:
    """Which checkpoints are kept."""

    keep: int  # number of latest checkpoints to keep, in addition to the best
    every: int  # rounds between checkpoints


class ExampleKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How each patient or row is protected."""

    # The bound on what one patient changes, after the whole run.
    epsilon: Annotated[float, msgspec.Meta(gt=0, le=1e6)]
    delta: Annotated[float, msgspec.Meta(gt=0, lt=1)]  # the chance that the bound fails
    clip: Annotated[float, msgspec.Meta(gt=0, le=1e30)]  # the longest gradient of one patient
    unit: Literal["patient", "row"] = "patient"  # what is protected
    # Samples whose gradients are kept at once; ``None``: as memory allows.
    chunk: Annotated[int, msgspec.Meta(ge=1)] | None = None


class ClientKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How all of a client's patients together are protected."""

    # Standard deviation of the noise in a sum over clients, in multiples of ``clip``.
    sigma: Annotated[float, msgspec.Meta(gt=0, le=1e6)]
    delta: Annotated[float, msgspec.Meta(gt=0, lt=1)]  # the chance that the bound fails
    clip: Annotated[float, msgspec.Meta(gt=0, le=1e30)]  # the longest displacement of a client


@dataclass(frozen=True)
class Privacy:
    """What protects patients by noise."""

    example: ExampleKeys | None = None  # each patient or row, at its client
    client: ClientKeys | None = None  # all patients of a client together, in sums over clients

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Privacy:
        """Reads the section ``privacy``."""
        return cls(
            _keys(values, "example", ExampleKeys, "{epsilon:4,delta:1e-3,clip:1.0}"),
            _keys(values, "client", ClientKeys, "{sigma:1.0,delta:1e-3,clip:1.0}"),
        )


def _keys(values: Mapping[str, Any], name: str, kind: type[_Keys], such: str) -> _Keys | None:
    keys = values.get(name)
    try:
        return None if keys is None else fit(keys, kind)
    except ValueError as error:
        raise ConfigError(
            f"privacy.{name}={keys} cannot be used ({first_line(error)}); write "
            f"privacy.{name}={such}. Its keys are {', '.join(kind.__struct_fields__)}."
        ) from error


@dataclass(frozen=True)
class RunDescription:
    """What a run does, with all names checked; ``configs/train.yaml`` describes the keys."""

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
    aggregation: Section | None
    privacy: Privacy
    # The configuration as it is written, with its interpolations.
    source: Mapping[str, Any] = field(repr=False, compare=False)
    # The whole configuration, with every interpolation replaced.
    values: Section = field(repr=False)
    # The overrides on the command line; ``None`` without a command line.
    overrides: tuple[str, ...] | None = None
    # The keys whose values follow from the data, with what was chosen for them.
    derived: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    # What `compose.part_of` has built, by section, and of which values.
    built: dict[str, tuple[Section, Any]] = field(default_factory=dict, repr=False, compare=False)

    def replacing(self, values: Mapping[str, Any]) -> RunDescription:
        """Returns the description with other values; values that depend on these change, too."""
        source = written(self.source)
        for key, value in values.items():
            put(source, key, value)
        named = {key: value for key, value in values.items() if isinstance(value, Mapping)}
        check_targets(named, exists=True)
        new = _typed(source, resolved(source), self.overrides)
        return replace(new, derived=self.derived, built=self.built)

    def completed(self, facts: Mapping[str, Any]) -> RunDescription:
        """Returns the description with values that follow from the data; they are no choice."""
        new = self.replacing(facts)
        before, after = leaves(self.values), leaves(new.values)
        keys = (key for key in {**before, **after} if before.get(key) != after.get(key))
        return replace(new, derived={**{key: before.get(key) for key in keys}, **self.derived})

    def yaml(self) -> str:
        """Returns its values in the form that the run folder keeps."""
        return as_yaml({**self.values.plain(), "derived": dict(self.derived)})


def as_yaml(plain: dict[str, Any] | list[Any]) -> str:
    r"""Returns mappings and lists as yaml."""
    return OmegaConf.to_yaml(OmegaConf.create(plain))


def describe(config: Any, overrides: tuple[str, ...] | None = None) -> RunDescription:
    """Checks the configuration of a run and all names in it, and describes the run."""
    source = written(config)
    values = _checked(source, overrides or ())
    check_targets(values, exists=True)
    return _typed(source, values, overrides)


def _typed(
    source: dict[str, Any], values: dict[str, Any], overrides: tuple[str, ...] | None
) -> RunDescription:
    whole, facts = Section(values, checked=True), Facts.__dataclass_fields__
    try:
        typed: dict[str, Any] = {"source": source, "values": whole, "overrides": overrides}
        typed |= {
            **{key: whole.chosen(key) for key in ("canonical", "adapters", "aggregation")},
            **{key: tuple(map(str, values.get(key) or ())) for key in ("keep_out", "plugins")},
            "privacy": Privacy.of(values["privacy"]),
            "folder": str(values["folder"]),
            "pictures": str(values["pictures"]["format"]),
            "facts": Facts(**copy.deepcopy({key: values.get(key) for key in facts})),
            "evaluation": Evaluation(**values["evaluation"]),
            "checkpoint": Checkpoints(**values["checkpoint"]),
            "derived": dict(values.get("derived") or {}),
        }
        others = RunDescription.__dataclass_fields__.keys() - typed.keys() - {"built"}
        return RunDescription(**typed, **{key: whole[key] for key in sorted(others)})
    except (KeyError, TypeError) as error:
        raise LacksKeyError(first_line(error)) from error
