"""Trains one federation: ``medfed train experiment=brats_pfednet algorithm=fedavg``.

``-m`` trains every combination of several values: ``medfed train -m algorithm=fedavg,ditto``.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from medfed.commands.command_line import command
from medfed.common.processes import go_by_rank, launched, loading
from medfed.config.check import check_gpu, several
from medfed.config.compose import build
from medfed.config.description import RunDescription
from medfed.standalone.errors import ConfigError

_NOT_BEGUN = "the run had not begun; start it again."


def check(configs: Sequence[RunDescription], sweep: bool) -> None:
    """Checks the algorithm, budget and cohort by building them before anything large is loaded."""
    for config in configs:
        check_gpu(config.trainer["accelerator"])
        ranks = config.trainer["devices"]
        if sweep and several(config.trainer):
            raise ConfigError(
                f"-m cannot be combined with trainer.devices={ranks}; sweep with one rank per run, "
                "or start the runs one by one."
            )
        if several(config.trainer) and (starter := launched()) is not None:
            if not any(a.startswith(("hydra.run.dir=", "resume=")) for a in sys.argv[1:]):
                raise ConfigError(
                    f"{starter.by} has started {starter.ranks} processes, which share one run "
                    "folder: name it by hydra.run.dir=FOLDER, on a disk that all of them see."
                )
            go_by_rank()
        build(config.local)
        algorithm = build(config.algorithm)
        algorithm.check_cohort(build(config.cohort))
        if config.aggregation is not None:
            algorithm.aggregating(build(config.aggregation))


@contextmanager
def says_how_to_go_on(config: RunDescription) -> Iterator[None]:
    """Says how to continue a run that the user stops."""
    try:
        yield
    except KeyboardInterrupt as error:
        from medfed.records.folder import RunFolder  # only a stopped run needs it

        run, how = RunFolder(Path(config.folder)), "no round was finished; start it again"
        words = [o for o in config.overrides or () if not o.startswith("resume=")]
        command = shlex.join(["medfed", "train", *words, f"resume={run.folder}"])
        how = "continue after the last finished round" if run.rounds else how
        opened = run.config_yaml.exists()
        error.args = (f"{how} with: {command}",) if opened else (_NOT_BEGUN,)
        raise


@command("train", check, runs=True, trains=True)
def main(config: RunDescription) -> float | None:
    """Runs the composed configuration and returns the selection metric's mean on validation."""
    # Imported here, so that --help and errors in the configuration appear at once.
    with loading():
        from medfed.run.train import train

    with says_how_to_go_on(config):
        _, experiment = train(config, logs=True)
    best = experiment.evaluation.best_round()
    return None if best is None else experiment.evaluation.score(best)


if __name__ == "__main__":
    main()
