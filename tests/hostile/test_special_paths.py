"""Paths of no file: devices, pipes, sockets, circles of links, very long and very deep ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.trust.hostile_lines import SMALL, outcome, stage
from medfed.commands.help import COMMANDS
from medfed.common.untrusted import read_json, read_rows, read_yaml
from medfed.config.check import check_paths
from medfed.config.compose import load
from medfed.config.description import written
from medfed.config.sections import put, walk
from medfed.config.spelling import is_path_key
from medfed.datamodules.cache.store import map_array
from medfed.standalone import csv_files, pictures, volumes
from medfed.standalone.errors import MedfedError
from medfed.standalone.files import refuse_special

ODD = ("zero", "full", "pipe", "socket", "circle", "circle/x", "x" * 300, "/".join("d" * 1200))
MADE = {"zero", "full", "pipe", "socket", "circle"}
# What each command needs besides, to come as far as the key.
BESIDES = {
    "train": SMALL,
    "prepare": SMALL,
    "look": SMALL,
    "study": SMALL,
    "advise": SMALL,
    "evaluate": ("run=there", "by=sex"),
    "report": ("runs=there",),
    "benchmark": ("suite=heart",),
    "export": ("run=there",),
    "adopt": ("bundle=there", "out=new", "task=segmentation", "normalize=zscore"),
    "audit": ("run=there",),
    "predict": ("bundle=there", "input=there", "output=new"),
    "deploy": ("sites=[a,b,c]", "kit=there"),
}
# Keys that a configuration gets by an option or a plus sign.
FURTHER = {"train": ("plugins", "data.path")}


@pytest.fixture
def odd(tmp_path):
    """A folder with what is no file, and with an empty folder."""
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "full").symlink_to("/dev/full")
    (tmp_path / "there").mkdir()
    with stage(tmp_path):
        pass
    return tmp_path


def keys_of(command: str) -> list[str]:
    """All keys of a command whose values are paths."""
    content = written(load(BESIDES.get(command, ()), command))
    keys = [re.sub(r"\[\d+\]$", "", key) for key, _ in walk(content)]
    keys = [key for key in keys if is_path_key(key) and not key.startswith("hydra.")]
    return list(dict.fromkeys([*keys, *FURTHER.get(command, ())]))


def test_the_table_has_all_keys():
    known = {key for command in COMMANDS for key in keys_of(command)}
    asked = "run resume folder out input output candidates onboard patients runs bundle of plugins"
    assert known >= {*asked.split(), "init.weights", "data.path", "kit"}


@pytest.mark.parametrize("command", COMMANDS)
def test_each_key_of_each_command_is_answered_in_a_sentence(command, odd):
    wrong = {}
    for key in keys_of(command):
        for path in ODD:
            besides = [b for b in BESIDES.get(command, ()) if not b.startswith(f"{key}=")]
            with stage(odd):
                end, text = outcome([command, *besides, f"{key}={path}"], 20)
            if end != "sentence" or not (path[:20] in text or " names " in text):
                wrong[f"{key}={path[:20]}"] = text
    assert not wrong, wrong
    assert {p.name for p in odd.iterdir()} == {*MADE, "loop", "there", "file", "folder"}


def test_keys_that_other_options_bring(odd, monkeypatch):
    monkeypatch.chdir(odd)
    for key in (
        *("data.root", "data.cache", "data.reader.file", "data.reader.sites.file", "paths.x"),
        "partition.file",
        *("data.reader.candidates", "data.reader.annotations", "algorithm.affinity.weights"),
    ):
        for path in ODD:
            content: dict = {}
            put(content, key, path)
            with pytest.raises(MedfedError, match=key):
                check_paths(dict(walk(content)))


@pytest.mark.parametrize(
    "line",
    [
        *(["init", path] for path in (*ODD, "/proc/self/fd")),
        *(["site", "status", f"run={path}"] for path in ODD),
        *(["site", "check", f"agreed={path}", "local=there"] for path in ODD),
        *(["site", "check", "agreed=there", f"local={path}"] for path in ODD),
        *(["train", "-m", "seed=0,1", f"hydra.sweep.dir={path}"] for path in ODD),
    ],
    ids=lambda line: " ".join(line)[:40],
)
def test_commands_without_a_configuration(line, odd):
    with stage(odd):
        end, text = outcome(line, 20)
    assert end == "sentence", text


READERS = {
    "json": lambda path: read_json(path),
    "yaml": lambda path: read_yaml(path),
    "records": lambda path: read_rows(path, ["a"]),
    "table": lambda path: list(csv_files.csv_rows(path)),
    "picture": lambda path: pictures.read_picture(path, "grey"),
    "volume": lambda path: volumes.read_volume(path),
    "arrays": lambda path: pictures.arrays_of(path).__enter__(),
    "array": lambda path: map_array(path),
}


@pytest.mark.parametrize("kind", ["zero", "pipe", "socket", "circle"])
@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_files_within_folders(reader, kind, odd):
    """Of a received run folder, or of a folder of data."""
    for ending in ("", ".nii.gz", ".mha", ".png"):
        path = Path(f"{odd / kind}{ending}")
        path.exists() or path.is_symlink() or path.symlink_to(odd / kind)
        with pytest.raises(MedfedError, match=kind):
            reader(path)


def test_files_and_folders_are_taken(tmp_path):
    refuse_special(tmp_path)
    refuse_special(tmp_path / "nothing")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    refuse_special(tmp_path / "link")
