"""Methods across sites equal their simulation, with and without lossy codecs; one of each shape."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.harness import algorithm, lightning
from tests.contract.shapes import MESSAGES, STATES
from tests.sites.hospitals import as_left
from tests.sites.toy_sites import NAMES, ROUNDS, coordinated, fit, lossy, plain, toy_sites

CASES = [
    pytest.param(name, settings, id=f"{name}-{codec}")
    for names, settings, codec in ((STATES, plain, "fp32"), (MESSAGES, lossy, "stc-topk"))
    for name in names
    if not algorithm(name).trains_centrally
]


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_equal_hashes_metrics_and_ledger(name, settings, tmp_path: Path):
    """Also what every site keeps, and the steps and passes that it took."""
    expected, record = lightning(name, rounds=ROUNDS, **settings())
    transport = toy_sites(tmp_path, name, settings)
    module = coordinated(transport, name, settings)
    found = fit(module, tmp_path / "server")
    wanted = expected.federation
    assert module.coordinator.digests(ROUNDS) == wanted.digests()
    assert found.history == [r._replace(metrics=as_left(r.metrics)) for r in record.history]
    assert module.federation.ledger.to_csv() == wanted.ledger.to_csv()
    spent = {c: (wanted.clients[c].steps_done, wanted.clients[c].passes) for c in NAMES}
    assert module.coordinator.progress.spent == spent
    assert not module.coordinator.progress.left_out
