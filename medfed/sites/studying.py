"""Studies of statistics across hospitals: a site's half, and the coordinator's.

No model travels and nothing is trained. Each part of a plan is a round and each of its steps a
phase, so that the gate, the masks and their counters are those of training: sums leave under masks
alone, of three sites or more and of one set of sites for each step.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from medfed.common.console import short, size
from medfed.common.floors import LEAST, TIMES
from medfed.common.schemas import Number, fit, parse_json
from medfed.config.description import RunDescription
from medfed.federation.wire.fixed_point import FEWEST
from medfed.records.bundles import packed, unpacked
from medfed.sites import calls, coordinator, masks, wire, withdrawal
from medfed.sites.agreement import Agreed, SiteFile, fingerprints
from medfed.sites.gate import Refusal
from medfed.sites.policy import COUNTED, Counted, Policy
from medfed.sites.site import Site, own_data, versions_here
from medfed.sites.wire import Facts, Greeting, Reply
from medfed.sites.words import VetoError
from medfed.standalone.errors import CheckpointError, ConfigError, DataError, SiteError
from medfed.studies.cohorts import Cohort, Opener
from medfed.studies.page import write_study
from medfed.studies.parts import Estimates, Part, Separate, State, Table, Whole, numbers_in
from medfed.studies.plan import Plan, plan_of
from medfed.studies.regressions import Coefficients
from medfed.studies.rows import Rows
from medfed.studies.simulation import answered, parts

_log = logging.getLogger(__name__)
_MASKED = np.uint64


@dataclass(eq=False)
class StudyPlace:
    """What a site must know of a study: see :class:`medfed.sites.gate.Agreement`."""

    config: RunDescription  # the agreed configuration with the site's keys
    plan: Plan  # what is asked
    name: str  # this site
    members: Sequence[str] | None  # all sites, in order
    policy: Policy  # what the site allows
    # Whether all sites hold the same data set; see :class:`medfed.sites.agreement.Agreed`.
    cut: bool = False
    open_bundle: Opener | None = None  # opens the folder of a bundle
    # The folders of the bundles that arrived, by name.
    models: dict[str, Path] = field(default_factory=dict)
    joins: int = 0
    messages: int = 1
    parts: Sequence[Part | Separate] = field(init=False)

    def __post_init__(self) -> None:
        self.policy.check_noise(self.config)
        self.parts = [*parts(self.plan)]
        self.rounds = len(self.parts)

    @classmethod
    def of(cls, agreed: Agreed, file: SiteFile, open_bundle: Opener | None = None) -> StudyPlace:
        """Makes it from the agreement of a study and a site's file."""
        plan = plan_of(agreed.plan or {}, "The agreement")
        where = file.site, agreed.sites, file.policy, agreed.cut
        return cls(file.config(agreed), plan, *where, open_bundle)

    @cached_property
    def cohort(self) -> Cohort:
        """The site's patients."""
        data = own_data(self.config, self.name, None if self.cut else self.members)
        data.plan()
        return Cohort(data, self.name, self.plan)

    @cached_property
    def rows(self) -> Rows:
        """The site's rows, read once."""
        rows, least = self.cohort.rows(), max(self.plan.least, self.policy.least, LEAST)
        if (count := len(np.unique(rows.patients))) < least:
            need = f"a study needs {least} at each site"
            raise VetoError(f"There are {count} patients, and {need}; do not take part.")
        return rows

    @cached_property
    def scored(self) -> Rows:
        """The rows with what the plan's bundles predict."""
        names = [bundle.name for bundle in self.plan.bundles]
        if {*names} > self.models.keys():
            raise Refusal("order", "unready")
        assert self.open_bundle is not None or not names
        models = {name: self.open_bundle(self.models[name]) for name in names}  # type: ignore[misc]
        return self.cohort.with_predictions(self.rows, models)

    def greeting(self) -> Greeting:
        """Returns hashes of what is agreed."""
        agreed = fingerprints(self.config.values)
        versions = versions_here(str(self.config.trainer.accelerator))
        return Greeting(agreed, {"plan": msgspec.to_builtins(self.plan)}, versions)

    def agree(self, number: int, answer: bytes) -> None:
        """Reads the data; nothing about them leaves before the study."""
        _ = self.rows

    def facts(self) -> Facts:
        """Returns how many patients there are."""
        return Facts(len(np.unique(self.rows.patients)), "", {})

    def patients_behind(self) -> tuple[str, list[str]]:
        """Returns where the data are, and the patients, of whom all numbers are."""
        _ = self.rows
        return str(self.config.data.get("path")), sorted(self.cohort.patients)

    def join(self, everyone: Any) -> Any:
        """Refuses to train."""
        raise Refusal("order")


