"""Six methods of medfed and six plain PyTorch loops, written from the papers, on the same batches.

Each loop is what a reader of the paper would write: a copy of the network per hospital, its
gradients, the paper's step, and a mean of state dicts. It shares with medfed the network's first
weights and the batches, and none of its training, messages or methods. The network is MONAI's
DenseNet, whose BatchNorm statistics are averaged beside its weights; the data are scikit-learn's
digits, sorted, so that hospitals see other classes and diverge.

Compared are, after the last round, the server's model and each hospital's personal one; APFL's are
its mixtures. "From FedAvg" is how far the hospitals' models are from FedAvg's, lest both sides be
equal because a method did nothing. In single precision the order of additions shows.

    python benchmarks/evidence/side_by_side.py
    python benchmarks/evidence/side_by_side.py --dtype float32
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any, Literal

import torch
from monai.networks.nets import DenseNet
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from medfed.common.seeding import derive_seed
from medfed.federation.algorithm import Algorithm
from medfed.federation.assemble import assemble
from medfed.federation.budget import LocalBudget
from medfed.federation.federation import Federation
from medfed.federation.reference import ArrayClient, run_reference
from medfed.federation.split import float_entries
from medfed.federation.wire.channel import Channel
from medfed.federation.wire.codecs.dense import Dense
from medfed.personalize.apfl import APFL
from medfed.personalize.ditto import Ditto
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.fedprox import FedProx
from medfed.personalize.pfedme import PFedMe
from medfed.personalize.scaffold import Scaffold

SEED, LR, SIZES = 7, 0.05, (20, 28, 12)
MU, LAMBDA, ALPHA, INNER, BETA = 0.5, 0.7, 0.3, 2, 0.9
Personal = Sequence[nn.Module]


@dataclass(frozen=True)
class Problem:
    """What both sides get."""

    network: nn.Module
    hospitals: Sequence[Any]
    rounds: int
    steps: int

    def batches(self, k: int, round: int, call: int = 1) -> Iterator[dict[str, Tensor]]:
        """Yields what medfed's hospital k trains on: epochs shuffled by documented seeds."""
        hospital = self.hospitals[k]
        seed = derive_seed(SEED, round, hospital.id, "fit", 0, call, "train")
        epochs = (hospital.train_batches(derive_seed(seed, "epoch", e)) for e in count())
        return islice((batch for epoch in epochs for batch in epoch), self.steps)

    @property
    def shares(self) -> list[float]:
        """n_k / n."""
        sizes = [len(h.labels) for h in self.hospitals]
        return [n / sum(sizes) for n in sizes]


def problem(dtype: torch.dtype, rounds: int, steps: int) -> Problem:
    """Hospitals of digits sorted by class, and a DenseNet."""
    digits = load_digits(n_class=4)
    images = torch.tensor(digits.images, dtype=dtype).div(16)
    images = images.repeat_interleave(4, 1).repeat_interleave(4, 2)[:, None]
    labels = torch.tensor(digits.target)
    order = labels[: sum(SIZES)].argsort(stable=True)
    hospitals = [
        ArrayClient(f"hospital_{k}", images[rows], labels[rows], batch_size=8)
        for k, rows in enumerate(order.split(SIZES))
    ]
    torch.manual_seed(SEED)
    network = DenseNet(2, 1, 4, init_features=8, growth_rate=4, block_config=(2, 2), bn_size=2)
    return Problem(network.to(dtype), hospitals, rounds, steps)


