"""A Trainer of one's own does what Lightning's manual says, counted in rounds, or refuses."""

from __future__ import annotations

import inspect
import logging
import os
import re
import time
from datetime import timedelta
from functools import partial
from unittest import mock

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning import callbacks as of_lightning
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.trainer.states import TrainerFn
from torch import nn

from medfed.common.scores import Record
from medfed.federation.assemble import assemble
from medfed.federation.budget import LocalBudget
from medfed.federation.hospital import ArrayClient
from medfed.federation.lightning.callbacks import FederatedRounds, History, PersonalEvaluation
from medfed.federation.lightning.module import FederatedModule
from medfed.federation.lightning.strategy import _OF_ONE_MODEL, ClientSharding, check_trainer
from medfed.federation.reference import run_reference
from medfed.personalize.ditto import Ditto
from medfed.personalize.fedper import FedPer
from medfed.personalize.pfednet import PFedNet
from medfed.personalize.similarity import SimilarityGraph
from medfed.standalone.errors import ConfigError
from tests.pages import DOCS


@pytest.fixture(autouse=True)
def as_before():
    """What Lightning sets for the whole process ends with a test."""
    with mock.patch.dict(os.environ):
        yield
    torch.use_deterministic_algorithms(False)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


ROUNDS = 3
SHORT = timedelta(seconds=0.1)  # less than a round takes where losses wait
SCHEDULE = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
MANY_PHASES = PFedNet(personal="task", graph=SimilarityGraph(kind="ring"))


class Task(nn.Module):
    """What the module asks of a task."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.network = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).to(dtype)
        self.evaluated, self.waits = 0, 0.0

    def loss(self, batch):
        time.sleep(self.waits)
        return nn.functional.cross_entropy(self.network(batch["image"]), batch["label"])

    @torch.no_grad()
    def evaluate(self, batches, *, test=False):
        self.evaluated += 1
        self.network.eval()
        loss = [float(self.loss(batch)) for batch in batches]
        return {"loss": sum(loss) / len(loss), "acc": 1 / (1 + sum(loss))}


def clients(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    inputs = {name: torch.randn(9 + n, 4, generator=g) for n, name in enumerate("abc")}
    return [ArrayClient(n, x.to(dtype), (x[:, 0] > 0).long(), 4) for n, x in inputs.items()]


def assembled(algorithm=None, dtype=torch.float32, lr=0.2):
    task = Task(dtype)
    federation, local = assemble(
        algorithm or Ditto(),
        task.network,
        task.loss,
        clients(dtype),
        optimizer=partial(torch.optim.SGD, lr=lr),
        scheduler=SCHEDULE,
        personal="2.*",
        rounds=ROUNDS,
        budget=LocalBudget(steps=2),
    )
    return FederatedModule(task, federation, local)


def trainer_of(*called, closing=True, **flags):
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    evaluation = PersonalEvaluation("acc", "max")
    first = [FederatedRounds()] if closing else []
    keys = {"accelerator": "cpu", "max_epochs": ROUNDS, "enable_checkpointing": False, **quiet}
    if any(isinstance(c, of_lightning.Checkpoint) for c in called):
        keys["enable_checkpointing"] = True
    # The user's callbacks come first: no order matters.
    return pl.Trainer(**{**keys, **flags, "callbacks": [*called, *first, evaluation]}), evaluation


def trained(*called, algorithm=None, dtype=torch.float32, resume=None, **flags):
    module = assembled(algorithm, dtype)
    trainer, evaluation = trainer_of(*called, **flags)
    if any(isinstance(c, of_lightning.Timer) for c in trainer.callbacks):
        module.task.waits = 0.05
    trainer.fit(module, ckpt_path=resume, weights_only=True)
    return module, trainer, evaluation


def straight(rounds=ROUNDS, algorithm=None):
    """The hashes of the plain loop."""
    return run_reference(assembled(algorithm).federation, rounds).digests()


def tables():
    """The page's settings and callbacks, each with what it says of them."""
    text = (DOCS / "api" / "trainer.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([\w ]+) \|", text, re.MULTILINE)
    flags = inspect.signature(pl.Trainer.__init__).parameters
    known = {n: said for n, said in rows if n in flags}, {n: s for n, s in rows if n not in flags}
    assert len(known[0]) + len(known[1]) == len(rows)
    return known


