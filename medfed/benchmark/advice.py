"""A pilot on the training and validation patients of a run, and its advice, in words, too.

The pilot divides these patients into folds and tests each fold by models that are trained on the
others. The test patients of the run are in no fold: no cell names them, and nothing reads them.

The advice is the method to use, its gain at each hospital, and its cost. Intervals and verdicts are
those of all reports (:mod:`medfed.reports.verdicts`): Holm's procedure among the methods, and among
the hospitals of a method, so that verdicts hold for all of them at once. A pilot adds the hospitals
that it cannot judge, and the patients that a verdict would take.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from medfed.benchmark import runner
from medfed.benchmark.plan import Group, Setting
from medfed.benchmark.runner import Progress
from medfed.benchmark.suite import Method, Size, Suite, Variant
from medfed.benchmark.tasks import task_of
from medfed.common.console import brief, file_names, in_markdown, say, short, size, wide_console
from medfed.common.scores import LEAST_CASES
from medfed.common.seeding import derive_seed
from medfed.common.tables import Table
from medfed.config.check import several
from medfed.config.compose import described
from medfed.config.description import RunDescription, written
from medfed.config.spelling import key_of
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.splits import Split, split_patients
from medfed.functional.statistics import Difference, Floats
from medfed.records.cells import Cell, Stage, cell_key
from medfed.reports.sentences import lines_of, signed, takes_to_show
from medfed.reports.tasks import Scores, Task
from medfed.reports.verdicts import UNDECIDED, Verdict, against, judge
from medfed.run.assembly import unread_data
from medfed.standalone.errors import ConfigError, DataError, MedfedError, few
from medfed.standalone.files import digest, filled, write_json, write_text, writing

# Keys that the pilot sets itself.
_ITS_OWN = ("folder", "logger", "progress", "pictures.format")
Parts = dict[Split, list[str]]


@dataclass(frozen=True)
class PilotSplit:
    """One division of the patients."""

    content: Mapping[str, Any]  # the clients' patients per split, as ``partition=saved`` reads them
    name: str  # the name of its file, which is that of its content


@dataclass(frozen=True)
class PilotData:
    """The data and settings that advice is about, and the patients that the pilot may use."""

    overrides: tuple[str, ...]  # what the user would train with
    name: str  # the experiment's
    rounds: int  # of the user's runs
    patients: Mapping[str, Sequence[str]]  # by client, the patients that the pilot may use
    kept_out: int  # the number of test patients
    divisions: tuple[PilotSplit, ...]  # the divisions of the pilot, one for each repetition
    folds: int  # the number of folds

    @property
    def count(self) -> int:
        """The number of patients that the pilot may use."""
        return sum(map(len, self.patients.values()))


@dataclass(frozen=True, kw_only=True)
class Pilot(Group):
    """A method on the divisions."""

    pilot_data: PilotData
    out: Path  # where cells and divisions are kept
    rounds: int | None = None  # rounds of a run of the pilot; None: as many as the user's
    absent: Mapping[str, frozenset[str]] = field(default_factory=dict)  # hospitals by variant

    def config(self, variant: str, as_arm: bool = False) -> RunDescription:
        """Composes what the user would train with, by this method, without absent hospitals."""
        if not self._composed:
            config = composed(self.pilot_data.overrides, self.method.name)
            rounds = min(self.rounds or config.rounds, config.rounds)
            changed = {"rounds": rounds, "evaluation.every": min(config.evaluation.every, rounds)}
            # Its seeds stay, whatever initial weights a repetition starts from.
            self._composed["", ""] = config.replacing({**changed, "data": config.data.plain()})
        config, absent = self._composed["", ""], self.absent.get(variant)
        if not absent:
            return config
        return config.replacing({"keep_out": [*config.keep_out, *sorted(absent)]})

    @property
    def budget(self) -> int:
        """A pilot leaves out no method for its gradient passes; it reports them."""
        return 1

    def cell(self, variant: str, stage: Stage, trial: int, split: int, setting: Setting) -> Cell:
        """Returns a cell; its key knows what a division holds, not where it lies."""
        name = self.pilot_data.divisions[split].name
        key, _ = cell_key(self._on_division(variant, split, Path(name)), stage, False)
        file = (self.out / "divisions" / name).resolve()
        plain = written(self._on_division(variant, split, file))
        return Cell(self.suite.name, variant, self.method.name, stage, trial, split, plain, key)

    def _on_division(self, variant: str, split: int, file: Path) -> RunDescription:
        config = self.config(variant)
        target = "medfed.datamodules.partitions.saved.Saved"
        saved = {"_target_": target, "_convert_": "all", "file": str(file)}
        seed = config.seed + split
        return config.replacing({"partition": saved, "data.partition": saved, "seed": seed})


def composed(overrides: Sequence[str], method: str) -> RunDescription:
    """Composes and checks what the user would train with, by a method."""
    theirs = [o for o in overrides if key_of(o) not in _ITS_OWN]
    usable = [o for o in theirs if not key_of(o).startswith("hydra.")]
    usable += [f"algorithm={method}", "logger=none", "progress=false", "pictures.format=none"]
    config = described([*usable, "folder=nowhere"])
    if several(config.trainer):
        raise ConfigError(
            f"trainer.devices={config.trainer.devices}: each run of a pilot is on one device; "
            "leave it out, and workers=N computes N of them at once."
        )
    return config


def pilot_data(overrides: Sequence[str], folds: int, repeats: int) -> PilotData:
    """Reads who is who, and deals the patients whom a run would train and validate on."""
    config = composed(overrides, "local")
    data = unread_data(config)
    data.plan()
    divisions = tuple(
        _division(data, repeat, (part, folds)) for repeat in range(repeats) for part in range(folds)
    )
    federated = {c: p for c, p in data.plans.items() if c not in data.keep_out}
    if len(federated) < 2:
        raise DataError(
            f"There is only one hospital ({next(iter(federated))}), and a federation takes two; "
            "name the hospitals of the data by partition=OPTION."
        )
    return PilotData(
        tuple(overrides),
        str(config.name),
        int(config.rounds),
        {c: sorted([*p.patients["train"], *p.patients["val"]]) for c, p in federated.items()},
        sum(len(p.patients["test"]) for p in federated.values()),
        divisions,
        folds,
    )


def _division(data: FederatedDataModule, repeat: int, fold: tuple[int, int]) -> PilotSplit:
    labels = {i: p.label for i, p in data.patients.items()}
    content = {
        "clients": {
            c: _split_again(p.patients, labels, derive_seed(data.seed, c, repeat), fold)
            for c, p in data.plans.items()
        },
        "partition": {c: p.record(data.plan_names) for c, p in data.plans.items()},
    }
    return PilotSplit(content, f"{digest(content)[:16]}.json")


def _split_again(
    patients: Mapping[Split, Sequence[str]],
    labels: Mapping[str, object],
    seed: int,
    fold: tuple[int, int],
) -> Parts:
    """Splits a client's training and validation patients again, without its test patients.

    Example:
        >>> parts = {"train": ["a", "b", "c", "d"], "val": ["e", "f"], "test": ["g", "h"]}
        >>> found = [_split_again(parts, dict.fromkeys("abcdef"), 0, (k, 3)) for k in range(3)]
        >>> [len(found[0][split]) for split in ("train", "val", "test")]
        [3, 1, 2]
        >>> sorted(i for one in found for i in one["test"])
        ['a', 'b', 'c', 'd', 'e', 'f']
    """
    used = sorted([*patients["train"], *patients["val"]])
    share = len(patients["val"]) / max(1, len(used))
    share = min(share, 1 - 2 / fold[1]) if fold[1] > 2 else min(share, 0.4)
    return split_patients(used, share, 1 / fold[1], seed, labels, fold)


def pilots(
    pilot_data: PilotData, methods: Sequence[str], out: Path, rounds: int | None = None
) -> list[Pilot]:
    """Writes the divisions of the patients, and returns the methods to run."""
    for division in pilot_data.divisions:
        if not (file := out / "divisions" / division.name).is_file():
            write_json(file, division.content)
    variant = file_names([pilot_data.name])[pilot_data.name]
    suite = Suite(
        name="pilot", title="A pilot", experiment=pilot_data.name, lr=(1.0, 1.0), splits="folds",
        variants={variant: Variant()}, sizes={}, folds=pilot_data.folds, passes=math.inf,
    )  # fmt: skip
    common: dict[str, Any] = {"pilot_data": pilot_data, "out": out, "rounds": rounds}
    size = Size(len(pilot_data.divisions), 1)
    return [Pilot(suite, Method.of(name), (variant,), size, **common) for name in methods]


ALL = "all"
"""The variant of a pilot in which nobody is absent."""


def absences(pilot: Pilot, clients: Sequence[str], sets: bool) -> Pilot:
    """Returns a pilot's method without each hospital, or with every set of them."""
    names, sizes = file_names(clients), range(len(clients)) if sets else (0, 1)
    every = [frozenset(some) for size in sizes for some in combinations(clients, size)]
    absent = {"_".join(["without", *sorted(names[c] for c in some)]): some for some in every[1:]}
    absent = {ALL: frozenset(), **absent}
    suite = replace(pilot.suite, variants=dict.fromkeys(absent, Variant()))
    return replace(pilot, suite=suite, variants=tuple(absent), absent=absent, _final={})


