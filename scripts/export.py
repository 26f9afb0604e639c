"""Exports personal models as MONAI Bundles: ``python scripts/export.py run=DIR client=all``."""

from __future__ import annotations

import logging
import sys
import warnings

import hydra
from omegaconf import DictConfig, OmegaConf

from medfed.config import CONFIG_DIR, check_overrides, one_sentence, quote_folders
from medfed.errors import ConfigError

# Lightning 2.6 names torch's pytree leaves in a way that newer torch deprecates.
warnings.filterwarnings("ignore", message=".*LeafSpec.*")


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="export")
def run(config: DictConfig) -> None:
    """Writes a bundle per client and prints their sizes and metrics."""
    with one_sentence():
        if OmegaConf.is_missing(config, "run"):
            raise ConfigError("Name the run folder: python scripts/export.py run=DIR.")
        # Imported late, so that --help and mistakes in the configuration answer at once.
        from medfed.delivery.export import export_run

        logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
        export_run(config)


def list_clients(arguments: list[str]) -> list[str]:
    """Writes ``client=a,b`` as a list, which Hydra would take for a sweep.

    Example:
        >>> list_clients(["client=a,b", "client=all"])
        ['client=[a,b]', 'client=all']
    """
    sweeps = [a.startswith("client=") and "," in a and "[" not in a for a in arguments]
    return [
        f"client=[{a.removeprefix('client=')}]" if sweep else a
        for a, sweep in zip(arguments, sweeps, strict=True)
    ]


def main(arguments: list[str] | None = None) -> None:
    """Checks the command line, then hands over to Hydra."""
    if arguments is not None:
        sys.argv[1:] = arguments
    sys.argv[1:] = list_clients(quote_folders(quote_folders(sys.argv[1:], "run"), "out"))
    with one_sentence():
        check_overrides(sys.argv[1:], name="export")
    run()


if __name__ == "__main__":
    main()
