"""Measures a finished run again: ``python scripts/evaluate.py run=DIR split=val``.

Hospitals that join it: ``python scripts/evaluate.py run=DIR onboard=all k=1,5,20``.
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from pathlib import Path

import hydra
from omegaconf import DictConfig, ListConfig, OmegaConf

from medfed.config import CONFIG_DIR, check_overrides, one_sentence, quote_folders
from medfed.errors import ConfigError

# Lightning 2.6 names torch's pytree leaves in a way that newer torch deprecates.
warnings.filterwarnings("ignore", message=".*LeafSpec.*")


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="evaluate")
def run(config: DictConfig) -> None:
    """Evaluates the run and prints the table of its clients, or of hospitals that join it."""
    with one_sentence():
        if OmegaConf.is_missing(config, "run"):
            raise ConfigError("Name the run folder: python scripts/evaluate.py run=DIR.")
        folder = Path(str(config.run))
        if config.onboard is not None:
            welcome(config, folder)
            return
        # Imported late, so that --help and mistakes in the configuration answer at once.
        from medfed.evaluation import evaluate_run
        from medfed.reports.results import print_summary

        logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
        print_summary(evaluate_run(folder, str(config.split)), folder)


def welcome(config: DictConfig, folder: Path) -> None:
    """Lets hospitals join the run, writes what was measured and prints the table."""
    from medfed.onboarding import onboard
    from medfed.reports.onboarding import print_onboarding, write_onboarding

    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    counts = list(config.k) if isinstance(config.k, ListConfig) else [config.k]
    found = onboard(folder, str(config.onboard), counts, config.onboard_steps)
    write_onboarding(found, folder)
    print_onboarding(found, folder)


def main(arguments: list[str] | None = None) -> None:
    """Checks the command line, then hands over to Hydra."""
    if arguments is not None:
        sys.argv[1:] = arguments
    for key in ("run", "onboard"):
        sys.argv[1:] = quote_folders(sys.argv[1:], key)
    # Hydra takes k=1,5,20 for a sweep.
    sys.argv[1:] = [re.sub(r"^k=([^\[\]]*,[^\[\]]*)$", r"k=[\1]", a) for a in sys.argv[1:]]
    with one_sentence():
        check_overrides(sys.argv[1:], name="evaluate")
    run()


if __name__ == "__main__":
    main()
