"""All that the rest of medfed asks of delivery: bundles are exported, and predict.

What either needs is imported when it is called: prediction goes without what training needs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from medfed.config.compose import load
from medfed.config.description import checked
from medfed.config.sections import Section
from medfed.records.folder import RunFolder

if TYPE_CHECKING:
    from medfed.standalone.predictor import Predictor


def export(config: Section) -> list[Path]:
    """Exports models of a run; see :func:`medfed.delivery.export.export.export_run`."""
    from medfed.delivery.export.export import export_run

    return export_run(config)


def keep_bundle(folder: Path) -> None:
    """Exports the model of a run with one client into the run folder itself, as hospitals do."""
    export(checked(load([f"run={folder}", f"out={RunFolder(folder).bundle}"], "export")))


def open_bundle(folder: Path) -> Predictor:
    """Opens a bundle, of which the scripts may be absent; nothing that it holds is run."""
    from medfed.delivery.bundle.bundle import read_bundle
    from medfed.standalone.predictor import Predictor

    bundle = read_bundle(folder, whole=False)
    return Predictor.of(bundle.network(), bundle.facts, name=str(folder))


def predict(config: Section) -> None:
    """Predicts by bundles; see :func:`medfed.delivery.predict.prediction.predict`."""
    from medfed.delivery.predict.prediction import predict as answer

    answer(config)
