"""What every partition has to keep, whatever the patients; statistics of the random ones."""

import json
import random

import numpy as np
import pytest
from omegaconf import OmegaConf

from medfed.config.compose import build
from medfed.datamodules.partitions.base import Dealt, RoundRobin, Wrapped
from medfed.datamodules.partitions.by_centre import ByCentre
from medfed.datamodules.partitions.by_group import ChannelMissing, LabelGroups, SiteGroups, group_of
from medfed.datamodules.partitions.by_label import Dirichlet, LabelImbalance, QuantitySkew, Shards
from medfed.datamodules.readers.base import Patient
from medfed.standalone.errors import ConfigError
from tests.contract.names import load, partition_yamls
from tests.sweeps import sweep

GROUPS = [[0], [1]]
NAMES = [path.stem for path in partition_yamls()]
VARIANTS = {  # settings beside those that the configurations have
    "round_robin": RoundRobin(4),
    "dirichlet": Dirichlet(4, alpha=0.5, min_patients=2),
    "shards": Shards(4),
    "power": QuantitySkew(4, exponent=1.5),
    "channels": ChannelMissing(Dirichlet(4), "rotate"),
    "sites": SiteGroups(4, groups=3),
    "imbalance": LabelImbalance(4, delta=3.0),
    "groups": LabelGroups(4, GROUPS),
    "fixed": LabelImbalance(4, positive_fractions=[0.1, 0.5, 0.5, 0.9], samples_per_client=6),
}
KINDS = ("two classes", "ten classes", "several samples")


def cohort(case, kind="two classes", size=None):
    """Patients in random order, of two classes or ten, one sample each or several."""
    rng = random.Random(case)
    patients = []
    for i in range(size or rng.randint(40, 160)):
        several = (rng.randint(0, 9), rng.randint(0, 3) if rng.random() < 0.6 else 0)
        few = int(rng.random() < 0.4)
        if kind == "several samples":
            patients.append(Patient(f"p{i}", centre=f"clinic {i % 3}", counts=several))
        else:
            label = i % 10 if kind == "ten classes" else few
            patients.append(Patient(f"p{i}", centre=f"clinic {i % 3}", label=label))
    rng.shuffle(patients)
    return patients


@pytest.fixture
def make(tmp_path):
    """Builds a partition from its configuration; a file that it needs lists 40 patients."""

    def build_it(name):
        config = load([f"partition={name}"]).partition
        if OmegaConf.is_missing(config, "file"):
            ids = [f"p{i}" for i in range(40)]
            config.file = str(tmp_path / "clients.json")
            clients = {"a": ids[:25], "b": {"train": ids[25:35], "val": [], "test": ids[35:]}}
            (tmp_path / "clients.json").write_text(json.dumps({"clients": clients}))
        return build(config)

    return build_it


def check(partition, patients, seed):
    """That it keeps its word about these patients."""
    clients = partition.assign(patients, seed=seed)
    dealt = [i for ids in clients.values() for i in ids]
    assert len(dealt) == len(set(dealt))
    assert set(dealt) <= {p.id for p in patients}
    assert all(clients.values())
    inner = partition
    while isinstance(inner, Wrapped):
        inner = inner.assignment
    if isinstance(inner, Dealt):
        assert len(clients) == inner.num_clients
        assert list(clients) == inner.names()
        assert all(ids == sorted(ids) for ids in clients.values())
    if partition.traits.keeps_all:
        assert len(dealt) == len(patients)
    backwards = sorted(patients, key=lambda p: p.id, reverse=True)
    again = partition.assign(backwards, seed=seed)
    assert [(n, sorted(ids)) for n, ids in clients.items()] == [
        (n, sorted(ids)) for n, ids in again.items()
    ]
    assert (clients != partition.assign(patients, seed=seed + 100)) == partition.traits.seeded


@pytest.mark.parametrize("name", NAMES)
@sweep("case", range(6))
def test_configured_partitions(name, case, make):
    """They keep their word about all data that they accept, and there are such data."""
    accepted = []
    for kind in KINDS:
        partition, patients = make(name), cohort(case, kind)
        try:
            partition.assign(patients, seed=case)
        except ConfigError:
            continue
        check(partition, patients, case)
        accepted.append(kind)
    assert accepted