FLAGS, CALLBACKS = tables()
# A value of each setting, and the rounds that close with it.
VALUES = {
    "accelerator": ("cpu", 3),
    "strategy": (ClientSharding(), 3),
    "devices": (1, 3),
    "num_nodes": (1, 3),
    "precision": ("32-true", 3),
    "logger": ("csv", 3),
    "callbacks": (None, 3),
    "max_epochs": (2, 2),
    "min_epochs": (2, 3),
    "max_steps": (2, 2),
    "min_steps": (1, 3),
    "max_time": (SHORT, 1),
    "limit_val_batches": (0, 3),
    "limit_test_batches": (0, 3),
    "check_val_every_n_epoch": (2, 3),
    "num_sanity_val_steps": (2, 3),
    "log_every_n_steps": (1, 3),
    "enable_checkpointing": (True, 3),
    "enable_progress_bar": (True, 3),
    "enable_model_summary": (True, 3),
    "deterministic": (True, 3),
    "benchmark": (False, 3),
    "inference_mode": (False, 3),
    "profiler": ("simple", 3),
    "detect_anomaly": (True, 3),
    "barebones": (True, 3),
    "plugins": ([], 3),
    "default_root_dir": ("here", 3),
    "enable_autolog_hparams": (False, 3),
    "model_registry": (None, 3),
    # of no effect
    "limit_predict_batches": (1, 3),
    "gradient_clip_algorithm": ("norm", 3),
    "use_distributed_sampler": (False, 3),
    "reload_dataloaders_every_n_epochs": (1, 3),
}
REFUSED = {
    "fast_dev_run": [True, 1, 5],
    "limit_train_batches": [1, 0, 5, 0.5],
    "overfit_batches": [1, 1.0],
    "val_check_interval": [3],
    "accumulate_grad_batches": [2],
    "gradient_clip_val": [1.0],
    "strategy": ["ddp", "fsdp"],
    "precision": ["16-true", "bf16-true", "64-true"],
}


def test_the_page_has_every_setting():
    every = set(inspect.signature(pl.Trainer.__init__).parameters) - {"self"}
    assert set(FLAGS) == every
    assert {n for n, said in FLAGS.items() if said != "refused"} == set(VALUES)
    assert {n for n, said in FLAGS.items() if said == "refused"} <= {*REFUSED, "sync_batchnorm"}


@pytest.mark.parametrize("flag", VALUES)
def test_a_setting_does_what_the_page_says(flag, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger("pytorch_lightning.utilities.rank_zero"), "level", 50)
    value, rounds = VALUES[flag]
    value = CSVLogger(tmp_path, "log") if value == "csv" else value
    flags = {} if flag == "callbacks" else {flag: value}
    if flag == "barebones":
        flags |= dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), None)
        flags["enable_model_summary"] = None
    module, trainer, evaluation = trained(algorithm=MANY_PHASES, **flags)
    assert module.next_round == trainer.global_step == rounds
    assert module.federation.digests() == straight(rounds, MANY_PHASES)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    evaluated = {"limit_val_batches": [], "check_val_every_n_epoch": [1]}
    assert evaluation.history.rounds == evaluated.get(flag, list(range(rounds)))
    if flag == "enable_checkpointing":
        assert len([*tmp_path.rglob("*.ckpt")]) == 1
    if flag == "limit_test_batches":
        trainer.test(module, verbose=False)
        assert not evaluation.test


