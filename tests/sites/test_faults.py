"""Sites and replies that are missing, late or twice there; a coordinator and sites that end."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace

from medfed.common.untrusted import read_checkpoint
from medfed.federation.algorithm import Cohort
from medfed.federation.wire.channel import Channel, MessageContext
from medfed.federation.wire.packet import Packet
from medfed.sites.attendance import SitesProgress
from medfed.sites.gate import MODELS
from medfed.sites.site import Site
from medfed.sites.wire import Fit, Hello, Reply, Request, Trained
from medfed.standalone.errors import NonFiniteError, SiteError
from tests.contract.harness import lightning
from tests.sites.faults import Faulty, is_at, once
from tests.sites.hospitals import IMPATIENT, QUICK, as_left
from tests.sites.toy_sites import (
    NAMES,
    Toy,
    coordinated,
    fit,
    lossy,
    plain,
    toy_sites,
)

ROUNDS = 3
METHOD = "fedrep"
PHASES = "pfednet"  # several a round


@functools.cache
def simulated(settings=lossy, absent=(), method=METHOD):
    """Hashes, metrics and ledger of a simulation whose cohort lacks some."""
    cohort = Cohort(absent=dict(absent))
    module, record = lightning(method, rounds=ROUNDS, cohort=cohort, **settings())
    fed = module.federation
    return fed.digests(), left(record.history), fed.ledger.to_csv()


def left(history):
    return [record._replace(metrics=as_left(record.metrics)) for record in history]


def result(module, evaluation):
    coordinator = module.coordinator
    return coordinator.digests(ROUNDS), evaluation.history, module.federation.ledger.to_csv()


def across(folder: Path, settings=lossy, terms=QUICK, method=METHOD, **faults):
    transport = Faulty(toy_sites(folder, method, settings))
    module = coordinated(transport, method, settings, terms)
    for name, rule in faults.items():
        setattr(transport, name, rule)
    return module, fit(module, folder / "server", ROUNDS), transport


@pytest.mark.parametrize("phase", [1, 2])
def test_a_silent_site_is_left_out_of_a_round(phase, tmp_path: Path):
    """Whoever had answered goes back; the next rounds have it again."""
    silent = is_at("fit", "c1", 1, phase)
    module, evaluation, _ = across(tmp_path, method=PHASES, deaf=silent)
    expected = simulated(absent=((1, ("c1",)),), method=PHASES)
    assert result(module, evaluation)[::2] == expected[::2]
    progress = module.coordinator.progress
    assert progress.absent == {1: ["c1"]}
    assert progress.left_out == [(1, "c1", "it did not answer")]
    # It is measured again as soon as it is back, and only what was measured is recorded.
    measured = {(r.round, r.client) for r in evaluation.history}
    assert measured == {(n, c) for n in range(ROUNDS) for c in NAMES} - {(1, "c1")}


def test_two_sites_fail_in_one_round_each(tmp_path: Path):
    def fails(asked: Request) -> bool:
        return (asked.kind, asked.site, asked.round) in {("fit", "c0", 1), ("fit", "c2", 2)}

    module, evaluation, _ = across(tmp_path, deaf=fails)
    expected = simulated(absent=((1, ("c0",)), (2, ("c2",))))
    assert result(module, evaluation)[::2] == expected[::2]


@pytest.mark.parametrize(
    "event",
    [is_at("fit", "c1", 1), is_at("commit", "c1", 1), is_at("evaluate", "c1", 1)],
    ids=["fit", "commit", "evaluate"],
)
def test_a_lost_reply_is_asked_for_again(event, tmp_path: Path):
    """The site has done its work, and does it no second time."""
    module, evaluation, transport = across(tmp_path, lose=once(event))
    assert result(module, evaluation) == simulated()
    assert sum(map(event, transport.seen)) == 2
    assert not module.coordinator.progress.left_out


def test_a_commit_that_never_answers_takes_the_round_back(tmp_path: Path):
    """Although the site has kept the round, it goes back to the one before with all others."""
    module, evaluation, _ = across(tmp_path, lose=is_at("commit", "c1", 1))
    assert result(module, evaluation)[::2] == simulated(absent=((1, ("c1",)),))[::2]


@pytest.mark.parametrize(("method", "part"), [("fedrep", "shared"), ("pfednet", "personal")])
def test_a_reply_without_a_part_names_its_site(method, part, tmp_path: Path):
    """The round is begun anew without it, and nothing of the attempt is kept."""

    class Lacking(Faulty):
        def call(self, site: str, request: bytes, timeout: float) -> bytes:
            answered = Reply.from_bytes(super().call(site, request, timeout))
            if (answered.kind, site, answered.round) == ("fit", "c1", 1):
                packet = Packet.from_bytes(answered.body)
                parts = {n: p for n, p in packet.parts.items() if n != part}
                body = dataclasses.replace(packet, parts=parts).to_bytes()
                answered = replace(answered, body=body)
            return answered.to_bytes()

    module = coordinated(Lacking(toy_sites(tmp_path, method, lossy)), method, lossy)
    evaluation = fit(module, tmp_path / "server", ROUNDS)
    assert module.coordinator.progress.left_out == [(1, "c1", f"its message has no {part}")]
    assert result(module, evaluation)[::2] == simulated(absent=((1, ("c1",)),), method=method)[::2]


class Changed(Faulty):
    """What c1 replies in round 1 is changed by a function."""

    def __init__(self, inner, change) -> None:
        super().__init__(inner)
        self.change = change

    def call(self, site: str, request: bytes, timeout: float) -> bytes:
        data = super().call(site, request, timeout)
        answered = Reply.from_bytes(data)
        chosen = (site, answered.round, answered.status) == ("c1", 1, "ok")
        return self.change(answered).to_bytes() if chosen else data


def filled(value: float):
    """Fills what a site sends with a number."""

    def change(answered: Reply) -> Reply:
        if answered.kind != "fit":
            return answered
        message, _ = Channel().decode(Packet.from_bytes(answered.body), "up", None)
        parts = {
            part: {name: torch.full_like(tensor, value) for name, tensor in tensors.items()}
            for part, tensors in message.parts.items()
        }
        changed = dataclasses.replace(message, parts=parts)
        packet, _ = Channel().encode(changed, "up", MessageContext("c1"), None)
        return replace(answered, body=packet.to_bytes())

    return change


@pytest.mark.parametrize("value", [3.4e38, 1e30, -1e9])
@pytest.mark.parametrize("method", ["fedavg", "fedrep"])
def test_huge_numbers_leave_out_their_site_alone(method, value, tmp_path: Path):
    """Sums of them overflow, and then the training of innocent sites fails."""
    module = coordinated(Changed(toy_sites(tmp_path, method), filled(value)), method)
    evaluation = fit(module, tmp_path / "server", ROUNDS)
    ((number, site, why),) = module.coordinator.progress.left_out
    assert (number, site) == (1, "c1")
    norm = re.match(r"its message has the norm (\S+), and those of most sites at most", why)
    assert norm is not None
    assert min(abs(value), 9e18) <= float(norm[1]) <= max(1e19, 100 * abs(value))
    assert result(module, evaluation)[::2] == simulated(plain, ((1, ("c1",)),), method)[::2]


def test_a_site_measures_no_models_beyond_the_protocol(tmp_path: Path):
    """Metrics of any weights, on test patients before training, would tell of single patients."""
    transport = Faulty(toy_sites(tmp_path, "fedavg"))
    fit(coordinated(transport, "fedavg"), tmp_path / "server", ROUNDS)
    asked = [r for r in transport.seen if is_at("evaluate", "c1", ROUNDS - 1)(r)][-1]

    def answer(number: int, split: str = "val", value: float | None = None, **more) -> str:
        more |= {"split": split, "trained": False}
        request = replace(asked, round=number, attempt=9, **more)
        if value is not None:
            reply = Trained("c1", body=asked.body, steps=1, passes=(1, 1))
            request = replace(request, body=filled(value)(reply).body)
        reply = Reply.from_bytes(transport.inner.call("c1", request.to_bytes(), 1))
        return reply.reason or reply.status

    assert answer(ROUNDS) == "round"
    assert answer(ROUNDS + 1, "test") == "round"
    asked = replace(asked, at=ROUNDS - 1)
    answers = [answer(ROUNDS - 1, value=float(n)) for n in range(len(NAMES) + MODELS)]
    assert answers == ["ok"] * (len(NAMES) + MODELS - 1) + ["replay"]
    assert answer(ROUNDS, "test") == "ok"
    where = {"round": ROUNDS - 1, "attempt": 10, "at": ROUNDS - 1, "cohort": ["c0", "c1"]}
    training = Fit("c1", asked.session, body=asked.body, **where)
    reply = Reply.from_bytes(transport.inner.call("c1", training.to_bytes(), 1))
    assert reply.reason == "order"  # the test was the end
    again = Site(Toy("c1", "fedavg"), tmp_path / "c1")
    transport.inner.sites["c1"] = again
    coordinated(transport, "fedavg")
    asked = replace(asked, session=again.gate.session, at=-1)
    assert answer(0, "test") == "order"  # before the first round


def test_a_training_that_fails_after_large_numbers_names_who_sent_them(tmp_path: Path):
    transport = Changed(toy_sites(tmp_path, "fedavg"), filled(300.0))
    module = coordinated(transport, "fedavg")
    client = transport.inner.sites["c0"].client

    def diverge(asked: Request) -> None:
        if asked.round == 2:
            client.data.x[:] = float("nan")

    transport.before = diverge
    with pytest.raises(
        NonFiniteError, match=r"Site c0, round 3: .* The cause may be site c1, whose"
    ):
        fit(module, tmp_path / "server", ROUNDS)


METRICS = {
    "auroc": (1e300, "its auroc is 1e+300"),
    "dice/whole": (-0.5, "its dice/whole is -0.5"),
    "rmse": (-math.inf, "its rmse is -inf"),
    "loss": (-1e300, "its loss is -1e+300"),
}


def measured(name: str, value: float):
    """Replaces all metrics that a site sends by one."""

    def change(answered: Reply) -> Reply:
        if answered.kind != "evaluate":
            return answered
        return replace(answered, metrics={name: value})

    return change


@pytest.mark.parametrize("name", METRICS)
def test_metrics_that_no_site_can_measure_move_no_round(name, tmp_path: Path):
    value, why = METRICS[name]
    transport = Changed(toy_sites(tmp_path, METHOD), measured(name, value))
    module = coordinated(transport, METHOD)
    module.coordinator.requests.usual["val"] = frozenset([name])
    call = transport.inner.call

    def renamed(site: str, request: bytes, timeout: float) -> bytes:
        answered = Reply.from_bytes(call(site, request, timeout))
        return measured(name, 0.5)(answered).to_bytes() if answered.status == "ok" else b""

    transport.inner.call = renamed
    evaluation = fit(module, tmp_path / "server", 2, metric=name)
    assert module.coordinator.progress.left_out == [(1, "c1", why)]
    assert all(r.metrics == {name: 0.5} for r in evaluation.history)


def test_repeated_and_late_requests_change_nothing(tmp_path: Path):
    module, evaluation, _ = across(tmp_path / "a", repeat=lambda asked: asked.kind != "hello")
    assert result(module, evaluation) == simulated()
    late = once(is_at("fit", "c2", 1))
    module, evaluation, _ = across(tmp_path / "b", late=late)
    assert result(module, evaluation) == simulated()  # it came after its own repetition


def test_a_late_request_of_a_round_that_was_given_up_is_refused(tmp_path: Path):
    module, evaluation, transport = across(tmp_path, deaf=is_at("fit", "c1", 1))
    old = next(r for r in transport.seen if is_at("fit", "c0", 1)(r) and r.attempt == 0)
    reply = Reply.from_bytes(transport.inner.call("c0", old.to_bytes(), 1))
    assert (reply.status, reply.reason) == ("refused", "stale")
    assert result(module, evaluation)[::2] == simulated(absent=((1, ("c1",)),))[::2]


def restarted(transport: Faulty, folder: Path, name: str, settings=lossy) -> None:
    transport.inner.sites[name] = Site(Toy(name, METHOD, settings), folder / name)


@pytest.mark.parametrize("event", [is_at("fit", "c1", 1, 2), is_at("commit", "c1", 1)])
def test_a_site_that_is_killed_and_started_again(event, tmp_path: Path):
    """It goes on from its folder, and the round is repeated with it: nothing is missing."""
    killed = once(event)

    def kill(asked: Request) -> None:
        if killed(asked):
            transport.inner.sites["c1"] = Site(Toy("c1", PHASES, lossy), tmp_path / "c1")

    transport = Faulty(toy_sites(tmp_path, PHASES, lossy), before=kill)
    module = coordinated(transport, PHASES, lossy)
    evaluation = fit(module, tmp_path / "server", ROUNDS)
    assert result(module, evaluation) == simulated(method=PHASES)
    assert module.coordinator.progress.left_out == [(1, "c1", "it was restarted")]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("kind", ["fit", "commit", "load"])
def test_a_coordinator_that_is_killed_and_resumed(kind, tmp_path: Path):
    """Between the commits of two sites, among others; its sites live on, or are new."""

    def kill(asked: Request) -> None:
        if asked.site == "c1" and asked.round == 1 and asked.kind == kind:
            raise Killed

    folder = tmp_path / "server"
    transport = Faulty(toy_sites(tmp_path, METHOD, lossy), before=kill)
    module = coordinated(transport, METHOD, lossy)
    if kind == "load":
        fit(module, folder, 2)
    else:
        with pytest.raises(Killed):
            fit(module, folder, ROUNDS)
    transport.before = lambda _: None
    restarted(transport, tmp_path, "c2")
    last = sorted(folder.glob("round_*.ckpt"))[-1]
    progress = SitesProgress.of(read_checkpoint(last)["sites"])
    again = coordinated(transport, METHOD, lossy, progress=progress)
    evaluation = fit(again, folder, ROUNDS, resume=last)
    assert result(again, evaluation) == simulated()


def test_a_torn_checkpoint_of_the_coordinator_costs_one_more_round(tmp_path: Path):
    folder = tmp_path / "server"
    transport = toy_sites(tmp_path, METHOD, lossy)
    fit(coordinated(transport, METHOD, lossy), folder, 2)
    first = folder / "round_00000.ckpt"
    progress = SitesProgress.of(read_checkpoint(first)["sites"])
    again = coordinated(toy_sites(tmp_path, METHOD, lossy), METHOD, lossy, progress=progress)
    assert result(again, fit(again, folder, ROUNDS, resume=first)) == simulated()


def test_a_site_that_has_lost_its_folder_cannot_go_on(tmp_path: Path):
    folder = tmp_path / "server"
    fit(coordinated(toy_sites(tmp_path, METHOD, plain), METHOD), folder, 1)
    progress = SitesProgress.of(read_checkpoint(folder / "round_00000.ckpt")["sites"])
    transport = toy_sites(tmp_path, METHOD, plain)
    transport.sites["c1"] = Site(Toy("c1", METHOD), tmp_path / "elsewhere")
    with pytest.raises(SiteError, match="c1: it has not kept round 1, which it should restore"):
        coordinated(transport, METHOD, progress=progress)


def test_too_few_sites_stop_the_run(tmp_path: Path):
    terms = dataclasses.replace(IMPATIENT, quorum=0.9)
    silent = lambda asked: asked.site == "c1" and asked.round == 1  # noqa: E731
    with pytest.raises(SiteError, match=r"Round 2 needs 3 of its 3 sites.*c1: it did not answer"):
        across(tmp_path, plain, terms, deaf=silent)
    assert (tmp_path / "server" / "round_00000.ckpt").is_file()  # to be resumed from


def test_the_status_names_who_is_away_where_a_run_stops(tmp_path: Path):
    """It said of all sites that they are there, below the sentence that they did not answer."""
    transport = Faulty(toy_sites(tmp_path, METHOD))
    module = coordinated(transport, METHOD, terms=dataclasses.replace(IMPATIENT, quorum=0.9))
    transport.deaf = lambda asked: asked.site == "c1" and asked.round == 1
    said: list[tuple[str, dict[str, str]]] = []
    attendance = module.coordinator.attendance
    attendance.tell = lambda doing, number, away, at: said.append((doing, dict(away)))
    with pytest.raises(SiteError, match="too few answer"):
        fit(module, tmp_path / "server", ROUNDS)
    assert said[-1] == ("waits for sites", {"c1": "it did not answer"})


def test_methods_that_need_all_wait_for_all(tmp_path: Path):
    """The quorum of half does not count: the round is repeated with the site that was away."""
    transport = Faulty(toy_sites(tmp_path, "fedsplit"))
    module = coordinated(transport, "fedsplit")
    assert module.federation.algorithm.card.full_cohort
    transport.deaf = once(lambda r: is_at("fit", "c1", 1)(r) and r.attempt == 0)
    transport.lose = once(lambda r: is_at("fit", "c1", 1)(r) and r.attempt == 0)
    evaluation = fit(module, tmp_path / "server", ROUNDS)
    expected, record = lightning("fedsplit", rounds=ROUNDS)
    assert module.coordinator.digests(ROUNDS) == expected.federation.digests()
    assert evaluation.history == left(record.history)
    assert not module.coordinator.progress.absent


def test_a_busy_site_is_left_out_and_comes_back(tmp_path: Path):
    """Its old work, which nobody waits for any more, is forgotten."""
    transport = Faulty(toy_sites(tmp_path, METHOD, lossy))
    module = coordinated(transport, METHOD, lossy)
    site = transport.inner.sites["c1"]
    busy, call = threading.Event(), transport.inner.call

    def slow(name: str, request: bytes, timeout: float) -> bytes:
        asked = Request.from_bytes(request)
        if is_at("fit", "c1", 1)(asked) and asked.attempt == 0:
            site.gate.lock.acquire()  # as a thread that computes would
            busy.set()
        if name == "c1" and asked.kind == "evaluate" and asked.round == 1:
            pytest.fail("it was asked although it was busy")
        answered = call(name, request, timeout)
        if name == "c1" and asked.kind == "agree" and busy.is_set():
            busy.clear()  # by when it is asked for the next round, and has said so once
            site.gate.lock.release()
        return answered

    transport.inner.call = slow  # type: ignore[method-assign]
    evaluation = fit(module, tmp_path / "server", ROUNDS)
    progress = module.coordinator.progress
    assert progress.absent == {1: ["c1"]}
    assert progress.left_out == [(1, "c1", "it was busy")]
    assert result(module, evaluation)[::2] == simulated(absent=((1, ("c1",)),))[::2]


def test_probes_end_with_the_run(tmp_path: Path):
    """A site that is busy to the end is asked no more once the run has ended."""
    transport = Faulty(toy_sites(tmp_path, METHOD))
    module = coordinated(transport, METHOD, terms=dataclasses.replace(QUICK, probe=0.01))
    caller, busy = module.coordinator.caller, transport.inner.sites["c1"]
    transport.before = lambda asked: is_at("fit", "c1", 1)(asked) and busy.gate.lock.acquire()
    with caller:
        fit(module, tmp_path / "server", ROUNDS)
        assert module.coordinator.attendance.away == {"c1": "it was busy"}
        (probe,) = (thread for thread in caller._threads if thread.is_alive())
        caller.terms = QUICK  # the end waits for a call, however slow the machine
    asked = len(transport.seen)
    assert not probe.is_alive()
    assert caller.one(caller.request(Hello, "c1"), 1) == "the run has ended"
    assert len(transport.seen) == asked


def test_patience_is_for_waiting_and_not_for_training(tmp_path: Path, monkeypatch):
    """A round that takes longer still waits for a site that is lost in it."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None)
    for module in ("attendance", "coordinator"):
        monkeypatch.setattr(f"medfed.sites.{module}.time", clock)

    def trains(asked: Request) -> bool:
        now[0] += 100 * (asked.kind == "fit")
        return is_at("commit", "c1", 1)(asked) and asked.attempt == 0

    terms = dataclasses.replace(QUICK, quorum=1.0, patience=60)
    module, evaluation, transport = across(tmp_path, terms=terms, deaf=trains)
    assert any(is_at("fit", "c1", 1)(asked) and asked.attempt for asked in transport.seen)
    assert not module.coordinator.progress.absent
    assert result(module, evaluation) == simulated()


