"""DICOM SEG: read back by highdicom, pydicom and SimpleITK, it is the mask where the scan lies."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pydicom
import pytest

from medfed.delivery.predict import masks
from medfed.standalone.errors import ConfigError, DataError
from tests.datamodules.volume_files import affine, write_series, write_volume
from tests.delivery.test_predict_geometry import BALL, centred, run, scan, threshold_bundle
from tests.sweeps import sweep

GRIDS = {
    "upright": affine((3.0, 3.0, 6.0)),
    "oblique": affine((3.0, 3.2, 6.0), angle=0.3),
    # Sagittal slices, flipped: neither rows nor slices run as the body's axes do.
    "turned": affine((3.0, 3.2, 6.0)) @ np.diag([-1, 1, -1, 1])[:, [1, 2, 0, 3]],
}
SHAPE = (17, 15, 10)
REGIONS = {"ball": [1], "core": [2], "nowhere": [3]}
LPS = np.diag([-1.0, -1, 1, 1])


@pytest.fixture(scope="module")
def three_regions(tmp_path_factory):
    """The ball, what is brighter still within it, and a region that no voxel is in."""
    source = {"kind": "volumes", "files": None, "file_channels": ["CT"], "regions": REGIONS}
    outputs = [(20.0, 0.35), (20.0, 0.75), (20.0, 99.0)]
    window = {"name": "window", "hu": [0, 200], "to": [0, 1]}  # body 0.2, ball 0.5 and 1
    folder = tmp_path_factory.mktemp("regions") / "bundle"
    more = {"labels": list(REGIONS), "input": source, "normalization": window}
    return threshold_bundle(folder, outputs, **more)


def two_greys(to_mm: np.ndarray) -> np.ndarray:
    """The body of 40 and the ball of 100, whose left half is 200."""
    brighter = scan(to_mm, SHAPE)
    place = np.stack(np.meshgrid(*map(np.arange, SHAPE), indexing="ij"), -1)
    left = place @ to_mm[0, :3] + to_mm[0, 3] < BALL[0]
    brighter[left & (brighter == 100)] = 200
    return brighter


def series(folder: Path, grid: str) -> Path:
    to_mm = centred(GRIDS[grid], SHAPE)
    write_series(folder, two_greys(to_mm), to_mm)
    return folder


@pytest.mark.parametrize("grid", GRIDS)
def test_segments_lie_where_the_masks_lie(grid, three_regions, tmp_path):
    hd = pytest.importorskip("highdicom", reason="DICOM SEG is written by highdicom")
    import nibabel as nib

    source = series(tmp_path / "in" / "p 1", grid)
    files = {name: tmp_path / "nifti" / f"p 1_{name}.nii.gz" for name in REGIONS}
    run(three_regions, tmp_path / "in", tmp_path / "nifti", format="nifti")
    assert sorted((tmp_path / "nifti").glob("*.nii.gz")) == sorted(files.values())
    run(three_regions, tmp_path / "in", tmp_path / "out", format="dicomseg", probabilities="true")
    assert (tmp_path / "out" / "p 1_probabilities.nii.gz").is_file()
    seg = hd.seg.segread(tmp_path / "out" / "p 1.dcm")
    first = pydicom.dcmread(next(source.iterdir()))
    for tag in ("PatientID", "StudyInstanceUID", "FrameOfReferenceUID"):
        assert seg[tag].value == first[tag].value
    assert seg.Modality == "SEG"
    assert seg.SeriesInstanceUID != first.SeriesInstanceUID
    assert [seg.get_segment_description(n).segment_label for n in (1, 2, 3)] == list(REGIONS)
    referenced = {uid for _, _, uid in seg.get_source_image_uids()}
    assert referenced <= {pydicom.dcmread(f).SOPInstanceUID for f in source.iterdir()}
    volume = seg.get_volume(combine_segments=False, allow_missing_positions=True)
    for n, name in enumerate(REGIONS):
        mask = nib.load(files[name])
        expected = places(np.asarray(mask.dataobj), LPS @ mask.affine)
        found = places(volume.array[..., n], volume.affine)
        assert (name == "nowhere") == (len(expected) == 0)
        np.testing.assert_allclose(found, expected, atol=1e-3)
    sizes = [volume.array[..., n].sum() for n in range(2)]
    assert sizes[0] > sizes[1] > 0  # they overlap, and both are whole


def places(mask: np.ndarray, to_mm: np.ndarray) -> np.ndarray:
    """(n, 3) mm of the voxels in a mask, sorted."""
    index = np.argwhere(mask > 0)
    mm = (index @ to_mm[:3, :3].T + to_mm[:3, 3]).round(3)
    return mm[np.lexsort(mm.T)]


def test_one_series_into_one_file(three_regions, tmp_path):
    hd = pytest.importorskip("highdicom", reason="DICOM SEG is written by highdicom")
    source = series(tmp_path / "p1", "upright")
    run(three_regions, source, tmp_path / "new" / "seg.dcm")
    assert hd.seg.segread(tmp_path / "new" / "seg.dcm").number_of_segments == 3


SETS = {
    "latin": ("ISO_IR 100", "Müller^Jörg"),
    "greek": ("ISO_IR 126", "Παππάς^Α"),
    "utf8": ("ISO_IR 192", "山田^太郎"),
    "japanese": (["", "ISO 2022 IR 87"], "Yamada^Tarou=山田^太郎"),
    "korean": (["", "ISO 2022 IR 149"], "Hong^Gildong=洪^吉洞=홍^길동"),
    "empty": ("", "Smith^J"),
    "absent": (None, "Smith^J"),
}
NAMES_OF_REGIONS = {
    "accents": ["Läsion", "病灶"],
    "backslash": ["a\\b", "a/b"],
    "long": ["x" * 70 + "A", "x" * 70 + "B"],
    "control": ["a\n\x1b[31mb\x00", "\t"],
    "caret": ["a^b=c", "-"],
}


def with_header(folder: Path, **tags) -> None:
    """Sets elements in all files of a series; what is None goes."""
    for file in folder.iterdir():
        one = pydicom.dcmread(file)
        for name, value in tags.items():
            if value is None:
                one.pop(name, None)
            else:
                one[name] = pydicom.DataElement(
                    pydicom.datadict.tag_for_keyword(name),
                    pydicom.datadict.dictionary_VR(name),
                    value,
                    validation_mode=pydicom.config.IGNORE,
                )
        with pydicom.config.disable_value_validation():
            one.save_as(file)


def all_valid(seg: pydicom.Dataset) -> None:
    """Every value is what pydicom's own rules allow."""
    for element in seg.iterall():
        values = element.value if element.VM > 1 else [element.value]
        for value in values if element.VR not in ("SQ", "OB", "OW") else ():
            text = str(value) if element.VR in ("IS", "DS") else value
            pydicom.valuerep.validate_value(element.VR, text, pydicom.config.RAISE)


