"""Finished runs: where they are, which of them are one method, and what differs between methods.

The notes say what a reader must know to judge a comparison: budgets, settings, clients in a mean.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from medfed.common import scores
from medfed.common.console import short
from medfed.config.compose import changed_keys
from medfed.config.sections import has, leaves, select
from medfed.config.spelling import key_of
from medfed.federation.card import CEILINGS, REFERENCES
from medfed.records.folder import NOT_THE_EXPERIMENT, Run, RunFolder
from medfed.standalone.errors import CheckpointError, ConfigError, did_you_mean, few

T = TypeVar("T")
# The runs of each method, at the same places in the same order, by its name.
Runs = Mapping[str, Sequence[Run]]
# Differences that make no other method: where, when and under which name it ran.
_NO_METHOD = (*NOT_THE_EXPERIMENT, "name", "threads", "evaluation", "checkpoint", "data.fold")
Place = tuple[int, int | None, str]  # seed, seed of the data, and fold


_LEVELS = 6  # below a folder, within which runs are looked for
_FOLDERS = 5_000  # in which runs are looked for
_PARTS = {
    place.name
    for place in (
        *(RunFolder.checkpoints, RunFolder.models, RunFolder.centers, RunFolder.predictions),
        *(RunFolder.pictures_folder, RunFolder.bundles, RunFolder.bundle),
    )
}


def folders_with(file: Path, root: Path) -> Iterator[Path]:
    """Yields the folders below a folder, or itself, that hold a file, at most six levels down."""
    for count, (place, inside, files) in enumerate(os.walk(root)):
        if count == _FOLDERS:
            raise CheckpointError(
                f"{root} holds more than {_FOLDERS:,} folders; name the folder that holds the runs."
            )
        if file.name in files:
            yield Path(place)
        deep = len(Path(place).relative_to(root).parts) >= _LEVELS
        inside[:] = () if deep else [name for name in inside if name not in _PARTS]


def find_runs(runs: str | Sequence[str]) -> list[Path]:
    """Lists the run folders that are named, and all finished runs below other folders."""
    if not runs:
        raise CheckpointError("runs= names no folder; name one that holds finished runs.")
    folders: list[Path] = []
    for name in [runs] if isinstance(runs, str) else runs:
        folder = Path(name).expanduser()
        one = RunFolder(folder).config_yaml.is_file()
        inside = [folder] if one else [*folders_with(RunFolder.summary_json, folder)]
        if not inside:
            raise CheckpointError(
                f"{folder} holds no finished run (no summary.json within {_LEVELS} levels)."
            )
        folders += sorted(inside, key=lambda p: _natural(str(p)))
    return list(dict.fromkeys(folders))


def common_folder(runs: Sequence[Path]) -> Path:
    """Returns the folder that holds all runs."""
    return Path(os.path.commonpath([p.absolute().parent for p in runs]))


def differences(one: Run, other: Run) -> list[str]:
    """Returns the keys in which two configurations differ, but for those of another split."""
    # Seeds, folds and run conditions are left out: with others of them it is the same method.
    # What followed from the data of a split is no choice.
    mine, others = ({**leaves(run.config), **run.config.get("derived", {})} for run in (one, other))
    changed = (c.split(": ")[0] for c in changed_keys(mine, others, _NO_METHOD))
    keys_of_runs = [key for key in changed if key.split(".")[-1] not in ("seed", "_convert_")]
    if _version(one) == _version(other):
        return keys_of_runs
    # A key of a section that both have, which one version lacks or fills in, and nobody has typed.
    lone = mine.keys() ^ others.keys()
    lone |= {*one.config.get("derived", ())} ^ {*other.config.get("derived", ())}
    typed = {key_of(word) for run in (one, other) for word in run.overrides}
    sections = [{key.rpartition(".")[0] for key in of} for of in (mine, others)]
    lone = {key for key in lone - typed if key.rpartition(".")[0] in sections[0] & sections[1]}
    return [key for key in keys_of_runs if key not in lone]


def _version(run: Run) -> str:
    return f"{run.versions['medfed']} {run.versions['commit'][:12]}"


def place(run: Run) -> Place:
    """Returns what decides the patients and the initial weights of a run."""
    fold = select(run.config, "data.fold")
    return run.seed, select(run.config, "data.seed"), str(fold)


def grouped(items: Iterable[T], same: Callable[[T, T], bool]) -> list[list[T]]:
    """Groups equal items, in the order of the first item of each group."""
    groups: list[list[T]] = []
    for item in items:
        group = next((g for g in groups if same(g[0], item)), None)
        if group is None:
            groups.append([item])
        else:
            group.append(item)
    return groups


def check_same_patients(runs: Sequence[Run]) -> None:
    """Checks that runs at one place have the same data, and patients in every client's splits."""
    by_place: dict[Place, Run] = {}
    for run in runs:
        one = runs[0]
        # A client that was kept out has patients and no result.
        if (*run.patients, *run.clients) != (*one.patients, *one.clients):
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
        files, others = (r.splits["files"] for r in (run, twin))
        for name in files.keys() | others.keys():
            if files.get(name) != others.get(name):
                raise CheckpointError(
                    f"{name} in the data of {run.folder} is not that of {twin.folder}; only runs "
                    "on the same data can stand in one table."
                )


