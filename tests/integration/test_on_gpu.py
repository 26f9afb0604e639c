"""Whole runs on a GPU, from training to prediction: what a CPU gives, to rounding.

On one CPU core each of these runs takes .5 to .8 CPU seconds, lesions 1.6 to 2.4, and what
`tests/federation/test_gpu.py` compares 1.3. With the starts of CUDA, and of the two ranks, all
tests of a GPU should end in three minutes, after one in which pytest collects them: an estimate.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from medfed.common.untrusted import read_tensors
from tests.integration.runs import CLINICAL, ROOT, imaging, resume, run
from tests.integration.test_detection import QUICK
from tests.sweeps import sweep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),  # of operations that have no deterministic kernel
]
RUNS = {
    "patients of a table": (*CLINICAL, "experiment=clinical_pfednet"),
    "patches": imaging,
    "patches, classes mixed by PPFL": lambda root: (*imaging(root), "algorithm=ppfl"),
    "patches, mixed precision": lambda root: (*imaging(root), "trainer.precision=bf16-mixed"),
    "lesions": lambda root: (*QUICK, f"data.root={root}"),
}


@sweep("name", RUNS)
def test_a_run_gives_what_it_gives_on_a_cpu(name, tmp_path):
    words = RUNS[name] if isinstance(RUNS[name], tuple) else RUNS[name](tmp_path / "data")
    models, ledgers = {}, {}
    for trainer in ("gpu", "cpu"):
        folder = tmp_path / trainer
        run(folder, *words, f"trainer={trainer}", "optimizer=sgd", "optimizer.lr=0.01")
        files = sorted((folder / "models").glob("*.safetensors"))
        models[trainer] = {f"{p.stem}/{n}": t for p in files for n, t in read_tensors(p).items()}
        ledgers[trainer] = (folder / "ledger.csv").read_text()
        with (folder / "metrics.csv").open() as file:
            assert [*csv.DictReader(file)]
    assert ledgers["gpu"] == ledgers["cpu"]
    assert models["cpu"]
    rough = 0.02 if "mixed precision" in name else 0.002
    for entry, value in models["cpu"].items():
        torch.testing.assert_close(models["gpu"][entry], value, rtol=rough, atol=rough)


def test_a_stopped_run_goes_on_and_ranks_share_the_gpu(tmp_path):
    words = (*CLINICAL, "trainer=gpu")
    run(tmp_path / "straight", *words)
    shutil.copytree(tmp_path / "straight", tmp_path / "again")
    for path in (
        (tmp_path / "again") / "summary.json",
        *tmp_path.glob("again/checkpoints/*00002*"),
    ):
        path.unlink()
    words = (*words, "local.resident_states=true")  # which changes no bit
    resume(tmp_path / "again", *words)
    two = ("trainer.strategy.ranks_per_device=2", f"hydra.run.dir={tmp_path / 'shared'}")
    # Not by the tests' forks: a process that has begun to use a GPU cannot be forked.
    script = [sys.executable, str(ROOT / "scripts" / "train.py")]
    how = {"cwd": ROOT, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    first = subprocess.Popen([*script, *words, *two], **how)
    try:
        errors = first.communicate(timeout=150)[1]
    finally:  # the other rank, too, which would keep the GPU
        with contextlib.suppress(ProcessLookupError):
            os.killpg(first.pid, signal.SIGKILL)
    assert first.returncode == 0, errors[-2000:]
    hashes = {f.name: json.loads((f / "hashes.json").read_text()) for f in tmp_path.iterdir()}
    assert hashes["straight"] == hashes["again"] == hashes["shared"]
