"""``medfed deploy``: hands an experiment to FLARE, follows it, and hands it in again if it fails.

One dead worker fails a whole job of FLARE's, a killed server's job is not taken up again, and a
hospital whose machine was restarted has no part in a job that still runs. So a job is no more than
a vehicle: the run is in medfed's own checkpoints, at the server and at the sites, and goes on from
there in the next job.

The kits of a new federation, and what to do with them.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from medfed.common.console import shown
from medfed.common.errors import ConfigError, SiteError
from medfed.common.files import make_private, refuse_full, write_text
from medfed.config.description import as_yaml
from medfed.config.sections import Section
from medfed.records.folder import RunFolder
from medfed.sites.agreement import Agreed
from medfed.sites.calls import Terms
from medfed.sites.flare.job import LOST, PREFIXES, SITE, write_job
from medfed.sites.flare_processes import (
    BEGUN,
    FINISHED,
    PRINTED,
    SITE_FILE,
    STOPPED,
    Deployment,
    encoded,
    outcome,
)
from medfed.sites.newcomers import agreed_for

if TYPE_CHECKING:
    from medfed.sites.flare.console import Console

POLL = 1.0
"""Seconds between looks how a job is."""
_COMPONENTS = "medfed.sites.flare.components"
_WEIGHTS = "init.weights"
_SETTLING = 8  # looks after which a job without processes is believed to be lost
_ENDING = 60.0  # seconds in which a finished run's job may end, too


def deployment_of(keys: Section, typed: Sequence[str]) -> Deployment:
    """Returns what a command line asks for, and says what of it is not agreed among the sites.

    Args:
        keys: The keys of ``medfed deploy``.
        typed: The overrides that are those of ``medfed train``.

    Raises:
        ConfigError: If sites, overrides or terms cannot be used, or a new run's folder is not new.
    """
    Terms(**keys.terms)
    agreed, coordinator_only, said = Agreed.of(
        typed, [str(site) for site in keys.sites], bool(keys.cut)
    )
    for line in said:
        _print(line)
    config = agreed.config()
    folder = keys.resume or keys.folder
    if folder is None:
        method = str(config.algorithm["_target_"]).rpartition(".")[2].lower()
        folder = f"outputs/{config.name}/{method}/{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    if keys.resume is None:
        refuse_full(Path(folder))
    else:
        _ = RunFolder(Path(folder)).config
    return Deployment(
        name=str(config.name),
        agreed=agreed.record(),
        folder=str(Path(folder).resolve()),
        coordinator_only=tuple(map(_placed, coordinator_only)),
        resume=keys.resume is not None,
        terms=dict(keys.terms),
    )


def joining_deployment(keys: Section) -> Deployment:
    """Returns the deployment by which a hospital joins a finished run.

    Args:
        keys: The keys of ``medfed deploy``.

    Raises:
        MedfedError: If the run is none that the hospital can join.
    """
    Terms(**keys.terms)
    folder, site = Path(str(keys.run)).expanduser(), str(keys.onboard)
    agreed = agreed_for(folder, site)
    return Deployment(
        name=str(agreed.config().name),
        agreed=agreed.record(),
        folder=str(folder.resolve()),
        terms=dict(keys.terms),
        onboard=site,
        steps=int(keys.onboard_steps),
    )


def write(deployment: Deployment, folder: Path) -> Path:
    """Writes the job of a deployment.

    Args:
        deployment: What is to be done.
        folder: Where; its name is the job's.

    Returns:
        The folder.
    """
    server = (f"{_COMPONENTS}.Coordinator", {"deployment": deployment.text()})
    site = (f"{SITE}.Hospital", {"agreed": encoded(deployment.agreed)})
    sites = deployment.expected
    write_job(folder, sites, len(sites), server, site)
    return folder


def _placed(override: str) -> str:
    """The coordinator's file of weights by its whole path: the server's process runs elsewhere."""
    key, _, value = override.partition("=")
    whole = Path(value.strip("'\"")).expanduser()
    return f"{key}='{whole.resolve()}'" if key == _WEIGHTS and whole.exists() else override


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass
class Follower:
    """Sees a deployment through, over as many jobs as it takes.

    Attributes:
        deployment: What is to be done.
        kit: Of who submits.
        attempts: Jobs in a row that may end without a further round; then it is given up.
        patience: Seconds to wait for a site that is not connected, or a server that was there.
        look: Seconds between looks whether a site was restarted.
        say: Takes a line for the user.
    """

    deployment: Deployment
    kit: Path
    attempts: int = 5
    patience: float = 3600.0
    look: float = 15.0
    say: Callable[[str], None] = _print

    def __post_init__(self) -> None:
        self._passed_on = 0  # letters of what the server's process says that were passed on

    def run(self) -> None:
        """Submits until the run has finished.

        Raises:
            SiteError: If a site, the server or the run itself gives up; the sentence is theirs.
        """
        failed = 0
        while True:
            before = self._last()
            with tempfile.TemporaryDirectory(prefix="medfed-deploy-") as scratch:
                why = self._job(replace(self.deployment, output=scratch), Path(scratch))
            if why is None:
                return
            failed = 1 if self._last() != before else failed + 1
            if failed >= self.attempts:
                kept = f"What was finished is kept: go on by resume={self.deployment.folder}."
                raise SiteError(
                    f"{failed} jobs in a row have come to nothing ({why}). "
                    f"{'Try again.' if self.deployment.onboard else kept}"
                )
            self.deployment = self.deployment.resumed()
            self.say(f"FLARE's job has ended ({why}); the run goes on in another one.")

    def _last(self) -> str:
        """The latest checkpoint, by which a job is known to have come to something."""
        return max(
            (path.name for path in RunFolder(Path(self.deployment.folder)).rounds), default=""
        )

    def _job(self, deployment: Deployment, scratch: Path) -> str | None:
        """Carries out one job; returns why it came to nothing, ``None`` if the run has finished."""
        from medfed.sites.flare.console import Console, NoServerError  # late: the extra

        job = write(deployment, scratch / deployment.name)
        self._passed_on, number, gone = 0, "", False
        end = time.monotonic() + self.patience
        while True:
            try:
                with Console(self.kit) as console:
                    if not number:
                        self._wait(console, end)
                        number = console.submit(job)
                    if gone:
                        self.say("FLARE's server is back.")
                    gone, end = False, time.monotonic() + self.patience
                    return self._follow(console, number, scratch)
            except NoServerError as error:
                if not number or time.monotonic() > end:
                    raise
                if not gone:
                    self.say(f"{error} Waiting for it.")
                gone = True
                time.sleep(POLL)

    def _wait(self, console: Console, end: float) -> None:
        """Waits until all sites are connected."""
        waited: list[str] = []
        while missing := [
            s for s in self.deployment.expected if s not in (known := console.connected())
        ]:
            names = ", ".join(map(shown, missing))
            if waited != missing:
                others = ", ".join(map(shown, sorted(known))) or "nobody"
                self.say(f"Waiting for {names} to connect to FLARE's server; there: {others}.")
            if time.monotonic() > end:
                raise SiteError(
                    f"{names} did not connect to FLARE's server; start the kit there, see whether "
                    "the name is the kit's, or leave it out."
                )
            waited = missing
            time.sleep(POLL)

    def _follow(self, console: Console, number: str, scratch: Path) -> str | None:
        status, look, alone = "", time.monotonic() + self.look, ""
        try:
            while not status.startswith(("FINISHED", LOST)):
                time.sleep(POLL)
                self._pass_on(scratch / PRINTED)
                if outcome(scratch)[0] in (FINISHED, STOPPED):
                    break
                status = self._settled(console, number)
                if time.monotonic() > look and outcome(scratch)[0] == BEGUN:
                    look = time.monotonic() + self.look
                    restarted = [s for s in self.deployment.expected if console.has_restarted(s)]
                    if alone in restarted:  # twice, as sites also leave a job that is just ending
                        console.abort(number)
                        return f"{shown(alone)} was restarted, and has no part in it"
                    alone = next(iter(restarted), "")
        except KeyboardInterrupt:
            console.abort(number)
            raise
        end = time.monotonic() + _ENDING
        while not status.startswith(("FINISHED", LOST)) and time.monotonic() < end:
            time.sleep(POLL)
            status = console.status(number)
        self._pass_on(scratch / PRINTED)
        how, why = outcome(scratch)
        if how == STOPPED:
            raise SiteError(why)
        if not how and status != LOST:
            raise SiteError(
                f"FLARE ended the job before its first round ({console.reason(number) or status}). "
                f"Each site, and the server, must allow the classes {', '.join(PREFIXES)} in "
                "local/resources.json of its kit; its log says what was refused."
            )
        return None if how == FINISHED else status

    def _settled(self, console: Console, number: str) -> str:
        """Returns how a job is; one that is just ending has no processes, and no end either."""
        for _ in range(_SETTLING):
            if (status := console.status(number)) != LOST:
                break
            time.sleep(POLL)
        return status

    def _pass_on(self, path: Path) -> None:
        """Passes on what the server's process has said since the last time, in whole lines."""
        if path.is_file():
            text = path.read_text(errors="replace")[self._passed_on :]
            whole, mark, _ = text.rpartition("\n")
            self._passed_on += len(whole + mark)
            for line in whole.splitlines():
                self.say(line)


