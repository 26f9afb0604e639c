"""The evidence on real hospitals: every table of docs/evidence_tables.md, from stored results.

    python benchmarks/evidence/evidence.py

prints them from ``docs/evidence.json``, which holds what was computed with the hashes of its cells.
To compute it again (some hours of a core)::

    medfed benchmark suite=stroke paths.stroke=TABLE variants=all arms=true out=OUT
    medfed benchmark suite=stroke_survival paths.stroke_survival=TABLE out=SURVIVAL
    medfed benchmark suite=heart paths.heart=FOLDER methods=[BASELINES] arms=true out=HEART
    python benchmarks/evidence/flamby.py brca FOLDER BRCA.csv
    medfed benchmark suite=tcga_brca paths.tcga_brca=BRCA.csv out=BRCA
    medfed benchmark suite=retina_centres paths.retina_centres=FOLDER arms=true out=RETINA
    medfed benchmark suite=retina_centres paths.retina_centres=FOLDER methods=[finetune,pfednet] \
        variants=[papers_network] out=UNET
    medfed benchmark suite=stroke paths.stroke=TABLE methods=[fedmd] variants=hospitals out=FEDMD
    medfed benchmark suite=stroke paths.stroke=TABLE methods=[NEWER] arms=[ARMS] out=NEW
    medfed benchmark suite=stroke paths.stroke=TABLE methods=[fedlc,pfedfda,feddbe,knnper] \
        variants=[most_20] out=NEW
    medfed benchmark suite=heart paths.heart=FOLDER methods=[NEWER] out=NEW_HEART
    medfed benchmark suite=retina_centres paths.retina_centres=FOLDER methods=[adabn,silobn] \
        out=NEW_RETINA
    medfed benchmark suite=breast_cancer methods=[NEWER] out=NEW_CARD
    medfed benchmark suite=lgg paths.lgg=FOLDER arms=true out=LGG
    medfed benchmark suite=stroke_imbalance paths.stroke_imbalance=TABLE variants=all arms=true \
        out=IMBALANCE
    python benchmarks/evidence/evidence.py --complete FOLDER --out LIST.csv
    medfed benchmark suite=lgg_complete paths.lgg_complete=LIST.csv methods=[finetune] out=COMPLETE
    python benchmarks/evidence/evidence.py --advice /path/to/ist.csv --out ADVICE
    python benchmarks/evidence/evidence.py --table TABLE --collect OUT SURVIVAL HEART ... COMPLETE
    python benchmarks/evidence/evidence.py --collect-newer NEW NEW_HEART NEW_RETINA NEW_CARD
    python benchmarks/evidence/evidence.py --collect-advice ADVICE
    python benchmarks/evidence/evidence.py --collect-normalization RESULTS.json ...

``benchmarks/evidence/normalization.py`` says how RESULTS.json are made.
BASELINES are the methods of ``suite=stroke``; NEWER are quped, fenda, fedlc, recalibrated,
fedproto, feddbe, pfedfda, fedpac and knnper (elsewhere than on strokes fednova, too), and ARMS the
arms of qupel, quped and fedlc. ``--advice`` counts how often a pilot's advice is right: it deals
hospitals of 60 to 500 patients into federations of five, asks ``medfed advise`` in each, and then
trains on all who are not tested.
``--collect`` leaves other stored tasks as they are. Of a task that is stored with more methods it
takes the arms and further methods alone, and stops where the other methods' results differ, as
convolutions round otherwise on another CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import multiprocessing
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import yaml  # type: ignore[import-untyped]
from PIL import Image
from scipy.stats import spearmanr

from medfed.benchmark.tasks import fewest_of
from medfed.functional.statistics import difference, splits_needed
from medfed.reports.tasks import Scores, Task, rise_of
from medfed.reports.verdicts import judge, plain

ROOT = Path(__file__).resolve().parents[2]
STORE = ROOT / "docs" / "evidence.json"
FOUND = ROOT / "docs" / "benchmark" / "findings.json"
METHODS = ("fedavg", "finetune")
FEW = 5  # hospitals of a federation
TARGET = 0.03  # the smallest difference of AUROC, concordance or Dice worth knowing
AVERAGED = ("dice", "auroc", "brier")  # what is shown of normalization.py
FOLDS = 5
LONGER = "_thrice_the_rounds"


def deal(sizes: Mapping[str, int], least: int, most: int, count: int) -> list[list[str]]:
    """Deals hospitals of ``least`` to ``most`` patients to federations of ``count``.

    Each has small and large ones; hospitals that are left over take no part.

    Example:
        >>> deal({"a": 30, "b": 60, "c": 70, "d": 80, "e": 90}, 50, 100, 2)
        [['b', 'd'], ['c', 'e']]
    """
    ordered = sorted((n, name) for name, n in sizes.items() if least <= n <= most)
    groups = len(ordered) // count
    named = [name for _, name in ordered[: groups * count]]
    return [named[i::groups] for i in range(groups)]


def rows_of(path: Path) -> list[dict[str, str]]:
    """Patients with a known outcome."""
    with path.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if row["OCCODE"] in "1234"]


def advise_one(task: tuple[int, list[str], Path, Path]) -> None:
    """Asks for advice in one federation, then looks at the test patients; writes one file."""
    from advice import compare, tested  # type: ignore[import-not-found]

    from medfed.benchmark.advice import ALONE, advise

    number, hospitals, table, out = task
    place = out / f"federation_{number}"
    if (place / "verdicts.json").is_file():
        return
    place.mkdir(parents=True, exist_ok=True)
    rows = [row for row in rows_of(table) if row["HOSPNUM"] in hospitals]
    with (place / "table.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    keys = ["experiment=stroke", f"data.path={place / 'table.csv'}"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        found, _ = advise(keys, METHODS, folds=5, repeats=1, out=place, workers=0)
        own, alone = (tested(keys, m, place, 0) for m in (found.leader, ALONE))
    test = compare(found, own, alone)
    gain = found.methods[found.leader].gain
    assert gain is not None
    kept = {
        "federation": number,
        "use": found.use,
        "shown": found.leader,
        "pilot": {"mean": gain.mean, "low": gain.low, "high": gain.high, "says": gain.says},
        "test": float(np.nanmean([value for value, *_ in test.values()])),
        "hospitals": {
            client: {
                "patients": one.patients,
                "says": one.says,
                "low": one.low,
                "high": one.high,
                "test": test[client],
            }
            for client, one in found.methods[found.leader].hospitals.items()
        },
        "cells": cells_of(place),
        "cpu_seconds": seconds_of(place),
    }
    (place / "verdicts.json").write_text(json.dumps(kept))


def complete(folder: Path, to: Path) -> int:
    """Lists the pictures of the patients of whom no contrast is missing.

    Where a contrast was not taken, the data set's authors put FLAIR, the second channel, in its
    place.
    """
    with (folder / "images.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    lacking = set()
    for row in rows:
        with Image.open(folder / row["image"]) as picture:
            before, flair, after = np.moveaxis(np.asarray(picture), -1, 0)
        if np.array_equal(before, flair) or np.array_equal(after, flair):
            lacking.add(row["patient"])
    with to.open("x", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        for row in rows:
            if row["patient"] not in lacking:
                writer.writerow(row | {k: folder / row[k] for k in ("image", "mask")})
    return len(lacking)


def cells_of(out: Path) -> dict[str, str]:
    """The hashes of cells, by their places."""
    found = [json.loads(file.read_text()) for file in sorted((out / "cells").rglob("[!.]*.json"))]
    return {one["name"]: one["key"][:16] for one in found}


def seconds_of(out: Path) -> float:
    """CPU seconds of all cells in a folder."""
    files = (out / "cells").rglob("[!.]*.json")
    return sum(float(json.loads(file.read_text())["result"]["cpu_seconds"]) for file in files)


def run_advice(table: Path, out: Path, workers: int) -> None:
    """Asks in all federations, several at a time."""
    import medfed.benchmark.main  # noqa: F401 - once, before the processes are forked

    sizes = Counter(row["HOSPNUM"] for row in rows_of(table))
    groups = deal(sizes, 60, 500, FEW)
    tasks = [(n, hospitals, table, out) for n, hospitals in enumerate(groups)]
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        for _ in pool.imap_unordered(advise_one, tasks):
            print("one more federation", flush=True)


def finals(folder: Path) -> list[dict[str, Any]]:
    """The results of a method on test patients, by split."""
    cells = [json.loads(file.read_text()) for file in folder.glob("final_*.json")]
    numbered = {int(cell["name"].rpartition("_")[2]): cell["result"] for cell in cells}
    return [result for _, result in sorted(numbered.items()) if "clients" in result]


def task_of(folder: Path, other: str = "") -> Task:
    """Reads a task of a benchmark, by its own metric or another one that falls.

    Methods of which a split is missing are left out, and the arms.
    """
    results = {method.name: finals(method) for method in sorted(folder.iterdir())}
    splits = max(map(len, results.values()))
    suite = yaml.safe_load((ROOT / f"configs/suites/{folder.parent.name}.yaml").read_text("utf-8"))
    arms = {*suite.get("arms", ()), "qupel"}  # QuPeL is tuned for its arms
    whole = {n: each for n, each in results.items() if len(each) == splits and n not in arms}
    first = next(iter(whole.values()))
    metric, mode = (other, "min") if other else first[0]["metric"]
    clients = tuple(first[0]["clients"])
    counts = [[*result["patients"].values()] for result in first]
    overlap = [sum(c["test"] for c in n) / sum(c["train"] + c["val"] for c in n) for n in counts]
    task = Task(folder.parent.name, folder.name, metric, mode == "min", clients)
    for name in sorted({*results} - {*whole} - arms):
        cells = [json.loads(file.read_text()) for file in (folder / name).glob("final_*.json")]
        why = {cell["result"].get("error", "") for cell in cells} - {""}
        counted = f"{len(results[name])} of {splits} splits."
        task.left_out[name] = f"`{name}` is left out: {' '.join(sorted(why)) or counted}"
    task.overlap = float(np.mean(overlap))
    sign = -1 if task.falls else 1
    for name, each in whole.items():
        rows = [[result["clients"][c].get(metric) for c in clients] for result in each]
        courses = [[at["score"] for at in result["course"]] for result in each]
        sent = tuple(float(np.mean([r["bytes"][way] for r in each])) for way in ("up", "down"))
        values = sign * np.array(rows, dtype=float)
        none = np.zeros((splits, 0, len(clients)))
        rise = rise_of(np.array(courses, dtype=float).tolist(), task.overlap)
        task.scores[name] = Scores(name, values, none, sent, 1.0, 0, {}, rise=rise)  # type: ignore[arg-type]
    task.leave_out_small({client: fewest_of(first, client) for client in clients})
    return task


def plainly(folder: Path) -> dict[str, Any]:
    """A task with its verdicts, as JSON holds it; of risks, with the Brier score, too."""
    task = task_of(folder)
    methods = {name: plain(verdict) for name, verdict in judge(task).items()}
    if task.metric == "auroc":
        for name, one in judge(task_of(folder, "brier")).items():
            against = {
                r: a._asdict() for r, a in ((r, v.difference) for r, v in one.against.items())
            }
            verdicts = {r: v.verdict for r, v in one.against.items()}
            methods[name]["brier"] = {"mean": -one.mean.mean, "against": against, "says": verdicts}
    facts = {"metric": task.metric, "clients": list(task.clients), "splits": task.splits}
    for name, scores in task.scores.items():
        gap = difference((scores.means - task.scores["local"].means).tolist(), task.overlap)
        methods[name]["needed"] = (
            splits_needed(TARGET, gap, task.splits, task.overlap, len(methods) - 1)
            if gap.error
            else 0
        )
    facts["left_out"] = [*task.left_out.values()]
    thrice: dict[str, list[float]] = {}
    for longer in sorted(folder.glob(f"*{LONGER}")):
        means = means_of(finals(longer))
        if len(means) == task.splits:
            thrice[longer.name.removesuffix(LONGER)] = means
    if thrice:
        once = {name: each.means.tolist() for name, each in task.scores.items()}
        facts |= {"thrice": thrice, "once": once}
    facts["arms"] = arms_of(folder)
    return {**facts, "overlap": task.overlap, "methods": methods}


def collect(outs: Sequence[Path], table: Path, before: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of benchmarks: tasks, hashes, seconds, and facts about the hospitals."""
    folders = [f for out in outs for f in sorted((out / "cells").glob("*/*"))]
    ready = [folder for folder in folders if any(folder.glob("fedavg/final_*.json"))]
    tasks, cells = dict(before.get("tasks", {})), dict(before.get("cells", {}))
    for name, task in ((f"{f.parent.name}/{f.name}", plainly(f)) for f in ready):
        known = tasks.get(name, {"methods": {}})["methods"]
        now = task["methods"]
        if {*known} - {*now}:
            further = {m: one for m, one in now.items() if m not in known}
            if any(known[m]["mean"] != one["mean"] for m, one in now.items() if m in known):
                raise SystemExit(f"{name}: stored results differ; measure all methods on one CPU.")
            tasks[name]["methods"] |= further
            out = [line for line in tasks[name]["left_out"] if line.split("`")[1] not in further]
            tasks[name]["left_out"] = out
            tasks[name]["arms"] |= task["arms"]
        else:
            tasks[name] = task
            cells = {place: key for place, key in cells.items() if not place.startswith(f"{name}/")}
    by_hospital = defaultdict(list)
    for row in rows_of(table):
        by_hospital[row["HOSPNUM"]].append(row["OCCODE"] in "12")
    facts = {h: [len(v), float(np.mean(v))] for h, v in by_hospital.items()}
    kept = {c for task in tasks.values() for c in task["clients"]}
    return {
        "tasks": tasks,
        "hospitals": {h: f for h, f in sorted(facts.items()) if h in kept},
        "cells": {place: key for out in outs for place, key in cells_of(out).items()} | cells,
        "cpu_seconds": before.get("cpu_seconds", 0.0) + sum(map(seconds_of, outs)),
    }


