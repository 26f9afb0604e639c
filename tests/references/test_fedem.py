"""FedEM against Algorithm 1 in NumPy: responsibilities of every sample, on minibatches."""

from __future__ import annotations

import copy
from itertools import islice

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from medfed.federation.algorithm import Cohort
from medfed.federation.reference import onboarded_client, run_onboarding, run_reference
from medfed.models.networks.canonical import Canonical
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.fedem import FedEM
from medfed.standalone.errors import ConfigError
from tests.personalize.whole_runs import assert_one_sentence
from tests.references.pairing import drawn_in
from tests.toys import ToyData, ToyTask, canonical_toy, toy_federation

COUNT, CLASSES, BATCH = 3, 3, 4
# Options of the method, options of the run.
CASES = {
    "plain": ({}, {}),
    "uniform-momentum": ({"weighting": "uniform"}, {"momentum": 0.9, "lr": 0.02}),
    "half": ({}, {"fraction": 0.5, "rounds": 6}),
    "batches-half": ({"membership_batches": 1}, {"fraction": 0.5, "rounds": 6}),
}


class Softmax(ToyTask):
    """K linear classifiers, of which the probabilities are mixed."""

    personal = ("membership",)

    def __init__(self, count: int = COUNT, mix: str = "outputs"):
        super().__init__(norm=False, dtype=torch.float64)
        nets = []
        for k in range(count):
            torch.manual_seed(20 + k)
            nets.append(nn.Sequential(nn.Linear(3, CLASSES, dtype=torch.float64)))
        self.single = copy.deepcopy(nets[0])
        self.network = Canonical(nets, ["*"], mix)

    def loss(self, batch):
        return cross_entropy(self.network(batch["image"]), batch["label"])


class One(Softmax):
    """The first of them alone."""

    personal = ()

    def __init__(self):
        super().__init__()
        self.network = self.single


def clients(samples: int = 7) -> list[ToyData]:
    """Two populations, whose labels are turned round against each other; mixed half in c3."""
    rng, data = np.random.default_rng(6), []
    slope = rng.normal(size=(CLASSES, 3)) * 2
    for i in range(4):
        x = rng.normal(size=(samples + 3 * i, 3))
        turned = np.arange(len(x)) % 2 if i == 3 else np.full(len(x), i % 2)
        y = ((x @ slope.T + rng.gumbel(size=(len(x), CLASSES))).argmax(1) + turned) % CLASSES
        data.append(ToyData(f"c{i}", torch.tensor(x), torch.tensor(y), batch_size=BATCH))
    return data


def federation(method, task=None, data=None, rounds=4, fraction=1.0, **changes):
    settings = {"steps": 5, "lr": 0.2, **changes}
    _, fed, local = toy_federation(
        method,
        task or Softmax(),
        data or drawn_in(clients(), BATCH),
        rounds=rounds,
        cohort=Cohort(fraction=fraction),
        **settings,
    )
    start = {n: t.detach().numpy().copy() for n, t in local.model.initial().items()}
    return run_reference(fed, rounds), start


def losses(w: np.ndarray, b: np.ndarray, x: np.ndarray, y: np.ndarray):
    """l(theta; s) of every sample, and dl/dlogits (S, classes)."""
    logits = x @ w.T + b
    raised = np.exp(logits - logits.max(1, keepdims=True))
    p = raised / raised.sum(1, keepdims=True)
    return -np.log(p[np.arange(len(y)), y]), p - np.eye(CLASSES)[y]


def responsibilities(theta, pi, x, y) -> np.ndarray:
    """q_k(s), (K, S)."""
    q = pi[:, None] * np.exp([-losses(w, b, x, y)[0] for w, b in theta])
    return q / q.sum(0)


