"""Processes: how many there may be, and how they end; each mistake one sentence, nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from pytorch_lightning.plugins.environments import LightningEnvironment

import medfed
from medfed.common.processes import Terminated, ended_by_signals, signals_blocked
from medfed.config.compose import load
from medfed.config.description import checked
from medfed.federation.algorithm import Cohort
from medfed.federation.lightning.checkpoint import RoundCheckpoint, rounds_in
from medfed.federation.lightning.strategy import Launcher
from medfed.run import results
from medfed.standalone.errors import ConfigError
from medfed.standalone.files import PARTIAL, write_text
from tests.integration.runs import CLINICAL, ROOT, left_in, outcome, resume, run
from tests.processes import Started, ranks
from tests.sweeps import sweep

NUMBER = "give a number of at least 1, or on GPUs auto for all, or a list such as [0,1]."
OTHERS = "could mix the gradients of clients; leave it at auto, which assigns"
REFUSED = {
    **{
        f"trainer.devices={value}": f"trainer.devices={shown} cannot be used; {NUMBER}"
        for value, shown in {
            **{v: v for v in ("0", "-1", "auto", "1.5", "all", "[]", "-2")},
            ".nan": "nan",
            "'2'": "2",
            "true": "True",
            "null": "None",
            "[0,1]": "[0, 1]",
        }.items()
    },
    "trainer.accelerator=gpu trainer.devices=[0,0]": "trainer.devices=[0, 0] cannot be used",
    "trainer.accelerator=gpu trainer.devices=[-1]": "trainer.devices=[-1] cannot be used",
    **{
        f"trainer.strategy={name} trainer.devices=2": f"trainer.strategy={name} {OTHERS}"
        for name in ("ddp", "fsdp", "deepspeed", "ddp_spawn", "dp", "ddp_notebook")
    },
    "trainer.strategy=ddp": f"trainer.strategy=ddp {OTHERS}",
    "trainer.strategy._target_=pytorch_lightning.strategies.DDPStrategy": "may build",
    "trainer.num_nodes=2": "trainer.num_nodes=2 needs the run to be started on every",
    "trainer.num_nodes=0": "trainer.num_nodes=0 cannot be used; give the number of machines, at",
    "trainer.num_nodes=1.5": "trainer.num_nodes=1.5 cannot be used; give the number",
    "rounds=1000000000000000000000000": "rounds must be a whole number of at most 1000000, not",
    "threads=100000": "threads must be a whole number of at most 256, not 100000.",
    "threads=257": "threads must be a whole number of at most 256, not 257.",
    "threads=-1": "threads must be a whole number of at least 1, not -1.",
    "threads=.nan": "threads must be a whole number, not nan.",
    "threads=1e3": "threads must be a whole number, not 1000.0.",
    "threads=true": "threads must be a whole number, not True.",
    "threads=null": "threads must be a whole number, not None.",
    "workers=0": "workers must be a whole number of at least 1, not 0.",
    "workers=-4": "workers must be a whole number of at least 1, not -4.",
    "workers=.nan": "workers must be a whole number or null, not nan.",
    "workers=many": "workers must be a whole number or null, not 'many'.",
    "workers=65": "workers must be a whole number of at most 64, not 65.",
    "workers=1" + 20 * "0": "workers must be a whole number of at most 64, not 1000",
}
FINE = ("trainer.accelerator=gpu trainer.devices=auto", "trainer.devices=3", "workers=null")


@pytest.fixture(scope="module")
def config():
    composed = load(CLINICAL)
    OmegaConf.set_struct(composed, False)  # as by +key=value
    return composed


@sweep(("words", "sentence"), REFUSED.items())
def test_a_number_of_processes_that_cannot_be(words, sentence, config):
    with pytest.raises(ConfigError) as caught:
        checked(OmegaConf.merge({"workers": 1}, config, OmegaConf.from_dotlist(words.split())))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("words", FINE)
def test_numbers_of_processes_that_can_be(words, config):
    checked(OmegaConf.merge(config, OmegaConf.from_dotlist(words.split())))


def test_more_devices_than_clients_are_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"trainer\.devices=7 means 7 devices for 5 clients; set it"
    ):
        run(tmp_path / "run", *CLINICAL, "trainer.devices=7")
    assert not left_in(tmp_path)


def test_python_does_not_start_itself_anew(tmp_path):
    with pytest.raises(ConfigError, match="use the command: medfed train"):
        medfed.train(*CLINICAL, trainer__devices=2, folder=tmp_path / "run")
    assert not left_in(tmp_path)


# Signals


@pytest.fixture(scope="module")
def finished(finished_run):
    return finished_run(*CLINICAL)


@pytest.fixture
def as_it_was(monkeypatch):
    """What a command changes in its process; after a signal it ignores further ones."""
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


ENDS = {signal.SIGINT: (130, "Interrupted; "), signal.SIGTERM: (143, "Terminated; ")}


def stopped(capsys, number: signal.Signals, command: str, *words: str) -> str:
    """Runs a command to which something sends the signal; returns how it says to go on."""
    with pytest.raises(SystemExit) as ended:
        import_module(f"medfed.commands.{command}").main(words)
    status, word = ENDS[number]
    assert ended.value.code == status
    error = capsys.readouterr().err
    assert "Traceback" not in error
    line = error.splitlines()[-1]
    assert line.startswith(word)
    return line.removeprefix(word)


def test_a_stopped_run_says_how_to_go_on_and_does(
    finished, tmp_path, capsys, monkeypatch, as_it_was
):
    folder, draw = tmp_path / "run", Cohort.of

    def of(self, clients, seed, round):
        if round == 1:
            signal.raise_signal(signal.SIGTERM)
        return draw(self, clients, seed, round)

    with monkeypatch.context() as patch:
        patch.setattr(Cohort, "of", of)
        line = stopped(capsys, signal.SIGTERM, "train", *CLINICAL, f"hydra.run.dir={folder}")
    command = f"medfed train {' '.join(CLINICAL)} resume={folder}"
    assert line == f"continue after the last finished round with: {command}"
    assert not [name for name in left_in(folder) if "partial" in name]
    resume(folder, *CLINICAL)
    assert outcome(folder) == outcome(finished)


def test_a_run_stopped_before_it_began_leaves_no_folder(tmp_path, capsys, monkeypatch, as_it_was):
    def splits(self):
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("medfed.datamodules.base.FederatedDataModule.splits", splits)
    folder = tmp_path / "run"
    line = stopped(capsys, signal.SIGTERM, "train", *CLINICAL, f"hydra.run.dir={folder}")
    assert line == "the run had not begun; start it again."
    assert not folder.exists()


@pytest.mark.parametrize("sweep", [(), ("-m", "seed=0,1")], ids=["run", "sweep"])
@pytest.mark.parametrize("number", ENDS, ids=lambda number: number.name)
def test_a_signal_that_a_library_hides_ends_the_command(
    number, sweep, tmp_path, capsys, monkeypatch, as_it_was
):
    """NumPy whose import is interrupted ends with a RecursionError."""

    def splits(self):
        with suppress(KeyboardInterrupt):
            signal.raise_signal(number)
        raise RecursionError

    monkeypatch.setattr("medfed.datamodules.base.FederatedDataModule.splits", splits)
    folders = [f"hydra.{each}.dir={tmp_path / each}" for each in ("run", "sweep")]
    line = stopped(capsys, number, "train", *sweep, *CLINICAL, *folders)
    assert ("0 of the 2 runs of the sweep are finished" in line) == bool(sweep)


SCANS = ("hospitals=2", "patients=4", "shape=[48,48,24]", "lookalikes=8")
STOPPED = {
    "prepare": "medfed.datamodules.cache.store.files.write_json",
    "export": "medfed.delivery.bundle.metadata.monai_metadata",
    "report": "medfed.reports.report.page",
}


@pytest.mark.parametrize(("command", "place"), STOPPED.items())
def test_other_commands_end_with_one_line(
    command, place, finished, tmp_path, capsys, monkeypatch, as_it_was
):
    words = {
        "prepare": (
            *("data=luna16", "workers=1", f"data.root={tmp_path}", f"data.cache={tmp_path / 'c'}"),
            *(f"data.generated.{key}" for key in SCANS),
        ),
        "export": (f"run={finished}", f"out={tmp_path / 'out'}"),
        "report": (f"runs={finished}", f"out={tmp_path / 'out'}"),
    }
    number = signal.SIGTERM if command == "export" else signal.SIGINT
    monkeypatch.setattr(place, lambda *_, **__: signal.raise_signal(number))
    line = stopped(capsys, number, command, *words[command])
    assert line == "finished work is kept; run the command again to continue."
    left = left_in(tmp_path)
    assert not [name for name in left if PARTIAL in name or "/." in name]
    assert (command == "prepare") == bool(left)  # patches that are whole


def test_the_first_signal_alone_counts(as_it_was):
    def twice():
        try:
            signal.raise_signal(signal.SIGTERM)
        except Terminated:
            signal.raise_signal(signal.SIGINT)
            raise

    with pytest.raises(SystemExit) as ended, ended_by_signals():
        twice()
    assert ended.value.code == 143


def test_who_ignores_a_signal_goes_on_to(as_it_was):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with ended_by_signals():
        signal.raise_signal(signal.SIGINT)


def test_signals_are_held_back_from_what_is_started(as_it_was):
    ask = "import signal; print(*signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
    told = []

    def interrupted():
        with signals_blocked(signal.SIGINT):
            signal.raise_signal(signal.SIGINT)
            told.append(subprocess.run([sys.executable, "-c", ask], capture_output=True).stdout)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert b"SIGINT" in told[0] or told[0].split() == [b"2"]


# Ranks


TRAIN = (ROOT / "scripts" / "train.py", *CLINICAL, "trainer.devices=2")


def further_ranks(process: Started) -> list[int]:
    """Returns the children that were started as ranks; Git, asked for the commit, is another."""
    tasks = Path(f"/proc/{process.pid}/task").glob("*/children")
    found = [int(child) for task in tasks for child in task.read_text().split()]
    return [c for c in found if b"LOCAL_RANK=1" in Path(f"/proc/{c}/environ").read_bytes()]


@pytest.mark.promise("a dead rank")
@pytest.mark.skipif(not Path("/proc/self/environ").is_file(), reason="needs Linux")
def test_a_dead_rank_ends_the_others_and_they_come_to_what_one_device_comes_to(finished, tmp_path):
    folder = tmp_path / "run"
    first = Started(*TRAIN, f"hydra.run.dir={folder}")
    further: list[int] = []
    while not further:
        assert first.poll() is None, first.told()
        with suppress(OSError):  # what has ended in the meantime
            further = further_ranks(first)
    os.kill(further[0], signal.SIGKILL)
    _, error = first.communicate(timeout=240)
    assert first.returncode == 1
    assert error == (
        "error: Rank 1 ended by signal 9, so that the other ranks were stopped; continue with the "
        f"same command and resume={folder}.\n"
    )
    again = ranks(*TRAIN, f"resume={folder}")
    errors = [rank.communicate(timeout=200)[1] for rank in again]
    assert [rank.returncode for rank in again] == [0, 0], "\n".join(errors)
    assert outcome(folder) == outcome(finished)


def test_sigterm_ends_the_other_ranks_at_once():
    """Lightning passes it on by this function, and would then wait for them to hear of it."""
    launcher = Launcher(LightningEnvironment(), 2, 1)
    launcher.procs = [subprocess.Popen(["sleep", "10000"])]
    assert launcher.failed() is None
    with pytest.raises(Terminated):
        launcher.kill(signal.SIGTERM)
    assert launcher.procs[0].returncode == -signal.SIGKILL


def test_the_thread_that_watches_ranks_ends_with_them(monkeypatch):
    """It used to watch for ever, and ended the process if a rank failed after the run."""
    launcher, code = Launcher(LightningEnvironment(), 2, 1), "import sys; sys.stdin.read()"
    rank = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    for name in ("LOCAL_RANK", "MEDFED_PARENT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launcher, "_call_children_scripts", lambda: launcher.procs.append(rank))
    launcher.launch(lambda: None)
    assert launcher._watching.is_alive()
    rank.stdin.close()
    launcher.join()
    assert rank.returncode == 0
    assert not launcher._watching.is_alive()


def test_a_rank_does_not_outlive_the_first():
    code = "import time; from medfed.common.processes import end_with_parent as e; e(); "
    gone = {**os.environ, "MEDFED_PARENT": "1" if os.getpid() != 1 else "2"}
    command = [sys.executable, "-c", code + "time.sleep(10_000)"]
    assert subprocess.run(command, env=gone, cwd=ROOT, timeout=240).returncode == 1


# What a kill leaves


def test_partial_files_of_dead_processes_are_removed(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    write_text(tmp_path / "known", "")  # this process has looked at this folder
    names = {}
    for pid in (dead.pid, os.getppid()):
        code = (
            "import os, sys; from pathlib import Path; from medfed.standalone import files;"
            f"os.getpid = lambda: {pid}; files._is_running = lambda _: True\n"
            f"with files.replacing(Path({str(tmp_path / 'a')!r})) as p: p.touch(); os._exit(0)"
        )
        before = set(tmp_path.iterdir())
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
        (names[pid],) = set(tmp_path.iterdir()) - before
    code = "from pathlib import Path; from medfed.standalone.files import write_text; import sys;"
    code += "write_text(Path(sys.argv[1]), '')"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "b")], check=True, cwd=ROOT)
    assert not names[dead.pid].exists()
    assert names[os.getppid()].exists()


def test_a_kill_after_the_last_checkpoint_leaves_no_older_ones(finished, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(RoundCheckpoint, "_forget", lambda _: None)
        patch.setattr(results, "write", lambda *_: ({}, None))
        run(folder, *CLINICAL)
    assert len(rounds_in(folder / "checkpoints")) == 3
    resume(folder, *CLINICAL)
    names = [name for name in left_in(finished) if name.startswith("checkpoints")]
    assert [name for name in left_in(folder) if name.startswith("checkpoints")] == names
    assert outcome(folder) == outcome(finished)
