"""``medfed deploy``: submits an experiment to FLARE, follows it, and submits it again if it fails.

One dead worker fails a whole FLARE job, FLARE does not resume a killed server's job, and a
restarted hospital is not part of a running job. So jobs are only temporary: medfed's checkpoints at
the server and at the sites hold the run, and the next job continues from there.

The module also holds what medfed runs in FLARE's processes, the coordinator and a site.
"""

from __future__ import annotations

import base64
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from medfed import __version__
from medfed.common import schemas, untrusted
from medfed.common.console import levels, logged_by, short, without_remarks
from medfed.config import compose, description, sections
from medfed.federation.wire.fixed_point import FEWEST
from medfed.records.folder import RunFolder
from medfed.records.places import refuse_full
from medfed.run.channel import build_channel
from medfed.run.federating import method_of
from medfed.sites import agreement, calls, installed, masks, newcomers, run, site_folder, studying
from medfed.sites.flare import LOST, PREFIXES, SITE, check_flare, write_job
from medfed.sites.site import own_data
from medfed.sites.wire import Answers, Request, Transport, declined, unreadable
from medfed.sites.withdrawal import withdrawn_of
from medfed.sites.words import VetoError, in_words
from medfed.standalone.errors import CodecError, ConfigError, MedfedError, SiteError, few
from medfed.standalone.files import write_json
from medfed.studies.cohorts import Opener
from medfed.studies.parts import Separate
from medfed.studies.plan import plan_of, read_plan
from medfed.studies.simulation import parts

if TYPE_CHECKING:
    from medfed.sites.flare.console import Console

T = TypeVar("T")
_log = logging.getLogger(__name__)
OUTCOME, PRINTED = "outcome.json", "printed.txt"
BEGUN, FINISHED, STOPPED = "begun", "finished", "stopped"


@dataclass(frozen=True)
class Deployment:
    """The task of the process at FLARE's server."""

    name: str  # the experiment's
    agreed: Mapping[str, Any]  # the agreement, from :meth:`medfed.sites.agreement.Agreed.record`
    folder: str  # the run folder, on the server's machine
    coordinator_only: tuple[str, ...] = ()  # overrides that apply only at the coordinator
    resume: bool = False  # whether to continue the existing run
    # Keywords of :class:`medfed.sites.calls.Terms`.
    terms: Mapping[str, Any] = field(default_factory=dict)
    output: str = ""  # folder for its output and its result
    # The last of the sites, which joins the finished run in the folder; empty: all sites run the
    # experiment.
    onboard: str = ""
    # Folders of the bundles of a study, by name.
    bundles: Mapping[str, str] = field(default_factory=dict)

    @property
    def expected(self) -> list[str]:
        """Names of the sites that take part, without those that have withdrawn."""
        if self.onboard:
            return [self.onboard]
        gone = withdrawn_of(Path(self.folder)) if self.resume else []
        return [site for site in self.agreed["sites"] if site not in gone]

    def resumed(self) -> Deployment:
        """Returns the deployment that continues the run, if there is anything to continue."""
        return replace(self, resume=RunFolder(Path(self.folder)).config_yaml.is_file())

    def text(self) -> str:
        """Returns it in the form of a job's arguments."""
        return encoded(asdict(self))

    @classmethod
    def of(cls, text: str) -> Deployment:
        """Reads what :meth:`text` returned."""
        return decoded(text, cls)


def encoded(content: Mapping[str, Any]) -> str:
    """Encodes content so that FLARE does not change it: FLARE fills in braces and builds mappings.

    Example:
        >>> decoded(encoded({"overrides": ["cohort.absent={3:[a]}"]}))
        {'overrides': ['cohort.absent={3:[a]}']}
    """
    return base64.b64encode(json.dumps(content).encode()).decode()


def decoded(text: str, kind: type[T] = dict[str, Any]) -> T:  # type: ignore[assignment]
    """Reads what :func:`encoded` returned, as a type."""
    return schemas.parse_json(base64.b64decode(text, validate=True), kind)