@pytest.fixture(scope="module")
def one_series(tmp_path_factory):
    return series(tmp_path_factory.mktemp("series") / "s", "upright")


@sweep("kind", SETS)
def test_names_of_patients_are_kept_in_any_character_set(kind, one_series, three_regions, tmp_path):
    pytest.importorskip("highdicom", reason="DICOM SEG is written by highdicom")
    characters, name = SETS[kind]
    source = Path(shutil.copytree(one_series, tmp_path / "s"))
    with_header(source, SpecificCharacterSet=characters, PatientName=name)
    assert str(pydicom.dcmread(next(source.iterdir())).PatientName) == name
    run(three_regions, source, tmp_path / "seg.dcm")
    seg = pydicom.dcmread(tmp_path / "seg.dcm")
    assert (seg.SpecificCharacterSet, str(seg.PatientName)) == ("ISO_IR 192", name)
    all_valid(seg)


@sweep("kind", NAMES_OF_REGIONS)
def test_labels_of_segments_are_valid_and_differ(kind, one_series, tmp_path, caplog):
    pytest.importorskip("highdicom", reason="DICOM SEG is written by highdicom")
    names = NAMES_OF_REGIONS[kind]
    source = {"kind": "volumes", "files": None, "file_channels": ["CT"]}
    source["regions"] = {name: [n + 1] for n, name in enumerate(names)}
    bundle = threshold_bundle(
        tmp_path / "b", [(20.0, 0.5), (20.0, 0.7)], labels=names, input=source
    )
    run(bundle, one_series, tmp_path / "seg.dcm")
    seg = pydicom.dcmread(tmp_path / "seg.dcm")
    labels = [segment.SegmentLabel for segment in seg.SegmentSequence]
    all_valid(seg)
    assert all(isinstance(label, str) and label.isprintable() for label in labels)
    assert len({*labels}) == len(names)
    for label, name in zip(labels, names, strict=True):
        if name == label:
            continue
        kept = name.replace("\\", "/")[:58].strip()
        assert label.startswith(kept) or not kept.isprintable()
        assert f"SegmentLabel {name!r} is no valid LO of DICOM" in caplog.text or name == "a/b"


