"""Across sites noise is each site's, its spending is kept, and its ceiling holds for all runs."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from medfed.common.untrusted import read_tensors
from medfed.config.compose import described
from medfed.delivery.main import keep_bundle
from medfed.functional.privacy import epsilon, renyi
from medfed.records.folder import RunFolder
from medfed.run.privacy import Protection
from medfed.sites.agreement import Agreed, SiteFile
from medfed.sites.calls import Caller
from medfed.sites.check import check_site
from medfed.sites.newcomers import _reopened, agreed_for, onboard
from medfed.sites.policy import Ceiling, Spending
from medfed.sites.run import coordinate
from medfed.sites.site_folder import hospital
from medfed.sites.status import tables
from medfed.sites.withdrawal import SitesRecord
from medfed.sites.words import VetoError
from medfed.standalone.errors import ConfigError, SiteError
from tests.sites.direct import Direct
from tests.sites.hospitals import QUICK
from tests.sites.tables import EXPERIMENT, write_table
from tests.sites.toy_sites import opened

TWO = ("Basel", "Bern")
EXAMPLE = "privacy.example={epsilon:4,delta:1e-3,clip:1.0}"
WORDS = (
    *EXPERIMENT[:-2], "algorithm=fedper", "model=mlp", "model.network.dropout=0.2", "rounds=2",
    "local.steps=2", "data.scaling=client",
)  # fmt: skip


def sites(root: Path, agreed: Agreed, lines: str = "", names: tuple[str, ...] = TWO) -> dict:
    started = {}
    for name in names:
        (root / name).mkdir(exist_ok=True, parents=True)
        write_table(root / name / "ours.csv", (name,))
        text = f"site: {name}\ndata: {{path: ours.csv}}\npictures: {{format: none}}\n{lines}\n"
        (root / name / "site.yaml").write_text(text)
        file = SiteFile.read(root / name / "site.yaml")
        started[name] = hospital(agreed, file, keep_bundle)
    return started


def across(root: Path, agreed: Agreed, started: dict, server: str = "server", **resume):
    words = [*agreed.overrides, "data.path=null", f"folder={root / server}"]
    if resume:
        words.append(f"resume={root / server}")
    return coordinate(described(words), Direct(started), TWO, QUICK)


def spent(root: Path, name: str = "Basel") -> list[dict]:
    return json.loads((root / name / "medfed" / "privacy.json").read_text())


def model(root: Path, name: str = "Basel"):
    (path,) = (root / name / "medfed").glob("*/models/*.safetensors")
    return read_tensors(path)


def test_noise_is_the_sites_and_its_spending_is_kept(tmp_path, caplog):
    """Two runs of one agreement and seed differ; each hospital records what both have spent."""
    agreed = Agreed(TWO, (*WORDS, EXAMPLE))
    caplog.set_level("INFO", "medfed.sites.run")
    for run in ("first", "second"):
        summary = across(tmp_path / run, agreed, sites(tmp_path / run, agreed))
    assert {c: round(epsilon, 2) for c, epsilon in summary["epsilon"].items()} == {
        "Basel": 4.0,
        "Bern": 4.0,
    }
    assert "Epsilon, as the sites declare it, at delta 0.001: Basel 4, Bern 4." in caplog.text
    paper = Console(record=True, file=io.StringIO(), width=160)
    paper.print(tables(RunFolder(tmp_path / "second" / "server")))
    shown = paper.export_text()
    assert re.search(r"epsilon.*Basel[^\n]* 4 .*\n[^\n]*Bern[^\n]* 4 ", shown, re.S)
    first, second = (model(tmp_path / run) for run in ("first", "second"))
    assert all(not first[name].equal(second[name]) for name in first)
    for name in TWO:
        (entry,) = spent(tmp_path / "first", name)
        assert entry["draws"] == 4
        assert 3.9 < epsilon(entry["rate"], entry["noise"], 4, 1e-3) <= 4
    (folder,) = (tmp_path / "first" / "Basel" / "medfed").glob("clinical*/privacy.json")
    kept = json.loads(folder.read_text())
    assert kept["private"] is True
    assert kept["example"]["clients"]["Basel"]["gradients"] == 4


def test_repeated_rounds_spend_again(tmp_path):
    """A coordinator that is started again lets sites repeat a round: the record grows."""
    agreed = Agreed(TWO, (*WORDS, EXAMPLE))
    started = sites(tmp_path, agreed)
    calls = started["Bern"].answer

    def dies(request: bytes) -> bytes:
        if b'"kind":"evaluate"' in request:
            raise KeyboardInterrupt
        return calls(request)

    started["Bern"].answer = dies
    with pytest.raises(KeyboardInterrupt):
        across(tmp_path, agreed, started)
    started["Bern"].answer = calls
    assert spent(tmp_path)[0]["draws"] == 2
    summary = across(tmp_path, agreed, started, resume=True)
    assert spent(tmp_path)[0]["draws"] == 6
    assert summary["epsilon"]["Basel"] > 4
    (folder,) = (tmp_path / "Basel" / "medfed").glob("clinical*/privacy.json")
    kept = json.loads(folder.read_text())["example"]["clients"]["Basel"]
    assert kept["draws"] == 4 < kept["gradients"] == 6
    assert kept["epsilon"] > 4


def test_no_hospital_joins_a_run_with_noise_per_patient(tmp_path):
    """It failed there with a KeyError, and the coordinator read that word alone."""
    agreed = Agreed(TWO, (*WORDS, EXAMPLE))
    across(tmp_path, agreed, sites(tmp_path, agreed))
    with pytest.raises(ConfigError, match="to let hospitals join"):
        agreed_for(tmp_path / "server", "Chur", 3)
    late = Agreed((*TWO, "Chur"), agreed.overrides, joins=3)
    site = sites(tmp_path, late, names=("Chur",))["Chur"]
    run = SitesRecord.read(tmp_path / "server")
    caller = opened(Caller(Direct({"Chur": site}), ["Chur"], QUICK))
    federation = _reopened(RunFolder(tmp_path / "server"), run.clients)
    with pytest.raises(SiteError, match="Chur: it failed"):  # one that asks nevertheless
        onboard(caller, federation, "Chur", run)
    log = (tmp_path / "Chur" / "medfed" / "log.txt").read_text()
    assert "Client Chur was not part of the run, so privacy.example gives it no noise" in log


def test_a_ceiling_holds_for_all_runs_and_refuses_studies_without_noise(tmp_path, capsys):
    agreed = Agreed(TWO, (*WORDS, EXAMPLE))
    lines = "policy: {parts: [shared, preprocessing], privacy: {epsilon: 4.2, delta: 1e-3}}"
    assert "epsilon" not in across(tmp_path, agreed, sites(tmp_path, agreed, lines))
    again = Agreed(TWO, (*WORDS, EXAMPLE, "seed=1"))
    with pytest.raises(SiteError, match="Basel: its policy"):
        across(tmp_path, again, sites(tmp_path, again, lines), "again")
    log = (tmp_path / "Basel" / "medfed" / "log.txt").read_text()
    assert "all runs on these patients spend epsilon " in log
    assert "(4 so far), and policy.privacy of this site's file allows 4.2; do not take part" in log
    file = SiteFile.read(tmp_path / "Basel" / "site.yaml")
    with pytest.raises(VetoError, match="all runs on these patients spend epsilon"):
        check_site(again, file, file.config(again))
    assert "Noise protects each patient (privacy.example): after 4 draws epsilon is 4 at delta" in (
        capsys.readouterr().out
    )
    for words in (WORDS, (*WORDS, EXAMPLE.replace("}", ",unit:row}"))):
        other = Agreed(TWO, words)
        with pytest.raises(VetoError, match="does not protect each patient by noise"):
            check_site(other, file, file.config(other))


def test_spending_adds_up_and_stops_after_it_is_written(tmp_path):
    spending = Spending(Ceiling(3.0, 1e-3), tmp_path / "privacy.json")
    assert spending.epsilon(1e-3) == 0
    one = Protection(rate=0.2, draws=10, uses=2, noise=4.0, delta=1e-3)
    spending.check("a", one)
    spending.add("a", one, 20)
    assert spending.draws("a") == 10
    alone = epsilon(0.2, 4.0 / 2**0.5, 10, 1e-3)
    assert spending.epsilon(1e-3) == pytest.approx(alone)
    assert spending.epsilon(1e-3, {"a": one}) == pytest.approx(alone)  # its plan, not once more
    both = 20 * renyi(0.2, 4.0 / 2**0.5)
    spending.add("b", one, 20)
    assert spending.epsilon(1e-3) == pytest.approx(epsilon(0.2, 4.0 / 2**0.5, 20, 1e-3))
    assert both.any()
    with pytest.raises(VetoError, match=r"spend epsilon .* allows 3"):
        spending.add("b", one, 400)
    assert spending.draws("b") == 210
