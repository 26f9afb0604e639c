"""Runs an experiment across hospitals: ``medfed deploy experiment=NAME sites=[A,B] kit=DIR``.

Needs NVIDIA FLARE, ``pip install "medfed[sites]"``, and runs on the machine of FLARE's server. The
kits of a new federation: ``medfed deploy provision=DIR sites=[a,b] server=NAME``. All other keys
are those of ``medfed train``; what is each site's own, such as where its data are, its file says.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from medfed.commands.door import loading, one_sentence
from medfed.commands.help import print_help
from medfed.common.errors import ConfigError
from medfed.config.compose import CONFIG_DIR, load

NAME = "deploy"


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
        own, rest = split(given)
        deploy(own, rest, given)


def split(given: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """Parts a command line into the keys of this command, composed and checked, and those of train.

    Raises:
        ConfigError: If a value cannot be used, or something is missing.
    """
    if flag := next((a for a in given if a.startswith("-")), None):
        raise ConfigError(f"medfed {NAME} takes KEY=VALUE, and not {flag}; it runs one experiment.")
    known = set(OmegaConf.load(CONFIG_DIR / f"{NAME}.yaml").keys())
    rest = [a for a in given if a.partition("=")[0].partition(".")[0] not in known]
    listed = (re.sub(r"^sites=([^\[].*)", r"sites=[\1]", a) for a in given if a not in rest)
    own = load(list(listed), NAME)
    if OmegaConf.is_missing(own, "sites") or not own.sites:
        raise ConfigError("Name the hospitals by sites=[NAME,NAME], as their kits are called.")
    if own.provision is None and own.dry_run is None and own.kit is None:
        raise ConfigError(
            "Name the folder of the coordinator's own kit by kit=DIR; provision=DIR makes kits, "
            "and dry_run=DIR only writes the job."
        )
    return own, rest


def deploy(own: DictConfig, rest: Sequence[str], given: Sequence[str]) -> None:
    """Makes kits, writes a job, or carries the experiment out.

    Args:
        own: This command's keys.
        rest: The overrides that are also those of ``medfed train``.
        given: The whole command line, to be shown again.
    """
    # Imported late, so that --help and mistakes in the command line answer at once.
    from medfed.sites.provisioning import make_kits, needs_flare

    if own.provision is not None:
        make_kits(Path(own.provision), list(map(str, own.sites)), str(own.server), int(own.port))
        return
    with loading():
        from medfed.sites.deploying import Follower, order_of, write
    order = order_of(own, rest)
    if own.dry_run is not None:
        agreed, job = Path(own.dry_run) / "agreed.json", Path(own.dry_run) / order.name
        order.write_agreed(agreed)
        print(
            f"{write(order, job)}: the job; {agreed}: what all sites agree on, for them to check."
        )
        return
    follower = Follower(order, Path(own.kit), int(own.attempts), float(own.terms.patience))
    try:
        with needs_flare():
            follower.run()
    except KeyboardInterrupt as error:
        again = [o for o in given if not o.startswith(("resume=", "folder="))]
        line = shlex.join(["medfed", NAME, *again, f"resume={order.folder}"])
        error.args = (f"the job was ended at the sites, too; go on by: {line}",)
        raise


if __name__ == "__main__":
    main()