def chosen_metric(runs: Sequence[Run], metric: str | None) -> str:
    """Returns the metric of the verdicts: the given one, or the one that selected the rounds."""
    wanted = metric or str(runs[0].summary["selection"][0])
    for run in runs:
        known = list(next(iter(run.summary["clients"].values())))
        if wanted not in known:
            raise ConfigError(
                f"{run.folder} has no metric={wanted}{did_you_mean(wanted, known)}; it has "
                f"{', '.join(known)}."
            )
    return wanted


def with_constants(methods: Runs) -> dict[str, list[Mapping[str, Any]]]:
    """Returns the summaries of each method, and likewise of constant predictors that all know."""
    summaries: dict[str, list[Mapping[str, Any]]]
    summaries = {name: [run.summary for run in runs] for name, runs in methods.items()}
    ones, every = next(iter(summaries.values())), chain.from_iterable(summaries.values())
    known = set.intersection(*({*summary.get("constant", {})} for summary in every))
    names = [name for name in ones[0].get("constant", {}) if name in known]
    return summaries | {name: [summary["constant"][name] for summary in ones] for name in names}


def metrics_of(methods: Runs, first: str) -> list[str]:
    """Returns the metrics that all runs have, a given one first."""
    every = [next(iter(r.summary["clients"].values())) for runs in methods.values() for r in runs]
    return [first, *(n for n in every[0] if n != first and all(n in one for one in every))]


def value_at(summary: Mapping[str, Any], metric: str, place: str, clients: Iterable[str]) -> float:
    """Returns the metric of a client, or a statistic over some; NaN where there is none."""
    of = summary["clients"]
    if place in of:
        return float(of[place].get(metric, math.nan))
    values = [float(of[c].get(metric, math.nan)) for c in clients]
    kind = "mean" if place == scores.WITHOUT_SMALL else place
    return scores.federation_statistics(values, scores.smaller_is_better(metric))[kind]


