"""What the tests remember of Hydra is what Hydra composes."""

from __future__ import annotations

import hydra
import pytest
from omegaconf import OmegaConf

from medfed.config import compose as composer
from medfed.config.compose import load
from medfed.standalone.errors import ConfigError
from tests import composing
from tests.contract.names import experiment_yamls

OVERRIDES = (
    ("algorithm=ditto", "seed=3", "algorithm.strength=0.5"),
    ("codec.up=stc", "channel.up.cer.gamma=0.1", "+local.clip=1", "hydra.run.dir=/tmp/a b"),
    ("optimizer=adamw", "~scheduler", "data.batch_size=7", "name='x,y'"),
)


@pytest.mark.parametrize("overrides", OVERRIDES, ids=lambda words: words[0])
@pytest.mark.parametrize("experiment", sorted(experiment_yamls()))
def test_remembered_configurations_are_hydras(experiment, overrides, monkeypatch):
    words, both = (f"experiment={experiment}", *overrides), []
    for compose in (composing.remembered, hydra.compose):
        monkeypatch.setattr(composer, "compose", compose)
        try:
            config = composer._composed(list(words), "train").config
            both.append(OmegaConf.to_container(config, resolve=False))
        except ConfigError as error:
            both.append(str(error))
    assert both[0] == both[1]


def test_a_configuration_that_is_changed_changes_no_other():
    first = load(["experiment=brats_pfednet"])
    first.seed = 99
    assert load(["experiment=brats_pfednet"]).seed != 99
