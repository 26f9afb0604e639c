"""A folder that holds runs or bundles, where a run or a bundle is asked for."""

from __future__ import annotations

import re

import pytest

from medfed.commands.main import main
from medfed.records.bundles import manifest_hash
from medfed.records.folder import RunFolder
from medfed.records.places import METADATA, RUN
from medfed.standalone.errors import MedfedError


@pytest.mark.parametrize("name", ["evaluate", "export", "audit", "predict"])
def test_commands_name_the_runs_and_bundles_that_a_folder_holds(name, tmp_path, capsys):
    key, file = ("bundle", METADATA) if name == "predict" else ("run", RUN)
    for one in ("fedavg/0", "local", "deep/er/2"):
        (tmp_path / "all" / one / file).parent.mkdir(parents=True)
        (tmp_path / "all" / one / file).touch()
    more = [f"input={tmp_path}", f"output={tmp_path / 'out'}"] * (name == "predict")
    with pytest.raises(SystemExit) as ended:
        main([name, f"{key}={tmp_path / 'all'}", *more])
    assert ended.value.code == 1
    said = " ".join(capsys.readouterr().err.split())
    there = ", ".join(str(tmp_path / "all" / one) for one in ("deep/er/2", "fedavg/0", "local"))
    assert f"(it has no {file}); name one of those that it holds: {there}." in said


@pytest.mark.parametrize("read", [lambda folder: RunFolder(folder).config, manifest_hash])
def test_functions_say_what_to_name_where_a_folder_holds_nothing(read, tmp_path):
    with pytest.raises(MedfedError, match=re.escape(str(tmp_path))) as refused:
        read(tmp_path)
    assert re.search(r"name one that a run has printed\.|adopt make one\.$", str(refused.value))
