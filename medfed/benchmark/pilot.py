"""A pilot: a cross-validation on the training and validation patients of a run.

The pilot divides these patients into folds and tests each fold by models that are trained on the
others. The test patients of the run are in no fold: no cell names them, and nothing reads them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medfed.benchmark.plan import Group, Setting
from medfed.benchmark.suite import Method, Size, Suite, Variant
from medfed.common.console import file_names
from medfed.common.errors import ConfigError, DataError
from medfed.common.files import digest, write_json
from medfed.common.seeding import derive_seed
from medfed.config.check import several
from medfed.config.compose import described
from medfed.config.description import RunDescription, written
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.splits import Split, split_patients
from medfed.records.cells import Cell, Stage, cell_key
from medfed.run.assembly import unread_data

# Keys that the pilot sets itself.
_ITS_OWN = ("folder", "logger", "progress", "pictures.format")
Parts = dict[Split, list[str]]


class PilotCell(Cell):
    """A cell with numbers only, without images of patients."""

    @property
    def shows(self) -> bool:
        """No."""
        return False


@dataclass(frozen=True)
class Division:
    """One division of the patients.

    Attributes:
        content: The clients' patients per split, as ``partition=saved`` reads them.
        name: The name of its file, which is that of its content.
    """

    content: Mapping[str, Any]
    name: str


@dataclass(frozen=True)
class Pilot(Group):
    """A method on the divisions.

    Attributes:
        overrides: What the user would train with.
        divisions: The divisions of the patients, one for each repetition.
        out: Where cells and divisions are kept.
        rounds: Rounds of a run of the pilot; None: as many as the user's.
    """

    overrides: tuple[str, ...] = ()
    divisions: tuple[Division, ...] = ()
    out: Path = Path()
    rounds: int | None = None

    @property
    def settings(self) -> list[dict[str, float]]:  # type: ignore[override]
        """What the user has set, untuned."""
        return [{}]

    def config(self, variant: str, as_arm: bool = False) -> RunDescription:
        """Composes what the user would train with, by this method.

        Args:
            variant: The task, of which there is one.
            as_arm: Without a meaning here.

        Raises:
            ConfigError: If it does not compose.
        """
        if (variant, "") not in self._composed:
            config = composed(self.overrides, self.method.name)
            rounds = min(self.rounds or config.rounds, config.rounds)
            changed = {"rounds": rounds, "evaluation.every": min(config.evaluation.every, rounds)}
            # Its seeds stay, whatever initial weights a repetition starts from.
            self._composed[variant, ""] = config.replacing({**changed, "data": config.data.plain()})
        return self._composed[variant, ""]

    @property
    def budget(self) -> int:
        """A pilot leaves out no method for its gradient passes; it reports them."""
        return 1

    def cell(self, variant: str, stage: Stage, trial: int, split: int, setting: Setting) -> Cell:
        """Returns a cell; its key knows what a division holds, not where it lies."""
        division = self.divisions[split]
        key, _ = cell_key(self._on_division(variant, split, Path(division.name)), stage, False)
        file = self.out / "divisions" / division.name
        plain = written(self._on_division(variant, split, file.resolve()))
        name = self.method.name
        return PilotCell(self.suite.name, variant, name, stage, trial, split, plain, key)  # type: ignore[arg-type]

    def _on_division(self, variant: str, split: int, file: Path) -> RunDescription:
        config = self.config(variant)
        saved = {
            "_target_": "medfed.datamodules.partitions.saved.Saved",
            "_convert_": "all",
            "file": str(file),
        }
        seed = config.seed + split
        return config.replacing({"partition": saved, "data.partition": saved, "seed": seed})


def composed(overrides: Sequence[str], method: str) -> RunDescription:
    """Composes and checks what the user would train with, by a method.

    Args:
        overrides: As ``medfed train`` takes them.
        method: The name of the method.

    Raises:
        ConfigError: If it does not compose, or asks for several devices.
    """
    kept = [o for o in overrides if _key(o) not in _ITS_OWN and not _key(o).startswith("hydra.")]
    kept += [f"algorithm={method}", "logger=none", "progress=false", "pictures.format=none"]
    config = described([*kept, "folder=nowhere"])
    if several(config.trainer):
        raise ConfigError(
            f"trainer.devices={config.trainer.devices}: each run of a pilot is on one device; "
            "leave it out, and workers=N computes N of them at once."
        )
    return config


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


@dataclass(frozen=True)
class Question:
    """The data and settings that advice is about, and the patients that the pilot may use.

    Attributes:
        overrides: What the user would train with.
        name: The experiment's.
        rounds: Of the user's runs.
        patients: By client, the patients that the pilot may use.
        kept_out: The number of test patients.
        divisions: The divisions of the pilot.
        folds: The number of folds.
    """

    overrides: tuple[str, ...]
    name: str
    rounds: int
    patients: Mapping[str, Sequence[str]]
    kept_out: int
    divisions: tuple[Division, ...]
    folds: int

    @property
    def count(self) -> int:
        """The number of patients that the pilot may use."""
        return sum(map(len, self.patients.values()))


def question(overrides: Sequence[str], folds: int, repeats: int) -> Question:
    """Reads who is who, and deals the patients whom a run would train and validate on.

    Args:
        overrides: What the user would train with, without a method.
        folds: Parts that are tested in turn.
        repeats: The number of divisions into folds.

    Raises:
        MedfedError: If the configuration or the data cannot be used.
    """
    config = composed(overrides, "local")
    data = unread_data(config)
    data.plan()
    divisions = tuple(
        _division(data, repeat, (part, folds)) for repeat in range(repeats) for part in range(folds)
    )
    federated = {c: p for c, p in data.plans.items() if c not in data.keep_out}
    if len(federated) < 2:
        raise DataError(
            f"There is only one hospital ({next(iter(federated))}), and a federation takes "
            "two; name "
            "the hospitals of the data by partition=OPTION."
        )
    return Question(
        tuple(overrides),
        str(config.name),
        int(config.rounds),
        {c: sorted([*p.patients["train"], *p.patients["val"]]) for c, p in federated.items()},
        sum(len(p.patients["test"]) for p in federated.values()),
        divisions,
        folds,
    )


def _division(data: FederatedDataModule, repeat: int, fold: tuple[int, int]) -> Division:
    labels = {i: p.label for i, p in data.patients.items()}
    content = {
        "clients": {
            client: split_again(plan.patients, labels, derive_seed(data.seed, client, repeat), fold)
            for client, plan in data.plans.items()
        },
        "partition": {c: p.record(data.plan_names) for c, p in data.plans.items()},
    }
    return Division(content, f"{digest(content)[:16]}.json")


def split_again(
    patients: Mapping[Split, Sequence[str]],
    labels: Mapping[str, object],
    seed: int,
    fold: tuple[int, int],
) -> Parts:
    """Splits a client's training and validation patients again, without its test patients.

    Args:
        patients: Ids per split of the user's run.
        labels: By patient; the function reads those of training and validation patients only.
        seed: Of the split.
        fold: k and K, the k-th of K parts is tested. Of the others, as large a share validates as
            in the user's run.

    Example:
        >>> parts = {"train": ["a", "b", "c", "d"], "val": ["e", "f"], "test": ["g", "h"]}
        >>> found = [split_again(parts, dict.fromkeys("abcdef"), 0, (k, 3)) for k in range(3)]
        >>> [len(found[0][split]) for split in ("train", "val", "test")]
        [3, 1, 2]
        >>> sorted(i for one in found for i in one["test"])
        ['a', 'b', 'c', 'd', 'e', 'f']
    """
    used = sorted([*patients["train"], *patients["val"]])
    share = len(patients["val"]) / max(1, len(used))
    share = min(share, 1 - 2 / fold[1]) if fold[1] > 2 else min(share, 0.4)
    labels_used = {i: labels[i] for i in used}
    return split_patients(used, share, 1 / fold[1], seed, labels_used, fold)


def pilots(
    asked: Question, methods: Sequence[str], out: Path, rounds: int | None = None
) -> list[Pilot]:
    """Writes the divisions of the patients, and returns the methods to run.

    Args:
        asked: The question.
        methods: The methods.
        out: Where cells and divisions are kept.
        rounds: See `Pilot`.
    """
    for division in asked.divisions:
        if not (file := out / "divisions" / division.name).is_file():
            write_json(file, division.content)
    variant = file_names([asked.name])[asked.name]
    suite = Suite(
        name="pilot", title="A pilot", experiment=asked.name, lr=(1.0, 1.0), splits="folds",
        variants={variant: Variant()}, sizes={}, folds=asked.folds, passes=math.inf,
    )  # fmt: skip
    size = Size(len(asked.divisions), 1)
    return [
        Pilot(
            suite, Method.of(name), (variant,), size, overrides=asked.overrides,
            divisions=asked.divisions, out=out, rounds=rounds,
        )
        for name in methods
    ]  # fmt: skip
