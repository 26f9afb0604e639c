"""Every experiment builds and trains a step with its model.

In ``make test-long`` the first with the same data also does so with every model of its task, new
ones included, and so does the first whose method mixes models.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf, open_dict
from PIL import Image

from medfed.common.seeding import numpy_rng
from medfed.config.description import RunDescription, describe
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.readers.heart import FEATURES, PUBLISHED
from medfed.models.classification import ClassificationTask, RiskTask
from medfed.models.detection import DetectionTask
from medfed.models.findings import FindingsTask
from medfed.models.regression import RegressionTask
from medfed.models.segmentation import SegmentationTask
from medfed.models.survival import SurvivalTask
from medfed.run.assembly import read_data, task_for
from medfed.run.federating import federate
from tests.contract.names import experiment_yamls, load, model_yamls
from tests.datamodules.picture_files import picture, write_index
from tests.datamodules.test_published_layouts import EXPERIMENTS as PUBLISHED_LAYOUTS

TASKS = (
    SegmentationTask,
    RegressionTask,
    RiskTask,
    ClassificationTask,
    FindingsTask,
    SurvivalTask,
    DetectionTask,
)
QUICK = ("folder=none", "local.steps=1", "rounds=1", "logger=none", "progress=false", "threads=1")
QUICK += ("evaluation.every=1", "seed=1", "++canonical.count=2")
PATCHES = ("data.patches_per_patient=2", "data.batch_size=2")
PLANNED = ("data.planning.memory_gb=0.02", "data.planning.features=4")
# How each data set is made small; the sides of what a network sees stay those of the experiment.
SMALL = {
    "brats": (
        *PATCHES,
        "data.generated.patients=3",
        "data.generated.shape=[64,64,8]",
        "data.eval_every=4",
    ),
    "datalist": (
        *PATCHES,
        "data.generated.patients=3",
        "data.generated.shape=[84,68,12]",
        "data.eval_every=4",
    ),
    "image_masks": PATCHES,
    "luna16": ("data.generated.patients=3", "data.generated.shape=[48,48,24]", "data.batch_size=2"),
    "luna16_scans": (*PATCHES, "data.generated.patients=3", "data.generated.shape=[64,64,32]"),
    "medmnist": ("data.generated.images=[60,30,30]", "data.batch_size=2"),
    "digits": ("data.batch_size=2",),
}


@cache
def family(model: str) -> type:
    """The task of a model's yaml, of those that ship."""
    task = get_class(OmegaConf.load(model_yamls()[model])["_target_"])
    return next(base for base in TASKS if issubclass(task, base))


@cache
def experiment_node(experiment: str) -> DictConfig:
    """An experiment's yaml, with that on which it builds."""
    node = OmegaConf.load(experiment_yamls()[experiment])
    bases = [d for d in node.defaults if isinstance(d, str) and d != "_self_"]
    return OmegaConf.merge(*map(experiment_node, bases), node) if bases else node


def chosen(experiment: str) -> dict[str, str]:
    """The options that an experiment chooses, by group."""
    node = OmegaConf.load(experiment_yamls()[experiment])
    bases = [d for d in node.defaults if isinstance(d, str) and d != "_self_"]
    if bases:
        return chosen(bases[0])
    return {k.removeprefix("override /"): v for d in node.defaults for k, v in d.items()}


@cache
def model_node(model: str) -> DictConfig:
    return OmegaConf.load(model_yamls()[model])


def take_model(config: DictConfig, experiment: str, model: str) -> None:
    """What ``model=...`` would compose, but composed once per experiment and once per model."""
    with open_dict(config):
        own = experiment_node(experiment).get("model", {})
        config.model = OmegaConf.merge(model_node(model), own)


_read: dict[str, FederatedDataModule] = {}
_tried: set[tuple[str, bool, type]] = set()