def collect_newer(outs: Sequence[Path]) -> dict[str, Any]:
    """What is kept of benchmarks of newer methods, which have references of their own."""
    folders = [f for out in outs for f in sorted((out / "cells").glob("*/*"))]
    return {
        "tasks": {f"{f.parent.name}/{f.name}": plainly(f) for f in folders},
        "cells": {place: key for out in outs for place, key in cells_of(out).items()},
        "cpu_seconds": sum(map(seconds_of, outs)),
    }


def of_newer(tasks: Mapping[str, Any]) -> Iterator[str]:
    """The tables of the newer methods."""
    for name, task in tasks.items():
        yield from [*of_methods(f"newer methods, {name}", task), "", *task["left_out"], ""]
        yield from [*of_probabilities(f"newer methods, {name}", task), ""]
        if task["arms"]:
            yield from [*of_arms(name, task), ""]


def collect_advice(out: Path) -> list[dict[str, Any]]:
    """The verdicts of all federations."""
    files = sorted(out.glob("federation_*/verdicts.json"))
    return sorted((json.loads(f.read_text()) for f in files), key=lambda one: one["federation"])


def interval(one: Mapping[str, float], signed: bool = True) -> str:
    """A mean with its interval."""
    form = "+.4f" if signed else ".4f"
    return f"{one['mean']:{form}} [{one['low']:{form}}, {one['high']:{form}}]"


