"""A mistake in a method, penalty or codec of one's own is said in one sentence that names it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from medfed.commands.sentences import sentence_of
from medfed.config.allowed import _active, add_plugin_folders
from medfed.federation.wire.channel import Channel
from medfed.federation.wire.codecs.base import Codec
from medfed.method import Message
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.fedper import FedPer
from medfed.standalone.errors import ConfigError, MedfedError
from tests.federation.test_inputs import federate


@dataclass(frozen=True)
class Own(FedAvg):
    """FedAvg with one function that returns another value."""

    function: str = "fit"
    makes: object = None  # of the right value

    def _made(self, function, right):
        return self.makes(right) if function == self.function else right

    def init(self, weights, split, clients):
        if self.function == "kept":  # no message holds it
            server, state = super().init(weights, split, clients)
            return server, {**state, "n": {"n": torch.ones(1)}}
        return self._made("init", super().init(weights, split, clients))

    def phases(self, round):
        return self._made("phases", super().phases(round))

    def weights(self, server, clients):
        return self._made("weights", super().weights(server, clients))

    def adapted(self, split, network):
        return self._made("adapted", super().adapted(split, network))

    def completed(self, client, model):
        return self._made("completed", super().completed(client, model))

    def fit(self, client, message):
        if self.function == "state":
            client.state.update(self.makes)
        if self.function == "received":
            self.makes(message.parts)
        if self.function == "kept":
            self.makes(client.state)
        return self._made("fit", super().fit(client, message))

    def local_steps(self, client, start):
        how = self.makes if self.function == "train" else {}
        start = how.pop("start", lambda weights: weights)(start) if "start" in how else start
        return client.train(start, **how)

    def broadcast(self, server, client):
        if self.function == "broadcasting":
            self.makes(server)
        return self._made("broadcast", super().broadcast(server, client))

    def personal_model(self, client, message):
        return self._made("personal_model", super().personal_model(client, message))

    def round(self, server, cohort, round):
        if self.function == "no generator":
            return server
        return self._round(server, cohort, round)

    def _round(self, server, cohort, round):
        rest = super().round(server, cohort, round)
        try:
            replies = yield self._made("outbox", next(rest))
            if not replies:
                return server
            if self.function == "serving":
                self.makes(server)
            rest.send(replies)
        except StopIteration as stop:
            return self._made("round", stop.value)


def lacking(reply):
    """A reply without the first tensor of its part."""
    return replace(reply, parts={"shared": dict([*reply.parts["shared"].items()][1:])})


def changed(reply, change):
    """A reply with other tensors."""
    parts = {p: {n: change(t) for n, t in named.items()} for p, named in reply.parts.items()}
    return replace(reply, parts=parts)


def halve(groups):
    """Changes tensors in place."""
    for tensor in (t for named in groups.values() for t in named.values()):
        tensor.copy_(tensor / 2)


MISTAKES = {
    "broadcast, nothing": ("broadcast", lambda _: None, "Own.broadcast returns None; it must be"),
    "broadcast, parts": ("broadcast", lambda m: m.parts, "Own.broadcast returns a dict; it must"),
    "broadcast, in place": ("broadcasting", halve, "Own changes the group shared of the server's"),
    "state, in place": ("kept", halve, "Own changes the group .* of the client's state in place"),
    "round, in place": (
        "serving",
        halve,
        "Own changes the group .* of the server's state in place",
    ),
    "state, graph": (
        "state",
        {"n": {"n": 2 * torch.ones(1, requires_grad=True)}},
        "Own.fit leaves tensors that remember their computation in 'n' of a state; keep tensor.det",
    ),
    "fit, in place": ("received", halve, "Own changes the part shared of a message in place"),
    "fit, undeclared": (
        "fit",
        lambda r: replace(r, parts={**r.parts, "more": {"x": torch.ones(1)}}),
        r"Own.fit sends \['more'\], which may not leave a client: see parts_sent",
    ),
    "fit, kind": ("fit", lambda r: replace(r, kinds={"shared": "updat"}), "kinds=.* needs a part"),
    "outbox, phase": (
        "outbox",
        lambda o: {c: replace(m, phase="trian") for c, m in o.items()},
        "Own sent phase 'trian' to a where phase 'fit'",
    ),
    "outbox, stranger": ("outbox", lambda o: {**o, "x": o["a"]}, "sent phase 'fit' to x where"),
    "model, whole numbers": (
        "personal_model",
        lambda m: {n: t.int() for n, t in m.items()},
        "personal_model returns 0.weight as torch.int32",
    ),
    "fit, nothing": ("fit", lambda _: None, "Own.fit returns None; it must be a Message"),
    "fit, parts": ("fit", lambda r: r.parts, "Own.fit returns a dict; it must be a Message"),
    "fit, phase": ("fit", lambda r: Message("fitt", r.parts), "phase 'fit' with phase 'fitt'"),
    "fit, NumPy": ("fit", lambda r: changed(r, torch.Tensor.numpy), "a ndarray as shared/"),
    "init, nothing": ("init", lambda _: None, "Own.init must return two states, not None"),
    "init, one": ("init", lambda s: s[0], "Own.init must return two states, not a dict"),
    "init, number": ("init", lambda s: ({"n": {"": 1}}, s[1]), "Own.init leaves an int in 'n'"),
    "state, number": ("state", {"n": 1}, "Own.fit leaves an int in 'n' of a state"),
    "state, list": ("state", {"n": [1, 2]}, "Own.fit leaves a list in 'n' of a state"),
    "state, deep": ("state", {"n": {"a": {}}}, "Own.fit leaves a dict in 'n' of a state"),
    "train, typing error": (
        "train",
        {"penalyt": lambda _: 0.0},
        r"Client.train: penalyt is unknown \(did you mean penalty",
    ),
    "penalty, two arguments": (
        "train",
        {"penalty": lambda weights, batch: 0.0},
        "Client.train: penalty must take 1 argument, and the function <lambda> does not: missing",
    ),
    "after step, none": (
        "train",
        {"after_step": lambda: None},
        "after_step must take 2 arguments, and the function <lambda> does not: too many",
    ),
    "update, unknown": ("train", {"update": "sharde"}, "update='sharde' is unknown .did you mean"),
    "start, shape": (
        "train",
        {"start": lambda w: {**w, "0.bias": w["0.bias"][:1]}},
        r"0.bias of shape \[1\], and the network's is \[3\]",
    ),
    "phases, nothing": ("phases", lambda _: None, r"Own.phases returns None; it is a tuple of"),
    "phases, text": ("phases", lambda _: "fit", r"Own.phases returns 'fit'; it is a tuple of"),
    "phases, none": ("phases", lambda _: (), r"Own.phases returns \(\); it is a tuple of"),
    "phases, one more": (
        "phases",
        lambda _: ("fit", "more"),
        "ended round 1 before its phase more",
    ),
    "fit, lacks a part": (
        "fit",
        lambda r: replace(r, parts={}, kinds={}),
        "The method reads the part shared of replies, and not every client has sent it",
    ),
    "weights, nothing": ("weights", lambda _: None, "Own.weights returns None for a, b; it is one"),
    "weights, one": ("weights", lambda w: w[:1], "Own.weights returns .9.0. for a, b; it is one"),
    "weights, 0": (
        "weights",
        lambda w: [0.0 for _ in w],
        "Own.weights returns .0.0, 0.0. for a, b",
    ),
    "server, no sizes": (
        "round",
        lambda s: {"shared": s["shared"]},
        "Own weighs clients by their samples, and the server's state has none of a",
    ),
    "completed, part": (
        "completed",
        lambda m: {"0.bias": m["0.bias"]},
        "What a client trains or evaluates lacks 0.weight",
    ),
    "adapted, nothing": ("adapted", lambda _: None, "What adapted returns must be an Algorithm"),
    "no generator": ("no generator", None, "Own.round returns a dict, but is a generator"),
    "outbox, nothing": ("outbox", lambda _: None, "Own.round yields None; it yields {client"),
    "outbox, list": ("outbox", lambda o: [*o.values()], "Own.round yields a list; it yields"),
    "outbox, empty": (
        "outbox",
        lambda _: {},
        "no client has trained in round 1",
    ),
    "outbox, parts": ("outbox", lambda o: {"a": o["a"].parts}, "Own.round yields for a a dict"),
    "server, nothing": ("round", lambda _: None, "Own.round leaves None as a state, which is"),
    "server, list": ("round", lambda s: {**s, "n": [1]}, "Own.round leaves a list in 'n'"),
    "steps, none": ("train", {"steps": 0}, "takes steps=1 or more, not 0"),
    "steps, half": ("train", {"steps": 1.5}, "takes steps=1 or more, not 1.5"),
    "start, part": ("train", {"start": lambda w: {"0.bias": w["0.bias"]}}, "0.weight, 2.weight"),
    "start, none": (
        "train",
        {"start": lambda _: None},
        "has None as a model, which is {name: tensor}",
    ),
    "model, nothing": ("personal_model", lambda _: None, "personal_model has None as a model"),
    "model, shape": (
        "personal_model",
        lambda m: {n: t.flatten() for n, t in m.items()},
        r"0.weight of shape \[12\], and the network's is \[3, 4\]",
    ),
    "penalty, number": (
        "train",
        {"penalty": lambda w: sum(t.square().sum().item() for t in w.values())},
        "penalty has no gradient",
    ),
    "penalty, detached": (
        "train",
        {"penalty": lambda w: sum(t.detach().square().sum() for t in w.values())},
        "penalty has no gradient",
    ),
    "penalty, vector": ("train", {"penalty": lambda w: w["0.bias"]}, r"penalty has shape \[3\]"),
    "penalty, nothing": ("train", {"penalty": lambda _: None}, "penalty returns None"),
    "term, detached": (
        "train",
        {"batch_penalty": lambda batch, w, forward: forward(w).detach().square().mean()},
        "batch_penalty has no gradient",
    ),
}


@pytest.mark.parametrize(("function", "makes", "says"), MISTAKES.values(), ids=MISTAKES)
def test_a_method_of_ones_own(function, makes, says):
    makes = dict(makes) if isinstance(makes, dict) else makes
    with pytest.raises(ConfigError, match=says):
        federate(algorithm=Own(function=function, makes=makes), rounds=2, steps=2).losses("test")


def test_a_reply_lacks_a_tensor():
    with pytest.raises(ValueError, match=r"0\.weight is in one summand alone, so"):
        federate(algorithm=Own(makes=lacking), steps=1)


class Halves(FedPer):
    """FedPer whose evaluation changes the personal part that training goes on from."""

    def personal_model(self, client, message):
        halve(client.state)
        return super().personal_model(client, message)


def test_an_evaluation_changes_no_state():
    done = federate(algorithm=Halves(), personal="2.*")
    with pytest.raises(
        ConfigError, match=r"Halves changes the group .* of the client's state in pl"
    ):
        done.model("a")


def test_a_penalty_may_be_nothing_for_some_steps():
    plain = federate(algorithm=Own(function=""), steps=2)
    warm = federate(algorithm=Own(function="train", makes={"penalty": lambda _: 0.0}), steps=2)
    for name, tensor in plain.model("a").state_dict().items():
        assert torch.equal(tensor, warm.model("a").state_dict()[name])


class Mine(Codec):
    """Two bytes per element, by a function that a test gives."""

    codes = (254,)
    pack = staticmethod(lambda values: [values.astype("<f2").tobytes()])

    def _pack(self, values, rng):
        return type(self).pack(values)

    def _unpack(self, payload, length):
        return payload.array("<f2", length).astype("f4")


PACKS = {
    "bytes": (lambda values: values.astype("<f2").tobytes(), "must return a list of pieces"),
    "text": (lambda values: ["abc"], "must return a list of pieces"),
    "nothing": (lambda values: None, "must return a list of pieces"),
}


@pytest.mark.parametrize(("pack", "says"), PACKS.values(), ids=PACKS)
def test_a_codec_of_ones_own(pack, says, monkeypatch):
    assert federate(channel=Channel(up=Mine()), steps=1)
    monkeypatch.setattr(Mine, "pack", staticmethod(pack))
    with pytest.raises(MedfedError, match=f"Client a, round 1, phase fit: .*{says}"):
        federate(channel=Channel(up=Mine()), steps=1)


def test_a_codec_that_changes_its_input_changes_no_tensor(monkeypatch):
    def halved(values):
        values *= 0.5
        return [values.astype("<f2").tobytes()]

    monkeypatch.setattr(Mine, "pack", staticmethod(halved))
    sent = torch.ones(3)
    assert Mine().decode(Mine().encode(sent)).tolist() == [0.5] * 3
    assert sent.tolist() == [1.0] * 3


@pytest.mark.parametrize("way", ["int8", Mine, 8])
def test_a_channel_takes_codecs(way):
    with pytest.raises(ConfigError, match=r"Channel\(down=\) takes a codec or a Link, not"):
        Channel(down=way)


def test_a_command_names_the_line_of_a_plugin(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [])
    before = [*_active]
    source = "def fit():\n    return {}['model']\ndef bad(refuse):\n    refuse()\n"
    source += "def own(error):\n    raise error\n"
    (tmp_path / "mine_that_fails.py").write_text(source)

    def refuse():
        raise ConfigError("It has None as a model.")

    try:
        add_plugin_folders([tmp_path])
        compiled = compile((tmp_path / "mine_that_fails.py").read_text(), tmp_path / "m.py", "exec")
        names = {}
        exec(compiled, names)
        with pytest.raises(KeyError) as caught:
            names["fit"]()
        said = sentence_of(caught.value, tmp_path)
        with pytest.raises(ConfigError) as caught:
            names["bad"](refuse)
        refused = sentence_of(caught.value, tmp_path)
        with pytest.raises(ConfigError) as caught:
            names["own"](ConfigError("Set alpha."))
        assert sentence_of(caught.value, tmp_path) == "Set alpha."
    finally:
        _active[:] = before
    assert said.startswith(f"{tmp_path / 'm.py'}, line 2, in fit: KeyError: 'model'; the traceback")
    assert "report it" not in said
    assert refused == f"{tmp_path / 'm.py'}, line 4, in bad: It has None as a model."
    assert "please report it" in sentence_of(KeyError("model"), tmp_path)