def without_repeats(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Keeps the newest of several equal runs, with a note for each older run."""
    newest: list[Run] = []
    notes = []
    for run in runs:
        twin = next((k for k in newest if place(k) == place(run) and not differences(k, run)), None)
        if twin is None:
            newest.append(run)
            continue
        old, new = sorted((twin, run), key=lambda r: r.summary_json.stat().st_mtime)
        newest[newest.index(twin)] = new
        notes.append(f"{new.folder} repeats {old.folder}; only the newer run counts.")
    return newest, notes


def pool(runs: Sequence[Run]) -> tuple[dict[str, list[Run]], list[str]]:
    """Gathers the runs of each method, in the order of the places that all methods have."""
    groups = grouped(runs, lambda one, other: not differences(one, other))
    names = method_names([group[0] for group in groups])
    places = [{place(run): run for run in group} for group in groups]
    common = sorted(set.intersection(*map(set, places)), key=_natural_place)
    if not common:
        of = zip(names, places, strict=True)
        listed = "; ".join(f"{name}: {_listed(by_place.values())}" for name, by_place in of)
        raise CheckpointError(f"No seed was run with every method (seeds of {listed}).")
    notes = [
        f"Seeds {_listed(rest)} of {name} are left out: not every method has them."
        for name, by_place in zip(names, places, strict=True)
        if (rest := [run for at, run in by_place.items() if at not in common])
    ]
    at_common = [[by_place[at] for at in common] for by_place in places]
    return dict(zip(names, at_common, strict=True)), notes


def _natural_place(at: Place) -> tuple[int, str]:
    return at[0], str(at)


def _listed(runs: Iterable[Run]) -> str:
    """Seeds, each with what else makes the split where that does not follow from the seed."""
    texts = []
    for run in sorted(runs, key=lambda run: _natural_place(place(run))):
        seed, data_seed, fold = place(run)
        extra = [f"data.seed={data_seed}"] if data_seed not in (None, seed) else []
        extra += [f"data.fold={fold}"] if fold != "None" else []
        texts.append(f"{seed} with {' '.join(extra)}" if extra else str(seed))
    return ", ".join(texts)


def with_references(methods: Runs) -> tuple[dict[str, Sequence[Run]], list[str]]:
    """Calls the best local training, by validation, ``local``, and so FedAvg and pooling."""
    # Where a reference was run with several settings, the best of them is what others must
    # beat.
    names = {name: name for name in methods}
    notes = []
    for reference in (*REFERENCES, CEILINGS[0]):
        settings = [n for n, runs in methods.items() if runs[0].summary["algorithm"] == reference]
        if settings and reference not in names:
            best = max(settings, key=lambda name: _validated(methods[name]))
            names[best] = reference
            count = f"the best of {len(settings)} settings on validation"
            notes.append(f"{reference} stands for {best}, {count}.")
    return {names[name]: runs for name, runs in methods.items()}, notes


def _validated(runs: Sequence[Run]) -> float:
    """What validation gave at the selected rounds, larger is better."""
    each = []
    for run in runs:
        metric = run.summary["selection"][0]
        sign = -1 if scores.smaller_is_better(metric) else 1
        at = run.summary["selected_round"]
        each += [sign * r.metrics[metric] for r in run.history() if r.round == at]
    return float(np.mean(each)) if each else -math.inf


def method_names(runs: Sequence[Run]) -> list[str]:
    """Names each run by its algorithm, and by its settings where others share the algorithm."""
    families: dict[str, list[Run]] = {}
    for run in runs:
        families.setdefault(str(run.summary["algorithm"]), []).append(run)
    differing = {
        n: sorted({k for r in family[1:] for k in differences(family[0], r)})
        for n, family in families.items()
    }
    names = []
    for run in runs:
        name = str(run.summary["algorithm"])
        keys = differing[name]
        settings = dict.fromkeys(_setting(run, key, keys) for key in keys if has(run.config, key))
        names.append(" ".join([name, *settings]))
    return names


def _setting(run: Run, key: str, keys: Sequence[str]) -> str:
    """Writes a setting as ``strength=0.1``, with its parent where the last name is ambiguous."""
    *parents, leaf = key.split(".")
    value = select(run.config, key)
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if parents[-1:] == ["client_bits"]:
        return f"client_bits={text}"  # once, however many clients have them
    if leaf == "_target_":
        return f"{'.'.join(parents)}={text.split('.')[-1]}"
    rivals = [k for k in keys if k.split(".")[-1] == leaf]
    if any(select(run.config, k) != value for k in rivals):
        leaf = ".".join([*parents[-1:], leaf])
    return f"{leaf}={text}"


def _natural(text: str) -> list[tuple[int, str]]:
    """Orders ``2_x`` before ``10_x``."""
    return [(int(t), "") if t.isdigit() else (-1, t) for t in re.split(r"(\d+)", text)]


def facts_of(methods: Runs, clients: Sequence[str]) -> dict[str, Any]:
    """Returns what a reader must know to judge a comparison, such as its budgets."""
    ones = {name: runs[0] for name, runs in methods.items()}
    first, *others = ones.values()
    kinds = ("steps", "gradient_passes", "forward_passes")
    spent = {
        kind: {name: [run.summary[kind][c] for c in clients] for name, run in ones.items()}
        for kind in kinds
    }
    # A coordinator knows of no preparation.
    known = first.preprocessing_json.is_file() and not first.sites_json.is_file()
    steps = first.preprocessing if known else {}
    labels = {c: of for c in clients if (of := steps.get(c, {}).get("annotated"))}
    rising = {n: sum(bool(r.summary.get("improving")) for r in runs) for n, runs in methods.items()}
    keys = {key for other in others for key in differences(first, other)}
    return {
        "differing": {
            kind: {name: scores.span(counts) for name, counts in of.items()}
            for kind, of in spent.items()
            if any(a != b for a, b in pairwise(of.values()))
        },
        "steps": scores.span(next(iter(spent["steps"].values()))),
        "labelled": [f"{short(client)} {', '.join(of)}" for client, of in labels.items()],
        "settings": sorted(key for key in keys if not key.startswith("algorithm.")),
        "improving": [f"{n} in {k} of {len(methods[n])} runs" for n, k in rising.items() if k],
        "unlike": {n: few(of) for n, runs in methods.items() if (of := _unlike(runs, clients))},
        "scores": [*dict.fromkeys(_score_notes(methods))],
        "versions": sorted({_version(run) for of in methods.values() for run in of}),
    }


def _unlike(runs: Sequence[Run], clients: Sequence[str]) -> list[str]:
    """Lists the clients' contributions, means over a method's runs, where runs have them."""
    every = [run.summary.get("contributions", {}) for run in runs]
    known = {c: [of[c]["contribution"] for of in every if c in of] for c in clients}
    return [f"{short(c)} {np.mean(v):.2f}" for c, v in known.items() if v and None not in v]


def _score_notes(methods: Runs) -> Iterator[str]:
    """Names the clients that a metric leaves out, and those whose model failed."""
    seeds: dict[str, dict[int, None]] = {}
    for name, runs in methods.items():
        for run in runs:
            clients = run.summary["clients"]
            for sentence in scores.undefined_sentences(clients, "test"):
                seeds.setdefault(sentence, {})[run.seed] = None
            for sentence in scores.failure_sentences(clients, "test"):
                seeds.setdefault(f"{name}: {sentence}", {})[run.seed] = None
    for sentence, of in seeds.items():
        yield f"Seed{'s' * (len(of) > 1)} {few([*map(str, of)])}: {sentence}"
