"""The same report of a user's own finished runs: what their data can bear, and no more.

Runs that differ in ``seed``, ``data.seed`` or ``data.fold`` alone are one method on several splits.
Those on the same patients count as one split: seeds say how lucky initial weights were, and nothing
about patients.

``medfed report``: the page of a user's own finished runs.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

import numpy as np
import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf

from medfed.benchmark.main import print_tables
from medfed.benchmark.report.files import write
from medfed.benchmark.report.findings import Told, judged
from medfed.benchmark.report.page import GENERATOR
from medfed.benchmark.report.pictures import drawn_of, slices_of
from medfed.benchmark.report.scores import Floats, Moment, Scores, Task
from medfed.benchmark.report.verdicts import LABELS, REFERENCES
from medfed.common.console import few, say, wide_console
from medfed.common.errors import CheckpointError, ConfigError, did_you_mean
from medfed.common.files import digest, writing
from medfed.common.scores import mean_of_known, smaller_is_better
from medfed.common.untrusted import read_json, reading
from medfed.records.folder import Run, read_splits
from medfed.reports.methods import method_names
from medfed.reports.runs import (
    check_same_patients,
    common_folder,
    differences,
    find_runs,
    grouped,
    notes_on,
    without_repeats,
)

Runs = Mapping[str, Sequence[Run]]
_SPLITS = ("data.fold",)  # what makes another split, and no other method


def own_findings(folders: Sequence[Path], metric: str | None = None) -> Told:
    """Judges finished runs.

    Args:
        folders: Run folders.
        metric: What they are judged by; None: what selected the rounds.

    Returns:
        Findings of one task.

    Raises:
        CheckpointError: If a run is unfinished, or runs are of other patients, data, metrics or
            clients than others; one is named.
        ConfigError: If the metric is unknown.
    """
    runs, notes = without_repeats([Run(folder) for folder in folders])
    check_same_patients(runs, _place)
    _check_same_data(runs)
    methods, more = _methods(runs)
    splits = _splits(next(iter(methods.values())))
    task = _task(methods, splits, _metric(runs, metric))
    told = judged([task])
    told.title = f"Runs of {task.suite}"
    told.remark = _bearing(methods, splits, task)
    told.notes = [*_lacking(methods), *more, *notes, *notes_on(methods, task.clients), *told.notes]
    told.notes.append(
        "Settings are those of the runs; nothing here says that all methods were tuned alike."
    )
    told.commands = [c for own in methods.values() for run in own if (c := _command(run))]
    versions = read_json(runs[0].folder / "versions.json", {})
    told.libraries = {n: str(v) for n, v in versions.items() if n not in ("commit", "plugins")}
    return told


def _place(run: Run) -> Hashable:
    """What split a run says that it is on."""
    fold = OmegaConf.select(run.config, "data.fold")
    return run.seed, OmegaConf.select(run.config, "data.seed"), str(fold)


def _check_same_data(runs: Sequence[Run]) -> None:
    """Checks that equal names of files are equal files, where runs say that splits are equal.

    Raises:
        CheckpointError: If not; the run and the file are named.
    """
    first: dict[Hashable, tuple[Run, Mapping[str, str]]] = {}
    for run in runs:
        files = read_splits(run.folder)["files"]
        twin, known = first.setdefault(_place(run), (run, files))
        for name in files.keys() | known.keys():
            if files.get(name) != known.get(name):
                raise CheckpointError(
                    f"{name} in the data of {run.folder} is not that of {twin.folder}; only runs "
                    "on the same data can stand in one table."
                )


def _metric(runs: Sequence[Run], metric: str | None) -> str:
    wanted = metric or str(runs[0].summary["selection"][0])
    for run in runs:
        known = list(next(iter(run.summary["clients"].values())))
        if wanted not in known:
            raise ConfigError(
                f"{run.folder} has no metric={wanted}{did_you_mean(wanted, known)}; it has "
                f"{', '.join(known)}."
            )
    return wanted


def _methods(runs: Sequence[Run]) -> tuple[dict[str, list[Run]], list[str]]:
    """Gathers the runs of each method, in the order of splits that all methods have.

    Raises:
        CheckpointError: If there is no such split.
    """
    groups = grouped(
        runs, lambda one, other: not [k for k in differences(one, other) if k not in _SPLITS]
    )
    places = [{_place(run): run for run in group} for group in groups]
    common = [place for place in places[0] if all(place in own for own in places)]
    if not common:
        listed = "; ".join(
            f"{own[0].summary['algorithm']}: {few([str(run.seed) for run in own])}"
            for own in groups
        )
        raise CheckpointError(f"No seed and fold was run with every method (seeds of {listed}).")
    kept = [[own[place] for place in sorted(common, key=str)] for own in places]
    names = _with_references(dict(zip(method_names([own[0] for own in kept]), kept, strict=True)))
    lost = [
        f"{len(own) - len(common)} runs of {name} are left out: not every method has their splits."
        for name, own in zip(names, places, strict=True)
        if len(own) > len(common)
    ]
    return names, lost


def _with_references(methods: Mapping[str, list[Run]]) -> dict[str, list[Run]]:
    """Calls the best local training, by validation, ``local``, and so with FedAvg and pooling."""
    names = {name: name for name in methods}
    for reference in (*REFERENCES, "pooled"):
        own = [n for n, runs in methods.items() if runs[0].summary["algorithm"] == reference]
        if own and reference not in names:
            best = max(own, key=lambda n: _validated(methods[n]))
            names[best] = reference
    return {names[name]: runs for name, runs in methods.items()}


def _validated(runs: Sequence[Run]) -> float:
    """What validation gave at the selected rounds, larger is better."""
    found = []
    for run in runs:
        metric = run.summary["selection"][0]
        sign = -1 if smaller_is_better(metric) else 1
        at = run.summary["selected_round"]
        found += [sign * r.metrics[metric] for r in run.history() if r.round == at]
    return float(np.mean(found)) if found else -math.inf


def _splits(runs: Sequence[Run]) -> list[list[int]]:
    """Returns which runs of a method are on the same patients and data, by their places."""
    keys = [digest([run.patients, read_splits(run.folder)["files"]]) for run in runs]
    return [[i for i, key in enumerate(keys) if key == one] for one in dict.fromkeys(keys)]


def _task(methods: Runs, splits: Sequence[Sequence[int]], metric: str) -> Task:
    first = next(iter(methods.values()))
    task = Task(str(first[0].config.name), "", metric, smaller_is_better(metric), first[0].clients)
    ones = [first[own[0]] for own in splits]
    task.patients = sum(len(p["test"]) for run in ones for p in run.patients.values())
    task.overlap = _overlap(ones)
    budget = max(_passes(run) for run in methods.get("fedavg", first))
    for name, runs in methods.items():
        task.scores[name] = _scores(task, name, runs, splits, budget)
    sign = -1 if task.falls else 1
    for constant in first[0].summary.get("constant", {}):
        rows = [
            [
                run.summary.get("constant", {}).get(constant, {"clients": {}})["clients"]
                .get(c, {}).get(metric, math.nan)
                for c in task.clients
            ]
            for run in ones
        ]  # fmt: skip
        task.floor[constant] = sign * np.array(rows, dtype=float)
    return task


def _overlap(runs: Sequence[Run]) -> float:
    """Test patients per training patient; 0 where none is ever in both parts."""
    tested, trained, again = [], [], False
    data = {digest(read_splits(run.folder)["files"]) for run in runs}
    for run in runs:
        parts = run.patients.items()
        tested.append({(c, p) for c, own in parts for p in own["test"]})
        trained.append({(c, p) for c, own in parts for n in own if n != "test" for p in own[n]})
    if len(data) > 1:
        return 0.0  # other data
    again = any(test & train for test in tested for train in trained)
    ratio = np.mean([len(t) / max(1, len(n)) for t, n in zip(tested, trained, strict=True)])
    return float(ratio) if again else 0.0


def _scores(
    task: Task, name: str, runs: Sequence[Run], splits: Sequence[Sequence[int]], budget: float
) -> Scores:
    """A method's scores, means over the runs of each split."""
    sign = -1 if task.falls else 1

    def values(run: Run) -> Floats:
        return np.array([run.summary["clients"][c][task.metric] for c in task.clients])

    def over(found: Sequence[Floats]) -> Floats:
        return mean_of_known(np.stack(found), axis=0)

    drawn = [drawn_of(run, task.metric, task.clients) for run in runs]
    width = min(len(one) for one in drawn)
    return Scores(
        name,
        sign * np.stack([over([values(runs[i]) for i in own]) for own in splits]),
        sign * np.stack([over([drawn[i][:width] for i in own]) for own in splits]),
        tuple(float(np.mean([r.summary["bytes"][way] for r in runs])) for way in ("up", "down")),  # type: ignore[arg-type]
        max(_passes(run) for run in runs) / budget if budget else math.nan,
        0,
        {},
        _course(runs),
        slices_of(runs[0], name, task.clients),
        tuple(str(run.folder) for run in runs),
    )


