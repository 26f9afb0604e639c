"""Trains one federation: ``medfed train experiment=brats_pfednet algorithm=fedavg``.

``-m`` trains every combination of several values: ``medfed train -m algorithm=fedavg,ditto``;
``sweep.workers=4`` trains four at once.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from medfed.commands.command_line import Command
from medfed.common.processes import go_by_rank, launched, loading
from medfed.config.check import check_gpu, several
from medfed.config.compose import part_of
from medfed.config.description import RunDescription
from medfed.standalone.errors import ConfigError


def check(configs: Sequence[RunDescription], sweep: bool) -> None:
    """Checks the algorithm, budget and cohort by building them before anything large is loaded."""
    for config in configs:
        check_gpu(config.trainer["accelerator"])
        ranks, parallel = config.trainer["devices"], several(config.trainer)
        if sweep and parallel:
            raise ConfigError(
                f"-m cannot be combined with trainer.devices={ranks}; sweep with one rank per run, "
                "or start the runs one by one."
            )
        if parallel and (starter := launched()) is not None:
            if not any(a.startswith(("hydra.run.dir=", "resume=")) for a in sys.argv[1:]):
                raise ConfigError(
                    f"{starter.by} has started {starter.ranks} processes, which share one run "
                    "folder: name it by hydra.run.dir=FOLDER, on a disk that all of them see."
                )
            go_by_rank()
        part_of(config, "local")
        algorithm = part_of(config, "algorithm")
        algorithm.check_cohort(part_of(config, "cohort"))
        if config.aggregation is not None:
            algorithm.aggregating(part_of(config, "aggregation"))


def how_to_go_on(config: RunDescription) -> str:
    """Says how to continue a run that the user has stopped."""
    from medfed.records.folder import RunFolder  # only a stopped run needs it

    run = RunFolder(Path(config.folder))
    if not run.config_yaml.exists():
        return "the run had not begun; start it again."
    words = [o for o in config.overrides or () if not o.startswith("resume=")]
    command = shlex.join(["medfed", "train", *words, f"resume={run.folder}"])
    how = "no round was finished; start it again"
    return f"{'continue after the last finished round' if run.rounds else how} with: {command}"


@Command("train", check, runs=True, trains=True)
def main(config: RunDescription) -> float | None:
    """Runs the composed configuration and returns the selection metric's mean on validation."""
    # Imported here, so that --help and errors in the configuration appear at once.
    with loading():
        from medfed.run.train import train

    try:
        _, experiment = train(config, logs=True)
    except KeyboardInterrupt as error:
        error.args = (how_to_go_on(config),)
        raise
    best = experiment.evaluation.best_round()
    return None if best is None else experiment.evaluation.score(best)


if __name__ == "__main__":
    main()
