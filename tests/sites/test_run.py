"""A run across sites leaves what the ordinary run leaves, byte for byte."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path

import pytest

from medfed.records.folder import Run
from medfed.sites.status import show
from medfed.sites.wire import Request
from tests.integration.runs import CLINICAL, run
from tests.sites.hospitals import QUICK, across, as_left, direct, same


@pytest.mark.parametrize("method", ["fedavg", "pfednet", "ppfl"])
def test_equal_to_the_ordinary_run(method, tmp_path: Path):
    overrides: tuple[str, ...] = (*CLINICAL, f"algorithm={method}", "partition.num_clients=3")
    if method == "ppfl":
        overrides += (
            "canonical=outputs",
            "canonical.count=2",
            "model.network.spread=0.1",
            'canonical.parts=["*"]',
        )
    expected, experiment = run(tmp_path / "simulation", *overrides)
    names = list(experiment.data.clients)
    transport = direct(tmp_path / "sites", names, *overrides)
    summary = across(tmp_path / "server", transport, names, *overrides)
    assert not same(tmp_path / "simulation", tmp_path / "server")
    if method == "ppfl":
        assert not same(tmp_path / "simulation", tmp_path / "server", ("memberships.csv",))
        assert summary["memberships"] == expected["memberships"]
        pictures = [p.stem for p in (tmp_path / "server" / "pictures").glob("memberships*")]
        assert sorted(pictures) == ["memberships", "memberships_over_rounds"]
    equal = ("bytes", "savings", "steps", "selected_round")
    assert {k: summary[k] for k in equal} == {k: expected[k] for k in equal}
    assert summary["clients"] == as_left(expected["clients"])
    assert summary["clients"] != expected["clients"]  # not all digits have left
    for name, of in expected["federation"].items():
        assert summary["federation"][name] == pytest.approx(of, rel=1e-3, abs=1e-3)
    assert summary["points"] == as_left(expected["points"])
    found = Run(tmp_path / "server")
    assert list(found.clients) == names
    assert not (tmp_path / "server" / "models").exists()
    assert not (tmp_path / "server" / "absences.json").exists()
    splits = json.loads((tmp_path / "server" / "splits.json").read_text())
    assert splits["clients"] == {c: {} for c in names}  # no patient's name left a site


@pytest.mark.parametrize("method", ["shift", "platt"])
def test_a_site_gets_what_the_others_say_of_levels_thresholds_and_quantiles(method, tmp_path: Path):
    overrides = (
        *(*CLINICAL, "rounds=1", "partition=dirichlet", "partition.num_clients=4"),
        f"evaluation.calibration={method}",
        *("evaluation.operating_point={sensitivity: 0.9}", "evaluation.coverage=0.8"),
    )
    expected, experiment = run(tmp_path / "simulation", *overrides)
    names = list(experiment.data.clients)
    pooled = [name for name in names if "pooled" in expected["points"][name]]
    assert 0 < len(pooled) < 4
    assert {p["patients"] for p in expected["points"].values()} == {0.0}  # the quantile of all
    transport = direct(tmp_path / "sites", names, *overrides)
    summary = across(tmp_path / "server", transport, names, *overrides)
    assert summary["points"] == as_left(expected["points"])
    assert summary["clients"] == as_left(expected["clients"])
    assert 0 < len(summary["small"]) == len(expected["small"])
    assert summary["small"].keys() == expected["small"].keys()  # their numbers stay at the sites


class Killed(BaseException):
    """The coordinator's end."""


def test_a_run_is_resumed_although_a_site_is_not_there(tmp_path: Path, caplog, capsys):
    """What it leaves equals a simulation that is told the absences which its folder records."""
    overrides = (*CLINICAL, "algorithm=fedavg", "partition.num_clients=3")
    names = [f"hospital_{n}" for n in range(3)]
    folder, transport = tmp_path / "server", direct(tmp_path / "sites", names, *overrides)
    call = transport.call

    def kill(site: str, request: bytes, timeout: float) -> bytes:
        if Request.from_bytes(request).round == 1:
            raise Killed
        return call(site, request, timeout)

    transport.call = kill  # type: ignore[method-assign]
    with pytest.raises(Killed):
        across(folder, transport, names, *overrides)
    again = direct(tmp_path / "sites", names, *overrides)
    late = again.sites.pop(names[1])

    def back(site: str, request: bytes, timeout: float) -> bytes:
        if Request.from_bytes(request).kind == "commit":
            again.sites[names[1]] = late  # before the last round
        return type(again).call(again, site, request, timeout)

    again.call = back  # type: ignore[method-assign]
    caplog.set_level("INFO", "medfed.sites.run")
    across(folder, again, names, *overrides, f"resume={folder}")
    line = f"Not all sites took part in all rounds: {names[1]} missed 1; absences.json says why."
    assert line in caplog.text
    capsys.readouterr()
    show(folder)
    assert capsys.readouterr().out.count("missed") == 1
    record = json.loads((folder / "absences.json").read_text())
    assert record["absent"] == {"1": [names[1]]}
    run(tmp_path / "simulation", *overrides, record["simulation"])
    assert not same(tmp_path / "simulation", folder, ("hashes.json", "ledger.csv"))
    assert list(Run(folder).clients) == names


def test_a_site_that_is_busy_to_the_end_is_asked_no_more_after_it(tmp_path: Path):
    overrides = (*CLINICAL, "algorithm=fedavg", "partition.num_clients=3", "rounds=2")
    names = [f"hospital_{n}" for n in range(3)]
    transport = direct(tmp_path / "sites", names, *overrides)
    call, busy = transport.call, transport.sites[names[1]]

    def works(site: str, request: bytes, timeout: float) -> bytes:
        asked = Request.from_bytes(request)
        if (asked.kind, asked.round, site) == ("fit", 1, names[1]) and not busy.gate.lock.locked():
            busy.gate.lock.acquire()  # as a thread that computes would
        return call(site, request, timeout)

    transport.call = works  # type: ignore[method-assign]
    terms = dataclasses.replace(QUICK, probe=0.01)
    summary = across(tmp_path / "server", transport, names, *overrides, terms=terms)
    assert summary["not_tested"] == [names[1]]
    for thread in threading.enumerate():
        if thread.name == "medfed-site":
            thread.join(60)
            assert not thread.is_alive()
