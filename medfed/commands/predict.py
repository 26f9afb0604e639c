"""Runs an exported model: ``medfed predict bundle=DIR input=FILE output=FILE``."""

from __future__ import annotations

from medfed.commands.command_line import command
from medfed.config.sections import Section


@command("predict")
def main(config: Section) -> None:
    """Predicts and prints what was written."""
    # Imported late, so that --help and mistakes in the configuration answer at once.
    from medfed.delivery.main import predict

    predict(config)


if __name__ == "__main__":
    main()
