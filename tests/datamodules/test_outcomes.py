"""Continuous outcomes: from tables and generated mixtures, in their own unit, never as classes."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes

from medfed.datamodules.partitions.base import RoundRobin
from medfed.datamodules.partitions.by_centre import ByCentre
from medfed.datamodules.partitions.by_label import Dirichlet, LabelImbalance, QuantitySkew
from medfed.datamodules.readers.table import read_csv
from medfed.datamodules.tables.agreement import AgreementSettings, TrainRows
from medfed.datamodules.tables.datamodule import TabularDataModule
from medfed.datamodules.tables.mixture import MixtureDataModule
from medfed.run.cohort import cohort_record
from medfed.standalone.errors import ConfigError, DataError
from tests.agreeing import agree
from tests.sweeps import sweep

CSV = """id,site,age,score
p1,Bern,50,1.5
p1,Bern,51,-2
p2,Bern,60,3e1
p3,Bern,70,4
p4,Basel,40,0.25
p5,Basel,45,6
p6,Basel,90,7
"""


def rows_of(client):
    """All (features, outcome) of a client."""
    batches = [b for s in ("train", "val", "test") for b in client.eval_batches(s)]
    return torch.cat([b["image"] for b in batches]), torch.cat([b["label"] for b in batches])


def test_diabetes_is_scikit_learns_with_its_outcome_untouched():
    data = TabularDataModule(QuantitySkew(5), embedded="diabetes", scaling="pooled")
    data.setup()
    raw = load_diabetes(scaled=False)
    assert (data.in_channels, data.class_names) == (10, ("progression",))
    assert data.channel_names == tuple(raw.feature_names)
    found = torch.cat([rows_of(c)[1] for c in data.clients.values()])
    assert found.dtype == torch.float32
    assert sorted(found.tolist()) == sorted(raw.target.tolist())
    client = data.clients["hospital_0"]
    assert torch.equal(client.label_counts, torch.tensor([float(client.num_samples)]))
    batch = next(client.train_batches(0))
    assert batch["label"].shape == batch["image"].shape[:1]
    # Scaling is monotonous, so a feature still goes with its own outcome.
    x, y = rows_of(client)
    known = {(round(t, 3)): b for t, b in zip(raw.target, raw.data[:, 2], strict=True)}
    unique = [i for i, t in enumerate(y.tolist()) if (raw.target == t).sum() == 1]
    own = np.array([known[round(float(y[i]), 3)] for i in unique])
    order = np.argsort(own, kind="stable")
    assert np.all(np.diff(x[unique, 2].numpy()[order]) >= -1e-6)


def test_a_csv_with_a_continuous_outcome(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(CSV)
    data = TabularDataModule(
        ByCentre(), path=str(path), label="score", outcome="continuous", patient="id", centre="site"
    )
    data.setup()
    assert data.class_names == ("score",)
    assert data.channel_names == ("age",)
    _, y = rows_of(data.clients["Bern"])
    assert sorted(y.tolist()) == [-2.0, 1.5, 4.0, 30.0]
    assert all(p.label is None and p.counts is None for p in data.list_patients())
    bern = cohort_record(data).clients["Bern"]
    assert bern.after == [sum([-2.0, 1.5, 4.0, 30.0]) / 4]
    assert (bern.samples, bern.missing) == (4, {})


@pytest.mark.parametrize("cell", ["high", "inf", "1,5"])
def test_an_outcome_that_is_no_number_is_named(tmp_path, cell):
    path = tmp_path / "table.csv"
    path.write_text(CSV.replace("p3,Bern,70,4", f'p3,Bern,70,"{cell}"'))
    with pytest.raises(DataError, match=rf"data row 4, column score: the outcome '{cell}' is not"):
        read_csv(path, "score", outcome="continuous")


@sweep(
    ("options", "message"),
    [
        ({"partition": LabelImbalance(2)}, r"row_0 has no label; .* not a continuous outcome"),
        ({"partition": Dirichlet(2)}, r"row_0 has no label; .* not a continuous outcome"),
        (
            {"outcome": "continous"},
            r"data\.outcome='continous' is unknown \(did you mean continuous",
        ),
        ({"outcome": "continuous", "positive": [1]}, r"data\.positive .* name classes; leave them"),
        ({"embedded": "diabetis"}, r"data\.embedded='diabetis' is unknown; choose"),
    ],
)
def test_mistakes_are_explained(options, message):
    with pytest.raises(ConfigError, match=message):
        TabularDataModule(**{"partition": RoundRobin(2), "embedded": "diabetes", **options}).setup()


def test_a_saved_order_of_classes_is_refused():
    class Orders(RoundRobin):
        def label_orders(self, clients, num_classes, seed):
            return dict.fromkeys(clients, (0,))

    with pytest.raises(ConfigError, match="changes the classes of client hospital_0"):
        TabularDataModule(Orders(2), embedded="diabetes").setup()


def test_continuous_mixtures_follow_the_mixed_model():
    """Least squares finds sum_k alpha_k theta_k and the noise."""
    data = MixtureDataModule(
        ByCentre(), clients=2, samples=4000, features=6, outcome="continuous", noise=0.5
    )
    data.setup()
    assert data.class_names == ("outcome",)
    for name, client in data.clients.items():
        x, y = client.train["image"].double().numpy(), client.train["label"].double().numpy()
        truth = np.array(data.mixtures[name]) @ data.thetas
        found, residual, *_ = np.linalg.lstsq(x, y, rcond=None)
        sd = np.sqrt(residual[0] / (len(x) - 6))
        assert sd == pytest.approx(0.5, rel=0.05)
        assert np.abs(found - truth).max() < 5 * 0.5 / np.sqrt(len(x))


def test_both_outcomes_have_the_same_rows_and_mixtures():
    pair = [MixtureDataModule(ByCentre(), clients=2, outcome=o) for o in ("classes", "continuous")]
    for data in pair:
        data.setup()
    assert pair[0].mixtures == pair[1].mixtures
    image = [torch.sort(rows_of(d.clients["hospital_000"])[0][:, 0])[0] for d in pair]
    assert torch.equal(*image)


def test_the_noise_is_not_negative():
    with pytest.raises(ConfigError, match=r"data\.noise must not be negative, not -1"):
        MixtureDataModule(ByCentre(), outcome="continuous", noise=-1)


def agreed_scale(outcomes):
    """The mean and deviation on which hospitals agree."""
    rows = {c: TrainRows(np.zeros((len(of), 1)), outcomes=of) for c, of in outcomes.items()}
    settings = AgreementSettings(["x"], False, "standard", pooled=False, continuous=True)
    return agree(settings, rows)[0].outcome


@pytest.mark.parametrize("sizes", [(30, 20, 25), (30, 20, 1, 2), (1, 1, 1, 9)], ids=str)
@pytest.mark.parametrize(
    ("mean", "sd"),
    [(7.4, 0.04), (310.15, 0.5), (2015, 3), (2e7, 4), (5e-9, 4e-9), (250e3, 80e3), (0, 1e-6)],
    ids=["pH", "kelvin", "year", "date", "mol per litre", "platelets", "change"],
)
def test_an_outcome_in_any_unit_is_taken(mean, sd, sizes):
    rng = np.random.default_rng(0)
    each = {f"hospital_{n}": rng.normal(mean, sd, size) for n, size in enumerate(sizes)}
    each["of one value"] = np.full(8, mean)
    every = np.concatenate([*each.values()])
    assert agreed_scale(each) == pytest.approx([every.mean(), every.std()], rel=0.02, abs=sd * 1e-3)


@pytest.mark.parametrize("mean", [7.4, 310.15, 0.05])
def test_a_hospital_that_sends_another_unit_is_named(mean):
    rng = np.random.default_rng(0)
    each = {f"hospital_{n}": rng.normal(mean, mean / 100, 20) for n in range(4)}
    each["hospital_2"] *= 1000
    with pytest.raises(DataError, match=r"^hospital_2 sends outcomes far from those"):
        agreed_scale(each)


@pytest.mark.parametrize(
    ("offset", "factor", "error", "remark"),
    [(0, 1, None, 0), (310, 0.1, None, 0), (2e7, 1, "subtract a constant", 0), (0, 1e-9, None, 1)],
    ids=["as it is", "kelvin", "date", "mol per litre"],
)
def test_no_outcome_is_rounded_unseen(offset, factor, error, remark, tmp_path):
    """Labels have single precision, and tables four decimals."""
    values = [offset + factor * float(row.split(",")[-1]) for row in CSV.splitlines()[1:]]
    rows = [f"{n},{50 + n * n % 7},{value!r}" for n, value in enumerate(values * 4)]
    path = tmp_path / "table.csv"
    path.write_text("\n".join(["id,age,score", *rows]))
    data = TabularDataModule(
        RoundRobin(2), path=str(path), label="score", patient="id", outcome="continuous"
    )
    if error:
        with pytest.raises(DataError, match=error):
            data.setup()
        return
    data.setup()
    assert len([r for r in data.remarks if "change its unit" in r]) == remark
    for client in data.clients.values():
        truth = {float(np.float32(value)) for value in values}
        assert {*rows_of(client)[1].tolist()} <= truth
