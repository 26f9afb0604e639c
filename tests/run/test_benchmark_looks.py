"""What a cell keeps for pictures is what the run has: course, slices, drawings, memberships."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from medfed.benchmark.work import content_of_pictures, course
from medfed.common.scores import rounded
from medfed.models.contours import Case
from medfed.records.predictions import SIDE, packed, read_predictions, unpacked
from tests.integration.runs import imaging, run


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    """A finished run on a few small heads, and what is kept of it."""
    root = tmp_path_factory.mktemp("looks")
    _, experiment = run(root / "run", *imaging(root / "data"))
    return experiment, content_of_pictures(experiment)


def test_the_course_adds_up(scans):
    experiment, _ = scans
    ledger, evaluation = experiment.module.federation.ledger, experiment.evaluation
    found = course(experiment)
    assert [row["round"] for row in found] == [1, 2]
    assert [row["passes"] for row in found] == [0.5, 1.0]
    until = np.cumsum([ledger.total(round=n) for n in range(2)])
    assert [row["bytes"] for row in found] == until.tolist()
    metric, mode = evaluation.selection
    for number, row in enumerate(found):
        values = [r.metrics[metric] for r in evaluation.history if r.round == number]
        sign = 1 if mode == "max" else -1
        assert row["score"] == pytest.approx(sign * np.mean([rounded(v) for v in values]))
        assert row["worst"] == min(sign * v for v in values)


def test_slices_unpack_to_what_was_predicted(scans):
    experiment, found = scans
    kept = found["slices"]
    assert kept["regions"] == list(experiment.task.regions)
    clients = experiment.module.federation.ids
    saved = read_predictions({"own": Path(experiment.folder)}, clients)
    again = unpacked(kept["clients"], "mine")
    assert list(again) == list(saved) == list(clients)
    for client, case in again.items():
        assert torch.equal(case.truth, saved[client].truth)
        apart = case.probabilities["mine"] - saved[client].probabilities["own"]
        assert float(apart.abs().max()) <= 1 / 255
        assert case.image.shape == (1, *case.truth.shape[1:])
        assert 0 <= float(case.image.min()) < float(case.image.max()) <= 1


def test_pictures_are_svg(scans):
    _, found = scans
    assert "graph" in found["pictures"]
    for text in found["pictures"].values():
        assert ElementTree.fromstring(text).tag.endswith("svg")


def test_of_a_large_slice_the_part_around_the_truth_is_kept():
    rng = np.random.default_rng(0)
    image = torch.from_numpy(rng.normal(size=(2, 300, 100)).astype(np.float32))
    probability = torch.from_numpy(rng.random((1, 300, 100)).astype(np.float32))
    truth = torch.zeros(1, 300, 100)
    truth[0, 250:290, 20:60] = 1
    case = unpacked({"c": packed(Case(image, truth, {"own": probability}))}, "m")["c"]
    rows = slice(300 - SIDE, 300)  # as near as the edge lets it
    assert torch.equal(case.truth, truth[:, rows])
    assert float((case.probabilities["m"] - probability[:, rows]).abs().max()) <= 0.5 / 255 + 1e-6
    low, high = np.percentile(image[0].numpy(), (1, 99.5))
    grey = ((image[0] - low) / (high - low)).clamp(0, 1)[rows]
    assert float((case.image[0] - grey).abs().max()) <= 0.5 / 255 + 1e-6


def test_memberships_are_those_of_the_run(tmp_path):
    keys = ("experiment=synthetic_ppfl", "data.clients=4", "data.samples=60", "rounds=2")
    short = ("local.steps=2", "evaluation.every=1", "logger=none", "progress=false")
    _, experiment = run(tmp_path / "run", *keys, *short)
    kept = content_of_pictures(experiment)["memberships"]
    assert kept["clients"] == list(experiment.module.federation.ids)
    best = experiment.evaluation.best_round()
    at = -1 if best is None else best + 1
    rows = experiment.module.federation.memberships()[at]
    assert np.abs(np.array(kept["rows"]) - rows.numpy()).max() <= 1e-5
    truth = [experiment.data.mixtures[client] for client in kept["clients"]]
    assert np.abs(np.array(kept["truth"]) - np.array(truth)).max() <= 1e-5
