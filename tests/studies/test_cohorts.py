"""Cohorts of images and scans as rows: what files hold, in the same sums as tables."""

from __future__ import annotations

import json

import nibabel as nib
import numpy as np
import pytest
from PIL import Image

from medfed.commands.study import main
from medfed.config.compose import build, described
from medfed.run.evaluation import values_of
from medfed.standalone.errors import ConfigError
from medfed.studies.cohorts import hospital_rows
from medfed.studies.plan import Plan
from tests.datamodules.picture_files import cohort, write_index

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


def volume(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(values, np.eye(4)), path)


def listed_scans(folder):
    """Scans that a JSON list names, with the age and sex of some patients."""
    rng, entries = np.random.default_rng(1), []
    for n in range(6):
        volume(folder / f"images/{n}.nii.gz", rng.normal(100, 9, (8, 8, 4)).astype(np.float32))
        volume(folder / f"labels/{n}.nii.gz", np.ones((8, 8, 4), np.uint8))
        entry = {"image": f"images/{n}.nii.gz", "label": f"labels/{n}.nii.gz", "age": 50 + n}
        entries.append(entry | ({"sex": "FM"[n % 2]} if n else {}))
    content = {"training": entries, "modality": {"0": "CT"}, "labels": {"0": "none", "1": "organ"}}
    (folder / "dataset.json").write_text(json.dumps(content), encoding="utf-8")
    known = {str(n): (50.0 + n, "FM"[n % 2] if n else None) for n in range(6)}
    return ["data=datalist", f"data.path={folder}"], known


def pictures_with_masks(folder):
    rows = cohort(folder)
    for n, row in enumerate(rows):
        row |= {"age": 60 + n // 2, "sex": "FM"[n // 2 % 2]}  # two eyes of a patient
    write_index(folder, rows)
    known = {row["patient"]: (float(row["age"]), row["sex"]) for row in rows}
    return ["experiment=retina_pfednet", f"data.path={folder}"], known


def listed_images(folder):
    """Images of two classes without ids: the file names the patient."""
    rng, rows, known = np.random.default_rng(3), [], {}
    for n in range(8):
        Image.fromarray(rng.integers(0, 255, (16, 16), np.uint8)).save(folder / f"{n}.png")
        row = {"image": f"{n}.png", "label": "ab"[n % 2], "age": "" if n == 0 else 40 + n}
        rows.append(row | {"sex": "MF"[n % 2]})
        known[f"{n}.png"] = (40.0 + n if n else np.nan, "MF"[n % 2])
    write_index(folder, rows)
    return [
        "data=image_table",
        f"data.path={folder / 'images.csv'}",
        "data.reader.size=[16,16]",
    ], known


@pytest.mark.parametrize(
    "write", [listed_scans, pictures_with_masks, listed_images], ids=["list", "masks", "table"]
)
def test_a_cohort_of_files_has_the_columns_of_its_table(write, tmp_path):
    """Only those of patients, for groups and for Table 1; roles and paths are none."""
    words, known = write(tmp_path)
    data = planned([*words, "partition=round_robin", "partition.num_clients=2"])
    patients = 0
    for client, rows in hospital_rows(data).items():
        plan = data.plans[client]
        names = [p for split in ("train", "val", "test") for p in plan.patients[split]]
        age, sex = rows.column("age"), rows.coded("sex", ("F", "M"))
        for at, patient in enumerate(rows.patients):
            wanted, group = known[names[patient]]
            np.testing.assert_equal(age[at], wanted)
            np.testing.assert_equal(sex[at], np.nan if group is None else "FM".index(group))
        patients += len(names)
        others = {"image", "mask", "label", "patient", "centre", "split"}
        assert not others & rows.columns.keys()
    assert patients == len(known)
    with pytest.raises(ConfigError, match=r"did you mean sex.*has the columns of its table"):
        rows.column("sexe")


def test_groups_of_scans_need_no_voxel(tmp_path):
    words, _ = listed_scans(tmp_path)
    data = planned([*words, "partition=round_robin", "partition.num_clients=2"])
    groups = hospital_rows(data, Plan({"sex": ["F", "M"]}))
    assert {name for rows in groups.values() for name in rows.columns} == {"age", "sex"}


def test_a_column_of_a_table_of_pictures_divides_the_patients(tmp_path):
    """Also after training: ``medfed evaluate by=sex``."""
    words, known = listed_images(tmp_path)
    data = planned([*words, "partition=round_robin", "partition.num_clients=2"])
    assert values_of(data, "sex", None) == {name: sex for name, (_, sex) in known.items()}
    with pytest.raises(ConfigError, match=r"by=sexe is no column of the data \(did you mean sex"):
        values_of(data, "sexe", None)
