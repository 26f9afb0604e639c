"""Shows what every hospital has before training: ``medfed look data=heart data.path=DIR``.

It takes the data and the partition of ``medfed train``, and writes a page and ``look.json``: counts
of patients, columns, spacings and grey values, shares of labels, and what is missing.
``least=20`` withholds all numbers that follow from fewer patients. Across hospitals, each runs
``medfed site describe``, and ``medfed look of=[A/look.json,B/look.json]`` joins their files.
"""

from __future__ import annotations

from pathlib import Path

from medfed.commands.command_line import Command
from medfed.config.compose import build
from medfed.config.description import RunDescription
from medfed.config.sections import listed
from medfed.records.places import refuse_full


@Command("look", runs=True)
def main(config: RunDescription) -> None:
    """Describes the hospitals and writes the page."""
    refuse_full(Path(config.folder), otherwise=" by folder=FOLDER")
    # Imported here, so that --help and errors in the configuration appear at once.
    from medfed.reports.look import read_descriptions, write_look
    from medfed.studies.described import described

    if config.values.of is not None:
        files = [Path(str(name)).expanduser() for name in listed(config.values.of)]
        descriptions = read_descriptions(files)
    else:
        data = build(config.data)
        data.plan()
        descriptions = [described(data, client, int(config.values.least)) for client in data.plans]
    write_look(descriptions, Path(config.folder))
