"""``medfed deploy run=FOLDER onboard=SITE``: as in a simulation, and each side keeps its part."""

from __future__ import annotations

import csv
import json
import re
import shutil
import warnings
from pathlib import Path

import pytest
from msgspec.structs import replace

from medfed.commands.deploy import main
from medfed.config.compose import load
from medfed.config.description import checked
from medfed.delivery.bundle.bundle import read_bundle
from medfed.delivery.main import export, keep_bundle
from medfed.federation.wire.ledger import Ledger
from medfed.records.folder import Run
from medfed.run.onboarding import onboard
from medfed.sites import wire
from medfed.sites.agreement import Agreed, SiteFile
from medfed.sites.deploying import FINISHED, STOPPED, Deployment, outcome, run_coordinator
from medfed.sites.newcomers import agreed_for
from medfed.sites.site_folder import hospital
from medfed.standalone.errors import ConfigError
from tests.integration.runs import left_in, resume, run
from tests.sites.direct import Direct
from tests.sites.hospitals import as_left
from tests.sites.tables import EXPERIMENT, SITES, write_table
from tests.sites.test_deploy import sentence

*OTHERS, NEW = SITES
SHORT = (*EXPERIMENT, "rounds=1")
STEPS = 3
TERMS = {"timeout": 250, "hello": 250, "grace": 0.1, "probe": 250, "patience": 250}


def at(root: Path, name: str, agreed: Agreed) -> Direct:
    """The transport to one hospital with a table of its own."""
    (root / name).mkdir(exist_ok=True)
    write_table(root / name / "ours.csv", (name,))
    (root / name / "site.yaml").write_text(f"site: {name}\ndata: {{path: ours.csv}}\n")
    return Direct({name: hospital(agreed, SiteFile.read(root / name / "site.yaml"), keep_bundle)})


