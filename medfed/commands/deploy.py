"""Runs an experiment across hospitals: ``medfed deploy experiment=NAME sites=[A,B] kit=DIR``.

The command needs NVIDIA FLARE (the extra ``sites``) and runs on the machine of FLARE's server.
``medfed deploy provision=DIR server=NAME`` makes a new federation and its invitation, and
``approve=FILE provision=DIR`` approves the request by which a hospital answers it.
``medfed deploy run=FOLDER onboard=SITE kit=DIR`` lets a hospital join a finished run. All other
keys are those of ``medfed train``. A file at each site holds what only that site knows, such as the
path of its data.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from medfed.commands.help import print_help
from medfed.commands.sentences import without_hydra
from medfed.common.processes import loading
from medfed.config import check, compose, description, sections
from medfed.sites import actions
from medfed.standalone.errors import ConfigError

NAME = "deploy"
_OF_A_RUN = ("sites=", "study=", "cut=", "folder=", "resume=", "provision=", "approve=")


@without_hydra(partial(print_help, NAME))
def main(words: Sequence[str]) -> None:
    """Runs the command."""
    deploy(*split(words), words)


def split(words: Sequence[str]) -> tuple[sections.Section, list[str]]:
    """Splits a command line into this command's keys, composed and checked, and those of train."""
    if flag := next((a for a in words if a.startswith("-")), None):
        raise ConfigError(
            f"medfed {NAME} takes KEY=VALUE, not {flag}: it runs one experiment; leave {flag} out."
        )
    known = set(yaml.safe_load((compose.CONFIG_DIR / f"{NAME}.yaml").read_text()))
    rest = [a for a in words if a.partition("=")[0].partition(".")[0] not in known]
    listed = (re.sub(r"^sites=([^\[].*)", r"sites=[\1]", a) for a in words if a not in rest)
    settings = sections.Section(description.resolved(compose.load(list(listed), NAME)))
    every = dict(sections.walk(settings))
    check.check_keys(every)
    check.check_paths(every)
    if settings.run is not None or settings.onboard is not None:
        _check_joining(settings, [*rest, *(a for a in words if a.startswith(_OF_A_RUN))])
    elif settings.sites in ("???", []) and settings.provision is None:
        raise ConfigError("Name the hospitals by sites=[NAME,NAME]: the names of their kits.")
    if settings.provision is None and settings.dry_run is None and settings.kit is None:
        raise ConfigError(
            "Name the folder of the coordinator's kit by kit=DIR; provision=DIR makes a "
            "federation, and dry_run=DIR only writes the job."
        )
    return settings, rest


def _check_joining(settings: sections.Section, odd: Sequence[str]) -> None:
    """Checks the command line by which a hospital joins a finished run."""
    if settings.run is None or settings.onboard is None:
        raise ConfigError(
            "To let a hospital join a finished run, give run=FOLDER onboard=SITE: the "
            "coordinator's run folder and the name of the hospital's kit."
        )
    if odd:
        raise ConfigError(
            f"{odd[0]} cannot be set when a hospital joins a finished run, which has decided it "
            "already; leave it out."
        )


def deploy(keys: sections.Section, rest: Sequence[str], words: Sequence[str]) -> None:
    """Makes kits, writes a job, or runs the experiment."""
    if keys.provision is not None:
        folder = Path(keys.provision)
        if keys.approve is not None:
            actions.keys("approve", folder=folder, request=Path(keys.approve))
            return
        at = {"server": str(keys.server), "port": int(keys.port), "renew": bool(keys.renew)}
        sites = [] if keys.sites == "???" else [str(site) for site in keys.sites]
        lock = None if keys.lock is None else Path(keys.lock)
        actions.keys("provision", folder=folder, sites=sites, lock=lock, **at)
        return
    with loading():
        deployment = actions.deployment_of(keys, rest)
    if keys.dry_run is not None:
        job, agreed, approval = actions.write_job(deployment, Path(keys.dry_run))
        print(f"The job is in {job}. What all sites agree on, for them to check, is in {agreed}.")
        print(f"A site approves it by this line in its file: agreed: {approval}")
        return
    attempts, patience = int(keys.attempts), float(keys.terms.patience)
    try:
        actions.carry_out(deployment, Path(keys.kit), attempts, patience)
    except KeyboardInterrupt as error:
        again = [o for o in words if not o.startswith(("resume=", "folder="))]
        again += [f"resume={deployment.folder}"] * (keys.onboard is None)
        line = shlex.join(["medfed", NAME, *again])
        error.args = (f"the job was stopped at the sites, too; continue it with: {line}",)
        raise