class StudySite(Site):
    """Answers the questions of a study, and trains nothing."""

    workplace: StudyPlace  # type: ignore[assignment]

    def _begin(self, request: wire.Begin) -> Reply:
        steps = [_STEPS if type(part) is Coefficients else 1 for part in self.workplace.parts]
        self.gate.start(request.session, request.clients, None)
        self.gate.phase_names = lambda number: ("step",) * steps[number]
        return wire.Begun.to(request, rounds=[])

    def _bring(self, request: wire.Bring) -> Reply:
        """Keeps a bundle; it is opened by the first question, and runs nothing of itself."""
        hashes = {bundle.name: bundle.manifest for bundle in self.workplace.plan.bundles}
        manifest = hashes.get(request.of) or ""
        folder = self.folder / "models" / manifest
        try:
            unpacked(request.body, manifest, folder)
        except DataError as error:
            self.log.getChild("refused").warning("%s", error)
            raise Refusal("message") from error
        self.workplace.models[request.of] = folder
        return wire.Taken.to(request)

    def _ask(self, request: wire.Ask) -> Reply:
        place, gate = self.workplace, self.gate
        part = place.parts[request.round]
        what, (data, _) = f"{request.round}/{request.phase}", place.patients_behind()

        def remember(count: int, patients: int) -> None:
            most = patients * place.policy.plans // TIMES
            gate.answered.add_numbers(data, what, count, most)

        try:
            if isinstance(part, Separate):
                told = part.estimate(place.scored)
                remember(numbers_in(told), sum(gate.samples.values()))  # as the coordinator says
                gate.phases = [*gate.phases, request.phase]
                return wire.Told.to(request, body=json.dumps(told).encode())
            whole = part.ask(place.scored, parse_json(request.body, list[Number])).whole
        except (ValueError, ConfigError, DataError, CheckpointError) as error:
            self.log.getChild("refused").warning("%s was refused: %s", part.name, error)
            raise Refusal("few") from error
        assert gate.half is not None
        if gate.half.samples < TIMES * len(whole):
            raise Refusal("few")
        remember(len(whole), gate.half.samples)
        hidden = whole.view(_MASKED) + gate.half.mask(len(whole), request.boxes, _MASKED)
        gate.phases = [*gate.phases, request.phase]
        return wire.Told.to(request, body=hidden.astype("<u8").tobytes())


_STEPS = 16  # of a regression, at most


def study_site(
    agreed: Agreed, file: SiteFile, signer: masks.Signer | None, open_bundle: Opener
) -> StudySite:
    """Makes a site from the agreement of a study and its file."""
    file.check_approved(agreed)
    place, counted = StudyPlace.of(agreed, file, open_bundle), file.folder / COUNTED
    return StudySite(place, file.folder / "study", signer, Counted(counted, agreed.digest))


