"""A tensor with several names is one entry: personal or shared, trained, sent and counted once."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from monai.networks.nets import DynUNet
from torch import Tensor, nn

from medfed import federate
from medfed.common.tensors import digest
from medfed.delivery.bundle.networks import check_state
from medfed.federation.reference import ArrayClient, Federated
from medfed.federation.split import ParameterSplit, aliases, float_entries
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.fedper import FedPer
from medfed.personalize.quantized_base import quantized_names
from medfed.standalone.decode import fill
from medfed.standalone.errors import ConfigError

HEADER = 12  # bytes of a codec's header


class Tied(nn.Module):
    """What encodes also decodes; one normalisation stands in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)
        self.decode = nn.Linear(3, 3)
        self.decode.weight = self.encode.weight
        self.again = self.norm
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.encode(x).relu())
        return self.head(self.again(self.decode(x)))


def dynunet() -> DynUNet:
    sizes = {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2]}
    return DynUNet(2, 1, 2, **sizes, filters=[4, 4, 4], deep_supervision=True)


def clients(count: int = 2) -> list[ArrayClient]:
    rng = torch.Generator().manual_seed(3)
    data = [torch.randn(8, 4, generator=rng) for _ in range(count)]
    return [ArrayClient(f"c{i}", x[:, :3], x[:, 3:]) for i, x in enumerate(data)]


def square(network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (network(batch["image"]) - batch["label"]).square().mean()


def run(algorithm: FedAvg, count: int = 2, **options: object) -> tuple[Federated, nn.Module]:
    torch.manual_seed(0)
    network = Tied()
    start = copy.deepcopy(network)
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    options = {"rounds": 2, "optimizer": optimizer, **options}
    return federate(algorithm, network, square, clients(count), **options), start


@pytest.mark.parametrize("build", [Tied, dynunet])
def test_every_tensor_is_one_entry(build):
    network = build()
    entries = float_entries(network)
    assert list(entries) == [n for n, _ in network.named_parameters()]
    assert sum(map(Tensor.numel, entries.values())) == sum(p.numel() for p in network.parameters())
    named = network.state_dict(keep_vars=True)
    assert len(named) > len(entries)
    assert all(named[n] is entries[entry] for n, entry in aliases(network).items())


@pytest.mark.parametrize("pattern", ["encode.weight", "decode.weight", "*code.weight"])
def test_names_share_one_fate(pattern):
    split = ParameterSplit.of(Tied(), [pattern])
    assert split.personal == ("encode.weight",)
    assert "decode.weight" not in split.shared


def test_the_decoder_of_a_dynunet_is_personal_once():
    network = dynunet()
    split = ParameterSplit.of(network, ["upsamples.*", "output_block.*"])
    live = network.state_dict(keep_vars=True)
    own = {id(live[n]) for n in split.personal}
    assert own == {id(p) for part in (network.upsamples, network.output_block)
                   for p in part.parameters()}  # fmt: skip
    assert not own & {id(live[n]) for n in split.shared}
    again = ParameterSplit.of(network, ["skip_layers*.upsample.*", "output_block.*"])
    assert again.personal == split.personal


def test_bytes_are_counted_once():
    done, _ = run(FedPer(personal=("decode.*",)))
    shared = 3 + 2 * 3 + 3 + 1  # the bias of encode, the normalisation, the head
    up = [e.bytes for e in done.ledger.entries if e.direction == "up"]
    assert up == [HEADER + 4 * shared] * 4


def test_alone_it_is_plain_training():
    done, by_hand = run(FedAvg(), count=1)
    (client,) = clients(1)
    whole = {"image": client.inputs, "label": client.labels}
    for _ in range(2):  # momentum starts anew every round, of one step
        optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
        optimizer.zero_grad()
        square(by_hand, whole).backward()
        optimizer.step()
    got = done.model("c0")
    assert list(got.state_dict()) == list(by_hand.state_dict())
    for name, tensor in by_hand.state_dict().items():
        torch.testing.assert_close(got.state_dict()[name], tensor, rtol=0, atol=1e-6)
    assert got.decode.weight is got.encode.weight


def test_weights_fill_a_whole_network_again():
    done, start = run(FedPer(personal=("decode.*",)))
    weights = done.weights("c1")
    assert "decode.weight" not in weights
    assert len(digest(weights)) == 64
    check_state(start, weights)
    full = fill(start, weights)
    assert torch.equal(full.decode.weight, weights["encode.weight"])
    x = torch.randn(5, 3)
    assert torch.equal(full(x), done.model("c1")(x))
    with pytest.raises(RuntimeError, match=r"encode\.weight"):
        fill(Tied(), {n: t for n, t in weights.items() if n != "encode.weight"})


def test_full_precision_may_be_asked_for_under_any_name():
    assert quantized_names(Tied(), ["decode.weight"]) == ("head.weight",)
    with pytest.raises(ConfigError, match="matches no parameter"):
        quantized_names(Tied(), ["decoder.weight"])
