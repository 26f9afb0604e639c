"""The built wheel in an environment of its own, outside any clone: each command as a user types it.

Only medfed itself is installed there; the libraries are those of this environment, which a line in
a .pth file leads to (its own .pth files, such as that of an editable medfed, are not followed).
The installed script runs in forks of one process of that environment, which loads them once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from medfed.federation.wire.ledger import Ledger
from tests.pages import DOCS, ROOT, write_clinics, write_files
from tests.processes import Forks

SHORT = ("experiment=digits_pfednet", "rounds=2", "local.steps=2", "data.root=data")

pytest.importorskip("hatchling")


class Installed:
    """An environment with the wheel, and a folder to work in."""

    def __init__(self, folder: Path) -> None:
        self.environment, self.place = folder / "environment", folder / "place"
        self.place.mkdir()
        wheels = folder / "wheels"
        pip = [sys.executable, "-m", "pip"]
        build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels)]
        self._run([*pip, *build, str(ROOT)])
        venv.create(self.environment, with_pip=False, symlinks=True)
        self.python = self.environment / "bin" / "python"
        site = self._run([str(self.python), "-c", "import site; print(site.getsitepackages()[0])"])
        (Path(site.strip()) / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
        (self.wheel,) = wheels.glob("medfed-*.whl")
        install = ["install", "--no-deps", "--ignore-installed", str(self.wheel)]
        self._run([*pip, "--python", str(self.python), *install])

    def _environ(self) -> dict[str, str]:
        hidden = ("PYTHONPATH", "PYTEST_CURRENT_TEST")
        environ = {k: v for k, v in os.environ.items() if k not in hidden}
        return environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}

    def _run(self, command: list[str]) -> str:
        done = subprocess.run(
            command,
            cwd=self.place,
            env=self._environ(),
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @cached_property
    def server(self) -> Forks:
        """Runs the script in forks of itself."""
        modules = "monai", "medfed.run.train"
        return Forks(*modules, python=self.python, env=self._environ(), cwd=self.place)

    def medfed(self, *arguments: str, fails: bool = False) -> str:
        script = self.environment / "bin" / "medfed"
        done = self.server.run(script, *arguments, cwd=self.place)
        assert done.returncode == int(fails), done.stdout + done.stderr
        return done.stderr if fails else done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Iterator[Installed]:
    found = Installed(tmp_path_factory.mktemp("wheel"))
    yield found
    found.server.end()


@pytest.mark.promise("the wheel")
def test_it_is_the_wheel_that_runs(installed):
    where = installed._run([str(installed.python), "-c", "import medfed; print(medfed.__file__)"])
    assert Path(where.strip()).is_relative_to(installed.environment)
    typed = Path(where.strip()).parent / "py.typed"
    assert typed.is_file()


def test_help_fits_a_screen(installed):
    script = str(installed.environment / "bin" / "medfed")
    lines = installed._run([script, "--help"]).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    assert "digits_pfednet" in installed._run([script, "train", "--help"])


@pytest.mark.long
def test_from_training_to_prediction(installed):
    # A sweep of two methods, as the README's; two ranks are in the test below.
    told = installed.medfed(
        "train", "-m", *SHORT, "algorithm=pfednet,fedavg", "hydra.sweep.dir=runs"
    )
    assert "pfednet: test auroc" in told
    assert "2 of 2 runs are finished" in told
    assert "better than FedAvg" in installed.medfed("report", "runs=runs")
    assert (installed.place / "runs" / "report" / "comparison.csv").is_file()

    client = "group_0_hospital_0"
    (first,) = (installed.place / "runs").glob("0_*")
    installed.medfed("export", f"run={first}", f"client={client}", "bits=4", "out=bundles")
    images = installed.place / "images"
    images.mkdir()
    for i, image in enumerate(load_digits().images[:3]):
        Image.fromarray(image.astype(np.uint8)).save(images / f"digit_{i}.png")
    installed.medfed("predict", f"bundle=bundles/{client}", "input=images", "output=told.csv")
    assert len((installed.place / "told.csv").read_text().splitlines()) == 4
    left = {p.name for p in installed.place.iterdir()}
    assert left <= {"bundles", "clinics", "data", "images", "plugins", "runs", "told.csv"}


def test_a_plugin_folder_has_all_kinds_and_reaches_all_ranks(installed):
    """The documents' method, codec, reader and partition, in one run on two ranks."""
    for page in ("algorithm", "codec", "reader", "partition"):
        write_files(DOCS / f"extending/{page}.md", installed.place / "plugins")
    write_clinics(installed.place / "clinics")
    data = ["data=clinics", "data.path=clinics", "partition=by_pattern"]
    method = ["algorithm=kindred", "codec.up=int8", "trainer=ddp"]
    keys = ["plugins=plugins", *data, *method, "rounds=2", "hydra.run.dir=plugged"]
    installed.medfed("train", "experiment=clinical_pfednet", *keys)
    folder = installed.place / "plugged"
    summary = json.loads((folder / "summary.json").read_text())
    assert list(summary["clients"]) == ["site_north", "site_south", "site_west"]
    ledger = Ledger.from_csv((folder / "ledger.csv").read_text())
    # What hospitals agree on before the first round is no message of the method.
    sent = [e for e in ledger.entries if e.direction == "up" and e.part != "preprocessing"]
    assert sent
    assert all(e.bytes < e.dense / 2 for e in sent)
    versions = json.loads((folder / "versions.json").read_text())
    (recorded,) = versions["plugins"]
    assert recorded == str(installed.place / "plugins")

    refused = installed.medfed("evaluate", "run=plugged", fails=True)
    assert refused.count("\n") == 1
    assert f"only run if you name it: add plugins=[{recorded}]" in refused
    again = installed.medfed("evaluate", "run=plugged", "plugins=plugins")
    assert "Results and pictures: plugged" in again
