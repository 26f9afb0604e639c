"""FedAMP and HeurFedAMP against Algorithm 1 in NumPy, on minibatches, and where they end."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import numpy as np
import pytest
import torch

from medfed.federation.algorithm import Cohort
from medfed.federation.reference import onboarded_client, run_onboarding, run_reference
from medfed.personalize.fedamp import FedAMP, attention
from medfed.personalize.local import Local
from medfed.standalone.errors import ConfigError
from tests.personalize.whole_runs import assert_one_sentence, gap, run
from tests.references.linear_net import ALL, Model, gradient
from tests.references.one_layer import Quadratics, personal, spread, two_groups, vector
from tests.references.pairing import Minibatches, assert_same, run_on_minibatches
from tests.toys import ToyTask, toy_data, toy_federation

# Options of the method, options of the run.
CASES = {
    "plain": ({"sigma": 0.7}, {}),
    "median": ({"strength": 3.0, "own": 0.1}, {}),
    "heuristic": ({"attention": "cosine", "sigma": 9.0, "own": 0.3}, {}),
    "heuristic-median": ({"attention": "cosine"}, {"fraction": 0.5, "rounds": 7}),
    "half-momentum": ({"own": 0.2}, {"momentum": 0.9, "lr": 0.01, "fraction": 0.5, "rounds": 7}),
}


def quarter(gaps: Iterable[float]) -> float:
    """Of the lower median."""
    found = sorted(gaps)
    typical = found[(len(found) - 1) // 2]
    return typical / 4 if typical > 1e-14 else 1.0


def weights(models: list[Model], method: FedAMP, i: int) -> list[float]:
    """xi_ij of one client, pair by pair."""
    flat = [np.concatenate([m[k].ravel() for k in ALL]) for m in models]
    far = lambda a, b: ((a - b) ** 2).sum()  # noqa: E731
    cos = lambda a, b: a @ b / np.linalg.norm(a) / np.linalg.norm(b)  # noqa: E731
    pairs = [(j, h) for j in range(len(flat)) for h in range(j)]
    if len(flat) == 1:
        return [1.0]
    if method.attention == "distance":
        sigma = method.sigma or quarter(far(flat[j], flat[h]) for j, h in pairs)
        slope = lambda u, w: np.exp(-far(u, w) / sigma) / sigma  # noqa: E731  A'
        company = [
            sum(slope(u, w) for j, w in enumerate(flat) if j != h) for h, u in enumerate(flat)
        ]
        alpha = (1 - method.own) / max(company)
        found = [alpha * slope(flat[i], w) for w in flat]
    else:
        sigma = method.sigma or 1 / quarter(1 - cos(flat[j], flat[h]) for j, h in pairs)
        raised = [np.exp(sigma * (cos(flat[i], w) - 1)) for w in flat]
        total = sum(raised) - raised[i]
        found = [(1 - method.own) * r / total for r in raised]
    found[i] = 1 - sum(f for j, f in enumerate(found) if j != i)
    return found


def fedamp(p: Minibatches, method: FedAMP) -> list[Model]:
    """All w_i after the last round."""
    own, seen = [dict(p.initial) for _ in p.batches], set()
    for cohort in p.cohorts:
        seen |= set(cohort)
        known, mixtures = sorted(seen), {}
        for n in cohort:
            xi = weights([own[k] for k in known], method, known.index(n))
            mixtures[n] = {
                k: sum(x * own[j][k] for x, j in zip(xi, known, strict=True)) for k in ALL
            }
        for n in cohort:
            w, velocity = own[n], {k: np.zeros_like(p.initial[k]) for k in ALL}
            for batch in islice(p.batches[n], p.steps):
                g = gradient(w, *batch)
                g = {k: g[k] + method.strength * (w[k] - mixtures[n][k]) for k in ALL}
                velocity = {k: p.momentum * velocity[k] + g[k] for k in ALL}
                w = {k: w[k] - p.lr * velocity[k] for k in ALL}
            own[n] = w
    return own


@pytest.mark.parametrize("case", CASES)
def test_equals_algorithm_1(case):
    options, changes = CASES[case]
    federation, problem = run_on_minibatches(FedAMP(**options), **changes)
    for client, expected in zip(federation.ids, fedamp(problem, FedAMP(**options)), strict=True):
        assert_same(federation.personal_model(client), expected, 1e-10)
        assert_same(federation.server[f"model/{client}"], expected, 1e-10)


@pytest.mark.parametrize("fraction", [1.0, 0.4])
def test_ends_where_attraction_and_gradients_balance(fraction):
    """grad f_i + s sum_j xi_ij (w_i - w_j) = 0 with xi of the paper: lambda A' is s xi."""
    q, sigma, strength, own = spread(), 6.0, 2.0, 0.2
    method = FedAMP(strength=strength, sigma=sigma, own=own)
    w = personal(q.run(method, 40 if fraction == 1 else 100, lr=0.3, steps=3, fraction=fraction))
    apart = w[:, None] - w[None]
    near = np.exp(-(apart**2).sum(-1) / sigma) * (1 - np.eye(5))
    pull = (1 - own) * near / near.sum(1).max()
    balance = q.gradients(w) + strength * (pull[..., None] * apart).sum(1)
    assert balance == pytest.approx(np.zeros((5, 4)), abs=1e-5)
    assert 0.01 < pull[~np.eye(5, dtype=bool)].min() / pull.max() < 0.9
    # It is the gradient of sum f_i + (lambda/2) sum_{i<j} A: half of the printed objective's.
    assert np.abs(q.gradients(w)).max() > 0.1


