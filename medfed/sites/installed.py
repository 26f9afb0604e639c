"""What is installed here: the hash of medfed's code, and the folder by which hospitals install it.

The folder ``install`` holds wheels of what no index has as a wheel, a lock with the hashes of all
others, a bill of materials, the hashes of these files, and a script. The lock is made at release,
by ``scripts/lock.py``. Wheels are packed from what is installed here, always with the same bytes.
"""

from __future__ import annotations

import re
import tomllib
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

import medfed
from medfed.common import files
from medfed.common.errors import ConfigError
from medfed.config.compose import CONFIG_DIR
from medfed.sites.policy import VetoError

PACKED = ("medfed", "antlr4-python3-runtime", "pyhocon")
"""Packages of which no index has a wheel."""
LOCK, SCRIPT, TEMPLATES = "requirements.txt", "install.sh", Path(__file__).parent / "templates"
_PACKAGE = Path(medfed.__file__).parent
_DATE = (2020, 2, 2, 0, 0, 0)  # of all files in a wheel
_LOCAL = re.compile(
    r"__pycache__/|\.dist-info/(RECORD|INSTALLER|REQUESTED|direct_url\.json)$|^\.\."
)
_LOCKED = re.compile(r"^([\w.-]+)==([^\s;\\]+)(?:[^\n]|(?<=\\)\n)*", re.MULTILINE)
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


@cache
def code() -> str:
    """Returns the hash of the installed code: the names and bytes of all files of the package."""
    whole = sha256()
    for name, path in sorted(_code().items()):
        whole.update(f"{files.sha256(path)}  {name}\n".encode())
    return whole.hexdigest()


def check(version: str, agreed: str) -> None:
    """Compares what is installed here with an agreement.

    Raises:
        VetoError: If it is another version, or other code.
    """
    if (version, agreed) != (medfed.__version__, code()):
        raise VetoError(
            f"The sites have agreed on medfed {version}, code {agreed:.12}, and this is "
            f"{medfed.__version__}, code {code():.12}; install the wheel of your kit, by "
            "install/install.sh.",
            "code",
        )


def _code() -> dict[str, Path]:
    """Returns the files of the package by their names in the wheel, from a clone, too."""
    roots = {"medfed": _PACKAGE, "medfed/configs": CONFIG_DIR}
    found = {
        f"{name}/{path.relative_to(root).as_posix()}": path
        for name, root in roots.items()
        for path in root.rglob("*")
        if path.is_file()
    }
    return {name: path for name, path in found.items() if not _LOCAL.search(name)}


def pack(package: str, folder: Path) -> Path:
    """Packs a wheel of an installed package; the same files give the same bytes.

    Args:
        package: Its name; medfed may be installed from a clone.
        folder: Where.

    Returns:
        The wheel.

    Raises:
        ConfigError: If the package is not installed, or a file is not as it was installed.
    """
    try:
        found = metadata.distribution(package)
    except metadata.PackageNotFoundError as error:
        raise ConfigError(f"{package} is not installed here, so a kit cannot hold it.") from error
    listed = {path.as_posix(): path for path in found.files or ()}
    kept = {name: Path(str(p.locate())) for name, p in listed.items() if not _LOCAL.search(name)}
    if package == "medfed":
        about = {name: path for name, path in kept.items() if ".dist-info/" in name}
        kept = {**_code(), **about}
        if (clone := _PACKAGE.parent / "pyproject.toml").is_file():
            _check_clone(clone, found.requires or ())
            listed = {}
    lines, name = list[str](), f"{package.replace('-', '_')}-{found.version}"
    tags = re.findall(r"^Tag: (\S+)$", found.read_text("WHEEL") or "", re.MULTILINE)
    wheel = folder / f"{name}-{_joined(tags)}.whl"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(
        wheel, "w"
    ) as archive:  # not compressed: what a library makes of it varies
        for place, path in sorted(kept.items()):
            content = path.read_bytes()
            known = listed[place].hash if place in listed else None
            hashed = urlsafe_b64encode(sha256(content).digest()).decode().rstrip("=")
            if known is not None and known.mode == "sha256" and known.value != hashed:
                raise ConfigError(f"{path} is not as it was installed; install {package} again.")
            archive.writestr(zipfile.ZipInfo(place, _DATE), content)
            lines.append(f"{place},sha256={hashed},{len(content)}\n")
        record = next(n for n in sorted(kept) if n.endswith("/METADATA"))[: -len("METADATA")]
        lines.append(f"{record}RECORD,,\n")
        archive.writestr(zipfile.ZipInfo(f"{record}RECORD", _DATE), "".join(lines))
    return wheel


