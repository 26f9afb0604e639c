"""Studies of statistics across sites: the simulation's numbers, under masks, past one gate."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
from msgspec.structs import replace

from medfed.sites import wire
from medfed.sites.calls import Caller
from medfed.sites.policy import NO_LIMITS, Counted, Policy
from medfed.sites.studying import Conductor, StudyPlace, StudySite
from medfed.sites.words import VetoError
from medfed.standalone.errors import SiteError
from medfed.studies.page import write_study
from medfed.studies.plan import Evaluation, Plan
from tests.sites.direct import Direct
from tests.sites.hospitals import QUICK
from tests.sites.studies import NAMES, PLAN, conducted, place, plain, rows, simulation, sites, write
from tests.sites.toy_sites import opened


def test_sites_have_the_numbers_of_the_simulation(tables, tmp_path):
    """To the last bit: the same whole numbers are added."""
    found, remarks = conducted(sites(tables, tmp_path))
    assert remarks == []
    assert plain(found) == plain(simulation(tables))


LESIONS = ("lesions", "BOX: lesions found from 0.5", "BOX: false alarms from 0.5")
SCORES = {
    "classes": Evaluation(["NEW"]),
    "lesions": Evaluation(["BOX"], thresholds=[0.5]),
}


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """Tables with scores of three classes, and of lesions."""
    folder = tmp_path_factory.mktemp("scored")
    head = ["id", "centre", "dead", *(f"NEW: {kind}" for kind in "abc"), *LESIONS]
    for name in NAMES:
        rng, lines = np.random.default_rng(ord(name[0])), []
        for n in range(90):
            p, lesions = rng.dirichlet([1, 1, 1]).round(4), int(rng.integers(1, 5))
            found, alarms = rng.integers(0, lesions + 1) / lesions, rng.integers(0, 6)
            grade = "abc"[rng.choice(3, p=p / p.sum())]
            lines.append([f"{name}{n}", name, grade, *p, lesions, found, alarms])
        for path in (folder / f"{name}.csv", folder / "all.csv"):
            with path.open("a", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows([head, *lines] if not file.tell() else lines)
    return folder


@pytest.mark.parametrize("kind", SCORES)
def test_sites_judge_classes_and_lesions_as_the_simulation(scored, tmp_path, kind):
    """To the last bit: estimates of each class, and the counts of a FROC."""
    plan = Plan(evaluate=SCORES[kind]).check("plan")
    found, remarks = conducted(sites(scored, tmp_path, plan), plan)
    assert remarks == []
    assert plain(found) == plain(simulation(scored, plan))
    wanted = "FROC of BOX" if kind == "lesions" else "Every hospital"
    (table,) = (t for t in found if t.title == wanted)
    assert len(table.lines) == (1 if kind == "lesions" else len(NAMES))


class Listening(Direct):
    """Keeps what sites answer to the questions of sums."""

    def __init__(self, inner: Direct) -> None:
        super().__init__(inner.sites)
        self.heard: list[tuple[str, int, int, bytes]] = []

    def call(self, site: str, request: bytes, timeout: float) -> bytes:
        answer = super().call(site, request, timeout)
        asked, reply = wire.Request.from_bytes(request), wire.Reply.from_bytes(answer)
        if isinstance(asked, wire.Ask) and reply.status == "ok":
            self.heard.append((site, asked.round, asked.phase, reply.body))
        return answer


def test_what_a_site_sends_of_a_sum_looks_like_chance(tables, tmp_path):
    """Its bits are half ones, and it is not the site's own vector."""
    transport = Listening(sites(tables, tmp_path))
    conducted(transport)
    part = place(tables, "alpha").parts[0]
    own = part.ask(place(tables, "alpha").rows, ()).whole
    sent = np.frombuffer(next(b for s, r, p, b in transport.heard if (s, r) == ("alpha", 0)), "<u8")
    assert len(sent) == len(own)
    assert not (sent.view(np.int64) == own).any()
    ones = np.unpackbits(sent.view(np.uint8)).mean()
    assert abs(ones - 0.5) < 6 * 0.5 / np.sqrt(64 * len(sent))


def test_a_site_that_is_lost_is_named_and_the_sum_is_that_of_the_others(tables, tmp_path):
    plan = Plan({"age": PLAN.columns["age"]})
    transport = sites(tables, tmp_path, plan)
    gone = transport.sites["delta"]

    class Silent:
        def answer(self, request: bytes) -> bytes:
            asked = wire.Request.from_bytes(request)
            if isinstance(asked, wire.Ask) and asked.round == 0:
                return wire.declined(asked, "failed", "OSError").to_bytes()
            return gone.answer(request)

    transport.sites["delta"] = Silent()
    found, remarks = conducted(transport, plan)
    assert remarks == ["delta took no part in age: it failed (OSError); see the log of delta."]
    assert plain(found) == plain(simulation(tables, plan, without="delta"))


