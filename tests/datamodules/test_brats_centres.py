"""Which hospital a case comes from, in the layout of the BraTS challenges."""

import json

import pytest

from medfed.datamodules.readers.case_folders import BratsChallengeReader
from medfed.datamodules.readers.datalist import DatalistReader
from medfed.datamodules.splits import SPLITS
from medfed.standalone.errors import DataError
from tests.datamodules.brats_layouts import make_head, write_challenge, write_msd
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


SITES = {"case": "Subject_ID", "centre": "Partition_ID"}


def test_a_table_of_any_columns_names_hospitals_and_splits(tmp_path):
    names = [f"BraTS19_CBICA_{n}_1" for n in range(3)]
    write_challenge(tmp_path, dict(zip(names, HEADS.values(), strict=True)))
    table = tmp_path / "partitioning_1.csv"
    rows = [
        f"{n},{name},{split}" for (n, name), split in zip(enumerate(names), SPLITS, strict=True)
    ]
    table.write_text("\n".join(["Partition_ID,Subject_ID,TrainOrVal", *rows[:2]]))
    reader = BratsChallengeReader(tmp_path, sites={"file": str(table), **SITES})
    assert centres_of(reader) == dict(zip(names, "01", strict=False))  # not CBICA
    assert table in reader.indices()
    reader = BratsChallengeReader(
        tmp_path, sites={"file": str(table), **SITES, "split": "TrainOrVal"}
    )
    assert {p.id: p.split for p in reader.patients()} == {names[0]: None, names[1]: "val"}
    table.write_text(
        "\n".join(["Partition_ID,Subject_ID,TrainOrVal", *rows, f"2,{names[0]},train"])
    )
    with pytest.raises(DataError, match=f"has case {names[0]} at 0 and at 2"):
        BratsChallengeReader(tmp_path, sites={"file": str(table), **SITES}).patients()


def test_a_table_of_hospitals_leaves_the_splits_of_a_list(tmp_path):
    write_msd(tmp_path, HEADS)
    content = json.loads((tmp_path / "dataset.json").read_text())
    content["validation"] = [content["training"].pop()]
    (tmp_path / "dataset.json").write_text(json.dumps(content))
    table = tmp_path / "places.csv"
    table.write_text("Partition_ID,Subject_ID\n1,a\n2,b\n2,c\n")
    reader = DatalistReader(
        tmp_path, regions={"tumour": [1, 2, 3]}, sites={"file": str(table), **SITES}
    )
    assert centres_of(reader) == {"a": "1", "b": "2", "c": "2"}
    assert sorted(str(p.split) for p in reader.patients()) == ["None", "None", "val"]


def test_the_hospital_may_come_first_in_centres_csv(tmp_path):
    write_challenge(tmp_path, HEADS)
    (tmp_path / "centres.csv").write_text("Partition_ID,Subject_ID\n1,a\n2,b\n2,c\n")
    assert centres_of(BratsChallengeReader(tmp_path)) == {"a": "1", "b": "2", "c": "2"}


@sweep(
    ("name", "text", "message"),
    [
        ("centres.csv", "case,centre\na,x\nb,y\n", r"centres\.csv names no hospital for case c"),
        ("centres.csv", "case,centre\na,x\na,y\n", r"has case a at x and at y.*remove one row"),
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
