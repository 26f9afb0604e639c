"""Prepares data ahead of training: ``medfed prepare data=luna16 data.path=DIR``.

What every client would get: ``medfed prepare data=luna16 partition=label_imbalance show=true``.
"""

from __future__ import annotations

from omegaconf import DictConfig

from medfed.commands.command_line import command


@command("prepare")
def main(config: DictConfig) -> None:
    """Makes the cache, or completes or verifies the one that is there."""
    # Imported late, so that --help and mistakes in the configuration answer at once.
    from hydra.core.hydra_config import HydraConfig

    from medfed.run.prepare import prepare

    prepare(config, list(HydraConfig.get().overrides.task))


if __name__ == "__main__":
    main()
