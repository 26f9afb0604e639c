"""Loggers beside Lightning's CSV logger: Weights & Biases, or none."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure
from pytorch_lightning.loggers import Logger, WandbLogger


def wandb_logger(
    project: str, name: str | None, save_dir: str, offline: bool | None = None
) -> WandbLogger:
    """Returns a W&B logger that needs no network and no login unless a key is set.

    Args:
        project: The W&B project.
        name: The run's name; ``None`` to have one chosen.
        save_dir: Where offline runs are kept.
        offline: ``None`` means offline unless ``WANDB_API_KEY`` is set.
    """
    if offline is None:
        offline = not os.environ.get("WANDB_API_KEY")
    os.environ.setdefault("WANDB_SILENT", "true")
    return WandbLogger(project=project, name=name, save_dir=save_dir, offline=offline)


def no_logger() -> bool:
    """Returns what makes Lightning log nothing (its default would be TensorBoard, if installed).

    Example:
        >>> no_logger()
        False
    """
    return False


def log_figures(logger: Logger | bool | None, figures: Mapping[str, Figure | Path]) -> None:
    """Sends pictures to W&B, where it is the logger.

    Args:
        logger: The run's logger.
        figures: Name to figure or picture file.
    """
    if isinstance(logger, WandbLogger):
        for name, figure in figures.items():
            image = str(figure) if isinstance(figure, Path) else figure
            logger.log_image(key=name, images=[image])


def close(logger: Logger | bool | None) -> None:
    """Ends the W&B run, so that its process does not outlive the run; others have nothing open."""
    if isinstance(logger, WandbLogger):
        logger.experiment.finish()
