"""The meter of segmentations: overlaps and surfaces, per region and case, and over cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from medfed.functional.weighted_scores import Floats
from medfed.models.meters import Batch, Columns
from medfed.models.regions import iou_and_dice, overlap_counts, surface_metrics

_COUNTS = ("true_positive", "predicted", "labelled")
_SURFACE = ("hd95", "nsd")


class SegmentationMeter:
    """Counts overlaps per case and region, so that they can be pooled or averaged over cases.

    Args:
        criterion: The loss of logits and labels ``(B, R, *spatial)``.
        regions: Names of the R regions.
        segment: From logits to masks ``(B, R, *spatial)``, bool.
        tolerances: For each region the mm within which surfaces agree; None measures no surfaces.
    """

    def __init__(
        self,
        criterion: Callable[[Tensor, Tensor], Tensor],
        regions: Sequence[str],
        segment: Callable[[Tensor], Tensor],
        tolerances: Sequence[float] | None = None,
    ) -> None:
        self.criterion = criterion
        self.regions = tuple(regions)
        self.segment = segment
        self.tolerances = tolerances
        self.loss_sum, self.images = 0.0, 0
        self.counts: dict[int, Tensor] = {}
        self.voxels: dict[int, int] = {}
        self.surfaces: dict[int, list[Tensor]] = {}  # (2, R) of every scan of a case
        self._slices: list[tuple[Tensor, Tensor]] = []
        self._stack: tuple[int, int, tuple[float, ...]] | None = None  # case, scan, spacing

    def update(self, logits: Tensor, batch: Batch) -> None:
        """Adds logits and the ``label`` of the batch ``(B, R, *spatial)``.

        The ``case`` of the batch ``(B,)`` says which patient an image belongs to; without it each
        image is a case of its own. A patient may have several scans, numbered by ``scan`` ``(B,)``.
        """
        pred, truth = self.segment(logits), batch["label"] > 0.5
        counts = overlap_counts(pred, truth).cpu()
        first = len(self.counts)
        ids = batch["case"].tolist() if "case" in batch else range(first, first + len(counts))
        for i, c in zip(ids, counts, strict=True):
            self.counts[i] = self.counts[i] + c if i in self.counts else c
            self.voxels[i] = self.voxels.get(i, 0) + pred[0, 0].numel()
        self.loss_sum += self.criterion(logits, batch["label"]).item() * len(counts)
        self.images += len(counts)
        if self.tolerances is not None:
            spacing = batch.get("spacing")
            mm = [None] * len(ids) if spacing is None else spacing.tolist()
            scans = batch["scan"].tolist() if "scan" in batch else [0] * len(ids)
            for case, scan, one, p, t in zip(ids, scans, mm, pred, truth, strict=True):
                self._add_surfaces(case, scan, one, p, t)

    def _add_surfaces(
        self, case: int, scan: int, spacing: Sequence[float] | None, pred: Tensor, truth: Tensor
    ) -> None:
        """Measures masks ``(R, *spatial)``, the slices of one case as the volume that they make."""
        if spacing is None:  # a distance without a unit would look like one in mm
            self.surfaces[case] = [torch.full((2, len(self.regions)), math.nan).double()]
        elif pred.ndim - 1 == len(spacing):
            self.surfaces.setdefault(case, []).append(self._measured(pred, truth, spacing))
        else:
            key = (case, scan, tuple(spacing))
            if self._stack != key:
                self._close_stack()
            self._stack = key
            self._slices.append((pred.cpu(), truth.cpu()))

    def _close_stack(self) -> None:
        """Measures the slices that are waiting for the rest of their case."""
        if self._stack is None:
            return
        pred, truth = (torch.stack(masks, -1) for masks in zip(*self._slices, strict=True))
        case, _, spacing = self._stack
        if len(self._slices) == 1:  # no volume: all of it would be surface
            pred, truth, spacing = pred[..., 0], truth[..., 0], spacing[:2]
        self.surfaces.setdefault(case, []).append(self._measured(pred, truth, spacing))
        self._slices, self._stack = [], None

    def _surfaces_of(self, case: int) -> Tensor:
        """(2, R) of a case, the mean over its scans."""
        return torch.stack(self.surfaces[case]).mean(0)

    def _measured(self, pred: Tensor, truth: Tensor, spacing: Sequence[float]) -> Tensor:
        assert self.tolerances is not None
        return torch.stack(surface_metrics(pred, truth, spacing, self.tolerances))

    def compute(self) -> dict[str, float]:
        """Returns the metrics, each as a mean over regions and per region (``iou/whole``).

        ``iou`` and ``dice`` pool the voxels of all cases; ``dice_case`` is the mean over cases, and
        so are ``hd95``, in mm, and ``nsd``, of volumes whose slices follow each other from the feet
        up; ``loss`` is the mean over images. All are NaN where there is no case, and the last two
        also where the data do not say the spacing of their voxels.
        """
        self._close_stack()
        # Without a case every number is NaN.
        nowhere = torch.full((1, len(self.regions), 3), math.nan)
        cases = torch.stack([*self.counts.values()]) if self.counts else nowhere
        iou, dice = iou_and_dice(cases.sum(0))
        values = {"iou": iou, "dice": dice, "dice_case": iou_and_dice(cases)[1].mean(0)}
        if self.tolerances is not None:
            # (cases, 2, R)
            found = [self._surfaces_of(case) for case in self.surfaces]
            measured = torch.stack(found or [nowhere[0, :, :2].T])
            values |= dict(zip(_SURFACE, measured.mean(0), strict=True))
        out = {"loss": self.loss_sum / self.images if self.images else math.nan}
        for name, per_region in values.items():
            scores = per_region.tolist()
            out[name] = math.fsum(scores) / len(scores)
            out |= {f"{name}/{r}": v for r, v in zip(self.regions, scores, strict=True)}
        return out

    def cases(self) -> list[dict[str, float | str]]:
        """Returns a row per case and region: its voxels, and what overlaps and surfaces give."""
        self._close_stack()
        rows: list[dict[str, float | str]] = []
        for case, counts in self.counts.items():
            columns: dict[str, Tensor] = dict(zip(_COUNTS, counts.T, strict=True))
            columns |= dict(zip(("iou", "dice"), iou_and_dice(counts), strict=True))
            if self.tolerances is not None:
                columns |= dict(zip(_SURFACE, self._surfaces_of(case), strict=True))
            for r, region in enumerate(self.regions):
                values = {name: column[r].item() for name, column in columns.items()}
                size = self.voxels[case]
                rows.append({"case": case, "region": region, "voxels": size, **values})
        return rows


def overlap_scores(cases: Columns, regions: Sequence[str], weights: Floats) -> dict[str, Floats]:
    """Returns the metrics of a meter, of cases that have weights.

    Args:
        cases: Rows of :meth:`SegmentationMeter.cases`, by column.
        regions: Their R regions, in order.
        weights: (W, N) of the N rows; 1 for each row gives the metrics of the meter.

    Returns:
        (W,) per metric and region, and the means over regions.
    """
    found: dict[str, Floats] = {}
    for region in regions:
        rows = cases["region"] == region
        w = weights[:, rows]
        counts = np.stack([cases[n][rows].astype(float) for n in _COUNTS])  # (3, n)
        total, each = (w[:, None] * counts).sum(2), torch.from_numpy(counts.T)
        iou, dice = (t.numpy() for t in iou_and_dice(torch.from_numpy(total)))
        some = w.sum(1) > 0
        values = {"iou": np.where(some, iou, np.nan), "dice": np.where(some, dice, np.nan)}
        by_case = {"dice_case": iou_and_dice(each)[1].numpy()}
        by_case |= {n: cases[n][rows].astype(float) for n in _SURFACE if n in cases}
        with np.errstate(divide="ignore", invalid="ignore"):
            values |= {n: (w * v).sum(1) / w.sum(1) for n, v in by_case.items()}
        found |= {f"{n}/{region}": v for n, v in values.items()}
    names = dict.fromkeys(n.split("/")[0] for n in found)
    means = {n: np.mean([found[f"{n}/{r}"] for r in regions], axis=0) for n in names}
    return means | found