@sweep(
    ("name", "kind"),
    # Patients with samples of both groups are refused: see the tests of label groups.
    [(n, k) for n in VARIANTS for k in (KINDS[0], KINDS[2]) if (n, k) != ("groups", KINDS[2])],
)
@sweep("case", range(6))
def test_other_settings(name, kind, case):
    check(VARIANTS[name], cohort(case, kind), case)


@sweep("name", sorted(set(VARIANTS) - {"imbalance", "fixed"}))
def test_too_few_patients(name):
    with pytest.raises(ConfigError, match="num_clients=4 does not fit 3 patients"):
        VARIANTS[name].assign(cohort(0, size=3), seed=0)


@pytest.mark.parametrize("name", NAMES)
def test_too_few_patients_are_refused(name, make):
    partition = make(name)
    if isinstance(partition, Dealt):
        with pytest.raises(ConfigError, match=r"^\S.* patients|are too few"):
            partition.assign(cohort(0, size=partition.num_clients - 1), seed=0)


def refused(make, name, need, **lacking):
    """Whether what a partition needs is what it refuses to do without."""
    partition = make(name)
    kinds = [k for k in KINDS if accepts(partition, cohort(0, k))]
    patients = [*cohort(0, kinds[0]), Patient("x", **lacking)]
    if need not in partition.traits.needs:
        partition.assign(patients, seed=0)
        return
    with pytest.raises(ConfigError, match="Patient x"):
        partition.assign(patients, seed=0)


def accepts(partition, patients):
    try:
        partition.assign(patients, seed=0)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("name", NAMES)
def test_labels_are_needed_as_declared(name, make):
    refused(make, name, "label", centre="clinic 0")


@pytest.mark.parametrize("name", NAMES)
def test_centres_are_needed_as_declared(name, make):
    refused(make, name, "centre", label=0)


def table(clients, patients, classes):
    """Patients per client and class."""
    label = {p.id: p.label for p in patients}
    return np.array(
        [np.bincount([label[i] for i in ids], minlength=classes) for ids in clients.values()]
    )


@pytest.mark.parametrize("alpha", [0.3, 1.0, 10.0])
def test_dirichlet_mean_and_variance(alpha):
    """p ~ Dir_N(alpha) has mean 1/N and variance (1/N)(1 - 1/N)/(N alpha + 1)."""
    classes, clients = 40, 5
    patients = [Patient(f"{i}", label=i % classes) for i in range(classes * 50)]
    partition = Dirichlet(clients, alpha, min_patients=1)
    drawn = [table(partition.assign(patients, s), patients, classes) / 50 for s in range(10)]
    shares = np.concatenate([d.T for d in drawn])  # 400 draws of proportions
    assert np.allclose(shares.sum(axis=1), 1)
    variance = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    assert np.allclose(shares.mean(axis=0), 1 / clients, atol=4 * np.sqrt(variance / 400))
    assert shares.var() == pytest.approx(variance, rel=0.1)


def test_dirichlet_keeps_the_least_size_and_says_when_it_cannot():
    patients = [Patient(str(i), label=i % 2) for i in range(60)]
    for seed in range(20):
        clients = Dirichlet(4, alpha=0.2, min_patients=5).assign(patients, seed)
        assert min(map(len, clients.values())) >= 5
    with pytest.raises(ConfigError, match=r"alpha=0\.001, all 20 clients never got 3 of the"):
        Dirichlet(20, alpha=0.001).assign(patients, 0)


def test_dirichlet_with_whole_patients_comes_near_to_the_drawn_numbers():
    rng = np.random.default_rng(0)
    patients = [Patient(f"{i}", counts=tuple(rng.integers(0, 6, 3).tolist())) for i in range(600)]
    counts = {p.id: np.array(p.counts) for p in patients}
    for alpha, skewed in ((0.5, True), (1000.0, False)):
        clients = Dirichlet(4, alpha).assign(patients, seed=1)
        have = np.array([sum(counts[i] for i in ids) for ids in clients.values()])
        shares = have / have.sum(axis=0)
        if skewed:
            assert shares.max() > 0.45
        else:
            assert np.allclose(shares, 0.25, atol=0.02)


