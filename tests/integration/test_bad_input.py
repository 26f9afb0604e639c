"""Whatever a user gets wrong is answered in one sentence, and nothing half-written is left."""

from __future__ import annotations

import logging
import re
import shutil
import sys

import pytest
import torch

from medfed.commands.sentences import one_sentence
from medfed.config.compose import load
from medfed.datamodules.generated.brats import BratsCohort
from medfed.federation.lightning.checkpoint import is_whole, last_whole, rounds_in
from medfed.federation.local_client import LocalClient
from medfed.models.classification import RiskTask
from medfed.records.places import check_made
from medfed.standalone.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MedfedError,
    NonFiniteError,
)
from tests.integration.runs import CLINICAL, imaging, left_in, outcome, resume, run, script
from tests.processes import ROOT, ranks
from tests.sweeps import sweep

EDGES = "algorithm.graph.kind=edges algorithm.graph.edges="
CASES = {
    # Options, keys and values that do not exist
    "algorithm=pfednett": "Unknown algorithm 'pfednett' (did you mean pfednet",
    "data=breast": "Unknown data 'breast' (did you mean brats, breast_cancer",
    "codec@codec.up=fp46": "Unknown codec 'fp46' (did you mean fp64, fp16, fp32?)",
    "codec.up=fp46": "Unknown codec 'fp46' (did you mean fp64, fp16, fp32?); choose one of",
    "codec.up=3.5": "codec.up=3.5 would replace a whole section; choose an option by codec.up=",
    "codec=fp32": "'codec' is no group; set codec.up, codec.down, such as codec.up=fp32",
    "local=3": "local=3 would replace a whole section; set one of its keys",
    "algoritm=fedavg": "Unknown key 'algoritm' (did you mean algorithm",
    "round=3": "Unknown key 'round' (did you mean rounds",
    "local.step=3": "Unknown key 'local.step' (did you mean steps?); local has steps, epochs,",
    "algorithm.graph.neighbors=2": "'algorithm.graph.neighbors' (did you mean neighbours?)",
    "+trainer.gpus=1": "trainer cannot be used as it is: Trainer.__init__() got an unexpected",
    "+optimizer.foo=1": "scheduler cannot be used as it is: SGD.__init__() got an unexpected",
    "algorithm.weighting=sample": "algorithm.weighting='sample' is unknown; choose samples or",
    "buffers=average": "buffers='average' is unknown (did you mean averaged?); choose one",
    "algorithm.p=3": "p is 3, but a norm here has p = 1, 2 or inf",
    "algorithm.graph.kind=knnn": "algorithm.graph.kind='knnn' is unknown (did you mean knn?)",
    "algorithm.graph.sketch=datas": "sketch='datas' is unknown (did you mean data?)",
    "algorithm.z_step=half": "algorithm.z_step='half' is unknown; choose scaled or literal",
    "local.optimizer_state=old": "local.optimizer_state='old' is unknown; choose ",
    "local.optimizer_state=averaged": "averaged does not go with this: PFedNet does not send",
    "algorithm=fedavg local.optimizer_state=averaged channel.secure=masks": "masks clips their",
    "algorithm=fedavg local.optimizer_state=averaged privacy.client={sigma:1,delta:1e-3,clip:1}": (
        "privacy.client adds noise to displacements alone; choose local.optimizer_state=kept"
    ),
    "evaluation.normalization=old": "evaluation.normalization=",
    "model.class_weights=equal": "model.class_weights='equal' is unknown",
    "model.selection=[auroc2,max]": "model.selection='auroc2' is unknown (did you mean auroc",
    "channel.up.gamma=1": "Unknown key 'channel.up.gamma'; channel.up has cer, feedback, shift,",
    "channel.up.cer=true": "channel.up.cer=True would replace a whole section; set one",
    "channel.up.parts=[share]": "channel.up.parts names 'share', which never travels (did you mean",
    "channel.down.parts=shared": "; write channel.down.parts=[shared].",
    "channel.up.shift=0.5 channel.up.feedback=true": "channel.up.feedback=true and channel.",
    # Numbers that cannot be
    "channel.up.cer.gamma=-1": "cer.gamma must be 0 or more, not -1.",
    "channel.up.cer.gamma=big": "channel.up.cer.gamma must be a number, not 'big'.",
    "channel.up.feedback=yes": "channel.up.feedback must be true or false or null, not 'yes'.",
    "channel.down.shift=2": "channel.down.shift must be auto, a step in (0, 1] or null, not 2.",
    "channel.down.zstd=30": "channel.down.zstd must be a level from 1 to 22 or null, not 30.",
    "rounds=0": "rounds must be a whole number of at least 1, not 0.",
    "rounds=many": "rounds must be a whole number, not 'many'.",
    "seed=null": "seed must be a whole number, not None.",
    "threads=0": "threads must be a whole number of at least 1, not 0.",
    "evaluation.patience=0": "evaluation.patience must be a whole number of at least 1, not 0.",
    "evaluation.every=4": "evaluation.every=4 is more than rounds=3, so validation could select no",
    "checkpoint.every=0.5": "checkpoint.every must be a whole number, not 0.5.",
    "local.steps=0": "local.steps must be in [1, 1000000000], not 0.",
    "local.steps=many": "local.steps must be a whole number or null, not 'many'.",
    "local.clip=0": "local.clip must be positive, not 0",
    "local.resident_gib=-1": "local.resident_gib must not be negative, not -1",
    "cohort.fraction=half": "cohort.fraction must be a number, not 'half'.",
    "algorithm.strength=-1": "algorithm.strength must not be negative, not -1",
    "algorithm=fedprox algorithm.mu=big": "algorithm.mu must be a number, not 'big'.",
    "optimizer.lr=-1": "The optimizer or its scheduler cannot be used as it is: Invalid learning",
    "optimizer={_target_:torch.optim.LBFGS,lr:1}": "The optimizer or its scheduler cannot be used "
    "as it is: LBFGS.step() missing 1 required",
    "scheduler={_target_:torch.optim.lr_scheduler.OneCycleLR,max_lr:1,total_steps:9}": "as it is: "
    "OneCycleLR changes momentum, but a schedule may only",
    "model.loss={_target_:torch.nn.NLLLoss}": "model.loss=NLLLoss does not take logits, of which",
    "model.metrics={a:{_target_:monai.metrics.ROCAUCMetric}}": "model.metrics has ROCAUCMetric "
    "without a direction; add direction: max or min.",
    "scheduler=step scheduler.step_size=0": "scheduler cannot be used as it is: integer modulo",
    "data.batch_size=0": "data.batch_size must be in [1, 2147483647], not 0.",
    "trainer.devices=0": "trainer.devices=0 cannot be used; give a number of at least 1, or on",
    "trainer.precision=16-mixed": "trainer.precision=16-mixed is for GPUs; choose bf16-mixed on",
    # Names that fit nothing
    "algorithm.personal=network.linear": "The personal pattern 'network.linear' matches no "
    "parameter (did you mean linear.*?).",
    f"{EDGES}[[hospital_0,hospital_1],[hospital_1,hospital_9]]": "The graph names client "
    "'hospital_9', which does not take part (did you mean hospital_4",
    f"{EDGES}[[hospital_0,hospital_1],[hospital_1,hospital_2]]": "The graph lacks client "
    "'hospital_3' and 1 more",
    "algorithm.graph.kind=edges": "algorithm.graph.edges goes with algorithm.graph.kind=edges.",
    "cohort.clients=[hospital_9]": "cohort.clients='hospital_9' is unknown (did",
    "cohort.clients=[]": "cohort.clients is an empty list; name a client or set it to null.",
    "algorithm=fedbn": "personal=normalization finds no normalisation layer with parameters",
    # Data
    "data=csv data.path=/no/such.csv": "/no/such.csv does not exist; set data.path to",
    "data=csv": "data.path has no value yet; set it by data.path=VALUE.",
    "partition=round_robin partition.num_clients=570": "num_clients=570 does not fit 569 patients",
    "partition.num_clients=570": "num_clients=570 does not fit 569 patients",
    "partition=centre": "has no centre; name each one's centre in the data, as docs/data.md",
    "out_channels=5": "out_channels is 5, but the data have 2; leave it at null.",
    "in_channels=3": "in_channels is 3, but the data have 30; leave it at null.",
    "spatial_dims=4": "spatial_dims is 4, but the data have 2; leave it at null.",
    "patch_size=[0,0]": "patch_size is for segmentation by windows; leave it at null.",
    "model=densenet_bc": "The model cannot take the batches of these data (image (32, 30)",
}


