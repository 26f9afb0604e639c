"""kNN-Per against its definition in NumPy; its choice against a search; its limits."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from medfed.common.tensors import digest
from medfed.federation.client import Features
from medfed.federation.reference import federate, onboarded_client, run_onboarding
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.knnper import KNNPer, neighbours_of_others
from medfed.standalone.errors import ConfigError
from medfed.standalone.neighbours import nearest, votes
from tests.references.class_net import K, clients, features, finished, logits
from tests.references.pairing import assert_same, to_numpy
from tests.references.test_fedrod import Classes
from tests.toys import toy_federation

FIXED = {"some": (5, 0.7, 0.4), "the-nearest": (1, 1.0, 1.0), "all": (999, 2.0, 0.9)}


@dataclass(frozen=True)
class Fixed(KNNPer):
    """With k, s and lambda that are not chosen."""

    vote: tuple[float, ...] = (3, 1.0, 0.5)

    def best_vote(self, seen):
        return torch.tensor(self.vote, dtype=torch.float64)


def probabilities(w, x):
    o = logits(w, x)
    e = np.exp(o - o.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def shares(z, store, labels, k, s):
    """Of one case after the other, by the plain quotient."""
    found = np.zeros((len(z), K))
    for i, one in enumerate(z):
        squares = ((one - store) ** 2).sum(1)
        for j in np.argsort(squares, kind="stable")[:k]:
            found[i, labels[j]] += np.exp(-squares[j] / (store.shape[1] * s))
    return found / found.sum(1, keepdims=True)


def answers(fed, model, x):
    fed.trainer.model.load(model)
    with torch.no_grad():
        return fed.trainer.network.eval()(x).softmax(1).numpy()


@pytest.mark.parametrize("setting", FIXED)
def test_equals_its_definition(setting):
    data = clients()
    fed, _ = finished(Fixed(vote=FIXED[setting]), data)
    w, x = to_numpy(fed.server["shared"]), clients(seed=7)[0].x
    k, s, share = FIXED[setting]
    for client, own in zip(fed.ids, data, strict=True):
        z, store = (features(w, t.numpy()) for t in (x, own.x))
        voted = shares(z, store, own.y.numpy(), k, s)
        expected = share * voted + (1 - share) * probabilities(w, x.numpy())
        found = answers(fed, fed.personal_model(client), x)
        np.testing.assert_allclose(found, expected, atol=1e-12)


def test_training_is_fedavg_and_nothing_else_travels():
    found, _ = finished(KNNPer(), clients())
    plain, _ = finished(FedAvg(), clients())
    assert digest(found.server["shared"]) == digest(plain.server["shared"])
    assert found.ledger.to_csv() == plain.ledger.to_csv()
    assert all(digest(c.state["personal"]) == digest({}) for c in found.clients.values())


def test_without_a_vote_it_is_fedavg():
    found, _ = finished(Fixed(vote=(3, 1.0, 0.0)), clients())
    for client in found.ids:
        assert_same(found.personal_model(client), to_numpy(found.server["shared"]), 0.0)


def test_cases_of_a_single_patient_do_not_vote_for_themselves():
    data = clients()
    for one in data:
        one.eval_batches = lambda _, one=one: iter(
            [{"image": one.x, "label": one.y, "case": torch.zeros(len(one.y))}]
        )
    found, _ = finished(KNNPer(), data)
    for client in found.ids:
        assert_same(found.personal_model(client), to_numpy(found.server["shared"]), 0.0)


def test_the_nearest_case_alone_makes_no_training_error_and_all_give_the_prevalence():
    data = clients()[0]
    fed, _ = finished(Fixed(vote=(1, 1.0, 1.0)), [data])
    found = answers(fed, fed.personal_model("c0"), data.x)
    assert (found.argmax(1) == data.y.numpy()).all()
    z, y = torch.randn(30, 4).double(), torch.arange(30) % K
    at = torch.randn(5, 4).double()
    near, order = nearest(at, z)
    flat = votes(near, y[order], torch.tensor(30), torch.tensor(1e12), K)
    np.testing.assert_allclose(flat, np.tile(np.full(K, 1 / K), (5, 1)), atol=1e-9)
    sharp = votes(near, y[order], torch.tensor(30), torch.tensor(1e-12), K)
    assert sharp.argmax(1).equal(y[order[:, 0]])


def test_far_from_all_cases_the_votes_are_finite():
    """The plain quotient is 0 / 0 there."""
    z, y = torch.zeros(3, 2).double(), torch.tensor([0, 1, 1])
    near, order = nearest(torch.full((1, 2), 1e4).double(), z)
    found = votes(near, y[order], torch.tensor(3), torch.tensor(0.1), 2)
    np.testing.assert_allclose(found, [[1 / 3, 2 / 3]], atol=1e-12)
    assert (-near / 0.1).exp().sum() == 0


def test_what_is_chosen_is_the_least_loss_over_stores_without_the_patient():
    """Each case with a store of its own, k and s of the same lists, lambda on a fine grid."""
    data = clients()
    fed, _ = finished(KNNPer(), data)
    w = to_numpy(fed.server["shared"])
    for client, own in zip(fed.clients.values(), data, strict=True):
        z, y = features(w, own.x.numpy()), own.y.numpy()
        plain = probabilities(w, own.x.numpy())[range(len(y)), y]
        losses = {(0.0, 0.0, 0.0): -np.log(plain).mean()}
        for k in (1, 3, 10, 30):
            for s in (0.01, 0.1, 1.0, 10.0):
                voted = np.array(
                    [
                        shares(z[[i]], z[others], y[others], k, s)[0, y[i]]
                        for i in range(len(y))
                        for others in [np.arange(len(y)) // 2 != i // 2]
                    ]
                )
                for share in np.linspace(0, 0.9, 181):
                    mixed = share * voted + (1 - share) * plain
                    losses[k, s, share] = -np.log(mixed).mean()
        best = min(losses, key=losses.get)
        chosen = fed.algorithm.best_vote(client.features(fed.server["shared"])).numpy()
        assert tuple(chosen[:2]) == best[:2]
        assert chosen[2] == pytest.approx(best[2], abs=0.0051)
        assert chosen[2] <= 0.9


def test_cases_of_the_same_patient_do_not_vote():
    """Pairs of equal slices with labels at random would speak for the nearest neighbour."""
    torch.manual_seed(0)
    z, y = torch.randn(40, 4).double().repeat_interleave(2, 0), (torch.rand(40) < 0.5).long()
    y, patients = y.repeat_interleave(2), torch.arange(80) // 2
    seen = Features(z, y, patients, torch.zeros(80, 2).double())
    near, _ = neighbours_of_others(seen, 1)
    assert bool((near > 0).all())
    k, _, share = KNNPer().best_vote(seen).tolist()
    alone = KNNPer().best_vote(seen._replace(patients=torch.arange(80))).tolist()
    assert (alone[0], alone[2]) == (1.0, 0.9)
    assert k != 1 or share < 0.5


def test_where_a_hospital_labels_otherwise_its_own_cases_win():
    """And the shared model alone is worse there."""
    data = clients()
    data[3].y = (data[3].y + 1) % K
    fed, _ = finished(KNNPer(), data)
    x, y = data[3].x, data[3].y.numpy()
    voted = answers(fed, fed.personal_model("c3"), x)[range(len(y)), y]
    plain = answers(fed, fed.server["shared"], x)[range(len(y)), y]
    assert -np.log(voted).mean() < -np.log(plain).mean() - 0.3


def test_the_store_is_in_the_tensors_of_the_model_by_name_and_of_no_other():
    """A network of the plain kind takes them; its answers are those of the run."""
    toy, data = Classes(), clients()
    loss = nn.functional.cross_entropy
    done = federate(
        Fixed(),
        toy.network,
        lambda network, batch: loss(network(batch["image"]), batch["label"]),
        data,
        rounds=2,
        personal=("head.*",),
    )
    assert not any("neighbours" in name for name in toy.network.state_dict())
    for name, own in zip(done.federation.ids, data, strict=True):
        whole = done.weights(name)
        assert whole["head.neighbours_features"].shape == (len(own.x), 4)
        assert whole["head.neighbours_labels"].equal(own.y)
        model = done.model(name)
        found = answers(done.federation, done.federation.personal_model(name), own.x)
        with torch.no_grad():
            np.testing.assert_array_equal(model(own.x).softmax(1).numpy(), found)
            twin = copy.deepcopy(model)
            np.testing.assert_array_equal(twin(own.x).softmax(1).numpy(), found)
    # Whose model was loaded last does not matter.
    again = {name: done.weights(name) for name in reversed(done.federation.ids)}
    for name in done.federation.ids:
        assert digest(again[name]) == digest(done.weights(name))


def test_a_model_without_a_vote_holds_no_features_of_another_client():
    fed, _ = finished(KNNPer(), clients())
    voting = fed.personal_model("c0")
    fed.trainer.model.load(voting)
    plain = fed.trainer.model.whole(fed.server["shared"])
    assert not plain["head.neighbours_features"].numel()


def test_a_newcomer_remembers_its_cases_without_a_step():
    fed, _ = finished(Fixed(), clients())
    newcomer = onboarded_client(fed, clients(((9, 0, 7),), seed=9)[0])
    model = fed.algorithm.onboard(newcomer, run_onboarding(fed, newcomer)[0])
    assert newcomer.steps_done == 0
    whole = fed.trainer.model.whole(model)
    assert len(whole["head.neighbours_features"]) == 16


def test_a_head_of_two_modules_is_refused():
    task = Classes()
    task.network.add_module("last", nn.Linear(K, K).double())
    task.personal = ("head.*", "last.*")
    with pytest.raises(ConfigError, match=r"must be one module .* is head\.weight, head\.bias"):
        toy_federation(KNNPer(), task, clients())
