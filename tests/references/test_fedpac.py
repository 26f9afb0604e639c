"""FedPAC against its Algorithm 1 in NumPy; its quadratic problem solved over all supports."""

from __future__ import annotations

from itertools import combinations, islice

import numpy as np
import pytest
import torch

from medfed.federation.algorithm import Cohort
from medfed.federation.client import Features
from medfed.federation.reference import onboarded_client, run_onboarding
from medfed.personalize.features_base import means_of
from medfed.personalize.fedpac import FedPAC, head_weights, variance_of
from medfed.personalize.fedrep import FedRep
from tests.references.class_net import (
    LEAST,
    LR,
    ROUNDS,
    STEPS,
    K,
    clients,
    cohorts,
    features,
    finished,
    present,
    pulled,
)
from tests.references.linear_net import BODY, HEAD
from tests.references.pairing import assert_same
from tests.references.test_fedrod import gradient

LAMBDA = 0.7
SETTINGS = {
    "plain": {},
    "momentum-half": {"momentum": 0.9, "lr": 0.02, "cohort": Cohort(0.5)},
    "uneven-phases": {"head_share": 0.2},
}


def solved(form: np.ndarray) -> np.ndarray:
    """The least a^T form a on the simplex: the best of the exact solutions on every support."""
    best, least = np.zeros(len(form)), np.inf
    for size in range(1, len(form) + 1):
        for some in map(list, combinations(range(len(form)), size)):
            inverse = np.linalg.solve(form[np.ix_(some, some)], np.ones(size))
            part = inverse / inverse.sum()
            value = part @ form[np.ix_(some, some)] @ part
            if part.min() >= 0 and value < least:
                best, least = np.zeros(len(form)), value
                best[some] = part
    return best


def compared(w, data):
    """h and V by a covariance of all K d numbers of a sample, of the classes that may leave."""
    z, y = features(w, data.x.numpy()), data.y.numpy()
    rows = np.zeros((len(y), K, z.shape[1]))
    for k in present(data):
        rows[y == k, k] = z[y == k]
    flat = rows.reshape(len(y), -1)
    return flat.mean(0), np.trace(np.cov(flat.T, ddof=0)) / (len(y) / 2)


def mixture(n, heads, known):
    """A client's mixture of heads, given h and V of all who have some."""
    if n not in known:
        return heads[n]
    who = list(known)
    gaps = np.array([known[j][0] - known[n][0] for j in who])
    weights = solved(gaps @ gaps.T + np.diag([known[j][1] for j in who]))
    return {k: sum(a * heads[j][k] for a, j in zip(weights, who, strict=True)) for k in HEAD}


def steps(w, batches, names, count, means=None, lr=LR, momentum=0.0):
    velocity = {k: np.zeros_like(w[k]) for k in names}
    for x, y in islice(batches, count):
        g = gradient(w, x, y)
        if means:
            z = features(w, x)
            gap = np.array([z[i] - means[c] for i, c in enumerate(y)])
            term = pulled(w, x, 2 * LAMBDA * gap / gap.size)
            g = {k: g[k] + term[k] for k in g}
        velocity = {k: momentum * velocity[k] + g[k] for k in names}
        w = {**w, **{k: w[k] - lr * velocity[k] for k in names}}
    return w