def one(sentence: str) -> bool:
    return (
        "\n" not in sentence and "Traceback" not in sentence and len(sentence) < 700
    )  # with the names of fifty methods


@sweep(("overrides", "message"), CASES.items())
def test_clinical(overrides, message, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(MedfedError) as caught:
        run(folder, *CLINICAL, *overrides.split())
    assert message in str(caught.value)
    assert one(str(caught.value))
    assert not folder.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(tmp_path):
    with pytest.raises(ConfigError, match="accelerator=gpu finds no GPU on this machine; choose"):
        run(tmp_path / "run", *CLINICAL, "trainer=gpu")
    assert not (tmp_path / "run").exists()


IMAGING = {
    "data.path=/no/such/folder": "/no/such/folder does not exist; set data.path to a",
    "partition.preset=lack_k partition.channel=FLARE partition.clients=[0]": "Unknown channel "
    "FLARE; known: FLAIR, T1w, T1gd, T2w (did you mean FLAIR?).",
    "partition.preset=rotat": "partition.preset='rotat' is unknown (did you mean rotate?); choose",
    "partition.preset=lack_k partition.channel=T1w partition.clients=[bern]": "Unknown client "
    "bern; known: hospital_0, hospital_1",
    "patch_size=[0,0]": "patch_size=[0, 0] must be 2 positive numbers, or null.",
    "patch_size=[8,8,8]": "patch_size=[8, 8, 8] must be 2 positive numbers, or null.",
    "data.reader.channels=[FLAIR,T9]": "Unknown channel T9; known: FLAIR, T1w, T1gd, T2w",
    "data.reader.regions=[hole]": "Unknown region hole; known: whole, core, enhancing",
    "partition=centre partition.centres=[Bern]": "Unknown centre Bern; known: hospital_0, hospital",
    "data.patch_size=[15,16]": "The model cannot take the batches of these data (image (4, 4, 15",
    "data.spatial_dims=3": "does not fit data.spatial_dims=3",
    "algorithm.personal=up": "The personal pattern 'up' matches no parameter; there are",
}


@pytest.mark.parametrize(("overrides", "message"), IMAGING.items())
def test_imaging(overrides, message, tmp_path, cohort_root):
    folder = tmp_path / "run"
    with pytest.raises(MedfedError) as caught:
        run(folder, *imaging(cohort_root), *overrides.split())
    assert message in str(caught.value)
    assert one(str(caught.value))
    assert not folder.exists()


def test_a_truncated_volume_is_named(tmp_path, cohort_root):
    cohort = BratsCohort(hospitals=2, patients=4, shape=(32, 32, 8)).ensure(cohort_root)[0]
    path = tmp_path / "copy"
    shutil.copytree(cohort, path)
    torn = sorted((path / "imagesTr").glob("*.nii.gz"))[2]
    torn.write_bytes(torn.read_bytes()[: torn.stat().st_size // 2])
    with pytest.raises(DataError, match=f"{torn.name} is truncated or corrupt"):
        run(tmp_path / "run", *imaging(cohort_root), f"data.path={path}")
    assert not (tmp_path / "run").exists()


# A run that fails on its way, and checkpoints that are not as they were.


@pytest.fixture(scope="module")
def straight(finished_run):
    return finished_run(*CLINICAL)


def bad_loss(monkeypatch):
    loss, calls = RiskTask.loss, []

    def broken(self, batch):
        calls.append(1)
        # One forward pass tries the model; a round has 5 clients with 2 steps.
        return loss(self, batch) * (float("nan") if len(calls) == 1 + 10 + 2 * 2 + 1 else 1.0)

    monkeypatch.setattr(RiskTask, "loss", broken)


def bad_reply(monkeypatch):
    train = LocalClient.train

    def broken(self, start, **options):
        end = train(self, start, **options)
        if (self.id, self._round) == ("hospital_2", 1):
            end = {n: t / 0 for n, t in end.items()}
        return end

    monkeypatch.setattr(LocalClient, "train", broken)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (bad_loss, "the training loss became NaN or infinite; lower optimizer.lr or set local."),
        (bad_reply, "personal/linear.weight holds NaN or infinity"),
    ],
)
def test_a_number_that_is_not_finite_stops_the_round(damage, what, tmp_path, straight):
    folder = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        damage(patch)
        with pytest.raises(NonFiniteError) as caught:
            run(folder, *CLINICAL)
    assert str(caught.value).startswith(f"Client hospital_2, round 2, phase personal: {what}")
    assert one(str(caught.value))
    # The round before is whole, and the run goes on from there as if nothing had happened.
    good = last_whole(folder / "checkpoints")
    assert good is not None
    assert good.name == "round_00000.ckpt"
    assert torch.load(good, weights_only=True)["federation"]["next_round"] == 1
    assert not any("partial" in name or "summary" in name for name in left_in(folder))
    resume(folder, *CLINICAL)
    assert outcome(folder) == outcome(straight)


def tear(path):
    path.write_bytes(path.read_bytes()[:-50])


def test_the_checkpoint_before_a_torn_one_is_used(tmp_path, straight, caplog):
    folder = tmp_path / "run"
    shutil.copytree(straight, folder)
    tear(rounds_in(folder / "checkpoints")[-1])
    with caplog.at_level(logging.WARNING):
        resume(folder, *CLINICAL)
    assert "round_00002.ckpt is damaged or unfinished; the run uses the checkpoint" in caplog.text
    assert outcome(folder) == outcome(straight)


def test_only_torn_checkpoints(tmp_path, straight):
    folder = tmp_path / "run"
    shutil.copytree(straight, folder)
    for path in rounds_in(folder / "checkpoints"):
        tear(path)
    with pytest.raises(CheckpointError, match=r"Every checkpoint in .* is damaged; start the run"):
        resume(folder, *CLINICAL)


def test_a_checkpoint_of_another_federation(tmp_path, straight):
    folder = tmp_path / "run"
    other = ("partition.num_clients=4", "algorithm.graph.neighbours=2")
    run(folder, *CLINICAL, "rounds=1", *other)
    checkpoint = rounds_in(straight / "checkpoints")[0]
    shutil.rmtree(folder / "checkpoints")
    shutil.copytree(checkpoint.parent, folder / "checkpoints")
    with pytest.raises(CheckpointError, match=r"is of PFedNet with the clients .*_4, the run is"):
        resume(folder, *CLINICAL, "rounds=1", *other)


def test_a_changed_configuration(straight, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(straight, folder)
    before = left_in(folder)
    changed = r"another configuration \(local.steps: 2 -> 3\); start a new run, or resume with the"
    with pytest.raises(CheckpointError, match=changed):
        resume(folder, *CLINICAL, "local.steps=3")
    (folder / "overrides.yaml").write_text(
        "- experiment=clinical_pfednet\n- data.label=two words\n"
    )
    again = f"by medfed train experiment=clinical_pfednet 'data.label=two words' resume={folder}"
    with pytest.raises(CheckpointError, match=re.escape(again)):
        resume(folder, *CLINICAL, "local.steps=3")
    (folder / "overrides.yaml").unlink()
    assert left_in(folder) == before
    assert all(is_whole(p) for p in rounds_in(folder / "checkpoints"))


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(CheckpointError, match=r"is no run folder \(it has no config.yaml\)"):
        resume(tmp_path / "nowhere", *CLINICAL)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("key", "file"),
    [("run", "config.yaml"), ("resume", "config.yaml"), ("bundle", "configs/metadata.json")],
)
def test_a_folder_near_the_one_that_a_command_needs_hears_its_name(key, file, tmp_path):
    place = tmp_path / "bundles" / "Basel, West"
    (place / file).parent.mkdir(parents=True)
    (place / file).touch()
    check_made({key: place})
    for wrong in (tmp_path, place.parent, place / "models", place / file):
        with pytest.raises(CheckpointError, match=re.escape(f"(it has no {file}); name {place}.")):
            check_made({key: wrong})


# The command line itself.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["algorithm=fedavgg"], "Unknown algorithm 'fedavgg' (did you mean fedavg"),
        (["resume=nowhere"], "resume=nowhere is no run folder (it has no config.yaml)"),
        (["-m", "algorithm=fedavg,fedprx"], "Unknown algorithm 'fedprx' (did you mean fedprox"),
        (["rounds"], "'rounds' is no override; write key=value."),
    ],
)
def test_mistakes_are_answered_before_hydra_starts(arguments, message, tmp_path):
    done = script(*arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: {message}")
    assert done.stderr.count("\n") == 1
    assert left_in(tmp_path) == []


def test_a_sweep_over_ranks_is_refused(tmp_path):
    done = script("-m", *CLINICAL, "seed=0,1", "trainer=ddp", cwd=tmp_path)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line]
    assert lines == [
        "error: -m cannot be combined with trainer.devices=2; sweep with one rank per run, or "
        "start the runs one by one."
    ]
    assert "Traceback" not in done.stdout


