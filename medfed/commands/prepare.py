"""Prepares data ahead of training: ``medfed prepare data=luna16 data.path=DIR``.

What every client would get: ``medfed prepare data=luna16 partition=label_imbalance show=true``.
"""

from __future__ import annotations

import sys

from omegaconf import DictConfig

from medfed.commands.door import command


@command("prepare")
def main(config: DictConfig) -> None:
    """Makes the cache, or completes or verifies the one that is there."""
    # Imported late, so that --help and mistakes in the configuration answer at once.
    from hydra.core.hydra_config import HydraConfig

    from medfed.run.prepare import prepare

    try:
        prepare(config, list(HydraConfig.get().overrides.task))
    except KeyboardInterrupt:
        print("Interrupted; what is finished is kept: run it again to go on.", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