def of_methods(name: str, task: Mapping[str, Any]) -> list[str]:
    """A line per method: mean, worst hospital, against alone and FedAvg, harmed, still rising."""
    head = "| method | mean | worst hospital | − alone | − FedAvg | harmed | rises | splits |"
    lines = [f"{name}: {task['metric']}, {task['splits']} splits, {len(task['clients'])} clients"]
    lines += ["", head, "|---|---|---:|---|---|---:|---|---:|"]
    methods = task["methods"]
    for method in sorted(methods, key=lambda m: -methods[m]["mean"]["mean"]):
        one = methods[method]
        cells = [f"`{method}`", interval(one["mean"], False), f"{one['worst_client']:.3f}"]
        for reference in ("local", "fedavg"):
            against = one["against"].get(reference)
            sure = {"better": " *", "worse": " *", "undecided": ""}
            cells.append(interval(against) + sure[against["verdict"]] if against else "")
        harmed = one["harmed"]
        cells.append(f"{len(harmed['surely'])}" if harmed else "")
        rise = one.get("rise")
        rises = rise and rise["p"] is not None and rise["p"] < 0.05 and rise["mean"] > 0
        cells.append("" if rise is None else f"{rise['mean']:+.4f}" if rises else "no")
        cells.append("" if method == "local" else str(one["needed"] or "> 1000"))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def of_probabilities(name: str, task: Mapping[str, Any]) -> list[str]:
    """A line per method: the Brier score of its probabilities, smaller is better."""
    lines = [f"{name}: Brier score, mean over hospitals; differences above 0 are better", ""]
    lines += [
        "| method | Brier | better than alone by | better than FedAvg by |",
        "|---|---:|---|---|",
    ]
    scores = {method: one["brier"] for method, one in task["methods"].items() if "brier" in one}
    for method in sorted(scores, key=lambda m: scores[m]["mean"]):
        one, cells = scores[method], [f"`{method}`", f"{scores[method]['mean']:.4f}"]
        for reference in ("local", "fedavg"):
            gap = one["against"].get(reference)
            sure = " *" * (one["says"].get(reference, "undecided") != "undecided")
            cells.append(interval(gap) + sure if gap else "")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


