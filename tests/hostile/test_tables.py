"""Tables and settings of data that cannot be: one sentence each, nothing left behind."""

from __future__ import annotations

import logging
import os
from contextlib import suppress

import pytest

from medfed.datamodules.readers.table import read_csv
from medfed.datamodules.tables.datamodule import TabularDataModule
from medfed.standalone.csv_files import read_features
from medfed.standalone.errors import DataError, MedfedError
from tests.integration.runs import CLINICAL, imaging, run
from tests.sweeps import sweep

HEADER = "who,place,age,ill"
ROWS = [f"p{n},{'Basel' if n % 2 else 'Bern'},{40 + n},{n // 2 % 2}" for n in range(16)]
TABLE = "\n".join([HEADER, *ROWS]) + "\n"


def one(sentence: str) -> bool:
    return "\n" not in sentence and sentence.endswith(".") and len(sentence) < 400


def changed(old, new):
    assert old in TABLE
    return TABLE.replace(old, new, 1)


def rows(lines):
    return "\n".join([HEADER, *lines]) + "\n"


# What a file holds, and what the sentence says.
FILES = {
    "torn UTF-16": (TABLE.encode("utf-16")[:-1], "is not UTF-8 (byte 0x"),
    "UTF-16 without a mark": (TABLE.encode("utf-16-le"), "line 1: a NUL byte"),
    "Latin-1 and a byte of none": (
        TABLE.replace("Bern", "Zürich\x81").encode("latin-1"),
        "is not UTF-8 (byte 0xfc); save it",
    ),
    "semicolons, a point and a comma": (
        changed(",41,", ",4.1,").replace(",", ";").replace(";42;", ";4,2;"),
        "data row 3, column age: '4,2' is not a number (below 1e30); write a number with a decimal",
    ),
    "semicolons, perhaps thousands": (
        changed(",41,", ",1'041,").replace(",", ";").replace("1'041", "1,041"),
        "data row 2, column age: '1,041' is not a number",
    ),
    "a cell beyond the commas": (
        changed("ill", "ill,").replace(",41,0", ",41,0,x"),
        "data row 1: 4 cells, but 5 columns",
    ),
    "open quote": (changed("p3", '"p3'), "cannot be read as CSV (a quote is not closed)"),
    "two open quotes": (
        changed("p3,Basel", 'p3,"Basel').replace("p9,Basel", 'p9,"Basel'),
        "cannot be read as CSV (',' expected after '\"')",
    ),
    "NUL": (changed("p3", "p\0003"), "line 5: a NUL byte"),
    "NULs at the end": (TABLE + "\0" * 50, "line 18: a NUL byte"),
    "only NULs": (bytes(500), "line 1: a NUL byte"),
    "a cell more": (changed("p3,", "p3,x,"), "data row 4: 5 cells, but 4 columns"),
    "a cell fewer": (changed("p3,", ""), "data row 4: 3 cells, but 4 columns"),
    "Excel": (b"PK\x03\x04" + bytes(range(256)), "is an Excel or zip file, not a CSV file"),
    "old Excel": (b"\xd0\xcf\x11\xe0\xa1\xb1" + bytes(99), "is an old Excel file"),
    "gzip": (b"\x1f\x8b\x08" + bytes(50), "is a gzip file"),
    "Parquet": (b"PAR1" + bytes(60), "is a Parquet file"),
    "picture": (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "is a PNG picture, not a CSV file"),
    "page": ("<html>\n<body>404</body>\n</html>\n", "is a web page or XML, not a CSV file"),
    "empty": ("", "has no data rows"),
    "blank": ("\n \n\n", "has no data rows"),
    "header alone": (HEADER + "\n", "has no data rows"),
    "column twice": (changed("age", "Who"), "occurs twice; give every column a"),
    "no name": (changed("age", ""), "a column without a name, perhaps row numbers"),
    "long name": (changed("age", "a" * 9999), "no column can be called 'aaa"),
    "line in a name": (changed("age", '"a\nb"'), "no column can be called 'a\\nb'"),
    "many unknown columns": (
        ",".join(f"c{n}" for n in range(100_000)) + "\n" + ",".join("1" * 100_000) + "\n",
        "and 99980 more",
    ),
    "infinity": (changed(",41,", ",inf,"), "data row 2, column age: 'inf' is not a number"),
    "beyond": (changed(",41,", ",1e400,"), "'1e400' is not a number"),
    "too large to scale": (changed(",41,", ",-1e308,"), "'-1e308' is not a number (below 1e30)"),
    "decimal comma": (changed(",41,", ',"4,1",'), "'4,1' is not a number"),
    "thousands": (changed(",41,", ',"1,041",'), "'1,041' is not a number"),
    "underscore": (changed(",41,", ",4_1,"), "'4_1' is not a number"),
    "text": (changed(",41,", ",old,"), "'old' is not a number"),
    "long text": (changed(",41,", f",{'x' * 5000},"), "'xxx"),
    "huge cell": (changed(",41,", f",{'4' * 200_000},"), "field larger than field limit"),
    "one row": (rows(ROWS[:1]), "the label column has 1 distinct value(s)"),
    "one class": (rows(ROWS[:2]), "the label column has 1 distinct value(s)"),
    "label missing": (changed(",41,0", ",41,"), "data row 2, column ill: the cell is missing"),
    "labels are ids": (rows([f"p{n},B,{n},patient {n}" for n in range(16)]), "is probably an id"),
    "labels are long": (
        rows([f"p{n},B,{n},{'x' * 500}{n}" for n in range(300)]),
        "the label column has 300 distinct value(s)",
    ),
    "labels are measured": (rows([f"p{n},B,{n},{n / 7}" for n in range(40)]), "data.outcome=conti"),
    "no features": ("ill\n0\n1\n0\n1\n", "has no feature column"),
    "patient missing": (changed("p3,", ","), "data row 4, column who: the cell is missing"),
}


