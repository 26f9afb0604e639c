"""Folders, names and disks that would lose data: refused, kept apart, or told in one sentence."""

from __future__ import annotations

import csv
import dataclasses
import errno
import io
import json
import logging
import os
import pkgutil
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from rich.table import Table

import medfed
from medfed.commands.main import main
from medfed.common.console import Terminal, file_names, short
from medfed.common.figures import save_figures
from medfed.config.compose import described, load
from medfed.config.description import checked
from medfed.delivery.export.export import export_run
from medfed.federation.lightning.callbacks import RoundProgress
from medfed.records.folder import RunFolder, git_commit, save_tensors
from medfed.records.places import BEGUN
from medfed.reports.report import report_runs
from medfed.run.claim import locked_run_folder
from medfed.run.evaluation import evaluate_run
from medfed.standalone import files
from medfed.standalone.errors import ConfigError, DataError, MedfedError, WriteError
from medfed.standalone.files import locked
from medfed.standalone.names import fold
from tests.integration.runs import CLINICAL, resume, run

SMALL = (*CLINICAL, "rounds=1", "local.steps=1")
IMPOSSIBLE = "partition.num_clients=5000"  # which only the data reveal


def state(folder: Path) -> dict[str, bytes | None]:
    """All that lies below a folder, byte for byte."""
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None
        for p in sorted(folder.rglob("*"))
    }


def command(capsys, *arguments: str) -> str:
    """Runs a command that must fail, in this process; returns its one sentence."""
    (sentence,) = sentences(capsys, *arguments)
    return sentence


