"""Survival: the time until an event, of which some patients were not seen until it happened."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Unpack

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medfed.functional.scores import Floats
from medfed.functional.survival import LEAST_EVENTS, SURVIVAL, kaplan_meier, survival_scores
from medfed.models.meters import Batch, Columns, WholeSplit, scores_of
from medfed.models.task import MakeOptimizer, MakeScheduler, TaskModule, TaskOptions
from medfed.standalone.checks import checked
from medfed.standalone.errors import ConfigError
from medfed.standalone.inference import SurvivalInference


class SurvivalTask(TaskModule):
    """Discrete-time logistic hazard, or Cox's partial likelihood of each hospital.

    Batches: ``image (B, F)`` features, ``label (B, 2)``: time, and 1 for an event or 0 for a
    censored patient. Metrics: ``loss`` and those of
    :func:`medfed.functional.survival.survival_scores`.

    The hazard loss is a sum over patients, so batches of any size are unbiased. Cox's needs all
    patients of a hospital in each batch; each hospital then has a baseline hazard of its own.

    Source: M. Andreux et al., "Federated Survival Analysis with Discrete-Time Cox Models", 2020.
    """

    default_selection: ClassVar[tuple[str, str]] = ("loss", "min")
    inference = SurvivalInference()

    @checked("model")
    def __init__(
        self,
        network: nn.Module,
        optimizer: MakeOptimizer,
        scheduler: MakeScheduler | None = None,
        *,
        cuts: Sequence[float | str],
        loss: Literal["hazard", "cox", "cox_batches"] = "hazard",
        ties: Literal["efron", "breslow"] = "efron",
        horizon: float | None = None,
        least_events: int = LEAST_EVENTS,
        **more: Unpack[TaskOptions],
    ) -> None:
        self.cuts = tuple(map(float, cuts))
        if horizon is not None and not 0 < horizon <= self.cuts[-1]:
            raise ConfigError(
                f"model.horizon={horizon:g} must be above 0 and at most {self.cuts[-1]:g}, the end "
                "of the last interval."
            )
        self.cox, self.ties = loss != "hazard", ties
        self.horizon, self.least = horizon, least_events
        # Canonical models mix hazards, or logarithms of hazard ratios.
        self.activation = "identity" if self.cox else "sigmoid"
        super().__init__(network, optimizer, scheduler, **more)
        layers = [part for part in self.network.modules() if isinstance(part, nn.Linear)]
        if layers and layers[-1].bias is not None and not self.cox:
            # Hazards start near those of events that spread evenly, not at a half, from which the
            # hazards of late intervals, which few patients reach, would hardly move.
            nn.init.constant_(layers[-1].bias, -math.log(len(self.cuts)))

    def criterion(self, logits: Tensor, label: Tensor) -> Tensor:
        """Returns the loss of logits and labels ``(B, 2)``."""
        if self.cox:
            return cox_loss(logits[:, 0], label, self.ties)
        return hazard_loss(logits, label, self.cuts)

    def output_shape(self, image: Tensor) -> tuple[int, ...]:
        """See the base class."""
        return (1 if self.cox else len(self.cuts),)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Returns the survival ``(B, J)`` until each cut, or Cox's logarithms as they are."""
        return logits if self.cox else self.inference.probabilities(logits)

    def meter(self, *, test: bool = False) -> SurvivalMeter:
        """Returns an empty meter."""
        return SurvivalMeter(self)

    def scores(self, cases: Columns, weights: Floats) -> dict[str, Floats]:
        """See the base class."""
        return survival_scores(cases, weights, self.cuts, self.horizon, self.least)

    def columns(self, logits: Tensor) -> dict[str, Tensor]:
        """Returns the risk ``(N,)``, and the survival until each cut if it is predicted.

        The risk of the hazard loss is the restricted mean survival time up to the last cut, with
        the sign changed.
        """
        if self.cox:
            return {"risk": logits[:, 0]}
        alive = self.probabilities(logits)
        width = torch.tensor(self.cuts).diff(prepend=torch.zeros(1)).to(alive)
        mean = (torch.cat([torch.ones_like(alive[:, :1]), alive[:, :-1]], 1) + alive) / 2
        names = [SURVIVAL.format(f"{cut:g}") for cut in self.cuts]
        return {"risk": -(mean * width).sum(1), **dict(zip(names, alive.T, strict=True))}

    def constants(self, cases: Columns, training: Batch) -> dict[str, Columns]:
        """Returns the cases with the Kaplan-Meier curve of the training data as prediction."""
        time, event = training["label"].double().numpy().T
        times, _, curve = kaplan_meier(time, event, np.ones((1, len(time))))
        alive = np.array([1.0, *curve[0]])[np.searchsorted(times, self.cuts, side="right")]
        names = [SURVIVAL.format(f"{cut:g}") for cut in self.cuts]
        same = {"risk": 0.0, **dict(zip(names, alive, strict=True))}
        return {"constant": {n: np.full(len(v), same.get(n, v)) for n, v in cases.items()}}


