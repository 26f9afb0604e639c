"""A method outside the repository is one file and one yaml, and meets the same contract."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import pytest_configure

ROOT = Path(__file__).resolve().parents[2]
METHOD = '''
"""FedAvg whose server goes a share of the way."""
from dataclasses import dataclass
from medfed.common.tensors import add
from medfed.personalize.fedavg import FedAvg

@dataclass(frozen=True)
class Hesitant(FedAvg):
    share: float = 0.5
    rounds: int = 0

    def round(self, server, cohort, round):
        assert self.rounds == 3  # of the run
        moved = yield from super().round(server, cohort, round)
        change = {n: t - server["shared"][n] for n, t in moved["shared"].items()}
        return {**moved, "shared": add(server["shared"], change, self.share)}
'''
YAML = "_target_: hesitant.Hesitant\n_convert_: all\nshare: 0.5\nrounds: ${rounds}\n"


def test_a_plugin_meets_the_contract(tmp_path):
    """And ``-k`` leaves out all others. The ranks take too long for a second time here."""
    (tmp_path / "hesitant.py").write_text(METHOD)
    (tmp_path / "configs" / "algorithm").mkdir(parents=True)
    (tmp_path / "configs" / "algorithm" / "hesitant.yaml").write_text(YAML)
    report = tmp_path / "report.xml"
    files = [f"tests/contract/test_{name}.py" for name in ("contract", "lossy", "onboarding")]
    options = ["-n0", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command = [*files, *options, "--plugins", str(tmp_path), "-k", "hesitant"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *command], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    cases = [case.get("name", "") for case in ET.parse(report).iter("testcase")]
    assert len(cases) > 30
    assert all("[hesitant" in name or "-hesitant" in name for name in cases)


def test_a_folder_that_is_none_is_named():
    config = SimpleNamespace(getoption=lambda _: ["nowhere"])
    with pytest.raises(pytest.UsageError, match="nowhere is no folder"):
        pytest_configure(config)
