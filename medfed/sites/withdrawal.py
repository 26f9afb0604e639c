"""A site that withdraws from a run: it is not asked any more, and on request forgotten.

What the others have learnt with it stays in what all share; nobody can take that out again. But
what the server keeps *of this site* can go: what both ends of its channel remember, its sketch, its
own model, its number of samples. Its part of the record stays: bytes, and metrics of rounds that
took place. The run folder's ``withdrawn.json`` says when, and what was forgotten.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medfed.common.errors import ConfigError, did_you_mean
from medfed.common.files import write_json
from medfed.common.schemas import Count
from medfed.common.tensors import State
from medfed.common.untrusted import read_checkpoint, read_json
from medfed.config.compose import build
from medfed.federation.lightning.checkpoint import save_sealed
from medfed.records.folder import RunFolder
from medfed.sites.wire import Facts


@dataclass(frozen=True)
class SitesRecord:
    """What the run folder's ``sites.json`` holds: what the sites said when the run began.

    Attributes:
        job: Names the federation.
        greeting: What all said of their data before they read them.
        clients: What each said of its data and model.
        answers: What the server said about the data of all.
    """

    job: str
    greeting: dict[str, Any]
    clients: dict[str, Facts]
    answers: list[str]

    @classmethod
    def read(cls, folder: Path) -> SitesRecord:
        """Reads it.

        Raises:
            CheckpointError: If it is missing, torn, or holds something else.
        """
        return read_json(RunFolder(folder).sites_json, cls)


@dataclass(frozen=True)
class _Withdrawal:
    """One site's: after how many rounds, and what the server has forgotten of it."""

    after: Count
    forgotten: list[str]


@dataclass(frozen=True)
class _Withdrawals:
    """What ``withdrawn.json`` holds."""

    sites: dict[str, _Withdrawal] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> _Withdrawals:
        path = RunFolder(folder).withdrawn_json
        return read_json(path, cls) if path.is_file() else cls()


def withdrawn_of(folder: Path) -> list[str]:
    """Returns the sites that have withdrawn from the run of a folder."""
    return list(_Withdrawals.read(folder).sites)


def withdraw(folder: Path, site: str, forget: bool = False) -> list[str]:
    """Takes a site out of the rounds to come of a run, which has stopped and will be resumed.

    Args:
        folder: The coordinator's run folder.
        site: Which one.
        forget: Whether the server is to forget what it keeps of it, in all its checkpoints.

    Returns:
        What was done, in sentences.

    Raises:
        CheckpointError: If it is no folder of a run across sites.
        ConfigError: If there is no such site, or the run cannot go on without it.
    """
    run = RunFolder(folder)
    config = run.config
    sites, known = list(SitesRecord.read(folder).clients), _Withdrawals.read(folder).sites
    left = [name for name in sites if name not in known and name != site]
    if site not in sites:
        raise ConfigError(
            f"site={site} is none of the run in {folder}{did_you_mean(site, sites)}; its sites are "
            f"{', '.join(sites)}."
        )
    algorithm = build(config.algorithm)
    if algorithm.card.full_cohort:
        raise ConfigError(
            f"{type(algorithm).__name__} needs all clients in every round, so that this run ends "
            f"without {site}; start another one among {', '.join(left) or 'others'}."
        )
    if not left:
        raise ConfigError(f"Without {site} nobody is left in the run in {folder}.")
    checkpoints = run.rounds
    last = int(checkpoints[-1].stem.removeprefix("round_")) + 1 if checkpoints else 0
    earlier = known.get(site, _Withdrawal(last, []))
    forgotten = earlier.forgotten
    if forget:
        for path in [*checkpoints, *([run.best_ckpt] if run.best_ckpt.is_file() else [])]:
            forgotten = sorted({*forgotten, *_forget_in(path, site, len(sites))})
    now = _Withdrawals({**known, site: _Withdrawal(earlier.after, forgotten)})
    write_json(run.withdrawn_json, asdict(now))
    said = [
        f"{site} takes part in no round after round {earlier.after} of the run in {folder}; "
        f"resume it among {', '.join(left)}."
    ]
    if forget:
        what = ", ".join(forgotten) or "nothing"
        said.append(
            f"The server kept of it, and has forgotten: {what}. What the others have learnt with "
            "it stays, and so do its bytes and metrics in the record."
        )
    return said


def _forget_in(path: Path, site: str, count: int) -> list[str]:
    """Rewrites a checkpoint without what is of one site; returns what that was."""
    checkpoint = read_checkpoint(path)
    saved = checkpoint["federation"]
    place = list(saved["clients"]).index(site)
    saved["server"], forgotten = forgotten_state(saved["server"], site, place, count)
    for way, kept in saved["memory"].items():
        if kept.pop(site, None):
            forgotten.append(f"channel {way}")
    save_sealed(checkpoint, path)
    return forgotten


def forgotten_state(
    server: Mapping[str, Mapping[str, Tensor]], site: str, place: int, count: int
) -> tuple[State, list[str]]:
    """Returns a server's state without what is of one client.

    What is kept under its name becomes 0. Of models in rows, one for each client, its own becomes
    the mean of the others', so that who is drawn to it is drawn to the middle; what a solver goes
    on from is dropped with that.

    Args:
        server: The state; it stays as it is.
        site: The client's name.
        place: Its position among all.
        count: How many there are.

    Returns:
        The new state, and the groups in which something was forgotten.

    Example:
        >>> server = {"num_samples": {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}}
        >>> forgotten_state(server, "a", 0, 2)
        ({'num_samples': {'a': tensor([0.]), 'b': tensor([4.])}}, ['num_samples'])
    """
    state: State = {group: dict(named) for group, named in server.items()}
    forgotten = []
    for group, named in server.items():
        if group.endswith(f"/{site}"):
            state[group] = {name: torch.zeros_like(t) for name, t in named.items()}
        elif site in named:
            state[group][site] = torch.zeros_like(named[site])
        elif group == "personal" and all(t.shape[:1] == (count,) for t in named.values()):
            state[group] = {name: _mean_row(t, place) for name, t in named.items()}
            if "admm" in state:
                state["admm"] = {}
        else:
            continue
        forgotten.append(group)
    return state, forgotten


def _mean_row(rows: Tensor, place: int) -> Tensor:
    others = torch.arange(len(rows), device=rows.device) != place
    filled = rows.clone()
    filled[place] = rows[others].mean(dim=0)
    return filled


def replayed(answers: Sequence[str]) -> Generator[bytes, Sequence[bytes], None]:
    """The server's half of what sites agree on about their data, as it was said before.

    Whoever has withdrawn is still part of it: scaling may not change within a run.

    Args:
        answers: What the server said.

    Example:
        >>> server = replayed(["x"])
        >>> next(server), server.send([b"anything"])
        (b'', b'x')
    """
    yield b""
    for answer in answers:
        yield answer.encode()
