"""The UCI Heart Disease data: the format, its codes of missing values, and what must not pass."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from medfed.common.seeding import numpy_rng
from medfed.config.compose import described
from medfed.datamodules.partitions.by_centre import ByCentre
from medfed.datamodules.readers.heart import FEATURES, PUBLISHED, TARGET, read_heart
from medfed.datamodules.tables.datamodule import TabularDataModule
from medfed.run.train import train
from medfed.standalone.errors import ConfigError, DataError
from tests.sweeps import sweep

SHARED = Path(os.environ.get("MEDFED_SHARED", Path(__file__).parents[3] / "shared"))
REAL = SHARED / "data" / "heart"
ROW = "63,1,1,145,233,1,2,150,0,2.3,3,0,6,{num}"


def write(folder, centre, rows, header=None):
    path = folder / f"processed.{centre}.data"
    path.write_text("\n".join([*([header] if header else []), *rows]) + "\n")
    return path


@pytest.fixture
def folder(tmp_path):
    """Four small hospitals with the published format; a sixth of the cells is missing."""
    for centre in PUBLISHED:
        rng = numpy_rng("heart", centre)
        rows = []
        for _ in range(20):
            ill = int(rng.random() < 0.5)
            cells = [f"{v:.1f}" for v in rng.uniform(1, 9, len(FEATURES)) + 3 * ill]
            gone = rng.random(len(FEATURES)) < 1 / 6
            cells = ["?" if g else c for g, c in zip(gone, cells, strict=True)]
            rows.append(",".join([*cells, str(ill * int(rng.integers(1, 5)))]))
        write(tmp_path, centre, rows)
    return tmp_path


def test_missing_cells_of_all_conventions(tmp_path):
    """`?`, `NaN`, empty, -9, and a pressure or cholesterol of 0; a ST depression may be 0."""
    cells = "?,NaN,,-9,0,-9.0,nan,0,0,0,3.0,0.0,6"
    write(tmp_path, "va", [f"{cells},4"])
    table = read_heart(tmp_path, ["va"])
    missing = dict(zip(FEATURES, np.isnan(table.features[0]), strict=True))
    assert [n for n, gone in missing.items() if gone] == list(FEATURES[:7])
    assert table.features[0, 7:].tolist() == [0, 0, 0, 3, 0, 6]
    assert (table.labels.tolist(), table.patients) == ([1], ["va_1"])


def test_a_header_may_name_the_columns_in_another_order(tmp_path):
    rows = [ROW.format(num=n) for n in (0, 1, 4)]
    write(tmp_path, "va", rows)
    plain = read_heart(tmp_path, ["va"])
    write(tmp_path, "va", rows, header=",".join((*FEATURES, TARGET)).upper())
    named = read_heart(tmp_path, ["va"])
    turned = [",".join(reversed(row.split(","))) for row in rows]
    write(tmp_path, "va", turned, header=",".join(reversed((*FEATURES, TARGET))))
    for table in (named, read_heart(tmp_path, ["va"])):
        assert np.array_equal(table.features, plain.features)
        assert table.labels.tolist() == [0, 1, 1]


def test_every_hospital_is_a_client(folder):
    data = TabularDataModule(ByCentre(), path=str(folder), reader=read_heart)
    data.setup()
    assert list(data.clients) == sorted(PUBLISHED)
    assert data.class_names == ("no disease", "disease")
    for name, client in data.clients.items():
        ids = [i for split in client.patients.values() for i in split]
        assert sorted(ids) == sorted(f"{name}_{n}" for n in range(1, 21))
    files = data.splits()["files"]
    assert sorted(Path(f).name for f in files) == [f"processed.{c}.data" for c in sorted(PUBLISHED)]


@sweep(
    ("row", "header", "message"),
    [
        (ROW.format(num=5), None, r"va\.data, data row 1: the label 5 is none of 0, 1, 2, 3, 4"),
        (ROW.format(num="?"), None, r"va\.data, data row 1, column num: the cell is missing"),
        ("old" + ROW.format(num=1)[2:], "age", r"va\.data: the header lacks sex, cp"),
        (ROW.format(num=1).replace("145", "high"), None, r"data row 1, column trestbps: 'high'"),
        (ROW.format(num=1)[3:], None, r"va\.data, data row 1: 13 cells, but 14 columns"),
    ],
)
def test_bad_files_are_named(tmp_path, row, header, message):
    write(tmp_path, "va", [row], header)
    with pytest.raises(DataError, match=message):
        read_heart(tmp_path, ["va"])


def test_missing_files_and_unknown_hospitals(folder, tmp_path):
    (folder / "processed.va.data").unlink()
    with pytest.raises(DataError, match=r"va\.data does not exist; .* data\.reader\.centres"):
        read_heart(folder)
    assert set(read_heart(folder, ["hungarian"]).centres) == {"hungarian"}
    with pytest.raises(ConfigError, match="Unknown centre zurich"):
        read_heart(folder, ["zurich"])
    with pytest.raises(DataError, match=r"is not a folder; set data\.path"):
        read_heart(tmp_path / "none")


def test_a_recoded_copy_is_refused(tmp_path, caplog):
    """The counts of the well-known copy in which 1 means healthy."""
    rows, healthy = PUBLISHED["cleveland"]
    right = [ROW.format(num=int(i >= healthy)) for i in range(rows)]
    write(tmp_path, "cleveland", right)
    assert int(read_heart(tmp_path, ["cleveland"]).labels.sum()) == rows - healthy
    write(tmp_path, "cleveland", [ROW.format(num=int(i < healthy)) for i in range(rows)])
    with pytest.raises(DataError, match="139 patients without disease, the published file 164"):
        read_heart(tmp_path, ["cleveland"])
    write(tmp_path, "cleveland", right[:-1])
    read_heart(tmp_path, ["cleveland"])
    assert "has 302 rows, the published file 303" in caplog.text


def test_hospitals_train_even_where_a_test_split_has_one_class(folder, tmp_path):
    """What AUROC cannot say there is left out, and is no error."""
    rows = [ROW.format(num=int(i > 1)) for i in range(12)]
    write(folder, "switzerland", rows)
    overrides = [
        *("experiment=heart_pfednet", f"data.path={folder}"),
        *("rounds=2", "local.steps=3", "logger=none", "progress=false"),
        *("data.test_fraction=0.1", "data.val_fraction=0.1", f"folder={tmp_path / 'run'}"),
    ]
    summary, experiment = train(described(overrides))
    labels = [b["label"] for b in experiment.data.clients["switzerland"].eval_batches("test")]
    assert len(torch.cat(labels).unique()) == 1
    measured = summary["clients"]["switzerland"]
    assert measured["auroc"] is None or np.isnan(measured["auroc"])
    assert np.isnan(measured["balanced_accuracy"])
    assert 0 <= measured["accuracy"] <= 1
    assert all(np.isfinite(m["loss"]) for m in summary["clients"].values())


@pytest.mark.skipif(not REAL.is_dir(), reason=f"{REAL} is absent (the four UCI files)")
def test_the_four_real_hospitals():
    table = read_heart(REAL)
    assert table.features.shape == (920, 13)
    for centre, (rows, healthy) in PUBLISHED.items():
        mine = np.array(table.centres) == centre
        assert (int(mine.sum()), int((table.labels[mine] == 0).sum())) == (rows, healthy)
        with (REAL / f"processed.{centre}.data").open() as file:  # by hand
            cells = [row[4] for row in csv.reader(file)]
        known = [float(c) for c in cells if c.lower() not in ("nan", "?") and float(c) != 0]
        chol = table.features[mine, FEATURES.index("chol")]
        assert chol[~np.isnan(chol)].tolist() == known
    data = TabularDataModule(ByCentre(), path=str(REAL), reader=read_heart, missing_indicator=True)
    data.setup()
    assert data.in_channels == 26
    shares = {n: float(c.label_counts[1] / c.label_counts.sum()) for n, c in data.clients.items()}
    assert shares["switzerland"] > 0.9
    assert shares["hungarian"] < 0.4
    for client in data.clients.values():
        assert torch.isfinite(client.train["image"]).all()
