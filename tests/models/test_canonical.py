"""Canonical models: mixtures, their gradients, and what of a network is computed how often."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from medfed.federation.split import match
from medfed.models.classification import ClassificationTask
from medfed.models.networks.canonical import Canonical
from medfed.models.networks.densenet import densenet_bc
from medfed.models.networks.personal_part import default_personal
from medfed.models.networks.small import LogisticRegression, SmallCNN
from medfed.models.networks.unet import basic_unet, unet
from medfed.models.segmentation import SegmentationTask
from medfed.standalone.errors import ConfigError
from medfed.standalone.mixture import mix_outputs
from tests.models.tiny import SGD, make_batch, make_task
from tests.sweeps import sweep

NETWORKS = {
    "densenet": lambda: densenet_bc(2, 1, 2, growth_rate=2, block_config=(2, 2), stem="small"),
    "small_cnn": lambda: SmallCNN(2, 1, 2, channels=(4, 8), strides=(1, 2)),
    "logistic": lambda: LogisticRegression(5, 3, spread=0.5),
    "unet": lambda: unet(2, 2, 2, channels=(4, 8, 8), strides=(2, 2)),
    "basic_unet": lambda: basic_unet(2, 2, 2, features=(4, 4, 8, 8, 8, 4)),
}
SHAPES = {"logistic": (3, 5), "unet": (3, 2, 16, 16), "basic_unet": (3, 2, 32, 32)}


def nets(name: str, count: int = 3) -> list[nn.Module]:
    found = []
    for k in range(count):
        torch.manual_seed(k)
        found.append(NETWORKS[name]().double())
    return found


def canonical(name: str, mix: str = "outputs", count: int = 3, parts=None) -> Canonical:
    networks = nets(name, count)
    activation = "sigmoid" if "unet" in name else "softmax"
    net = Canonical(networks, parts or default_personal(networks[0]), mix, activation)
    with torch.no_grad():
        net.membership.copy_(torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)[:count])
        net.membership.div_(net.membership.sum())
    return net


def images(name: str) -> torch.Tensor:
    torch.manual_seed(9)
    return torch.randn(SHAPES.get(name, (3, 1, 8, 8)), dtype=torch.float64)


def with_common_of_the_first(name: str) -> list[nn.Module]:
    """K whole networks that differ in the canonical part alone."""
    networks = nets(name)
    parts = match(default_personal(networks[0]), networks[0].state_dict())
    first = networks[0].state_dict()
    for other in networks[1:]:
        own = other.state_dict()
        other.load_state_dict({n: own[n] if n in parts else first[n] for n in own})
    return networks


@sweep("name", NETWORKS)
def test_outputs_are_mixed_as_probabilities(name):
    """Against K whole networks, by the formula as it is printed."""
    net, x = canonical(name).eval(), images(name)
    outputs = [n.eval()(x) for n in with_common_of_the_first(name)]
    squash = torch.sigmoid if "unet" in name else lambda z: z.softmax(1)
    expected = sum(c * squash(z) for c, z in zip(net.membership, outputs, strict=True))
    torch.testing.assert_close(squash(net(x)), expected, rtol=0, atol=1e-13)


@sweep("name", NETWORKS)
def test_parameters_are_mixed(name):
    net, x = canonical(name, "parameters").eval(), images(name)
    networks = with_common_of_the_first(name)
    states = [dict(n.named_parameters()) for n in networks]
    with torch.no_grad():
        for key, tensor in states[0].items():
            mixed = sum(c * s[key].clone() for c, s in zip([0.5, 0.3, 0.2], states, strict=True))
            tensor.copy_(mixed)
    torch.testing.assert_close(net(x), networks[0].eval()(x), rtol=0, atol=1e-13)


@sweep("mix", ["outputs", "parameters"])
@sweep("name", ["small_cnn", "logistic", "unet"])
def test_gradients_of_memberships_by_finite_differences(name, mix):
    net, x = canonical(name, mix), images(name)
    task = (SegmentationTask if name == "unet" else ClassificationTask)(
        net, SGD, **({"regions": ["a", "b"]} if name == "unet" else {"num_classes": 2})
    )
    shape = net(x).shape
    label = torch.tensor([0, 1, 1]) if len(shape) == 2 else (torch.rand(shape) > 0.5).double()
    found = torch.autograd.grad(task.criterion(net(x), label), net.membership)[0]
    assert found.abs().max() > 1e-3
    start = net.membership.detach().clone()
    for k in range(3):
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                net.membership.copy_(start)
                net.membership[k] += sign * 1e-5
            ends.append(task.criterion(net(x), label).item())
        assert (ends[0] - ends[1]) / 2e-5 == pytest.approx(float(found[k]), abs=1e-8)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_the_gradient_on_the_simplex_is_that_of_the_plain_mixture(activation):
    """They may differ by a multiple of ones, which exponentiated gradients do not notice."""
    torch.manual_seed(0)
    outputs = list(torch.randn(3, 4, 2, dtype=torch.float64))
    c = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64, requires_grad=True)
    label = torch.tensor([0, 1, 1, 0])
    stacked = torch.stack(outputs)
    if activation == "softmax":
        loss = nn.functional.cross_entropy(mix_outputs(outputs, c, activation), label)
        plain = torch.tensordot(c, stacked.softmax(2), dims=1)[range(4), label]
    else:
        truth = nn.functional.one_hot(label, 2).double()
        loss = nn.functional.binary_cross_entropy_with_logits(
            mix_outputs(outputs, c, activation), truth
        )
        mixed = torch.tensordot(c, stacked.sigmoid(), dims=1)
        plain = torch.where(truth > 0, mixed, 1 - mixed)
    assert loss.item() == pytest.approx(-plain.log().mean().item(), abs=1e-12)
    gap = torch.autograd.grad(loss, c)[0] - torch.autograd.grad(-plain.log().mean(), c)[0]
    torch.testing.assert_close(gap, gap.mean().expand(3), rtol=0, atol=1e-12)


def test_architectures_coincide_for_a_linear_head_mixed_in_logits():
    torch.manual_seed(0)
    networks = nets("small_cnn")
    again = copy.deepcopy(networks)
    both = [
        Canonical(networks, ["head.*"], "outputs", "identity"),
        Canonical(again, ["head.*"], "parameters"),
    ]
    x, grads = images("small_cnn"), []
    for net in both:
        with torch.no_grad():
            net.membership.copy_(torch.tensor([0.7, 0.2, 0.1]))
        net(x).square().sum().backward()
        grads.append({n: p.grad for n, p in net.named_parameters()})
    torch.testing.assert_close(both[0](x), both[1](x), rtol=0, atol=1e-13)
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-10, atol=1e-12)


@sweep("mix", ["outputs", "parameters"])
@sweep("name", NETWORKS)
def test_one_instance_is_the_network(name, mix):
    plain, net = nets(name, 1)[0], canonical(name, mix, count=1)
    x = images(name)
    assert torch.equal(plain(x), net(x))
    plain(x).square().sum().backward()
    net(x).square().sum().backward()
    ours = [p.grad for n, p in net.named_parameters() if n != "membership"]
    theirs = [p.grad for p in plain.parameters()]
    key = lambda g: (g.numel(), float(g.double().abs().sum()))  # noqa: E731  the order may differ
    for a, b in zip(sorted(ours, key=key), sorted(theirs, key=key), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["densenet", "unet", "basic_unet"])
def test_common_layers_see_a_batch_once(name):
    """Their statistics are those of one pass, whatever K, and dropout would be one draw."""
    net, alone = canonical(name), nets(name, 1)[0]
    calls = {}
    for key, module in net.common.named_modules():
        if not list(module.children()):
            module.register_forward_hook(
                lambda *_, key=key: calls.update({key: calls.get(key, 0) + 1})
            )
    x = images(name)
    net(x)
    alone(x)
    assert set(calls.values()) == {1}
    theirs = alone.state_dict()
    ours = {n: t for n, t in net.common.state_dict().items() if n in theirs}
    assert any("running_mean" in n for n in ours)
    assert all(torch.equal(t, theirs[n]) for n, t in ours.items())


def test_instances_have_their_own_statistics_only_where_each_of_them_runs():
    outputs, parameters = canonical("unet"), canonical("unet", "parameters")
    means = [n for n in outputs.state_dict() if "canonical" in n and "running_mean" in n]
    kept = [n for n in parameters.state_dict() if "canonical" in n and "running_mean" in n]
    assert {n.split(".")[1] for n in means} == {"0", "1", "2"}
    assert {n.split(".")[1] for n in kept} == {"0"}
    x = images("unet")
    for net, names in ((outputs, means), (parameters, kept)):
        before = copy.deepcopy(net.state_dict())
        net(x)
        assert all(not torch.equal(net.state_dict()[n], before[n]) for n in names)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_extreme_outputs_and_memberships_stay_finite(activation):
    outputs = [torch.tensor([[500.0, -500.0]]), torch.tensor([[-500.0, 500.0]])]
    for members in ([1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [1e-38, 1.0]):
        c = torch.tensor(members, requires_grad=True)
        mixed = mix_outputs(outputs, c, activation)
        (grad,) = torch.autograd.grad(mixed[0, 0], c)
        assert torch.isfinite(mixed).all()
        assert torch.isfinite(grad).all()


@sweep("name", NETWORKS)
def test_instances_without_weight_are_not_computed(name):
    """A client that chose one instance runs it alone, unless its membership is to be learnt."""
    net, x = canonical(name).eval(), images(name)
    chosen = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    net.membership.data.copy_(chosen)
    ran = []
    for k, part in enumerate(net.canonical):
        first = next(m for m in part.modules() if not list(m.children()))
        first.register_forward_hook(lambda *_, k=k: ran.append(k))
    learning = net(x)
    assert set(ran) == {0, 1, 2}
    ran.clear()
    net.membership.requires_grad_(False)
    out = net(x)
    assert set(ran) == {1}
    out.square().sum().backward()
    moved = {n for n, p in net.named_parameters() if p.grad is not None}
    assert {n.split(".")[1] for n in moved if n.startswith("canonical.")} == {"1"}
    ran.clear()
    with torch.no_grad():
        net.membership.requires_grad_(True)
        net(x)
    assert set(ran) == {1}
    if net.activation == "softmax":  # one instance alone gives logits, which losses normalise
        out = out.log_softmax(1)
    torch.testing.assert_close(out, learning, rtol=0, atol=1e-12)


def test_the_network_survives_copies_and_failures():
    net, x = canonical("unet"), images("unet")
    again = copy.deepcopy(net)
    with torch.no_grad():
        for p in net.canonical.parameters():
            p.zero_()
    assert not torch.equal(net.eval()(x), again.eval()(x))
    names = list(again.state_dict())
    with pytest.raises(RuntimeError):
        again(x[:, :1])
    assert list(again.state_dict()) == names
    assert not any("forward" in vars(m) for m in again.modules())
    assert torch.isfinite(again(x)).all()


def test_parts_of_several_layers():
    net = canonical("densenet", parts=["features.denseblock2.*", "class_layers.*"])
    assert default_personal(net) == ("membership",)
    kept = {n.split(".")[2] for n, _ in net.canonical.named_parameters(prefix="canonical")}
    assert kept == {"features_denseblock2", "class_layers"}
    assert net(images("densenet")).shape == (3, 2)


def test_the_penalty_leaves_memberships_alone():
    task = make_task("risk", l2=2.0)
    net = Canonical([LogisticRegression(5, spread=0.3) for _ in range(2)], ["*"])
    task.network = net
    batch = make_batch("risk")
    weights = [p for n, p in net.named_parameters() if n.endswith("weight")]
    assert len(weights) == 2
    with torch.no_grad():
        bare = task.criterion(task.forward(batch["image"]), batch["label"])
        expected = bare + sum(w.square().sum() for w in weights)
        torch.testing.assert_close(task.loss(batch), expected)


@sweep(
    ("options", "message"),
    [
        ({"parts": ["haed.*"]}, r"'haed\.\*' matches no parameter \(did you mean head\.\*"),
        ({"parts": ["head.weight"]}, r"'head\.weight' is half of one; name it by 'head\.\*'"),
        ({"parts": []}, r"no part of this SmallCNN is named: set for example"),
        ({"parts": ["head.*"], "mix": "output"}, r"canonical\.mix='output' is unknown"),
        ({"parts": ["head.*"], "activation": "relu"}, r"activation='relu' is unknown"),
    ],
)
def test_mistakes_are_explained(options, message):
    with pytest.raises(ConfigError, match=message):
        Canonical(nets("small_cnn"), **options)


def test_equal_instances_are_refused():
    with pytest.raises(ConfigError, match=r"start as equals .* model\.network\.spread"):
        Canonical([LogisticRegression(5), LogisticRegression(5)], ["*"])
    with pytest.raises(ConfigError, match=r"canonical\.count must be 1 or more"):
        Canonical([], ["*"])


def test_mixtures_of_exclusive_classes_mix_probabilities():
    networks = [unet(2, 2, 3, channels=(4, 8), strides=(2,)) for _ in range(2)]
    image, alone = torch.randn(2, 2, 16, 16), []
    task = make_task("classes")
    for network in networks:
        task.network = copy.deepcopy(network)
        alone.append(task.predict({"image": image}))
    task.network = Canonical(networks, ["*"], "outputs", task.activation)
    with torch.no_grad():
        task.network.membership.copy_(torch.tensor([0.7, 0.3]))
    mixed = task.predict({"image": image})
    assert torch.allclose(mixed, 0.7 * alone[0] + 0.3 * alone[1], atol=1e-6)
