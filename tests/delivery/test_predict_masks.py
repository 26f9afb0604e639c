"""Masks: those of the evaluation after training, on the scan's own grid, and of MONAI's bundle."""

import csv
import itertools
import re
import shutil
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk
import torch
from nibabel.orientations import axcodes2ornt, io_orientation, ornt_transform
from PIL import Image

from medfed.config.compose import load
from medfed.config.description import checked
from medfed.delivery.bundle.bundle import read_bundle, write_bundle
from medfed.delivery.predict.prediction import predict
from medfed.standalone import itk
from medfed.standalone.errors import ConfigError, DataError, MedfedError
from medfed.standalone.masks import label_codes, label_map, map_codes, save_like
from medfed.standalone.run import run as run_bundle
from medfed.standalone.volumes import read_geometry, read_volume
from medfed.standalone.voxels import axial, brain_slices
from tests import processes
from tests.datamodules.volume_files import affine, write_volume
from tests.delivery.hospitals import run_by_monai, same_files
from tests.delivery.test_predict_geometry import run as run_prediction
from tests.delivery.test_predict_geometry import threshold_bundle
from tests.processes import ROOT
from tests.sweeps import sweep

ORIENTATIONS = [
    "".join(signs[axis] for signs, axis in zip(choice, order, strict=True))
    for order in itertools.permutations(range(3))
    for choice in itertools.product(("RAS", "LPI"), repeat=3)
]


def scans(hospital):
    """The files of the client's test patients, and their ids."""
    patients = hospital.data.plans[hospital.client].patients["test"]
    return {p: hospital.data.patients[p].files["image"] for p in patients}


def turned(source: Path, codes: str, target: Path) -> nib.Nifti1Image:
    image = nib.load(source)
    turn = ornt_transform(io_orientation(image.affine), axcodes2ornt(codes))
    nib.save(image.as_reoriented(turn), target)
    return nib.load(target)


@pytest.mark.parametrize("name", ["slices", "margins", "windows"])
def test_probabilities_are_those_of_the_evaluation(name, hospital, tmp_path):
    made = hospital(name)
    plan = made.data.plans[made.client]
    assert plan.channels.all() == (name == "windows")  # with a missing contrast, and without
    for case, (patient, file) in enumerate(scans(made).items()):
        mask = tmp_path / f"{patient}.nii.gz"
        made.predict(input=file, output=mask, probabilities="true")
        batch = made.data.evaluation_block(patient, case, plan)
        expected = made.task.predict(batch)
        found = read_volume(tmp_path / f"{patient}_probabilities.nii.gz").voxels
        if name != "windows":
            brain = (made.data.scans.read(made.data.patients[patient])["image"] != 0).any(0)
            chosen = brain_slices(brain)
            assert found.sum((0, 1, 2)).nonzero().ravel().tolist() == chosen.tolist()
            found = axial(found, chosen)
        else:
            found = found[None]
        assert expected.std() > 1e-3
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        regions = read_volume(mask).voxels[0] > 0
        assert 0 < regions.float().mean() < 1
        if name == "windows":
            assert torch.equal(regions[None, None], expected > 0.5)


def test_sizes_are_those_of_the_written_mask_where_regions_do_not_nest(
    hospital, tmp_path, caplog, monkeypatch
):
    """The network answers each region by itself; the map of labels puts the inner ones in outer."""
    made = hospital("slices")
    file = next(iter(scans(made).values()))
    monkeypatch.setattr(itk, "_WARNED", {})  # what earlier predictions have said
    made.predict(input=file, output=tmp_path / "out", probabilities="true")
    (mask,) = (p for p in (tmp_path / "out").glob("*.nii.gz") if "probabilities" not in p.name)
    written = np.asanyarray(nib.load(mask).dataobj)
    given = nib.load(str(mask).replace(".nii.gz", "_probabilities.nii.gz")).get_fdata() > 0.5
    facts = read_bundle(made.bundle).facts
    codes = map_codes(facts)
    outwards, own = (
        [*reversed(codes)],
        dict(zip(facts["labels"], np.moveaxis(given, 3, 0), strict=True)),
    )
    assert (own[outwards[0]] & ~own[outwards[1]]).any()
    beyond = f"predicts voxels of {outwards[0]} beyond {outwards[1]}, and masks have them in both"
    assert caplog.text.count(beyond) == 1
    with (tmp_path / "out" / "summary.csv").open(newline="") as table:
        (row,) = csv.DictReader(table)
    factor = np.prod(nib.load(mask).header.get_zooms()[:3]) / 1000
    for place, name in enumerate(outwards):
        inside = np.isin(written, [codes[within] for within in outwards[: place + 1]])
        np.testing.assert_allclose(float(row[f"{name}_ml"]), inside.sum() * factor, rtol=1e-5)


