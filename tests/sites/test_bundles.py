"""Bundles that a study brings to hospitals: the simulation's numbers, and what a site refuses."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from medfed.records.bundles import manifest_hash, packed, unpacked
from medfed.records.places import MANIFEST, METADATA
from medfed.sites import wire
from medfed.sites.calls import Caller
from medfed.sites.policy import Policy
from medfed.sites.studying import Conductor
from medfed.sites.words import VetoError
from medfed.standalone.errors import DataError, SiteError
from medfed.studies.plan import Bundle, Evaluation, Plan
from tests.sites.hospitals import QUICK
from tests.sites.studies import NAMES, conducted, exported, place, plain, simulation, sites
from tests.sites.toy_sites import opened

ALLOWED = Policy(evaluate_models=True)


@pytest.fixture(scope="module")
def bundle(tables, tmp_path_factory) -> Path:
    """The bundle of a model that was trained on the tables."""
    return exported(tables, tmp_path_factory.mktemp("bundle"))


@pytest.fixture(scope="module")
def plan(bundle) -> Plan:
    """The model beside a column of scores, of all patients."""
    one = Bundle("new", manifest_hash(bundle), str(bundle))
    asked = Evaluation(["new", "score"], reference="score", by=["sex"])
    return Plan({"sex": ["f", "m"]}, evaluate=asked, bundles=[one], patients="all").check("plan")


def brought(tables, tmp_path, plan, bundle, **policies):
    everyone = dict.fromkeys(NAMES, ALLOWED) | policies
    transport = sites(tables, tmp_path, plan.agreed, **everyone)
    return transport, {"new": packed(bundle)}


def test_sites_have_the_numbers_of_the_simulation(tables, tmp_path, plan, bundle):
    """To the last bit, with differences from a column, groups, and the list of harm."""
    transport, bodies = brought(tables, tmp_path, plan, bundle)
    found, remarks = conducted(transport, plan, bodies)
    assert remarks == []
    assert plain(found) == plain(simulation(tables, plan))
    scores = {line[0] for line in found[-1].lines}
    assert {"new", "new, sex: f"} <= scores


def test_nothing_of_a_bundle_travels_but_plain_data(bundle, tmp_path):
    files = msgspec.msgpack.decode(packed(bundle))
    assert {*files} == {MANIFEST, METADATA, "models/model.pt"}
    unpacked(packed(bundle), manifest_hash(bundle), tmp_path / "here")
    assert not (tmp_path / "here" / "scripts").exists()


def changed(body: bytes, **of: bytes) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.decode(body) | of)


OTHERS = {
    "metadata": lambda body: changed(body, **{METADATA: b"{}"}),
    "weights": lambda body: changed(body, **{"models/model.pt": b"pickle"}),
    "manifest": lambda body: changed(body, **{MANIFEST: b'{"sha256": {}}'}),
    "code": lambda body: changed(body, **{"scripts/run.py": b"import os"}),
    "path": lambda body: changed(body, **{"../../here": b"there"}),
    "nothing": lambda body: b"",
    "noise": lambda body: b"\xff" * 90,
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_bundle_than_the_agreed_one_is_not_opened(name, bundle, tmp_path):
    body = OTHERS[name](packed(bundle))
    with pytest.raises(DataError, match="The bundle that arrived is not the agreed one"):
        unpacked(body, manifest_hash(bundle), tmp_path / "models" / "here")
    assert [*tmp_path.iterdir()] == []


def test_a_site_keeps_no_other_bundle_and_answers_nothing_without(tables, tmp_path, plan, bundle):
    transport, bodies = brought(tables, tmp_path, plan, bundle)
    with pytest.raises(SiteError, match="alpha"):
        conducted(transport, plan, {"new": changed(bodies["new"], **{METADATA: b"{}"})})
    with pytest.raises(SiteError, match="alpha"):
        conducted(transport, plan, {"other": bodies["new"]})
    found, remarks = conducted(transport, replace(plan, columns={}))
    assert all("took no part" in line for line in remarks)
    assert not any(table.lines for table in found)


def test_a_policy_must_allow_models_and_counts_them(tables, tmp_path, plan, bundle):
    transport, bodies = brought(tables, tmp_path, plan, bundle, beta=Policy())
    with pytest.raises(SiteError, match="beta: its policy"):
        conducted(transport, plan, bodies)
    few = Policy(evaluate_models=True, test_metrics=0)
    transport, bodies = brought(tables, tmp_path / "few", plan, bundle, beta=few)
    with pytest.raises(SiteError, match="beta: its policy"):
        conducted(transport, plan, bodies)


def test_a_training_takes_no_bundle(tables, tmp_path, plan, bundle):
    """Nor does a study whose session has not begun."""
    transport, bodies = brought(tables, tmp_path, plan, bundle)
    asked = wire.Bring("alpha", "session", of="new", body=bodies["new"])
    reply = wire.Reply.from_bytes(transport.sites["alpha"].answer(asked.to_bytes()))
    assert (reply.status, reply.reason) == ("unready", "session")


def test_the_test_patients_alone_count_and_are_remembered(tables, tmp_path, plan, bundle):
    """A study of the test patients and one of all may differ by enough, or are refused."""
    alone = replace(plan, patients=None)
    place_ = place(tables, "alpha", alone.agreed, ALLOWED)
    _, names = place_.patients_behind()
    assert 20 <= len(names) < 40
    few = replace(alone, least=60)
    with pytest.raises(VetoError, match="patients, and a study needs 60 at each site"):
        _ = place(tables, "alpha", few.agreed, ALLOWED).rows


def test_the_check_counts_what_would_leave_without_the_bundle(tables, tmp_path, plan, bundle):
    """As many numbers as leave then."""
    site = place(tables, "alpha", plan.agreed, ALLOWED)
    part = site.parts[-1]
    counted = part.estimate(
        site.cohort.with_examples(site.rows, [one.name for one in site.plan.bundles])
    )
    transport, bodies = brought(tables, tmp_path, plan, bundle)
    caller = opened(Caller(transport, NAMES, QUICK))
    Conductor(caller, plan, "job", bodies).run()
    told = part.estimate(transport.sites["alpha"].workplace.scored)
    assert {n: {*of} for n, of in counted.items()} == {n: {*of} for n, of in told.items()}