def test_a_loss_that_is_not_finite_ends_every_rank(tmp_path):
    folder = tmp_path / "run"
    rates = (
        "optimizer.lr=0.01",
        "scheduler=step",
        "scheduler.step_size=1",
        "scheduler.gamma=1e20",
        "optimizer.weight_decay=0.01",
    )
    keys = (
        *CLINICAL,
        *rates,
        "rounds=2",
        "local.steps=9",
        "trainer=ddp",
        f"hydra.run.dir={folder}",
    )
    both = ranks(ROOT / "scripts" / "train.py", *keys)
    first, second = (rank.communicate(timeout=200)[1] for rank in both)
    assert [rank.returncode for rank in both] == [1, 1]
    assert second == ""
    assert first == (
        "error: Client hospital_0, round 2, phase personal: the training loss became NaN or "
        "infinite; lower optimizer.lr or set local.clip.\n"
    )
    good = last_whole(folder / "checkpoints")
    assert good is not None
    assert good.name == "round_00000.ckpt"
    assert not (folder / "summary.json").exists()


def test_the_sentence_and_the_exit_code(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(SystemExit) as stopped, one_sentence():
        load(["rouds=1"])
    assert stopped.value.code == 1
    assert capsys.readouterr().err.startswith("error: Unknown key 'rouds' (did you mean rounds")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ConfigError, match="Unknown key 'rouds'"), one_sentence():
        load(["rouds=1"])


def test_ranks_do_not_repeat_what_stops_them_all(capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    for error, said in ((NonFiniteError("a"), ""), (DataError("b"), "error: b\n")):
        with pytest.raises(SystemExit), one_sentence():
            raise error
        assert capsys.readouterr().err == said