def sentences(capsys, *arguments: str) -> list[str]:
    """Those of a command that must fail: of a sweep each failed run's, then all that failed."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("round ")]
    assert all(line.startswith("error: ") for line in lines)
    return lines


# What the user's folder holds, relative to the current one.
USERS = {
    "thesis": {"thesis.tex": "mine"},
    "a log of that name": {"train.log": "mine"},
    "others of such names": {".hydra/config.yaml": "mine", "splits.json": "mine", ".lock": "mine"},
    "an empty folder": {"sub/": ""},
}


@pytest.fixture(autouse=True)
def _logging_as_it_was():
    """Hydra gives the program's log to a stream that ends with a test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def users(request, tmp_path, monkeypatch) -> Path:
    """The current folder, with something in it."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, text in USERS[request.param].items():
        place = folder / name
        place.mkdir() if name.endswith("/") else place.parent.mkdir(exist_ok=True)
        if text:
            place.write_text(text)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("users", USERS, indirect=True)
def test_a_users_folder_is_refused_and_stays_as_it_is(users, capsys):
    before = state(users)
    for arguments in (("hydra.run.dir=.",), ("-m", "seed=0,1", "hydra.sweep.dir=.")):
        assert "is not empty; name an empty one" in command(capsys, "train", *SMALL, *arguments)
        assert state(users) == before
    with pytest.raises(ConfigError, match="is not empty; name an empty one"):
        medfed.train(*SMALL, folder=".")
    assert state(users) == before


SINGLE = ("hydra.run.dir=a/run",)
SWEEP = ("-m", "seed=0,1", "hydra.sweep.dir=a/run")
WITHIN = ("-m", "seed=0,1", "hydra.sweep.dir=a", "hydra.sweep.subdir=run")


@pytest.mark.parametrize(
    ("there", "arguments"),
    [
        ((), SINGLE),
        (("a",), SINGLE),
        (("a", "a/run"), SINGLE),
        ((), SWEEP),
        (("a", "a/run"), SWEEP),
        ((), WITHIN),
        (("a", "a/run"), WITHIN),
    ],
)
def test_a_mistake_removes_what_was_made_and_nothing_else(
    there, arguments, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for name in there:
        (tmp_path / name).mkdir()
    if arguments is WITHIN and "a/run" in there:
        (tmp_path / "a" / "multirun.yaml").write_text("of an earlier sweep")
    found = sentences(capsys, "train", *SMALL, IMPOSSIBLE, *arguments)
    assert len(found) == (1 if arguments is SINGLE else 4)  # two runs, each also at the end
    assert all("does not fit" in sentence for sentence in found)
    assert {n for n, text in state(tmp_path).items() if text is None} == set(there)
    assert {n for n, text in state(tmp_path).items() if text} <= {"a/multirun.yaml"}


def test_a_second_sweep_goes_beside_the_first(tmp_path, monkeypatch, capsys):
    """Where a job would go over one of the first sweep, it is refused and that one stays."""
    monkeypatch.chdir(tmp_path)
    sweep = ("-m", *SMALL, "hydra.sweep.dir=sweep", "hydra.sweep.subdir=${seed}")
    run(tmp_path / "sweep" / "0", *SMALL)
    (tmp_path / "sweep" / "multirun.yaml").touch()
    first = state(tmp_path / "sweep" / "0")
    capsys.readouterr()
    said, named = sentences(capsys, "train", *sweep, "seed=1,0")
    assert "sweep/0 is not empty" in said
    assert named.startswith("error: Run 1 of the sweep (seed=0) failed: The folder ")
    assert state(tmp_path / "sweep" / "0") == first
    added = tmp_path / "sweep" / "1"
    assert (added / "summary.json").is_file()
    assert "- rounds=1" in (added / "overrides.yaml").read_text().splitlines()


def test_a_rank_shares_the_folder_of_the_first(tmp_path, monkeypatch):
    """It neither looks nor locks nor removes."""
    from medfed.run.claim import locked_run_folder

    (tmp_path / "config.yaml").touch()
    config = load([*SMALL, f"folder={tmp_path}"])
    monkeypatch.setenv("LOCAL_RANK", "1")
    with locked_run_folder(config, logs=True):
        assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]


def test_interrupted_before_the_first_round_nothing_is_left(tmp_path, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("medfed.run.experiment.read_data", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "a" / "run", *SMALL)
    assert not list(tmp_path.iterdir())


NAMES = {
    "climbs": "../../../x",
    "absolute": "/x",
    "markup": "[/x]",
    "bold": "[bold]x[/bold]",
    "long": "n" * 300,
    "long twin": "n" * 299 + "m",
    "newline": "a\nb",
    "carriage return": "a\rb",
    "control": "a\x1b[31mb\x07",
    "upper": "Hospital",
    "lower": "hospital",
    "reserved": "NUL",
    "reserved with suffix": "com1.txt",
    "drive": "C:\\x",
    "formula": "$a_b$ $",
    "mark": "a|b*?<c>",
    "hidden": ".x",
    "composed": "é",
    "decomposed": "e\u0301",
    "backslash": "x\\",
    "parent": "..",
    "comma": 'a,"b"',
}


# A table refuses names that differ in case alone, and joins those that differ in white space.
WRITTEN = [name for key, name in NAMES.items() if key != "lower"]
IN_A_TABLE = {fold(name) for name in WRITTEN}


@pytest.mark.parametrize("name", [".lock", ".lock.pid", "train.log", "pictures"])
def test_nothing_is_written_through_a_link(name, tmp_path):
    """A received run folder may hold links to files of the user's."""
    folder, other = tmp_path / "run", tmp_path / "other"
    folder.mkdir()
    (folder / "config.yaml").touch()
    other.mkdir() if name == "pictures" else other.write_text("mine")
    (folder / name).symlink_to(other)
    config = described([*SMALL, f"folder={folder}"])
    before = state(tmp_path)
    sentence = f"{name} is a link, and nothing is written through it; remove it"
    with (
        pytest.raises(ConfigError, match=re.escape(sentence)),
        locked_run_folder(dataclasses.replace(config, resume=str(folder)), logs=True),
    ):
        logging.getLogger().warning("never")
    if name == "pictures":  # as medfed export and evaluate write them
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            save_figures(folder / name, {"export": Figure()})
    elif name != "train.log":
        with pytest.raises(ConfigError, match=re.escape(sentence)), locked(folder, ".lock"):
            pass
    assert state(tmp_path) == before


def test_file_names_are_safe_and_unique():
    names = file_names([*NAMES.values(), "", " ", "a" * 200 + ".", "hospital_0"])
    assert names["hospital_0"] == "hospital_0"
    assert len({n.casefold() for n in names.values()}) == len(names)
    for name in names.values():
        assert Path(name).name == name
        assert len(name.encode()) <= 120
        assert not set(name) & set('<>:"/\\|?*\n\r\x1b\x07')
        assert name.strip(". ") == name
    again = file_names(reversed([*names]))
    assert again == names
    taken = file_names(["a/b", file_names(["a/b"])["a/b"]])
    assert len(set(taken.values())) == 2


@pytest.mark.parametrize("name", [*NAMES.values(), ""], ids=[*NAMES, "empty"])
def test_names_are_shown_as_they_are(name):
    console = Terminal(file=io.StringIO(), width=200)
    table = Table("client")
    table.add_row(short(name))
    console.print(table)
    assert short(name).rstrip() in console.file.getvalue()
    assert "\x1b" not in console.file.getvalue()


