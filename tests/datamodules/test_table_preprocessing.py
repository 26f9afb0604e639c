"""Imputing, standardising and encoding of tables, beside scikit-learn's."""

import json
import logging

import numpy as np
import pytest
import torch
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from medfed.datamodules.partitions.base import RoundRobin
from medfed.datamodules.partitions.by_centre import ByCentre
from medfed.datamodules.partitions.by_group import ChannelMissing
from medfed.datamodules.readers.table import read_csv
from medfed.datamodules.tables.agreement import AgreementSettings, TrainRows
from medfed.datamodules.tables.columns import fit, fit_standard, limits, value_range
from medfed.datamodules.tables.datamodule import TabularDataModule
from medfed.run.cohort import cohort_record
from medfed.standalone.columns import Columns
from medfed.standalone.csv_files import read_features
from medfed.standalone.errors import ConfigError, DataError
from tests.agreeing import agree
from tests.sweeps import sweep

HEADER = "hospital,age,sex,grade,crp,outcome"


def lines(count=210, seed=0):
    rng = np.random.default_rng(seed)
    for n in range(count):
        cells = [
            ("Basel", "Bern", "Chur")[n % 3],
            "" if n % 11 == 0 else f"{rng.normal(60, 12):.1f}",
            rng.choice(["f", "m"]),
            rng.choice(["I", "II", "III"]) if n % 7 else "",
            f"{rng.lognormal(1, 1):.2f}",
            str(n // 3 % 2),
        ]
        yield ",".join(cells)


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "table.csv"
    file.write_text("\n".join([HEADER, *lines()]) + "\n")
    return file


def module(path, **settings):
    given = {"partition": ByCentre(), "label": "outcome", "centre": "hospital", **settings}
    data = TabularDataModule(path=path, **given)
    data.setup()
    return data


def images(client):
    return client.train["image"].double().numpy()


def test_numbers_are_those_of_scikit_learn():
    rng = np.random.default_rng(1)
    rows = rng.normal(50, 9, (200, 4)) * (1, 10, 0.01, 0)
    rows[rng.random(rows.shape) < 0.2] = np.nan
    low, _, high = limits(rows)
    clipped = np.clip(rows, low, high)
    theirs = make_pipeline(StandardScaler(), SimpleImputer(strategy="median", add_indicator=True))
    wanted = theirs.fit_transform(clipped)
    columns = Columns(("a", "b", "c", "d"), {}, ("a", "b", "c", "d"))
    scaled = fit_standard(rows).scale(rows)
    np.testing.assert_allclose(scaled, wanted[:, :4], rtol=0, atol=1e-12)
    np.testing.assert_array_equal(columns.encode(rows, scaled)[:, 4:], wanted[:, 4:])


@pytest.mark.parametrize("scaling", ["client", "pooled"])
def test_the_ends_of_minmax_are_no_patients_and_do_not_follow_one(path, scaling):
    data = module(path, normalization="minmax", features=["age", "crp"], scaling=scaling)
    for client, of in data.train.items():
        said, rows = data.preprocessing(client)["normalization"], of.rows
        assert said == data.scalings[client].facts()
        assert (said["name"], len(rows) > 40) == ("minmax", True)
        for ends in (said["minimum"], said["maximum"]):
            for end, column in zip(ends, rows.T, strict=True):
                assert end not in column
                assert np.nanmin(abs(column - end)) > 0.05
        other = rows.copy()
        for column in other.T:
            column[np.nanargmax(column)] = 10 * np.nanmax(column)
        assert fit("minmax", other).facts() == fit("minmax", rows).facts()
        assert fit("exact_minmax", other).facts() != fit("exact_minmax", rows).facts()
        assert client_range(data.clients[client]) == (-1, 1) or scaling == "pooled"


def client_range(client):
    image = client.train["image"]
    return float(image.min().round(decimals=0)), float(image.max().round(decimals=0))


@pytest.mark.parametrize("count", [1, 5, 19])
def test_few_values_do_not_show_through_minmax(count):
    ages = np.random.default_rng(count).integers(20, 90, (count, 1)).astype(float)
    fitted = fit("minmax", ages)
    assert fitted.minimum not in ages
    assert fitted.maximum not in ages
    assert np.ptp(fitted.scale(ages)) > 0.5 or count == 1


def test_categories_are_those_of_scikit_learn(path):
    data = module(path, partition=RoundRobin(1), centre=None, features=["sex", "grade"])
    table = data.table
    assert dict(table.categories) == {"sex": ("f", "m"), "grade": ("I", "II", "III")}
    texts = np.array(
        [
            [table.categories[c][int(code)] if code == code else "?" for code in column]
            for c, column in zip(table.names, table.features.T, strict=True)
        ]
    ).T
    known = [list(table.categories[c]) for c in table.names]
    theirs = OneHotEncoder(categories=known, drop="if_binary", handle_unknown="ignore")
    with pytest.warns(UserWarning, match="unknown categories"):
        wanted = theirs.fit(texts[(texts != "?").all(1)]).transform(texts).toarray()
    found = data.columns.encode(table.features, np.empty((len(texts), 0)))
    assert data.channel_names == ("sex=m", "grade=I", "grade=II", "grade=III", "grade missing")
    np.testing.assert_array_equal(found[:, :4], wanted)
    np.testing.assert_array_equal(found[:, 4], texts[:, 1] == "?")


def test_every_hospital_is_scaled_by_its_own_rows_or_all_by_those_of_all(path):
    own, all_ = module(path), module(path, scaling="pooled")
    names = own.channel_names
    assert names == all_.channel_names
    assert names[:2] == ("age", "sex=m")
    assert names[-2:] == ("age missing", "grade missing")  # the same at every hospital
    for client, data in own.clients.items():
        rows = own.train[client].rows[:, [0, 3]]
        low, _, high = limits(rows)
        z = StandardScaler().fit_transform(np.clip(rows, low, high))
        there = ~np.isnan(z)
        np.testing.assert_allclose(images(data)[:, [0, 5]][there], z[there], atol=1e-6)
    rows = np.concatenate([all_.train[c].rows[:, [0, 3]] for c in all_.clients])
    scaling = all_.agreed.scaling
    z = StandardScaler().fit_transform(np.clip(rows, scaling.low, scaling.high))
    there = ~np.isnan(z)
    found = np.concatenate([images(c)[:, [0, 5]] for c in all_.clients.values()])
    np.testing.assert_allclose(found[there], z[there], atol=1e-6)


def test_pooled_means_are_those_of_all_rows_together():
    rng = np.random.default_rng(2)
    parts = {c: rng.normal(1e4 * k, 3, (20 + k, 2)) for k, c in enumerate("abc")}
    parts["b"][:5, 0], parts["c"][:, 1] = np.nan, np.nan
    settings = AgreementSettings(["x", "y"], False, "standard", pooled=True)
    agreed, _ = agree(settings, {c: TrainRows(rows) for c, rows in parts.items()})
    scaling = agreed.scaling
    clipped = np.clip(np.concatenate(list(parts.values())), scaling.low, scaling.high)
    theirs = StandardScaler().fit(clipped)
    np.testing.assert_allclose(scaling.mean, theirs.mean_, rtol=1e-12)
    np.testing.assert_allclose(scaling.sd, theirs.scale_, rtol=1e-9)
    wanted = np.median([np.median(parts[c][:, 1]) for c in "ab"])
    assert scaling.median[1] == pytest.approx(wanted, rel=1e-12)


def test_one_outlier_hardly_moves_the_others():
    """A cholesterol of a million, in a hospital of 60: the others keep their places."""
    rng = np.random.default_rng(3)
    before = rng.normal(240, 50, (60, 1))
    after = np.concatenate([before[:-1], [[1e6]]])
    moved = fit_standard(after).scale(after)[:-1] - fit_standard(before).scale(before)[:-1]
    assert np.abs(moved).max() < 0.4
    assert np.median(np.abs(moved)) < 0.12
    naive = StandardScaler().fit_transform(after)[:-1]
    assert np.ptp(naive) < 0.01  # what it does otherwise
    other = TrainRows(rng.normal(240, 50, (60, 1)))
    settings = AgreementSettings(["chol"], False, "standard", pooled=True)
    kept, _ = agree(settings, {"a": TrainRows(after), "b": other})
    clean, _ = agree(settings, {"a": TrainRows(before), "b": other})
    both = kept.scaling.scale(before) - clean.scaling.scale(before)
    assert np.abs(both).max() < 0.3


@sweep(
    ("values", "kept"),
    [
        ([0.0] * 95 + [1.0] * 5, (0.0, 1.0)),  # a rare yes
        ([0.0] * 48 + [1.0] * 48 + [2.0] * 4, (0.0, 2.0)),
        ([0.0] * 75 + list(range(1, 26)), (0.0, 25.0)),  # mostly none, else many
        ([7.0] * 9, (7.0, 7.0)),
        ([5.0], (5.0, 5.0)),
    ],
)
def test_what_is_rare_is_not_far_out(values, kept):
    low, _, high = limits(np.array(values, dtype=float)[:, None])
    assert low[0] <= kept[0]
    assert kept[1] <= high[0]


def test_what_is_exchanged_is_counted_and_all_that_is_needed(path):
    data = module(path, scaling="pooled")
    clients = list(data.clients)
    assert [(c, way) for c, way, _ in data.exchanged] == [
        (c, way) for _ in range(2) for way in ("up", "down") for c in clients
    ]
    rows, columns = data.train["Bern"].rows, data.table
    low, median, high = limits(rows[:, [0, 3]])
    count = (~np.isnan(rows[:, [0, 3]])).sum(0)
    used = [{*rows[:, at][~np.isnan(rows[:, at])].astype(int)} for at in (1, 2)]
    said = {
        "missing": [n for n, g in zip(columns.names, np.isnan(rows).any(0), strict=True) if g],
        "categories": {
            n: [columns.categories[n][code] for code in sorted(codes)]
            for n, codes in zip(("sex", "grade"), used, strict=True)
        },
        "count": count.tolist(),
        **{
            n: v.tolist()
            for n, v in zip(("low", "median", "high"), (low, median, high), strict=True)
        },
    }
    first = next(size for c, way, size in data.exchanged if (c, way) == ("Bern", "up"))
    assert first == len(json.dumps(said, separators=(",", ":")))
    assert module(path, missing_indicator=True, features=["crp"]).exchanged == []
    own = module(path)
    assert sum(size for *_, size in own.exchanged) < sum(size for *_, size in data.exchanged)


def test_categories_of_test_rows_alone_count_as_none_and_are_said(path, caplog):
    held = module(path).clients["Chur"].patients["test"][0]
    row = int(held.removeprefix("row_"))
    text = path.read_text().splitlines()
    cells = text[row + 1].split(",")
    cells[3] = "IV"
    text[row + 1] = ",".join(cells)
    path.write_text("\n".join(text))
    with caplog.at_level(logging.WARNING):
        data = module(path)
    assert "grade=IV" not in data.channel_names
    assert (
        "Rows whose category of grade fewer than 5 training patients of every client have: 1; they"
        in caplog.text
    )


def test_categories_of_few_patients_leave_no_client():
    """Five rows of one patient are one patient; a category that another client has has an input."""
    rows = {"a": np.array([0] * 9 + [1] * 5 + [2] * 4), "b": np.array([0] * 5 + [2] * 5 + [3] * 5)}
    texts = {"drug": ("A", "B", "C", "D")}
    patients = {"a": np.arange(18), "b": np.r_[:10, [10] * 5]}
    asked = AgreementSettings(["drug"], False, "standard", False, ["drug"])
    cells = {client: r[:, None].astype(float) for client, r in rows.items()}
    train = {c: TrainRows(of, texts, patients=patients[c]) for c, of in cells.items()}
    agreed, sent = agree(asked, train)
    assert agreed.columns.categories == {"drug": ("A", "B", "C")}
    assert sent[0][2] == len('{"categories":{"drug":["A","B"]}}')


def test_what_no_feature_can_be_is_left_out_and_said(tmp_path, caplog):
    path = tmp_path / "t.csv"
    rows = [f"{n},P{n:03d},2020-01-{n + 1:02d},yes,{n % 2},{n % 3},10:30" for n in range(20)]
    path.write_text("\n".join([",name,seen,consent,dead,x,at", *rows]))
    with caplog.at_level(logging.WARNING):
        data = module(path, label="dead", centre=None, partition=RoundRobin(1))
    assert "seen (dates or times), at (dates or times); set" in caplog.text
    assert data.table.names == ("consent", "x")
    assert "left out the one without a name (row numbers), name (20 different texts" in caplog.text
    assert "One value in all training rows, so without information: consent." in caplog.text
    with pytest.raises(DataError, match=r"column name has 20 different texts in 20 rows, which is"):
        module(path, label="dead", centre=None, partition=RoundRobin(1), features=["name"])
    with pytest.raises(DataError, match="is a date or time, not"):
        module(path, label="dead", centre=None, partition=RoundRobin(1), features=["x", "seen"])


def test_a_column_that_one_hospital_never_varies_and_copied_rows_are_said(tmp_path):
    rng = np.random.default_rng(0)
    rows = [
        [h, n % 2, *rng.normal(size=3), 1.0 if h == "a" else n] for h in "ab" for n in range(20)
    ]
    rows[25] = ["b", *rows[3][1:]]
    path = tmp_path / "t.csv"
    lines = [",".join(map(str, row)) for row in rows]
    path.write_text("\n".join(["place,dead,x,y,z,dose", *lines]))
    data = module(path, label="dead", centre="place")
    cohort = cohort_record(data).record()
    assert [r for r in cohort["remarks"] if r.endswith("tells nothing there: dose at a.")]
    assert cohort["duplicates"]["over_clients"] == 1


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"categorical": []},
            DataError,
            r"2 columns .*: sex \('f|m' in data row 1\), grade \(",
        ),
        ({"categorical": ["sax"]}, ConfigError, r"data.categorical: Unknown column sax; .*sex"),
        ({"scaling": "combat", "normalization": "minmax"}, ConfigError, "normalization=standard"),
        ({"covariates": ["age"]}, ConfigError, "data.covariates are for data.scaling=combat"),
        (
            {"scaling": "combat", "covariates": ["sex"]},
            ConfigError,
            "Unknown column of numbers sex; known: age, crp",
        ),
        ({"normalization": "z"}, ConfigError, "data.normalization='z' is unknown"),
        ({"missing_indicator": "no"}, ConfigError, "data.missing_indicator='no' is unknown"),
    ],
)
def test_settings_that_cannot_be(settings, error, message, path):
    with pytest.raises(error, match=message.replace("'f|m'", "'(f|m)'")):
        module(path, **settings)