@pytest.mark.parametrize("per_client", [1, 2, 3])
def test_shards_hold_few_labels(per_client):
    clients, classes = 20, 10
    patients = [Patient(f"{i}", label=i % classes) for i in range(997)]
    for seed in range(5):
        dealt = Shards(clients, per_client).assign(patients, seed)
        held = (table(dealt, patients, classes) > 0).sum(axis=1)
        # Each cut between two labels adds at most one label to one shard.
        assert held.sum() <= clients * per_client + classes - 1
        assert held.max() <= 2 * per_client  # a shard is smaller than a label
        sizes = [len(ids) for ids in dealt.values()]
        assert max(sizes) - min(sizes) <= per_client


def test_shards_of_whole_patients_go_by_the_share_of_positives():
    patients = [Patient(f"{i}", counts=(100 - i, i)) for i in range(100)]
    for ids in Shards(5, 1).assign(patients, seed=0).values():
        numbers = sorted(map(int, ids))
        assert numbers == list(range(numbers[0], numbers[0] + 20))


def test_label_groups():
    groups = [[0, 1, 2], [3, 4], [5, 6, 7], [8, 9]]
    patients = [Patient(f"{i}", label=i % 11) for i in range(660)]
    clients = LabelGroups(10, groups).assign(patients, seed=0)
    assert len(clients) == 10
    held = table(clients, patients, 11)
    for name, row in zip(clients, held, strict=True):
        assert np.flatnonzero(row).tolist() == groups[group_of(name)]
    per_group = [group_of(name) for name in clients]
    assert per_group == sorted(per_group)
    assert set(np.bincount(per_group)) == {2, 3}
    assert (held[:, :10].sum(axis=0) == 60).all()  # all of a group's labels are used
    assert held[:, 10].sum() == 0  # the label of no group is not
    for label in range(10):  # and evenly within the group
        column = held[:, label][held[:, label] > 0]
        assert column.max() - column.min() <= 1


def test_label_groups_take_patients_with_several_samples_of_one_group():
    partition = LabelGroups(2, [[0, 1], [2]])
    inside = [Patient("a", counts=(3, 1, 0)), Patient("b", counts=(0, 0, 2))]
    expected = {"group_0_hospital_0": ["a"], "group_1_hospital_0": ["b"]}
    assert partition.assign(inside, 0) == expected
    with pytest.raises(ConfigError, match="Patient c has samples of more than one label group"):
        partition.assign([*inside, Patient("c", counts=(1, 0, 1))], 0)


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0])
def test_power_law(exponent):
    sizes = [
        len(ids)
        for ids in QuantitySkew(8, exponent=exponent).assign(cohort(1, size=4000), 0).values()
    ]
    law = np.arange(1, 9) ** -exponent
    assert np.abs(np.array(sizes) - 4000 * law / law.sum()).max() < 1


def test_at_least_one_patient_each():
    clients = QuantitySkew(3, exponent=30.0).assign(cohort(1, size=10), 0)
    assert [len(ids) for ids in clients.values()] == [8, 1, 1]


def test_quantity_skew_leaves_labels_alike():
    patients = cohort(2, size=4000)
    prevalence = np.mean([p.label for p in patients])
    held = table(QuantitySkew(4).assign(patients, 0), patients, 2)
    size = held.sum(axis=1)
    error = np.sqrt(prevalence * (1 - prevalence) / size)
    assert (np.abs(held[:, 1] / size - prevalence) < 4 * error).all()


@sweep(
    ("make", "message"),
    [
        (lambda: Dirichlet(2, alpha=0), r"partition\.alpha must be in \(0, inf\), not 0"),
        (lambda: Dirichlet(2, min_patients=0), r"partition\.min_patients must be 1 or more"),
        (lambda: Shards(2, 0), r"partition\.shards_per_client must be 1 or more, not 0"),
        (lambda: LabelGroups(2, [[0, 1], [1]]), "no label in two of them"),
        (lambda: LabelGroups(2, [[0], []]), "none of them empty"),
        (lambda: LabelGroups(1, GROUPS), "num_clients=1 is fewer than 2 groups"),
        (lambda: QuantitySkew(2, exponent=-1), r"exponent must be in \[0, inf\), not -1"),
        (lambda: LabelGroups(4, [[0], [7]]).assign(cohort(0), 0), "Group 1 .labels 7. has 0 pat"),
        (lambda: ChannelMissing(None), "partition.assignment=None is no partition; choose one by"),
        (lambda: group_of("hospital_0"), "Client hospital_0 is in no label group"),
        (lambda: ByCentre().assign([Patient("a", label=0)], 0), "has no centre"),
    ],
)
def test_bad_settings(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
