"""Volumes that a list names, and nnU-Net's folders: read, prepared, split and cut into patches."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from monai.transforms import (
    Compose,
    CropForeground,
    EnsureChannelFirst,
    LoadImage,
    NormalizeIntensity,
    Orientation,
    ScaleIntensityRange,
    ScaleIntensityRangePercentiles,
    Spacing,
)

from medfed.config.compose import build, load
from medfed.datamodules.readers.datalist import DatalistReader, NnunetReader
from medfed.run.cohort import cohort_record, print_cohort
from medfed.standalone.errors import ConfigError, DataError
from medfed.standalone.normalization import CT_WINDOW
from medfed.standalone.preparation import on_grid
from medfed.standalone.volumes import nifti_header
from tests.datamodules.organ_layouts import LABELS, organs, write_datalist, write_nnunet
from tests.sweeps import sweep

SMALL = ("patch_size=[8,8]", "patches_per_patient=3", "batch_size=4", "reader.hospitals=2")


def module(tmp_path, folder, *settings, data="datalist", partition="centre"):
    overrides = [f"data={data}", f"partition={partition}", f"data.path={folder}"]
    overrides += [f"data.{s}" for s in (*SMALL, f"root={tmp_path / 'root'}", *settings)]
    made = build(load(overrides).data)
    made.setup()
    return made


@pytest.fixture(scope="module")
def listed(tmp_path_factory):
    return write_datalist(tmp_path_factory.mktemp("list"))


def test_a_list_says_channels_regions_and_that_they_are_exclusive(listed, tmp_path):
    data = module(tmp_path, listed)
    assert (data.channel_names, data.class_names) == (("CT",), ("liver", "tumour"))
    assert data.exclusive is True
    client = data.clients["hospital_0"]
    batch = next(client.train_batches(0))
    assert batch["image"].shape == (3, 1, 8, 8)
    assert batch["label"].shape == (3, 2, 8, 8)
    assert float(batch["image"].min()) >= 0
    assert float(batch["image"].max()) <= 1
    facts = data.preprocessing("hospital_0")
    assert facts["normalization"] == {"name": "window", "hu": [*CT_WINDOW], "to": [0, 1]}
    assert facts["input"]["regions"] == {"liver": [1], "tumour": [2]}
    json.dumps(facts)


@pytest.mark.parametrize("suffix", [".nrrd", ".mha", ""])
def test_any_format_gives_the_same_batches(suffix, listed, tmp_path):
    """Also a DICOM series per case, whose mask is a NIfTI file."""
    other = write_datalist(tmp_path / "other", suffix=suffix)
    one, two = (module(tmp_path, folder) for folder in (listed, other))
    for name, client in one.clients.items():
        batches = (c.eval_batches("train") for c in (client, two.clients[name]))
        for a, b in zip(*batches, strict=True):
            assert a["image"].equal(b["image"])
            assert a["label"].equal(b["label"])
    cached = module(tmp_path, other, "memory_gb=0")
    for name, client in one.clients.items():
        batches = (c.eval_batches("val") for c in (cached.clients[name], client))
        for a, b in zip(*batches, strict=True):
            assert all(a[key].equal(b[key]) for key in ("image", "label"))
            assert a["spacing"].numpy() == pytest.approx(b["spacing"].numpy(), abs=1e-4)
    assert cached.splits()["files"] == two.splits()["files"]


def by_monai(folder, *steps):
    """The first case as MONAI's own transforms prepare it."""
    load_it = [
        LoadImage(image_only=True),
        EnsureChannelFirst(),
        Orientation("RAS", labels=None),
    ]
    return Compose([*load_it, *steps])(folder / "imagesTr" / "organ_00.nii.gz")