def test_what_an_error_says_stays_at_the_site(tmp_path: Path, caplog):
    """A patient's name in an exception is in the site's log, and in nothing that leaves."""
    transport = Faulty(toy_sites(tmp_path, METHOD))
    module = coordinated(transport, METHOD)
    client = transport.inner.sites["c1"].client
    kept, secret = client.data, "Jane Doe, born 1970"

    class Broken:
        def __getattr__(self, name):
            raise KeyError(secret)

    def breaks(asked: Request) -> None:
        broken = asked.kind == "fit" and asked.round == 1
        client.data = Broken() if broken else kept

    transport.before = breaks
    replies = []
    call = transport.inner.call
    transport.inner.call = lambda *a: replies.append(call(*a)) or replies[-1]
    fit(module, tmp_path / "server", ROUNDS)
    reason = module.coordinator.progress.left_out[0][2]
    assert reason == "it failed (KeyError); see the log of c1"
    assert not any(secret.encode() in reply for reply in replies)
    assert secret in caplog.text


def test_a_diverged_training_stops_the_run_as_in_a_simulation(tmp_path: Path):
    transport = toy_sites(tmp_path, "fedavg")
    module = coordinated(transport, "fedavg")
    client = transport.sites["c1"].client
    client.data.x[:] = float("nan")
    with pytest.raises(NonFiniteError, match=r"Site c1, round 1: .*see the log of c1"):
        fit(module, tmp_path / "server", ROUNDS)


def test_a_site_that_starts_with_other_weights_is_named(tmp_path: Path):
    transport = toy_sites(tmp_path, METHOD)
    transport.sites["c2"].workplace.weights = "0" * 64
    with pytest.raises(SiteError, match="Site c2 starts from other weights than c0"):
        coordinated(transport, METHOD)
    transport.sites["c2"] = Site(Toy("c2", "fedavg"), tmp_path / "c2")
    with pytest.raises(SiteError, match="Site c2 has another configuration than c0: algorithm d"):
        coordinated(transport, METHOD)
    assert not (tmp_path / "c2").exists()


def test_the_record_is_json(tmp_path: Path):
    module, _, _ = across(tmp_path, deaf=is_at("fit", "c1", 1))
    saved = module.coordinator.progress.state_dict()
    again = SitesProgress.of(saved)
    assert again == module.coordinator.progress
    assert json.loads(json.dumps(saved["absent"])) == {"1": ["c1"]}
