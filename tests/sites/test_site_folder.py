"""What a site keeps for itself equals what a simulation has of that client, and stays there."""

import csv
import json
from pathlib import Path

import pytest

from medfed.config.compose import described, load
from medfed.config.description import describe
from medfed.delivery.bundle.bundle import read_bundle
from medfed.delivery.main import keep_bundle
from medfed.federation.wire.ledger import Ledger
from medfed.sites.agreement import Agreed, SiteFile
from medfed.sites.run import coordinate
from medfed.sites.site_folder import hospital
from medfed.sites.wire import Agree, Begin, Client, Hello, Load, Reply
from tests.integration.runs import run
from tests.sites.direct import Direct
from tests.sites.hospitals import EQUAL, QUICK, same
from tests.sites.tables import EXPERIMENT, SITES, write_table


class Overheard(Direct):
    """Keeps every byte that passes."""

    said = b""

    def call(self, site: str, request: bytes, timeout: float) -> bytes:
        reply = super().call(site, request, timeout)
        self.said += request + reply
        return reply


def hospitals(root: Path, agreed: Agreed) -> Overheard:
    for name in agreed.sites:
        (root / name).mkdir(exist_ok=True)
        write_table(root / name / "ours.csv", (name,))
        (root / name / "site.yaml").write_text(f"site: {name}\ndata: {{path: ours.csv}}\n")
    files = {name: SiteFile.read(root / name / "site.yaml") for name in agreed.sites}
    return Overheard({name: hospital(agreed, file, keep_bundle) for name, file in files.items()})


def folder_of(root: Path, site: str) -> Path:
    (found,) = (root / site / "medfed").glob("clinical-*")
    return found


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A simulation of three hospitals, and the same across three sites with a table each."""
    root = tmp_path_factory.mktemp("sites")
    write_table(root / "all.csv", SITES)
    run(root / "simulation", *EXPERIMENT, f"data.path={root / 'all.csv'}", "partition=auto")
    agreed, alone, _ = Agreed.of([*EXPERIMENT, "logger=none"], SITES)
    transport = hospitals(root, agreed)
    config = load([*agreed.overrides, *alone, "data.path=null", f"folder={root / 'server'}"])
    coordinate(describe(config), transport, agreed.sites, QUICK)
    return root, transport


def rows(path: Path, site: str) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return [
            row
            for row in csv.DictReader(file)
            if row["client"] == site and row.get("split") != "train"
        ]


def test_sites_with_their_own_tables_equal_a_simulation_of_all(done):
    root, _ = done
    assert not same(root / "simulation", root / "server", EQUAL)


@pytest.mark.parametrize("site", SITES)
def test_a_sites_folder_equals_the_simulations_client(done, site):
    root, _ = done
    own, whole = folder_of(root, site), root / "simulation"
    model = f"models/{site}.safetensors"
    assert (own / model).read_bytes() == (whole / model).read_bytes()
    for name in ("metrics.csv", "cases.csv"):
        assert rows(own / name, site) == rows(whole / name, site)
        assert len(rows(own / name, site)) == (own / name).read_text().count("\n") - 1
    ledgers = [Ledger.from_csv((f / "ledger.csv").read_text()) for f in (own, whole)]
    mine, theirs = ([e for e in ledger.entries if e.client == site] for ledger in ledgers)
    assert sorted(mine) == sorted(theirs)
    found, expected = (json.loads((f / "summary.json").read_text()) for f in (own, whole))
    assert found["clients"] == {site: expected["clients"][site]}
    assert found["selected_round"] == expected["selected_round"]
    assert found["steps"] == {site: expected["steps"][site]}
    splits, all_ = (json.loads((f / "splits.json").read_text())["clients"] for f in (own, whole))
    assert splits == {site: all_[site]}
    assert (own / "pictures" / "bytes.png").is_file()
    bundle = read_bundle(own / "bundle" / site)
    assert bundle.metadata["medfed"]["card"]["hospitals"] == 3


def test_a_coordinator_that_is_started_again_doubles_no_entry(tmp_path):
    """The site lives on: what it counted of a round that came to nothing is forgotten."""
    agreed, alone, _ = Agreed.of([*EXPERIMENT, "algorithm=fedavg", "rounds=1"], SITES[:2])
    transport = hospitals(tmp_path, agreed)
    calls = transport.call

    def stopped(site: str, request: bytes, timeout: float) -> bytes:
        if b'"kind":"evaluate"' in request:
            raise KeyboardInterrupt
        return calls(site, request, timeout)

    config = [*agreed.overrides, *alone, "data.path=null", f"folder={tmp_path / 'server'}"]
    transport.call = stopped
    with pytest.raises(KeyboardInterrupt):
        coordinate(described(config), transport, agreed.sites, QUICK)
    transport.call = calls
    coordinate(
        described([*config, f"resume={tmp_path / 'server'}"]), transport, agreed.sites, QUICK
    )
    found, whole = (
        Ledger.from_csv((folder / "ledger.csv").read_text())
        for folder in (folder_of(tmp_path, "Bern"), tmp_path / "server")
    )
    assert sorted(found.entries) == sorted(e for e in whole.entries if e.client == "Bern")
    counted, summary = (
        json.loads((folder / "summary.json").read_text())
        for folder in (folder_of(tmp_path, "Bern"), tmp_path / "server")
    )
    for cost in ("steps", "gradient_passes", "forward_passes"):
        assert counted[cost] == {"Bern": summary[cost]["Bern"]}
        assert summary[cost]["Bern"] or cost == "forward_passes"


def test_no_patient_and_no_file_has_left_a_site(done):
    root, transport = done
    assert len(transport.said) > 10_000
    for private in (b"P001", b"P002", b"ours.csv", b"hospital\x00", str(root).encode()):
        assert private not in transport.said
    server = [p for p in (root / "server").rglob("*") if p.suffix in (".json", ".csv", ".yaml")]
    assert server
    for path in server:
        assert "P001" not in path.read_text()
    assert not (root / "server" / "models").exists()


def test_the_text_of_an_error_stays_in_the_sites_log(tmp_path, monkeypatch):
    simple = ("data.scaling=client", "data.features=[age,crp]", "data.missing_indicator=false")
    agreed = Agreed(("Basel",), (*EXPERIMENT[:-3], *simple))
    (site,) = hospitals(tmp_path, agreed).sites.values()
    table = tmp_path / "Basel" / "ours.csv"
    table.write_text(table.read_text() + "Anna Muster,Basel,60,f,born 1957,1\n")

    def answered(kind, **rest) -> Reply:
        data = site.answer(kind("Basel", "session", **rest).to_bytes())
        assert b"Muster" not in data
        assert b"1957" not in data
        return Reply.from_bytes(data)

    log = tmp_path / "Basel" / "medfed" / "log.txt"
    assert answered(Hello).reason == "DataError"
    assert "born 1957" in log.read_text()
    write_table(table, ("Basel",))
    assert answered(Hello).status == "ok"
    assert answered(Agree).status == "ok"
    clients = [Client("Basel", site.workplace.facts().num_samples)]
    job = "0" * 31
    assert answered(Begin, clients=clients, job=f"../{job}").reason == "job"
    assert answered(Begin, clients=clients, job=job).status == "ok"

    def fails():
        raise ValueError("the scan of Anna Muster is torn")

    monkeypatch.setattr(site.module.federation, "digests", fails)
    assert answered(Load, round=0).reason == "ValueError"
    assert "Anna Muster is torn" in log.read_text()
    assert str(tmp_path).encode() not in site.answer(b"broken")
