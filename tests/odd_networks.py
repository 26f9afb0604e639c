"""Networks that keep state in every place that PyTorch knows, and what must hold of each.

Each takes (B, 4) and gives (B, 2); what it keeps has an effect on its outputs.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from medfed.common.streams import seeded
from medfed.common.tensors import digest, first_non_finite
from medfed.federation.algorithm import Algorithm
from medfed.federation.assemble import assemble
from medfed.federation.federation import Federation
from medfed.federation.other_state import copied, filled
from medfed.federation.reference import ArrayClient, Federated, run_reference
from medfed.federation.round import Round
from medfed.personalize.ditto import Ditto
from medfed.personalize.local import Local
from medfed.standalone.errors import MedfedError

ROUNDS, STEPS, LR = 2, 3, 0.02


class Keeps(nn.Module):
    """A small network around one kind of state.

    Args:
        begin: Makes the state, as an attribute of the network.
        change: Changes it in each training pass, by the pass's features (B, 8).
        use: Turns features into others by it.
    """

    def __init__(
        self,
        begin: Callable[[Any], None],
        change: Callable[[Any, Tensor], None] = lambda net, f: None,
        use: Callable[[Any, Tensor], Tensor] = lambda net, f: f,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.change, self.use = change, use
        begin(self)

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x).tanh()
        if self.training:
            with torch.no_grad():
                self.change(self, features.detach())
        return self.head(self.use(self, features))


def _buffer(start: Tensor, persistent: bool = True) -> Callable[[nn.Module], None]:
    return lambda net: net.register_buffer("kept", start.clone(), persistent=persistent)


def _attribute(start: Any) -> Callable[[nn.Module], None]:
    return lambda net: setattr(net, "kept", copy.deepcopy(start))


def _assign(value: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], None]:
    return lambda net, f: setattr(net, "kept", value(net.kept, f))


def _scaled(net: Any, f: Tensor) -> Tensor:
    return f * (1 + 0.1 * float(net.kept))


def _shifted(net: Any, f: Tensor) -> Tensor:
    return f if net.kept is None else f + net.kept.float()


def _average(kept: Any, f: Tensor) -> Tensor:
    return f.mean(0) if kept is None else 0.9 * kept + 0.1 * f.mean(0)


def _in_place(net: Any, f: Tensor) -> None:
    net.kept.mul_(0.9).add_(f.mean(0), alpha=0.1)


def _layer(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Keeps(lambda net: setattr(net, "kept", make()), use=lambda net, f: net.kept(f))


def _normalised(norm: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    def begin(net: Any) -> None:
        with warnings.catch_warnings(action="ignore"):  # the older ones are deprecated
            net.body = norm(net.body)

    return lambda: Keeps(begin)


def _teacher(net: Any) -> None:
    net.kept = copy.deepcopy(net.head).requires_grad_(False)


def _hidden_teacher(net: Any) -> None:
    net.kept = [copy.deepcopy(net.head).requires_grad_(False)]


def _follow(net: Any, f: Tensor) -> None:
    teacher = net.kept[0] if isinstance(net.kept, list) else net.kept
    for mine, its in zip(teacher.parameters(), net.head.parameters(), strict=True):
        mine.data.mul_(0.9).add_(its.data, alpha=0.1)


def _taught(net: Any, f: Tensor) -> Tensor:
    teacher = net.kept[0] if isinstance(net.kept, list) else net.kept
    return f + teacher(f).mean(1, keepdim=True)


class Queue(nn.Module):
    """Features of earlier batches in a tensor, with the place of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.at = torch.zeros(5, 8), 0

    def forward(self, f: Tensor) -> Tensor:
        if self.training:
            self.queue[self.at] = f.detach().mean(0)
            self.at = (self.at + 1) % 5
        return f + self.queue.mean(0)


class Recurrent(nn.Module):
    """A GRU whose hidden state goes on from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.hidden = nn.GRU(8, 8, batch_first=True), None

    def forward(self, f: Tensor) -> Tensor:
        before = None
        if self.hidden is not None:
            before = self.hidden.detach().mean(1, keepdim=True).expand(1, len(f), 8).contiguous()
        outputs, self.hidden = self.cell(f[:, None], before)
        return outputs[:, 0]


class KeepsMask(nn.Module):
    """A dropout mask that evaluation uses again."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None

    def forward(self, f: Tensor) -> Tensor:
        if self.training:
            self.mask = (f.detach().mean(0) > 0).float()
        return f if self.mask is None else f * self.mask


