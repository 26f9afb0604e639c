"""A detector's bundle finds what its run found, in mm by SimpleITK; what cannot be is refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk
import torch
from PIL import Image

from medfed.common.untrusted import read_rows
from medfed.config.compose import described, load
from medfed.config.description import checked
from medfed.delivery.bundle.bundle import read_bundle
from medfed.delivery.bundle.metadata import check_facts
from medfed.delivery.main import export, keep_bundle, predict
from medfed.reports.report import report_runs
from medfed.run.evaluation import evaluate_run
from medfed.sites.agreement import Agreed, SiteFile
from medfed.sites.run import coordinate
from medfed.sites.site_folder import hospital
from medfed.standalone.ct import ScanSpec, read_scan
from medfed.standalone.errors import CheckpointError, ConfigError, DataError, MedfedError
from medfed.standalone.files import sha256
from medfed.standalone.predictor import Predictor
from tests.datamodules.volume_files import write_series
from tests.delivery.hospitals import run_by_monai, same_files
from tests.integration.runs import run
from tests.integration.test_detection import QUICK
from tests.sites.direct import Direct
from tests.sites.hospitals import QUICK as TERMS
from tests.sites.hospitals import same

HEADER = "seriesuid,coordX,coordY,coordZ,probability\n"
PLACE = ("coordX", "coordY", "coordZ")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A run, the bundles of its two hospitals, and the test scan of each."""
    folder = tmp_path_factory.mktemp("detector")
    _, made = run(folder / "run", *QUICK, "threads=1", f"data.root={folder / 'root'}")
    export(checked(load([f"run={folder / 'run'}"], "export")))
    scans = {
        client: made.data.patients[plan.patients["test"][0]].files["header"]
        for client, plan in made.data.plans.items()
    }
    return folder / "run", scans


def find(exported, client="hospital_0", **keys):
    bundle = exported[0] / "bundles" / client
    given = {"bundle": bundle, "batch_size": 4, **keys}  # windows at once, as in the run
    texts = {k: f'"{v}"' if isinstance(v, Path) else v for k, v in given.items()}
    predict(checked(load([f"{k}={v}" for k, v in texts.items()], "predict")))


def numbers(rows):
    values = [[float(row[name]) for name in (*PLACE, "probability")] for row in rows]
    return np.array(sorted(values))


def test_the_bundle_finds_what_the_run_found(exported, tmp_path, monkeypatch):
    folder, scans = exported
    known = read_rows(folder / "detections.csv", [*PLACE, "probability"])
    for client, scan in scans.items():
        output = tmp_path / client
        find(exported, client, input=scan, output=output)
        assert (output / "detections.csv").read_text().startswith(HEADER)
        found = read_rows(output / "detections.csv", [*PLACE, "probability"])
        own = [row for row in known if row["seriesuid"] == scan.stem]
        assert len(found) == len(own) > 5
        assert {row["seriesuid"] for row in found} == {scan.stem}
        # Both are rounded to 1e-4 mm.
        np.testing.assert_allclose(numbers(found), numbers(own), rtol=1e-6, atol=1.1e-4)
        content = json.loads((output / f"{scan.stem}_boxes.json").read_text())
        bundle = folder / "bundles" / client
        assert content["bundle_manifest_sha256"] == sha256(bundle / "configs" / "manifest.json")
        boxes = content["boxes"]
        assert [box["probability"] for box in boxes] == sorted(
            (box["probability"] for box in boxes), reverse=True
        )
        for box, row in zip(boxes, found, strict=True):
            assert box["centre_mm"] == [float(row[name]) for name in PLACE]
            assert box["probability"] == pytest.approx(float(row["probability"]), rel=1e-7)
            assert min(box["size_mm"]) > 0
        (row,) = read_rows(output / "summary.csv", ["nodule_boxes"])
        assert int(row["nodule_boxes"]) == len(found)
    # MONAI runs the bundle's own scripts and writes the same files.
    run_by_monai(folder / "bundles" / client, scan, tmp_path / "monai", monkeypatch)
    assert len(same_files(tmp_path / "monai", output)) == 2