LAMBDA = "pfednet_lambda_"
STC = "pfednet_stc"
GAMMA = f"{STC}_cer_"
PAIRS = {
    "QuPeL of 2 bits − of 32 bits": ("qupel_2", "qupel_32"),
    "QuPeL of 3 bits − of 32 bits": ("qupel_3", "qupel_32"),
    "QuPeL of 1 bit − of 32 bits": ("qupel_1", "qupel_32"),
    **{f"QuPeD of {n} bits − of 32 bits": (f"quped_{n}", "quped_32") for n in (3, 2)},
    "QuPeD of 1 bit − of 32 bits": ("quped_1", "quped_32"),
    **{f"QuPeD − QuPeL, bits: {n}": (f"quped_{n}", f"qupel_{n}") for n in (32, 3, 2, 1)},
    "QuPeD with every second network half as wide − all alike": ("quped_half", "quped_32"),
    "FedLC that predicts for each hospital's own shares − for even ones": ("fedlc_own", "fedlc"),
    "PPFL with memberships that stay equal − learned": ("ppfl_equal", "ppfl"),
    "PPFL by the largest membership − by the mixture": ("ppfl_hard", "ppfl"),
}


def means_of(results: Sequence[Mapping[str, Any]], metric: str = "") -> list[float]:
    """The mean over hospitals, by split, of the task's metric or another."""
    every = [[c[metric or one["metric"][0]] for c in one["clients"].values()] for one in results]
    return [float(np.mean([v for v in values if v is not None])) for values in every]


