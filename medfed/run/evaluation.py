"""Evaluates a finished run again: the round that validation selected, on any split."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from medfed.common.checks import check_known
from medfed.common.files import write_json
from medfed.common.scores import failed
from medfed.federation.lightning.module import EvalSplit
from medfed.federation.lightning.strategy import together
from medfed.records.folder import RunFolder
from medfed.run.experiment import examined, reopen, test_selected
from medfed.run.intervals import findings, over_clients
from medfed.run.results import undefined


def evaluate_run(folder: Path, split: str = "test") -> dict[str, Any]:
    """Evaluates every client's selected personal model and writes ``evaluation_<split>.json``.

    Args:
        folder: The folder of a finished run.
        split: ``test``, ``val`` or ``train``.

    Returns:
        The run's summary with ``split`` and the new scores in ``clients`` and ``federation``.

    Raises:
        ConfigError: If the split is unknown.
        CheckpointError: If the run is unfinished, its checkpoint is torn or its data have changed.
    """
    check_known("split", split, get_args(EvalSplit))
    run = RunFolder(folder)
    summary = run.summary
    experiment = reopen(folder)
    experiment.module.test_split = split  # type: ignore[assignment]
    with together(experiment.trainer):
        test_selected(experiment)
    clients = experiment.evaluation.test
    measured: dict[str, Any] = {"split": split, "clients": clients}
    measured |= {"federation": over_clients(clients), "undefined": undefined(clients, split)}
    measured |= {"failed": {split: failed(clients)}}
    measured |= findings(examined(experiment), experiment.config.seed)
    kept = {k: summary[k] for k in ("name", "algorithm", "selection", "selected_round")}
    write_json(run.evaluation_json(split), kept | measured)
    return summary | measured