def test_the_bundle_says_what_it_is(exported):
    bundle = exported[0] / "bundles" / "hospital_1"
    facts = read_bundle(bundle).facts
    model = json.loads((bundle / "configs" / "metadata.json").read_text())["medfed"]
    assert (facts["task"], facts["labels"]) == ("detection", ["nodule"])
    assert facts["anchors"] == facts["network"]["anchors"] == [[4] * 3, [6] * 3, [10] * 3]
    assert (facts["patch_size"], facts["threshold"], facts["boxes"]) == ([48, 48, 24], 0.01, 50)
    assert facts["input"] == {"kind": "ct_scans", "spacing": [1.5, 1.5, 1.5]}
    assert facts["normalization"]["hu"] == [-1000, 400]
    assert "lesion_cpm" in facts["run_test_metrics"]
    assert "detections.csv" in (bundle / "docs" / "README.md").read_text()
    card = (bundle / "docs" / "model_card.md").read_text()
    assert "Personal part: task" in card
    assert r"classification" in card
    changes = {
        "anchors": ([[4, 4, 5]], "anchors has an odd number"),
        "boxes": (None, "anchors, boxes or patch_size is missing"),
        "patch_size": ([48, 48], "anchors, boxes or patch_size is missing"),
        "threshold": (None, "threshold is missing"),
        "task": ("classification", "a model of classification does not take ct_scans"),
        "input": ({"kind": "ct_scans", "spacing": [1.5, 0.001, 1.5]}, "spacing"),
    }
    for key, (value, words) in changes.items():
        with pytest.raises(CheckpointError, match=words):
            check_facts({**model, key: value}, bundle)


def by_simpleitk(scan, predictor, flipped):
    """World coordinates of the boxes of a scan that is stored in LPS axes, some of them flipped.

    The boxes are in voxels h, w, d of 1.5 mm; SimpleITK transforms their places in the file's own
    voxels.
    """
    image = sitk.ReadImage(str(scan)) if scan.is_file() else read_folder(scan)
    spec = ScanSpec((1.5,) * 3, (-1000, 400))
    prepared = torch.from_numpy(spec.values.take(read_scan(scan, spec)))[None, None]
    boxes, _ = predictor.boxes(prepared, scan)
    low, high = boxes.double().numpy().reshape(-1, 2, 3).transpose(1, 0, 2)
    at = ((low + high) / 2 * 1.5)[:, [1, 0, 2]] / image.GetSpacing() - 0.5
    ends = np.array(image.GetSize()) - 1
    at = np.where(flipped, ends - at, at)
    return np.array([image.TransformContinuousIndexToPhysicalPoint(i.tolist()) for i in at])


def read_folder(folder):
    reader = sitk.ImageSeriesReader()
    reader.SetFileNames(reader.GetGDCMSeriesFileNames(str(folder)))
    return reader.Execute()


def test_places_in_turned_scans_are_those_of_simpleitk(exported, tmp_path):
    """Of anisotropic voxels, flipped axes and a moved origin: NIfTI, MetaImage and DICOM."""
    image = sitk.ReadImage(str(exported[1]["hospital_0"]))
    new = np.array([2.1, 2.9, 3.3])
    size = np.floor(np.array(image.GetSize()) * image.GetSpacing() / new).astype(int)
    origin = image.TransformContinuousIndexToPhysicalPoint([0.5, 0.5, 0.5])
    to = (size.tolist(), sitk.Transform(), sitk.sitkLinear, origin, new.tolist())
    image = sitk.Resample(image, *to, image.GetDirection(), -1000)
    image.SetOrigin((17.25, -303.5, 41.75))
    source = tmp_path / "in"
    (source / "deep").mkdir(parents=True)
    flips = {"deep/a.nii.gz": (True, True, False), "b.mha": (True, False, True)}
    for name, flipped in flips.items():
        sitk.WriteImage(sitk.Flip(image, flipped, False), str(source / name))
    flips["series"] = (False,) * 3
    voxels = sitk.GetArrayFromImage(image).transpose(2, 1, 0)
    to_mm = np.diag([-new[0], -new[1], new[2], 1])  # RAS
    to_mm[:3, 3] = np.array([-1, -1, 1]) * image.GetOrigin()
    write_series(source / "series", voxels.astype(np.int16), to_mm, uid="1.2.3.77")
    find(exported, input=source, output=tmp_path / "out")
    rows = read_rows(tmp_path / "out" / "detections.csv", [*PLACE, "probability"])
    assert {row["seriesuid"] for row in rows} == {"a", "b", "1.2.3.77"}
    bundle = read_bundle(exported[0] / "bundles" / "hospital_0")
    predictor = Predictor.of(bundle.network(), bundle.facts, batch_size=4)
    known = []
    for name, flipped in flips.items():
        expected = by_simpleitk(source / name, predictor, flipped)
        uid = {"series": "1.2.3.77"}.get(name, name.split("/")[-1].split(".")[0])
        found = [[float(r[axis]) for axis in PLACE] for r in rows if r["seriesuid"] == uid]
        assert len(found) == len(expected) > 5
        # NIfTI keeps numbers in single precision: 1e-5 of a scan of 300 mm.
        np.testing.assert_allclose(found, expected, rtol=0, atol=3e-3)
        known.append(expected)
    files = sorted(p.relative_to(tmp_path / "out").as_posix() for p in tmp_path.rglob("*_boxes.*"))
    assert files == ["b_boxes.json", "deep/a_boxes.json", "series_boxes.json"]
    # The anatomy is one, so its best boxes are, too, whatever the order of the voxels.
    for other in known[1:]:
        assert np.abs(other[:3] - known[0][:3]).max() < 0.1


