"""Attacks the messages and models of a finished run, on the run's data and in full precision.

The first rounds are replayed, and the rows are counted that follow exactly from messages. Then
federations are trained by the run's keys on random halves of each client's training patients, from
the run's initial weights: the shadow models of an attack on membership (see
:mod:`medfed.functional.leakage`).
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from medfed.common.console import Steps, levels, say, short, wide_console
from medfed.common.scores import interval
from medfed.common.seeding import derive_seed, torch_rng
from medfed.common.tensors import Tensors, flatten, select
from medfed.config.description import RunDescription
from medfed.datamodules.client_data import ClientData
from medfed.datamodules.plans import trained_patients, with_patients
from medfed.datamodules.splits import Split
from medfed.federation.federation import Federation
from medfed.federation.round import Round
from medfed.federation.wire.packet import Message
from medfed.functional import leakage
from medfed.functional.kmeans import initial_centers
from medfed.functional.leakage import Bools
from medfed.functional.quantize import quantize
from medfed.functional.scores import Floats
from medfed.functional.sketches import sketch_vector
from medfed.models.networks.canonical import Canonical
from medfed.models.task import TaskModule
from medfed.personalize.quantized_base import layer_weights
from medfed.records.folder import RunFolder
from medfed.reports.charts import Picture, Row, forest
from medfed.reports.report import rendered
from medfed.run.experiment import Experiment
from medfed.run.federating import federate
from medfed.run.finished import reopen_selected
from medfed.standalone.files import filled, write_json, write_text, writing

BATCHES = (1, 4, 16)
BITS = (4, 2)
FEWEST, MOST = 8, 32  # shadow models, if their number is not set
LEAST = 4  # training patients of a client that is attacked
DESCRIBE = ("sketch", "membership")  # parts of messages that describe a client
Attack = tuple[Floats, Bools]
"""(A, P) the scores of patients in A attacks, and which are members."""
Sure = dict[tuple[str, str], tuple[Floats, Floats]]
"""By model and client, how sure the model is of each training and of each test patient."""


@dataclass(frozen=True)
class LeakedRows:
    """Training rows that follow from the messages of a client, at one setting."""

    client: str
    own: bool  # whether the setting is the run's, otherwise one step per round
    batch: int  # rows of a batch
    steps: int  # gradient steps of a round
    used: int  # rows that the messages are computed from, over all rounds
    found: int  # how many of them the messages give away


@dataclass(frozen=True)
class Guess:
    """How well an attack tells a client's training patients from others by a model."""

    model: str  # ``shared model``, ``personal model``, or ``personal model, 4 bits``
    client: str  # the client, or ``all``
    # Whether the run's model is attacked, and its test patients are the others; otherwise models
    # trained alike on halves of the training patients.
    of_run: bool
    patients: int  # training patients
    others: int  # test patients of the run, otherwise 0
    auc: tuple[float, float, float]  # the area under the ROC curve and its interval
    # The share of members that are recognised at 1 % false positives, and its interval.
    hits: tuple[float, float, float]
    allowed: int  # how many false positives that is


@dataclass(frozen=True)
class Fingerprint:
    """How often a part of a client's messages points to the client."""

    part: str  # ``sketch`` or ``membership``
    clients: int  # how many there are; 1 in so many is chance
    pairs: int  # pairs of federations on complementary halves of the patients
    # The share of the clients that are recognised, and its interval.
    rate: tuple[float, float, float]


@dataclass(frozen=True)
class Audit:
    """What the messages and models of a run give away."""

    summary: dict[str, Any]  # of the run, as ``summary.json`` holds it
    rounds: int  # how many first rounds were replayed
    tolerance: float  # the largest distance to a row, as a share of its norm
    layer: str  # the network's first layer
    shadows: int  # federations trained on halves of the patients
    rows: tuple[LeakedRows, ...]  # by setting and client; empty if the attack does not apply
    guesses: tuple[Guess, ...]  # by model and client
    fingerprints: tuple[Fingerprint, ...]  # by part
    notes: tuple[str, ...] = ()  # sentences about what was not measured, and why


