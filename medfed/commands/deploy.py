"""Runs an experiment across hospitals: ``medfed deploy experiment=NAME sites=[A,B] kit=DIR``.

Needs NVIDIA FLARE, ``pip install "medfed[sites]"``, and runs on the machine of FLARE's server. The
kits of a new federation: ``medfed deploy provision=DIR sites=[a,b] server=NAME``. All other keys
are those of ``medfed train``; what is each site's own, such as where its data are, its file says.
A hospital joins a finished run: ``medfed deploy run=FOLDER onboard=SITE kit=DIR``.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from medfed.commands.command_line import loading, one_sentence
from medfed.commands.help import print_help
from medfed.common.errors import ConfigError
from medfed.config.compose import CONFIG_DIR, load
from medfed.config.description import resolved
from medfed.config.sections import Section
from medfed.sites import actions

NAME = "deploy"
_OF_A_RUN = ("sites=", "cut=", "folder=", "resume=", "provision=")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command.

    Args:
        arguments: The command line without the program; ``None``: this process's.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(given):
        print_help(NAME, __doc__ or "")
        return
    with one_sentence():
        keys, rest = split(given)
        deploy(keys, rest, given)


def split(given: Sequence[str]) -> tuple[Section, list[str]]:
    """Parts a command line into the keys of this command, composed and checked, and those of train.

    Raises:
        ConfigError: If a value cannot be used, or something is missing.
    """
    if flag := next((a for a in given if a.startswith("-")), None):
        raise ConfigError(f"medfed {NAME} takes KEY=VALUE, and not {flag}; it runs one experiment.")
    known = set(yaml.safe_load((CONFIG_DIR / f"{NAME}.yaml").read_text()))
    rest = [a for a in given if a.partition("=")[0].partition(".")[0] not in known]
    listed = (re.sub(r"^sites=([^\[].*)", r"sites=[\1]", a) for a in given if a not in rest)
    settings = Section(resolved(load(list(listed), NAME)))
    if settings.run is not None or settings.onboard is not None:
        _check_joining(settings, [*rest, *(a for a in given if a.startswith(_OF_A_RUN))])
    elif settings.sites in ("???", []):
        raise ConfigError("Name the hospitals by sites=[NAME,NAME], as their kits are called.")
    if settings.provision is None and settings.dry_run is None and settings.kit is None:
        raise ConfigError(
            "Name the folder of the coordinator's own kit by kit=DIR; provision=DIR makes kits, "
            "and dry_run=DIR only writes the job."
        )
    return settings, rest


def _check_joining(settings: Section, odd: Sequence[str]) -> None:
    """Checks the command line by which a hospital joins a finished run.

    Raises:
        ConfigError: If something is missing, or not to be chosen any more.
    """
    if settings.run is None or settings.onboard is None:
        raise ConfigError(
            "A hospital joins a finished run by run=FOLDER onboard=SITE: the coordinator's run "
            "folder, and the hospital as its kit is called."
        )
    if odd:
        raise ConfigError(
            f"{odd[0]} cannot be chosen where a hospital joins a finished run, which has all of "
            "that already; leave it out."
        )
    if settings.onboard_steps < 1:
        raise ConfigError(f"onboard_steps must be at least 1, not {settings.onboard_steps}.")


def deploy(keys: Section, rest: Sequence[str], given: Sequence[str]) -> None:
    """Makes kits, writes a job, or carries the experiment out.

    Args:
        keys: This command's keys.
        rest: The overrides that are also those of ``medfed train``.
        given: The whole command line, to be shown again.
    """
    if keys.provision is not None:
        actions.make_kits(
            Path(keys.provision), list(map(str, keys.sites)), str(keys.server), int(keys.port)
        )
        return
    with loading():
        deployment = actions.deployment_of(keys, rest)
    if keys.dry_run is not None:
        job, agreed, approval = actions.write_job(deployment, Path(keys.dry_run))
        print(f"{job}: the job; {agreed}: what all sites agree on, for them to check.")
        print(f"A site approves it by this line in its file: agreed: {approval}")
        return
    try:
        actions.carry_out(
            deployment, Path(keys.kit), int(keys.attempts), float(keys.terms.patience)
        )
    except KeyboardInterrupt as error:
        again = [o for o in given if not o.startswith(("resume=", "folder="))]
        again += [f"resume={deployment.folder}"] * (keys.onboard is None)
        line = shlex.join(["medfed", NAME, *again])
        error.args = (f"the job was ended at the sites, too; go on by: {line}",)
        raise


if __name__ == "__main__":
    main()