def _passes(run: Run) -> float:
    spent = run.summary.get("gradient_passes", run.summary["steps"])
    return float(max(spent.values()))


def _course(runs: Sequence[Run]) -> tuple[Moment, ...]:
    """The mean over runs of how validation went, at the rounds that all of them have."""
    by_round: dict[int, list[Moment]] = {}
    for run in runs:
        metric = run.summary["selection"][0]
        sign = -1 if smaller_is_better(metric) else 1
        history: dict[int, list[float]] = {}
        for record in run.history():
            history.setdefault(record.round, []).append(sign * record.metrics[metric])
        sent: dict[int, int] = {}
        for entry in run.ledger.entries:
            sent[entry.round] = sent.get(entry.round, 0) + entry.bytes
        for at, scores in history.items():
            known = [s for s in scores if math.isfinite(s)]
            total = sum(count for r, count in sent.items() if r <= at)
            passes = _passes(run) * (at + 1) / run.summary["rounds"]
            mean = float(np.mean(known)) if len(known) == len(scores) else math.nan
            by_round.setdefault(at, []).append(Moment(at + 1, mean, total, passes))
    return tuple(
        Moment(at + 1, *(float(v) for v in mean_of_known(np.array(found)[:, 1:], axis=0)))
        for at, found in sorted(by_round.items())
        if len(found) == len(runs)
    )