@dataclass(eq=False)
class Conductor:
    """The coordinator of a study."""

    caller: calls.Caller  # reaches the sites
    plan: Plan  # what is asked
    job: str  # names the study
    # The bundles of the plan as they travel, by name.
    bundles: Mapping[str, bytes] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)  # who took no part in what, and why

    def run(self) -> list[Table]:
        """Asks all parts of the plan."""
        caller = self.caller
        calls.greet(caller)
        facts, _, _ = calls.agree_on_data(caller, withdrawal.replayed(()))
        clients = [wire.Client(c, of.num_samples) for c, of in facts.items()]
        caller.everyone(caller.requests(wire.Begin, caller.sites, job=self.job, clients=clients))
        for name, body in self.bundles.items():
            _log.info("Sends %s, %s, to each site.", name, size(len(body)))
            caller.everyone(caller.requests(wire.Bring, caller.sites, of=name, body=body))
        tables: list[Table] = []
        every = [*parts(self.plan)]
        for number, part in enumerate(every):
            _log.info("Part %d of %d: %s.", number + 1, len(every), part.name)
            try:
                if len(caller.sites) < FEWEST and not isinstance(part, Separate):
                    raise SiteError(f"a sum needs {FEWEST} sites.")
                ask = self._estimates if isinstance(part, Separate) else self._sum
                tables += answered(part, partial(ask, number, [*caller.sites]))
            except SiteError as error:  # the other parts have spent what sites allow
                self.remarks.append(f"{part.name} is left out: {error}")
        if not tables:
            raise SiteError(f"Nothing could be measured: {' '.join(self.remarks)}")
        return tables

    def _estimates(self, number: int, sites: list[str], part: Separate, *_: Any) -> Any:
        questions = self.caller.requests(wire.Ask, sites, round=number, body=b"[]")
        replies, why = self.caller.all(questions)
        each = {}
        for site, reply in replies.items():
            try:
                each[site] = fit(parse_json(reply.body), Estimates)
            except ValueError:
                why[site] = "its estimates cannot be read"
        self._without(part.name, why)
        return each

    def _sum(self, number: int, sites: list[str], part: Part, step: int, state: State) -> Whole:
        """Returns the sum of one step over `sites`, of which those that are lost are taken out."""
        body, attempt = json.dumps([*state]).encode(), 0
        while len(sites) >= FEWEST:
            where = {"round": number, "phase": step, "attempt": attempt}
            total, why = self._attempt(where, body, sites)
            self._without(part.name, why)
            sites[:] = [c for c in sites if c not in why]
            if total is not None:
                return total
            if step:
                why_not = "sums without a site that was lost after the first step show its numbers"
                raise SiteError(f"{why_not}; repeat the study.")
            attempt += 1
        raise SiteError(f"fewer than {FEWEST} sites answer, so nothing can be summed.")

    def _attempt(
        self, where: Mapping[str, int], body: bytes, sites: list[str]
    ) -> tuple[Whole | None, dict[str, str]]:
        """Makes keys, shares and the sum; ``None`` if a site is lost too early."""
        requests, least = self.caller.requests, masks.needed(len(sites))

        def ask(kind: Any, **more: Any) -> dict[str, Any]:
            replies, why = self.caller.all(requests(kind, sites, **where, **more))
            if why:
                raise coordinator.Lost(why)
            return replies

        try:
            announced = ask(wire.Keys, cohort=sites)
            hidden = coordinator.Masks.of(announced, ask)
        except coordinator.Lost as lost:
            return None, lost.why
        questions = requests(wire.Ask, sites, body=body, **where)
        boxed = {c: replace(one, boxes=hidden.for_site(c)) for c, one in questions.items()}
        replies, why = self.caller.all(boxed)
        sizes = Counter(len(reply.body) for reply in replies.values()).most_common(1)
        odd = [c for c, r in replies.items() if len(r.body) != sizes[0][0] or len(r.body) % 8]
        why |= dict.fromkeys(odd, "its numbers are not as many as those of the others")
        if odd or len(replies) < least:
            return None, why
        shares, gone = self.caller.all(requests(wire.Unmask, replies, sent=[*replies], **where))
        if len(shares) < least:
            return None, why | gone
        vectors = [np.frombuffer(reply.body, "<u8") for reply in replies.values()]
        rest = hidden.rest([*replies], shares, len(vectors[0]), kind=_MASKED)
        total = np.stack([*vectors, rest]).sum(axis=0, dtype=_MASKED)
        return np.asarray(total.view(np.int64)), why

    def _without(self, name: str, why: Mapping[str, str]) -> None:
        """Remembers who took no part."""
        self.remarks += [f"{short(site)} took no part in {name}: {w}." for site, w in why.items()]


def conduct(caller: calls.Caller, plan: Plan, bundles: Mapping[str, str], folder: Path) -> None:
    """Runs a study across sites, and writes its page."""
    models = {name: packed(Path(place)) for name, place in bundles.items()}
    conductor = Conductor(caller, plan, secrets.token_hex(8), models)
    tables = conductor.run()
    write_study(plan, tables, conductor.remarks, folder)
