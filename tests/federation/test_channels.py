"""Which weights read a channel, in networks that this package has never seen."""

from __future__ import annotations

import importlib.util
import itertools

import pytest
import torch
from monai.networks import nets
from torch import nn

from medfed.common.tensors import weighted_mean
from medfed.federation.missing_channels import entries_reading, lacks, mean_where_present, presence
from medfed.models.networks.canonical import Canonical
from medfed.models.networks.densenet import densenet_bc
from medfed.models.networks.small import SmallCNN
from medfed.standalone.errors import CodecError, ConfigError
from tests.sweeps import sweep

SMALL = {"channels": (4, 8, 8), "strides": (2, 2)}
UNETR = {"feature_size": 4, "hidden_size": 12, "mlp_dim": 16, "num_heads": 2}
DYN = {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2]}
# Network, shape of one input, and how many layers read it.
NETWORKS = {
    "unet": (lambda: nets.UNet(2, 3, 2, **SMALL), (3, 16, 16), 1),
    "residual unet": (lambda: nets.UNet(2, 3, 2, **SMALL, num_res_units=2), (3, 16, 16), 2),
    "residual unet 3d": (lambda: nets.UNet(3, 4, 1, **SMALL, num_res_units=2), (4, 8, 8, 8), 2),
    "attention unet": (lambda: nets.AttentionUnet(2, 3, 1, **SMALL), (3, 16, 16), 1),
    "basic unet": (lambda: nets.BasicUNet(2, 2, 1, features=(4,) * 6), (2, 32, 32), 1),
    "segresnet": (lambda: nets.SegResNet(2, 8, 4, 1), (4, 16, 16), 1),
    "dynunet": (lambda: nets.DynUNet(2, 3, 1, **DYN, filters=[4, 4, 4]), (3, 16, 16), 1),
    "dynunet residual": (
        lambda: nets.DynUNet(2, 3, 1, **DYN, filters=[4, 4, 4], res_block=True), (3, 16, 16), 2,
    ),
    "unetr": (lambda: nets.UNETR(2, 1, (32, 32), **UNETR, spatial_dims=2), (2, 32, 32), 3),
    "densenet": (
        lambda: densenet_bc(2, 3, 2, init_features=4, growth_rate=2, block_config=(2, 2)),
        (3, 32, 32), 1,
    ),
    "resnet": (
        lambda: nets.ResNet("basic", [1, 1, 1, 1], [4] * 4, spatial_dims=2, n_input_channels=3),
        (3, 32, 32), 1,
    ),
    "small cnn": (lambda: SmallCNN(2, 3, 2), (3, 16, 16), 1),
    "swin unetr": (
        lambda: nets.SwinUNETR(in_channels=2, out_channels=1, feature_size=12, spatial_dims=2),
        (2, 64, 64), 3,
    ),
}  # fmt: skip


def needs_einops() -> None:
    if importlib.util.find_spec("einops") is None:
        pytest.skip("MONAI's transformers need einops")