def test_numbers_written_as_text_are_no_categories(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("crp,ill\n" + "\n".join(f'"{n},5",{n % 2}' for n in range(12)))
    with pytest.raises(DataError) as caught:
        read_csv(path, "ill", categorical="auto")
    assert "column crp: '0,5' is not a number (below 1e30) (nor are 11 other" in str(caught.value)
    path.write_text("crp,ill\n" + "\n".join(f"<{n},{n % 2}" for n in range(12)))
    with pytest.raises(DataError, match="column crp: '<0' is not a number"):
        read_csv(path, "ill", categorical="auto")
    named = read_csv(path, "ill", categorical=["crp"])
    assert named.categories["crp"][:3] == ("<0", "<1", "<10")


def test_numbers_named_as_categories_add_to_the_columns_of_texts(tmp_path):
    path = tmp_path / "t.csv"
    lines = [f"{n % 3},{'fm'[n % 2]},2019-01-{n + 1:02d},{90 - n},{n % 2}" for n in range(12)]
    path.write_text("\n".join(["stage,sex,seen,age,ill", *lines]))
    named = read_csv(path, "ill", categorical=["stage"])
    assert named.names == ("stage", "sex", "age")
    assert named.categories == {"stage": ("0", "1", "2"), "sex": ("f", "m")}


def test_decimal_commas_between_semicolons_are_read_and_said(tmp_path, caplog):
    path = tmp_path / "t.csv"
    path.write_text("crp;sex;ill\n" + "\n".join(f"{n},5;{'fm'[n % 2]};{n % 2}" for n in range(12)))
    table = read_csv(path, "ill", categorical="auto")
    assert table.features[:, 0].tolist() == [n + 0.5 for n in range(12)]
    assert "decimal commas in crp; 0,5 is read as 0.5" in caplog.text


def test_a_hospital_without_a_column_has_none_of_its_inputs(path):
    inner = ByCentre()
    lacks = ChannelMissing(inner, preset="lack_k", channel="grade", clients=[0])
    data = module(path, partition=lacks)
    names = data.preprocessing("Basel")["present"]
    assert not [n for n in names if n.startswith("grade")]
    assert "age missing" in names
    places = [at for at, n in enumerate(data.channel_names) if n.startswith("grade")]
    assert not data.clients["Basel"].train["image"][:, places].any()
    assert data.clients["Bern"].train["image"][:, places].any()
    assert data.splits()["partition"]["Basel"]["channels"] == ["age", "sex", "crp"]


def test_who_is_kept_out_is_not_asked(path):
    data = TabularDataModule(ByCentre(), path=path, label="outcome", centre="hospital")
    data.keep_out, data.scaling = ("Chur",), "pooled"
    data.setup()
    assert {client for client, *_ in data.exchanged} == {"Basel", "Bern"}
    rows = np.concatenate([data.train[c].rows[:, 3] for c in ("Basel", "Bern")])
    scaling = data.agreed.scaling
    clipped = np.clip(rows, scaling.low[1], scaling.high[1])
    assert scaling.mean[1] == pytest.approx(clipped.mean(), rel=1e-12)
    assert torch.isfinite(data.kept_out["Chur"].train["image"]).all()


def test_all_columns_that_are_no_numbers_are_named_at_once_and_may_be_dropped(tmp_path):
    path = tmp_path / "t.csv"
    rows = [f"2019-01-{n + 1:02d},{90 - n},1{n % 6}:30,<{n},{n % 2}" for n in range(11)]
    rows.append("soon,78,?,3,1")
    path.write_text("\n".join(["Datum,age,arrival,crp,ill", *rows]))
    with pytest.raises(DataError) as caught:
        read_csv(path, "ill", categorical="auto")
    assert str(caught.value) == (
        f"{path}: 2 columns have cells that are not numbers: Datum ('2019-01-01' a date or time, "
        "in data row 1), crp ('<0' in data row 1); leave columns such as dates out by "
        "'data.drop=[Datum,crp]', name those with categories in data.categorical, take limits by "
        "data.limits=half or data.limits=value, and mend the others."
    )
    given = {"label": "ill", "centre": None, "partition": RoundRobin(1)}
    data = module(path, **given, drop=["Datum", "crp"])
    assert data.channel_names == ("age",)
    with pytest.raises(ConfigError, match="Unknown column date"):
        module(path, **given, drop=["date"])


@pytest.mark.parametrize(
    ("no", "yes", "asked"),
    [("nein", "ja", True), ("NON", "OUI", True), ("no", "sí", True), ("no", "yes", False)],
)
def test_yes_and_no_are_asked_where_the_alphabet_does_not_know_them(no, yes, asked, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["age,ill", *(f"{n},{(no, yes)[n % 2]}" for n in range(12))]))
    if asked:
        with pytest.raises(DataError, match=rf"look like yes and no; .* data\.positive=\[{yes}\]"):
            read_csv(path, "ill")
    labels = read_csv(path, "ill", positive=[yes] if asked else None).labels
    assert labels.tolist() == [n % 2 for n in range(12)]


