"""Networks of plain data are those of the run: same names, same outputs."""

from __future__ import annotations

import json

import pytest
import torch

from medfed.config.compose import load
from medfed.delivery.bundle.networks import build_network, describe
from medfed.records.tasks import build_task
from medfed.standalone.errors import CheckpointError, ConfigError
from tests.toys import assert_alike

CASES = {
    "unet": ((4, 3), ["model=unet", "model.network.norm=instance"]),
    "basic_unet": ((4, 3), ["model=basic_unet"]),
    "published": ((4, 3), ["model=basic_unet", "model.network.published=true"]),
    "densenet_bc": ((1, 2), ["model=densenet_bc", "model.network.block_config=[2,2]"]),
    "small stem": (
        (1, 2),
        ["model=densenet_bc", "model.network.stem=small", "model.network.block_config=[2,2]"],
    ),
    "small_cnn": ((1, 10), ["model=small_cnn"]),
    "small_cnn, no norm": ((1, 10), ["model=small_cnn", "model.network.norm=none"]),
    "logistic": ((7, 3), ["model=logistic"]),
    "mlp": ((7, 3), ["model=mlp"]),
    "mlp_regression": ((7, 1), ["model=mlp_regression"]),
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_the_plain_network_is_that_of_the_run(case):
    (channels, out), overrides = CASES[case]
    facts = [f"in_channels={channels}", f"out_channels={out}", "spatial_dims=2", "regions=[a,b,c]"]
    config = load([*overrides, *facts])
    network = build_task(config.model, None, config.seed).network.eval()
    plain = json.loads(json.dumps(describe(dict(config.model.network))))
    again = build_network(plain).eval()
    again.load_state_dict(network.state_dict())
    image = torch.randn(
        2, channels, *([] if case in ("logistic", "mlp", "mlp_regression") else [32, 32])
    )
    with torch.no_grad():
        assert_alike(again(image), network(image), 1e-6)


def test_an_unknown_network():
    with pytest.raises(ConfigError, match="Bundles know no network mine"):
        describe({"_target_": "mine"})


def test_arguments_that_do_not_fit():
    with pytest.raises(CheckpointError, match=r"nets\.UNet cannot be built .* argument 'depth'"):
        build_network({"_target_": "monai.networks.nets.UNet", "depth": 3})
