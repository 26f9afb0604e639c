"""Trains one federation: ``medfed train experiment=brats_pfednet algorithm=fedavg``.

With ``-m`` every combination of several values: ``medfed train -m algorithm=fedavg,ditto``.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig

from medfed.commands.door import command, loading
from medfed.common.errors import ConfigError, MedfedError
from medfed.config.check import several
from medfed.config.compose import build

HYDRA_FILES = ("train.log", ".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml")
OPENING_FILES = ("versions.json", "splits.json", "preprocessing.json")  # before config.yaml


def check(configs: Sequence[DictConfig], sweep: bool) -> None:
    """Lets the algorithm and what surrounds it judge their values, before anything else is loaded.

    Raises:
        ConfigError: If a value is out of range, or a sweep would run on several ranks, each of
            which would start the whole sweep again.
    """
    for config in configs:
        ranks = config.trainer.devices
        if sweep and several(config.trainer):
            raise ConfigError(
                f"-m cannot be combined with trainer.devices={ranks}; sweep with one rank per run, "
                "or start the runs one by one."
            )
        for section in ("algorithm", "local", "cohort"):
            build(config[section])


@contextmanager
def nothing_half_written(folder: Path) -> Iterator[None]:
    """Removes the folder that Hydra made where something stops the run before it is opened.

    Only what Hydra and the opening wrote is removed, and folders that are empty then. Who has
    stopped a run that was opened is told how to go on.
    """
    try:
        yield
    except (MedfedError, KeyboardInterrupt) as error:
        opened = (folder / "config.yaml").exists()
        if not opened:
            for name in HYDRA_FILES + OPENING_FILES:
                (folder / name).unlink(missing_ok=True)
            for place in (folder / ".hydra", folder):
                if place.is_dir() and not any(place.iterdir()):
                    place.rmdir()
        if isinstance(error, KeyboardInterrupt):
            error.args = (_go_on(folder) if opened else "nothing was begun: run it again.",)
        raise


def _go_on(folder: Path) -> str:
    from hydra.core.hydra_config import HydraConfig

    given = [o for o in HydraConfig.get().overrides.task if not o.startswith("resume=")]
    command = shlex.join(["medfed", "train", *given, f"resume={folder}"])
    if any((folder / "checkpoints").glob("round_*.ckpt")):
        return f"go on after the last finished round by: {command}"
    return f"no round was finished; start it again by: {command}"


@command("train", check)
def main(config: DictConfig) -> float | None:
    """Runs the composed configuration and returns the selection metric's mean on validation."""
    with nothing_half_written(Path(config.folder)):
        # Imported late, so that --help and mistakes in the configuration answer at once.
        with loading():
            from medfed.run.train import train

        _, experiment = train(config)
        best = experiment.evaluation.best_round()
        return None if best is None else experiment.evaluation.score(best)


if __name__ == "__main__":
    main()
