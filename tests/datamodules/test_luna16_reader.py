import json
import shutil

import numpy as np
import pytest
import SimpleITK as sitk

from medfed.datamodules.generated.luna16 import write_scan
from medfed.datamodules.readers.luna16 import Luna16Reader
from medfed.standalone.ct import PatchSpec, extract, find_scans, hounsfield, read_points
from medfed.standalone.errors import ConfigError, DataError
from medfed.standalone.files import sha256
from medfed.standalone.volumes import read_geometry

from .luna_files import image_of, noise, write_csv, write_luna

SERIES = ("1.3.6.1.4.1.100", "1.3.6.1.4.1.99", "2.25.7")
SMALL = noise((6, 12, 10))


def rows_of(image, series, labels):
    """Candidates on the diagonal of a scan."""
    places = [
        image.TransformIndexToPhysicalPoint((n % 9, n % 11, n % 6)) for n in range(len(labels))
    ]
    return [(series, *place, label) for place, label in zip(places, labels, strict=True)]


@pytest.fixture
def luna(tmp_path):
    """Three scans in subsets, 12 candidates of which 3 are nodules; returns the folder."""
    image = image_of(SMALL)
    rows = rows_of(image, SERIES[0], [0, 1, 0, 0])
    rows += rows_of(image, SERIES[1], [0, 0, 0, 0])
    rows += rows_of(image, SERIES[2], [1, 0, 1, 0])
    write_luna(tmp_path, dict.fromkeys(SERIES, image), rows)
    return tmp_path


def test_scans_and_candidates_are_those_on_disk(luna):
    reader = Luna16Reader(luna, negatives_per_positive=None)
    patients = reader.patients()
    assert [p.id for p in patients] == sorted(SERIES)
    assert [p.counts for p in patients] == [(3, 1), (4, 0), (2, 2)]
    assert {p.centre for p in patients} == {None}
    first = patients[0]
    assert first.files["header"].name == "1.3.6.1.4.1.100.mhd"
    assert first.files["raw"].name == "1.3.6.1.4.1.100.raw"
    candidates = reader.candidates_of("2.25.7")
    assert candidates.row.tolist() == [9, 10, 11, 12]
    assert candidates.label.tolist() == [1, 0, 1, 0]
    lines = (luna / "candidates.csv").read_text().splitlines()
    for row, world in zip(candidates.row, candidates.world, strict=True):
        assert [float(cell) for cell in lines[row].split(",")[1:4]] == world.tolist()


def test_a_flat_folder_centres_and_v2(luna):
    for file in luna.glob("subset*/*"):
        file.rename(luna / file.name)
    (luna / "centres.json").write_text(json.dumps(dict.fromkeys(SERIES, "Leiden")))
    rows = [line.split(",") for line in (luna / "candidates.csv").read_text().splitlines()[5:]]
    write_csv(luna / "candidates_V2.csv", rows)
    reader = Luna16Reader(luna)
    assert [p.centre for p in reader.patients()] == ["Leiden"] * 2
    assert reader.record()["candidates"] == "candidates_V2.csv"
    first = Luna16Reader(luna, candidates="candidates.csv")
    assert len(first.patients()) == 3


def test_columns_may_stand_in_any_order_beside_others(luna):
    lines = [line.split(",") for line in (luna / "candidates.csv").read_text().splitlines()]
    text = "\n".join(",".join([row[4], "x", *row[:4]]) for row in lines)
    (luna / "candidates.csv").write_text("\ufeff" + text + "\n\n")
    assert [p.counts for p in Luna16Reader(luna, negatives_per_positive=None).patients()] == [
        (3, 1), (4, 0), (2, 2),
    ]  # fmt: skip


