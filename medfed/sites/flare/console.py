"""The coordinator's line to FLARE's server.

Kits for FLARE's server, its sites and the coordinator: certificates, scripts, allowed classes.
"""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml  # type: ignore[import-untyped]
from nvflare.fuel.flare_api.flare_api import NoConnection, new_secure_session
from nvflare.lighter.constants import CtxKey
from nvflare.lighter.provision import prepare_builders, prepare_project
from nvflare.lighter.provisioner import Provisioner

from medfed.common.errors import ConfigError, SiteError, first_line
from medfed.common.files import filled, make_private, write_json, write_text
from medfed.sites.flare import LOST, PREFIXES


def _not_flare(record: logging.LogRecord) -> bool:
    """Silences FLARE's logs of connections, whose names have no common prefix."""
    return "nvflare" not in Path(record.pathname).parts


class NoServerError(SiteError):
    """FLARE's server does not answer."""


class Console:
    """Submits jobs with an admin's kit, and watches them; a context manager.

    Args:
        kit: The folder of the kit.

    Raises:
        ConfigError: If it is not an admin's kit.
    """

    def __init__(self, kit: Path) -> None:
        self.kit = kit
        try:
            about = json.loads((kit / "startup" / "fed_admin.json").read_text())["admin"]
            self.name, self.server = str(about["username"]), f"{about['host']}:{about['port']}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"kit={kit} is not a coordinator's kit of FLARE (it has no "
                "startup/fed_admin.json); name the folder of the coordinator's kit."
            ) from error
        self._session: Any = None

    def __enter__(self) -> Console:
        for handler in filter(None, [*logging.getLogger().handlers, logging.lastResort]):
            handler.addFilter(_not_flare)
        with self._one_sentence(), redirect_stdout(io.StringIO()):
            self._session = new_secure_session(self.name, str(self.kit.resolve()), timeout=20.0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._session is not None:
            with suppress(Exception):
                self._session.close()

    @contextmanager
    def _one_sentence(self) -> Iterator[None]:
        """FLARE's errors have no common base, and their text is the server's."""
        try:
            yield
        except NoConnection as error:
            raise NoServerError(
                f"FLARE's server at {self.server} does not answer; start it by startup/start.sh "
                "of its kit, and see that its port can be reached from here."
            ) from error
        except Exception as error:
            raise SiteError(
                f"FLARE's server at {self.server} refuses: {first_line(error)}."
            ) from error

    def connected(self) -> set[str]:
        """Returns the sites whose kit is started and has reached the server."""
        with self._one_sentence():
            return {client.name for client in self._session.get_system_info().client_info}

    def submit(self, job: Path) -> str:
        """Submits a job; returns its number."""
        with self._one_sentence():
            return str(self._session.submit_job(str(job.resolve())))

    def status(self, number: str) -> str:
        """Returns a job's status in FLARE's words, or :data:`LOST`.

        Raises:
            NoServerError: If the server does not answer.
        """
        with self._one_sentence():
            status = str(self._session.get_job_status(number))
            if status == "RUNNING":  # FLARE reports this for ever if the job's server was killed
                running = {job.job_id for job in self._session.get_system_info().job_info}
                if number not in running:  # or it has ended in between
                    status = str(self._session.get_job_status(number))
                    return LOST if status == "RUNNING" else status
            return status

    def reason(self, number: str) -> str:
        """Returns FLARE's reason why a job has not run: the sites' replies to the job."""
        with self._one_sentence():
            about = self._session.get_job_meta(number)
        said = [s for s in about.get("job_deploy_detail", ()) if not s.endswith(": OK")]
        said = said or [s for s in about.get("schedule_history", ()) if not s.endswith("scheduled")]
        return "; ".join(said[-5:]).replace("NVFLARE_ERROR: ", "")

    def has_restarted(self, site: str) -> bool:
        """Returns whether a site answers and runs no process of a job."""
        try:
            about = self._session.get_client_job_status([site])
        except Exception:  # for a site that is down the server waits and then gives up
            return False
        return any(one.get("status") == "no_jobs" for one in about or ())

    def abort(self, number: str) -> None:
        """Ends a job, unless it has ended."""
        with self._one_sentence():
            self._session.abort_job(number)


ROOT_DAYS = 3650
"""Days after which the root certificate of a new federation ends, so that kits can be renewed."""
_TEMPLATES = Path(__file__).parents[1] / "templates"
_READY = (
    'mkdir -p "$WORKSPACE/transfer"\n'  # in FLARE's start script, once it knows the kit's folder
)
_JOBS = """sed -i "s#/tmp/nvflare/#$WORKSPACE/jobs/#g" "$WORKSPACE/local/resources.json"\n"""


def project(name: str, sites: Sequence[str], server: str, port: int, admin: str) -> dict[str, Any]:
    """Returns a project file for FLARE's provisioning: one server, one person, one kit per site.

    Args:
        name: The federation's name.
        sites: The hospitals.
        server: The server's name in the network, which its certificate is for.
        port: The only port, which sites and admin connect to; no connection goes to them.
        admin: The coordinator, as an e-mail address.
    """
    orgs = {site: re.sub(r"\W", "_", site) for site in sites}
    words = {"name": name, "orgs": orgs, "server": server, "port": port, "admin": admin}
    text = filled(_TEMPLATES / "project.yml", **words, days=ROOT_DAYS)
    content: dict[str, Any] = yaml.safe_load(text)
    return content


def allow(kit: Path, prefixes: Sequence[str] = PREFIXES) -> None:
    """Sets in a kit's ``local`` folder what jobs may do there.

    Jobs may name the classes of FLARE's list and of medfed's, and contain no code. No one can read
    the site's files or logs remotely: by default FLARE sends error logs to the server, and the text
    of an error may hold a patient's name.

    Args:
        kit: The kit of a site or the server.
        prefixes: The prefixes of allowed classes.
    """
    local = kit / "local"
    path = local / "resources.json"
    resources = json.loads(
        (path if path.exists() else path.with_suffix(".json.default")).read_text()
    )
    listed = resources.setdefault("class_allow_list", [])
    listed += [prefix for prefix in prefixes if prefix not in listed]
    resources["allow_log_streaming"] = False
    resources["components"] = [
        one for one in resources["components"] if one["id"] != "site_log_streamer"
    ]
    write_json(path, resources)
    rights = _TEMPLATES / "authorization.json"
    write_text(local / rights.name, rights.read_text(encoding="utf-8"))
    # FLARE keeps jobs in /tmp, where other users and other federations reach them. Only the start
    # script knows where the kit was unpacked.
    script = kit / "startup" / "sub_start.sh"
    text = script.read_text()
    if _JOBS not in text:
        if _READY not in text:
            raise ConfigError(f"{script} is of another FLARE; install the one that medfed needs.")
        script.write_text(text.replace(_READY, _READY + _JOBS))


def _forget_all_but_the_root(path: Path) -> None:
    """Lets FLARE make new keys and certificates by the same root.

    Raises:
        ConfigError: If there is nothing to renew.
    """
    if not path.is_file():
        raise ConfigError(f"There are no kits to renew: {path} is missing; leave renew out.")
    state = json.loads(path.read_text())
    write_json(path, {key: state[key] for key in ("root_cert", "root_pri_key")})


def provision(project: Mapping[str, Any], folder: Path, renew: bool = False) -> Path:
    """Makes kits with keys, certificates and start scripts, which their owner alone may read.

    Args:
        project: A project file's content.
        folder: The folder of the kits; existing kits stay, and new ones have the same root.
        renew: Whether to make new keys and certificates for all, by the same root.

    Returns:
        The folder that holds a kit for each participant.

    Raises:
        ConfigError: If FLARE refuses it.
    """
    content = json.loads(json.dumps(project))  # FLARE writes into it
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if renew:
        _forget_all_but_the_root(folder / str(project["name"]) / "state" / "cert.json")
    errors = list[str]()  # of FLARE's log, for the sentence
    levels = dict.fromkeys(("debug", "info", "warning"), lambda _: None)
    try:
        made = Provisioner(str(folder), prepare_builders(content)).provision(
            prepare_project(content), logger=SimpleNamespace(**levels, error=errors.append)
        )
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"FLARE does not provision this project ({error}).") from error
    if made.get(CtxKey.BUILD_ERROR):
        raise ConfigError(f"FLARE does not provision this project ({'; '.join(errors)}).")
    kits = Path(made[CtxKey.CURRENT_PROD_DIR])
    for one in project["participants"]:
        if one["type"] != "admin":
            allow(kits / one["name"])
    make_private(folder)  # state/cert.json in it holds the keys of all
    return kits