REGION_SETS = {
    "nested": {"whole": [1, 2, 4], "core": [1, 4], "enhancing": [4]},
    "nested, of several values": {"whole": [1, 2, 3], "core": [2, 3]},
    "overlapping": {"a": [1, 2], "b": [2, 3]},
    "apart": {"a": [1], "b": [2]},
    "equal": {"a": [1], "b": [1]},
    "nested and apart": {"organ": [1, 2], "lesion": [2], "other": [7]},
}
PLACES = [
    (0.6, 0.4, 0.9),
    (0.4, 0.6, 0.9),
    (0.2, 0.4, 0.7),
]  # inner regions reach beyond outer ones
INPUTS = ("nii", "nii.gz", "nrrd", "mha", "DICOM")


def grey_volume() -> np.ndarray:
    """Boxes of growing values, some of which cross: thresholds do not only nest."""
    values = np.zeros((14, 12, 10), np.int16)
    values[2:12, 2:10, 1:9] = 60
    values[3:8, 3:9, 2:8] = 100
    values[5:11, 4:7, 3:6] = 150
    values[6:7, 5:6, 4:5] = 190
    return values


def read_regions(folder: Path, regions: dict[str, list[int]], seg: bool) -> dict[str, float]:
    """The millilitres of each region in what was written, by other libraries alone."""
    if seg:
        import pydicom

        one = pydicom.dcmread(folder / "a.dcm")
        measures = one.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
        factor = float(np.prod(measures.PixelSpacing)) * float(measures.SliceThickness) / 1000
        frames = one.PerFrameFunctionalGroupsSequence
        numbers = [f.SegmentIdentificationSequence[0].ReferencedSegmentNumber for f in frames]
        sizes = one.pixel_array.reshape(len(numbers), -1).sum(1)
        of = dict.fromkeys(regions, 0.0)
        labels = {s.SegmentNumber: s.SegmentLabel for s in one.SegmentSequence}
        for number, size in zip(numbers, sizes, strict=True):
            of[labels[number]] += float(size) * factor
        return of
    read = {name: sitk.ReadImage(str(folder / name)) for name in map(str, folder.iterdir())}
    found = {}
    for name, values in regions.items():
        one = folder / f"a_{name}.nii.gz"
        image = read[str(one if one.exists() else folder / "a.nii.gz")]
        array = sitk.GetArrayFromImage(image)
        if one.exists():
            inside = array > 0
        else:  # a label of a region, or of one within it
            codes = label_codes(regions) or {n: k for k, n in enumerate(regions, 1)}
            own = [codes[n] for n, of in regions.items() if set(of) <= set(values)]
            inside = np.isin(array, own)
        found[name] = inside.sum() * np.prod(image.GetSpacing()) / 1000
    return found


@sweep(
    ("regions", "places", "activation", "kind"),
    [
        (name, places, activation, INPUTS[(n + k) % len(INPUTS)])
        for n, name in enumerate(REGION_SETS)
        for k, places in enumerate(PLACES)
        for activation in ("sigmoid", "softmax")
        if activation == "sigmoid" or name in ("apart", "nested and apart")
    ],
)
def test_mask_table_and_segments_of_one_prediction_agree(
    regions, places, activation, kind, tmp_path
):
    of = REGION_SETS[regions]
    if activation == "softmax" and regions != "apart":
        of = {"organ": [1], "lesion": [2], "other": [7]}
    outputs = [(20.0, place) for place in places[: len(of)]]
    if activation == "softmax":
        outputs = [(-20.0, 0.3), *outputs]  # of the background
    source = {"kind": "volumes", "files": None, "file_channels": ["CT"], "regions": of}
    window = {"name": "window", "hu": [0, 200], "to": [0, 1]}
    facts = {"labels": [*of], "input": source, "normalization": window, "activation": activation}
    bundle = threshold_bundle(tmp_path / "b", outputs, **facts)
    to_mm, voxels = affine((2.0, 2.5, 3.0)), grey_volume()
    name = "a" if kind == "DICOM" else f"a.{kind}"
    write_volume(tmp_path / "in" / name, voxels, to_mm)
    for format in ("nifti", *["dicomseg"] * (kind == "DICOM")):
        out = tmp_path / format
        run_prediction(bundle, tmp_path / "in", out, format=format)
        with (out / "summary.csv").open(newline="") as table:
            (row,) = csv.DictReader(table)
        written = out
        if format == "nifti":
            written = tmp_path / "masks"
            written.mkdir()
            for file in out.glob("*.nii.gz"):
                shutil.copy(file, written)
        found = read_regions(written, of, format == "dicomseg")
        assert found == {n: pytest.approx(float(row[f"{n}_ml"]), rel=1e-5) for n in of}
        assert sum(found.values()) > 0
        files = [Path(f.rpartition(" ")[0]).name for f in row["files"].split("/")]
        assert sorted(files) == sorted(p.name for p in out.glob("a*"))


