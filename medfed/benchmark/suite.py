"""Suites: tasks on which methods are compared, a yaml file each.

A suite is an experiment, the settings that change for all methods, variants that differ in one key
(a dial, from hospitals that are alike to hospitals that contradict each other), how patients are
split, and sizes. ``configs/suites`` has those that are shipped; ``plugins=FOLDER`` adds those of
``FOLDER/configs/suites``.

Arms: further measurements of a method on a suite, each with something changed.

An arm asks why: the same method with its tuned settings, on the same splits, with other keys. The
table has no arms, and no correction counts them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml  # type: ignore[import-untyped]
from msgspec import Meta

from medfed.common.schemas import fit, fit_keys
from medfed.common.scores import limits_of
from medfed.config import allowed, sections
from medfed.federation.card import CEILINGS, REFERENCES, Range, tuned
from medfed.standalone.csv_files import as_number, csv_rows
from medfed.standalone.errors import ConfigError, did_you_mean, few

T = TypeVar("T")
Splits = Literal["sample", "seed", "folds"]
_NAME = re.compile(r"[A-Za-z0-9_.]+")


@dataclass(frozen=True)
class Arm:
    """A measurement of a method with something changed."""

    method: str  # the method, as ``methods=`` has it
    overrides: tuple[str, ...] = ()  # its changes, which come before tuned values
    # Whole numbers of the configuration that are multiplied, by key, at any size alike.
    times: Mapping[str, float] = field(default_factory=dict)
    variant: str = ""  # the task; empty: the one on which methods are tuned
    splits: Annotated[int, Meta(ge=1)] | None = None  # of how many splits, at most; None: of all
    name: str = ""

    @property
    def keys(self) -> set[str]:
        """The keys that it sets."""
        return {o.partition("=")[0].lstrip("+~") for o in self.overrides}

    def after(self, typed: Sequence[str]) -> list[str]:
        """Returns its overrides after those of the suite, but for sections that it replaces.

        Example:
            >>> arm = Arm("ppfl", ("partition=site_groups",))
            >>> arm.after(["partition.delta=4", "rounds=9"])
            ['rounds=9', 'partition=site_groups']
        """
        replaced = {key for key in self.keys if "." not in key}
        others = [o for o in typed if o.partition("=")[0].partition(".")[0] not in replaced]
        return [*others, *self.overrides]

    def setting(self, tuned: Mapping[str, float]) -> dict[str, float]:
        """Returns the tuned values, without those of keys that the arm sets."""
        return {key: value for key, value in tuned.items() if key not in self.keys}

    def scale(self, source: dict[str, Any]) -> None:
        """Multiplies what `times` names."""
        for key, factor in self.times.items():
            value = sections.select(source, key)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(f"arm {self.name}: times.{key} names no whole number.")
            sections.put(source, key, max(1, round(value * factor)))
        evaluation = source["evaluation"]
        evaluation["every"] = min(evaluation["every"], source["rounds"])


def chosen_arms(
    wanted: bool | str | Sequence[str],
    by_suite: Mapping[str, Mapping[str, Arm]],
    methods: Collection[str] = (),
) -> dict[str, list[Arm]]:
    """Returns the wanted arms, by suite."""
    for suite, arms in by_suite.items():
        if taken := sorted(set(arms) & set(methods)):
            raise ConfigError(f"suite={suite}: the arm {taken[0]} has the name of a method.")
    known = list(dict.fromkeys(name for arms in by_suite.values() for name in arms))
    they = f"they are {', '.join(known)}." if known else "there are none."
    whole = f"arms={{}} is none of suite={','.join(by_suite)}{{}}; {they}"
    names = chosen("all" if wanted is True else wanted or (), known, whole)
    return {suite: [a for n, a in arms.items() if n in names] for suite, arms in by_suite.items()}


SIZES = ("smoke", "small", "full")
TUNING = 1000
"""The first split that is tuned on; those that are reported are numbered from 0."""


@dataclass(frozen=True)
class Size:
    """How much is computed."""

    # New splits of the patients, each with other initial weights.
    splits: Annotated[int, Meta(ge=1)]
    # Settings of every method that are tried on validation patients; the first is the default.
    trials: Annotated[int, Meta(ge=1)]
    overrides: tuple[str, ...] = ()  # the changes in all runs
    # Those that are compared where none are named, or ``all``; None: the suite's.
    methods: str | tuple[str, ...] | None = None


@dataclass(frozen=True)
class Variant:
    """One task of a suite."""

    overrides: tuple[str, ...] = ()  # what makes it differ
    # Where it stands between hospitals that are alike and hospitals in conflict; None: on no dial.
    dial: float | None = None
    situation: str = ""  # see :class:`Suite`; empty: the suite's


@dataclass(frozen=True)
class Published:
    """A row of a published table."""

    method: str  # the method, as ``methods=`` has it
    means: tuple[float, ...]  # the mean score of each published run; none: it is not known
    table: str = ""  # which table has it; empty: the main one
    over: str = "hospitals"  # what a mean is over: hospitals, patients, or one hospital's name
    variant: str = ""  # the task; empty: the suite's first


@dataclass(frozen=True)
class Suite:
    """Tasks on which methods are compared."""

    name: str  # the name of its file
    title: str  # what it is, in a line
    experiment: str  # the experiment that is run
    # The least and the greatest learning rate among which every method is tuned.
    lr: tuple[float, float]
    # How a split comes about: ``sample``, other generated patients of the same hospitals; ``seed``,
    # other generated data; ``folds``, real patients are dealt into parts that are tested in turn,
    # again and again.
    splits: Splits
    variants: Mapping[str, Variant]  # its tasks; methods are tuned on the first
    sizes: Mapping[str, Size]  # how much is computed, by the sizes' names
    overrides: tuple[str, ...] = ()  # the changes of the experiment, for all methods
    # Those that are compared where none are named.
    methods: tuple[str, ...] = ("ditto", "fedrep", "pfednet")
    # Further changes of single methods, such as other steps; tuned values come after.
    by_method: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    folds: int = 5  # the number of folds of real data
    dial: str = ""  # the meaning of the dial; empty: none
    # In what way its hospitals differ, in a few words; the decision card groups tasks by it.
    situation: str = ""
    # What the data are; empty: ``real`` where patients are dealt into folds, else ``generated``.
    data: str = ""
    path: bool = False  # whether it needs real data, by ``paths.NAME=FOLDER``
    passes: float = 1.05  # gradient passes that a method may take, as a multiple of the budget
    # Further measurements, by name: see :mod:`medfed.benchmark.suite`.
    arms: Mapping[str, Arm] = field(default_factory=dict)
    # A published table that it repeats by its own protocol, without tuning and equal budgets.
    published: tuple[Published, ...] = ()
    metric: str = ""  # of the published table; empty: the one that selects rounds
    source: str = ""  # where the published table stands
    fetch: str = ""  # what lies at its path, and where to get it

    @property
    def base(self) -> str:
        """The variant on which methods are tuned."""
        return next(iter(self.variants))

    @property
    def repeats(self) -> bool:
        """Whether it repeats a published table, by the table's protocol."""
        return bool(self.published or self.source)

    def chosen(self, wanted: str | Sequence[str] | None) -> list[str]:
        """Returns the wanted variants; by default those of the published table, or the first."""
        names = ", ".join(self.variants)
        whole = f"variants={{}} is none of suite={self.name}{{}}; it has {names}."
        usual = [row.variant or self.base for row in self.published] or [self.base]
        return chosen(usual if wanted is None else wanted, self.variants, whole)

    def sized(self, size: str) -> Size:
        """Returns how much is computed."""
        if size not in self.sizes:
            known = ", ".join(self.sizes)
            raise ConfigError(f"suite={self.name} has no size={size}; it has {known}.")
        return self.sizes[size]

    def seeds(self, split: int) -> dict[str, Any]:
        """Returns the keys by which a split differs from others."""
        if self.splits == "sample":
            return {"seed": split, "data.generated.sample": split + 1}
        if self.splits == "seed":
            return {"seed": split}
        again, part = divmod(split, self.folds)
        return {"seed": split, "data.seed": again, "data.fold": [part, self.folds]}