def _bearing(methods: Runs, splits: Sequence[Sequence[int]], task: Task) -> str:
    """Says what the runs' splits can bear."""
    count = len(next(iter(methods.values())))
    if len(splits) > 1:
        again = " The same patients come again in other splits, which the intervals allow for."
        return f"{len(splits)} splits of the patients.{again * bool(task.overlap)}"
    seeds = f"All {count} seeds are" if count > 1 else "All runs are"
    return (
        f"{seeds} on one split of the patients: seeds on one split say nothing about other "
        "patients. "
        "Intervals are over the tested patients alone; other training patients might turn a "
        "difference around. Runs with other seed=, data.seed= or data.fold= would tell."
    )


def _lacking(methods: Runs) -> list[str]:
    told = {
        "local": "nothing is said of who would be better off alone",
        "fedavg": "nothing is compared with the usual average",
    }
    return [
        f"There is no run of {LABELS[name]}, so that {what}; run it with algorithm={name}."
        for name, what in told.items()
        if name not in methods
    ]


def _command(run: Run) -> str:
    """What a run was started with, where it is known."""
    path = run.folder / "overrides.yaml"
    if not path.is_file():
        return ""
    with reading(path):
        typed = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(typed, list) or not all(isinstance(word, str) for word in typed):
            raise ValueError("it is no list of overrides")
    return shlex.join(["medfed", "train", *typed])


def report_runs(
    runs: str | Sequence[str],
    out: Path | None = None,
    metric: str | None = None,
    figures: bool = True,
    quiet: bool = False,
) -> Told:
    """Judges finished runs, prints the table and writes the page with all that lies beside it.

    Args:
        runs: Run folders, or folders that hold runs.
        out: Where to write; None takes ``report`` in the folder that holds all runs.
        metric: What they are judged by; None: what selected the rounds.
        figures: Whether to write the pictures as files of vectors, too.
        quiet: Whether to print nothing.

    Returns:
        What was found.

    Raises:
        MedfedError: If the runs cannot be read or do not belong together, or ``out`` cannot be
            written, or holds a page that no report wrote.
    """
    folders = find_runs(runs)
    folder = common_folder(folders) / "report" if out is None else out.expanduser()
    page = folder / "report.html"
    if page.is_file() and GENERATOR.encode() not in page.read_bytes()[:1000]:
        raise ConfigError(
            f"{page} is there and no report has written it; choose another out=FOLDER."
        )
    told = own_findings(folders, metric)
    told.notes += _unfinished(runs, folders)
    with writing(folder, "choose another out=FOLDER"):
        write(folder, told, figures)
    if not quiet:
        print_tables(told)
        say(wide_console(), *told.sentences, f"Report: {page}")
    return told


def _unfinished(runs: str | Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Names the runs below the folders that have not finished, which the report has not."""
    known = {folder.resolve() for folder in folders}
    lost = sorted(
        str(path.parent)
        for name in ([runs] if isinstance(runs, str) else runs)
        for path in Path(name).expanduser().rglob("config.yaml")
        if path.parent.resolve() not in known and (path.parent / "splits.json").is_file()
    )
    return [f"Not finished, and left out: {few(lost, 5)}."] if lost else []
