"""What a run folder has of single cases: patients drawn anew, and predicted slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from medfed.common.seeding import derive_seed
from medfed.common.untrusted import read_rows, reading
from medfed.functional.bootstrap import draws
from medfed.reports.benchmark.scores import Floats
from medfed.run.finished import Run
from medfed.run.predictions import read_predictions

RESAMPLES = 400


def drawn_of(run: Run, metric: str, clients: Sequence[str]) -> Floats:
    """Measures a run on patients drawn anew; the same draws for all runs on the same patients.

    Args:
        run: A finished run.
        metric: What is measured.
        clients: Whose patients.

    Returns:
        (W, C), NaN where a client has no cases or its draw leaves the metric undefined; W is 0
        where the run has kept no cases, or its task does not measure the metric on them.

    Raises:
        CheckpointError: If its cases are torn.
    """
    path = run.folder / "cases.csv"
    if not path.is_file():
        return np.zeros((0, len(clients)))
    from medfed.run.assembly import plain_task

    task = plain_task(run.config)
    rows = read_rows(path, ("client", "patient"))
    found = np.full((RESAMPLES, len(clients)), np.nan)
    with reading(path):
        for i, client in enumerate(clients):
            own = [row for row in rows if row["client"] == client]
            patients = run.patients[client]["test"]
            if not own or not patients:
                continue
            places = {name: n for n, name in enumerate(patients)}
            case = np.array([places[row["patient"]] for row in own])
            cases = {n: _column([row[n] for row in own]) for n in own[0]}
            counts = draws(len(patients), RESAMPLES, derive_seed(run.seed, "report", client))
            measured = task.scores({**cases, "case": case}, counts[:, case].astype(float))
            if metric not in measured:
                return np.zeros((0, len(clients)))
            found[:, i] = measured[metric]
    return found


def _column(texts: Sequence[str]) -> Any:
    try:
        return np.array([float(text) for text in texts])
    except ValueError:
        return np.array(texts)


def slices_of(run: Run, name: str, clients: Sequence[str]) -> dict[str, Any]:
    """Returns the predicted slices that a run has kept, as the looks of a cell.

    Args:
        run: A finished run.
        name: The method's.
        clients: Its clients.
    """
    cases = read_predictions({name: run.folder}, clients)
    model = run.config.model
    if not cases or OmegaConf.select(run.config, "model.threshold") is None:
        return {}
    from medfed.models.segmentation import chosen_activation

    regions = list(run.config.regions)
    wanted = model.get("activation", "sigmoid")
    exclusive = chosen_activation(wanted, len(regions), run.config.get("exclusive")) == "softmax"
    told = {"regions": regions, "threshold": float(model.threshold), "exclusive": exclusive}
    return {"slices": {**told, "cases": cases}}
