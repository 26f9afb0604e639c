"""Channels-last layout: of the live network alone, and the same numbers but for rounding."""

from functools import partial

import pytest
import torch
from monai.networks.nets import BasicUNet, UNet
from torch import nn

from medfed.common.tensors import digest
from medfed.federation.assemble import assemble
from medfed.federation.budget import LocalBudget
from medfed.federation.engine.working_network import channels_last_pays
from medfed.federation.reference import ArrayClient, run_reference
from medfed.models.networks.densenet import densenet_bc
from medfed.models.networks.small import SmallCNN
from medfed.personalize.scaffold import Scaffold
from medfed.standalone.errors import ConfigError

NETWORKS = {
    "2d": lambda: densenet_bc(2, 2, 2, block_config=[1, 1], stem="small"),
    "3d": lambda: nn.Sequential(
        UNet(3, 2, 2, (4, 8), (2,), num_res_units=1, norm="batch"), nn.Flatten(), nn.LazyLinear(2)
    ),
}


def federation(kind: str, channels_last: object, optimizer=None, **budget):
    torch.manual_seed(0)
    network, size = NETWORKS[kind](), (8,) * int(kind[0])
    network(torch.ones(2, 2, *size))
    rng = torch.Generator().manual_seed(1)
    data = [
        ArrayClient(
            f"c{k}", torch.randn(6, 2, *size, generator=rng), torch.arange(6) % 2, batch_size=3
        )
        for k in range(2)
    ]
    made, local = assemble(
        Scaffold(),
        network.double(),
        lambda batch: nn.functional.cross_entropy(network(batch["image"].double()), batch["label"]),
        data,
        personal=(),
        optimizer=optimizer or partial(torch.optim.SGD, lr=0.1),
        rounds=2,
        budget=LocalBudget(steps=2, channels_last=channels_last, **budget),
    )
    return made, local


def tensors(saved: object):
    if isinstance(saved, torch.Tensor):
        yield saved
    elif isinstance(saved, dict):
        for value in saved.values():
            yield from tensors(value)


@pytest.mark.parametrize("kind", NETWORKS)
def test_only_the_live_network_is_laid_out_and_results_agree(kind):
    results = {}
    for wanted in (False, "auto"):
        made, local = federation(kind, wanted)
        kernels = [p for p in local.network.parameters() if p.ndim > 3 and min(p.shape[:3]) > 1]
        assert kernels
        assert all(k.is_contiguous() is (wanted is False) for k in kernels)
        run_reference(made, 2)
        client = made.clients["c0"]
        kept = [made.server, client.state_dict(), made.personal_model("c0"), local.model.initial()]
        kept.append(client.gradient(client.weights))
        assert all(t.is_contiguous() for saved in kept for t in tensors(saved))
        results[wanted] = made.personal_model("c0")
    for name, plain in results[False].items():
        torch.testing.assert_close(results["auto"][name], plain, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", [torch.optim.Adam, partial(torch.optim.SGD, momentum=0.9)])
def test_optimizer_state_survives_the_change_of_layout(kind):
    ends = []
    for reload in (False, True):
        made, _ = federation("2d", True, partial(kind, lr=0.01), optimizer_state="kept")
        client = made.clients["c0"]
        client.begin(0, "fit", 0)
        client.train(client.weights)
        if reload:
            saved = client.state_dict()
            made, _ = federation("2d", True, partial(kind, lr=0.01), optimizer_state="kept")
            client = made.clients["c0"]
            client.load_state_dict(saved)
        client.begin(1, "fit", 0)
        ends.append(digest(client.train(client.weights)))
    assert ends[0] == ends[1]


def test_where_it_pays():
    assert channels_last_pays(densenet_bc(2, 1, 2, block_config=[2, 2]))
    assert not channels_last_pays(SmallCNN(2, 1, 2))
    assert not channels_last_pays(BasicUNet(2, 1, 1, features=(4, 4, 4, 4, 4, 4)))  # instance norm
    assert not channels_last_pays(nn.Sequential(nn.Conv1d(1, 1, 1), nn.Linear(2, 2)))
    with pytest.raises(
        ConfigError, match=r"local.channels_last=.* is unknown.*; choose one of auto, true, false"
    ):
        LocalBudget(channels_last="yes")
