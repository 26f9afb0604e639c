"""Label imbalance of patients that stay whole, such as scans with nodule candidates."""

import numpy as np
import pytest
from scipy.optimize import linprog

from medfed.datamodules.partitions.by_label import LabelImbalance, deal_whole, largest_fit, thin
from medfed.datamodules.readers.base import Patient
from medfed.standalone.errors import ConfigError
from tests.sweeps import sweep


def scans(count, seed=0):
    """Candidates like those of LUNA16 after subsampling: about two negatives for one nodule."""
    rng = np.random.default_rng(seed)
    return [
        Patient(f"1.2.{i}", counts=(int(rng.poisson(3)), int(rng.poisson(1.5))))
        for i in range(count)
    ]


def held(clients, patients):
    counts = {p.id: np.array(p.counts) for p in patients}
    return np.array([sum((counts[i] for i in ids), np.zeros(2, int)) for ids in clients.values()])


def fractional_optimum(counts, wishes):
    """The largest equal size if patients could be divided: a linear programme.

    Maximise s subject to sum_n x_pn <= 1 and sum_p counts_pk x_pn >= s wishes_nk, x >= 0.
    """
    patients, clients = len(counts), len(wishes)
    once = np.hstack([np.kron(np.eye(patients), np.ones(clients)), np.zeros((patients, 1))])
    enough = [
        np.append(-np.kron(counts[:, k], np.eye(clients)[n]), wishes[n, k])
        for n in range(clients)
        for k in range(2)
    ]
    objective = np.append(np.zeros(patients * clients), -1)
    limits = np.append(np.ones(patients), np.zeros(2 * clients))
    return -linprog(objective, np.vstack([once, *enough]), limits).fun


@sweep("delta", [1.0, 2.0, 4.0, 7.0])
@sweep("num_clients", [2, 5])
def test_clients_reach_their_ratio_at_nearly_the_largest_size(num_clients, delta):
    patients = scans(120)
    partition = LabelImbalance(num_clients, delta)
    clients = partition.assign(patients, seed=1)
    shares = partition.class_shares(list(clients), 2, seed=1)
    reached = [
        sum(largest_fit(have.tolist(), shares[client]))
        for have, client in zip(held(clients, patients), clients, strict=True)
    ]
    counts = np.array([p.counts for p in patients])
    best = fractional_optimum(counts, np.array(list(shares.values())))
    assert min(reached) >= 0.93 * best
    assert min(reached) <= best + 1
    assert clients == partition.assign(patients, seed=1) != partition.assign(patients, seed=2)


def test_thinned_clients_have_the_ratio():
    patients, partition = scans(200), LabelImbalance(5, delta=4.0)
    clients = partition.assign(patients, seed=0)
    shares = partition.class_shares(list(clients), 2, seed=0)
    for name, (negatives, positives) in zip(clients, held(clients, patients), strict=True):
        labels = np.repeat([0, 1], [negatives, positives])
        kept = labels[thin(labels, shares[name], seed=0)]
        assert abs(kept.sum() - shares[name][1] * len(kept)) <= 0.5
        assert len(kept) > 30


def test_wanted_sizes_are_met_and_no_more_scans_used_than_needed():
    patients = scans(300)
    partition = LabelImbalance(4, delta=3.0, samples_per_client=60)
    clients = partition.assign(patients, seed=0)
    have = held(clients, patients)
    for row, positive in zip(have, partition.fractions(), strict=True):
        assert row[0] >= 60 * (1 - positive)
        assert row[1] >= 60 * positive
    assert sum(map(len, clients.values())) < 250
    with pytest.raises(ConfigError, match="are too few for 4 clients of 600 samples"):
        LabelImbalance(4, delta=3.0, samples_per_client=600).assign(patients, seed=0)


def test_one_sample_each_is_dealt_like_labels():
    rng = np.random.default_rng(0)
    single = [Patient(f"{i}", counts=[(1, 0), (0, 1)][rng.integers(2)]) for i in range(100)]
    have = held(LabelImbalance(4, delta=1.0).assign(single, 0), single)
    assert have.max(axis=0).tolist() == pytest.approx(have.min(axis=0).tolist(), abs=1)


def test_dealing_meets_targets_that_can_be_met():
    """Patients are cut from known clients; the greedy rule must come near to that division."""
    rng = np.random.default_rng(1)
    counts = np.concatenate([rng.multinomial(8, p, size=60) for p in rng.dirichlet([1, 1, 1], 4)])
    targets = counts.reshape(4, 60, 3).sum(axis=1).astype(float)
    owner = deal_whole(counts, targets, seed=0)
    reached = np.array([counts[owner == n].sum(axis=0) for n in range(4)])
    assert np.abs(reached - targets).max() <= 0.02 * counts.sum()


@pytest.mark.parametrize(
    ("partition", "patients", "message"),
    [
        (LabelImbalance(1), [Patient("a", counts=(1, 1, 1))], "Patient a has samples beyond"),
        (
            LabelImbalance(2),
            [Patient("a", counts=(9, 0))] * 2,
            "are too few for 2 clients of 1 samples",
        ),
        (LabelImbalance(2), [Patient("a", counts=(9, 3)), Patient("b")], "Patient b has no label"),
    ],
)
def test_bad_patients(partition, patients, message):
    with pytest.raises(ConfigError, match=message):
        partition.assign(patients, seed=0)


def test_other_numbers_of_classes_are_refused():
    with pytest.raises(ConfigError, match="needs 2 classes, but the data have 3"):
        LabelImbalance(2).class_shares(["a", "b"], 3, seed=0)
