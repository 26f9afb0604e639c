"""The scores of methods on a task, from cells or from run folders.

The patients of a finished run are resampled as the run itself resampled them, so an interval here
is the interval that the run printed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from medfed.common import scores
from medfed.common.untrusted import reading
from medfed.config.sections import select
from medfed.federation.wire.ledger import Ledger
from medfed.functional.detection import lesion_scores
from medfed.functional.scores import case_class_scores, finding_scores, outcome_scores
from medfed.functional.statistics import RESAMPLES, Difference, difference, patients_anew
from medfed.functional.survival import survival_scores
from medfed.records.folder import Run, read_predictions, with_nan
from medfed.reports.runs import Runs
from medfed.standalone.files import digest

Floats = NDArray[np.float64]
Result = Mapping[str, Any]  # what a run on one split has given, as `medfed.run.cell` returns it
_MADE = "medfed.datamodules.tables.mixture"  # generates what it has
_BLOCK = 4_000_000  # weights of cases that are in memory at once


class Moment(NamedTuple):
    """A round of a run that was evaluated."""

    round: int  # its number, from 1
    score: float  # mean over clients of the validation metric, turned so that larger is better
    bytes: float  # what had travelled by then
    passes: float  # gradient passes that a client had taken by then


@dataclass(frozen=True)
class Scores:
    """A method on a task."""

    method: str  # its name
    # (S, C) the metric of every split and client, turned so that larger is better; NaN where a
    # client's patients leave it undefined.
    values: Floats
    resampled: Floats  # (S, W, C) the same on resampled patients; W is 0 without any
    sent: tuple[float, float]  # bytes of a run, up and down, mean over splits
    passes: float  # gradient passes of the client that took most, as a share of the budget
    failed: int = 0  # splits in which its model has failed, which count as the worst possible
    setting: Mapping[str, float] = field(default_factory=dict)  # what was changed of its defaults
    # What validation gave after how many rounds, bytes and passes, mean over splits.
    course: tuple[Moment, ...] = ()
    # The predicted slices of the first split, see :func:`slices_of`; empty: none.
    slices: Mapping[str, Any] = field(default_factory=dict)
    keys: tuple[str, ...] = ()  # the hashes of its cells, by split
    # How much validation rose from the third to the last quarter of the rounds.
    rise: Difference | None = None
    # On the task of the tuning, the changes of each trial and its score on validation patients,
    # turned so that larger is better; the defaults' first.
    trials: tuple[tuple[Mapping[str, float], float | None], ...] = ()
    # Mean over splits and all hospitals, also those that are too small to decide.
    of_all: float = math.nan
    # The same as `values`, of what validation has chosen (recalibrated, thresholds).
    chosen: Mapping[str, Floats] = field(default_factory=dict)

    def chosen_mean(self, words: str) -> float:
        """Returns the mean over splits and clients of a choice; NaN where there was none."""
        known = scores.mean_of_known(self.chosen.get(words, np.zeros((0, 0))), axis=1)
        return float(known.mean()) if len(known) else math.nan

    @property
    def means(self) -> Floats:
        """(S,) means over the clients."""
        return scores.mean_of_known(self.values, axis=1)

    def over_clients(self, name: str) -> float:
        """Returns a statistic over clients, mean over splits: ``worst`` or ``worst_decile``."""
        statistics = [scores.federation_statistics([*row])[name] for row in self.values]
        return float(np.mean([v for v in statistics if not math.isnan(v)] or [math.nan]))


@dataclass
class Task:
    """A variant of a suite, with the methods that can be compared on it."""

    suite: str
    variant: str
    metric: str = ""
    falls: bool = False  # whether smaller is better
    clients: tuple[str, ...] = ()  # the names of those that decide
    scores: dict[str, Scores] = field(default_factory=dict)  # by method
    # By constant predictor the (S, C) scores, turned so that larger is better.
    floor: dict[str, Floats] = field(default_factory=dict)
    # Test patients per training patient, where splits are of the same patients.
    overlap: float = 0.0
    left_out: dict[str, str] = field(default_factory=dict)  # by method why it is left out
    unfinished: str = ""  # what of it is not there yet
    patients: int = 0  # test patients of all splits and clients together
    title: str = ""  # what it is, in a line
    # In what way the hospitals differ, by which a card groups tasks; empty: by none.
    situation: str = ""
    data: str = ""  # ``generated``, ``real`` or other words; empty where that is unknown
    same: bool = True  # whether a client's name means the same hospital in all splits
    # By hospital its patients in each part, mean over splits, also of small ones.
    counts: dict[str, Mapping[str, float]] = field(default_factory=dict)
    # By hospital on how few test patients of all splits its scores rest, and on which.
    fewest: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    # The hospitals that decide nothing and have no verdict, each with what it has.
    small: Mapping[str, str] = field(default_factory=dict)
    # The smallest gain worth knowing; None: 0.02, or 2 % of a metric without limits.
    target: float | None = None

    def begin(self, results: Sequence[Result]) -> None:
        """Reads the hospitals, and their patients, from the results of a method."""
        self.clients = tuple(results[0]["clients"])
        counted = [r["patients"] for r in results]
        self.patients = sum(of["test"] for one in counted for of in one.values())
        for c in self.clients if self.patients else ():
            parts = {part: [one[c][part] for one in counted] for part in counted[0][c]}
            self.counts[c] = {part: float(np.mean(of)) for part, of in parts.items()}

    def add(
        self, name: str, splits: Sequence[Sequence[Result]], budget: float, **rest: Any
    ) -> None:
        """Adds the scores of a method."""
        # `splits`: the results on each split; those of several seeds are averaged.
        # `budget`: gradient passes that a client may take; 0: unknown.
        sign, worst = -1 if self.falls else 1, scores.worst_value(self.metric)
        every = [result for split in splits for result in split]
        whole = [result for result in every if "clients" in result]
        sizes = [max(map(len, r.get("resampled", {}).values()), default=0) for r in whole]
        width = min(sizes, default=0)

        def resampled(result: Result) -> Floats:
            known, lost = result.get("resampled", {}), math.nan if "clients" in result else worst
            rows = [known[c][:width] if c in known else [lost] * width for c in self.clients]
            return sign * np.array(rows, dtype=float).T

        def over(of: Iterable[Floats]) -> Floats:
            return np.stack([scores.mean_of_known(one, axis=0) for one in of])

        passes = [max(r["passes"].values()) for r in whole]
        courses = [
            [Moment(**{**with_nan(m), "passes": m["passes"] * taken}) for m in r.get("course", ())]
            for r, taken in zip(whole, passes, strict=True)
        ]
        self.scores[name] = Scores(
            name,
            over(values_of(split, self.metric, self.clients) for split in splits),
            over(np.stack([*map(resampled, split)]) for split in splits),
            tuple(float(np.mean([r["bytes"][way] for r in whole])) for way in ("up", "down")),  # type: ignore[arg-type]
            max(passes) / budget if budget else math.nan,
            len(every) - len(whole),
            course=mean_course(courses),
            chosen={
                words: over(values_of(split, self.metric + end, self.clients) for split in splits)
                for words, end in scores.CHOSEN.items()
            },
            **rest,
        )

    def add_constants(self, results: Sequence[Result]) -> None:
        """Adds what constant predictors reach, one result for each split."""
        sign = -1 if self.falls else 1
        for name in results[0].get("constant", {}):
            known = [r.get("constant", {}).get(name, {}) for r in results]
            rows = [[of.get(c) for c in self.clients] for of in known]
            self.floor[name] = sign * np.array(rows, dtype=float)

    def leave_out_small(self, tested: Mapping[str, tuple[int, str]]) -> None:
        """Leaves hospitals with few test patients out of all that is judged."""
        # They stay where fewer than two hospitals would decide, as then all are small.
        self.fewest = tested
        few_of = {c: f"{n} {what}" for c, (n, what) in tested.items() if n < scores.LEAST_CASES}
        self.leave_out(few_of)

    def leave_out(self, few_of: Mapping[str, str]) -> None:
        """Leaves hospitals out, each with what it has, if two or more others stay."""
        large = [i for i, client in enumerate(self.clients) if client not in few_of]
        if len(large) < 2 or not few_of:
            return
        self.small = few_of
        self.clients = tuple(self.clients[i] for i in large)
        self.floor = {name: values[:, large] for name, values in self.floor.items()}
        self.scores = {
            name: replace(
                one,
                values=one.values[:, large],
                resampled=one.resampled[:, :, large],
                of_all=float(np.mean(one.means)),
                chosen={words: values[:, large] for words, values in one.chosen.items()},
            )
            for name, one in self.scores.items()
        }

    @property
    def name(self) -> str:
        """The suite and the variant, if it has any."""
        return f"{self.suite}/{self.variant}".rstrip("/")

    @property
    def label(self) -> str:
        """The name, with what the data are."""
        return f"{self.name} ({self.data})" if self.data else self.name

    @property
    def best_constant(self) -> tuple[str, float]:
        """The best constant predictor and its mean score, larger is better."""
        means = {n: float(np.mean(scores.mean_of_known(v, 1))) for n, v in self.floor.items()}
        known = {n: v for n, v in means.items() if not math.isnan(v)}
        best = max(known, key=lambda n: known[n], default="")
        return best, known.get(best, math.nan)

    @property
    def notes(self) -> list[str]:
        """Remarks on it: which methods are left out, and what is unfinished."""
        return [*self.left_out.values(), *([self.unfinished] * bool(self.unfinished))]

    @property
    def splits(self) -> int:
        """How many splits there are."""
        return max((len(s.values) for s in self.scores.values()), default=0)

    @property
    def single(self) -> bool:
        """Whether there is one split, so that nothing is known of other training patients."""
        return self.splits == 1

    @property
    def is_unsure(self) -> bool:
        """Whether all decide, also small hospitals, as there are fewer than two others."""
        has_few = any(count < scores.LEAST_CASES for count, _ in self.fewest.values())
        return has_few and not self.small

    @property
    def limits(self) -> tuple[float, float]:
        """The least and the greatest possible score, larger is better."""
        low, high = scores.limits_of(self.metric)
        return (-high, -low) if self.falls else (low, high)

    @property
    def gain_limits(self) -> tuple[float, float]:
        """The least and the greatest possible difference of two scores."""
        low, high = self.limits
        return low - high, high - low

    def raw(self, value: float) -> float:
        """Returns a score as the metric has it."""
        return -value if self.falls else value

    def interval(self, score: Difference) -> tuple[float, float, float]:
        """Returns a mean score and the ends of its interval as the metric has them."""
        low, high = sorted((self.raw(score.low), self.raw(score.high)))
        return self.raw(score.mean), low, high


def values_of(results: Sequence[Result], metric: str, clients: Sequence[str]) -> Floats:
    """Returns (S, C) test scores, larger is better; the worst possible where a model has failed."""
    lost = {metric: scores.worst_value(metric)}
    rows = [[r["clients"][c] if "clients" in r else lost for c in clients] for r in results]
    values = np.array([[of.get(metric) for of in row] for row in rows], dtype=float)
    return -values if scores.smaller_is_better(metric) else values


def task_of_runs(methods: Runs, metric: str) -> Task:
    """Reads the scores of finished runs."""
    # Runs on the same patients and data count as one split, whatever their seeds: seeds say
    # how lucky initial weights were, and nothing about patients. `metric`: what they are
    # judged by; all runs have it.
    first = next(iter(methods.values()))
    splits = splits_of(first)
    task = Task(str(first[0].config.name), "", metric, scores.smaller_is_better(metric))
    ones = [first[split[0]] for split in splits]
    data = first[0].config.data
    made = data.get("generated") or str(data["_target_"]).startswith(_MADE)
    task.data = "generated" if made and data.get("path") is None else ""
    budget = max(max(r.summary["gradient_passes"].values()) for r in methods.get("fedavg", first))
    for name, runs in methods.items():
        # Runs of other seeds meet the draws of the first: the mean of draws of their own would
        # vary less than with the patients.
        grouped = [
            [result_of(runs[i], metric, one.seed) for i in split]
            for one, split in zip(ones, splits, strict=True)
        ]
        if not task.scores:
            one_each = [of[0] for of in grouped]
            task.begin(one_each)
            task.add_constants(one_each)
            task.overlap = overlap_of(one_each) if _test_again(ones) else 0.0
        slices = slices_of(runs[0], name, first[0].clients)
        keys = tuple(str(run.folder) for run in runs)
        task.add(name, grouped, budget, slices=slices, keys=keys)
    tested: dict[str, list[dict[str, str]]] = {client: [] for client in task.clients}
    for run in ones:
        for row in run.cases() if run.cases_csv.is_file() else ():
            tested[row["client"]].append(row)
    if any(tested.values()):
        task.leave_out_small({c: scores.fewest(rows) for c, rows in tested.items()})
    else:  # sites say it of each split
        known = [run.summary.get("small", {}) for run in ones]
        task.leave_out({c: has for c, has in known[0].items() if all(c in of for of in known)})
    return task


def result_of(run: Run, metric: str, seed: int) -> Result:
    """Returns what a finished run has given, as a cell of a benchmark holds it."""
    summary, anew = run.summary, resampled_of(run, metric, run.clients, seed)
    moments = course(run.history(), run.ledger, summary["selection"], summary["rounds"])
    return {
        "clients": summary["clients"],
        "patients": {c: {n: len(ids) for n, ids in of.items()} for c, of in run.patients.items()},
        "bytes": summary["bytes"],
        "passes": summary["gradient_passes"],
        "resampled": dict(zip(run.clients, anew.T, strict=True)),
        "constant": {
            name: {c: of.get(metric) for c, of in constant["clients"].items()}
            for name, constant in summary.get("constant", {}).items()
        },
        "course": [moment._asdict() for moment in moments],
    }


def splits_of(runs: Sequence[Run]) -> list[list[int]]:
    """Returns which runs of a method are on the same patients and data, by their places."""
    keys = [
        # A coordinator does not know the patients; they follow from the seed.
        digest([run.patients, run.splits["files"], run.seed if run.sites_json.is_file() else None])
        for run in runs
    ]
    return [[i for i, key in enumerate(keys) if key == one] for one in dict.fromkeys(keys)]


def overlap_of(results: Sequence[Result]) -> float:
    """Returns test patients per training patient, mean over splits of the same patients."""
    counts = [r["patients"].values() for r in results]
    tested = [sum(c["test"] for c in one) for one in counts]
    trained = [sum(n for c in one for part, n in c.items() if part != "test") for one in counts]
    return float(np.mean(np.divide(tested, np.maximum(trained, 1)))) if counts else 0.0


def _test_again(runs: Sequence[Run]) -> bool:
    """Whether runs of the same data test some patient whom others train on."""
    if len({digest(run.splits["files"]) for run in runs}) > 1:
        return False
    tested, trained = set(), set()
    for client, parts in ((c, parts) for run in runs for c, parts in run.patients.items()):
        tested |= {(client, patient) for patient in parts["test"]}
        trained |= {(client, p) for part in parts if part != "test" for p in parts[part]}
    return bool(tested & trained)


def course(
    history: Iterable[scores.Record], ledger: Ledger, selection: Sequence[str], rounds: int
) -> Iterator[Moment]:
    """Yields the evaluated rounds of a run."""
    metric, mode = selection
    by_round: dict[int, list[float]] = {}
    for record in history:
        by_round.setdefault(record.round, []).append(record.metrics.get(metric, math.nan))
    for at, values in by_round.items():
        # As where the round is selected: over the clients whose data define the metric.
        mean = float(scores.mean_of_known(np.array(values), 0))
        mean = mean if math.isfinite(mean) else math.nan
        sent = sum(entry.bytes for entry in ledger.entries if entry.round <= at)
        yield Moment(at + 1, mean if mode == "max" else -mean, sent, (at + 1) / rounds)


def mean_course(courses: Sequence[Iterable[Moment]]) -> tuple[Moment, ...]:
    """Returns the mean over splits or runs, at the rounds that all of them have."""
    by_round: dict[int, list[Moment]] = {}
    for moment in itertools.chain.from_iterable(courses):
        by_round.setdefault(moment.round, []).append(moment)
    whole = [np.array(of) for _, of in sorted(by_round.items()) if len(of) == len(courses)]
    means = (scores.mean_of_known(moments[:, 1:], 0) for moments in whole)
    return tuple(Moment(int(m[0, 0]), *map(float, v)) for m, v in zip(whole, means, strict=True))


def rise_of(courses: Sequence[Sequence[float]], overlap: float = 0.0) -> Difference | None:
    """Returns how much validation still rose at the end, which says whether rounds were few."""
    # The result is the mean of the last quarter less that of the quarter before; None with
    # fewer than four evaluated rounds.
    size = min(map(len, courses), default=0) // 4
    if not size:
        return None
    ends = [np.asarray(course, dtype=float) for course in courses]
    rises = [c[-size:].mean() - c[-2 * size : -size].mean() for c in ends]
    return difference([float(rise) for rise in rises], overlap)


def resampled_of(run: Run, metric: str, clients: Sequence[str], seed: int) -> Floats:
    """Returns the scores of a run on resampled patients, which follow from the seed."""
    # The result is (W, C), NaN where a client has no cases, or a single patient, whom every
    # resample has, or its draw leaves the metric undefined; W is 0 where the run has kept no
    # cases, or its task does not measure the metric on them.
    path = run.cases_csv
    if not path.is_file():
        return np.zeros((0, len(clients)))
    measure, rows = _measure_of(run), run.cases()
    resampled = np.full((RESAMPLES, len(clients)), np.nan)
    with reading(path):
        for i, client in enumerate(clients):
            mine = [row for row in rows if row["client"] == client]
            patients = run.patients[client]["test"]
            if not mine or len(patients) < 2:
                continue
            places = {name: n for n, name in enumerate(patients)}
            case = np.array([places[row["patient"]] for row in mine])
            cases = {n: _column([row[n] for row in mine]) for n in mine[0]}
            counts = patients_anew(len(patients), seed, client)
            size = max(1, _BLOCK // len(case))
            for start in range(0, RESAMPLES, size):
                weights = counts[start : start + size, case].astype(float)
                values = measure({**cases, "case": case}, weights)
                if metric not in values:
                    return np.zeros((0, len(clients)))
                resampled[start : start + size, i] = values[metric]
    return resampled


def _measure_of(run: Run) -> Callable[[Mapping[str, Any], Floats], dict[str, Floats]]:
    """Returns how to score the cases of a run: the function that its task module calls."""
    # The module needs PyTorch, Lightning and MONAI, for seconds. Only a task of a user's is
    # built, which says itself how.
    model = run.config.model
    plain: dict[str, Callable[[Mapping[str, Any], Floats], dict[str, Floats]]] = {
        "classification": case_class_scores,
        "regression": lambda cases, w: outcome_scores(cases["prediction"], cases["label"], w),
        "findings": lambda cases, w: finding_scores(cases, model.findings, w),
        "survival": lambda cases, w: survival_scores(
            cases, w, [*map(float, model.cuts)], model.horizon, model.least_events
        ),
        "detection": lesion_scores,
    }
    module = str(model["_target_"]).rpartition(".")[0]
    if (measure := plain.get(module.removeprefix("medfed.models."))) is not None:
        return measure
    if module == "medfed.models.segmentation":
        from medfed.models.segmentation_meter import overlap_scores

        return lambda cases, w: overlap_scores(cases, tuple(model.regions), w)
    from medfed.common.streams import own_stream
    from medfed.config.compose import build

    with own_stream(0):  # its weights are of no interest
        task = build(model)
    return lambda cases, w: task.scores(cases, w)  # type: ignore[no-any-return]


def _column(texts: Sequence[str]) -> Any:
    try:
        return np.array([float(text) for text in texts])
    except ValueError:
        return np.array(texts)


def slices_of(run: Run, name: str, clients: Sequence[str]) -> dict[str, Any]:
    """Returns the predicted slices that a run has kept, and how they are to be read."""
    cases = read_predictions(name, run.folder, clients)
    model = run.config.model
    if not cases or select(run.config, "model.threshold") is None:
        return {}
    from medfed.models.segmentation import chosen_activation

    regions = list(run.config.regions)
    wanted = model.get("activation", "sigmoid")
    exclusive = chosen_activation(wanted, len(regions), run.config.get("exclusive")) == "softmax"
    decided = {"regions": regions, "threshold": float(model.threshold), "exclusive": exclusive}
    return {**decided, "cases": cases}
