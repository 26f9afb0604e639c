"""What commands do with runs across hospitals: the interface of this folder.

Each function imports its modules when it is called, so that mistakes in files or keys are reported
before PyTorch is imported.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medfed.sites.deploying import Deployment
    from medfed.sites.wire import Answers
    from medfed.studies.cohorts import Opener


def check(agreed: Path, local: Path, folder: Path | None = None) -> None:
    """Reads a site's data by the agreement, and reports what would leave; nothing leaves."""
    from medfed.sites.agreement import Agreed, SiteFile

    terms, file = Agreed.read(agreed), SiteFile.read(local)
    config = file.config(terms)
    from medfed.sites.check import check_site, describe_site

    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
    if folder is not None:
        describe_site(terms, file, config, folder)
    else:
        check_site(terms, file, config)


def withdraw(folder: Path, site: str, forget: bool) -> list[str]:
    """Takes a site out of all later rounds; see :func:`medfed.sites.withdrawal.withdraw`."""
    from medfed.records.places import Places
    from medfed.sites import withdrawal
    from medfed.standalone.files import locked

    with locked(folder, str(Places.lock), wait=False):  # a run under way asks all its sites
        return withdrawal.withdraw(folder, site, forget)


def show_status(folder: Path) -> None:
    """Prints the state of a run across sites; see :func:`medfed.sites.status.show`."""
    from medfed.sites import status

    status.show(folder)


def keys(what: str, **values: Any) -> None:
    """Carries out one step from a key to a kit, and prints the next one."""
    from datetime import date, timedelta

    from medfed.common.console import say, wide_console
    from medfed.sites.flare import kits
    from medfed.sites.installed import TEMPLATES
    from medfed.standalone.files import filled

    made = getattr(kits, what)(**values)
    end = date.today() + timedelta(days=kits.CERTIFICATES)
    words = {**values, "what": what, "made": made, "end": end, "kits": kits}
    for line in filled(TEMPLATES / "kits.txt", **words).strip().split("\n"):
        say(wide_console(), line.removeprefix("! "), style="red" * line.startswith("!"))


def deployment_of(keys: Any, overrides: Sequence[str]) -> Deployment:
    """Returns what the keys of ``medfed deploy``, and the overrides of a training, ask for."""
    from medfed.sites import deploying

    return deploying.deployment_of(keys, overrides)


def write_job(deployment: Deployment, folder: Path) -> tuple[Path, Path, str]:
    """Writes the job of a deployment and what all sites agree on."""
    from medfed.sites import deploying
    from medfed.standalone.files import digest, write_json

    agreed = folder / "agreed.json"
    write_json(agreed, deployment.agreed)
    job = deploying.write(deployment, folder / deployment.name)
    return job, agreed, digest(deployment.agreed)


def carry_out(deployment: Deployment, kit: Path, attempts: int, patience: float) -> None:
    """Submits a deployment to FLARE, and follows it until it is done."""
    from medfed.sites.deploying import Follower

    Follower(deployment, kit, attempts, patience).run()


def start_site(
    kit: Path, agreed: str, name: str, keep_bundle: Callable[[Path], object], open_bundle: Opener
) -> Answers:
    """Makes the site of a kit's ``local`` folder, for FLARE's process there."""
    from medfed.sites import deploying
    from medfed.sites.flare import SITE_FILE

    return deploying.start_site(kit / SITE_FILE, agreed, name, keep_bundle, open_bundle)
