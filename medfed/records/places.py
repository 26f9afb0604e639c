"""The names of the files in a run folder, and whether a folder is new, begun, or holds a run.

Commands read this before they import any library.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medfed.config.sections import listed
from medfed.standalone.errors import CheckpointError, ConfigError, few
from medfed.standalone.files import PARTIAL

# The files by which a run folder and a bundle are known.
RUN, METADATA, MANIFEST = "config.yaml", "configs/metadata.json", "configs/manifest.json"


class _Place:
    """A file of a run folder, by its name; on a :class:`RunFolder` its path."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: Places | None, owner: object) -> Path:
        return Path(self.name) if run is None else run.folder / self.name


class Places:
    """The files of a run folder: their names, and with a ``folder`` their paths."""

    folder: Path

    # From the start.
    lock = _Place(".lock")
    lock_pid = _Place(".lock.pid")  # which process holds it
    log = _Place("train.log")
    # Before the first round; the configuration last, as a run folder is known by it.
    versions_json = _Place("versions.json")  # of packages, the commit, hashes of plugins
    splits_json = _Place("splits.json")  # patients per client and split, hashes of the data's files
    preprocessing_json = _Place("preprocessing.json")  # what becomes of each client's scans
    plan_json = _Place("plan.json")  # on which clients agreed, with its hash
    cohort_json = _Place("cohort.json")  # what each client has, what is there twice
    privacy_json = _Place("privacy.json")  # noise and epsilon of each client
    overrides_yaml = _Place("overrides.yaml")  # what was typed
    start_json = _Place("start.json")  # what became of the weights of init.weights
    start_safetensors = _Place("start.safetensors")  # all entries that the first round starts from
    logger_json = _Place("logger.json")  # by what name W&B or MLflow know the run
    config_yaml = _Place(RUN)  # resolved, facts of the data filled in
    # After each round.
    checkpoints = _Place("checkpoints")  # round_00000.ckpt, best.ckpt, each with its hash
    best_ckpt = _Place("checkpoints/best.ckpt")
    unusual_json = _Place("unusual.json")  # messages far longer than others, diverging losses
    # Once the selected round was tested; summary.json last, as a finished run is known by it.
    hashes_json = _Place("hashes.json")  # of all states after the last round
    models = _Place("models")  # each client's personal weights
    centers = _Place("centers")  # of its quantised parameters
    predictions = _Place("predictions")  # a slice of each client, of some where there are many
    memberships_csv = _Place("memberships.csv")  # in canonical models, over rounds
    metrics_csv = _Place("metrics.csv")  # validation after each round, the test at the end
    ledger_csv = _Place("ledger.csv")  # every part of every message, with its bytes
    cases_csv = _Place("cases.csv")  # what each test case gave
    detections_csv = _Place("detections.csv")  # boxes in test scans, in LUNA16's columns
    summary_json = _Place("summary.json")
    pictures_folder = _Place("pictures")
    # What commands add to a finished run: evaluate, also evaluation_SPLIT.json and
    # subsets_SPLIT.csv; export; audit.
    onboarding_csv = _Place("onboarding.csv")
    onboarding_json = _Place("onboarding.json")
    bundles = _Place("bundles")
    export_csv = _Place("export.csv")
    audit = _Place("audit")
    # Of a run across hospitals, at the coordinator ...
    sites_json = _Place("sites.json")  # what the sites said when it began
    withdrawn_json = _Place("withdrawn.json")  # who has left it since, and what was forgotten
    absences_json = _Place("absences.json")  # who took no part in which round, and why
    status_json = _Place("status.json")  # who is there, what happens, since when
    traffic_csv = _Place("traffic.csv")  # every byte over the network, by site and kind of request
    agreed_json = _Place("agreed.json")  # what all have agreed on, for hospitals that join
    # ... and at a hospital, whose folder is as that of a run with one client.
    job_json = _Place("job.json")  # of which federation it is
    validation_json = _Place("validation.json")  # metrics until now
    bundle = _Place("bundle")


# What a run makes before it is opened; the last file opens it.
_BEGUN: tuple[Path, ...] = (
    *(Places.lock, Places.lock_pid, Places.log, Places.versions_json, Places.splits_json),
    *(Places.preprocessing_json, Places.plan_json, Places.cohort_json, Places.overrides_yaml),
)
BEGUN = tuple(map(str, _BEGUN))


def check_made(values: Mapping[str, Any]) -> None:
    """Checks that the run folders and bundles of a command's keys are there.

    Example:
        >>> check_made({"run": "/no/such/run"})
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.CheckpointError: run=/no/such/run is no run folder (it has no \
config.yaml); name one that a run has printed.
    """
    for key, file in {"run": RUN, "resume": RUN, "bundle": METADATA}.items():
        for one in listed(values.get(key)):
            if one is not None and not os.path.isfile(Path(str(one)) / file):
                raise CheckpointError(refusal(Path(str(one)), file, f"{key}={one}"))


def refusal(folder: Path, file: str = RUN, name: str = "") -> str:
    """Says that a folder is no run or bundle, and names those that it holds or that hold it."""
    kind, hint = "bundle", "medfed export and medfed adopt make one"
    if file == RUN:
        kind, hint = "run folder", "name one that a run has printed"
    above = [str(parent) for parent in folder.parents if os.path.isfile(parent / file)]
    levels = (folder.glob(f"{below}/{file}") for below in ("*", "*/*", "*/*/*"))
    near = above[:1] or sorted(str(path)[: -len(file) - 1] for level in levels for path in level)
    if near:
        hint = (
            f"name {near[0]}" if len(near) == 1 else f"name one of those that it holds: {few(near)}"
        )
    return f"{name or folder} is no {kind} (it has no {file}); {hint}."


def refuse_full(folder: Path, known_by: str | None = None, otherwise: str | None = None) -> None:
    """Refuses a folder for new results that is not empty.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> refuse_full(folder)
        >>> (folder / "thesis.tex").touch()
        >>> refuse_full(folder)
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.ConfigError: The folder /tmp/... is not empty; name an empty one, \
or resume=FOLDER.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; name a new or empty folder.")
    if known_by is not None and (folder / known_by).is_file():
        return
    if folder.is_dir() and any(folder.iterdir()) and not _was_killed_early(folder):
        if otherwise is None:
            otherwise = "" if known_by else ", or resume=FOLDER"
        raise ConfigError(f"The folder {folder} is not empty; name an empty one{otherwise}.")


def _was_killed_early(folder: Path) -> bool:
    """Whether a folder holds only the leftovers of a run that was killed before it opened."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    others = [n for n in names if n not in BEGUN and not n.startswith(PARTIAL)]
    locked = str(Places.lock_pid) in names or names == [str(Places.lock)]
    return locked and not others
