"""What stands next to the outputs of networks that this package has never seen."""

from __future__ import annotations

from collections.abc import Callable

import torch
from monai.networks import nets
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from medfed.models.networks.personal_part import last_activation, nearest
from medfed.standalone.outputs import heads
from tests.federation.test_tied_weights import dynunet
from tests.sweeps import sweep

IMAGE = torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(0))


class Network(nn.Module):
    """A body, and whatever a test hangs on to it."""

    def __init__(self, after: Callable[[Network, Tensor], object], **layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Conv2d(1, 4, 3, padding=1)
        self.deep = nn.Conv2d(4, 4, 3, padding=1)
        self.after = after
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, image: Tensor) -> object:
        return self.after(self, self.deep(self.body(image).relu()).relu())


def pooled(x: Tensor) -> Tensor:
    return x.mean((2, 3))


def root_parameters() -> Network:
    """A scale and an embedding at the root, whose module would be the whole network."""
    net = Network(lambda n, x: n.head(pooled(x) + n.where[0]) * n.scale, head=nn.Linear(4, 3))
    net.where, net.scale = nn.Parameter(torch.ones(1, 4)), nn.Parameter(torch.ones(1, 3))
    return net


def root_weight() -> Network:
    net = Network(lambda n, x: pooled(x) @ n.weight + n.bias)
    net.weight, net.bias = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.zeros(3))
    return net


def stacked() -> Network:
    """A head of the end, and one of the middle that is brought to the same size."""

    def after(n: Network, x: Tensor) -> Tensor:
        aside = n.aside(nn.functional.avg_pool2d(x, 2))
        return torch.stack([n.head(n.late(x).relu()), nn.functional.interpolate(aside, 16)], 1)

    layers = {"late": nn.Conv2d(4, 4, 1), "head": nn.Conv2d(4, 2, 1), "aside": nn.Conv2d(4, 2, 1)}
    return Network(after, **layers)


CASES = {
    "linear": (lambda: Network(lambda n, x: n.head(pooled(x)), head=nn.Linear(4, 3)), ("head.*",)),
    "normalised": (
        lambda: Network(
            lambda n, x: n.norm(n.head(pooled(x))), head=nn.Linear(4, 3), norm=nn.BatchNorm1d(3)
        ),
        ("head.*", "norm.*"),
    ),
    "layer_norm_of_two_axes": (
        lambda: Network(
            lambda n, x: n.norm(n.head(x)), head=nn.Conv2d(4, 2, 1), norm=nn.LayerNorm((16, 16))
        ),
        ("head.*", "norm.*"),
    ),
    "root_parameters": (root_parameters, ("scale", "head.*")),
    "root_weight": (root_weight, ("weight", "bias")),
    "one_output_channel": (
        lambda: Network(lambda n, x: n.head(x), head=nn.Conv2d(4, 1, 1)), ("head.*",),
    ),
    "hidden_states": (
        lambda: Network(lambda n, x: (n.head(pooled(x)), [x, n.deep(x)]), head=nn.Linear(4, 3)),
        ("head.*",),
    ),
    "stacked": (stacked, ("head.*", "aside.*")),
    "two_paths": (
        lambda: Network(lambda n, x: n.a(x) + n.b(x), a=nn.Conv2d(4, 2, 1), b=nn.Conv2d(4, 2, 1)),
        ("a.*", "b.*"),
    ),
    "parametrised": (
        lambda: Network(
            lambda n, x: n.head(pooled(x)), head=parametrizations.weight_norm(nn.Linear(4, 3))
        ),
        ("head.*",),
    ),
    "no_layer": (lambda: nn.Flatten(), ()),
}  # fmt: skip


@sweep("name", CASES)
def test_what_stands_next_to_the_output(name):
    build, expected = CASES[name]
    network = build()
    before = {n: t.clone() for n, t in network.state_dict().items()}
    found = nearest(network, lambda net, x: heads(net(x), x), IMAGE)
    assert set(found) == set(expected)
    assert all(torch.equal(before[n], t) for n, t in network.state_dict().items())


@sweep(
    ("network", "expected"),
    [
        (nets.SegResNet(2, 8, 1, 2), {"conv_final.2.conv.*"}),
        (dynunet(), {"output_block.conv.conv.*", "deep_supervision_heads.0.conv.conv.*"}),
        (nets.resnet10(spatial_dims=2, n_input_channels=1, num_classes=3), {"fc.*"}),
        (
            nets.DenseNet(2, 1, 3, 4, 2, (2, 2)), {"class_layers.out.*"},
        ),
        (
            nets.ViT(1, (16, 16), (8, 8), 12, 16, 1, 2, classification=True, spatial_dims=2),
            {"classification_head.0.*"},
        ),
    ],
)  # fmt: skip
def test_networks_of_monai_as_if_they_were_unknown(network, expected):
    assert set(nearest(network, lambda net, x: heads(net(x), x), IMAGE)) == expected


@sweep(
    ("layer", "name"),
    [(nn.Sigmoid(), "Sigmoid"), (nn.Softmax(1), "Softmax"), (nn.Tanh(), "Tanh"),
     (nn.ReLU(), "Relu"), (nn.LogSoftmax(1), None), (nn.Identity(), None), (nn.PReLU(), None)],
)  # fmt: skip
def test_the_last_activation(layer, name):
    output = nn.Sequential(nn.Conv2d(1, 2, 1), layer)(IMAGE)
    assert last_activation(output) == name
    assert last_activation(output.flatten(2).transpose(1, 2).unsqueeze(1)) == name
    assert last_activation(nn.functional.interpolate(output, scale_factor=2)) == name
    assert last_activation(nn.Conv2d(2, 1, 1)(output)) is None
