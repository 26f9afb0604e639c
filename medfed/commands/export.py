"""Exports personal models as MONAI Bundles: ``medfed export run=DIR client=all bits=2``."""

from __future__ import annotations

from medfed.commands.command_line import Command
from medfed.config.sections import Section


@Command("export", folders="run")
def main(config: Section) -> None:
    """Writes a bundle per client and prints their sizes and metrics."""
    # Imported here, so that --help and errors in the configuration appear at once.
    from medfed.delivery.main import export

    export(config)