def audit(
    folder: Path,
    shadows: int | None = None,
    minutes: float = 5.0,
    rounds: int = 3,
    tolerance: float = 0.01,
) -> Audit:
    """Measures what the messages and the models of a run give away."""
    summary = RunFolder(folder).summary
    last = summary["rounds"] if summary["selected_round"] is None else summary["selected_round"] + 1
    rounds = min(rounds, summary["rounds"])
    audited = _Audited(reopen_selected(folder))
    with levels({"medfed": logging.ERROR}):  # the run itself has logged it
        layer, rows = audited.replayed(rounds, tolerance)
        each = last * audited.seconds / rounds
        if shadows is None:
            shadows = min(MOST, max(FEWEST, int(60 * minutes / each)))
        shadows += shadows % 2  # pairs of complementary halves
        say(
            wide_console(),
            f"Trains {shadows} federations of {last} rounds on halves of the patients: about "
            f"{shadows * each / 60:.1f} minutes; shadows=NUMBER or minutes=NUMBER changes this.",
        )
        guesses, fingerprints = audited.shadowed(shadows, last)
    sections = tuple(rows), tuple(guesses), tuple(fingerprints), tuple(audited.notes)
    return Audit(summary, rounds, tolerance, layer, shadows, *sections)


class _Audited:
    """A run that is attacked."""

    def __init__(self, experiment: Experiment) -> None:
        self.config, self.task = experiment.config, experiment.task
        self.federation, self.local = experiment.module.federation, experiment.module.local
        self.whole, self.data = experiment.data, experiment.data.clients
        self.start = next(iter(self.federation.clients.values())).weights
        self.notes: list[str] = []  # sentences about what is not measured
        self.seconds = 0.0  # the time of the replayed rounds at the run's settings

    def fresh(self, config: RunDescription, clients: Sequence[ClientData]) -> Federation:
        """Returns a federation at the run's initial weights, on its device."""
        self.local.model.load(self.start)
        data = copy.copy(self.whole)
        data.clients = {client.id: client for client in clients}
        federation, _ = federate(config, data, self.task)
        federation.to(self.local.model.device)
        return federation

    def replayed(self, rounds: int, tolerance: float) -> tuple[str, list[LeakedRows]]:
        """Returns the first layer's kind, and the rows that follow from messages, if any can."""
        layer, shape = _first_layer(self.task, next(iter(self.data.values()))), None
        if isinstance(layer, nn.Linear) and layer.bias is not None and not is_parametrized(layer):
            shape = layer.weight.shape
        if self.federation.channel.sums is not None:
            self.notes.append("The server sees sums over clients; these are not searched for rows.")
        single = self.config.replacing({"local.steps": 1, "local.accumulate": 1})
        counts: list[LeakedRows] = []
        for size in (0, *BATCHES) if shape else (0,):
            if size == 1 and self.local.model.normalises:
                continue  # a layer that normalises batches cannot learn from one row
            clients = [replace(c, batch_size=size or c.batch_size) for c in self.data.values()]
            began = time.monotonic()
            federation = self.fresh(single if size else self.config, clients)
            counts += _leaked_rows(federation, shape, rounds, tolerance, alone=not size)
            self.seconds = self.seconds or time.monotonic() - began
        return type(layer).__name__, counts if shape else []

    def models(self, federation: Federation, client: str) -> dict[str, Tensors]:
        """Returns the entries of a client's models, by what they are."""
        personal = federation.personal_model(client)
        models = {"personal model": personal}
        # A method may deliver nothing at the end, as Ditto, and send its model in every round.
        for known in (federation.server, federation.delivered(client).parts):
            if personal.keys() <= known.get("shared", {}).keys():
                models["shared model"] = select(known["shared"], personal)
        # As a bundle quantises: all weights but those of the first and the last layer.
        middle = layer_weights(self.task.network)[1:-1]
        done = isinstance(self.task.network, Canonical) or federation.centers(client)
        for bits in BITS if middle and not done else ():
            few = {
                n: quantize(t, initial_centers(t, bits)) for n, t in personal.items() if n in middle
            }
            models[f"personal model, {bits} bits"] = personal | few
        return models

    def kinds(self) -> list[str]:
        """Returns which models are attacked, and notes why others are not."""
        models = self.models(self.federation, next(iter(self.data)))
        if "shared model" not in models:
            self.notes.append("What the server sends is no whole model, so none is attacked.")
        elif torch.equal(*(flatten(models[f"{kind} model"]) for kind in ("shared", "personal"))):
            del models["personal model"]
            self.notes.append("All clients use the shared model; there is no personal one.")
        if not any("bits" in kind for kind in models):
            self.notes.append("No model is quantised further.")
        return list(models)

    def shadowed(self, shadows: int, rounds: int) -> tuple[list[Guess], list[Fingerprint]]:
        """Trains shadow federations, and attacks membership and descriptions by them."""
        kinds, positions = self.kinds(), {c: trained_patients(d) for c, d in self.data.items()}
        attacked = [c for c, places in positions.items() if len(places) >= LEAST]
        if lacking := len(self.data) - len(attacked):
            self.notes.append(f"{lacking} clients with fewer than {LEAST} patients are left out.")
        of_run = self._sure(self.federation, kinds)
        sure: list[Sure] = []
        described: list[dict[str, dict[str, Tensor]]] = []
        inside: dict[str, list[Bools]] = {c: [] for c in attacked}
        with Steps(shadows, verb="train") as progress:
            for number in range(shadows):
                clients, seed = dict(self.data), derive_seed(self.config.seed, "audit", number)
                for c in attacked:
                    draw = torch_rng(self.config.seed, "audit", number // 2, c)
                    order = torch.randperm(len(positions[c]), generator=draw)
                    half = (order < len(order) // 2) == bool(number % 2)
                    clients[c] = with_patients(self.data[c], positions[c][half])
                    inside[c].append(half.numpy())
                config = self.config.replacing({"seed": seed})
                federation = self.fresh(config, list(clients.values()))
                described.append(descriptions(federation, rounds))
                sure.append(self._sure(federation, kinds))
                progress.advance(f"federation {number + 1}")
        guesses: list[Guess] = []
        for kind, of_run_only in product(kinds, (False, True)):
            scores = {c: ([s[kind, c] for s in sure], np.stack(inside[c])) for c in attacked}
            attacks = {c: attack(*scores[c], of_run[kind, c], of_run_only) for c in attacked}
            guesses += self._guesses((kind, of_run_only), attacks)
        return guesses, list(compared(described))

    def _guesses(self, what: tuple[str, bool], attacks: dict[str, Attack]) -> Iterator[Guess]:
        """Returns the success of an attack at each client, and at all together."""
        if len(attacks) > 1:
            scores, members = (np.hstack(each) for each in zip(*attacks.values(), strict=True))
            attacks = {**attacks, "all": (scores, members)}
        for client, (scores, members) in attacks.items():
            if not members.all():  # there are test patients
                others = int((~members).sum()) if what[1] else 0
                patients = scores.shape[1] - others
                share, allowed = leakage.hits(scores, members)
                area = leakage.auc(scores, members, derive_seed(self.config.seed, *what, client))
                hits = share, *leakage.exact_interval(share, patients)
                yield Guess(what[0], client, what[1], patients, others, area, hits, allowed)

    def _sure(self, federation: Federation, kinds: Sequence[str]) -> Sure:
        sure: Sure = {}
        for client, data in self.data.items():
            models = self.models(federation, client)
            for kind in kinds:
                self.local.model.load(models[kind])
                sure[kind, client] = self._patients(data, "train"), self._patients(data, "test")
        return sure

    def _patients(self, data: ClientData, split: Split) -> Floats:
        """(P,) the mean confidence in the samples of each patient."""
        sums, counts = np.zeros((2, len(data.patients[split])))
        for batch in data.eval_batches(split):
            losses, case = self.task.losses(batch).double().cpu().numpy(), batch["case"].numpy()
            np.add.at(sums, case, leakage.confidence(losses))
            np.add.at(counts, case, 1)
        return np.asarray(sums[counts > 0] / counts[counts > 0])


def attack(
    sure: Sequence[tuple[Floats, Floats]],
    inside: Bools,
    target: tuple[Floats, Floats],
    of_run: bool,
) -> tuple[Floats, Bools]:
    """Attacks the run's model by the shadows without a patient, or each shadow by the others.

    Returns scores, and who is a member: (1, N + M) of the run's model, (S, N) of the shadows.
    """
    train, test = (np.stack(values) for values in zip(*sure, strict=True))
    if not of_run:
        return leakage.in_turn(train, inside), inside
    # No shadow was trained with a test patient. Half of them are left out all the same, so that the
    # two groups differ by membership alone.
    unused = (np.arange(len(test))[:, None] + np.arange(test.shape[1])) % 2 == 0
    every, left_out = np.hstack([train, test]), np.hstack([inside, unused])
    scores = leakage.lira(every, left_out, np.concatenate(target), without=True)
    return scores[None], np.arange(len(scores))[None] < train.shape[1]


def compared(described: Sequence[Mapping[str, Mapping[str, Tensor]]]) -> Iterator[Fingerprint]:
    """Compares what clients sent about themselves from complementary halves of their patients."""
    for part in described[0]:
        rates = []
        for pair in zip(described[::2], described[1::2], strict=True):
            known = [c for c in pair[0][part] if c in pair[1][part]]
            vectors = (torch.stack([of[part][c] for c in known]) for of in pair)
            rates.append(leakage.recognised(*vectors))
        rate, clients = float(np.mean(rates)), len(described[0][part])
        if clients > 1:
            interval = leakage.exact_interval(rate, clients)
            yield Fingerprint(part, clients, len(rates), (rate, *interval))


def _first_layer(task: TaskModule, data: ClientData) -> nn.Module:
    """Returns the first layer with weights that a network calls."""
    called: list[nn.Module] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, _: called.append(module))
        for module in task.network.modules()
        if is_parametrized(module) or (module._parameters and not isinstance(module, Canonical))
    ]
    task.losses({name: values[:1] for name, values in next(data.eval_batches("train")).items()})
    for hook in hooks:
        hook.remove()
    return called[0]