def test_many_rows_are_read_exactly(tmp_path):
    rng = np.random.default_rng(0)
    world = rng.uniform(-300, 300, (60_000, 3)).round(2)
    rows = [(f"1.2.{n % 90}", *xyz, int(n % 400 == 0)) for n, xyz in enumerate(world.tolist())]
    write_csv(tmp_path / "c.csv", rows)
    points = read_points(tmp_path / "c.csv", "class")
    assert [*points] == [f"1.2.{n}" for n in range(90)]
    assert all(np.array_equal(points[f"1.2.{n}"].world, world[n::90]) for n in range(90))
    assert points["1.2.89"].row[:2].tolist() == [90, 180]
    assert sum(of.value.sum() for of in points.values()) == 150


def test_annotations_are_read(tmp_path):
    write_csv(
        tmp_path / "a.csv", [("1.2", 1, 2, 3, 4.5)], "seriesuid,coordX,coordY,coordZ,diameter_mm"
    )
    points = read_points(tmp_path / "a.csv", "diameter_mm")
    assert points["1.2"].value.tolist() == [4.5]
    with pytest.raises(DataError, match=r"needs the columns .*class, but has"):
        read_points(tmp_path / "a.csv", "class")


def many(tmp_path, scans, per_scan=60, name="many"):
    """A table alone: empty files stand for scans, whose voxels the reader does not touch."""
    folder = tmp_path / name
    folder.mkdir()
    for series in scans:
        (folder / f"{series}.mhd").touch()
    rows = [(s, n, 0, 0, int(n % 20 == 7)) for s in scans for n in range(per_scan)]
    write_csv(folder / "candidates.csv", rows)
    return folder


def kept(reader, scans):
    return {s: set(reader.candidates_of(s).world[:, 0].astype(int).tolist()) for s in scans}


def test_negatives_are_drawn_by_the_recorded_rule(tmp_path):
    scans = [f"1.{n}" for n in range(6)]
    folder = many(tmp_path, scans)
    reader = Luna16Reader(folder, negatives_per_positive=4.0, seed=3)
    chosen = kept(reader, scans)
    assert all({7, 27, 47} <= rows for rows in chosen.values())  # every nodule stays
    assert sum(map(len, chosen.values())) == 18 * 5
    assert reader.record() == {
        "candidates": "candidates.csv",
        "sha256": sha256(folder / "candidates.csv"),
        "rule": reader.record()["rule"],
        "negatives_per_positive": 4.0,
        "seed": 3,
        "listed": {"non-nodule": 342, "nodule": 18},
        "kept": {"non-nodule": 72, "nodule": 18},
        "absent_series": 0,
    }
    assert "hash of seed, series and place" in reader.record()["rule"]
    assert json.loads(json.dumps(reader.record())) == reader.record()
    assert kept(Luna16Reader(folder, negatives_per_positive=4.0, seed=3), scans) == chosen
    assert kept(Luna16Reader(folder, negatives_per_positive=4.0, seed=4), scans) != chosen


def test_more_negatives_and_more_scans_never_change_the_order_of_choice(tmp_path):
    scans = [f"1.{n}" for n in range(6)]
    folder = many(tmp_path, scans)
    few = kept(Luna16Reader(folder, negatives_per_positive=2.0), scans)
    more = kept(Luna16Reader(folder, negatives_per_positive=6.0), scans)
    assert all(few[s] < more[s] for s in scans)
    # Other scans before these in the file: each scan keeps a beginning of the same order.
    larger = many(tmp_path, ["0.1", "0.2", *scans], name="larger")
    others = kept(Luna16Reader(larger, negatives_per_positive=6.0), scans)
    assert all(others[s] <= more[s] or more[s] <= others[s] for s in scans)
    assert sum(len(others[s] ^ more[s]) for s in scans) < 0.2 * sum(map(len, more.values()))


def test_the_choice_is_spread_evenly_over_scans_and_rows(tmp_path):
    scans = [f"1.{n}" for n in range(40)]
    folder = many(tmp_path, scans, per_scan=200)
    reader = Luna16Reader(folder, negatives_per_positive=5.0)
    chosen = kept(reader, scans)
    sizes = np.array([len(rows) - 10 for rows in chosen.values()])  # of 190, 50 expected
    places = np.concatenate([sorted(rows) for rows in chosen.values()])
    assert sizes.sum() == 2000
    assert 4 < sizes.std() < 9  # binomial: 6.1
    assert abs(places.mean() - 99.5) < 4