@pytest.mark.parametrize("kind", [nib.Nifti1Image, nib.Nifti2Image])
def test_no_text_of_a_scans_header_goes_on_into_its_mask(kind, tmp_path):
    source, target = tmp_path / "scan.nii", tmp_path / "mask.nii"
    image = kind(np.ones((3, 4, 5), np.int16), np.diag([-2.0, 2, 3, 1]))
    header = image.header
    texts = [name for name, (of, _) in header.template_dtype.fields.items() if of.char == "S"]
    for name in set(texts) - {"magic", "sizeof_hdr"}:
        header[name] = b"Sekret"
    header.set_intent("t test", (7.0,), "Sekret")
    header["slice_duration"], header["toffset"], header["cal_max"] = 3.0, 5.0, 100.0
    header.extensions.append(nib.nifti1.Nifti1Extension("comment", b"Sekret"))
    header.set_xyzt_units("mm", "sec")
    nib.save(image, source)
    assert source.read_bytes().count(b"Sekret") > 3
    note = "1 Läsion\n, 2 病灶 " + "é" * 60
    save_like(np.ones((3, 4, 5), np.uint8), read_geometry(source), source, target, note)
    assert b"Sekret" not in target.read_bytes()
    mask = nib.load(target)
    assert not mask.header.extensions
    assert mask.header.get_intent()[0] == "none"
    for name in ("slice_duration", "toffset", "cal_max"):
        assert float(mask.header[name]) == 0
    np.testing.assert_array_equal(mask.affine, image.affine)
    written = bytes(mask.header["descrip"]).rstrip(b"\0").decode()  # whole characters
    assert written == note.replace("\n", " ")[: len(written)]
    assert 76 <= len(written.encode()) <= 79


def of_exclusive_classes(hospital):
    """The hospital, a case of it, and each voxel's likeliest class by label value, RAS."""
    made = hospital("classes")
    plan = made.data.plans[made.client]
    patient = plan.patients["test"][0]
    probabilities = made.task.predict(made.data.evaluation_block(patient, 0, plan))[0]
    classes = torch.cat([1 - probabilities.sum(0, keepdim=True), probabilities])
    return made, patient, torch.tensor([0, 2, 5])[classes.argmax(0)].numpy(), probabilities


def test_exclusive_classes_become_one_label_map(hospital, tmp_path):
    made, patient, expected, probabilities = of_exclusive_classes(hospital)
    assert made.task.activation == "softmax"
    assert set(np.unique(expected)) == {0, 2, 5}
    source = Path(made.config.data.path) / patient / "CT.nii.gz"
    mask = tmp_path / "mask.nii.gz"
    made.predict(input=source.parent, output=mask, probabilities="true", picture="true")
    found = read_volume(mask).voxels[0].numpy()
    np.testing.assert_array_equal(found, expected)
    maps = read_volume(tmp_path / "mask_probabilities.nii.gz").voxels
    torch.testing.assert_close(maps, probabilities, atol=1e-5, rtol=0)
    np.testing.assert_array_equal(nib.load(mask).affine, nib.load(source).affine)
    with pytest.raises(MedfedError, match=r"threshold=0\.3 is for regions that may overlap"):
        made.predict(input=source.parent, output=tmp_path / "other.nii.gz", threshold=0.3)


def test_exclusive_classes_in_the_bundle_run_by_monai(hospital, tmp_path, monkeypatch):
    made, patient, expected, _ = of_exclusive_classes(hospital)
    source = Path(made.config.data.path) / patient
    (tmp_path / "in").mkdir()
    shutil.copytree(source, tmp_path / "in" / "a")
    run_by_monai(made.bundle, tmp_path / "in", tmp_path / "monai", monkeypatch)
    theirs = nib.load(tmp_path / "monai" / "a.nii.gz")
    np.testing.assert_allclose(theirs.affine, nib.load(source / "CT.nii.gz").affine)
    found = read_volume(tmp_path / "monai" / "a.nii.gz").voxels
    np.testing.assert_array_equal(found.numpy()[0], expected)


