"""Sweeps: one by one, in processes, and by launchers of Hydra; a failed run ends no other."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from medfed.commands.main import main
from medfed.common import console
from medfed.common.processes import take_gpu, worker_pool
from medfed.config.spelling import workers_of
from medfed.config.sweeps import DIED, Sweep
from medfed.standalone.errors import ConfigError
from tests.integration.runs import ROOT

TABLE = (
    *("data=breast_cancer", "model=mlp", "partition=round_robin", "partition.num_clients=3"),
    *("algorithm=fedavg", "rounds=1", "local.steps=1", "pictures.format=none", "progress=false"),
)
RATES = "optimizer.lr=1e29,0.1,0.05"  # with the first of which the loss is infinite
NAMES = ["0_optimizer.lr-1e+29", "1_optimizer.lr-0.1", "2_optimizer.lr-0.05"]


def swept(folder: Path, *engine: str) -> int:
    """Runs the sweep, and returns its exit status."""
    with pytest.raises(SystemExit) as ended:
        main(["train", "-m", *TABLE, RATES, "logger=none", f"hydra.sweep.dir={folder}", *engine])
    return ended.value.code


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory):
    """A sweep whose folder has a name of a user's, and what its runs said."""
    folder = tmp_path_factory.mktemp("sweeps") / "my sweep, 1"
    capture = pytest.MonkeyPatch()
    said = {"out": [], "err": []}
    for name, lines in said.items():
        stream = type("Stream", (), {"write": lines.append, "flush": lambda: None})
        stream.isatty = staticmethod(lambda: False)
        capture.setattr(f"sys.std{name}", stream)
    status = swept(folder)
    capture.undo()
    return folder, status, "".join(said["out"]), "".join(said["err"])


def test_a_failed_run_ends_no_other_and_the_end_names_it(one_by_one):
    folder, status, out, err = one_by_one
    assert status == 1
    assert sorted(p.parent.name for p in folder.glob("*/summary.json")) == NAMES[1:]
    said, named = err.splitlines()
    assert said.endswith("lower optimizer.lr or set local.clip.")
    why = said.removeprefix("error: ")
    assert named == f"error: Run 0 of the sweep (optimizer.lr=1e+29) failed: {why}"
    once, last = out.splitlines()[-2:]
    assert once.startswith("Sentences that several runs say are printed once")
    assert last == f"2 of 3 runs are finished; compare them: medfed report 'runs={folder}'"
    assert json.loads((folder / NAMES[1] / "summary.json").read_text())


def test_a_run_has_a_line_and_what_all_runs_say_is_said_once(one_by_one):
    folder, _, out, _ = one_by_one
    lines = out.splitlines()
    for once in ("Data: ", "[low, high]: ", "Gradient steps per client", "Sent up"):
        assert sum(line.startswith(once) for line in lines) == 1, once
    assert sum("Before training" in line for line in lines) == 1
    begins = [
        f"Run {n} of the sweep: optimizer.lr={rate}" for n, rate in enumerate(("1e+29", 0.1, 0.05))
    ]
    assert [line for line in lines if line.startswith("Run ")] == begins
    results = [line for line in lines if line.startswith("fedavg: test ")]
    assert len(results) == 2
    for line, name in zip(results, NAMES[1:], strict=True):
        summary = json.loads((folder / name / "summary.json").read_text())
        metric, over = summary["selection"][0], summary["federation"][summary["selection"][0]]
        low, high = summary["intervals"]["mean"][metric]
        assert line == (
            f"fedavg: test {metric} {over['mean']:.4f} [{low:.3f}, {high:.3f}], worst hospital "
            f"{over['worst']:.4f}; in {folder / name}"
        )
    last = lines[lines.index(begins[2]) : -2]
    assert len(last) <= 4, last  # its values, its result, and what is new with its numbers


def test_the_command_that_the_end_names_takes_the_folder(one_by_one, capsys, tmp_path):
    folder = one_by_one[0]
    main(["report", str(folder), f"out={tmp_path}", "figures=false"])
    assert "lr=0.1" in capsys.readouterr().out
    assert (tmp_path / "comparison.csv").is_file()


def test_several_at_once_are_as_one_by_one(one_by_one, tmp_path, capfd):
    assert swept(tmp_path / "s", "sweep.workers=2") == 1
    assert sorted(p.name for p in (tmp_path / "s").glob("[0-9]*")) == NAMES
    for name in NAMES[1:]:
        expected = (one_by_one[0] / name / "hashes.json").read_text()
        assert (tmp_path / "s" / name / "hashes.json").read_text() == expected
    out, err = capfd.readouterr()
    assert out.splitlines()[-1].startswith("2 of 3 runs are finished; compare them: ")
    assert err.splitlines()[-1].startswith("error: Run 0 of the sweep (optimizer.lr=1e+29) failed")