def of_rounds(task: Mapping[str, Any]) -> list[str]:
    """A line per method that was also run with thrice the rounds."""
    once, thrice = task["once"], task["thrice"]
    lines = ["| method | thrice the rounds | − once | − alone, thrice |", "|---|---:|---|---|"]
    for name, scores in thrice.items():
        now = np.array(scores)
        cells = [f"`{name}`", f"{now.mean():.4f}"]
        for before in (once[name], thrice["local"] if name != "local" else None):
            gap = None if before is None else difference((now - before).tolist(), task["overlap"])
            cells.append(interval(gap._asdict()) if gap else "")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


Arm = Mapping[str, Sequence[float]]


def arms_of(folder: Path) -> dict[str, dict[str, list[float]]]:
    """Of what the paired questions name, by split: means over hospitals, bytes up and down.

    Of probabilities there is the accuracy, too, as papers print it.
    """
    named = {name for pair in PAIRS.values() for name in pair}
    found: dict[str, dict[str, list[float]]] = {}
    for place in sorted(folder.iterdir()):
        if place.name in named or place.name.startswith((LAMBDA, "pfednet")):
            results = finals(place)
            arm = {"mean": means_of(results)}
            arm |= {way: [one["bytes"][way] for one in results] for way in ("up", "down")}
            if all("brier" in c for one in results for c in one["clients"].values()):
                arm["accuracy"] = means_of(results, "accuracy")
            found[place.name] = arm
    most = max((len(arm["mean"]) for arm in found.values()), default=0)
    found = {name: arm for name, arm in found.items() if len(arm["mean"]) == most > 1}
    return found if len(found) > 1 else {}  # pFedNet alone answers no question


def gap_of(one: Arm, other: Arm, overlap: float, what: str = "mean") -> dict[str, float]:
    """The paired difference of two arms, with its interval."""
    gaps = np.subtract(one[what], other[what])
    return dict(difference(gaps.tolist(), overlap)._asdict())


def path_of(arms: Mapping[str, Arm], start: str) -> dict[str, str]:
    """The arms whose names begin alike, by the values that follow, in growing order.

    Example:
        >>> path_of({"a_10": {}, "b": {}, "a_0.1_delta_2": {}}, "a_")
        {'0.1': 'a_0.1_delta_2', '10': 'a_10'}
    """
    named = {
        arm.removeprefix(start).partition("_")[0]: arm for arm in arms if arm.startswith(start)
    }
    return {value: named[value] for value in sorted(named, key=float)}


def of_arms(name: str, task: Mapping[str, Any]) -> list[str]:
    """A line per paired question."""
    lines = [f"| {name} | difference of {task['metric']} | bytes up |", "|---|---|---:|"]
    arms = task["arms"]
    paths = {
        f"pFedNet with λ = {value} − as tuned": (arm, "pfednet")
        for value, arm in path_of(arms, LAMBDA).items()
    }
    paths |= {
        f"CER (γ = {value}) − STC alone": (arm, STC) for value, arm in path_of(arms, GAMMA).items()
    }
    for what, (one, other) in {**paths, **PAIRS}.items():
        if one in arms and other in arms:
            found = gap_of(arms[one], arms[other], task["overlap"])
            sent, before = (np.mean(arms[arm]["up"]) for arm in (one, other))
            ratio = f"{sent / before - 1:+.0%}" if before else ""
            lines.append(f"| {what} | {interval(found)} | {ratio} |")
    return lines


def compressed(arms: Mapping[str, Arm]) -> dict[str, str]:
    """The arms with STC by CER's γ; ``0`` is STC alone."""
    return {"0": STC} | path_of(arms, GAMMA)


