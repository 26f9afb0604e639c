"""A site that has its own patients alone holds what it holds in a simulation with all others."""

import contextlib
import random

import numpy as np
import pytest
import torch

from medfed.datamodules.base import converse_here
from medfed.datamodules.images import ImageDataModule
from medfed.datamodules.one_site import OwnData
from medfed.datamodules.partitions.by_centre import Auto, ByCentre
from medfed.datamodules.partitions.by_group import ChannelMissing
from medfed.datamodules.partitions.by_label import Dirichlet, LabelImbalance
from medfed.datamodules.readers.base import Patient
from medfed.datamodules.readers.scikit_learn import read_digits
from medfed.datamodules.splits import SPLITS
from medfed.datamodules.tables.agreement import (
    AgreementSettings,
    TrainRows,
    client_side,
    server_side,
)
from medfed.datamodules.tables.datamodule import TabularDataModule
from medfed.standalone.errors import ConfigError, DataError
from tests.sweeps import sweep

SITES = ["Basel", "Bern", "Chur"]
ONE_EACH = [Patient(site, centre=site) for site in SITES]
INVENTED = Patient("p", centre="a", invented=True)
HEADER = "patient,hospital,age,sex,grade,crp,outcome"


def lines(seed=0):
    rng = np.random.default_rng(seed)
    for n in range(90):
        cells = [
            f"P{n // 2:03d}",
            SITES[n // 2 % 3],
            "" if n % 11 == 0 else f"{rng.normal(60, 12):.1f}",
            "" if n % 3 == 2 and n % 5 == 0 else rng.choice(["f", "m"]),
            rng.choice(["I", "II"] if n % 3 else ["II", "III"]),
            f"{rng.lognormal(1, 1):.3f}",
            str(rng.integers(2)),
        ]
        yield ",".join(cells)


@pytest.fixture
def files(tmp_path):
    """One file of all hospitals, and one of each."""
    rows = list(lines())
    for name, own in {
        "all": rows,
        **{s: [r for r in rows if f",{s}," in r] for s in SITES},
    }.items():
        (tmp_path / f"{name}.csv").write_text("\n".join([HEADER, *own]) + "\n")
    return tmp_path


def table(path, partition, **settings):
    given = {"label": "outcome", "centre": "hospital", "patient": "patient", "seed": 3, **settings}
    return TabularDataModule(partition, path=path, **given)


def alone(modules, server):
    """Sets each up alone; a server that has no data stands between them."""
    answers = []

    def merging():
        facts = [data.facts() for data in modules.values()]  # known once all halves have begun
        assert all(one == facts[0] for one in facts)
        half, messages = server.merging(facts[0]), None
        with contextlib.suppress(StopIteration):
            while True:
                answers.append(half.send(messages))
                messages = yield answers[-1]

    halves = {site: data.setup_alone(site) for site, data in modules.items()}
    _, exchanged = converse_here(merging(), halves)
    return answers[1:], exchanged


def same(one, other):
    assert one.patients == other.patients
    assert torch.equal(one.label_counts, other.label_counts)
    assert torch.equal(one.channels, other.channels)
    for split in SPLITS:
        pairs = zip(one.eval_batches(split), other.eval_batches(split), strict=True)
        for a, b in pairs:
            assert all(torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])) for k in a)
    first, second = (next(iter(c.train_batches(4)))["image"] for c in (one, other))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    "settings",
    [
        {"scaling": "pooled"},
        {"scaling": "pooled", "normalization": "minmax", "missing_indicator": True},
        {"scaling": "pooled", "normalization": "exact_minmax"},
        {"scaling": "combat"},
        {"scaling": "combat", "covariates": ["Age"]},
        {"scaling": "client"},
        {"scaling": "client", "missing_indicator": False, "features": ["age", "crp"]},
        {"outcome": "continuous", "label": "crp"},
        {"outcome": "continuous", "label": "crp", "scaling": "pooled", "normalization": "minmax"},
        {"outcome": "continuous", "label": "crp", "scaling": "pooled"},
        {"outcome": "continuous", "label": "crp", "missing_indicator": False, "features": ["age"]},
        {"outcome": "continuous", "label": "crp", "outcome_scale": [3, 2]},
    ],
)
def test_a_table_of_ones_own(files, settings):
    whole = table(files / "all.csv", ByCentre(), **settings)
    whole.setup()
    modules = {
        s: table(files / f"{s}.csv", OwnData(ByCentre(), s, SITES), **settings) for s in SITES
    }
    answers, exchanged = alone(modules, table(None, ByCentre(), **settings))
    assert exchanged == whole.exchanged
    assert bool(answers) == bool(exchanged)
    for site, data in modules.items():
        same(data.clients[site], whole.clients[site])
        assert list(data.clients) == [site]
        assert data.channel_names == whole.channel_names
        assert data.preprocessing(site) == whole.preprocessing(site)
        assert data.agreed_outcome_scale == whole.agreed_outcome_scale
    if whole.samples.continuous and "outcome_scale" not in settings:
        outcomes = np.concatenate([c.train["label"] for c in whole.clients.values()])
        scale = outcomes.mean(dtype=float), outcomes.std(dtype=float)
        assert whole.agreed_outcome_scale == pytest.approx(scale, rel=1e-6)
    else:
        assert whole.agreed_outcome_scale == settings.get("outcome_scale")
    # Who comes later is told what the others have agreed on, and tells nothing.
    late = table(files / "Bern.csv", OwnData(Auto(), "Bern", SITES), **settings)
    half = late.setup_alone("Bern")
    next(half, None)
    with contextlib.suppress(StopIteration):
        for answer in answers:
            half.send(answer)
    same(late.clients["Bern"], whole.clients["Bern"])


