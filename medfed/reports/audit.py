"""The page of ``medfed audit`` and ``audit.json``; ``templates/audit.html`` has the tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from medfed.common.console import say, shown, wide_console
from medfed.common.files import write_json, write_text, writing
from medfed.common.scores import interval
from medfed.records.evaluations import Audit, Fingerprint, RowsFound
from medfed.reports.charts import Picture, Row, forest
from medfed.reports.page import rendered

_MOST = 40  # clients in a picture


def write_audit(audit: Audit, folder: Path) -> None:
    """Writes ``audit.html`` and ``audit.json``, and prints the sentences.

    Args:
        audit: What was measured.
        folder: A new or empty folder.
    """
    kept = {key: audit.summary[key] for key in ("name", "algorithm", "selected_round")}
    with writing(folder, "choose another out=FOLDER"):
        write_json(folder / "audit.json", {**asdict(audit), "summary": kept})
        write_text(folder / "audit.html", page(audit))
    say(wide_console(), *sentences(audit), *audit.notes, f"Page: {folder / 'audit.html'}")


def page(audit: Audit) -> str:
    """Returns the page as HTML that fetches nothing."""
    models = {
        model: [g for g in audit.guesses if g.model == model]
        for model in dict.fromkeys(g.model for g in audit.guesses)
    }
    pictures = {}
    for model, guesses in models.items():
        alike = [Row(shown(g.client), *g.auc) for g in guesses if not g.of_run][-_MOST:]
        pictures[model] = Picture(forest(alike, {"chance": 0.5}, "AUC"), f"From the {model}.")
    return rendered(
        "audit.html",
        audit=audit,
        sentences=sentences(audit),
        models=models,
        pictures=pictures,
        shown=shown,
        text=_text,
    )


def sentences(audit: Audit) -> list[str]:
    """Returns the answers in words: rows, membership, descriptions."""
    return [_about_rows(audit), *_about_members(audit), *map(_about, audit.fingerprints)]


def _about_rows(audit: Audit) -> str:
    if not audit.rows:
        return (
            f"The first layer is {audit.layer}, not a plain linear layer with a bias: rows do not "
            "follow exactly from its gradient. That is no protection: images can be approximated."
        )
    settings: dict[tuple[bool, int], list[RowsFound]] = {}
    for row in audit.rows:
        settings.setdefault((row.own, 0 if row.own else row.batch), []).append(row)
    counts = []
    for rows in settings.values():
        found, used = sum(row.found for row in rows), sum(row.used for row in rows)
        size = f"{rows[0].steps} steps with batches of {rows[0].batch}"
        counts.append(f"{found:,} of {used:,} ({size.replace('1 steps', '1 step')})")
    return (
        f"Training rows that follow from messages within {audit.tolerance:.2g} of their size: at "
        f"the run's settings {counts[0]}; of single steps {', '.join(counts[1:])}."
    )


def _about_members(audit: Audit) -> Iterator[str]:
    for model in dict.fromkeys(g.model for g in audit.guesses):
        alike = [g for g in audit.guesses if g.model == model and not g.of_run]
        whole, worst = alike[-1], max(alike, key=lambda g: (g.client != "all", g.auc[0]))
        verdict = "better than chance" if whole.auc[1] > 0.5 else "not shown to beat chance"
        yield (
            f"Who was in training, guessed from the {model}: AUC {_text(whole.auc)} over "
            f"{whole.patients} patients, {verdict} (0.5); at 1 % false positives "
            f"{_text(whole.hits)} of the members are recognised. Most exposed: "
            f"{shown(worst.client)}, AUC {_text(worst.auc)}, {worst.patients} patients."
        )


def _about(each: Fingerprint) -> str:
    beats = "is identifying" if each.rate[1] > 1 / each.clients else "is not shown to identify it"
    return (
        f"A client's {each.part} {beats}: from other patients of the same client it points to the "
        f"client in {_text(each.rate)} of the cases; chance is {1 / each.clients:.3f}."
    )


def _text(value: tuple[float, float, float]) -> str:
    return f"{value[0]:.3f} {interval(value[1:])}"
