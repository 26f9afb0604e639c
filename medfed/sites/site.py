"""A hospital's end: one client, its data, its end of the channel, and its kept rounds.

Every request passes :mod:`medfed.sites.gate`; this file does what an admitted one asks. A repeated
round, a later round, and a restarted coordinator all first restore the round that the request
names, so that the site forgets its work for a failed round. It keeps its last rounds, and those
that the coordinator still needs, in its folder.

A configuration describes a site: its data, the agreed model and method.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

import torch

from medfed.common import schemas, scores, untrusted
from medfed.common.tensors import Tensors, digest, to_device
from medfed.config.compose import build
from medfed.config.description import RunDescription
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.one_site import Exchanged, OwnData
from medfed.federation import algorithm, budget, local_client, onboarding, split
from medfed.federation.federation import Federation
from medfed.federation.lightning.checkpoint import digest_file, is_whole, save_sealed
from medfed.federation.lightning.module import FederatedModule
from medfed.federation.reference import Newcomer
from medfed.federation.round import answer
from medfed.federation.split import parted
from medfed.federation.wire.channel import Channel, MessageContext
from medfed.federation.wire.packet import Message, Packet
from medfed.models.task import TaskModule
from medfed.records.folder import RunFolder, commit_here, save_tensors, versions
from medfed.run import assembly, experiment, federating, loggers, start
from medfed.run.chooser import chooser_of
from medfed.run.onboarding import tested
from medfed.sites import agreement, masks, policy, wire
from medfed.sites.gate import Agreement, Gate, Refusal, sum_key
from medfed.sites.policy import NO_LIMITS, Policy
from medfed.sites.wire import START, Facts, Greeting, Reply, Request
from medfed.standalone import files
from medfed.standalone.errors import CheckpointError, DataError
from medfed.studies.parts import Part, Separate

SavedState = dict[str, Any]


class _Round(TypedDict):
    """The content of a round's file."""

    site: str
    round: wire.RoundNumber
    steps: schemas.Count
    passes: tuple[schemas.Count, schemas.Count]
    client: dict[str, dict[str, Any]]


