"""``medfed prepare`` as a user calls it, and the training that it prepares."""

from __future__ import annotations

import logging
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from medfed.config.compose import described
from medfed.datamodules.generated.luna16 import LunaCohort
from medfed.run.prepare import contact_sheet, prepare
from medfed.standalone.errors import ConfigError, DataError
from tests import processes
from tests.checking import check_overrides
from tests.integration.runs import run, typed

COHORT = LunaCohort(hospitals=2, patients=4, shape=(48, 48, 24), lookalikes=8, seed=1)
SMALL = (
    "data=luna16",
    "data.generated.hospitals=2",
    "data.generated.patients=4",
    "data.generated.shape=[48,48,24]",
    "data.generated.lookalikes=8",
    "data.generated.seed=1",
)


@pytest.fixture(scope="module")
def luna_path(tmp_path_factory) -> Path:
    return COHORT.ensure(tmp_path_factory.mktemp("luna"))[0]


def script(*overrides: str) -> subprocess.CompletedProcess[str]:
    return processes.run("scripts/prepare.py", *overrides)


def test_the_folder_of_hydra_is_the_folder_of_what_is_shown(tmp_path):
    given = ("data=breast_cancer", "partition=round_robin", "pictures.format=none", "show=true")
    done = script(*given, f"hydra.run.dir={tmp_path}/shown")
    assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in (tmp_path / "shown").iterdir())
    assert names == ["cohort.json", "splits.json"]


def test_prepares_verifies_and_names_the_command_to_train(luna_path, tmp_path, caplog):
    overrides = ["data=luna16", f"data.path={luna_path}", f"data.cache={tmp_path}"]
    done = script(*overrides)
    assert done.returncode == 0, done.stderr
    for line in (
        rf"Data: {luna_path}\.",
        rf"Cache: {tmp_path}/luna16_\w+",
        r"Items: 8",
        r"Samples: \d+ \(\d+ non-nodule, \d+ nodule\)",
        r"Size: \d+\.\d [kM]B, from sources of \d+\.\d [kM]B",
        r"Made in \d+\.\d s",
        r"Checksum: [0-9a-f]{64}",
    ):
        assert re.search(rf"^{line}$", done.stdout, re.MULTILINE), line
    assert "prepared 8/8" in done.stderr
    command = shlex.split(done.stdout.splitlines()[-1].removeprefix("To train on these data: "))
    assert command[:2] == ["medfed", "train"]
    assert set(overrides) < set(command)
    (config,) = check_overrides(command[2:])
    assert config.data.path == str(luna_path)
    with caplog.at_level(logging.INFO):
        data = prepare(typed(overrides))
    assert "It existed already; verified in" in caplog.text
    assert data.store.checksum in done.stdout


def test_show_sets_up_the_clients(luna_path, tmp_path):
    overrides = [
        "data=luna16",
        f"data.path={luna_path}",
        f"data.cache={tmp_path}",
        "partition=round_robin",
    ]
    data = prepare(described([*overrides, "partition.num_clients=3", "show=true"], "prepare"))
    assert len(data.clients) == 3
    counts = [min(client.num_samples, 12) for client in data.clients.values()]
    assert len({*counts}) > 1  # some have fewer samples than a row has places
    (axes,) = contact_sheet(data).axes
    assert len(axes.images) == sum(counts)
    assert axes.get_xlim()[1] >= max(image.get_extent()[1] for image in axes.images)


def test_data_without_a_cache_need_nothing(caplog):
    with caplog.at_level(logging.INFO):
        prepare(typed(["data=breast_cancer"]))
    assert "need no preparation" in caplog.text
    assert "medfed train experiment=clinical_pfednet data=breast_cancer" in caplog.text


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("workers=0", r"workers must be a whole number of at least 1, not 0"),
        ("seed=-1", r"seed must be a whole number of at least 0, not -1"),
        ("data.patches.slices=2", r"slices=2 must be an odd number"),
        ("data.reader.missing=ignore", r"data\.reader\.missing='ignore' is unknown"),
        ("worker=2", r"Unknown key 'worker' \(did you mean workers"),
    ],
)
def test_mistakes_are_one_sentence(override, sentence, tmp_path):
    with pytest.raises(ConfigError, match=sentence):
        prepare(described([f"data.root={tmp_path}", *SMALL, override], "prepare"))


def test_data_without_a_path():
    with pytest.raises(ConfigError, match=r"data\.path has no value yet; set it by data\.path="):
        prepare(described(["data=csv"], "prepare"))


def test_a_path_without_scans(tmp_path):
    with pytest.raises(DataError, match=r"has no \.mhd scans"):
        prepare(described(["data=luna16", f"data.path={tmp_path}"], "prepare"))
    assert not list(tmp_path.iterdir())


def test_the_experiment_trains_on_the_prepared_patches(tmp_path):
    settings = (f"data.root={tmp_path}", *SMALL, "data.patches.size=[16,16]")
    data = prepare(described(settings, "prepare"))
    manifest = data.store.folder / "manifest.json"
    before = manifest.stat().st_mtime_ns
    summary, _ = run(
        tmp_path / "run",
        "experiment=luna16_pfednet",
        *settings,
        "partition=centre",
        "rounds=1",
        "evaluation.every=1",
        "local.steps=2",
        "model.network.block_config=[1,1,1]",
        "logger=none",
        "progress=false",
    )
    assert set(summary["clients"]) == {"hospital_0", "hospital_1"}
    assert manifest.stat().st_mtime_ns == before