Messages = Mapping[str, Message]
"""Messages by client, as the server knows them."""


def played(federation: Federation, number: int) -> Iterator[tuple[Messages, Messages]]:
    """Runs a round, and yields what clients receive and reply in each phase."""
    current, goes_on, decode = Round(federation, number), True, federation.channel.decode
    while goes_on:
        received, replies = {}, {}
        for client in current.recipients:
            memory = federation.clients[client].memory["down"]
            received[client] = decode(current.sent[client], "down", memory)[0]
            packet = current.fit(client)
            replies[client] = decode(packet, "up", federation.memory["up"].get(client))[0]
            current.receive(client, packet)
        yield received, replies
        goes_on = current.close_phase()


def descriptions(federation: Federation, rounds: int) -> dict[str, dict[str, Tensor]]:
    """Runs all rounds, and returns what clients sent last about themselves, by part and client."""
    described: dict[str, dict[str, Tensor]] = {}
    for _, replies in chain.from_iterable(played(federation, n) for n in range(rounds)):
        for (client, reply), part in product(replies.items(), DESCRIBE):
            for tensor in reply.parts.get(part, {}).values():
                described.setdefault(part, {})[client] = sketch_vector(tensor.cpu())
    return described


def _leaked_rows(
    federation: Federation, shape: Sequence[int] | None, rounds: int, tolerance: float, alone: bool
) -> list[LeakedRows]:
    """Counts the training rows that follow from the messages of first rounds, by client."""
    clients, rows = federation.clients, dict[str, Tensor]()
    for c, local in clients.items() if shape else ():
        rows[c] = torch.cat([b["image"].flatten(1) for b in local.data.eval_batches("train")])
    # The server knows what it sent, and a reply that is a model is a change of that.
    known = {c: dict(local.weights) for c, local in clients.items()}
    used, leaked = dict.fromkeys(clients, 0), dict.fromkeys(clients, 0)
    for number in range(rounds):
        hit = {c: torch.zeros(len(of), dtype=torch.bool) for c, of in rows.items()}
        for received, replies in played(federation, number):
            for client in rows.keys() & replies.keys():
                for tensors in received[client].parts.values():
                    known[client] |= tensors
                changes: Tensors = {}
                for part in replies[client].parts.keys() - set(DESCRIBE):
                    is_state = replies[client].kind(part) == "state"
                    for name, tensor in replies[client].parts[part].items():
                        before = known[client].get(name) if is_state else None
                        changes[name] = tensor if before is None else tensor - before
                for name, weight in changes.items():
                    bias = changes.get(f"{name.removesuffix('weight')}bias")
                    if name.endswith("weight") and weight.shape == shape and bias is not None:
                        hit[client] |= leakage.rows_in_update(weight, bias, rows[client], tolerance)
        for c, of in rows.items():
            leaked[c] += (count := int(hit[c].sum()))
            used[c] += max(count, min(len(of), clients[c].steps * clients[c].data.batch_size))
    return [
        LeakedRows(c, alone, of.data.batch_size, of.steps, used[c], leaked[c])
        for c, of in clients.items()
    ]


