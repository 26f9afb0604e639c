"""Kits for FLARE's server, its sites and the coordinator, whose keys stay where they are made.

A site makes its key and a request from the coordinator's invitation; the coordinator approves the
request; the site makes its kit from the certificate that comes back, once it has compared the
fingerprint of the root. All three are NVFLARE's own commands. Then the kit gets rules for jobs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import site as python_site
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypedDict

from medfed.common.untrusted import read_yaml
from medfed.config.description import as_yaml
from medfed.sites.flare import PREFIXES, SITE_FILE, check_flare
from medfed.sites.installed import TEMPLATES, write_install
from medfed.standalone.errors import ConfigError, first_line
from medfed.standalone.files import filled, make_private, replacing_folder, write_json, write_text

ADMIN = "coordinator@medfed.local"
"""Who submits; FLARE asks for the form of an address, and writes to nobody."""
CERTIFICATES = 360
"""Days after which certificates end; the root's ends after ten years."""
INVITATION, PROFILE, ROOT, KITS = "invitation", "profile.yml", "ca", "kits"
# In FLARE's start script, once it knows the kit's folder.
_READY = 'mkdir -p "$WORKSPACE/transfer"\n'
_JOBS = """sed -i "s#/tmp/nvflare/#$WORKSPACE/jobs/#g" "$WORKSPACE/local/resources.json"\n"""


class _Profile(TypedDict):
    name: str
    server: dict[str, str | int]


