"""What hospitals install: the hash of the code, wheels, the lock, and the folder of a kit."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from medfed.sites import installed
from medfed.sites.agreement import Agreed
from medfed.sites.installed import LOCK, PACKED, TEMPLATES, pack, write_install
from medfed.sites.words import VetoError
from medfed.standalone.errors import ConfigError, MedfedError
from medfed.standalone.files import sha256
from tests.pages import PAGES, ROOT

LOCKED = re.compile(r"^([\w.-]+)==([^\s;]+)", re.MULTILINE)
NETWORKLESS = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}


def texts():
    """All that a person may read: pages, messages, templates, and what tests and scripts say."""
    roots = (ROOT / name for name in ("medfed", "configs", "scripts", "benchmarks", "examples"))
    kinds = ("*.py", "*.yaml", "*.yml", "*.md", "*.txt", "*.sh", "*.html", "*.ipynb", "Dockerfile")
    found = [path for root in roots for kind in kinds for path in root.rglob(kind)]
    more = [ROOT / "Makefile", *(ROOT / ".github").rglob("*.yml"), *PAGES]
    return [*found, *more, *(TEMPLATES / n for n in ("install.sh", "kits.txt"))]


BY_NAME = re.compile(
    r"(?:pip3?|uv|pipx) (?:install|add|download)\b[^\n`#]*?(?<![\w./-])medfed(?![\w/-])"
)


def test_nothing_says_to_install_medfed_by_name():
    """On an index the name is anybody's: whoever registers it would own hospitals."""
    for path in texts():
        text = re.sub(r"""["']\s*\n\s*f?["']""", "", path.read_text(encoding="utf-8"))
        assert not (said := BY_NAME.search(text)), f"{path.relative_to(ROOT)}: {said and said[0]}"


@pytest.mark.parametrize(
    ("line", "is_by_name"),
    [
        ('pip install "medfed[sites]"', True),
        ("pip install medfed==1.0", True),
        ("python -m pip install -U medfed.", True),
        ("pip install 'medfed-VERSION-py3-none-any.whl[sites]'", False),
        ("pip install .    # the command medfed", False),
        ("pip install '.[sites]'", False),
        ("git clone https://host/medfed", False),
    ],
)
def test_the_search_finds_it(line, is_by_name):
    assert bool(BY_NAME.search(line)) == is_by_name


