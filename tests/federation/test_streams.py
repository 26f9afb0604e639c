"""Threads that initialise and train at once draw what each would draw alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from medfed.common.streams import globals_kept, globals_seeded, own_stream, seeded
from medfed.federation.engine.loop import LocalTrainer
from medfed.federation.reference import run_reference
from medfed.federation.round import Round
from medfed.federation.split import ParameterSplit
from medfed.personalize.fedavg import FedAvg
from medfed.records.tasks import plain_task
from tests.contract.harness import federation, lightning
from tests.registered import register
from tests.sweeps import sweep
from tests.toys import toy_data

CONFIG = OmegaConf.create(
    {
        "seed": 3,
        "network": {
            "_target_": "torch.nn.Sequential",
            "_args_": [
                {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 8},
                {"_target_": "torch.nn.Dropout", "p": 0.5},
                {"_target_": "torch.nn.Linear", "in_features": 8, "out_features": 1},
            ],
        },
    }
)


def trained() -> tuple[Tensor, ...]:
    """Initial weights as a run draws them, and those of twenty steps with dropout."""
    network = plain_task(CONFIG.network, CONFIG.seed)
    first = [p.detach().clone() for p in network.parameters()]
    split = ParameterSplit.of(network, ())
    local = LocalTrainer(
        network, lambda b: network(b["image"]).square().mean(), split, torch.optim.SGD, seed=3
    )
    end, _ = local.run(toy_data(1)[0], local.model.initial(), (0, "c0"), 0.05, 20, None)
    return (*first, *end.values())


class Drawn(nn.Linear):
    """Initial weights of the global generators of NumPy and Python, as users write them."""

    def __init__(self) -> None:
        super().__init__(2, 1)
        start = [np.random.standard_normal(), random.random()]
        self.weight = nn.Parameter(torch.tensor([start]))


register(__name__)


def test_initial_weights_of_any_global_generator_follow_the_seed():
    config = OmegaConf.create({"_target_": f"{__name__}.Drawn"})
    before = random.getstate(), np.random.get_state()[1].tolist()
    first, again, other = (plain_task(config, seed).weight.tolist() for seed in (3, 3, 4))
    assert first == again != other
    assert before == (random.getstate(), np.random.get_state()[1].tolist())


@contextmanager
def meanwhile(action: Callable[[], object]) -> Iterator[None]:
    """Another thread does something again and again."""
    done, begun = threading.Event(), threading.Event()

    def repeat() -> None:
        while not done.is_set():
            action()
            begun.set()

    thread = threading.Thread(target=repeat)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_threads_that_initialise_and_train_at_once_change_nothing():
    expected = trained()
    with meanwhile(lambda: torch.rand(())), ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: trained(), range(16)):
            assert all(map(torch.equal, found, expected))


def test_a_simulation_changes_nothing_while_a_site_of_a_test_joins():
    """The tests' networks are built in threads of coordinators, too."""
    expected, _ = lightning("fedper", rounds=1)
    with meanwhile(lambda: federation("fedper")):
        for _ in range(5):
            module, _ = lightning("fedper", rounds=1)
            assert module.federation.digests() == expected.federation.digests()


DRAWS: dict[str, Callable[[], Tensor]] = {
    "normal": lambda: torch.empty(40).normal_(1, 2),
    "uniform": lambda: torch.empty(3, 5).uniform_(-1, 1),
    "kaiming": lambda: nn.Conv2d(2, 3, 3).weight.detach(),
    "truncated": lambda: nn.init.trunc_normal_(torch.empty(20)),
    "orthogonal": lambda: nn.init.orthogonal_(torch.empty(4, 4)),
    "embedding": lambda: nn.Embedding(3, 4).weight.detach(),
    "rand": lambda: torch.rand(3, dtype=torch.float64),
    "randn_like": lambda: torch.randn_like(torch.ones(40)),
    "randint": lambda: torch.randint(2, 9, (7,)),
    "randint_like": lambda: torch.randint_like(torch.ones(7), 2, 9),
    "randperm": lambda: torch.randperm(9),
    "bernoulli": lambda: torch.bernoulli(torch.full((9,), 0.5)),
    "multinomial": lambda: torch.multinomial(torch.ones(9), 4),
    "gamma": lambda: torch.distributions.Gamma(2.0, 1.0).sample((3,)),
    "dropout": lambda: nn.functional.dropout(torch.ones(20)),
    "dropout3d": lambda: nn.functional.dropout3d(torch.ones(2, 9, 1, 1, 1)),
    "alpha_dropout": lambda: nn.functional.alpha_dropout(torch.ones(20), training=True),
    "rrelu": lambda: nn.functional.rrelu(-torch.ones(20), training=True),
    "gumbel": lambda: nn.functional.gumbel_softmax(torch.ones(5)),
    "attention": lambda: nn.functional.scaled_dot_product_attention(
        *torch.ones(3, 1, 1, 4, 4), dropout_p=0.5
    ),
    "fused attention": lambda: nn.functional.scaled_dot_product_attention(
        *torch.ones(3, 1, 1, 4, 4)
    ),
    "lstm": lambda: nn.LSTM(2, 3, 2, dropout=0.5)(torch.ones(4, 1, 2))[0].detach(),
}


