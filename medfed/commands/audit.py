"""Measures what a finished run's messages and models give away: ``medfed audit run=DIR``.

It replays the first rounds and reads training rows off their messages. It trains the run again on
random halves of the patients, and guesses by these who was in training.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile

from medfed.commands.command_line import Command
from medfed.config.sections import Section
from medfed.records.folder import RunFolder
from medfed.records.places import refuse_full
from medfed.standalone.files import writing


@Command("audit", folders="run")
def main(config: Section) -> None:
    """Attacks the run, writes the page and prints its sentences."""
    folder = Path(str(config.run))
    out = RunFolder(folder).audit if config.out is None else Path(str(config.out)).expanduser()
    refuse_full(out, otherwise=" by out=FOLDER")
    near = next(place for place in (out, *out.absolute().parents) if place.exists())
    with writing(out, "choose another out=FOLDER"), TemporaryFile(dir=near):
        pass  # nothing is trained for a page that cannot be kept
    # Imported here, so that --help and errors in the configuration appear at once.
    from medfed.run.audit import audit, write_audit

    measured = audit(folder, config.shadows, config.minutes, config.rounds, config.tolerance)
    write_audit(measured, out)