_MOST = 40  # clients in a picture


def write_audit(audit: Audit, folder: Path) -> None:
    """Writes ``audit.html`` and ``audit.json``, and prints the sentences."""
    summary = {key: audit.summary[key] for key in ("name", "algorithm", "selected_round")}
    with writing(folder, "choose another out=FOLDER"):
        write_json(folder / "audit.json", {**asdict(audit), "summary": summary})
        write_text(folder / "audit.html", page(audit))
    say(wide_console(), *sentences(audit), *audit.notes, f"Page: {folder / 'audit.html'}")


def page(audit: Audit) -> str:
    """Returns the page as HTML that fetches nothing."""
    names = dict.fromkeys(g.model for g in audit.guesses)
    models = {name: [g for g in audit.guesses if g.model == name] for name in names}
    pictures = {}
    for model, guesses in models.items():
        alike = [Row(short(g.client), *g.auc) for g in guesses if not g.of_run][-_MOST:]
        pictures[model] = Picture(forest(alike, {"chance": 0.5}, "AUC"), f"From the {model}.")
    words = {"models": models, "pictures": pictures, "short": short, "text": _text}
    return rendered("audit.html", audit=audit, sentences=sentences(audit), **words)


def sentences(audit: Audit) -> list[str]:
    """Returns the answers in words: rows, membership, descriptions."""
    settings: dict[tuple[bool, int], list[LeakedRows]] = {}
    for row in audit.rows:
        settings.setdefault((row.own, 0 if row.own else row.batch), []).append(row)
    members = []
    for model in dict.fromkeys(g.model for g in audit.guesses):
        alike = [g for g in audit.guesses if g.model == model and not g.of_run]
        members.append((alike[-1], max(alike, key=lambda g: (g.client != "all", g.auc[0]))))
    words = {"settings": list(settings.values()), "members": members, "text": _text}
    template = Path(__file__).parent / "templates" / "audit.txt"
    return filled(template, of=audit, short=short, **words).strip().split("\n")


def _text(value: tuple[float, float, float]) -> str:
    return f"{value[0]:.3f} {interval(value[1:])}"
