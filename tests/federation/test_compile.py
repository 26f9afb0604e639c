"""A compiled loss: the same steps but for rounding, and the same bits after resuming."""

import logging
from functools import partial

import pytest
import torch
from torch import nn

from medfed.common.tensors import digest
from medfed.federation.assemble import assemble
from medfed.federation.budget import LocalBudget
from medfed.federation.reference import ArrayClient
from medfed.personalize.fedavg import FedAvg
from medfed.standalone.errors import ConfigError


def client_of(compile: bool):
    """A client of eight samples in batches of three: the last one is short, and not compiled."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Tanh(), nn.Linear(3, 2))
    data = ArrayClient("c0", torch.randn(8, 4), torch.arange(8) % 2, batch_size=3)
    federation, local = assemble(
        FedAvg(),
        network,
        lambda batch: nn.functional.cross_entropy(network(batch["image"]), batch["label"]),
        [data],
        personal=(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        rounds=2,
        budget=LocalBudget(steps=6, compile=compile),
    )
    return federation.clients["c0"], local


def rounds(client, numbers, weights):
    for number in numbers:
        client.begin(number, "fit", 0)
        weights = client.train(weights)
    return weights


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # PyTorch's own
def test_compiled_steps_are_the_same_but_for_rounding(caplog, monkeypatch):
    from torch._inductor import config

    # Which vector instructions a machine has is found by compiling a file for each: half the time.
    monkeypatch.setattr(config.cpp, "vec_isa_ok", False)
    monkeypatch.setattr(config, "compile_threads", 1)  # more would outlive the test
    plain, _ = client_of(False)
    expected = rounds(plain, range(2), plain.weights)
    (quick, local), (other, _) = client_of(True), client_of(True)
    middle = rounds(quick, [0], quick.weights)
    found = rounds(quick, [1], middle)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
    assert digest(rounds(other, [1], middle)) == digest(found)  # resumed
    assert list(local.network.state_dict()) == list(plain.trainer.network.state_dict())
    with caplog.at_level(logging.WARNING):
        quick.train(quick.weights, outputs=lambda output: output)
        quick.train(quick.weights, outputs=lambda output: output)
    assert caplog.text.count("local.compile=true has no effect") == 1


def test_a_missing_compiler_is_named(monkeypatch):
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "cxx", ("no-such-compiler",))
    with pytest.raises(ConfigError, match=r"local.compile=true needs a C\+\+ compiler"):
        client_of(True)