def outcome(folder: Path) -> tuple[str, str]:
    """Returns how a coordinator's process has ended, and why; empty if it has not started."""
    path = folder / OUTCOME
    ended = untrusted.read_json(path, dict[str, str]) if path.is_file() else {}
    return ended.get("how", ""), ended.get("why", "")


def run_coordinator(text: str, transport: Transport) -> None:
    """Runs or resumes the experiment of a deployment; its output goes to a file, line by line."""
    deployment = Deployment.of(text)
    output = Path(deployment.output)
    write_json(output / OUTCOME, {"how": BEGUN, "why": ""})
    how, why = FINISHED, ""
    with (
        (output / PRINTED).open("a", encoding="utf-8", buffering=1) as printed,
        redirect_stdout(printed),
        redirect_stderr(printed),
        levels({"medfed": logging.INFO, "": logging.WARNING}),  # FLARE logs every call
        without_remarks(),
        logged_by(logging.StreamHandler(printed), "medfed"),
    ):
        try:
            _coordinate(deployment, transport)
        except MedfedError as error:
            how, why = STOPPED, str(error)
        except Exception as error:
            _log.exception("The run has failed.")
            how, why = STOPPED, f"unexpected {type(error).__name__}; see the traceback above."
    write_json(output / OUTCOME, {"how": how, "why": why})


def _coordinate(deployment: Deployment, transport: Transport) -> None:
    overrides = (*deployment.agreed["overrides"], *deployment.coordinator_only)
    source = description.written(compose.load([*overrides, f"folder={deployment.folder}"]))
    source["resume"] = deployment.folder if deployment.resume and not deployment.onboard else None
    if source["data"].get("path") == "???":
        source["data"]["path"] = None  # the data are the sites'
    config, terms = description.describe(source), calls.Terms(**deployment.terms)
    if (plan := deployment.agreed.get("plan")) is not None:
        with calls.Caller(transport, deployment.agreed["sites"], terms) as caller:
            agreed_plan = plan_of(plan, "The agreement")
            studying.conduct(caller, agreed_plan, deployment.bundles, Path(config.folder))
        return
    if deployment.onboard:
        newcomers.join(config, transport, deployment.onboard, deployment.agreed["joins"], terms)
        return
    run.coordinate(config, transport, list(deployment.agreed["sites"]), terms, logs=True)
    agreed = RunFolder(Path(deployment.folder)).agreed_json  # for hospitals that join it
    write_json(agreed, deployment.agreed)


def start_site(
    path: Path, agreed: str, name: str, keep_bundle: Callable[[Path], object], open_bundle: Opener
) -> Answers:
    """Makes the site from the agreement, encoded, and its file.

    After a mistake it is a site that only answers that it failed: no error text may leave the site.
    """
    log = _log
    try:
        file = agreement.SiteFile.read(path)
        log = site_folder.listen(name, file.folder)
        log.info("Starts with medfed %s, code %s.", __version__, installed.code())
        terms = agreement.Agreed(**decoded(agreed, agreement.AgreedRecord))
        if file.site != name:
            raise ConfigError(f"{path} is of site {file.site}, but FLARE names this site {name}.")
        kit = path.absolute().parents[1] / "startup"  # also where the file itself is a link
        signer = None
        if (kit / "client.key").is_file():
            signer = masks.Certificate(kit, file.folder / "certificates.json")
        if terms.plan is not None:
            return studying.study_site(terms, file, signer, open_bundle)
        return site_folder.hospital(terms, file, keep_bundle, signer)
    except VetoError as veto:
        log.getChild("refused").error("The site %s does not take part: %s", name, veto)
        return Broken(name, veto.reason, "refused")
    except Exception as error:
        unexpected = not isinstance(error, MedfedError)
        log.error("The site %s cannot start: %s", name, error, exc_info=unexpected)
        return Broken(name, type(error).__name__)