@sweep("name", FILES)
def test_a_file_that_is_no_table(name, tmp_path):
    content, message = FILES[name]
    path = tmp_path / "t.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    roles = {} if name == "no features" else {"centre": "place", "patient": "who"}
    with pytest.raises(MedfedError) as caught:
        read_csv(path, "ill", **roles)
    assert message in str(caught.value)
    assert "t.csv" in str(caught.value)
    assert one(str(caught.value))


@sweep(
    "content",
    [
        b"\xef\xbb\xbf" + TABLE.encode(),
        TABLE.replace("\n", "\r\n").encode(),
        TABLE.replace("\n", "\r").encode(),
        TABLE.replace("p3", '"p3"').encode(),
        TABLE.encode() + b"\n\n ,,,\n",
        TABLE.replace("\n", ",,\n").encode(),
        TABLE.replace("0\n", "0,\n").encode(),
        TABLE.replace(",age", ",,age").replace("Basel", "Basel,").replace("Bern", "Bern,").encode(),
        b"\xef\xbb\xbf" + TABLE.replace(",", ";").replace("\n", "\r\n").encode(),
        TABLE.replace(",", "\t").encode(),
        TABLE.replace(",", ";").replace(";41;", ";41,0;").encode(),
    ],
)
def test_a_file_that_users_expect_to_be_read(content, tmp_path):
    (tmp_path / "t.csv").write_bytes(content)
    table = read_csv(tmp_path / "t.csv", "ill", centre="place", patient="who")
    assert table.features.ravel().tolist() == list(range(40, 56))
    assert list(table.patients) == [f"p{n}" for n in range(16)]


def test_a_bundles_input_is_told_of_no_key_of_data(tmp_path):
    """Whoever predicts cannot set ``data.drop``: the bundle says how its input is read."""
    refused = 0
    for content, _ in FILES.values():
        path = tmp_path / "rows.csv"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with suppress(DataError):
            read_features(path, ["age"])
            continue
        refused += 1
        with pytest.raises(DataError, match=r"^((?!data\.).)*$"):
            read_features(path, ["age"])
    assert refused > 10
    with pytest.raises(DataError, match="set input to a CSV file"):
        read_features(tmp_path / "none.csv", ["age"])


