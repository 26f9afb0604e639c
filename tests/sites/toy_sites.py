"""The toy federation of the contract tests, with each client at a site of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from medfed.common.tensors import digest
from medfed.federation.algorithm import ClientInfo
from medfed.federation.lightning.callbacks import CommunicationLogger
from medfed.federation.lightning.checkpoint import RoundCheckpoint
from medfed.federation.lightning.module import FederatedModule
from medfed.federation.wire.channel import Channel, Link
from medfed.federation.wire.codecs.sparse import TopK
from medfed.federation.wire.codecs.stc import STC
from medfed.sites.attendance import Attendance, SitesProgress
from medfed.sites.calls import Caller, Terms, agree_on_data, greet
from medfed.sites.coordinator import Coordinator
from medfed.sites.policy import NO_LIMITS
from medfed.sites.run import SitesEvaluation, SitesModule
from medfed.sites.site import Site
from medfed.sites.wire import Facts, Greeting, Transport
from tests.contract.harness import federation
from tests.sites.direct import Direct
from tests.sites.hospitals import QUICK

NAMES = ["c0", "c1", "c2"]
ROUNDS = 2
Settings = Callable[[], dict[str, Any]]
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


def plain() -> dict[str, Any]:
    """Dense fp32 both ways."""
    return {}


def lossy() -> dict[str, Any]:
    """STC with its residual up, top-k as differences from a reference down."""
    return {"channel": Channel(Link(STC(0.2)), Link(TopK(0.3)))}


class Toy:
    """One client of the toy federation."""

    rounds, members, joins, policy, parts, messages = 3, None, 0, NO_LIMITS, (), 1

    def __init__(self, name: str, method: str, settings: Settings = plain) -> None:
        self.name, self.method, self.settings = name, method, settings
        _, fed, local = federation(method, **settings())
        self.samples = fed.clients[name].num_samples
        self.weights = digest(local.model.initial())

    def greeting(self) -> Greeting:
        return Greeting({"algorithm": self.method}, {"features": 3})

    def agree(self, number: int, answer: bytes) -> bytes | None:
        return None

    def patients_behind(self) -> tuple[str, list[str]]:
        return "", []

    def facts(self) -> Facts:
        return Facts(self.samples, self.weights, {"shape": [3]})

    def join(self, everyone: Sequence[ClientInfo]) -> FederatedModule:
        task, fed, local = federation(self.method, **self.settings())
        assert [(c.id, c.num_samples) for c in everyone] == [
            (c.id, c.num_samples) for c in fed.clients.values()
        ]
        fed.clients = {self.name: fed.clients[self.name]}
        return FederatedModule(task, fed, local)


def nothing():
    """What a server has to say to data that need no agreement."""
    yield from ()


OPEN: list[Caller] = []  # closed at the end of each test: conftest.py


def opened(caller: Caller) -> Caller:
    """Has a caller closed at the end of the test, as the command closes its own."""
    OPEN.append(caller)
    return caller


def toy_sites(folder: Path, method: str, settings: Settings = plain) -> Direct:
    """All sites, in this process."""
    return Direct({c: Site(Toy(c, method, settings), folder / c) for c in NAMES})


def coordinated(
    transport: Transport,
    method: str,
    settings: Settings = plain,
    terms: Terms = QUICK,
    progress: SitesProgress | None = None,
) -> SitesModule:
    """A coordinator that has greeted its sites."""
    caller = opened(Caller(transport, NAMES, terms))
    greet(caller)
    facts, answers, _ = agree_on_data(caller, nothing())
    task, fed, local = federation(method, **settings())
    fed.clients = {}
    attendance = Attendance(
        caller, fed, facts, answers, "job", progress or SitesProgress.new(NAMES)
    )
    attendance.begin()
    return SitesModule(task, fed, local, Coordinator(attendance))


def fit(
    module: SitesModule,
    folder: Path,
    rounds: int = ROUNDS,
    resume: Path | None = None,
    metric: str = "loss",
):
    """Runs it under a Trainer; returns what was evaluated."""
    evaluation = SitesEvaluation(metric, "min")
    module.coordinator.best = evaluation.best_round
    pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=rounds,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[
            evaluation,
            CommunicationLogger(),
            RoundCheckpoint(folder, evaluation=evaluation),
        ],
    ).fit(module, ckpt_path=resume, weights_only=True)
    return evaluation
