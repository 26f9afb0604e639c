"""Opens a finished run again, in the round that validation selected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from medfed.common.untrusted import read_checkpoint
from medfed.config.allowed import check_plugins
from medfed.config.description import LacksKeyError, RunDescription, describe
from medfed.config.sections import Section
from medfed.federation.lightning import checkpoint
from medfed.records.folder import RunFolder
from medfed.run.experiment import Experiment, build_experiment
from medfed.run.loggers import NO_LOGGER
from medfed.standalone.errors import CheckpointError, ConfigError


def test_selected(experiment: Experiment) -> None:
    """Loads the round that validation selects and evaluates it on the test split."""
    experiment.evaluation.check_selected()
    best = best_checkpoint(experiment.folder)
    experiment.trainer.test(experiment.module, ckpt_path=best, weights_only=True, verbose=False)
    tested = experiment.tested_cases()
    for client, metrics in experiment.evaluation.test.items():
        metrics |= tested.of_candidates(client)


def best_checkpoint(folder: Path) -> Path:
    """Returns the checkpoint of the round that validation selects."""
    best = RunFolder(folder).best_ckpt
    if not checkpoint.is_whole(best):
        raise CheckpointError(f"{best} is missing or torn; resume or repeat the run.")
    checkpoint.check_federation(best)
    return best


def reopened(config: Section, folder: Path, **trainer: Any) -> RunDescription:
    """Describes a finished run so that its objects can be built again."""
    source = config.plain()
    source |= {"resume": str(folder), "folder": str(folder), "progress": False}
    source["logger"] = NO_LOGGER
    source["trainer"] |= {"devices": 1, "strategy": "auto", **trainer}  # not those of training
    if "num_nodes" in source["trainer"]:
        source["trainer"]["num_nodes"] = 1
    return describe(source)


def reopen(folder: Path) -> Experiment:
    """Rebuilds the objects of a finished run from its folder, for evaluation."""
    run = RunFolder(folder)
    config, _ = run.config, run.splits  # both are read before the data
    run.check_simulation(
        "which keep their patients; only simulations are evaluated or attacked again"
    )
    check_plugins(config, folder)
    run.compare_plugins(config.plugins)
    try:
        return build_experiment(reopened(config, folder))
    except LacksKeyError as error:
        what = f"{run.config_yaml} lacks a key: {error}."
        raise CheckpointError(f"{run.other_commit()}{what}") from error
    except ConfigError as error:
        if made := run.other_commit():
            raise CheckpointError(f"{made}{error}") from error
        raise


def reopen_selected(folder: Path) -> Experiment:
    """Reopens a run with the states of the round that validation selected, on its device."""
    experiment = reopen(folder)
    experiment.module.to(experiment.trainer.strategy.root_device)
    experiment.module.restore(read_checkpoint(best_checkpoint(folder)))
    return experiment
