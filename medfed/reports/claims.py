"""Judged claims in words: whether each holds, where, and by which numbers."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from medfed.reports.tables import Table

YES, NO, UNKNOWN, MISSING = "yes", "no", "cannot tell", "not measured"


@dataclass(frozen=True)
class Answer:
    """The answer to a question.

    Attributes:
        asks: The statement.
        where: Suite and variant.
        answer: ``yes``, ``no``, ``cannot tell`` or ``not measured``.
        mean: Mean over splits.
        low: The lower end of its 95 % interval.
        high: The upper end.
        bound: The number that it must exceed; with ``at_most``, stay below.
        p: Two-sided p-value against the bound, Holm's among the questions of its kind in the claim.
        detectable: The smallest distance from the bound that is detected with 80 % power, alone.
        splits: How many.
        note: The result that is missing, or the method that decided.
    """

    asks: str
    where: str
    answer: str = MISSING
    mean: float = math.nan
    low: float = math.nan
    high: float = math.nan
    bound: float = 0.0
    p: float = math.nan
    detectable: float = math.nan
    splits: int = 0
    note: str = ""


@dataclass(frozen=True)
class JudgedClaim:
    """A claim with its answers.

    Attributes:
        name: Of the claim.
        claim: The statement.
        source: Who makes it, and where.
        verdict: ``confirmed``, ``qualified``, ``refuted``, ``cannot tell`` or ``not measured``.
        parts: The answers that decide the verdict.
        reasons: The answers of experiments that ask why.
    """

    name: str
    claim: str
    source: str
    verdict: str
    parts: tuple[Answer, ...]
    reasons: tuple[Answer, ...] = ()

    def plain(self) -> dict[str, Any]:
        """Returns it as JSON holds it."""
        return {key: value for key, value in asdict(self).items() if key != "name"}

    def table(self) -> Table:
        """Returns a line for each question: the statement, its task, the answer, the number."""
        return Table.of(
            ("", "where", "statement", "answer", "mean over splits [95 %], p by Holm"),
            [
                (kind, a.where, a.asks + (f" ({a.note})" if a.note else ""), a.answer, number(a))
                for kind, answers in (("part", self.parts), ("why", self.reasons))
                for a in answers
            ],
            prose=range(5),
        )


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


def number(answer: Answer) -> str:
    """Returns the mean, its interval and the bound.

    Example:
        >>> number(Answer("", "", YES, 0.02, 0.01, 0.03, 0.0, 0.004, 0.01, 10))
        '+0.0200 [+0.0100, +0.0300] against 0, p = 0.004, 10 splits'
    """
    if math.isnan(answer.mean):
        return "–"
    ends = "" if math.isnan(answer.low) else f" [{answer.low:+.4f}, {answer.high:+.4f}]"
    p = "" if math.isnan(answer.p) else f", p = {answer.p:.2g}"
    return f"{answer.mean:+.4f}{ends} against {answer.bound:g}{p}, {answer.splits} splits"
