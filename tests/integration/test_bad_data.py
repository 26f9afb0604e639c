"""Data that cannot be used, as they come through ``scripts/prepare.py``: one sentence each.

The readers' own tests have more cases; here every kind of data meets every kind of damage that it
can have, with the configuration, the cache and the folder of results around it.
"""

from __future__ import annotations

import json
import re
import resource

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk
from PIL import Image

from medfed.config.compose import described, load
from medfed.config.description import describe
from medfed.run.prepare import prepare
from medfed.standalone.errors import MedfedError
from tests import processes
from tests.datamodules.brats_layouts import make_head, save, write_challenge
from tests.datamodules.luna_files import HEADER, image_of, noise, write_luna
from tests.integration.runs import left_in, run

CASES = [f"Brats18_X_{n}" for n in range(3)]
SERIES = [f"1.3.6.{n}" for n in range(3)]
SETTINGS = {
    "brats_challenge": ("data.reader.hospitals=1", "data.patch_size=[8,8]"),
    "luna16": ("partition=round_robin", "partition.num_clients=1", "data.patches.size=[8,8]"),
    "csv": ("data.label=ill", "data.centre=place", "data.patient=who"),
    "heart": (),
    "medmnist": ("partition=round_robin", "partition.num_clients=1"),
    "image_folder": ("partition=round_robin", "partition.num_clients=1"),
    "image_table": ("partition=round_robin", "partition.num_clients=1", "data.reader.size=[8,8]"),
}


def write_brats(folder):
    write_challenge(folder, {case: make_head(n) for n, case in enumerate(CASES)})


def write_scans(folder):
    folder.mkdir()
    scans = {series: image_of(noise(seed=n)) for n, series in enumerate(SERIES)}
    inside = scans[SERIES[0]].TransformContinuousIndexToPhysicalPoint([18.0, 20.0, 7.0])
    write_luna(folder, scans, [(s, *inside, k) for s in SERIES for k in (0, 1)])


def write_table(path):
    lines = ["who,place,age,ill"]
    lines += [f"p{n},{'Basel' if n % 2 else 'Bern'},{40 + n},{n // 2 % 2}" for n in range(16)]
    path.write_text("\n".join(lines) + "\n")


def write_heart(folder):
    folder.mkdir()
    for n, centre in enumerate(("cleveland", "hungarian", "switzerland", "va")):
        rows = [[40 + n + k, *[1.0] * 12, k % 2] for k in range(8)]
        text = "\n".join(",".join(map(str, row)) for row in rows)
        (folder / f"processed.{centre}.data").write_text(text + "\n")


def arrays():
    rng = np.random.default_rng(0)
    found = {}
    for split, count in (("train", 8), ("val", 4), ("test", 4)):
        found[f"{split}_images"] = rng.integers(0, 255, (count, 12, 12), dtype=np.uint8)
        found[f"{split}_labels"] = (np.arange(count) % 2)[:, None]
    return found


def write_npz(path):
    np.savez(path, **arrays())


def write_images(folder):
    for name in ("benign", "malignant"):
        (folder / name).mkdir(parents=True)
        for n in range(6):
            pixels = np.random.default_rng(n).integers(0, 255, (12, 12), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{n}.png")


def write_image_table(path):
    write_images(path.parent / "images")
    lines = [f"images/{k}/{n}.png,{k},p{n}" for n in range(6) for k in ("benign", "malignant")]
    path.write_text("\n".join(["image,label,patient", *lines]) + "\n")


WRITE = {
    "brats_challenge": write_brats,
    "luna16": write_scans,
    "csv": write_table,
    "heart": write_heart,
    "medmnist": write_npz,
    "image_folder": write_images,
    "image_table": write_image_table,
}


def cut(pattern):
    """A damage: the second half of a file is gone."""

    def damage(path):
        file = next(path.rglob(pattern)) if path.is_dir() else path
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    return damage


def remove(pattern):
    return lambda path: next(path.rglob(pattern)).unlink()


def change(name, old, new):
    """A damage: another text in a table."""

    def damage(path):
        file = path / name if name else path
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new, 1))

    return damage


def append(name, line):
    def damage(path):
        file = path / name if name else path
        file.write_text(f"{file.read_text()}{line}\n")

    return damage


