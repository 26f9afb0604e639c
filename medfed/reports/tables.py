"""Tables of a report.

The page and the LaTeX file have the same tables, see ``templates``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from medfed.common.console import size
from medfed.common.scores import CHOSEN, WITHOUT_SMALL, mean_of_known, over_seeds
from medfed.common.scores import number as score
from medfed.common.tables import Cell, Table, number
from medfed.federation.card import REFERENCES
from medfed.reports.runs import Runs, metrics_of, value_at, with_constants
from medfed.reports.tasks import Task
from medfed.reports.verdicts import UNDECIDED, Verdict, Verdicts

_SHORT = {"local": "local", "fedavg": "FedAvg"}


def _between(value: float, low: float, high: float, sign: str = "", word: str = "") -> Cell:
    ends = "" if math.isnan(low) else f"[{low:{sign}.4f}, {high:{sign}.4f}]"
    return number(value, sign=sign, word=word)._replace(ends=ends, low=low, high=high)


def _share(v: Verdict) -> Cell:
    if v.harm is None:
        return Cell()
    ends = "" if math.isnan(v.harm.low) else f"[{v.harm.low:.0%}, {v.harm.high:.0%}]"
    return Cell("–" if math.isnan(v.harm.share) else f"{v.harm.share:.0%}", ends, "", v.harm.share)


# The columns of texts and of papers; the page has all.
BRIEF = (
    *("method", "harmed", WITHOUT_SMALL, *CHOSEN, "mean", "worst", "decile"),
    *("− local", "− FedAvg", "p (Holm)", "sent"),
)
PAPER = tuple(title for title in BRIEF if title not in ("decile", "sent"))


def methods_table(task: Task, verdicts: Verdicts) -> Table:
    """Returns a line for each method, best first."""
    every = [v.scores for v in verdicts.values()]
    chosen = [w for w in CHOSEN if not all(math.isnan(s.chosen_mean(w)) for s in every)]
    references = [r for r in REFERENCES if any(r in v.against for v in verdicts.values())]
    means = [WITHOUT_SMALL, *chosen, "mean"] if task.small else ["mean", *chosen]
    head = ["method", "harmed", *means, "worst", "decile"]
    for reference in references:
        head += [f"− {_SHORT[reference]}", "p (Holm)", "detects"]
    head += ["sent", "passes"]
    rows = []
    for name in verdicts.by_mean:
        v = verdicts[name]
        others = [v.scores.chosen_mean(words) for words in chosen]
        others += [*[v.scores.of_all] * bool(task.small), v.worst, v.decile]
        cells = [Cell(name), _share(v), _between(*task.interval(v.mean))]
        cells += [number(task.raw(value)) for value in others]
        for reference in references:
            if (a := v.against.get(reference)) is None:
                cells += [Cell()] * 3
                continue
            d = a.difference
            cells.append(_between(d.mean, d.low, d.high, "+", a.verdict))
            cells += [number(a.p, 3), number(d.detectable)]
        sent = sum(v.scores.sent)
        cells += [Cell(size(round(sent)), value=sent), number(v.scores.passes, 2)]
        rows.append(cells)
    return Table(head, rows, prose=(0,))


def hospitals_table(task: Task, verdicts: Verdicts) -> Table | None:
    """Returns the patients of each hospital, its score alone, and its gain with each method."""
    # Without local training it has the scores of all methods. The longer of hospitals and
    # lines runs downwards.
    if not task.clients:
        return None
    if not task.same:
        return Table((), ())
    everyone, known = (*task.clients, *task.small), task.counts
    parts = next(iter(known.values()), {})
    rows = [
        [Cell(f"{part} patients"), *(number(known[c][part], 0) for c in everyone)] for part in parts
    ]
    if task.fewest:
        pairs = (task.fewest[client] for client in everyone)
        least = (f"{count}{what.removeprefix('test patients')}" for count, what in pairs)
        rows.append([Cell("least tested, all splits"), *map(Cell, least)])
    for name in ("local", *(n for n in verdicts.by_mean if n != "local")):
        if name not in verdicts:
            continue
        harm, values = verdicts[name].harm, mean_of_known(verdicts[name].scores.values, axis=0)
        if harm is None:
            cells = [number(task.raw(float(value)), 3) for value in values]
        else:
            gains = [harm.gains[client] for client in task.clients]
            words = ("" if gain.verdict == UNDECIDED else gain.verdict for gain in gains)
            means = (gain.difference.mean for gain in gains)
            cells = [number(mean, 3, "+", word) for mean, word in zip(means, words, strict=True)]
        rows.append([Cell(name), *cells, *[Cell("too small")] * len(task.small)])
    return Table(("method", *everyone), rows, (0,), "cells").upright("hospital")


def means_table(task: Task, methods: Runs) -> Table:
    """Returns means of all metrics over hospitals and runs, by method and constant predictor."""
    # Beside them stand the means without the hospitals that are too small to decide, and
    # those of what each hospital's validation cases have chosen: probabilities recalibrated,
    # thresholds.
    plain = [metric for metric in metrics_of(methods, task.metric) if "/" not in metric]
    rows = []
    for name, summaries in with_constants(methods).items():
        everyone = [*summaries[0]["clients"]]
        kinds = [("", "", everyone), *[(", without small", "", task.clients)] * bool(task.small)]
        chosen = ((f", {words}", ending, everyone) for words, ending in CHOSEN.items())
        for words, ending, clients in (*kinds, *chosen):
            each = [
                [value_at(s, metric + ending, "mean", clients) for s in summaries]
                for metric in plain
            ]
            texts = [score(over_seeds(values)[0]) for values in each]
            if any(text != "–" for text in texts):
                rows.append([name + words, *texts])
    return Table.of(("method", *(n.replace("_", " ") for n in plain)), rows, (0,)).upright("metric")


_HOSPITALS = 12  # lines that a terminal and a text have room for; the page has all


def of_task(task: Task, verdicts: Verdicts) -> dict[str, Table]:
    """Returns the tables of terminals and texts, by title."""
    apart = any(v.decile != v.worst for v in verdicts.values())  # else one column says it
    brief = [column for column in BRIEF if apart or column != "decile"]
    tables = {f"{task.label}: {task.metric}": methods_table(task, verdicts).only(brief)}
    hospitals = hospitals_table(task, verdicts)
    if hospitals is not None and hospitals.rows and len(hospitals.rows) <= _HOSPITALS:
        tables[f"{task.label}, by hospital"] = hospitals.only(hospitals.head)
    return tables


def settings_table(tasks: Iterable[tuple[Task, Mapping[str, Verdict]]]) -> Table:
    """Returns the settings of each method, and the hashes of its cells."""
    rows = []
    for task, name, scores in ((t, n, v.scores) for t, judged in tasks for n, v in judged.items()):
        setting = " ".join(f"{k}={v:g}" for k, v in scores.setting.items()) or "defaults"
        keys = " ".join(k[:12] if len(k) == 64 else k for k in scores.keys)
        rows.append((task.name, name, setting, keys))
    return Table.of(("task", "method", "setting", "cells, by split"), rows, prose=(0, 1, 2, 3))
