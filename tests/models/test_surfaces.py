"""Distances of surfaces and how far they agree: against all pairs of points, in millimetres."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from monai.metrics import compute_hausdorff_distance, compute_surface_dice
from scipy.ndimage import binary_erosion
from scipy.spatial.distance import cdist

from medfed.models.segmentation import SegmentationMeter, dice_bce_loss
from medfed.models.segmentation_meter import surface_metrics
from medfed.standalone.errors import ConfigError
from tests.models.tiny import make_task
from tests.sweeps import sweep


def positive(logits: torch.Tensor) -> torch.Tensor:
    return logits > 0


def hausdorff95(pred: torch.Tensor, truth: torch.Tensor, spacing=None) -> float:
    return surface_metrics(pred, truth, spacing)[0].item()


@pytest.mark.parametrize(
    ("found", "overlap", "distance"),
    [(False, 1.0, 0.0), (True, 0.0, math.hypot(4 * 2.0, 4 * 1.5))],
    ids=["rightly empty", "falsely found"],
)
def test_a_region_that_is_nowhere_follows_brats(found, overlap, distance):
    truth, pred = torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4, 4)
    truth[:, 0] = pred[:, 0] = 1
    pred[:, 1, 0, 0] = found
    meter = SegmentationMeter(dice_bce_loss, ["here", "nowhere"], positive, [1.0, 1.0])
    meter.update(pred * 20 - 10, {"label": truth, "spacing": torch.tensor([[2.0, 1.5, 9.0]])})
    scores = meter.compute()
    for name in ("iou", "dice", "dice_case", "nsd"):
        assert scores[f"{name}/nowhere"] == overlap
        assert scores[name] == (1 + overlap) / 2
    assert scores["hd95/here"] == 0
    assert scores["hd95/nowhere"] == pytest.approx(distance)
    assert scores["hd95"] == pytest.approx(distance / 2)


def edges(mask: np.ndarray) -> np.ndarray:
    return np.argwhere(mask & ~binary_erosion(mask))


@pytest.mark.parametrize("spatial", [(20, 18), (12, 11, 10)])
def test_hausdorff_agrees_with_all_pairs(spatial):
    grid = torch.stack(torch.meshgrid(*(torch.arange(n) for n in spatial), indexing="ij"))
    centre = torch.tensor([n // 2 for n in spatial]).view(-1, *(1,) * len(spatial))
    truth = ((grid - centre).square().sum(0) < 14)[None]
    pred = ((grid - centre - 1).square().sum(0) < 9)[None]
    d = cdist(edges(pred[0].numpy()), edges(truth[0].numpy()))
    expected = max(np.percentile(d.min(1), 95), np.percentile(d.min(0), 95))
    assert hausdorff95(pred, truth) == pytest.approx(expected, rel=1e-5)


@pytest.mark.filterwarnings("ignore:.*always_return_as_numpy:FutureWarning")
@pytest.mark.parametrize("spacing", [(1.0, 2.5), (1.0, 1.5, 4.0)])
def test_measured_in_their_box_masks_give_the_same_bits(spacing):
    """Also where they touch the border, or are a voxel thin."""
    size = (14, 12, 9)[: len(spacing)]
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        masks = torch.zeros(2, *size, dtype=torch.bool)
        low = [seed % 2 * n // 3 for n in size]
        for mask in masks:
            box = tuple(slice(start, start + 2 + seed) for start in low)
            mask[box] = torch.rand(mask[box].shape, generator=generator) > 0.4
        masks[:, *low] = True
        p, t = (m[None, None].float() for m in masks)
        more = {"include_background": True, "spacing": spacing}
        expected = compute_hausdorff_distance(p, t, percentile=95, **more).item()
        agreeing = compute_surface_dice(p, t, [1.5], use_subvoxels=True, **more).item()
        found = surface_metrics(*masks[:, None], spacing, [1.5])
        assert [v.item() for v in found] == [expected, agreeing]


def test_hausdorff_of_a_region_that_one_mask_alone_has_is_the_diagonal():
    some = torch.zeros(1, 3, 4, dtype=torch.bool)
    some[..., 1, 1] = True
    none = torch.zeros_like(some)
    assert hausdorff95(none, some) == hausdorff95(some, none) == 5.0
    assert hausdorff95(some, none, spacing=(1.0, 1.0)) == 5.0
    assert hausdorff95(some, none, spacing=(4.0, 1.25)) == 13.0
    assert hausdorff95(none, none) == hausdorff95(some, some) == 0.0


def test_the_diagonal_of_a_brats_volume_is_that_of_the_challenge():
    some = torch.zeros(1, 240, 240, 155, dtype=torch.bool)
    some[..., 100, 100, 100] = True
    assert hausdorff95(some & False, some) == pytest.approx(373.128664, abs=1e-6)


@pytest.mark.parametrize("spacing", [(0.5, 0.5, 5.0), (1.0, 2.0, 0.7)])
def test_distances_of_volumes_and_of_their_slices_are_in_millimetres(spacing):
    g = torch.Generator().manual_seed(2)
    truth = torch.zeros(2, 1, 9, 10, 6)
    truth[0, :, 2:6, 3:8, 1:4] = 1
    truth[1, :, 4:6, 2:5, 2:5] = 1
    pred = truth.roll((1, -2, 1), (2, 3, 4)) * (torch.rand(truth.shape, generator=g) > 0.1)
    mm = np.array(spacing)
    expected = []
    for p, t in zip(pred[:, 0].numpy() > 0, truth[:, 0].numpy() > 0, strict=True):
        d = cdist(edges(p) * mm, edges(t) * mm)
        expected.append(max(np.percentile(d.min(1), 95), np.percentile(d.min(0), 95)))
    volumes, slices = (SegmentationMeter(dice_bce_loss, ["a"], positive, [1.5]) for _ in range(2))
    step = torch.tensor([spacing])
    case = torch.arange(2)
    batch = {"label": truth, "case": case, "spacing": step.expand(2, 3)}
    volumes.update(pred * 20 - 10, batch)
    flat = [t.permute(0, 4, 1, 2, 3).flatten(0, 1) for t in (pred, truth)]  # 2 x 6 slices
    for some in torch.arange(12).split(5):  # batches that span two cases
        label = {"label": flat[1][some], "case": case.repeat_interleave(6)[some]}
        slices.update(flat[0][some] * 20 - 10, label | {"spacing": step.expand(len(some), 3)})
    assert volumes.compute()["hd95"] == pytest.approx(np.mean(expected), rel=1e-5)
    assert volumes.compute() == slices.compute() | {"loss": volumes.compute()["loss"]}
    kept = [row["hd95"] for row in slices.cases()]
    assert kept == pytest.approx(expected, rel=1e-5)


def test_without_spacing_there_is_no_distance():
    truth = torch.ones(1, 1, 4, 4)
    meter = SegmentationMeter(dice_bce_loss, ["a"], positive, [1.0])
    meter.update(truth, {"label": truth})
    assert math.isnan(meter.compute()["hd95"])
    assert math.isnan(meter.compute()["nsd"])


def pieces(mask: np.ndarray, mm: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Centres (mm) and lengths or areas of a surface, between the centres of voxels."""
    mask = np.pad(mask, 1)
    places, sizes = [], []
    for corner in np.ndindex(*(n - 1 for n in mask.shape)):
        cell = mask[tuple(slice(i, i + 2) for i in corner)]
        if cell.any() and not cell.all():
            places.append((np.array(corner) - 0.5) * mm)
            sizes.append(size_of(cell, mm))
    return np.array(places), np.array(sizes)