def compression(task: Mapping[str, Any], way: str) -> dict[str, float]:
    """How many times smaller compressed messages of pFedNet are, by CER's γ."""
    arms = task["arms"]
    plain_bytes = np.mean(arms["pfednet"][way])
    named = compressed(arms).items()
    return {value: float(plain_bytes / np.mean(arms[arm][way])) for value, arm in named}


def of_compression(tasks: Mapping[str, Any]) -> list[str]:
    """A line per task and γ: what it saves, and what it costs against messages as they are."""
    head = "| pFedNet by STC with CER | γ | to hospitals | from hospitals | − uncompressed |"
    lines = [head, "|---|---:|---:|---:|---|"]
    for name, task in tasks.items():
        arms = task["arms"]
        if "down" in arms.get(STC, ()):
            down, up = (compression(task, way) for way in ("down", "up"))
            for value, arm in compressed(arms).items():
                gap = gap_of(arms[arm], arms["pfednet"], task["overlap"])
                times = f"{down[value]:.1f} times | {up[value]:.1f} times"
                lines.append(f"| {name} | {value} | {times} | {interval(gap)} |")
    return lines


CLAIMS: dict[str, tuple[str, str, float]] = {
    "pFedNet is better than training alone": ("pfednet", "local", 0.0),
    "pFedNet is better than FedAvg": ("pfednet", "fedavg", 0.0),
    "pFedNet as tuned is better than with λ = 0": ("pfednet", "pfednet_lambda_0", 0.0),
    "pFedNet as tuned is better than with λ = 1": ("pfednet", "pfednet_lambda_1", 0.0),
    "One part for all that the graph joins (λ = 1) is better than a part for each (λ = 0)": (
        "pfednet_lambda_1",
        "pfednet_lambda_0",
        0.0,
    ),
    "CER (γ = 1) on top of STC is at most 0.01 worse": ("pfednet_stc_cer_1", STC, -0.01),
    "CER (γ = 10) on top of STC is at most 0.01 worse": ("pfednet_stc_cer_10", STC, -0.01),
    "QuPeL of 2 bits is at most 0.02 worse than of 32": ("qupel_2", "qupel_32", -0.02),
    "PPFL's learned memberships are better than equal ones": ("ppfl", "ppfl_equal", 0.0),
}


def of_claims(tasks: Mapping[str, Any]) -> list[str]:
    """A line per claim of a paper and task: the difference, held against the claim's bound."""
    lines = ["| the papers' claim | task | difference | claim |", "|---|---|---|---|"]
    rows: list[tuple[str, str, Mapping[str, float], float]] = []
    for claim, (one, other, bound) in CLAIMS.items():
        for name, task in tasks.items():
            arms, methods = task["arms"], task["methods"]
            if one in arms and other in arms:
                rows.append((claim, name, gap_of(arms[one], arms[other], task["overlap"]), bound))
            elif one in methods and (gap := methods[one]["against"].get(other)):
                rows.append((claim, name, gap, bound))
    for claim, name, gap, bound in [*rows, *of_case_mix(tasks), *of_savings(tasks)]:
        holds = "yes" if gap["low"] > bound else "no" if gap["high"] < bound else "cannot tell"
        lines.append(f"| {' | '.join((claim, name, interval(gap), holds))} |")
    return lines


def of_case_mix(
    tasks: Mapping[str, Any],
) -> Iterator[tuple[str, str, Mapping[str, float], float]]:
    """Accuracy over λ, as pFedNet plots it: λ = 0.01, which the paper advises, and the ends."""
    name, even = "stroke_imbalance/delta_4", "stroke_imbalance/delta_1"
    if name in tasks:
        overlap = tasks[name]["overlap"]
        differ, alike = (
            {value: tasks[task]["arms"][arm] for value, arm in path.items()}
            for task in (name, even)
            for path in [path_of(tasks[task]["arms"], LAMBDA)]
        )
        for what, words in (("mean", "AUROC"), ("accuracy", "accuracy")):
            for end in "01":
                gap = gap_of(differ["0.01"], differ[end], overlap, what)
                yield f"λ = 0.01 has a better {words} than λ = {end}", name, gap, 0.0
            costs = [np.subtract(arms["0"][what], arms["1"][what]) for arms in (differ, alike)]
            gap = difference((costs[0] - costs[1]).tolist(), overlap)._asdict()
            claim = f"λ = 1 costs more {words} against λ = 0 where case mix differs than where not"
            yield claim, name, gap, 0.0


