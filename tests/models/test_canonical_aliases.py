"""Canonical parts of networks that hold a layer, or a weight, in several places."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from medfed.federation.split import ParameterSplit, float_entries
from medfed.models.networks.canonical import Canonical
from medfed.models.networks.personal_part import default_personal, part_roots
from medfed.standalone.errors import ConfigError
from medfed.standalone.outputs import heads
from tests.federation.test_tied_weights import Tied, dynunet
from tests.sweeps import sweep

MEMBERSHIP = torch.tensor([0.7, 0.3])
BUILD = {"dynunet": dynunet, "tied": Tied}
# The weight of decode is that of encode: they are canonical together.
PARTS = {"dynunet": default_personal(dynunet()), "tied": ("decode.*", "encode.bias", "head.*")}
IMAGE = {"dynunet": (2, 1, 16, 16), "tied": (4, 3)}


def networks(name: str) -> list[nn.Module]:
    """Two networks that differ in the canonical part alone."""
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        found.append(BUILD[name]())
    own = ParameterSplit.of(found[0], PARTS[name]).personal
    entries = [float_entries(n) for n in found]
    with torch.no_grad():
        for key in entries[0].keys() - set(own):
            entries[1][key].copy_(entries[0][key])
    return found


def canonical(name: str, mix: str) -> Canonical:
    net = Canonical(networks(name), PARTS[name], mix, "sigmoid")
    with torch.no_grad():
        net.membership.copy_(MEMBERSHIP)
    return net


@sweep("training", [True, False])
@sweep("name", BUILD)
def test_all_heads_are_mixed_as_probabilities(name, training):
    image = torch.randn(IMAGE[name])
    plain = [heads(n.train(training)(image), image) for n in networks(name)]
    found = heads(canonical(name, "outputs").train(training)(image), image)
    assert len(found) == len(plain[0]) == (2 if name == "dynunet" and training else 1)
    for got, *both in zip(found, *plain, strict=True):
        expected = sum(c * h.sigmoid() for c, h in zip(MEMBERSHIP, both, strict=True))
        torch.testing.assert_close(got.sigmoid(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", BUILD)
def test_parameters_are_mixed_once(name):
    image, (first, second) = torch.randn(IMAGE[name]), networks(name)
    theirs = float_entries(second)
    with torch.no_grad():
        for key, tensor in float_entries(first).items():
            tensor.copy_(MEMBERSHIP[0] * tensor + MEMBERSHIP[1] * theirs[key])
    torch.testing.assert_close(
        canonical(name, "parameters").eval()(image), first.eval()(image), rtol=1e-4, atol=1e-5
    )


def test_every_instance_learns_and_no_layer_is_counted_twice():
    net = canonical("dynunet", "outputs").train()
    image = torch.randn(IMAGE["dynunet"])
    sum(h.square().mean() for h in heads(net(image), image)).backward()
    assert all(p.grad is not None for p in net.parameters())
    plain, own = dynunet(), ParameterSplit.of(dynunet(), PARTS["dynunet"]).personal
    sizes = {n: t.numel() for n, t in float_entries(plain).items()}
    expected = 2 + sum(sizes.values()) + sum(sizes[n] for n in own)
    assert sum(map(Tensor.numel, float_entries(net).values())) == expected


def test_the_roots_are_layers_that_stand_nowhere_else():
    """The list of DynUNet's up-sampling blocks is forgotten by its forward pass, not they."""
    assert part_roots(dynunet(), ["upsamples.*"]) == ["upsamples.0", "upsamples.1"]


def test_half_of_a_tied_pair_is_refused():
    with pytest.raises(ConfigError, match=r"'encode\.weight' is half of one"):
        part_roots(Tied(), ["decode.*"])