def provision(
    folder: Path,
    sites: Sequence[str],
    server: str,
    port: int,
    renew: bool = False,
    lock: Path | None = None,
) -> Path:
    """Makes a federation: its root, an invitation, and the kits of the server and coordinator."""
    check_flare()
    invitation, root = folder / INVITATION, folder / ROOT
    if renew and not (root / "rootCA.key").is_file():
        raise ConfigError(f"There are no kits to renew: {root} is missing; leave renew out.")
    at = {"host": server, "fed_learn_port": port, "admin_port": port}
    how = {"name": "medfed", "scheme": "tcp", "connection_security": "mtls", "server": at}
    profile = invitation / PROFILE
    if profile.is_file() and (known := read_yaml(profile, _Profile)["server"]) != at:
        raise ConfigError(
            f"{folder} is of the server {known.get('host')}, port {known.get('admin_port')}; name "
            "both, or another folder."
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with replacing_folder(invitation / "install") as install:
        write_install(install, lock)
    write_text(profile, as_yaml(how))
    if not (root / "rootCA.key").is_file():
        _flare(root, "cert", "init", "--profile", str(profile), "-o", str(root))
    kinds = {server: "server", ADMIN: "admin", **dict.fromkeys(sites, "client")}
    for name, kind in kinds.items():
        place = folder / KITS / name
        if renew or not (place / "startup").is_dir():
            made = approve(folder, request(invitation, place, name, kind)[0])
            make_kit(Path(made["signed_zip"]), made["rootca_fingerprint_sha256"], place)
    make_private(folder)
    return folder / KITS


def request(invitation: Path, folder: Path, name: str, kind: str = "client") -> tuple[Path, str]:
    """Makes a key that stays in the folder of a kit, and the request for its certificate."""
    about = read_yaml(invitation / PROFILE, _Profile, "name by invitation what you were sent")
    ports = {key: value for key, value in about["server"].items() if key != "host"}
    more = {"server": ports, "admin": {"role": "lead"}}.get(kind, {})
    one = {"name": name, "type": kind, "org": re.sub(r"\W", "_", name), **more}
    place, file = folder / "request", folder / "request" / "participant.yml"
    if (invitation / "install").is_dir():
        shutil.copytree(invitation / "install", folder / "install", dirs_exist_ok=True)
    write_text(file, as_yaml({"name": about["name"], "participants": [one]}))
    made = _flare(place, "cert", "request", "-p", str(file), "--out", str(place), "--force")
    make_private(folder)
    known = json.loads((place / "request.json").read_text(encoding="utf-8"))
    return Path(made["request_zip"]), str(known["csr_sha256"])


def approve(folder: Path, request: Path) -> dict[str, Any]:
    """Makes a certificate for the key of a request.

    Returns in FLARE's words: whose it is, the file that goes back, and what both compare by
    telephone.
    """
    root, profile = folder / ROOT, str(folder / INVITATION / PROFILE)
    words = ("-c", str(root), "--profile", profile, "--valid-days", str(CERTIFICATES), "--force")
    return _flare(root, "cert", "approve", str(request), *words)


def make_kit(signed: Path, fingerprint: str, folder: Path) -> str:
    """Makes a kit, or renews its keys; the folder ``local`` of one that is there stays."""
    home = folder / "request"
    if not home.is_dir():
        raise ConfigError(f"{folder} has made no request; begin by medfed site request.")
    with TemporaryDirectory(prefix=".made-", dir=folder) as scratch:
        words = ("package", str(signed), "--request-dir", str(home), "-w", scratch)
        made = _flare(home, *words, f"--fingerprint={fingerprint}")
        for part in Path(made["output_dir"]).iterdir():
            place = folder / part.name
            if part.name == "startup" and place.exists():
                place.rename(Path(scratch) / "old")
            if not place.exists():
                part.rename(place)
    name = str(made["name"])
    if made["type"] in ("client", "server"):
        allow(folder)
        files = {f"service/medfed-{name}.service": "medfed.service"}
        files["service/Dockerfile"] = "Dockerfile"
        if made["type"] == "client":
            files[f"local/{SITE_FILE}.example"] = f"{SITE_FILE}.example"
        for file, template in files.items():
            text = filled(TEMPLATES / template, name=name, low=name.lower())
            write_text(folder / file, text)
    make_private(folder)
    return name


def _flare(home: Path, *words: str) -> dict[str, Any]:
    """Runs one of NVFLARE's commands, whose records of keys go to ``home``, not to the user's."""
    check_flare()
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    command = [sys.executable, "-P", "-m", "nvflare.cli", "--format", "json", *words]
    environ = {**os.environ, "HOME": str(home), "PYTHONUSERBASE": python_site.getuserbase()}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    line = next((each for each in done.stdout.splitlines() if each.startswith("{")), "{}")
    answer = json.loads(line)
    if answer.get("status") != "ok":  # its hint would say the fingerprint of another root
        why = answer.get("data", {}).get("detail") or answer.get("message") or done.stderr
        raise ConfigError(f"FLARE does not do this: {first_line(ValueError(why)).rstrip('.')}.")
    return dict(answer["data"])


def allow(kit: Path, prefixes: Sequence[str] = PREFIXES) -> None:
    """Sets in a kit's ``local`` folder what jobs may do there.

    Jobs may name classes of FLARE's list and of ``prefixes``, and contain no code. No one can read
    the site's files or logs remotely: by default FLARE sends error logs to the server, and the text
    of an error may hold a patient's name.
    """
    local = kit / "local"
    path = local / "resources.json"
    usual = path.with_suffix(".json.default")
    resources = json.loads((path if path.exists() else usual).read_text())
    listed = resources.setdefault("class_allow_list", [])
    listed += [prefix for prefix in prefixes if prefix not in listed]
    resources["allow_log_streaming"] = False
    parts = resources["components"]
    resources["components"] = [one for one in parts if one["id"] != "site_log_streamer"]
    write_json(path, resources)
    rights = TEMPLATES / "authorization.json"
    write_text(local / rights.name, rights.read_text(encoding="utf-8"))
    # FLARE keeps jobs in /tmp, where other users and other federations reach them. Only the start
    # script knows where the kit was unpacked.
    script = kit / "startup" / "sub_start.sh"
    text = script.read_text()
    if _JOBS not in text:
        if _READY not in text:
            raise ConfigError(f"{script} is of another FLARE; install the one that medfed needs.")
        script.write_text(text.replace(_READY, _READY + _JOBS))