_TEMPLATES = Path(__file__).parent / "templates"
ALONE = "local"
LEAST = 3
"""The least repetitions for an interval."""
METHODS = (
    *("method", "mean", "better than alone by", "p (Holm)", "verdict"),
    *("sent in a run", "CPU time of a run"),
)
HOSPITALS = ("hospital", "patients", "better than alone by", "p (Holm)", "verdict")
VERDICT = {"better": "gains", "worse": "stays alone", "cannot tell": "cannot tell"}


@dataclass(frozen=True)
class Gain:
    """How much better one side is than the other, larger is better whatever the metric."""

    mean: float  # over repetitions
    low: float  # the lower end of its interval
    high: float  # the upper end
    detectable: float  # the smallest true difference that such a pilot detects with 80 % power
    says: str  # ``better``, ``worse`` or ``cannot tell``
    why: str  # why the pilot cannot tell, and what a verdict would take; empty with a verdict
    repetitions: int  # the repetitions that define the metric
    patients: int  # the number of test patients
    p: float  # Holm's p-value among the methods, or the hospitals

    @property
    def text(self) -> str:
        """The mean with its interval, where there is one."""
        return "–" if math.isnan(self.mean) else signed((self.mean, self.low, self.high))


def gain_of(
    task: Task,
    difference: Difference,
    verdict: str,
    repetitions: int,
    patients: int,
    p: float,
    comparisons: int = 1,
) -> Gain:
    """Judges a difference by the repetitions of a pilot.

    Example:
        >>> from medfed.functional.statistics import difference
        >>> found, task = difference([0.1, 0.12, 0.11, 0.1], overlap=0.3), Task("pilot", "")
        >>> [gain_of(task, found, "better", 4, n, 0.01) for n in (40, 5)][1].why
        '5 patients are too few; a verdict takes 10 or more'
    """
    words = {"repetitions": repetitions, "patients": patients, "gap": difference, "task": task}
    words |= {"comparisons": comparisons, "undecided": verdict == UNDECIDED, "least": LEAST}
    words |= {"least_patients": LEAST_CASES, "isfinite": math.isfinite}
    template = _TEMPLATES / "cannot_tell.txt"
    why = filled(template, takes_to_show=takes_to_show, **words).strip()
    says = "cannot tell" if why else verdict
    return Gain(*difference[:3], difference.detectable, says, why, repetitions, patients, p)


