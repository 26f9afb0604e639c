"""Slots on the CPU: the same turns as on a GPU, and the bits of one client after the other."""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
from functools import partial

import pytest
import torch
from torch import nn

from medfed.common.errors import ConfigError
from medfed.common.streams import seeded
from medfed.federation.budget import LocalBudget
from medfed.federation.engine.gpu.slots import Backend, Slots, slots_of, twin
from medfed.federation.engine.loop import LocalTrainer, Turns
from medfed.federation.reference import run_reference
from tests.contract import harness
from tests.sweeps import sweep
from tests.toys import ToyTask

CPU = torch.device("cpu")


class Trainer:
    """Takes steps that only say that they were taken."""

    def __init__(self) -> None:
        self.network, self.turns = nn.Linear(1, 1), Turns()


def steps(name: str, count: int, told: list[str], trainer: Trainer) -> None:
    with trainer.turns.working():
        for _ in range(count):
            told.append(name)
            trainer.turns.pause()
        trainer.turns.finish()


def test_slots_take_turns_and_whoever_is_free_takes_the_next_job():
    told: list[str] = []
    lengths = {"a": 3, "b": 1, "c": 2, "d": 1}
    jobs = [partial(steps, name, count, told) for name, count in lengths.items()]
    slots = Slots([Trainer(), Trainer()])
    slots.run(jobs)
    assert "".join(told) == "abacacd"
    assert all(type(t.turns) is Turns for t in slots.trainers)
    slots.run([])


def test_only_one_thread_runs_at_a_time():
    running = threading.Lock()

    def job(trainer: Trainer) -> None:
        for _ in range(20):
            assert running.acquire(blocking=False)
            time.sleep(0.0005)
            running.release()
            trainer.turns.pause()

    Slots([Trainer() for _ in range(4)]).run([job] * 6)


def test_each_job_draws_what_it_would_draw_alone():
    found: dict[int, list[float]] = {}

    def job(seed: int, trainer: Trainer) -> None:
        with seeded(seed, CPU):
            for _ in range(3 + seed % 2):
                found.setdefault(seed, []).append(float(torch.rand(())))
                trainer.turns.pause()

    slots = Slots([Trainer() for _ in range(3)])
    torch.manual_seed(5)
    expected = float(torch.rand(()))
    torch.manual_seed(5)
    slots.run([partial(job, n) for n in range(5)])
    assert float(torch.rand(())) == expected
    together, found = found, {}
    for n in range(5):
        job(n, Trainer())
    assert together == found


def test_a_slot_whose_steps_are_not_done_lets_the_others_go_on():
    class Slow(Backend):
        """The first slot's stream takes its time."""

        left = 3

        def stream(self) -> list[int]:
            self.made = getattr(self, "made", -1) + 1
            return [self.made]

        def is_done(self, stream: list[int]) -> bool:
            self.left -= stream == [0]
            return stream != [0] or self.left < 0

    told: list[str] = []

    def job(name: str, count: int, trainer: Trainer) -> None:
        steps(name, count, told, trainer)
        told.append(name.upper())

    Slots([Trainer(), Trainer()], Slow()).run([partial(job, "a", 1), partial(job, "b", 4)])
    assert "".join(told) == "abbbbAB"


def test_after_an_error_no_job_begins_and_the_first_in_order_is_told():
    begun: list[int] = []

    def job(number: int, trainer: Trainer) -> None:
        begun.append(number)
        trainer.turns.pause()
        trainer.turns.pause() if number == 0 else None
        raise ValueError(str(number))

    slots = Slots([Trainer(), Trainer()])
    with pytest.raises(ValueError, match=r"^0$"):
        slots.run([partial(job, n) for n in range(4)])
    assert begun == [0, 1]


def test_ctrl_c_ends_all_slots():
    def job(interrupts: bool, trainer: Trainer) -> None:
        if interrupts:
            signal.raise_signal(signal.SIGINT)
        while True:
            time.sleep(0.001)
            trainer.turns.pause()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            Slots([Trainer(), Trainer()]).run([partial(job, True), partial(job, False)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert not [t for t in threading.enumerate() if "(work)" in t.name]


# The contract


@sweep("count", [2, 5])
@sweep("name", ["fedavg", "pfednet", "scaffold", "moon", "qupel", "fedfomo"])
def test_a_run_with_slots_is_that_of_the_plain_loop(name, count, monkeypatch):
    """Dropout, BatchNorm, momentum, several phases, penalties, gradients, validation losses."""
    _, expected, _ = harness.federation(name)
    run_reference(expected, harness.ROUNDS)
    federation = harness.federation

    def with_slots(*given, **settings):
        task, built, local = federation(*given, **settings)
        local.budget = dataclasses.replace(local.budget, slots=count)
        return task, built, local

    monkeypatch.setattr(harness, "federation", with_slots)
    module, _ = harness.lightning(name)
    assert module.slots is not None
    assert len(module.slots.trainers) == count
    assert [t.gradients.passes.gradient > 0 for t in module.slots.trainers[:2]] == [True, True]
    assert module.federation.digests() == expected.digests()
    assert module.federation.ledger.to_csv() == expected.ledger.to_csv()
    for client, local in module.federation.clients.items():
        assert local.passes == expected.clients[client].passes
        assert local.trainer is module.local


def first_bias(task: ToyTask, batches: object) -> float:
    return float(task.network.body.bias.detach()[0])


def test_a_twin_has_a_network_loss_and_measure_of_its_own():
    task, _, local = harness.federation("fedavg")
    local.measure = partial(first_bias, task)
    made = twin(local)
    batch = {"image": torch.ones(4, 3), "label": torch.ones(4)}
    made.network.eval(), local.network.eval()
    assert torch.equal(made.gradients.loss(batch), local.gradients.loss(batch))
    with torch.no_grad():
        made.network.body.bias += 1
    assert not torch.equal(made.gradients.loss(batch), local.gradients.loss(batch))
    assert made.measure([]) == pytest.approx(local.measure([]) + 1)
    assert all(made.model.entries[n] is not t for n, t in local.model.entries.items())


def test_a_network_that_cannot_be_copied_has_one_slot_and_says_so(caplog):
    local: LocalTrainer = harness.federation("fedavg")[2]
    network = local.network
    local.gradients.loss = lambda batch: network(batch["image"]).sum()
    assert slots_of(local, 2) is None
    assert "local.slots=2 is not used: the network cannot be copied (its loss is" in caplog.text
    assert slots_of(local, 1) is None


@pytest.mark.parametrize("count", [0, 65])
def test_slots_that_cannot_be(count):
    with pytest.raises(ConfigError, match=rf"local\.slots must be from 1 to 64, not {count}\."):
        LocalBudget(slots=count)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("graphs", [True, False])
def test_slots_on_a_gpu_are_that_of_one_slot(graphs, monkeypatch):
    federation, found = harness.federation, []
    for count in (1, 3):

        def with_slots(*given, count=count, **settings):
            task, built, local = federation(*given, **settings)
            local.budget = dataclasses.replace(local.budget, slots=count, graphs=graphs)
            return task, built, local

        monkeypatch.setattr(harness, "federation", with_slots)
        module, _ = harness.lightning("ditto", trainer={"accelerator": "gpu"})
        found.append(module.federation.digests())
    assert found[0] == found[1]
