"""What lies outside the repository is one file and one yaml, and meets the same contracts."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import processes
from tests.conftest import pytest_configure
from tests.pages import DOCS, write_files

NAMES = {"algorithm": "kindred", "codec": "int8", "reader": "clinics", "partition": "by_pattern"}
FILES = (
    *(f"tests/contract/test_{name}.py" for name in ("contract", "lossy", "onboarding")),
    "tests/federation/wire/codecs",
    *(f"tests/datamodules/test_{n}.py" for n in ("configs", "partitions_configs")),
    "tests/datamodules/test_partitions_properties.py",
)


@pytest.mark.long
def test_plugins_meet_the_contracts(tmp_path):
    """And ``-k`` leaves out all others. The ranks take too long for a second time here."""
    for page in NAMES:
        write_files(DOCS / f"extending/{page}.md", tmp_path)
    report = tmp_path / "report.xml"
    options = ["-n0", "-p", "no:cacheprovider", f"--junitxml={report}", "--plugins", str(tmp_path)]
    script = Path(pytest.__file__).with_name("__main__.py")
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # the fork has imported Hydra
    done = processes.run(script, *FILES, *options, "-k", " or ".join(NAMES.values()))
    assert done.returncode == 0, done.stdout + done.stderr
    cases = [case.get("name", "") for case in ET.parse(report).iter("testcase")]
    found = {n: [case for case in cases if n in case] for n in NAMES.values()}
    assert all(len(of_one) >= 3 for of_one in found.values())
    assert len(found["kindred"]) >= 20
    assert set(cases) == set().union(*found.values())


def test_a_folder_that_is_none_is_named():
    config = SimpleNamespace(getoption=lambda _: ["nowhere"])
    with pytest.raises(pytest.UsageError, match="nowhere is no folder"):
        pytest_configure(config)
