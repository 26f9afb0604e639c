"""The meter of segmentations: overlaps and surfaces, per region and case, and over cases.

Every measure has a value, also where a region is nowhere, by the conventions of the BraTS
challenges: a mask that is rightly empty is perfect (Dice and surface Dice 1, distance 0 mm), one
that is wrongly empty or wrongly not so is as wrong as can be (Dice and surface Dice 0, distance the
diagonal of the image, which is 373.13 mm for BraTS's 240 x 240 x 155 voxels of 1 mm). MONAI, which
measures the rest, has NaN and infinity there, which no mean over cases survives.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medfed.common.scores import mean_of_parts
from medfed.functional.points import AT_POINT, at_point
from medfed.functional.scores import Floats
from medfed.models.meters import Batch, Columns, Scan, Spacing, Volumes, scores_of, spacings
from medfed.standalone.preparation import bounding_box


def slice_with_most(label: Tensor) -> int:
    """Picks the slice of ``(S, R, H, W)`` with the most labelled voxels over all regions."""
    return int((label > 0.5).flatten(1).sum(1).argmax())


def overlap_counts(pred: Tensor, truth: Tensor) -> Tensor:
    """Counts true positives, predicted and labelled voxels.

    `pred` is ``(B, R, *spatial)`` boolean. Returns ``(B, R, 3)`` integers: TP, P, L.

    Example:
        >>> pred, truth = torch.tensor([[[1, 1, 0]]]).bool(), torch.tensor([[[0, 1, 1]]]).bool()
        >>> overlap_counts(pred, truth).tolist()
        [[[1, 2, 2]]]
    """
    masks = (m.flatten(2).view(torch.uint8) for m in (pred & truth, pred, truth))
    return torch.stack([m.sum(2, dtype=torch.int32) for m in masks], dim=-1).long()


def counts_above(probabilities: Tensor, truth: Tensor, levels: Sequence[float]) -> Tensor:
    """Counts true positives and predicted voxels at several thresholds, in one look at the voxels.

    `probabilities` is ``(B, R, *spatial)``. Returns ``(B, R, G, 2)`` integers: TP, P.

    Example:
        >>> probabilities, truth = torch.tensor([[[0.2, 0.5, 0.9]]]), torch.tensor([[[0, 0, 1]]])
        >>> counts_above(probabilities, truth.bool(), [0.1, 0.5]).tolist()
        [[[[1, 3], [1, 1]]]]
    """
    edges, size = torch.tensor(levels).to(probabilities), len(levels) + 1
    bins = torch.bucketize(probabilities, edges) + size * truth
    each = [torch.bincount(of.flatten(), minlength=2 * size) for of in bins.flatten(0, 1)]
    counts = torch.stack(each).view(*truth.shape[:2], 2, size)
    above = counts.flip(-1).cumsum(-1).flip(-1)[..., 1:]
    return torch.stack([above[:, :, 1], above.sum(2)], -1)


def iou_and_dice(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Intersection over union ``TP / (P + L - TP)`` and Dice ``2 TP / (P + L)``.

    Both are 1 where nothing is predicted or labelled, and 0 where only one of them is. Returns two
    tensors of shape ``(...)``, float64.

    Example:
        >>> iou, dice = iou_and_dice(torch.tensor([[1, 2, 2], [0, 0, 0], [0, 3, 0]]))
        >>> [round(v, 4) for v in iou.tolist()], dice.tolist()
        ([0.3333, 1.0, 0.0], [0.5, 1.0, 0.0])
    """
    tp, p, t = counts.double().unbind(-1)
    nowhere = p + t == 0
    iou, dice = tp / (p + t - tp), 2 * tp / (p + t)
    return iou.masked_fill(nowhere, 1.0), dice.masked_fill(nowhere, 1.0)


