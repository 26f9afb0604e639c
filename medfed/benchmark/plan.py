"""The cells of a benchmark, with equal data, initial weights, rounds and gradient passes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from medfed.benchmark import suite as suites
from medfed.config import compose, description, sections
from medfed.federation.card import CEILINGS, Range
from medfed.records.cells import Cell, Stage, cell_key
from medfed.standalone.errors import ConfigError

Setting = Mapping[str, float]
Compositions = dict[tuple[str, str], description.RunDescription]
"""Configurations by their variant and arm."""


@dataclass(frozen=True)
class Group:
    """A method on a suite: the settings that are tried, then the fresh splits."""

    suite: suites.Suite
    method: suites.Method
    variants: tuple[str, ...]  # the tasks that are reported
    size: suites.Size  # how much is computed
    common: tuple[str, ...] = ()  # the user's overrides: paths of real data, plugins
    root: str = "data"  # where generated cohorts are kept
    # The changes of an arm, which has the method's tuning; None: a method of the table.
    arm: suites.Arm | None = None
    _composed: Compositions = field(default_factory=dict, compare=False, repr=False)
    _final: dict[int, list[Cell]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def name(self) -> str:
        """The suite and the method."""
        return f"{self.suite.name}/{self.method.name}"

    @cached_property
    def kind(self) -> type[Any]:
        """The method's class."""
        kind: type[Any] = compose.class_of(self.config(self.suite.base).algorithm)
        return kind

    @property
    def selection(self) -> str:
        """The metric that selects rounds."""
        model = self.config(self.suite.base).model
        selection = model.get("selection") or compose.class_of(model).default_selection
        return str(selection[0])

    @cached_property
    def settings(self) -> list[dict[str, float]]:
        """The settings that are tried, the default first."""
        space = suites.search_space(self.kind, Range(*self.suite.lr))
        return suites.trial_settings(space, self.size.trials)

    def config(self, variant: str, as_arm: bool = False) -> description.RunDescription:
        """Composes the task with this method, at its defaults and of no split in particular."""
        arm, suite = self.arm if as_arm else None, self.suite
        key = variant, arm.name if arm else ""
        if key not in self._composed:
            of_method = suite.by_method.get(self.method.algorithm, ())
            of_all = (*suite.overrides, *self.size.overrides, *of_method)
            of_all += suite.variants[variant].overrides
            named = f"suite={suite.name}" + (f", arm {self.arm.name}" if self.arm else "")
            overrides = [
                f"experiment={suite.experiment}",
                f"algorithm={self.method.algorithm}",
                *(arm.after(of_all) if arm else of_all),
                *("logger=none", "progress=false", "threads=1", "folder=nowhere"),
                *self.common,
            ]
            try:
                source = description.written(compose.load(overrides))
                if "root" in source["data"]:
                    source["data"]["root"] = self.root
                if arm:
                    arm.scale(source)
                config = description.describe(source)
            except ConfigError as error:
                raise ConfigError(f"{named}: {error}") from error
            if config.local.steps is None and not suite.repeats:
                raise ConfigError(
                    f"suite={suite.name} has no local.steps, without which budgets are not equal; "
                    "set it in its overrides."
                )
            self._composed[key] = config
        return self._composed[key]

    @property
    def budget(self) -> int:
        """Gradient passes of a client in a run, the same for all methods."""
        config = self.config(self.suite.base)
        return int(config.rounds * config.local.steps)

    def cell(self, variant: str, stage: Stage, trial: int, split: int, setting: Setting) -> Cell:
        """Returns a cell."""
        as_arm = self.arm is not None and stage == "final"
        config, changed = self.config(variant, as_arm), dict[str, Any]()
        if self.arm is not None and as_arm:
            setting = self.arm.setting(setting)
        # A step of two gradients is half as many steps.
        if not (self.is_ceiling or self.suite.repeats) and self.kind.card.passes > 1:
            passes = compose.build(config.algorithm).passes  # with the values of its keys
            changed["local.steps"] = max(1, round(config.local.steps / passes))
        for key, value in {**self.suite.seeds(split), **setting}.items():
            place, _, leaf = key.rpartition(".")
            section = sections.select(config.values, place) if place else config.values
            if section is None or leaf not in section:
                raise ConfigError(f"suite={self.suite.name} has no key {key}.")
            changed[key] = value
        config = config.replacing(changed)
        # The pooled model is tuned; finetuning starts from it, and has cells of its own.
        finetuned = self.method.finetuned and stage == "final"
        method = self.method.name if stage == "final" else self.method.algorithm
        key, plain = cell_key(config, stage, finetuned)
        return Cell(self.suite.name, variant, method, stage, trial, split, plain, key, finetuned)

    @property
    def is_ceiling(self) -> bool:
        """Whether it has all patients in one place, so that no budget holds it."""
        return self.method.algorithm in CEILINGS

    @cached_property
    def tuning(self) -> list[Cell]:
        """The cells of tuning, by trial; none where only the default is tried."""
        if len(self.settings) == 1:
            return []
        base = self.suite.base
        return [self.cell(base, "tune", n, suites.TUNING, s) for n, s in enumerate(self.settings)]

    def final(self, trial: int) -> list[Cell]:
        """Returns the cells that are reported."""
        if trial not in self._final:
            setting, both = self.settings[trial], product(self.variants, range(self.size.splits))
            cells = [self.cell(variant, "final", trial, split, setting) for variant, split in both]
            self._final[trial] = cells
        return self._final[trial]


