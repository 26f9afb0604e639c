"""Kits: services, jobs in their own folder, certificates that are renewed."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from medfed import __version__
from medfed.common.errors import ConfigError
from medfed.common.files import make_private
from medfed.sites.deploying import make_kits, sealed, service_files

needs_flare = pytest.mark.sites


def test_a_service_starts_the_kit_again_without_more_rights(tmp_path: Path):
    files = service_files("va")
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(files["medfed-va.service"])
    service = unit["Service"]
    assert service["ExecStart"].endswith("startup/sub_start.sh --once")
    assert (service["Restart"], service["UMask"]) == ("always", "0077")
    assert service["NoNewPrivileges"] == "yes"
    if shutil.which("systemd-analyze"):
        path = tmp_path / "medfed-va.service"
        path.write_text(files["medfed-va.service"])
        asked = ["systemd-analyze", "verify", "--man=no", str(path)]
        done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=240)
        said = [line for line in done.stderr.splitlines() if path.name in line]
        assert not [line for line in said if "Unknown" in line or "Failed to parse" in line]
    lines = [line for line in files["Dockerfile"].splitlines() if line and line[0] != "#"]
    assert [line.split()[0] for line in lines] == ["FROM", "RUN", "WORKDIR", "CMD"]
    assert f"medfed[sites]=={__version__}" in lines[1]
    assert json.loads(lines[-1].removeprefix("CMD ")) == ["bash", "startup/sub_start.sh", "--once"]


def check_archive(archive: Path, kit: Path, phrase: str) -> None:
    """It opens with its passphrase alone, holds what the kit holds, and nobody else reads it."""
    pyzipper = pytest.importorskip("pyzipper")
    assert archive.stat().st_mode & 0o777 == 0o600
    assert b"PRIVATE KEY" not in archive.read_bytes()
    files = {str(f.relative_to(kit.parent)): f for f in kit.rglob("*") if f.is_file()}
    for wrong in (None, phrase.upper().encode()):
        with pyzipper.AESZipFile(archive) as opened, pytest.raises(RuntimeError, match="assword"):
            opened.read(next(iter(files)), pwd=wrong)
    with pyzipper.AESZipFile(archive) as opened:
        held = {i.filename: opened.read(i, pwd=phrase.encode()) for i in opened.infolist()}
        assert {i.wz_aes_strength for i in opened.infolist()} == {3}  # 256 bits
    assert held == {name: file.read_bytes() for name, file in files.items()}
    for tool in filter(shutil.which, ("bsdtar", "7z")):
        order = ["-tf" if tool == "bsdtar" else "t", str(archive)]
        word = ["--passphrase", phrase] if tool == "bsdtar" else [f"-p{phrase}"]
        subprocess.run([tool, *word, *order], check=True, capture_output=True)


def test_a_kit_opens_with_its_passphrase_alone(tmp_path: Path):
    pytest.importorskip("pyzipper")
    kit = tmp_path / "va"
    for name in ("startup/client.key", "startup/start.sh", "local/x"):
        (kit / name).parent.mkdir(parents=True, exist_ok=True)
        (kit / name).write_text(f"-----BEGIN PRIVATE KEY----- {name}\n" * 40)
    first, second = sealed(kit), sealed(kit)
    assert re.fullmatch(r"([a-z2-9]{5}-){4}[a-z2-9]{5}", first)
    assert first != second
    make_private(tmp_path)
    check_archive(tmp_path / "va.zip", kit, second)


@needs_flare
def test_kits_are_renewed_by_the_same_root_and_keep_jobs(tmp_path: Path, capsys):
    pytest.importorskip("nvflare")
    from nvflare.lighter.utils import load_crt

    def certificate(kits: Path, kit: str, name: str):
        return load_crt(str(kits / kit / "startup" / name))

    folder = tmp_path / "kits"
    with pytest.raises(ConfigError, match="There are no kits to renew"):
        make_kits(folder, ["a", "b"], "localhost", 8002, renew=True)
    first = make_kits(folder, ["a", "b"], "localhost", 8002)
    more = make_kits(folder, ["a", "b", "c"], "localhost", 8002)
    new = make_kits(folder, ["a", "b", "c"], "localhost", 8002, renew=True)
    assert len({first, more, new}) == 3
    serials = [certificate(kits, "a", "client.crt").serial_number for kits in (first, more, new)]
    assert serials[0] == serials[1] != serials[2]
    roots = [certificate(kits, "a", "rootCA.pem") for kits in (first, new)]
    assert roots[0] == roots[1]
    assert (roots[0].not_valid_after_utc - roots[0].not_valid_before_utc).days == 3650
    said = capsys.readouterr().out
    for name in ("a", "b", "c"):
        (phrase,) = set(
            re.findall(rf"^ +{name}\.zip  (\S+)$", said.rpartition("The kits")[2], re.M)
        )
        check_archive(new / f"{name}.zip", new / name, phrase)
    kept = [path for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in kept if phrase.encode() in path.read_bytes()]
    state = folder / "medfed" / "state" / "cert.json"
    assert state.stat().st_mode & 0o777 == 0o600
    for name in ("localhost", "a"):
        script = (new / name / "startup" / "sub_start.sh").read_text()
        assert script.count("s#/tmp/nvflare/#$WORKSPACE/jobs/#g") == 1
        assert re.search(r"mkdir -p .*transfer\"\nsed -i ", script)
        assert (new / name / "service" / "Dockerfile").is_file()
    assert "/tmp/nvflare/jobs-storage" in (new / "localhost/local/resources.json").read_text()
