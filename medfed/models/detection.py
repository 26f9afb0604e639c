"""Detection of lesions in whole scans, by anchors: loss, meter and task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Unpack

import torch
import torch.nn.functional as F
from monai.data.box_utils import box_iou, centers_in_boxes
from torch import Tensor, nn

from medfed.functional.detection import LESION_CPM, SCAN, lesion_scores, match_lesions
from medfed.functional.scores import Floats
from medfed.models.meters import Batch, Columns, scores_of
from medfed.models.task import MakeOptimizer, MakeScheduler, TaskModule, TaskOptions
from medfed.standalone.checks import check_count, checked, within
from medfed.standalone.detector import CODER, BoxInference
from medfed.standalone.errors import ConfigError

NEAREST = 4  # cells around the centre of a lesion whose anchors may be its own
# Negative anchors in the loss for each positive one, and the fewest of a patch.
HARD, FEWEST = 3, 16
_COLUMNS = ("case", "found", "score", "lesions", "x", "y", "z")


class DetectionTask(TaskModule):
    """Scores of anchors and the boxes that they become; windows over whole scans.

    Batches: ``image (B, C, h, w, d)``; ``label (B, M, 7)``, the corners of a box in voxels and a
    flag: 1 for a lesion, -1 for one whose centre lies outside the patch, 0 for an empty row; and
    for evaluation ``case (B,)`` and ``spacing (B, 3)``, the mm between voxels.

    Metrics: ``loss`` and those of :func:`medfed.functional.detection.lesion_scores`.
    """

    inference: BoxInference
    default_selection: ClassVar[tuple[str, str]] = ("lesion_cpm", "max")

    @checked("model")
    def __init__(
        self,
        network: nn.Module,
        optimizer: MakeOptimizer,
        scheduler: MakeScheduler | None = None,
        *,
        anchors: Sequence[Sequence[int]],
        patch_size: Sequence[int],
        overlap: Annotated[float, within("[0, 1)")] = 0.25,
        window_batch: Annotated[int, check_count] = 4,
        threshold: Annotated[float, within("[0, 1)")] = 0.01,
        boxes: Annotated[int, check_count] = 50,
        **more: Unpack[TaskOptions],
    ) -> None:
        if not all(len(a) == 3 and all(n > 0 and n % 2 == 0 for n in a) for a in anchors):
            raise ConfigError(
                f"model.anchors={[list(a) for a in anchors]} must each have three sides in voxels, "
                "even numbers."
            )
        sides = tuple(tuple(a) for a in anchors)
        window = tuple(patch_size), overlap, window_batch
        self.inference = BoxInference(sides, *window, threshold, boxes)
        super().__init__(network, optimizer, scheduler, **more)

    def criterion(self, logits: Tensor, label: Tensor) -> Tensor:
        """Returns the loss of maps of anchors and boxes."""
        return detection_loss(*self.inference.by_anchor(logits), self.inference.grid(logits), label)

    def logits(self, batch: Batch) -> Tensor:
        """See the base class: the map of anchors of whole scans."""
        return self.inference.logits(self.forward, batch["image"])

    def meter(self, *, test: bool = False) -> DetectionMeter:
        """Returns an empty meter."""
        return DetectionMeter(self)

    def scores(self, cases: Columns, weights: Floats) -> dict[str, Floats]:
        """See the base class."""
        return lesion_scores(cases, weights)


class DetectionMeter:
    """Gathers a row per scan and per box of it; see :func:`match_lesions`."""

    def __init__(self, task: DetectionTask) -> None:
        self.task = task
        self.losses: list[float] = []
        self.rows: list[dict[str, float | str]] = []

    def update(self, logits: Tensor, batch: Batch) -> None:
        """Adds maps of anchors of scans."""
        label, images = batch["label"].cpu(), batch["image"]
        cases = batch.get("case", torch.arange(len(images)) + len(self.losses)).tolist()
        spacing = batch.get("spacing", torch.ones(len(images), 3)).cpu()
        boxes_by_image = self.task.inference.boxes_of(logits, images.shape[2:])
        parts = zip(cases, logits, label, spacing, boxes_by_image, strict=True)
        for case, one, truth, mm, (boxes, scores) in parts:
            self.losses.append(self.task.criterion(one[None], truth[None].to(one)).item())
            lesions = truth[truth[:, 6] == 1, :6]
            (at, sides), (centres, _) = (in_mm(b.cpu(), mm) for b in (lesions, boxes))
            score = scores.double().cpu().numpy()
            kinds = match_lesions(centres, score, at, sides.mean(1) / 2)
            rows = [(SCAN, 0.0, len(lesions), *[math.nan] * 3)]
            for kind, value, centre in zip(kinds, score, centres / mm.numpy(), strict=True):
                rows.append((int(kind), float(value), 0, *centre.tolist()))
            self.rows += [dict(zip(_COLUMNS, (case, *row), strict=True)) for row in rows]

    def compute(self) -> dict[str, float]:
        """Returns the loss and the metrics of all scans so far."""
        if not self.rows:
            return dict.fromkeys(("loss", *LESION_CPM), math.nan)
        loss = sum(self.losses) / len(self.losses)
        return {"loss": loss, **scores_of(self.rows, lesion_scores)}

    def cases(self) -> list[dict[str, float | str]]:
        """Returns the rows; x, y and z are the voxels of a box's centre."""
        return self.rows