@dataclass(frozen=True)
class Cost:
    """The cost of a run of all rounds, estimated from the runs of the pilot."""

    bytes_up: int  # of all hospitals to the server
    bytes_down: int  # of the server to all hospitals
    cpu_hours: float  # of all hospitals together, on a core of this machine

    @property
    def sent(self) -> int:
        """Bytes both ways."""
        return self.bytes_up + self.bytes_down


@dataclass(frozen=True)
class Judged:
    """A method of the pilot."""

    name: str
    mean: float  # its metric, mean over hospitals and repetitions
    gain: Gain | None  # over training alone, mean over hospitals; None for training alone
    hospitals: Mapping[str, Gain]  # the same of each hospital
    # Over the shown method, see `Advice.leader`; None for that one and for training alone.
    against_shown: Gain | None
    cost: Cost  # of a run of all rounds
    failed: int  # the number of repetitions in which its model failed


@dataclass(frozen=True)
class Advice:
    """The advice of a pilot."""

    # The method to use, ``local`` if all others are worse; empty if the pilot cannot tell.
    use: str
    best: str  # the method other than training alone with the largest mean
    methods: Mapping[str, Judged]  # by name
    task: Task  # the pilot's scores
    repetitions: int  # of the pilot
    rounds: int  # of its runs
    pilot_data: PilotData  # the question
    notes: Sequence[str]  # the methods that are left out, and why

    @property
    def leader(self) -> str:
        """The method whose hospitals are shown: the one to use, or the best of the pilot."""
        return self.use if self.use not in ("", ALONE) else self.best

    def hospitals(self, says: str) -> list[str]:
        """Returns the hospitals with this verdict on the shown method."""
        return [c for c, g in self.methods[self.leader].hospitals.items() if g.says == says]

    @property
    def rivals(self) -> list[str]:
        """The methods without a shown difference from the one to use."""
        gains = {name: judged.against_shown for name, judged in self.methods.items()}
        return [n for n, gain in gains.items() if gain is not None and gain.says == "cannot tell"]

    def plain(self) -> dict[str, Any]:
        """Returns all of it, as JSON holds it."""
        constant, level = self.task.best_constant
        return {
            "use": self.use or None,
            "best_of_pilot": self.best,
            "metric": self.task.metric,
            "smaller_is_better": self.task.falls,
            "hospitals_of": self.leader,
            "gaining": self.hospitals("better"),
            "stay_alone": self.hospitals("worse"),
            "cannot_tell": self.hospitals("cannot tell"),
            "no_difference_shown": self.rivals,
            "methods": {
                name: {**asdict(judged), "mean": self.task.raw(judged.mean)}
                for name, judged in self.methods.items()
            },
            "constant": {"name": constant, "mean": self.task.raw(level)},
            "pilot": {
                "repetitions": self.repetitions,
                "folds": self.pilot_data.folds,
                "rounds": self.rounds,
                "rounds_of_a_run": self.pilot_data.rounds,
                "patients": {c: len(ids) for c, ids in self.pilot_data.patients.items()},
                "test_patients_left_out": self.pilot_data.kept_out,
                "overrides": list(self.pilot_data.overrides),
                "notes": list(self.notes),
            },
        }