def size_of(cell: np.ndarray, mm: np.ndarray) -> float:
    """What marching squares or cubes put into a cell; of cubes only those that boxes have."""
    if cell.sum() > cell.size // 2:
        cell = ~cell
    flat = [np.ptp(np.argwhere(cell)[:, axis]) for axis in range(cell.ndim)]  # 0: one layer
    if cell.sum() == 1 and cell.ndim == 3:  # a triangle between the middles of three edges
        a, b, c = mm / 2
        return math.sqrt((a * b) ** 2 + (b * c) ** 2 + (c * a) ** 2) / 2
    if cell.ndim == 2 and (cell.sum() == 1 or all(flat)):  # corners are cut
        return math.hypot(*mm / 2) * cell.sum()
    if cell.ndim == 2:
        return mm[flat.index(1)]
    (along,) = np.flatnonzero(flat) if cell.sum() == 2 else [None]
    if along is None:  # a face
        return float(np.prod(mm[np.flatnonzero(flat)]))
    return float(math.hypot(*np.delete(mm, along) / 2) * mm[along])


def surface_dice(pred: np.ndarray, truth: np.ndarray, mm: np.ndarray, tolerance: float) -> float:
    (at, a), (bt, b) = pieces(pred, mm), pieces(truth, mm)
    d = cdist(at, bt)
    near = a[d.min(1) <= tolerance].sum() + b[d.min(0) <= tolerance].sum()
    return near / (a.sum() + b.sum())


