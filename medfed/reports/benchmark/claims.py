"""Claims judged by what a benchmark has measured: each in words, with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from medfed.functional.paired import difference, holm
from medfed.reports.benchmark.measured import Floats, Measured
from medfed.reports.benchmark.questions import Claim, Question, read_claims
from medfed.reports.benchmark.tables import table, words
from medfed.run.benchmark.runner import Progress

LEVEL = 0.95
YES, NO, UNKNOWN, MISSING = "yes", "no", "cannot tell", "not measured"


@dataclass(frozen=True)
class Answer:
    """What was found for a question.

    Attributes:
        asks: The statement.
        where: Suite and variant.
        answer: ``yes``, ``no``, ``cannot tell`` or ``not measured``.
        mean: What was measured, mean over splits.
        low: The lower end of its 95 % interval.
        high: The upper end.
        bound: What it must exceed; of ``at_most``, what it must stay below.
        p: Two-sided p-value against the bound, Holm's among the questions of its kind in the claim.
        visible: How far from the bound it must be to be seen, alone, in 8 of 10 repetitions.
        splits: How many.
        note: What is missing, or which of several it was.
    """

    asks: str
    where: str
    answer: str = MISSING
    mean: float = math.nan
    low: float = math.nan
    high: float = math.nan
    bound: float = 0.0
    p: float = math.nan
    visible: float = math.nan
    splits: int = 0
    note: str = ""


@dataclass(frozen=True)
class JudgedClaim:
    """A claim with its answers.

    Attributes:
        claim: The claim.
        verdict: ``confirmed``, ``qualified``, ``refuted``, ``cannot tell`` or ``not measured``.
        parts: Answers of what it rests on.
        reasons: Answers of what asks why.
    """

    claim: Claim
    verdict: str
    parts: tuple[Answer, ...]
    reasons: tuple[Answer, ...] = ()

    def plain(self) -> dict[str, Any]:
        """Returns it as JSON holds it."""
        return {
            "claim": self.claim.claim,
            "source": self.claim.source,
            "verdict": self.verdict,
            "parts": [asdict(a) for a in self.parts],
            "reasons": [asdict(a) for a in self.reasons],
        }


def answer(question: Question, measured: Measured) -> Answer:
    """Answers a question by its own p-value, not yet corrected.

    Args:
        question: The question.
        measured: What there is.
    """
    try:
        if question.kind == "peak":
            return _peak(question, measured)
        values, bound, sign, first = _values(question, measured)
        where, overlap = measured.place(question, first), measured.overlap(question, first)
    except KeyError as error:
        return Answer(question.asks, question.suite, note=f"lacks {error.args[0]}")
    return _held(question.asks, where, values, bound, sign, overlap)


def _values(question: Question, measured: Measured) -> tuple[Floats, float, int, str]:
    """The number of every split, its bound, which side is yes, and a name that it is of."""
    q, kind = question.given, question.kind
    if kind == "better":
        return measured.gap(question, q["better"], q["than"]), float(q.get("by", 0)), 1, q["better"]
    if kind == "as_good":
        gap = measured.gap(question, q["as_good"], q["as"])
        return gap, -float(q.get("within", 0)), 1, q["as_good"]
    if kind == "widens":
        gaps = [measured.gap(question, *q[key]) for key in ("widens", "over")]
        splits = min(map(len, gaps))
        return gaps[0][:splits] - gaps[1][:splits], 0.0, 1, q["widens"][0]
    if kind == "saves":
        own, other = measured.sent(question, q["saves"]), measured.sent(question, q["of"])
        splits = min(len(own), len(other))
        return 1 - own[:splits] / other[:splits], float(q.get("share", 0)), 1, q["saves"]
    side = 1 if "at_least" in q else -1
    values = measured.recovered(question, q["recovers"])
    return values, float(q.get("at_least", q.get("at_most"))), side, q["recovers"]


def _held(asks: str, where: str, values: Floats, bound: float, sign: int, overlap: float) -> Answer:
    found = difference((values - bound).tolist(), overlap, LEVEL)
    over = replace(
        Answer(asks, where), mean=found.mean + bound, low=found.low + bound,
        high=found.high + bound, bound=bound, p=found.p, visible=found.visible, splits=len(values),
    )  # fmt: skip
    return replace(over, answer=_word(found.mean * sign, found.p))


def _word(excess: float, p: float) -> str:
    if math.isnan(p) or p >= 1 - LEVEL:
        return UNKNOWN
    return YES if excess > 0 else NO


def _peak(question: Question, measured: Measured) -> Answer:
    """One must be better than each end: its larger p, times how many there are to choose from."""
    inner, ends = question.given["peak"], question.given["above"]

    def against(name: str, end: str) -> Answer:
        gap, overlap = measured.gap(question, name, end), measured.overlap(question, name)
        return _held(question.asks, measured.place(question, name), gap, 0.0, 1, overlap)

    table = {name: [against(name, end) for end in ends] for name in inner}
    larger = {n: max(a.p if a.mean > 0 else 1.0 for a in row) for n, row in table.items()}
    best = min(inner, key=lambda n: (larger[n], -min(a.mean for a in table[n])))
    nearest = min(table[best], key=lambda a: a.mean)
    told = replace(nearest, note=f"{best}, against {ends[table[best].index(nearest)]}")
    p = min(1.0, larger[best] * len(inner))
    if p < 1 - LEVEL:
        return replace(told, answer=YES, p=p)
    # Not so where one end is better than all of them.
    each = [max(r[i].p if r[i].mean < 0 else 1.0 for r in table.values()) for i in range(len(ends))]
    if min(each) < 1 - LEVEL:
        return replace(told, answer=NO, p=min(each))
    return replace(told, answer=UNKNOWN, p=p)


def corrected(answers: Sequence[Answer]) -> tuple[Answer, ...]:
    """Corrects the p-values of the questions of a claim, and what they say."""
    found = []
    for one, p in zip(answers, holm([a.p for a in answers]), strict=True):
        word = UNKNOWN if one.answer in (YES, NO) and not p < 1 - LEVEL else one.answer
        found.append(replace(one, p=p, answer=word))
    return tuple(found)


def verdict(answers: Sequence[Answer]) -> str:
    """Sums up what a claim rests on.

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


