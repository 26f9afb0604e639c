"""Penalties that add their gradient themselves, against autograd."""

import torch

from medfed.functional.prox import Linear, Proximity
from medfed.personalize.fedavg import FedAvg
from tests.sweeps import sweep
from tests.toys import toy_federation


def values(like, seed):
    rng = torch.Generator().manual_seed(seed)
    return {n: torch.randn(t.shape, generator=rng).to(t) for n, t in like.items()}


@sweep("accumulate", [1, 2])
@sweep("kind", ["proximity", "linear"])
def test_a_closed_gradient_is_autograds_to_the_bit(kind, accumulate):
    ends = []
    for closed in (True, False):
        _, federation, local = toy_federation(FedAvg(), steps=4)
        object.__setattr__(local.budget, "accumulate", accumulate)
        client = federation.clients["c1"]
        client.begin(0, "fit", 0)
        anchor = values({n: client.weights[n] for n in client.split.parameters("all")}, 3)
        anchor.pop("body.bias")
        penalty = Proximity(0.3, anchor) if kind == "proximity" else Linear(anchor)
        shown = penalty if closed else lambda weights, penalty=penalty: penalty(weights)
        ends.append(client.train(client.weights, penalty=shown))
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())
    assert any(not torch.equal(ends[0][n], client.weights[n]) for n in anchor)


def test_a_parameter_that_the_loss_forgets_gets_the_penalty_alone():
    used, free = (torch.ones(2, requires_grad=True) for _ in range(2))
    used.sum().backward()
    with torch.no_grad():
        Proximity(2.0, {"used": torch.zeros(2), "free": torch.full((2,), 3.0)}).add_gradient(
            {"used": used, "free": free}
        )
    assert (used.grad.tolist(), free.grad.tolist()) == ([3.0, 3.0], [-4.0, -4.0])
    Proximity(1.0, {}).add_gradient({"used": used})
    assert used.grad.tolist() == [3.0, 3.0]