@dataclass(eq=False)
class Site:
    """Answers a coordinator; see :class:`medfed.sites.wire.Answers`."""

    workplace: Agreement
    folder: Path  # of the kept rounds of a federation
    signer: masks.Signer | None = None  # of the keys of masks; ``None``: they are not signed
    counted: policy.Counted | None = None  # what the site has answered; ``None``: in its folder

    def __post_init__(self) -> None:
        self.name, self._root = self.workplace.name, self.folder
        counted = self.counted or policy.Counted(self.folder / policy.COUNTED)
        how = self._go_to, self._folder_of, self._mark
        self.gate = Gate(self.workplace, counted, *how)
        self.log = self.gate.log
        # Of the last evaluation, with all digits, which stay here.
        self.metrics: dict[str, float] = {}
        self._states: dict[int, SavedState] = {}  # those of the start and of the round before
        self._newcomer: Newcomer | None = None

    @property
    def module(self) -> FederatedModule:
        """The federation at this site with what it trains, once a session has started."""
        return self.gate.module

    @property
    def federation(self) -> Federation:
        """The federation at this site, once a session has started."""
        return self.module.federation

    @property
    def client(self) -> local_client.LocalClient:
        """The only client, once a session has started."""
        return self.federation.clients[self.name]

    def answer(self, request: bytes) -> bytes:
        """Returns the reply to a request."""
        return self.gate.answer(request, self._do)

    def _do(self, request: Request) -> Reply:
        """Does what an admitted request asks, by the method of its kind, and keeps the result."""
        reply: Reply = getattr(self, f"_{request.kind}")(request)
        self.keep(request, reply)
        return reply

    def _hello(self, request: wire.Hello) -> Reply:
        return wire.Greeted.to(request, greeting=self.workplace.greeting())

    def _agree(self, request: wire.Agree) -> Reply:
        statement = self.workplace.agree(request.phase, request.body)
        facts = self.workplace.facts() if statement is None else None
        return wire.Described.to(request, facts=facts, body=statement or b"")

    def _begin(self, request: wire.Begin) -> Reply:
        """Starts a session: clears the memory and reads the kept rounds."""
        self._join(request, request.session)
        files.write_json(RunFolder(self.folder).job_json, {"job": request.job, "site": self.name})
        self.gate.tested = RunFolder(self.folder).summary_json.is_file()
        self._states = {START: self._state(START)}
        self.begun(request)
        return wire.Begun.to(request, rounds=self.rounds())

    def _join(self, request: wire.Begin | wire.Onboard, session: str) -> None:
        self.folder = self._folder_of(request)
        everyone = [algorithm.ClientInfo(c.id, c.num_samples) for c in request.clients]
        self.gate.start(session, request.clients, self.workplace.join(everyone))
        self.guard()

    def _keys(self, request: wire.Keys) -> Reply:
        place = self.name, request, request.cohort, self.signer
        self.gate.half = masks.Half(*place, self.gate.samples[self.name])
        earlier = self.gate.answered.of(sum_key(self.gate, request))
        keys = self.gate.half.announced()
        return wire.Announced.to(request, keys=keys, given=earlier[0].split() if earlier else [])

    def _shares(self, request: wire.Shares) -> Reply:
        assert self.gate.half is not None
        return wire.Shared.to(request, boxes=self.gate.half.boxes(request.keys))

    def _unmask(self, request: wire.Unmask) -> Reply:
        assert self.gate.half is not None
        return wire.Unmasked.to(request, shares=self.gate.half.shares(request.sent))

    def _fit(self, request: wire.Fit) -> Reply:
        gate, module = self.gate, self.module
        packet = gate.read(request)
        if gate.here is not None:
            gate.base = gate.here
            self._states = {START: self._states[START], gate.base: self._state(gate.base)}
        gate.here = None
        module.next_round = request.round
        # A sum may be made without sites that are lost later; their noise is then missing.
        noisy = masks.needed(len(gate.half.sites)) if gate.half else len({*request.cohort})
        place = self.name, packet, request.round, request.phase, noisy
        reply = answer(module.federation, *place)
        reply = gate.masked(reply, request)
        gate.phases = [*gate.phases, request.phase]
        return wire.Trained.to(request, **self._spent(), body=reply.to_bytes())

    def _evaluate(self, request: wire.Evaluate) -> Reply:
        module, is_test = self.module, request.split == "test"
        module.next_round = request.round + 1
        with self.arrived(self.gate.read(request)), torch.no_grad():
            self.metrics = module.evaluate_client(self.name, request.split, keep=is_test)
        point = None
        if is_test and module.chooser is not None:
            self.metrics |= module.decide(self.name, request.point)
            point = _leaving(module.points[self.name])
        cases = module.cases.get(self.name, ()) if is_test else ()
        small = bool(cases) and scores.fewest_cases(cases)[0] < scores.LEAST_CASES
        self.gate.tested = self.gate.tested or is_test
        loss = self.client.training_loss if request.trained else None
        module.losses = {} if loss is None else {self.name: loss}
        diverged, metrics = bool(module.diverged({self.name: self.metrics})), _leaving(self.metrics)
        return wire.Measured.to(
            request, metrics=metrics, diverged=diverged, point=point, small=small
        )

    def _across(self, request: wire.Across) -> Reply:
        """Evaluates the site's personal model and sends it, or evaluates another site's."""
        module, packet, channel, body = self.module, self.gate.read(request), Channel(), b""
        if request.of == self.name:
            with self.arrived(packet):
                model = module.federation.personal_model(self.name)
            message = Message("across", {"model": model})
            body = channel.encode(message, "down", MessageContext(self.name))[0].to_bytes()
            self.log.warning("The personal model leaves, as policy.send_model allows.")
        else:
            model = channel.decode(packet, "down")[0].parts.get("model", {})
        entries = module.local.model.entries
        if any(n not in model or model[n].shape != entries[n].shape for n in entries):
            raise Refusal("message")
        try:
            module.local.model.load(model)
        except ValueError as error:
            raise Refusal("message") from error
        data = self.client.data.eval_batches("test")
        batches = (to_device(batch, module.device) for batch in data)
        with torch.no_grad():
            metrics = module.task.evaluate(batches)
        return wire.Tested.to(request, metrics=_leaving(metrics), body=body)

    def _commit(self, request: wire.Commit) -> Reply:
        needed = {*request.needed, request.round}
        save_sealed(self._state(request.round), self._file(request.round))
        for number in set(self.rounds()) - needed:
            path = self._file(number)
            digest_file(path).unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        self.gate.here = request.round
        if (loss := self.client.training_loss) is not None:
            loss = scores.rounded(loss)
        return wire.Committed.to(request, **self._spent(), loss=loss, epsilon=self.gate.epsilon())

    def _load(self, request: wire.Load) -> Reply:
        return wire.Loaded.to(request, digest=self.federation.digests()[f"client/{self.name}"])

    def _onboard(self, request: wire.Onboard) -> Reply:
        """Joins a trained federation; its model stays here."""
        if request.phase == 0:
            self._join(request, "")  # no longer part of another session
            self._newcomer = newcomer_of(self.module, self.name, self.workplace.joins)
        assert self._newcomer is not None
        packet, body, metrics = self.gate.read(request), b"", dict[str, float]()
        if request.last:
            module, client = self.module, self._newcomer.client
            rules = onboarding.rules_of(module.federation.algorithm)
            model = rules.onboard(client, self._newcomer.begin(packet))
            model, metrics = tested(module, client, model, request.point)
            self.joined(self._newcomer, module.local.model.whole(model), metrics)
        else:
            body = self._newcomer.answer(packet).to_bytes()
        self.gate.questions = self.gate.questions_with(request)
        self.gate.questions_answered = self._newcomer.phase
        return wire.Joined.to(request, metrics=_leaving(metrics), body=body)

    def _folder_of(self, request: wire.Begin | wire.Onboard) -> Path:
        """Returns the folder of a federation."""
        return self._root

    def begun(self, request: wire.Begin) -> None:
        """Called at the start of a session."""

    def guard(self) -> None:
        """Called when the site has joined a federation, before it trains."""

    def keep(self, request: Request, reply: Reply) -> None:
        """Called before the answer to a request leaves."""

    def joined(self, newcomer: Newcomer, model: Tensors, metrics: dict[str, float]) -> None:
        """Called with the model of a site that has joined a trained federation."""
        save_tensors(self._root.parent / f"{self._root.name}-joined.safetensors", model)

    @contextmanager
    def arrived(self, packet: Packet) -> Iterator[None]:
        """Has a delivered packet in the federation for a while."""
        arrived = self.federation.arrived
        arrived[self.name] = packet
        try:
            yield
        finally:
            del arrived[self.name]

    def _spent(self) -> dict[str, Any]:
        return {"steps": self.client.steps_done, "passes": tuple(self.client.passes)}

    def _go_to(self, number: int) -> None:
        """Restores the state of a kept round."""
        if number == self.gate.here:
            return
        if number not in (*self._states, *self.rounds()):
            raise Refusal("round")
        self._load_state(self._states.get(number) or self._read(number))

    def _load_state(self, state: SavedState) -> None:
        self.client.load_state_dict(state["client"])
        self.client.steps_done = state["steps"]
        self.client.passes = budget.Passes(*state["passes"])

    def _mark(self) -> Callable[[], None]:
        """Returns what takes the site's memory back to where it is now."""
        gate, state = self.gate, None if self.gate.started is None else self._state(START)
        # Values are replaced, never changed.
        before = [(of, {**vars(of)}) for of in (self, gate, gate.half) if of is not None]

        def take_back() -> None:
            for of, values in before:
                vars(of).update(values)
            if state is not None:
                self._load_state(state)

        return take_back

    def _state(self, number: int) -> SavedState:
        """The client's state, without copies: tensors are replaced, never changed."""
        state = self.client.state_dict()
        return {"site": self.name, "round": number, "client": state, **self._spent()}

    def rounds(self) -> list[int]:
        """Returns the complete rounds in the folder."""
        paths = (p for p in sorted(self.folder.glob("round_*.ckpt")) if is_whole(p))
        return [int(p.stem.removeprefix("round_")) for p in paths]

    def _file(self, number: int) -> Path:
        return self.folder / f"round_{number:05d}.ckpt"

    def _read(self, number: int) -> SavedState:
        path = self._file(number)
        saved: SavedState = untrusted.read_checkpoint(path)
        try:
            if schemas.fit(saved, _Round)["site"] != self.name:
                raise ValueError(saved["site"])
        except ValueError as error:
            raise CheckpointError(f"{path} is not a round of {self.name} ({error}).") from error
        return saved


