"""medfed evaluate subsets=...: every client's model on subsets of its channels."""

from __future__ import annotations

import csv
import json
import logging
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from medfed.reports.findings import report_on
from medfed.reports.subsets import find, heat_map
from medfed.run.evaluation import (
    Subsets,
    find_subsets,
    measure_subsets,
    show_subsets,
    table_of,
)
from medfed.run.finished import reopen_selected
from medfed.standalone.errors import CheckpointError, ConfigError
from tests.integration.runs import ROOT, imaging, left_in, run

COLOURS = (
    *("experiment=medmnist_pfednet", "algorithm=fedper", "rounds=1", "local.steps=2"),
    *("data.generated.images=[60,30,30]", "partition=channel_missing", "partition.preset=table"),
    *("partition@partition.assignment=round_robin", "partition.assignment.num_clients=2"),
    *("partition.table={hospital_0:[red,blue]}", "logger=none", "progress=false"),
)


@pytest.fixture(scope="module")
def scans(tmp_path_factory, cohort_root) -> Path:
    """Two hospitals that lack FLAIR and T1w."""
    folder = tmp_path_factory.mktemp("subsets") / "scans"
    run(folder, *imaging(cohort_root), "algorithm=fedavg")
    return folder


@pytest.fixture(scope="module")
def measured(scans) -> Subsets:
    return measure_subsets(scans, "all")


def test_who_lacks_a_channel_is_not_measured_with_it(measured):
    assert len(measured.subsets) == 15
    assert [set(s) for s in measured.subsets[:4]] == [{"FLAIR"}, {"T1w"}, {"T1gd"}, {"T2w"}]
    for client, lacking in (("hospital_0", "FLAIR"), ("hospital_1", "T1w")):
        expected = [s for s in measured.subsets if lacking not in s]
        assert list(measured.metrics[client]) == expected
        assert len(expected) == 7


def test_all_that_a_client_has_gives_the_summary_again(scans, measured):
    summary = json.loads((scans / "summary.json").read_text())
    for client, by_subset in measured.metrics.items():
        whole = by_subset[max(by_subset, key=len)]
        assert whole == {n: summary["clients"][client][n] for n in whole}


def test_dice_with_two_channels_by_hand(scans, measured):
    """Images zeroed and masks counted in NumPy, with the weights that the run has saved."""
    experiment = reopen_selected(scans)
    names = experiment.data.channel_names
    for client in measured.metrics:
        network = experiment.task.network.eval()
        experiment.module.local.model.load(experiment.module.federation.personal_model(client))
        hits = sizes = 0
        for batch in experiment.data.clients[client].eval_batches("test"):
            image = batch["image"].numpy().copy()
            for place, name in enumerate(names):
                if name not in ("T1gd", "T2w"):
                    image[:, place] = 0
            with torch.no_grad():
                found = network(torch.from_numpy(image)).numpy() > 0
            truth = batch["label"].numpy() > 0.5
            hits, sizes = hits + 2 * (found & truth).sum(), sizes + found.sum() + truth.sum()
        assert measured.metrics[client][("T1gd", "T2w")]["dice"] == pytest.approx(hits / sizes)


