"""Every request passes the gate: its table, the attacks that went around it, and sequences."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import sys
from functools import partial
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch

from medfed.datamodules.base import converse_here
from medfed.datamodules.one_site import Claims
from medfed.datamodules.tables.agreement import (
    AgreementSettings,
    TrainRows,
    client_side,
    server_side,
)
from medfed.delivery.main import keep_bundle
from medfed.federation.aggregation import Median
from medfed.federation.assemble import assemble
from medfed.federation.engine.private import ClientPrivacy
from medfed.federation.round import Round
from medfed.federation.wire.channel import Channel, MessageContext
from medfed.federation.wire.fixed_point import FixedPoint
from medfed.federation.wire.packet import Message
from medfed.personalize.fedper import FedPer
from medfed.run.privacy import Protection
from medfed.sites import site_folder, wire
from medfed.sites.agreement import Agreed, SiteFile
from medfed.sites.calls import Caller, agree_on_data, greet
from medfed.sites.gate import MODELS, RULES
from medfed.sites.policy import Counted, FullError, Policy, Spending, fewest_in_combinations
from medfed.sites.site_folder import hospital
from medfed.standalone.errors import CheckpointError, ConfigError, DataError, SiteError
from tests.agreeing import agree
from tests.integration.runs import resume, run
from tests.sites.hospitals import QUICK
from tests.sites.tables import EXPERIMENT, write_table
from tests.sites.toy_sites import NAMES, coordinated, fit, opened, toy_sites
from tests.toys import toy_data

ROOT = Path(__file__).resolve().parents[2]


def test_each_kind_of_request_has_one_rule_in_words():
    assert [*wire.KINDS] == [kind.__struct_config__.tag for kind in RULES]
    for kind, rule in RULES.items():
        assert all(check.__doc__ for check in rule.checks), kind
        assert rule.leaves
        assert {*rule.policy} <= {*Policy.__struct_fields__}
    named = {key for rule in RULES.values() for key in rule.policy}
    assert named == {*Policy.__struct_fields__} - {"pictures"}  # which stay at the site
    page = (ROOT / "docs" / "sites.md").read_text("utf-8")
    assert page.count("<!-- table: requests -->") == 1


def test_a_site_that_trains_does_not_answer_as_one_that_joins(tmp_path: Path, caplog):
    """An update of one step was one patient's row."""
    transport = toy_sites(tmp_path, "fedavg")
    module = coordinated(transport, "fedavg")
    site, clients = transport.sites["c0"], [wire.Client(c, 8) for c in NAMES[1:]]
    body = Round(module.federation, 0).sent["c0"].to_bytes()
    before = site.client.steps_done
    for last in (False, True):
        asked = wire.Onboard("c0", body=body, last=last, job="j", clients=clients)
        assert wire.Reply.from_bytes(site.answer(asked.to_bytes())).reason == "order"
    assert site.client.steps_done == before
    assert caplog.text.count("The request onboard was refused: order") == 2


def test_no_sequence_of_requests_fills_a_sites_memory_or_disk(tmp_path: Path):
    """Each reply was kept, as large as a model; each round, and each name of a part."""
    transport = toy_sites(tmp_path, "fedavg")
    module = coordinated(transport, "fedavg")
    fit(module, tmp_path / "server", 2)
    site, session = transport.sites["c0"], module.coordinator.caller.session
    before = {path: path.read_bytes() for path in (tmp_path / "c0").glob("*")}

    def ask(kind, **how):
        return wire.Reply.from_bytes(site.answer(kind("c0", session, **how).to_bytes()))

    there = {"round": 2, "attempt": 1, "at": 1}
    assert [ask(wire.Load, phase=n, **there).status for n in range(50)] == ["ok"] * 50
    assert len(site.gate.replies) <= 4
    body = Round(module.federation, 2).sent["c0"].to_bytes()
    for parts in ({f"part{n}": {} for n in range(1001)}, {"x" * 1001: {}}):
        packet = Channel().encode(Message("fit", parts), "down", MessageContext("c0"))[0]
        odd = ask(wire.Fit, cohort=NAMES, body=packet.to_bytes(), **there)
        assert (odd.status, odd.reason) == ("refused", "message")
    assert ask(wire.Fit, cohort=NAMES, body=body, **there).status == "ok"
    assert ask(wire.Commit, needed=[*range(6)], **there).reason == "message"
    now = {path: path.read_bytes() for path in (tmp_path / "c0").glob("*")}
    assert {path.name for path in now if now[path] != before.get(path)} == {"answered.json"}