@pytest.mark.parametrize(
    ("kind", "lie", "why"),
    [
        (wire.Shared, {"boxes": {}}, "its shares are not for all sites"),
        (wire.Told, {"body": bytes(16)}, "its numbers are not as many as those of the others"),
        (wire.Told, {"body": b"odd"}, "its numbers are not as many as those of the others"),
    ],
    ids=["no_shares", "few_numbers", "no_numbers"],
)
def test_a_site_that_lies_in_a_sum_is_named_and_left_out(kind, lie, why, tables, tmp_path):
    plan = Plan({"age": PLAN.columns["age"]})
    transport = sites(tables, tmp_path, plan)
    honest = transport.sites["delta"]

    class Lying:
        def answer(self, request: bytes) -> bytes:
            reply = wire.Reply.from_bytes(honest.answer(request))
            return (replace(reply, **lie) if isinstance(reply, kind) else reply).to_bytes()

    transport.sites["delta"] = Lying()
    found, remarks = conducted(transport, plan)
    assert remarks == [f"delta took no part in age: {why}."]
    assert plain(found) == plain(simulation(tables, plan, without="delta"))


def test_wrong_shares_are_one_sentence(tables, tmp_path):
    plan = Plan({"age": PLAN.columns["age"]})
    transport = sites(tables, tmp_path, plan)
    honest = transport.sites["alpha"]

    class Lying:
        def answer(self, request: bytes) -> bytes:
            reply = wire.Reply.from_bytes(honest.answer(request))
            if isinstance(reply, wire.Unmasked):
                reply = replace(reply, shares={})
            return reply.to_bytes()

    transport.sites["alpha"] = Lying()
    with pytest.raises(SiteError, match="alpha, beta, gamma, delta cannot be unmasked"):
        conducted(transport, plan)


def test_a_study_trains_nothing_and_measures_no_model(tables, tmp_path):
    """Every other request of a coordinator is refused, also after a session has begun."""
    transport = sites(tables, tmp_path)
    conducted(transport)
    site = transport.sites["alpha"]
    head = {"session": site.gate.session, "round": 0, "attempt": 9}
    for asked in (
        wire.Fit("alpha", cohort=NAMES, **head),
        wire.Evaluate("alpha", split="val", trained=False, **head),
        wire.Across("alpha", of="alpha", **head),
        wire.Onboard("alpha", last=True, job="job", clients=[], **head),
        wire.Commit("alpha", needed=[], **head),
        wire.Load("alpha", **head),
    ):
        reply = wire.Reply.from_bytes(site.answer(asked.to_bytes()))
        assert reply.status in ("refused", "unready"), asked.kind
        assert reply.body == b""


def step(site: StudySite, number: int, phase: int, state: bytes, attempt: int = 20, **more):
    asked = wire.Ask(site.name, site.gate.session, number, attempt, phase, body=state, **more)
    return wire.Reply.from_bytes(site.answer(asked.to_bytes()))


def test_a_step_is_answered_once_and_not_without_masks(tables, tmp_path):
    transport = sites(tables, tmp_path)
    conducted(transport)
    site = transport.sites["alpha"]
    assert step(site, 0, 0, b"[]").reason == "stale"  # later parts were answered
    assert step(site, 6, 0, b"[]").reason == "round"
    assert step(site, 5, 1, b"[]").reason == "order"  # estimates take one step
    assert step(site, 5, 0, b"[2]", attempt=21).reason == "answers"
    fresh = sites(tables, tmp_path / "fresh").sites["alpha"]
    fresh.answer(wire.Hello("alpha").to_bytes())
    clients = [wire.Client(name, 150) for name in NAMES]
    fresh.answer(wire.Agree("alpha").to_bytes())
    fresh.answer(wire.Begin("alpha", "session", job="job", clients=clients).to_bytes())
    assert step(fresh, 0, 0, b"[]").reason == "order"  # no keys were made


def test_chosen_coefficients_are_refused(tables, tmp_path):
    """A coordinator that starts a regression where the weights select few patients gets nothing."""
    transport = sites(tables, tmp_path)

    class Greedy(Conductor):
        def _sum(self, number, sites, part, step, state):
            if state:
                state = [4000.0, 4000.0]
            return super()._sum(number, sites, part, step, state)

    conductor = Greedy(opened(Caller(transport, NAMES, QUICK)), PLAN, "job")
    found = conductor.run()
    *refused, left_out = conductor.remarks
    assert left_out.startswith("logistic regression of outcome is left out: fewer than 3 sites")
    assert all("too few patients" in line for line in refused)
    assert {t.title for t in found} >= {"age", "sex", "Every hospital"}  # the others are there
    assert not any(t.title.startswith("Logistic") for t in found)


