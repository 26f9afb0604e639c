"""Kits for FLARE's server, its sites and who submits: certificates, scripts, what is allowed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nvflare.lighter.constants import CtxKey
from nvflare.lighter.provision import prepare_builders, prepare_project
from nvflare.lighter.provisioner import Provisioner

from medfed.common.errors import ConfigError
from medfed.common.files import write_json
from medfed.sites.flare.job import PREFIXES


def project(
    name: str,
    sites: Sequence[str],
    server: str,
    port: int,
    admin: str,
) -> dict[str, Any]:
    """Returns a project file for FLARE's provisioning: one server, one person, one kit per site.

    Args:
        name: Of the federation.
        sites: The hospitals.
        server: The server's name in the network, which its certificate is for.
        port: The one port that sites and admin call, and nobody calls them.
        admin: Who submits, as an e-mail address.
    """
    lighter = "nvflare.lighter.impl"
    return {
        "api_version": 3,
        "name": name,
        "description": "Written by medfed; one project per federation.",
        "participants": [
            {
                "name": server,
                "type": "server",
                "org": "coordinator",
                "fed_learn_port": port,
                "admin_port": port,
            },
            *({"name": s, "type": "client", "org": re.sub(r"\W", "_", s)} for s in sites),
            {"name": admin, "type": "admin", "org": "coordinator", "role": "project_admin"},
        ],
        "builders": [
            {"path": f"{lighter}.workspace.WorkspaceBuilder"},
            {
                "path": f"{lighter}.static_file.StaticFileBuilder",
                "args": {"config_folder": "config", "scheme": "tcp"},
            },
            {"path": f"{lighter}.cert.CertBuilder"},
            {"path": f"{lighter}.signature.SignatureBuilder"},
        ],
    }


def allow(kit: Path, prefixes: Sequence[str] = PREFIXES) -> None:
    """Settles in a kit's ``local`` folder what jobs may do there.

    They may name the classes of FLARE's own list and ours, and bring no code. Nobody reads the
    site's files or logs from afar: FLARE sends the log of errors to the server unless told not to,
    and the text of an error may hold a patient's name.

    Args:
        kit: Of a site or the server.
        prefixes: Of classes.
    """
    local = kit / "local"
    own = local / "resources.json"
    resources = json.loads((own if own.exists() else own.with_suffix(".json.default")).read_text())
    listed = resources.setdefault("class_allow_list", [])
    listed += [prefix for prefix in prefixes if prefix not in listed]
    resources["allow_log_streaming"] = False
    resources["components"] = [
        one for one in resources["components"] if one["id"] != "site_log_streamer"
    ]
    write_json(own, resources)
    rights = dict.fromkeys(("submit_job", "manage_job", "download_job", "view", "operate"), "any")
    rights |= dict.fromkeys(("clone_job", "shell_commands", "byoc"), "none")
    permissions = {"project_admin": rights}
    write_json(local / "authorization.json", {"format_version": "1.0", "permissions": permissions})


class _Said:
    """What FLARE's provisioning logs: its errors are for the sentence."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def error(self, text: str) -> None:
        self.errors.append(text)

    def info(self, text: str) -> None: ...

    debug = warning = info


def provision(project: Mapping[str, Any], folder: Path) -> Path:
    """Makes kits with keys, certificates and start scripts, the allowed classes among them.

    Args:
        project: A project file's content.
        folder: Where; what was made there before stays, and new kits have the same root.

    Returns:
        The folder that holds a kit for each participant.

    Raises:
        ConfigError: If FLARE refuses it.
    """
    content = json.loads(json.dumps(project))  # FLARE writes into it
    said = _Said()
    try:
        made = Provisioner(str(folder), prepare_builders(content)).provision(
            prepare_project(content), logger=said
        )
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"FLARE does not provision this project ({error}).") from error
    if made.get(CtxKey.BUILD_ERROR):
        raise ConfigError(f"FLARE does not provision this project ({'; '.join(said.errors)}).")
    kits = Path(made[CtxKey.CURRENT_PROD_DIR])
    for one in project["participants"]:
        if one["type"] != "admin":
            allow(kits / one["name"])
    return kits