def test_what_is_written_and_that_nothing_else_is(scans, measured, capsys):
    before = {n: (scans / n).read_bytes() for n in left_in(scans)}
    show_subsets(measured, scans)
    after = {n: (scans / n).read_bytes() for n in left_in(scans)}
    new = {"subsets_test.csv", "pictures/subsets_test.png"}
    assert {n: b for n, b in after.items() if n not in new} == before
    assert set(after) - set(before) == new
    with (scans / "subsets_test.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 14
    for row in rows:
        subset = tuple(row["channels"].split("+"))
        assert int(row["missing"]) == 3 - len(subset)
        assert float(row["dice"]) == measured.metrics[row["client"]][subset]["dice"]
    text = capsys.readouterr().out
    assert "test Dice on subsets" in text
    assert "test IoU on subsets" in text
    assert "FLAIR+T1w+T1gd+T2w" in text
    assert "0 of 2" in text


def test_the_heat_map_says_every_number(measured):
    values = table_of(measured, "dice")
    assert values.shape == (3, 15)
    mean = measured.subsets.index(("T1gd", "T2w"))
    assert values[2, mean] == pytest.approx(values[:2, mean].mean())
    names = ["a", "b", "mean"]
    figure = heat_map(values, names, measured.subsets, measured.channels, "Dice", mean=True)
    texts = [t.get_text() for t in figure.axes[0].texts]
    assert texts == ["–" if math.isnan(v) else f"{v:.2f}" for v in values.ravel()]


def test_methods_compared_by_the_channels_that_are_lost(scans, measured, cohort_root, tmp_path):
    dropout = ("augment.channel_dropout=1", "augment.rescale=sqrt", "algorithm.mask_aware=true")
    run(tmp_path / "other", *imaging(cohort_root), "algorithm=fedavg", *dropout)
    other = measure_subsets(tmp_path / "other", "all")
    assert other.metrics != measured.metrics
    show_subsets(measured, scans)
    both = report_on([scans, tmp_path / "other"])
    find(both)
    assert not both.tables
    before = len(both.notes)
    show_subsets(other, tmp_path / "other")
    find(both)
    rows = list(csv.DictReader(both.tables["missing_channels"].splitlines()))
    values = {(r["method"], r["by"], r["name"]): float(r["value"]) for r in rows if r["value"]}
    for method, one in zip(both.runs, (measured, other), strict=True):
        for lost in range(3):
            chosen = [
                metrics["dice"]
                for by_subset in one.metrics.values()
                for subset, metrics in by_subset.items()
                if len(subset) == 3 - lost
            ]
            assert values[method, "lost", str(lost)] == pytest.approx(np.mean(chosen))
        for subset in one.subsets:
            chosen = [m[subset]["dice"] for m in one.metrics.values() if subset in m]
            if chosen:
                name = "+".join(subset)
                assert values[method, "channels", name] == pytest.approx(np.mean(chosen))
    sentences = both.notes[before:]
    assert len(sentences) == 2
    assert "with all, " in sentences[0]
    assert "without 1 of them" in sentences[0]
    assert list(both.pictures) == ["missing_channels"]
    header = (scans / "subsets_test.csv").read_text().splitlines()[0]
    (scans / "subsets_test.csv").write_text(f"{header}\na,T1w+FLAIR,0\n")
    with pytest.raises(CheckpointError, match=r"subsets_test\.csv"):
        find(both)
    (scans / "subsets_test.csv").write_text(f"{header}\n")
    empty = report_on([scans, tmp_path / "other"])
    find(empty)
    assert not empty.tables


def test_images_of_colour_and_a_list(tmp_path):
    run(tmp_path / "run", *COLOURS, f"data.root={tmp_path}")
    found = measure_subsets(tmp_path / "run", ["Red", "green+blue", "red+green+blue"], "val")
    assert found.subsets == (("red",), ("green", "blue"), ("red", "green", "blue"))
    assert [len(m) for m in found.metrics.values()] == [1, 3]
    show_subsets(found, tmp_path / "run")
    assert (tmp_path / "run" / "pictures" / "subsets_val.png").is_file()


def test_neighbouring_slices_of_a_contrast_go_together(tmp_path, cohort_root):
    keys = ("data.slices=3", "augment.channel_dropout=1", "algorithm.mask_aware=true", "rounds=1")
    _, experiment = run(tmp_path, *imaging(cohort_root), "algorithm=fedavg", *keys)
    client = experiment.data.clients["hospital_0"]
    kept = torch.cat([b["channels"] for b in client.train_batches(0)]).unflatten(1, (4, 3))
    assert bool((kept == kept[:, :, :1]).all())
    assert len({tuple(row) for row in kept[:, :, 0].tolist()}) > 2
    found = measure_subsets(tmp_path, ["T1gd", "T1w+T1gd+T2w"])
    assert list(found.metrics["hospital_0"]) == [("T1gd",), ("T1w", "T1gd", "T2w")]
    assert list(found.metrics["hospital_1"]) == [("T1gd",)]


@pytest.mark.parametrize(
    ("wanted", "split", "message"),
    [
        ("FLAIRE", "test", r"Unknown channel FLAIRE; .*did you mean FLAIR"),
        ("FLAIR+T1w", "test", r"subsets=FLAIR\+T1w: no client has all of these channels"),
    ],
)
def test_mistakes_are_one_sentence(scans, wanted, split, message):
    before = left_in(scans)
    with pytest.raises(ConfigError, match=message):
        measure_subsets(scans, wanted, split)
    assert left_in(scans) == before


def test_too_many_channels_for_all_subsets():
    with pytest.raises(ConfigError, match="30 channels have 1073741823 subsets, too many"):
        find_subsets("all", tuple(f"x{i}" for i in range(30)))


def test_the_command_line(scans, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import evaluate  # the script

    logging.getLogger().handlers.clear()
    evaluate.main([f"run={scans}", "subsets=[T2w,T1gd+T2w]", "split=val"])
    assert "val Dice on subsets" in capsys.readouterr().out
    assert len((scans / "subsets_val.csv").read_text().splitlines()) == 5
    with pytest.raises(SystemExit):
        evaluate.main([f"run={scans}", "subsets=all", "onboard=all"])
    assert "separate evaluations" in capsys.readouterr().err
    for key, sentence in {
        "subsets=[]": "subsets must be a list with at least one entry, not [].",
        "split=tset": "split='tset' is unknown (did you mean test?)",
    }.items():
        with pytest.raises(SystemExit):
            evaluate.main([f"run={scans}", key])
        assert sentence in capsys.readouterr().err
