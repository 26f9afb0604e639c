"""Prepares data ahead of training: ``python scripts/prepare.py data=luna16 data.path=DIR``."""

from __future__ import annotations

import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from medfed.config import CONFIG_DIR, check_overrides, one_sentence


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="prepare")
def run(config: DictConfig) -> None:
    """Makes the cache, or completes or verifies the one that is there."""
    with one_sentence():
        # Imported late, so that --help and mistakes in the configuration answer at once.
        from medfed.preparation import prepare

        prepare(config, list(HydraConfig.get().overrides.task))


def main(arguments: list[str] | None = None) -> None:
    """Checks the command line, then hands over to Hydra."""
    if arguments is not None:
        sys.argv[1:] = arguments
    with one_sentence():
        check_overrides(sys.argv[1:], name="prepare")
    try:
        run()
    except KeyboardInterrupt:
        print("Interrupted; what is finished is kept: run it again to go on.", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
