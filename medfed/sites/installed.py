"""What is installed here: the hash of medfed's code, and the folder by which hospitals install it.

The folder ``install`` holds wheels of what no index has as a wheel, a lock with the hashes of all
others, a bill of materials, the hashes of these files, and a script. The lock is made at release,
by ``scripts/lock.py``. Wheels are packed from what is installed here, always with the same bytes.
"""

from __future__ import annotations

import re
import shutil
import tomllib
import zipfile
from base64 import urlsafe_b64encode
from functools import cache
from hashlib import sha256
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

import medfed
from medfed.common import untrusted
from medfed.config.compose import CONFIG_DIR
from medfed.sites.words import veto
from medfed.standalone import files
from medfed.standalone.errors import ConfigError

PACKED = ("medfed", "antlr4-python3-runtime", "pyhocon")
"""Packages of which no index has a wheel."""
LOCK, TEMPLATES = "requirements.txt", Path(__file__).parent / "templates"
_PACKAGE = Path(medfed.__file__).parent
_DATE = (2020, 2, 2, 0, 0, 0)  # of all files in a wheel
_BY_INSTALLERS = "RECORD|INSTALLER|REQUESTED|direct_url.json"
_LOCAL = re.compile(rf"__pycache__/|\.dist-info/({_BY_INSTALLERS})$|^\.\.")
_LOCKED = re.compile(r"^([\w.-]+)==([^\s;\\]+)(?:[^\n]|(?<=\\)\n)*", re.MULTILINE)


@cache
def code() -> str:
    """Returns the hash of the installed code: the names and bytes of all files of the package."""
    lines = (f"{files.sha256(path)}  {name}\n" for name, path in sorted(_code().items()))
    return sha256("".join(lines).encode()).hexdigest()


def check(version: str, agreed: str) -> None:
    """Compares what is installed here with an agreement."""
    if (version, agreed) != (medfed.__version__, code()):
        versions = {"agreed": version, "hash": agreed, "here": medfed.__version__}
        raise veto("code", "code", **versions, hash_here=code())


def _code() -> dict[str, Path]:
    """Returns the files of the package by their names in the wheel, from a clone, too."""
    roots = {"medfed": _PACKAGE, "medfed/configs": CONFIG_DIR}
    every = ((name, root, p) for name, root in roots.items() for p in root.rglob("*"))
    paths = ((name, p.relative_to(root).as_posix(), p) for name, root, p in every if p.is_file())
    files = {f"{name}/{place}": path for name, place, path in paths}
    return {name: path for name, path in files.items() if not _LOCAL.search(name)}


def pack(package: str, folder: Path) -> Path:
    """Packs a wheel of an installed package; the same files give the same bytes."""
    try:
        dist = metadata.distribution(package)
    except metadata.PackageNotFoundError as error:
        raise ConfigError(f"{package} is not installed here, so a kit cannot hold it.") from error
    listed = {path.as_posix(): path for path in dist.files or ()}
    packed = {name: Path(str(p.locate())) for name, p in listed.items() if not _LOCAL.search(name)}
    if package == "medfed":
        packed = {n: p for n, p in packed.items() if ".dist-info/" in n} | _code()
        if (project := _PACKAGE.parent / "pyproject.toml").is_file():
            listed = {}
            wanted = tomllib.loads(project.read_text("utf-8"))["project"]["dependencies"]
            known = map(Requirement, dist.requires or ())
            if {*map(Requirement, wanted)} != {each for each in known if each.marker is None}:
                raise ConfigError(
                    f"{project} has changed since medfed was installed from there; install it "
                    "again by pip install --editable '.[sites]'."
                )
    (record,) = (n[:-8] + "RECORD" for n in packed if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
    tags = [t.split("-") for t in re.findall(r"^Tag: (\S+)$", dist.read_text("WHEEL") or "", re.M)]
    tag = "-".join(".".join(dict.fromkeys(part)) for part in zip(*tags, strict=True))
    wheel, lines = folder / f"{record.partition('.dist-info')[0]}-{tag}.whl", list[str]()
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel, "w") as archive:  # not compressed: libraries differ in how
        for name, path in sorted(packed.items()):
            content = path.read_bytes()
            hashed = urlsafe_b64encode(sha256(content).digest()).decode().rstrip("=")
            known_hash = listed[name].hash if name in listed else None
            if known_hash is not None and known_hash.value != hashed:
                raise ConfigError(f"{path} is not as it was installed; install {package} again.")
            archive.writestr(zipfile.ZipInfo(name, _DATE), content)
            lines.append(f"{name},sha256={hashed},{len(content)}\n")
        archive.writestr(zipfile.ZipInfo(record, _DATE), "".join([*lines, f"{record},,\n"]))
    return wheel


def write_install(folder: Path, lock: Path | None = None) -> None:
    """Writes the folder ``install``."""
    source = lock or TEMPLATES / LOCK
    with untrusted.reading(source):
        text = source.read_text("utf-8")
    locked = [(m[1], m[2], m[0]) for m in _LOCKED.finditer(text) if m[1] not in PACKED]
    bare = [name for name, _, line in locked if "--hash=sha256:" not in line]
    if bare or not locked:
        what = [*bare, "any package"][0]
        raise ConfigError(f"lock={source} has no hash of {what}; scripts/lock.py makes one.")
    for package in PACKED:
        hashed, version = files.sha256(pack(package, folder / "wheels")), metadata.version(package)
        locked.append((package, version, f"{package}=={version} --hash=sha256:{hashed}"))
    places = re.findall(r"^--(?:extra-)?index-url .*$", text, re.M)
    files.write_text(folder / LOCK, "\n".join([*places, *(line for *_, line in locked), ""]))
    known = {d.name.lower().replace("_", "-"): d.metadata.json for d in metadata.distributions()}
    licences = {n: m.get("license_expression") or m.get("license", "") for n, m in known.items()}
    parts = []
    for name, version, line in locked:
        licence, *_ = str(licences.get(name, "")).split("\n")
        parts.append((name, version, licence, re.findall(r"sha256:(\w{64})", line)))
    bill = files.filled(TEMPLATES / "sbom.json", version=medfed.__version__, parts=parts)
    files.write_text(folder / "sbom.cdx.json", bill)
    shutil.copyfile(TEMPLATES / "install.sh", folder / "install.sh")
    written = sorted(path for path in folder.rglob("*") if path.is_file())
    sums = (f"{files.sha256(path)}  {path.relative_to(folder).as_posix()}\n" for path in written)
    files.write_text(folder / "SHA256SUMS", "".join(sums))
