"""Every partition can be chosen on the command line, also below those that wrap another one."""

import inspect
from functools import cache

import pytest
from omegaconf import OmegaConf

from medfed.config import CONFIG_DIR, build, check_overrides, load
from medfed.datamodules import partitions
from medfed.datamodules.partitions.base import Wrapped
from medfed.errors import ConfigError

NAMES = sorted(p.stem for p in (CONFIG_DIR / "partition").glob("*.yaml"))


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
    named = {node(f"partition={name}")._target_.rpartition(".")[2] for name in NAMES}
    assert named == set(partitions.__all__) - {"Partition"}


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_is_written_out(name):
    partition = built(f"partition={name}")
    parameters = set(inspect.signature(type(partition)).parameters)
    assert parameters == {key for key in node(f"partition={name}") if not key.startswith("_")}


@pytest.mark.parametrize(
    ("wrapper", "name"),
    [*(("channel_missing", name) for name in NAMES), ("site_effect", "label_groups")],
)
def test_every_partition_can_be_wrapped(wrapper, name):
    partition = built(f"partition={wrapper}", f"partition@partition.assignment={name}")
    assert isinstance(partition, Wrapped)
    assert type(partition.assignment) is type(built(f"partition={name}"))


def test_two_wrappers():
    """The innermost one is chosen in the same way, and takes settings."""
    partition = build(
        node(
            "partition=channel_missing",
            "partition@partition.assignment=site_effect",
            "partition@partition.assignment.assignment=shards",
            "partition.assignment.assignment.num_clients=3",
        )
    )
    assert partition.assignment.assignment == partitions.Shards(3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["partition=dirichelt"], r"Unknown partition 'dirichelt' \(did you mean dirichlet"),
        (["partition@partition.assignment=shard"], r"Unknown partition 'shard' \(did you mean sh"),
        (
            ["partition.assignment=shards"],
            "would replace a whole section; choose an option by partition@partition.assignment=",
        ),
        (
            ["partition=centre", "partition@partition.assignment=shards"],
            r"Unknown key 'partition\.assignment'.*; partition has centres\.",
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
        build(node("partition.assignment=null"))
