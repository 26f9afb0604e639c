"""What cells say of methods and arms, by name: scores, bytes, and what was recovered."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medfed.common.errors import ConfigError
from medfed.common.scores import mean_of_known, smaller_is_better, worst_value
from medfed.reports.benchmark.questions import Question
from medfed.run.benchmark.runner import Progress

Floats = NDArray[np.float64]
Result = Mapping[str, Any]


class Measured:
    """What there is of methods and arms, by suite, variant and name."""

    def __init__(self, progress: Sequence[Progress]) -> None:
        """Reads final cells; of a method or arm that lacks some, nothing."""
        self.found: dict[tuple[str, str, str], list[Result]] = {}
        self.overlaps: dict[str, bool] = {}
        self.base: dict[str, str] = {}
        for own in progress:
            suite, name = own.group.suite, own.group.method.name
            self.base[suite.name] = suite.base
            self.overlaps[suite.name] = suite.splits == "folds"
            for variant in own.group.variants:
                cells = [c for c in own.wanted if c.variant == variant and c.stage == "final"]
                results = [own.final.get(c.place) for c in cells]
                known: list[Result] = [r for r in results if r is not None and "error" not in r]
                if known and len(known) == own.group.size.splits:
                    self.found[suite.name, variant, name] = known

    def key(self, question: Question, name: str) -> tuple[str, str, str]:
        """Returns suite, variant and name of what a question calls by `name`.

        Raises:
            KeyError: If it is not there.
        """
        suite = question.suite
        method, _, variant = name.partition("@")
        variant = variant or question.given.get("variant") or self.base.get(suite, "")
        if (suite, variant, method) in self.found:
            return suite, variant, method
        others = [k for k in self.found if k[0] == suite and k[2] == method]
        if "@" in name or "variant" in question.given or len(others) != 1:
            raise KeyError(f"{method} on {suite}/{variant}".rstrip("/"))
        return others[0]  # an arm is of one variant

    def place(self, question: Question, name: str) -> str:
        """Returns suite and variant."""
        return "/".join(self.key(question, name)[:2])

    def of(self, question: Question, name: str) -> list[Result]:
        """Returns the results of a method or arm, by split."""
        return self.found[self.key(question, name)]

    def scores(self, question: Question, name: str) -> Floats:
        """Returns (S,) means over clients, larger is better."""
        results = self.of(question, name)
        whole = next((r for r in results if "clients" in r), None)
        if whole is None:
            raise KeyError(f"a run of {name} that has not failed")
        metric = question.given.get("metric") or whole["metric"][0]
        clients = list(whole["clients"])
        rows = [
            [_number(r["clients"][c].get(metric)) if "clients" in r else worst_value(metric)
             for c in clients]
            for r in results
        ]  # fmt: skip
        sign = -1 if smaller_is_better(metric) else 1
        return sign * mean_of_known(np.array(rows, dtype=float), axis=1)

    def gap(self, question: Question, first: str, second: str) -> Floats:
        """Returns (S,) paired differences.

        Raises:
            ConfigError: If the two are not of the same patients.
        """
        pairs = zip(self.of(question, first), self.of(question, second), strict=False)
        whole = [(a, b) for a, b in pairs if "clients" in a and "clients" in b]
        if any(a["data"] != b["data"] for a, b in whole):
            raise ConfigError(
                f"A claim compares {first} with {second} on {question.suite}, which are not of the "
                "same patients; ask whether a difference widens instead."
            )
        one, other = self.scores(question, first), self.scores(question, second)
        splits = min(len(one), len(other))
        return one[:splits] - other[:splits]

    def sent(self, question: Question, name: str) -> Floats:
        """Returns (S,) bytes of a run."""
        way = question.given.get("way", "both")
        ways = ("up", "down") if way == "both" else (way,)
        return np.array(
            [sum(r["bytes"][w] for w in ways) for r in self.of(question, name) if "bytes" in r],
            dtype=float,
        )

    def recovered(self, question: Question, name: str) -> Floats:
        """Returns (S,) of what a cell has kept of its memberships."""
        found = [r.get("looks", {}).get("memberships") for r in self.of(question, name)]
        key = question.given["what"]
        known = [_number(m[key]) for m in found if m is not None and m.get(key) is not None]
        if not known:
            raise KeyError(f"{key} of the memberships of {name}")
        return np.array(known, dtype=float)

    def overlap(self, question: Question, name: str) -> float:
        """Test patients per training patient where splits are of the same patients; else 0."""
        if not self.overlaps[question.suite]:
            return 0.0
        counts = [r["patients"] for r in self.of(question, name) if "patients" in r]
        shares = [
            sum(c["test"] for c in one.values()) / sum(c["train"] + c["val"] for c in one.values())
            for one in counts
        ]
        return float(np.mean(shares)) if shares else 0.0


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