def in_mm(boxes: Tensor, spacing: Tensor) -> tuple[Floats, Floats]:
    """Returns centres and sides (n, 3) of boxes, in mm from the scan's first corner."""
    low, high = (part.double() * spacing for part in boxes.view(-1, 2, 3).unbind(1))
    return ((low + high) / 2).numpy(), (high - low).numpy()


def detection_loss(scores: Tensor, codes: Tensor, anchors: Tensor, label: Tensor) -> Tensor:
    """Cross-entropy of positive and of hard negative anchors, plus the distance of boxes.

    The positive anchors of a patch are those of :func:`matches`. The negative ones are those of the
    highest scores among anchors whose centre is in no box: :data:`HARD` for each positive one, at
    least :data:`FEWEST`. The loss of a patch is the mean over its positive anchors of cross-entropy
    and smooth L1 distance (of the box's numbers, see MONAI's ``BoxCoder``), plus the mean over its
    negative ones of the cross-entropy; that of a batch is the mean over patches. Nothing is drawn.

    Source: A. Shrivastava et al., "Training region-based object detectors with online hard example
    mining", CVPR 2016; R. Girshick, "Fast R-CNN", ICCV 2015 (the distance). `scores` is ``(B, N)``
    logits of the anchors. `codes` is ``(B, N, 6)`` the numbers of their boxes. `anchors` is ``(N,
    6)`` corners in voxels. `label` is ``(B, M, 7)``, see :class:`DetectionTask`.

    Example:
        >>> anchors = torch.tensor([[0.0, 0, 0, 4, 4, 4], [8.0, 8, 8, 12, 12, 12]])
        >>> label = torch.tensor([[[0.0, 0, 0, 4, 4, 4, 1]]])
        >>> right = torch.tensor([[20.0, -20.0]])
        >>> round(detection_loss(right, torch.zeros(1, 2, 6), anchors, label).item(), 6)
        0.0
    """
    losses = []
    for score, code, truth in zip(scores.float(), codes.float(), label, strict=True):
        inside = truth[truth[:, 6] != 0, :6].to(score)
        boxes = truth[truth[:, 6] == 1, :6].to(score)
        of_box, negative = matches(boxes, anchors), torch.ones_like(score, dtype=torch.bool)
        middles = (anchors[:, :3] + anchors[:, 3:]) / 2
        for box in inside:
            negative &= ~centers_in_boxes(middles, box.expand(len(middles), 6))
        positive = of_box >= 0
        negative &= ~positive
        count = int(positive.sum())
        wrong = F.softplus(score[negative])
        hard = wrong.topk(min(len(wrong), max(HARD * count, FEWEST))).values
        loss = hard.sum() / max(1, len(hard))
        if count:
            target = CODER.encode_single(boxes[of_box[positive]], anchors[positive].float())
            distance = F.smooth_l1_loss(code[positive], target, beta=0.1, reduction="sum")
            loss = loss + (F.softplus(-score[positive]).sum() + distance) / count
        losses.append(loss)
    return torch.stack(losses).mean()


def matches(boxes: Tensor, anchors: Tensor) -> Tensor:
    """Assigns anchors to lesions by adaptive training sample selection, on one level.

    Of the anchors next to a lesion's centre (of :data:`NEAREST` cells) those are its own whose
    overlap is at least the mean plus the standard deviation of theirs, and the one that overlaps it
    most of all anchors. An anchor of several lesions belongs to the one that it overlaps most.

    Source: S. Zhang et al., "Bridging the gap between anchor-based and anchor-free detection via
    adaptive training sample selection", CVPR 2020. MONAI's ``ATSSMatcher`` writes to the root
    logger whenever it is made, and leaves lesions without an anchor. `boxes` is ``(M, 6)`` of
    lesions. `anchors` is ``(N, 6)``, cell by cell. Returns ``(N,)`` the number of the lesion, -1
    for none.

    Example:
        >>> anchors = torch.tensor([[0.0, 0, 0, 4, 4, 4], [8.0, 8, 8, 12, 12, 12]])
        >>> matches(torch.tensor([[1.0, 1, 1, 4, 4, 4]]), anchors).tolist()
        [0, -1]
    """
    if not len(boxes):
        return torch.full((len(anchors),), -1, device=anchors.device)
    overlap = box_iou(boxes, anchors)
    middles, others = ((b[:, :3] + b[:, 3:]) / 2 for b in (boxes, anchors))
    gaps = torch.cdist(middles, others)
    a_cell = int((gaps[0] == gaps[0].min()).sum())
    near = gaps.topk(min(NEAREST * a_cell, len(anchors)), largest=False).indices
    of_near = overlap.gather(1, near)
    least = of_near.mean(1, keepdim=True) + of_near.std(1, keepdim=True).nan_to_num()
    nearest = torch.zeros_like(overlap, dtype=torch.bool).scatter(1, near, of_near >= least)
    nearest.scatter_(1, overlap.argmax(1, keepdim=True), True)
    best, number = torch.where(nearest, overlap, -1.0).max(0)
    return torch.where(best >= 0, number, -1)