def fedem(fed, start, method, rounds, steps=5, lr=0.2, momentum=0.0):
    """All theta_k and pi_i after the last round."""
    data = list(fed.clients.values())
    draws = [iter(c.data.drawn) for c in data]
    sizes = [c.num_samples if method.weighting == "samples" else 1 for c in data]
    key = "canonical.{}.network.0.{}"
    theta = [(start[key.format(k, "weight")], start[key.format(k, "bias")]) for k in range(COUNT)]
    pi = [np.full(COUNT, 1 / COUNT) for _ in data]
    for number in range(rounds):
        cohort = [fed.ids.index(c) for c in fed.members(number)]
        ends = {}
        for i in cohort:
            epoch = -(-data[i].num_samples // BATCH)
            seen = list(islice(draws[i], method.membership_batches or epoch))
            x, y = (np.concatenate([part[j] for part in seen]) for j in (0, 1))
            pi[i] = responsibilities(theta, pi[i], x, y).mean(1)
            own = [(w.copy(), b.copy()) for w, b in theta]
            velocity = [(0 * w, 0 * b) for w, b in theta]
            for x, y in islice(draws[i], steps):
                q = responsibilities(own, pi[i], x, y)
                for k in range(COUNT):
                    back = q[k][:, None] * losses(*own[k], x, y)[1] / len(y)
                    gradient = (back.T @ x, back.sum(0))
                    velocity[k] = [
                        momentum * v + g for v, g in zip(velocity[k], gradient, strict=True)
                    ]
                    own[k] = [p - lr * v for p, v in zip(own[k], velocity[k], strict=True)]
            ends[i] = own
        whole = sum(sizes[i] for i in cohort)
        theta = [
            [sum(sizes[i] * ends[i][k][part] for i in cohort) / whole for part in (0, 1)]
            for k in range(COUNT)
        ]
    return theta, pi


@pytest.mark.parametrize("case", CASES)
def test_equals_algorithm_1(case):
    options, changes = CASES[case]
    method, rounds = FedEM(**options), changes.get("rounds", 4)
    fed, start = federation(method, **changes)
    passed = {k: v for k, v in changes.items() if k in ("momentum", "lr")}
    theta, pi = fedem(fed, start, method, rounds, **passed)
    for k, (w, b) in enumerate(theta):
        found = [fed.server["shared"][f"canonical.{k}.network.0.{n}"] for n in ("weight", "bias")]
        assert found[0].numpy() == pytest.approx(w, abs=1e-10)
        assert found[1].numpy() == pytest.approx(b, abs=1e-10)
    for client, expected in zip(fed.ids, pi, strict=True):
        assert fed.personal_model(client)["membership"].numpy() == pytest.approx(
            expected, abs=1e-10
        )
        assert fed.server["membership"][client].numpy() == pytest.approx(expected, abs=1e-10)
    assert np.abs(np.array(pi) - 1 / COUNT).max() > 0.05


def test_the_likelihood_never_falls_and_memberships_follow_the_populations():
    """Whole data, small steps; c0 and c2 come from one population, c1 from the other."""
    data = [ToyData(d.id, d.x, d.y) for d in clients(30)]
    _, fed, local = toy_federation(FedEM(), Softmax(2), data, rounds=25, steps=5, lr=0.5)
    heights = []

    def measure(_):
        total = 0.0
        for c in fed.clients.values():
            total += c.num_samples * local.mean_loss(
                c.data, fed.personal_model(c.id), (0,), None, "train"
            )
        heights.append(total)

    run_reference(fed, 25, measure)
    assert (np.diff(heights) < 1e-9).all()
    pi = np.stack([fed.server["membership"][c].numpy() for c in fed.ids])
    first = pi[0].argmax()
    assert pi[[0, 2], first].min() > 0.8
    assert pi[1, first] < 0.2
    assert 0.2 < pi[3, first] < 0.8
    assert fed.memberships().shape == (26, 4, 2)


def test_one_model_is_fedavg():
    one, _ = federation(FedEM(), Softmax(1))
    plain, _ = federation(FedAvg(), One())
    for name, tensor in plain.server["shared"].items():
        assert torch.equal(one.server["shared"][f"canonical.0.network.{name}"], tensor)


def test_an_onboarded_client_finds_the_likeliest_mixture_of_models_that_stay():
    """EM of pi alone, to its end: the maximum over a fine grid of two models."""
    fed, _ = federation(FedEM(), Softmax(2), drawn_in(clients(30), BATCH), rounds=12)
    new = clients(40)[3]
    new.batch_size = new.num_samples
    client = onboarded_client(fed, new)
    message, ledger = run_onboarding(fed, client)
    found = fed.algorithm.fit_membership(
        client, fed.algorithm.onboarding_start(client, message), 150
    )
    x, y = new.x.numpy(), new.y.numpy()
    shared = {n: t.numpy() for n, t in fed.server["shared"].items()}
    key = "canonical.{}.network.0.{}"
    likely = np.exp(
        [
            -losses(shared[key.format(k, "weight")], shared[key.format(k, "bias")], x, y)[0]
            for k in (0, 1)
        ]
    )
    grid = np.linspace(0, 1, 2001)
    best = grid[np.argmax([np.log(g * likely[0] + (1 - g) * likely[1]).mean() for g in grid])]
    assert 0.05 < best < 0.95
    assert found.numpy() == pytest.approx([best, 1 - best], abs=1e-3)
    assert ledger.total(direction="up") == 0


def test_other_losses_keep_the_simplex():
    """Squared errors of mixed outputs, far from any likelihood."""
    data = clients()
    for d in data:
        d.y = 50.0 * d.x.sum(1)
    _, fed, _ = toy_federation(FedEM(), canonical_toy(), data, rounds=3, lr=1e-4)
    run_reference(fed, 3)
    found = fed.memberships()
    assert float(found.min()) >= 0
    assert found.sum(-1).numpy() == pytest.approx(np.ones((4, 4)))


def test_mixed_parameters_are_refused():
    with pytest.raises(
        ConfigError, match="choose canonical=models, or canonical=outputs"
    ) as caught:
        federation(FedEM(), Softmax(mix="parameters"))
    assert_one_sentence(caught.value)
    with pytest.raises(
        ConfigError, match=r"algorithm\.membership_batches must be 1 or more, or null"
    ):
        FedEM(membership_batches=0)