def test_lines_of_several_runs_are_marked_and_facts_said_once(tmp_path, monkeypatch):
    monkeypatch.setenv(console.PRINTED, str(tmp_path))
    whole = io.StringIO()
    for number in (0, 1):
        monkeypatch.setattr("sys.stdout", whole)
        with console.as_run(f"[{number}] "):
            with console.only_news():
                print(f"Data: {9 + number} patients, {number / 3} of them women.")
                Console().print("two\nlines")
            print(f"Result {number}.")
            print("Sent 1 kB.")
    assert whole.getvalue().splitlines() == [
        *(
            "[0] Data: 9 patients, 0.0 of them women.",
            "[0] two",
            "[0] lines",
            "[0] Result 0.",
            "[0] Sent 1 kB.",
        ),
        *("[1] Result 1.", "[1] Sent 1 kB."),
    ]


def die(config):
    """A run that is killed in one of the combinations."""
    if config.seed == 1:
        os._exit(9)
    return ""


def wait(config):
    """A run that does not end by itself."""
    Path(config.name, str(os.getpid())).touch()
    time.sleep(600)
    return ""


def test_a_process_that_dies_ends_its_run_and_no_other():
    with Sweep([*TABLE, "seed=0,1,2,3"], "train", workers=1) as sweep:
        outcomes = {job.number: why for job, why in sweep.outcomes(die)}
    assert outcomes == {0: "", 1: DIED, 2: "", 3: ""}


def test_an_interrupt_ends_all_processes(tmp_path, request):
    def interrupt() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    overrides = [*TABLE, "seed=0,1,2", f"name='{tmp_path}'"]
    # A shell's background process ignores the signal, and so would this one.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with Sweep(overrides, "train", workers=2) as sweep:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            list(sweep.outcomes(wait))
    for process in [int(path.name) for path in tmp_path.iterdir()]:
        for _ in range(600):
            if not Path(f"/proc/{process}").exists():
                break
            time.sleep(0.05)
        assert not Path(f"/proc/{process}").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="forks are safe on Linux alone")
def test_a_process_has_loaded_what_runs_need_and_threads_of_libraries_work(tmp_path):
    environ = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    command = [sys.executable, "-m", "tests.integration.after_fork", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, check=True, timeout=600
    )
    state, sums = json.loads(done.stdout)
    assert state == {
        "loaded": True,
        "threads of the server": 1,
        "folder": str(tmp_path),
        "threads": 1,
        "cuda": False,
    }
    assert sums == [512.0**3, 512.0**3, 22.0**3 * 27, 512.0 * 512 - 2 * 512 + 1]


def gpu(barrier):
    """What a process sees once it and the others have taken their GPUs."""
    take_gpu()
    barrier.wait(60)
    return os.environ["CUDA_VISIBLE_DEVICES"]


def test_each_process_takes_a_gpu_of_its_own_while_there_are_some(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-8a")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with multiprocessing.get_context("spawn").Manager() as manager:
        barrier = manager.Barrier(3)
        with worker_pool(3) as pool:
            futures = [pool.submit(gpu, barrier) for _ in range(3)]
            assert sorted(f.result()[0] for f in futures) == ["3", "3", "G"]


def test_an_experiment_s_settings_of_a_method_hold_in_a_sweep(tmp_path):
    given = ["experiment=heart_flamby", "algorithm=fedavg,local", "optimizer.lr=0.5"]
    with Sweep([*given, f"data.path='{tmp_path}'"], "train") as sweep:
        fedavg, local = (sweep.composed(job) for job in sweep.jobs)
    assert fedavg[1].local.epochs is None or fedavg[1].local.epochs != 50
    assert (local[1].local.epochs, local[1].rounds) == (50, 1)
    assert "optimizer=adam" in local[0]
    assert local[1].optimizer.lr == 0.5  # the command line wins


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("sweep.workers=0", "sweep.workers must be a whole number from 1 to 64, not 0."),
        ("sweep.workers=two", "sweep.workers must be a whole number from 1 to 64, not two."),
        ("sweep.worker=2", r"Unknown key 'sweep.worker' \(did you mean sweep.workers\?\)"),
    ],
)
def test_what_runs_a_sweep_is_chosen_by_known_words(words, sentence):
    with pytest.raises(ConfigError, match=sentence):
        workers_of(words.split())


@pytest.mark.parametrize("word", ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"])
def test_who_asks_for_a_launcher_of_hydra_is_told_of_the_workers(word, capsys):
    with pytest.raises(SystemExit):
        main(["train", "-m", *TABLE, "seed=0,1", word])
    assert "run several at once by sweep.workers=N" in capsys.readouterr().err


def test_parallel_runs_without_a_sweep_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["train", *TABLE, "sweep.workers=2"])
    assert capsys.readouterr().err == (
        "error: sweep.workers=2 is for a sweep; add -m, or leave sweep.workers=2 out.\n"
    )