@pytest.mark.parametrize("codes", ["RAS", "LPS", "SAR", "PIL", "IRP"])
def test_a_turned_scan_gets_the_same_mask_turned(codes, hospital, tmp_path):
    made = hospital("windows")
    file = next(iter(scans(made).values()))
    scan = turned(file, codes, tmp_path / "scan.nii")
    made.predict(input=file, output=tmp_path / "straight.nii.gz")
    made.predict(input=tmp_path / "scan.nii", output=tmp_path / "mask.nii")
    mask = nib.load(tmp_path / "mask.nii")
    assert (mask.shape, mask.get_data_dtype()) == (scan.shape[:3], np.uint8)
    np.testing.assert_array_equal(mask.affine, scan.affine)
    assert "".join(nib.aff2axcodes(mask.affine)) == codes
    for key in ("qform_code", "sform_code", "xyzt_units"):
        assert mask.header[key] == scan.header[key]
    np.testing.assert_array_equal(mask.header["pixdim"][1:4], scan.header["pixdim"][1:4])
    straight = nib.load(tmp_path / "straight.nii.gz")
    turn = ornt_transform(io_orientation(straight.affine), axcodes2ornt(codes))
    expected = np.asarray(straight.as_reoriented(turn).dataobj)
    assert 0 < expected.sum() < expected.size
    np.testing.assert_array_equal(np.asarray(mask.dataobj), expected)


@sweep("codes", ORIENTATIONS)
def test_every_voxel_keeps_its_place_in_space(codes, tmp_path):
    """By the affines alone: a point of space has the value that the RAS array has there."""
    rng = np.random.default_rng(0)
    affine = np.diag([1.0, 2.0, 3.0, 1.0])
    affine[:3, 3] = 5, -7, 11
    ras = rng.integers(0, 200, (3, 4, 5), dtype=np.uint8)
    nib.save(nib.Nifti1Image(np.zeros((3, 4, 5), np.float32), affine), tmp_path / "ras.nii")
    turned(tmp_path / "ras.nii", codes, tmp_path / "scan.nii")
    scan = tmp_path / "scan.nii"
    save_like(ras, read_geometry(scan), scan, tmp_path / "mask.nii", note="1 whole")
    mask = nib.load(tmp_path / "mask.nii")
    for index in np.ndindex(3, 4, 5):
        world = affine @ [*index, 1]
        there = np.rint(np.linalg.solve(mask.affine, world))[:3].astype(int)
        assert mask.dataobj[tuple(there)] == ras[index]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mask.nii", "ras.nii", "scan.nii"]


@pytest.mark.parametrize(
    "regions",
    [
        {"whole": (1, 2, 3), "core": (2, 3), "enhancing": (3,)},  # MSD
        {"enhancing": (4,), "whole": (1, 2, 4), "core": (1, 4)},  # BraTS, in another order
        {"whole": (1,)},
    ],
)
def test_label_maps_give_the_training_masks_again(regions):
    truth = torch.from_numpy(np.random.default_rng(1).choice([0, *regions["whole"]], (5, 6, 7)))
    masks = {name: torch.isin(truth, torch.tensor(v)) for name, v in regions.items()}
    codes = label_codes(regions)
    assert torch.equal(label_map(masks, codes), truth.to(torch.uint8))


def test_regions_that_do_not_nest_have_no_common_map():
    assert label_codes({"left": (1, 3), "right": (2, 3)}) is None
    assert label_codes({"a": (1, 2), "b": (1, 2)}) is None
    assert label_codes({"whole": (1, 2, 3), "enhancing": (3,)}) == {"whole": 1, "enhancing": 2}


def test_a_file_per_contrast_gives_the_mask_of_the_one_file(hospital, tmp_path):
    made = hospital("slices")
    file = next(iter(scans(made).values()))
    image = nib.load(file)
    case = tmp_path / "cases" / "case_1"
    case.mkdir(parents=True)
    present = made.data.preprocessing(made.client)["present"]
    names = {"FLAIR": "_flair", "T1w": "_t1", "T1gd": "_t1ce", "T2w": "_t2"}
    for number, name in enumerate(made.data.channel_names):
        if name in present:  # the contrast that the hospital lacks need not be there
            voxels = np.asarray(image.dataobj)[..., number]
            nib.save(nib.Nifti1Image(voxels, image.affine), case / f"case_1{names[name]}.nii.gz")
    made.predict(input=file, output=tmp_path / "one.nii.gz")
    made.predict(input=case, output=tmp_path / "several.nii.gz")
    made.predict(input=tmp_path / "cases", output=tmp_path / "masks")
    expected = np.asarray(nib.load(tmp_path / "one.nii.gz").dataobj)
    assert 0 < (expected > 0).mean() < 1
    for found in ("several.nii.gz", "masks/case_1.nii.gz"):
        np.testing.assert_array_equal(np.asarray(nib.load(tmp_path / found).dataobj), expected)