def choose(pilot_data: PilotData, progress: Sequence[Progress]) -> Advice:
    """Reads the pilot's cells."""
    task = task_of(progress, progress[0].group.variants[0])
    notes = [n.replace(f" on {task.name}", "").replace(task.name, "the pilot") for n in task.notes]
    others = [name for name in task.scores if name != ALONE]
    if ALONE not in task.scores or not others:
        why = " ".join(notes) or "no method was computed."
        raise MedfedError(f"The pilot has nothing to compare: {why}")
    verdicts = judge(task)
    gains = _gains(pilot_data, task, others, ALONE)
    # Of those that are surely better, so that a lucky one is not preferred to them.
    surely = {name: gain.mean for name, gain in gains.items() if gain.says == "better"}
    alone = ALONE if all(gain.says == "worse" for gain in gains.values()) else ""
    use = max(surely, key=lambda name: surely[name]) if surely else alone
    best = max(others, key=lambda name: np.nan_to_num(gains[name].mean, nan=-math.inf))
    displayed = use if use not in ("", ALONE) else best
    rivals = _gains(pilot_data, task, [name for name in others if name != displayed], displayed)
    group = progress[0].group
    rounds = group.config(group.variants[0]).rounds
    by_name, methods = {p.group.method.name: p for p in progress}, dict[str, Judged]()
    for name, scores in task.scores.items():
        cost = _cost(by_name[name], scores, pilot_data.rounds / rounds)
        hospitals = _hospitals(pilot_data, task, verdicts[name])
        mean, gain, rival = verdicts[name].mean.mean, gains.get(name), rivals.get(name)
        methods[name] = Judged(name, mean, gain, hospitals, rival, cost, scores.failed)
    return Advice(use, best, methods, task, group.size.splits, rounds, pilot_data, notes)