def test_only_its_own_images_are_read(make_brats, monkeypatch):
    inner = ChannelMissing(ByCentre(), preset="rotate")
    whole = make_brats(partition=inner)
    whole.setup()
    sites = list(whole.clients)
    data = make_brats(partition=OwnData(inner, sites[1], sites))
    read, reader = [], type(data.scans)
    plain = reader.raw
    monkeypatch.setattr(reader, "raw", lambda self, p: read.append(p.id) or plain(self, p))
    assert list(data.setup_alone(sites[1])) == []
    own = whole.clients[sites[1]]
    same(data.clients[sites[1]], own)
    assert set(read) == {i for ids in own.patients.values() for i in ids}
    assert data.splits()["partition"] == {sites[1]: whole.splits()["partition"][sites[1]]}
    assert data.facts() == whole.facts()


def test_a_share_of_a_data_set_that_every_site_holds():
    modules = [ImageDataModule(Dirichlet(3), reader=read_digits) for _ in "ab"]
    modules[0].setup()
    assert list(modules[1].setup_alone("hospital_2")) == []
    same(modules[1].clients["hospital_2"], modules[0].clients["hospital_2"])
    assert modules[1].facts()["white"] == 16
    with pytest.raises(ConfigError, match=r"hospital_7 is no client .* \(did you mean hospital_"):
        next(modules[1].setup_alone("hospital_7"))


@sweep(
    ("partition", "message"),
    [
        (lambda: OwnData(LabelImbalance(3), "a", ["a"]), "LabelImbalance divides .* on cut=true"),
        (lambda: OwnData(ChannelMissing(LabelImbalance(3)), "a", ["a"]), "LabelImbalance divides"),
        (
            lambda: OwnData(Auto(), "Basle", SITES).assign(
                [Patient(s, centre=s) for s in SITES], 0
            ),
            r"none of which has its name \(did you mean Basel",
        ),
        (
            lambda: OwnData(Auto(), "a", ["a"]).assign(
                [Patient("p", centre="a", invented=True)], 0
            ),
            "invented hospitals, but a site is one",
        ),
    ],
)
def test_what_no_site_can_have(partition, message):
    with pytest.raises(ConfigError, match=message):
        partition()


def test_patients_of_other_centres_are_left_out_and_said():
    own = OwnData(Auto(), "Bern", SITES)
    patients = [Patient(f"p{n}", centre=SITES[n % 3]) for n in range(5)]
    assert own.assign(patients, 0) == {"Bern": ["p1", "p4"]}
    assert own.remark(patients).startswith("3 of 5 patients come from other centres (Basel, Chur)")
    assert own.assign([Patient("p"), Patient("q", centre="ward 3")], 0) == {"Bern": ["p", "q"]}
    assert own.remark([Patient("q", centre="ward 3")]) == ""


def test_broken_messages_about_a_table_change_nothing():
    rows, names = np.array([[1.0, 0.0], [2.0, np.nan]]), ["crp", "sex"]
    settings = AgreementSettings(names, "auto", "standard", pooled=True, categorical=["sex"])

    def halves():
        client = client_side(settings, TrainRows(rows, {"sex": ("f", "m")}))
        server = server_side(settings)
        next(server)
        return client, next(client), server

    _, told, server = halves()
    answer = server.send([told])
    rng = random.Random(0)
    for case in range(1000):
        client, told, server = halves()
        for good, send in ((told, lambda b, s=server: s.send([b])), (answer, client.send)):
            bad = bytearray(good)
            for _ in range(rng.randint(1, 4)):
                bad[rng.randrange(len(bad))] = rng.randrange(256)
            if case % 3 == 0:
                bad = bad[: rng.randrange(len(bad))]
            with contextlib.suppress(DataError):  # or it is another message of ours
                send(bytes(bad))
    for bad in (b"[" * 10**5, b'{"count":[1e400]}', b"9" * 5000, b'{"a":1,"a":1}', b"null"):
        with pytest.raises(DataError, match="is malformed"):
            halves()[2].send([bad])


def test_sites_that_do_not_read_alike_are_told():
    rows = np.array([[1.0], [2.0]])
    settings = AgreementSettings(["x"], False, "standard", pooled=True)
    halves = {"a": client_side(settings, TrainRows(rows)), "b": iter(())}
    server = server_side(settings)
    with pytest.raises(DataError, match="a shares other facts about its data than the others"):
        converse_here(server, halves)
