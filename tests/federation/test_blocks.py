"""A method that keeps a part at the client never runs with none, and says what there is."""

from __future__ import annotations

import re

import pytest
from monai.networks.nets import SegResNet, UNet
from torch import nn

from medfed.config.compose import load
from medfed.federation.algorithm import Algorithm
from medfed.federation.split import ParameterSplit, blocks, listed, main_blocks, proposal
from medfed.personalize.ditto import Ditto
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.fedper import FedPer
from medfed.personalize.fedrep import FedRep
from medfed.personalize.pfednet import PFedNet
from medfed.standalone.errors import ConfigError
from tests.federation.test_tied_weights import Tied
from tests.sweeps import sweep

NETWORK = SegResNet(2, 8, 1, 2)
KEEPING = [FedPer(), FedRep(), PFedNet(), FedAvg(personal="body"), Ditto(personal="task")]


@sweep("algorithm", KEEPING)
def test_nothing_personal_is_refused_with_the_blocks(algorithm: Algorithm):
    with pytest.raises(ConfigError) as caught:
        algorithm.split(NETWORK, (), "averaged")
    text = str(caught.value)
    assert "\n" not in text
    assert f"{type(algorithm).__name__} keeps a part" in text
    for block in ("down_layers.*", "up_layers.*", "up_samples.*", "conv_final.*"):
        child = NETWORK.get_submodule(block[:-2])
        assert f"{block} ({sum(p.numel() for p in child.parameters()):,})" in text
    pasted = re.search(r"'(model\.personal=[^']*)'", text)
    personal = load(["data=brats", "model=unet", pasted[1]]).model.personal
    assert algorithm.split(NETWORK, list(personal), "averaged").personal


@pytest.mark.parametrize("policy", ["averaged", "local"])
def test_statistics_alone_are_no_part(policy):
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(ConfigError, match="keeps a part of the model"):
        FedPer(personal=("1.running_*",)).split(network, (), policy)


@pytest.mark.parametrize("algorithm", [FedAvg(), Ditto(), FedPer(personal="none")])
def test_who_asks_for_none_gets_none(algorithm):
    assert algorithm.split(NETWORK, ("up_layers.*",), "averaged").personal == ()


def test_blocks_count_every_tensor_once():
    network = Tied()
    found = blocks(network, ParameterSplit.of(network, ["decode.*"]).personal)
    assert sum(b.parameters for b in found) == sum(p.numel() for p in network.parameters())
    assert {b.name: b.personal for b in found if b.personal} == {"encode": 9, "decode": 3}


def test_a_network_in_one_box_is_opened_and_a_parameter_at_the_root_is_a_block():
    network = UNet(2, 1, 1, (4, 8), (2,))
    assert [b.pattern for b in main_blocks(network)] == ["model.0.*", "model.1.*", "model.2.*"]
    network.scale = nn.Parameter(network.model[0].conv.weight.detach()[0, 0, 0])
    assert ("scale", "scale", 3, 0) in blocks(network)


def test_a_long_list_is_cut_and_the_last_blocks_are_proposed():
    network = nn.Sequential(*(nn.Linear(2, 2) for _ in range(40)))
    assert "5.* (6), 28 more, 34.* (6)" in listed(network)
    assert proposal(network, 0.05) == '\'model.personal=["38.*","39.*"]\''