WINDOW = ScaleIntensityRange(-175, 250, 0, 1, clip=True)
CROP = CropForeground(select_fn=lambda x: x > 0, allow_smaller=True)
FINE = Spacing((1.0, 1.5, 2.0), mode="bilinear", padding_mode="border")
PREPARED = {
    "window": ((), [WINDOW]),
    "lungs": (("normalize={window:[-1000,400]}",), [ScaleIntensityRange(-1000, 400, 0, 1, True)]),
    "zscore": (("normalize=zscore",), [NormalizeIntensity()]),
    "nonzero": (("normalize=zscore_nonzero",), [NormalizeIntensity(nonzero=True)]),
    "percentiles": (
        ("normalize={percentiles:[1,99]}",),
        [ScaleIntensityRangePercentiles(1, 99, 0, 1, clip=True)],
    ),
    "spacing": (("spacing=[1.0,1.5,2.0]",), [WINDOW, FINE]),
    "crop": (("crop_foreground=true",), [WINDOW, CROP]),
    "all": (("crop_foreground=true", "spacing=[1.0,1.5,2.0]"), [WINDOW, CROP, FINE]),
}


@pytest.mark.parametrize("name", PREPARED)
def test_preparation_is_that_of_monai(name, listed, tmp_path):
    settings, steps = PREPARED[name]
    memory = "memory_gb=0" if name in ("all", "zscore") else "memory_gb=2"  # through the cache
    volumes = ("spatial_dims=3", "patch_size=[8,8,4]", memory)
    data = module(tmp_path, listed, *settings, *volumes)
    seen = data.prepared("organ_00", next(iter(data.plans.values())))
    known = by_monai(listed, *steps).as_tensor().float()
    assert seen.image.numpy() == pytest.approx(known.numpy(), abs=2e-5)
    truth = torch.from_numpy(np.stack([organs()[1] == k for k in (1, 2)]))
    assert seen.label.bool().equal(truth)
    if seen.grid is not None:  # the mask on the image's grid and back is, for the most part, itself
        there = on_grid(seen.label, seen.grid.inverse(), seen.image.shape[1:], nearest=True)
        back = on_grid(there, seen.grid, truth.shape[1:], nearest=True).bool()
        assert (back == truth).float().mean() > 0.95
        inside = on_grid(seen.image, seen.grid, truth.shape[1:])[0][truth[1]]
        assert inside.mean() == pytest.approx((40 + 175) / 425, abs=0.12)  # the tumour's HU


def test_slices_are_measured_where_the_masks_were_drawn(listed, tmp_path):
    settings = ("spacing=[1.0,1.5]", "crop_foreground=true", "slices=3")
    data = module(tmp_path, listed, *settings)
    plain = module(tmp_path, listed)
    assert data.in_channels == 3
    assert data.window == (8, 8)
    pairs = zip(data.clients.values(), plain.clients.values(), strict=True)
    batches = [zip(*(c.eval_batches("val") for c in pair), strict=True) for pair in pairs]
    for batch, known in chain.from_iterable(batches):
        assert batch["label"].equal(known["label"])
        assert batch["spacing"].equal(known["spacing"])
        assert batch["image"].shape[1] == batch["channels"].shape[1] == 3
        middle = batch["image"][:, 1:2]
        assert batch["image"][1:, :1].equal(middle[:-1])  # below each slice is the one before
        size = known["image"].shape[2:]
        pairs = zip(middle, batch["grid"], strict=True)
        back = torch.stack([on_grid(image, grid, size) for image, grid in pairs])
        inside = known["label"][:, :1].bool()
        assert (back - known["image"])[inside].abs().mean() < 0.05


def test_regions_may_overlap_and_channels_be_chosen(tmp_path):
    labels = {"background": 0, "whole": [1, 2], "tumour": 2}
    folder = write_nnunet(tmp_path / "n", channels=("CT", "PET"), labels=labels)
    reader = NnunetReader(folder, channels=["PET"])
    found = reader.raw(reader.patients()[0])
    image, label = organs()
    assert np.array_equal(found["image"][0].numpy(), image + 1)
    assert np.array_equal(found["label"].numpy(), np.stack([label > 0, label == 2]))
    assert reader.exclusive is False
    assert reader.layout()["files"] == {"PET": ["*_0001.nii.gz"]}
    assert NnunetReader(folder, regions=["tumour"]).exclusive is True
    data = module(tmp_path, folder, data="nnunet")
    names = [one["name"] for one in data.preprocessing("hospital_0")["normalization"]["channels"]]
    assert names == ["window", "zscore"]