@pytest.mark.parametrize("state", [[], [0.0, 0.0]], ids=["a column", "a regression"])
def test_no_second_sum_without_one_site_shows_its_numbers(state, tables, tmp_path):
    """Steps that a part does not need, or takes later, gave the same sum of fewer sites."""
    plan = replace(PLAN, evaluate=None, models=PLAN.models[:1])
    transport = sites(tables, tmp_path, plan)
    number = 3 if state else 0
    sums = []

    class Differencing(Conductor):
        def _sum(self, part, sites, *rest):
            total = super()._sum(part, sites, *rest)
            if part == number:
                where = {"round": part, "phase": 1, "attempt": 50}
                body = json.dumps(state).encode()
                sums.append(self._attempt(where, body, sites[:-1]))
                raise SiteError("it has seen enough")
            return total

    conductor = Differencing(opened(Caller(transport, NAMES, QUICK)), plan, "job")
    conductor.run()
    ((total, why),) = sums
    assert total is None
    assert {*why} == {*NAMES[:-1]}
    reason = "its share to a sum of other sites" if state else "order"
    assert all(reason in each for each in why.values())


def test_sizes_that_a_coordinator_makes_up_let_no_sum_of_few_patients_pass(tables, tmp_path):
    """Two hundred bins of 600 patients: most hold one to three."""
    plan = Plan({"age": [20 + n / 2 for n in range(201)]}).check("plan")
    transport = sites(tables, tmp_path, plan)

    class Boasting(Direct):
        def call(self, site: str, request: bytes, timeout: float) -> bytes:
            asked = wire.Request.from_bytes(request)
            if isinstance(asked, wire.Begin):
                others = {c.id: c.num_samples if c.id == site else 10**9 for c in asked.clients}
                asked = replace(asked, clients=[wire.Client(*each) for each in others.items()])
            return super().call(site, asked.to_bytes(), timeout)

    with pytest.raises(
        SiteError, match="Nothing could be measured: alpha took no part in age: too"
    ):
        conducted(Boasting(transport.sites), plan)


def test_all_studies_together_are_limited(tables, tmp_path):
    transport = sites(tables, tmp_path, alpha=Policy(plans=0))
    _, remarks = conducted(transport)
    assert remarks
    assert all(line.startswith("alpha took no part") for line in remarks)


def test_a_hospital_of_few_patients_takes_no_part(tables, tmp_path):
    write(tmp_path / "alpha.csv", rows("alpha", 12))
    with pytest.raises(VetoError, match="There are 12 patients, and a study needs 20"):
        _ = place(tmp_path, "alpha").rows


def test_two_studies_that_differ_by_one_patient_are_refused(tables, tmp_path):
    """Differencing: the second would show the row that the first did not have."""
    conducted(sites(tables, tmp_path))
    other = tmp_path / "tables"
    other.mkdir()
    for name in NAMES:
        write(other / f"{name}.csv", [*rows(name)][: 149 if name == "alpha" else None])
    transport = sites(other, tmp_path)
    for name, site in transport.sites.items():
        behind = site.workplace.patients_behind()
        site.workplace.patients_behind = lambda behind=behind, name=name: (
            str(tables / f"{name}.csv"),
            behind[1],
        )
        site.gate.answered = Counted(tmp_path / name / "answered.json", "another")
    with pytest.raises(SiteError, match=r"^alpha: its policy, or the least number of patients"):
        conducted(transport)


def test_a_plan_of_another_coordinator_is_not_that_of_the_sites(tables, tmp_path):
    transport = sites(tables, tmp_path)
    other = replace(PLAN, models=[])
    assert place(tables, "alpha", other).greeting() != place(tables, "beta").greeting()
    assert transport.sites


def test_two_sites_give_estimates_alone(tables, tmp_path):
    """Of two, each would know the other's sums; what is left out is said, and the page is made."""
    pair = NAMES[:2]
    made = {}
    for name in pair:
        config = place(tables, name).config
        site = StudyPlace(config, PLAN, name, pair, NO_LIMITS)
        made[name] = StudySite(site, tmp_path / name, counted=Counted(tmp_path / name / "a.json"))
    conductor = Conductor(opened(Caller(Direct(made), pair, QUICK)), PLAN, "job")
    found = conductor.run()
    assert {t.title for t in found} >= {"Means of hospitals", "Every hospital"}
    assert "age is left out: a sum needs 3 sites." in conductor.remarks
    write_study(PLAN, found, conductor.remarks, tmp_path / "page")
    assert (tmp_path / "page" / "study.html").is_file()
