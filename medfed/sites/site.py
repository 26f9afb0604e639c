"""A hospital's end: one client, its data, its end of the channel, and its kept rounds.

It answers one request at a time (``busy`` otherwise) and every request once: a repeated request
gets the same bytes. A repeated round, a later round, and a restarted coordinator all first restore
the round that the request names, so that the site forgets its work for a failed round. It keeps its
last rounds, and those that the coordinator still needs, in its folder.

A configuration describes a site: its data, the agreed model and method.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypedDict

import torch

from medfed.common import files, schemas, scores, untrusted
from medfed.common.errors import CheckpointError, CodecError, DataError
from medfed.common.tensors import Tensors, digest, map_state, to_device
from medfed.config.compose import build
from medfed.config.description import RunDescription
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.one_site import OwnData, setup_alone
from medfed.federation.algorithm import ClientInfo
from medfed.federation.budget import Passes
from medfed.federation.entries import parted
from medfed.federation.federation import Federation
from medfed.federation.lightning.checkpoint import digest_file, is_whole, save_sealed
from medfed.federation.lightning.module import FederatedModule
from medfed.federation.local_client import LocalClient
from medfed.federation.split import float_entries
from medfed.federation.wire.channel import Channel, Place
from medfed.federation.wire.fixed_point import FEWEST
from medfed.federation.wire.message import Message
from medfed.federation.wire.packet import Packet
from medfed.models.task import TaskModule
from medfed.records.folder import RunFolder, commit_here, save_tensors, versions
from medfed.run import assembly, experiment, federating, loggers, start
from medfed.sites import agreement, masks, newcomers
from medfed.sites.policy import NO_LIMITS, Policy, VetoError, check_data, check_study
from medfed.sites.wire import START, Facts, Greeting, Reply, Request, RoundNumber, Status

MODELS = 10
"""Models of one round that may be evaluated, in addition to one for each site."""
SUMS = "sums.json"  # the sites of the sums under masks that this site took part in
FIRST = ("hello", "agree", "begin", "onboard")  # kinds of requests that belong to no round
Kept = dict[str, Any]


class _Round(TypedDict):
    """The content of a round's file."""

    site: str
    round: RoundNumber
    steps: schemas.Count
    passes: tuple[schemas.Count, schemas.Count]
    client: dict[str, dict[str, Any]]


class Refusal(Exception):  # noqa: N818 - it becomes a reply
    """A request that cannot be answered, with one of the reasons of `wire`."""

    def __init__(self, reason: str, status: Status = "refused") -> None:
        super().__init__(reason)
        self.reason, self.status = reason, status


class Keeper(Protocol):
    """Keeps a site's results in its folder."""

    def begin(self, site: Site, asked: Request) -> None:
        """Called at the start of a session."""

    def after(self, site: Site, asked: Request, reply: Reply) -> None:
        """Called after the answer to a round's request; an error it raises becomes the answer."""

    def joined(
        self, site: Site, newcomer: newcomers.Joining, model: Tensors, metrics: dict[str, float]
    ) -> None:
        """Called with the model of a site that has joined a trained federation."""

    def epsilon(self, site: Site) -> float | None:
        """Returns what the run has spent on the site's patients, if it may be said."""


