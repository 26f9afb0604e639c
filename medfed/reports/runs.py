"""Finished runs as their folders describe them: where they are, and which belong together.

What a reader must know to judge a comparison: budgets, settings, who is in a mean.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from medfed.common.errors import CheckpointError
from medfed.common.scores import failure_sentences, span, undefined_sentences
from medfed.config.compose import changed_keys
from medfed.records.folder import NOT_THE_EXPERIMENT, Run

T = TypeVar("T")
# Differences that make no other method: where, when and under which name it ran.
_NO_METHOD = (*NOT_THE_EXPERIMENT, "name", "threads", "evaluation", "checkpoint")


def find_runs(runs: str | Sequence[str]) -> list[Path]:
    """Lists run folders: those that are named, and all finished ones below a folder that is none.

    Args:
        runs: A folder or several.

    Raises:
        CheckpointError: If a folder holds no finished run, or none is named.
    """
    if not runs:
        raise CheckpointError("runs names no folder; name one that holds finished runs.")
    found: list[Path] = []
    for name in [runs] if isinstance(runs, str) else runs:
        folder = Path(name).expanduser()
        inside = [p.parent for p in folder.rglob("summary.json")]
        if (folder / "config.yaml").is_file():
            inside = [folder]
        if not inside:
            raise CheckpointError(f"{folder} holds no finished run (no summary.json below it).")
        found += sorted(inside, key=lambda p: _natural(str(p)))
    return list(dict.fromkeys(found))


def common_folder(runs: Sequence[Path]) -> Path:
    """Returns the folder that holds all runs."""
    return Path(os.path.commonpath([p.absolute().parent for p in runs]))


def differences(one: Run, other: Run) -> list[str]:
    """Returns the keys in which two configurations differ, seeds and run conditions left out."""
    changed = (c.split(": ")[0] for c in changed_keys(one.config, other.config, _NO_METHOD))
    return [key for key in changed if key.split(".")[-1] not in ("seed", "_convert_")]


def grouped(items: Iterable[T], same: Callable[[T, T], bool]) -> list[list[T]]:
    """Puts together what is the same, in the order in which it comes.

    Example:
        >>> grouped([1, 2, 3, 5], lambda a, b: a % 2 == b % 2)
        [[1, 3, 5], [2]]
    """
    groups: list[list[T]] = []
    for item in items:
        group = next((g for g in groups if same(g[0], item)), None)
        if group is None:
            groups.append([item])
        else:
            group.append(item)
    return groups


def check_same_patients(
    runs: Sequence[Run], place: Callable[[Run], Hashable] = lambda run: run.seed
) -> None:
    """Checks that runs of one seed have the same patients in every split of every client.

    Args:
        runs: The runs.
        place: What must be equal of runs that must have the same patients.

    Raises:
        CheckpointError: If not, or if the clients themselves or the selection metric differ.
    """
    by_place: dict[Hashable, Run] = {}
    for run in runs:
        one = runs[0]
        if list(run.patients) != list(one.patients):
            raise CheckpointError(
                f"The clients of {run.folder} are not those of {one.folder}; only runs on the same "
                "clients can be compared."
            )
        if run.summary["selection"] != one.summary["selection"]:
            raise CheckpointError(
                f"{run.folder} selects its round by {run.summary['selection'][0]}, {one.folder} by "
                f"{one.summary['selection'][0]}; only equal selections can be compared."
            )
        twin = by_place.setdefault(place(run), run)
        for client, parts in run.patients.items():
            if parts != twin.patients[client]:
                raise CheckpointError(
                    f"The patients of {client} in {run.folder} are not those in {twin.folder}; "
                    "only runs on the same splits can be compared."
                )


def without_repeats(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Keeps the latest of runs that are equal in all, seed included, and says so."""
    kept: list[Run] = []
    notes = []
    for run in runs:
        twin = next((k for k in kept if k.seed == run.seed and not differences(k, run)), None)
        if twin is None:
            kept.append(run)
            continue
        old, new = sorted((twin, run), key=lambda r: (r.folder / "summary.json").stat().st_mtime)
        kept[kept.index(twin)] = new
        notes.append(f"{old.folder} is repeated by {new.folder}; only the latter counts.")
    return kept, notes


def _natural(text: str) -> list[tuple[int, str]]:
    """Orders ``2_x`` before ``10_x``."""
    return [(int(t), "") if t.isdigit() else (-1, t) for t in re.split(r"(\d+)", text)]


Runs = Mapping[str, Sequence[Run]]
"""The runs of each method, one per seed, by its name."""
_PASSES = {
    "gradient_passes": "Gradient passes per client, those of the steps among them, differ",
    "forward_passes": "Passes forward alone per client differ",
}


def notes_on(methods: Runs, clients: Sequence[str]) -> list[str]:
    """Returns all notes.

    Args:
        methods: The runs by method.
        clients: Names of the clients.
    """
    return [
        step_note(methods, clients),
        *pass_notes(methods, clients),
        *setting_notes(methods),
        *dict.fromkeys(score_notes(methods)),
    ]


def step_note(methods: Runs, clients: Sequence[str]) -> str:
    """Says whether every method took the same gradient steps on every client."""
    steps = {n: [runs[0].summary["steps"][c] for c in clients] for n, runs in methods.items()}
    told = {n: span(s) for n, s in steps.items()}
    if all(a == b for a, b in pairwise(steps.values())):
        return f"Equal budgets: {next(iter(told.values()))} gradient steps per client."
    listed = ", ".join(f"{n} {t}" for n, t in told.items())
    return f"Gradient steps per client differ: {listed}."


def pass_notes(methods: Runs, clients: Sequence[str]) -> Iterator[str]:
    """Says where equal steps are not equal work: further gradients, and losses alone."""
    for key, what in _PASSES.items():
        summaries = {n: runs[0].summary for n, runs in methods.items()}
        counts = {n: [s[key][c] for c in clients] for n, s in summaries.items() if key in s}
        if any(a != b for a, b in pairwise(counts.values())):
            yield f"{what}: {', '.join(f'{n} {span(s)}' for n, s in counts.items())}."
    old = [str(r.folder) for runs in methods.values() for r in runs if "failed" not in r.summary]
    if old:
        yield (
            f"Written by an older version: {', '.join(old)}; it counted no gradient passes and "
            "left failed models and empty regions out of its means."
        )


def setting_notes(methods: Runs) -> list[str]:
    """Names settings outside the algorithm in which methods differ."""
    one, *others = [runs[0] for runs in methods.values()]
    keys = {k for other in others for k in differences(one, other)}
    outside = sorted(k for k in keys if not k.startswith("algorithm."))
    if not outside:
        return []
    return [f"Settings besides the algorithm differ between methods: {', '.join(outside)}."]


def score_notes(methods: Runs) -> Iterator[str]:
    """Says whom the data leave out of a metric, and whose model has failed."""
    for name, runs in methods.items():
        for run in runs:
            clients = run.summary["clients"]
            yield from undefined_sentences(clients, "test", f"Seed {run.seed}: ")
            yield from failure_sentences(clients, "test", f"{name}, seed {run.seed}: ")
