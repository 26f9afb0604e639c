"""A short step of SGD leaves the bits of PyTorch's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from medfed.federation.optimizers import faster, restore_optimizer, save_optimizer, step_of

RULES = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "dampening": {"momentum": 0.5, "dampening": 0.1},
    "decay": {"weight_decay": 0.1},
    "ascent": {"maximize": True},
}


def gradients(network: nn.Module, step: int) -> None:
    rng = torch.Generator().manual_seed(step)
    for number, parameter in enumerate(network.parameters()):
        # One parameter has no gradient now and then, as a head that a method does not train, and
        # the second group has none in the first step, so that its momentum begins later.
        absent = step % 3 == 1 if number == 1 else number > 1 and step == 0
        parameter.grad = None if absent else torch.randn(parameter.shape, generator=rng)


@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "single"])
@pytest.mark.parametrize("rule", RULES)
def test_a_step_has_the_bits_of_pytorch(rule, foreach):
    ours = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))
    theirs = copy.deepcopy(ours)
    groups = [
        [{"params": n[0].parameters()}, {"params": n[1].parameters(), "lr": 0.3}]
        for n in (ours, theirs)
    ]
    mine, reference = (torch.optim.SGD(g, lr=0.1, foreach=foreach, **RULES[rule]) for g in groups)
    step = step_of(mine)
    for number in range(7):
        gradients(ours, number)
        gradients(theirs, number)
        if number == 4:  # a schedule
            for optimizer in (mine, reference):
                optimizer.param_groups[0]["lr"] = 0.01
        step()
        reference.step()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        mine_state, their_state = mine.state[a], reference.state[b]
        assert mine_state.keys() == their_state.keys() or not RULES[rule].get("momentum")
        for key, value in their_state.items():
            assert value is None or torch.equal(mine_state[key], value)


def test_other_optimizers_keep_their_step():
    weight = nn.Parameter(torch.ones(2))
    adam = torch.optim.Adam([weight])
    assert step_of(adam) == adam.step


def test_a_sparse_gradient_is_left_to_pytorch():
    table, twin = (nn.Embedding(4, 2, sparse=True, _weight=torch.ones(4, 2)) for _ in range(2))
    mine, reference = (torch.optim.SGD(t.parameters(), lr=0.5, foreach=True) for t in (table, twin))
    for network, step in ((table, step_of(mine)), (twin, reference.step)):
        network(torch.tensor([1, 3])).sum().backward()
        step()
    assert torch.equal(table.weight, twin.weight)
    assert table.weight[1, 0] == 0.5


FUSED = {"sgd": (torch.optim.SGD, {"momentum": 0.9}), "adam": (torch.optim.Adam, {})}
FUSED |= {"adamw": (torch.optim.AdamW, {})}


@pytest.mark.parametrize("name", FUSED)
def test_fused_steps_go_on_from_a_saved_state(name):
    """What a GPU steps by: as PyTorch's plain steps to rounding, and resumed as straight."""
    kind, more = FUSED[name]
    assert faster(kind, "cuda", 1e9) == "fused"
    networks = [nn.Linear(5, 4).double() for _ in range(3)]
    for network in networks[1:]:
        network.load_state_dict(networks[0].state_dict())
    plain, straight, resumed = (
        kind(n.parameters(), lr=0.01, **more, fused=n is not networks[0]) for n in networks
    )
    for number in range(6):
        if number == 3:
            saved = save_optimizer(resumed)
            resumed = kind(networks[2].parameters(), lr=0.01, **more, fused=True)
            restore_optimizer(resumed, saved)
        for network, optimizer in zip(networks, (plain, straight, resumed), strict=True):
            rng = torch.Generator().manual_seed(number)
            for parameter in network.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=rng).double()
            optimizer.step()
    for a, b, c in zip(*(n.parameters() for n in networks), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert torch.equal(b, c)