ODD = {
    "PatientID": "1" * 80,
    "PatientName": "A" * 70 + "^" + "B",
    "AccessionNumber": "12345678901234567",
    "StudyID": "a\x07b",
    "PatientBirthDate": "19.07.1960",
    "StudyTime": "noon",
    "PatientSex": "female",
    "ReferringPhysicianName": "A=B=C=D",
    "StudyDate": None,
}


def test_odd_headers_become_valid_ones_and_are_said(one_series, three_regions, tmp_path, caplog):
    pytest.importorskip("highdicom", reason="DICOM SEG is written by highdicom")
    source = Path(shutil.copytree(one_series, tmp_path / "s"))
    with_header(source, SpecificCharacterSet="ISO_IR 100", **ODD)
    run(three_regions, source, tmp_path / "seg.dcm")
    seg = pydicom.dcmread(tmp_path / "seg.dcm")
    all_valid(seg)
    for name, value in ODD.items():
        if value is not None:
            assert caplog.text.count(f"{name} {value!r} is no valid ") == 1
    empty = ("PatientBirthDate", "StudyTime", "PatientSex", "StudyDate")
    assert [seg[name].value or "" for name in empty] == [""] * 4
    assert seg.PatientID == "1" * 64


def test_of_the_header_only_what_the_standard_needs_goes_on(one_series, three_regions, tmp_path):
    """A name in any other element, private ones among them, is in no byte of the mask."""
    pytest.importorskip("highdicom", reason="DICOM SEG is written by highdicom")
    source = Path(shutil.copytree(one_series, tmp_path / "s"))
    secret, texts = "Sekret", ("LO", "SH", "PN", "LT", "ST", "UT", "UC")
    for file in source.iterdir():
        one = pydicom.dcmread(file)
        for tag, (vr, vm, *_, keyword) in pydicom.datadict.DicomDictionary.items():
            known = (*masks._PATIENT, *masks._REFERENCE)
            if vr in texts and vm[0] == "1" and tag > 0x00080008 and keyword not in known:
                one[keyword] = pydicom.DataElement(tag, vr, secret)
        block = one.private_block(0x0011, "MAKER", create=True)
        block.add_new(1, "LO", secret)
        one.save_as(file)
        assert secret.encode() in file.read_bytes()
    run(three_regions, source, tmp_path / "seg.dcm")
    run(three_regions, source, tmp_path / "mask.nii")
    written = [file for file in tmp_path.iterdir() if file.is_file()]
    assert len(written) == 4
    for file in written:
        assert secret.encode() not in file.read_bytes()