def read_by_convolutions(network: nn.Module, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Brute force: the convolutions that get the very image, whose weights are (out, C, ...)."""
    image, found = torch.randn(1, *shape), {}

    def look(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs[0].shape == image.shape and torch.equal(inputs[0], image):
            mask = torch.zeros(shape[0], *module.weight.shape, dtype=torch.bool)
            for channel in range(shape[0]):
                mask[channel, :, channel] = True
            found[id(module.weight)] = mask

    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            module.register_forward_pre_hook(look)
    with torch.no_grad():
        network.eval()(image)
    return {n: found[id(t)] for n, t in network.named_parameters() if id(t) in found}


@sweep("name", NETWORKS)
def test_the_weights_that_read_a_channel(name):
    if "unetr" in name:
        needs_einops()
    build, shape, layers = NETWORKS[name]
    torch.manual_seed(0)
    network = build()
    before = {n: t.clone() for n, t in network.state_dict().items()}
    masks = entries_reading(network, shape)
    assert all(torch.equal(before[n], t) for n, t in network.state_dict().items())
    expected = read_by_convolutions(network, shape)
    assert len({t.data_ptr() for n, t in network.named_parameters() if n in expected}) == layers
    assert masks.keys() == expected.keys()
    assert all(torch.equal(masks[n], expected[n]) for n in masks)


def test_patches_that_are_embedded():
    flat = nn.Sequential(nn.Flatten(), nn.Linear(2 * 9, 3))
    masks = entries_reading(flat, (2, 3, 3))
    assert masks["1.weight"][0, 0].tolist() == [True] * 9 + [False] * 9
    needs_einops()
    vit = nets.ViTAutoEnc(2, (8, 8), (4, 4), out_channels=1, hidden_size=8, mlp_dim=8, num_layers=1,
                          num_heads=2, proj_type="conv", spatial_dims=2)  # fmt: skip
    assert list(entries_reading(vit, (2, 8, 8))) == ["patch_embedding.patch_embeddings.weight"]


def test_canonical_parts_that_read_the_input():
    nets_ = [nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)) for _ in range(2)]
    masks = entries_reading(Canonical(nets_, ["*"], "outputs", "identity"), (3,))
    assert {n.split(".", 1)[0] for n in masks} == {"canonical"}
    assert len(masks) == 2


def test_a_normalised_input_and_one_channel():
    norm = nn.Sequential(nn.BatchNorm2d(2), nn.Conv2d(2, 1, 1))
    masks = entries_reading(norm, (2, 4, 4))
    assert masks["0.weight"].tolist() == [[True, False], [False, True]]
    assert "0.bias" not in masks
    assert entries_reading(nn.Conv2d(1, 1, 1), (1, 4, 4)) == {}


def test_layers_that_start_at_zero_or_are_dead_hide_nothing():
    network = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 1, 3))
    nn.init.zeros_(network[2].weight)
    nn.init.constant_(network[0].bias, -9.0)
    assert list(entries_reading(network, (2, 8, 8))) == ["0.weight"]


def test_channels_that_are_mixed_at_once_are_told():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(1, 1, 1)

        def forward(self, x):
            return self.layer(x.sum(1, keepdim=True))

    with pytest.raises(ConfigError, match="reads input channel 0 alone; set it to false"):
        entries_reading(Sum(), (2, 4, 4))


def test_the_mean_against_a_loop_over_entries():
    torch.manual_seed(1)
    shape, count = (3, 2, 2), 4
    reads = {"w": torch.zeros(2, *shape, dtype=torch.bool)}
    for channel in range(2):
        reads["w"][channel, :, channel] = True
    items = [
        {"w": torch.randn(shape, dtype=torch.float64), "b": torch.randn(3, dtype=torch.float64)}
        for _ in range(count)
    ]
    weights = [3.0, 1.0, 0.5, 2.0]
    for pattern in itertools.product([True, False], repeat=2 * 3):
        present = torch.tensor([*pattern, True, True]).reshape(count, 2)
        mean = mean_where_present(items, weights, present, reads)
        for o, c, x in itertools.product(*map(range, shape)):
            having = [n for n in range(count) if present[n, c]]
            expected = sum(weights[n] * float(items[n]["w"][o, c, x]) for n in having)
            expected /= sum(weights[n] for n in having)
            assert abs(float(mean["w"][o, c, x]) - expected) < 1e-14
        assert torch.equal(mean["b"], weighted_mean(items, weights)["b"])


def test_who_has_what_travels_as_numbers():
    for bits in itertools.product([True, False], repeat=4):
        channels = torch.tensor(bits)
        told = lacks(channels)
        assert len(told) == 4 - sum(bits)
        assert torch.equal(presence({**told, "reach": 9.0}, 4), channels)


@pytest.mark.parametrize("value", [4.0, -1.0, 0.5])
def test_a_channel_that_is_none_is_refused(value):
    with pytest.raises(CodecError, match="of 4 channels"):
        presence({"lacks/0": value}, 4)


def test_a_patch_smaller_than_the_images_will_do():
    seen = []

    class Looks(nn.Conv3d):
        def forward(self, x):
            seen.append(tuple(x.shape))
            return super().forward(x)

    masks = entries_reading(nn.Sequential(Looks(2, 3, 3), nn.Conv3d(3, 1, 1)), (2, 128, 128, 20))
    assert list(masks) == ["0.weight"]
    assert set(seen) == {(1, 2, 32, 32, 20)}