@pytest.mark.parametrize(
    ("flag", "value"), [(f, v) for f, values in REFUSED.items() for v in values], ids=str
)
def test_a_setting_that_rounds_cannot_follow_is_refused(flag, value, tmp_path):
    module = assembled()
    try:
        trainer, _ = trainer_of(**{flag: value}, default_root_dir=tmp_path)
    except (ValueError, pl.utilities.exceptions.MisconfigurationException):
        assert (flag, value) == ("strategy", "fsdp")  # which Lightning refuses on a CPU
        return
    with pytest.raises(ConfigError) as caught:
        trainer.fit(module)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")
    assert ("DDPStrategy" if flag == "strategy" else f"Trainer({flag}=") in str(caught.value)
    assert module.next_round == 0


def test_synchronised_normalisation_is_refused():
    sharing = ClientSharding(process_group_backend="gloo")
    trainer, _ = trainer_of(strategy=sharing, devices=2, sync_batchnorm=True)
    trainer.state.fn = TrainerFn.FITTING
    with pytest.raises(ConfigError, match=r"sync_batchnorm=True\) would mix the statistics"):
        check_trainer(trainer, Task().network)


def evaluating(value):
    """A module whose task gives this result."""
    module = assembled()
    module.task.evaluate = lambda batches, *, test=False: value
    return module


def of_another_network():
    module = assembled()
    return FederatedModule(Task(), module.federation, module.local)


def of_no_task():
    module = assembled()
    return FederatedModule(module.task.network, module.federation, module.local)