@pytest.fixture(scope="module")
def named(tmp_path_factory) -> Path:
    """A run on a table whose centres have such names."""
    root = tmp_path_factory.mktemp("named")
    table, generator = root / "table.csv", torch.Generator().manual_seed(0)
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["x0", "x1", "centre", "label"])
        for centre in WRITTEN:
            for i in range(20):
                values = torch.randn(2, generator=generator).tolist()
                writer.writerow([*values, centre, i % 2])
    data = (f"data.path={table}", "data.centre=centre", "partition=centre")
    overrides = (
        "experiment=clinical_pfednet",
        "data=csv",
        *data,
        "name='[/x]'",
        "logger=csv",
        "algorithm=ditto",
    )
    folder = root / "a" / "b" / "c" / "run"
    run(folder, *overrides, "rounds=1", "local.steps=1", "progress=true", "pictures.format=png")
    return folder


def test_training_stays_in_its_folder(named):
    assert sorted(p.name for p in named.parents[3].iterdir()) == ["a", "table.csv"]
    assert [p.name for p in named.parent.iterdir()] == ["run"]
    done = medfed.Run(named)
    assert sorted(done.clients) == sorted(IN_A_TABLE)
    assert len(list((named / "models").iterdir())) == len(IN_A_TABLE)
    assert sorted({e.client for e in done.ledger.entries}) == sorted(IN_A_TABLE)
    assert {r["client"] for r in done.metrics} == IN_A_TABLE


def test_each_client_has_its_own_model(named):
    done = medfed.Run(named)
    hashes = {
        name: hash(tuple(torch.cat([p.flatten() for p in done.model(name).parameters()]).tolist()))
        for name in done.clients
    }
    assert len(set(hashes.values())) == len(IN_A_TABLE)


def test_what_reads_the_run_works(named, capsys):
    evaluate_run(named)
    report_runs(str(named))
    bundles = export_run(checked(load([f"run={named}"], "export")))
    assert all(b.parent == named / "bundles" for b in bundles)
    for name, bundle in zip(medfed.Run(named).clients, bundles, strict=True):
        facts = json.loads((bundle / "configs" / "metadata.json").read_text())["medfed"]
        assert facts["client"] == name
    printed = capsys.readouterr().out
    assert "[/x]" in printed
    assert "\x1b" not in printed
    assert sorted(p.name for p in named.parents[3].iterdir()) == ["a", "table.csv"]


def test_the_progress_bar_shows_names():
    progress = RoundProgress(None, Terminal(file=io.StringIO(), force_terminal=True, width=120))
    assert progress.console.is_terminal
    for name in NAMES.values():
        progress.console.print(short(name))


def test_two_trainings_in_one_folder(tmp_path, monkeypatch):
    """The second is refused while the first lives; a killed one is resumed."""
    folder = tmp_path / "run"
    run(folder, *SMALL)
    code = (
        "import sys; from pathlib import Path; from medfed.standalone.files import locked\n"
        "with locked(Path(sys.argv[1]), '.lock', wait=False):\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], **pipes) as other:
        assert other.stdout.readline() == "held\n"
        before = {n: b for n, b in state(folder).items() if not n.startswith(".lock")}
        with pytest.raises(
            ConfigError, match=rf"^Process {other.pid} already works in .*; wait until it"
        ):
            resume(folder, *SMALL)
        assert {n: b for n, b in state(folder).items() if not n.startswith(".lock")} == before
        with pytest.raises(ConfigError, match="is not empty"):
            run(folder, *SMALL)
        os.kill(other.pid, signal.SIGKILL)
    resume(folder, *SMALL)


def test_a_run_goes_on_in_its_own_folder(tmp_path):
    run(tmp_path / "run", *SMALL)
    with pytest.raises(ConfigError, match="continues in that folder"):
        run(tmp_path / "other", *SMALL, f"resume={tmp_path / 'run'}")
    assert not (tmp_path / "other").exists()


WRITERS = {
    "json": lambda p: files.write_json(p, {"a": 1}),
    "text": lambda p: files.write_text(p, "a"),
    "tensors": lambda p: save_tensors(p, {"a": torch.zeros(2)}),
}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_is_one_sentence(writer, number, tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "replace", full)
    path = tmp_path / "sub" / "a"
    with pytest.raises(WriteError, match=f"^Cannot write {path} \\({os.strerror(number)}\\); "):
        WRITERS[writer](path)
    assert not list(path.parent.iterdir())


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Lets the system stop writing as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("when", "place"),
    [
        ("medfed.run.experiment.RunFolder.open", "run/.*versions.json"),
        ("pytorch_lightning.loggers.CSVLogger.save", "/run"),
        ("pytorch_lightning.Trainer.save_checkpoint", "checkpoints/round_00000.ckpt"),
        ("medfed.run.results.save_tensors", "models/hospital_0.safetensors"),
        ("medfed.run.results.save_figures", "pictures/.*.png"),
    ],
)
def test_a_disk_that_fills_while_training(when, place, tmp_path, monkeypatch):
    """The system's own limit of a file's size stands for a full disk from some step on."""
    folder, (owner, _, name) = tmp_path / "run", when.rpartition(".")
    writer = getattr(pkgutil.resolve_name(owner), name)

    def limited(*args: object, **kwargs: object) -> object:
        with largest_file(50):
            return writer(*args, **kwargs)

    monkeypatch.setattr(when, limited)
    with pytest.raises(WriteError) as caught:
        run(folder, *SMALL, "logger=csv", "pictures.format=png")
    sentence = str(caught.value)
    assert re.match(rf"Cannot write .*{place} \(File too large\); make room there, or ", sentence)
    assert folder.exists() == (folder / "config.yaml").exists() == ("RunFolder" not in when)
    left = state(tmp_path)
    assert not [n for n in left if "partial" in n or re.search(f"{place}$", n)]


