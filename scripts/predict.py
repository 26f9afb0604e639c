"""Runs an exported model: ``python scripts/predict.py bundle=DIR input=FILE output=FILE``."""

from __future__ import annotations

import logging
import sys
import warnings

import hydra
from omegaconf import DictConfig

from medfed.config import CONFIG_DIR, check_overrides, one_sentence, quote_folders

# Lightning 2.6 names torch's pytree leaves in a way that newer torch deprecates.
warnings.filterwarnings("ignore", message=".*LeafSpec.*")
PATHS = ("bundle", "input", "output", "candidates")


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="predict")
def run(config: DictConfig) -> None:
    """Predicts and prints what was written."""
    with one_sentence():
        # Imported late, so that --help and mistakes in the configuration answer at once.
        from medfed.delivery.prediction import predict

        logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
        predict(config)


def main(arguments: list[str] | None = None) -> None:
    """Checks the command line, then hands over to Hydra."""
    if arguments is not None:
        sys.argv[1:] = arguments
    for key in PATHS:
        sys.argv[1:] = quote_folders(sys.argv[1:], key)
    with one_sentence():
        check_overrides(sys.argv[1:], name="predict")
    run()


if __name__ == "__main__":
    main()
