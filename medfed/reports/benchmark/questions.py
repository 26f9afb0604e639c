"""Claims as they are written: a yaml each in ``configs/claims``.

A claim rests on ``parts``, and ``reasons`` are experiments that ask why. Each is a question: a
number per split, held against a bound.

========================================  =========================================================
``better: A, than: B, by: b``             A - B is above b (0 unless told)
``as_good: A, as: B, within: m``          A - B is above -m
``saves: A, of: B, share: s, way: up``    A sends at least the share s fewer bytes than B
``widens: [A, B], over: [C, D]``          A - B is above C - D
``recovers: A, what: KEY, at_least: v``   what was planted is found (or ``at_most: v``)
``peak: [A, B], above: [C, D]``           some of the first are better than each of the last
========================================  =========================================================

A, B, … are methods and arms of the suite; ``A@variant`` is on another variant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from medfed.common.errors import ConfigError, did_you_mean
from medfed.run.benchmark.suite import yamls_of

KINDS = {
    "better": {"than", "by"},
    "as_good": {"as", "within"},
    "saves": {"of", "share", "way"},
    "widens": {"over"},
    "recovers": {"what", "at_least", "at_most"},
    "peak": {"above"},
}
_COMMON = {"suite", "variant", "metric", "asks"}


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        kind: One of the table above.
        suite: The suite.
        asks: The statement that is true if the answer is yes.
        given: What its yaml says.
    """

    kind: str
    suite: str
    asks: str
    given: Mapping[str, Any]


@dataclass(frozen=True)
class Claim:
    """A statement, what it rests on, and experiments that ask why.

    Attributes:
        name: The name of its file.
        claim: The statement.
        source: Who makes it, and where.
        parts: What it rests on.
        reasons: What asks why.
    """

    name: str
    claim: str
    source: str
    parts: tuple[Question, ...]
    reasons: tuple[Question, ...] = ()


def read_claims(folders: Sequence[str | Path] = ()) -> list[Claim]:
    """Reads all claims.

    Args:
        folders: Further folders that hold ``configs/claims``, or ``claims``.

    Raises:
        ConfigError: If one cannot be read; the file and what is wrong are named.
    """
    found = []
    for file in yamls_of("claims", folders):
        try:
            content = yaml.safe_load(file.read_text(encoding="utf-8"))
            asked = {n: tuple(map(_question, content.get(n) or ())) for n in ("parts", "reasons")}
            if unknown := sorted(set(content) - {"claim", "source", "parts", "reasons"}):
                raise ValueError(f"it has no key {unknown[0]!r}")
            if not asked["parts"]:
                raise ValueError("it has no parts")
            found.append(Claim(file.stem, content["claim"], content.get("source", ""), **asked))
        except (OSError, KeyError, AttributeError, TypeError, ValueError, yaml.YAMLError) as error:
            told = " ".join(str(error).split()).rstrip(".")
            if isinstance(error, KeyError):
                told = f"it lacks the key {told}"
            raise ConfigError(f"The claim {file} cannot be read: {told}.") from error
    return found


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
    return Question(kind, given["suite"], given.get("asks") or _words(kind, given), given)


def _words(kind: str, q: Mapping[str, Any]) -> str:
    metric = f" ({q['metric']})" if "metric" in q else ""
    if kind == "better":
        by = f" by more than {q['by']:g}" if q.get("by") else ""
        return f"{q['better']} is better than {q['than']}{by}{metric}"
    if kind == "as_good":
        return f"{q['as_good']} is at most {q.get('within', 0):g} worse than {q['as']}{metric}"
    if kind == "saves":
        way = {"up": " up", "down": " down"}.get(q.get("way", "both"), "")
        share = f"at least {q.get('share', 0):.0%} fewer"
        return f"{q['saves']} sends {share} bytes{way} than {q['of']}"
    if kind == "widens":
        (a, b), (c, d) = q["widens"], q["over"]
        return f"{a} − {b} is above {c} − {d}{metric}"
    if kind == "peak":
        return f"one of {', '.join(q['peak'])} is better than {' and '.join(q['above'])}{metric}"
    side = "at least" if "at_least" in q else "at most"
    return f"{q['recovers']}: {q['what']} is {side} {q.get('at_least', q.get('at_most')):g}"