def test_a_bad_scan_does_not_stop_the_others(hospital, tmp_path, capsys):
    made = hospital("windows")
    file = next(iter(scans(made).values()))
    (tmp_path / "in").mkdir()
    for name in ("a", "c"):
        shutil.copy(file, tmp_path / "in" / f"{name}.nii.gz")
    (tmp_path / "in" / "b.nii.gz").write_bytes(file.read_bytes()[:2000])
    with pytest.raises(DataError, match=r"^1 of 3 scans could not be predicted, .* are done\.$"):
        made.predict(input=tmp_path / "in", output=tmp_path / "out", picture="true")
    said = capsys.readouterr()
    assert "b.nii.gz is truncated or corrupt" in said.err
    assert "predicted 3/3" in said.err
    assert "a.nii.gz" in re.sub(r"[\s│]+", "", said.out)  # a long path has several lines
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == ["a.nii.gz", "a.png", "c.nii.gz", "c.png", "prediction.json", "summary.csv"]


def bundle_run(bundle: Path, source: Path, output: Path) -> None:
    """Runs the bundle by MONAI, in a process that cannot import this package."""
    overrides = {"bundle_root": bundle, "dataset_dir": source, "output_dir": output}
    command = ["monai.bundle", "run", "--config_file", "configs/inference.json"]
    command += [f"--{k}={v}" for k, v in overrides.items()]
    done = processes.run(ROOT / "tests/delivery/alone.py", "medfed", *command, cwd=bundle)
    assert done.returncode == 0, done.stderr[-3000:]


def test_mask_of_the_bundle_run_by_monai(hospital, tmp_path):
    pytest.importorskip("fire", reason="monai.bundle run needs fire")
    made = hospital("slices")
    patient, file = next(iter(scans(made).items()))
    (tmp_path / "in").mkdir()
    shutil.copy(file, tmp_path / "in")
    bundle_run(made.copy(tmp_path), tmp_path / "in", tmp_path / "monai")
    made.predict(input=tmp_path / "in", output=tmp_path / "own")
    assert same_files(tmp_path / "monai", tmp_path / "own") == [f"{patient}.nii.gz"]
    mask = np.asarray(nib.load(tmp_path / "own" / f"{patient}.nii.gz").dataobj)
    assert 0 < (mask > 0).mean() < 1


def case_bundle(made, folder: Path) -> Path:
    """The bundle of a hospital that has a folder per case, with a file per contrast."""
    bundle = read_bundle(made.bundle)
    files = {name: [f"{name}.nii*"] for name in bundle.facts["channels"]}
    facts = {**bundle.facts, "input": {**bundle.facts["input"], "files": files}}
    write_bundle(folder, facts, bundle.state, {})
    return folder


def test_cases_that_share_file_names_get_a_mask_each(hospital, tmp_path, monkeypatch):
    made = hospital("slices")
    bundle = case_bundle(made, tmp_path / "bundle")
    for case, file in zip(("a", "b.1", "b.2"), itertools.cycle(scans(made).values()), strict=False):
        image = nib.load(file)
        (tmp_path / "in" / case).mkdir(parents=True)
        for channel, name in enumerate(made.data.channel_names):
            voxels = np.asarray(image.dataobj)[..., channel] * (1 + len(case))
            nib.save(
                nib.Nifti1Image(voxels, image.affine), tmp_path / "in" / case / f"{name}.nii.gz"
            )
    run_by_monai(bundle, tmp_path / "in", tmp_path / "monai", monkeypatch)
    made.predict(bundle=bundle, input=tmp_path / "in", output=tmp_path / "own")
    names = ["a.nii.gz", "b.1.nii.gz", "b.2.nii.gz"]
    assert same_files(tmp_path / "monai", tmp_path / "own") == names
    read_bundle(bundle)  # what the run left in it is no damage


