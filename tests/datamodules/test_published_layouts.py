"""Experiments of published data train on made files in their layout; real ones are not ours."""

from __future__ import annotations

import csv
import runpy
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from PIL import Image

from medfed.config.compose import described
from medfed.datamodules.readers.case_folders import FolderReader
from medfed.run.train import train
from medfed.standalone.errors import ConfigError, DataError
from tests.integration.test_bad_data import write_heart

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("logger=none", "progress=false", "pictures.format=none", "rounds=1", "evaluation.every=1")
SMALL = ("data.patch_size=[16,16,16]", "data.patches_per_patient=2", "augment=none")
ADMITTED = ("RDELAY", "RCONSC", "SEX", "AGE", "RSLEEP", "RATRIAL", "RCT", "RVISINF", "RHEP24")
ADMITTED += ("RASP3", "RSBP", "STYPE")


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def case(folder, image, label, values):
    """A scan whose regions are brighter, and its mask."""
    rng = np.random.default_rng(len(str(folder)))
    voxels, mask = rng.normal(size=(20, 20, 20)).astype(np.float32), np.zeros((20,) * 3, np.uint8)
    for n, value in enumerate(values):
        mask[4 + 4 * n : 8 + 4 * n, 4:12, 4:12] = value
    for name, content in ((image, 50 * (voxels + 3 * mask)), (label, mask)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        nib.save(nib.Nifti1Image(content, np.diag([2.9, 1.9, 1.9, 1.0])), folder / name)


def stroke(folder):
    rows = []
    for n in range(160):
        known = dict.fromkeys(ADMITTED, "NY"[n % 3 == 0])
        known |= {f"RDEF{k}": "NY"[n % 2] for k in range(1, 9)}
        known |= {"RDELAY": n % 24, "AGE": 50 + n % 40, "RSBP": 120 + n % 60, "SEX": "MF"[n % 2]}
        rows.append(
            {"HOSPNUM": n % 4, **known, "OCCODE": n // 4 % 5, "DIED": n // 4 % 2, "TD": 3 + n}
        )
    return (f"data.path={write(folder / 'ist.csv', rows)}",)


def brca(folder):
    rng, pids = np.random.default_rng(0), [f"TCGA-{'AB'[n % 2]}{n % 4}-{n:03}" for n in range(80)]
    rows = [
        {
            "pid": pid,
            "age": 40 + n % 30,
            "stage": int(rng.integers(2)),
            "E": n // 2 % 2,
            "T": n + 1.0,
        }
        for n, pid in enumerate(pids)
    ]
    write(folder / "brca.csv", rows)
    codes = sorted({pid.split("-")[1] for pid in pids})
    write(folder / "centers.csv", [{"TSS Code": c, "Region": c[0]} for c in codes])
    folds = [{"pid": p, "fold": "test" if n % 5 < 2 else "train"} for n, p in enumerate(pids)]
    write(folder / "train_test_split.csv", folds[:-2])  # two are in no split, as in FLamby's
    runpy.run_path(str(ROOT / "benchmarks/evidence/flamby.py"))["prepare_brca"](
        folder, folder / "t.csv"
    )
    return (f"data.path={folder / 't.csv'}",)


def heart(folder):
    write_heart(folder / "uci")
    runpy.run_path(str(ROOT / "benchmarks/evidence/flamby.py"))["prepare_heart"](
        folder / "uci", folder / "t.csv"
    )
    return (f"data.path={folder / 't.csv'}",)


def isic(folder):
    pictures, rng = folder / "ISIC_2019_Training_Input_preprocessed", np.random.default_rng(0)
    pictures.mkdir()
    rows = []
    for n in range(24):
        noise = rng.integers(0, 255, (40, 40, 3), dtype=np.uint8)
        Image.fromarray(noise).save(pictures / f"ISIC_{n}.jpg")
        fold = "test" if n % 3 == 0 else "train"
        told = {"image": f"ISIC_{n}", "target": n % 4 // 2, "center": n % 2, "fold": fold}
        rows.append({**told, "fold2": f"{fold}_{n % 2}"})
    path = write(folder / "train_test_folds.csv", rows)
    return f"data.path={path}", "data.batch_size=4", "data.reader.size=[32,32]"


def ixi(folder):
    for n in range(9):
        name = f"IXI00{n}-{('Guys', 'HH', 'IOP')[n % 3]}-0828"
        case(folder / name, f"T1/{name}.nii.gz", f"label/{name}.nii.gz", [1])
    return f"data.path={folder}", *SMALL


def kits(folder):
    for n in range(7):
        case(folder / "data" / f"case_0000{n}", "imaging.nii.gz", "segmentation.nii.gz", [1, 2])
    rows = [
        {
            "case_ids": f"case_0000{n}",
            "site_ids": n % 2,
            "train_test_split": ("train", "test")[n > 3],
        }
        for n in range(6)
    ]
    sites = write(folder / "thresholded_sites.csv", rows)
    return f"data.path={folder / 'data'}", f"data.reader.sites.file={sites}", *SMALL


def lidc(folder):
    for n in range(6):
        case(folder / "series" / f"1.3.6.{n}", "patient.nii.gz", "mask_consensus.nii.gz", [1])
    rows = [
        {
            "SeriesInstanceUID": f"1.3.6.{n}",
            "Manufacturer": n % 2,
            "Split": ("train", "test")[n > 3],
        }
        for n in range(6)
    ]
    sites = write(folder / "metadata.csv", rows)
    keys = (f"data.path={folder / 'series'}", f"data.reader.sites.file={sites}", *SMALL)
    narrow = ("model.network.channels=[4,8]", "model.network.strides=[2]")
    return *keys, "model=unet", *narrow  # a step of VNet takes seconds


EXPERIMENTS = {
    "stroke": (stroke, ["0", "1", "2", "3"]),
    "stroke_survival": (stroke, ["0", "1", "2", "3"]),
    "tcga_brca_flamby": (brca, ["A", "B"]),
    "heart_flamby": (heart, ["cleveland", "hungarian", "switzerland", "va"]),
    "isic2019_flamby": (isic, ["0", "1"]),
    "ixi_tiny_flamby": (ixi, ["Guys", "HH", "IOP"]),
    "kits19_flamby": (kits, ["0", "1"]),
    "lidc_flamby": (lidc, ["0", "1"]),
}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_one_line_trains(experiment, tmp_path):
    make, clients = EXPERIMENTS[experiment]
    data = tmp_path / "data"
    data.mkdir()
    words = [f"experiment={experiment}", *make(data), *QUICK, "local.steps=1"]
    words += [f"folder={tmp_path / 'run'}"]
    words += [f"data.root={tmp_path}"] if make in (isic, ixi, kits, lidc) else []
    summary, done = train(described(words))
    assert sorted(summary["clients"]) == clients
    plans = done.data.plans
    if experiment.endswith("flamby") and experiment != "ixi_tiny_flamby":
        assert not any(plan.patients["val"] for plan in plans.values())
    if experiment == "kits19_flamby":  # the table lists neither the split of others nor case 6
        assert {i for p in plans.values() for i in p.patients["test"]} == {
            "case_00004",
            "case_00005",
        }
        assert sum(len(ids) for p in plans.values() for ids in p.patients.values()) == 6


def test_tables_of_cases_that_cannot_be_used_are_refused(tmp_path):
    kits(tmp_path)
    files = {"CT": "imaging.nii.gz"}, "segmentation.nii.gz", {"kidney": [1, 2]}

    def reader(**sites):
        return FolderReader(tmp_path / "data", *files, sites=sites)

    good = {"file": str(tmp_path / "thresholded_sites.csv"), "case": "case_ids"}
    with pytest.raises(ConfigError, match="sites needs file=PATH of a table"):
        reader(**good)
    with pytest.raises(ConfigError, match="Unknown column site; known: case_ids"):
        reader(**good, centre="site").patients()
    with pytest.raises(
        DataError, match=r"lists no case of .*; it has 0, 1, 0, 1, .* and the cases"
    ):
        reader(**{**good, "case": "site_ids"}, centre="case_ids").patients()
    found = {p.id: (p.centre, p.split) for p in reader(**good, centre="site_ids").patients()}
    assert found["case_00001"] == ("1", None)
    assert len(found) == 6


def test_a_table_of_cases_names_them_or_their_files_and_one_hospital_of_each(tmp_path):
    kits(tmp_path)
    table = tmp_path / "sites.csv"
    files = {"CT": "imaging.nii.gz"}, "segmentation.nii.gz", {"kidney": [1, 2]}

    def places(*rows):
        table.write_text("\n".join(["case,place", *rows]) + "\n")
        columns = {"file": str(table), "case": "case", "centre": "place"}
        reader = FolderReader(tmp_path / "data", *files, sites=columns)
        return {patient.id: patient.centre for patient in reader.patients()}

    found = places("case_00000.nii.gz,A", "case_00001,B")
    assert found == {"case_00000": "A", "case_00001": "B"}
    with pytest.raises(DataError, match=r"has case case_00000 at A and at B.* remove one row"):
        places("case_00000,A", "case_00000_0000.nii.gz,B")
