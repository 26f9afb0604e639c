"""Prepares data ahead of training: ``medfed prepare data=luna16 data.path=DIR``.

What every client would get: ``medfed prepare data=luna16 partition=label_imbalance show=true``.
"""

from __future__ import annotations

from medfed.commands.command_line import command
from medfed.config.description import RunDescription


@command("prepare", runs=True)
def main(config: RunDescription) -> None:
    """Makes the cache, or completes or verifies the one that is there."""
    # Imported late, so that --help and mistakes in the configuration answer at once.
    from medfed.run.prepare import prepare

    prepare(config)


if __name__ == "__main__":
    main()
