"""Memberships of canonical models: what is reported, by brute force where there is a sum."""

from __future__ import annotations

import csv
from itertools import permutations

import numpy as np
import pytest
import torch

from medfed.run.memberships import (
    Memberships,
    half_l1,
    leaf_order,
    matched,
)
from medfed.run.pictures import membership_figures
from medfed.run.results import remarks
from tests.integration.runs import resume, run
from tests.run.test_remarks import RUN

DIGITS = (
    "experiment=digits_ppfl",
    "partition.num_clients=8",
    "local.steps=1",
    "model.network.channels=[4,4,4]",
    "logger=none",
    "progress=false",
)


def rows(count: int, models: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet([0.4] * models, count)


def found(**changes) -> Memberships:
    own = rows(6, 3)
    fields = {
        "history": np.stack([np.full((6, 3), 1 / 3), own]),
        "clients": tuple(f"group_{i // 2}_hospital_{i % 2}" for i in range(6)),
    }
    return Memberships(**{**fields, **changes})


@pytest.mark.parametrize("models", [2, 3, 4])
def test_half_l1_is_that_of_the_best_permutation(models):
    """Also where one side has more models than the other has mixtures."""
    truth, own = rows(5, 3), rows(5, models, seed=1)
    width = max(3, models)
    wide = np.zeros((5, width)), np.zeros((5, width))
    wide[0][:, :3], wide[1][:, :models] = truth, own
    every = [np.abs(wide[1][:, p] - wide[0]).sum(1).mean() / 2 for p in permutations(range(width))]
    assert half_l1(own, truth).mean() == pytest.approx(min(every))
    assert half_l1(truth[:, [2, 0, 1]], truth) == pytest.approx(0, abs=1e-12)
    np.testing.assert_allclose(matched(truth[:, [2, 0, 1]], truth), truth)


def test_like_clients_become_neighbours():
    own = np.eye(3)[[0, 1, 2, 0, 1, 2, 0]]
    ordered = own[leaf_order(own)].argmax(1)
    assert (np.diff(ordered) != 0).sum() == 2
    assert leaf_order(own[:1]) == [0]


@pytest.mark.parametrize("clients", [6, 60])
def test_pictures_show_the_truth_where_it_is_known(clients):
    own = rows(clients, 3)
    these = found(
        history=np.stack([own, own]),
        clients=tuple(f"hospital_{i}" for i in range(clients)),
        truth=own,
    )
    figures = membership_figures(these)
    titles = {n: [a.get_title() for a in f.axes if a.get_title()] for n, f in figures.items()}
    assert titles["memberships"] == ["learned (after round 1),\nrenumbered", "true mixtures"]
    assert len(titles["memberships_over_rounds"]) == 3
    np.testing.assert_allclose(
        *(a.images[0].get_array() for a in figures["memberships"].axes[:2]), atol=1e-12
    )


def test_a_run_keeps_memberships_of_all_rounds_also_when_resumed(tmp_path):
    """The state of the selected round knows none of the later ones; the file knows all."""
    straight, experiment = run(
        tmp_path / "a", *DIGITS, "rounds=3", "cohort.fraction=0.5", "pictures.format=png"
    )
    lines = list(csv.DictReader((tmp_path / "a" / "memberships.csv").read_text().splitlines()))
    assert len(lines) == 4 * 8
    values = torch.tensor([[float(r[f"model_{k}"]) for k in range(4)] for r in lines])
    torch.testing.assert_close(values.sum(1), torch.ones(32), atol=1e-4, rtol=0)
    assert torch.equal(values[:8], torch.full((8, 4), 0.25))
    # Half of the clients are absent in a round and keep what they had.
    moved = (values[8:16] != 0.25).any(1)
    assert moved.sum() == 4
    names = [p.stem for p in (tmp_path / "a" / "pictures").glob("memberships*.png")]
    assert sorted(names) == ["memberships", "memberships_over_rounds"]
    assert -1 <= straight["memberships"]["adjusted_rand"] <= 1
    assert straight["memberships"]["planted_groups"] == 4
    assert len(experiment.module.federation.server["history"]["membership"]) > 1

    again, _ = resume(tmp_path / "a", *DIGITS, "rounds=3", "cohort.fraction=0.5")
    assert again["memberships"] == straight["memberships"]
    assert (
        list(csv.DictReader((tmp_path / "a" / "memberships.csv").read_text().splitlines())) == lines
    )


def test_everything_is_of_the_selected_round():
    """Not of the last one, which is told beside it; the CSV has all rounds."""
    groups, apart, together = (0, 0, 1, 1, 2, 2), np.eye(3)[[0, 0, 1, 1, 2, 2]], np.eye(3)[[0] * 6]
    history = np.stack([np.full((6, 3), 1 / 3), apart, together])
    these = found(history=history, groups=groups, truth=apart, selected=1)
    told = these.summary()
    assert (told["round"], told["leading"], told["adjusted_rand"], told["half_l1"]) == (1, 3, 1, 0)
    assert told["half_l1_at_start"] == pytest.approx(2 / 3)
    last = {"round": 2, "leading": 1, "planted_groups": 3, "adjusted_rand": 0.0}
    assert told["last"] == {**last, "half_l1": pytest.approx(2 / 3)}
    (line,) = remarks({**RUN, "memberships": told})[1][-1:]
    assert "round 1: 3 of 3" in line
    assert "after the last round, 2: 1 of 3" in line
    assert len(these.to_csv().splitlines()) == 1 + 3 * 6
    figures = membership_figures(these)
    assert figures["memberships"].axes[0].get_title() == "learned (round 1, selected),\nrenumbered"
    np.testing.assert_array_equal(
        np.sort(figures["memberships"].axes[0].images[0].get_array(), 0), np.sort(apart, 0)
    )
    marked = figures["memberships_over_rounds"].axes[0].lines
    assert [line.get_xdata()[0] for line in marked] == [1, 1]
    last = found(history=history, selected=2).summary()
    line = remarks({**RUN, "memberships": last})[1][-1]
    assert line == "Memberships of round 2: 1 of 3 models lead a client."
    unmarked = membership_figures(found(history=history, selected=2))["memberships_over_rounds"]
    assert not unmarked.axes[0].lines


def test_a_run_reports_the_memberships_that_it_exports(tmp_path):
    """Also where validation selects an earlier round than the last."""
    summary, experiment = run(tmp_path / "a", *DIGITS, "rounds=4", "local.steps=3")
    best = experiment.evaluation.best_round()
    lines = list(csv.DictReader((tmp_path / "a" / "memberships.csv").read_text().splitlines()))
    exported = experiment.module.federation.personal_model("group_1_hospital_0")["membership"]
    (row,) = [
        r for r in lines if r["round"] == str(best + 1) and r["client"] == "group_1_hospital_0"
    ]
    found_row = [float(row[f"model_{k}"]) for k in range(4)]
    assert found_row == pytest.approx(exported.tolist(), abs=1e-5)
    assert summary["memberships"]["round"] == best + 1 == summary["selected_round"] + 1
    assert ("last" in summary["memberships"]) == (best + 1 < 4)


def test_summary_counts_leaders_and_compares_with_the_planted():
    one = np.tile([0.9, 0.1, 0.0], (6, 1))
    assert found(history=one[None]).summary() == {"models": 3, "round": 0, "leading": 1}
    groups = (0, 0, 1, 1, 2, 2)
    told = found(history=np.eye(3)[[2, 2, 0, 0, 1, 1]][None], groups=groups).summary()
    assert told["adjusted_rand"] == 1.0