def test_rows_without_a_label_are_left_out_by_a_key_and_named(tmp_path, caplog):
    path = tmp_path / "t.csv"
    cells = [f"{n},{'' if n in (2, 5) else n % 2}" for n in range(12)]
    path.write_text("\n".join(["age,ill", *cells]))
    with pytest.raises(DataError, match=r"data row 3, .* by data\.unlabelled=drop"):
        read_csv(path, "ill")
    table = read_csv(path, "ill", unlabelled="drop")
    assert "2 of 12 rows have no ill and are left out: data rows 3, 6." in caplog.text
    assert table.patients == [f"row_{n}" for n in range(12) if n not in (2, 5)]
    assert table.features.ravel().tolist() == [n for n in range(12) if n not in (2, 5)]
    path.write_text("\n".join(["age,ill", *cells[:8], "old,1", *cells[9:]]))
    with pytest.raises(DataError, match="data row 9, column age: 'old'"):  # the row in the file
        read_csv(path, "ill", unlabelled="drop")
    with pytest.raises(ConfigError, match=r"data\.unlabelled='keep' is unknown"):
        module(path, label="ill", centre=None, partition=RoundRobin(1), unlabelled="keep")


def test_labels_that_look_like_a_measurement_are_said(tmp_path):
    path = tmp_path / "t.csv"
    given = {"centre": None, "partition": RoundRobin(2)}
    for count, said in ((44, True), (10, False)):
        ages = [f"{40 + n % count},{n % 7}" for n in range(176)]
        path.write_text("\n".join(["age,x", *ages]))
        remarks = " ".join(module(path, **given, label="age").remarks)
        assert ("The labels are 44 different numbers, each of which is a class" in remarks) == said
        assert ("set data.outcome=continuous model=linear." in remarks) == said
        outcome = module(path, **given, label="age", outcome="continuous")
        assert "different numbers" not in " ".join(outcome.remarks)
        path.write_text(path.read_text().replace("\n", "\nclass "))
        named = module(path, **given, label="age")
        assert "different numbers" not in " ".join(named.remarks)


