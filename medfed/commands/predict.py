"""Applies an exported model to new data: ``medfed predict bundle=DIR input=FILE output=FILE``."""

from __future__ import annotations

from medfed.commands.command_line import Command
from medfed.config.sections import Section


@Command("predict")
def main(config: Section) -> None:
    """Predicts, and prints which files it wrote."""
    # Imported here, so that --help and errors in the configuration appear at once.
    from medfed.delivery.main import predict

    predict(config)
