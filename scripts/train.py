"""Trains one federation: ``python scripts/train.py experiment=brats_pfednet algorithm=fedavg``."""

from __future__ import annotations

import logging
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from medfed.config import CONFIG_DIR, check_overrides, one_sentence
from medfed.errors import ConfigError, MedfedError
from medfed.overrides import hydra_spelling

# Lightning 2.6 names torch's pytree leaves in a way that newer torch deprecates.
warnings.filterwarnings("ignore", message=".*LeafSpec.*")


def refuse_sweeps_over_ranks(config: DictConfig) -> None:
    """Stops ``-m`` with several ranks: each would start the whole sweep again.

    Raises:
        ConfigError: If both are asked for.
    """
    ranks = config.trainer.devices
    if ranks not in (1, "1"):
        raise ConfigError(
            f"-m cannot be combined with trainer.devices={ranks}; sweep with one rank per run, or "
            "start the runs one by one."
        )


@contextmanager
def nothing_half_written(folder: Path) -> Iterator[None]:
    """Removes the folder that Hydra made where a mistake stops the run before it is opened."""
    try:
        yield
    except MedfedError:
        if not (folder / "config.yaml").exists():
            shutil.rmtree(folder, ignore_errors=True)
        raise


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="train")
def run(config: DictConfig) -> float | None:
    """Runs the composed configuration and returns the selection metric's mean on validation."""
    with one_sentence(), nothing_half_written(Path(config.folder)):
        # Imported late, so that --help and mistakes in the configuration answer at once.
        from medfed.experiment import train

        logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
        _, experiment = train(config)
        best = experiment.evaluation.best_round()
        return None if best is None else experiment.evaluation.score(best)


def main(arguments: list[str] | None = None) -> Any:
    """Checks the command line, then hands over to Hydra."""
    if arguments is not None:
        sys.argv[1:] = arguments
    sys.argv[1:] = hydra_spelling(sys.argv[1:])
    with one_sentence():
        configs = check_overrides(sys.argv[1:])
        if {"-m", "--multirun"} & set(sys.argv):
            for config in configs:
                refuse_sweeps_over_ranks(config)
    return run()


if __name__ == "__main__":
    main()
