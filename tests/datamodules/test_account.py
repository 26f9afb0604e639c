"""Every file of a data set is taken or left out: a walk over all readers of files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from PIL import Image

from medfed.config.compose import build, described
from medfed.run.cohort import cohort_record
from tests.datamodules.test_dicom import ROOT, SEG, frames, series
from tests.datamodules.volume_files import write_volume

PEOPLE = range(6)
SMALL = ["data.patch_size=[8,8]"]


def volume(path, label=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    array = np.random.default_rng(0).integers(1, 900, (12, 10, 5)).astype(np.int16)
    nib.save(nib.Nifti1Image((array > 450).astype(np.int16) if label else array, np.eye(4)), path)


def picture(path, seed=0, mask=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    array = np.random.default_rng(seed).integers(0, 255, (16, 16)).astype(np.uint8)
    Image.fromarray((array > 128).astype(np.uint8) if mask else array).save(path)


def write(path, text="x"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def datalist(root):
    entries = []
    for n in PEOPLE:
        volume(root / f"images/c{n}.nii.gz")
        volume(root / f"labels/c{n}.nii.gz", label=True)
        entries.append({k: f"{k}s/c{n}.nii.gz" for k in ("image", "label")})
    volume(root / "images/c9.nii.gz")
    content = {"modality": {"0": "MRI"}, "labels": {"0": "no", "1": "t"}, "training": entries}
    write(root / "dataset.json", json.dumps(content))
    return root, SMALL, {"the data set does not name it": 1}


def dicom(root):
    entries = []
    for n in PEOPLE:
        series(root / f"images/c{n}")
        volume(root / f"labels/c{n}.nii.gz", label=True)
        array = np.zeros((6, 8, 5), np.int16)
        array[2:4, 2:4] = 1
        nib.save(nib.Nifti1Image(array, np.diag([-0.7, -0.8, 2, 1])), root / f"labels/c{n}.nii.gz")
        entries.append({"image": f"images/c{n}", "label": f"labels/c{n}.nii.gz"})
    frames(root / "images/c0/seg.dcm", kind=SEG, series="2")
    content = {"modality": {"0": "MRI"}, "labels": {"0": "no", "1": "t"}, "training": entries}
    write(root / "dataset.json", json.dumps(content))
    return root, ["data=datalist", *SMALL], {"Segmentation": 1}


def two_series(root):
    path, keys, _ = dicom(root)
    (root / "images/c0/seg.dcm").unlink()
    for n in (2, 4):
        series(root / f"images/c{n}", heights=[0, 2, 4], ending="_2.dcm", series="9")
    return path, [*keys, f"data.reader.series={ROOT}.1"], {"another series": 6}


def nnunet(root):
    for n in PEOPLE:
        volume(root / f"imagesTr/c{n}_0000.nii.gz")
        volume(root / f"labelsTr/c{n}.nii.gz", label=True)
    for n in (7, 8):
        volume(root / f"imagesTr/c{n}_0000.nii.gz")
    content = {"channel_names": {"0": "MRI"}, "labels": {"background": 0, "t": 1}}
    write(root / "dataset.json", json.dumps({**content, "numTraining": 8}))
    return root, SMALL, {"no mask in labelsTr": 2}


def brats(root):
    for n in PEOPLE:
        name = f"BraTS-GLI-{n:05d}-000"
        for part in ("t1n", "t2w", "seg"):
            volume(root / name / f"{name}-{part}.nii.gz", part == "seg")
    keys = ["data=brats_challenge", "data.reader.channels=[T1w]", "data.reader.enhancing=3"]
    return root, [*keys, *SMALL], {"the data set does not name it": 6}


def folders(root):
    for n in PEOPLE:
        volume(root / f"c{n}/ct.nii.gz")
        volume(root / f"c{n}/m.nii.gz", label=True)
    keys = ["data=brats_folder", "data.reader.modalities={CT: ct.nii.gz}"]
    return root, [*keys, "data.reader.label=m.nii.gz", *SMALL], {}


def classes(root):
    for n in PEOPLE:
        for kind, ending in (("ill", "png"), ("well", "webp")):
            picture(root / kind / f"{n}.{ending}", n)
    picture(root / "ill/1_mask.png", mask=True)
    write(root / "well/scan.dcm")
    return root, ["data=image_folder"], {"masks of pictures beside them": 1}


def image_table(root):
    rows = ["image,label"]
    for n in PEOPLE:
        picture(root / f"p/{n}.png", n)
        rows.append(f"p/{n}.png,{n % 2}")
    picture(root / "p/9.png", 9)
    write(root / "images.csv", "\n".join(rows))
    return root / "images.csv", [], {"the data set does not name it": 1}


def image_masks(root):
    for n in PEOPLE:
        picture(root / f"images/{n}.png", n)
        picture(root / f"masks/{n}.png", n, mask=True)
    return root, SMALL, {}


def luna16(root):
    rng = np.random.default_rng(0)
    rows = ["seriesuid,coordX,coordY,coordZ,class"]
    for n in PEOPLE:
        voxels = rng.integers(-900, 400, (64, 64, 64)).astype(np.int16)
        write_volume(root / f"subset0/1.{n}.mhd", voxels, np.eye(4), packed=False)
        if n:
            rows += [f"1.{n},32,32,32,1", f"1.{n} ,30,30,30,0"]
    write(root / "candidates.csv", "\n".join(rows))
    return root, [], {"a scan without candidates": 2}


LAYOUTS = [datalist, dicom, two_series, nnunet, brats, folders, classes, image_table, image_masks]
LAYOUTS.append(luna16)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_what_is_seen_is_taken_or_left_out(layout, tmp_path):
    path, keys, left = layout(tmp_path)
    places = {"the folder": tmp_path}
    if path != tmp_path:  # a table: the folders of what it names
        places["the pictures"] = tmp_path / "p"
    for place in places.values():
        for name in (".hidden.nii.gz", ".git/a.png", "__MACOSX/a.png", "Thumbs.db"):
            write(place / name)
    write(place / "notes.txt")
    data = [] if keys[:1] and keys[0].startswith("data=") else [f"data={layout.__name__}"]
    run = ["partition=round_robin", "partition.num_clients=1", f"data.path={path}", *data, *keys]
    module = build(described(run).data)
    module.plan()
    (account,) = module.accounts
    shown = {
        os.path.join(folder, name)
        for folder, _, names in os.walk(tmp_path)
        for name in names
        if not any(
            p[0] == "." or p in ("__MACOSX", "Thumbs.db")
            for p in (name, *folder.split("/")[-1:])
            if p
        )
    }
    assert account.total == len(shown)
    assert account.total == account.taken + sum(n for n, _ in account.left_out.values())
    by_reason = {}
    for why, (count, first) in account.left_out.items():
        assert (path if path.is_dir() else path.parent).joinpath(first).is_file()
        reason = why.split(": ")[1]
        by_reason[reason] = by_reason.get(reason, 0) + count
    others = 2 if layout is classes else 1
    assert by_reason == {**left, "another kind of file": others}
    assert f"{account.taken} of {account.total} files are taken" in account.sentence()
    assert "notes.txt" in account.sentence()
    if layout in (classes, image_table, two_series):
        module.setup()
        assert cohort_record(module).record()["read"] == [account.record()]


def csv(root):
    rows = [f"p{n},h{n % 2},{'' if n == 3 else 40 + n},{n % 2}" for n in range(12)]
    write(root / "t.csv", "\n".join(["patient,hospital,age,ill", *rows, ",,,", ""]))
    keys = ["data=csv", "data.label=ill", "data.centre=hospital", "data.patient=patient"]
    return root / "t.csv", keys, [(12, 13), (11, 12)]


def heart(root):
    for centre in ("cleveland", "hungarian", "switzerland", "va"):
        rows = [[40 + k, *["?" if k == 0 else 1.0] * 12, k % 2] for k in range(8)]
        lines = [",".join(map(str, row)) for row in rows]
        write(root / f"processed.{centre}.data", "\n".join(lines))
    keys = ["data=heart", "data.reader.complete=true"]
    return root, keys, [(7, 8), (7 * 13, 7 * 13)] * 4


def medmnist(root):
    splits = ("train", "val", "test")
    arrays = {f"{split}_images": np.zeros((6, 8, 8), np.uint8) for split in splits}
    np.savez(root / "a.npz", **arrays, **{f"{s}_labels": np.arange(6)[:, None] % 2 for s in splits})
    return root / "a.npz", ["data=medmnist"], [(1, 1)]


@pytest.mark.parametrize("layout", [csv, heart, medmnist], ids=lambda layout: layout.__name__)
def test_rows_and_cells_are_taken_or_left_out(layout, tmp_path):
    path, keys, counts = layout(tmp_path)
    run = ["partition=round_robin", "partition.num_clients=2", f"data.path={path}", *keys]
    module = build(described(run).data)
    module.plan()
    assert [(account.taken, account.total) for account in module.accounts] == counts
    for account in module.accounts:
        assert account.total == account.taken + sum(n for n, _ in account.left_out.values())
        assert account.sentence().startswith(account.where)
        assert path == Path(account.where) or Path(account.where).parent == path
