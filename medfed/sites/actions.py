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


def check(agreed: Path, local: Path, folder: Path | None = None) -> None:
    """Reads a site's data by the agreement, and reports what would leave; nothing leaves.

    Args:
        agreed: The file of the agreement.
        local: The site's file.
        folder: Gets a description of the data instead, see :mod:`medfed.datamodules.descriptions`.

    Raises:
        MedfedError: If a file cannot be read, or the two contradict each other.
    """
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
    from medfed.sites import withdrawal

    return withdrawal.withdraw(folder, site, forget)


def show_status(folder: Path) -> None:
    """Prints the state of a run across sites; see :func:`medfed.sites.status.show`."""
    from medfed.sites import status

    status.show(folder)


def provision(
    folder: Path, sites: Sequence[str], server: str, port: int, renew: bool, lock: Path | None
) -> None:
    """Makes a federation, and prints the next steps; see :mod:`medfed.sites.flare.kits`."""
    from medfed.sites.flare import kits

    kits.provision(folder, sites, server, port, renew, lock)
    _next("provisioned", folder=folder, sites=sites, server=server, port=port, admin=kits.ADMIN)


def approve(folder: Path, request: Path) -> None:
    """Approves a site's request; prints what goes back, and what is compared by telephone."""
    from medfed.sites.flare import kits

    _next("approved", **kits.approve(folder, request)._asdict())


def request(invitation: Path, folder: Path, site: str) -> None:
    """Makes a site's key and its request; prints what the coordinator gets."""
    from medfed.sites.flare import kits

    file, hashed = kits.request(invitation, folder, site)
    _next("requested", name=site, file=file, request=hashed, folder=folder)


def make_kit(signed: Path, fingerprint: str, folder: Path) -> None:
    """Makes a site's kit from what the coordinator has approved; prints the next steps."""
    from medfed.sites.flare import kits

    _next("made", name=kits.make_kit(signed, fingerprint, folder), folder=folder)


def _next(what: str, **words: Any) -> None:
    """Prints what to do next; lines with a mark are red."""
    from datetime import date, timedelta

    from rich.console import Console

    from medfed.common.files import filled
    from medfed.sites.flare.kits import CERTIFICATES, TEMPLATES

    end = date.today() + timedelta(days=CERTIFICATES)
    text = filled(TEMPLATES / "kits.txt", what=what, days=CERTIFICATES, end=end, **words)
    for line in text.strip().split("\n"):
        style = "red" if line.startswith("!") else None
        plain = line.removeprefix("! ")
        Console().print(plain, style=style, soft_wrap=True, highlight=False, markup=False)


def deployment_of(keys: Any, overrides: Sequence[str]) -> Deployment:
    """Returns the deployment for a ``medfed deploy`` command: a run, or a hospital that joins.

    Args:
        keys: The keys of ``medfed deploy``.
        overrides: Those of ``medfed train``.

    Raises:
        MedfedError: If they cannot be used.
    """
    from medfed.sites import deploying

    if keys.onboard is not None:
        return deploying.joining_deployment(keys)
    return deploying.deployment_of(keys, overrides)


def write_job(deployment: Deployment, folder: Path) -> tuple[Path, Path, str]:
    """Writes the job of a deployment and what all sites agree on.

    Returns:
        Where both are, and the hash by which sites approve it.
    """
    from medfed.common.files import digest, write_json
    from medfed.sites import deploying

    agreed = folder / "agreed.json"
    write_json(agreed, deployment.agreed)
    job = deploying.write(deployment, folder / deployment.name)
    return job, agreed, digest(deployment.agreed)


def carry_out(deployment: Deployment, kit: Path, attempts: int, patience: float) -> None:
    """Submits a deployment to FLARE, and follows it until it is done.

    Args:
        deployment: The deployment.
        kit: The folder of the coordinator's kit.
        attempts: How many jobs in a row may fail.
        patience: Seconds to wait for a site or the server.

    Raises:
        ConfigError: If FLARE is not installed.
        SiteError: If a site, the server or the run itself gives up.
    """
    from medfed.sites.deploying import Follower

    Follower(deployment, kit, attempts, patience).run()


def start_site(kit: Path, agreed: str, name: str, keep_bundle: Callable[[Path], object]) -> Answers:
    """Makes the site of a kit's ``local`` folder, for FLARE's process there.

    Args:
        kit: That folder.
        agreed: The agreement, encoded.
        name: The site's name in FLARE.
        keep_bundle: Makes the bundle of the model in a run folder.
    """
    from medfed.sites import deploying
    from medfed.sites.flare import SITE_FILE

    return deploying.start_site(kit / SITE_FILE, agreed, name, keep_bundle)