@pytest.mark.parametrize(
    ("cells", "odd"),
    [
        (["26,5", "26.5", "27,1"], "'26.5' is not a number with a decimal comma, as others are;"),
        (["26,5", "26.5"], "'26.5' is not a number with a decimal comma"),
        (["26.5", "26,5", "27.1"], "'26,5' is not a number (below 1e30); write a number with a"),
        (["8,50", "<0,5", "9,1"], "'<0,5' is not a number (below 1e30);"),
        (["8,50", "old", "9,1", "x"], "'old' is not a number (below 1e30) (nor are 1 other cells)"),
    ],
    ids=["a point", "a point of two", "a comma", "a limit", "words"],
)
def test_the_rarer_spelling_of_a_column_is_named(cells, odd, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("crp;age\n" + "\n".join(f"{cell};6{n},4" for n, cell in enumerate(cells)))
    with pytest.raises(DataError) as caught:
        read_features(path, ["crp", "age"])
    row = 1 + cells.index(odd.split("'")[1])
    assert f"data row {row}, column crp: {odd}" in str(caught.value)


def test_a_table_in_latin_1_is_read_and_a_line_says_so(tmp_path, caplog):
    (tmp_path / "t.csv").write_bytes(TABLE.replace("Bern", "Zürich").encode("latin-1"))
    table = read_csv(tmp_path / "t.csv", "ill", centre="place", patient="who")
    assert set(table.centres) == {"Basel", "Zürich"}
    assert "is not UTF-8 and is read as Latin-1, such as 'Zürich'; if that is wrong" in caplog.text


def test_a_table_of_very_many_columns(tmp_path):
    names = [f"c{n}" for n in range(100_000)]
    lines = [",".join(["ill", *names]), *[",".join([str(k), *["1"] * len(names)]) for k in (0, 1)]]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    assert read_csv(tmp_path / "t.csv", "ill").features.shape == (2, 100_000)


def test_a_folder_and_a_file_without_permission(tmp_path):
    with pytest.raises(MedfedError, match=r"is a folder; name a CSV file\."):
        read_csv(tmp_path, "ill")
    path = tmp_path / "t.csv"
    path.write_text(TABLE)
    path.chmod(0)
    if os.geteuid():  # the administrator may read everything
        with pytest.raises(MedfedError, match=r"t\.csv cannot be read as CSV \(.*Permission"):
            read_csv(path, "ill")


@sweep(
    ("roles", "message"),
    [
        ({"positive": [7]}, "no row has a label of data.positive (7); the labels are 0, 1."),
        ({"positive": [1], "negative": [2]}, "the label 0 is none of 1, 2; mend the row."),
        ({"features": ["age", "ill"]}, "data.features names ill, which is data.label"),
        (
            {"features": ["aeg"]},
            "Unknown column aeg; known: who, place, age, ill (did you mean age",
        ),
        ({"features": []}, "Each column must be named once; got: none."),
        ({"features": ["age", "age"]}, "Each column must be named once"),
        ({"centre": "ill"}, "Each column must be named once"),
        ({"centre": "land"}, "Unknown column land"),
        ({"outcome": "continuous", "label": "place"}, "the outcome 'Bern' is not a number"),
        ({"label": "age"}, "16 distinct values in 16 rows, so it is probably an id"),
        ({"header": ["a", "b"]}, "4 cells, but 2 columns; mend the row or data.header."),
    ],
)
def test_roles_that_do_not_fit(roles, message, tmp_path):
    (tmp_path / "t.csv").write_text(TABLE)
    given = {"label": "ill", "patient": "who", **roles}
    with pytest.raises(MedfedError) as caught:
        read_csv(tmp_path / "t.csv", **given)
    assert message in str(caught.value)
    assert one(str(caught.value))


def test_missing_cells_and_lone_classes_are_said(tmp_path, caplog):
    from medfed.datamodules.partitions.base import RoundRobin

    path = tmp_path / "t.csv"
    path.write_text(
        rows([f"p{n},Bern,,{n % 2}" for n in range(8)])
        .replace("place", "weight")
        .replace("Bern", "")
    )
    data = TabularDataModule(RoundRobin(1), path=path, label="ill", patient="who")
    with pytest.raises(MedfedError, match=r"t\.csv has only missing cells; fill them in\."):
        data.setup()
    path.write_text(rows([f"p{n},7{n}.5,,{n % 2}" for n in range(8)]))
    data = TabularDataModule(RoundRobin(1), path=path, label="ill", patient="who")
    with caplog.at_level(logging.WARNING):
        data.setup()
        (tmp_path / "u.csv").write_text(changed(",41,0", ",41,2147483648"))
        assert len(read_csv(tmp_path / "u.csv", "ill", patient="who", centre="place").classes) == 3
    assert "1 columns have no value and become 0, such as age." in caplog.text
    assert "the class 2147483648 has a single row." in caplog.text


GONE = "would leave out a whole section; choose an option by"
MUST = "must be non-negative and leave a share for training."
NOT_FIT = "does not fit 569 patients"
LEARNS = "The model cannot take the batches of these data (image (32, 30)"
DIABETES = "data=diabetes partition=quantity_skew model=linear"
SETTINGS = {
    "data.val_fraction=nan": f"data.val_fraction=nan and data.test_fraction=0.2 {MUST}",
    "data.test_fraction=nan": f"data.test_fraction=nan {MUST}",
    "data.val_fraction=-0.1": MUST,
    "data.test_fraction=-1": MUST,
    "data.val_fraction=1.2": MUST,
    "data.val_fraction=inf": MUST,
    "data.test_fraction=1": MUST,
    "data.val_fraction=0.5 data.test_fraction=0.5": MUST,
    "data.val_fraction=null": "data.val_fraction must be a number, not None.",
    "data.test_fraction=0": "No client has a test patient, so there is nothing to evaluate; set "
    "data.test_fraction above 0",
    "~data": f"~data {GONE} data=OPTION.",
    "~partition": f"~partition {GONE} partition=OPTION.",
    "~model": GONE,
    "~algorithm": GONE,
    "~optimizer": GONE,
    "~trainer": GONE,
    "~local": "~local would leave out a whole section; set one of its keys.",
    "data=null": f"data=null {GONE} data=OPTION.",
    "partition=null": GONE,
    "model=null": GONE,
    "algorithm=null": GONE,
    "optimizer=null": GONE,
    "data.partition=null": "data.partition=None is no partition; choose one by partition=OPTION.",
    "model.network=null": "model.network=None is no network; set model=OPTION.",
    "model.network=foo": "model.network=foo is no network; set model=OPTION.",
    "~data.partition": "~data.partition would leave out a key",
    "model=foo": "Unknown model 'foo'",
    "model=unet": LEARNS,
    "model=small_cnn": LEARNS,
    "model=densenet121": LEARNS,
    "model=basic_unet": LEARNS,
    "model=linear": "Linear regression predicts one number, and these data have 2 classes",
    "in_channels=7": "in_channels is 7, but the data have 30; leave it at null.",
    "out_channels=0": "out_channels must be a whole number of at least 1, not 0.",
    "data=diabetes": "has no label; a partition by label needs one per patient, not a continuous",
    "data=digits": "has samples beyond classes 0 and 1; partition=label_imbalance needs 2",
    f"{DIABETES} data.outcome_scale=[1,0]": "data.outcome_scale=[1, 0] must be a mean and a",
    f"{DIABETES} data.outcome_scale=[1,nan]": "must be a mean and a deviation above 0",
    f"{DIABETES} data.outcome_scale=[1]": "must be a mean and a deviation above 0",
    f"{DIABETES} data.outcome_scale=3": "data.outcome_scale must be a list or null, not 3",
    f"{DIABETES} outcome_scale=[0,1]": "outcome_scale is [0, 1], but the data have [154.35",
    f"{DIABETES} data.outcome_scale=[0,1] outcome_scale=[0,2]": "but the data have [0.0, 1.0]",
    f"{DIABETES} model=mlp": "at least 2 classes, not 1 (a continuous outcome needs model=",
    f"{DIABETES} model=logistic": "outcome needs model=linear or model=mlp_regression)",
    "model=mlp_regression": "a regression needs one continuous outcome per sample",
    "algorithm=fedrep": "The model has no shared part, which the algorithm trains; choose a model",
    "algorithm=fedalt": "The model has no shared part, which the algorithm trains; choose a model",
    "algorithm=fedbabu": "The model has no shared part, which the algorithm trains; choose a model",
    "data.batch_size=-1": "data.batch_size must be in [1, 2147483647], not -1.",
    "data.batch_size=1000000000000000000000": "data.batch_size must be in [1, 2147483647], not 1",
    "data.batch_size=nan": "data.batch_size must be a whole number, not nan.",
    "data.batch_size=2.5": "data.batch_size must be a whole number, not 2.5.",
    "data.eval_batch_size=0": "data.eval_batch_size must be in [1, 2147483647], not 0.",
    "partition.num_clients=0": NOT_FIT,
    "partition.num_clients=-3": NOT_FIT,
    "partition.num_clients=100000000000": NOT_FIT,
    "partition.num_clients=300": "No client has a test patient",
    "partition.num_clients=nan": "partition.num_clients must be a whole number, not nan.",
    "partition=dirichlet partition.alpha=nan": "partition.alpha must be in (0, inf), not nan.",
    "partition=dirichlet partition.alpha=-1": "must be in (0, inf), not -1.",
    "partition=shards partition.shards_per_client=0": "must be 1 or more, not 0.",
    "partition=site_groups partition.scanners=[{gamma:2},{}]": "tables have no images; set",
    "optimizer.lr=nan": "cannot be used as it is: a learning rate must be a number below 1e+30.",
    "optimizer.lr=inf": "cannot be used as it is: a learning rate must be a number below 1e+30.",
    "model.l2=nan": "l2 must not be negative or infinite, not nan.",
    "data.scaling=mine": "data.scaling='mine' is unknown; choose one of client, pooled, combat.",
    "data.embedded=iris": "data.embedded='iris' is unknown",
    "data=mixture data.noise=nan": "data.noise must not be negative, not nan.",
    "data=mixture data.samples=0": "data.samples must be positive, not 0.",
}


@pytest.mark.promise("settings are checked first")
@sweep(("overrides", "message"), SETTINGS.items())
def test_settings_are_checked_before_the_first_round(overrides, message, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(MedfedError) as caught:
        run(folder, *CLINICAL, *overrides.split())
    assert message in str(caught.value)
    assert one(str(caught.value))
    assert not folder.exists()


def test_classes_have_no_scale(tmp_path):
    (tmp_path / "t.csv").write_text(rows(ROWS))
    own = ["data=csv", f"data.path={tmp_path / 't.csv'}", "data.label=ill", "data.centre=place"]
    with pytest.raises(MedfedError, match=r"data\.outcome_scale is for continuous outcomes; leave"):
        run(tmp_path / "run", *CLINICAL, *own, "data.outcome_scale=[0,1]")
    assert not (tmp_path / "run").exists()


def test_a_client_without_test_patients_is_said_and_the_others_measured(tmp_path, caplog):
    path = tmp_path / "t.csv"
    more = [f"q{n},Chur,{50 + n},{n % 2}" for n in range(2)]
    path.write_text(rows([*ROWS, more[0]]))
    own = ["data=csv", f"data.path={path}", "data.label=ill", "data.centre=place"]
    own += ["data.patient=who", "partition=centre", "rounds=1", "algorithm=fedavg"]
    with caplog.at_level(logging.WARNING):
        summary, _ = run(tmp_path / "run", *CLINICAL, *own)
    assert "Client Chur has no patient in: val, test." in caplog.text
    assert summary


@pytest.fixture(scope="module")
def cohort_root(tmp_path_factory):
    """Where the heads of the imaging experiment are generated, once."""
    return tmp_path_factory.mktemp("cohorts")


PATCHES = {
    "data.patch_size=[0,0]": "data.patch_size=[0, 0] does not fit data.spatial_dims=2",
    "data.patch_size=[-4,4]": "does not fit data.spatial_dims=2",
    "data.patch_size=[16,16,16]": "does not fit data.spatial_dims=2",
    "data.patch_size=[100000,100000]": "is more than twice as large as the volume of patient",
    "data.patches_per_patient=0": "patches_per_patient must be 1 or more",
    "data.background_share=nan": "data.background_share must be in [0, 1], not nan",
    "data.memory_gb=nan": "data.memory_gb must not be negative, not nan",
    "data.val_fraction=nan": MUST,
    "model=linear": "",
    "model=logistic": "",
    "model=mlp": "",
}


@pytest.mark.parametrize(("overrides", "message"), PATCHES.items())
def test_patches_that_cannot_be_cut(overrides, message, tmp_path, cohort_root):
    folder = tmp_path / "run"
    with pytest.raises(MedfedError) as caught:
        run(folder, *imaging(cohort_root), *overrides.split())
    assert message in str(caught.value)
    assert one(str(caught.value))
    assert not folder.exists()