def test_a_scan_without_a_box_gives_a_header_and_a_bad_one_stops_no_other(
    exported, tmp_path, capsys
):
    """And scans of one name are told apart by their folders; the same command adds what is new."""
    scan, source, output = exported[1]["hospital_0"], tmp_path / "in", tmp_path / "out"
    find(exported, input=scan, output=tmp_path / "none", threshold=0.99)
    assert (tmp_path / "none" / "detections.csv").read_text().replace("\r", "") == HEADER
    assert json.loads((tmp_path / "none" / f"{scan.stem}_boxes.json").read_text())["boxes"] == []
    image = sitk.ReadImage(str(scan))
    for patient in ("p1", "p2"):
        (source / patient).mkdir(parents=True)
        sitk.WriteImage(image, str(source / patient / "CT.nii.gz"))
    sitk.WriteImage(sitk.Abs(image), str(source / "mri.nii.gz"))
    with pytest.raises(DataError, match="1 of 3 scans could not be predicted"):
        find(exported, input=source, output=output)
    assert re.search(r"mri.nii.gz has no value below \d+, but air", capsys.readouterr().err)
    rows = read_rows(output / "detections.csv", ["seriesuid"])
    assert {row["seriesuid"] for row in rows} == {"p1/CT", "p2/CT"}
    before = (output / "p1" / "CT_boxes.json").stat().st_mtime_ns
    (source / "mri.nii.gz").unlink()
    shutil.copy(source / "p1" / "CT.nii.gz", source / "prediction.nii.gz")
    find(exported, input=source, output=output)
    assert (output / "p1" / "CT_boxes.json").stat().st_mtime_ns == before
    rows = read_rows(output / "detections.csv", ["seriesuid"])
    assert {row["seriesuid"] for row in rows} == {"p1/CT", "p2/CT", "prediction"}
    with pytest.raises(ConfigError, match="other bundles or settings"):
        find(exported, "hospital_1", input=source, output=output)


def test_what_is_no_ct_scan_is_refused(exported, tmp_path):
    scan = exported[1]["hospital_0"]
    Image.new("L", (64, 64)).save(tmp_path / "picture.png")
    air = np.random.default_rng(0).integers(-1000, 400, (32, 32, 1)).astype(np.int16)
    nib.save(nib.Nifti1Image(air, np.eye(4)), tmp_path / "slice.nii.gz")
    colour = np.repeat(np.concatenate([air] * 8, 2)[..., None], 3, 3)
    nib.save(nib.Nifti1Image(colour, np.eye(4)), tmp_path / "colour.nii.gz")
    zscore = np.random.default_rng(0).normal(size=(16, 16, 8)).astype(np.float32)
    nib.save(nib.Nifti1Image(zscore, np.eye(4)), tmp_path / "mri.nii.gz")
    nib.save(nib.Nifti1Image(zscore * 30_000, np.eye(4)), tmp_path / "raw.nii.gz")
    (tmp_path / "empty").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "detections.csv").write_text("mine")
    for keys, words in (
        ({"input": tmp_path / "picture.png"}, "picture.png is no volume"),
        ({"input": tmp_path / "none.nii.gz"}, "none.nii.gz does not exist"),
        ({"input": tmp_path / "empty"}, "empty has no volumes"),
        ({"input": tmp_path / "slice.nii.gz"}, "slice.nii.gz is a single slice"),
        ({"input": tmp_path / "colour.nii.gz"}, "several values per voxel"),
        ({"input": tmp_path / "mri.nii.gz"}, r"mri.nii.gz has no value below -\d, but air"),
        ({"input": tmp_path / "raw.nii.gz"}, "outside of -4096 to 4096 HU"),
        ({"output": tmp_path / "table.csv"}, "table.csv must be a folder"),
        ({"output": tmp_path / "mine"}, "detections.csv is there already; set overwrite=true"),
        ({"candidates": tmp_path / "c.csv"}, "candidates is for models of CT patches"),
        ({"picture": True}, "picture=true is for segmentation"),
        ({"format": "nifti"}, "format is for masks"),
        ({"backend": "onnx"}, r"holds no models/model\.onnx"),
    ):
        with pytest.raises(MedfedError, match=words) as caught:
            find(exported, **{"input": scan, "output": tmp_path / "out", **keys})
        assert str(caught.value).endswith(".")
        assert "\n" not in str(caught.value)
    assert (tmp_path / "mine" / "detections.csv").read_text() == "mine"
    assert not (tmp_path / "out" / "detections.csv").exists()  # it would say that nothing was found


