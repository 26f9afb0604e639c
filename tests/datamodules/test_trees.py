"""Volumes in folders of folders: every image beside its mask, hospital and patient, by names."""

from __future__ import annotations

import re
import tempfile
from itertools import product
from pathlib import Path

import nibabel
import numpy as np
import pytest
from hypothesis import assume, event, example, given, settings
from hypothesis import strategies as st

from medfed.commands.init import guessed
from medfed.datamodules.readers.datalist import DatalistReader
from medfed.datamodules.readers.trees import list_of
from medfed.standalone.errors import DataError

PLACES = ("Basel", "Bern", "site_3")
# By layout: files of a case at a hospital, as templates, the contrasts, and the patient.
LAYOUTS = {
    "cases": (["{h}/{c}/t1.nii.gz", "{h}/{c}/adc.nii.gz", "{h}/{c}/seg.nii.gz"], "adc t1", "{c}"),
    "prefixes": (["{h}/{c}_T1.nii.gz", "{h}/{c}_mask.nii.gz"], "T1", None),
    "two folders": (["{h}/images/{c}.nii", "{h}/labels/{c}.nii"], "image", None),
    "capitals": (["{h}/Images/Case {c}.nii", "{h}/Masks/Case {c}.nii"], "image", None),
    "deeper": (["data/{h}/{c}/scan/ct.mha", "data/{h}/{c}/gt.mha"], "ct", "{c}"),
    "visits": (
        [f"{{h}}/{{c}}/v{v}/{file}.nii.gz" for v in (1, 2) for file in ("t1", "seg")],
        "t1",
        "{c}",
    ),
}
CASES = [f"{place[:3]}{number}" for place in PLACES for number in range(8, 12)]


def touch(folder, files):
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()


def places_of(case):
    return next(place for place in PLACES if place.startswith(case[:3]))


@pytest.mark.parametrize(("files", "contrasts", "patient"), LAYOUTS.values(), ids=LAYOUTS)
def test_hospitals_are_folders(tmp_path, files, contrasts, patient):
    touch(tmp_path, [f.format(h=places_of(c), c=c) for c in CASES for f in files])
    index = list_of(tmp_path)
    assert [*index["modality"].values()] == contrasts.split()
    count = sum("seg" in f or "mask" in f.lower() or "gt" in f or "labels" in f for f in files)
    assert len(index["training"]) == len(CASES) * count
    for entry in index["training"]:
        (case,) = (c for c in CASES if c in entry["label"].replace("/", "_").replace(" ", "_"))
        assert all(case in image for image in entry["image"])
        assert entry["centre"] == places_of(case)
        assert entry.get("patient") == (patient and patient.format(c=case))
        if "/v" in entry["label"]:
            visit = entry["label"].split("/")[2]
            assert all(visit in image for image in entry["image"])


def test_the_order_of_numbers_counts(tmp_path):
    cases = [f"{p}/{v}" for p in "12" for v in "12"]
    touch(tmp_path, [f"{case}/{file}.nii" for case in cases for file in ("t1", "seg")])
    for entry in list_of(tmp_path)["training"]:
        assert entry["image"] == [entry["label"].replace("seg", "t1")]


def test_numbers_that_repeat_at_hospitals_are_other_patients(tmp_path):
    files = [f"{h}/{n}/{f}.nii" for h in PLACES for n in range(4) for f in ("t1", "seg")]
    touch(tmp_path, files)
    patients = [entry["patient"] for entry in list_of(tmp_path)["training"]]
    assert patients == [f"{h}_{n}" for h in PLACES for n in range(4)]


def test_folders_of_patients_are_no_hospitals(tmp_path):
    people = [f"P{n:03d}" for n in range(6)]
    touch(tmp_path, [f"{p}/v{v}/{f}.nii" for p in people for v in "123" for f in ("t1", "seg")])
    entries = list_of(tmp_path)["training"]
    assert all("centre" not in entry for entry in entries)
    assert {entry["patient"] for entry in entries} == {*people}
    # Only the owner knows better.
    chosen = list_of(tmp_path, "folder")["training"]
    assert {entry["folder"] for entry in chosen} == {*people}
    touch(tmp_path / "named", [f"Basel/p{n}_{f}.nii" for n in range(3) for f in ("t1", "seg")])
    touch(tmp_path / "named", [f"Bern/p{n}_{f}.nii" for n in range(3) for f in ("t1", "seg")])
    named = tmp_path / "named"
    assert all("patient" in e and "centre" not in e for e in list_of(named, None)["training"])


