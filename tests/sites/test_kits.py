"""Kits: keys that stay where they are made, services, jobs in their own folder, renewal."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from medfed.commands.deploy import main as deploy
from medfed.commands.site import main as site
from medfed.sites.flare import check_flare
from medfed.sites.flare.kits import approve, make_kit, provision, request
from medfed.sites.installed import TEMPLATES
from medfed.standalone.errors import ConfigError, MedfedError
from medfed.standalone.files import filled

needs_flare = pytest.mark.sites


def test_a_service_starts_the_kit_again_without_more_rights(tmp_path: Path):
    words = {"name": "va", "low": "va"}
    text, image = (filled(TEMPLATES / n, **words) for n in ("medfed.service", "Dockerfile"))
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(text)
    service = unit["Service"]
    assert service["ExecStart"].endswith("startup/sub_start.sh --once")
    assert (service["Restart"], service["UMask"]) == ("always", "0077")
    assert service["NoNewPrivileges"] == "yes"
    if shutil.which("systemd-analyze"):
        path = tmp_path / "medfed-va.service"
        path.write_text(text)
        asked = ["systemd-analyze", "verify", "--man=no", str(path)]
        done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=240)
        said = [line for line in done.stderr.splitlines() if path.name in line]
        assert not [line for line in said if "Unknown" in line or "Failed to parse" in line]
    lines = [line for line in image.splitlines() if line and line[0] != "#"]
    assert [line.split()[0] for line in lines] == ["FROM", "COPY", "RUN", "ENV", "WORKDIR", "CMD"]
    assert lines[2] == "RUN sh /install/install.sh /opt/medfed"
    assert json.loads(lines[-1].removeprefix("CMD ")) == ["bash", "startup/sub_start.sh", "--once"]


def test_without_flare_one_sentence_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setattr("medfed.sites.flare.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"NVIDIA FLARE, .* install\.sh of its invitation"):
        check_flare()
    with pytest.raises(ConfigError, match="NVIDIA FLARE"):
        provision(tmp_path / "keys", [], "localhost", 8002)
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("request invitation=none name=a folder=a", r"none/profile\.yml is missing"),
        ("request name=a folder=a", "invitation has no value yet"),
        ("kit signed=a.signed.zip fingerprint=SHA256:0 folder=a", "a has made no request"),
        ("kit signed=a.signed.zip folder=a", "fingerprint has no value yet"),
    ],
)
def test_mistakes_at_a_site_are_one_sentence(command, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        site(command.split())
    said = capsys.readouterr().err
    assert re.search(words, said), said
    assert said.count("\n") == 1
    assert not [*tmp_path.iterdir()]


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Path:
    """A federation without sites."""
    pytest.importorskip("nvflare")
    folder = tmp_path_factory.mktemp("coordinator") / "keys"
    provision(folder, [], "localhost", 8002)
    return folder


def certificate(path: Path):
    from nvflare.lighter.utils import load_crt

    return load_crt(str(path))


def secrets(folder: Path) -> list[bytes]:
    """The lines of all private keys in a folder, without their heads."""
    keys = (path.read_bytes() for path in folder.rglob("*") if path.is_file())
    return [key.splitlines()[5] for key in keys if b"PRIVATE KEY-----" in key]


@needs_flare
def test_a_key_is_born_at_its_site_and_stays_there(keys: Path, tmp_path: Path, monkeypatch, capsys):
    """By the commands, as two people type them; what travels are the files that they name."""
    home, hospital, office = tmp_path / "home", tmp_path / "hospital", tmp_path / "office"
    for folder in (home, hospital, office):
        folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    shutil.copytree(keys / "invitation", hospital / "invitation")
    kit = hospital / "va"
    site(["request", f"invitation={hospital / 'invitation'}", "name=va", f"folder={kit}"])
    hashed = re.search(r"^  ([0-9a-f]{64})$", capsys.readouterr().out, re.M)[1]
    shutil.copy(kit / "request" / "va.request.zip", office)
    deploy([f"approve={office / 'va.request.zip'}", f"provision={keys}"])
    said = capsys.readouterr().out
    assert f"  {hashed}\n" in said
    fingerprint = re.search(r"SHA256:\S+", said)[0]
    shutil.copy(office / "va.signed.zip", hospital)
    site(
        [
            "kit",
            f"signed={hospital / 'va.signed.zip'}",
            f"fingerprint={fingerprint}",
            f"folder={kit}",
        ]
    )

    (secret,) = {*secrets(kit)}
    for folder in (keys, office, hospital / "invitation"):
        held = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
        for file in folder.rglob("*.zip"):
            with zipfile.ZipFile(file) as archive:
                held += [archive.read(name) for name in archive.namelist()]
        assert not [content for content in held if secret in content]
    assert not secrets(keys / "invitation")
    assert not [*home.iterdir()]  # FLARE's records of keys are in folders that nobody else reads
    for folder in (kit, keys):
        assert {path.stat().st_mode & 0o077 for path in folder.rglob("*")} == {0}
    for path in (kit / "service" / "Dockerfile", kit / "service" / "medfed-va.service"):
        assert "{{" not in path.read_text()
    assert (kit / "install" / "install.sh").is_file()
    assert "site: va" in (kit / "local" / "medfed.yaml.example").read_text()
    rights = json.loads((kit / "local" / "authorization.json").read_text())["permissions"]
    assert {*rights} == {"lead"}
    assert rights["lead"]["byoc"] == "none"


@needs_flare
def test_a_kit_is_renewed_and_its_local_folder_stays(keys: Path, tmp_path: Path):
    kit, invitation = tmp_path / "va", keys / "invitation"
    serials, sent = [], []
    for _ in range(2):
        file, hashed = request(invitation, kit, "va")
        approved = approve(keys, file)
        assert approved["csr_sha256"] == hashed
        signed, fingerprint = Path(approved["signed_zip"]), approved["rootca_fingerprint_sha256"]
        make_kit(signed, fingerprint, kit)
        (kit / "local" / "medfed.yaml").write_text("site: va\n")
        one = certificate(kit / "startup" / "client.crt")
        serials.append(one.serial_number)
        sent.append(shutil.copy(signed, tmp_path / f"{len(sent)}.signed.zip"))
        assert (one.not_valid_after_utc - one.not_valid_before_utc).days == 360
    assert serials[0] != serials[1]
    assert (kit / "local" / "medfed.yaml").read_text() == "site: va\n"
    script = (kit / "startup" / "sub_start.sh").read_text()
    assert script.count("s#/tmp/nvflare/#$WORKSPACE/jobs/#g") == 1
    assert re.search(r"mkdir -p .*transfer\"\nsed -i ", script)
    with pytest.raises(ConfigError, match="FLARE does not do this"):  # of the key before
        make_kit(Path(sent[0]), fingerprint, kit)
    assert certificate(kit / "startup" / "client.crt").serial_number == serials[1]
    assert not [*kit.glob(".made-*")]


@needs_flare
def test_another_root_is_refused_and_its_fingerprint_not_said(keys: Path, tmp_path: Path):
    other = tmp_path / "other"
    provision(other, [], "localhost", 8002)
    kit = tmp_path / "va"
    file, _ = request(other / "invitation", kit, "va")
    invited = approve(other, file)["rootca_fingerprint_sha256"]
    with pytest.raises(ConfigError, match="fingerprint does not match") as no:
        make_kit(Path(approve(keys, file)["signed_zip"]), invited, kit)
    assert "SHA256:" not in str(no.value)
    assert not (kit / "startup").exists()


@needs_flare
@pytest.mark.parametrize("name", ["St. Mary's", "../va", "a b"])
def test_names_that_flare_refuses_are_one_sentence(name, keys: Path, tmp_path: Path):
    with pytest.raises(MedfedError, match="FLARE does not do this"):
        request(keys / "invitation", tmp_path / "kit", name)


@needs_flare
def test_a_rehearsal_is_renewed_by_the_same_root_and_said_in_red(tmp_path: Path, capsys):
    pytest.importorskip("nvflare")
    folder = tmp_path / "keys"
    with pytest.raises(ConfigError, match="There are no kits to renew"):
        provision(folder, ["a"], "localhost", 8002, renew=True)
    typed = [f"provision={folder}", "server=localhost", "port=8003"]
    deploy([*typed, "sites=[a]"])
    assert "For a rehearsal only: the keys of a were made here" in capsys.readouterr().out
    kits = folder / "kits"
    of = {n: kits / n / "startup" / "client.crt" for n in ("a", "coordinator@medfed.local")}
    first = {name: certificate(path).serial_number for name, path in of.items()}
    root = (kits / "a" / "startup" / "rootCA.pem").read_bytes()
    provision(folder, ["a", "b"], "localhost", 8003)
    assert {name: certificate(path).serial_number for name, path in of.items()} == first
    provision(folder, ["a", "b"], "localhost", 8003, renew=True)
    new = {name: certificate(path).serial_number for name, path in of.items()}
    assert not {*first.values()} & {*new.values()}
    for name in ("a", "b", "localhost"):
        assert (kits / name / "startup" / "rootCA.pem").read_bytes() == root
    with pytest.raises(ConfigError, match="is of the server localhost, port 8003"):
        provision(folder, [], "elsewhere", 8003)
    assert "/tmp/nvflare/jobs-storage" in (kits / "localhost/local/resources.json").read_text()
