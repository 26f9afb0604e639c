"""The network of a plan with a residual encoder is nnU-Net's, to the name and the bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from medfed.federation.split import ParameterSplit, float_entries
from medfed.models.networks.personal_part import default_personal
from medfed.models.networks.unet import planned_unet
from medfed.standalone.errors import ConfigError
from tests.sweeps import sweep

unets = pytest.importorskip(
    "dynamic_network_architectures.architectures.unet", reason="needs medfed[resenc]"
)
STORED = Path(__file__).parents[1] / "references" / "nnunet_plans.json"
NAMED = {
    f"{one['name']}, {plan['residual']}, {plan['configuration']}": plan
    for one in json.loads(STORED.read_text("utf-8"))["fingerprints"]
    for plan in one["plans"]
    if plan["residual"]
}
# One of each network; few as wide as planned would be quick.
PLANS = {str((p["strides"], p["kernel_sizes"])): name for name, p in NAMED.items()}.values()
PLAN = NAMED["ACDC, M, 3d_fullres"]


def by_nnunet(plan, channels, outputs):
    """What nnunetv2 2.8.1 builds: `ResEncUNetPlanner` and `get_network_from_plans`."""
    dims = len(plan["patch_size"])
    network = unets.ResidualEncoderUNet(
        input_channels=channels,
        n_stages=len(plan["strides"]),
        features_per_stage=plan["features"],
        conv_op=(nn.Conv2d, nn.Conv3d)[dims - 2],
        kernel_sizes=plan["kernel_sizes"],
        strides=plan["strides"],
        n_blocks_per_stage=plan["blocks"],
        num_classes=outputs,
        n_conv_per_stage_decoder=plan["decoder_blocks"],
        conv_bias=True,
        norm_op=(nn.InstanceNorm2d, nn.InstanceNorm3d)[dims - 2],
        norm_op_kwargs={"eps": 1e-5, "affine": True},
        dropout_op=None,
        dropout_op_kwargs=None,
        nonlin=nn.LeakyReLU,
        nonlin_kwargs={"inplace": True},
        deep_supervision=True,
    )
    network.apply(network.initialize)
    return network


def narrow(plan):
    """The same network with a sixteenth of the features."""
    return {**plan, "features": [of // 16 for of in plan["features"]]}


def ours_and_theirs(plan, device="cpu"):
    networks = []
    for build in (
        lambda: planned_unet(len(plan["patch_size"]), 2, 3, plan=plan),
        lambda: by_nnunet(plan, 2, 3),
    ):
        torch.manual_seed(35)
        with torch.device(device):
            networks.append(build())
    return networks


@sweep("name", PLANS)
def test_parameters_are_nnunets(name, monkeypatch):
    """But for those of the coarsest output, which nnU-Net never trains."""
    # Names and shapes need no values, which take most of the time even where there are none.
    monkeypatch.setattr(nn.init, "kaiming_normal_", lambda weight, **_: weight)
    ours, theirs = (n.state_dict() for n in ours_and_theirs(NAMED[name], "meta"))
    untrained = {f"decoder.seg_layers.0.{what}" for what in ("weight", "bias")}
    assert theirs.keys() - ours.keys() == untrained
    assert {n: t.shape for n, t in ours.items()} == {n: theirs[n].shape for n in ours}


@sweep("name", ["ACDC, M, 3d_fullres", "hippocampus, L, 3d_fullres", "random 6, M, 2d"])
def test_outputs_and_first_weights_are_nnunets(name):
    plan = narrow(NAMED[name])
    ours, theirs = (n.double() for n in ours_and_theirs(plan))
    known = theirs.state_dict()
    for what, tensor in ours.state_dict().items():
        assert torch.equal(tensor, known[what])
    for what, tensor in float_entries(ours).items():  # the last norm of a block begins at 0
        tensor.data.add_(torch.randn_like(tensor), alpha=0.1)
        known[what].copy_(tensor.data)
    least = torch.tensor(plan["strides"]).prod(0)
    image = torch.randn(1, 2, *(least * torch.tensor([1] * (len(least) - 1) + [2])).tolist())
    image = image.double()
    wanted = theirs(image)
    got = ours.train()(image)
    assert [h.shape for h in got] == [h.shape for h in wanted[:-1]]
    for head, other in zip(got, wanted, strict=False):
        torch.testing.assert_close(head, other, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(image), wanted[0], rtol=1e-12, atol=1e-12)
    sum(head.square().mean() for head in got).backward()
    assert all(p.grad is not None for p in ours.parameters())


def test_the_decoder_is_personal_and_every_weight_counts_once():
    network = planned_unet(3, 2, 3, plan=narrow(PLAN))
    entries = float_entries(network)
    assert sum(t.numel() for t in entries.values()) == sum(p.numel() for p in network.parameters())
    split = ParameterSplit.of(network, default_personal(network))
    assert {n.split(".")[0] for n in split.personal} == {"decoder"}
    assert {n.split(".")[0] for n in split.shared} == {"encoder"}


def test_without_deep_supervision_one_output_is_trained():
    network = planned_unet(3, 2, 3, plan=narrow(PLAN), deep_supervision=False, dropout=0.1)
    assert network(torch.ones(1, 2, 4, 64, 32)).shape == (1, 3, 4, 64, 32)
    last = f"decoder.seg_layers.{len(PLAN['strides']) - 2}"
    names = [n for n in float_entries(network) if "seg_layers" in n]
    assert names == [f"{last}.weight", f"{last}.bias"]
    assert any(isinstance(layer, nn.Dropout) for layer in network.modules())


def test_an_absent_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "dynamic_network_architectures.architectures.unet", None)
    with pytest.raises(ConfigError, match=r"pip install dynamic-network-architectures\."):
        planned_unet(3, 2, 3, plan=PLAN)
