import io
import logging
import os

import pytest
import torch

from medfed.federation.lightning import checkpoint
from medfed.federation.lightning.checkpoint import (
    BEST,
    digest_file,
    is_whole,
    last_whole,
    rounds_in,
    seal,
)
from medfed.federation.wire.ledger import Ledger
from medfed.standalone.errors import CheckpointError
from tests.contract import harness
from tests.sweeps import sweep


def write(folder, name):
    """A checkpoint of a federation that has done nothing."""
    parts = ("steps", "passes", "server", "memory", "clients")
    content = {"algorithm": "FedAvg", "next_round": 0, **{part: {} for part in parts}}
    content["ledger"] = Ledger().state_dict()
    saved = io.BytesIO()
    torch.save({"federation": content}, saved)
    partial = folder / f"{name}.partial"
    partial.write_bytes(saved.getvalue())
    seal(partial, folder / name)
    return folder / name


def test_sealed_files_are_whole(tmp_path):
    path = write(tmp_path, "round_00000.ckpt")
    assert is_whole(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name, path.name + ".sha256"]


@pytest.mark.parametrize("damage", ["cut", "flipped", "unsealed", "empty seal", "gone"])
def test_torn_files_are_passed_over(damage, tmp_path, caplog):
    first, second = (write(tmp_path, f"round_0000{i}.ckpt") for i in range(2))
    if damage == "cut":
        second.write_bytes(second.read_bytes()[:-1])
    elif damage == "flipped":
        second.write_bytes(b"1" + second.read_bytes()[1:])
    elif damage == "unsealed":
        digest_file(second).unlink()
    elif damage == "empty seal":
        digest_file(second).write_text("")
    else:
        second.unlink()
    with caplog.at_level(logging.WARNING):
        assert last_whole(tmp_path) == first
    assert ("round_00001.ckpt is damaged" in caplog.text) == (damage != "gone")


def test_nothing_whole(tmp_path):
    assert last_whole(tmp_path) is None
    digest_file(write(tmp_path, "round_00000.ckpt")).unlink()
    with pytest.raises(CheckpointError, match=r"Every checkpoint in .* is damaged"):
        last_whole(tmp_path)


def test_only_the_last_rounds_and_the_best_are_kept(tmp_path):
    _, evaluation = harness.lightning("fedavg", tmp_path, rounds=4)
    assert [p.name for p in rounds_in(tmp_path)] == ["round_00002.ckpt", "round_00003.ckpt"]
    assert is_whole(tmp_path / BEST)
    assert evaluation.best_round() is not None
    assert not list(tmp_path.glob("*.partial*"))


class Killed(BaseException):
    """In place of SIGKILL."""


@sweep("position", range(5))
def test_killed_while_sealing(position, tmp_path, monkeypatch):
    """Dies before the n-th renaming or linking of round 1, and resumes as if straight."""
    straight, _ = harness.lightning("ditto", tmp_path / "straight")
    harness.lightning("ditto", tmp_path / "run", rounds=1)
    left = [position]

    def dying(function):
        def call(*arguments):
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return function(*arguments)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "replace", dying(os.replace))
        patch.setattr(checkpoint.os, "link", dying(os.link))
        start = last_whole(tmp_path / "run")
        with pytest.raises(Killed):
            harness.lightning("ditto", tmp_path / "run", rounds=2, resume=start)
    start = last_whole(tmp_path / "run")
    assert start is not None
    module, _ = harness.lightning("ditto", tmp_path / "run", resume=start)
    assert module.federation.digests() == straight.federation.digests()
    assert module.federation.ledger.entries == straight.federation.ledger.entries
    assert is_whole(tmp_path / "run" / BEST)
    assert not list((tmp_path / "run").glob("*.ckpt.partial"))