def chosen(wanted: str | Sequence[str], known: Collection[str], sentence: str) -> list[str]:
    """Returns the wanted names."""
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    names = list(known) if names == ["all"] else names
    for name in names:
        if name not in known:
            raise ConfigError(sentence.format(name, did_you_mean(name, known)))
    return list(dict.fromkeys(names))


def suites(folders: Sequence[str | Path] = ()) -> dict[str, Suite]:
    """Reads all suites, by name."""
    places = [allowed.CONFIG_DIR, *(allowed.yamls_of(Path(folder)) for folder in folders)]
    files = [file for place in places for file in sorted((place / "suites").glob("*.yaml"))]
    return {file.stem: read_suite(file) for file in files}


def read_yaml(file: Path, what: str, read: Callable[[str, dict[str, Any]], T]) -> T:
    """Reads a suite or a claim."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it holds no keys")
        return read(file.stem, content)
    except (OSError, yaml.YAMLError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(f"The {what} {file} cannot be read: {reason}.") from error


def read_suite(file: Path) -> Suite:
    """Reads a suite."""
    return read_yaml(file, "suite", _suite)


_PARTS = {"variants": (Variant, "variants."), "sizes": (Size, "sizes."), "arms": (Arm, "the arm ")}


def _suite(name: str, content: dict[str, Any]) -> Suite:
    if content.get("splits", "seed") not in get_args(Splits):
        raise ValueError(f"splits={content['splits']} is unknown; choose sample, seed or folds")
    parts: dict[str, Any] = {}
    for key, (kind, what) in _PARTS.items():
        by_name = fit(content.get(key) or {}, dict[str, Any])
        parts[key] = {name: fit_keys(keys, kind, what + name) for name, keys in by_name.items()}
    parts["arms"] = {name: replace(arm, name=name) for name, arm in parts["arms"].items()}
    suite = fit_keys({**content, **parts, "name": name}, Suite, "it")
    if lacking := [key for key in ("variants", "sizes") if not parts[key]]:
        raise ValueError(f"it lacks the key {lacking[0]}")
    if unknown := [size for size in suite.sizes if size not in SIZES]:
        raise ValueError(f"the size {unknown[0]} is unknown; choose {', '.join(SIZES)}")
    if not 0 < suite.lr[0] <= suite.lr[1]:
        raise ValueError(f"lr={list(suite.lr)} must be two positive numbers in order")
    _check_variants(suite.published, suite.variants)
    for arm in suite.arms.values():
        _check_arm(arm, suite.variants)
    return suite


def with_table(suite: Suite, file: Path, known: Collection[str]) -> Suite:
    """Returns a suite with the published table of a CSV file.

    The file has a line for each published run: its ``method`` and ``value``, and further what
    `Published` has.
    """
    header, *lines = [*csv_rows(file, "set published to a CSV file")] or [[]]
    columns, runs = [cell.strip().lower() for cell in header], dict[Published, list[float]]()
    if lacking := [name for name in ("method", "value") if header and name not in columns]:
        raise ConfigError(f"{file} has no column {lacking[0]}; it has {few(columns)}.")
    for number, line in enumerate(lines, 2):
        cells = {c: cell.strip() for c, cell in zip(columns, line, strict=False) if cell.strip()}
        try:
            value = as_number(text := cells.pop("value", ""))
            if not math.isfinite(value):
                raise ValueError(f"value={text} is no number with a decimal point")
            row = fit_keys({**cells, "means": []}, Published, "the line")
            if row.method not in known:
                hint = did_you_mean(row.method, known)
                raise ValueError(f"medfed has no method {row.method}{hint}; leave the line out")
            _check_variants([row], suite.variants)
        except ValueError as error:
            raise ConfigError(
                f"{file}, line {number}: {error}. Write the columns method and value, such as "
                "fedavg,0.819, and if need be table, over and variant."
            ) from error
        runs.setdefault(row, []).append(value)
    if not runs:
        raise ConfigError(f"{file} has no published values; write the columns method and value.")
    rows = tuple(replace(row, means=tuple(means)) for row, means in runs.items())
    return replace(suite, published=rows, source=str(file))


def check_published(suite: Suite, selection: str) -> None:
    """Refuses published values that the metric cannot have, such as percent."""
    metric = suite.metric or selection
    low, high = limits_of(metric)
    for row in suite.published:
        if beyond := [value for value in row.means if not low <= value <= high]:
            raise ConfigError(
                f"suite={suite.name}: the published {metric} of {row.method}, {beyond[0]:g}, is "
                f"outside of {low:g} to {high:g}; write 81.9 % as 0.819."
            )


def _check_variants(rows: Iterable[Published], variants: Collection[str]) -> None:
    for row in rows:
        if row.variant and row.variant not in variants:
            hint = did_you_mean(row.variant, variants)
            raise ValueError(f"the published variant={row.variant} is none of the suite{hint}")


def _check_arm(arm: Arm, variants: Collection[str]) -> None:
    if not _NAME.fullmatch(arm.name):
        raise ValueError(f"the arm {arm.name!r} must be named by letters, digits, _ and .")
    if arm.variant and arm.variant not in variants:
        raise ValueError(
            f"the arm {arm.name} is of variant={arm.variant}, which is none"
            f"{did_you_mean(arm.variant, variants)}"
        )
    if "algorithm" in arm.keys:
        raise ValueError(f"the arm {arm.name} sets algorithm; its key method is for that")


def check_shard(shard: str | None) -> tuple[int, int]:
    """Returns which of how many jobs this is."""
    i, _, n = (shard or "1/1").partition("/")
    if not (i.isdecimal() and n.isdecimal() and 1 <= int(i) <= int(n)):
        raise ConfigError(f"shard={shard} must be i/n, the i-th of n jobs, such as 1/4.")
    return int(i), int(n)


def check_paths(paths: Mapping[str, str | None], known: Iterable[Suite]) -> None:
    """Checks the folders of real data."""
    real = [suite.name for suite in known if suite.path]
    for name, place in paths.items():
        if name not in real:
            raise ConfigError(
                f"paths.{name} names no suite that needs data{did_you_mean(name, real)}; those are "
                f"{', '.join(real)}."
            )
        if place is not None and not Path(place).expanduser().exists():
            raise ConfigError(f"paths.{name}={place} does not exist.")


def chosen_suites(wanted: str | Sequence[str], folders: Sequence[str | Path] = ()) -> list[Suite]:
    """Returns the wanted suites."""
    known = suites(folders)
    whole = f"Unknown suite {{!r}}{{}}; the suites are {', '.join(known)}, or all, or published."
    if wanted in ("all", "published", ["all"], ["published"]):
        repeats = "published" in wanted
        return [suite for suite in known.values() if suite.repeats == repeats]
    return [known[name] for name in chosen(wanted, known, whole)]


LR = "optimizer.lr"
ALWAYS = (*REFERENCES, *CEILINGS)
"""The methods that every suite runs."""


@dataclass(frozen=True)
class Method:
    """A method that is compared."""

    name: str  # as ``methods=`` has it
    algorithm: str  # as ``algorithm=`` has it
    finetuned: bool = False  # whether every client then trains its own copy of the model

    @classmethod
    def of(cls, name: str) -> Method:
        """Returns the method of that name; whether there is one, the configuration says."""
        finetuned = name == "pooled_finetuned"
        return cls(name, "pooled" if finetuned else name, finetuned)


def chosen_methods(
    wanted: str | Sequence[str] | None, usual: str | Sequence[str], known: Sequence[str]
) -> list[Method]:
    """Returns the wanted methods, after those that every suite runs."""
    listed = usual if wanted is None else wanted
    whole = "Unknown method {!r}{}; medfed methods lists them."
    names = chosen(known if listed in ("all", ["all"]) else listed, [*known, *ALWAYS], whole)
    return [Method.of(name) for name in dict.fromkeys([*ALWAYS, *names])]


def wanted_of(
    suite: str | Sequence[str],
    methods: str | Sequence[str] | None,
    size: str,
    arms: bool | str | Sequence[str],
    folders: Sequence[str | Path] = (),
    published: str | Path | None = None,
) -> tuple[list[Suite], dict[str, list[Method]], dict[str, list[Arm]]]:
    """Returns the wanted suites, and by suite the methods and arms; as for `benchmark`."""
    chosen, known = chosen_suites(suite, folders), list(allowed.method_yamls(folders))
    if published is not None:
        if len(chosen) > 1:
            raise ConfigError(f"published={published} is one suite's table; name one suite.")
        chosen = [with_table(chosen[0], Path(published).expanduser(), known)]
    by_suite = {}
    for one in chosen:
        rows = dict.fromkeys(row.method for row in one.published)
        rows |= dict.fromkeys(one.methods if one.repeats and not rows else ())
        every = chosen_methods(methods, [*rows] or one.sized(size).methods or one.methods, known)
        by_suite[one.name] = [method for method in every if method.name in (rows or [method.name])]
    return chosen, by_suite, chosen_arms(arms, {s.name: s.arms for s in chosen}, known)


def search_space(method: type, lr: Range) -> dict[str, Range]:
    """Returns the ranges of tuning by key: the learning rate, then those of the method."""
    return {LR: lr, **{f"algorithm.{name}": over for name, over in tuned(method).items()}}


def trial_settings(space: dict[str, Range], trials: int) -> list[dict[str, float]]:
    """Returns the settings to try: the default, then the same quasi-random points for all."""
    # Their coordinates are those of one Halton sequence, the first of which is the learning
    # rate's; so all methods try the same learning rates. Its first point, the middle, is left
    # out, as it is where defaults are.
    # Source: J. H. Halton, "On the efficiency of certain quasi-random sequences of points",
    # Numerische Mathematik, 1960; SciPy's ``qmc.Halton``.
    from scipy.stats import qmc  # names are checked before anything large is loaded

    shares = qmc.Halton(len(space), scramble=False).fast_forward(2).random(trials - 1)
    rows = (zip(space.items(), row, strict=True) for row in shares)
    return [{}, *({key: over.at(float(u)) for (key, over), u in row} for row in rows)]
