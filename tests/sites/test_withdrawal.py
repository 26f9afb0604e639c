"""A site that withdraws: the run goes on as a simulation without it, and forgets it on request."""

import json
import re
from pathlib import Path

import pytest
import torch

from medfed.commands.main import main
from medfed.common.untrusted import read_checkpoint
from medfed.config.compose import load
from medfed.config.description import describe
from medfed.delivery.main import keep_bundle
from medfed.federation.lightning.checkpoint import rounds_in
from medfed.sites.agreement import Agreed, SiteFile
from medfed.sites.deploying import Deployment
from medfed.sites.run import coordinate
from medfed.sites.site_folder import hospital
from medfed.sites.withdrawal import forgotten_state
from medfed.standalone.files import locked
from tests.integration.runs import run
from tests.sites.direct import Direct
from tests.sites.hospitals import QUICK
from tests.sites.tables import EXPERIMENT, SITES, write_table

TYPED = (*EXPERIMENT, "rounds=2", "algorithm=fedavg", "algorithm.weighting=samples")


class Ends(Direct):
    """A transport whose coordinator is stopped before a round."""

    before: int | None = None

    def call(self, site: str, request: bytes, timeout: float) -> bytes:
        if b'"kind":"fit"' in request and f'"round":{self.before},'.encode() in request:
            raise KeyboardInterrupt
        return super().call(site, request, timeout)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run of three sites that was stopped after a round, and what starts its sites again."""
    root = tmp_path_factory.mktemp("withdrawal")
    agreed, alone, _ = Agreed.of(TYPED, SITES)
    for name in SITES:
        (root / name).mkdir()
        write_table(root / name / "ours.csv", (name,))
        (root / name / "site.yaml").write_text(f"site: {name}\ndata: {{path: ours.csv}}\n")

    def sites(*names: str) -> Ends:
        files = {name: SiteFile.read(root / name / "site.yaml") for name in names}
        return Ends({name: hospital(agreed, file, keep_bundle) for name, file in files.items()})

    def go_on(transport: Direct, *more: str):
        folder = f"folder={root / 'server'}"
        config = load([*agreed.overrides, *alone, "data.path=null", folder, *more])
        return coordinate(describe(config), transport, agreed.sites, QUICK)

    first = sites(*SITES)
    first.before = 1
    with pytest.raises(KeyboardInterrupt):
        go_on(first)
    return root, sites, go_on


def state_of(folder: Path) -> dict:
    return read_checkpoint(sorted(rounds_in(folder / "checkpoints"))[-1])["federation"]


def test_the_run_goes_on_as_a_simulation_without_it(stopped, capsys):
    root, sites, go_on = stopped
    server, resume = root / "server", f"resume={root / 'server'}"
    before = state_of(server)["server"]["num_samples"]
    with pytest.raises(SystemExit):
        main(["site", "withdraw", f"run={server}", "site=Berne"])
    error = capsys.readouterr().err
    assert "site=Berne is not a site of the run" in error
    assert "(did you mean Bern?)" in error
    # A run under way would go on to ask the site, and write its checkpoints again.
    kept = {path: path.read_bytes() for path in server.rglob("*.ckpt")}
    with locked(server, ".lock"), pytest.raises(SystemExit):
        main(["site", "withdraw", f"run={server}", "site=Bern", "forget=true"])
    assert f"already works in {server}; wait until it ends" in capsys.readouterr().err
    assert not (server / "withdrawn.json").exists()
    assert kept == {path: path.read_bytes() for path in server.rglob("*.ckpt")}
    main(["site", "withdraw", f"run={server}", "site=Bern", "forget=true"])
    said = capsys.readouterr().out
    assert "Bern takes part in no round after round 1" in said
    assert "; resume the run with Basel, Chur." in said
    assert "has deleted its state of this site: num_samples." in said
    main(["site", "status", f"run={server}"])
    shown = capsys.readouterr().out
    assert re.findall(r"(\w+) +withdrawn ", shown) == ["Bern"]
    after = state_of(server)
    assert before["Bern"] > 0
    assert after["server"]["num_samples"] == {**before, "Bern": torch.zeros(1).double()}
    record = json.loads((server / "withdrawn.json").read_text())["sites"]
    assert record == {"Bern": {"after": 1, "forgotten": ["num_samples"]}}
    order = Deployment("clinical", {"sites": SITES}, str(server), resume=True)
    assert order.expected == ["Basel", "Chur"]  # for whom FLARE's job waits
    summary = go_on(sites("Basel", "Chur"), resume)
    assert list(summary["clients"]) == ["Basel", "Chur"]
    assert summary["not_tested"] == ["Bern"]
    capsys.readouterr()
    main(["site", "withdraw", f"run={server}", "site=Bern"])
    assert "; the run has finished, so there is nothing to resume." in capsys.readouterr().out
    absences = json.loads((server / "absences.json").read_text())
    assert absences["absent"] == {"1": ["Bern"]}
    # The simulation that the record names, of one table of all.
    write_table(root / "all.csv", SITES)
    table = (f"data.path={root / 'all.csv'}", "partition=auto", absences["simulation"])
    run(root / "simulation", *TYPED, *table)
    ours, theirs = (
        json.loads((root / f / "hashes.json").read_text()) for f in ("server", "simulation")
    )
    assert {c: ours[f"client/{c}"] for c in ("Basel", "Chur")} == {
        c: theirs[f"client/{c}"] for c in ("Basel", "Chur")
    }


def test_what_is_kept_of_one_client_is_forgotten():
    torch.manual_seed(0)
    server = {
        "shared": {"a": torch.rand(3)},
        "personal": {"w": torch.rand(3, 2), "b": torch.rand(3, 1)},
        "admm": {"w": torch.rand(4)},
        "sketches": {c: torch.rand(2) for c in SITES},
        "model/Bern": {"w": torch.rand(2)},
        "model/Chur": {"w": torch.rand(2)},
        "lacks": {"shared": torch.rand(3)},
    }
    found, forgotten = forgotten_state(server, "Bern", 1, 3)
    assert forgotten == ["personal", "sketches", "model/Bern"]
    rows = server["personal"]["w"]
    assert torch.equal(found["personal"]["w"][[0, 2]], rows[[0, 2]])
    assert torch.allclose(found["personal"]["w"][1], rows[[0, 2]].mean(dim=0))
    assert found["admm"] == {}
    assert not found["sketches"]["Bern"].any()
    assert not found["model/Bern"]["w"].any()
    for group in ("shared", "lacks", "model/Chur"):
        assert found[group] == server[group]
    assert server["sketches"]["Bern"].all()  # the state that was given stays
