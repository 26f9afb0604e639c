"""A site that withdraws from a run: it gets no more requests, and its state can be deleted.

The shared part keeps the effect of its training; nobody can remove it. But the server can delete
the state *of this site*: the memory of its channel, its sketch, its model, its number of samples.
Its part of the record stays: bytes, and metrics of past rounds. The run folder's ``withdrawn.json``
says when it withdrew, and what was deleted.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from medfed.common import schemas, tensors, untrusted
from medfed.config.compose import build
from medfed.federation.lightning.checkpoint import save_sealed
from medfed.records.folder import RunFolder
from medfed.sites.wire import Facts
from medfed.standalone import errors, files


class SitesRecord(msgspec.Struct, frozen=True):
    """The content of the run folder's ``sites.json``: the sites' facts at the start of the run."""

    job: str  # names the federation
    greeting: dict[str, Any]  # the facts of all sites before they read their data
    clients: dict[str, Facts]  # each site's facts about its data and model
    answers: list[str]  # the server's answers about the data of all
    versions: dict[str, dict[str, str]] = {}  # at each site

    @classmethod
    def read(cls, folder: Path) -> SitesRecord:
        """Reads it."""
        return untrusted.read_json(RunFolder(folder).sites_json, cls)


class _Withdrawal(msgspec.Struct):
    """A withdrawn site: after how many rounds, and the state that the server deleted."""

    after: schemas.Count
    forgotten: list[str]


def withdrawn_of(folder: Path) -> dict[str, _Withdrawal]:
    """Returns the sites that have withdrawn from the run of a folder, from ``withdrawn.json``."""
    path = RunFolder(folder).withdrawn_json
    if not path.is_file():
        return {}
    return untrusted.read_json(path, dict[str, dict[str, _Withdrawal]]).get("sites", {})


def withdraw(folder: Path, site: str, forget: bool = False) -> list[str]:
    """Takes a site out of all later rounds of a stopped run, which can then be resumed."""
    run = RunFolder(folder)
    config = run.config
    sites, known = list(SitesRecord.read(folder).clients), withdrawn_of(folder)
    left = [name for name in sites if name not in known and name != site]
    if site not in sites:
        raise errors.ConfigError(
            f"site={site} is not a site of the run in {folder}{errors.did_you_mean(site, sites)}; "
            f"its sites are {', '.join(sites)}."
        )
    algorithm = build(config.algorithm)
    if algorithm.card.full_cohort:
        raise errors.ConfigError(
            f"{algorithm.title} needs all clients in every round, so this run cannot "
            f"continue without {site}; start another one among {', '.join(left) or 'others'}."
        )
    if not left:
        raise errors.ConfigError(f"Without {site} no site is left in the run in {folder}.")
    checkpoints = run.rounds
    last = int(checkpoints[-1].stem.removeprefix("round_")) + 1 if checkpoints else 0
    gone = known.setdefault(site, _Withdrawal(last, []))
    then = f"resume the run with {', '.join(left)}"
    if run.summary_json.is_file():
        then = "the run has finished, so there is nothing to resume"
    lines = [
        f"{site} takes part in no round after round {gone.after} of the run in {folder}; {then}."
    ]
    if forget:
        for path in filter(Path.is_file, [*checkpoints, run.best_ckpt]):
            gone.forgotten = sorted({*gone.forgotten, *_forget_in(path, site, len(sites))})
        what = ", ".join(gone.forgotten) or "nothing"
        lines.append(
            f"The server has deleted its state of this site: {what}. What the other sites have "
            "learned from it stays in their models, and its bytes and metrics stay in the record."
        )
    files.write_json(run.withdrawn_json, {"sites": msgspec.to_builtins(known)})
    return lines


def _forget_in(path: Path, site: str, count: int) -> list[str]:
    """Rewrites a checkpoint without one site's state; returns what was deleted."""
    checkpoint = untrusted.read_checkpoint(path)
    saved = checkpoint["federation"]
    place = list(saved["clients"]).index(site)
    saved["server"], forgotten = forgotten_state(saved["server"], site, place, count)
    for way, entries in saved["memory"].items():
        if entries.pop(site, None):
            forgotten.append(f"channel {way}")
    save_sealed(checkpoint, path)
    return forgotten


def forgotten_state(
    server: Mapping[str, Mapping[str, Tensor]], site: str, place: int, count: int
) -> tuple[tensors.State, list[str]]:
    """Returns a server's state without one client's state.

    Entries under its name become 0. If the rows of a matrix are the clients' models, its row
    becomes the mean of the others, so that coupled clients are pulled to the mean; the solver's
    state is then dropped. `server`: the state; it does not change. `count`: the number of clients.

    Example:
        >>> server = {"num_samples": {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}}
        >>> forgotten_state(server, "a", 0, 2)
        ({'num_samples': {'a': tensor([0.]), 'b': tensor([4.])}}, ['num_samples'])
    """
    state: tensors.State = {group: dict(named) for group, named in server.items()}
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
    """The server's half of the sites' agreement on their data, repeated from earlier answers.

    Withdrawn sites are still part of it: scaling may not change within a run.

    Example:
        >>> server = replayed(["x"])
        >>> next(server), server.send([b"anything"])
        (b'', b'x')
    """
    yield b""
    for answer in answers:
        yield answer.encode()