def test_folders_of_splits_are_splits(tmp_path):
    splits = {"Train": "training", "valid": "validation", "testing": "test"}
    files = [f"{s}/Basel/{s}{n}/{f}.nii" for s in splits for n in "123" for f in ("t1", "seg")]
    touch(tmp_path, [*files, *(f.replace("Basel", "Bern") for f in files)])
    index = list_of(tmp_path)
    for folder, split in splits.items():
        assert [entry["label"].split("/")[0] for entry in index[split]] == [folder] * 6
        assert {entry["centre"] for entry in index[split]} == {"Basel", "Bern"}


@pytest.mark.parametrize("sessions", [("",), ("ses-01", "ses-02")], ids=["one", "sessions"])
def test_bids(tmp_path, sessions):
    people = [f"sub-{number:02d}" for number in range(6)]
    for person in people:
        for session in sessions:
            place = f"{person}/{session}/anat".replace("//", "/")
            name = "_".join(filter(None, (person, session)))
            scans = [f"{place}/{name}_{kind}.nii.gz" for kind in ("T1w", "FLAIR")]
            mask = f"derivatives/manual/{place}/{name}_label-lesion_mask.nii.gz"
            touch(tmp_path, [*scans, mask])
    rows = [f"{p}\t50\t{PLACES[n % 2]}\n" for n, p in enumerate(people)]
    (tmp_path / "participants.tsv").write_text("participant_id\tage\tsite\n" + "".join(rows))
    index = list_of(tmp_path)
    assert [*index["modality"].values()] == ["FLAIR", "T1w"]
    assert len(index["training"]) == len(people) * len(sessions)
    for entry in index["training"]:
        (person,) = (p for p in people if p in entry["label"])
        assert all(i.startswith(person) and i.split("/")[-2] == "anat" for i in entry["image"])
        session = next((s for s in sessions if s and s in entry["label"]), "")
        assert all(session in image for image in entry["image"])
        assert (entry["patient"], entry["centre"]) == (person, PLACES[people.index(person) % 2])


NAMELESS = {
    "no mask": (["a/1.nii", "a/2.nii"], "no name of a file has a word for a mask"),
    "no image": (["a/1_seg.nii", "a/2_seg.nii"], "each name of a file has"),
    "two masks": (["a/1_t1.nii", "a/seg.nii", "a/mask.nii", "b/1_t1.nii", "b/seg.nii"], "fits two"),
    "a contrast twice": (["a/t1.nii", "a/t1.mha", "a/seg.nii", "b/t1.nii", "b/seg.nii"], "alike"),
    "visits like contrasts": (
        [f"{p}/pre_seg.nii" for p in "ab"]
        + [f"{p}/{v}_t1_pre.nii" for p in "ab" for v in ("pre", "post")],
        "fits .*, but has post where .* has pre",
    ),
    "raters": ([f"{p}/{n}.nii" for p in "abc" for n in ("t1", "mask_1", "mask_2")], "do not tell"),
}


@pytest.mark.parametrize(("files", "why"), NAMELESS.values(), ids=NAMELESS)
def test_names_that_do_not_tell(tmp_path, files, why):
    touch(tmp_path, files)
    with pytest.raises(DataError, match=f"{why}.*list the pairs in a file"):
        list_of(tmp_path)
    with pytest.raises(DataError, match=why):
        DatalistReader(tmp_path, regions={"tumour": [1]})
    touch(tmp_path / "more", [f"hospital/{file}" for file in files])
    assert re.search(why, str(guessed(tmp_path / "more", {}).refused))


def test_pictures_are_no_volumes(tmp_path):
    touch(tmp_path, ["a/t1.png", "a/seg.png"])
    assert list_of(tmp_path) is None