def _check_clone(project: Path, known: Sequence[str]) -> None:
    """Refuses what an installation from a clone says of other dependencies than the clone's."""
    wanted = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    if {*map(Requirement, wanted)} != {r for r in map(Requirement, known) if r.marker is None}:
        raise ConfigError(
            f"{project} has changed since medfed was installed from there; install it again by "
            "pip install --editable '.[sites]'."
        )


def _joined(tags: list[str]) -> str:
    """The tags of a wheel in the form of its name, such as ``py3-none-any``."""
    parts = zip(*(tag.split("-") for tag in tags), strict=True)
    return "-".join(".".join(dict.fromkeys(part)) for part in parts)


def write_install(folder: Path, lock: Path | None = None) -> None:
    """Writes the folder ``install``.

    Args:
        folder: A new folder.
        lock: Replaces the lock of this release, such as one with a build of PyTorch for CPUs.

    Raises:
        ConfigError: If a package has no hash in the lock, or a wheel cannot be packed.
    """
    source = lock or TEMPLATES / LOCK
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"lock={source} cannot be read ({error}).") from error
    locked = [(m[1], m[2], m[0]) for m in _LOCKED.finditer(text) if m[1] not in PACKED]
    if odd := [name for name, _, line in locked if not _HASH.search(line)] or [""] * (not locked):
        raise ConfigError(
            f"lock={source} has no hash of {odd[0] or 'any package'}; scripts/lock.py makes a lock."
        )
    for package in PACKED:
        wheel = pack(package, folder / "wheels")
        version = metadata.version(package)
        line = f"{package}=={version} --hash=sha256:{files.sha256(wheel)}"
        locked.append((package, version, line))
    options = re.findall(r"^--(?:extra-)?index-url .*$", text, re.MULTILINE)
    files.write_text(folder / LOCK, "\n".join([*options, *(line for *_, line in locked)]) + "\n")
    files.write_json(folder / "sbom.cdx.json", _materials(locked))
    files.write_text(folder / SCRIPT, (TEMPLATES / SCRIPT).read_text(encoding="utf-8"))
    written = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    sums = [f"{files.sha256(folder / name)}  {name}\n" for name in written if name != "SHA256SUMS"]
    files.write_text(folder / "SHA256SUMS", "".join(sums))


def _materials(locked: list[tuple[str, str, str]]) -> Mapping[str, Any]:
    """The bill of materials in CycloneDX's form; licences are those of what is installed here."""
    components = []
    for name, version, line in locked:
        url = f"pkg:pypi/{name}@{version}"
        hashes = [{"alg": "SHA-256", "content": found} for found in _HASH.findall(line)]
        place = {"type": "distribution", "url": f"https://pypi.org/project/{name}/{version}/"}
        known = {"type": "library", "name": name, "version": version, "purl": url, "bom-ref": url}
        words = _licence(name)
        licence = {"licenses": [{"license": {"name": words}}]} if words else {}
        components.append({**known, **licence, "externalReferences": [{**place, "hashes": hashes}]})
    about = {"component": {"type": "application", "name": "install", "version": medfed.__version__}}
    head = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "metadata": about}
    return {**head, "components": components}


def _licence(package: str) -> str:
    try:
        about = metadata.metadata(package)
    except metadata.PackageNotFoundError:
        return ""
    named = [c.rpartition(" :: ")[2] for c in about.get_all("Classifier") or () if "License" in c]
    return str(about.get("License-Expression") or ", ".join(named))