MISTAKES = {
    "a task of another network": (of_another_network, "The task's network is not the one that"),
    "a network as task": (of_no_task, "give assemble task.network and task.loss"),
    "no metrics": (lambda: evaluating(None), "evaluate must return metrics by name, not None."),
    "several numbers": (
        lambda: evaluating({"acc": torch.zeros(3)}),
        "The metric acc of evaluate must be one number, not a tensor of shape [3].",
    ),
    "a text": (lambda: evaluating({"acc": "high"}), "must be one number, not 'high'"),
    "another metric": (
        lambda: evaluating({"dice": 0.5}),
        "The metric of PersonalEvaluation='acc' is unknown; choose one of dice.",
    ),
    "another mode": (
        lambda: PersonalEvaluation("acc", "maximum"),
        "mode='maximum' is unknown; choose max or min.",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_the_users_task_costs_one_sentence(mistake):
    make, sentence = MISTAKES[mistake]
    with pytest.raises(ConfigError) as caught:
        trainer_of(max_epochs=1, num_sanity_val_steps=0)[0].fit(make())
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [torch.tensor(0.5), torch.tensor([0.5]), np.float32(0.5)],
    ids=["tensor", "one entry", "NumPy"],
)
def test_a_metric_may_be_a_tensor_or_a_number_of_numpy(value):
    trainer, evaluation = trainer_of(max_epochs=1)
    trainer.fit(evaluating({"acc": value}))
    assert [record.metrics for record in evaluation.history] == [{"acc": 0.5}] * 3
    assert {type(record.metrics["acc"]) for record in evaluation.history} == {float}


def test_a_trainer_that_closes_no_round_is_refused():
    module = assembled()
    trainer, _ = trainer_of(closing=False)
    with pytest.raises(ConfigError, match=r"has no callback that closes rounds; add FederatedR"):
        trainer.fit(module)


@pytest.mark.parametrize(
    "call",
    [
        lambda trainer, *both: trainer.fit(*both),
        lambda trainer, module, loader: trainer.fit(module, val_dataloaders=loader),
        lambda trainer, *both: trainer.validate(*both),
        lambda trainer, *both: trainer.test(*both),
    ],
    ids=["fit", "val_dataloaders", "validate", "test"],
)
def test_a_loader_beside_those_of_the_clients_is_refused(call):
    trainer, _ = trainer_of()
    with pytest.raises(ConfigError, match="every client brings its own data"):
        call(trainer, assembled(), torch.utils.data.DataLoader([0, 1]))


@pytest.mark.parametrize("name", [n for n, said in CALLBACKS.items() if said == "refused"])
def test_a_callback_that_changes_one_model_is_refused(name):
    made = {
        "StochasticWeightAveraging": partial(of_lightning.StochasticWeightAveraging, 0.1),
        "ModelPruning": partial(of_lightning.ModelPruning, "l1_unstructured"),
        "GradientAccumulationScheduler": partial(
            of_lightning.GradientAccumulationScheduler, {0: 1, 1: 2}
        ),
    }.get(name, getattr(of_lightning, name))
    trainer, _ = trainer_of(made())
    with pytest.raises(ConfigError, match=f"callback {name} changes one model"):
        trainer.fit(assembled())


def test_the_page_names_every_callback_that_is_refused():
    text = (DOCS / "api" / "trainer.md").read_text()
    assert all(f"`{kind.__name__}`" in text for kind in _OF_ONE_MODEL)
    here = {"FederatedRounds", "PersonalEvaluation"}
    assert all(n in here or hasattr(of_lightning, n) for n in CALLBACKS)


def test_a_type_that_network_and_data_have_is_kept():
    module, *_ = trained(dtype=torch.float64, precision="64-true")
    expected = run_reference(assembled(dtype=torch.float64).federation, ROUNDS).digests()
    assert module.federation.digests() == expected


def plain_mean(evaluation: PersonalEvaluation, number: int) -> float:
    """What ``val/acc`` is: every hospital weighs the same, unlike in ``val/score``."""
    return float(np.mean([r.metrics["acc"] for r in evaluation.history.by_round[number]]))


@pytest.mark.parametrize(
    "algorithm", [Ditto(), FedPer(), MANY_PHASES], ids=["ditto", "fedper", "pfednet"]
)
def test_a_checkpoint_on_a_metric_is_the_best_round(algorithm, tmp_path):
    best = of_lightning.ModelCheckpoint(tmp_path, "{epoch}-{step}", monitor="val/acc", mode="max")
    module, trainer, evaluation = trained(best, algorithm=algorithm)
    means = [plain_mean(evaluation, n) for n in range(ROUNDS)]
    number = means.index(max(means))
    assert best.best_model_path.endswith(f"epoch={number}-step={number + 1}.ckpt")
    assert float(best.best_model_score) == pytest.approx(max(means), abs=1e-4)
    before = list(evaluation.history)
    (shown,) = trainer.test(module, ckpt_path="best", verbose=False, weights_only=True)
    tested = [metrics["acc"] for metrics in evaluation.test.values()]
    assert shown["test/acc"] == pytest.approx(sum(tested) / len(tested), abs=1e-4)
    assert shown["test/acc_worst"] == pytest.approx(min(tested), abs=1e-4)
    # The tested models are those of that round, and the record keeps the later ones.
    at_best = assembled(algorithm)
    run_reference(at_best.federation, number + 1)
    for client, metrics in evaluation.test.items():
        assert metrics == at_best.evaluate_client(client, "test")
    assert list(evaluation.history) == before


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"save_top_k": -1}, [1, 2, 3]),
        ({"save_top_k": -1, "every_n_epochs": 2}, [2]),
        ({"save_top_k": -1, "every_n_train_steps": 2}, [2]),
        ({"save_top_k": 0, "save_last": True}, ["last"]),
        ({"save_top_k": 1, "monitor": "train/loss", "save_on_train_epoch_end": True}, None),
    ],
    ids=["all", "epochs", "steps", "last", "training loss"],
)
@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_checkpoints_come_when_they_are_due_and_resume(settings, steps, tmp_path):
    saved = of_lightning.ModelCheckpoint(tmp_path, "{step}", **settings)
    trained(saved)
    names = sorted(path.stem for path in tmp_path.glob("*.ckpt"))
    if steps is not None:
        assert names == [s if s == "last" else f"step={s}" for s in steps]
    for name in names:
        again = of_lightning.ModelCheckpoint(tmp_path, "{step}", **settings)
        module, trainer, evaluation = trained(again, resume=tmp_path / f"{name}.ckpt")
        assert module.next_round == trainer.global_step == ROUNDS
        assert module.federation.digests() == straight()
        # Saved within a round's epoch, it lacks that round's evaluation, as the page says.
        within = "every_n_train_steps" in settings
        assert evaluation.history.rounds == ([0, 2] if within else list(range(ROUNDS)))