def test_columns_that_tell_the_label_or_number_the_rows_are_said(tmp_path):
    rng = np.random.default_rng(0)
    dead = rng.random(120) < 0.4
    columns = {
        "mrn": rng.permutation(9000)[:120],
        "age": rng.integers(30, 90, 120),
        "score": rng.normal(size=120) + dead,  # predicts, but not alone
        "autopsy": np.where(dead, "done", "not done"),
        "discharged": [("" if one else n % 9) for n, one in enumerate(dead)],
        "dead": dead.astype(int),
    }
    path = tmp_path / "t.csv"
    rows = zip(*columns.values(), strict=True)
    path.write_text("\n".join(",".join(map(str, row)) for row in [columns, *rows]))
    given = {"label": "dead", "centre": None, "partition": RoundRobin(2)}
    first, second = module(path, **given).remarks[-2:]
    assert first == (
        "Columns that alone predict the label in training, with their AUROC: autopsy (1.000), "
        "whether discharged is missing (1.000). Leave out what is known only after the outcome: "
        "'data.drop=[autopsy,discharged]'."
    )
    assert second.startswith("Columns with a different whole number in every training row, as id")
    assert second.endswith("'data.drop=[mrn]'.")
    clean = module(path, **given, drop=["autopsy", "discharged", "mrn"])
    assert not [r for r in clean.remarks if r.startswith("Columns")]


