"""Parameter counts, output shapes, and which names the personal patterns pick."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
import torch
from torch import nn

from medfed.models.networks.densenet import densenet_bc
from medfed.models.networks.personal_part import default_personal
from medfed.models.networks.small import LinearRegression, LogisticRegression, SmallCNN
from medfed.models.networks.unet import basic_unet, unet
from medfed.standalone.errors import ConfigError
from tests.sweeps import sweep

COUNTS = [
    (densenet_bc(2, 1, 2), 198_224),
    (densenet_bc(2, 1, 2, stem="small"), 197_744),
    (
        densenet_bc(2, 1, 2, growth_rate=32, block_config=(6, 12, 24, 16), init_features=64),
        6_949_634,
    ),
    (unet(2, 4, 3), 211_657),
    (basic_unet(2, 4, 3), 488_475),
    (basic_unet(2, 3, 2), 488_394),
    (basic_unet(2, 3, 2, published=True), 486_562),
    (LinearRegression(58), 59),
    (LogisticRegression(58), 59),
    (SmallCNN(2, 1, 10), 24_170),
]


def picked(net: nn.Module, patterns: tuple[str, ...]) -> list[str]:
    names = list(net.state_dict())
    for pattern in patterns:
        assert any(fnmatchcase(name, pattern) for name in names), f"{pattern} matches nothing"
    return [name for name in names if any(fnmatchcase(name, p) for p in patterns)]


@sweep(("net", "count"), COUNTS)
def test_parameter_count(net, count):
    assert sum(p.numel() for p in net.parameters()) == count


@sweep("spatial_dims", [2, 3])
@sweep(
    ("build", "out"),
    [
        (lambda d: densenet_bc(d, 2, 3, block_config=(2, 2)), (2, 3)),
        (lambda d: densenet_bc(d, 2, 3, block_config=(2, 2), stem="small"), (2, 3)),
        (lambda d: SmallCNN(d, 2, 3, channels=(4, 8), strides=(1, 2)), (2, 3)),
        (lambda d: SmallCNN(d, 2, 3, channels=(4,), strides=(2,), norm="none"), (2, 3)),
        (lambda d: unet(d, 2, 3, channels=(4, 8, 16), strides=(2, 2)), None),
        (lambda d: unet(d, 2, 3, channels=(4, 8), strides=(2,), norm="instance"), None),
        (lambda d: basic_unet(d, 2, 3, features=(2, 2, 4, 4, 4, 2)), None),
        (lambda d: basic_unet(d, 2, 3, features=(2, 2, 4, 4, 4, 2), published=True), None),
    ],
)
def test_output_shape(build, out, spatial_dims):
    size = (32,) * spatial_dims
    logits = build(spatial_dims)(torch.randn(2, 2, *size))
    assert logits.shape == (out or (2, 3, *size))


def test_small_stem_keeps_resolution():
    features = densenet_bc(2, 1, 2, stem="small").features
    x = torch.randn(1, 1, 32, 32)
    for name in ("conv0", "norm0", "relu0", "pool0"):
        x = getattr(features, name)(x)
    assert x.shape == (1, 12, 32, 32)


def test_densenet_personal_is_the_classifier():
    net = densenet_bc(2, 1, 2, block_config=(2, 2))
    names = picked(net, default_personal(net))
    assert names == ["class_layers.out.weight", "class_layers.out.bias"]


@pytest.mark.parametrize("published", [False, True])
def test_basic_unet_personal_is_up_path_and_output(published):
    net = basic_unet(2, 1, 1, published=published)
    shared = set(net.state_dict()) - set(picked(net, default_personal(net)))
    assert {name.split(".")[0] for name in shared} == {
        "conv_0",
        *(f"down_{i}" for i in (1, 2, 3, 4)),
    }


@sweep("depth", [2, 3, 5])
@sweep("units", [0, 2])
def test_unet_personal_is_up_path_and_output(depth, units):
    widths = tuple(2 * 2**i for i in range(depth))
    net = unet(2, 1, 1, channels=widths, strides=(2,) * (depth - 1), num_res_units=units)
    expected, level, path = [], net.model, "model"
    while isinstance(level, nn.Sequential) and hasattr(level[1], "submodule"):
        up = level[2]
        expected += [f"{path}.2.{name}" for name in up.state_dict()]
        level, path = level[1].submodule, f"{path}.1.submodule"
    assert sorted(picked(net, default_personal(net))) == sorted(expected)


def test_small_cnn_personal_is_the_head_and_nothing_is_averaged_but_weights():
    net = SmallCNN(2, 1, 2)
    assert picked(net, default_personal(net)) == ["head.weight", "head.bias"]
    assert not list(net.buffers())


def test_logistic_is_all_personal_and_starts_at_zero():
    net = LogisticRegression(4, 3)
    assert picked(net, default_personal(net)) == ["linear.weight", "linear.bias"]
    assert torch.equal(net(torch.randn(5, 4)), torch.zeros(5, 3))


def test_other_networks_have_no_default():
    assert default_personal(nn.Linear(2, 2)) == ()


@sweep(
    ("build", "words"),
    [
        (lambda: densenet_bc(4, 1, 2), "spatial_dims=4 is unknown; choose 2 or 3"),
        (lambda: densenet_bc(2, 1, 2, stem="smal"), "choose imagenet or small"),
        (lambda: unet(2, 1, 1, channels=(4, 8), strides=(2, 2)), "one stride fewer"),
        (lambda: unet(2, 1, 1, norm="bach"), "choose batch or instance"),
        (lambda: basic_unet(2, 1, 1, features=(4, 8)), "six features"),
        (lambda: SmallCNN(2, 1, 2, norm="groups"), "did you mean group"),
        (lambda: SmallCNN(2, 1, 2, channels=(6, 12, 24)), "multiples of 4"),
        (lambda: SmallCNN(2, 1, 2, channels=(8, 8)), "as many strides"),
        (lambda: LogisticRegression(3, 1), "out_channels >= 2.*model=linear"),
        (lambda: LinearRegression(3, 2), "these data have 2 classes; choose model=logistic"),
        (lambda: LinearRegression(3, spread=-1), "spread must not be negative"),
    ],
)
def test_bad_options(build, words):
    with pytest.raises(ConfigError, match=words):
        build()