def test_the_sanity_check_leaves_no_trace():
    module, _, evaluation = trained(num_sanity_val_steps=2)
    assert [r.round for r in evaluation.history] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert module.task.evaluated == 1 + 3 * ROUNDS
    assert evaluation.history == trained(num_sanity_val_steps=0)[2].history


def test_a_look_at_the_last_round_leaves_no_trace():
    module, trainer, evaluation = trained()
    before = list(evaluation.history)
    (shown,) = trainer.validate(module, verbose=False)
    assert list(evaluation.history) == before
    assert shown["val/acc"] == pytest.approx(plain_mean(evaluation, ROUNDS - 1), abs=1e-4)


def test_early_stopping_ends_after_its_patience():
    stop = of_lightning.EarlyStopping("val/loss", mode="max", patience=1)  # which never improves
    module, trainer, evaluation = trained(stop)
    losses = [evaluation.history.mean(n, "loss") for n in evaluation.history.rounds]
    assert losses[1] < losses[0]
    assert module.next_round == trainer.current_epoch == 2
    assert module.federation.digests() == straight(2)


def test_the_monitor_shows_each_rounds_step_size(tmp_path):
    monitor = of_lightning.LearningRateMonitor("epoch")
    trained(monitor, logger=CSVLogger(tmp_path, "log"))
    assert monitor.lrs == {"lr-SGD": [0.2, 0.1, 0.05]}


@pytest.mark.parametrize(("rounds", "goes_on"), [(ROUNDS, False), (ROUNDS + 1, True), (1, False)])
def test_a_schedule_that_ends_before_the_rounds_is_named(rounds, goes_on, caplog):
    module, *_ = trained(max_epochs=rounds)
    assert module.next_round == rounds
    line = f"Trainer(max_epochs={rounds}) goes on after the {ROUNDS} rounds of assemble's schedule"
    assert (line in caplog.text) is goes_on


def test_a_timer_ends_with_a_whole_round():
    module, *_ = trained(of_lightning.Timer(SHORT, interval="step"), algorithm=MANY_PHASES)
    assert module.next_round == 1
    assert module.federation.digests() == straight(1, MANY_PHASES)


def test_rounds_continue_in_another_trainer():
    module = assembled()
    for rounds in (1, 2):
        trainer, evaluation = trainer_of(max_epochs=rounds)
        trainer.fit(module)
        assert trainer.global_step == module.next_round
    assert module.federation.digests() == straight(3)
    assert evaluation.history.rounds == [1, 2]
    assert isinstance(evaluation.history[0], Record)


def test_a_hospital_of_few_samples_selects_little():
    """Weights n / (n + 150), by an independent average; hospitals alike weigh the same."""
    rng = np.random.default_rng(0)
    clients, samples = ("a", "b", "tiny"), {"a": 300, "b": 90, "tiny": 5}
    values = {c: rng.random(6).round(3) for c in clients}
    records = [Record(n, c, {"auroc": float(values[c][n])}) for n in range(6) for c in clients]
    history = History(records)
    plain = [history.mean(n, "auroc") for n in range(6)]
    assert plain == pytest.approx(np.mean([*values.values()], axis=0), abs=1e-9)
    history = History(records, samples)
    weights = [n / (n + 150) for n in samples.values()]
    expected = np.average([*values.values()], axis=0, weights=weights)
    assert [history.mean(n, "auroc") for n in range(6)] == pytest.approx(expected, abs=1e-9)
