"""Classification of images by several findings, of which some are unknown, as in chest X-rays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, Unpack

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medfed.functional.scores import Floats, finding_scores
from medfed.models.meters import Batch, Columns, WholeSplit, plain
from medfed.models.task import MakeOptimizer, MakeScheduler, TaskModule, TaskOptions
from medfed.standalone.checks import checked
from medfed.standalone.inference import FindingInference
from medfed.standalone.mixture import Activation

_COLUMNS = ("case", "finding", "label", "probability")


class FindingsTask(TaskModule):
    """Binary cross-entropy of every finding, over those that are known.

    Batches: ``image (B, C, *spatial)``, ``label (B, K)``: 1, 0, or NaN where nobody looked for a
    finding. Metrics: ``loss auroc``, the latter also per finding (``auroc/effusion``).
    """

    activation: Activation = "sigmoid"
    inference = FindingInference()
    default_selection: ClassVar[tuple[str, str]] = ("auroc", "max")

    @checked("model")
    def __init__(
        self,
        network: nn.Module,
        optimizer: MakeOptimizer,
        scheduler: MakeScheduler | None = None,
        *,
        findings: Sequence[str],
        class_weights: Literal["balanced"] | None = None,
        **more: Unpack[TaskOptions],
    ) -> None:
        self.findings = tuple(findings)
        self.balanced = class_weights == "balanced"
        super().__init__(network, optimizer, scheduler, **more)

    def criterion(self, logits: Tensor, label: Tensor) -> Tensor:
        """Returns the loss of logits and labels ``(B, K)``."""
        return finding_loss(logits, label)

    def training_criterion(self, logits: Tensor, batch: Batch) -> Tensor:
        """See the base class; positive findings have the weights of the batch."""
        weight = batch["class_weights"].to(logits) if self.balanced else None
        return finding_loss(logits, batch["label"], weight)

    def output_shape(self, image: Tensor) -> tuple[int, ...]:
        """See the base class."""
        return (len(self.findings),)

    def meter(self, *, test: bool = False) -> WholeSplit:
        """Returns an empty meter."""
        return FindingsMeter(self.findings)

    def scores(self, cases: Columns, weights: Floats) -> dict[str, Floats]:
        """See the base class."""
        return finding_scores(cases, self.findings, weights)


class FindingsMeter(WholeSplit):
    """The meter of findings, with a row per case and known finding."""

    def __init__(self, findings: Sequence[str]) -> None:
        names = ("auroc", *(f"auroc/{name}" for name in findings))
        super().__init__(finding_loss, names, self._measure)
        self.findings = findings

    def _measure(self, logits: Tensor, label: Tensor) -> dict[str, float]:
        rows = self.cases()
        table = {name: np.array([row[name] for row in rows]) for name in _COLUMNS}
        return plain(finding_scores(table, self.findings, np.ones((1, len(rows)))))

    def cases(self) -> list[dict[str, float | str]]:
        """See the base class."""
        if not self.labels:
            return []
        y, p = torch.cat(self.labels).cpu(), torch.cat(self.logits).double().sigmoid().cpu()
        cells = [(n, k, int(y[n, k]), float(p[n, k])) for n, k in (~y.isnan()).nonzero().tolist()]
        rows = ((self.case[n], self.findings[k], label, chance) for n, k, label, chance in cells)
        return [dict(zip(_COLUMNS, row, strict=True)) for row in rows]


def finding_loss(logits: Tensor, label: Tensor, weight: Tensor | None = None) -> Tensor:
    """Binary cross-entropy, the mean over known findings; unknown ones have no gradient.

    `logits` is ``(B, K)``. `label` is ``(B, K)``, 1, 0 or NaN. `weight` is ``(B, K)`` factors of
    positive findings; None for 1.

    Example:
        >>> label = torch.tensor([[1.0, float("nan")]])
        >>> round(finding_loss(torch.zeros(1, 2), label, torch.full((1, 2), 3.0)).item(), 4)
        2.0794
    """
    known = ~label.isnan()
    target = label.nan_to_num().to(logits.dtype)
    each = F.binary_cross_entropy_with_logits(logits, target, pos_weight=weight, reduction="none")
    return (each * known).sum() / known.sum().clamp(min=1)