ADMIN = "coordinator@medfed.local"
"""Who submits; FLARE asks for the form of an address, and writes to nobody."""
PROJECT = "medfed"
CERTIFICATES = 360
"""Days after which the certificates that FLARE makes end."""
EXAMPLE = """\
# Copy this file to medfed.yaml in the same folder, and change it there; nothing else reads it.
site: {site}
folder: /srv/medfed          # models, bundle, metrics, pictures and log of this site
data:
  path: /srv/data            # a file or folder of this site's patients
# The study that you approve, by the line that this prints; any other study is refused:
#   medfed site check agreed=agreed.json local=medfed.yaml
# agreed: HASH
# What you allow in any study; without these lines there is no limit:
policy:
  least: 20                  # patients of each split, and samples behind whatever leaves
  largest_share: 0.8         # of all training samples, that one site may have
  test_metrics: 1            # models whose test metrics may be asked for; 0: none
  plugins: false             # whether code from outside medfed may run here
  pictures: false            # whether pictures of patients are drawn in the folder
"""


@contextmanager
def needs_flare() -> Iterator[None]:
    """Says in one sentence how to get NVIDIA FLARE where it is absent.

    Raises:
        ConfigError: If it is.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("nvflare", "psutil"):
            raise
        raise ConfigError(
            'Runs across hospitals need NVIDIA FLARE; install it by pip install "medfed[sites]".'
        ) from error


def make_kits(folder: Path, sites: Sequence[str], server: str, port: int) -> Path:
    """Makes a kit for FLARE's server, each site and the coordinator, and says what is next.

    Args:
        folder: Where; those of an earlier call stay, and a site that is added has the same root.
        sites: Names of the sites.
        server: What they call the server by.
        port: The one port that they call.

    Returns:
        The folder that holds the kits.

    Raises:
        ConfigError: If FLARE is absent, or refuses a name.
    """
    with needs_flare():
        from medfed.sites.flare.console import project, provision

    content = project(PROJECT, sites, server, port, ADMIN)
    kits = provision(content, folder)
    write_text(folder / "project.yml", as_yaml(content))
    for site in sites:
        example = kits / site / "local" / f"{SITE_FILE}.example"
        write_text(example, EXAMPLE.format(site=site))
    make_private(folder)
    end = date.today() + timedelta(days=CERTIFICATES)
    print(
        f"The kits are in {kits}; each holds a key, so that it goes to its owner alone, and\n"
        f"{folder / 'state'} holds all keys, so that it stays here. Nobody but you may read them.\n"
        f"The certificates end after {CERTIFICATES} days, on {end}: for a longer study make new\n"
        "kits in another folder before, and hand them all out.\n"
        f"  {server}: unpack on the server's machine, open port {port}, startup/start.sh\n"
        f"  {', '.join(sites)}: one for each hospital, which checks it there by\n"
        "    nvflare preflight-check -p KIT, writes local/medfed.yaml by the example there,\n"
        "    approves the study by the line agreed: that medfed site check prints, and runs\n"
        "    startup/start.sh\n"
        f"  {ADMIN}: medfed deploy kit={kits / ADMIN} sites=[{','.join(sites)}] experiment=..."
    )
    return kits
