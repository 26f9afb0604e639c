"""The decision card: which method stands there, by which tasks, and which tasks show none."""

from __future__ import annotations

import numpy as np

from medfed.reports.findings import judged
from medfed.reports.sentences import card
from medfed.reports.tasks import Scores, Task

SPLITS, CLIENTS = 8, 3
SENT = {"local": 0.0, "fedavg": 400.0, "ditto": 300.0, "pfednet": 900.0}


def task(name: str, situation: str = "", noise: float = 0.01, **gains: float) -> Task:
    """Methods that gain so much over 0.5."""
    found = Task("made", name, "auroc", clients=("a", "b", "c"), situation=situation)
    rng = np.random.default_rng(0)
    for method, gain in {"local": 0.0, **gains}.items():
        values = 0.5 + gain + noise * rng.normal(size=(SPLITS, CLIENTS))
        drawn = np.zeros((SPLITS, 0, CLIENTS))
        found.scores[method] = Scores(method, values, drawn, (SENT[method], 0.0), 1.0, 0, {})
    return found


def rows(*tasks: Task) -> list[dict[str, str]]:
    table = card(judged(tasks).tasks)
    return [{n: c.text for n, c in zip(table.head, row, strict=True)} for row in table.rows]


def test_each_situation_has_the_methods_that_its_tasks_show():
    alike = [task(n, "alike", fedavg=0.1, ditto=0.1) for n in ("one", "two")]
    unlike = task("three", "unlike", fedavg=-0.1, ditto=0.1, pfednet=0.2)
    alone = task("four", "unlike", fedavg=-0.1, ditto=0.0)
    found = rows(*alike, unlike, alone)
    assert [(r["situation"], r["best shown"]) for r in found] == [
        ("alike", "FedAvg"), ("unlike", "pfednet"), ("unlike", "local training"),
        ("bytes are scarce", "ditto"),
    ]  # fmt: skip
    assert found[0]["how sure"].startswith("2 of 2 tasks (made/one, made/two): p < 0.001 (Holm)")
    assert found[0]["over FedAvg"] == "–"
    assert found[1]["over local training"].startswith("+0.2")
    assert found[1]["cost of a run"] == "passes 1.00; 900 B, 2.2 times FedAvg's"
    assert found[2]["over FedAvg"].startswith("+0.09")  # what FedAvg loses
    assert found[3]["cost of a run"] == "passes 1.00; 300 B, 0.75 times FedAvg's"


def test_one_task_stands_by_its_name_and_names_the_hospitals():
    own = task("runs", fedavg=0.1)
    own.scores["fedavg"].values[:, 1] = 0.3
    (row,) = rows(own)
    assert row["situation"] == "made/runs"
    assert row["harms"].endswith("surely b")


def test_generated_and_real_data_have_lines_of_their_own():
    ones = [task(n, "alike", fedavg=0.1) for n in ("one", "two")]
    for one, data in zip(ones, ("real", "generated"), strict=True):
        one.data = data
    assert [(r["situation"], r["data"]) for r in rows(*ones)] == [
        ("alike", "real"), ("alike", "generated"),
    ]  # fmt: skip


def test_tasks_that_show_nothing_say_what_they_could_have_shown():
    nothing = [task(n, "few patients", noise=0.2, fedavg=0.0) for n in ("one", "two")]
    (row,) = rows(*nothing)
    each = [v["fedavg"].against["local"].difference.detectable for _, v in judged(nothing).tasks]
    ends = " to ".join(dict.fromkeys(f"{gap:.2g}" for gap in sorted(each)))
    assert row["best shown"] == "none"
    unseen = f"gains below {ends} of auroc may go unseen"
    assert row["how sure"] == f"none of 2 tasks shows a method; {unseen}"
    for sentence, *_ in judged(nothing).answers.values():
        assert "a gain of 0.02 takes about" in sentence
