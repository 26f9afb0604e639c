"""``medfed deploy`` as far as it goes without FLARE: the command line, the order, the job."""

import json
import logging

import pytest

from medfed.commands.deploy import main
from medfed.sites.agreement import Agreed
from medfed.sites.deploying import (
    BEGUN,
    FINISHED,
    STOPPED,
    Broken,
    Deployment,
    decoded,
    outcome,
    run_coordinator,
)
from medfed.sites.wire import Hello, Reply
from medfed.standalone.errors import CodecError
from tests.integration.runs import run
from tests.sites.direct import Direct
from tests.sites.hospitals import direct, same

CLINICAL = ("experiment=clinical_pfednet", "partition.num_clients=2", "local.steps=2")
SITES = ["hospital_0", "hospital_1"]
POSSIBLE = ("sites=[a,b]", "dry_run=x", "algorithm=fedavg", "data=csv", "data.label=ill")


def sentence(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 1
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    return line


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "sites=[NAME,NAME]"),
        (("sites=[]", "kit=x"), "sites=[NAME,NAME]"),
        (("sites=[a,b]",), "kit=DIR"),
        (("sites=[a,a]", "dry_run=x", "cut=true"), "each once"),
        (("-m", "sites=[a]", "kit=x"), "not -m"),
        (("sites=[a]", "kit=x", "terms.quorumm=1"), "did you mean quorum?"),
        (("sites=[a]", "kit=x", "cut=true", "terms.quorum=2"), "terms.quorum"),
        (("sites=[a]", "kit=x", "cut=true", "roundz=2"), "did you mean rounds"),
        (("sites=[a]", "kit=x", "cut=true", "resume=nowhere"), "nowhere is no run folder"),
        (("sites=[a]", "kit=x", "cut=true", "seed=0,1"), "Ambiguous value"),
        (
            ("sites=[a]", "kit=x", "experiment=nope"),
            "Unknown experiment 'nope' (one of yours: plugins=FOLDER",
        ),
        ((*POSSIBLE, "algorithm=pooled"), "trains on the data of all clients in one place"),
        ((*POSSIBLE, "partition=label_imbalance"), "LabelImbalance divides the patients of one"),
        ((*POSSIBLE, "channel.secure=masks"), "2 clients are too few to hide one in a sum of 3"),
        ((*POSSIBLE, "aggregation=krum"), "needs at least 5 clients, and there are 2"),
        (("sites=[a,b]", "dry_run=x", "study=nowhere.yaml"), "The plan nowhere.yaml is no file"),
    ],
)
def test_a_mistake_is_one_sentence(arguments, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert told in sentence(capsys, *arguments)
    assert not list(tmp_path.iterdir())


def test_a_dry_run_writes_a_job_without_code_and_what_is_agreed(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.pt").touch()
    main((*CLINICAL, f"sites=[{','.join(SITES)}]", "cut=true", "trainer.accelerator=cpu",
          "init.weights=w.pt",
          f"dry_run={tmp_path / 'dry'}", f"folder={tmp_path / 'run'}"))  # fmt: skip
    assert "applies only at the coordinator" in capsys.readouterr().err
    files = [p for p in (tmp_path / "dry").rglob("*") if p.is_file()]
    assert {p.suffix for p in files} == {".json"}
    assert not (tmp_path / "run").exists()
    agreed = json.loads((tmp_path / "dry" / "agreed.json").read_text())
    assert agreed["sites"] == SITES
    job = tmp_path / "dry" / "clinical"
    meta = json.loads((job / "meta.json").read_text())
    assert meta["deploy_map"] == {"coordinator": ["server"], "site": SITES}
    own = json.loads((job / "site/config/config_fed_client.json").read_text())["components"][0]
    assert decoded(own["args"]["agreed"]) == agreed
    told = (job / "coordinator/config/config_fed_server.json").read_text()
    main_part = json.loads(told)["components"][0]
    order = Deployment.of(main_part["args"]["deployment"])
    assert order.folder == str(tmp_path / "run")
    assert order.coordinator_only == (
        "trainer.accelerator=cpu",
        f"init.weights='{tmp_path / 'w.pt'}'",
    )


def order(tmp_path, *more, **rest):
    agreed = {
        "medfed": "",
        "code": "",
        "sites": SITES,
        "cut": True,
        "overrides": [*CLINICAL, *more],
    }
    told = tmp_path / "told"
    told.mkdir(exist_ok=True)
    return Deployment("clinical", agreed, str(tmp_path / "run"), output=str(told), **rest)


def test_an_order_is_carried_out_and_followed(tmp_path):
    """What the coordinator's process does under FLARE, over sites in this process."""
    asked = order(tmp_path, "rounds=2", terms={"patience": 250})
    before = logging.root.level
    run_coordinator(asked.text(), direct(tmp_path, SITES, *CLINICAL, "rounds=2"))
    assert outcome(tmp_path / "told") == (FINISHED, "")
    assert "round 2/2" in (tmp_path / "told" / "printed.txt").read_text()
    assert logging.root.level == before
    assert asked.resumed().resume
    again = tmp_path / "again"
    again.mkdir()
    run_coordinator(order(again, "rounds=2").text(), direct(again, SITES, *CLINICAL, "rounds=2"))
    assert not same(tmp_path / "run", again / "run")


def test_all_start_from_weights_that_each_has_for_itself(tmp_path):
    short = (*CLINICAL, "rounds=1", "algorithm=fedavg")
    run(tmp_path / "before", *short, "logger=none")
    weights = f"init.weights={tmp_path / 'before' / 'models' / 'hospital_0.safetensors'}"
    run(tmp_path / "simulation", *short, "logger=none", weights)
    _, alone, _ = Agreed.of([*short, weights], SITES, cut=True)
    assert alone == [weights]
    run_coordinator(
        order(tmp_path, *short[3:], coordinator_only=(weights, "logger=none")).text(),
        direct(tmp_path, SITES, *short, weights),
    )
    assert outcome(tmp_path / "told") == (FINISHED, "")
    assert not same(tmp_path / "run", tmp_path / "simulation")


def test_what_stops_the_run_is_told(tmp_path):
    found = direct(tmp_path, SITES, *CLINICAL)
    del found.sites["hospital_1"]
    asked = order(tmp_path, terms={"hello": 0, "grace": 0})
    assert outcome(tmp_path / "told") == ("", "")
    run_coordinator(asked.text(), found)
    how, why = outcome(tmp_path / "told")
    assert how == STOPPED
    assert "hospital_1" in why
    assert not asked.resumed().resume


def test_a_job_that_flare_ends_is_left_as_begun(tmp_path):
    class Ended(Direct):
        def call(self, site, request, timeout):
            raise SystemExit("FLARE ends the job")

    with pytest.raises(SystemExit):
        run_coordinator(order(tmp_path).text(), Ended({}))
    assert outcome(tmp_path / "told") == (BEGUN, "")


def test_a_site_that_cannot_start_says_no_more_than_the_type():
    site = Broken("a", "ConfigError")
    reply = Reply.from_bytes(site.answer(Hello("a", "s").to_bytes()))
    assert (reply.status, reply.reason) == ("failed", "ConfigError")
    assert Reply.from_bytes(site.answer(b"?")).reason == "bytes"
    with pytest.raises(CodecError):
        Reply.from_bytes(b"?")
