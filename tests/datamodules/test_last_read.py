"""What was read last is taken again, unless a file, the reader or its arguments have changed."""

from __future__ import annotations

import logging
import os
import shutil
from functools import partial

import numpy as np
import pytest
from PIL import Image

from medfed.datamodules.images import ImageDataModule
from medfed.datamodules.partitions.base import RoundRobin
from medfed.datamodules.readers import last_read
from medfed.datamodules.readers.image_folder import read_image_folder
from medfed.datamodules.readers.table import read_csv
from medfed.datamodules.tables.datamodule import TabularDataModule
from tests.integration.runs import run


@pytest.fixture(autouse=True)
def settled(monkeypatch):
    """Files that tests have just made count as old; no result of another test is there."""
    monkeypatch.setattr(last_read, "_CLOCK_STEP", -(10**18))
    monkeypatch.setattr(last_read, "_last", [])


class OfUser(TabularDataModule):
    """A data module of a user's, who may change the table."""


@pytest.fixture
def csv(tmp_path):
    path = tmp_path / "table.csv"
    rows = "".join(f"{n},{n % 3},{n % 2},2020-01-0{n % 9 + 1}\n" for n in range(10, 40))
    path.write_text("age,stage,label,admitted\n" + rows)
    return path


def table(path, of=TabularDataModule, **more):
    return of(RoundRobin(2), path=str(path), **more).table


def rewrite(path):
    """Other content of the same size and time."""
    before = path.stat()
    path.write_text(path.read_text().replace("10,1,0", "99,1,0"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def replace_by_another(path):
    other = path.with_suffix(".new")
    shutil.copy2(path, other)
    rewrite(other)
    other.replace(path)


def add_row(path):
    path.write_text(path.read_text() + "50,1,1,2020-01-01\n")


CHANGES = {
    "nothing": (lambda path: None, {}, True),
    "another seed": (lambda path: None, {"seed": 5, "val_fraction": 0.1}, True),
    "the same size and time": (rewrite, {}, False),
    "another file": (replace_by_another, {}, False),
    "a row more": (
        lambda path: path.write_text(path.read_text() + "50,1,1,2020-01-01\n"),
        {},
        False,
    ),
    "an argument": (lambda path: None, {"features": ["age"]}, False),
    "the type of an argument": (lambda path: None, {"positive": ["1"]}, False),
    "a module of a user's": (lambda path: None, {"of": OfUser}, False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_table_is_read_once_until_something_changes(change, csv):
    first = table(csv, positive=[1])
    alter, more, same = CHANGES[change]
    alter(csv)
    more = {"positive": [1], **more}
    again = table(csv, **more)
    assert np.shares_memory(again.features, first.features) == same
    named = {"positive": more["positive"], "features": more.get("features")}
    expected = read_csv(csv, "label", categorical="auto", **named)
    np.testing.assert_array_equal(again.features, expected.features)
    np.testing.assert_array_equal(again.labels, expected.labels)


def test_the_sentences_of_a_reading_are_said_each_time(csv, caplog):
    caplog.set_level(logging.INFO)
    said = []
    for _ in range(2):
        caplog.clear()
        table(csv)
        said.append(
            [(record.name, record.levelno, record.getMessage()) for record in caplog.records]
        )
    assert said[0] == said[1]
    assert any("left out admitted" in message for _, _, message in said[0])


def test_a_file_that_has_just_changed_is_read_again(csv, monkeypatch):
    monkeypatch.undo()  # a second change in the same moment would leave the same time
    csv.touch()
    first, again = table(csv), table(csv)
    assert not np.shares_memory(first.features, again.features)


def test_a_reader_of_a_user_is_called_each_time(csv):
    calls = []

    def reader(path):
        calls.append(path)
        return read_csv(path, "label", drop=["admitted"])

    for _ in range(2):
        read = table(csv, reader=partial(reader))
        read.features[0, 0] = 0.0  # it is the user's
    assert calls == [csv, csv]


def test_what_is_kept_cannot_be_changed_and_has_a_bound(csv, monkeypatch):
    with pytest.raises(ValueError, match="read-only"):
        table(csv).features[0, 0] = 0.0
    monkeypatch.setattr(last_read, "_MOST", 10)
    csv.touch()
    first, again = table(csv), table(csv)
    assert not np.shares_memory(first.features, again.features)
    assert not last_read._last


def test_a_run_on_what_was_read_before_has_the_bits_of_another(csv, tmp_path):
    words = ("data=csv", f"data.path={csv}", "data.label=label", "partition=round_robin")
    few = ("partition.num_clients=2", "model=logistic", "algorithm=fedavg", "rounds=1")
    hashes = []
    for name in ("first", "again", "anew"):
        if name == "anew":
            last_read._last.clear()
        kept = [*last_read._last]
        run(tmp_path / name, *words, *few)
        assert (kept == last_read._last) == (name == "again")
        hashes.append((tmp_path / name / "hashes.json").read_text())
    assert len({*hashes}) == 1


@pytest.fixture
def pictures(tmp_path):
    for number in range(8):
        folder = tmp_path / "pictures" / f"class_{number % 2}" / "more"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), 9 * number, np.uint8)).save(folder / f"{number}.png")
    (tmp_path / "pictures" / "class_1" / "empty").mkdir()
    return tmp_path / "pictures"


def add(folder, name):
    shutil.copy(folder / "class_0" / "more" / "0.png", folder / name)


NEW = {
    "nothing": (lambda folder: None, True),
    "a picture": (lambda folder: add(folder, "class_1/more/new.png"), False),
    "a picture in an empty folder": (lambda folder: add(folder, "class_1/empty/new.png"), False),
    "a picture less": (lambda folder: (folder / "class_1/more/1.png").unlink(), False),
    "a picture overwritten": (lambda folder: add(folder, "class_1/more/1.png"), False),
    "a class": (lambda folder: shutil.copytree(folder / "class_0", folder / "class_2"), False),
}


@pytest.mark.parametrize("change", NEW)
def test_pictures_are_read_once_until_something_changes(change, pictures):
    reader = partial(read_image_folder, size=[8, 8])
    first = ImageDataModule(RoundRobin(2), reader, path=str(pictures)).data
    alter, same = NEW[change]
    alter(pictures)
    again = ImageDataModule(RoundRobin(2), reader, path=str(pictures), seed=3).data
    assert np.shares_memory(again.images, first.images) == same
    expected = read_image_folder(pictures, size=[8, 8])
    np.testing.assert_array_equal(again.images, expected.images)
    assert again.classes == expected.classes
