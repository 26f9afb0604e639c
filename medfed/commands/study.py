"""Counts and sums over hospitals, before training: ``medfed study data=heart data.path=DIR``.

It takes the data and the partition of ``medfed train``, and writes Table 1 with tests, curves of
survival, and the regressions that a plan asks for: ``plan=plan.yaml``. Without a plan it describes
all columns, and writes ``plan.yaml``, from which to go on. Everything follows from sums over the
hospitals, of the same whole numbers that hospitals would add.
"""

from __future__ import annotations

from pathlib import Path

from medfed.commands.command_line import Command
from medfed.config.compose import build
from medfed.config.description import RunDescription
from medfed.records.places import refuse_full


@Command("study", runs=True)
def main(config: RunDescription) -> None:
    """Answers the plan and writes the page."""
    refuse_full(Path(config.folder), otherwise=" by folder=FOLDER")
    # Imported here, so that --help and errors in the configuration appear at once.
    from medfed.delivery.main import open_bundle
    from medfed.studies.cohorts import hospital_rows
    from medfed.studies.page import write_study
    from medfed.studies.plan import read_plan, suggested
    from medfed.studies.simulation import simulated

    path = config.values.plan
    plan = None if path is None else read_plan(Path(path).expanduser())
    data = build(config.data)
    data.plan()
    bundles = [] if plan is None else plan.bundles
    models = {one.name: open_bundle(Path(str(one.path))) for one in bundles}
    hospitals = hospital_rows(data, plan, models)
    plan = plan or suggested(hospitals)
    write_study(plan, *simulated(plan, hospitals), Path(config.folder))