@pytest.mark.parametrize("kind", ["hello", "begin", "fit", "evaluate", "load"])
def test_every_refusal_is_in_the_log(kind, tmp_path: Path, caplog):
    """Also of a request for another site, of another session, and while the site works."""
    transport = toy_sites(tmp_path, "fedavg")
    coordinated(transport, "fedavg")
    site, more = transport.sites["c0"], {"fit": {"cohort": []}, "begin": {"job": "", "clients": []}}
    more["evaluate"] = {"split": "val", "trained": True}
    asked = {c.__struct_config__.tag: c for c in RULES}[kind]
    own, other = (asked(name, "odd", 0, **more.get(kind, {})) for name in ("c0", "c1"))
    for request in (own, other, own) if kind != "hello" else (other,):
        lines = len(caplog.records)
        reply = wire.Reply.from_bytes(site.answer(request.to_bytes()))
        assert reply.status != "ok"
        assert len(caplog.records) == lines + 1
        assert "; needed: " in caplog.text or reply.reason == "site"  # in words, too
    with site.gate.lock:
        assert wire.Reply.from_bytes(site.answer(own.to_bytes())).status == "busy"
    assert caplog.records[-1].levelno == logging.WARNING


def test_the_log_names_the_rule_that_refuses_and_has_no_traceback_of_known_errors(
    tmp_path: Path,
):
    """A person of the hospital's IT reads it; its folder, with patients' ids, is private."""
    write_table(tmp_path / "ours.csv", ("Basel",))
    (tmp_path / "site.yaml").write_text("site: Basel\nfolder: new/ours\ndata: {path: ours.csv}\n")
    agreed, folder = Agreed(("Basel",), (*EXPERIMENT[:-3],)), tmp_path / "new" / "ours"
    site = hospital(agreed, SiteFile.read(tmp_path / "site.yaml"), keep_bundle)

    def said(**asked) -> str:
        site.answer(wire.Agree("Basel", "s", **asked).to_bytes())
        return (folder / "log.txt").read_text().splitlines()[-1]

    said()
    wrong = b'{"indicators": [], "low": [NaN], "median": [0], "high": [1]}'
    assert said(phase=1, body=wrong).endswith("is malformed: NaN is no finite number.")
    assert said(phase=1, body=b"{}").endswith(
        "refused: answers; needed: one answer to each message"
    )
    assert said(phase=9).endswith("order; needed: The answers to all earlier messages came.")
    assert said(phase=-1).endswith("phase: expected int >= 0).")
    (folder / "answered.json").write_text("[]")
    assert "answered.json is not as a run writes it" in (line := said(phase=1, body=b"{}"))
    assert "restore it from a backup, as a site without it forgets what has left." in line
    assert "Traceback" not in (folder / "log.txt").read_text()
    assert folder.stat().st_mode & 0o077 == 0


