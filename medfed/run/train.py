"""A whole run: trains, tests once, and writes the results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from medfed.common.console import only_news
from medfed.config.description import RunDescription
from medfed.federation.lightning.checkpoint import last_whole
from medfed.federation.lightning.strategy import ranks_end_together
from medfed.records.folder import RunFolder
from medfed.run import results
from medfed.run.claim import locked_run_folder
from medfed.run.experiment import Experiment, build_experiment
from medfed.run.finished import test_selected
from medfed.run.loggers import marked_as_failed


def train(config: RunDescription, logs: bool = False) -> tuple[dict[str, Any], Experiment]:
    """Runs or resumes an experiment; returns its results, and the objects of the run.

    The round with the best validation score is selected; the test split is read once, at the end.
    `logs`: whether the run folder keeps a log.
    """
    if config.resume is not None:
        what = f"which its coordinator resumes by medfed deploy resume={config.resume}"
        RunFolder(Path(config.resume)).check_simulation(what)
    with locked_run_folder(config, logs):
        with only_news():
            experiment = build_experiment(config)
        run = RunFolder(experiment.folder)
        resume_from = None if config.resume is None else last_whole(run.checkpoints)
        with marked_as_failed(experiment.trainer.logger), ranks_end_together(experiment.trainer):
            experiment.trainer.fit(experiment.module, ckpt_path=resume_from, weights_only=True)
            results.write_hashes(experiment.module, experiment.folder)
            # Kept here for all rounds: the state of the selected round lacks the later ones.
            memberships = experiment.module.federation.memberships()
            test_selected(experiment)
            return results.write(experiment, memberships), experiment
