"""A pilot without each hospital: who harms the others, and what a hospital outside gets."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import replace
from itertools import combinations, permutations

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from medfed.benchmark.absence import advise_without, answer_of, sentences_of
from medfed.commands.advise import main
from medfed.federation.reference import onboarded_client, outsiders_model, run_reference
from medfed.functional.statistics import difference
from medfed.reports.tasks import overlap_of
from medfed.standalone.errors import ConfigError
from tests.contract.harness import federation
from tests.reports.test_advice import SPLITS, asks, write
from tests.toys import toy_data

NAMES = ["a", "b", "c"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("without")
    three = {name: SPLITS[name] for name in ("north", "south", "tiny")}
    (folder / "splits.json").write_text(json.dumps({"clients": three}))
    write(folder / "table.csv")
    return folder


def test_what_is_said_is_what_the_cells_hold(folder):
    given = {"folds": 2, "repeats": 1, "workers": 0, "out": folder / "out"}
    answer, where = advise_without(asks(folder), "fedavg", **given)
    cells: dict[tuple[str, str], list] = {}
    for path in sorted((folder / "out" / "cells").rglob("*.json")):
        content = json.loads(path.read_text())
        _, variant, method, _ = content["name"].split("/")
        cells.setdefault((variant, method), []).append(content["result"])
    assert len(cells) == 5
    whole, without, alone = (
        cells[key] for key in (("all", "fedavg"), ("without_south", "fedavg"), ("all", "local"))
    )
    member, other = answer.members["south"], answer.members["north"]
    assert other.seen == pytest.approx(np.mean([r["clients"]["north"]["auroc"] for r in whole]))
    assert member.unseen == pytest.approx(
        np.mean([r["outside"]["south"]["auroc"] for r in without])
    )
    assert all("south" not in r["clients"] for r in without)
    assert member.alone == pytest.approx(np.mean([r["clients"]["south"]["auroc"] for r in alone]))
    gains = []
    for one, another in zip(whole, without, strict=True):
        pairs = [[r["clients"][n]["auroc"] for r in (one, another)] for n in ("north", "tiny")]
        gains.append(np.mean([a - b for a, b in pairs if None not in (a, b)]))
    assert member.gives == pytest.approx(difference(gains, overlap_of(whole)))
    page = (where / "without.md").read_text()
    assert f"| south | {member.seen:.4f} | {member.unseen:.4f} | {member.alone:.4f} |" in page
    assert json.loads((where / "without.json").read_text())["metric"] == "auroc"


def test_the_command_without_sets_has_shapleys_values_of_its_cells(folder, monkeypatch):
    """From the command line to the page: each value is the mean over all orders of joining."""
    monkeypatch.chdir(folder)
    words = ["methods=[fedavg]", "without=sets", "folds=2", "repeats=1", "out=sets"]
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: ())  # so that it works here
    monkeypatch.setattr(sys, "argv", ["advise", *asks(folder), *words])
    main(sys.argv[1:])
    cells: dict[frozenset[str], list] = {}
    for path in sorted((folder / "sets" / "cells").rglob("*.json")):
        content = json.loads(path.read_text())
        _, variant, method, _ = content["name"].split("/")
        if method == "fedavg":
            away = frozenset(variant.split("_")[1:])
            cells.setdefault(away, []).append(content["result"])
    hospitals = frozenset(cells[frozenset()][0]["patients"])
    assert len(cells) == 2 ** len(hospitals) - 1 == 7

    def worth(members: frozenset[str], division: int) -> float:
        if not members:
            constant = cells[frozenset()][division]["constant"]
            return float(np.mean([*next(iter(constant.values())).values()]))
        result = cells[hospitals - members][division]
        every = {**result["clients"], **result["outside"]}
        return float(np.mean([every[c]["auroc"] for c in hospitals]))

    (file,) = (folder / "sets").rglob("without.json")
    found = json.loads(file.read_text())
    for c in hospitals:
        each = []
        for division in range(2):
            gains = []
            for order in permutations(sorted(hospitals)):
                before = frozenset(order[: order.index(c)])
                gains.append(worth(before | {c}, division) - worth(before, division))
            each.append(np.mean(gains))
        assert found["members"][c]["share"][0] == pytest.approx(np.mean(each), abs=1e-9)
    assert found["apart"][1] == 3
    assert "Shapley value" in file.with_name("without.md").read_text()


def trained(seed: int, flipped: bool):
    """Logistic regressions of five hospitals, in ten divisions; one may have flipped labels."""
    rng, sizes = np.random.default_rng(seed), dict.fromkeys("abcd", 250) | {"odd": 700}
    data, parts = {}, {}
    for h, n in sizes.items():
        x = rng.normal(size=(n, 8))
        chance = 1 / (1 + np.exp(-x @ [1.0, -0.7, 0.5, 0, 0, 0, 0, 0]))
        y = (rng.random(n) < chance).astype(int)
        data[h] = x, 1 - y if flipped and h == "odd" else y
    absent = {"all": frozenset(), **{f"without_{h}": frozenset([h]) for h in sizes}}
    results, alone = {variant: [] for variant in absent}, []
    for division in range(10):
        for h, n in sizes.items():
            turn = np.random.default_rng([seed, division // 5, n]).permutation(n) % 5
            parts[h] = turn == division % 5

        def fit(hospitals):
            rows = [(x[~parts[h]], y[~parts[h]]) for h in hospitals for x, y in [data[h]]]
            return LogisticRegression(C=10).fit(*map(np.concatenate, zip(*rows, strict=True)))

        def score(model, h):
            x, y = (of[parts[h]] for of in data[h])
            return {"auroc": roc_auc_score(y, model.decision_function(x))}

        counts = {h: {"train": n * 4 // 5, "val": 0, "test": n // 5} for h, n in sizes.items()}
        for variant, away in absent.items():
            model = fit([h for h in sizes if h not in away])
            one = {"metric": ["auroc", "max"], "patients": counts}
            one["clients"] = {h: score(model, h) for h in sizes if h not in away}
            results[variant].append({**one, "outside": {h: score(model, h) for h in away}})
        alone.append({"clients": {h: score(fit([h]), h) for h in sizes}, "outside": {}})
    return answer_of("fedavg", absent, results, {"all": alone})


def test_a_hospital_with_flipped_labels_is_found():
    answer = trained(3, flipped=True)
    assert answer.named("harms the others") == ["odd"]
    assert min(answer.members, key=lambda c: answer.members[c].gives.mean) == "odd"
    assert answer.members["odd"].gives.high < 0
    said = " ".join(sentences_of(answer))
    assert "odd surely lowers the others: check its labels and units." in said
    assert "cannot rank" not in said


def test_hospitals_that_are_alike_are_not_ranked():
    answer = trained(0, flipped=False)
    assert {one.verdict for one in answer.members.values()} == {"cannot tell"}
    said = " ".join(sentences_of(answer))
    assert "These data cannot rank the hospitals." in said
    assert f"changes by less than {answer.largest:.2g} (95 %)" in said
    assert all(abs(one.gives.mean) < answer.largest for one in answer.members.values())


def test_the_largest_change_is_said_only_where_it_is_known():
    answer = trained(0, flipped=False)
    said = sentences_of(replace(answer, largest=math.nan))
    assert not any("nan" in line or "changes by less" in line for line in said)


def results_of(seed: int, falls: bool = False):
    """Made results of all sets of three hospitals, in six divisions."""
    rng, metric = np.random.default_rng(seed), "loss" if falls else "auroc"
    counts = {c: {"train": 30, "val": 10, "test": 10} for c in NAMES}
    results, absent = {}, {}
    for size in range(3):
        for some in combinations(NAMES, size):
            name = "_".join(["without", *some]) if some else "all"
            absent[name], results[name] = frozenset(some), []
            for _ in range(6):
                score = {c: {metric: float(rng.random())} for c in NAMES}
                one = {"metric": [metric, "min" if falls else "max"], "patients": counts}
                one["clients"] = {c: score[c] for c in NAMES if c not in some}
                one["outside"] = {c: score[c] for c in some}
                one["constant"] = {"share": {c: float(rng.random()) for c in NAMES}}
                results[name].append(one)
    return results, absent


@pytest.mark.parametrize("falls", [False, True])
def test_shapley_values_are_means_over_orders_of_joining(falls):
    results, absent = results_of(0, falls)
    metric, sign = ("loss", -1) if falls else ("auroc", 1)
    answer = answer_of("fedavg", absent, results, {"all": results["all"]})

    def worth(members: frozenset, s: int) -> float:
        if not members:
            return sign * np.mean([*results["all"][s]["constant"]["share"].values()])
        name = next(n for n, away in absent.items() if away == frozenset(NAMES) - members)
        result = results[name][s]
        return sign * np.mean(
            [{**result["clients"], **result["outside"]}[c][metric] for c in NAMES]
        )

    for c in NAMES:
        each = [
            np.mean(
                [
                    worth(frozenset(order[: order.index(c) + 1]), s)
                    - worth(frozenset(order[: order.index(c)]), s)
                    for order in permutations(NAMES)
                ]
            )
            for s in range(6)
        ]
        expected = difference(each, overlap_of(results["all"]))
        assert answer.members[c].share == pytest.approx(expected)
    assert answer.apart == (0, 3)
    assert answer.table.head[-1] == "Shapley value"
    seen = np.mean([r["clients"]["a"][metric] for r in results["all"]])
    assert answer.members["a"].seen == pytest.approx(seen)  # in the metric's own direction


@pytest.mark.parametrize(
    ("method", "has"), [("fedavg", True), ("fedrep", False), ("fedamp", False), ("local", False)]
)
def test_which_methods_have_a_model_for_a_hospital_without_patients(method, has):
    _, fed, _ = federation(method)
    run_reference(fed, 1)
    before = fed.digests()
    client = onboarded_client(fed, toy_data(4)[3])
    model = outsiders_model(fed, client)
    assert (model is not None) == has
    assert client.steps_done == 0
    assert fed.digests() == before
    if model is not None:
        shared = fed.server["shared"]
        assert {*shared} <= {*model}
        assert all(bool((model[name] == value).all()) for name, value in shared.items())


def test_a_method_without_a_model_for_outsiders_says_so():
    results, absent = results_of(1)
    for of in results.values():
        for result in of:
            result["outside"] = {}
    one = {v: away for v, away in absent.items() if len(away) < 2}
    answer = answer_of("fedavg", one, {v: results[v] for v in one}, {"all": results["all"]})
    assert all(np.isnan(member.unseen) for member in answer.members.values())
    assert any("no whole model for a hospital without patients" in s for s in sentences_of(answer))


@pytest.mark.parametrize(("hospitals", "sets", "wrong"), [(2, False, "three"), (9, True, "8 at")])
def test_too_few_and_too_many_hospitals(hospitals, sets, wrong, folder):
    clients = {
        f"h{n}": {s: [f"h{n}_{s}_{k}" for k in range(4)] for s in ("train", "val", "test")}
        for n in range(hospitals)
    }
    lines = ["patient,centre,label,f0"]
    for name, parts in clients.items():
        ids = (i for part in parts.values() for i in part)
        lines += [f"{i},{name},{k % 2},{k}" for k, i in enumerate(ids)]
    (folder / "few.csv").write_text("\n".join(lines))
    (folder / "few.json").write_text(json.dumps({"clients": clients}))
    question = asks(folder, "few.csv", f"partition.file={folder / 'few.json'}")
    with pytest.raises(ConfigError, match=wrong):
        advise_without(question, "fedavg", sets=sets, out=folder / "none")
    assert not (folder / "none").exists()