def touched(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    return folder


def test_inputs_that_a_bundle_refuses(tmp_path):
    source = {"kind": "volumes", "files": None, "file_channels": ["CT"]}
    facts = {"task": "segmentation", "labels": ["a"], "present": ["CT"], "threshold": 0.5}
    facts |= {"channels": ["CT"], "input": source}
    folder = touched(tmp_path / "in", "a/x.nii.gz", "a/x.nii")
    with pytest.raises(MedfedError, match="There are two scans of the name a/x; rename one"):
        run_bundle(torch.nn.Identity(), facts, str(folder), str(tmp_path / "out"))
    with pytest.raises(DataError, match="is the folder of the input; choose another"):
        run_bundle(torch.nn.Identity(), facts, str(folder), str(folder))
    facts |= {"task": "classification", "input": {"kind": "ct_patches"}}
    with pytest.raises(ConfigError, match="name them in candidates=FILE"):
        run_bundle(torch.nn.Identity(), facts, str(folder), str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (("x.nii.gz", "x_probabilities.nii.gz"), "Scans x and x_probabilities would share"),
        (("x.nii.gz", "x.nii"), "There are two scans of the name x; rename one"),
        (("p/x.nii.gz", "p/x.nii"), "There are two scans of the name p/x; rename one"),
    ],
)
def test_scans_that_would_share_a_file(hospital, tmp_path, names, sentence):
    touched(tmp_path / "in", *names)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(MedfedError, match=sentence):
        hospital("slices").predict(
            input=tmp_path / "in", output=tmp_path / "out", probabilities="true", overwrite="true"
        )
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("label", ["../../x", "/x", "a\\b", "a\0b"])
def test_a_label_that_leads_out_of_the_folder(hospital, tmp_path, label):
    made = hospital("slices")
    bundle = read_bundle(made.bundle)
    labels = [label, *bundle.facts["labels"][1:]]
    write_bundle(tmp_path / "bundle", {**bundle.facts, "labels": labels}, bundle.state, {})
    file = next(iter(scans(made).values()))
    with pytest.raises(MedfedError, match="cannot be part of a file's name"):
        made.predict(bundle=tmp_path / "bundle", input=file, output=tmp_path / "mask.nii.gz")
    assert [p.name for p in tmp_path.iterdir()] == ["bundle"]


def test_a_label_of_pictures_that_leads_out_of_the_folder(hospital, tmp_path):
    made = hospital("pictures")
    bundle = read_bundle(made.bundle)
    write_bundle(tmp_path / "bundle", {**bundle.facts, "labels": ["../x"]}, bundle.state, {})
    file = made.bundle.parent / "pictures" / "centre_0" / "0L.png"
    keys = {"output": tmp_path / "mask.png", "probabilities": "true"}
    with pytest.raises(MedfedError, match="cannot be part of a file's name"):
        made.predict(bundle=tmp_path / "bundle", input=file, **keys)
    assert [p.name for p in tmp_path.iterdir()] == ["bundle"]


@pytest.mark.parametrize("kind", ["grey", "grey in three channels", "colours"])
def test_a_picture_of_other_colours_than_those_of_training_is_said(
    kind, hospital, tmp_path, caplog
):
    made = hospital("pictures")
    file = made.bundle.parent / "pictures" / "centre_0" / "0L.png"
    pixels = np.asarray(Image.open(file).convert("RGB")).copy()
    pixels[:] = pixels[..., :1]
    if kind == "colours":
        pixels[..., 0] = 255 - pixels[..., 0]
    Image.fromarray(pixels[..., 0] if kind == "grey" else pixels).save(tmp_path / "a.png")
    made.predict(input=tmp_path / "a.png", output=tmp_path / "mask.png")
    trained = read_bundle(made.bundle).facts["input"]["color"]
    other = kind == "grey" if trained == "rgb" else kind == "colours"
    assert ("but the model was trained on" in caplog.text) == other


def _bad(kind: str, file: Path, folder: Path) -> Path:
    """A scan that is wrong in one way."""
    image = nib.load(file)
    voxels, affine = np.asarray(image.dataobj, dtype=np.float32).copy(), image.affine.copy()
    path = folder / "scan.nii.gz"
    if kind == "channels":
        voxels = voxels[..., :2]
    elif kind == "spacing":
        affine[:3, :3] *= 1.5
    elif kind == "nan":
        voxels[3, 3, 3, 1] = np.nan
    elif kind == "flat":
        voxels = voxels[:, :, 0, 0]
    elif kind == "empty":
        voxels[:] = 0
    elif kind == "alike":
        voxels[:] = voxels > voxels.mean()
    elif kind == "constant":
        voxels[..., 1] = 7
    elif kind == "five":
        voxels = voxels[..., None]
    nib.save(nib.Nifti1Image(voxels, affine), path)
    return path


BAD = {
    "channels": r"scan.nii.gz has 2 channels, but the model needs 4 \(FLAIR, T1w, T1gd, T2w\)",
    "spacing": r"has voxels of 12 × 14.4 × 21.6 mm, but the hospital's training scans have 8 × ",
    "nan": r"scan.nii.gz: channel T1w has NaN or infinite voxels; repair the file",
    "flat": r"scan.nii.gz has shape \(24, 20\); a volume has three axes",
    "empty": r"scan.nii.gz has only zero voxels; export the scan again",
    "alike": r"scan.nii.gz is 0 in every voxel for the network: its grey values are all alike",
    "constant": r"scan.nii.gz: channel T1w has the value 7 in every voxel; copy the file again",
    "five": r"scan.nii.gz has shape \(24, 20, 10, 4, 1\); a volume has three axes, or four",
}