CASE = [{"n": n, "h": PLACES[n % 3], "batch": n // 6, "v": v} for n in range(12) for v in (1, 2)]
# Layouts of public releases: images and mask of a case, its contrasts, patient and hospital.
RELEASES = {
    "ISLES 2022": (
        [
            "sub-{n}/ses-{v}/dwi/sub-{n}_ses-{v}_dwi.nii.gz",
            "sub-{n}/ses-{v}/dwi/sub-{n}_ses-{v}_adc.nii.gz",
        ],
        "derivatives/sub-{n}/ses-{v}/sub-{n}_ses-{v}_msk.nii.gz",
        "adc dwi",
        "sub-{n}",
        None,
    ),
    "ATLAS 2": (
        ["Training/R00{batch}/sub-{n}/ses-{v}/anat/sub-{n}_ses-{v}_space-MNI_T1w.nii.gz"],
        "Training/R00{batch}/sub-{n}/ses-{v}/anat/sub-{n}_ses-{v}_space-MNI_desc-T1lesion_mask.nii.gz",
        "T1w",
        "sub-{n}",
        None,
    ),
    "VerSe": (
        ["dataset-0{batch}/rawdata/sub-{n}/sub-{n}_dir-{v}_ct.nii.gz"],
        "dataset-0{batch}/derivatives/sub-{n}/sub-{n}_dir-{v}_seg-vert_msk.nii.gz",
        "ct",
        "sub-{n}",
        None,
    ),
    "MSLesSeg": (
        [f"train/P{{n}}/T{{v}}/P{{n}}_T{{v}}_{c}.nii.gz" for c in ("FLAIR", "T1", "T2")],
        "train/P{n}/T{v}/P{n}_T{v}_MASK.nii.gz",
        "FLAIR T1 T2",
        "P{n}",
        None,
    ),
    "WMH": (
        [f"{{h}}/{{n}}/{place}/{c}.nii.gz" for place in ("orig", "pre") for c in ("FLAIR", "T1")],
        "{h}/{n}/wmh.nii.gz",
        "orig_FLAIR orig_T1 pre_FLAIR pre_T1",
        "{n}",
        "{h}",
    ),
    "ACDC": (
        ["P{n:02}/P{n:02}_frame{v}{n}.nii.gz"],
        "P{n:02}/P{n:02}_frame{v}{n}_gt.nii.gz",
        "image",
        "P{n:02}",
        None,
    ),
    "BTCV": (
        ["Training/img/img{n:04}.nii.gz"],
        "Training/label/label{n:04}.nii.gz",
        "img",
        None,
        None,
    ),
    "M&Ms": (
        ["Training/Labeled/A{n}/A{n}_sa.nii.gz"],
        "Training/Labeled/A{n}/A{n}_sa_gt.nii.gz",
        "image",
        "A{n}",
        None,
    ),
    "visits above": (["visit{v}/P{n}/t1.nii"], "visit{v}/P{n}/seg.nii", "t1", "P{n}", None),
    "visits of hospitals": (
        ["{h}/week-{v}/P{n}/t1.nii"],
        "{h}/week-{v}/P{n}/seg.nii",
        "t1",
        "P{n}",
        "{h}",
    ),
    "visits of files": (["fu{v}/P{n}_t1.nii"], "fu{v}/P{n}_seg.nii", "t1", "p{n}", None),
    "numbers that repeat": (["scans/{n}/{n}_{v}.nii"], "masks/{n}_{v}.nii", "image", None, None),
    "masks of brains": (["{h}/{n}/t1.nii"], "{h}/{n}/seg.nii", "t1", "{n}", "{h}"),
}


@pytest.mark.parametrize(
    ("images", "mask", "contrasts", "patient", "place"), RELEASES.values(), ids=RELEASES
)
def test_published_layouts(tmp_path, images, mask, contrasts, patient, place):
    wanted = {
        mask.format(**case): (
            {image.format(**case) for image in images},
            patient and patient.format(**case),
            place and place.format(**case),
        )
        for case in CASE
    }
    touch(tmp_path, [*wanted, *(image for of, *_ in wanted.values() for image in of)])
    touch(tmp_path, [str(Path(label).parent / "brain_mask.nii.gz") for label in wanted])
    index = list_of(tmp_path)
    assert [*index["modality"].values()] == contrasts.split()
    for entry in index["training"]:
        facts = {*entry["image"]}, entry.get("patient"), entry.get("centre")
        assert facts == wanted.pop(entry["label"])
    assert not wanted


def test_an_image_without_a_mask_is_no_contrast_of_another(tmp_path):
    files = [f"Batch 1/{what}-{n}.nii" for n in range(1, 8) for what in ("volume", "segmentation")]
    touch(tmp_path, [file for file in files if file != "Batch 1/segmentation-4.nii"])
    entries = list_of(tmp_path)["training"]
    assert len(entries) == 6
    assert all(e["image"] == [e["label"].replace("segmentation", "volume")] for e in entries)


def test_folders_of_many_scans_are_asked_about(tmp_path, caplog):
    for n in range(12):
        volume = np.zeros((8, 8, 4), np.uint8)
        volume[2:4, 2:4, 1:3] = 1
        for kind, numbers in (("volume", volume * 7.0), ("segmentation", volume)):
            file = tmp_path / f"Batch {n // 6}/{kind}-{n}.nii"
            file.parent.mkdir(exist_ok=True)
            nibabel.save(nibabel.Nifti1Image(numbers, np.eye(4)), file)
    question = guessed(tmp_path, {}).asks["data.reader.patient"]
    assert question.best is None
    assert "Batch 0 6, Batch 1 6" in question.text
    assert "Batch 0 6" in guessed(tmp_path, {}).asks["data.reader.centre"].text
    assert "data.reader.patient=null" in caplog.text
    counts = {
        p: len(DatalistReader(tmp_path, None, {"a": [1]}, p).patients()) for p in ("patient", None)
    }
    assert counts == {"patient": 2, None: 12}


def test_visits_of_a_hospital_are_one_patients(tmp_path):
    for place in PLACES[:2]:
        for n in range(12):
            volume = np.zeros((8, 8, 4), np.uint8)
            volume[2:4, 2:4, 1:3] = 1
            for kind, numbers in (("t1", volume * 7.0), ("seg", volume)):
                file = tmp_path / place / f"P{n // 2}_v{n % 2}_{kind}.nii"
                file.parent.mkdir(exist_ok=True)
                nibabel.save(nibabel.Nifti1Image(numbers, np.eye(4)), file)
    asked = guessed(tmp_path, {}).asks["data.reader.patient_pattern"]
    reader = DatalistReader(tmp_path, regions={"a": [1]}, patient_pattern=asked.best)
    people = {f"{place}_P{n}" for place in PLACES[:2] for n in range(6)}
    assert {patient.id for patient in reader.patients()} == people


def test_capitals_make_no_contrast_and_other_words_are_masks(tmp_path):
    cases = [("Basel/1", "T1", "seg"), ("Basel/2", "T1", "SEG"), ("Bern/3", "t1", "Maske")]
    touch(tmp_path, [f"{place}/{file}.nii" for place, *files in cases for file in files])
    index = list_of(tmp_path)
    assert (index["modality"], len(index["training"])) == ({"0": "T1"}, 3)
    bids = [f"sub-{n}/anat/sub-{n}_T1w.nii.gz" for n in "123"]
    bids += [f"derivatives/sub-{n}/anat/sub-{n}_dseg.nii.gz" for n in "123"]
    touch(tmp_path / "bids", bids)
    assert [e["patient"] for e in list_of(tmp_path / "bids")["training"]] == [
        *("sub-1", "sub-2", "sub-3")
    ]


@pytest.mark.parametrize(
    ("folders", "are_hospitals"),
    [
        (("site1", "site2"), True),
        (("HK", "I2CVB"), True),
        (("Hospital_01", "Hospital_02"), True),
        (("P1", "P2"), False),
        (("A0S9V9", "B3E2W8"), False),
        (("sub-01", "sub-02"), False),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_numbers_in_the_names_of_hospitals(tmp_path, folders, are_hospitals):
    files = [f"{h}/{n:03d}/{file}.nii" for h in folders for n in range(3) for file in ("t1", "seg")]
    touch(tmp_path, files)
    assert all(("centre" in e) == are_hospitals for e in list_of(tmp_path)["training"])


def test_a_contrast_that_few_cases_lack_is_a_missing_one(tmp_path):
    files = [f"{h}/{h}{n}/{f}.nii" for h in PLACES for n in range(4) for f in ("t1", "t2", "seg")]
    touch(tmp_path, files)
    (tmp_path / "Bern/Bern2/t2.nii").unlink()
    touch(tmp_path, ["Bern/Bern2/localizer.nii"])
    index = list_of(tmp_path)
    assert [*index["modality"].values()] == ["t1", "t2"]
    lacks = [e["label"] for e in index["training"] if None in e["image"]]
    assert lacks == ["Bern/Bern2/seg.nii"]


def test_the_reader_takes_a_folder_of_hospitals(tmp_path):
    for place in PLACES:
        for number in range(2):
            folder = tmp_path / place / f"{place}_{number}"
            folder.mkdir(parents=True)
            volume = np.zeros((8, 8, 4), np.uint8)
            volume[2:4, 2:4, 1:3] = 1
            for name, numbers in (("t1", volume * 7.0), ("seg", volume)):
                nibabel.save(nibabel.Nifti1Image(numbers, np.eye(4)), folder / f"{name}.nii.gz")
    reader = DatalistReader(tmp_path, regions={"tumour": [1]})
    patients = reader.patients()
    assert {p.id: p.centre for p in patients} == {f"{h}_{n}": h for h in PLACES for n in range(2)}
    assert reader.channels == ("t1",)
    assert all(not p.invented for p in patients)
    guess = guessed(tmp_path, {})
    assert (guess.data, guess.keys["data.reader.regions"]) == ("datalist", {"foreground": [1]})
    assert guess.asks["data.reader.centre"].best == "centre"


VISITS = [("",), ("pre", "post"), ("v1", "v2"), ("1", "2"), ("t1", "t2"), ("ses-1", "ses-2")]
KINDS = [("t1",), ("t1", "t2"), ("t1_pre", "t1_post"), ("1", "2"), ("t1", "t1_v1"), ("", "post")]


@st.composite
def trees(draw):
    """The images of each mask, and the files that are there: masks and some images are missing."""
    visits, contrasts = draw(st.sampled_from(VISITS)), draw(st.sampled_from(KINDS))
    patient = draw(st.sampled_from(["P{}", "{:03}", "sub-{}"])).format
    places = draw(st.sampled_from([("",), PLACES[:1], PLACES[:2]]))
    mask, join = draw(st.sampled_from(["seg", "mask"])), draw(st.sampled_from("_-")).join
    kinds = draw(st.sampled_from([("", ""), ("images", "labels")]))
    folders = draw(st.sampled_from(["pv", "p", "vp", "v", ""]))
    in_file = [word for word in "pv" if word not in folders or draw(st.booleans())]
    apart = draw(st.booleans())  # whether patients of two hospitals have different numbers

    def named(place, kind, last):
        name = join(filter(None, (*(words[w] for w in in_file), last))) or "image"
        return "/".join(filter(None, (place, kind, *(words[w] for w in folders), f"{name}.nii")))

    images: dict[str, list[str]] = {}
    for (at, place), n, v in product(enumerate(places), range(1, 5), visits):
        words = {"p": patient(n + 4 * at * apart), "v": v}
        images[named(place, kinds[1], mask)] = [named(place, kinds[0], c) for c in contrasts]
    every = [image for of in images.values() for image in of]
    assume(len({*images, *every}) == len(images) + len(every))
    missing = {
        *draw(st.lists(st.sampled_from([*images]), max_size=4)),
        draw(st.sampled_from(every)),
    }
    return images, [file for file in (*images, *every) if file not in missing]


MASKED = ["P1_pre", "P2_pre", "P2_post", "P3_pre"]  # and P1_post and P3_post are not
SHARED = {
    f"{n}_{v}_seg.nii": [f"{n}_{v}_t1_{c}.nii" for c in ("pre", "post")]
    for n, v in product(("P1", "P2", "P3"), ("pre", "post"))
}
THERE = [f"{case}_seg.nii" for case in MASKED] + [image for of in SHARED.values() for image in of]


@settings(max_examples=100, deadline=None)
@given(tree=trees())
@example(tree=(SHARED, [file for file in THERE if file != "P2_pre_t1_post.nii"]))
@example(tree=(SHARED, [file for file in THERE if not file.startswith("P2_post")]))
def test_no_image_is_paired_with_the_mask_of_another(tree):
    images, there = tree
    with tempfile.TemporaryDirectory() as folder:
        touch(Path(folder), there)
        try:
            index = list_of(Path(folder))
        except DataError:
            event("refused")
            return
    for entry in index["training"]:
        assert {*entry["image"]} <= {*images[entry["label"]], None}
