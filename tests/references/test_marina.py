"""MARINA against Algorithm 1 in NumPy, with a codec that loses most of every difference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from medfed.common.tensors import flatten
from medfed.config.compose import build, described
from medfed.federation.reference import run_reference
from medfed.federation.wire.channel import Channel, Link
from medfed.federation.wire.codecs.dense import Dense
from medfed.federation.wire.codecs.sparse import RandomK
from medfed.personalize.fedsgd import FedSGD
from medfed.personalize.marina import MARINA
from medfed.run.channel import build_channel
from medfed.standalone.errors import ConfigError
from tests.references.linear_net import ALL, gradient
from tests.references.pairing import assert_same, run_both_ways
from tests.references.quadratics import FEATURES, Quadratics, global_model
from tests.toys import toy_federation


class Told(Channel):
    """Differences lose two entries of three; what clients say and what is understood is kept."""

    def __init__(self, fraction: float = 0.34) -> None:
        up = Link(RandomK(fraction), parts=["difference"])
        super().__init__(up, Dense("float64"))
        self._others["up"] = Link(Dense("float64"))
        self.said, self.understood = [], []

    def encode(self, message, direction, *rest):
        if direction == "up":
            self.said.append(message)
        return super().encode(message, direction, *rest)

    def decode(self, packet, direction, *rest):
        found = super().decode(packet, direction, *rest)
        if direction == "up":
            self.understood.append(found[0])
        return found


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_equals_algorithm_1(weighting):
    """Given what the codec makes of each difference."""
    method, channel = MARINA(full=0.3, weighting=weighting), Told()
    rounds = 7
    federation, p = run_both_ways(
        method, rounds=rounds, batch=4, lr=0.1, momentum=0.9, channel=channel
    )
    heads = [method.phases(t) == ("full",) for t in range(rounds)]
    assert heads[0]
    assert 1 < sum(heads) < rounds
    w, before, g = p.initial, None, None
    said, understood = iter(channel.said), iter(channel.understood)
    for full in heads:
        sent = []
        for n in range(len(p.clients)):
            new, raw, decoded = gradient(w, *p.clients[n]), next(said), next(understood)
            if full:
                assert_same(raw.parts["gradient"], new, 1e-10)
                sent.append(new)
            else:
                old = gradient(before, *p.clients[n])
                assert_same(raw.parts["difference"], {k: new[k] - old[k] for k in ALL}, 1e-10)
                sent.append({k: t.numpy() for k, t in decoded.parts["difference"].items()})
                kept = flatten(decoded.parts["difference"]).count_nonzero()
                assert kept <= 0.4 * flatten(raw.parts["difference"]).numel()
        mean = p.average(list(range(len(sent))), sent)
        g = mean if full else {k: g[k] + mean[k] for k in ALL}
        before, w = w, {k: w[k] - p.lr * g[k] for k in ALL}
    assert_same(federation.server["shared"], w, 1e-10)
    assert_same(federation.server["gradient"], g, 1e-10)


def test_without_a_codec_it_is_gradient_descent():
    estimate, _ = run_both_ways(MARINA(full=0.2), rounds=6)
    plain, _ = run_both_ways(FedSGD(), rounds=6)
    assert_same(estimate.server["shared"], plain.server["shared"], 1e-12)


def test_comes_to_the_optimum_where_compressed_gradients_do_not():
    problem = Quadratics()
    method = MARINA(full=1 / FEATURES)
    found = global_model(problem.run(method, 80, steps=1, lr=0.35, channel=Told()))
    np.testing.assert_allclose(found, problem.optimum(), atol=1e-7)
    lossy = Channel(Link(RandomK(0.34)), Dense("float64"))
    stalled = global_model(problem.run(FedSGD(), 80, steps=1, lr=0.35, channel=lossy))
    assert np.abs(stalled - problem.optimum()).max() > 0.05


@pytest.mark.parametrize("policy", ["averaged", "local"])
def test_statistics_follow_the_batches(policy):
    """One round, in which no parameter moves, however large the step that follows it is."""
    ends = []
    for lr in (0.0, 0.5):
        _, federation, local = toy_federation(MARINA(), rounds=1, buffers=policy, lr=lr)
        start = local.model.initial()
        run_reference(federation, 1)
        ends.append([federation.personal_model(c) for c in federation.ids])
    names = sorted(local.split.buffers)
    for still, moved in zip(*ends, strict=True):
        assert all(torch.equal(still[n], moved[n]) for n in names)
        assert all(not torch.equal(moved[n], start[n]) for n in names)
    first, *others = ends[1]
    alike = all(torch.equal(first[n], other[n]) for n in names for other in others)
    assert alike == (policy == "averaged")


def test_what_is_not_defined_is_refused():
    with pytest.raises(ConfigError, match=r"algorithm\.full must be in \(0, 1\], not 0"):
        MARINA(full=0.0)
    with pytest.raises(ConfigError, match="MARINA has one model for all"):
        MARINA(personal="task")
    with pytest.raises(ConfigError, match="mask_aware is not for MARINA"):
        MARINA(mask_aware=True)
    with pytest.raises(ConfigError, match="MARINA needs all clients in every round"):
        run_both_ways(MARINA(), fraction=0.5)


CODECS = {
    "algorithm=adiana codec.up=stc": "ADIANA compresses its messages itself",
    "algorithm=marina codec.up=topk": "MARINA converges only with an unbiased codec",
    "algorithm=marina codec.up=qsgd channel.up.feedback=true": "only with an unbiased codec",
    "algorithm=marina codec.up=qsgd channel.up.parts=[gradient]": "encodes nothing but difference",
}


def test_a_codec_encodes_differences_alone(subtests):
    """On gradients, too, the method would stall without a word."""
    for line in ("codec.up=randomk", "codec.up=qsgd channel.up.parts=[difference]"):
        config = described(["algorithm=marina", *line.split()], folder=".")
        up = build_channel(config, build(config.algorithm), 3).links["up"]
        sent = [up.compresses("x", part) for part in ("gradient", "difference")]
        assert (sent, up.feedback) == ([False, True], False)
    for line, sentence in CODECS.items():
        config = described(line.split(), folder=".")
        method = build(config.algorithm)
        with subtests.test(line), pytest.raises(ConfigError, match=sentence):
            build_channel(config, method, 3)
    for name in ("marina", "adiana"):  # rounding is no loss that adds up
        config = described([f"algorithm={name}", "codec.up=bf16"], folder=".")
        assert build_channel(config, build(config.algorithm), 3).links["up"].parts is None