def test_images_may_be_lists_of_files(tmp_path):
    write_nnunet(tmp_path, channels=("a", "b"))
    images = [f"imagesTr/organ_00_{c:04d}.nii.gz" for c in (0, 1)]
    entries = [{"image": images, "label": "labelsTr/organ_00.nii.gz"}]
    (tmp_path / "mine.json").write_text(json.dumps({"training": entries}))
    regions = {"organ": [1, 2]}
    for order in ((0, 1), (1,), (1, 0)):
        channels = None if order == (0, 1) else [f"channel_{n}" for n in order]
        reader = DatalistReader(tmp_path / "mine.json", channels=channels, regions=regions)
        (patient,) = reader.patients()
        found = reader.raw(patient)["image"].numpy()
        assert np.array_equal(found, np.stack([organs()[0] + c for c in order]))


def test_cases_of_a_patient_stay_together(tmp_path):
    folder = write_datalist(tmp_path / "d", 8, entry=lambda n: {"patient": f"p{n // 2}"})
    data = module(tmp_path, folder, "reader.hospitals=1")
    (client,) = data.clients.values()
    assert sorted(p for ids in client.patients.values() for p in ids) == ["p0", "p1", "p2", "p3"]
    blocks = list(client.evaluation["test"])
    assert [set(b["case"].tolist()) for b in blocks] == [{0}, {0}]  # two cases of one patient
    assert [set(b["scan"].tolist()) for b in blocks] == [{0}, {1}]
    assert client.num_samples == 3 * len(client.patients["train"])  # of both cases of each
    files = data.splits()["files"]
    assert len(files) == 16
    by_name = DatalistReader(folder, patient="none", patient_pattern="organ_(.)")
    assert [p.id for p in by_name.patients()] == ["0"]


def test_lists_and_folds_are_kept(tmp_path):
    folder = write_datalist(tmp_path / "d", 9, entry=lambda n: {"fold": n % 3})
    data = module(tmp_path, folder, "reader.hospitals=1", "reader.fold=2")
    (client,) = data.clients.values()
    assert client.patients["test"] == ["organ_02", "organ_05", "organ_08"]
    assert len(client.patients["val"]) == 1
    with pytest.raises(ConfigError, match=r"fold=7 has no cases .*the folds 0, 1, 2"):
        DatalistReader(folder, fold=7)
    index = json.loads((folder / "dataset.json").read_text())
    listed = index["training"]
    index |= {"training": listed[:5], "validation": listed[5:7], "test": listed[7:]}
    (folder / "dataset.json").write_text(json.dumps(index))
    (client,) = module(tmp_path, folder, "reader.hospitals=1").clients.values()
    assert {s: len(ids) for s, ids in client.patients.items()} == {"train": 5, "val": 2, "test": 2}
    index["test"] = [entry["image"] for entry in listed[7:]]  # MSD's own: without masks
    (folder / "dataset.json").write_text(json.dumps(index))
    (client,) = module(tmp_path, folder, "reader.hospitals=1").clients.values()
    assert {s: len(ids) for s, ids in client.patients.items()} == {"train": 4, "val": 2, "test": 1}


def test_hospitals_may_be_named_by_the_list_or_beside_it(tmp_path):
    folder = write_datalist(tmp_path / "d", 6, entry=lambda n: {"centre": "ab"[n % 2]})
    assert list(module(tmp_path, folder).clients) == ["a", "b"]
    rows = ["case,hospital", *(f"organ_{n:02d},{'xyz'[n % 3]}" for n in range(6))]
    (folder / "centres.csv").write_text("\n".join(rows))
    assert [p.centre for p in DatalistReader(folder).patients()] == list("xyzxyz")
    with pytest.raises(DataError, match=r"Patient 0 is at x .*and at y .*one hospital"):
        DatalistReader(folder, patient_pattern="organ_(.)").patients()