@pytest.mark.parametrize("kind", sorted(BAD))
def test_scans_that_contradict_the_metadata(kind, hospital, tmp_path):
    made = hospital("windows")
    path = _bad(kind, next(iter(scans(made).values())), tmp_path)
    with pytest.raises(DataError, match=BAD[kind]):
        made.predict(input=path, output=tmp_path / "mask.nii.gz")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["scan.nii.gz"]


def test_what_is_odd_about_channels_is_said_of_those_that_the_model_sees(
    hospital, tmp_path, caplog
):
    made, path = hospital("slices"), tmp_path / "scan.nii.gz"
    facts = read_bundle(made.bundle).facts
    channels, present = facts["channels"], facts["present"]
    (unseen,) = {*channels} - {*present}
    image = nib.load(next(iter(scans(made).values())))

    def said(voxels: np.ndarray) -> str:
        caplog.clear()
        nib.save(nib.Nifti1Image(voxels, image.affine), path)
        made.predict(input=path, output=tmp_path / "mask.nii.gz", overwrite="true")
        return caplog.text

    for name in (present[0], unseen):
        voxels = np.asarray(image.dataobj, dtype=np.float32).copy()
        voxels[..., channels.index(name)] = 0
        assert (f"channel {name} is 0 in every voxel" in said(voxels)) == (name in present)
    expected = nib.load(tmp_path / "mask.nii.gz").get_fdata()
    fewer = voxels[..., [channels.index(name) for name in present]]
    assert f"scan.nii.gz is taken as {', '.join(present)}, in this order" in said(fewer)
    assert np.array_equal(nib.load(tmp_path / "mask.nii.gz").get_fdata(), expected)


def test_a_scan_whose_background_is_not_0_is_named(hospital, tmp_path, caplog):
    """All voxels then count in a normalisation over those that are not 0."""
    made, path = hospital("slices"), tmp_path / "scan.nii.gz"
    image = nib.load(next(iter(scans(made).values())))
    voxels = np.asarray(image.dataobj, dtype=np.float32)
    for added in (0, 1):
        nib.save(nib.Nifti1Image(voxels + added, image.affine), path)
        made.predict(input=path, output=tmp_path / "mask.nii.gz", overwrite="true")
        named = "scan.nii.gz has a contrast without a voxel of 0, so all that surrounds the body"
        assert caplog.text.count(named) == added


def test_a_case_without_a_contrast_hears_what_a_hospital_can_do(hospital, tmp_path):
    """It has a bundle, and no data.reader."""
    made = hospital("slices")
    file = next(iter(scans(made).values()))
    (tmp_path / "case").mkdir()
    shutil.copy(file, tmp_path / "case" / "scan_t2.nii.gz")
    with pytest.raises(DataError, match="Add the file, give one such a name, or remove the case"):
        made.predict(input=tmp_path / "case", output=tmp_path / "mask.nii.gz")


def test_files_that_are_no_case_hear_how_contrasts_are_named(hospital, tmp_path):
    made = hospital("slices")
    file = next(iter(scans(made).values()))
    for name in ("t1w", "T2W"):
        (tmp_path / "case").mkdir(exist_ok=True)
        shutil.copy(file, tmp_path / "case" / f"{name}.nii.gz")
    names = r"Files that are contrasts of one scan are named .*\*_t2\.nii\.gz"
    with pytest.raises(ConfigError, match=f"holds several scans, .* without a suffix. {names}"):
        made.predict(input=tmp_path / "case", output=tmp_path / "mask.nii.gz")


def test_another_spacing_where_it_is_allowed(hospital, tmp_path):
    made = hospital("windows")
    path = _bad("spacing", next(iter(scans(made).values())), tmp_path)
    made.predict(input=path, output=tmp_path / "mask.nii.gz", spacing_tolerance="null")
    assert nib.load(tmp_path / "mask.nii.gz").shape == (24, 20, 10)


