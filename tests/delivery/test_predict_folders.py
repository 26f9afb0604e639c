"""Folders of scans and arrays: one result each, a summary, and where an interrupted one goes on."""

import csv
import json
import os
import shutil
from pathlib import Path

import nibabel as nib
import numpy as np
import pydicom
import pytest
from PIL import Image

from medfed.delivery.predict import cases
from medfed.standalone import scans
from medfed.standalone.errors import ConfigError, DataError, MedfedError
from tests.datamodules.volume_files import affine, write_series, write_volume
from tests.delivery.test_predict_geometry import centred, run, scan, threshold_bundle
from tests.sweeps import sweep

TO_MM = centred(affine((3.0, 3.0, 6.0)), (17, 15, 10))


@pytest.fixture(scope="module")
def finds_ball(tmp_path_factory):
    return threshold_bundle(tmp_path_factory.mktemp("ball") / "bundle", [(20.0, 0.5)])


def ball(gain: float = 1.0) -> np.ndarray:
    return (gain * scan(TO_MM, (17, 15, 10))).astype(np.float32)


def nested(folder: Path, names: list[str]) -> Path:
    for n, name in enumerate(names):
        write_volume(folder / name, ball(1 + n), TO_MM)
    return folder


def summary(folder: Path) -> dict[str, dict[str, str]]:
    with (folder / "summary.csv").open(newline="") as file:
        return {row["case"]: row for row in csv.DictReader(file)}


def test_twenty_cases_of_one_file_name_get_twenty_masks(finds_ball, tmp_path, capsys, caplog):
    names = [f"ward {n % 3}/p{n:02d} ü/scan.nii.gz" for n in range(20)]
    source = nested(tmp_path / "in", names)
    (source / "ward 0" / "notes.txt").write_text("")
    (source / "ward 0" / "loop").symlink_to(source)
    output = source / "results" / "of today"  # with its parents, and within the input
    run(finds_ball, source, output)
    found = sorted(p.relative_to(output).as_posix() for p in output.rglob("*.nii.gz"))
    assert found == sorted(names)
    rows = summary(output)
    assert sorted(rows) == [name.removesuffix(".nii.gz") for name in found]
    for name in found:
        mask, image = nib.load(output / name), nib.load(source / name)
        np.testing.assert_array_equal(mask.affine, image.affine)
        row = rows[name.removesuffix(".nii.gz")]
        voxels = int(np.asarray(mask.dataobj).sum())
        assert voxels > 20
        assert float(row["ball_ml"]) == pytest.approx(voxels * 3 * 3 * 6 / 1000)
        assert (row["input"], row["output"]) == (str((source / name).resolve()), name)
        assert 0.5 < float(row["ball_highest_probability"]) <= 1
        assert row["error"] == ""
    assert "No volumes, and left out, below" in caplog.text
    assert "notes.txt" in caplog.text
    run(finds_ball, source, tmp_path / "again", threshold=0.6)  # the masks are no scans
    assert len(summary(tmp_path / "again")) == 20
    assert "of today is left out: it holds predictions" in caplog.text
    assert "predicted 20/20" in capsys.readouterr().err
    assert [p.name for p in output.iterdir() if p.name.startswith(".")] == []


def test_a_series_among_files(finds_ball, tmp_path):
    write_series(tmp_path / "in" / "a" / "series", ball().astype(np.int16), TO_MM)
    nested(tmp_path / "in", ["a/scan.mha", "b.nrrd"])
    run(finds_ball, tmp_path / "in", tmp_path / "out", format="nifti")
    assert sorted(summary(tmp_path / "out")) == ["a/scan", "a/series", "b"]
    assert len(list((tmp_path / "out").rglob("*.nii.gz"))) == 3