def surface_metrics(
    pred: Tensor,
    truth: Tensor,
    spacing: Sequence[float] | None = None,
    tolerances: Sequence[float] | None = None,
) -> tuple[Tensor, Tensor]:
    """95th percentile Hausdorff distance and normalised surface Dice of each region.

    The distance is measured between the outermost voxels of the regions. The surface Dice is the
    share of both surfaces that lies within the tolerance of the other one; it is weighted by area,
    by marching cubes on voxels of their true size, so that thick slices count as what they are.

    Source: S. Nikolov et al., "Clinically applicable segmentation of head and neck anatomy for
    radiotherapy", J. Med. Internet Res. 23(7), 2021; computed by MONAI. `pred` is ``(R, *spatial)``
    bool. `spacing`: mm from voxel to voxel along each spatial axis; None for voxels of 1 mm.
    `tolerances`: mm, for each region; None for 1 mm. Returns ``(R,)`` distances in mm: 0 where both
    are empty, the diagonal of the image where one of them is. ``(R,)`` surface Dice: 1 where both
    are empty, 0 where one of them is.

    Example:
        >>> pred, truth = torch.zeros(1, 8, 8).bool(), torch.zeros(1, 8, 8).bool()
        >>> pred[..., 2:4, 2:4], truth[..., 2:4, 2:5] = True, True
        >>> [round(v.item(), 4) for v in surface_metrics(pred, truth, (1.0, 2.5), [2.0])]
        [2.5, 0.876]
        >>> [v.item() for v in surface_metrics(pred, truth & False, (0.75, 1.0))]
        [10.0, 0.0]
    """
    # Late: only tests measure surfaces.
    from monai.metrics import compute_hausdorff_distance, compute_surface_dice

    pred, truth = pred.cpu(), truth.cpu()  # distance transforms come from SciPy
    some_pred, some_truth = pred.flatten(1).any(1), truth.flatten(1).any(1)
    size = pred.shape[1:]
    mm = [1.0] * len(size) if spacing is None else [float(s) for s in spacing]
    diagonal = math.hypot(*(n * s for n, s in zip(size, mm, strict=True)))
    alone = (some_pred ^ some_truth).double()
    distance, agreeing = alone * diagonal, 1 - alone
    with warnings.catch_warnings(), torch.autocast("cpu", enabled=False):
        # MONAI 1.6 calls its own function with an argument that it has deprecated.
        warnings.filterwarnings("ignore", ".*always_return_as_numpy", FutureWarning)
        for r in (some_pred & some_truth).nonzero().flatten().tolist():
            # MONAI looks at all that it gets, several times.
            box = bounding_box((pred[r] | truth[r]).numpy())
            p, t = (m[r][box][None, None].float() for m in (pred, truth))
            common = {"include_background": True, "spacing": mm}
            distance[r] = compute_hausdorff_distance(p, t, percentile=95, **common).item()
            within = [1.0 if tolerances is None else tolerances[r]]
            agreeing[r] = compute_surface_dice(p, t, within, use_subvoxels=True, **common).item()
    return distance, agreeing


_COUNTS = ("true_positive", "predicted", "labelled")
_SURFACE = ("hd95", "nsd")


