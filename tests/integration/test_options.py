"""Every switch of a run does what it says, on small runs of the shipped experiments."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections import defaultdict
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch

from medfed.federation.engine.loop import LocalTrainer
from medfed.federation.lightning.checkpoint import last_whole
from medfed.federation.lightning.module import FederatedModule
from medfed.federation.reference import run_reference
from medfed.models.classification import ClassificationTask
from medfed.models.networks.densenet import densenet_bc
from medfed.personalize.fedavg import FedAvg
from medfed.run.evaluation import evaluate_run
from medfed.standalone.files import json_text
from tests import processes
from tests.integration.runs import (
    CLINICAL,
    IMAGING,
    ROOT,
    imaging,
    left_in,
    outcome,
    resume,
    run,
)
from tests.toys import ToyData, toy_federation

SHARED = Path(os.environ.get("MEDFED_SHARED", ROOT.parent / "shared"))
SIX = SHARED / "data" / "brats2018"


def models(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    paths = sorted((folder / "models").glob("*.safetensors"))
    return {p.stem: safetensors.torch.load_file(p) for p in paths}


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


# Rounds


def test_early_stopping_and_its_resume(tmp_path):
    folder = tmp_path / "run"
    patient = (*CLINICAL, "rounds=6", "optimizer.lr=0", "evaluation.patience=1")
    summary, _ = run(folder, *patient)
    assert summary["rounds"] == 2  # the second evaluation is no better than the first
    assert summary["selected_round"] == 0
    straight = outcome(folder)
    for name in ("summary.json", "hashes.json", "metrics.csv", "ledger.csv"):
        (folder / name).unlink()
    shutil.rmtree(folder / "models")
    resume(folder, *patient)
    assert outcome(folder) == straight


def test_evaluation_of_every_second_round(tmp_path):
    summary, experiment = run(tmp_path, *CLINICAL, "rounds=5", "evaluation.every=2")
    assert {r.round for r in experiment.evaluation.history} == {1, 3}
    assert summary["selected_round"] in (1, 3)
    assert summary["rounds"] == 5


def test_the_end_of_a_run_says_what_validation_did(tmp_path, capsys):
    rising = ("rounds=8", "local.steps=1", "optimizer.lr=0.01")
    fast = (*CLINICAL, "algorithm=finetune", "logger=none", "model.selection=[loss,min]")
    summary, _ = run(tmp_path / "rising", *fast, *rising)
    assert summary["improving"]
    assert "Validation loss was still improving when the run ended: set" in capsys.readouterr().out
    harm = ("rounds=4", "optimizer.lr=0", "algorithm.local_share=0.75")
    summary, _ = run(tmp_path / "harm", *fast, *harm)
    assert not summary["improving"]
    assert (summary["selected_round"], summary["first_local"]) == (0, 1)
    assert "before fine-tuning began in round 2: the tested models" in capsys.readouterr().out


def test_a_fraction_of_the_clients(tmp_path):
    _, experiment = run(tmp_path, *CLINICAL, "algorithm=fedavg", "cohort.fraction=0.5")
    cohorts = defaultdict(set)
    for entry in experiment.module.federation.ledger.entries:
        if entry.phase == "fit":
            cohorts[entry.round].add(entry.client)
    assert [len(cohorts[n]) for n in range(3)] == [3, 3, 3]
    assert len({frozenset(c) for c in cohorts.values()}) > 1


# Steps


def test_a_schedule_over_rounds(tmp_path, monkeypatch):
    used, train = defaultdict(set), LocalTrainer.run

    def spy(self, data, start, key, rate, *rest, **options):
        used[key[0]].add(rate)
        return train(self, data, start, key, rate, *rest, **options)

    monkeypatch.setattr(LocalTrainer, "run", spy)
    schedule = ("scheduler=step", "scheduler.step_size=2", "scheduler.gamma=0.5")
    run(tmp_path, *CLINICAL, *schedule, "optimizer.lr=0.2")
    assert dict(used) == {0: {0.2}, 1: {0.2}, 2: {0.1}}


def test_adam_whose_state_is_kept(tmp_path):
    adam = (*CLINICAL, "algorithm=fedavg", "optimizer=adam")
    kept = ("local.optimizer_state=kept", "local.steps=2")
    run(tmp_path / "kept", *adam, *kept)
    run(tmp_path / "fresh", *adam)
    assert outcome(tmp_path / "kept")["hashes"] != outcome(tmp_path / "fresh")["hashes"]
    checkpoint = last_whole(tmp_path / "kept" / "checkpoints")
    assert checkpoint is not None
    saved = torch.load(checkpoint, weights_only=True)["federation"]["clients"]["hospital_0"]
    (memory,) = saved["optimizers"].values()
    assert memory["0/step"] == 3 * 2
    assert memory["0/exp_avg"].abs().sum() > 0


# Buffers


@pytest.mark.parametrize("policy", ["averaged", "local", "frozen"])
def test_buffers_of_a_unet(policy, tmp_path, cohort_root):
    small = (*imaging(cohort_root), "rounds=1", "algorithm=fedavg")
    run(tmp_path, *small, f"buffers={policy}", "evaluation.normalization=kept")
    left, right = models(tmp_path).values()
    means = [n for n in left if n.endswith("running_mean")]
    assert means
    counters = [n for n in left if n.endswith("num_batches_tracked")]
    assert bool(counters) == (policy != "frozen")
    assert all(left[n] == 2 for n in counters)  # the steps of this hospital
    if policy == "frozen":
        assert all(not left[n].any() and not right[n].any() for n in means)
    else:
        assert all(torch.equal(left[n], right[n]) == (policy == "averaged") for n in means)
    assert all(torch.equal(left[n], right[n]) for n in left if n.endswith("conv.weight"))


@pytest.mark.parametrize("policy", ["averaged", "local", "frozen"])
def test_buffers_of_a_densenet(policy):
    torch.manual_seed(0)
    network = densenet_bc(
        spatial_dims=2,
        in_channels=1,
        out_channels=2,
        growth_rate=2,
        block_config=(2, 2),
        init_features=4,
        stem="small",
    )
    task = ClassificationTask(network, partial(torch.optim.SGD, lr=0.1), num_classes=2)
    data = [ToyData(f"c{i}", torch.randn(8, 1, 8, 8) + i, torch.arange(8) % 2, 4) for i in range(2)]
    for client in data:
        client.label_counts = torch.tensor([4.0, 4.0])
    federation = toy_federation(FedAvg(), task, data, buffers=policy)[1]
    initial = federation.clients["c0"].weights
    run_reference(federation, 2)
    left, right = (federation.personal_model(c.id) for c in data)
    buffers = [n for n in left if n.endswith(("running_mean", "running_var"))]
    assert buffers
    for name in buffers:
        assert torch.equal(left[name], right[name]) == (policy != "local")
        assert torch.equal(left[name], initial[name]) == (policy == "frozen")


# Shapes, numbers, ranks


def test_three_dimensions_follow_the_data(tmp_path, cohort_root):
    volumes = ("data.spatial_dims=3", "data.patch_size=[16,16,8]", "rounds=1")
    summary, experiment = run(tmp_path, *imaging(cohort_root), *volumes, "pictures.format=png")
    assert experiment.config.facts.spatial_dims == 3
    assert list(experiment.config.facts.patch_size) == [16, 16, 8]
    assert any(t.ndim == 5 for t in models(tmp_path)["hospital_0"].values())
    assert set(summary["clients"]) == {"hospital_0", "hospital_1"}
    assert (tmp_path / "pictures" / "contours.png").stat().st_size > 1000


def test_double_precision(tmp_path, cohort_root):
    double = ("trainer.precision=64-true", "codec@codec.up=fp64", "codec@codec.down=fp64")
    small = (*imaging(cohort_root), "rounds=1", "algorithm=fedavg")
    wide, _ = run(tmp_path / "double", *small, *double)
    narrow, _ = run(tmp_path / "single", *small)
    kept = models(tmp_path / "double")["hospital_0"].values()
    assert {t.dtype for t in kept if t.is_floating_point()} == {torch.float64}
    header = 12
    messages = len(wide["clients"])
    assert wide["bytes"]["up"] - header * messages == 2 * (
        narrow["bytes"]["up"] - header * messages
    )
    for client, metrics in narrow["clients"].items():
        assert wide["clients"][client]["loss"] == pytest.approx(metrics["loss"], rel=1e-3)


def test_lossy_codecs_and_what_they_save(tmp_path, capsys):
    chosen = (
        "codec.up=stc",
        "codec.up.sparsity=0.2",
        "codec.down=qsgd",
        "channel.up.cer.gamma=0.1",
    )
    summary, experiment = run(tmp_path, *CLINICAL, "algorithm=fedavg", *chosen)
    up = experiment.module.federation.channel.links["up"]
    assert (type(up.codec).__name__, up.codec.sparsity, up.transform.gamma) == ("STC", 0.2, 0.1)
    ledger = rows(tmp_path / "ledger.csv")
    for direction in ("up", "down"):
        own = [r for r in ledger if r["direction"] == direction]
        sent, dense = (sum(int(r[c]) for r in own) for c in ("bytes", "dense"))
        assert summary["savings"][direction] == summary["savings_by_part"][f"{direction}/shared"]
        assert summary["savings"][direction] == dense / sent > 1.3
        assert (own[0]["bytes"] == own[0]["dense"]) == (direction == "down")
    assert f"({summary['savings']['up']:.1f}x less than fp32)" in capsys.readouterr().out
    state = experiment.module.federation.clients["hospital_0"].memory
    assert [key.split("/")[0] for way in ("up", "down") for key in state[way]] == [
        "residual",
        "reference",
    ]


def test_bfloat16(tmp_path, cohort_root, caplog, monkeypatch):
    small = (*imaging(cohort_root), "rounds=1", "algorithm=fedavg")
    monkeypatch.setattr("medfed.run.doctor.units", lambda: ["AVX2"])  # of another machine
    rounded, _ = run(tmp_path / "bf16", *small, "trainer.precision=bf16-mixed")
    exact, _ = run(tmp_path / "single", *small)
    for client, metrics in exact["clients"].items():
        assert rounded["clients"][client]["loss"] == pytest.approx(metrics["loss"], rel=0.05)
        assert rounded["clients"][client]["loss"] != metrics["loss"]
    assert caplog.text.count("is slower than 32-true here, as this CPU has no instructions") == 1


def test_mixed_precision_is_of_losses_alone_and_resumes_bit_for_bit(tmp_path, monkeypatch):
    small = (*CLINICAL, "trainer.precision=bf16-mixed", "local.accumulate=2", "data.batch_size=16")
    _, experiment = run(tmp_path / "straight", *small)
    train = FederatedModule._fit

    def killed(self, current, client, *rest):
        if self.next_round == 1 and client == self.federation.ids[3]:
            raise KeyboardInterrupt
        return train(self, current, client, *rest)

    monkeypatch.setattr(FederatedModule, "_fit", killed)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run(tmp_path / "resumed", *small)
    monkeypatch.undo()
    resume(tmp_path / "resumed", *small)
    assert outcome(tmp_path / "resumed") == outcome(tmp_path / "straight")
    module = experiment.module
    client = module.federation.ids[0]
    model = module.federation.personal_model(client)
    assert {t.dtype for t in model.values()} == {torch.float32}
    assert all(bool(t.isfinite().all()) for t in model.values())
    # Measured in single precision, as the model is delivered.
    alone = module.evaluate_client(client, "test")
    # Points are chosen after all validation cases are known.
    tested = experiment.evaluation.test[client]
    chosen = ("/point", "/calibrated")
    assert {n: v for n, v in tested.items() if not n.endswith(chosen)} == alone
    with torch.autocast("cpu", torch.bfloat16):
        assert module.evaluate_client(client, "test") != alone
    passes = [c.passes.gradient for c in module.federation.clients.values()]
    steps = [c.steps_done for c in module.federation.clients.values()]
    assert steps == [6] * 5  # three rounds of two
    assert all(n > s for n, s in zip(passes, steps, strict=True))


@pytest.mark.promise("two ranks")
def test_ranks_with_unequal_numbers_of_clients(tmp_path, cohort_root):
    small = (*imaging(cohort_root, hospitals=3), "augment=nnunet", "data.patches=fresh")
    run(tmp_path / "one", *small)
    keys = (*small, "trainer=ddp", f"hydra.run.dir={tmp_path / 'two'}")
    started = processes.ranks(ROOT / "scripts" / "train.py", *keys, together=True)
    logs = [p.communicate(timeout=240)[0] for p in started]
    assert [p.returncode for p in started] == [0, 0], "\n".join(logs)
    assert outcome(tmp_path / "two") == outcome(tmp_path / "one")
    assert len(models(tmp_path / "two")) == 3


def test_fresh_augmented_patches_resume_bit_for_bit(tmp_path, cohort_root, monkeypatch):
    small = (*imaging(cohort_root), "augment=light", "data.patches=fresh")
    run(tmp_path / "straight", *small)
    train = FederatedModule._fit

    def killed(self, current, client, *rest):
        if self.next_round == 1 and client == self.federation.ids[1]:  # amid the second round
            raise KeyboardInterrupt
        return train(self, current, client, *rest)

    monkeypatch.setattr(FederatedModule, "_fit", killed)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run(tmp_path / "killed", *small)
    monkeypatch.undo()
    assert not (tmp_path / "killed" / "hashes.json").exists()
    resume(tmp_path / "killed", *small, "data.workers=1")
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "straight")


# The whole imaging experiment


def test_what_a_run_leaves(tmp_path, cohort_root):
    folder = tmp_path / "run"
    summary, experiment = run(folder, *imaging(cohort_root), "pictures.format=png")
    files = left_in(folder)
    clients = ["hospital_0", "hospital_1"]
    for name in ("config.yaml", "splits.json", "metrics.csv", "hashes.json", "summary.json"):
        assert name in files
    assert not [name for name in files if "partial" in name]
    versions = json.loads((folder / "versions.json").read_text())
    assert {"commit", "python", "torch", "monai"} <= set(versions)
    splits = json.loads((folder / "splits.json").read_text())
    assert {c: {s: len(i) for s, i in p.items()} for c, p in splits["clients"].items()} == {
        c: {"train": 2, "val": 1, "test": 1} for c in clients
    }
    ledger = rows(folder / "ledger.csv")
    for direction in ("up", "down"):
        total = sum(int(r["bytes"]) for r in ledger if r["direction"] == direction)
        assert total == summary["bytes"][direction] > 0
    assert json.loads((folder / "summary.json").read_text()) == json.loads(json_text(summary))
    metrics = rows(folder / "metrics.csv")
    assert [(r["round"], r["client"], r["split"]) for r in metrics if r["split"] == "val"] == [
        (str(n), c, "val") for n in range(2) for c in clients
    ]
    assert [r["client"] for r in metrics if r["split"] == "test"] == clients
    assert all(0 <= float(r["dice"]) <= 1 for r in metrics if r["split"] != "train")
    assert [r["client"] for r in metrics if r["split"] == "train"] == 2 * clients
    hashes = json.loads((folder / "hashes.json").read_text())
    assert set(hashes) == {"server", *(f"client/{c}" for c in clients)}
    own = models(folder)
    assert set(own) == set(clients)
    weights = {n for n, t in own["hospital_0"].items() if t.is_floating_point()}
    assert weights == set(experiment.module.local.model.entries)
    assert [f for f in files if f.startswith("predictions")] == [
        f"predictions/{c}.npz" for c in clients
    ]
    pictures = {p.name: p.stat().st_size for p in (folder / "pictures").glob("*.png")}
    assert {"bytes.png", "contours.png", "graph.png", "val_iou.png"} <= set(pictures)
    assert min(pictures.values()) > 1000
    assert summary["steps"] == dict.fromkeys(clients, 2 * 2)


@pytest.mark.skipif(not SIX.is_dir(), reason=f"the six BraTS 2018 patients are not in {SIX}")
def test_six_real_patients(tmp_path):
    real = ("data=brats_folder", f"data.path={SIX}", "data.eval_every=40", "rounds=1")
    summary, experiment = run(tmp_path, *IMAGING, *real, "pictures.format=png")
    assert experiment.data.channel_names == ("FLAIR", "T1")
    assert set(summary["clients"]) == {"hospital_0", "hospital_1"}
    for metrics in summary["clients"].values():
        assert 0 <= metrics["dice"] <= 1
        assert 0 < metrics["loss"] < 10
    assert (tmp_path / "pictures" / "contours.png").stat().st_size > 1000


def test_balanced_classes_change_training_and_not_what_is_measured(tmp_path, caplog):
    short = (*CLINICAL, "algorithm=local", "rounds=1")
    plain, _ = run(tmp_path / "plain", *short)
    one, experiment = run(tmp_path / "one", *short, "model.class_weights=balanced")
    assert plain["clients"] != one["clients"]
    for client in experiment.data.clients.values():
        batch = next(iter(client.train_batches(0)))
        n = client.label_counts
        expected = n.sum() / (2 * n)
        assert torch.allclose(batch["class_weights"], expected.expand(len(batch["label"]), 2))
        assert "class_weights" not in next(iter(client.eval_batches("test")))
    assert evaluate_run(tmp_path / "one")["clients"] == one["clients"]
    one_class = ("partition=shards", "model.class_weights=balanced")
    run(tmp_path / "shards", *short, *one_class)
    assert ", to which balanced weights give 0" in caplog.text


def test_a_run_leaves_no_variables_of_ranks(tmp_path):
    """Otherwise the next command of this process would take itself for a rank."""
    before = dict(os.environ)
    run(tmp_path / "run", *CLINICAL, "rounds=1", "trainer=ddp", "trainer.devices=1")
    named = ("RANK", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
    assert not [name for name in set(os.environ) - set(before) if name.endswith(named)]
