"""A newcomer gets over the wire what it gets in a simulation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from medfed.common.tensors import digest
from medfed.common.untrusted import read_tensors
from medfed.federation.lightning.module import FederatedModule
from medfed.federation.local_client import LocalClient
from medfed.federation.onboarding import rules_of
from medfed.federation.reference import onboarded_client, run_onboarding, run_reference
from medfed.sites.calls import Caller
from medfed.sites.newcomers import onboard
from medfed.sites.site import Site
from medfed.sites.wire import Facts
from medfed.sites.withdrawal import SitesRecord
from medfed.standalone.errors import SiteError
from tests.contract.harness import federation
from tests.sites.direct import Direct
from tests.sites.hospitals import QUICK, as_left
from tests.sites.toy_sites import NAMES, Toy, lossy
from tests.toys import toy_data

NEW, STEPS = "c3", 5
ALONE = SitesRecord("0", {}, {}, [])  # a run that has said nothing to its sites


class Late(Toy):
    """A client whom the federation does not know."""

    def __init__(self, method: str) -> None:
        super().__init__("c0", method, lossy)
        self.joins = STEPS
        self.name, self.data = NEW, toy_data(4, batch=4)[3]

    def facts(self) -> Facts:
        return msgspec.structs.replace(super().facts(), num_samples=self.data.num_samples)

    def join(self, everyone) -> FederatedModule:
        task, fed, local = federation(self.method, **self.settings())
        assert [c.id for c in everyone] == NAMES
        weights = next(iter(fed.clients.values())).weights
        fed.clients = {NEW: LocalClient(self.data, local, weights, fed.client_start)}
        return FederatedModule(task, fed, local)


# Whose newcomer asks nothing, is asked, trains all, and has a personal part.
@pytest.mark.parametrize("method", ["fedavg", "pfednet", "fedamp", "fedrep", "ifca"])
def test_a_newcomer(method, tmp_path: Path):
    task, fed, local = federation(method, **lossy())
    run_reference(fed, 2)
    before = fed.digests()
    caller = Caller(Direct({NEW: Site(Late(method), tmp_path / NEW)}), [*NAMES, NEW], QUICK)
    _, metrics, ledger = onboard(caller, fed, NEW, ALONE)
    assert fed.digests() == before
    local.budget = replace(local.budget, steps=STEPS)
    client = onboarded_client(fed, toy_data(4, batch=4)[3])
    message, expected = run_onboarding(fed, client)
    model = fed.as_evaluated(client, rules_of(fed.algorithm).onboard(client, message))
    assert ledger.to_csv() == expected.to_csv()
    kept = read_tensors(tmp_path / f"{NEW}-joined.safetensors")
    assert digest(kept) == digest(local.model.whole(model))
    local.model.load(model)
    assert metrics == as_left(task.evaluate(client.data.eval_batches("test"), test=True))


def test_who_has_trained_need_not_join(tmp_path: Path):
    _, fed, _ = federation("fedavg")
    caller = Caller(Direct({}), NAMES, QUICK)
    with pytest.raises(SiteError, match="Site c1 has already trained with the others"):
        onboard(caller, fed, "c1", ALONE)
    with pytest.raises(SiteError, match="c3: it did not answer"):
        onboard(caller, fed, NEW, ALONE)
