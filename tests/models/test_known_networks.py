"""The personal part of well-known networks, which nothing but the class tells."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from monai.networks import nets
from torch import nn

from medfed.config.compose import build, load
from medfed.federation.split import ParameterSplit, float_entries
from medfed.models.networks.personal_part import PERSONAL, default_personal, known_personal, nearest
from tests.sweeps import sweep

CONVS = {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2]}
TRANSFORMER = {"hidden_size": 48, "mlp_dim": 96, "num_heads": 4, "spatial_dims": 2}
WIDTHS = (8, 16, 32, 64, 128, 8)
UNETS = {"channels": (8, 16, 32, 64), "strides": (2, 2, 2)}
# Network, percent of its parameters that are personal, and the modules that they are in.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], float, set[str]]] = {
    "segresnet": (
        lambda: nets.SegResNet(2, 8, 1, 2), 6.9, {"up_layers", "up_samples", "conv_final"},
    ),
    "segresnet_vae": (
        lambda: nets.SegResNetVAE((32, 32), spatial_dims=2, init_filters=8, out_channels=2),
        6.0, {"up_layers", "up_samples", "conv_final"},
    ),
    "segresnet_ds": (
        lambda: nets.SegResNetDS(2, 8, 1, 2, blocks_down=(1, 2, 2)), 17.9, {"up_layers"},
    ),
    "dynunet": (
        lambda: nets.DynUNet(2, 1, 2, **CONVS, filters=[8, 16, 32], deep_supervision=True),
        38.5, {"upsamples", "output_block", "deep_supervision_heads"},
    ),
    "dynunet_plain": (
        lambda: nets.DynUNet(2, 1, 2, **CONVS, filters=[8, 16, 32]),
        38.4, {"upsamples", "output_block"},
    ),
    "unetr": (
        lambda: nets.UNETR(1, 2, (32, 32), feature_size=8, **TRANSFORMER),
        38, {"decoder2", "decoder3", "decoder4", "decoder5", "out"},
    ),
    "swin_unetr": (
        lambda: nets.SwinUNETR(in_channels=1, out_channels=2, feature_size=12, spatial_dims=2),
        28.8, {*(f"decoder{i}" for i in range(1, 6)), "out"},
    ),
    "basic_unet": (
        lambda: nets.BasicUNet(2, 1, 2, WIDTHS), 39.4, {*(f"upcat_{i}" for i in range(1, 5)),
                                                        "final_conv"},
    ),
    "basic_unet_pp": (
        lambda: nets.BasicUNetPlusPlus(2, 1, 2, WIDTHS),
        48.3, {*(f"upcat_{i}_{j}" for i in range(4) for j in range(1, 5 - i)),
               *(f"final_conv_0_{j}" for j in range(1, 5))},
    ),
    "unet": (lambda: nets.UNet(2, 1, 2, **UNETS), 40.3, {"model"}),
    "unet_of_two": (lambda: nets.UNet(2, 1, 2, (8, 16), (2,)), 25.8, {"model"}),
    "attention_unet": (
        lambda: nets.AttentionUnet(2, 1, 2, (8, 16, 32), (2, 2)), 39.7, {"model"},
    ),
    "vnet": (
        lambda: nets.VNet(2, 1, 2), 47.5,
        {"up_tr256", "up_tr128", "up_tr64", "up_tr32", "out_tr"},
    ),
    "flexible_unet": (
        lambda: nets.FlexibleUNet(1, 2, "efficientnet-b0", spatial_dims=2),
        25.1, {"decoder", "segmentation_head"},
    ),
    "densenet": (lambda: nets.DenseNet121(2, 1, 2), 0.03, {"class_layers"}),
    "resnet": (
        lambda: nets.resnet18(spatial_dims=2, n_input_channels=1, num_classes=4), 0.02, {"fc"},
    ),
    "senet": (
        lambda: nets.SEResNet50(spatial_dims=2, in_channels=1, num_classes=4), 0.03, {"last_linear"}
    ),
    "efficientnet": (
        lambda: nets.EfficientNetBN("efficientnet-b0", False, spatial_dims=2, in_channels=1,
                                    num_classes=6),
        0.2, {"_fc"},
    ),
    "vit": (
        lambda: nets.ViT(1, (32, 32), (8, 8), num_layers=2, classification=True, **TRANSFORMER),
        0.3, {"classification_head"},
    ),
}  # fmt: skip


@sweep("name", NETWORKS)
def test_the_share_and_the_modules(name):
    build, percent, modules = NETWORKS[name]
    network = build()
    split = ParameterSplit.of(network, default_personal(network))
    sizes = {n: t.numel() for n, t in float_entries(network).items()}
    own = sum(sizes[n] for n in split.parameters("personal"))
    share = 100 * own / sum(sizes[n] for n in split.parameters("all"))
    assert share == pytest.approx(percent, rel=0.4 if percent < 1 else 0.02)
    assert {n.split(".")[0] for n in split.personal} == modules


def test_a_network_that_extends_a_known_one_has_its_part():
    class Mine(nets.SegResNet):
        pass

    assert known_personal(Mine(2, 8, 1, 2)) == PERSONAL["monai.networks.nets.segresnet.SegResNet"]


def test_a_known_class_without_a_head_names_nothing():
    network = nets.ViT(1, (32, 32), (8, 8), num_layers=1, **TRANSFORMER)
    assert known_personal(network) == ()


def test_torchvision_is_known_by_the_path_alone():
    def build(path: str, head: str) -> nn.Module:
        module, _, name = path.rpartition(".")
        kind = type(name, (nn.Module,), {"__module__": module})
        network = kind()
        network.body, network.__dict__["_modules"][head] = nn.Linear(2, 2), nn.Linear(2, 1)
        return network

    heads = {"densenet.DenseNet": "classifier", "resnet.ResNet": "fc",
             "efficientnet.EfficientNet": "classifier",
             "vision_transformer.VisionTransformer": "heads"}  # fmt: skip
    for path, head in heads.items():
        network = build(f"torchvision.models.{path}", head)
        assert default_personal(network) == (f"{head}.*",)


DOCUMENTED = {
    "segresnet": 395_211, "dynunet": 121_361, "attention_unet": 124_347, "swin_unetr": 1_592_973,
    "resnet": 11_172_162,
}  # fmt: skip


@sweep("name", DOCUMENTED)
def test_the_yamls_have_the_parameters_that_they_say(name):
    facts = {"in_channels": 1, "out_channels": 2} if name == "resnet" else {"in_channels": 4}
    facts = {"spatial_dims": 2, "out_channels": 3, **facts}
    config = load([f"model={name}", *(f"{k}={v}" for k, v in facts.items())])
    network = build(config.model.network, _convert_="all")
    assert sum(p.numel() for p in network.parameters()) == DOCUMENTED[name]
    if name == "segresnet":  # what the documents say of the rule that needs no table
        image = torch.zeros(1, 4, 16, 16)
        found = nearest(network, lambda net, x: [net(x)], image)
        split = ParameterSplit.of(network, found)
        assert sum(float_entries(network)[n].numel() for n in split.personal) == 27
