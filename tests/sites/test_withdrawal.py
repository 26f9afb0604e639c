"""A site that withdraws: the run goes on as a simulation without it, and forgets it on request."""

import json
from pathlib import Path

import pytest
import torch

from medfed.commands.main import main
from medfed.common.errors import SiteError
from medfed.common.untrusted import read_checkpoint
from medfed.config.compose import load
from medfed.federation.lightning.checkpoint import rounds_in
from medfed.sites.agreement import Agreed
from medfed.sites.calls import Terms
from medfed.sites.own_file import SiteFile
from medfed.sites.own_folder import hospital
from medfed.sites.run import coordinate
from medfed.sites.transport import Direct
from tests.integration.runs import run
from tests.sites.hospitals import same
from tests.sites.tables import EXPERIMENT, SITES, write_table

ROUNDS = (*EXPERIMENT, "rounds=2", "data.val_fraction=0.2")


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
    agreed, alone, _ = Agreed.of(ROUNDS, SITES)
    for name in SITES:
        (root / name).mkdir()
        write_table(root / name / "ours.csv", (name,))
        (root / name / "site.yaml").write_text(f"site: {name}\ndata: {{path: ours.csv}}\n")

    def sites(*names: str) -> Ends:
        files = {name: SiteFile.read(root / name / "site.yaml") for name in names}
        return Ends({name: hospital(agreed, file) for name, file in files.items()})

    def go_on(transport: Direct, *more: str):
        folder = f"folder={root / 'server'}"
        config = load([*agreed.overrides, *alone, "data.path=null", folder, *more])
        terms = Terms(timeout=20, hello=60, grace=0.1, probe=0.1, patience=1)
        return coordinate(config, transport, agreed.sites, terms)

    first = sites(*SITES)
    first.before = 1
    with pytest.raises(KeyboardInterrupt):
        go_on(first)
    return root, sites, go_on


def state_of(folder: Path) -> dict:
    return read_checkpoint(sorted(rounds_in(folder / "checkpoints"))[-1])["federation"]


def test_the_run_goes_on_as_a_simulation_without_it(stopped, capsys):
    root, sites, go_on = stopped
    server = root / "server"
    resume = f"resume={server}"
    with pytest.raises(SiteError, match="Bern"):
        go_on(sites("Basel", "Chur"), resume)  # that it is gone is not said yet
    before = state_of(server)
    assert before["server"]["num_samples"]["Bern"] > 0
    main(["site", "withdraw", f"run={server}", "site=Bern", "forget=true"])
    said = capsys.readouterr().out
    assert "Bern takes part in no round after round 1" in said
    assert "has forgotten: " in said
    after = state_of(server)
    assert float(after["server"]["num_samples"]["Bern"]) == 0
    assert not after["server"]["sketches"]["Bern"].any()
    for name, rows in after["server"]["personal"].items():
        assert torch.allclose(rows[1], rows[[0, 2]].mean(dim=0)), name
        assert torch.equal(rows[0], before["server"]["personal"][name][0])
    assert all("Bern" not in kept for kept in after["memory"].values())
    record = json.loads((server / "withdrawn.json").read_text())["sites"]["Bern"]
    assert record["after"] == 1
    assert {"num_samples", "personal", "sketches"} <= {*record["forgotten"]}
    summary = go_on(sites("Basel", "Chur"), resume)
    assert list(summary["clients"]) == ["Basel", "Chur"]
    assert summary["not_tested"] == ["Bern"]
    assert json.loads((server / "absences.json").read_text())["absent"] == {
        "1": ["Bern"],
    }


def test_who_withdraws_without_being_forgotten_is_merely_absent(tmp_path, capsys):
    """Byte for byte the simulation whose cohort lacks it from then on."""
    agreed, alone, _ = Agreed.of([*ROUNDS, "algorithm=fedavg"], SITES)
    write_table(tmp_path / "all.csv", SITES)
    absent = "cohort.absent=[[1,[Bern]]]"
    both = (*ROUNDS, "algorithm=fedavg", absent, f"data.path={tmp_path / 'all.csv'}")
    run(tmp_path / "simulation", *both, "partition=auto")
    for name in SITES:
        (tmp_path / name).mkdir()
        write_table(tmp_path / name / "ours.csv", (name,))
        (tmp_path / name / "site.yaml").write_text(f"site: {name}\ndata: {{path: ours.csv}}\n")
    files = {name: SiteFile.read(tmp_path / name / "site.yaml") for name in SITES}
    transport = Ends({name: hospital(agreed, file) for name, file in files.items()})
    config = [*agreed.overrides, *alone, "data.path=null", f"folder={tmp_path / 'server'}"]
    terms = Terms(timeout=20, hello=60, grace=0.1, probe=0.1, patience=1)
    transport.before = 1
    with pytest.raises(KeyboardInterrupt):
        coordinate(load(config), transport, SITES, terms)
    main(["site", "withdraw", f"run={tmp_path / 'server'}", "site=Bern"])
    transport.before = None
    transport.sites.pop("Bern")
    coordinate(load([*config, f"resume={tmp_path / 'server'}"]), transport, SITES, terms)
    server, whole = tmp_path / "server", tmp_path / "simulation"
    ours, theirs = (json.loads((f / "hashes.json").read_text()) for f in (server, whole))
    assert ours == {name: theirs[name] for name in ours}
    assert {*ours} == {"server", "client/Basel", "client/Chur"}
    assert same(server, whole) == ["hashes.json", "metrics.csv", "ledger.csv"]  # Bern is not there


def test_what_cannot_be_withdrawn(stopped, capsys):
    root, _, _ = stopped
    with pytest.raises(SystemExit):
        main(["site", "withdraw", f"run={root / 'server'}", "site=Berne"])
    assert "site=Berne is none of the run" in capsys.readouterr().err
