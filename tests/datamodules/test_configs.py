"""Every shipped data and partition node builds what it names, with every setting written out."""

import inspect
from functools import cache
from pathlib import Path

import pytest
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf

from medfed.config import load
from medfed.datamodules.base import FederatedDataModule

CONFIGS = Path(__file__).parents[2] / "configs"
VOLUMES = ("brats", "brats_challenge", "brats_folder")
IMAGES = ("digits", "image_folder", "medmnist")
CASES = [
    (data, partition)
    for data in (*VOLUMES, *IMAGES, "breast_cancer", "csv", "diabetes", "heart", "mixture")
    for partition in ("centre", "channel_missing", "label_imbalance", "round_robin")
]


@cache
def composed(partition):
    """The node with its own defaults, which a plain reading of the file would leave out."""
    return load([f"partition={partition}"]).partition


def compose(data, partition):
    nodes = {
        "data": OmegaConf.load(CONFIGS / "data" / f"{data}.yaml"),
        "partition": composed(partition),
    }
    config = OmegaConf.create({**nodes, "seed": 3})
    if OmegaConf.is_missing(config.data, "path"):
        config.data.path = "somewhere"
    return config


@pytest.mark.parametrize(("data", "partition"), CASES)
def test_instantiates(data, partition):
    config = compose(data, partition)
    module = instantiate(config.data)
    assert isinstance(module, FederatedDataModule)
    assert module.seed == 3
    assert type(module.partition).__name__ == config.partition._target_.rsplit(".", 1)[1]


@pytest.mark.parametrize("data", [*VOLUMES, *IMAGES, "csv", "mixture"])
def test_every_setting_is_written_out(data):
    node = compose(data, "centre").data
    parameters = set(inspect.signature(get_class(node._target_)).parameters)
    assert parameters == {key for key in node if not key.startswith("_")}
