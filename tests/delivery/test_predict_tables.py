"""Probabilities of candidates, images and rows: those of the data modules' batches."""

import csv
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

from medfed.delivery.bundle.bundle import write_manifest
from medfed.delivery.bundle.metadata import FORMAT_VERSION
from medfed.records.bundles import MODEL
from medfed.records.places import METADATA
from medfed.standalone.errors import CheckpointError, ConfigError, DataError, MedfedError
from tests.delivery.hospitals import run_by_monai
from tests.processes import with_torch


def read(path):
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    return header, rows


def write(path, header, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def chances(rows, classes):
    return torch.tensor([[float(cell) for cell in row[-classes:]] for row in rows])


def expected(made):
    """Probabilities of the client's test split, by the task on the data module's batches."""
    batches = list(made.data.clients[made.client].eval_batches("test"))
    return torch.cat([made.task.predict(batch) for batch in batches])


def test_candidates_are_those_of_the_data_module(hospital, tmp_path, monkeypatch):
    made = hospital("candidates")
    reader, series = made.data.scans, made.data.plans[made.client].patients["test"]
    rows = [
        [s, *map(repr, point)] for s in series for point in reader.candidates_of(s).world.tolist()
    ]
    header = ["seriesuid", "coordX", "coordY", "coordZ"]
    candidates = write(tmp_path / "candidates.csv", header, rows)
    made.predict(input=reader.path, output=tmp_path / "all.csv", candidates=candidates)
    keys = {"candidates": str(candidates)}
    run_by_monai(made.bundle, reader.path, tmp_path / "monai", monkeypatch, **keys)
    written = (tmp_path / "monai" / "predictions.csv").read_bytes()
    assert written == (tmp_path / "all.csv").read_bytes()
    names, found = read(tmp_path / "all.csv")
    assert names == [*header, "probability_non-nodule", "probability_nodule"]
    assert [row[:4] for row in found] == rows
    wanted = expected(made)
    assert len(wanted) == len(rows) > 3
    assert wanted.std() > 1e-3
    torch.testing.assert_close(chances(found, 2), wanted, atol=1e-5, rtol=0)
    # One scan alone, and the class that LUNA16's own files have as a last column
    listed = write(tmp_path / "listed.csv", [*header, "class"], [[*row, "0"] for row in rows])
    scan = made.data.patients[series[0]].files["header"]
    made.predict(input=scan, output=tmp_path / "one.csv", candidates=listed)
    assert read(tmp_path / "one.csv")[1] == [row for row in found if row[0] == series[0]]


def test_candidates_that_cannot_be_used(hospital, tmp_path, capsys):
    made = hospital("candidates")
    path = made.data.scans.path
    series = made.data.plans[made.client].patients["test"]
    good = [[s, *made.data.scans.candidates_of(s).world[0].tolist()] for s in series]
    header, output = ["seriesuid", "coordX", "coordY", "coordZ"], tmp_path / "out.csv"
    scan = made.data.patients[series[0]].files["header"]

    def candidates(*rows):
        return write(tmp_path / "candidates.csv", header, rows)

    outside = [series[0], 9000.0, 0.0, 0.0]
    cases = {
        "name them in candidates=FILE.csv": (path, None),
        r"data row 1: \(9000, 0, 0\) mm lies outside scan": (scan, candidates(outside)),
    }
    for sentence, (source, file) in cases.items():
        with pytest.raises(MedfedError, match=sentence):
            made.predict(input=source, output=output, candidates=file)
    with pytest.raises(DataError, match=r"candidates.csv has no candidates of series .*; the scan"):
        made.predict(input=scan, output=output, candidates=candidates(["1.2.3", 0, 0, 0]))
    with pytest.raises(DataError, match="is no MetaImage scan"):
        made.predict(input=tmp_path / "candidates.csv", output=output, candidates=candidates(*good))
    with pytest.raises(ConfigError, match=r"is no \.csv file"):
        made.predict(input=scan, output=tmp_path / "o.nii", candidates=candidates(*good))
    with pytest.raises(ConfigError, match="picture=true is for segmentation"):
        made.predict(input=scan, output=output, candidates=candidates(*good), picture="true")
    metadata = made.copy(tmp_path / "x") / METADATA
    facts = json.loads(metadata.read_text())
    facts["medfed"]["spacing_range"] = [[9.0] * 3, [9.0] * 3]
    metadata.write_text(json.dumps(facts))
    write_manifest(metadata.parents[1])
    with pytest.raises(
        DataError, match="but the hospital's training scans have 9 × 9 × 9 mm; resample"
    ):
        made.predict(
            bundle=metadata.parents[1], input=scan, output=output, candidates=candidates(*good)
        )
    assert not output.exists()
    # An absent series does not stop the others
    with pytest.raises(DataError, match=r"1 of \d scans could not"):
        made.predict(input=path, output=output, candidates=candidates(*good, ["1.2.3", 0, 0, 0]))
    assert f"data row {len(good) + 1}: series 1.2.3 has no scan below" in capsys.readouterr().err
    assert [row[0] for row in read(output)[1]] == series


def test_images_are_those_of_the_data_module(hospital, tmp_path):
    made = hospital("digits")
    samples, images = made.data.data.samples, made.data.data.images
    index = [samples.rows[p][0] for p in made.data.plans[made.client].patients["test"]]
    (tmp_path / "in").mkdir()
    for place, sample in enumerate(index):
        if place % 2:
            Image.fromarray(images[sample, 0]).save(tmp_path / "in" / f"{place:03d}.png")
        else:
            np.save(tmp_path / "in" / f"{place:03d}.npy", images[sample])
    made.predict(input=tmp_path / "in", output=tmp_path / "out.csv")
    header, rows = read(tmp_path / "out.csv")
    assert header == ["image", *(f"probability_{d}" for d in range(10))]
    assert [row[0][:3] for row in rows] == [f"{place:03d}" for place in range(len(index))]
    torch.testing.assert_close(chances(rows, 10), expected(made), atol=1e-5, rtol=0)


def test_images_that_training_never_saw(hospital, tmp_path):
    made = hospital("digits")
    colour = np.zeros((8, 8, 3), np.uint8)
    colour[..., 0] = 16
    Image.fromarray(np.zeros((9, 8), np.uint8)).save(tmp_path / "size.png")
    Image.fromarray(colour).save(tmp_path / "colour.png")
    Image.fromarray(np.full((8, 8), 255, np.uint8)).save(tmp_path / "range.png")
    (tmp_path / "torn.png").write_bytes((tmp_path / "size.png").read_bytes()[:30])
    np.save(tmp_path / "shape.npy", np.zeros((8, 8), np.uint8))
    (tmp_path / "none").mkdir()
    cases = {
        "size.png": r"has 9 × 8 pixels, but the model was trained on 8 × 8; resample the image",
        "colour.png": "is coloured, but the model was trained on grey images",
        "range.png": "has values up to 255, but white was 16 in training; scale the image",
        "torn.png": "cannot be read as an image",
        "shape.npy": r"is uint8 \(8, 8\), but the model takes uint8 \(1, 8, 8\)",
        "none": "has no images",
        "absent.png": "does not exist; name an image",
    }
    for name, sentence in cases.items():
        with pytest.raises(DataError, match=sentence):
            made.predict(input=tmp_path / name, output=tmp_path / "out.csv")
    assert not (tmp_path / "out.csv").exists()


def test_rows_are_those_of_the_data_module(hospital, tmp_path):
    made = hospital("table")
    table, samples = made.data.table, made.data.samples
    index = [r for p in made.data.plans[made.client].patients["test"] for r in samples.rows[p]]
    # Columns in another order, with one that is no feature
    order = np.random.default_rng(0).permutation(len(table.names))
    header = ["patient", *(table.names[i].upper() for i in order)]
    values = [[f"p{r}", *map(repr, table.features[r, order].tolist())] for r in index]
    source = write(tmp_path / "in.csv", header, values)
    made.predict(input=source, output=tmp_path / "out.csv")
    names, rows = read(tmp_path / "out.csv")
    assert names == ["row", "patient", "warning", "probability_benign", "probability_malignant"]
    assert [row[:2] for row in rows] == [[str(n), f"p{r}"] for n, r in enumerate(index, start=1)]
    wanted = expected(made)
    assert wanted.std() > 1e-2
    torch.testing.assert_close(chances(rows, 2), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["table", "survival"])
def test_a_table_with_the_columns_of_the_readme_is_taken(kind, hospital, tmp_path):
    made = hospital(kind)
    text = (made.bundle / "docs" / "README.md").read_text()
    assert "Ends are rounded outwards" in (made.bundle / "docs" / "model_card.md").read_text()
    (listed,) = re.findall(r"^Columns: (.*?)\.(?: Where .*)?$", text, re.MULTILINE)
    columns = dict(column.partition(" (")[::2] for column in listed.split(", "))
    cells = [texts.removesuffix(")").split(" or ")[-1] or "1" for texts in columns.values()]
    made.predict(input=write(tmp_path / "in.csv", columns, [cells]), output=tmp_path / "out.csv")
    header, (answer,) = read(tmp_path / "out.csv")
    warning = answer[header.index("warning")]
    assert not any(f"{name} is {texts}" in warning for name, texts in columns.items() if texts)


def test_no_column_of_the_output_appears_twice(hospital, tmp_path, caplog):
    """A table may have any of the output's columns: as one that medfed has written."""
    made = hospital("table")
    table, rows = made.data.table, made.data.table.features[:2].tolist()
    names = ["row", "Warning", "input_row", "probability_benign", "PROBABILITY_malignant", "note"]
    cells = [[f"{name} {n}" for name in names] for n in range(2)]
    given = [[*a, *b] for a, b in zip(rows, cells, strict=True)]
    source = write(tmp_path / "in.csv", [*table.names, *names], given)
    made.predict(input=source, output=tmp_path / "out.csv")
    header, found = read(tmp_path / "out.csv")
    lower = [name.lower() for name in header]
    assert len({*lower}) == len(header)
    expected = ["input_row", "input_Warning", "input_input_row"]
    expected += ["input_probability_benign", "input_PROBABILITY_malignant", "note"]
    assert header[:7] == ["row", *expected]
    assert header[7:] == ["warning", "probability_benign", "probability_malignant"]
    assert [row[1:7] for row in found] == cells
    assert caplog.text.count("has a column ") == 5
    assert "has a column Warning, as the output does" in caplog.text
    # What was written is an input, too: nothing is lost, and nothing twice.
    again = [[*a, *b] for a, b in zip(rows, found, strict=True)]
    write(tmp_path / "in.csv", [*table.names, *header], again)
    made.predict(input=source, output=tmp_path / "again.csv")
    names, cells = read(tmp_path / "again.csv")
    assert len({name.lower() for name in names}) == len(names) == 1 + len(header) + 3
    assert [row[1 : 1 + len(header)] for row in cells] == found


def test_two_classes_are_decided_by_the_threshold_after_calibration(hospital, tmp_path):
    made = hospital("table")
    table = made.data.table
    source = write(tmp_path / "rows.csv", table.names, table.features[:40].tolist())
    made.predict(input=source, output=tmp_path / "plain.csv")
    plain = chances(read(tmp_path / "plain.csv")[1], 2).double()
    bundle = made.copy(tmp_path)
    facts = json.loads((bundle / METADATA).read_text())
    level = float(plain[:, 1].median())
    facts["medfed"] |= {"threshold": level, "calibration": [2.0, -0.5]}
    (bundle / METADATA).write_text(json.dumps(facts))
    write_manifest(bundle)
    made.predict(bundle=bundle, input=source, output=tmp_path / "points.csv")
    names, found = read(tmp_path / "points.csv")
    assert names[-1] == f"above_threshold_{made.data.class_names[1]}"
    odds = plain**2 * torch.tensor([1.0, np.exp(-0.5)])
    wanted = odds / odds.sum(1, keepdim=True)
    torch.testing.assert_close(chances(found, 3)[:, :2].double(), wanted, atol=1e-6, rtol=0)
    decided = [row[-1] for row in found]
    assert decided == [str(int(p >= level)) for p in wanted[:, 1]]
    assert len({*decided}) == 2
    made.predict(bundle=bundle, input=source, output=tmp_path / "set.csv", threshold=0.999)
    assert [row[-1] for row in read(tmp_path / "set.csv")[1]].count("1") < decided.count("1")


@pytest.mark.parametrize("name", ["table", "outcome"])
def test_sets_and_intervals_are_those_of_the_quantile(name, hospital, tmp_path):
    made = hospital(name)
    table = made.data.table
    source = write(tmp_path / "rows.csv", table.names, table.features[:40].tolist())
    made.predict(input=source, output=tmp_path / "plain.csv")
    names, plain = read(tmp_path / "plain.csv")
    bundle, classes = made.copy(tmp_path), 2 if name == "table" else 1
    facts = json.loads((bundle / METADATA).read_text())
    values = chances(plain, classes).double()
    bound = 30.0 if name == "outcome" else float(1 - values.amin(1).median())
    facts["medfed"]["coverage"] = {"level": 0.9, "quantiles": {"": bound}, "patients": {"": 120}}
    (bundle / METADATA).write_text(json.dumps(facts))
    write_manifest(bundle)
    made.predict(bundle=bundle, input=source, output=tmp_path / "covered.csv")
    header, found = read(tmp_path / "covered.csv")
    assert header[: len(names)] == names
    assert [row[: len(names)] for row in found] == plain
    ends = chances(found, 2).double()
    if name == "outcome":
        assert header[len(names) :] == ["low_90", "high_90"]
        expected = torch.cat([values - bound, values + bound], 1)
        torch.testing.assert_close(ends, expected, atol=1e-3, rtol=0)
        return
    assert header[len(names) :] == [f"in_90_set_{label}" for label in made.data.class_names]
    likeliest = values == values.amax(1, keepdim=True)
    near = (1 - values - bound).abs() < 1e-6
    assert bool((near | (ends.bool() == (likeliest | (1 - values <= bound)))).all())
    assert {*ends.sum(1).tolist()} == {1.0, 2.0}


WRONG_COVERAGE = {
    "a region": {"level": 0.9, "quantiles": {"whole": 0.2}, "patients": {}},
    "no quantile": {"level": 0.9, "quantiles": {}, "patients": {}},
    "certain": {"level": 1.0, "quantiles": {"": 0.2}, "patients": {}},
    "negative": {"level": 0.9, "quantiles": {"": -0.2}, "patients": {}},
}


@pytest.mark.parametrize("entry", WRONG_COVERAGE.values(), ids=WRONG_COVERAGE)
def test_a_coverage_of_another_task_or_form_is_refused(entry, hospital, tmp_path):
    made = hospital("table")
    bundle = made.copy(tmp_path)
    facts = json.loads((bundle / METADATA).read_text())
    facts["medfed"]["coverage"] = entry
    (bundle / METADATA).write_text(json.dumps(facts))
    write_manifest(bundle)
    with pytest.raises(CheckpointError, match=r"coverage.*export the bundle anew"):
        made.predict(bundle=bundle, input=tmp_path / "rows.csv", output=tmp_path / "out.csv")


def test_missing_cells_and_columns(hospital, tmp_path):
    made = hospital("table")
    table = made.data.table
    features = table.features[:3].copy()
    cells = [[repr(v) for v in row] for row in features.tolist()]
    cells[1][4] = "?"
    made.predict(input=write(tmp_path / "in.csv", table.names, cells), output=tmp_path / "out.csv")
    scaling = made.data.scalings[made.client]
    low, high = scaling.minimum, scaling.maximum
    scaled = np.clip(2 * (features - low) / (high - low) - 1, -1, 1)  # by hand
    missing = np.zeros_like(scaled)
    scaled[1, 4], missing[1, 4] = 0, 1
    rows = torch.from_numpy(np.concatenate([scaled, missing], axis=1)).float()
    wanted = made.task.predict({"image": rows})
    found = chances(read(tmp_path / "out.csv")[1], 2)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    write(tmp_path / "bad.csv", table.names[1:], [row[1:] for row in cells])
    with pytest.raises(DataError, match=f"bad.csv lacks the column {table.names[0]}; it needs"):
        made.predict(input=tmp_path / "bad.csv", output=tmp_path / "other.csv")
    cells[2][0] = "high"
    write(tmp_path / "bad.csv", table.names, cells)
    with pytest.raises(DataError, match="data row 3, column mean radius: 'high' is not a number"):
        made.predict(input=tmp_path / "bad.csv", output=tmp_path / "other.csv")
    assert not (tmp_path / "other.csv").exists()


def test_a_prediction_does_not_import_lightning(hospital, tmp_path):
    made, output = hospital("table"), tmp_path / "out.csv"
    rows = made.data.table.features[:2].tolist()
    source = write(tmp_path / "in.csv", made.data.table.names, rows)
    keys = [f"bundle={made.bundle}", f"input={source}", f"output={output}"]
    script = (
        "import sys\nfrom medfed.commands.predict import main\nmain()\n"
        "assert not {'pytorch_lightning', 'lightning'} & {*sys.modules}\n"
    )
    (tmp_path / "script.py").write_text(script)
    done = with_torch().run(tmp_path / "script.py", *keys, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(read(output)[1]) == 2


def test_a_bundle_that_is_not_as_exported(hospital, tmp_path):
    made = hospital("table")
    output, bundle = tmp_path / "out.csv", made.copy(tmp_path)
    source = write(tmp_path / "in.csv", made.data.table.names, [["1"] * 30])
    metadata, weights = bundle / METADATA, bundle / MODEL
    text, raw = metadata.read_text(), weights.read_bytes()

    def refused(sentence):
        with pytest.raises(CheckpointError, match=sentence):
            made.predict(bundle=bundle, input=source, output=output)

    weights.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    refused("is not the file that was exported")
    weights.write_bytes(raw)
    now, next_ = f'"format_version": {FORMAT_VERSION}', f'"format_version": {FORMAT_VERSION + 1}'
    assert now in text
    metadata.write_text(text.replace(now, next_))
    refused(f"has version {FORMAT_VERSION + 1}, but this program reads version")
    facts = json.loads(text)
    del facts["medfed"]["channels"]
    metadata.write_text(json.dumps(facts))
    write_manifest(bundle)
    refused("metadata.json: channels is missing; export the bundle anew")
    facts = json.loads(text)
    facts["medfed"]["input"]["kind"] = "smells"
    metadata.write_text(json.dumps(facts))
    write_manifest(bundle)
    refused("metadata.json: input.kind: invalid value 'smells'; export the bundle anew")
    with pytest.raises(CheckpointError, match="is no bundle"):
        made.predict(bundle=tmp_path / "nothing", input=source, output=output)
    assert not output.exists()


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("batch_size", "0", "batch_size must be 1 or more, not 0"),
        ("threshold", "1.5", r"threshold must be in \[0, 1\), not 1.5"),
        ("spacing_tolerance", "-1", "spacing_tolerance must not be negative, not -1"),
        ("device", "abacus", "device=abacus cannot be used on this machine"),
        ("overwrite", "maybe", "overwrite must be true or false, not 'maybe'"),
        ("treshold", "0.5", r"Unknown key 'treshold' \(did you mean threshold"),
    ],
)
def test_options_that_cannot_be_used(key, value, sentence, hospital, tmp_path):
    with pytest.raises(ConfigError, match=sentence):
        hospital("table").predict(
            input=tmp_path / "in.csv", output=tmp_path / "o.csv", **{key: value}
        )
