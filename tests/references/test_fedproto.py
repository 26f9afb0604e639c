"""FedProto against its Algorithm 1 in NumPy, with means that too few patients stand behind."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from medfed.common.tensors import digest
from medfed.federation.algorithm import Cohort
from medfed.federation.reference import onboarded_client, run_onboarding
from medfed.personalize.features_base import means_of
from medfed.personalize.fedproto import FedProto
from medfed.personalize.local import Local
from tests.references.class_net import (
    LEAST,
    LR,
    STEPS,
    K,
    clients,
    cohorts,
    features,
    finished,
    present,
    pulled,
)
from tests.references.pairing import assert_same
from tests.references.test_fedrod import gradient

SETTINGS = {"plain": {}, "momentum-half": {"momentum": 0.9, "lr": 0.02, "cohort": Cohort(0.5)}}


def steps(w, batches, means, strength, lr=LR, momentum=0.0):
    velocity = {k: np.zeros_like(v) for k, v in w.items()}
    for x, y in islice(batches, STEPS):
        g, z = gradient(w, x, y), features(w, x)
        gap = np.array([z[i] - means[c] if c in means else 0 * z[i] for i, c in enumerate(y)])
        term = pulled(w, x, 2 * strength * gap / gap.size)
        velocity = {k: momentum * velocity[k] + g[k] + term[k] for k in w}
        w = {k: w[k] - lr * velocity[k] for k in w}
    return w


@pytest.mark.parametrize("setting", SETTINGS)
def test_equals_algorithm_1(setting):
    data, changes = clients(), SETTINGS[setting]
    fed, initial = finished(FedProto(strength=0.7, least_patients=LEAST), data, **changes)
    own, means = [initial] * len(data), {}
    batches = [iter(d.drawn) for d in data]
    more = {k: changes[k] for k in ("lr", "momentum") if k in changes}
    for cohort in cohorts(fed):
        sent = {}
        for n in cohort:
            own[n] = steps(own[n], batches[n], means, 0.7, **more)
            z, y = features(own[n], data[n].x.numpy()), data[n].y.numpy()
            sent[n] = {k: z[y == k] for k in present(data[n])}
        for k in range(K):
            if rows := [sent[n][k] for n in cohort if k in sent[n]]:
                means[k] = np.concatenate(rows).mean(0)
    for n, client in enumerate(fed.ids):
        assert_same(fed.personal_model(client), own[n], 1e-10)
    found, known = means_of(fed.server["features"])
    assert bool(known.all())
    np.testing.assert_allclose(found.numpy(), [means[k] for k in range(K)], atol=1e-10)
    assert {e.part for e in fed.ledger.entries} <= {"features", "scalars"}


def test_without_the_term_it_is_local_training():
    limit, alone = finished(FedProto(strength=0.0), clients())[0], finished(Local(), clients())[0]
    for client in limit.ids:
        assert digest(limit.personal_model(client)) == digest(alone.personal_model(client))


def test_a_class_of_few_patients_never_leaves():
    """The third hospital has one patient of class 2, and the second none of class 1."""
    data = clients()
    fed, _ = finished(FedProto(least_patients=LEAST), data)
    for n, client in enumerate(fed.ids):
        local = fed.clients[client]
        sums = fed.algorithm.sums_of(local, local.features(fed.personal_model(client)))
        known = means_of(sums)[1]
        assert known.nonzero().flatten().tolist() == present(data[n])
        assert not sums["class_sums"][~known].any()
    assert [present(data[n]) for n in (1, 2)] == [[0, 2], [0, 1]]
    none, _ = finished(FedProto(), clients())
    assert not none.server["features"]["class_shares"].any()
    (statistic,) = none.algorithm.summaries(data[0])
    assert statistic.too_few() is None
    assert "20 of at least 50" in statistic.too_few(least=50)


def test_where_no_class_has_enough_patients_the_run_says_so(caplog):
    finished(FedProto(), clients(), rounds=3)
    assert caplog.text.count("No hospital of the first round has 20 patients of a class") == 1


def test_a_newcomer_trains_towards_the_means():
    fed, initial = finished(FedProto(strength=0.7, least_patients=LEAST), clients())
    data = clients(seed=5)[1]
    client = onboarded_client(fed, data)
    model = fed.algorithm.onboard(client, run_onboarding(fed, client)[0])
    found = means_of(fed.server["features"])[0].numpy()
    assert_same(model, steps(initial, iter(data.drawn), dict(enumerate(found)), 0.7), 1e-10)