BAD = {
    "no file": (lambda i: None, "dataset.json does not exist"),
    "no cases": (lambda i: i.update(training=[]), "lists no training cases"),
    "no pair": (lambda i: i.update(training=["a.nii.gz"]), "is no pair of image and label"),
    "no labels": (lambda i: i.pop("labels"), "has no usable labels"),
    "labels of text": (lambda i: i.update(labels={"0": "b", "x": "y"}), "has no usable labels"),
    "ignore": (lambda i: i.update(labels={"b": 0, "a": 1, "ignore": 2}), "the label ignore"),
    "modality": (lambda i: i.update(modality={"x": "CT"}), "has no usable channel names"),
    "a path": (lambda i: i["training"].append({"image": 3, "label": "a"}), "no path of a volume"),
    "twice": (lambda i: i["training"].append(i["training"][0]), "twice; list each case once"),
    "one label less": (lambda i: i.update(labels={"0": "b", "1": "a"}), "unknown label value 2"),
    "missing": (lambda i: i["training"][0].update(image="no.nii.gz"), "no.nii.gz is missing"),
    "too few channels": (lambda i: i.update(modality=["CT", "PET"]), "has 1 channels, but 2 are"),
}


@sweep("name", BAD)
def test_a_bad_list_is_one_sentence(name, tmp_path):
    change, message = BAD[name]
    folder = write_datalist(tmp_path / "d", 1)
    index = json.loads((folder / "dataset.json").read_text())
    change(index)
    (folder / "dataset.json").write_text(json.dumps(index))
    if name == "no file":
        (folder / "dataset.json").unlink()
    with pytest.raises(DataError) as caught:
        [r.read(patient) for r in [DatalistReader(folder)] for patient in r.patients()]
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


