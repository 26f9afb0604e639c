"""What each hospital brings the others, and what a hospital outside gets: a pilot without each.

On every division of the training and validation patients one model is trained with all hospitals
and one without each, or one of every set of hospitals. All are tested on the same patients, so that
differences are paired.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from medfed.benchmark import runner
from medfed.benchmark.advice import ALL, ALONE, absences, pilot_data, pilot_folder, pilots
from medfed.common.console import in_markdown, say, short, wide_console
from medfed.common.scores import label_of, mean_of_known, number, smaller_is_better
from medfed.common.tables import Table
from medfed.functional.statistics import LEVEL, Difference, Floats, difference, holm, shapley
from medfed.reports.sentences import lines_of, signed
from medfed.reports.tasks import overlap_of
from medfed.standalone.errors import ConfigError, MedfedError
from medfed.standalone.files import write_json, write_text, writing

MOST = 8
"""Hospitals of which every set is trained, at most: 255 sets."""
_HEAD = ("hospital", "seen", "unseen", "alone", "gives the others", "p (Holm)", "verdict")
_TEMPLATES = Path(__file__).parent / "templates"
Results = Mapping[str, Sequence[Mapping[str, Any]]]
"""By variant, a result for each division."""


@dataclass(frozen=True)
class Member:
    """A hospital; scores are means over divisions."""

    seen: float  # its score by the model of all hospitals
    unseen: float  # by the model of the others; NaN where the method gives outsiders none.
    alone: float  # by its own model
    gives: Difference  # how much better the others are with it, larger is better
    p: float  # Holm's p-value of that among the hospitals
    # Its Shapley value of the mean over hospitals; None: not asked for.
    share: Difference | None = None

    @property
    def verdict(self) -> str:
        """What it does to the others."""
        if not self.p < 1 - LEVEL:
            return "cannot tell"
        return "helps the others" if self.gives.mean > 0 else "harms the others"


@dataclass(frozen=True)
class Answer:
    """What the pilot says."""

    method: str  # the method
    metric: str  # the metric of all numbers
    members: Mapping[str, Member]  # the hospitals, by name
    # How much better hospitals are by the model of the others than by that of all.
    outside: Difference
    largest: float  # of the changes of the others' mean without any one hospital, at 95 %
    # How many pairs of Shapley values differ, of how many; None: not asked for.
    apart: tuple[int, int] | None

    @property
    def table(self) -> Table:
        """A line per hospital, and their mean."""
        rows = []
        for name, one in self.members.items():
            scores = map(number, (one.seen, one.unseen, one.alone))
            row = [name, *scores, signed(one.gives), f"{one.p:.3f}", one.verdict]
            rows.append([*row, *([] if one.share is None else [signed(one.share)])])
        each = np.array([(one.seen, one.unseen, one.alone) for one in self.members.values()])
        means = map(number, mean_of_known(each, 0).tolist())
        rows.append(["mean", *means, *[""] * (len(rows[0]) - 4)])
        head = [*_HEAD, *["Shapley value"] * (self.apart is not None)]
        return Table.of(head, rows, prose=(0, 6))

    def named(self, verdict: str) -> list[str]:
        """The hospitals with a verdict."""
        return [short(name) for name, one in self.members.items() if one.verdict == verdict]


def answer_of(
    method: str, absent: Mapping[str, frozenset[str]], results: Results, alone: Results
) -> Answer:
    """Compares the models of each division, of the method and of local training."""
    whole = results[ALL]
    metric, clients = whole[0]["metric"][0], [*whole[0]["clients"]]
    sign, overlap = (-1 if smaller_is_better(metric) else 1), overlap_of(whole)

    def scores(of: Sequence[Mapping[str, Any]]) -> Floats:  # (S, N), larger is better
        every = [{**result["clients"], **result["outside"]} for result in of]
        values = [[known.get(c, {}).get(metric, np.nan) for c in clients] for known in every]
        return sign * np.array(values, dtype=float)

    by_absent = {absent[variant]: scores(of) for variant, of in results.items()}
    as_members, by_themselves = by_absent[frozenset()], scores(alone[ALL])
    unseen = np.stack([by_absent[frozenset([c])][:, n] for n, c in enumerate(clients)], axis=1)
    gains = [
        mean_of_known(np.delete(as_members - by_absent[frozenset([c])], n, axis=1), 1).tolist()
        for n, c in enumerate(clients)
    ]
    shares, apart = dict[str, Difference](), None
    if len(by_absent) == 2 ** len(clients) - 1:
        worth = {frozenset(clients) - a: mean_of_known(v, 1) for a, v in by_absent.items()}
        nobody = [next(iter(result["constant"].values())) for result in whole]
        constant = np.array([[of[c] for c in clients] for of in nobody], dtype=float)
        worth[frozenset()] = sign * mean_of_known(constant, 1)
        each = shapley(worth)
        shares = {c: difference(each[c].tolist(), overlap) for c in clients}
        pairs = [each[a] - each[b] for a, b in combinations(clients, 2)]
        ps = holm([difference(pair.tolist(), overlap).p for pair in pairs])
        apart = sum(p < 1 - LEVEL for p in ps), len(ps)
    means = (sign * mean_of_known(part, 0) for part in (as_members, unseen, by_themselves))
    differences = [difference(gain, overlap) for gain in gains]
    columns = zip(clients, *means, differences, holm([one.p for one in differences]), strict=True)
    members = {
        c: Member(float(a), float(b), float(d), one, p, shares.get(c))
        for c, a, b, d, one, p in columns
    }
    # At once for all hospitals, by Bonferroni.
    ends = [difference(gain, overlap, 1 - (1 - LEVEL) / len(gains)) for gain in gains]
    largest = float(np.max([[-one.low, one.high] for one in ends]))  # NaN: it is not known
    outside = difference(mean_of_known(unseen - as_members, 1).tolist(), overlap)
    return Answer(method, metric, members, outside, largest, apart)


def sentences_of(answer: Answer) -> list[str]:
    """Returns the title, and what a board should know."""
    return lines_of("without.md", _TEMPLATES, answer=answer, label=label_of(answer.metric))


def check_count(count: int, sets: bool) -> None:
    """Refuses too few hospitals, or too many for all their sets."""
    if count < 3:
        raise ConfigError(f"without=each needs three hospitals or more; the data have {count}.")
    if sets and count > MOST:
        raise ConfigError(
            f"without=sets trains every set of hospitals, of {MOST} at most, and the data have "
            f"{count}; set without=each."
        )


def advise_without(
    overrides: Sequence[str],
    method: str,
    *,
    sets: bool = False,
    folds: int = 5,
    repeats: int = 2,
    rounds: int | None = None,
    out: Path = Path("outputs/advice"),
    workers: int = 1,
) -> tuple[Answer, Path]:
    """Runs the pilot's cells that are missing, then writes and prints the answer."""
    question, out = pilot_data(overrides, folds, repeats), out.expanduser()
    check_count(len(question.patients), sets)
    with writing(out, "choose another out=FOLDER"):
        alone, pilot = pilots(question, [ALONE, method], out, rounds)
        group = absences(pilot, [*question.patients], sets)
        alone = replace(absences(alone, [*question.patients], False), variants=(ALL,))
        progress = runner.computed([group, alone], out, workers)
    results = [
        {variant: [r or {} for _, r in one.finals(variant)] for variant in one.group.variants}
        for one in progress
    ]
    for variant, result in ((v, r) for of in results for v, each in of.items() for r in each):
        if why := result.get("error") or result.get("failed"):
            raise MedfedError(f"The pilot's run {variant} cannot be used: {why}")
        if sets and len(result["outside"]) < len(group.absent[variant]):
            raise ConfigError(
                f"without=sets needs a method that gives hospitals without patients a model, which "
                f"{method} does not; choose methods=[fedavg], or without=each."
            )
    answer = answer_of(method, group.absent, *results)
    folder = out / pilot_folder(question, [group, alone])
    title, *sentences = sentences_of(answer)
    with writing(folder, "choose another out=FOLDER"):
        page = [f"# {title}", "", *answer.table.markdown(), ""]
        page += [f"- {sentence}" for sentence in in_markdown(sentences)]
        write_text(folder / "without.md", "\n".join([*page, ""]))
        write_json(folder / "without.json", asdict(answer))
    wide_console().print(answer.table.printed(title))
    say(wide_console(), *sentences, f"Written: {folder / 'without.md'} and without.json")
    return answer, folder
