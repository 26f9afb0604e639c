"""Two machines over loopback, by torchrun and as SLURM would start them: what one process gives."""

from __future__ import annotations

import sys

import pytest
import torch
from omegaconf import OmegaConf
from pytorch_lightning.plugins.environments import LightningEnvironment

from medfed.commands.train import check as check_train
from medfed.common.processes import launched, number
from medfed.config.compose import described, load
from medfed.config.description import describe
from medfed.federation.lightning.strategy import ClientSharding, environment
from medfed.run import claim
from medfed.run.claim import SameEverywhere
from medfed.standalone.errors import ConfigError, DataError
from tests.integration.runs import CLINICAL, ROOT, outcome
from tests.processes import Started, free_port

TRAIN = str(ROOT / "scripts" / "train.py")
TWO = ("trainer=ddp", "trainer.devices=1", "trainer.num_nodes=2")
SLURM = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "medfed", "SLURM_NODELIST": "127.0.0.1"}


@pytest.fixture(scope="module")
def alone(finished_run):
    return outcome(finished_run(*CLINICAL))


def ended(started: list[Started]) -> None:
    told = [p.communicate(timeout=200) for p in started]
    assert [p.returncode for p in started] == [0] * len(started), told


# What torchrun does on a machine, but that its agent forks instead of importing all once more.
AGENT = """
import runpy, sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

rank, meet, *sys.argv = sys.argv[1:]
config = LaunchConfig(
    min_nodes=2, max_nodes=2, nproc_per_node=1, start_method="fork", rdzv_backend="static",
    rdzv_endpoint=meet, rdzv_configs={"rank": int(rank), "timeout": 240}, run_id="none",
)
elastic_launch(config, runpy.run_path)(sys.argv[0], None, "__main__")
"""


def test_two_machines_of_torchrun(alone, tmp_path):
    meet, agent = f"127.0.0.1:{free_port()}", tmp_path / "agent.py"
    agent.write_text(AGENT)
    words = [meet, TRAIN, *CLINICAL, *TWO, f"hydra.run.dir={tmp_path / 'run'}"]
    ended([Started(agent, str(n), *words, cwd=ROOT) for n in range(2)])
    assert outcome(tmp_path / "run") == alone


def test_two_machines_of_slurm_with_two_ranks_on_each_device(alone, tmp_path, monkeypatch):
    words = [*CLINICAL, *TWO, "trainer.strategy.ranks_per_device=2"]
    told = {**SLURM, "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "2"}
    told |= {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "MASTER_PORT": free_port()}
    started = []
    for n in range(4):
        own = {"SLURM_PROCID": n, "SLURM_NODEID": n // 2, "SLURM_LOCALID": n % 2}
        for name, value in {**told, **own}.items():
            monkeypatch.setenv(name, str(value))
        started.append(Started(TRAIN, *words, f"hydra.run.dir={tmp_path / 'run'}", cwd=ROOT))
    ended(started)
    assert outcome(tmp_path / "run") == alone


# What cannot be

FOUR = {"TORCHELASTIC_RUN_ID": "none", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
STEP = {**SLURM, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "3"}


@pytest.mark.parametrize("words", ["", "trainer.devices=4", "trainer.num_nodes=2"])
@pytest.mark.parametrize("told", [FOUR, STEP], ids=["torchrun", "srun"])
def test_more_or_fewer_processes_than_the_run_takes(told, words, monkeypatch):
    config = load([*CLINICAL, "trainer=ddp"])
    OmegaConf.set_struct(config, False)
    config.trainer.devices = 1
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    merged = OmegaConf.merge(config, OmegaConf.from_dotlist(words.split()))
    if told is STEP and not words:
        describe(merged)  # srun may start runs that have nothing to do with each other
        assert number() == 0
        return
    with pytest.raises(ConfigError, match=r"has started 4 processes on 2 machines, .* set trainer"):
        describe(merged)


def test_ranks_share_a_folder_that_the_user_names(monkeypatch):
    for name, value in {**STEP, "SLURM_STEP_NUM_TASKS": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "0")  # and put back
    config = described([*CLINICAL, *TWO])
    monkeypatch.setattr(sys, "argv", ["train.py", *CLINICAL])
    with pytest.raises(ConfigError, match=r"srun has started 2 processes, .* hydra\.run\.dir=FOLD"):
        check_train([config], False)
    monkeypatch.setattr(sys, "argv", ["train.py", "hydra.run.dir=x"])
    check_train([config], False)
    assert number() == 3


def test_the_script_of_a_slurm_job_starts_its_own_ranks(monkeypatch):
    """Lightning would take it for one of several that srun has started, and wait for ever."""
    assert environment(True) is None
    for name, value in {**SLURM, "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    assert launched() is None
    assert isinstance(environment(True), LightningEnvironment)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(ConfigError, match="Use `--ntasks-per-node=4` instead"):
        environment(True)


def test_several_ranks_on_a_device_exchange_by_gloo():
    shared = ClientSharding(ranks_per_device=2)
    shared.parallel_devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert [d.index for d in shared.parallel_devices or ()] == [0, 0, 1, 1]
    assert shared.num_processes == 4
    assert shared.process_group_backend == "gloo"
    assert ClientSharding().process_group_backend is None
    with pytest.raises(ConfigError, match="ranks_per_device must be 1 or more, not 0"):
        ClientSharding(ranks_per_device=0)


@pytest.mark.parametrize(
    ("part", "sentence"), [("folder", "see the run"), ("data", "differ from those of rank 0")]
)
def test_machines_that_do_not_share_what_they_must(part, sentence, tmp_path, monkeypatch):
    class Machines:
        num_nodes = world_size = 2
        device = torch.device("cpu")

        def splits(self) -> dict[str, str]:
            return {}

    (tmp_path / "config.yaml").touch()
    here = Machines()

    def gathered(own):
        folder, data = own
        return [own, (False, data) if part == "folder" else (folder, b"other")]

    monkeypatch.setattr(claim, "gathered", gathered)
    with pytest.raises(DataError, match=f"machine of rank 1 .*{sentence}"):
        SameEverywhere(tmp_path, here).on_fit_start(here, here)
