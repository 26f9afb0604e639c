"""Every partition can be chosen on the command line, also below those that wrap another one."""

import importlib
import inspect
import pkgutil
from functools import cache

import pytest
from omegaconf import OmegaConf

from medfed.config.compose import build
from medfed.datamodules import partitions
from medfed.datamodules.partitions.base import Partition, Wrapped
from medfed.datamodules.partitions.by_label import Shards
from medfed.standalone.errors import ConfigError
from tests.checking import check_overrides
from tests.contract.names import load, partition_yamls
from tests.sweeps import sweep

NAMES = [path.stem for path in partition_yamls()]
WRAPPERS = [path.stem for path in partition_yamls() if "@assignment" in path.read_text()]


@cache
def node(*overrides):
    return load(overrides).partition


def built(*overrides):
    """The partition; a file that has to be named is named."""
    config = node(*overrides)
    for part in (config, config.get("assignment", config)):
        if OmegaConf.is_missing(part, "file"):
            part.file = "splits.json"
    return build(config)


def test_every_partition_has_a_config():
    found = set()
    for info in pkgutil.iter_modules(partitions.__path__, f"{partitions.__name__}."):
        for name, one in vars(importlib.import_module(info.name)).items():
            own = inspect.isclass(one) and one.__module__ == info.name
            if own and issubclass(one, Partition) and not inspect.isabstract(one):
                found.add(f"{info.name}.{name}")
    found.remove(f"{Wrapped.__module__}.{Wrapped.__name__}")  # changes nothing
    assert found <= {node(f"partition={name}")._target_ for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_is_written_out(name):
    partition = built(f"partition={name}")
    parameters = set(inspect.signature(type(partition)).parameters)
    assert parameters == {key for key in node(f"partition={name}") if not key.startswith("_")}


@pytest.mark.parametrize(
    ("wrapper", "name"), [(WRAPPERS[n % len(WRAPPERS)], name) for n, name in enumerate(NAMES)]
)
def test_every_partition_can_be_wrapped(wrapper, name):
    partition = built(f"partition={wrapper}", f"partition@partition.assignment={name}")
    assert isinstance(partition, Wrapped)
    assert type(partition.assignment) is type(built(f"partition={name}"))
    outer, inner = partition.traits, partition.assignment.traits
    assert (outer.keeps_all, outer.seeded) == (inner.keeps_all, inner.seeded)
    assert outer.needs >= inner.needs


def test_two_wrappers():
    """The innermost one is chosen in the same way, and takes settings."""
    partition = build(
        node(
            "partition=channel_missing",
            "partition@partition.assignment=channel_missing",
            "partition@partition.assignment.assignment=shards",
            "partition.assignment.assignment.num_clients=3",
        )
    )
    assert partition.assignment.assignment == Shards(3)


@sweep(
    ("overrides", "message"),
    [
        (["partition=dirichelt"], r"Unknown partition 'dirichelt' \(did you mean dirichlet"),
        (
            ["partition=channel_missing", "partition@partition.assignment=shard"],
            r"Unknown partition 'shard' \(did you mean sh",
        ),
        (
            ["partition=channel_missing", "partition.assignment=shards"],
            "would replace a whole section; choose an option by partition@partition.assignment=",
        ),
        (
            ["partition=centre", "partition@partition.assignment=shards"],
            r"Unknown key 'partition\.assignment'.*; partition has centres, patients\.",
        ),
        (
            ["partition=dirichlet", "partition.alpa=1"],
            r"\(did you mean alpha\?\); partition has num",
        ),
    ],
)
def test_mistakes_are_explained(overrides, message):
    with pytest.raises(ConfigError, match=message):
        check_overrides(overrides)


def test_no_assignment():
    with pytest.raises(
        ConfigError, match=r"partition\.assignment=None is no partition; choose one"
    ):
        build(node("partition=channel_missing", "partition.assignment=null"))