def test_all_scans_absent_or_some(luna):
    (luna / "subset1" / "1.3.6.1.4.1.99.mhd").unlink()
    message = (
        r"candidates\.csv, data row 5: series 1\.3\.6\.1\.4\.1\.99 has no \.mhd file below .* "
        r"\(1 of 3 series have none\); .* data\.reader\.missing=skip"
    )
    with pytest.raises(DataError, match=message):
        Luna16Reader(luna)
    reader = Luna16Reader(luna, missing="skip", negatives_per_positive=None)
    assert [p.id for p in reader.patients()] == [SERIES[0], SERIES[2]]
    assert reader.record()["absent_series"] == 1
    assert reader.record()["kept"] == {"non-nodule": 5, "nodule": 3}
    write_csv(luna / "candidates.csv", [("1.1", 0, 0, 0, 1)])
    with pytest.raises(DataError, match="none of its 1 series has a scan"):
        Luna16Reader(luna, missing="skip")


def test_skipping_absent_scans_is_logged(luna, caplog):
    (luna / "subset1" / "1.3.6.1.4.1.99.mhd").unlink()
    Luna16Reader(luna, missing="skip")
    assert "1 of 3 series have no scan; their 4 candidates are skipped" in caplog.text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("2.25.7,1,2,3,2", r"candidates\.csv, data row 13: class 2 is unknown; known: 0 .* and 1"),
        ("2.25.7,1,x,3,0", r"data row 13: 2\.25\.7, 1, x, 3, 0 has no number for each of coordX"),
        ("2.25.7,1,,3,0", r"data row 13: .*has no number for each of coordX"),
        ("2.25.7,1,2,nan,0", r"data row 13: 1, 2, nan, 0 are not all finite"),
        ("2.25.7,1,2,3,yes", r"data row 13: .*has no number for each of .*class"),
        ("2.25.7,1,2", r"data row 13: 2\.25\.7, 1, 2 has no number for each"),
    ],
)
def test_bad_rows_are_named(luna, row, message):
    with (luna / "candidates.csv").open("a") as file:
        file.write(row + "\n")
    with pytest.raises(DataError, match=message):
        Luna16Reader(luna)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("series,x,y,z,class\n1,2,3,4,1\n", r"needs the columns seriesuid, .*, but has series, x"),
        ("", "needs the columns"),
        ("seriesuid,coordX,coordY,coordZ,class\n", "has no data rows"),
        (b"seriesuid,\xff\xfe", "needs the columns"),
    ],
)
def test_bad_tables_are_named(luna, text, message):
    (luna / "candidates.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=message):
        Luna16Reader(luna)


def test_bad_folders_and_options_are_named(luna, tmp_path):
    with pytest.raises(DataError, match=r"nowhere has no \.mhd scans.*set data\.path"):
        Luna16Reader(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"has no candidates_V3\.csv; unpack it"):
        Luna16Reader(luna, candidates="candidates_V3.csv")
    with pytest.raises(ConfigError, match=r"negatives_per_positive must not be negative, not -1"):
        Luna16Reader(luna, negatives_per_positive=-1.0)
    with pytest.raises(ConfigError, match=r"missing='ignore' is unknown"):
        Luna16Reader(luna, missing="ignore")
    with pytest.raises(DataError, match="no candidates for series 9"):
        Luna16Reader(luna).candidates_of("9")
    shutil.copy(luna / "subset0" / f"{SERIES[0]}.mhd", luna)
    with pytest.raises(DataError, match="are the same series; remove one"):
        find_scans(luna)


def test_a_table_without_nodules_leaves_nothing_to_count_by(luna):
    write_csv(luna / "candidates.csv", rows_of(image_of(SMALL), SERIES[0], [0, 0]))
    with pytest.raises(DataError, match=r"negatives_per_positive=null"):
        Luna16Reader(luna)
    assert len(Luna16Reader(luna, negatives_per_positive=None).patients()) == 1


def damage_cut(header):
    raw = header.with_suffix(".raw")
    raw.write_bytes(raw.read_bytes()[:-7])


def damage_lengthen(header):
    with header.with_suffix(".raw").open("ab") as file:
        file.write(b"xx")


def damage_no_raw(header):
    header.with_suffix(".raw").unlink()


def damage_garbage(header):
    header.write_bytes(b"\x00garbage\xff" * 9)


def damage_dimension(header):
    header.write_text(header.read_text().replace("NDims = 3", "NDims = x"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_cut, r"100\.raw has 1433 bytes, but .*100\.mhd says 1440; copy it again"),
        (damage_lengthen, r"100\.raw has 1442 bytes"),
        (damage_no_raw, r"100\.raw is missing, but .*100\.mhd names it"),
        (damage_garbage, r"100\.mhd is no MetaImage header"),
    ],
)
def test_bad_scans_are_named_before_any_voxel_is_read(luna, damage, message):
    damage(luna / "subset0" / f"{SERIES[0]}.mhd")
    with pytest.raises(DataError, match=message):
        Luna16Reader(luna).patients()


