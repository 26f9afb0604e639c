"""The cache: equal to what was read, whole after any kill, and refused when it is not."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from medfed.datamodules.cache import store as building
from medfed.datamodules.cache.store import ITEMS, MANIFEST, Item, Recipe, Store, build, find
from medfed.datamodules.client_data import ArrayRows
from medfed.standalone.errors import DataError
from tests.datamodules import cache_items
from tests.datamodules.cache_items import COUNT, contents, recipe, were_read, write_sources

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def source(tmp_path):
    write_sources(tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def cache(source):
    return source / "cache"


def make(source, cache, **settings):
    return build(recipe(source, **settings), cache, workers=1)


def start(source, workers=2, pause=0.02, errors=subprocess.PIPE):
    """Makes the cache in another process, with a process group of its own."""
    module = [sys.executable, "-m", "tests.datamodules.cache_items"]
    return subprocess.Popen(
        [*module, str(source), str(workers), str(pause)],
        cwd=ROOT,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
    )


def wait_for(condition, seconds=240.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def seals(cache):
    return sorted(cache.glob(f"demo_*/{ITEMS}/*.json"))


@pytest.mark.parametrize("joined", [True, False])
def test_holds_exactly_what_was_read(source, cache, joined):
    store = make(source, cache, joined=joined)
    start = 0
    for path in sorted(source.glob("*.txt")):
        direct, cached = cache_items.read(path), store.arrays(path.stem)
        assert direct.keys() == cached.keys()
        for name, array in direct.items():
            assert np.array_equal(cached[name], array)
            assert cached[name].dtype == array.dtype
            assert not cached[name].flags.writeable
        if joined:
            assert store.rows(path.stem) == range(start, start + len(direct["label"]))
            start += len(direct["label"])
    if joined:
        assert store.array("image").shape == (start, 1, 3, 4)
        assert not (store.folder / ITEMS).exists()
    store.verify()


def test_worker_processes_make_the_same_bytes(source, cache, tmp_path):
    alone = make(source, cache)
    together = build(recipe(source), tmp_path / "other", workers=2)
    assert contents(together) == contents(alone)
    assert together.entries == alone.entries


def test_a_finished_cache_is_opened_and_not_made_again(source, cache):
    assert find(recipe(source), cache) is None
    first = build(recipe(source), cache)
    assert first.new
    assert were_read(source) == [f"scan.{i}" for i in range(COUNT)]
    second = find(recipe(source), cache)
    assert not second.new
    assert second.checksum == first.checksum
    build(recipe(source), cache)
    assert not were_read(source)


def test_other_settings_are_another_cache(source, cache):
    assert make(source, cache).folder != make(source, cache, size=4).folder
    assert len(list(cache.iterdir())) == 2


def test_resumes_after_being_killed_at_random(source, cache, tmp_path):
    write_sources(tmp_path / "straight")
    expected = contents(make(tmp_path / "straight", tmp_path / "straight" / "cache"))
    last = source / f"scan.{COUNT - 1}.closed"
    last.touch()  # so that no process can finish before it is killed
    moments = random.Random(0)
    for kill in range(3):
        process = start(source)
        done = 2 * kill + 1
        wait_for(lambda process=process, done=done: len(seals(cache)) >= done or process.poll())
        time.sleep(moments.random() * 0.04)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        assert find(recipe(source, 0.02), cache) is None
    kept = {path: path.stat().st_mtime_ns for path in seals(cache)}
    were_read(source)
    last.unlink()
    process = start(source)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert len(were_read(source)) == COUNT - len(kept)  # what was finished was not read again
    store = find(recipe(source, 0.02), cache)
    assert str(store.folder) == out.strip()
    assert contents(store) == expected
    assert not list(cache.rglob("*.partial-*"))


def test_workers_end_with_a_killed_parent(source, cache):
    last = source / f"scan.{COUNT - 1}.closed"
    last.touch()  # one of them is at work whenever the parent is killed
    process = start(source)
    wait_for(lambda: len(seals(cache)) >= 1)
    process.kill()  # the parent alone
    process.wait()

    def gone():
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        return False

    wait_for(gone)
    process.communicate()
    last.unlink()
    assert contents(make(source, cache))


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_a_torn_shard_is_made_again(source, cache, damage):
    (source / "scan.7.txt").write_text("bad")
    with pytest.raises(DataError, match=r"scan\.7\.txt is bad"):
        make(source, cache)
    assert find(recipe(source), cache) is None
    assert were_read(source) == [f"scan.{i}" for i in range(COUNT)]
    (torn,) = cache.glob(f"demo_*/{ITEMS}/00002.image.npy")
    content = bytearray(torn.read_bytes())
    content[-1] ^= 1
    if damage == "remove":
        torn.unlink()
    else:
        torn.write_bytes(content if damage == "flip" else content[:-5])
    (source / "scan.7.txt").write_text("107")
    store = make(source, cache)
    assert were_read(source) == ["scan.2", "scan.7"]
    expected = cache_items.read(source / "scan.2.txt")["image"]
    assert np.array_equal(store.arrays("scan.2")["image"], expected)


@pytest.mark.parametrize("moment", ["join", "manifest"])
def test_killed_while_finishing(source, cache, monkeypatch, moment):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if moment == "join":
            patch.setattr(building, "_join", killed)
        else:
            patch.setattr(Store, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            make(source, cache)
    assert find(recipe(source), cache) is None
    were_read(source)
    make(source, cache).verify()
    assert not were_read(source)


def test_a_torn_manifest_is_not_used(source, cache):
    store = make(source, cache)
    path = store.folder / MANIFEST
    whole = path.read_text()
    for torn in ("", whole[: len(whole) // 2], "[]", whole.replace('"count": 1', '"count": 2')):
        path.write_text(torn)
        with pytest.raises(DataError, match=r"manifest\.json cannot be used .* run medfed "):
            find(recipe(source), cache)
    make(source, cache).verify()
    assert path.read_text() == whole


@pytest.mark.parametrize("change", ["time", "size", "gone"])
def test_a_changed_source_is_named(source, cache, change):
    make(source, cache)
    path = source / "scan.3.txt"
    if change == "time":
        os.utime(path, (1, 1))
    elif change == "size":
        path.write_text("1234")
    else:
        path.unlink()
        one = Item("scan.3", (path,), (path,), (path, 0.0))
        items = recipe(source).items
        gone = Recipe("demo", {"size": 3}, (*items[:3], one, *items[3:]), cache_items.read)
        with pytest.raises(DataError, match=r"scan\.3\.txt of scan\.3 is unreadable"):
            find(gone, cache)
        return
    with pytest.raises(DataError, match=r"scan\.3\.txt of scan\.3 has changed .* medfed prepare"):
        find(recipe(source), cache)
    store = make(source, cache)
    expected = cache_items.read(path)["image"]
    assert np.array_equal(store.arrays("scan.3")["image"], expected)


def test_volumes_of_unchanged_sources_are_kept(source, cache):
    make(source, cache, joined=False)
    (source / "scan.3.txt").write_text("1234")
    were_read(source)
    make(source, cache, joined=False)
    assert were_read(source) == ["scan.3"]


def test_damaged_bytes_are_found_and_named(source, cache):
    store = make(source, cache)
    path = store.path("image")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    damaged = find(recipe(source), cache)  # the size is right, so only the checksum can tell
    with pytest.raises(DataError, match=r"is damaged at scan\.7; run medfed prepare"):
        damaged.verify()
    make(source, cache).verify()
    path.write_bytes(content[:-2])
    with pytest.raises(DataError, match=r"image\.npy is missing or not of the \d+ bytes"):
        find(recipe(source), cache)


def test_two_processes_at_once(source, cache, tmp_path):
    first = source / "scan.0.closed"
    first.touch()
    files = [tmp_path / name for name in "ab"]
    with files[0].open("w") as one, files[1].open("w") as other:
        both = [start(source, workers=1, pause=0, errors=file) for file in (one, other)]
    wait_for(lambda: any("Waiting for process" in file.read_text() for file in files))
    first.unlink()
    for process in both:
        process.communicate(timeout=240)
    assert [process.returncode for process in both] == [0, 0], [f.read_text() for f in files]
    assert sum("Waiting for process" in file.read_text() for file in files) == 1
    assert sorted(were_read(source)) == [f"scan.{i}" for i in range(COUNT)]
    find(recipe(source), cache).verify()


def test_a_folder_that_cannot_be_written(source, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"Cannot write .*file/demo_.* set data\.cache to another"):
        make(source, tmp_path / "file")


def test_a_full_disk(source, cache):
    """Stands in for it: the kernel refuses to write files beyond a size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
    try:
        with pytest.raises(DataError, match=r"Cannot write .* \(File too large\); make room"):
            make(source, cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert find(recipe(source), cache) is None
    assert not list(cache.rglob("*.partial-*"))
    make(source, cache).verify()


def test_a_bad_source_stops_worker_processes_by_its_name(source, cache):
    (source / "scan.1.txt").write_text("bad")
    with pytest.raises(DataError, match=r"scan\.1\.txt is bad"):
        build(recipe(source), cache, workers=2)
    (source / "scan.1.txt").write_text("no number")
    with pytest.raises(DataError, match=r"scan\.1 cannot be prepared from .*scan\.1\.txt: invalid"):
        build(recipe(source), cache, workers=2)
    (source / "scan.1.txt").write_text("kill")
    with pytest.raises(DataError, match=r"A worker process was killed .* workers=1"):
        build(recipe(source), cache, workers=2)
    assert find(recipe(source), cache) is None


def test_plain_lines_without_a_terminal(source, cache, capfd):
    build(recipe(source), cache, workers=1)
    assert f"prepared {COUNT}/{COUNT}" in capfd.readouterr().err


def test_manifest_is_json_with_sources_and_hashes(source, cache):
    store = make(source, cache)
    manifest = json.loads((store.folder / MANIFEST).read_text())
    entry = manifest["entries"][0]
    stat = (source / "scan.0.txt").stat()
    assert entry["sources"] == [["scan.0.txt", stat.st_size, stat.st_mtime_ns]]
    known = subprocess.run(["sha256sum", source / "scan.0.txt"], capture_output=True, check=True)
    assert entry["hashes"] == [known.stdout.decode().split()[0]]
    assert manifest["files"]["image.npy"] == store.path("image").stat().st_size


def test_mapped_rows_gather_convert_and_pickle_small(source, cache):
    store = make(source, cache)
    image = store.array("image")
    chosen = np.array([5, 0, 9, 3])
    rows = ArrayRows(store.path("image"), chosen, np.float32)
    assert rows.shape == (4, 1, 3, 4)
    index = torch.tensor([3, 1, 1])
    expected = np.array(image)[[3, 0, 0]].astype(np.float32)
    assert np.array_equal(rows.take(index).numpy(), expected)
    few = rows.some(torch.tensor([3, 1]))
    assert np.array_equal(few.take(torch.tensor([0])), np.array(image)[[3]].astype(np.float32))
    assert few.shape == (2, 1, 3, 4)
    copied = pickle.dumps(rows)
    assert len(copied) < 600
    assert torch.equal(pickle.loads(copied).take(index), rows.take(index))
    rows.take(index).zero_()  # a copy: the cache cannot be changed by it
    store.verify()


def test_a_script_without_a_main_guard_ends_with_a_sentence(source, tmp_path):
    """Its workers read it again; they used to wait for it, and it for them."""
    script = tmp_path / "unguarded.py"
    script.write_text(
        "from pathlib import Path\n"
        "from medfed.datamodules.cache.store import build\n"
        "from tests.datamodules.cache_items import recipe\n"
        f"folder = Path({str(source)!r})\n"
        "build(recipe(folder), folder / 'cache', workers=2)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script)], env=environ, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 1
    assert 'put what it does under if __name__ == "__main__":' in done.stderr
    assert not list((source / "cache").rglob(MANIFEST))
