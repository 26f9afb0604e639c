"""Federated fine-tuning of a bundle: its network and preprocessing, a better start than chance."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch

from medfed.config.compose import load
from medfed.config.description import checked
from medfed.delivery.bundle.bundle import read_bundle, write_bundle
from medfed.delivery.bundle.weights import kmeans
from medfed.delivery.export.export import export_run
from medfed.delivery.start.pretrained import Pretrained
from medfed.federation.split import float_entries
from medfed.records.folder import Run
from medfed.run.start import fit
from medfed.standalone.errors import CheckpointError, ConfigError
from tests.integration.runs import imaging, outcome, resume, run

FIRST = (
    *("algorithm=fedavg", "partition=centre", "rounds=2", "local.steps=40", "evaluation.every=2"),
    *("optimizer=adam", "optimizer.lr=0.01", "data.spacing=[1.5,1.5]", "checkpoint.every=2"),
)
SMALL = (
    *("experiment=finetune_bundle", "logger=none", "progress=false", "rounds=1"),
    *("local.steps=2", "data.generated.hospitals=2", "data.generated.patients=4"),
    *("data.generated.shape=[32,32,8]", "data.generated.seed=5", "data.patches_per_patient=4"),
    *("data.batch_size=4", "data.val_fraction=0.25", "data.test_fraction=0.25"),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A run, a bundle of it, and one that fine-tunes it on other patients."""
    root = tmp_path_factory.mktemp("finetune")
    run(root / "first", *imaging(root / "data"), *FIRST)
    export_run(checked(load([f"run={root / 'first'}", "client=hospital_0"], "export")))
    shutil.copytree(root / "first" / "bundles" / "hospital_0", root / "bundle")
    run(root / "tuned", *tuned(root))
    return root


def tuned(root: Path) -> tuple[str, ...]:
    return (*SMALL, f"data.root={root / 'other'}", f"init.weights={root / 'bundle'}")


def first_dice(folder: Path) -> float:
    return sum(record.metrics["dice"] for record in Run(folder).history() if record.round == 0)


def test_network_and_preprocessing_are_the_bundles(root):
    config, first = Run(root / "tuned").config, Run(root / "first").config
    assert config.model.network == first.model.network
    for key in ("spacing", "patch_size", "spatial_dims", "normalize"):
        assert config.data[key] == first.data[key]
    record = json.loads((root / "tuned" / "start.json").read_text())
    assert record["shares"]["matched"] == 1
    assert record["adopted"]["data.spacing"] == [1.5, 1.5]


def test_the_first_evaluation_is_better_than_from_random_weights(root):
    given = Run(root / "first").config.model.network
    network = [f"model.network.{k}={given[k]}" for k in ("channels", "strides", "num_res_units")]
    alike = ["data.patch_size=[16,16]", "data.spacing=[1.5,1.5]", *network]
    run(root / "random", *tuned(root), "init.weights=null", "init.adopt=[]", *alike)
    assert first_dice(root / "tuned") > 0.3 + first_dice(root / "random")


def test_it_goes_on_without_the_bundle(root):
    before = outcome(root / "tuned")
    (root / "bundle").rename(root / "elsewhere")
    try:
        resume(root / "tuned", *tuned(root))
    finally:
        (root / "elsewhere").rename(root / "bundle")
    assert outcome(root / "tuned") == before


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("model=densenet_bc",), r"a model of SegmentationTask, but model= chooses Classif"),
        (("init.adopt=[weights]",), r"init\.adopt=.* is no list of network and data"),
        (("init.part=[]",), r"init\.part is empty"),
        (("init.weights=null",), r"init\.weights has no value yet, but init\.adopt needs"),
    ],
    ids=["task", "adopt", "part", "nothing"],
)
def test_what_does_not_go_together_is_one_sentence(root, more, sentence, tmp_path):
    with pytest.raises(ConfigError, match=sentence):
        run(tmp_path / "run", *tuned(root), *more)
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_plain_file_has_no_network_to_adopt(tmp_path):
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pt")
    with pytest.raises(ConfigError, match=r"init\.adopt is for bundles of medfed export and"):
        Pretrained(weights=str(tmp_path / "a.pt"), adopt=["network"]).read()


def test_a_folder_of_another_origin_is_one_sentence(tmp_path):
    with pytest.raises(CheckpointError, match=r"is no bundle \(it has no configs"):
        Pretrained(weights=str(tmp_path)).read()
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "metadata.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is no bundle of medfed export"):
        Pretrained(weights=str(tmp_path)).read()


@pytest.mark.parametrize("name", ["digits", "table"])
def test_weights_of_our_own_bundles_are_unpacked_and_checked(name, hospital, tmp_path):
    """Also quantised ones; a file that was changed is refused."""
    made = hospital(name)
    bundle, network = read_bundle(made.bundle), copy.deepcopy(made.task.network)
    weight = next(n for n, t in bundle.state.items() if t.ndim > 1)
    folder = tmp_path / "bundle"
    dense = {n: t for n, t in bundle.state.items() if n != weight}
    write_bundle(folder, bundle.facts, dense, {weight: kmeans(bundle.state[weight], 2)})
    found = Pretrained(weights=str(folder), strict=True).read()
    account = fit(network, found)
    assert account.share(account.matched) == 1
    assert len(float_entries(network)[weight].unique()) <= 4
    assert found.names["channels"] == list(made.data.channel_names)
    (folder / "models" / "model.pt").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"model\.pt"):
        Pretrained(weights=str(folder)).read()