def of_savings(
    tasks: Mapping[str, Any],
) -> Iterator[tuple[str, str, Mapping[str, float], float]]:
    """Compression over γ, as pFedNet plots it: the share of STC's bytes that CER saves."""
    for value in ("1", "10"):
        for way, words in (("down", "to"), ("up", "from")):
            for name, task in tasks.items():
                arms = task["arms"]
                if way in arms.get(STC, ()) and f"{GAMMA}{value}" in arms:
                    share = 1 - np.divide(arms[f"{GAMMA}{value}"][way], arms[STC][way])
                    gap = difference(share.tolist(), task["overlap"])._asdict()
                    claim = f"CER (γ = {value}) saves 7 % of STC's bytes {words} hospitals"
                    yield claim, name, gap, 0.07


GENERATED = ("luna16/delta_4", "brats/rotate")
REAL = ("stroke/hospitals", "heart/centres", "retina_centres/hospitals", "lgg/hospitals")


def of_orders(tasks: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """A line per pair of tasks: whether the means order their methods alike."""
    every = {name: found[name]["methods"] for name in GENERATED}
    every |= {name: tasks[name]["methods"] for name in REAL}
    lines = [
        "| the methods' order on | and on | methods | rank correlation | p |",
        "|---|---|---:|---:|---:|",
    ]
    for one, other in combinations(every, 2):
        shared = [m for m in every[one] if m in every[other] and not m.startswith("pooled")]
        means = [[every[task][m]["mean"]["mean"] for m in shared] for task in (one, other)]
        same = spearmanr(*means)
        kinds = [f"{task} (generated)" if task in GENERATED else task for task in (one, other)]
        row = (*kinds, str(len(shared)), f"{same.statistic:+.2f}", f"{same.pvalue:.3f}")
        lines.append(f"| {' | '.join(row)} |")
    return lines


def of_hospitals(task: Mapping[str, Any], facts: Mapping[str, Sequence[float]]) -> list[str]:
    """Whether FedAvg's gain over alone goes with a hospital's size or its share of outcomes."""
    gains = task["methods"]["fedavg"]["harmed"]["gains"]
    known = [(facts[c], g[0]) for c, g in gains.items() if c in facts and g[0] == g[0]]
    sizes, shares = (np.array([f[i] for f, _ in known]) for i in (0, 1))
    gain = np.array([g for _, g in known])
    lines = ["| FedAvg's gain over alone goes with | rank correlation | p |", "|---|---:|---:|"]
    for what, values in (
        ("patients of the hospital", sizes),
        ("distance of its share of outcomes from the mean", abs(shares - shares.mean())),
    ):
        found = spearmanr(values, gain)
        lines.append(f"| {what} | {found.statistic:+.2f} | {found.pvalue:.3f} |")
    return lines


def of_advice(advice: Sequence[Mapping[str, Any]]) -> list[str]:
    """How often a pilot's words held on test patients."""
    lines = [
        "| the pilot says | times | test gain above 0 | mean test gain |",
        "|---|---:|---:|---:|",
    ]
    for says in ("better", "cannot tell", "worse"):
        gains = [one["test"] for one in advice if one["pilot"]["says"] == says]
        mean = f"{np.mean(gains):+.4f}" if gains else ""
        lines.append(f"| {says} | {len(gains)} | {sum(g > 0 for g in gains)} | {mean} |")
    inside = [o["pilot"]["low"] <= o["test"] <= o["pilot"]["high"] for o in advice]
    each = [h for one in advice for h in one["hospitals"].values()]
    held = [h["low"] <= h["test"][0] <= h["high"] for h in each if h["low"] == h["low"]]
    words = Counter(h["says"] for h in each)
    lines += [
        "",
        f"{len(advice)} federations of {FEW} hospitals. The test gain lies within the pilot's "
        f"interval in {sum(inside)} of {len(inside)}; of single hospitals in {sum(held)} of "
        f"{len(held)}, of which the pilot calls {words['better']} better and {words['worse']} "
        "worse off.",
    ]
    return lines


def collect_normalization(files: Sequence[Path]) -> dict[str, Any]:
    """Means over hospitals of what is shown, of every training and both kinds of statistics."""
    every = [item for file in files for item in json.loads(file.read_text()).items()]
    return {
        name: {
            kind: {
                metric: float(np.nanmean([of[metric] for of in clients.values()]))
                for metric in AVERAGED
                if metric in next(iter(clients.values()))
            }
            for kind, clients in measured.items()
        }
        for name, measured in sorted(every)
    }


def of_normalization(found: Mapping[str, Any]) -> list[str]:
    """A line per suite, metric and case: means over hospitals and splits, and paired differences.

    An interval takes three splits or more.
    """
    kinds = ("kept", "reestimated")
    head = "| suite | case | splits | kept | estimated again | again − kept | − alone, both again |"
    lines = [head, "|---|---|---:|---:|---:|---|---|"]
    tables: dict[tuple[str, str], dict[str, dict[str, dict[int, float]]]] = {}
    for name, measured in found.items():
        suite, case, split = name.split("/")
        for kind, means in measured.items():
            for metric, mean in means.items():
                by_kind = tables.setdefault((suite, metric), {}).setdefault(case, {})
                by_kind.setdefault(kind, {})[int(split)] = mean

    def paired(one: Mapping[int, float], other: Mapping[int, float]) -> str:
        gaps = [one[split] - other[split] for split in sorted(one.keys() & other.keys())]
        if len(gaps) > 2:
            return interval(difference(gaps, 1 / (FOLDS - 1))._asdict())
        return f"{np.mean(gaps):+.4f}" if gaps else ""

    for (suite, metric), cases in tables.items():
        for case, by_kind in cases.items():
            kept, again = (by_kind[kind] for kind in kinds)
            cells = [f"{suite}, {metric}", f"`{case}`", str(len(kept))]
            cells += [f"{np.mean([*one.values()]):.4f}" for one in (kept, again)]
            if kept == again:  # without BatchNorm
                cells[-1], again = "", kept
            alone = cases.get("local", by_kind)["reestimated"]
            cells.append("" if again is kept else paired(again, kept))
            cells.append("" if case == "local" else paired(again, alone))
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def pages(stored: Mapping[str, Any]) -> list[str]:
    """All tables, as docs/evidence_tables.md has them."""
    lines: list[str] = []
    if benchmark := stored.get("benchmark"):
        tasks = benchmark["tasks"]
        for name, task in tasks.items():
            lines += [*of_methods(name, task), "", *task["left_out"], ""]
            if task["metric"] == "auroc":
                lines += [*of_probabilities(name, task), ""]
            if "local" in task.get("thrice", ()):
                lines += [*of_rounds(task), ""]
            if task["arms"]:
                lines += [*of_arms(name, task), ""]
        lines += [*of_compression(tasks), "", *of_claims(tasks), ""]
        found = json.loads(FOUND.read_text(encoding="utf-8"))["tasks"]
        lines += [*of_orders(tasks, found), ""]
        lines += [*of_hospitals(tasks["stroke/hospitals"], benchmark["hospitals"]), ""]
    newer = stored.get("newer", {"tasks": {}, "cells": {}, "cpu_seconds": 0.0})
    lines += of_newer(newer["tasks"])
    if advice := stored.get("advice"):
        lines += [*of_advice(advice), ""]
    if normalization := stored.get("normalization"):
        lines += [*of_normalization(normalization), ""]
    seconds = stored.get("benchmark", {}).get("cpu_seconds", 0.0) + newer["cpu_seconds"]
    seconds += sum(one["cpu_seconds"] for one in stored.get("advice", ()))
    count = len(stored.get("benchmark", {}).get("cells", ())) + len(newer["cells"])
    count += sum(len(one["cells"]) for one in stored.get("advice", ()))
    lines.append(f"{count} cells, {seconds / 3600:.2f} CPU hours.")
    return lines


def main() -> None:
    """Prints the tables, or computes or collects what they are made of."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--advice", type=Path, help="the table; asks for advice and tests it")
    parser.add_argument("--out", type=Path, default=Path("outputs/evidence"))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--collect", type=Path, nargs="+", help="folders of benchmarks")
    parser.add_argument("--table", type=Path, help="with --collect: the table of the hospitals")
    parser.add_argument("--collect-newer", type=Path, nargs="+", help="folders of benchmarks")
    parser.add_argument("--collect-advice", type=Path, help="folder of --advice")
    parser.add_argument("--complete", type=Path, help="the gliomas' folder; lists whole patients")
    parser.add_argument("--collect-normalization", type=Path, nargs="+", help="RESULTS.json")
    options = parser.parse_args()
    if options.complete:
        print(complete(options.complete.resolve(), options.out), "patients are left out")
        return
    if options.advice:
        run_advice(options.advice.resolve(), options.out.resolve(), options.workers)
        return
    stored = json.loads(STORE.read_text()) if STORE.is_file() else {}
    if options.collect:
        before = stored.get("benchmark", {})
        stored["benchmark"] = collect(options.collect, options.table, before)
    if options.collect_newer:
        stored["newer"] = collect_newer(options.collect_newer)
    if options.collect_advice:
        stored["advice"] = collect_advice(options.collect_advice)
    if options.collect_normalization:
        stored["normalization"] = collect_normalization(options.collect_normalization)
    if len(sys.argv) > 1:
        STORE.write_text(json.dumps(stored, indent=1) + "\n")
    print("\n".join(pages(stored)))


if __name__ == "__main__":
    main()