def volume(suffix, edit, affine=None):
    """A damage: another array in one NIfTI file."""

    def damage(path):
        file = next(path.rglob(f"*{suffix}.nii.gz"))
        image = nib.load(file)
        array = edit(np.asanyarray(image.dataobj).astype(np.float32))
        save(file, array, image.affine if affine is None else affine)

    return damage


def with_voxel(value):
    def edit(array):
        array[4, 4, 4] = value
        return array

    return edit


def float_scan(path):
    file = next(path.rglob("*.mhd"))
    voxels = noise().astype(np.float32)
    voxels[7, 20, 18] = np.nan
    sitk.WriteImage(image_of(voxels), str(file))


def stored(**changed):
    return lambda path: np.savez(path, **{**arrays(), **changed})


OUTSIDE = f"{SERIES[0]},9000,0,0,1"
BAD = {
    "brats_challenge": {
        "truncated volume": (cut("*_t2.nii.gz"), r"_t2.nii.gz is truncated or corrupt"),
        "missing modality": (remove("*_t1ce.nii.gz"), "0 files match *_t1ce.nii.gz"),
        "missing mask": (remove("*_seg.nii.gz"), "0 files match *_seg.nii.gz"),
        "other shape": (volume("_t1", lambda a: a[1:]), "_t1.nii.gz has shape (13, 12, 9)"),
        "other affine": (
            volume("_seg", lambda a: a, np.diag([2.0, 2, 2, 1])),
            "_seg.nii.gz has another affine",
        ),
        "NaN": (volume("_flair", with_voxel(np.nan)), "channel FLAIR has NaN or infinite"),
        "infinity": (volume("_t1", with_voxel(np.inf)), "channel T1w has NaN or infinite"),
        "unknown label": (volume("_seg", with_voxel(7)), "_seg.nii.gz: unknown label value 7"),
    },
    "luna16": {
        "truncated scan": (cut("*.raw"), ".raw has"),
        "missing scan": (remove("*.raw"), ".raw is missing, but"),
        "torn header": (cut("*.mhd"), ".mhd"),
        "NaN": (float_scan, "has NaN or infinite voxels"),
        "absent series": (append("candidates.csv", "9.9,1,2,3,0"), "data row 7: series 9.9 has no"),
        "outside": (append("candidates.csv", OUTSIDE), "data row 7: (9000, 0, 0) mm lies outside"),
        "unknown class": (
            append("candidates.csv", f"{SERIES[0]},1,2,3,2"),
            "data row 7: class 2 is unknown",
        ),
        "cell": (
            append("candidates.csv", f"{SERIES[0]},1,two,3,0"),
            "two, 3, 0 has no number for each of",
        ),
        "columns": (change("candidates.csv", HEADER, "series,x,y,z,class"), "needs the columns"),
    },
    "csv": {
        "cell": (change("", "41", "old"), "data row 2, column age: 'old' is not a number"),
        "columns": (
            change("", "ill", "sick"),
            "data, data.label: Unknown column ill; known: who, place, age, sick",
        ),
        "cells": (append("", "p16,Bern"), "data row 17: 2 cells, but 4 columns"),
        "two centres": (append("", "p1,Bern,50,1"), "Patient p1 has samples at several centres"),
        "label": (change("", ",40,0", ",40,"), "data row 1, column ill: the cell is missing"),
    },
    "heart": {
        "cell": (
            change("processed.va.data", "43", "old"),
            "processed.va.data, data row 1, column age: 'old'",
        ),
        "label": (append("processed.va.data", "50" + ",1" * 12 + ",9"), "data row 9"),
        "missing file": (remove("*.hungarian.data"), "processed.hungarian.data does not exist"),
    },
    "medmnist": {
        "torn": (cut(""), "is no whole .npz file"),
        "labels": (
            stored(val_labels=np.array([0, 1])),
            "val_labels",
        ),
        "values": (stored(test_images=np.full((4, 12, 12), np.nan)), "test_images"),
    },
    "image_folder": {
        "torn": (cut("3.png"), "3.png cannot be read as an image"),
        "empty class": (lambda path: (path / "odd").mkdir(), "odd has no images"),
        "a split among classes": (
            lambda path: (path / "benign").rename(path / "Training"),
            "look like splits: leave one folder per split there",
        ),
    },
    "image_table": {
        "column": (change("", "label", "finding"), "set data.reader.label=COLUMN"),
        "label": (change("", "0.png,malignant", "0.png,"), "row 2, column label: the cell is mis"),
        "one label": (
            lambda path: path.write_text(path.read_text().replace("malignant,p", "benign,p")),
            "has the only label benign; name two",
        ),
        "absent": (change("", "images/benign/3.png", "x.png"), "row 7: "),
        "no ending": (change("", "images/benign/3.png", "3"), "data.reader.file where the files"),
        "a measurement": (
            lambda path: path.write_text(
                re.sub("nant,p|nign,p", lambda at: f"{at.start()},p", path.read_text())
            ),
            "has 12 different labels in 12 rows",
        ),
        "twice": (change("", "images/benign/3.png", "images/benign/2.png"), "in two rows"),
        "split": (change("", "patient", "split"), "'p0' is none of train, val and test"),
    },
}
TABLE = [(kind, name) for kind, cases in BAD.items() for name in cases]