SETTINGS = {
    "regions": ("reader.regions=[lever]", "Unknown region lever; known: liver, tumour"),
    "values": ("reader.regions={liver:[]}", "must give each region its label values"),
    "channels": ("reader.channels=[MR]", "Unknown channel MR; known: CT"),
    "pattern": ("reader.patient_pattern=organ", "has 0 groups; it needs one"),
    "rule": ("normalize=zscor", "data.normalize=zscor must be zscore_nonzero"),
    "window": ("normalize={window:[250,-175]}", "must be two ascending numbers"),
    "percentiles": ("normalize={percentiles:[1,101]}", "ascending numbers from 0 to 100"),
    "spacing": ("spacing=[1,1,1]", "must have 2 numbers for data.spatial_dims=2"),
    "no spacing": ("spacing=[1,0]", "must be null, or millimetres"),
    "slices": ("slices=2", "data.slices=2 must be odd"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_bad_setting_is_one_sentence(name, listed, tmp_path):
    setting, message = SETTINGS[name]
    with pytest.raises(ConfigError) as caught:
        module(tmp_path, listed, setting)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def scan_of(folder, n, change):
    """Writes the n-th scan of a list anew."""
    path = folder / "imagesTr" / f"organ_{n:02d}.nii.gz"
    scan = nib.load(path)
    nib.save(nib.Nifti1Image(change(np.asarray(scan.dataobj)), scan.affine), path)


UNITS = {
    "Hounsfield": (0, "null", False),
    "1024 added": (1024, "null", True),
    "1024 added, lungs": (1024, "{window: [-1000, 400]}", True),
    "1024 added, z-score": (1024, "zscore", False),
    "1024 added, window above 0": (1024, "{window: [900, 1200]}", False),
}


@pytest.mark.parametrize("kind", UNITS)
def test_ct_in_other_units_than_the_window_is_said_once(kind, tmp_path, caplog):
    added, normalize, doubtful = UNITS[kind]
    folder = write_datalist(tmp_path / "list", 4)
    for n in range(4):
        scan_of(folder, n, lambda hounsfield: hounsfield + np.int16(added))
    data = module(tmp_path, folder, f"normalize={normalize}")
    for client in data.clients.values():
        next(client.eval_batches("train"))
    lines = [r.getMessage() for r in caplog.records if "Hounsfield" in r.getMessage()]
    assert len(lines) == doubtful
    assert all("has no value below 0" in line for line in lines)


@pytest.mark.parametrize("patients", [2, 3, 40])
@pytest.mark.parametrize("place", ["{}", "{}/anat", "hospital/{}"])
def test_files_that_are_odd_alike_in_a_folder_each_are_not_all_named(
    patients, place, tmp_path, caplog
):
    """Each of two files of a patient is odd; a thousand lines would hide all others."""
    for n in range(patients):
        folder = tmp_path / "list" / "cohort" / place.format(f"p{n}")
        folder.mkdir(parents=True)
        for name in ("ct.nii.gz", "mask.nii.gz"):
            nib.Nifti1Image(np.ones((2, 2, 2), np.int16), None).to_filename(folder / name)
            nifti_header(folder / name)
    lines = [record.getMessage() for record in caplog.records]
    assert sum("which side is left" in line for line in lines) == min(patients, 3)
    assert sum("Further such files are not named" in line for line in lines) == (patients > 2)


@pytest.mark.parametrize("values", [[1], [2], [3], [1, 3]], ids=str)
def test_a_region_that_no_training_mask_shows_is_said(values, tmp_path, caplog):
    """Values 1 and 2 are in every mask, and 3 in none."""
    wanted = {f"organ_{v}": [v] for v in values}
    regions = f"reader.regions={wanted}".replace("'", "")
    folder = write_datalist(tmp_path / "list", index={"labels": {**LABELS, "3": "cyst"}})
    print_cohort(cohort_record(module(tmp_path, folder, regions)))
    assert ("No training patch shows organ_3: check" in caplog.text) == (3 in values)


BLANK = {
    "mask": (lambda values: (values > 0).astype(np.int16), "zscore_nonzero"),
    "air": (lambda values: (values % 20 - 1000).astype(np.int16), "null"),
}


@pytest.mark.parametrize("kind", BLANK)
def test_a_scan_that_becomes_zero_is_named(kind, tmp_path):
    change, normalize = BLANK[kind]
    folder = write_datalist(tmp_path / "list", 4)
    for n in range(4):
        scan_of(folder, n, change)
    with pytest.raises(DataError, match=r"organ_0\d\.nii\.gz is 0 in every voxel for the network"):
        module(tmp_path, folder, f"normalize={normalize}")


def test_a_folder_may_be_named_from_here(tmp_path, monkeypatch):
    """As who stands beside the data does: data.path=Dataset009_Spleen."""
    write_nnunet(tmp_path / "n", 2)
    write_datalist(tmp_path / "l", 2)
    monkeypatch.chdir(tmp_path)
    for kind, name in ((NnunetReader, "n"), (DatalistReader, "l")):
        reader = kind(Path(name))
        assert {tuple(reader.read(p)) for p in reader.patients()} == {("image", "label", "spacing")}


def test_nnunet_lacks_a_channel(tmp_path):
    folder = write_nnunet(tmp_path, 1, channels=("CT", "PET"))
    (folder / "imagesTr" / "organ_00_0001.nii.gz").unlink()
    with pytest.raises(DataError, match=r"organ_00_0001\.nii\.gz is missing, but .*labelsTr"):
        [NnunetReader(folder).read(patient) for patient in NnunetReader(folder).patients()]
    (folder / "labelsTr" / "organ_00.nii.gz").unlink()
    with pytest.raises(DataError, match=r"has no masks \(\*\.nii\.gz\)"):
        NnunetReader(folder)
