"""What every algorithm promises when codecs are lossy and remember; once per shape of messages."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from medfed.common.tensors import digest
from medfed.federation.federation import Federation
from medfed.federation.reference import run_reference
from medfed.federation.wire.packet import Packet
from tests.contract.harness import (
    LOSSY,
    ROUNDS,
    Serialising,
    federation,
    half,
    lightning,
    lossy,
)
from tests.contract.shapes import MESSAGES

pytestmark = [
    pytest.mark.parametrize("name", MESSAGES),
    pytest.mark.parametrize("setting", LOSSY),
]


@functools.cache
def straight(name: str, setting: str) -> Federation:
    """The oracle: the plain loop, without a single evaluation."""
    _, fed, _ = federation(name, channel=lossy(setting), cohort=half())
    return run_reference(fed, ROUNDS)


def test_lightning_with_evaluations_equals_reference(name, setting, tmp_path: Path):
    expected = straight(name, setting)
    folder = tmp_path / "run"
    module, record = lightning(name, folder, channel=lossy(setting), cohort=half())
    assert module.federation.digests() == expected.digests()
    assert module.federation.ledger.to_csv() == expected.ledger.to_csv()
    path = folder / "round_00001.ckpt"
    resumed, again = lightning(name, folder, resume=path, channel=lossy(setting), cohort=half())
    assert resumed.federation.digests() == expected.digests()
    assert resumed.federation.ledger.to_csv() == expected.ledger.to_csv()
    assert again.history == record.history


def test_serialised_messages_change_nothing(name, setting):
    serial = Serialising(**LOSSY[setting]())
    _, fed, _ = federation(name, channel=serial, cohort=half())
    assert run_reference(fed, ROUNDS).digests() == straight(name, setting).digests()


def test_what_is_evaluated_is_what_the_client_decodes(name, setting):
    """From nothing but the bytes and its own memory; and again, with equal bits."""
    fed = straight(name, setting)
    before = fed.digests()
    for client in fed.ids:
        packet = Packet.from_bytes(fed.delivery(client).to_bytes())
        local = fed.clients[client]
        message, _ = fed.channel.decode(packet, "down", local.memory["down"])
        decoded = fed.as_evaluated(local, fed.algorithm.personal_model(local, message))
        for _ in range(2):
            assert digest(fed.personal_model(client)) == digest(decoded)
    assert fed.digests() == before


def test_a_cohort_of_all_keeps_one_reference(name, setting):
    _, fed, _ = federation(name, channel=lossy(setting))
    run_reference(fed, 2)
    ends = [fed.memory["down"], {c: local.memory["down"] for c, local in fed.clients.items()}]
    held = [
        t.untyped_storage().data_ptr()
        for end in ends
        for memory in end.values()
        for key, t in memory.items()
        if key.startswith("reference/shared/")
    ]
    # Clients of unequal parts are sent unequal ones.
    assert len(set(held)) <= (len(fed.ids) if fed.algorithm.card.at_most else 1)
    assert all(torch.isfinite(t).all() for m in ends[0].values() for t in m.values())