def _gains(pilot_data: PilotData, task: Task, names: Sequence[str], other: str) -> dict[str, Gain]:
    """Methods against one, mean over the hospitals that decide."""
    patients = sum(len(pilot_data.patients[client]) for client in task.clients)
    means, gains = task.scores[other].means, against(task, other, names)
    known = {name: _defined(task.scores[name].means - means) for name in gains}
    return {
        name: gain_of(task, a.difference, a.verdict, known[name], patients, a.p, len(names))
        for name, a in gains.items()
    }


def _hospitals(pilot_data: PilotData, task: Task, verdict: Verdict) -> dict[str, Gain]:
    """A method against training alone, at each hospital."""
    if verdict.harm is None:
        return {}
    sizes, known = {c: len(ids) for c, ids in pilot_data.patients.items()}, dict[str, Gain]()
    values = (verdict.scores.values - task.scores[ALONE].values).T
    for client, of in zip(task.clients, values, strict=True):
        d, says, p, _ = verdict.harm.gains[client]
        known[client] = gain_of(task, d, says, _defined(of), sizes[client], p, len(task.clients))
    for client, has in task.small.items():
        why = f"{has} are too few; a verdict takes {LEAST_CASES} or more"
        unknown = (math.nan,) * 4
        known[client] = Gain(*unknown, "cannot tell", why, 0, sizes[client], math.nan)
    return {client: known[client] for client in pilot_data.patients}


def _defined(values: Floats) -> int:
    return int((~np.isnan(values)).sum())


def _cost(progress: Progress, scores: Scores, times: float) -> Cost:
    seconds = [float(r["cpu_seconds"]) for r in progress.final.values()]
    more = float(np.mean([_growth(result, times) for result in progress.final.values()]))
    up, down = (more * sent for sent in scores.sent)
    hours = float(np.median(seconds)) * times / 3600
    return Cost(round(up), round(down), float(f"{hours:.4g}"))


def _growth(result: Mapping[str, Any], times: float) -> float:
    """How many times its bytes a run sends that has so many times its rounds.

    Example:
        >>> course = [{"round": 1, "bytes": 70}, {"round": 3, "bytes": 90}]  # 60 are sent once
        >>> _growth({"rounds": 3, "bytes": {"up": 90, "down": 0}, "course": course}, 4.0)
        2.0
    """
    if times == 1:
        return 1.0
    whole, (first, last) = sum(result["bytes"].values()), (result["course"][k] for k in (0, -1))
    if not whole or first["round"] == last["round"]:
        return times
    each = (last["bytes"] - first["bytes"]) / (last["round"] - first["round"])
    return float(1 + (times - 1) * each * result["rounds"] / whole)


def sentences(advice: Advice) -> list[str]:
    """Returns the sentences of the advice, the answer first; ``templates/advice.txt`` has them."""
    hospitals = advice.methods[advice.leader].hospitals
    unsure = [client for client in advice.hospitals("cannot tell") if hospitals[client].mean < 0]
    again = advice.repetitions // advice.pilot_data.folds
    words: dict[str, Any] = {"advice": advice, "brief": brief, "again": again, "below": unsure}
    words |= {"least": LEAST_CASES, "few": lambda names: few([short(name) for name in names])}
    return [*lines_of("advice.txt", _TEMPLATES, **words), *advice.notes]


def duration(hours: float) -> str:
    """Returns a time as people write it."""
    if hours * 60 < 2:
        return f"{brief(3600 * hours)} s"
    return f"{60 * hours:.0f} min" if hours < 2 else f"{hours:.0f} h"


