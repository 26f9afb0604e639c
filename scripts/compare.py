"""Compares finished runs: ``python scripts/compare.py runs=[DIR,DIR]`` or ``runs=SWEEP_DIR``."""

from __future__ import annotations

import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

from medfed.config import CONFIG_DIR, check_overrides, one_sentence, quote_folders
from medfed.errors import ConfigError


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="compare")
def run(config: DictConfig) -> None:
    """Prints the table and writes CSV, Markdown and pictures."""
    with one_sentence():
        if OmegaConf.is_missing(config, "runs"):
            raise ConfigError(
                "Name the runs: python scripts/compare.py runs=[DIR,DIR] or runs=SWEEP_DIR."
            )
        # Imported late, so that --help and mistakes in the configuration answer at once.
        from medfed.reports.comparison_files import compare_runs

        runs = OmegaConf.to_container(config)["runs"]  # type: ignore[call-overload,index]
        compare_runs(runs, None if config.out is None else Path(str(config.out)), config.metric)


def main(arguments: list[str] | None = None) -> None:
    """Checks the command line, then hands over to Hydra."""
    if arguments is not None:
        sys.argv[1:] = arguments
    sys.argv[1:] = quote_folders(sys.argv[1:], "runs")
    with one_sentence():
        check_overrides(sys.argv[1:], name="compare")
    run()


if __name__ == "__main__":
    main()