class SurvivalMeter(WholeSplit):
    """The meter of survival; its table of cases has ``time`` and ``event`` instead of a label."""

    def __init__(self, task: SurvivalTask) -> None:
        columns = task.columns(torch.zeros(0, 1 if task.cox else len(task.cuts)))
        empty = {n: np.zeros(0) for n in ("time", "event", *columns)}
        names = tuple(task.scores(empty, np.ones((1, 0))))
        super().__init__(task.criterion, names, self._measure, task.columns)
        self.scores = task.scores

    def _measure(self, logits: Tensor, label: Tensor) -> dict[str, float]:
        return scores_of(self.cases(), self.scores)

    def cases(self) -> list[dict[str, Any]]:
        """See the base class."""
        rows: list[dict[str, Any]] = [*super().cases()]
        for row in rows:
            row["time"], event = row.pop("label")
            row["event"] = int(event)
        return rows


def hazard_loss(logits: Tensor, label: Tensor, cuts: Sequence[float]) -> Tensor:
    """Negative log-likelihood of discrete-time hazards, the mean over patients.

    An event in an interval means that the patient survived those before. A censored patient
    survived the intervals that had ended by then. Events after the last cut count as censored at
    it. `logits` is ``(B, J)`` of the hazards. `label` is ``(B, 2)``: time, and 1 for an event or 0.

    Example:
        >>> label = torch.tensor([[5.0, 1.0], [25.0, 0.0]])
        >>> round(hazard_loss(torch.zeros(2, 2), label, (10.0, 20.0)).item(), 4)  # 3 coins in 2
        1.0397
    """
    time, event = label[:, :1], label[:, 1:] == 1
    # Not a tensor of the cuts, whose copy to a GPU would keep a step from being captured.
    within = torch.cat([time <= cut for cut in cuts], 1)
    passed = torch.where(event, ~within, torch.cat([time >= cut for cut in cuts], 1))
    happened = event & within & (within.cumsum(1) == 1)
    each = F.binary_cross_entropy_with_logits(logits, happened.to(logits.dtype), reduction="none")
    return (each * (happened | passed)).sum() / len(label)


def cox_loss(risk: Tensor, label: Tensor, ties: str = "efron") -> Tensor:
    """Negative logarithm of Cox's partial likelihood, over the number of patients.

    A mean over hospitals, weighted by patients, is so the likelihood stratified by hospital.

    Sources: D. R. Cox, "Regression models and life-tables", 1972; N. E. Breslow, 1974, and B.
    Efron, 1977, for ties. `risk` is ``(B,)`` logarithms of hazard ratios. `label` is ``(B, 2)``:
    time, and 1 for an event or 0.

    Example:
        >>> label = torch.tensor([[1.0, 1.0], [1.0, 1.0], [2.0, 0.0]])
        >>> round(3 * cox_loss(torch.zeros(3), label).exp().item() ** 3, 4)  # 3 (3 * 2)
        18.0
    """
    time, event = label[:, 0], label[:, 1] == 1
    at_risk = (time[:, None] <= time).to(risk.dtype)  # (B, B) is small for one hospital
    if ties == "efron":
        tied = (time[:, None] == time) & event & event[:, None]
        tied = tied.to(risk.dtype)
        before = tied.tril(-1).sum(1, keepdim=True) / tied.sum(1, keepdim=True).clamp(min=1)
        at_risk = at_risk - before * tied
    return ((torch.logsumexp(risk + at_risk.log(), 1) - risk) * event).sum() / len(label)
