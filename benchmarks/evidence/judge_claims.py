"""Claims of papers, judged by the cells of a benchmark; a yaml for each in ``claims``.

    medfed benchmark suite=all variants=all arms=true out=OUT paths.heart=FOLDER
    python benchmarks/evidence/judge_claims.py OUT --paths heart=FOLDER  # adds to its findings

A claim rests on ``parts``, and ``reasons`` are experiments that ask why. Each is a question: a
number per split, held against a bound.

========================================  =========================================================
``better: A, than: B, by: b``             A - B is above b (0 by default)
``as_good: A, as: B, within: m``          A - B is above -m
``saves: A, of: B, share: s, way: up``    A sends at least the share s fewer bytes than B
``widens: [A, B], over: [C, D]``          A - B is above C - D
``recovers: A, what: KEY, at_least: v``   A recovers what was planted (or ``at_most: v``)
``peak: [A, B], above: [C, D]``           some of the first are better than each of the last
========================================  =========================================================

A, B, … are methods and arms of the suite; ``A@variant`` is on another variant.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medfed.benchmark.plan import groups
from medfed.benchmark.runner import Progress, found_groups
from medfed.benchmark.suite import SIZES, read_yaml, wanted_of
from medfed.common.schemas import fit_keys
from medfed.common.scores import mean_of_known
from medfed.functional.statistics import LEVEL, difference, holm
from medfed.reports.tasks import overlap_of, values_of
from medfed.standalone.errors import ConfigError, did_you_mean
from medfed.standalone.files import filled, write_json

KINDS = {
    "better": {"than", "by"},
    "as_good": {"as", "within"},
    "saves": {"of", "share", "way"},
    "widens": {"over"},
    "recovers": {"what", "at_least", "at_most"},
    "peak": {"above"},
}
_COMMON = {"suite", "variant", "metric", "asks"}
CLAIMS = Path(__file__).parent / "claims"
YES, NO, UNKNOWN, MISSING = "yes", "no", "cannot tell", "not measured"


@dataclass(frozen=True)
class Question:
    """A question of a claim."""

    kind: str
    suite: str
    asks: str  # the statement that is true if the answer is yes
    given: Mapping[str, Any]  # its keys in the yaml


@dataclass(frozen=True)
class Claim:
    """A statement, what it rests on, and experiments that ask why."""

    name: str
    claim: str
    source: str = ""
    parts: tuple[Question, ...] = ()
    reasons: tuple[Question, ...] = ()


def read_claims(folder: Path = CLAIMS) -> list[Claim]:
    """Reads all claims of a folder."""
    return [read_yaml(file, "claim", _claim) for file in sorted(folder.glob("*.yaml"))]


def _claim(name: str, content: dict[str, Any]) -> Claim:
    asked: dict[str, Any] = {
        n: tuple(map(_question, content.get(n) or ())) for n in ("parts", "reasons")
    }
    claim = replace(
        fit_keys({**content, **dict.fromkeys(asked, ()), "name": name}, Claim, "it"), **asked
    )
    if not claim.parts:
        raise ValueError("it has no parts")
    return claim


def _question(given: Mapping[str, Any]) -> Question:
    kinds = [kind for kind in KINDS if kind in given]
    if len(kinds) != 1:
        raise ValueError(f"a question has one of {', '.join(KINDS)}: {dict(given)}")
    (kind,) = kinds
    known = _COMMON | KINDS[kind] | {kind}
    if unknown := sorted(set(given) - known):
        raise ValueError(
            f"a question of {kind} has no key {unknown[0]!r}{did_you_mean(unknown[0], known)}"
        )
    needed = {"than", "as", "of", "over", "above", "what"} & KINDS[kind]
    if lacking := sorted((needed | {"suite"}) - set(given)):
        raise ValueError(f"a question of {kind} lacks the key {lacking[0]!r}")
    if kind == "recovers" and ("at_least" in given) == ("at_most" in given):
        raise ValueError("a question of recovers has one of at_least and at_most")
    asks = given.get("asks") or filled(CLAIMS / "asks.txt", kind=kind, q={"by": 0, **given}).strip()
    return Question(kind, given["suite"], asks, given)


@dataclass(frozen=True)
class Answer:
    """The answer to a question."""

    asks: str
    where: str  # suite and variant
    answer: str = MISSING
    mean: float = math.nan
    low: float = math.nan
    high: float = math.nan
    bound: float = 0.0  # what the mean must exceed; with ``at_most``, stay below
    p: float = math.nan  # against the bound; Holm's among the questions of its kind in the claim
    detectable: float = math.nan  # distance from the bound that is detected with 80 % power, alone
    splits: int = 0
    note: str = ""  # the result that is missing, or the method that decided


@dataclass(frozen=True)
class JudgedClaim:
    """A claim with its answers."""

    name: str
    claim: str
    source: str
    verdict: str  # confirmed, qualified, refuted, cannot tell or not measured
    parts: tuple[Answer, ...]
    reasons: tuple[Answer, ...] = ()


def sentence(claim: JudgedClaim) -> str:
    """Returns the verdict in words: where the claim holds, where not, and where nobody can tell."""
    sentences = [f"{claim.claim.rstrip('.')}. {claim.verdict.capitalize()}"]
    heads = ((YES, "Holds"), (NO, "Does not hold"), (UNKNOWN, "Cannot tell"))
    for word, head in heads:
        places = [f"{a.where}, {a.asks}" for a in claim.parts if a.answer == word]
        if places and claim.verdict == "qualified":
            sentences.append(f"{head}: {'; '.join(places)}")
    if lacking := dict.fromkeys(a.where for a in claim.parts if a.answer == MISSING):
        sentences.append(f"Not measured: on {', '.join(lacking)}")
    return ". ".join(sentences) + "."


def numbers(answer: Answer) -> str:
    """Returns the mean, its interval and the bound.

    Example:
        >>> numbers(Answer("", "", YES, 0.02, 0.01, 0.03, 0.0, 0.004, 0.01, 10))
        '+0.0200 [+0.0100, +0.0300] against 0, p = 0.004, 10 splits'
    """
    if math.isnan(answer.mean):
        return "–"
    ends = "" if math.isnan(answer.low) else f" [{answer.low:+.4f}, {answer.high:+.4f}]"
    p = "" if math.isnan(answer.p) else f", p = {answer.p:.2g}"
    return f"{answer.mean:+.4f}{ends} against {answer.bound:g}{p}, {answer.splits} splits"


Floats = NDArray[np.float64]
Result = Mapping[str, Any]


class Results:
    """The results of methods and arms, by suite, variant and name."""

    def __init__(self, progress: Sequence[Progress]) -> None:
        """Reads the final cells of the methods and arms that lack none."""
        self.found: dict[tuple[str, str, str], list[Result]] = {}
        self.overlaps: dict[str, bool] = {}
        self.base: dict[str, str] = {}
        for one in progress:
            suite, name = one.group.suite, one.group.method.name
            self.base[suite.name] = suite.base
            self.overlaps[suite.name] = suite.splits == "folds"
            for variant in one.group.variants:
                results = [result for _, result in one.finals(variant)]
                known: list[Result] = [r for r in results if r is not None and "error" not in r]
                if known and len(known) == one.group.size.splits:
                    self.found[suite.name, variant, name] = known

    def key(self, question: Question, name: str) -> tuple[str, str, str]:
        """Returns suite, variant and name of a method or arm of a question."""
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
        return mean_of_known(values_of(results, metric, list(whole["clients"])), axis=1)

    def gap(self, question: Question, first: str, second: str) -> Floats:
        """Returns (S,) paired differences."""
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
        """Returns (S,) values of a key of the memberships."""
        memberships = [r.get("memberships") for r in self.of(question, name)]
        key = question.given["what"]
        known = [float(m[key]) for m in memberships if m is not None and m.get(key) is not None]
        if not known:
            raise KeyError(f"{key} of the memberships of {name}")
        return np.array(known, dtype=float)

    def overlap(self, question: Question, name: str) -> float:
        """Test patients per training patient where splits are of the same patients; else 0."""
        if not self.overlaps[question.suite]:
            return 0.0
        return overlap_of([r for r in self.of(question, name) if "patients" in r])


def answer(question: Question, results: Results) -> Answer:
    """Answers a question by its own p-value, not yet corrected."""
    try:
        if question.kind == "peak":
            return _peak(question, results)
        values, bound, sign, first = _values(question, results)
        where, overlap = results.place(question, first), results.overlap(question, first)
    except KeyError as error:
        return Answer(question.asks, question.suite, note=f"lacks {error.args[0]}")
    return _held(question.asks, where, values, bound, sign, overlap)


def _values(question: Question, results: Results) -> tuple[Floats, float, int, str]:
    """The number of every split, its bound, which side is yes, and a name that it is of."""
    q, kind = question.given, question.kind
    if kind == "better":
        return results.gap(question, q["better"], q["than"]), float(q.get("by", 0)), 1, q["better"]
    if kind == "as_good":
        gap = results.gap(question, q["as_good"], q["as"])
        return gap, -float(q.get("within", 0)), 1, q["as_good"]
    if kind == "widens":
        gaps = [results.gap(question, *q[key]) for key in ("widens", "over")]
        splits = min(map(len, gaps))
        return gaps[0][:splits] - gaps[1][:splits], 0.0, 1, q["widens"][0]
    if kind == "saves":
        sent, other = results.sent(question, q["saves"]), results.sent(question, q["of"])
        splits = min(len(sent), len(other))
        return 1 - sent[:splits] / other[:splits], float(q.get("share", 0)), 1, q["saves"]
    side = 1 if "at_least" in q else -1
    values = results.recovered(question, q["recovers"])
    return values, float(q.get("at_least", q.get("at_most"))), side, q["recovers"]


def _held(asks: str, where: str, values: Floats, bound: float, sign: int, overlap: float) -> Answer:
    gap = difference((values - bound).tolist(), overlap, LEVEL)
    mean, low, high = (end + bound for end in gap[:3])
    held = (mean, low, high, bound, gap.p, gap.detectable, len(values))
    return Answer(asks, where, _word(gap.mean * sign, gap.p), *held)


def _word(excess: float, p: float) -> str:
    if math.isnan(p) or p >= 1 - LEVEL:
        return UNKNOWN
    return YES if excess > 0 else NO


def _peak(question: Question, results: Results) -> Answer:
    """One must be better than each end: its larger p, times how many there are to choose from."""
    inner, ends = question.given["peak"], question.given["above"]

    def against(name: str, end: str) -> Answer:
        gap, overlap = results.gap(question, name, end), results.overlap(question, name)
        return _held(question.asks, results.place(question, name), gap, 0.0, 1, overlap)

    table = {name: [against(name, end) for end in ends] for name in inner}
    larger = {n: max(a.p if a.mean > 0 else 1.0 for a in row) for n, row in table.items()}
    best = min(inner, key=lambda n: (larger[n], -min(a.mean for a in table[n])))
    nearest = min(table[best], key=lambda a: a.mean)
    answered = replace(nearest, note=f"{best}, against {ends[table[best].index(nearest)]}")
    p = min(1.0, larger[best] * len(inner))
    if p < 1 - LEVEL:
        return replace(answered, answer=YES, p=p)
    # Not so where one end is better than all of them.
    each = [max(r[i].p if r[i].mean < 0 else 1.0 for r in table.values()) for i in range(len(ends))]
    if min(each) < 1 - LEVEL:
        return replace(answered, answer=NO, p=min(each))
    return replace(answered, answer=UNKNOWN, p=p)


def corrected(answers: Sequence[Answer]) -> tuple[Answer, ...]:
    """Corrects the p-values of the questions of a claim, and what they say."""
    answered = []
    for one, p in zip(answers, holm([a.p for a in answers]), strict=True):
        word = UNKNOWN if one.answer in (YES, NO) and not p < 1 - LEVEL else one.answer
        answered.append(replace(one, p=p, answer=word))
    return tuple(answered)


def verdict(answers: Sequence[Answer]) -> str:
    """Sums up the answers of a claim.

    Example:
        >>> yes, no, open = (Answer("", "", word) for word in (YES, NO, UNKNOWN))
        >>> verdict([yes, yes]), verdict([yes, no]), verdict([no, open]), verdict([open])
        ('confirmed', 'qualified', 'refuted', 'cannot tell')
    """
    words = {a.answer for a in answers} - {MISSING}
    if not words:
        return MISSING
    if words == {YES}:
        return "confirmed"
    if YES in words:
        return "qualified"
    return "refuted" if NO in words else "cannot tell"


def judge_claims(progress: Sequence[Progress], folder: Path = CLAIMS) -> list[JudgedClaim]:
    """Judges all claims for which there are results."""
    results, judged = Results(progress), []
    for claim in read_claims(folder):
        parts = corrected([answer(q, results) for q in claim.parts])
        reasons = corrected([answer(q, results) for q in claim.reasons])
        if (word := verdict(parts)) != MISSING:
            judged.append(JudgedClaim(claim.name, claim.claim, claim.source, word, parts, reasons))
    return judged


def main() -> None:
    """Judges the claims by the cells of a benchmark, and adds them to its findings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="the folder of the benchmark")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--paths", nargs="*", default=[], help="real data, SUITE=FOLDER")
    asked = parser.parse_args()
    paths = dict(one.split("=", 1) for one in asked.paths)
    chosen, methods, arms = wanted_of("all", None, asked.size, True)
    root = str(Path("data").resolve())
    every, _ = groups(chosen, methods, asked.size, "all", paths, [], root, arms, named=False)
    judged = judge_claims(found_groups(every, asked.out))
    for one in judged:
        print(sentence(one))
        for answered in (*one.parts, *one.reasons):
            note = f" ({answered.note})" * bool(answered.note)
            print(f"  {answered.answer}: {answered.where}, {answered.asks}{note}")
            print(f"    {numbers(answered)}")
    file = asked.out / "report" / "findings.json"
    findings = json.loads(file.read_text(encoding="utf-8"))
    write_json(file, findings | {"claims": {one.name: asdict(one) for one in judged}})


if __name__ == "__main__":
    main()
