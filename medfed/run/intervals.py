"""Intervals, pooled metrics and the scores of constant predictions, from a run's test cases."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from medfed.common import scores
from medfed.common.console import short
from medfed.datamodules.splits import Split
from medfed.functional.scores import CPM, Floats, froc_scores
from medfed.functional.statistics import LEVEL, RESAMPLES, patients_anew, percentiles
from medfed.models.meters import Columns

if TYPE_CHECKING:
    from medfed.datamodules.base import FederatedDataModule
    from medfed.models.task import TaskModule

_BLOCK = 4_000_000  # weights of cases that are in memory at once
_SOME = 0.05  # share of resamples without a metric from which a client is named
Rows = Sequence[Mapping[str, Any]]
Values = dict[str, Floats]
"""(W,) per metric, of W resamples."""


@dataclass
class SplitCases:
    """The test cases of a run, with the task that computes their metrics."""

    task: TaskModule  # the task that computes the metrics
    data: FederatedDataModule  # the data of the cases
    split: Split = "test"  # the split that was tested
    # By client, the cases of models that have not failed.
    cases: dict[str, Columns] = field(default_factory=dict)
    failed: dict[str, Rows] = field(default_factory=dict)  # the cases of models that have failed
    # The clients with too few cases for a verdict, each with what it has.
    small: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        task: TaskModule,
        data: FederatedDataModule,
        cases: Mapping[str, Rows],
        split: Split = "test",
        failed: Collection[str] = (),
    ) -> SplitCases:
        """Collects the cases of the last test."""
        collected = cls(task, data, split)
        for client, rows in cases.items():
            count, what = scores.fewest_cases(rows)
            if rows and count < scores.LEAST_CASES:
                collected.small[client] = f"{count} {what}"
            columns = {n: np.array([row[n] for row in rows]) for n in rows[0]} if rows else {}
            if not rows or client in failed:
                collected.failed[client] = rows
                continue
            positive = data.positive_of(client)
            if positive is not None:
                columns["lesion"] = columns["label"] == positive
                columns["score"] = columns[f"probability/{positive}"]
            if "event" in columns:  # pooled concordances compare patients of one hospital
                columns["hospital"] = np.full(len(rows), len(collected.cases))
            collected.cases[client] = columns
        return collected

    @property
    def complete(self) -> bool:
        """Whether no model with test cases has failed."""
        return not any(self.failed.values())

    def patients(self, client: str) -> int:
        """How many patients a client has in the split, including those without a case."""
        return len(self.data.plans[client].patients[self.split])

    def measure(self, cases: Columns, weights: Floats, patients: int) -> Values:
        """Returns the metrics of weighted cases; for candidates, their FROC metrics, too."""
        values = self.task.scores(cases, weights)
        if "lesion" in cases:
            scans = np.full(len(weights), float(patients))
            values = values | froc_scores(cases["score"], cases["lesion"], weights, scans)
        return values

    def unweighted(self, cases: Columns, patients: int) -> dict[str, float]:
        """Returns the metrics of unweighted cases."""
        values = self.measure(cases, np.ones((1, len(cases["case"]))), patients)
        return {n: float(v[0]) for n, v in values.items()}

    def of_candidates(self, client: str) -> dict[str, float]:
        """Returns the FROC metrics of a client if its samples are candidates in scans."""
        positive = self.data.positive_of(client)
        if positive is None:
            return {}
        if client in self.cases:
            values = self.unweighted(self.cases[client], self.patients(client))
            return {n: values[n] for n in CPM}
        # The client's model has failed, or it has no scan.
        lost = any(row["label"] == positive for row in self.failed.get(client, ()))
        return dict.fromkeys(CPM, 0.0 if lost else math.nan)

    def absent(self) -> dict[str, list[str]]:
        """Returns, by client, the classes that its cases lack, if there are more than two."""
        constant: dict[str, list[str]] = {}
        names = self.data.class_names
        for client, cases in self.cases.items():
            if "probability/2" in cases:
                order = self.data.plans[client].label_order or range(len(names))
                lacking = set(range(len(names))) - set(cases["label"].tolist())
                constant[client] = [names[list(order).index(k)] for k in sorted(lacking)]
        return {c: lacking for c, lacking in constant.items() if lacking}

    def pooled(self) -> dict[str, float]:
        """Returns the metrics of all clients' cases together; empty if a model has failed."""
        if not self.complete:
            return {}
        return self.unweighted(joined([*self.cases.values()]), sum(map(self.patients, self.cases)))

    def constants(self) -> dict[str, dict[str, dict[str, float]]]:
        """Returns the metrics of constants from the training labels, by predictor and client."""
        intervals: dict[str, dict[str, dict[str, float]]] = {}
        for client, cases in self.cases.items():
            data = self.data.clients[client]
            training: Any = {"label_counts": data.label_counts, "label": data.train["label"]}
            for name, columns in self.task.constants(cases, training).items():
                if "lesion" in cases:
                    columns = {**columns, "score": np.zeros(len(cases["score"]))}
                metrics = self.unweighted(columns, self.patients(client))
                intervals.setdefault(name, {})[client] = metrics
        return intervals

    def resampled(self, seed: int) -> tuple[Iterator[tuple[str, Values]], Iterator[Values]]:
        """Yields the metrics of ``RESAMPLES`` resamples of each client's patients, then of all.

        One client follows the other, so that memory does not grow with their number: exhaust the
        first iterator before you begin the second, which is empty if a model has failed.
        """
        draws: dict[str, NDArray[np.int64]] = {}
        case = {c: cases["case"].astype(np.int64) for c, cases in self.cases.items()}

        def blocks(clients: Sequence[str], cases: Columns) -> Iterator[Values]:
            size, count = max(1, _BLOCK // len(cases["case"])), sum(map(self.patients, clients))
            for start in range(0, RESAMPLES, size):
                some = [draws[c][start : start + size, case[c]].astype(float) for c in clients]
                yield self.measure(cases, np.concatenate(some, axis=1), count)

        def each() -> Iterator[tuple[str, Values]]:
            for c, cases in self.cases.items():
                rows = patients_anew(self.patients(c), seed, c)
                draws[c] = rows.astype(np.min_scalar_type(int(rows.max(initial=0))))
                yield c, joined(list(blocks([c], cases)))

        def together() -> Iterator[Values]:
            if self.complete:
                yield from blocks([*self.cases], joined([*self.cases.values()]))

        return each(), together()


def joined(parts: Sequence[Columns]) -> dict[str, Any]:
    """Concatenates the columns of several tables of cases.

    Example:
        >>> joined([{"label": np.array([1])}, {"label": np.array([0, 1])}])["label"].tolist()
        [1, 0, 1]
    """
    return {n: np.concatenate([part[n] for part in parts]) for n in parts[0]} if parts else {}


def case_statistics(tested: SplitCases, seed: int) -> dict[str, Any]:
    """Returns the entries of ``summary.json`` that follow from the cases of a test.

    Such are the metrics of all cases together (``pooled``) and every interval.
    """
    small = {"small": tested.small} if tested.cases or tested.failed else {}
    plain = {c: tested.unweighted(cases, tested.patients(c)) for c, cases in tested.cases.items()}
    if not any(plain.values()):
        return small  # the task keeps no table of cases
    each, together = tested.resampled(seed)
    patients = {c: tested.patients(c) for c in tested.cases}

    def ends(values: Values, of: Mapping[str, float]) -> dict[str, list[float]]:
        return {n: [*percentiles(v, LEVEL, of[n])] for n, v in values.items()}

    clients: dict[str, dict[str, list[float]]] = {}
    undefined: dict[str, dict[str, int]] = {}
    groups = {"mean": [*tested.cases]}
    if 1 < len(large := [c for c in tested.cases if c not in tested.small]) < len(tested.cases):
        groups[scores.WITHOUT_SMALL] = large
    sums: dict[str, dict[str, Any]] = {group: defaultdict(float) for group in groups}
    for c, values in each:
        undefined[c] = {n: lost for n, v in values.items() if (lost := int(np.isnan(v).sum()))}
        if patients[c] < 2:  # every resample of a single patient is the same
            values = {n: np.full(RESAMPLES, math.nan) for n in values}
        clients[c] = ends(values, plain[c])
        for group in (group for group, members in groups.items() if c in members):
            for n in (n for n in values if not math.isnan(plain[c][n])):
                sums[group][n] += scores.redrawn(values[n])
    pooled = joined(list(together))  # empty where a model has failed: then no mean has an interval
    if min(patients.values()) < 2:
        pooled = {n: np.full(RESAMPLES, math.nan) for n in pooled}
    whole = tested.pooled()

    def ends_of_mean(group: str) -> dict[str, list[float]]:
        ends_by_metric = dict.fromkeys(pooled, [math.nan] * 2)
        for n, values in sums[group].items():
            known = [v for c in groups[group] if not math.isnan(v := plain[c][n])]
            ends_by_metric[n] = [*percentiles(values / len(known), LEVEL, float(np.mean(known)))]
        return ends_by_metric if pooled else {}

    return small | {
        "pooled": whole,
        "absent": tested.absent(),
        "stratified": tested.data.stratified,
        "remarks": tested.data.test_remarks(),
        "intervals": {
            "level": LEVEL,
            "resamples": RESAMPLES,
            "patients": patients,
            "clients": clients,
            **{group: ends_of_mean(group) for group in groups},
            "pooled": ends(pooled, whole),
            "undefined": {c: names for c, names in undefined.items() if names},
        },
        "constant": {
            name: {"clients": clients, "federation": over_clients(clients)}
            for name, clients in tested.constants().items()
        },
    }


def over_clients(clients: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Returns the statistics over clients of each metric."""
    each, falls = [*clients.values()], scores.smaller_is_better
    return {n: scores.federation_statistics([m[n] for m in each], falls(n)) for n in each[0]}


def doubts(summary: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """Returns the intervals of a run, if it has any, and which of them rest on few data."""
    intervals = summary.get("intervals")
    if not intervals or metric not in next(iter(intervals["clients"].values())):
        return {"intervals": None}
    lost = {c: names.get(metric, 0) for c, names in intervals["undefined"].items()}
    known = {c: not math.isnan(values[metric]) for c, values in summary["clients"].items()}
    count, ends = intervals["resamples"], [m[metric] for m in intervals["clients"].values()]
    most = count - scores.LEAST_DEFINED * count
    return {
        "intervals": intervals,
        "undefined": [f"{n} of {short(c)}" for c, n in lost.items() if _SOME * count <= n <= most],
        "rarely": [short(c) for c, n in lost.items() if most < n and known[c]],
        "alone": [short(c) for c, n in intervals["patients"].items() if n < 2 and known[c]],
        "flat": any(low == high for low, high in ends),
    }