def test_a_full_disk_leaves_no_lock_in_a_clone(tmp_path):
    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        done = subprocess.run(["git", *who, *words], cwd=tmp_path, capture_output=True, check=True)
        return done.stdout.decode().strip()

    git("init")
    assert git_commit(tmp_path) == "unknown"  # there is none yet
    (tmp_path / "code.py").write_text("a = 1")
    git("add", ".")
    git("commit", "-m", "first")
    os.utime(tmp_path / "code.py", (0, 0))  # as new, for git: it looks, and would write what it saw
    with largest_file(0):
        assert git_commit(tmp_path) == git("rev-parse", "HEAD")
    assert not list((tmp_path / ".git").glob("*.lock"))
    (tmp_path / "code.py").write_text("a = 2")
    assert git_commit(tmp_path) == git("describe", "--always", "--dirty", "--abbrev=40")


def test_a_disk_that_fills_while_a_bundle_is_written(tmp_path):
    run(tmp_path / "run", *SMALL)
    before = state(tmp_path)
    with largest_file(1000), pytest.raises(WriteError, match=r"Cannot write .*bundles/hospital_0 "):
        export_run(checked(load([f"run={tmp_path / 'run'}"], "export")))
    after = {n: text for n, text in state(tmp_path).items() if n != "run/bundles"}
    assert after == before


def test_a_folder_opens_whole_or_not_at_all(tmp_path, monkeypatch):
    """Its config.yaml comes last: without it nothing takes it for a run."""
    config = described([*SMALL, f"folder={tmp_path / 'run'}"])

    def full(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("medfed.records.folder.write_text", full)
    with pytest.raises(OSError, match="No space left"):
        RunFolder(Path(config.folder)).open(config, {}, {}, {})
    written = [p.name for p in (tmp_path / "run").iterdir()]
    assert "config.yaml" not in written
    assert {*written} <= {*BEGUN}
    with pytest.raises(WriteError, match=r"Cannot write .*other \(No space left on device\); make"):
        medfed.train(*SMALL, folder=tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.fixture(scope="module")
def undisturbed(finished_run) -> Path:
    return finished_run(*SMALL)


@pytest.mark.parametrize("writes", [None, 0, 1, 2, 3])
def test_a_run_killed_before_it_was_opened_begins_anew(writes, tmp_path, undisturbed):
    """What it leaves is known by its names; the same command does what it would have done."""
    folder = tmp_path / "run"
    config = described([*SMALL, f"folder={folder}"])
    child = os.fork()
    if not child:  # killed at the next file, half of which is there
        left = writes or 0

        def killed(path: Path, *_: object, **__: object) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                (path.parent / f"{files.PARTIAL}x").write_text("half")
                os.kill(os.getpid(), signal.SIGKILL)
            path.write_text("{}")

        import medfed.records.folder

        medfed.records.folder.write_json = medfed.records.folder.write_text = killed
        with locked_run_folder(config):
            if writes is not None:
                RunFolder(Path(config.folder)).open(config, {}, {}, {})
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    written = {p.name for p in folder.iterdir()} - {".lock", ".lock.pid", f"{files.PARTIAL}x"}
    assert len(written) == (writes or 0)
    assert "config.yaml" not in written
    run(folder, *SMALL)
    after, other = state(folder), state(undisturbed)
    assert {*after} == {*other}
    assert after["summary.json"] == other["summary.json"]
    with pytest.raises(ConfigError, match="is not empty"):
        run(folder, *SMALL)


def test_mistakes_stay_on_one_line(capsys):
    from medfed.commands.sentences import one_sentence

    with pytest.raises(SystemExit), one_sentence():
        raise DataError("Patient a\nb\x1b[31m has no centre.")
    assert capsys.readouterr().err == "error: Patient a\\nb\\x1b[31m has no centre.\n"
    assert issubclass(WriteError, MedfedError)