@sweep("inference", [False, True])
@sweep("name", DRAWS)
def test_an_own_stream_has_the_numbers_of_the_global_one(name, inference):
    with torch.inference_mode(inference):
        torch.manual_seed(3)
        expected = [DRAWS[name](), torch.rand(())]
        before = torch.get_rng_state()
        with own_stream(3):
            found = [DRAWS[name](), torch.rand(())]
    assert all(map(torch.equal, found, expected))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_of_the_callers_stays_in_use():
    given = torch.Generator().manual_seed(5)
    with own_stream(3):
        found = torch.randperm(9, generator=given)
    assert torch.equal(found, torch.randperm(9, generator=torch.Generator().manual_seed(5)))


def test_streams_within_streams():
    with own_stream(3):
        expected = torch.rand(4)
    with own_stream(3):
        first = torch.rand(2)
        with own_stream(7):
            torch.rand(5)
        assert torch.equal(torch.cat([first, torch.rand(2)]), expected)


def recomputed(seed: int) -> Tensor:
    torch.manual_seed(0)
    x = torch.ones(50, requires_grad=True)
    with seeded(seed):
        y = checkpoint(nn.functional.dropout, x, use_reentrant=False)
        y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    return y.detach()


def test_checkpointed_activations_draw_again_in_the_main_thread_and_nowhere_else():
    recomputed(3)
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="A backward pass draws"):
        pool.submit(recomputed, 3).result()


def drawn(seed: int) -> tuple[float, ...]:
    with globals_seeded(seed):
        return numbers()


def states() -> tuple[object, ...]:
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()


@sweep("fails", [False, True])
def test_one_block_keeps_the_global_generators_for_many_seeded_ones(fails, monkeypatch):
    np.random.standard_normal()  # leaves a second number for the next call
    before, saved = states(), []
    alone = [drawn(3), drawn(4)]
    save = np.random.get_state
    monkeypatch.setattr(np.random, "get_state", lambda: saved.append(1) or save())
    with suppress(ZeroDivisionError), globals_kept(torch.device("cpu")):
        assert [drawn(3), drawn(4)] == alone
        assert len(saved) == 1
        with globals_seeded(3):
            now = drawn(4)
            assert (*now[:2], now[2]) == (*alone[0][:2], alone[1][2])  # PyTorch's numbers alone
            assert 1 / (not fails)
    monkeypatch.undo()
    assert before == states()
    assert drawn(3) == alone[0]
    assert before == states()


@dataclass(frozen=True)
class Draws(FedAvg):
    """Draws before and after its training, by all global generators."""

    drawn: dict[tuple[int, str], tuple[float, ...]] = field(default_factory=dict)

    def fit(self, client, message):
        before = numbers()
        reply = super().fit(client, message)
        self.drawn[len(self.drawn) // 3, client.id] = before + numbers()
        return reply


def numbers() -> tuple[float, ...]:
    return random.random(), np.random.standard_normal(), float(torch.rand(()))


def test_what_a_method_draws_follows_the_seed_in_any_order_of_clients():
    """So for any number of ranks; no two clients or rounds have the same numbers."""
    seen = []
    for order in (1, -1):
        made = federation("fedavg")[1]
        made.algorithm = Draws()
        for number in range(2):
            current = Round(made, number)
            for client in current.recipients[::order]:
                current.receive(client, current.fit(client))
            current.close_phase()
        seen.append(made.algorithm.drawn)
    made = federation("fedavg")[1]
    made.algorithm = Draws()
    run_reference(made, 2)
    assert seen[0] == seen[1] == made.algorithm.drawn
    before = [drawn[:3] for drawn in seen[0].values()]
    assert len({number for three in before for number in three}) == 3 * 6


RUNS: dict[str, Callable[[], object]] = {
    "plain": lambda: run_reference(federation("fedavg")[1], 2),
    "lightning": lambda: lightning("fedavg", rounds=2, evaluate=False),
}


@sweep("run", RUNS)
def test_a_run_saves_the_users_generators_once_for_all_clients_of_a_phase(run, monkeypatch):
    saved, save = [], np.random.get_state
    monkeypatch.setattr(np.random, "get_state", lambda: saved.append(1) or save())
    RUNS[run]()
    assert len(saved) <= 3  # for six turns of clients in two phases; Lightning saves them once, too