@dataclass(eq=False)
class Site:
    """Answers a coordinator; see :class:`medfed.sites.wire.Answers`.

    Args:
        workplace: Its data, the model, and the agreement.
        folder: The folder of kept rounds of one federation; with a keeper the prefix of the folders
            of all federations.
        keeper: Keeps results other than rounds.
        signer: Signs the keys of masks; ``None``: they are not signed.

    Attributes:
        module: The federation at this site, once a session has started.
        metrics: Of the last evaluation, with all digits, which stay here.
    """

    workplace: ConfiguredSite
    folder: Path
    keeper: Keeper | None = None
    signer: masks.Signer | None = None

    def __post_init__(self) -> None:
        self.name, self._root = self.workplace.name, self.folder
        self._half: masks.Half | None = None  # of the sum under masks that is being made
        self.log = logging.getLogger(f"{__name__}.{self.name}")
        self.module: FederatedModule | None = None
        self.metrics: dict[str, float] = {}
        self._lock = threading.Lock()
        self._session = ""
        self._latest = (START, 0)  # round and attempt of the last request
        self._phases: list[int] = []  # that were answered of it
        self._here: int | None = START  # the kept round of the current state; None within a round
        self._base = START  # the kept round before the current one
        self._states: dict[int, Kept] = {}  # those of the start and of the round before
        self._replies: dict[bytes, bytes] = {}
        self._newcomer: newcomers.Joining | None = None
        self._measured: dict[int, set[bytes]] = {}  # hashes of models by round, over all sessions
        self._tested = False

    @property
    def federation(self) -> Federation:
        """The federation at this site, once a session has started."""
        return self._module.federation

    @property
    def client(self) -> LocalClient:
        """The only client, once a session has started."""
        return self.federation.clients[self.name]

    def answer(self, request: bytes) -> bytes:
        """Returns the reply to a request; errors become replies, too."""
        try:
            asked = Request.from_bytes(request)
        except CodecError as error:
            self.log.warning("A request was refused: %s", error)
            return Reply("hello", self.name, status="refused", reason="bytes").to_bytes()
        if asked.site != self.name:
            return Reply.to(asked, "refused", "site").to_bytes()
        if not self._lock.acquire(blocking=False):
            return Reply.to(asked, "busy").to_bytes()
        try:
            return self._answer(asked, hashlib.blake2b(request).digest())
        finally:
            self._lock.release()

    def _answer(self, asked: Request, key: bytes) -> bytes:
        if asked.kind not in FIRST:
            if not self._session:
                return Reply.to(asked, "unready").to_bytes()
            if asked.session != self._session:
                return Reply.to(asked, "refused", "session").to_bytes()
        if known := self._replies.get(key):
            return known
        answer: Callable[[Request], Reply] = getattr(self, f"_{asked.kind}")  # one of `wire.Kind`
        try:
            answered = answer(asked)
            if self.keeper is not None and asked.kind not in FIRST:
                self.keeper.after(self, asked, answered)
            reply = answered.to_bytes()
        except (VetoError, Refusal) as why:
            self.log.warning("%s was refused: %s", asked, why)
            return Reply.to(asked, why.status, why.reason).to_bytes()
        except Exception as error:
            # The error's text may name a patient or a file: it stays in this log.
            self.log.exception("%s failed.", asked)
            return Reply.to(asked, "failed", type(error).__name__).to_bytes()
        if asked.kind not in FIRST[:3]:
            self._replies[key] = reply
        return reply

    def _hello(self, asked: Request) -> Reply:
        content = {n: dict(v) for n, v in vars(self.workplace.greeting()).items()}
        return Reply.to(asked, content=content)

    def _agree(self, asked: Request) -> Reply:
        statement = self.workplace.agree(asked.phase, asked.body)
        facts = self.workplace.facts().content() if statement is None else {}
        return Reply.to(asked, content={"facts": facts}, body=statement or b"")

    def _begin(self, asked: Request) -> Reply:
        """Starts a session: clears the memory and reads the kept rounds."""
        job = asked.content["job"]
        self.folder = self._folder_of(asked)
        kept = RunFolder(self.folder).job_json
        if kept.is_file() and untrusted.read_json(kept, dict[str, str]).get("job") != job:
            raise Refusal("job")
        if not asked.session:
            raise Refusal("session")
        everyone = [ClientInfo(c["id"], c["num_samples"]) for c in asked.content["clients"]]
        this = ClientInfo(self.name, self.workplace.facts().num_samples)
        if this not in everyone or len({c.id for c in everyone}) < len(everyone):
            raise Refusal("message")
        self.folder.mkdir(parents=True, exist_ok=True)
        files.write_json(kept, {"job": job, "site": self.name})
        self.module = self.workplace.join(everyone)
        self._session, self._latest, self._phases = asked.session, (START, 0), []
        self._replies.clear()
        self._tested = RunFolder(self.folder).summary_json.is_file()
        self._states = {START: self._state(START)}
        self._here = self._base = START
        if self.keeper is not None:
            self.keeper.begin(self, asked)
        return Reply.to(asked, content={"rounds": self.rounds()})

    def _enter(self, asked: Request) -> None:
        """Starts a phase with a cohort, or refuses it."""
        if asked.round >= self.workplace.rounds:
            raise Refusal("round")
        if self._tested:  # a run that trains on after the test would select by it
            raise Refusal("order")
        cohort = asked.content["cohort"]
        if self.name not in cohort or not {*cohort} <= {*self._module.federation.ids}:
            raise Refusal("message")
        self.workplace.check_cohort(cohort)
        self._turn_to(asked)
        if asked.phase in self._phases:
            raise Refusal("replay")
        if any(phase > asked.phase for phase in self._phases):
            raise Refusal("order")

    def _keys(self, asked: Request) -> Reply:
        self._enter(asked)
        cohort = asked.content["cohort"]
        if len({*cohort}) < max(FEWEST, len(cohort)):
            raise Refusal("message")
        self._half = masks.Half(self.name, asked, cohort, self.signer)
        given = self._given().get(f"{asked.round}/{asked.phase}", [])
        return Reply.to(asked, content={**self._half.announced(), "given": given})

    def _shares(self, asked: Request) -> Reply:
        keys = asked.content["keys"]
        return Reply.to(asked, content={"boxes": self._half_of(asked).boxes(keys)})

    def _unmask(self, asked: Request) -> Reply:
        """Gives shares for one set of sites in each phase of a round, and for no other."""
        half, sent, given = self._half_of(asked), sorted(asked.content["sent"]), self._given()
        if asked.phase not in self._phases:
            raise Refusal("order")
        if given.setdefault(f"{asked.round}/{asked.phase}", sent) != sent:
            raise Refusal("sums")
        shares = half.shares(sent)
        files.write_json(self.folder / SUMS, given)  # before the reply leaves
        return Reply.to(asked, content={"shares": shares})

    def _given(self) -> dict[str, list[str]]:
        """The sites of the sums to which this site has given shares, by round and phase."""
        path = self.folder / SUMS
        return untrusted.read_json(path, dict[str, list[str]]) if path.is_file() else {}

    def _half_of(self, asked: Request) -> masks.Half:
        self._turn_to(asked)
        if self._half is None or self._half.phase != asked.phase:
            raise Refusal("order")
        return self._half

    def _fit(self, asked: Request) -> Reply:
        self._enter(asked)
        module, sums = self._module, self._module.federation.channel.sums
        half = self._half_of(asked) if asked.content.get("boxes") else None
        packet = self._packet(asked)
        if self._here is not None:
            self._base = self._here
            self._states = {START: self._states[START], self._base: self._state(self._base)}
        self._here = None
        module.next_round = asked.round
        reply = module.federation.answer(self.name, packet, asked.round, asked.phase)
        if sums is not None and len(sums.read(reply)):
            if half is None:
                raise Refusal("sums")
            reply = half.masked(sums, reply, asked.content["boxes"])
        self._phases.append(asked.phase)
        return Reply.to(asked, content=self._spent(), body=reply.to_bytes())

    def _evaluate(self, asked: Request) -> Reply:
        split = asked.content["split"]
        if split not in ("val", "test"):
            raise Refusal("message")
        self._check_measured(asked)
        self._turn_to(asked)
        if asked.content["trained"] and not self._phases:
            raise Refusal("order", "unready")
        if self._phases and not asked.content["trained"]:
            raise Refusal("order")
        module = self._module
        module.next_round = asked.round + 1
        module.federation.arrived[self.name] = self._packet(asked)
        try:
            with torch.no_grad():
                self.metrics = module.evaluate_client(self.name, split, keep=split == "test")
        finally:
            del module.federation.arrived[self.name]
        chosen: dict[str, Any] = {}
        if split == "test" and module.chooser is not None:
            own = module.points[self.name]
            chosen["point"] = _leaving(own)
            point = own or {**(asked.content.get("point") or {}), "pooled": 1.0}
            module.points[self.name] = point
            self.metrics |= module.chooser.apply(module.cases[self.name], point)
        self._tested = self._tested or split == "test"
        loss = self.client.training_loss if asked.content["trained"] else None
        module.losses = {} if loss is None else {self.name: loss}
        diverged = bool(module.diverged({self.name: self.metrics}))
        chosen |= {"metrics": _leaving(self.metrics), "diverged": diverged}
        return Reply.to(asked, content=chosen)

    def _across(self, asked: Request) -> Reply:
        """Evaluates the site's personal model and sends it, or evaluates another site's."""
        sends = asked.content["of"] == self.name
        self.workplace.policy.check_across(sends)
        self._check_measured(asked)
        if not self._tested:
            raise Refusal("order")
        self._turn_to(asked)
        module, packet, channel, body = self._module, self._packet(asked), Channel(), b""
        if sends:
            module.federation.arrived[self.name] = packet
            try:
                model = module.federation.personal_model(self.name)
            finally:
                del module.federation.arrived[self.name]
            message = Message("across", {"model": model})
            body = channel.encode(message, "down", Place(self.name))[0].to_bytes()
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
        return Reply.to(asked, content={"metrics": _leaving(metrics)}, body=body)

    def _check_measured(self, asked: Request) -> None:
        """Refuses metrics of models that no run across sites would ask for.

        An honest coordinator asks once per attempt of a round, of which there is one more for each
        site that is left out; and for test metrics after the rounds.

        Raises:
            Refusal: If the round is none, or too many models are asked for.
        """
        is_test = asked.content.get("split", "test") == "test"
        if is_test and asked.round < 1:
            raise Refusal("order")
        if asked.round >= self.workplace.rounds + is_test:
            raise Refusal("round")
        models = self._measured.setdefault(asked.round, set())
        models.add(hashlib.blake2b(asked.body).digest())
        if len(models) > len(self._module.federation.ids) + MODELS:
            raise Refusal("replay")

    def _commit(self, asked: Request) -> Reply:
        self._turn_to(asked)
        if not self._phases:
            raise Refusal("order", "unready")
        needed = {*asked.content["needed"], asked.round}
        save_sealed(self._state(asked.round), self._file(asked.round))
        for number in set(self.rounds()) - needed:
            path = self._file(number)
            digest_file(path).unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        self._here = asked.round
        content = self._spent()
        if (loss := self.client.training_loss) is not None:
            content["loss"] = scores.rounded(loss)
        if self.keeper is not None and (spent := self.keeper.epsilon(self)) is not None:
            content["epsilon"] = spent
        return Reply.to(asked, content=content)

    def _load(self, asked: Request) -> Reply:
        self._turn_to(asked)
        if self._phases:
            raise Refusal("order")
        return Reply.to(asked, content={"digest": self.federation.digests()[f"client/{self.name}"]})

    def _onboard(self, asked: Request) -> Reply:
        """Joins a trained federation; its model stays here."""
        if asked.phase == 0:
            sizes = [ClientInfo(c["id"], c["num_samples"]) for c in asked.content["clients"]]
            if self.name in {c.id for c in sizes} or asked.content["steps"] < 1:
                raise Refusal("message")
            self.folder = self._folder_of(asked, "-joined")
            module = self.workplace.join(sizes)
            self._newcomer = newcomers.Joining(module, self.name, asked.content["steps"])
            self.module, self._session = module, ""  # no longer part of another session
        elif self._newcomer is None or self._newcomer.phase != asked.phase:
            raise Refusal("order", "unready")
        assert self._newcomer is not None
        packet = self._packet(asked)
        if not asked.content["last"]:
            answer = self._newcomer.answer(packet)
            return Reply.to(asked, content={"metrics": {}}, body=answer.to_bytes())
        model, metrics = self._newcomer.learn(packet)
        if self.keeper is None:
            save_tensors(self._root.parent / f"{self._root.name}-joined.safetensors", model)
        else:
            self.keeper.joined(self, self._newcomer, model, metrics)
        return Reply.to(asked, content={"metrics": _leaving(metrics)})

    def _folder_of(self, asked: Request, more: str = "") -> Path:
        """Returns a federation's folder; joining has another folder than training.

        Raises:
            Refusal: If its name could lead outside the folder.
        """
        job = asked.content["job"]
        if not re.fullmatch(r"\w{1,64}", job):
            raise Refusal("job")
        if self.keeper is None:
            return self._root
        return self._root.with_name(f"{self._root.name}-{job[:8]}{more}")

    @property
    def _module(self) -> FederatedModule:
        assert self.module is not None
        return self.module

    def _spent(self) -> dict[str, Any]:
        return {"steps": self.client.steps_done, "passes": list(self.client.passes)}

    def _packet(self, asked: Request) -> Packet:
        try:
            return Packet.from_bytes(asked.body, self._module.federation.most_elements)
        except CodecError as error:
            self.log.warning("A message was refused: %s", error)
            raise Refusal("message") from error

    def _turn_to(self, asked: Request) -> None:
        """Restores the kept round that a request names, and starts the request's round and attempt.

        Raises:
            Refusal: If the request is outdated, or the round is not kept.
        """
        turn = (asked.round, asked.attempt)
        if turn < self._latest:
            raise Refusal("stale")
        if turn == self._latest:
            if self._phases and asked.at != self._base:
                raise Refusal("order")
            if not self._phases:
                self._go_to(asked.at)
            return
        self._go_to(asked.at)
        self._latest, self._phases, self._half = turn, [], None
        self._replies.clear()

    def _go_to(self, number: int) -> None:
        """Restores the state of a kept round."""
        if number == self._here:
            return
        if number not in (*self._states, *self.rounds()):
            raise Refusal("round")
        kept = self._states.get(number) or self._read(number)
        self.client.load_state_dict(kept["client"])
        self.client.steps_done = kept["steps"]
        self.client.passes = Passes(*kept["passes"])
        self._here = number

    def _state(self, number: int) -> Kept:
        """The client's state, without copies: tensors are replaced, never changed."""
        client = self.client
        kept = {g: map_state(state, lambda t: t) for g, state in client.state_dict().items()}
        return {"site": self.name, "round": number, "client": kept, **self._spent()}

    def rounds(self) -> list[int]:
        """Returns the complete rounds in the folder."""
        paths = (p for p in sorted(self.folder.glob("round_*.ckpt")) if is_whole(p))
        return [int(p.stem.removeprefix("round_")) for p in paths]

    def _file(self, number: int) -> Path:
        return self.folder / f"round_{number:05d}.ckpt"

    def _read(self, number: int) -> Kept:
        path = self._file(number)
        kept: Kept = untrusted.read_checkpoint(path)
        try:
            if schemas.fit(kept, _Round)["site"] != self.name:
                raise ValueError(kept["site"])
        except ValueError as error:
            raise CheckpointError(f"{path} is not a round of {self.name} ({error}).") from error
        return kept


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
    """A site's components, from a configuration: its data, the model, and the agreement.

    Args:
        config: The composed configuration, with the site's keys (data, device, folders).
        name: This site's client.
        sites: All sites, in order, if the data belong to this site only; None if the data of all
            sites are here, as in a rehearsal, and the agreed partition divides them.
        policy: What the site allows.

    Attributes:
        data: The data, once they are read.
        task: The task, after the agreement.

    Raises:
        VetoError: If it does not allow what the configuration says.
    """

    config: RunDescription
    name: str
    sites: Sequence[str] | None = None
    policy: Policy = NO_LIMITS
    data: FederatedDataModule = field(init=False, repr=False)
    task: TaskModule = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_study(self.policy, self.config)
        self._greeting: Greeting | None = None
        self._start = start.Start()
        self._statements: list[bytes | None] = []
        self._answers: list[bytes] = []

    @classmethod
    def of(cls, agreed: agreement.Agreed, file: agreement.SiteFile) -> ConfiguredSite:
        """Makes a site from the agreement and its file.

        Raises:
            MedfedError: If they contradict each other.
        """
        file.check_approved(agreed)
        sites = None if agreed.cut else agreed.sites
        return cls(file.config(agreed), file.site, sites, file.policy)

    @property
    def rounds(self) -> int:
        """How many rounds are agreed on."""
        return self.config.rounds

    def greeting(self) -> Greeting:
        """Reads configuration and data once; returns the facts that all sites must share."""
        if self._greeting is None:
            agreed = agreement.fingerprints(self.config.values)
            self._start, self.config = experiment.read_start(self.config)
            data = assembly.unread_data(self.config)
            if self.sites is not None:
                data.partition = OwnData(data.partition, self.name, self.sites)
            self._agreeing: Generator[bytes, bytes, None] = setup_alone(data, self.name)
            self._statements = [next(self._agreeing, None)]
            check_data(self.policy, self.config, data, self.name, tells=self._statements != [None])
            versions = versions_here(str(self.config.trainer.accelerator))
            self.data, self._greeting = data, Greeting(agreed, data.facts(), versions)
            self._settle()
        return self._greeting

    def agree(self, number: int, answer: bytes) -> bytes | None:
        """Returns the site's messages about its data, for the coordinator.

        Args:
            number: How many messages it has already sent.
            answer: The coordinator's answer to the last message; empty at first.

        Returns:
            The next message; None after the last one, when the data are read.

        Raises:
            DataError: If the coordinator's answer differs from an earlier one.
        """
        self.greeting()
        if number and self._answers[number - 1 : number] not in ([], [answer]):
            raise DataError(
                "The coordinator's answer about the columns of all sites has changed; start the "
                "site again."
            )
        if number == len(self._statements) and number:
            self._answers.append(answer)
            try:
                self._statements.append(self._agreeing.send(answer))
            except StopIteration:
                self._statements.append(None)
            self._settle()
        if number >= len(self._statements):
            raise DataError("The coordinator has left out an answer; start it again.")
        return self._statements[number]

    def _settle(self) -> None:
        """Builds the model, once the data are read."""
        if self._statements[-1] is not None:
            return
        assembly.say_data(self.data)
        client = self.data.clients[self.name]
        self.policy.check_statistics(build(self.config.algorithm).summaries(client))
        self.config, self.task, *_ = experiment.begin(self.config, self.data, self._start)
        entries = float_entries(self.task.network)
        self._initial: Tensors = {n: t.detach().clone() for n, t in entries.items()}
        facts, absent = facts_of(self.config, self.data), self.data.absent
        self._facts = Facts(client.num_samples, digest(self._initial), facts, absent)

    @property
    def exchanged(self) -> tuple[list[bytes], list[bytes]]:
        """The site's messages about its data, and the answers."""
        return [one for one in self._statements if one is not None], list(self._answers)

    def facts(self) -> Facts:
        """Returns the facts about the model, after the agreement."""
        return self._facts

    def check_cohort(self, cohort: Sequence[str]) -> None:
        """Refuses a round with these sites if the site's policy does not allow it.

        Raises:
            VetoError: If one site has more than the largest share of this round's samples.
        """
        self.policy.check_sizes({name: self._samples[name] for name in cohort})

    def join(self, everyone: Sequence[ClientInfo]) -> FederatedModule:
        """Returns the federation at this site: with this client only, in its initial state.

        Args:
            everyone: All clients, in order.
        """
        self._samples = {c.id: c.num_samples for c in everyone}
        self.check_cohort([c.id for c in everyone])
        task, config = self.task, self.config
        initial = parted(task.network, self._initial)
        with torch.no_grad():
            for name, tensor in float_entries(task.network).items():
                tensor.copy_(initial[name])
        module = SiteModule(task, *federating.federate(config, self.data, task, everyone))
        module.chooser = experiment.chooser_of(config, task)
        # A Trainer, which runs nothing here, gives precision and device.
        quiet = {"progress": False, "logger": loggers.NO_LOGGER}
        trainer = experiment.trainer_of(config.replacing(quiet), [])
        trainer.strategy.connect(module)
        module.trainer = trainer
        module.setup("fit")
        module.to(trainer.strategy.root_device)
        module.on_fit_start()
        return module


def facts_of(config: RunDescription, data: FederatedDataModule) -> dict[str, Any]:
    """Returns the facts of the data that all sites must share and the coordinator needs.

    Args:
        config: The configuration, facts of the data filled in.
        data: The site's data.
    """
    (client,) = data.clients.values()
    return {key: getattr(config.facts, key) for key in FACTS} | {
        "personal": config.model.get("personal"),
        "shape": list(client.train_inputs(1).shape[1:]),
        "channels": list(data.channel_names),
        "labels": list(data.class_names),
    }


def versions_here(accelerator: str) -> dict[str, str]:
    """Returns the versions of an end, on which the bits of a run depend.

    Args:
        accelerator: The trainer's.
    """
    packages = versions()
    gpu = accelerator in ("gpu", "cuda") and torch.cuda.is_available()
    return {
        **{name: packages[name] for name in ("medfed", "torch", "monai")},
        "device": torch.cuda.get_device_name() if gpu else accelerator,
        "commit": commit_here(),
    }


def _leaving(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: scores.rounded(value) for name, value in metrics.items()}
