"""What one site can do to the others, and what is said of it."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from medfed.commands.site import main as site_command
from medfed.config.compose import described
from medfed.federation.aggregation import Median
from medfed.federation.wire.channel import Channel, MessageContext
from medfed.federation.wire.packet import Packet
from medfed.records.folder import RunFolder
from medfed.sites.agreement import fingerprints
from medfed.sites.calls import Caller, Terms, greet
from medfed.sites.run import as_before
from medfed.sites.status import Status, Traffic
from medfed.sites.wire import Facts, Greeted, Greeting, Reply, Request, Silent, declined
from medfed.sites.withdrawal import SitesRecord
from medfed.standalone.errors import NonFiniteError
from medfed.standalone.files import write_json
from tests.integration.runs import CLINICAL, run
from tests.sites.direct import Direct
from tests.sites.hospitals import across, direct, same
from tests.sites.toy_sites import NAMES, coordinated, fit, opened, toy_sites

OVERRIDES = (*CLINICAL, "algorithm=fedavg", "partition.num_clients=3", "rounds=2")
SITES = [f"hospital_{n}" for n in range(3)]


class Multiplied(Direct):
    """One site multiplies what it sends."""

    site, factor = SITES[1], -20.0

    def call(self, site: str, request: bytes, timeout: float) -> bytes:
        answered = Reply.from_bytes(super().call(site, request, timeout))
        if answered.kind == "fit" and site == self.site:
            message, _ = Channel().decode(Packet.from_bytes(answered.body), "up", None)
            parts = {
                part: {name: self.factor * tensor for name, tensor in tensors.items()}
                for part, tensors in message.parts.items()
            }
            changed = dataclasses.replace(message, parts=parts)
            packet, _ = Channel().encode(changed, "up", MessageContext(site), None)
            answered = replace(answered, body=packet.to_bytes())
        return answered.to_bytes()


def test_a_robust_aggregation_equals_the_simulation_and_is_agreed(tmp_path: Path):
    overrides = (*OVERRIDES, "aggregation=median")
    run(tmp_path / "simulation", *overrides)
    across(tmp_path / "server", direct(tmp_path / "sites", SITES, *overrides), SITES, *overrides)
    assert not same(tmp_path / "simulation", tmp_path / "server")
    assert not (tmp_path / "server" / "unusual.json").exists()
    plain, other = (
        fingerprints(described([*OVERRIDES, option, "folder=x"]).values)
        for option in ("aggregation=mean", "aggregation=median")
    )
    assert {key for key in plain if plain[key] != other.get(key)} == {"aggregation._target_"}


@pytest.mark.parametrize("aggregation", ["mean", "median"])
def test_one_site_ruins_the_mean_and_not_the_median(aggregation, tmp_path: Path, caplog):
    """Either way its messages are said and recorded."""
    caplog.set_level(logging.WARNING, "medfed")
    overrides = (*OVERRIDES, f"aggregation={aggregation}", "local.steps=20", "rounds=3")
    transport = Multiplied(direct(tmp_path / "sites", SITES, *overrides).sites)
    summary = across(tmp_path / "server", transport, SITES, *overrides)
    auroc = [summary["clients"][site]["auroc"] for site in SITES]
    assert (min(auroc) > 0.9) == (aggregation == "median")
    text = f"Round 1: the part shared of {SITES[1]} is"
    assert sum(text in record.getMessage() for record in caplog.records) == 1
    record = json.loads((tmp_path / "server" / "unusual.json").read_text())
    assert (0, SITES[1]) in {(far["round"], far["client"]) for far in record["far"]}


def test_a_robust_aggregation_waits_for_the_sites_that_it_needs(tmp_path: Path):
    module = coordinated(toy_sites(tmp_path, "fedavg"), "fedavg")
    federation = module.federation
    federation.algorithm = federation.algorithm.aggregating(Median(), 3)
    assert module.coordinator.attendance.gather(0, {}, 0.0) == tuple(NAMES)


def test_a_site_cannot_claim_other_samples_in_a_run(tmp_path: Path):
    """It comes back with a million: it is left out, and the reason names both numbers."""
    transport = toy_sites(tmp_path, "fedavg")
    call = transport.call

    class Claims(Direct):
        def call(self, site: str, request: bytes, timeout: float) -> bytes:
            answered = Reply.from_bytes(call(site, request, timeout))
            if site == "c1" and self.restarted:
                if answered.kind == "agree" and answered.status == "ok":
                    facts = replace(answered.facts, num_samples=10**6)
                    answered = replace(answered, facts=facts)
                elif answered.kind == "fit" and answered.round == 1:
                    answered = declined(Request.from_bytes(request), "unready")
            return answered.to_bytes()

        restarted = False

    claims = Claims(transport.sites)
    module = coordinated(claims, "fedavg")
    claims.restarted = True
    fit(module, tmp_path / "server", 3)
    progress = module.coordinator.progress
    assert progress.absent == {1: ["c1"], 2: ["c1"]}
    why = module.coordinator.attendance.away["c1"]
    assert why.startswith("it has 1000000 training samples, and had 8")


def test_divergence_is_said_and_no_such_round_is_selected(tmp_path: Path, caplog):
    """In a simulation and across sites; if it is every round, there is no result."""
    caplog.set_level(logging.WARNING, "medfed")
    hot = (*OVERRIDES, "optimizer.lr=1e6")
    with pytest.raises(NonFiniteError, match="In every evaluated round the loss is not finite or"):
        run(tmp_path / "simulation", *hot)
    assert any("Round 1: training diverges" in r.getMessage() for r in caplog.records)
    with pytest.raises(NonFiniteError, match="In every evaluated round"):
        across(tmp_path / "server", direct(tmp_path / "sites", SITES, *hot), SITES, *hot)
    for folder in ("simulation", "server"):
        record = json.loads((tmp_path / folder / "unusual.json").read_text())
        assert record["diverged"] == {"0": SITES, "1": SITES}


def test_other_versions_are_said_and_recorded(tmp_path: Path, caplog):
    caplog.set_level(logging.WARNING, "medfed")
    transport = direct(tmp_path / "sites", SITES, *OVERRIDES)
    workplace = transport.sites[SITES[2]].workplace
    greeting = workplace.greeting()
    older = {**greeting.versions, "torch": "2.0.1"}
    workplace._greeting = replace(greeting, versions=older)
    across(tmp_path / "server", transport, SITES, *OVERRIDES)
    lines = [r.getMessage() for r in caplog.records if "at the coordinator" in r.getMessage()]
    assert lines == [
        f"torch is {greeting.versions['torch']} at the coordinator, but 2.0.1 at hospital_2; last "
        "digits may differ."
    ]
    record = json.loads((tmp_path / "server" / "sites.json").read_text())["versions"]
    assert {*record[SITES[0]]} == {"medfed", "torch", "monai", "device", "commit"}
    assert record[SITES[2]]["torch"] == "2.0.1"


def test_sites_that_start_again_have_the_first_deadline():
    """A resumed run does not end because a site takes longer to start than for one request."""

    class Starting:
        def call(self, site: str, request: bytes, timeout: float) -> bytes:
            if timeout < 100:
                raise Silent
            asked = Request.from_bytes(request)
            return Greeted.to(asked, greeting=Greeting({}, {})).to_bytes()

    caller = Caller(Starting(), NAMES, Terms(timeout=90, hello=250, grace=0.05))
    assert list(greet(caller, some=True)) == NAMES
    assert not caller.lacking


def test_a_quorum_that_has_started_waits_for_the_others_no_longer_than_for_a_request():
    class Half:
        def call(self, site: str, request: bytes, timeout: float) -> bytes:
            if site == "c2":
                released.wait()  # it does not answer as long as anybody waits
                raise Silent
            asked = Request.from_bytes(request)
            return Greeted.to(asked, greeting=Greeting({}, {})).to_bytes()

    released = threading.Event()
    caller = opened(Caller(Half(), NAMES, Terms(timeout=0.2, hello=1e6, grace=0.05, probe=250)))
    try:
        assert list(greet(caller, some=True)) == ["c0", "c1"]
    finally:
        released.set()
    assert caller.lacking == {"c2": "it did not answer"}


def test_every_byte_is_counted_and_the_state_is_shown(tmp_path: Path, capsys):
    """Heads, starts and evaluations, too; lost replies, and what an earlier process has counted."""
    passed = {"down": 0, "up": 0}

    class Counting(Direct):
        def call(self, site: str, request: bytes, timeout: float) -> bytes:
            passed["down"] += len(request)
            if lost and (Request.from_bytes(request).kind, site) == ("commit", SITES[0]):
                lost.clear()
                raise Silent
            reply = super().call(site, request, timeout)
            passed["up"] += len(reply)
            return reply

    lost = [True]
    transport = Counting(direct(tmp_path / "sites", SITES, *OVERRIDES).sites)
    folder = tmp_path / "server"
    summary = across(folder, transport, SITES, *OVERRIDES)
    assert summary["wire"] == {way: passed[way] for way in ("up", "down")}
    assert summary["wire"]["up"] > summary["bytes"]["up"]
    counted = Traffic()
    counted.read(folder / "traffic.csv")
    assert counted.total() == (passed["down"], passed["up"])
    capsys.readouterr()
    site_command(["status", f"run={folder}"])
    printed = capsys.readouterr().out
    for text in ("Round 2 of 2: finished", "hospital_2", "there", "evaluate", "metrics"):
        assert text in printed
    with pytest.raises(SystemExit):
        site_command(["status", f"run={tmp_path}"])
    assert "is no folder of a run across sites" in capsys.readouterr().err


def test_the_state_says_who_is_away_and_why():
    status = Status(rounds=4)
    status.change("trains", 0, {}, {"a": -1, "b": -1})
    since = status.sites["a"].since
    status.change("evaluates", 0, {"b": "it was busy"}, {"a": 0, "b": -1})
    there = status.sites["a"]
    assert (status.doing, there.since, there.round) == ("evaluates", since, 0)
    assert status.sites["b"].state == "it was busy"


def test_a_resumed_run_leaves_out_a_site_of_other_samples(tmp_path: Path):
    """Alone, by name; the counts of the first agreement stay."""
    first = {site: Facts(10, "hash", {"shape": [3]}) for site in SITES}
    record = SitesRecord("job", {}, first, [])
    write_json(RunFolder(tmp_path).sites_json, msgspec.to_builtins(record))
    caller = Caller(Direct({}), SITES, Terms())
    now = {**first, SITES[1]: replace(first[SITES[1]], num_samples=10**6)}
    assert as_before(tmp_path, now, caller) == first
    assert list(caller.lacking) == [SITES[1]]
    assert caller.lacking[SITES[1]].startswith("it has 1000000 training samples, and had 10 when")