@pytest.mark.parametrize("setting", SETTINGS)
def test_equals_algorithm_1(setting):
    data, changes = clients(), dict(SETTINGS[setting])
    share = changes.pop("head_share", 0.5)
    first = round(share * STEPS) or 1
    method = FedPAC(strength=LAMBDA, least_patients=LEAST, head_share=share)
    fed, initial = finished(method, data, **changes)
    phi, heads = {k: initial[k] for k in BODY}, [{k: initial[k] for k in HEAD}] * len(data)
    batches, means = [iter(d.drawn) for d in data], {}
    more = {k: changes[k] for k in ("lr", "momentum") if k in changes}
    mixed = 0
    for cohort in cohorts(fed):
        ends, sums, known = {}, {k: [] for k in range(K)}, {}
        for n in cohort:
            w = {**phi, **heads[n]}
            known[n] = compared(w, data[n])
            w = steps(w, batches[n], HEAD, first, **more)
            ends[n] = steps(w, batches[n], BODY, STEPS - first, means, **more)
            z, y = features(ends[n], data[n].x.numpy()), data[n].y.numpy()
            for k in present(data[n]):
                sums[k].append(z[y == k])
        total = sum(data[n].num_samples for n in cohort)
        phi = {k: sum(data[n].num_samples * ends[n][k] for n in cohort) / total for k in BODY}
        means |= {k: np.concatenate(rows).mean(0) for k, rows in sums.items() if rows}
        after = list(heads)
        for n in cohort:
            after[n] = mixture(n, ends, known)
            mixed += not np.allclose(after[n]["head.weight"], ends[n]["head.weight"])
        heads = [{k: h[k] for k in HEAD} for h in after]
    assert mixed >= ROUNDS
    assert_same(fed.server["shared"], phi, 1e-9)
    for n, client in enumerate(fed.ids):
        assert_same(fed.personal_model(client), {**phi, **heads[n]}, 1e-9)
    found, known = means_of(fed.server["features"])
    assert known.nonzero().flatten().tolist() == sorted(means)
    np.testing.assert_allclose(found[known].numpy(), [means[k] for k in sorted(means)], atol=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_the_weights_are_the_least_on_the_simplex(seed):
    """Against every support, and SciPy's solver."""
    from scipy.optimize import minimize

    rng = np.random.default_rng(seed)
    h, v = rng.normal(size=(5, K, 2)), rng.uniform(0.1, 6, size=5)
    for i in range(5):
        gaps = (h - h[i]).reshape(5, -1)
        form = gaps @ gaps.T + np.diag(v)
        found = head_weights(torch.tensor(h), torch.tensor(v), i).numpy()
        np.testing.assert_allclose(found, solved(form), atol=1e-9)
        other = minimize(
            lambda a, form=form: a @ form @ a,
            np.full(5, 0.2),
            bounds=[(0, 1)] * 5,
            constraints={"type": "eq", "fun": lambda a: a.sum() - 1},
            tol=1e-12,
        )
        np.testing.assert_allclose(found, other.x, atol=1e-3)


def test_equal_hospitals_weigh_by_their_precision_and_far_ones_keep_their_heads():
    h, v = torch.zeros(3, K, 4, dtype=torch.double), torch.tensor([1.0, 2.0, 4.0])
    weights = head_weights(h, v, 1)
    torch.testing.assert_close(weights, torch.tensor([4.0, 2.0, 1.0]).double() / 7)
    h[1] += 1e6
    torch.testing.assert_close(
        head_weights(h, v, 1), torch.tensor([0.0, 1.0, 0.0]).double(), atol=1e-9, rtol=0
    )


def test_the_variance_is_how_far_h_scatters():
    """Over many hospitals of 50 patients drawn from one distribution."""
    rng = np.random.default_rng(0)
    drawn, said = [], []
    for _ in range(400):
        y = rng.integers(0, K, size=50)
        z = rng.normal(size=(50, 2)) + y[:, None]
        seen = Features(torch.tensor(z), torch.tensor(y), torch.arange(50), None)
        h = np.array([z[y == k].sum(0) / 50 for k in range(K)])
        sums = {"class_sums": torch.tensor(h), "class_shares": torch.ones(K).double()}
        drawn.append(h.ravel())
        said.append(variance_of(seen, sums))
    assert np.mean(said) == pytest.approx(np.trace(np.cov(np.array(drawn).T)), rel=0.05)


def test_without_the_term_and_statistics_it_is_fedrep(caplog):
    """No class has 20 patients: nobody's head is mixed, and the run says so."""
    limit, other = finished(FedPAC(), clients())[0], finished(FedRep(), clients())[0]
    for client in limit.ids:
        expected = {k: t.numpy() for k, t in other.personal_model(client).items()}
        assert_same(limit.personal_model(client), expected, 1e-12)
    assert caplog.text.count("No hospital of the first round has 20 patients of a class") == 1


def test_one_hospital_trains_as_fedrep_if_nothing_is_drawn_together():
    ends = [
        finished(method, clients()[:1])[0]
        for method in (FedPAC(strength=0.0, least_patients=LEAST), FedRep())
    ]
    expected = {k: t.numpy() for k, t in ends[1].personal_model("c0").items()}
    assert_same(ends[0].personal_model("c0"), expected, 1e-12)


def test_a_class_of_few_patients_never_leaves():
    """The third hospital has one patient of class 2, and the second none of class 1."""
    data = clients()
    fed, _ = finished(FedPAC(least_patients=LEAST), data)
    for n, client in enumerate(fed.ids):
        sums, known = fed.server[f"compared/{client}"], present(data[n])
        assert sums["class_shares"].nonzero().flatten().tolist() == known
        assert not sums["class_sums"][[k for k in range(K) if k not in known]].any()
    (statistic,) = fed.algorithm.summaries(data[0])
    assert "20 of at least 50" in FedPAC().summaries(data[0])[0].too_few(least=50)
    assert statistic.too_few() is not None


def test_a_hospital_without_a_class_keeps_its_head_and_no_other_takes_it():
    """The hospitals have 7, 6, 5 and 6 patients of their largest classes."""
    fed, _ = finished(FedPAC(least_patients=7), clients(), 1)
    heads = {c: fed.server[f"head/{c}"] for c in fed.ids}
    assert all(heads[c] is fed.server[f"sent/{c}"] for c in ("c1", "c2", "c3"))


def test_a_newcomer_trains_its_head_and_is_mixed_with_the_last_cohort():
    fed, initial = finished(FedPAC(least_patients=LEAST), clients())
    data = clients(((9, 0, 7),), seed=9)[0]
    client = onboarded_client(fed, data)
    model = fed.algorithm.onboard(client, run_onboarding(fed, client)[0])
    phi = {k: fed.server["shared"][k].numpy() for k in BODY}
    start = {**phi, **{k: initial[k] for k in HEAD}}
    own = steps(start, iter(data.drawn), HEAD, STEPS)
    heads = {c: {k: t.numpy() for k, t in fed.server[f"sent/{c}"].items()} for c in fed.ids}
    stored = {c: fed.server[f"compared/{c}"] for c in fed.ids}
    known = {c: (t["class_sums"].numpy().ravel(), float(t["variance"])) for c, t in stored.items()}
    heads["new"], known["new"] = own, compared(start, data)
    assert_same(model, {**phi, **mixture("new", heads, known)}, 1e-9)
    assert client.steps_done == STEPS