def test_other_code_of_the_same_version_is_refused(tmp_path, monkeypatch):
    agreed = Agreed(("a", "b"))
    assert agreed.record()["code"] == installed.code()
    agreed.write(tmp_path / "agreed.json")
    record = json.loads((tmp_path / "agreed.json").read_text())
    (tmp_path / "other.json").write_text(json.dumps({**record, "code": "0" * 64}))
    with pytest.raises(
        VetoError, match=r"code 000000000000, and this is .* wheel of your kit"
    ) as no:
        Agreed.read(tmp_path / "other.json")
    assert no.value.reason == "code"


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of some of the package, of which the hash is computed."""
    package, configs = tmp_path / "medfed", tmp_path / "configs"
    for folder, name in ((package / "common", "a.py"), (configs, "train.yaml")):
        folder.mkdir(parents=True)
        (folder / name).write_text(name)
    monkeypatch.setattr(installed, "_PACKAGE", package)
    monkeypatch.setattr(installed, "CONFIG_DIR", configs)
    return tmp_path


CHANGES = {
    "a byte": lambda at: (at / "medfed/common/a.py").write_text("a.pz"),
    "a byte of a configuration": lambda at: (at / "configs/train.yaml").write_text(""),
    "a file more": lambda at: (at / "medfed/common/sitecustomize.py").write_text(""),
    "a file less": lambda at: (at / "medfed/common/a.py").unlink(),
    "another name": lambda at: (at / "medfed/common/a.py").rename(at / "medfed/common/b.py"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_hash_is_that_of_every_file(change, copied):
    before = installed.code.__wrapped__()
    (copied / "medfed" / "__pycache__").mkdir()
    (copied / "medfed" / "__pycache__" / "a.pyc").write_text("compiled")
    assert installed.code.__wrapped__() == before
    CHANGES[change](copied)
    assert installed.code.__wrapped__() != before


def test_a_wheel_holds_what_was_installed_and_has_the_same_bytes_each_time(tmp_path):
    """That of a library: pip installs it, and finds every file by the hash of its list."""
    wheels = [pack("antlr4-python3-runtime", tmp_path / name) for name in ("a", "b")]
    assert wheels[0].name == "antlr4_python3_runtime-4.9.3-py3-none-any.whl"
    assert sha256(wheels[0]) == sha256(wheels[1])
    target = ["install", "--no-deps", "--no-index", "--target", str(tmp_path / "target")]
    subprocess.run([sys.executable, "-m", "pip", *target, str(wheels[0])], check=True)
    for path in metadata.distribution("antlr4-python3-runtime").files or ():
        if path.parts[0] == "antlr4" and path.suffix == ".py":
            assert (tmp_path / "target" / path).read_bytes() == path.locate().read_bytes()


def test_a_changed_file_is_not_packed(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    wheel = pack("antlr4-python3-runtime", tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "here")
    monkeypatch.syspath_prepend(str(tmp_path / "here"))
    pack("antlr4-python3-runtime", tmp_path / "again")
    (tmp_path / "here" / "antlr4" / "Token.py").write_text("")
    with pytest.raises(ConfigError, match=r"Token\.py is not as it was installed"):
        pack("antlr4-python3-runtime", tmp_path / "again")


def test_the_lock_has_every_requirement_in_its_range_with_hashes():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (TEMPLATES / LOCK).read_text()
    versions = {}
    for name, version in LOCKED.findall(text):
        versions.setdefault(name, []).append(version)
    for line in (*project["dependencies"], *project["optional-dependencies"]["sites"]):
        wanted = Requirement(line)
        found = versions.get(wanted.name.lower().replace("_", "-"))
        assert found, f"{wanted.name} is not locked; run scripts/lock.py"
        assert all(wanted.specifier.contains(v) for v in found), f"{line}; run scripts/lock.py"
    assert not {"wandb", *PACKED} & {*versions}
    assert "+cpu" not in text  # a build of this machine's disk
    for part in re.split(r"\n(?=[\w.-]+==)", text)[1:]:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", part), part


LOCKS = {
    "no hash": ("numpy==2.0\n", "has no hash of numpy"),
    "nothing": ("# empty\n", "has no hash of any package"),
    "no text": (b"\xff", "cannot be read"),
}


@pytest.mark.parametrize("kind", LOCKS)
def test_another_lock_needs_hashes(kind, tmp_path):
    content, words = LOCKS[kind]
    lock = tmp_path / "lock.txt"
    lock.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(MedfedError, match=words):
        write_install(tmp_path / "install", lock)
    assert not (tmp_path / "install").exists()


def closure(*wanted):
    """The installed packages that these need, by name."""
    found, left = {}, [*wanted]
    while left:
        one = Requirement(left.pop())
        if one.name not in found or one.extras:
            about = metadata.distribution(one.name)
            found[one.name] = about
            extras = [{"extra": e} for e in ("", *one.extras)]
            needed = map(Requirement, about.requires or ())
            left += [
                str(r) if not r.marker else str(r).partition(";")[0]
                for r in needed
                if r.marker is None or any(r.marker.evaluate(e) for e in extras)
            ]
    return {about.metadata["Name"]: about.version for about in found.values()}


@pytest.mark.long
@pytest.mark.sites
@pytest.mark.timeout(1200)
def test_a_kit_installs_without_a_network(tmp_path):
    """The wheels of its lock lie in a folder, as at a hospital without a network."""
    pytest.importorskip("pyhocon", reason="needs NVIDIA FLARE: pip install '.[sites]'")
    lines, wheels = [], tmp_path / "wheels"
    for name, version in closure("medfed[sites]").items():
        if name not in PACKED:
            wheel = pack(name, wheels)
            lines.append(f"{name}=={version} \\\n    --hash=sha256:{sha256(wheel)}\n")
    lock = tmp_path / "lock.txt"
    lock.write_text("".join(lines))
    install, place = tmp_path / "install", tmp_path / "environment"
    write_install(install, lock)
    named = {
        c["name"]: c["version"]
        for c in json.loads((install / "sbom.cdx.json").read_text())["components"]
    }
    assert named == closure("medfed[sites]")
    hidden = ("PYTHONPATH", "PYTEST_CURRENT_TEST")
    environ = {k: v for k, v in os.environ.items() if k not in hidden}
    environ |= {**NETWORKLESS, "WHEELS": str(wheels), "PYTHON": sys.executable}

    def run(*command):
        return subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True)

    changed = tmp_path / "changed"
    shutil.copytree(install, changed)
    (medfed,) = (changed / "wheels").glob("medfed-*.whl")
    medfed.write_bytes(medfed.read_bytes()[:-1] + b"?")
    refused = run("sh", str(changed / "install.sh"), str(place))
    assert refused.returncode != 0
    assert not place.exists()

    done = run("sh", str(install / "install.sh"), str(place))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Nothing is wrong" in done.stdout
    code = "import medfed.sites.installed as i; print(i.code()); print(i.__file__)"
    answer = run(str(place / "bin" / "python"), "-c", code).stdout.split()
    assert answer[0] == installed.code()  # the coordinator's, from its clone
    assert Path(answer[1]).is_relative_to(place)
    absent = run(str(place / "bin" / "python"), "-c", "import wandb")
    assert "No module named 'wandb'" in absent.stderr
    trained = run(
        *(str(place / "bin" / "medfed"), "train", "experiment=clinical_pfednet", "rounds=1"),
        "local.steps=1",
    )
    assert trained.returncode == 0, trained.stdout + trained.stderr
    for folder in (wheels, place, changed):  # gigabytes
        shutil.rmtree(folder)