def test_headers_and_voxels_that_are_damaged(tmp_path):
    header = write_scan(tmp_path, "1.2", SMALL)
    damage_dimension(header)
    with pytest.raises(DataError, match=r"1\.2\.mhd has NDims = 'x', which must be 3"):
        read_geometry(header)
    for name in ("2.2.mhd", "2.3.mha"):
        path = tmp_path / name
        sitk.WriteImage(image_of(SMALL), str(path), useCompression=True)
        voxels = path if name.endswith("mha") else path.with_suffix(".zraw")
        voxels.write_bytes(voxels.read_bytes()[:-99])
        scan = read_geometry(path, "LPS")
        with pytest.raises(DataError, match=r"2\.\d\.\w+ is truncated or corrupt"):
            hounsfield(path, scan)
    flat = sitk.GetImageFromArray(SMALL[0])
    sitk.WriteImage(flat, str(tmp_path / "3.mhd"))
    with pytest.raises(DataError, match="NDims = '2', which must be 3"):
        read_geometry(tmp_path / "3.mhd")


def test_nan_voxels_are_named(tmp_path):
    voxels = SMALL.astype(np.float32)
    voxels[3, 2, 1] = np.nan
    sitk.WriteImage(image_of(voxels), str(tmp_path / "1.mhd"))
    with pytest.raises(DataError, match=r"1\.mhd has NaN or infinite voxels"):
        hounsfield(tmp_path / "1.mhd", read_geometry(tmp_path / "1.mhd", "LPS"))


def test_a_raw_file_that_shrinks_while_it_is_read(luna):
    reader = Luna16Reader(luna)
    header = luna / "subset0" / f"{SERIES[0]}.mhd"
    scan = read_geometry(header, "LPS")
    damage_cut(header)
    with pytest.raises(DataError, match=r"100\.raw has 1433 bytes"):
        hounsfield(header, scan)
    with pytest.raises(DataError, match=r"has 1433 bytes"):
        extract(header, reader.candidates_of(SERIES[0]), PatchSpec())


def test_spaces_around_a_series_make_no_other_series(tmp_path):
    path = tmp_path / "candidates.csv"
    rows = ["1.2,1,1,1,1", "1.2 ,2,2,2,0", " 1.2,3,3,3,0", "1.3,4,4,4,1"]
    path.write_text("\n".join(["seriesuid,coordX,coordY,coordZ,class", *rows]))
    points = read_points(path, "class")
    assert {series: of.row.tolist() for series, of in points.items()} == {
        "1.2": [1, 2, 3],
        "1.3": [4],
    }