@dataclass(frozen=True)
class Broken:
    """A site that cannot start, and answers so."""

    name: str  # the site's
    reason: str  # the error's type; of what the site refuses, a word
    status: Literal["failed", "refused"] = "failed"  # whether it has failed or refuses

    def answer(self, request: bytes) -> bytes:
        """Answers so."""
        try:
            content = Request.from_bytes(request)
        except CodecError:
            return unreadable(self.name)
        return declined(content, self.status, self.reason).to_bytes()


POLL = 1.0
"""Seconds between looks how a job is."""
_COMPONENTS = "medfed.sites.flare.components"
_WEIGHTS = "init.weights"
_SETTLING = 8  # checks after which a job without processes counts as lost
_ENDING = 60.0  # seconds in which a finished run's job may end, too


def deployment_of(keys: sections.Section, typed: Sequence[str]) -> Deployment:
    """Returns the deployment of a command line: a run, or a hospital that joins a finished one.

    It names the overrides of ``medfed train`` that sites do not agree on.
    """
    terms = {**keys.terms, "across": bool(keys.across)}
    calls.Terms(**terms)
    if keys.onboard is not None:
        folder, site = Path(str(keys.run)).expanduser(), str(keys.onboard)
        joining = newcomers.agreed_for(folder, site, int(keys.onboard_steps))
        named = str(joining.config().name), joining.record(), str(folder.resolve())
        return Deployment(*named, terms=terms, onboard=site)
    study = None if keys.study is None else read_plan(Path(str(keys.study)).expanduser())
    plan = None if study is None else msgspec.to_builtins(study.agreed)
    what = typed, [*map(str, keys.sites)], bool(keys.cut), plan
    agreed, coordinator_only, remarks = agreement.Agreed.of(*what)
    if study is not None and len(agreed.sites) < FEWEST:
        sums = [part.name for part in parts(study) if not isinstance(part, Separate)]
        remarks += [f"Left out, as a sum needs {FEWEST} sites: {few(sums)}."] * bool(sums)
    for line in remarks:
        _print(line)
    config = agreed.config()
    if study is None:  # what no site could run is refused here
        sites = agreed.sites
        own_data(config, sites[0], None if agreed.cut else sites)
        algorithm = method_of(config, len(sites), are_sites=True)
        build_channel(config, algorithm, len(sites))
    method = str(config.algorithm["_target_"]).rpartition(".")[2].lower()
    kind, now = "study" if study else method, time.strftime("%Y-%m-%d_%H-%M-%S")
    folder = Path(keys.resume or keys.folder or f"outputs/{config.name}/{kind}/{now}")
    if keys.resume is None:
        refuse_full(folder)
    else:
        _ = RunFolder(folder).config
    named = str(config.name), agreed.record(), str(folder.resolve())
    only, is_resumed = tuple(map(_placed, coordinator_only)), keys.resume is not None
    bundles = {one.name: str(one.path) for one in (study.bundles if study else ())}
    return Deployment(*named, only, is_resumed, terms, bundles=bundles)


def write(deployment: Deployment, folder: Path) -> Path:
    """Writes the job of a deployment into a folder, whose name is the job's name."""
    server = (f"{_COMPONENTS}.Coordinator", {"deployment": deployment.text()})
    site = (f"{SITE}.Hospital", {"agreed": encoded(deployment.agreed)})
    write_job(folder, deployment.expected, server, site)
    return folder