def markdown(advice: Advice, command: str) -> str:
    """Returns the advice as a page."""
    methods, hospitals = _tables(advice)
    # A line per hospital, a column per method.
    gains = {name: one.hospitals for name, one in advice.methods.items() if name != ALONE}
    rows = ([c, *(of[c].text for of in gains.values())] for c in advice.pilot_data.patients)
    every = Table.of(["hospital", *gains], rows, prose=(0,))
    words: dict[str, Any] = {"methods": methods, "hospitals": hospitals, "every": every}
    words |= {"sentences": in_markdown(sentences(advice)), "costs": _of_costs(advice)}
    return filled(_TEMPLATES / "advice.md", advice=advice, command=command, **words)


def _tables(advice: Advice) -> tuple[Table, Table]:
    """Methods, best first, and hospitals with the method that is shown."""
    methods, hospitals = [], []
    for one in sorted(
        advice.methods.values(), key=lambda one: np.nan_to_num(-one.mean, nan=math.inf)
    ):
        gain = (one.gain.text, _p(one.gain), one.gain.says) if one.gain else ("", "", "")
        cost = size(one.cost.sent), duration(one.cost.cpu_hours)
        methods.append((one.name, f"{advice.task.raw(one.mean):.4f}", *gain, *cost))
    for client, of in advice.methods[advice.leader].hospitals.items():
        says = VERDICT[of.says] + (f": {of.why}" if of.why else "")
        hospitals.append((client, str(of.patients), of.text, _p(of), says))
    return Table.of(METHODS, methods, prose=(0, 4)), Table.of(HOSPITALS, hospitals, prose=(0, 4))


def _p(gain: Gain) -> str:
    return "–" if math.isnan(gain.p) else f"{gain.p:.3f}"


def _of_costs(advice: Advice) -> str:
    return filled(
        _TEMPLATES / "costs.txt", asked=advice.pilot_data.rounds, had=advice.rounds
    ).strip()


def print_advice(advice: Advice, command: str) -> None:
    """Prints the advice."""
    console = wide_console()
    first, *rest = sentences(advice)
    console.print()
    console.print(first, style="bold")
    titles = (f"Methods: {advice.task.metric}", f"Hospitals, with {advice.leader}")
    for title, table in zip(titles, _tables(advice), strict=True):
        console.print(table.printed(title))
    say(console, *rest, _of_costs(advice), f"To train so: {command}")


def advise(
    overrides: Sequence[str],
    methods: Sequence[str],
    *,
    folds: int = 5,
    repeats: int = 2,
    rounds: int | None = None,
    out: Path = Path("outputs/advice"),
    workers: int = 1,
) -> tuple[Advice, Path]:
    """Runs the pilot's cells that are missing, then writes and prints the advice."""
    question = pilot_data(overrides, folds, repeats)
    out = out.expanduser()
    with writing(out, "choose another out=FOLDER"):
        groups = pilots(question, [ALONE, *(m for m in methods if m != ALONE)], out, rounds)
        folder, console = out / pilot_folder(question, groups), wide_console()
        each = groups[0].config(groups[0].variants[0]).rounds
        many = {"methods": len(groups), "splits": len(question.divisions), "rounds": each}
        say(console, filled(_TEMPLATES / "begins.txt", asked=question, **many).strip())
        progress = runner.computed(groups, out, workers)
    advice = choose(question, progress)
    algorithm = f"algorithm={advice.use or ALONE}"
    command = shlex.join(["medfed", "train", *question.overrides, algorithm])
    with writing(folder, "choose another out=FOLDER"):
        write_json(folder / "advice.json", advice.plain())
        write_text(folder / "advice.md", markdown(advice, command))
    print_advice(advice, command)
    say(console, f"Advice: {folder / 'advice.md'}")
    return advice, folder


def pilot_folder(pilot_data: PilotData, groups: Sequence[Pilot]) -> str:
    """A name from the keys of all cells, so that no advice overwrites another."""
    # The content of the divisions is among them.
    keys = [cell.key for group in groups for cell in group.final(0)]
    return f"{file_names([pilot_data.name])[pilot_data.name]}-{digest(keys)[:8]}"
