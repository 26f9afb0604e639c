"""Measures a finished run again: ``python scripts/evaluate.py run=DIR split=val``."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

from medfed.config import CONFIG_DIR, check_overrides, one_sentence, quote_folders
from medfed.errors import ConfigError

# Lightning 2.6 names torch's pytree leaves in a way that newer torch deprecates.
warnings.filterwarnings("ignore", message=".*LeafSpec.*")


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="evaluate")
def run(config: DictConfig) -> None:
    """Evaluates the run and prints the table of its clients."""
    with one_sentence():
        if OmegaConf.is_missing(config, "run"):
            raise ConfigError("Name the run folder: python scripts/evaluate.py run=DIR.")
        # Imported late, so that --help and mistakes in the configuration answer at once.
        from medfed.evaluation import evaluate_run
        from medfed.reports.results import print_summary

        logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
        folder = Path(str(config.run))
        print_summary(evaluate_run(folder, str(config.split)), folder)


def main(arguments: list[str] | None = None) -> None:
    """Checks the command line, then hands over to Hydra."""
    if arguments is not None:
        sys.argv[1:] = arguments
    sys.argv[1:] = quote_folders(sys.argv[1:], "run")
    with one_sentence():
        check_overrides(sys.argv[1:], name="evaluate")
    run()


if __name__ == "__main__":
    main()