def test_no_tie_is_local_training():
    for momentum in (0.0, 0.9):
        changes = {"momentum": momentum, "fraction": None}
        changes.pop("fraction")
        assert gap(run(FedAMP(strength=0.0), **changes), run(Local(), **changes)) == 0


@pytest.mark.parametrize("kind", ["distance", "cosine"])
def test_weights_are_neither_none_nor_all_alike_whatever_the_size_of_the_network(kind):
    """Of sigma=null: groups are seen in ten weights and in a hundred thousand, small or large."""
    rng = np.random.default_rng(2)
    for d in (10, 100_000):
        for scale in (1e-3, 1.0, 30.0):
            centre = rng.normal(size=(2, d))
            rows = scale * (centre[[0, 1, 0, 1]] + 0.3 * rng.normal(size=(4, d)))
            found = attention(torch.tensor(rows), kind, 0.4, None).numpy()
            assert found.sum(1) == pytest.approx(np.ones(4))
            assert found.min() >= 0
            assert (found.diagonal() >= 0.4 - 1e-12).all()
            alike, other = found[0, 2], found[0, [1, 3]]
            assert 0.1 < alike <= 0.6
            assert other.max() < 0.3 * alike
    rows = torch.tensor(rng.normal(size=(4, 100_000)))
    assert (
        float(attention(rows, kind, 0.4, None).min()) > 0.1
    )  # where none are alike none are parted


def test_equal_models_and_one_model():
    one = torch.ones(3, 5)
    for kind in ("distance", "cosine"):
        assert attention(one[:1], kind, 0.2, None).tolist() == [[1.0]]
        even = attention(one, kind, 0.2, None).numpy()
        assert even == pytest.approx(np.full((3, 3), 0.4) - 0.2 * np.eye(3))


def test_who_never_took_part_draws_nobody():
    method, data = FedAMP(), toy_data(3, dtype=torch.float64)
    changes = {"cohort": Cohort(clients=["c0", "c2"]), "steps": 4}
    few = [d for d in data if d.id != "c1"]
    ends = []
    for clients in (data, few):
        task = ToyTask(norm=False, dtype=torch.float64)
        _, federation, _ = toy_federation(method, task, clients, **changes)
        ends.append(run_reference(federation, 3).personal_model("c0"))
    assert_same(*ends, 0)
    assert list(ends[0])


def test_an_onboarded_client_trains_alone_then_tied_to_its_mixture():
    q, steps, lr = two_groups(), 6, 0.5
    method = FedAMP(sigma=1.0, own=0.1, strength=2.0)
    federation = q.run(method, 12, steps=steps, lr=lr)
    new = Quadratics.drawn(np.array([[2.1, -2.0, 1.0, 0.1]]))
    client = onboarded_client(federation, new.data[0])
    message, ledger = run_onboarding(federation, client)
    w = np.zeros(4)
    for _ in range(steps // 2):
        w = w - lr * new.gradients(w)[0]
    others = np.stack([vector(federation.server[f"model/{c}"]) for c in federation.ids])
    rows = np.vstack([others, w])
    near = np.exp(-((rows[:, None] - rows) ** 2).sum(-1) / 1.0) - np.eye(7)
    xi = 0.9 * near[-1, :-1] / near.sum(1).max()
    mixture = (1 - xi.sum()) * w + xi @ others
    assert vector(message.parts["model"]) == pytest.approx(mixture, abs=1e-12)
    for _ in range(steps // 2):
        w = w - lr * (new.gradients(w)[0] + 2.0 * (w - mixture))
    assert vector(method.onboard(client, message)) == pytest.approx(w, abs=1e-12)
    assert ledger.total(direction="up") > 0
    assert xi[0] > 10 * xi[1]


def test_the_picture_shows_who_is_tied_to_whom():
    federation = two_groups().run(FedAMP(), 5)
    figure = federation.pictures()["attention"]
    (image,) = figure.axes[0].images
    shown = np.asarray(image.get_array())
    assert shown[0, 2] > 2 * shown[0, 1]
    assert np.isnan(shown.diagonal().astype(float)).all()
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == federation.ids


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"strength": -1.0}, r"algorithm\.strength must not be negative"),
        ({"mask_aware": True}, r"algorithm\.mask_aware is not for FedAMP"),
        ({"own": 1.2}, r"algorithm\.own must be in \[0, 1\], not 1\.2"),
        ({"sigma": 0.0}, r"algorithm\.sigma must be positive, not 0\.0"),
        ({"attention": "dot"}, r"algorithm\.attention='dot' is unknown; choose distance or cosine"),
    ],
)
def test_bad_values_are_named(options, culprit):
    with pytest.raises(ConfigError, match=culprit) as caught:
        FedAMP(**options)
    assert_one_sentence(caught.value)