@dataclass(eq=False)
class SegmentationMeter:
    """Counts overlaps per case and region, so that they can be pooled or averaged over cases."""

    criterion: Callable[..., Tensor]  # the loss of logits and labels ``(B, R, *spatial)``
    regions: Sequence[str]  # names of the R regions
    segment: Callable[[Tensor], Tensor]  # from logits to masks ``(B, R, *spatial)``, bool
    # For each region the mm within which surfaces agree; None measures no surfaces.
    tolerances: Sequence[float] | None = None
    # From logits and labels to overlaps at thresholds, see :func:`counts_above`; None counts at no
    # further ones.
    levels: Callable[[Tensor, Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        self.loss_sum, self.count = 0.0, 0
        # By case, of each image: overlaps, voxels, which regions are annotated, those at levels.
        self.images: dict[int, list[tuple[Tensor, int, Tensor, Tensor]]] = {}
        self.surfaces: dict[int, list[Tensor]] = {}  # (2, R) of every scan of a case
        if self.tolerances is not None:
            self.volumes = Volumes(self._add_surfaces)

    def update(self, logits: Tensor, batch: Batch) -> None:
        """Adds logits and the ``label`` of the batch ``(B, R, *spatial)``.

        The ``case`` of the batch ``(B,)`` says which patient an image belongs to; without it each
        image is a case of its own. A patient may have several scans, numbered by ``scan`` ``(B,)``.
        Regions that are not ``annotated`` ``(B, R)`` have no metrics.
        """
        pred, truth = self.segment(logits), batch["label"] > 0.5
        counts, first = overlap_counts(pred, truth).cpu(), len(self.images)
        ids = batch["case"].tolist() if "case" in batch else range(first, first + len(counts))
        gaps = {name: batch[name] for name in ("annotated",) if name in batch}
        known = gaps.get("annotated", torch.ones(pred.shape[:2], dtype=torch.bool)).cpu()
        at_levels = counts if self.levels is None else self.levels(logits, truth).cpu()
        for case, c, k, at in zip(ids, counts, known, at_levels, strict=True):
            self.images.setdefault(case, []).append((c, pred[0, 0].numel(), k, at))
        self.loss_sum += self.criterion(logits, batch["label"], **gaps).item() * len(counts)
        self.count += len(counts)
        if self.tolerances is not None:
            scans = batch["scan"].tolist() if "scan" in batch else [0] * len(counts)
            for case, scan, mm, p, t in zip(ids, scans, spacings(batch), pred, truth, strict=True):
                self.volumes.add((case, scan), mm, p, t)

    def _add_surfaces(self, scan: Scan, spacing: Spacing, pred: Tensor, truth: Tensor) -> None:
        """Measures masks ``(R, *spatial)``; NaN without a spacing, lest it look like mm."""
        assert scan is not None
        measured = torch.full((2, len(self.regions)), math.nan).double()
        if spacing is not None:
            measured = torch.stack(surface_metrics(pred, truth, spacing, self.tolerances))
        self.surfaces.setdefault(scan[0], []).append(measured)

    def compute(self) -> dict[str, float]:
        """Returns the metrics, each as a mean over regions and per region (``iou/whole``).

        ``iou`` and ``dice`` pool the voxels of all cases; ``iou_both`` is pFedNet's IoU, of which
        the background is a class, too; ``dice_case`` is the mean over cases, and
        so are ``hd95``, in mm, and ``nsd``, of volumes whose slices follow each other from the feet
        up; ``loss`` is the mean over images. All are NaN where there is no case, and the last two
        also where the data do not say the spacing of their voxels. A region that no case annotates
        is NaN, too, and counts in no mean.
        """
        rows = self.cases()
        surface = _SURFACE if self.tolerances is not None else ()
        kinds = ("iou", "iou_both", "dice", "dice_case", *surface)
        names = [n for kind in kinds for n in (kind, *(f"{kind}/{r}" for r in self.regions))]
        if not rows:
            return dict.fromkeys(("loss", *names), math.nan)
        scores = scores_of(rows, lambda cases, w: overlap_scores(cases, self.regions, w))
        return {"loss": self.loss_sum / self.count, **{n: scores[n] for n in names}}

    def cases(self) -> list[dict[str, Any]]:
        """Returns a row per case and region: its voxels, and what overlaps and surfaces give."""
        if self.tolerances is not None:
            self.volumes.close()
        rows: list[dict[str, Any]] = []
        for case, images in self.images.items():
            overlaps, voxels, annotated, at_levels = zip(*images, strict=True)
            counts, at = torch.stack(overlaps).sum(0), torch.stack(at_levels).sum(0)
            columns: dict[str, Tensor] = dict(zip(_COUNTS, counts.T, strict=True))
            columns |= dict(zip(("iou", "dice"), iou_and_dice(counts), strict=True))
            if self.tolerances is not None:
                mean = torch.stack(self.surfaces[case]).mean(0)  # over the scans of a case
                columns |= dict(zip(_SURFACE, mean, strict=True))
            for r in annotated[-1].nonzero().flatten().tolist():
                values = {name: column[r].item() for name, column in columns.items()}
                names = {"case": case, "region": self.regions[r], "voxels": sum(voxels)}
                more = {} if self.levels is None else {"counts": at[r].tolist()}
                rows.append({**names, **values, **more})
        return rows


def overlap_scores(cases: Columns, regions: Sequence[str], weights: Floats) -> dict[str, Floats]:
    """Returns the metrics of a meter, of cases that have weights; also at chosen thresholds.

    `weights` is (W, N) of the N rows; 1 for each row gives the metrics of the meter.
    """
    scores = _overlap_scores(cases, regions, weights)
    if AT_POINT[0] in cases:
        there = {**cases, **{n: cases[at] for n, at in zip(_COUNTS, AT_POINT, strict=False)}}
        chosen = _overlap_scores(there, regions, weights)
        scores |= {n: chosen[n.removesuffix("/point")] for n in at_point(regions)}
    return scores


def _overlap_scores(cases: Columns, regions: Sequence[str], weights: Floats) -> dict[str, Floats]:
    scores: dict[str, Floats] = {}
    for region in regions:
        rows = cases["region"] == region
        w = weights[:, rows]
        counts = np.stack([cases[n][rows].astype(float) for n in _COUNTS])  # (3, n)
        total, each = (w[:, None] * counts).sum(2), torch.from_numpy(counts.T)
        iou, dice = (t.numpy() for t in iou_and_dice(torch.from_numpy(total)))
        some = w.sum(1) > 0
        values = {"iou": np.where(some, iou, np.nan), "dice": np.where(some, dice, np.nan)}
        with np.errstate(divide="ignore", invalid="ignore"):
            hits, predicted, labelled = total.T
            voxels = (w * cases["voxels"][rows].astype(float)).sum(1)
            wrong = (predicted + labelled - 2 * hits) / voxels
            # accuracy / (2 - accuracy): intersections and unions summed over both classes
            values["iou_both"] = (1 - wrong) / (1 + wrong)
        by_case = {"dice_case": iou_and_dice(each)[1].numpy()}
        by_case |= {n: cases[n][rows].astype(float) for n in _SURFACE if n in cases}
        with np.errstate(divide="ignore", invalid="ignore"):
            values |= {n: (w * v).sum(1) / w.sum(1) for n, v in by_case.items()}
        scores |= {f"{n}/{region}": v for n, v in values.items()}
    names = dict.fromkeys(n.split("/")[0] for n in scores)
    occurs = np.isin(regions, cases["region"])[:, None]
    parts = {n: np.array([scores[f"{n}/{r}"] for r in regions]) for n in names}
    means = {n: mean_of_parts(values, occurs, 0) for n, values in parts.items()}
    return means | scores