def judge_claims(
    progress: Sequence[Progress], folders: Sequence[str | Path] = ()
) -> list[JudgedClaim]:
    """Judges all claims of which something was measured.

    Args:
        progress: Methods and arms.
        folders: See :func:`read_claims`.
    """
    measured, found = Measured(progress), []
    for claim in read_claims(folders):
        parts = corrected([answer(q, measured) for q in claim.parts])
        reasons = corrected([answer(q, measured) for q in claim.reasons])
        if (word := verdict(parts)) != MISSING:
            found.append(JudgedClaim(claim, word, parts, reasons))
    return found


def sentence(found: JudgedClaim) -> str:
    """Returns the verdict in words: what holds, what does not, and what cannot be told."""
    told = [f"{found.claim.claim.rstrip('.')}. {found.verdict.capitalize()}"]
    heads = ((YES, "Holds"), (NO, "Does not hold"), (UNKNOWN, "Cannot tell"))
    for word, head in heads:
        places = [f"{a.where}, {a.asks}" for a in found.parts if a.answer == word]
        if places and found.verdict == "qualified":
            told.append(f"{head}: {'; '.join(places)}")
    if lacking := dict.fromkeys(a.where for a in found.parts if a.answer == MISSING):
        told.append(f"Not measured: on {', '.join(lacking)}")
    return ". ".join(told) + "."


def rows(found: JudgedClaim) -> list[tuple[str, ...]]:
    """Returns a line for each question: what is asked, where, the answer, the number."""
    return [
        (kind, a.where, a.asks + (f" ({a.note})" if a.note else ""), a.answer, number(a))
        for kind, answers in (("part", found.parts), ("why", found.reasons))
        for a in answers
    ]


def number(found: Answer) -> str:
    """Returns the mean, its interval and the bound.

    Example:
        >>> number(Answer("", "", YES, 0.02, 0.01, 0.03, 0.0, 0.004, 0.01, 10))
        '+0.0200 [+0.0100, +0.0300] against 0, p = 0.004, 10 splits'
    """
    if math.isnan(found.mean):
        return "–"
    ends = "" if math.isnan(found.low) else f" [{found.low:+.4f}, {found.high:+.4f}]"
    p = "" if math.isnan(found.p) else f", p = {found.p:.2g}"
    return f"{found.mean:+.4f}{ends} against {found.bound:g}{p}, {found.splits} splits"


HEAD = ("", "where", "statement", "answer", "mean over splits [95 %], p by Holm")


def markdown(claims: Sequence[JudgedClaim]) -> list[str]:
    """Returns the section of a report in Markdown."""
    lines = ["## Claims", ""] if claims else []
    for one in claims:
        lines += [f"**{one.claim.claim}** {one.verdict.capitalize()}. ({one.claim.source})", ""]
        lines += [f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
        lines += [f"| {' | '.join(row)} |" for row in rows(one)] + [""]
    return lines


def section(claims: Sequence[JudgedClaim]) -> str:
    """Returns the section of the page, in HTML; empty without claims."""
    if not claims:
        return ""
    told = ['<section id="claims"><h2>Claims</h2>']
    for one in claims:
        told += [
            f"<h3>{escape(one.claim.claim)} <em>{one.verdict.capitalize()}.</em></h3>",
            f'<p class="note">{escape(one.claim.source)}</p>',
            table(HEAD, ([words(cell) for cell in row] for row in rows(one))),
        ]
    return "".join(told) + "</section>"
