"""What absent clients keep may lie on disk: the same numbers, and no file left."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch

from medfed.federation.algorithm import Cohort
from medfed.federation.local_client import on_disk
from medfed.federation.reference import run_reference
from medfed.standalone.errors import CheckpointError, ConfigError
from tests.contract.harness import federation, lossy

posix = pytest.mark.skipif(os.name != "posix", reason="a mapped file cannot lose its name there")


@posix
@pytest.mark.parametrize("name", ["ditto", "scaffold", "ppfl"])
def test_a_federation_whose_states_lie_on_disk_is_the_same_to_the_bit(name, tmp_path):
    settings = {"cohort": Cohort(fraction=0.67)}
    _, plain, _ = federation(name, channel=lossy("stc"), **settings)
    _, shelved, _ = federation(name, channel=lossy("stc"), **settings)
    shelved.absent_folder = tmp_path / "states"
    assert run_reference(plain, 3).digests() == run_reference(shelved, 3).digests()
    assert list(shelved.absent_folder.iterdir()) == []
    some = next(iter(shelved.clients.values()))
    kept = [t for named in some.state.values() for t in named.values()]
    maps = Path("/proc/self/maps")
    if kept and maps.is_file():
        assert str(shelved.absent_folder) in maps.read_text()


@posix
def test_only_what_is_kept_is_written(tmp_path):
    wide = torch.arange(100_000.0)
    found = on_disk({"state": {"personal": {"w": wide[:3]}}}, tmp_path)["state"]["personal"]["w"]
    assert found.tolist() == [0, 1, 2]
    assert found.untyped_storage().nbytes() <= mmap.PAGESIZE


def test_what_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"make room there, or raise cohort\.memory_gb"):
        on_disk({"state": {"personal": {"w": torch.ones(1)}}}, tmp_path / "file")
    with pytest.raises(ConfigError, match="memory_gb must not be negative"):
        Cohort(memory_gb=-1)