def read(described: str, config: RunDescription) -> FederatedDataModule:
    """The data of a configuration, read once for all experiments on the same."""
    if described not in _read:
        _read[described] = read_data(config)
    return _read[described]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, tuple[str, ...]]:
    """What only a user has: pictures of two cameras, tables of four hospitals."""
    pictures, tables = tmp_path_factory.mktemp("pictures"), tmp_path_factory.mktemp("tables")
    rows = []
    for centre, patients in (("drive", 9), ("chase", 6)):
        (pictures / centre).mkdir()
        for n in range(patients):
            image, mask = picture(numpy_rng("eye", centre, n), 132, 132)
            Image.fromarray(image).save(pictures / centre / f"{n}.png")
            for name in (f"{n}_mask", f"{n}_mask_second_reader"):
                Image.fromarray(mask).save(pictures / centre / f"{name}.png")
            named = {"image": f"{centre}/{n}.png", "mask": f"{centre}/{n}_mask.png"}
            rows.append({**named, "patient": f"{centre}{n}", "centre": centre})
    write_index(pictures, rows)
    for centre in PUBLISHED:
        cells = numpy_rng("heart", centre).uniform(1, 4, (30, len(FEATURES))).round()
        ill = np.arange(30) % 2
        lines = [",".join(map(str, [*row, y])) for row, y in zip(cells, ill, strict=True)]
        (tables / f"processed.{centre}.data").write_text("\n".join(lines) + "\n")
    rows = [f"{n},{'ab'[n % 2]},train,{n % 7},{10 + 7 * n},{n // 2 % 2}" for n in range(60)]
    (tables / "survival.csv").write_text("\n".join(["pid,region,fold,age,T,E", *rows]))
    return {
        "image_masks": (f"data.path={pictures}",),
        "heart": (f"data.path={tables}",),
        "csv": (f"data.path={tables / 'survival.csv'}",),
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cohorts")


each_experiment = pytest.mark.parametrize(
    "experiment", sorted({*experiment_yamls()} - {*PUBLISHED_LAYOUTS})
)


@pytest.fixture
def small(
    experiment: str, made: dict, root: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[DictConfig, FederatedDataModule]:
    """An experiment with little data, and these."""
    # The step itself is the trial.
    monkeypatch.setattr("medfed.run.assembly.try_model", lambda task, data: None)
    name, own = (chosen(experiment)[group] for group in ("data", "model"))
    keys = (*QUICK, *SMALL.get(name, ()), *made.get(name, ()))
    keys += (f"data.root={root}",) if name in SMALL else ()
    keys += PLANNED if own == "planned" else ()
    config = load([f"experiment={experiment}", *keys])
    config.init = load([]).init  # an experiment that starts from weights has none here
    return config, read(OmegaConf.to_yaml(config.data, resolve=True), describe(config))


def takes_a_step(
    config: DictConfig, data: FederatedDataModule, experiment: str, model: str
) -> None:
    take_model(config, experiment, model)
    try:
        described, task = task_for(describe(config), data)
        federation, _ = federate(described, data, task)
        client = federation.clients[federation.ids[0]]
        client.begin(0, "fit", 0)
        before = client.weights
        after = client.train(before, steps=1)
    except Exception as error:
        raise AssertionError(f"experiment={experiment} model={model}: {error}") from error
    assert client.loss is not None
    assert math.isfinite(client.loss), model
    assert any(not torch.equal(t, after[n]) for n, t in before.items()), model


@each_experiment
def test_its_own_model_trains(experiment: str, small: tuple) -> None:
    takes_a_step(*small, experiment, chosen(experiment)["model"])


@pytest.mark.long
@each_experiment
def test_every_model_of_the_task_trains(experiment: str, small: tuple) -> None:
    name, own = (chosen(experiment)[group] for group in ("data", "model"))
    kind = (name, chosen(experiment)["algorithm"] == "ppfl", family(own))
    others = [] if kind in _tried else [m for m in model_yamls() if family(m) is family(own)]
    others = [m for m in others if "planned" not in (m, own)]  # a plan is of its data
    others = [m for m in others if m != "poisson"]  # for counts, which no experiment has
    _tried.add(kind)
    for model in others:
        takes_a_step(*small, experiment, model)


@pytest.mark.parametrize(
    ("experiment", "model"), [("retina_readers", "basic_unet"), ("cer_stc", "small_cnn")]
)
def test_pairs_are_what_would_be_composed(experiment: str, model: str) -> None:
    path = ("data.path=somewhere",) if experiment.startswith("retina") else ()
    typed = load([f"experiment={experiment}", f"model={model}", *path])
    swapped = load([f"experiment={experiment}", *path])
    take_model(swapped, experiment, model)
    assert typed == swapped
