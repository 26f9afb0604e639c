"""One cell: the same run as ``medfed train`` makes, of which only the numbers are kept."""

from __future__ import annotations

import gc
import io
import logging
import tempfile
import time
import warnings
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from medfed.common.console import levels, without_remarks
from medfed.common.processes import threads_as_before
from medfed.common.scores import fewest_cases
from medfed.config.description import RunDescription, describe
from medfed.federation.lightning.strategy import ranks_end_together
from medfed.federation.reference import onboarded_client, outsiders_model
from medfed.records.cells import Stage
from medfed.reports.tasks import course
from medfed.run.experiment import Experiment, build_experiment
from medfed.run.finished import test_selected
from medfed.run.loggers import NO_LOGGER
from medfed.run.memberships import Memberships
from medfed.run.train import train
from medfed.standalone.errors import ConfigError, MachineError, NonFiniteError
from medfed.standalone.files import digest

RESAMPLES = 400
"""Draws of the patients of a split that a cell keeps, for intervals."""


def run_cell(config: Mapping[str, Any], stage: Stage, finetuned: bool = False) -> dict[str, Any]:
    """Computes a cell as JSON; nothing is printed, and nothing is left on the disk.

    A run that no machine can make says so in ``error``, one whose model has failed in
    ``failed``.
    """
    began = time.process_time()
    gc.collect()  # objects that refer to each other hold the data of the last cell
    with (
        tempfile.TemporaryDirectory(prefix="medfed-cell-") as folder,
        threads_as_before(),
        redirect_stdout(io.StringIO()),
        redirect_stderr(io.StringIO()),
        levels({"": logging.ERROR}),
        without_remarks(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            description = describe({**config, "logger": NO_LOGGER, "progress": False})
            if finetuned:
                description = _pool_first(description, Path(folder) / "pooled")
            description = description.replacing({"folder": str(Path(folder) / "run")})
            result = _computed(description, stage)
        except NonFiniteError as error:
            result = {"failed": str(error)}
        except MachineError:  # no result, as another machine may compute the cell
            raise
        except ConfigError as error:
            result = {"error": str(error)}
    return {**result, "cpu_seconds": round(time.process_time() - began, 2)}


def _pool_first(config: RunDescription, folder: Path) -> RunDescription:
    """Trains the pooled model; clients then go on from it, alone, a third as long."""
    train(config.replacing({"folder": str(folder)}))
    alone = {"_target_": "medfed.personalize.local.Local", "_convert_": "all"}
    rounds = max(1, config.rounds // 3)
    changed = {"algorithm": alone, "rounds": rounds, "init.weights": str(folder)}
    return config.replacing({**changed, "evaluation.every": min(config.evaluation.every, rounds)})


def _computed(config: RunDescription, stage: Stage) -> dict[str, Any]:
    experiment = build_experiment(config)
    module, evaluation = experiment.module, experiment.evaluation
    with ranks_end_together(experiment.trainer):
        experiment.trainer.fit(module)
    best = evaluation.best_round()
    data, ledger = experiment.data, module.federation.ledger
    splits = data.splits()
    steps = {c: n.gradient for c, (_, n) in module.spent().items()}
    result: dict[str, Any] = {
        "metric": list(evaluation.selection),
        "selected_round": best,
        "rounds": module.next_round,
        "passes": steps,
        "data": digest([splits["clients"], sorted(splits["files"].values())]),
    }
    if stage == "tune":
        score = float("nan") if best is None else evaluation.score(best)
        return {**result, "score": score}
    module.federation.count_delivery(module.next_round)
    result["bytes"] = {way: ledger.total(direction=way) for way in ("up", "down")}
    moments = course(evaluation.history, ledger, evaluation.selection, module.next_round)
    result["course"] = [moment._asdict() for moment in moments]
    history = module.federation.memberships()
    if history is not None:
        known = Memberships.of(list(data.clients), history, best, data.mixtures)
        result["memberships"] = known.summary()
    test_selected(experiment)
    return {**result, **_tested(experiment), "outside": _outside(experiment)}


def _outside(experiment: Experiment) -> dict[str, dict[str, float]]:
    """The test metrics of hospitals that were kept out, by a model that saw none of theirs."""
    module, metrics = experiment.module, dict[str, dict[str, float]]()
    for name, data in experiment.data.kept_out.items():
        client = onboarded_client(module.federation, data)
        if (model := outsiders_model(module.federation, client)) is not None:
            module.local.model.load(model)
            metrics[name] = module.evaluate_data(name, data, "test")
    return metrics


def _tested(experiment: Experiment) -> dict[str, Any]:
    """The test metrics of every client, on resampled patients, too, and of constants."""
    evaluation, plans = experiment.evaluation, experiment.data.plans
    metric = experiment.task.selection[0]
    tested = experiment.tested_cases()
    result: dict[str, Any] = {
        "clients": evaluation.test,
        "patients": {
            c: {split: len(plans[c].patients[split]) for split in ("train", "val", "test")}
            for c in evaluation.test
        },
        "metric": list(experiment.task.selection),
        "fewest": {c: fewest_cases(rows) for c, rows in evaluation.cases.items()},
    }
    if tested.cases and any(tested.unweighted(cases, 1) for cases in tested.cases.values()):
        each, _ = tested.resampled(experiment.config.seed)
        resampled = {c: values[metric][:RESAMPLES] for c, values in each if metric in values}
        short = {c: [float(f"{v:.6g}") for v in values] for c, values in resampled.items()}
        result["resampled"] = short
        constants = tested.constants().items()
        result["constant"] = {n: {c: m.get(metric) for c, m in of.items()} for n, of in constants}
    return result
