"""Sums of whole numbers: exact, clipped at the stated range, for methods that take means."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medfed.common.tensors import layout_of
from medfed.config.compose import build, described
from medfed.federation.algorithm import Cohort
from medfed.federation.other_state import OTHER
from medfed.federation.reference import run_reference
from medfed.federation.wire.channel import Channel, MessageContext
from medfed.federation.wire.fixed_point import FixedPoint, read
from medfed.federation.wire.packet import EncodedPart, Message
from medfed.run.channel import build_channel
from medfed.standalone.errors import CodecError, ConfigError, NonFiniteError
from tests.contract.harness import NAMES, algorithm, federation, lightning
from tests.integration.runs import CLINICAL


def covered(name: str) -> tuple[str, ...]:
    """The parts of a method that can be summed."""
    method = algorithm(name)
    return tuple(
        p for p in method.parts_sent if p in method.parts_averaged and not method.trains_centrally
    )


def secure(name: str) -> Channel:
    return Channel(sums=FixedPoint(covered(name)))


@given(
    st.integers(3, 7).flatmap(
        lambda n: st.lists(
            st.tuples(st.integers(1, 10**6), st.lists(st.floats(-16, 16), min_size=4, max_size=4)),
            min_size=n,
            max_size=n,
        )
    )
)
def test_the_sum_equals_numpys(clients):
    """Of Python's whole numbers, which never overflow; and the mean is right to a step."""
    sums, whole = FixedPoint(("w",), 16.0), sum(n for n, _ in clients)
    rows = [torch.tensor(row, dtype=torch.float64) for _, row in clients]
    shares = [n / whole for n, _ in clients]
    layout = layout_of({"w": rows[0]})
    parts = [
        EncodedPart("update", sums.encode({"w": row}, p)[0], layout)
        for row, p in zip(rows, shares, strict=True)
    ]
    exact = [
        sum(round(float(row[i]) * (p * sums.scale)) for row, p in zip(rows, shares, strict=True))
        for i in range(4)
    ]
    total = sum(read(part) for part in parts).astype(np.uint32)  # type: ignore[union-attr]
    assert total.view(np.int32).tolist() == exact
    mean = sum(p * row for row, p in zip(rows, shares, strict=True))
    found = sums.mean(parts, sum(shares))["w"]
    torch.testing.assert_close(found, mean, rtol=0, atol=len(clients) / sums.scale)
    assert torch.equal(sums.mean(parts[::-1], sum(shares))["w"], found)


def test_methods_that_take_means_alone_do_as_before():
    """Within the rounding of the steps, with the bytes of fp32."""
    for name in filter(covered, NAMES):
        plain, summed = (
            run_reference(federation(name, channel=channel)[1], 2)
            for channel in (Channel(), secure(name))
        )
        assert summed.ledger.to_csv() == plain.ledger.to_csv()
        for client in plain.ids:
            expected, found = plain.personal_model(client), summed.personal_model(client)
            for entry, tensor in expected.items():
                if (name, entry) == ("knnper", OTHER):
                    continue  # who votes is a choice, which rounding may turn
                torch.testing.assert_close(found[entry], tensor, rtol=1e-4, atol=1e-4)
        assert summed.digests() != plain.digests(), name


def test_lightning_equals_the_plain_loop():
    module, _ = lightning("scaffold", rounds=2, channel=secure("scaffold"))
    plain = run_reference(federation("scaffold", channel=secure("scaffold"))[1], 2)
    assert module.federation.digests() == plain.digests()


def test_what_is_beyond_the_range_is_clipped_and_said(caplog):
    sums = FixedPoint(("shared",), 2.0)
    channel = Channel(sums=sums)
    message = Message("fit", {"shared": {"w": torch.tensor([5.0, -1.0, -3.0])}})
    caplog.set_level(logging.WARNING, "medfed")
    for number in range(2):
        packet, _ = channel.encode(message, "up", MessageContext("north", number, 0, 1.0))
    assert sums.mean([packet.parts["shared"]], 1.0)["w"].tolist() == pytest.approx([2, -1, -2])
    (said,) = caplog.messages
    assert "north, round 1: 2 numbers of the part shared are beyond channel.range=2" in said
    assert channel.decode(packet, "up")[0].parts == {}


def test_bad_bytes_and_numbers_are_refused():
    channel = Channel(sums=FixedPoint(("shared",)))
    nan = Message("fit", {"shared": {"w": torch.tensor([float("nan")])}})
    with pytest.raises(NonFiniteError, match="shared/w holds NaN"):
        channel.encode(nan, "up", MessageContext("north", 0, 0, 1.0))
    fine = Message("fit", {"shared": {"w": torch.ones(2)}})
    with pytest.raises(ConfigError, match=r"would be sent on its own; set channel\.secure=null"):
        channel.encode(fine, "up", MessageContext("north"))
    data = channel.encode(fine, "up", MessageContext("north", 0, 0, 1.0))[0].parts["shared"].data
    for bad in (b"", b"x" + data[1:], data[:-1], data + b"x"):
        with pytest.raises(CodecError):
            read(EncodedPart("state", bad, (("w", (2,), "float32"),)))


def test_rounds_of_two_clients_are_refused():
    _, two, _ = federation("fedavg", channel=secure("fedavg"), cohort=Cohort(absent={1: ["c0"]}))
    with pytest.raises(ConfigError, match="needs 3 clients in every round, and round 2 has 2"):
        run_reference(two, 2)


@pytest.mark.parametrize(
    ("overrides", "clients", "why"),
    [
        (("algorithm=clusteredfl",), 4, "ClusteredFL needs more of what each client sends than"),
        (("algorithm=fedpac",), 4, "FedPAC needs more of what each client sends than"),
        (("algorithm=fedmgda",), 4, "FedMGDA needs more"),
        (("algorithm=ifca",), 4, "IFCA needs more"),
        (("algorithm=pooled",), 4, "Pooled needs more"),
        (("algorithm.mask_aware=true",), 4, "algorithm.mask_aware=true averages"),
        (("aggregation=median",), 5, "aggregation=median compares the clients"),
        (("codec.up=stc",), 4, "codec.up and channel.up make messages"),
        (("channel.up.cer.gamma=0.1",), 4, "codec.up and channel.up make messages"),
        (("channel.up.shift=auto",), 4, "codec.up and channel.up make messages"),
        ((), 2, "2 clients are too few to hide one in a sum of 3"),
        (("channel.secure=yes",), 4, "channel.secure must be masks or null"),
        (("channel.range=0",), 4, r"channel.range must be in \(0, 1000000\]"),
    ],
)
def test_what_needs_single_messages_is_refused_by_name(overrides, clients, why):
    base = (*CLINICAL, "algorithm=fedavg", "channel.secure=masks", "folder=x")
    config = described([*base, *overrides])
    method = build(config.algorithm)
    if config.aggregation is not None:
        method = method.aggregating(build(config.aggregation))
    with pytest.raises(ConfigError, match=why):
        build_channel(config, method, clients)


def test_what_is_not_covered_is_said(caplog):
    caplog.set_level(logging.WARNING, "medfed")
    config = described([*CLINICAL, "algorithm=pfednet", "channel.secure=masks", "folder=x"])
    channel = build_channel(config, build(config.algorithm), 4)
    assert channel.sums == FixedPoint(("shared",))
    assert "the server receives sketch and personal of each client" in caplog.text