def test_places_that_cannot_be_used(hospital, tmp_path):
    made = hospital("windows")
    file = next(iter(scans(made).values()))
    (tmp_path / "none").mkdir()
    (tmp_path / "mask.nii.gz").write_bytes(b"kept")
    (tmp_path / "scan.png").write_text("")
    cases = {
        "is there already; set overwrite=true": (file, "mask.nii.gz"),
        "mask.nii.gz is a file and no folder": (file, "mask.nii.gz/mask.nii.gz"),
        r"must be a folder, or a file of \.nii\.gz, ": (file, "mask.mhd"),
        "has no volumes": (tmp_path / "none", "masks"),
        "does not exist; name a scan": (tmp_path / "absent.nii", "mask.nii"),
        "is no volume": (tmp_path / "scan.png", "mask.nii"),
        "is the input; choose another": (tmp_path, "."),
    }
    before = sorted(tmp_path.rglob("*"))
    for sentence, (source, output) in cases.items():
        with pytest.raises(MedfedError, match=sentence):
            made.predict(input=source, output=tmp_path / output)
    with pytest.raises(MedfedError, match="candidates is for"):
        made.predict(input=file, output=tmp_path / "m.nii", candidates=tmp_path / "c.csv")
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "mask.nii.gz").read_bytes() == b"kept"
    made.predict(input=file, output=tmp_path / "mask.nii.gz", overwrite="true")
    assert nib.load(tmp_path / "mask.nii.gz").shape == (24, 20, 10)


@pytest.mark.parametrize("parts", [["core"], ["whole", "core"]])
def test_the_largest_part_alone_is_kept(parts, tmp_path, monkeypatch):
    """By SimpleITK's connected components, for masks of both programs."""
    rng = np.random.default_rng(0)
    voxels = np.zeros((24, 20, 18), np.float32)
    voxels[2:9, 3:10, 2:9] = 100
    voxels[12:20, 3:9, 5:15] = 200
    voxels[9:12, 15:18, 3:6] = 200
    voxels += rng.normal(0, 1, voxels.shape).astype(np.float32)
    (tmp_path / "in").mkdir()
    nib.save(nib.Nifti1Image(voxels, np.eye(4)), tmp_path / "in" / "a.nii.gz")
    outputs, labels = [(9.0, 0.5), (9.0, 2.0)], ["whole", "core"]
    regions = {"whole": [1, 2], "core": [2]}
    source = {"kind": "volumes", "files": None, "file_channels": ["CT"], "regions": regions}
    facts = {"labels": labels, "input": source, "patch_size": [32, 32, 32]}
    found = {}
    for name, kept in (("whole masks", None), ("parts", parts)):
        bundle = threshold_bundle(tmp_path / name / "b", outputs, **facts, largest_part=kept)
        target = tmp_path / f"{name} by MONAI"
        run_by_monai(bundle, tmp_path / "in", target, monkeypatch, spacing_tolerance=None)
        mask = np.asarray(nib.load(target / "a.nii.gz").dataobj)
        found[name] = np.stack([mask > 0, mask == 2], -1).astype(np.uint8)
    for channel, label in enumerate(labels):
        image = sitk.GetImageFromArray(found["whole masks"][..., channel])
        connected = sitk.ConnectedComponent(image, True)
        ordered = sitk.GetArrayFromImage(sitk.RelabelComponent(connected))
        assert ordered.max() > 1
        expected = ordered == 1 if label in parts else ordered > 0
        np.testing.assert_array_equal(found["parts"][..., channel] > 0, expected)
    assert read_bundle(bundle).metadata["required_packages_version"]["scipy"]
    options = [f"bundle={bundle}", f"input={tmp_path / 'in'}", f"output={tmp_path / 'own'}"]
    predict(checked(load([*options, "spacing_tolerance=null"], "predict")))
    same_files(target, tmp_path / "own")


def test_twenty_cases_of_one_file_name_get_twenty_masks(tmp_path, monkeypatch):
    bundle = threshold_bundle(tmp_path / "bundle", [(9.0, 0.5)])
    rng = np.random.default_rng(0)
    for case in range(20):
        folder = tmp_path / "in" / f"case_{case:02d}"
        folder.mkdir(parents=True)
        voxels = rng.normal(0, 1, (9 + case, 8, 7)).astype(np.float32)
        nib.save(nib.Nifti1Image(voxels, np.eye(4)), folder / "t1.nii.gz")
    run_by_monai(bundle, tmp_path / "in", tmp_path / "monai", monkeypatch)
    options = [f"bundle={bundle}", f"input={tmp_path / 'in'}", f"output={tmp_path / 'own'}"]
    predict(checked(load(options, "predict")))
    masks = same_files(tmp_path / "monai", tmp_path / "own")
    assert len(masks) == 20
    for case, mask in enumerate(masks):
        assert mask == f"case_{case:02d}/t1.nii.gz"
        assert nib.load(tmp_path / "own" / mask).shape[:3] == (9 + case, 8, 7)
