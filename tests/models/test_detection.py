"""The detector's loss against a case by hand, its anchors against MONAI's, its boxes and meter."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from monai.apps.detection.utils.ATSS_matcher import ATSSMatcher

from medfed.functional.detection import HIT, SCAN
from medfed.models.detection import DetectionTask, detection_loss, matches
from medfed.models.networks.detector import Detector
from medfed.standalone.detector import CODER, BoxInference
from medfed.standalone.errors import ConfigError

ANCHORS = [[4, 4, 4], [6, 6, 6], [10, 10, 10]]
PATCH = (16, 16, 8)


@pytest.fixture(scope="module")
def task():
    torch.manual_seed(0)
    network = Detector(1, ANCHORS, channels=(4, 4, 8))
    more = {"anchors": ANCHORS, "patch_size": PATCH, "personal": Detector.personal}
    return DetectionTask(network, torch.optim.SGD, **more)


def boxes(*rows):
    return torch.tensor(rows, dtype=torch.float32)[None]


def cross_entropy(logit, target):
    probability = 1 / (1 + math.exp(-logit))
    return -math.log(probability if target else 1 - probability)


def test_the_loss_is_that_of_a_case_by_hand():
    """Twenty anchors in a row; one lesion is the first's, one lies outside over the last two."""
    at = [(6.0 * n, 6.0 * n + 4) for n in range(20)]
    anchors = torch.tensor([[a, 0, 0, b, 4, 4] for a, b in at])
    label = boxes((0.5, 0, 0, 4.5, 4, 4, 1), (108, 0, 0, 118, 4, 4, -1), (0,) * 7)
    logits = [0.3, *(n / 4 - 2 for n in range(1, 20))]
    codes = torch.zeros(1, 20, 6)
    codes[0, 0] = torch.tensor([0.1, 0, 0, 0, 0.5, 0])
    # The first anchor is the lesion's; the last two are nothing; 16 of the 17 others are hard.
    hard = sorted((cross_entropy(logit, 0) for logit in logits[1:18]), reverse=True)[:16]
    # Numbers of the box: half a voxel of four to the right; smooth L1 is linear beyond 0.1.
    distance = 0.5 * (0.125 - 0.1) ** 2 / 0.1 + (0.5 - 0.05)
    expected = cross_entropy(0.3, 1) + distance + sum(hard) / 16
    found = detection_loss(torch.tensor([logits]), codes, anchors, label)
    assert found.item() == pytest.approx(expected, rel=1e-6)
    # A patch without a lesion has hard negatives alone; a batch is the mean of its patches.
    nothing = torch.zeros(1, 1, 7)
    hardest = sorted((cross_entropy(logit, 0) for logit in logits), reverse=True)[:16]
    alone = detection_loss(torch.tensor([logits]), codes, anchors, nothing)
    assert alone.item() == pytest.approx(sum(hardest) / 16, rel=1e-6)
    both = torch.cat([label, torch.zeros_like(label)])
    mean = detection_loss(torch.tensor([logits] * 2), codes.repeat(2, 1, 1), anchors, both)
    assert mean.item() == pytest.approx((expected + sum(hardest) / 16) / 2, rel=1e-6)


def test_anchors_belong_to_the_lesions_to_which_monai_gives_them():
    logging.disable(logging.INFO)
    theirs = ATSSMatcher(4, center_in_gt=False)
    logging.disable(logging.NOTSET)
    anchors = BoxInference(ANCHORS).grid(torch.zeros(1, 21, 12, 12, 6))
    random, alike = torch.Generator().manual_seed(0), 0
    for _ in range(12):
        middle = torch.rand(3, 3, generator=random) * torch.tensor([20.0, 20, 8]) + 2
        half = torch.rand(3, 1, generator=random) * 4 + 1.4
        lesions = torch.cat([middle - half, middle + half], 1)
        ours = matches(lesions, anchors)
        expected = theirs.compute_matches(lesions, anchors, [12 * 12 * 6], 3)[1]
        more = ours != expected
        # Each lesion without an anchor has here the one that overlaps it most.
        assert len(set(ours.tolist())) == 4
        assert bool((expected[more] == -1).all())
        alike += not more.any()
    assert alike > 6


def test_the_map_of_the_right_numbers_gives_the_lesions(task):
    """Through the window's inference: scores and numbers that a perfect network would give."""
    label = boxes((2.2, 3, 1, 7, 8.5, 6, 1), (20, 18, 9, 29, 27, 17.5, 1))
    shape = (1, 21, 16, 16, 12)
    anchors = task.inference.grid(torch.zeros(shape))
    own = matches(label[0, :, :6], anchors)
    score = torch.where(own >= 0, 6.0, -9.0).view(16, 16, 12, 3)
    codes = torch.zeros(len(anchors), 6)
    codes[own >= 0] = CODER.encode_single(label[0, own[own >= 0], :6], anchors[own >= 0])
    codes = codes.view(16, 16, 12, 3, 6)
    logits = torch.cat([score.movedim(-1, 0), codes.movedim((-2, -1), (0, 1)).flatten(0, 1)])[None]
    ((found, scores),) = task.inference.boxes_of(logits, (32, 32, 24))
    assert len(found) == 2
    order = found[:, 0].argsort()
    torch.testing.assert_close(found[order], label[0, :, :6], rtol=1e-5, atol=1e-4)
    assert scores.tolist() == pytest.approx([0.9975, 0.9975], abs=1e-4)
    meter = task.meter()
    image, mm = torch.zeros(1, 1, 32, 32, 24), torch.full((1, 3), 1.5)
    meter.update(logits, {"image": image, "label": label, "spacing": mm, "case": torch.tensor([5])})
    assert [row["found"] for row in meter.cases()] == [SCAN, HIT, HIT]
    assert {row["case"] for row in meter.cases()} == {5}
    measured = meter.compute()
    assert measured["lesion_cpm"] == measured["lesions_found"] == 1.0
    assert measured["loss"] < 0.05


def test_scans_are_evaluated_by_windows_and_padded(task):
    image = torch.rand(1, 1, 21, 16, 13, generator=torch.Generator().manual_seed(1))
    logits = task.logits({"image": image})
    assert logits.shape == (1, 21, 12, 8, 8)
    small = image[:, :, :16, :, :8]
    torch.testing.assert_close(task.logits({"image": small}), task.forward(small))
    label = torch.zeros(1, 1, 7)
    measured = task.evaluate([{"image": image, "label": label}])
    assert math.isnan(measured["lesion_cpm"])
    assert math.isfinite(measured["loss"])
    failed = task.measured([{"image": image * math.nan, "label": boxes((1, 1, 1, 6, 6, 6, 1))}])
    assert failed.compute()["lesion_cpm"] == 0.0
    assert failed.compute()["loss"] == math.inf


def test_numbers_that_no_detector_can_have_are_refused():
    network = Detector(1, ANCHORS, channels=(4,))
    for keys in ({"anchors": [[3, 4, 4]]}, {"threshold": 1.0}, {"boxes": 0}, {"overlap": 1.0}):
        more = {"anchors": ANCHORS, "patch_size": PATCH, "personal": "*"} | keys
        with pytest.raises(ConfigError, match=next(iter(keys))):
            DetectionTask(network, torch.optim.SGD, **more)