def test_a_log_does_not_grow_without_end(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(site_folder, "LARGEST_LOG", 1000)
    log = site_folder.listen("Basel", tmp_path)
    for n in range(100):
        log.getChild("refused").warning("The request %d was refused.", n)
    for name in (site_folder.LOG, site_folder.REFUSALS):
        lines = (tmp_path / name).read_text().splitlines()
        assert lines[0].endswith("The request 0 was refused.")
        assert 1000 < (tmp_path / name).stat().st_size < 1100
    (tmp_path / site_folder.LOG).rename(tmp_path / "moved.txt")
    site_folder.listen("Basel", tmp_path).warning("It goes on.")
    assert (tmp_path / site_folder.LOG).read_text().endswith("It goes on.\n")


def at_once(function, times: int = 25) -> None:
    """Calls a function from two threads, as two jobs do."""
    threads = [Thread(target=lambda n=n: [function(n, k) for k in range(times)]) for n in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_two_jobs_at_once_are_counted_one_after_another(tmp_path: Path):
    one = Protection(rate=0.2, draws=10, uses=1, noise=4.0, delta=1e-3)
    at_once(lambda n, k: Spending(None, tmp_path / "privacy.json").add("run", one, 1))
    assert Spending(None, tmp_path / "privacy.json").draws("run") == 50
    refused = []

    def add(n, k):
        try:
            Counted(tmp_path / "answered.json", "a").add(("test", f"{n} {k}", 7))
        except FullError:
            refused.append((n, k))

    at_once(add)
    assert len(Counted(tmp_path / "answered.json", "a").of("test")) == 7
    assert len(refused) == 43


SETTINGS = AgreementSettings(["age"], False, "standard", pooled=True)


def test_only_patients_strictly_within_the_limits_stand_behind_a_sum():
    """Low and median at 500 gave the exact 564, as all others were clipped to 0."""
    ages = np.array([*np.linspace(40, 80, 40), 564.0])[:, None]
    rows = TrainRows(ages, patients=np.arange(41))
    for low, high, within in ((500, 1e3, 1), (0, 1e3, 41), (60, 70, None), (40, 80, 38)):
        half = client_side(SETTINGS, rows)
        next(half)
        ends = {"low": [low], "median": [low], "high": [high]}
        half.send(json.dumps({"indicators": [], **ends}).encode())
        expected = int(((ages > low) & (ages < high)).sum())
        assert rows.contributing == {"age": expected}
        assert within in (None, expected)


def test_of_combat_the_patients_are_within_the_covariates_limits_too():
    settings = dataclasses.replace(SETTINGS, names=["age", "crp"], covariates=["crp"])
    values = np.stack([np.linspace(40, 80, 50), np.linspace(0, 1, 50)], axis=1)
    rows = TrainRows(values)
    half = client_side(settings, rows)
    next(half)
    limits = {"low": [0, 0.9], "median": [60, 0.5], "high": [99, 9]}
    half.send(json.dumps({"indicators": [], "kept": [], **limits}).encode())
    assert rows.contributing == dict.fromkeys(("age", "crp"), int((values[:, 1] > 0.9).sum()))


def test_one_client_with_far_limits_moves_no_other():
    rng = np.random.default_rng(0)
    parts = {c: rng.normal(60, 9, (50, 1)) for c in "abcd"}
    parts["d"] = parts["d"] * 1e12
    claims = Claims(list(parts))
    halves = {c: client_side(SETTINGS, TrainRows(rows)) for c, rows in parts.items()}
    agreed, _ = converse_here(server_side(SETTINGS, claims), halves)
    scaled = agreed.scaling.scale(parts["a"])
    assert np.std(scaled) > 0.3  # they all became 0
    (line,) = claims.remarks
    assert line.startswith("d has limits of age over 100 times as far out as those of most")


def agreed_on(claims, **texts):
    """What clients agree on whose column has these categories, 30 patients of each."""
    settings = AgreementSettings(["sex"], False, "standard", False, ["sex"])
    halves = {
        name: client_side(
            settings,
            TrainRows(
                np.repeat(np.arange(len(of)), 30.0).reshape(-1, 1),
                {"sex": (*of,)},
            ),
        )
        for name, of in texts.items()
    }
    return converse_here(server_side(settings, claims), halves)[0]


def test_codes_of_one_client_that_no_other_has_are_said():
    """Two spellings of one category became two inputs, and nobody was told."""
    claims = Claims(["a", "b", "c"])
    with pytest.raises(DataError, match=r"Column sex: 'f' \(a\) and 'F' \(c\) differ only in cap"):
        agreed_on(claims, a=["f", "m"], b=["f"], c=["F", "M"])
    agreed_on(claims, a=["f", "m"], b=["f"], c=["m", "unknown"])
    assert claims.remarks == []
    agreed_on(claims, a=["f", "m"], b=["f"], c=["female", "male"])
    (line,) = claims.remarks
    assert line.startswith("c alone has the categories female, male of sex, and has none of the")


WRONG = {
    "count below 0": ({"count": [-1e9]}, "b claims -1e[+]09 values of a column, which is no count"),
    "half a patient": ({"count": [2.5]}, "b claims 2.5 values of a column, which is no count"),
    "ends": ({"low": [9.0], "high": [1.0]}, "b sends ends of a column that no data have"),
    "sum": ({"sum": [1e299]}, "b sends counts or sums of a column that no data have"),
    "squares": ({"squares": [-1.0]}, "b sends counts or sums of a column that no data have"),
    "another count": ({"count": [49]}, "b sends counts or sums of a column that no data have"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_no_data_have_is_refused_by_name(wrong):
    lie, why = WRONG[wrong]
    rng = np.random.default_rng(0)
    halves = {c: client_side(SETTINGS, TrainRows(rng.normal(60, 9, (50, 1)))) for c in "ab"}
    server = server_side(SETTINGS, Claims(["a", "b"]))
    next(server)
    messages = [next(half) for half in halves.values()]
    if wrong in ("sum", "squares", "another count"):
        answer = server.send(messages)
        messages = [half.send(answer) for half in halves.values()]
    messages[1] = json.dumps(json.loads(messages[1]) | lie).encode()
    with pytest.raises(DataError, match=why):
        server.send(messages)


def test_a_site_claims_no_more_values_than_training_samples(tmp_path: Path):
    transport = toy_sites(tmp_path, "fedavg")
    caller = opened(Caller(transport, NAMES, QUICK))
    greet(caller)
    with pytest.raises(SiteError, match="Site c1 claims 9999 values of a column and 8 training"):
        agree_on_data(caller, (_ for _ in ()), Claims(NAMES, {"c1": 9999}))


def test_noise_is_that_of_the_sites_which_are_there(tmp_path: Path):
    """With a site away, each of the others adds more: the sum has what is claimed."""
    counts = []

    class Noted(ClientPrivacy):
        def protect(self, reply, clients, *key):
            counts.append(clients)
            return super().protect(reply, clients, *key)

    transport = toy_sites(tmp_path, "fedavg")
    module = coordinated(transport, "fedavg")
    for site in transport.sites.values():
        site.federation.noise = Noted(clip=1.0, sigma=0.01)
    gone = transport.sites.pop("c2")
    fit(module, tmp_path / "server", 1)
    assert gone.client.steps_done == 0
    assert counts[-2:] == [2, 2]  # they said 3 without a word


@pytest.mark.parametrize("is_noisy", [True, False])
def test_a_round_is_repeated_a_few_times_where_each_answer_has_new_noise(is_noisy, tmp_path: Path):
    """The mean of the answers to one request, in many attempts, was the message without noise."""
    transport = toy_sites(tmp_path, "fedavg")
    module, site = coordinated(transport, "fedavg"), transport.sites["c0"]
    site.federation.noise = ClientPrivacy(clip=1.0, sigma=1.0) if is_noisy else None
    body = Round(module.federation, 0).sent["c0"].to_bytes()
    for attempt in range(len(NAMES) + MODELS + 1):
        how = {"round": 0, "attempt": attempt, "cohort": NAMES, "body": body}
        asked = wire.Fit("c0", module.coordinator.caller.session, **how)
        reply = wire.Reply.from_bytes(site.answer(asked.to_bytes()))
        is_last = attempt == len(NAMES) + MODELS
        assert (reply.status, reply.reason) == (
            ("refused", "replay") if is_last and is_noisy else ("ok", "")
        )


PROTECTS = {
    "channel.secure=masks": {"channel": lambda _: Channel(sums=FixedPoint(("shared",)))},
    "aggregation=median": {"algorithm": FedPer(aggregation=Median())},
}


@pytest.mark.parametrize("key", PROTECTS)
def test_what_protects_means_refuses_a_wholly_personal_model(key):
    torch.manual_seed(0)
    network = torch.nn.Linear(3, 1)
    how = {"algorithm": FedPer(), **PROTECTS[key]}
    method, sgd = how.pop("algorithm"), partial(torch.optim.SGD, lr=0.1)
    loss = lambda batch: network(batch["image"]).mean()  # noqa: E731
    make = partial(assemble, method, network, loss, toy_data(3, batch=4), optimizer=sgd, **how)
    make(personal=["bias"])
    with pytest.raises(ConfigError, match=f"{key} protects what is averaged, .* wholly personal"):
        make(personal=["*"])


def edit(path: Path, change) -> None:
    """Changes the cells of a table."""
    head, *rows = path.read_text().splitlines()
    path.write_text("\n".join([head, *(",".join(change(*row.split(","))) for row in rows)]) + "\n")


CHANGES = {
    "a column": lambda *row: (*row[:4], "500", row[5]),
    "labels": lambda *row: (*row[:5], str(1 - int(row[5]))),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on a table."""
    root = tmp_path_factory.mktemp("resumed")
    write_table(root / "table.csv", ("Basel", "Bern"))
    words = (*EXPERIMENT, "algorithm=fedavg", "rounds=1", f"data.path={root / 'table.csv'}")
    run(root / "run", *words, "partition=auto")
    return root, words


@pytest.mark.parametrize("change", CHANGES)
def test_training_does_not_resume_on_other_data(change, trained):
    root, words = trained
    kept = (root / "table.csv").read_bytes()
    edit(root / "table.csv", CHANGES[change])
    with pytest.raises(CheckpointError, match=r"data files are not those .* table.csv changed"):
        resume(root / "run", *words, "partition=auto")
    (root / "table.csv").write_bytes(kept)
    resume(root / "run", *words, "partition=auto")


def test_a_site_does_not_resume_on_other_data(tmp_path: Path):
    """Its own folder has the record; the coordinator learns the error's type only."""
    keys = ("data.scaling=client", "data.features=[age,crp]", "data.missing_indicator=false")
    agreed = Agreed(("Basel",), (*EXPERIMENT[:-3], *keys))
    (tmp_path / "site.yaml").write_text("site: Basel\ndata: {path: ours.csv}\n")

    def begun():
        site = hospital(agreed, SiteFile.read(tmp_path / "site.yaml"), keep_bundle)
        for kind in (wire.Hello, wire.Agree):
            site.answer(kind("Basel", "s").to_bytes())
        clients = [wire.Client("Basel", site.workplace.facts().num_samples)]
        asked = wire.Begin("Basel", "s", job="0" * 32, clients=clients)
        return wire.Reply.from_bytes(site.answer(asked.to_bytes()))

    write_table(tmp_path / "ours.csv", ("Basel",))
    assert begun().status == begun().status == "ok"
    edit(tmp_path / "ours.csv", lambda *row: (*row[:2], "60", *row[3:]))
    assert begun().reason == "CheckpointError"
    assert "ours.csv changed" in (tmp_path / "medfed" / "log.txt").read_text()


@pytest.fixture(scope="module")
def machine():
    """The state machine of benchmarks/trust."""
    path = ROOT / "benchmarks" / "trust" / "coordinators.py"
    spec = importlib.util.spec_from_file_location("coordinators", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["coordinators"] = module
    spec.loader.exec_module(module)
    module.honest()
    yield module
    del sys.modules["coordinators"]


ALL = ("Basel", "Bern", "Chur", "Davos")
BEGIN = ("begin", {"slot": 0, "job": 0, "session": 0, "honest_sites": True})
TRAIN = ("train", {"slot": 0, "round": 0, "attempt": 0, "at": -1, "number": 0, "masked": True})
TRAIN[1].update(cohort=ALL, sent=ALL)
ATTACKS = {
    "1: a side entrance for one that joins": [
        ("onboard", {"slot": 0, "last": True, "number": 0, "phase": 0})
    ],
    "3: the floor counts rows that are summed": [("agree", {"slot": 0, "answer": 1, "last": 0})],
    "3: another answer after a restart": [
        ("agree", {"slot": 0, "answer": 0, "last": 0}),
        ("restart", {"slot": 0}),
        ("agree", {"slot": 0, "answer": 4, "last": 0}),
    ],
    "3: a refused answer scales the data": [
        ("agree", {"slot": 0, "answer": 0, "last": 1}),
        ("agree", {"slot": 1, "answer": 4, "last": 1}),
        (BEGIN[0], {**BEGIN[1], "slot": 1}),
    ],
    "4: another set of sites in another job": [
        (BEGIN[0], BEGIN[1]),
        (TRAIN[0], TRAIN[1]),
        (BEGIN[0], {**BEGIN[1], "slot": 1}),
        (TRAIN[0], {**TRAIN[1], "slot": 1, "sent": ALL[:3]}),
    ],
    "5: two jobs count at once": [("at_once", {"numbers": (0, 1)})],
    "a refused request moves the site": [
        (BEGIN[0], BEGIN[1]),
        (TRAIN[0], TRAIN[1]),
        (TRAIN[0], {**TRAIN[1], "attempt": 1, "cohort": ALL[:2]}),
    ],
    "two studies differ by one patient": [
        ("agree", {"slot": 0, "answer": 0, "last": 0}),
        ("begin_the_other_study", {}),
    ],
}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack[:1] + attack[-8:])
def test_an_attack_is_refused_and_found_where_its_hole_is_put_back(attack, machine):
    """In a real site with a table of its own."""

    def played() -> None:
        coordinator = machine.Coordinator()
        try:
            for name, how in ATTACKS[attack]:
                getattr(coordinator, name)(**how)
                coordinator.check_invariants(None, None, None)
        finally:
            coordinator.teardown()

    played()
    with machine.HOLES[attack](), pytest.raises(AssertionError):
        played()


def test_a_few_sequences_break_nothing(machine):
    """benchmarks/trust/coordinators.py plays 10,000."""
    assert machine.play(3)[1] == ""


def test_the_scaling_agrees_by_medians_of_limits():
    rng = np.random.default_rng(1)
    parts = {c: rng.normal(60, 9, (40, 1)) for c in "abc"}
    agreed, _ = agree(SETTINGS, {c: TrainRows(rows) for c, rows in parts.items()})
    medians = [np.median(rows) for rows in parts.values()]
    assert agreed.scaling.median[0] == pytest.approx(np.median(medians), rel=1e-12)


def moments(folder: Path, most: int) -> wire.Described:
    """What Basel sends of its table for a study of so many patients, in a process of its own."""
    agreed = Agreed(("Basel",), (*EXPERIMENT[:-3], *FEATURES, f"data.most_patients={most}"))
    site = hospital(agreed, SiteFile.read(folder / "site.yaml"), keep_bundle)
    reply = wire.Reply.from_bytes(site.answer(wire.Agree("Basel", "s").to_bytes()))
    if reply.status == "ok":
        body = json.dumps({"indicators": [], "low": [0], "median": [0], "high": [1e3]}).encode()
        asked = wire.Agree("Basel", "s", phase=1, body=body)
        reply = wire.Reply.from_bytes(site.answer(asked.to_bytes()))
    return reply


FEATURES = ("data.features=[age]", "data.missing_indicator=false", "data.val_fraction=0")


def test_two_studies_that_differ_by_one_patient_are_refused(tmp_path: Path, monkeypatch):
    """The difference of their sums was that patient's row."""
    write_table(tmp_path / "ours.csv", ("Basel",))
    (tmp_path / "site.yaml").write_text("site: Basel\ndata: {path: ours.csv}\n")
    patients = tmp_path / "medfed" / "patients.json"
    with monkeypatch.context() as before:
        before.setattr(Counted, "add_patients", lambda *_: None)
        one, other = (json.loads(moments(tmp_path, n).body) for n in (50, 51))
    age = other["sum"][0] - one["sum"][0]
    assert other["count"] == [one["count"][0] + 1]
    rows = (tmp_path / "ours.csv").read_text().splitlines()[1:]
    assert any(abs(float(row.split(",")[2]) - age) < 1e-9 for row in rows)
    assert moments(tmp_path, 50).status == "ok"
    for _ in range(2):  # a restart forgets nothing, and what was refused is not kept
        assert moments(tmp_path, 51).reason == "policy"
    assert moments(tmp_path, 50).status == "ok"
    (line,) = (tmp_path / "medfed" / "refusals.txt").read_text().strip().splitlines()[-1:]
    assert "combined with those that left before, show 1 patients of at least 20" in line
    assert str(patients) in line
    (known,) = json.loads(patients.read_text()).values()
    assert len(known) == 1


def test_no_combination_of_answers_shows_fewer_patients_than_it_says():
    """Four sets, of which no two differ by fewer than 20, give one patient together."""
    u, v, w = ([f"{name}{n}" for n in range(20)] for name in "uvw")
    together = [u + v, v + w, [*u, *w, "x"], u + v + w]
    assert min(len({*a} ^ {*b}) for a in together for b in together if a != b) == 20
    assert fewest_in_combinations(together) == 1
    rng = np.random.default_rng(0)
    for _ in range(50):
        member = rng.random((4, 60)) < 0.6
        member = member[:, member.any(0)]
        least = fewest_in_combinations([np.flatnonzero(row).astype(str).tolist() for row in member])
        every = rng.normal(size=(500, 4)) @ member
        assert ((every**2).sum(1) / (every**2).max(1)).min() >= least - 1e-5
        best = np.linalg.pinv(member.astype(float)) @ member  # the projection reaches it
        assert ((best**2).sum(1) / (best**2).max(1)).min() == pytest.approx(least, rel=1e-5)