def joined(root: Path, order: Deployment, transport: Direct) -> tuple[str, str]:
    """How an order has ended at the server."""
    told = root / "told"
    shutil.rmtree(told, ignore_errors=True)
    told.mkdir()
    text = Deployment(**{**vars(order), "output": str(told), "terms": TERMS}).text()
    with warnings.catch_warnings(record=True) as remarks:
        warnings.simplefilter("always")
        run_coordinator(text, transport)
    # It printed them to whoever follows the run.
    assert [str(r.message) for r in remarks if "LeafSpec" in str(r.message)] == []
    return outcome(told)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A simulation that kept one hospital out, and the same across sites, with it later."""
    root = tmp_path_factory.mktemp("late")
    write_table(root / "all.csv", SITES)
    keeping = (f"data.path={root / 'all.csv'}", "partition=auto", f"keep_out=[{NEW}]")
    run(root / "simulation", *SHORT, *keeping)
    agreed, _, _ = Agreed.of(SHORT, OTHERS)
    sites = Direct({c: at(root, c, agreed).sites[c] for c in OTHERS})
    order = Deployment("clinical", agreed.record(), str(root / "server"), ("logger=none",))
    assert joined(root, order, sites) == (FINISHED, "")
    before = {name: (root / "server" / name).read_bytes() for name in left_in(root / "server")}
    agreed = agreed_for(root / "server", NEW, STEPS)
    order = Deployment("clinical", agreed.record(), order.folder, onboard=NEW)
    assert order.expected == [NEW]
    for _ in range(2):  # as where FLARE ends the first job
        assert joined(root, order, at(root, NEW, agreed)) == (FINISHED, "")
    said = (root / "told" / "printed.txt").read_text()
    assert f"{NEW} has joined by the rule of pfednet" in said
    return root, before


def own(root: Path) -> Path:
    (found,) = (root / NEW / "medfed").glob("clinical-*-joined")
    return found


def test_a_hospital_gets_what_it_gets_in_a_simulation(done):
    root, _ = done
    rows = onboard(root / "simulation", NEW, [1000], STEPS).rows
    expected = next(row for row in rows if row.rule == "own")
    with (root / "server" / "onboarding.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert {n: float(row[n]) for n in expected.metrics} == as_left(expected.metrics)
    assert (row["client"], row["rule"], row["steps"]) == (NEW, "own", str(STEPS))
    assert int(row["samples"]) == expected.samples
    ledger = Ledger.from_csv((own(root) / "ledger.csv").read_text())
    columns = {way: ledger.total(direction=way, phase="preprocessing") for way in ("up", "down")}
    assert min(columns.values()) > 0  # it tells of its columns, too, which a simulation need not
    assert int(row["up"]) == expected.up + columns["up"] == ledger.total(direction="up")
    assert int(row["down"]) == expected.down + columns["down"] == ledger.total(direction="down")


def test_nothing_of_the_run_changes_and_no_model_is_at_the_server(done):
    root, before = done
    after = {name: (root / "server" / name).read_bytes() for name in left_in(root / "server")}
    assert {n for n in after if after[n] != before.get(n)} == {"onboarding.csv", "onboarding.json"}


def test_the_hospital_keeps_its_model(done):
    root, _ = done
    folder = own(root)
    bundle = read_bundle(folder / "bundle" / NEW)
    assert bundle.metadata["medfed"]["card"]["hospitals"] == 3
    assert (folder / "models" / f"{NEW}.safetensors").is_file()
    summary = json.loads((folder / "summary.json").read_text())
    record = json.loads((root / "server" / "onboarding.json").read_text())
    assert as_left(summary["clients"]) == {NEW: record["rows"][0]["metrics"]}
    assert list(json.loads((folder / "splits.json").read_text())["clients"]) == [NEW]
    with (folder / "cases.csv").open(newline="") as file:
        assert {row["client"] for row in csv.DictReader(file)} == {NEW}


def test_the_coordinators_folder_says_where_models_are(done):
    """It said that preprocessing.json is damaged, or that another configuration is resumed."""
    root, _ = done
    server, keys = Run(root / "server"), [f"run={root / 'server'}", "bits=2"]
    table = f"data.path={root / 'all.csv'}"
    asked = {
        "export": lambda: export(checked(load(keys, "export"))),
        "model": lambda: server.model(OTHERS[0]),
        "init": lambda: run(root / "other", *SHORT, f"init.weights={root / 'server'}", table),
        "preprocessing": lambda: server.preprocessing,
    }
    for ask in asked.values():
        with pytest.raises(ConfigError, match=r"was across sites, and this is the coordinator's"):
            ask()
    with pytest.raises(ConfigError, match=r"its coordinator resumes by medfed deploy resume="):
        resume(root / "server", *SHORT, table)
    log = (root / OTHERS[0] / "medfed" / "log.txt").read_text()
    (named,) = {*re.findall(r"The model and metrics of this site are in (.*)\.\n", log)}
    keys = [f"run={named}", f"out={root / 'smaller'}", "bits=2"]
    (bundle,) = export(checked(load(keys, "export")))
    assert read_bundle(bundle).metadata["medfed"]["client"] == OTHERS[0]


def test_another_configuration_and_a_site_that_is_not_there_stop_it(done):
    root, _ = done
    agreed = agreed_for(root / "server", NEW, STEPS)
    other = Agreed(agreed.sites, (*agreed.overrides, "seed=7"))
    order = Deployment("clinical", agreed.record(), str(root / "server"), onboard=NEW)
    how, why = joined(root, order, at(root, NEW, other))
    assert how == STOPPED
    assert f"Site {NEW} has another configuration than the run: " in why
    assert joined(root, order, Direct({}))[1].startswith(f"{NEW}: it did not answer")


@pytest.mark.parametrize(
    ("claimed", "why"),
    [({"auroc": 3.0}, "its auroc is 3."), ({"made_up": 0.5}, "it has other metrics.")],
    ids=["impossible", "unknown"],
)
def test_a_hospital_with_metrics_that_it_cannot_have_is_named(claimed, why, done):
    root, _ = done
    agreed = agreed_for(root / "server", NEW, STEPS)
    honest, before = at(root, NEW, agreed).sites[NEW], left_in(root / "server")
    record = (root / "server" / "onboarding.json").read_bytes()

    class Lying:
        def answer(self, request: bytes) -> bytes:
            reply = wire.Reply.from_bytes(honest.answer(request))
            if isinstance(reply, wire.Joined) and reply.metrics:
                reply = replace(reply, metrics={**reply.metrics, **claimed})
            return reply.to_bytes()

    order = Deployment("clinical", agreed.record(), str(root / "server"), onboard=NEW)
    assert joined(root, order, Direct({NEW: Lying()})) == (STOPPED, f"{NEW}: {why}")
    assert left_in(root / "server") == before
    assert (root / "server" / "onboarding.json").read_bytes() == record


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("onboard=Chur", "kit=x"), "run=FOLDER onboard=SITE"),
        (("run=RUN", "kit=x"), "run=FOLDER onboard=SITE"),
        (("run=RUN", "onboard=Chur"), "kit=DIR"),
        (("run=RUN", "onboard=Chur", "kit=x", "rounds=3"), "rounds=3 cannot be set"),
        (("run=RUN", "onboard=Chur", "kit=x", "sites=[a]"), "sites=[a] cannot be set"),
        (("run=RUN", "onboard=Chur", "kit=x", "onboard_steps=0"), "onboard_steps must be"),
        (("run=nowhere", "onboard=Chur", "kit=x"), "nowhere is no run folder"),
        (("run=RUN", "onboard=Bern", "kit=x"), "onboard=Bern was a site of"),
        (("run=RUN", "onboard=St. Mary", "kit=x"), "must have a name of letters"),
        (("run=SIMULATION", "onboard=Chur", "kit=x"), "is a simulation; onboard to it by medfed"),
        (("run=TORN", "onboard=Chur", "kit=x"), "has not finished"),
    ],
)
def test_a_mistake_is_one_sentence(arguments, told, done, capsys):
    root, _ = done
    (root / "torn").mkdir(exist_ok=True)
    shutil.copy(root / "server" / "config.yaml", root / "torn")
    named = {"RUN": root / "server", "SIMULATION": root / "simulation", "TORN": root / "torn"}
    for name, folder in named.items():
        arguments = [a.replace(f"run={name}", f"run={folder}") for a in arguments]
    assert told in sentence(capsys, *arguments)


def test_a_dry_run_writes_what_the_hospital_checks(done, tmp_path, capsys):
    root, _ = done
    main((f"run={root / 'server'}", f"onboard={NEW}", f"dry_run={tmp_path}"))
    agreed = Agreed.read(tmp_path / "agreed.json")
    assert agreed.sites == SITES
    meta = json.loads((tmp_path / "clinical" / "meta.json").read_text())
    assert meta["deploy_map"]["site"] == [NEW]