def newcomer_of(module: FederatedModule, site: str, steps: int) -> Newcomer:
    """Returns a newcomer in the state that all began with, which may take so many steps."""
    module.local.budget = replace(module.local.budget, steps=steps)
    client = module.federation.clients[site]
    client.state = dict(module.federation.client_start)  # which is on the network's device
    return Newcomer(module.federation, client)


FACTS = (
    *("in_channels", "out_channels", "spatial_dims", "regions", "exclusive", "millimetres"),
    *("patch_size", "outcome_scale", "plan"),
)
"""Keys of the configuration that the data decide, and that the coordinator takes from the sites."""


class SiteModule(FederatedModule):
    """A federation with only one client in this process."""

    @property
    def owned(self) -> list[str]:
        """That client."""
        return list(self.federation.clients)


@dataclass(eq=False)
class ConfiguredSite:
    """A site's components, from a configuration: its data, the model, and the agreement."""

    config: RunDescription  # with the site's keys (data, device, folders)
    name: str
    # All sites, in order, if the data belong to this site only; None if the data of all sites are
    # here, as in a rehearsal, and the agreed partition divides them.
    sites: Sequence[str] | None = None
    policy: Policy = NO_LIMITS
    members: Sequence[str] | None = None  # all sites of the agreement; ``None``: any
    joins: int = 0
    parts: Sequence[Part | Separate] = ()
    data: FederatedDataModule = field(init=False, repr=False)  # the data, once they are read
    task: TaskModule = field(init=False, repr=False)  # the task, after the agreement

    def __post_init__(self) -> None:
        self.policy.check_study(self.config)
        self.rounds, self._configuration = self.config.rounds, self.config
        self._greeting: Greeting | None = None
        self._start = start.Start()
        self._statements: list[bytes | None] = []
        self.answers: list[bytes] = []
        self.exchanged: list[Exchanged] = []  # sizes of what it says of its data, and of answers
        self._facts: Facts | None = None

    @classmethod
    def of(cls, agreed: agreement.Agreed, file: agreement.SiteFile) -> ConfiguredSite:
        """Makes a site from the agreement and its file."""
        file.check_approved(agreed)
        sites = None if agreed.cut else agreed.sites
        config = file.config(agreed)
        return cls(config, file.site, sites, file.policy, agreed.sites, agreed.joins)

    @property
    def messages(self) -> int:
        """How many messages about its data it can send by now."""
        return len(self._statements) + (self._statements[-1] is not None)

    def greeting(self) -> Greeting:
        """Reads configuration and data once; returns the facts that all sites must share."""
        if self._greeting is None:
            agreed = agreement.fingerprints(self._configuration.values)
            self._start, self.config = experiment.read_start(self._configuration)
            data = own_data(self.config, self.name, self.sites)
            self._agreeing: Generator[bytes, bytes, None] = data.setup_alone(self.name)
            self._statements = [next(self._agreeing, None)]
            self.answers, self.exchanged = [], []
            tells = self._statements != [None]
            self.policy.check_data(self.config, data, self.name, tells, self.joins)
            versions = versions_here(str(self.config.trainer.accelerator))
            self.data = data
            self._settle()
            self._greeting = Greeting(agreed, data.facts(), versions)
        return self._greeting

    def agree(self, number: int, answer: bytes) -> bytes | None:
        """Returns the site's messages about its data, for the coordinator."""
        self.greeting()
        if number and self.answers[number - 1 : number] not in ([], [answer]):
            raise DataError(
                "The coordinator's answer on columns has changed; start the site again."
            )
        if number == len(self._statements):
            try:
                self._statements.append(self._told(answer))
                self._settle()
            except Exception:
                self._greeting = self._facts = None  # an answer that is refused scales nothing
                raise
        return self._statements[number]

    def _told(self, answer: bytes) -> bytes | None:
        """Goes on with an answer; returns the next message."""
        self.answers.append(answer)
        for way, content in (("up", self._statements[-1] or b""), ("down", answer)):
            self.exchanged.append((self.name, way, len(content)))  # type: ignore[arg-type]
        try:
            statement = self._agreeing.send(answer)
        except StopIteration:
            return None
        self.policy.check_statistics(self.data.summaries(self.name))
        return statement

    def _settle(self) -> None:
        """Builds the model, once the data are read."""
        if self._statements[-1] is not None:
            return
        assembly.say_data(self.data)
        client = self.data.clients[self.name]
        self.policy.check_statistics(build(self.config.algorithm).summaries(client))
        self.config, self.task, *_ = experiment.begin(self.config, self.data, self._start)
        entries = split.float_entries(self.task.network)
        self._initial: Tensors = {n: t.detach().clone() for n, t in entries.items()}
        facts, absent = facts_of(self.config, self.data), self.data.absent
        self._facts = Facts(client.num_samples, digest(self._initial), facts, absent)

    def facts(self) -> Facts | None:
        """Returns the facts about the model, after the agreement; None before."""
        return self._facts

    def patients_behind(self) -> tuple[str, list[str]]:
        """Returns where the data are, and the patients behind its statistics; none: none leave."""
        self.greeting()
        client, method = self.data.clients.get(self.name), build(self.config.algorithm)
        sends = self._statements[0] is not None or (client and any(method.summaries(client)))
        patients = self.data.plans[self.name].patients["train"] if sends else []
        return str(self.config.data.get("path")), patients

    def join(self, everyone: Sequence[algorithm.ClientInfo]) -> FederatedModule:
        """Returns the federation at this site: with this client only, in its initial state."""
        task, config = self.task, self.config
        initial = parted(task.network, self._initial)
        with torch.no_grad():
            for name, tensor in split.float_entries(task.network).items():
                tensor.copy_(initial.get(name, tensor))  # what the method adds begins anew
        module = SiteModule(task, *federating.federate(config, self.data, task, everyone))
        module.chooser = chooser_of(config, task)
        # A Trainer, which runs nothing here, gives precision and device.
        quiet = {"progress": False, "logger": loggers.NO_LOGGER}
        trainer = experiment.trainer_of(config.replacing(quiet), [])
        trainer.strategy.connect(module)
        module.trainer = trainer
        module.setup("fit")
        module.to(trainer.strategy.root_device)
        module.on_fit_start()
        return module


def own_data(config: RunDescription, name: str, sites: Sequence[str] | None) -> FederatedDataModule:
    """Returns the data of a site before they are read; without `sites` others share their files."""
    data = assembly.unread_data(config)
    if sites is not None:
        data.partition = OwnData(data.partition, name, sites)
    return data


def facts_of(config: RunDescription, data: FederatedDataModule) -> dict[str, Any]:
    """Returns the facts of the data that all sites must share and the coordinator needs."""
    (client,) = data.clients.values()
    return {key: getattr(config.facts, key) for key in FACTS} | {
        "personal": config.model.get("personal"),
        "shape": list(client.train_inputs(1).shape[1:]),
        "channels": list(data.channel_names),
        "labels": list(data.class_names),
    }


def versions_here(accelerator: str) -> dict[str, str]:
    """Returns the versions of an end, on which the bits of a run depend."""
    packages = versions()
    gpu = accelerator in ("gpu", "cuda") and torch.cuda.is_available()
    return {
        **{name: packages[name] for name in ("medfed", "torch", "monai")},
        "device": torch.cuda.get_device_name() if gpu else accelerator,
        "commit": commit_here(),
    }


def _leaving(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: scores.rounded(value) for name, value in metrics.items()}
