"""Which hospital a case comes from, in the layout of the BraTS challenges."""

import json

import pytest

from medfed.datamodules.readers.case_folders import BratsChallengeReader
from medfed.standalone.errors import DataError
from tests.datamodules.brats_layouts import make_head, write_challenge
from tests.sweeps import sweep

HEADS = {name: make_head(seed) for seed, name in enumerate(["a", "b", "c"])}


def centres_of(reader):
    return {p.id: p.centre for p in reader.patients()}


def test_hospitals_come_from_a_file_beside_the_data(tmp_path):
    write_challenge(tmp_path, HEADS)
    assert centres_of(BratsChallengeReader(tmp_path)) == {"a": None, "b": None, "c": None}
    blocks = {"a": "hospital_0", "b": "hospital_0", "c": "hospital_1"}
    assert centres_of(BratsChallengeReader(tmp_path, hospitals=2)) == blocks
    (tmp_path / "centres.csv").write_text("case,centre\na, north\nb, south\nc, north\n")
    named = {"a": "north", "b": "south", "c": "north"}
    assert centres_of(BratsChallengeReader(tmp_path, hospitals=2)) == named
    (tmp_path / "centres.csv").unlink()
    (tmp_path / "centres.json").write_text(json.dumps(named))
    assert centres_of(BratsChallengeReader(tmp_path)) == named


def test_hospitals_come_from_the_names_of_2017_to_2019(tmp_path):
    names = ["Brats17_2013_10_1", "Brats18_TCIA08_242_1", "BraTS19_CBICA_AAB_1"]
    write_challenge(tmp_path, dict(zip(names, HEADS.values(), strict=True)))
    assert sorted(centres_of(BratsChallengeReader(tmp_path)).values()) == [
        "2013",
        "CBICA",
        "TCIA08",
    ]


def test_hospitals_of_2020_come_from_its_name_mapping(tmp_path):
    names = [f"BraTS20_Training_00{n}" for n in (1, 2, 3)]
    write_challenge(tmp_path, dict(zip(names, HEADS.values(), strict=True)))
    (tmp_path / "name_mapping.csv").write_text(
        "Grade,BraTS_2017_subject_ID,BraTS_2018_subject_ID,BraTS_2020_subject_ID\n"
        "HGG,Brats17_CBICA_AAB_1,Brats18_CBICA_AAB_1,BraTS20_Training_001\n"
        "LGG,NA,Brats18_TCIA13_9_1,BraTS20_Training_002\n"
        "HGG,NA,NA,BraTS20_Training_003\n"
    )
    found = centres_of(BratsChallengeReader(tmp_path, hospitals=1))
    assert list(found.values()) == ["CBICA", "TCIA13", "hospital_0"]


@sweep(
    ("name", "text", "message"),
    [
        ("centres.csv", "case,centre\na,x\nb,y\n", r"centres\.csv names no hospital for case c"),
        ("centres.csv", "case,centre\na,x\na,y\n", r"line 3: case a is already at x"),
        ("centres.csv", "case,centre\na\n", r"centres\.csv, line 2: 1 columns"),
        ("centres.json", "[]", r"centres\.json must hold a JSON object"),
        ("centres.json", '{"a": 3}', r"centres\.json must be an object of"),
        ("centres.json", "{torn", r"centres\.json is not readable JSON"),
    ],
)
def test_a_bad_file_of_hospitals_is_named(tmp_path, name, text, message):
    write_challenge(tmp_path, HEADS)
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        BratsChallengeReader(tmp_path).patients()
