"""A folder in another's place: killed before every single change of the disk, nothing is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from medfed.standalone.files import replacing_folder, restore_folder

# In a process of its own, small enough to be forked often. A hook sees every change of the disk
# before it is made, and kills at the one whose turn it is.
KILLED = """
import os, pathlib, shutil, signal, sys
from medfed.standalone.files import made_once, replacing_folder, restore_folder

root, left = pathlib.Path(sys.argv[1]), [0]

def hook(event, arguments):
    changes = event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir")
    if changes or (event == "open" and arguments[2] & os.O_CREAT):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

def write(folder, text):
    with replacing_folder(folder) as made:
        for name in "ab":
            (made / name).mkdir()
            (made / name / "text").write_text(text)

def write_once(folder):
    with made_once(folder) as made:
        for name in "ab" if made else "":
            (made / name).mkdir()
            (made / name / "text").write_text("once")
        return made is not None

def held(folder):
    return {(folder / n / "text").read_text() for n in "ab"} if folder.exists() else None

sys.addaudithook(hook)
steps, seen = 0, []
for old in (False, True):
    for step in range(1, 200):
        folder = root / f"{old}{step}"
        if old:
            write(folder, "old")
        child = os.fork()
        if child == 0:
            left[0] = step
            write(folder, "new")
            os._exit(0)
        killed = os.waitpid(child, 0)[1] != 0
        steps += killed
        before = held(folder)
        restore_folder(folder)
        found = held(folder)
        assert before in (found, None), (step, before, found)
        assert found in ({"old"}, {"new"}) or (not old and found is None), (step, found)
        seen.append((old, before and min(before), found and min(found)))
        write(folder, "next")  # whatever is left over does not disturb, and goes
        assert held(folder) == {"next"}
        assert [p.name for p in root.iterdir() if p.name != folder.name] == [], list(root.iterdir())
        shutil.rmtree(folder)
        if not killed:
            break
for step in range(1, 200):
    folder = root / f"once{step}"
    child = os.fork()
    if child == 0:
        left[0] = step
        write_once(folder)
        os._exit(0)
    killed = os.waitpid(child, 0)[1] != 0
    steps += killed
    before = held(folder)
    assert write_once(folder) == (before is None), (step, before)
    assert held(folder) == {"once"}
    assert [p.name for p in root.iterdir()] == [folder.name], list(root.iterdir())
    shutil.rmtree(folder)
    if not killed:
        break
wanted = [(True, None, "old"), (True, "old", "old"), (True, "new", "new")]
print(steps, *(way in seen for way in wanted))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_killed_at_every_step(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-1500:]
    steps, *seen = done.stdout.split()
    assert int(steps) > 20
    assert seen == ["True"] * 3  # killed between the renames, before them, and after them


def test_an_error_leaves_the_older_folder(tmp_path, monkeypatch):
    folder = tmp_path / "a"
    with replacing_folder(folder) as made:
        (made / "text").write_text("old")
    rename = Path.rename

    def full(path: Path, target: Path) -> Path:
        if path.name.endswith(".new"):
            raise OSError(28, "No space left on device")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(OSError, match="No space"), replacing_folder(folder) as made:
        (made / "text").write_text("new")
    assert (folder / "text").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_what_a_live_process_writes_is_left_alone(tmp_path):
    with replacing_folder(tmp_path / "a") as made:
        with replacing_folder(tmp_path / "b"):
            assert made.is_dir()
        restore_folder(tmp_path / "a")  # nothing to restore, and it does not wait
        assert made.is_dir()