def best_trial(results: Sequence[Mapping[str, Any]]) -> int:
    """Returns the trial with the best validation score; of equal ones the first.

    Example:
        >>> best_trial([{"score": 0.5}, {"failed": "…"}, {"score": 0.7}, {"score": None}])
        2
        >>> best_trial([{"failed": "…"}, {"failed": "…"}])
        0
    """
    # A run that failed, or has no score, is worse than any other.
    scores = [r.get("score") for r in results]
    known = [-math.inf if s is None or math.isnan(s) else float(s) for s in scores]
    return known.index(max(known))


def groups(
    wanted: Sequence[suites.Suite],
    methods: Mapping[str, Sequence[suites.Method]],
    size: str,
    variants: str | Sequence[str] | None = None,
    paths: Mapping[str, str | None] | None = None,
    common: Sequence[str] = (),
    root: str = "data",
    arms: Mapping[str, Sequence[suites.Arm]] | None = None,
    named: bool = True,
) -> tuple[list[Group], list[str]]:
    """Returns the methods to compare, and notes on suites that are left out."""
    chosen_groups: list[Group] = []
    notes: list[str] = []
    for suite in wanted:
        overrides = list(common)
        path = (paths or {}).get(suite.name)
        if suite.path:
            if path is None:
                way = f"name their folder by paths.{suite.name}=FOLDER."
                what = f"data ({suite.fetch})" if suite.fetch else "data"
                notes.append(f"suite={suite.name} is left out, as it needs {what}; {way}")
                continue
            suites.check_paths({suite.name: path}, wanted)
            overrides.append(f'data.path="{Path(path).expanduser().resolve()}"')
        chosen, sized, added = tuple(suite.chosen(variants)), suite.sized(size), tuple(overrides)
        composed: dict[str, Compositions] = {}
        for method in methods[suite.name]:
            shared = composed.setdefault(method.name, {})
            everywhere = named or suite.repeats or method.name in {*suites.ALWAYS, *suite.methods}
            if where := chosen if everywhere else tuple(v for v in chosen if v == suite.base):
                group = Group(suite, method, where, sized, added, root, None, shared)
                if suite.published:
                    suites.check_published(suite, group.selection)
                chosen_groups.append(group)
        for arm in (arms or {}).get(suite.name, ()):
            method = replace(suites.Method.of(arm.method), name=arm.name)
            where = (arm.variant or suite.base,)
            fewer = replace(sized, splits=min(sized.splits, arm.splits or sized.splits))
            shared = composed.setdefault(arm.method, {})
            chosen_groups.append(Group(suite, method, where, fewer, added, root, arm, shared))
    return chosen_groups, notes


def shard_of(all_groups: Sequence[Group], shard: str | None) -> Sequence[Group]:
    """Returns the groups of one job of several."""
    i, n = suites.check_shard(shard)
    return all_groups[i - 1 :: n]