def test_the_range_of_a_bundle_holds_all_training_rows_but_a_lone_outlier():
    rng = np.random.default_rng(0)
    heavy = np.exp(rng.normal(4.5, 0.4, size=(300, 3)))  # like glucose: a long tail
    heavy[:, 1] = heavy[:, 1].round()
    heavy[:, 2] = rng.integers(0, 2, 300)
    low, high = value_range(heavy, share=0)
    assert ((low <= heavy) & (heavy <= high)).all()
    assert (value_range(heavy)[1] < heavy.max(0))[:2].all()
    assert (high - low < 1.8 * np.ptp(heavy, axis=0))[:2].all()
    assert (low[2], high[2]) == (0, 1)
    heavy[0] = 1e4, 1e4, 7  # no end follows one patient
    again = value_range(heavy, share=0)[1]
    assert (again < 1e3).all()
    assert again[2] == 1
    assert np.isnan(value_range(heavy[:19], share=0)).all()


def test_years_between_dates_are_features_in_training_and_prediction(tmp_path, caplog):
    path = tmp_path / "t.csv"
    dates = [f"{1950 + n}-01-31,2010-01-31T12:00,{n},{n % 2}" for n in range(12)]
    path.write_text("\n".join(["Birth,admission,crp,ill", *dates, ",2010-01-31,3,1"]))
    assert read_csv(path, "ill", categorical="auto").names == ("crp",)  # dates are left out
    assert "or data.ages to change this" in caplog.text
    ages = {"admission": "birth"}
    table = read_csv(path, "ill", categorical="auto", ages=ages)
    assert table.names == ("crp", "years from Birth to admission")
    np.testing.assert_allclose(table.features[:12, 1], [60.0 - n for n in range(12)], atol=3e-3)
    assert np.isnan(table.features[12, 1])
    features, others, _ = read_features(path, table.names)
    np.testing.assert_array_equal(features, table.features)
    assert "Birth" in others
    assert read_csv(path, "ill", features=["crp"], ages=ages).names == table.names
    with pytest.raises(ConfigError, match="Unknown column born; known: Birth, admission"):
        read_csv(path, "ill", ages={"admission": "born"})
    path.write_text(path.read_text().replace("1952-01-31", "31.1.1952"))
    with pytest.raises(DataError, match=r"data row 3, column Birth: '31\.1\.1952' is no ISO date"):
        read_csv(path, "ill", ages=ages)
