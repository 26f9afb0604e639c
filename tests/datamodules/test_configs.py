"""Every data and partition node builds what it names, with every setting written out."""

import inspect
from functools import cache

import pytest
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf

from medfed.config.compose import build
from medfed.datamodules.base import FederatedDataModule
from medfed.standalone.errors import ConfigError
from tests.contract.names import data_yamls, load, partition_yamls
from tests.sweeps import sweep

DATA = [path.stem for path in data_yamls()]
PARTITIONS = [path.stem for path in partition_yamls()]
# Where things are in a CSV file; left out where a reader knows.
COLUMNS = {"features", "label", "centre", "patient", "positive", "negative", "outcome", "header"}
COLUMNS |= {"embedded", "reader", "outcome_scale", "drop", "unlabelled", "ages"}
COLUMNS |= {"time", "event", "intervals", "cuts", "split", "most_patients", "covariates"}
COLUMNS |= {"missing", "limits", "unplaced", "stratify"}


@cache
def composed(data, partition="centre"):
    config = load([f"data={data}", f"partition={partition}", "seed=3"])
    for node, key in (
        (config.data, "path"),
        (config.partition, "file"),
        (config.partition.get("assignment", config), "file"),
    ):
        if OmegaConf.is_missing(node, key):
            node[key] = "somewhere"
    return config


def settings(target):
    """What a constructor takes, with what it passes on to its bases."""
    found = set()
    for one in target.__mro__:
        if "__init__" not in vars(one):
            continue
        parameters = inspect.signature(one.__init__).parameters.values()
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        found |= {p.name for p in parameters if p.kind in named} - {"self"}
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
            break
    return found


# Each data with one partition at least, and each partition with one of the data.
PAIRS = [
    (DATA[n % len(DATA)], PARTITIONS[n % len(PARTITIONS)])
    for n in range(max(len(DATA), len(PARTITIONS)))
]


@pytest.mark.parametrize(("data", "partition"), PAIRS)
def test_instantiates(data, partition):
    config = composed(data).copy()
    config.partition = composed(DATA[0], partition).partition
    module = instantiate(config.data)
    assert isinstance(module, FederatedDataModule)
    assert module.seed == 3
    assert type(module.partition).__name__ == config.partition._target_.rsplit(".", 1)[1]


@pytest.mark.parametrize("data", DATA)
def test_every_setting_is_written_out(data):
    node = composed(data).data
    written = {key for key in node if not key.startswith("_")}
    known = settings(get_class(node._target_))
    assert written <= known
    assert known - written <= (set() if "label" in written else COLUMNS)


@pytest.mark.parametrize("data", DATA)
@sweep("key", ["batch_size", "val_fraction", "path"])
def test_values_of_another_type_are_refused(data, key):
    """Also of settings that a data module shares with others."""
    config = composed(data).copy()
    if key not in config.data:
        return
    config.data[key] = [1]
    with pytest.raises(ConfigError, match=rf"data\.{key} must be "):
        build(config.data)
