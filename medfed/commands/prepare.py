"""Prepares data before training: ``medfed prepare data=luna16 data.path=DIR``.

To see what every client would get, add ``show=true``:
``medfed prepare data=luna16 partition=label_imbalance show=true``.
"""

from __future__ import annotations

from medfed.commands.command_line import Command
from medfed.config.description import RunDescription


@Command("prepare", runs=True)
def main(config: RunDescription) -> None:
    """Makes the cache, or completes and verifies an existing one."""
    # Imported here, so that --help and errors in the configuration appear at once.
    from medfed.run.prepare import prepare

    prepare(config)