class Evaluating(nn.Module):
    """BatchNorm that stays in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def train(self, mode: bool = True) -> Evaluating:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, f: Tensor) -> Tensor:
        return self.norm(f)


class _Counter:
    def __init__(self) -> None:
        self.count = 0


def _tied() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    net[2].weight = net[0].weight
    return net


def _frozen(part: str) -> nn.Module:
    net = Keeps(lambda net: setattr(net, "kept", nn.BatchNorm1d(8)), use=lambda n, f: n.kept(f))
    net.get_submodule(part).requires_grad_(False)
    return net


def _history(net: Any, f: Tensor) -> None:
    net.kept["means"].append(float(f.mean()))
    net.kept["last"] = f.mean(0)


one = torch.zeros((), dtype=torch.long)
ODDITIES: dict[str, Callable[[], nn.Module]] = {
    "integer buffer": lambda: Keeps(_buffer(one), lambda n, f: n.kept.add_(1), _scaled),
    "integer buffer, assigned": lambda: Keeps(_buffer(one), _assign(lambda k, f: k + 1), _scaled),
    "bool buffer": lambda: Keeps(
        _buffer(torch.zeros(8, dtype=torch.bool)),
        lambda n, f: n.kept.logical_or_(f.max(0).values > 0.7),
        _shifted,
    ),
    "float buffer, assigned": lambda: Keeps(_buffer(torch.zeros(8)), _assign(_average), _shifted),
    "buffer, not persistent": lambda: Keeps(_buffer(torch.zeros(8), False), _in_place, _shifted),
    "tensor attribute": lambda: Keeps(_attribute(torch.zeros(8)), _in_place, _shifted),
    "attribute, first none": lambda: Keeps(_attribute(None), _assign(_average), _shifted),
    "number": lambda: Keeps(_attribute(0), _assign(lambda k, f: k + 1), _scaled),
    "float number": lambda: Keeps(
        _attribute(0.0), _assign(lambda k, f: k + float(f.mean())), _scaled
    ),
    "list": lambda: Keeps(
        _attribute([]),
        lambda n, f: n.kept.append(float(f.mean())),
        lambda n, f: f * (1 + sum(n.kept)),
    ),
    "bounded queue": lambda: Keeps(
        _attribute(deque(maxlen=2)),
        lambda n, f: n.kept.append(f.mean(0)),
        lambda n, f: f + sum(n.kept),
    ),
    "dictionary": lambda: Keeps(
        _attribute({"means": []}), _history, lambda n, f: f + n.kept.get("last", 0)
    ),
    "object": lambda: Keeps(
        _attribute(_Counter()),
        lambda n, f: setattr(n.kept, "count", n.kept.count + 1),
        lambda n, f: f * (1 + 0.1 * n.kept.count),
    ),
    "random generator": lambda: Keeps(
        _attribute(torch.Generator().manual_seed(0)),
        use=lambda n, f: f + torch.rand(8, generator=n.kept),
    ),
    "new layers": lambda: Keeps(_attribute(None), lambda n, f: setattr(n, "kept", nn.Linear(8, 8))),
    "queue of features": _layer(Queue),
    "moving average": lambda: Keeps(_teacher, _follow, _taught),
    "hidden moving average": lambda: Keeps(_hidden_teacher, _follow, _taught),
    "recurrent": _layer(Recurrent),
    "kept dropout mask": _layer(KeepsMask),
    "BatchNorm": _layer(lambda: nn.BatchNorm1d(8)),
    "BatchNorm, momentum none": _layer(lambda: nn.BatchNorm1d(8, momentum=None)),
    "BatchNorm in evaluation mode": _layer(Evaluating),
    "spectral norm": _normalised(parametrizations.spectral_norm),
    "spectral norm, older": _normalised(nn.utils.spectral_norm),
    "weight norm": _normalised(parametrizations.weight_norm),
    "weight norm, older": _normalised(nn.utils.weight_norm),
    "lazy": lambda: nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2)),
    "tied": _tied,
    "frozen body": partial(_frozen, "body"),
    "frozen BatchNorm": partial(_frozen, "kept"),
    "LSTM": _layer(lambda: _First(nn.LSTM(8, 8, batch_first=True))),
}


class _First(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, f: Tensor) -> Tensor:
        return self.cell(f[:, None])[0][:, 0]


class Case(NamedTuple):
    """A network, what it takes, and whether it draws random numbers in training."""

    network: Callable[[], nn.Module]
    shape: tuple[int, ...] = (4,)
    draws: bool = False


def outputs(given: Any) -> Iterator[Tensor]:
    """The float tensors of whatever a network returns."""
    if isinstance(given, Tensor):
        if given.is_floating_point() and given.numel():
            yield given
    elif isinstance(given, Mapping):
        yield from outputs(list(given.values()))
    elif isinstance(given, list | tuple):
        for part in given:
            yield from outputs(part)


def loss(network: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The mean of all outputs of a sample should be its label."""
    heads = [t.flatten(1).mean(1) for t in outputs(network(batch["image"])) if t.ndim > 1]
    return torch.stack([(head - batch["label"]).square().mean() for head in heads]).sum()


def hospitals(case: Case) -> list[ArrayClient]:
    """Three of different sizes; the last is measured."""
    random = torch.Generator().manual_seed(1)
    made = []
    for name, count, size in (("a", 9, 4), ("b", 6, 3), ("c", 8, 8)):
        x = torch.randn(count, *case.shape, generator=random)
        made.append(ArrayClient(name, x, x.flatten(1)[:, 0].sign(), size))
    return made