@sweep("tolerance", [0.0, 0.8, 2.1, 5.0])
@sweep("seed", range(3))
def test_surface_dice_of_slices_agrees_with_all_pairs(seed, tolerance):
    mm = np.array([0.7, 1.9])
    g = np.random.default_rng(seed)
    truth = np.zeros((16, 14), bool)
    truth[3:12, 2:11] = g.random((9, 9)) > 0.3  # ragged, with holes
    pred = np.roll(truth, (1, 1), (0, 1)) & (g.random(truth.shape) > 0.1)
    found = surface_metrics(*(torch.tensor(m)[None] for m in (pred, truth)), mm, [tolerance])[1]
    assert found.item() == pytest.approx(surface_dice(pred, truth, mm, tolerance), rel=1e-5)


@sweep("tolerance", [0.0, 1.0, 3.1])
@sweep("spacing", [(0.8, 0.8, 5.0), (1.0, 2.0, 0.7)])
def test_surface_dice_of_volumes_weighs_by_area(spacing, tolerance):
    mm = np.array(spacing)
    pred, truth = np.zeros((2, 12, 11, 9), bool)
    truth[2:8, 3:9, 2:6] = True
    pred[3:8, 3:10, 2:7] = True
    found = surface_metrics(*(torch.tensor(m)[None] for m in (pred, truth)), mm, [tolerance])[1]
    assert found.item() == pytest.approx(surface_dice(pred, truth, mm, tolerance), rel=1e-5)
    assert 0 < found.item() <= 1


def test_every_region_has_its_own_tolerance():
    truth = torch.zeros(1, 2, 9, 9, 9)
    truth[..., 2:6, 2:6, 2:6] = 1
    label = {"label": truth, "spacing": torch.ones(1, 3)}
    task = make_task("segmentation", tolerance={"core": 0.0, "whole": 1.5})
    meter = task.meter(test=True)
    meter.update(truth.roll(1, 2) * 20 - 10, label)
    scores = meter.compute()
    assert scores["nsd/whole"] == 1.0 > scores["nsd/core"]


@sweep(
    ("tolerance", "sentence"),
    [
        ({"whole": 1.0, "cor": 1.0}, "model.tolerance='cor' is unknown; choose whole or core."),
        ({"whole": 1.0}, "model.tolerance lacks the region core; give it in mm"),
        (-1.0, "model.tolerance=-1.0 must be mm, 0 or more"),
        (math.nan, "model.tolerance=nan must be mm, 0 or more"),
    ],
)
def test_tolerances_are_checked(tolerance, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make_task("segmentation", tolerance=tolerance)


def test_two_scans_of_a_patient_are_two_volumes():
    """A case's distance is the mean over its scans, as if each had been measured alone."""
    generator = torch.Generator().manual_seed(0)
    truth = (torch.rand(2, 5, 1, 6, 6, generator=generator) > 0.7).float()
    logits = torch.rand(2, 5, 1, 6, 6, generator=generator) * 4 - 2.6
    both = SegmentationMeter(dice_bce_loss, ["a"], positive, [1.0])
    alone = []
    for scan in (0, 1):
        one = SegmentationMeter(dice_bce_loss, ["a"], positive, [1.0])
        batch = {"label": truth[scan], "case": torch.zeros(5).long()}
        batch["spacing"] = torch.tensor([[1.0, 1.0, 3.0]]).expand(5, -1)
        one.update(logits[scan], batch)
        alone.append(one.compute()["hd95"])
        both.update(logits[scan], {**batch, "scan": torch.full((5,), scan)})
    assert both.compute()["hd95"] == pytest.approx(sum(alone) / 2)
    assert both.cases()[0]["hd95"] == both.compute()["hd95"]
