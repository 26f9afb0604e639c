"""Cohorts of images and scans as rows: what files hold, in the same sums as tables."""

from __future__ import annotations

import json

import nibabel as nib
import numpy as np
import pytest

from medfed.commands.study import main
from medfed.config.compose import build, described
from medfed.studies.cohorts import hospital_rows
from medfed.studies.plan import Plan
from tests.datamodules.picture_files import cohort

AXES = ("x", "y", "z")


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    """Scans of two hospitals, of several spacings and sizes, some without a lesion."""
    folder = tmp_path_factory.mktemp("scans")
    rng, known = np.random.default_rng(4), {}
    for n in range(48):
        spacing = (1.0, 1.0, (1.0, 2.5)[n % 2])
        label = np.zeros((8, 10, 6 + n % 3), np.uint8)
        if n % 4:
            label[2:6, 2 : 4 + n % 5, 1:4] = 1
        voxels = rng.normal(100 + n, 10, label.shape).astype(np.float32)
        voxels[0] = 0
        place = folder / f"case_{n:02d}"
        place.mkdir()
        for name, values in (("CT", voxels), ("label", label)):
            image = nib.Nifti1Image(values, np.diag([*spacing, 1.0]))
            nib.save(image, place / f"{name}.nii.gz")
        known[f"case_{n:02d}"] = (spacing, voxels, label)
    return folder, known


def keys(folder):
    return [
        *("data=brats_folder", f"data.path={folder}", "data.reader.modalities={CT: CT.nii.gz}"),
        *("data.reader.label=label.nii.gz", "data.reader.regions={lesion: [1]}"),
        *("partition=round_robin", "partition.num_clients=2", "data.val_fraction=0.1"),
    ]


def planned(words):
    data = build(described(words).data)
    data.plan()
    return data


def test_a_scan_is_a_row_of_what_its_files_hold(scans):
    folder, known = scans
    data = planned(keys(folder))
    for client, rows in hospital_rows(data).items():
        plan = data.plans[client]
        names = [p for split in ("train", "val", "test") for p in plan.patients[split]]
        assert len(names) == len(rows.patients) == 24
        for at, name in enumerate(names):
            spacing, voxels, label = known[name]
            for axis, mm, size in zip(AXES, spacing, label.shape, strict=True):
                assert rows.columns[f"spacing {axis}"][at] == pytest.approx(mm)
                assert rows.columns[f"size {axis}"][at] == size
            inside = voxels[voxels != 0].astype(np.float64)
            assert rows.columns["CT mean"][at] == pytest.approx(inside.mean(), rel=1e-5)
            assert rows.columns["CT deviation"][at] == pytest.approx(inside.std(), rel=1e-4)
            ml = label.sum() * np.prod(spacing) / 1000
            assert rows.columns["lesion ml"][at] == pytest.approx(ml, rel=1e-6)


def test_a_plan_that_evaluates_alone_reads_no_scan(scans):
    data = planned(keys(scans[0]))
    assert hospital_rows(data, Plan(patients="all")) != {}
    assert all(not rows.columns for rows in hospital_rows(data, Plan()).values())


def test_the_command_counts_scans(scans, tmp_path):
    """Means, quartiles and bins of all cases, in Table 1 and for papers."""
    folder, known = scans
    main([*keys(folder), f"folder={tmp_path / 'out'}"])
    found = json.loads((tmp_path / "out" / "study.json").read_text(encoding="utf-8"))
    volume = next(t for t in found["tables"] if t["title"] == "lesion ml")
    lines = {line[0]: line[1] for line in volume["lines"]}
    every = [label.sum() * np.prod(mm) / 1000 for mm, _, label in known.values()]
    assert lines["patients"] == 48
    assert lines["mean"] == pytest.approx(np.mean(every), rel=1e-6)
    assert lines["standard deviation"] == pytest.approx(np.std(every, ddof=1), rel=1e-5)
    assert "lesion ml, mean (SD)" in (tmp_path / "out" / "tables.tex").read_text(encoding="utf-8")
    assert [*(tmp_path / "out" / "tables").glob("Table*1.csv")]


def test_a_picture_has_pixels_and_shares(tmp_path):
    cohort(tmp_path)
    data = planned(["experiment=retina_pfednet", f"data.path={tmp_path}", "partition=centre"])
    rows = next(iter(hospital_rows(data).values()))
    assert not [name for name in rows.columns if name.startswith("spacing")]
    shares = [name for name in rows.columns if name.endswith(" percent")]
    assert shares
    assert all(((rows.columns[n] >= 0) & (rows.columns[n] <= 100)).all() for n in shares)


def test_images_have_means_and_their_class():
    data = planned(["experiment=digits_pfednet"])
    rows = next(iter(hospital_rows(data).values()))
    assert rows.categories["outcome"] == tuple(data.class_names)
    (name,) = data.channel_names
    assert ((rows.columns[f"{name} mean"] > 0) & (rows.columns[f"{name} deviation"] > 0)).all()
