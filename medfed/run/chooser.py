"""What validation cases choose, for the test: thresholds, calibration, sets and intervals."""

from __future__ import annotations

from collections.abc import Mapping

from medfed.config.description import Privacy, RunDescription
from medfed.functional.conformal import Covering
from medfed.functional.points import Chooser, RegionChooser
from medfed.models.classification import ClassificationTask
from medfed.models.networks.small import LogisticRegression
from medfed.models.regression import RegressionTask
from medfed.models.segmentation import SegmentationTask
from medfed.models.task import TaskModule
from medfed.standalone.errors import ConfigError

Chosen = Chooser | RegionChooser | Covering


def chooser_of(config: RunDescription, task: TaskModule) -> Chosen | None:
    """Returns what validation cases choose: thresholds, calibration, sets and intervals."""
    chooser, level = points_of(config, task), config.evaluation.coverage
    if level is None:
        return chooser
    if isinstance(task, ClassificationTask):
        return Covering(level, "classes", chooser=chooser)
    if isinstance(task, RegressionTask):
        return Covering(level, "outcome", chooser=chooser)
    if isinstance(task, SegmentationTask):
        return Covering(level, "volumes", [f"/{name}" for name in task.regions], chooser)
    raise ConfigError(
        f"evaluation.coverage={level} is for classification, regression and segmentation; set it "
        "to null."
    )


def points_of(config: RunDescription, task: TaskModule) -> Chooser | RegionChooser | None:
    """Returns what chooses thresholds and calibration on validation cases, if wanted.

    A shift and youden are defaults, for two classes; regions that may overlap have thresholds by
    their Dice; other tasks go without them.
    """
    rule, method = config.evaluation.operating_point, config.evaluation.calibration
    two = isinstance(task, ClassificationTask) and task.num_classes == 2
    if isinstance(rule, Mapping) and not two:
        raise ConfigError(
            f"evaluation.operating_point={dict(rule)} needs a classification into two classes; "
            "set it to null."
        )
    method = method if two or method != "shift" else None
    if isinstance(task, ClassificationTask) and (method != "platt" or two):
        rule = rule if two else None
        # A level is not among what privacy protects, and training patients are.
        linear = isinstance(task.network, LogisticRegression) and config.privacy == Privacy()
        return Chooser(task.num_classes, rule, method, linear) if rule or method else None
    if method:
        why = "is for classifications (platt: into two classes)"
        raise ConfigError(f"evaluation.calibration={method} {why}; set it to null.")
    if rule and isinstance(task, SegmentationTask) and task.activation == "sigmoid":
        counts = type(task).meter is SegmentationTask.meter  # at thresholds; a user's does not
        if counts and "point" not in task.regions:  # the ending of chosen metrics
            return RegionChooser(task.regions, task.threshold, task.scores)
    return None
