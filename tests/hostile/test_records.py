"""Mutated records of a run and of a bundle: read as before, or refused in a sentence."""

from __future__ import annotations

import csv
import io
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import medfed
from medfed.config.compose import load
from medfed.config.description import checked
from medfed.delivery.bundle.bundle import read_bundle, write_manifest
from medfed.delivery.export.export import export_run
from medfed.delivery.export.run_record import RunRecord
from medfed.delivery.predict.options import PredictOptions
from medfed.delivery.predict.prediction import make_predictor
from medfed.records.places import MANIFEST
from medfed.reports.report import report_runs
from medfed.run.evaluation import evaluate_run
from medfed.standalone.errors import MedfedError
from tests.integration.runs import CLINICAL

MUTATIONS = 300
# Values that no run writes at most places: types, sizes, interpolations, targets, paths, escapes.
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 10**30, 1.5, 1e308, -1e400, float("nan"), "", "x" * 5000, "1", [], {}),
    *([[[]]], {"a": {}}, ["a", 1], "${oc.env:HOME}", "${seed}", "${nothing}", "???", "/etc/passwd"),
    *("../../x", {"_target_": "os.system", "_args_": ["id"]}, {"_target_": "torch.nn.Linear"}),
    *("a\nb", "\x1b[31m", "[/nope]", "\u202e", "=1", "/dev/zero", "medfed.api.train"),
)


def places(content: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values in mappings and lists."""
    if at:
        yield at
    inner = content.items() if isinstance(content, dict) else ()
    inner = enumerate(content[:20]) if isinstance(content, list) else inner
    for key, value in inner:
        yield from places(value, (*at, key))


def changed(content: Any, chance: random.Random) -> None:
    """Changes, removes, renames or adds one value of plain content."""
    *above, key = chance.choice([*places(content)])
    for step in above:
        content = content[step]
    what = chance.random()
    if what < 0.6:
        content[key] = chance.choice(VALUES)
    elif what < 0.75:
        del content[key]
    elif isinstance(content, dict):
        content[chance.choice(["", "x", "../x", "_target_", "\x1b[1m"])] = content.pop(key)
    else:
        content.append(chance.choice(VALUES))


def mutated(path: Path, chance: random.Random) -> None:
    """Writes a record anew, with one change of its content or of its bytes."""
    whole = path.read_bytes()
    kind = chance.random()
    if kind < 0.15:
        at = chance.randrange(len(whole))
        path.write_bytes(whole[:at] + bytes([chance.randrange(256)]) * chance.choice((0, 1, 9)))
    elif kind < 0.3:
        at = chance.randrange(len(whole))
        path.write_bytes(whole[:at] + bytes([chance.randrange(256)]) + whole[at + 1 :])
    elif path.suffix == ".csv":
        rows = list(csv.reader(io.StringIO(whole.decode())))
        row = chance.choice(rows)
        row[chance.randrange(len(row))] = str(chance.choice(VALUES))
        text = io.StringIO()
        csv.writer(text).writerows(rows)
        path.write_text(text.getvalue())
    else:
        is_json = path.suffix == ".json"
        content = json.loads(whole) if is_json else yaml.safe_load(whole)
        changed(content, chance)
        path.write_text(json.dumps(content) if is_json else yaml.safe_dump(content))


def all_of_run(folder: Path) -> None:
    """What reads a run folder without its command line; the slow readers read some of them."""
    run = medfed.Run(folder)
    _ = run.clients, run.summary, run.metrics, run.ledger, run.history(), run.versions
    RunRecord.read(folder)
    if int(folder.name) % 20 == 0:
        report_runs(str(folder), folder.parent / "reported", figures=False)
        evaluate_run(folder)


def all_of_bundle(folder: Path) -> None:
    """What reads a bundle."""
    read_bundle(folder)
    make_predictor(read_bundle(folder), PredictOptions(str(folder), "x.csv", "y.csv"))


def outcomes(
    whole: Path, read: Callable[[Path], None], seal: Callable[[Path], None], count: int, tmp: Path
) -> tuple[int, dict[str, str]]:
    """Mutates a record of a copy, many times; counts what is refused, and names what is wrong."""
    refused, wrong = 0, dict[str, str]()
    records = sorted(
        path.relative_to(whole)
        for path in whole.rglob("*")
        if path.suffix in (".json", ".yaml", ".csv") and path.name != MANIFEST
    )
    for number in range(count):
        chance = random.Random(number)
        copy = tmp / str(number)
        shutil.copytree(whole, copy)
        record = chance.choice(records)
        mutated(copy / record, chance)
        seal(copy)
        try:
            read(copy)
        except MedfedError as error:
            refused += 1
            if "\n" in str(error):
                wrong[f"{number} {record}"] = f"several lines: {error}"
        except Exception as error:
            wrong[f"{number} {record}"] = f"{type(error).__name__}: {error}"
        shutil.rmtree(copy)
    return refused, wrong


@pytest.fixture(scope="module")
def finished(finished_run) -> Path:
    return finished_run(*CLINICAL, "rounds=2")


def test_records_of_a_run(finished, tmp_path):
    refused, wrong = outcomes(finished, all_of_run, lambda copy: None, MUTATIONS, tmp_path)
    assert not wrong, wrong
    assert refused > MUTATIONS // 10


def test_records_of_a_bundle(finished, tmp_path):
    """Whoever sends a bundle seals it anew."""
    config = checked(load([f"run={finished}", f"out={tmp_path / 'out'}"], "export"))
    bundle = export_run(config)[0]
    refused, wrong = outcomes(bundle, all_of_bundle, write_manifest, MUTATIONS, tmp_path / "copies")
    assert not wrong, wrong
    assert refused > MUTATIONS // 10