def built(method: Algorithm, case: Case, clients: list[ArrayClient]) -> Federated:
    """A federation with a network of its own."""
    network = case.network()
    before, network = copied(network), copied(network)
    optimizer = partial(torch.optim.SGD, lr=LR)
    made, _ = assemble(
        method,
        network,
        partial(loss, network),
        clients,
        optimizer=optimizer,
        rounds=ROUNDS,
        budget=_budget(),
    )
    return Federated(made, before)


def _budget() -> Any:
    from medfed.federation.budget import LocalBudget

    return LocalBudget(steps=STEPS)


def plain(case: Case) -> Tensor:
    """The loss of the last hospital's network after a loop of plain PyTorch."""
    network, data = case.network(), hospitals(case)[-1]
    optimizer = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], lr=LR)
    batch = {"image": data.inputs, "label": data.labels}
    for _ in range(ROUNDS * STEPS):
        network.train()
        optimizer.zero_grad()
        loss(network, batch).backward()
        optimizer.step()
    network.eval()
    with torch.no_grad():
        return loss(network, batch)


def alone_is_beside(case: Case) -> bool:
    """A hospital that trains alone has the same model, bit for bit, beside two others."""
    found = []
    for clients in (hospitals(case)[-1:], hospitals(case)):
        done = built(Local(), case, clients)
        run_reference(done.federation, ROUNDS)
        found.append((digest(done.weights("c")), repr(done.losses()["c"])))  # NaN, too
    return found[0] == found[1]


def saved_is_evaluated(case: Case) -> bool:
    """A model that is read from a file has the loss that the federation measures."""
    done = built(Ditto(), case, hospitals(case))
    run_reference(done.federation, ROUNDS)
    for client, data in done.federation.clients.items():
        weights = load(save({n: t.contiguous() for n, t in done.weights(client).items()}))
        assert first_non_finite(weights) is None
        network = filled(case.network(), weights).eval()
        batches = list(data.data.eval_batches("test"))
        with torch.no_grad(), seeded():
            losses = [float(loss(network, b)) for b in batches]
        sizes = [len(b["label"]) for b in batches]
        mean = sum(n * v for n, v in zip(sizes, losses, strict=True)) / sum(sizes)
        again = done.losses()[client]
        if repr(mean) != repr(again):
            return False
    return True


def _bytes(federation: Federation) -> bytes:
    states = {c: local.state_dict() for c, local in federation.clients.items()}
    file = io.BytesIO()
    torch.save({"server": federation.server, "clients": states, "memory": federation.memory}, file)
    return file.getvalue()


def resumed_is_straight(case: Case) -> bool:
    """A federation whose states were written and read goes on as if nothing had happened."""
    straight, first, second = (built(Ditto(), case, hospitals(case)).federation for _ in range(3))
    run_reference(straight, ROUNDS)
    run_reference(first, 1)
    saved = torch.load(io.BytesIO(_bytes(first)), weights_only=True)
    second.server, second.memory = saved["server"], saved["memory"]
    for client, state in saved["clients"].items():
        second.clients[client].load_state_dict(state)
    run_reference(second, ROUNDS, start=1)
    return second.digests() == straight.digests()


def ranks_are_one(case: Case) -> bool:
    """Clients that are divided over two networks, as over two processes, end as over one."""
    one, *two = (built(Ditto(), case, hospitals(case)).federation for _ in range(3))
    run_reference(one, ROUNDS)
    for number in range(ROUNDS):
        rounds, is_open = [Round(rank, number) for rank in two], True
        while is_open:
            for i, client in enumerate(rounds[0].recipients):
                packet = rounds[i % 2].fit(client)
                for each in rounds:
                    each.receive(client, packet)
            is_open, _ = (each.close_phase() for each in rounds)
    found = two[0].digests() | {
        f"client/{c}": two[i % 2].digests()[f"client/{c}"] for i, c in enumerate(one.ids)
    }
    return found == one.digests()


def plain_is_local(case: Case) -> bool:
    """Local training is a loop of plain PyTorch, up to the order of sums."""
    if case.draws:
        return True  # other numbers than those of a run's seed
    done = built(Local(), case, hospitals(case)[-1:])
    done.federation.trainer.normalization = "kept"
    run_reference(done.federation, ROUNDS)
    return abs(done.losses()["c"] - float(plain(case))) < 1e-4 * (1 + abs(done.losses()["c"]))


CHECKS: dict[str, Callable[[Case], bool]] = {
    "local = plain PyTorch": plain_is_local,
    "alone = beside others": alone_is_beside,
    "one rank = two": ranks_are_one,
    "saved = evaluated": saved_is_evaluated,
    "resumed = straight": resumed_is_straight,
}


def verdict(check: str, case: Case) -> str:
    """``ok``, ``WRONG``, the sentence of a refusal, or an error that is none."""
    try:
        return "ok" if CHECKS[check](case) else "WRONG"
    except MedfedError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
