"""HeteroFL against networks that are really narrow, in NumPy and in PyTorch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from medfed.models.networks.small import SmallCNN
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.heterofl import HeteroFL, alone, corner, leading
from medfed.standalone.errors import ConfigError
from tests.references.linear_net import Model
from tests.references.minibatch_steps import descend
from tests.references.pairing import assert_same, run_on_minibatches


def narrow(model: Model, hidden: int) -> Model:
    return {
        "body.weight": model["body.weight"][:hidden],
        "body.bias": model["body.bias"][:hidden],
        "head.weight": model["head.weight"][:, :hidden],
        "head.bias": model["head.bias"],
    }


@pytest.mark.parametrize("changes", [{}, {"fraction": 0.5, "momentum": 0.9, "lr": 0.01}])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_equals_narrow_networks(weighting, changes):
    """Hidden widths 4, 2, 1, 4: each entry is averaged over the networks that have it."""
    method = HeteroFL(widths=[1.0, 0.5, 0.25], weighting=weighting)
    federation, p = run_on_minibatches(method, rounds=6, **changes)
    hidden, w = [4, 2, 1, 4], p.initial
    for cohort in p.cohorts:
        total, share = ({k: np.zeros_like(t) for k, t in w.items()} for _ in range(2))
        for n in cohort:
            small = dataclasses.replace(p, initial=narrow(w, hidden[n]))
            end = descend(small, n, small.initial)
            for k, own in narrow(total, hidden[n]).items():  # views
                own += p.shares[n] * (end[k] - small.initial[k])
                narrow(share, hidden[n])[k] += p.shares[n]
        w = {k: t + total[k] / np.where(share[k] > 0, share[k], 1) for k, t in w.items()}
    assert_same(federation.server["shared"], w, 1e-10)
    for client, width in zip(federation.ids, hidden, strict=True):
        found = federation.personal_model(client)
        assert_same(
            narrow({k: t.numpy() for k, t in found.items()}, width), narrow(w, width), 1e-10
        )
        assert not found["body.weight"][width:].any()
        assert not found["head.weight"][:, width:].any()
    sent = {e.client: e.bytes for e in federation.ledger.entries if e.part == "shared"}
    sizes = [sum(t.size for t in narrow(w, h).values()) for h in hidden]
    each = (sent["c0"] - 12) / sizes[0]
    assert [sent[c] - 12 for c in federation.ids] == [each * size for size in sizes]


def test_of_one_width_it_is_fedavg():
    limit, _ = run_on_minibatches(HeteroFL(widths=[1.0]), fraction=0.5)
    plain, _ = run_on_minibatches(FedAvg(), fraction=0.5)
    assert_same(limit.server["shared"], plain.server["shared"], 1e-14)


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_leading_channels_of_a_cnn_are_those_of_a_narrow_one(norm):
    torch.manual_seed(0)
    wide = SmallCNN(2, 2, 3, channels=(8, 16), strides=(1, 2), norm=norm).eval()
    small = SmallCNN(2, 2, 3, channels=(4, 8), strides=(1, 2), norm=norm).eval()
    entries = {n: t for n, t in wide.state_dict().items() if t.is_floating_point()}
    shapes = leading(wide, 0.5)
    expected = {n: tuple(t.shape) for n, t in small.state_dict().items() if n in entries}
    assert shapes == expected
    x = torch.randn(2, 2, 8, 8)
    small.load_state_dict({n: corner(t, shapes[n]) for n, t in entries.items()}, strict=False)
    wide.load_state_dict({n: alone(t, shapes[n]) for n, t in entries.items()}, strict=False)
    assert torch.allclose(wide(x), small(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("widths", [[], [0.0], [1.5]])
def test_widths_out_of_range_are_refused(widths):
    with pytest.raises(ConfigError, match=r"must be shares of the channels in \(0, 1\]"):
        HeteroFL(widths=widths)