def _placed(override: str) -> str:
    """The absolute path of the coordinator's weights: the server's process runs elsewhere."""
    key, _, value = override.partition("=")
    whole = Path(value.strip("'\"")).expanduser()
    return f"{key}='{whole.resolve()}'" if key == _WEIGHTS and whole.exists() else override


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass
class Follower:
    """Runs a deployment, over as many jobs as it takes."""

    deployment: Deployment  # what is to be done
    kit: Path  # of who submits
    attempts: int = 5  # how many jobs in a row may end without a new round before giving up
    patience: float = 3600.0  # seconds to wait for a site to connect, or for a lost server
    look: float = 15.0  # seconds between checks whether a site was restarted
    say: Callable[[str], None] = _print  # prints a line for the user

    def __post_init__(self) -> None:
        self._passed_on = 0  # characters of the server's output that were already shown

    def run(self) -> None:
        """Submits until the run has finished."""
        check_flare()
        failed = 0
        while True:
            before = self._last()
            with tempfile.TemporaryDirectory(prefix="medfed-deploy-") as scratch:
                why = self._job(replace(self.deployment, output=scratch), Path(scratch))
            if why is None:
                return
            failed = 1 if self._last() != before else failed + 1
            if failed >= self.attempts:
                advice = f"Finished rounds are kept: continue with resume={self.deployment.folder}."
                raise SiteError(
                    f"{failed} jobs in a row have failed ({why}). "
                    f"{'Try again.' if self.deployment.onboard else advice}"
                )
            self.deployment = self.deployment.resumed()
            self.say(f"FLARE's job has ended ({why}); the run continues in another one.")

    def _last(self) -> str:
        """The latest checkpoint, which shows whether a job made progress."""
        rounds = RunFolder(Path(self.deployment.folder)).rounds
        return max((path.name for path in rounds), default="")

    def _job(self, deployment: Deployment, scratch: Path) -> str | None:
        """Runs one job; returns why it failed, ``None`` if the run has finished."""
        from medfed.sites.flare.console import Console, NoServerError  # imported here: the extra

        job = write(deployment, scratch / deployment.name)
        self._passed_on, number, gone = 0, "", False
        end = time.monotonic() + self.patience
        while True:
            try:
                with Console(self.kit) as console:
                    if not number:
                        self._wait(console, end)
                        number = console.submit(job)
                        self.say("Submitted; waiting for the sites, which read their data first.")
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
        expected = self.deployment.expected
        while missing := [s for s in expected if s not in (known := console.connected())]:
            names = ", ".join(map(short, missing))
            if waited != missing:
                others = ", ".join(map(short, sorted(known))) or "nobody"
                left = f"at most {max(0, end - time.monotonic()):.0f} s more"
                self.say(f"Waiting, {left}, for {names} to connect; connected: {others}.")
            if time.monotonic() > end:
                raise SiteError(in_words("not_connected", names=names))
            waited = missing
            time.sleep(POLL)

    def _follow(self, console: Console, number: str, scratch: Path) -> str | None:
        status, look, alone = "", time.monotonic() + self.look, ""
        try:
            while not status.startswith(("FINISHED", LOST)):
                time.sleep(POLL)
                self._pass_on(scratch / PRINTED)
                how = outcome(scratch)[0]
                if how in (FINISHED, STOPPED):
                    break
                status = self._final_status(console, number)
                if time.monotonic() > look and how == BEGUN:
                    look = time.monotonic() + self.look
                    restarted = [s for s in self.deployment.expected if console.has_restarted(s)]
                    if alone in restarted:  # twice, as sites also leave a job that is just ending
                        console.abort(number)
                        return f"{short(alone)} was restarted, and is not part of the job"
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
            why, classes = console.reason(number) or status, ", ".join(PREFIXES)
            raise SiteError(in_words("classes", why=why, classes=classes))
        return None if how == FINISHED else status

    def _final_status(self, console: Console, number: str) -> str:
        """Returns a job's status; one that is just ending has neither processes nor a result."""
        for _ in range(_SETTLING):
            if (status := console.status(number)) != LOST:
                break
            time.sleep(POLL)
        return status

    def _pass_on(self, path: Path) -> None:
        """Shows the server's new output, in whole lines."""
        if path.is_file():
            text = path.read_text(errors="replace")[self._passed_on :]
            whole, mark, _ = text.rpartition("\n")
            self._passed_on += len(whole + mark)
            for line in whole.splitlines():
                self.say(line)