def settings(kind, path, tmp_path):
    own = [f"data={kind}", f"data.path={path}", *SETTINGS[kind]]
    if kind not in ("csv", "heart"):
        own.append(f"data.root={tmp_path / 'root'}")
    return [*own, "show=true", "workers=1", f"folder={tmp_path / 'shown'}"]


@pytest.mark.parametrize(("kind", "name"), TABLE, ids=[f"{k}-{n}" for k, n in TABLE])
def test_one_sentence_and_nothing_half_written(kind, name, tmp_path):
    path = tmp_path / "data.npz" if kind == "medmnist" else tmp_path / "data"
    WRITE[kind](path)
    damage, message = BAD[kind][name]
    damage(path)
    with pytest.raises(MedfedError) as caught:
        prepare(described(settings(kind, path, tmp_path), "prepare"))
    sentence = str(caught.value)
    assert message in sentence
    assert "\n" not in sentence
    assert sentence.endswith(".")
    assert not (tmp_path / "shown").exists()
    assert not list((tmp_path / "root").rglob("manifest.json"))


@pytest.mark.parametrize("kind", BAD)
def test_the_same_data_without_damage(kind, tmp_path):
    path = tmp_path / "data.npz" if kind == "medmnist" else tmp_path / "data"
    WRITE[kind](path)
    prepare(described([*settings(kind, path, tmp_path), "show=false"], "prepare")).setup()


def script(*overrides):
    return processes.run("scripts/prepare.py", *overrides)


def test_the_command_ends_with_status_1(tmp_path):
    path = tmp_path / "data"
    write_table(path)
    record = tmp_path / "splits.json"
    record.write_text(json.dumps({"clients": {"Bern": ["p0", "p2"], "Chur": []}}))
    done = script(*settings("csv", path, tmp_path), "partition=saved", f"partition.file={record}")
    assert done.returncode == 1
    assert done.stderr == ("error: Client Chur has no patients; set another partition.\n")
    assert left_in(tmp_path) == ["data", "splits.json"]


def test_a_full_disk(tmp_path, capsys):
    """Stands in for it: the kernel refuses to write files beyond a size."""
    write_table(tmp_path / "data")
    config = load(settings("csv", tmp_path / "data", tmp_path), "prepare")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))
    try:
        with pytest.raises(
            MedfedError, match=r"Cannot write .*shown \(File too large\); make room"
        ):
            prepare(describe(config))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert left_in(tmp_path / "shown") == []


@pytest.mark.parametrize("data", ["brats", "luna16", "medmnist"])
def test_no_place_for_generated_data(data, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MedfedError, match=r"Cannot write .*file.*; .*data\.root") as caught:
        prepare(described([f"data={data}", f"data.root={tmp_path / 'file' / 'x'}"], "prepare"))
    assert "\n" not in str(caught.value)


def test_a_disk_that_is_full_at_a_checkpoint(tmp_path):
    """PyTorch hides the refusal behind an error of its own."""
    line = ("experiment=digits_pfednet", "rounds=1", "logger=none", "progress=false")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(MedfedError, match=r"Cannot write .*run \(File too large\); make room"):
            run(tmp_path / "run", *line)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