def gradient(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    """The gradient of a batch's loss; the running statistics follow the batch."""
    model.train().zero_grad()
    cross_entropy(model(batch["image"]), batch["label"]).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def values(model: nn.Module) -> list[Tensor]:
    """A copy of the parameters."""
    return [p.detach().clone() for p in model.parameters()]


@torch.no_grad()
def put(model: nn.Module, parameters: Sequence[Tensor]) -> None:
    """Sets the parameters."""
    for p, value in zip(model.parameters(), parameters, strict=True):
        p.copy_(value)


@torch.no_grad()
def average(w: nn.Module, models: Sequence[nn.Module], shares: Sequence[float]) -> None:
    """Puts the weighted mean of state dicts into w, and the variance of all patients together."""
    states = [m.state_dict() for m in models]

    def mean(function: Callable[[dict[str, Tensor]], Tensor]) -> Tensor:
        return torch.stack([p * function(s) for p, s in zip(shares, states, strict=True)]).sum(0)

    for name, entry in w.state_dict().items():
        if not entry.is_floating_point():
            continue
        value = mean(lambda s, name=name: s[name])  # type: ignore[misc]
        if name.endswith("running_var"):
            of = name.replace("running_var", "running_mean")
            middle = mean(lambda s, of=of: s[of])  # type: ignore[misc]
            value = value + mean(lambda s, of=of, m=middle: (s[of] - m).square())  # type: ignore[misc]
        entry.copy_(value)


def fedavg(p: Problem) -> tuple[nn.Module, Personal]:
    """McMahan et al. 2017, Algorithm 1."""
    return fedprox(p, 0.0)


def fedprox(p: Problem, mu: float = MU) -> tuple[nn.Module, Personal]:
    """Li et al. 2020, Algorithm 2: y <- y - eta (grad f(y) + mu (y - w))."""
    w = copy.deepcopy(p.network)
    for t in range(p.rounds):
        ends = [copy.deepcopy(w) for _ in p.hospitals]
        for k, y in enumerate(ends):
            for batch in p.batches(k, t):
                g, now = gradient(y, batch), zip(values(y), values(w), strict=True)
                put(y, [a - LR * (d + mu * (a - b)) for d, (a, b) in zip(g, now, strict=True)])
        average(w, ends, p.shares)
    return w, [w for _ in p.hospitals]


def scaffold(p: Problem) -> tuple[nn.Module, Personal]:
    """Karimireddy et al. 2020, Algorithm 1, option II, eta_g = 1, hospitals count alike."""
    w, n = copy.deepcopy(p.network), len(p.hospitals)
    c = [torch.zeros_like(t) for t in values(w)]
    own = [[t.clone() for t in c] for _ in p.hospitals]
    for t in range(p.rounds):
        ends, changes = [copy.deepcopy(w) for _ in p.hospitals], []
        for k, y in enumerate(ends):
            for batch in p.batches(k, t):
                terms = zip(values(y), gradient(y, batch), own[k], c, strict=True)
                put(y, [a - LR * (g - ci + cs) for a, g, ci, cs in terms])
            terms = zip(own[k], c, values(w), values(y), strict=True)
            new = [ci - cs + (x - a) / (p.steps * LR) for ci, cs, x, a in terms]
            changes.append([a - b for a, b in zip(new, own[k], strict=True)])
            own[k] = new
        average(w, ends, [1 / n] * n)
        c = [cs + sum(d) / n for cs, *d in zip(c, *changes, strict=True)]
    return w, [w for _ in p.hospitals]


def ditto(p: Problem) -> tuple[nn.Module, Personal]:
    """Li et al. 2021, Algorithm 1: FedAvg, and v <- v - eta (grad f(v) + lambda (v - w))."""
    w = copy.deepcopy(p.network)
    personal = [copy.deepcopy(w) for _ in p.hospitals]
    for t in range(p.rounds):
        ends = [copy.deepcopy(w) for _ in p.hospitals]
        for k, (y, v) in enumerate(zip(ends, personal, strict=True)):
            for batch in p.batches(k, t, call=1):
                put(y, [a - LR * g for a, g in zip(values(y), gradient(y, batch), strict=True)])
            for batch in p.batches(k, t, call=2):
                terms = zip(values(v), gradient(v, batch), values(w), strict=True)
                put(v, [a - LR * (g + LAMBDA * (a - b)) for a, g, b in terms])
        average(w, ends, p.shares)
    return w, personal


def apfl(p: Problem) -> tuple[nn.Module, Personal]:
    """Deng et al. 2020, Algorithm 1, alpha learnt with the step size of the models."""
    w = copy.deepcopy(p.network)
    own = [values(w) for _ in p.hospitals]
    alphas = [ALPHA] * len(own)
    for t in range(p.rounds):
        ends = [copy.deepcopy(w) for _ in p.hospitals]
        for k, y in enumerate(ends):
            for batch in p.batches(k, t):
                alpha, before, mixed = alphas[k], values(y), copy.deepcopy(y)
                pairs = list(zip(own[k], before, strict=True))
                put(mixed, [alpha * v + (1 - alpha) * x for v, x in pairs])
                at_mix, at_w = gradient(mixed, batch), gradient(y, batch)
                slope = sum(((v - x) * g).sum() for (v, x), g in zip(pairs, at_mix, strict=True))
                own[k] = [v - LR * alpha * g for v, g in zip(own[k], at_mix, strict=True)]
                put(y, [x - LR * g for x, g in zip(before, at_w, strict=True)])
                alphas[k] = min(1.0, max(0.0, alpha - LR * float(slope)))
        average(w, ends, p.shares)
    models = [copy.deepcopy(w) for _ in own]  # at the newest w, with its statistics
    for model, v, alpha in zip(models, own, alphas, strict=True):
        own_and_w = zip(v, values(w), strict=True)
        put(model, [alpha * a + (1 - alpha) * b for a, b in own_and_w])
    return w, models


def pfedme(p: Problem) -> tuple[nn.Module, Personal]:
    """T. Dinh et al. 2020, Algorithm 1, eta lambda = 1; theta goes on, a batch per inner step."""
    w = copy.deepcopy(p.network)
    personal = [copy.deepcopy(w) for _ in p.hospitals]
    for t in range(p.rounds):
        ends = []
        for k, theta in enumerate(personal):
            anchor = values(w)
            for s, batch in enumerate(p.batches(k, t), 1):
                terms = zip(values(theta), gradient(theta, batch), anchor, strict=True)
                put(theta, [a - LR * (g + LAMBDA * (a - b)) for a, g, b in terms])
                if s % INNER == 0 or s == p.steps:
                    anchor = values(theta)
            ends.append(copy.deepcopy(theta))
            put(ends[-1], anchor)
        before = values(w)
        average(w, ends, p.shares)
        put(w, [(1 - BETA) * a + BETA * b for a, b in zip(before, values(w), strict=True)])
    return w, personal


METHODS: dict[str, tuple[Algorithm, Callable[[Problem], tuple[nn.Module, Personal]]]] = {
    "FedAvg": (FedAvg(), fedavg),
    "FedProx": (FedProx(mu=MU), fedprox),
    "SCAFFOLD": (Scaffold(weighting="uniform"), scaffold),
    "Ditto": (Ditto(strength=LAMBDA), ditto),
    "APFL": (APFL(alpha=ALPHA), apfl),
    "pFedMe": (PFedMe(strength=LAMBDA, inner_steps=INNER, server_lr=BETA), pfedme),
}


def federated(p: Problem, method: Algorithm) -> Federation:
    """Runs medfed; both models of Ditto get all steps, as the paper counts."""
    network = copy.deepcopy(p.network)
    double = p.hospitals[0].inputs.dtype == torch.float64
    precision: Literal["float32", "float64"] = "float64" if double else "float32"
    federation, _ = assemble(
        method,
        network,
        lambda batch: cross_entropy(network(batch["image"]), batch["label"]),
        p.hospitals,
        optimizer=partial(torch.optim.SGD, lr=LR),
        budget=LocalBudget(steps=p.steps, budget="paper"),
        channel=lambda _: Channel(Dense(precision), Dense(precision)),
        seed=SEED,
        normalization="kept",  # as the loops have them
    )
    return run_reference(federation, p.rounds)


def gap(ours: dict[str, Tensor], theirs: nn.Module) -> float:
    """The largest difference of any entry, running statistics included; counters are no entries."""
    entries = float_entries(theirs)
    return max(float((ours[n].detach() - t.detach()).abs().max()) for n, t in entries.items())


def main() -> None:
    """Prints the largest difference of any weight, by method."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--dtype", default="float64", choices=["float64", "float32"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    p = problem(getattr(torch, options.dtype), options.rounds, options.steps)
    plain, _ = fedavg(p)
    largest = 0.0
    print(f"{options.rounds} rounds of {options.steps} steps, {options.dtype}")
    for name in options.methods:
        method, loop = METHODS[name]
        federation = federated(p, method)
        w, personal = loop(p)
        server = federation.server["shared"]
        own = [
            gap(federation.personal_model(c), model)
            for c, model in zip(federation.ids, personal, strict=True)
        ]
        apart = max(gap(federation.personal_model(c), plain) for c in federation.ids)
        found = [gap(server, w), max(own), apart]
        largest = max(largest, *found[:2])
        print("{:9} server {:.1e}, personal {:.1e}, from FedAvg {:.1e}".format(name, *found))
    print(f"largest difference: {largest:.1e}")
    print(f"equal to 1e-6: {'yes' if largest <= 1e-6 else 'no'}")


if __name__ == "__main__":
    main()