def test_quantised_and_onnx_bundles_find_boxes(exported, tmp_path):
    """Both are of the same network: ONNX Runtime gives PyTorch's boxes."""
    folder, scans = exported
    one = (f"run={folder}", "client=hospital_0", f"out={tmp_path / 'bundles'}")
    export(checked(load([*one, "bits=[32,4]", "finetune_steps=1", "onnx=true"], "export")))
    table = read_rows(folder / "export.csv", ["bytes"])
    assert [row["metric"] for row in table] == ["lesion_cpm"] * 2
    made = {}
    for name, width, more in (("torch", 32, {}), ("onnx", 32, {"backend": "onnx"}), ("4", 4, {})):
        place = tmp_path / "bundles" / f"{width}_bits" / "hospital_0"
        keys = {"bundle": place, "input": scans["hospital_0"], "output": tmp_path / name}
        find(exported, **keys, **more)
        made[name] = numbers(read_rows(tmp_path / name / "detections.csv", [*PLACE]))
    assert len(made["4"])
    best = [rows[rows[:, 3].argsort()[::-1][:3]] for rows in (made["torch"], made["onnx"])]
    np.testing.assert_allclose(np.sort(best[1], 0), np.sort(best[0], 0), rtol=1e-4, atol=1e-2)
    with pytest.raises(ConfigError, match="no 8-bit 3-D convolution"):
        export(checked(load([*one, "onnx=int8"], "export")))


def test_evaluate_and_report_know_lesions(exported, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(exported[0], copy, ignore=shutil.ignore_patterns("bundles"))
    summary = json.loads((copy / "summary.json").read_text())
    assert evaluate_run(copy)["clients"] == summary["clients"]
    report_runs(str(copy), tmp_path / "report", figures=False)
    assert "lesion_cpm" in (tmp_path / "report" / "comparison.csv").read_text()
    page = (tmp_path / "report" / "report.html").read_text()
    assert "lesion cpm, larger is better" in page


def test_the_detector_that_a_site_keeps_finds_what_the_simulation_found(exported, tmp_path):
    """Each site has a folder of its own scans alone."""
    folder, scans = exported
    source = scans["hospital_0"].parents[1]
    centres = json.loads((source / "centres.json").read_text())
    for scan in source.glob("subset*/*"):
        own = tmp_path / centres[scan.stem] / "LUNA16" / scan.parent.name
        own.mkdir(parents=True, exist_ok=True)
        (own / scan.name).symlink_to(scan)
    files = {}
    for name in scans:
        shutil.copy(source / "annotations.csv", tmp_path / name / "LUNA16")
        path = tmp_path / name / "site.yaml"
        path.write_text(f"site: {name}\ndata: {{path: LUNA16, reader: {{missing: skip}}}}\n")
        files[name] = SiteFile.read(path)
    # As of generated scans; own ones have augment=light by default.
    agreed, alone, _ = Agreed.of([*QUICK, "threads=1", "augment=none"], tuple(scans))
    sites = Direct({name: hospital(agreed, file, keep_bundle) for name, file in files.items()})
    server = [*agreed.overrides, *alone, "data.path=null", f"folder={tmp_path / 'server'}"]
    coordinate(described(server), sites, agreed.sites, TERMS)
    assert not same(folder, tmp_path / "server")
    for client, scan in scans.items():
        (bundle,) = (tmp_path / client / "medfed").glob(f"*/bundle/{client}")
        find(exported, client, bundle=bundle, input=scan, output=tmp_path / "out" / client)
        find(exported, client, input=scan, output=tmp_path / "whole" / client)
        kept, whole = (tmp_path / of / client / "detections.csv" for of in ("out", "whole"))
        assert kept.read_bytes() == whole.read_bytes()
        own = (bundle.parents[1] / "detections.csv").read_text().splitlines()
        every = (folder / "detections.csv").read_text().splitlines()
        assert own == [every[0], *(row for row in every if row.startswith(scan.stem))]
        assert len(own) > 6
