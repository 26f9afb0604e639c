"""A record is continued, evaluated or built upon with the data that made it, or not at all."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from medfed.run.evaluation import evaluate_run
from medfed.standalone.errors import CheckpointError
from tests.integration.runs import resume, run
from tests.integration.test_evaluate import contents

PLAIN = ("rounds=1", "local.steps=1", "logger=none", "progress=false")


def table(folder, seed=0):
    rng = np.random.default_rng(seed)
    rows = [f"{n},{rng.normal(60, 9):.2f},{n % 3 == 0:d},{'AB'[n % 2]}" for n in range(60)]
    (folder / "table.csv").write_text("\n".join(["id,age,ill,place", *rows]) + "\n")
    columns = ("data.label=ill", "data.patient=id", "data.centre=place")
    return (
        "experiment=clinical_pfednet",
        "data=csv",
        f"data.path={folder / 'table.csv'}",
        *columns,
    )


def pictures(folder):
    rng = np.random.default_rng(1)
    for name in ("benign", "malignant"):
        (folder / "pictures" / name).mkdir(parents=True)
        for n in range(12):
            pixels = rng.integers(0, 255, (8, 8), np.uint8)
            Image.fromarray(pixels).save(folder / "pictures" / name / f"{name}_{n}.png")
    smaller = (
        "data.reader.size=[8,8]",
        "model.network.channels=[4,4,4]",
        "partition.num_clients=2",
    )
    path = f"data.path={folder / 'pictures'}"
    return ("experiment=medmnist_pfednet", "data=image_folder", path, *smaller)


def column(folder):
    path = folder / "table.csv"
    path.write_text(re.sub(r"(?m)^(\d+),[\d.]+", r"\1,500", path.read_text()))


def labels(folder):
    path = folder / "table.csv"
    flip = {"0": "1", "1": "0"}
    text = re.sub(r"(?m),([01]),([AB])$", lambda m: f",{flip[m[1]]},{m[2]}", path.read_text())
    path.write_text(text)


def fewer(folder):
    path = folder / "table.csv"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def picture(folder):
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(
        folder / "pictures" / "benign" / "benign_3.png"
    )


@pytest.mark.parametrize(
    ("make", "change"),
    [(table, column), (table, labels), (table, fewer), (pictures, picture)],
    ids=["a column", "labels", "a row less", "a picture"],
)
def test_changed_data_are_named_and_nothing_is_written(make, change, tmp_path):
    overrides, folder = (*PLAIN, *make(tmp_path)), tmp_path / "run"
    run(folder, *overrides)
    change(tmp_path)
    before = contents(folder)
    for again in (lambda: resume(folder, *overrides), lambda: evaluate_run(folder)):
        with pytest.raises(CheckpointError, match=r"not those that .*splits\.json records"):
            again()
    assert contents(folder) == before


def test_data_that_have_moved_are_the_same(tmp_path):
    overrides = (*PLAIN, *table(tmp_path))
    run(tmp_path / "run", *overrides)
    shutil.move(tmp_path / "table.csv", tmp_path / "elsewhere.csv")
    splits = json.loads((tmp_path / "run" / "splits.json").read_text())
    (sha256,) = splits["files"].values()
    from medfed.records.folder import RunFolder

    RunFolder(tmp_path / "run").check_data({**splits, "files": {"elsewhere.csv": sha256}})
