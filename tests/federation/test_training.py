"""The training loop against loops written by hand, in float64."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from monai.optimizers import Novograd
from torch import Tensor, nn

from medfed.common.tensors import Tensors, digest
from medfed.federation.budget import LocalBudget, Passes
from medfed.federation.client import with_statistics
from medfed.federation.engine import working_network as live
from medfed.federation.engine.loop import LocalTrainer
from medfed.federation.local_client import LocalClient
from medfed.federation.optimizers import effective_step_length, learning_rates, remembers_elsewhere
from medfed.federation.other_state import OTHER
from medfed.federation.reference import run_reference
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.fedper import FedPer
from medfed.standalone.errors import ConfigError, NonFiniteError
from tests.sweeps import sweep
from tests.toys import ToyTask, toy_data, toy_federation

LR, MOMENTUM = 0.05, 0.9
DOUBLE = torch.float64


def toy_client(
    algorithm: FedAvg | None = None, *, norm: bool = True, batch: int | None = None, **options
) -> LocalClient:
    """A client in double precision; without a batch size, a batch is all its data."""
    task, data = ToyTask(norm=norm, dtype=DOUBLE), toy_data(dtype=DOUBLE, batch=batch)
    options = {"momentum": MOMENTUM, "lr": LR, "steps": 3, **options}
    _, federation, _ = toy_federation(algorithm or FedAvg(), task, data, **options)
    client = federation.clients["c1"]
    client.begin(0, "fit", 0)
    return client


def by_hand(
    client: LocalClient,
    start: Tensors,
    steps: int,
    velocity: Tensors,
    change: Callable[[Tensors, Tensors], Tensors] = lambda gradients, weights: gradients,
) -> Tensors:
    """SGD with momentum on full batches; ``change`` acts on the gradients."""
    network = copy.deepcopy(client.trainer.network).train()
    network.load_state_dict({n: t for n, t in start.items() if n != OTHER}, strict=False)
    for _ in range(steps):
        weights = dict(network.named_parameters())
        loss = square_loss(network, client.data.x, client.data.y)
        gradients = dict(zip(weights, torch.autograd.grad(loss, weights.values()), strict=True))
        with torch.no_grad():
            for n, g in change(gradients, weights).items():
                velocity[n] = MOMENTUM * velocity.get(n, 0) + g
                weights[n] -= LR * velocity[n]
    return {n: t.detach() for n, t in network.state_dict().items() if t.is_floating_point()}


def square_loss(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (network(x).squeeze(-1) - y).square().mean() / 2


def assert_close(a: Tensors, b: Tensors) -> None:
    a, b = ({n: t for n, t in one.items() if n != OTHER} for one in (a, b))
    assert set(a) == set(b)
    for n in a:
        torch.testing.assert_close(a[n], b[n], rtol=1e-12, atol=1e-14)


class Growing(torch.optim.Optimizer):
    """Steps that grow, counted in the group, and a number in the state."""

    def __init__(self, params: list, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                number = self.state[p].get("number", 0) + 1
                p.data -= group["lr"] * (number + self.steps) * p.grad
                self.state[p]["number"] = number


class Counting(Growing):
    """The same, but all that it remembers is in its state."""

    def step(self) -> None:
        self.steps = 0
        super().step()


ANY = [torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.ASGD, torch.optim.Rprop]
ANY += [torch.optim.NAdam, torch.optim.Adafactor, Novograd, Growing, Counting]


@sweep("kept", [False, True])
@sweep("kind", ANY)
def test_any_optimizer_is_of_one_client_alone(kind: type, kept: bool) -> None:
    """Against loops of plain PyTorch, one per client, the clients by turns."""
    assert remembers_elsewhere(partial(kind, lr=0.01)) == (kind is Growing)
    if kept and kind is Growing:
        return  # refused
    task, data = ToyTask(norm=False, dtype=DOUBLE), toy_data(dtype=DOUBLE)
    _, federation, local = toy_federation(FedAvg(), task, data, lr=0.01, steps=3, kept=kept)
    local.model.make_optimizer, local.model._plans = partial(kind, lr=0.01), {}
    plain: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}
    weights = {c: federation.clients[c].weights for c in ("c0", "c1")}
    for number in range(3):
        for c in weights:
            client = federation.clients[c]
            client.begin(number, "fit", 0)
            weights[c] = client.train(weights[c])
            network = plain[c][0] if c in plain else ToyTask(norm=False, dtype=DOUBLE).network
            optimizer = plain[c][1] if c in plain and kept else kind(network.parameters(), lr=0.01)
            plain[c] = network, optimizer
            for _ in range(3):
                optimizer.zero_grad()
                square_loss(network, client.data.x, client.data.y).backward()
                optimizer.step()
    for c, (network, _) in plain.items():
        assert_close(weights[c], dict(network.named_parameters()))


@pytest.mark.parametrize("kept", [False, True], ids=["fresh", "kept"])
def test_momentum_is_fresh_or_kept(kept: bool) -> None:
    client = toy_client(kept=kept)
    got = expected = client.weights
    velocity: Tensors = {}
    for number in range(3):
        client.begin(number, "fit", 0)
        got = client.train(got)
        expected = by_hand(client, expected, 3, velocity)
        if not kept:
            velocity.clear()
    assert_close(got, expected)
    assert bool(client.state_dict()["optimizers"]) == kept


def test_kept_momentum_belongs_to_phase_and_call() -> None:
    client = toy_client(kept=True)
    first = client.train(client.weights)
    second = client.train(client.weights)
    assert digest(first) == digest(second)
    assert set(client.state_dict()["optimizers"]) == {"fit/1", "fit/2"}


def test_kept_momentum_of_one_client_is_not_another_ones() -> None:
    _, federation, _ = toy_federation(FedAvg(), momentum=MOMENTUM, kept=True)
    alone = federation.clients["c1"]
    _, twin, _ = toy_federation(FedAvg(), momentum=MOMENTUM, kept=True)
    for number in range(2):
        for c in twin.clients.values():
            c.begin(number, "fit", 0)
            ends = c.train(c.weights)
            if c.id == "c1":
                among_others = ends
        alone.begin(number, "fit", 0)
        end = alone.train(alone.weights)
    assert digest(end) == digest(among_others)


def test_penalty_adds_its_gradient_but_not_to_the_loss() -> None:
    client, mu = toy_client(), 0.7
    anchor = {n: t + 1 for n, t in client.weights.items()}

    def penalty(weights: Tensors) -> Tensor:
        return mu / 2 * sum((t - anchor[n]).square().sum() for n, t in weights.items())

    def change(gradients: Tensors, weights: Tensors) -> Tensors:
        return {n: g + mu * (weights[n] - anchor[n]) for n, g in gradients.items()}

    got = client.train(client.weights, penalty=penalty)
    assert_close(got, by_hand(client, client.weights, 3, {}, change))
    client.train(client.weights, steps=1)
    without = client.loss
    client.train(client.weights, steps=1, penalty=penalty)
    assert client.loss == without


def test_clip_bounds_the_norm_of_the_whole_gradient() -> None:
    client, clip = toy_client(), 0.01
    client.trainer.budget = LocalBudget(steps=3, clip=clip)

    def change(gradients: Tensors, weights: Tensors) -> Tensors:
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        assert norm > clip
        return {n: g * clip / (norm + 1e-6) for n, g in gradients.items()}

    got = client.train(client.weights)
    assert_close(got, by_hand(client, client.weights, 3, {}, change))


@sweep("changes", [{}, {"clip": 0.01}, {"second": True}])
@sweep("steps", [2, 5])
def test_accumulated_batches_equal_a_batch_as_large(steps: int, changes: dict) -> None:
    # 8 samples: steps of 3 + 3, then 2, against steps of 6, then 2; the penalty counts once and the
    # clipping acts on the sum of everything.
    mu, seen = 0.7, {}

    def penalty(weights: Tensors) -> Tensor:
        return mu / 2 * sum((t - 1).square().sum() for t in weights.values())

    def train(**options: int) -> tuple[Tensors, LocalClient]:
        client = toy_client(norm=False, clip=changes.get("clip"), **options)
        gradients = seen.setdefault(client.data.batch_size, [])

        def second(weights: Tensors, grad_at: Callable[[Tensors], Tensors]) -> None:
            gradients.append(grad_at({n: t + 0.1 for n, t in weights.items()}))

        after = second if changes.get("second") else None
        end = client.train(client.weights, steps=steps, penalty=penalty, after_step=after)
        return end, client

    (got, ours), (expected, plain) = train(batch=3, accumulate=2), train(batch=6)
    assert_close(got, expected)
    for one, other in zip(seen[3], seen[6], strict=True):
        assert_close(one, other)
    assert ours.loss == pytest.approx(plain.loss, rel=1e-12)
    each = 2 if changes.get("second") else 1
    assert (ours.steps_done, plain.steps_done) == (steps, steps)
    short = steps // 2  # steps of one batch alone
    assert ours.passes == Passes(gradient=each * (2 * (steps - short) + short))
    assert plain.passes == Passes(gradient=each * steps)


def test_scaled_losses_change_nothing_and_overflow_is_repeated() -> None:
    plain, scaled = toy_client(), toy_client()
    scaled.trainer.gradients.half, limit, tried = True, 1000.0, []

    def backward(loss: Tensor) -> None:  # as in float16, where large gradients are infinite
        tried.append(loss.item())
        (loss if loss.item() < limit else loss * math.inf).backward()

    scaled.trainer.gradients.backward = backward
    assert_close(scaled.train(scaled.weights), plain.train(plain.weights))
    assert scaled.steps_done == plain.steps_done == 3
    assert scaled.passes.gradient == len(tried) > 3  # what was repeated is counted
    scaled.trainer.gradients.backward = lambda loss: (loss * math.inf).backward()
    with pytest.raises(NonFiniteError, match=r"overflow in float16; choose .*bf16-mixed"):
        scaled.train(scaled.weights)


@pytest.mark.parametrize(
    ("precision", "mend"),
    [
        (nullcontext, "infinite; lower optimizer.lr"),
        (partial(torch.autocast, "cpu", torch.bfloat16), "infinite; train with trainer.precision="),
    ],
)
def test_a_loss_that_is_no_number_in_mixed_precision_names_the_precision(precision, mend) -> None:
    client = toy_client(norm=False, lr=1e29, steps=12)
    client.trainer.gradients.precision = precision
    with pytest.raises(NonFiniteError, match=mend):
        client.train(client.weights)


def test_float16_trains_as_single_precision_and_keeps_weights_in_it() -> None:
    ends, passes = {}, {}
    for half in (False, True):
        data = toy_data(batch=4)
        data[1].y *= 1000  # gradients that overflow at first
        _, federation, local = toy_federation(FedAvg(), ToyTask(), data, lr=1e-6, steps=6)
        client = federation.clients["c1"]
        client.begin(0, "fit", 0)
        if half:
            local.gradients.half, local.gradients.precision = (
                True,
                partial(torch.autocast, "cpu", torch.float16),
            )
        ends[half], passes[half] = client.train(client.weights), client.passes.gradient
    assert passes[True] > passes[False] == 6
    assert not torch.equal(ends[True]["head.weight"], client.weights["head.weight"])
    assert torch.equal(ends[False].pop(OTHER), ends[True][OTHER])  # a repeated pass counts once
    for name, exact in ends[False].items():
        assert ends[True][name].dtype == torch.float32
        torch.testing.assert_close(ends[True][name], exact, rtol=1e-3, atol=1e-4)


def test_after_step_gets_gradients_of_the_same_batch_elsewhere() -> None:
    client = toy_client(norm=False, batch=3)
    batches: list[dict] = []
    original = client.data.train_batches

    def recording(seed: int) -> Iterator[dict]:
        for batch in original(seed):
            batches.append(batch)
            yield batch

    client.data.train_batches = recording
    network = copy.deepcopy(client.trainer.network)
    at = {n: t + 0.1 for n, t in client.weights.items()}
    network.load_state_dict(at)
    calls = 0

    def after_step(weights: Tensors, grad_at: Callable[[Tensors], Tensors]) -> None:
        nonlocal calls
        before = digest(weights)
        gradients = grad_at(at)
        assert digest(weights) == before
        with torch.enable_grad():
            loss = square_loss(network, batches[-1]["image"], batches[-1]["label"])
        exact = torch.autograd.grad(loss, list(network.parameters()))
        assert_close(gradients, dict(zip(gradients, exact, strict=True)))
        calls += 1

    client.data.batch_size = 3
    watched = client.train(client.weights, steps=5, after_step=after_step)
    assert calls == 5
    client.begin(0, "fit", 0)
    assert digest(watched) == digest(client.train(client.weights, steps=5))


def test_after_step_may_change_the_weights() -> None:
    client = toy_client()

    def zero(weights: Tensors, grad_at: Callable[[Tensors], Tensors]) -> None:
        weights["head.bias"].zero_()

    end = client.train(client.weights, after_step=zero)
    assert end["head.bias"].item() == 0
    assert end["head.weight"].abs().sum() > 0


STATISTICS = {"norm.running_mean", "norm.running_var"}


@pytest.mark.parametrize("policy", ["averaged", "local", "frozen"])
def test_buffer_policies(policy: str) -> None:
    client = toy_client(buffers=policy)
    end = client.train(client.weights)
    assert (OTHER in end) == (policy != "frozen")  # the counter of the batches
    changed = {n for n in client.weights if not torch.equal(end[n], client.weights[n])}
    parameters = set(client.weights) - STATISTICS - {"body.bias"}  # which normalisation cancels
    assert parameters <= changed
    assert STATISTICS & changed == (set() if policy == "frozen" else STATISTICS)
    assert (set(client.split.shared) >= STATISTICS) == (policy == "averaged")


@pytest.mark.parametrize("policy", ["averaged", "local", "frozen"])
def test_frozen_statistics_normalise(policy: str) -> None:
    client = toy_client(buffers=policy)
    network = copy.deepcopy(client.trainer.network)
    start = dict(client.weights)
    start["norm.running_mean"] = torch.full_like(start["norm.running_mean"], 0.5)
    network.load_state_dict(start, strict=False)
    network.train(policy != "frozen")
    client.train(start, steps=1)
    expected = square_loss(network, client.data.x, client.data.y).item()
    assert client.loss == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("update", ["personal", "shared"])
def test_the_other_part_comes_back_as_given(update: str) -> None:
    client = toy_client(FedPer())
    end = client.train(client.weights, update=update)
    given, trained = client.split.shared, client.split.personal
    if update == "shared":
        given, trained = trained, given
    assert all(end[n] is client.weights[n] for n in given)
    assert any(not torch.equal(end[n], client.weights[n]) for n in trained)


def test_alternating_parts_equals_separate_trainers() -> None:
    client = toy_client(FedPer())
    ends = [client.train(client.weights, update=u) for u in ("personal", "shared", "all")]
    for position, update in enumerate(("personal", "shared", "all"), start=1):
        other = toy_client(FedPer())
        other._calls = position - 1
        assert digest(ends[position - 1]) == digest(other.train(other.weights, update=update))


def test_nothing_to_train_is_an_error() -> None:
    client = toy_client()
    with pytest.raises(ConfigError, match="personal"):
        client.train(client.weights, update="personal")


def test_start_and_result_are_not_the_network() -> None:
    client = toy_client()
    before = digest(client.weights)
    end = client.train(client.weights)
    kept = digest(end)
    client.train(client.weights, steps=1)
    assert digest(client.weights) == before
    assert digest(end) == kept


@pytest.mark.parametrize("batch", [None, 3, 4])
def test_gradient_is_that_of_the_mean_loss(batch: int | None) -> None:
    client = toy_client(norm=False, batch=batch)
    network = copy.deepcopy(client.trainer.network)
    loss = square_loss(network, client.data.x, client.data.y)
    exact = torch.autograd.grad(loss, list(network.parameters()))
    got = client.gradient(client.weights)
    assert_close(got, dict(zip(got, exact, strict=True)))


def test_gradient_takes_no_step_and_keeps_statistics() -> None:
    client = toy_client()
    before = digest(client.weights)
    once = client.gradient(client.weights)
    assert set(once) == set(client.split.parameters("all"))
    assert digest(once) == digest(client.gradient(client.weights))
    assert digest(client.weights) == before
    assert client.steps_done == 0


def test_loss_at_is_the_one_of_the_gradient() -> None:
    client = toy_client(norm=False, batch=3)
    network = copy.deepcopy(client.trainer.network)
    exact = square_loss(network, client.data.x, client.data.y).item()
    assert client.loss_at(client.weights) == pytest.approx(exact, rel=1e-12)
    before = digest(client.weights)
    one = client.loss_at(client.weights, batches=1)
    assert one != exact
    assert client.loss_at(client.weights, batches=1) == one  # the same batch, to compare models
    assert digest(client.weights) == before
    assert client.steps_done == 0


def test_a_second_gradient_leaves_the_statistics_of_the_step() -> None:
    client = toy_client(norm=True)

    def after_step(weights: Tensors, grad_at: Callable[[Tensors], Tensors]) -> None:
        grad_at({n: t + 1.0 for n, t in weights.items()})

    watched = client.train(client.weights, steps=3, after_step=after_step)
    client.begin(0, "fit", 0)
    assert digest(watched) == digest(client.train(client.weights, steps=3))


def test_gradient_of_an_unused_parameter_is_zero() -> None:
    client = toy_client()
    client.trainer.gradients.loss = lambda batch: client.trainer.network.head.bias.square().sum()
    got = client.gradient(client.weights)
    assert got["body.weight"].count_nonzero() == 0
    assert got["head.bias"].item() == pytest.approx(2 * client.weights["head.bias"].item())


def test_steps_run_on_over_epochs_that_differ() -> None:
    client = toy_client(batch=3)  # 8 samples: 3 batches per epoch
    seeds, sizes = [], []
    original = client.data.train_batches

    def recording(seed: int) -> Iterator[dict]:
        seeds.append(seed)
        for batch in original(seed):
            sizes.append(len(batch["label"]))
            yield batch

    client.data.train_batches = recording
    client.train(client.weights, steps=7)
    assert sizes == [3, 3, 2, 3, 3, 2, 3]
    assert len(set(seeds)) == 3
    assert client.steps_done == 7


def test_passes_are_those_of_each_client_and_of_all_its_calls() -> None:
    client = toy_client(batch=3)  # 8 samples: 3 batches per epoch
    other = LocalClient(client.data, client.trainer, client.weights, {})

    def twice(weights: Tensors, grad_at: Callable[[Tensors], Tensors]) -> None:
        grad_at(weights)

    client.train(client.weights, steps=5)
    assert client.passes == Passes(gradient=5, forward=0)
    client.train(client.weights, steps=2, after_step=twice)
    assert client.passes == Passes(gradient=9, forward=0)
    assert client.steps_done == 7
    client.gradient(client.weights)
    client.gradient(client.weights, batches=2)
    assert client.passes == Passes(gradient=14, forward=0)
    client.loss_at(client.weights)
    client.loss_at(client.weights, batches=1)
    assert client.passes == Passes(gradient=14, forward=4)
    assert client.steps_done == 7
    assert other.passes == Passes()
    other.train(client.weights, steps=1)
    assert (other.passes, client.passes) == (Passes(1, 0), Passes(14, 4))


def test_a_client_without_batches_is_named() -> None:
    client = toy_client()
    client.data.train_batches = lambda seed: iter(())
    with pytest.raises(ConfigError, match="c1"):
        client.train(client.weights)


def test_randomness_is_drawn_from_the_key_alone() -> None:
    client = toy_client()
    client.trainer.gradients.loss = lambda batch: (
        square_loss(client.trainer.network, batch["image"], batch["label"]) * torch.rand(())
    )
    torch.manual_seed(5)
    stream = torch.get_rng_state()
    first = digest(client.train(client.weights))
    assert torch.equal(torch.get_rng_state(), stream)
    torch.manual_seed(6)
    assert digest(client.train(client.weights)) != first  # the second call of the phase
    client.begin(0, "fit", 0)
    assert digest(client.train(client.weights)) == first
    client.begin(1, "fit", 0)
    assert digest(client.train(client.weights)) != first


def test_a_loss_that_is_not_finite_names_the_place() -> None:
    _, federation, _ = toy_federation(FedAvg(), lr=1e28, steps=5)
    with pytest.raises(NonFiniteError, match=r"^Client c0, round 1, phase fit: .*optimizer\.lr"):
        run_reference(federation, 1)


def test_entries_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    client = toy_client()
    look_up, calls = live.splitting.float_entries, []
    monkeypatch.setattr(
        live.splitting, "float_entries", lambda net: calls.append(0) or look_up(net)
    )
    for update in ("all", "shared"):
        client.train(client.weights, update=update)
        client.gradient(client.weights, update=update)
    assert calls == []  # the initial weights had looked them up


def test_buffers_that_a_move_replaced_are_found_again() -> None:
    client = toy_client()
    before = digest(client.train(client.weights))
    client.trainer.network.float().double()  # as from GPU to CPU and back: new buffers
    client.begin(0, "fit", 0)
    assert digest(client.train(client.weights)) == before
    client.trainer.model.load(client.weights)
    live = client.trainer.network.state_dict()
    assert all(torch.equal(live[n], t) for n, t in client.weights.items())


def test_frozen_layers_train_again_afterwards() -> None:
    client = toy_client(buffers="frozen")
    client.train(client.weights)
    assert all(m.training for m in client.trainer.network.modules())


def test_schedule_sets_the_rate_of_each_round() -> None:
    sgd = partial(torch.optim.SGD, lr=LR)
    halve = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    assert learning_rates(sgd, halve, 3) == [LR, LR / 2, LR / 4]
    task, data = ToyTask(dtype=DOUBLE), toy_data(dtype=DOUBLE)[0]
    split = FedAvg().split(task.network, (), "averaged")
    trainer = LocalTrainer(task.network, task.loss, split, sgd, halve, rounds=3)
    client = LocalClient(data, trainer, trainer.model.initial(), {})
    steps = []
    for number in range(4):
        client.begin(number, "fit", 0)
        end = client.train(client.weights, steps=1)
        steps.append((end["head.bias"] - client.weights["head.bias"]).item())
    ratios = [a / b for a, b in zip(steps[1:], steps[:-1], strict=True)]
    assert ratios == pytest.approx([0.5, 0.5, 1.0])  # after its end the schedule stands


@sweep(
    "options",
    [{"steps": 0}, {"epochs": 0}, {"clip": 0.0}, {"clip": math.nan}, {"optimizer_state": "lost"}],
)
def test_budget_refuses(options: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        LocalBudget(**options)


def test_optimizer_state_survives_a_save() -> None:
    ends = []
    for reload in (False, True):
        client = toy_client(kept=True)
        client.train(client.weights)
        if reload:
            saved, client = client.state_dict(), toy_client(kept=True)
            client.load_state_dict(saved)
        client.begin(1, "fit", 0)
        ends.append(digest(client.train(client.weights)))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("policy", ["averaged", "frozen"])
def test_a_lone_last_sample_is_no_batch_for_batchnorm(policy):
    data = toy_data(1, batch=5)  # six samples: five and one
    _, federation, local = toy_federation(FedAvg(), data=data, steps=4, buffers=policy)
    sizes, loss = [], local.gradients.loss
    local.gradients.loss = lambda batch: sizes.append(len(batch["label"])) or loss(batch)
    run_reference(federation, 1)
    assert sizes == ([5, 5, 5, 5] if policy == "averaged" else [5, 1, 5, 1])
    assert federation.clients["c0"].steps_done == 4


def test_statistics_that_stay_follow_the_batches_and_parameters_do_not():
    """Each of k batches takes a tenth of the way to the statistics of the data."""
    data = toy_data(1, dtype=torch.float64)
    task = ToyTask(dtype=torch.float64)
    _, federation, _ = toy_federation(FedAvg(), task, data, buffers="local", steps=3)
    client = federation.clients["c0"]
    client.begin(0, "fit", 0)
    start = {**client.weights, "norm.running_mean": torch.full((4,), 5.0, dtype=torch.float64)}
    found = with_statistics(client, start)
    hidden = data[0].x @ start["body.weight"].T + start["body.bias"]
    expected = 0.9**3 * 5 + (1 - 0.9**3) * hidden.mean(0)
    torch.testing.assert_close(found["norm.running_mean"], expected)
    spread = 0.9**3 + (1 - 0.9**3) * hidden.var(0)
    torch.testing.assert_close(found["norm.running_var"], spread)
    for name in ("body.weight", "body.bias", "norm.weight", "head.weight"):
        assert torch.equal(found[name], start[name])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_reach_of_a_memory_that_has_settled_and_along_a_gradient(momentum):
    """Heavy ball comes to eta / (1 - m) per step; Adam goes eta along the signs."""
    sgd = partial(torch.optim.SGD, lr=1.0, momentum=momentum)
    gradient = torch.tensor([3.0, -1.0, 0.5])
    settled = effective_step_length(sgd, 0.1, 4, fresh=False, along=lambda: gradient)
    assert settled == pytest.approx(4 * 0.1 / (1 - momentum))
    fresh = effective_step_length(sgd, 0.1, 4, along=lambda: gradient)
    assert fresh == pytest.approx(
        0.1 * sum(sum(momentum**i for i in range(k)) for k in range(1, 5))
    )
    adam = effective_step_length(partial(torch.optim.Adam, lr=1.0), 0.1, 4, along=lambda: gradient)
    expected = 4 * 0.1 * gradient.abs().sum() / gradient.square().sum()
    assert adam == pytest.approx(float(expected), rel=1e-5)
    still = effective_step_length(
        partial(torch.optim.Adam, lr=1.0), 0.1, 4, along=lambda: torch.zeros(3)
    )
    assert still == pytest.approx(0.4)


def test_gradients_of_one_phase_can_be_of_the_same_batches():
    """Those of the loss, too: its finite differences are the gradient."""
    client = toy_client(norm=False, batch=4)
    at = client.weights
    first, again = (client.gradient(at, batches=1, same=True) for _ in range(2))
    other = client.gradient(at, batches=1)
    assert digest(first) == digest(again) != digest(other)
    step = {n: 1e-6 * torch.ones_like(t) for n, t in at.items()}
    up, down = (
        client.loss_at({n: t + sign * step[n] for n, t in at.items()}, batches=1)
        for sign in (1, -1)
    )
    slope = sum(float((g * step[n]).sum()) for n, g in first.items())
    assert (up - down) / 2 == pytest.approx(slope, rel=1e-6)


def test_groups_of_parameters_keep_rates_of_their_own() -> None:
    """As in plain PyTorch; the schedule and the method's phases scale all of them."""
    halve = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)

    def split_up(params: list[nn.Parameter], network: nn.Module) -> torch.optim.Optimizer:
        slow = {"params": network.body.parameters(), "lr": LR / 10}
        return torch.optim.SGD([slow, {"params": network.head.parameters()}], lr=LR)

    def by_place(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [{"params": params[:2], "lr": LR / 10}, {"params": params[2:]}], lr=LR
        )

    for factory in (split_up, by_place):
        task, data = ToyTask(norm=False, dtype=DOUBLE), toy_data(dtype=DOUBLE)[0]
        split = FedPer().split(task.network, task.personal, "averaged")
        trainer = LocalTrainer(task.network, task.loss, split, factory, halve, rounds=2)
        assert trainer.rates == [LR, LR / 2]
        client = LocalClient(data, trainer, trainer.model.initial(), {})
        plain = copy.deepcopy(task.network)
        optimizer = factory(list(plain.parameters()), *([plain] if factory is split_up else []))
        end = client.weights
        for number in range(2):
            client.begin(number, "fit", 0)
            end = client.train(end, steps=2)
            for _ in range(2):
                optimizer.zero_grad()
                square_loss(plain, data.x, data.y).backward()
                optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] /= 2
        assert_close(end, plain.state_dict())
        with pytest.raises(ConfigError, match="needs one step size for all layers"):
            client.effective_step_length(2)


def test_an_optimizer_of_other_tensors_or_of_some_alone_is_refused() -> None:
    mine = ToyTask(norm=False)
    for factory, sentence in (
        (
            lambda _: torch.optim.SGD(mine.network.parameters(), lr=LR),
            "are not of the network that",
        ),
        (lambda p: torch.optim.SGD(p[:1], lr=LR), "leaves out body.bias; give it all"),
    ):
        task, data = ToyTask(norm=False), toy_data()[0]
        split = FedAvg().split(task.network, (), "averaged")
        trainer = LocalTrainer(task.network, task.loss, split, factory)
        client = LocalClient(data, trainer, trainer.model.initial(), {})
        with pytest.raises(ConfigError, match=sentence):
            client.train(client.weights, steps=1)