def test_an_interrupted_prediction_goes_on(finds_ball, tmp_path, monkeypatch, capsys):
    source = nested(tmp_path / "in", [f"{n}.nii.gz" for n in "abcde"])
    whole, output = scans.save_like, tmp_path / "out"
    written: list[str] = []

    def killed(*given):
        whole(*given)
        written.append(given[3].name)
        if len(written) == 4:
            raise KeyboardInterrupt  # b's files are written, but not yet at their places

    monkeypatch.setattr(scans, "save_like", killed)
    with pytest.raises(KeyboardInterrupt, match=r"^1 of 5 are done and whole; the same command"):
        run(finds_ball, source, output, probabilities="true")
    assert written[2:] == ["b.nii.gz", "b_probabilities.nii.gz"]
    assert {case: row["error"] for case, row in summary(output).items()} == {
        "a": "",
        "b": "interrupted",
    }
    assert not [*output.glob("b*"), *output.glob(".*")]
    with (output / "summary.csv").open("a") as file:
        file.write("c,/torn")  # as a process that is killed while it writes a row
    before = {p.name: p.stat().st_mtime_ns for p in output.glob("a*")}
    monkeypatch.setattr(scans, "save_like", whole)
    run(finds_ball, source, output, probabilities="true")
    assert "1 of 5 scans were predicted before; they stay." in capsys.readouterr().out
    assert list(summary(output)) == list("abcde")
    assert {p.name: p.stat().st_mtime_ns for p in output.glob("a*")} == before
    assert len(list(output.glob("*.nii.gz"))) == 10
    assert not [p for p in output.iterdir() if p.name.startswith(".")]
    # A scan that has changed is no longer the one that was predicted; another mask is not replaced.
    write_volume(source / "a.nii.gz", ball()[::-1], TO_MM)
    with pytest.raises(ConfigError, match=r"a\.nii\.gz is there already; set overwrite=true"):
        run(finds_ball, source, output, probabilities="true")
    assert "is there already" in summary(output)["a"]["error"]
    run(finds_ball, source, output, probabilities="true", overwrite="true")
    assert summary(output)["a"]["error"] == ""


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder but for the record, which holds the time."""
    files = (p for p in folder.rglob("*") if p.is_file() and p.name != "prediction.json")
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def two_regions(tmp_path_factory):
    """Regions that lie in masks of their own."""
    regions = {"ball": [1], "body": [2]}
    source = {"kind": "volumes", "files": None, "file_channels": ["CT"], "regions": regions}
    folder = tmp_path_factory.mktemp("two") / "bundle"
    return threshold_bundle(folder, [(20.0, 0.5), (20.0, -0.5)], labels=[*regions], input=source)


def test_a_kill_at_any_file_is_mended_by_the_same_command(two_regions, tmp_path, monkeypatch):
    source, output = nested(tmp_path / "in", ["a.nii.gz", "b.nii.gz"]), tmp_path / "out"
    left: list[Path] = []
    move, add = Path.replace, cases.OutputFolder._add

    def seen(what):
        def then(*given):
            left.append(tmp_path / "killed" / str(len(left)))
            shutil.copytree(output, left[-1])
            return what(*given)

        return then

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", seen(move))
        patch.setattr(cases.OutputFolder, "_add", seen(add))
        run(two_regions, source, output, probabilities="true")
    whole, found = contents(output), set()
    assert len(whole) == 7
    for folder in left:
        for name in (".lock", ".lock.pid"):  # the system frees a killed process's lock
            (folder / name).unlink(missing_ok=True)
        before = {p: p.stat().st_mtime_ns for p in folder.glob("*.nii.gz")}
        found.add(len(before))
        run(two_regions, source, folder, probabilities="true")
        now = contents(folder)
        assert {name: now[name] for name in whole} == whole
        assert {p: p.stat().st_mtime_ns for p in before} == before
        # Only a torn file of this process, which the next process removes, may be there as well.
        assert all(".partial-" in name for name in now.keys() - whole.keys())
    assert found == {*range(7)}


def rows_without_b(summary: Path) -> None:
    lines = summary.read_text().splitlines(keepends=True)
    summary.write_text("".join(line for line in lines if not line.startswith("b,")))


DAMAGES = {
    "a mask is removed": lambda out: (out / "b_body.nii.gz").unlink(),
    "a map is removed": lambda out: (out / "b_probabilities.nii.gz").unlink(),
    "a picture is removed": lambda out: (out / "b.png").unlink(),
    "a mask is half": lambda out: halved(out / "b_ball.nii.gz"),
    "a mask is empty": lambda out: (out / "b_ball.nii.gz").write_bytes(b""),
    "a row is removed": lambda out: rows_without_b(out / "summary.csv"),
    "rows are torn": lambda out: halved(out / "summary.csv"),
    "all rows are removed": lambda out: (out / "summary.csv").unlink(),
    "the table is empty": lambda out: (out / "summary.csv").write_bytes(b""),
    "a row is no longer one": lambda out: (out / "summary.csv").write_text(
        (out / "summary.csv").read_text().replace(".nii.gz ", ".nii.gz x")
    ),
    "a mask and its row": lambda out: [
        (out / "b_body.nii.gz").unlink(),
        rows_without_b(out / "summary.csv"),
    ],
}


def halved(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.fixture(scope="module")
def predicted(two_regions, tmp_path_factory):
    folder = tmp_path_factory.mktemp("predicted")
    nested(folder / "in", ["a.nii.gz", "b.nii.gz"])
    run(two_regions, folder / "in", folder / "out", probabilities="true", picture="true")
    return folder


@sweep("damage", DAMAGES)
def test_what_is_missing_is_made_again(damage, two_regions, predicted, tmp_path):
    output = Path(shutil.copytree(predicted / "out", tmp_path / "out"))
    whole, before = contents(output), {p: p.stat().st_mtime_ns for p in output.glob("*.nii.gz")}
    (output / "notes.txt").write_text("theirs")
    DAMAGES[damage](output)
    hurt = {p for p in before if not p.exists() or p.stat().st_mtime_ns != before[p]}
    run(two_regions, predicted / "in", output, probabilities="true", picture="true")
    assert contents(output) == {**whole, "notes.txt": b"theirs"}
    assert {p for p in before if p.stat().st_mtime_ns != before[p]} == hurt


def test_a_mask_that_somebody_changed_stays(two_regions, predicted, tmp_path, caplog):
    output = Path(shutil.copytree(predicted / "out", tmp_path / "out"))
    (output / "b_ball.nii.gz").write_bytes(b"by hand")
    run(two_regions, predicted / "in", output, probabilities="true", picture="true")
    assert (output / "b_ball.nii.gz").read_bytes() == b"by hand"
    sentence = "b_ball.nii.gz was changed after the prediction"
    assert sentence in summary(output)["b"]["warning"]
    assert f"b: {sentence}, and stays." in caplog.text
    caplog.clear()
    run(two_regions, predicted / "in", output, probabilities="true", picture="true")
    assert not caplog.text  # it is done
    # Without the row, nobody knows whose the file is.
    rows_without_b(output / "summary.csv")
    before = contents(output)
    with pytest.raises(ConfigError, match=r"b_ball\.nii\.gz is there already"):
        run(two_regions, predicted / "in", output, probabilities="true", picture="true")
    after = contents(output)
    assert "b_ball.nii.gz is there already" in summary(output)["b"]["error"]
    assert before.keys() == after.keys()
    assert all(before[n] == after[n] for n in before if n != "summary.csv")


def test_a_slice_that_was_replaced_by_an_older_file_is_seen(finds_ball, tmp_path):
    write_series(tmp_path / "in" / "s", ball().astype(np.int16), TO_MM)
    run(finds_ball, tmp_path / "in", tmp_path / "out")
    other = sorted((tmp_path / "in" / "s").iterdir())[1]
    state = other.stat()
    dataset = pydicom.dcmread(other)
    dataset.PixelData = bytes(len(dataset.PixelData))
    dataset.save_as(other)
    os.utime(other, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert other.stat().st_size == state.st_size
    with pytest.raises(ConfigError, match="is there already"):
        run(finds_ball, tmp_path / "in", tmp_path / "out")


def test_what_of_a_series_is_left_out_is_said(finds_ball, tmp_path, caplog):
    folder = tmp_path / "in" / "s"
    write_series(folder, ball().astype(np.int16), TO_MM)
    write_series(tmp_path / "in" / "whole", ball().astype(np.int16), TO_MM)
    slices = len([*folder.iterdir()])
    structures = pydicom.dcmread(next(folder.iterdir()))
    structures.SOPClassUID = structures.file_meta.MediaStorageSOPClassUID = (
        pydicom.uid.RTStructureSetStorage
    )
    structures.save_as(folder / "rs.dcm")
    (folder / "notes.txt").write_text("")
    (folder / ".hidden").write_text("")
    run(finds_ball, tmp_path / "in", tmp_path / "out")
    rows = summary(tmp_path / "out")
    sentence = rows["s"]["warning"]
    assert f"{slices} of {slices + 2} files are taken; left out: " in sentence
    assert "1 .dcm: RT Structure Set (rs.dcm)" in sentence
    assert "1 .txt: another kind of file (notes.txt)" in sentence
    assert sentence in caplog.text
    assert rows["whole"]["warning"] == ""


MORE = {
    "a tolerance": {"spacing_tolerance": 0.5},
    "maps": {"probabilities": "true"},
    "pictures": {"picture": "true"},
}


@pytest.mark.parametrize("more", MORE)
def test_settings_that_masks_do_not_depend_on_may_change(more, finds_ball, tmp_path, caplog):
    source = nested(tmp_path / "in", ["a.nii.gz"])
    run(finds_ball, source, tmp_path / "out")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*.nii.gz")}
    run(finds_ball, source, tmp_path / "out", **MORE[more])
    assert {p: p.stat().st_mtime_ns for p in before} == before
    ((key, value),) = MORE[more].items()
    assert caplog.text.count("holds predictions with other settings") == 1
    assert f"it goes on with {key}={value}; what is not replaced now stays." in caplog.text
    straight = tmp_path / "straight"
    run(finds_ball, source, straight, **MORE[more])
    assert contents(tmp_path / "out") == contents(straight)


def test_other_settings_are_another_prediction(finds_ball, tmp_path, caplog):
    source = nested(tmp_path / "in", ["a.nii.gz", "b.nii.gz"])
    run(finds_ball, source, tmp_path / "out")
    with pytest.raises(ConfigError, match="holds predictions of other bundles or settings"):
        run(finds_ball, source, tmp_path / "out", threshold=0.9)
    (source / "b.nii.gz").unlink()
    run(finds_ball, source, tmp_path / "out", threshold=0.9, overwrite="true")
    assert list(summary(tmp_path / "out")) == ["a"]
    assert "what is not replaced now stays, without a row" in caplog.text
    record = json.loads((tmp_path / "out" / "prediction.json").read_text())
    assert record["threshold"] == 0.9


def test_files_of_others_stay(finds_ball, tmp_path, capsys):
    source = nested(tmp_path / "in", ["a.nii.gz", "b.nii.gz"])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "b.nii.gz").write_bytes(b"theirs")
    with pytest.raises(DataError, match="1 of 2 scans could not be predicted"):
        run(finds_ball, source, tmp_path / "out")
    assert "b.nii.gz is there already; set overwrite=true" in capsys.readouterr().err
    assert (tmp_path / "out" / "b.nii.gz").read_bytes() == b"theirs"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "summary.csv").write_text("theirs")
    with pytest.raises(ConfigError, match="is there already, and no prediction's"):
        run(finds_ball, source, tmp_path / "other")
    assert (tmp_path / "other" / "summary.csv").read_text() == "theirs"


def test_what_nobody_foresaw_does_not_stop_the_others(finds_ball, tmp_path, monkeypatch, capsys):
    source = nested(tmp_path / "in", ["a.nii.gz", "b.nii.gz"])
    whole = scans.read_scan

    def read(scan, *more):
        if scan.id == "a":
            raise MemoryError("no room")
        return whole(scan, *more)

    monkeypatch.setattr(scans, "read_scan", read)
    with pytest.raises(DataError, match="1 of 2 scans could not be predicted"):
        run(finds_ball, source, tmp_path / "out")
    assert "error: a: unexpected MemoryError: no room." in capsys.readouterr().err
    assert summary(tmp_path / "out")["a"]["error"].startswith("a: unexpected MemoryError")
    assert (tmp_path / "out" / "b.nii.gz").is_file()


@pytest.mark.parametrize("key", ["input", "output"])
def test_a_variable_of_the_shell_that_is_not_set(key, finds_ball, tmp_path):
    places = {"input": tmp_path, "output": tmp_path / "out", key: "''"}
    with pytest.raises(ConfigError, match=f"^{key} names no file or folder; write {key}=PATH"):
        run(finds_ball, places["input"], places["output"])


PLACES = {
    "in the bundle": ("{bundle}/masks", r"lies in bundle=.*; choose another"),
    "the input": ("{input}", "is the input; choose another one"),
    "below a file": ("{input}/a.nii.gz/out", "is a file and no folder"),
    "a file": ("{input}/../file", "file is a file and no folder"),
    "one file of several": ("mask.nii.gz", "holds several scans, so output=.* must be a folder"),
}


@pytest.mark.parametrize("place", PLACES)
def test_outputs_that_are_in_the_way(place, finds_ball, tmp_path):
    source = nested(tmp_path / "in", ["a.nii.gz", "b.nii.gz"])
    (tmp_path / "file").write_text("")
    before = sorted([*tmp_path.rglob("*"), *finds_ball.rglob("*")])
    output, sentence = PLACES[place]
    with pytest.raises(MedfedError, match=sentence):
        run(finds_ball, source, Path(output.format(bundle=finds_ball, input=source)))
    assert sorted([*tmp_path.rglob("*"), *finds_ball.rglob("*")]) == before


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a place where nobody writes")
def test_a_folder_that_cannot_be_written(finds_ball, tmp_path):
    source = nested(tmp_path / "in", ["a.nii.gz"])
    with pytest.raises(DataError, match=r"^Cannot write /proc/out \(.*choose another output\.$"):
        run(finds_ball, source, Path("/proc/out"))


def test_arrays_are_predicted_as_single_images(hospital, tmp_path):
    made = hospital("digits")
    samples, images = made.data.data.samples, made.data.data.images
    index = [samples.rows[p][0] for p in made.data.plans[made.client].patients["test"]][:7]
    (tmp_path / "in" / "deep").mkdir(parents=True)
    for n, sample in enumerate(index):
        Image.fromarray(images[sample, 0]).save(tmp_path / "in" / f"{n}.png")
    arrays = {"images": images[index, 0], "test_images": images[index[:3], 0]}
    np.savez_compressed(tmp_path / "in" / "deep" / "set.npz", **arrays)
    made.predict(input=tmp_path / "in", output=tmp_path / "new" / "out", batch_size=2)
    with (tmp_path / "new" / "out" / "predictions.csv").open(newline="") as file:
        rows = {row.pop("image"): row for row in csv.DictReader(file)}
    assert len(rows) == 7 + 7 + 3
    for n in range(7):
        both = [
            [float(v) for v in rows[name].values()]
            for name in (f"{n}.png", f"deep/set.npz/images/{n}")
        ]
        np.testing.assert_allclose(both[0], both[1], atol=1e-6)


ARRAYS = {
    "names": ({"x": np.zeros((2, 8, 8), np.uint8)}, "has no array of the name images"),
    "size": (
        {"images": np.zeros((2, 9, 8), np.uint8)},
        r"images is uint8 \(1, 9, 8\), but the model",
    ),
    "type": ({"images": np.zeros((2, 8, 8))}, r"must be uint8"),
    "range": ({"images": np.full((2, 8, 8), 200, np.uint8)}, "white was 16 in training"),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_that_cannot_be_used(kind, hospital, tmp_path):
    arrays, sentence = ARRAYS[kind]
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=sentence):
        hospital("digits").predict(input=tmp_path / "a.npz", output=tmp_path / "out.csv")
    (tmp_path / "torn.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:-30])
    with pytest.raises(DataError, match=r"is no whole \.npz file"):
        hospital("digits").predict(input=tmp_path / "torn.npz", output=tmp_path / "out.csv")
    assert not (tmp_path / "out.csv").exists()


def test_contrasts_of_several_scans_in_one_folder(tmp_path, caplog):
    """As nnU-Net has them; the same folder may also hold other files."""
    channels = ["T1", "T2"]
    source = {
        "kind": "volumes",
        "file_channels": channels,
        "files": {c: [f"*_{n:04d}.nii.gz"] for n, c in enumerate(channels)},
        "regions": {"ball": [1]},
    }
    facts = {"channels": channels, "present": channels, "input": source}
    bundle = threshold_bundle(tmp_path / "b", [(20.0, 0.5)], inputs=2, seen=1, **facts)
    gains = {"case_1": 1.0, "case_10": 2.0, "case_2": 3.0}
    for name, gain in gains.items():
        for place in (tmp_path / "flat" / f"{name}", tmp_path / "cases" / name / name):
            write_volume(place.with_name(f"{place.name}_0000.nii.gz"), ball(), TO_MM)
            write_volume(place.with_name(f"{place.name}_0001.nii.gz"), ball(gain), TO_MM)
    write_volume(tmp_path / "flat" / "case_3_0001.nii.gz", ball(), TO_MM)
    with pytest.raises(DataError, match=r"^1 of 4 scans could not be predicted"):
        run(bundle, tmp_path / "flat", tmp_path / "out")
    rows, apart = summary(tmp_path / "out"), tmp_path / "apart"
    assert "case_3 lacks T1 (*_0000.nii.gz); add the file" in rows.pop("case_3")["error"]
    run(bundle, tmp_path / "cases", apart)
    assert list(rows) == list(summary(apart)) == list(gains)
    for name in gains:
        mask, same = (
            nib.load(tmp_path / "out" / f"{name}.nii.gz"),
            nib.load(apart / f"{name}.nii.gz"),
        )
        np.testing.assert_array_equal(np.asarray(mask.dataobj), np.asarray(same.dataobj))
        assert np.asarray(mask.dataobj).any()


def test_the_only_contrast_of_a_case_names_no_mask(tmp_path):
    bundle = threshold_bundle(tmp_path / "b", [(20.0, 0.5)])
    for name in ("case_1", "case_2"):
        write_volume(tmp_path / "imagesTs" / f"{name}_0000.nii.gz", ball(), TO_MM)
    run(bundle, tmp_path / "imagesTs", tmp_path / "out")
    assert {*summary(tmp_path / "out")} == {"case_1", "case_2"}
    assert (tmp_path / "out" / "case_2.nii.gz").is_file()
