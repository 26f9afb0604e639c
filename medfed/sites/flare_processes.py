"""What medfed runs in FLARE's processes: a deployment at the coordinator, and a site."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from medfed.common.errors import MedfedError
from medfed.common.files import write_json
from medfed.common.schemas import parse_json
from medfed.common.untrusted import read_json
from medfed.records.folder import RunFolder
from medfed.sites.policy import VetoError

if TYPE_CHECKING:
    from medfed.sites.wire import Answers, Transport

T = TypeVar("T")
_log = logging.getLogger(__name__)
OUTCOME, PRINTED = "outcome.json", "printed.txt"
SITE_FILE = "medfed.yaml"
"""A site's file, in the ``local`` folder of its kit."""
BEGUN, FINISHED, STOPPED = "begun", "finished", "stopped"


@dataclass(frozen=True)
class Deployment:
    """The task of the process at FLARE's server.

    Attributes:
        name: The experiment's.
        agreed: The agreement, from :meth:`medfed.sites.agreement.Agreed.record`.
        coordinator_only: Overrides that apply only at the coordinator.
        folder: The run folder, on the server's machine.
        resume: Whether to continue the existing run.
        terms: Keywords of :class:`medfed.sites.calls.Terms`.
        output: Folder for its output and its result.
        onboard: The last of the sites, which joins the finished run in the folder; empty: all sites
            run the experiment.
        steps: Gradient steps that it may take.
    """

    name: str
    agreed: Mapping[str, Any]
    folder: str
    coordinator_only: tuple[str, ...] = ()
    resume: bool = False
    terms: Mapping[str, Any] = field(default_factory=dict)
    output: str = ""
    onboard: str = ""
    steps: int = 100

    @property
    def sites(self) -> list[str]:
        """Names of the sites."""
        return list(self.agreed["sites"])

    @property
    def expected(self) -> list[str]:
        """Names of the sites that take part, without those that have withdrawn."""
        if self.onboard:
            return [self.onboard]
        from medfed.sites.withdrawal import withdrawn_of  # imported here, as it imports PyTorch

        gone = withdrawn_of(Path(self.folder)) if self.resume else []
        return [site for site in self.sites if site not in gone]

    def write_agreed(self, path: Path) -> None:
        """Writes the agreement, so that sites can read it beforehand."""
        write_json(path, self.agreed)

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
    """Reads what :func:`encoded` returned.

    Args:
        text: The text.
        kind: What it must hold.

    Raises:
        ValueError: If it is something else.
    """
    return parse_json(base64.b64decode(text, validate=True), kind)


def outcome(folder: Path) -> tuple[str, str]:
    """Returns how a coordinator's process has ended, and why; empty if it has not started."""
    path = folder / OUTCOME
    if not path.is_file():
        return "", ""
    ended = read_json(path, dict[str, str])
    return ended.get("how", ""), ended.get("why", "")


def run_coordinator(text: str, transport: Transport) -> None:
    """Runs or resumes the experiment of a deployment; its output goes to a file, line by line.

    Args:
        text: The deployment, from :meth:`Deployment.text`.
        transport: Reaches the sites.
    """
    deployment = Deployment.of(text)
    output = Path(deployment.output)
    write_json(output / OUTCOME, {"how": BEGUN, "why": ""})
    how, why = FINISHED, ""
    with (
        (output / PRINTED).open("a", encoding="utf-8", buffering=1) as printed,
        redirect_stdout(printed),
        redirect_stderr(printed),
    ):
        handler, ours, root = (
            logging.StreamHandler(printed),
            logging.getLogger("medfed"),
            logging.root,
        )
        levels = ours.level, root.level
        ours.addHandler(handler)
        ours.setLevel(logging.INFO)
        root.setLevel(logging.WARNING)  # FLARE logs every call
        try:
            _coordinate(deployment, transport)
        except MedfedError as error:
            how, why = STOPPED, str(error)
        except Exception as error:
            _log.exception("The run has failed.")
            how, why = STOPPED, f"unexpected {type(error).__name__}; see the traceback above."
        finally:
            ours.removeHandler(handler)
            ours.setLevel(levels[0])
            root.setLevel(levels[1])
    write_json(output / OUTCOME, {"how": how, "why": why})


def _coordinate(deployment: Deployment, transport: Transport) -> None:
    from medfed.config.compose import load
    from medfed.config.description import describe, written
    from medfed.sites.calls import Terms
    from medfed.sites.newcomers import join
    from medfed.sites.run import coordinate

    source = written(
        load(
            [
                *deployment.agreed["overrides"],
                *deployment.coordinator_only,
                f"folder={deployment.folder}",
            ]
        )
    )
    source["resume"] = deployment.folder if deployment.resume and not deployment.onboard else None
    if source["data"].get("path") == "???":
        source["data"]["path"] = None  # the data are the sites'
    config = describe(source)
    folder = Path(deployment.folder)
    if deployment.onboard:
        join(config, transport, deployment.onboard, deployment.steps, Terms(**deployment.terms))
        return
    coordinate(config, transport, deployment.sites, Terms(**deployment.terms), logs=True)
    deployment.write_agreed(RunFolder(folder).agreed_json)  # for hospitals that join it


def start_site(
    path: Path, agreed: str, name: str, keep_bundle: Callable[[Path], object]
) -> Answers:
    """Makes the site from the agreement and its file.

    Args:
        path: The site's file.
        agreed: The agreement, encoded.
        name: The site's name in FLARE.
        keep_bundle: Makes the bundle of the model in a run folder.

    Returns:
        The site; after a mistake a site that only answers that it failed, as no error text may
        leave the site.
    """
    try:
        return _site(path, agreed, name, keep_bundle)
    except VetoError as veto:
        _log.error("The site %s does not take part: %s", name, veto)
        return Broken(name, veto.reason, "refused")
    except Exception as error:
        _log.exception("The site %s cannot start.", name)
        return Broken(name, type(error).__name__)


def _site(path: Path, agreed: str, name: str, keep_bundle: Callable[[Path], object]) -> Answers:
    from medfed.common.errors import ConfigError
    from medfed.sites.agreement import Agreed, AgreedRecord, SiteFile
    from medfed.sites.masks import Certificate
    from medfed.sites.site_folder import hospital

    terms = Agreed(**decoded(agreed, AgreedRecord))
    file = SiteFile.read(path)
    if file.site != name:
        raise ConfigError(f"{path} is of site {file.site}, but FLARE names this site {name}.")
    kit = path.resolve().parent.parent / "startup"
    signer = Certificate(kit) if (kit / "client.key").is_file() else None
    return hospital(terms, file, keep_bundle, signer)


@dataclass(frozen=True)
class Broken:
    """A site that cannot start, and answers so.

    Attributes:
        name: The site's.
        reason: The error's type; of what the site refuses, a word.
        status: Whether it has failed or refuses.
    """

    name: str
    reason: str
    status: Literal["failed", "refused"] = "failed"

    def answer(self, request: bytes) -> bytes:
        """Answers so."""
        from medfed.common.errors import CodecError
        from medfed.sites.wire import Reply, Request

        try:
            asked = Request.from_bytes(request)
        except CodecError:
            return Reply("hello", self.name, status="refused", reason="bytes").to_bytes()
        return Reply.to(asked, self.status, self.reason).to_bytes()