def test_a_lost_row_is_made_again_and_the_object_stays(three_regions, tmp_path):
    pytest.importorskip("highdicom", reason="DICOM SEG is written by highdicom")
    series(tmp_path / "in" / "p1", "upright")
    output, seg = tmp_path / "out", tmp_path / "out" / "p1.dcm"
    run(three_regions, tmp_path / "in", output, format="dicomseg")
    rows, before = (output / "summary.csv").read_bytes(), seg.read_bytes()
    whole = shutil.copy(seg, tmp_path / "whole.dcm")
    (output / "summary.csv").unlink()
    run(three_regions, tmp_path / "in", output, format="dicomseg")
    assert (seg.read_bytes(), (output / "summary.csv").read_bytes()) == (before, rows)
    for length in (len(before) // 2, len(before) - 20, 400):
        seg.write_bytes(before[:length])
        run(three_regions, tmp_path / "in", output, format="dicomseg")
        assert len(pydicom.dcmread(seg).pixel_array) == len(pydicom.dcmread(whole).pixel_array)
        assert without_bytes((output / "summary.csv").read_bytes()) == without_bytes(rows)
    # Another object in its place is not touched.
    other = series(tmp_path / "other" / "p1", "oblique")
    run(three_regions, other, tmp_path / "other.dcm")
    shutil.copy(tmp_path / "other.dcm", seg)
    (output / "summary.csv").unlink()
    with pytest.raises(ConfigError, match="is there already"):
        run(three_regions, tmp_path / "in", output, format="dicomseg")
    assert seg.read_bytes() == (tmp_path / "other.dcm").read_bytes()


def without_bytes(rows: bytes) -> bytes:
    """Rows without the bytes of each object, whose random UIDs have 42 or 44 characters."""
    return re.sub(rb"\.dcm \d+", b".dcm", rows)


def test_the_application_of_monai_deploy(three_regions, tmp_path):
    """The one that docs/export.md shows, where the SDK is installed."""
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
    (code,) = re.findall(r'```python title="app.py"\n(.*?)```', page, re.DOTALL)
    compile(code, "app.py", "exec")
    hd = pytest.importorskip("highdicom", reason="DICOM SEG is written by highdicom")
    pytest.importorskip("monai.deploy", reason="the MONAI Deploy App SDK is not installed")
    (tmp_path / "app.py").write_text(code)
    series(tmp_path / "in" / "p1", "oblique")
    folders = ["-i", tmp_path / "in", "-o", tmp_path / "out", "-m", three_regions]
    (tmp_path / "out").mkdir()
    command = [sys.executable, tmp_path / "app.py", *folders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    run(three_regions, tmp_path / "in", tmp_path / "own", format="dicomseg")
    theirs, own = (
        hd.seg.segread(tmp_path / folder / "p1.dcm") for folder in ("out/segments", "own")
    )
    np.testing.assert_array_equal(theirs.pixel_array, own.pixel_array)


def test_what_is_no_series_is_refused(three_regions, tmp_path, monkeypatch, capsys):
    to_mm = centred(GRIDS["upright"], SHAPE)
    write_volume(tmp_path / "in" / "a.nii.gz", scan(to_mm, SHAPE), to_mm)
    source = series(tmp_path / "in" / "p1", "upright")
    monkeypatch.setitem(sys.modules, "highdicom", None)
    for output in ({"output": "seg.dcm"}, {"output": "out", "format": "dicomseg"}):
        keys = {**output, "target": tmp_path / output["output"]}
        with pytest.raises(ConfigError, match=r"needs the package highdicom: pip"):
            run(three_regions, source, keys["target"], format=output.get("format", "null"))
    monkeypatch.undo()
    pytest.importorskip("highdicom", reason="DICOM SEG is written by highdicom")
    with pytest.raises(
        ConfigError, match=r"a\.nii\.gz is no DICOM series, which a DICOM SEG needs"
    ):
        run(three_regions, tmp_path / "in" / "a.nii.gz", tmp_path / "seg.dcm")
    with pytest.raises(ConfigError, match=r"must be a folder, or a file of \.dcm with format="):
        run(three_regions, source, tmp_path / "mask.nii.gz", format="dicomseg")
    with pytest.raises(DataError, match="1 of 2 scans could not be predicted"):
        run(three_regions, tmp_path / "in", tmp_path / "out", format="dicomseg")
    assert "a.nii.gz is no DICOM series" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "out").glob("*.dcm")] == ["p1.dcm"]
