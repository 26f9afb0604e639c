"""Sites in processes of their own: one is killed, later the coordinator, and nothing is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from medfed.sites.wire import Request, Silent
from tests.integration.runs import CLINICAL, run
from tests.sites.hospitals import QUICK, across, same, site
from tests.sites.pipes import Pipes

OVERRIDES = (
    *CLINICAL,
    "algorithm=pfednet",
    "partition.num_clients=2",
    "codec.up=stc",
    "codec.down=topk",
)
# Both must take part, so that the round that one is killed in waits until it is there again.
PATIENT = replace(QUICK, quorum=1.0)


class Killed(BaseException):
    """The coordinator's end."""


class Killing:
    """Kills a site as it is asked to commit the second round, and the coordinator in the third."""

    def __init__(self, pipes: Pipes, victim: str) -> None:
        self.pipes, self.victim = pipes, victim
        self.killed: set[int] = set()

    def call(self, name: str, request: bytes, timeout: float) -> bytes:
        asked = Request.from_bytes(request)
        if asked.kind == "commit" and name == self.victim and asked.round not in self.killed:
            self.killed.add(asked.round)
            if asked.round == 1:
                self.pipes.processes[name].kill()
                self.pipes.processes[name].join()
                with contextlib.suppress(Silent):
                    self.pipes.call(name, request, timeout)  # the pipe is broken
                    pytest.fail("A killed site has answered.")
                self.pipes.start(name)
            if asked.round == 2:
                raise Killed
        return self.pipes.call(name, request, timeout)


@pytest.mark.promise("a site")
def test_a_killed_site_and_a_killed_coordinator(tmp_path: Path):
    _, experiment = run(tmp_path / "simulation", *OVERRIDES)
    names = list(experiment.data.clients)
    pipes = Pipes({c: partial(site, tmp_path / "sites", c, *OVERRIDES) for c in names})
    transport, folder = Killing(pipes, names[1]), tmp_path / "server"
    try:
        with pytest.raises(Killed):
            across(folder, transport, names, *OVERRIDES, terms=PATIENT)
        assert not (folder / "summary.json").exists()
        across(folder, transport, names, *OVERRIDES, f"resume={folder}", terms=PATIENT)
    finally:
        pipes.close()
    assert not same(tmp_path / "simulation", folder)
    assert {1, 2} <= transport.killed
    left_out = (folder / "absences.json").read_text()
    assert "it was restarted" in left_out


class Freezing(Killing):
    """Stops a site's process as it is to train in the second round, until the others commit it."""

    def call(self, name: str, request: bytes, timeout: float) -> bytes:
        asked = Request.from_bytes(request)
        process = self.pipes.processes[self.victim].pid
        assert process is not None
        frozen = name == self.victim and asked.kind == "fit" and asked.round == 1
        if frozen and not self.killed:
            self.killed.add(1)
            os.kill(process, signal.SIGSTOP)
        if asked.kind == "commit" and asked.round == 1:
            os.kill(process, signal.SIGCONT)
        return self.pipes.call(name, request, 0.2 if frozen else timeout)  # waits in vain


@pytest.mark.skipif(os.name != "posix", reason="processes are stopped by signals")
def test_a_frozen_site_is_left_out_and_comes_back(tmp_path: Path):
    """As in a simulation that is told the one absence; its late answer is nobody's any more."""
    overrides = (*CLINICAL, "algorithm=fedavg", "partition.num_clients=2", "codec.up=stc")
    names = ["hospital_0", "hospital_1"]
    pipes = Pipes({c: partial(site, tmp_path / "sites", c, *overrides) for c in names})
    transport, folder = Freezing(pipes, names[1]), tmp_path / "server"
    try:
        across(folder, transport, names, *overrides)
    finally:
        pipes.close()
    record = json.loads((folder / "absences.json").read_text())
    assert record["absent"] == {"1": [names[1]]}
    assert {row["why"] for row in record["left_out"]} == {"it did not answer"}
    run(tmp_path / "simulation", *overrides, record["simulation"])
    assert not same(tmp_path / "simulation", folder, ("hashes.json", "ledger.csv"))
