"""``medfed site``: what a hospital reads before it takes part."""

import json
import re
from pathlib import Path

import pytest

from medfed.commands.main import main
from medfed.commands.methods import method, yamls
from medfed.federation.algorithm import Algorithm
from medfed.federation.wire.ledger import Ledger
from medfed.sites.agreement import Agreed, SiteFile
from medfed.sites.check import traffic_of
from medfed.sites.wire import Reply, Trained
from medfed.sites.words import words_for
from medfed.standalone.errors import DataError
from tests.integration.runs import run
from tests.pages import DOCS, write_files
from tests.sites.tables import EXPERIMENT, SITES, write_table


@pytest.fixture(scope="module")
def hospital(tmp_path_factory):
    """The folder of a hospital, with its own table, its file, and that of all."""
    folder = tmp_path_factory.mktemp("bern")
    write_table(folder / "ours.csv", ("Bern",))
    (folder / "site.yaml").write_text("site: Bern\ndata:\n  path: ours.csv\n")
    main(["deploy", f"dry_run={folder}", f"sites=[{','.join(SITES)}]", *EXPERIMENT])
    return folder


def look(hospital: Path, capsys, *more: str) -> str:
    capsys.readouterr()
    files = [f"agreed={hospital / 'agreed.json'}", f"local={hospital / 'site.yaml'}"]
    main(["site", "check", *files, *more])
    return " ".join(capsys.readouterr().out.split())


def test_a_hospital_reads_what_it_has_and_what_would_leave(hospital, capsys):
    before = sorted(hospital.iterdir())
    said = look(hospital, capsys)
    assert "Bern │ 80 of 80 │ 48 / 16 / 16" in said
    assert "that there are 48 training samples" in said
    assert "columns (age, sex, crp) and of classes or regions (0, 1)" in said
    assert "Pooled scaling sends the server for each column the number of values" in said
    assert "holds of each column its name, its scaling, a rounded range, and categories" in said
    assert "Never leaves: images, rows, names or ids of patients" in said
    (line,) = re.findall(r"has no line agreed, .* add the line: (agreed: [0-9a-f]{64}) ", said)
    assert said.endswith("Site Bern is ready.")
    assert "at the end the metrics over 16 test patients, whether these are few" in said
    written = (hospital / "site.yaml").read_text()
    (hospital / "site.yaml").write_text(f"{written}{line}\npolicy: {{test_metrics: 0}}\n")
    less = look(hospital, capsys)
    assert "Approved: agreed in the file of site Bern names this study." in less
    assert "at the end nothing of the test patients (policy.test_metrics). Also" in less
    (hospital / "site.yaml").write_text(written)
    assert not any(name in said for name in ("P001", "Basel │", "ours.csv │"))
    assert sorted(hospital.iterdir()) == before


def test_a_hospital_describes_its_patients_without_few_of_them(hospital, tmp_path, capsys):
    files = [f"agreed={hospital / 'agreed.json'}", f"local={hospital / 'site.yaml'}"]
    main(["site", "describe", *files, f"folder={tmp_path / 'bern'}"])
    (bern,) = json.loads((tmp_path / "bern" / "look.json").read_text())["hospitals"]
    assert (bern["hospital"], bern["least"]) == ("Bern", 20)
    assert bern["tables"]["Patients"] == {"train": 48, "val": None, "test": None}
    assert bern["tables"]["Means"]["age"] is not None
    assert not re.search(r"P\d", (tmp_path / "bern" / "look.json").read_text())
    more = json.loads((hospital / "agreed.json").read_text())
    more["overrides"].append("data.most_patients=63")
    (tmp_path / "agreed.json").write_text(json.dumps(more))
    fewer = [f"agreed={tmp_path / 'agreed.json'}", files[1], f"folder={tmp_path / 'fewer'}"]
    with pytest.raises(SystemExit):  # one patient fewer
        main(["site", "describe", *fewer])
    assert "combined with those that left before, show 1 patients" in capsys.readouterr().err
    assert not (tmp_path / "fewer").exists()
    other = {**bern, "hospital": "Basel", "least": 0}
    (tmp_path / "basel.json").write_text(json.dumps({"hospitals": [other]}))
    both = f"of=[{tmp_path / 'bern' / 'look.json'},{tmp_path / 'basel.json'}]"
    main(["look", both, f"folder={tmp_path / 'both'}"])
    page = (tmp_path / "both" / "look.html").read_text()
    assert "withheld" in page
    assert "The least: Bern 20." in page
    with pytest.raises(SystemExit):
        main(["site", "describe", *files, f"folder={tmp_path / 'bern'}"])
    assert "is not empty; name an empty one by folder=FOLDER" in capsys.readouterr().err


def test_what_could_single_out_a_patient_is_red(hospital, tmp_path, monkeypatch, capsys):
    """Logistic regression with a batch of one: each message was a patient's row."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    alone = ("algorithm=fedavg", "data.batch_size=1", "local.steps=1", "data.test_fraction=0.04")
    Agreed(SITES, (*EXPERIMENT[:-2], *alone)).write(tmp_path / "agreed.json")
    (tmp_path / "site.yaml").write_text(f"site: Bern\ndata:\n  path: {hospital / 'ours.csv'}\n")
    said = look(tmp_path, capsys)
    red = re.findall("\x1b\\[31m(.*?)\x1b", said)
    assert red == [
        "Patients behind one message (local.steps and data.batch_size): at least 1; gradients of "
        "so few can be undone.",
        "With 3 test patients a metric reveals something about each of them; set "
        "data.val_fraction and data.test_fraction higher if that is too much.",
    ]
    (tmp_path / "site.yaml").write_text(
        f"site: Bern\ndata: {{path: {hospital / 'ours.csv'}}}\npolicy: {{least_per_message: 2}}\n"
    )
    with pytest.raises(SystemExit):
        look(tmp_path, capsys)
    assert "policy.least_per_message of this site's file asks for 2" in capsys.readouterr().err


def test_a_hospital_reads_whether_sums_are_under_masks(hospital, tmp_path, capsys):
    masks = ("algorithm=fedavg", "channel.secure=masks")
    Agreed(SITES, (*EXPERIMENT[:-2], *masks)).write(tmp_path / "agreed.json")
    (tmp_path / "site.yaml").write_text(f"site: Bern\ndata:\n  path: {hospital / 'ours.csv'}\n")
    said = look(tmp_path, capsys)
    assert "operator learns of the part shared only the sum over the sites of a round" in said
    assert "operator sees everything that this site sends." in look(hospital, capsys)


def test_the_bytes_are_those_of_a_run(hospital, tmp_path, monkeypatch, capsys):
    """Tried by one site alone, against what it sends in a simulation of all."""
    shown = {}
    monkeypatch.setattr(
        "medfed.sites.check.print_traffic", lambda found, rounds, _: shown.update({rounds: found})
    )
    look(hospital, capsys)
    write_table(tmp_path / "all.csv", SITES)
    run(tmp_path / "run", *EXPERIMENT, f"data.path={tmp_path / 'all.csv'}", "partition=auto")
    ledger = Ledger.from_csv((tmp_path / "run" / "ledger.csv").read_text())
    ((rounds, tried),) = shown.items()
    for part in tried:
        own = {"client": "Bern", "direction": part.direction, "part": part.part}
        if part.part == "preprocessing":  # whose numbers have other digits
            assert part.first == pytest.approx(ledger.total(**own), rel=0.1)
        else:
            later = ledger.total(**own, phase="deliver")
            total = part.first + part.further * (rounds - 1)
            assert total == ledger.total(**own) - later, part
    assert {p.part for p in tried if p.direction == "up"} == {
        e.part for e in ledger.entries if e.direction == "up"
    }


LEAVES = {
    "hello": {"greeting": "hashes of the agreed keys"},
    "agree": {"facts": "that there are 48 training samples"},
    "begin": {"rounds": "the rounds that this site keeps"},
    "keys": {"keys": "public keys and shares for the masks", "given": "shares for the masks"},
    "shares": {"boxes": "shares for the masks"},
    "fit": {"steps": "the number of gradient steps", "passes": "steps and passes"},
    "unmask": {"shares": "shares for the masks"},
    "evaluate": {
        "metrics": "the metrics, such as auroc, over 16 validation patients",
        "diverged": "whether training diverges",
        "point": "thresholds, calibration, quantiles of misfits",
        "small": "whether these are few",
    },
    "across": {"metrics": "the whole model with its personal parts"},
    "commit": {
        "steps": "the number of gradient steps",
        "passes": "steps and passes",
        "loss": "their mean training loss",
        "epsilon": "epsilon so far",
    },
    "load": {"digest": "of the rounds that this site keeps"},
    "onboard": {"metrics": "the metrics over 16 test patients"},
    "declined": {"of": "", "status": "", "reason": "the type of the error"},
    "ask": {},
    "bring": {},  # of studies, which the check lists by part
}


def test_a_hospital_reads_of_each_field_of_its_replies(hospital, tmp_path, capsys):
    """Thresholds, calibration and epsilon left, and the check did not say so."""
    fields = {
        kind.__struct_config__.tag: {*kind.__struct_fields__} - {*Reply.__struct_fields__}
        for kind in (*Reply.__subclasses__(), *Trained.__subclasses__())
    }
    assert fields == {kind: {*words} for kind, words in LEAVES.items()}
    here = f"site: Bern\ndata: {{path: {hospital / 'ours.csv'}}}\npolicy: {{send_model: true}}\n"
    (tmp_path / "site.yaml").write_text(here)
    said = ""
    noise = "privacy.example={epsilon:8,delta:1e-3,clip:1}"
    for more in (("channel.secure=masks",), (noise, "data.scaling=client")):
        Agreed(SITES, (*EXPERIMENT[:-2], "algorithm=fedavg", *more)).write(tmp_path / "agreed.json")
        said += look(tmp_path, capsys)
    for kind, words in LEAVES.items():
        assert [name for name, text in words.items() if text not in said] == [], kind


def test_a_check_fails_where_the_run_would(hospital, tmp_path, capsys):
    study = (*EXPERIMENT[:-2], "data.scaling=client", "data.test_fraction=0", "algorithm=fedavg")
    Agreed(SITES, study).write(tmp_path / "agreed.json")
    here = f"site: Bern\ndata: {{path: {hospital / 'ours.csv'}}}\n"
    (tmp_path / "site.yaml").write_text(here)
    with pytest.raises(SystemExit):
        look(tmp_path, capsys)
    assert "No client has a test patient" in capsys.readouterr().err
    (tmp_path / "site.yaml").write_text(f"{here}folder: site.yaml/medfed\n")
    with pytest.raises(SystemExit):
        look(tmp_path, capsys)
    assert "nothing can be written to folder" in capsys.readouterr().err


def test_every_part_of_every_method_has_words():
    parts = {p for name, yaml in yamls().items() for p in method(name, yaml).kind.parts_sent}
    assert parts <= {*words_for("parts")}


def test_every_method_with_a_statistic_says_how_many_patients_stand_behind_it():
    kinds = {method(name, yaml).kind for name, yaml in yamls().items()}
    sketching = {kind for kind in kinds if {"sketch", "features"} & {*kind.parts_sent}}
    assert len(sketching) >= 6
    assert all(kind.summaries is not Algorithm.summaries for kind in sketching)


def test_a_simulation_says_what_hospitals_would_refuse(tmp_path, capsys):
    few = ("algorithm.graph.sketch_inputs=1", "algorithm.graph.sketch_size=1", "rounds=1")
    run(tmp_path / "few", "experiment=clinical_pfednet", "local.steps=1", *few)
    said = (
        "Hospitals would refuse this run: at hospital_0, too few patients stand behind a sketch of "
        "training rows (algorithm.graph.sketch_inputs and sketch_size): 1 of at least 20; and 4 "
        "more such statistics."
    )
    assert said in capsys.readouterr().out
    assert said in json.loads((tmp_path / "few" / "cohort.json").read_text())["remarks"]


WRONG = {
    ("check",): "agreed has no value yet",
    ("check", "agreed=A", "local=B", "seed=1"): "Unknown key 'seed'",
    ("chek", "agreed=A"): "Unknown command medfed site chek (did you mean check?)",
    (
        "check",
        "agreed=A",
        "local=B",
    ): "A is missing; name the agreed.json that medfed deploy",
    ("withdraw", "run=A"): "site has no value yet",
    ("withdraw", "run=A", "site=b"): "run=A is no run folder",
    ("withdraw", "run=A", "site=b", "forget=perhaps"): "forget must be true or false",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_mistake_is_one_sentence(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["site", *line])
    error = capsys.readouterr().err
    assert WRONG[line] in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


REFUSED = {
    ("algorithm.graph.sketch_inputs=1",): "too few patients stand behind a sketch of training rows",
    ("algorithm=pooled",): "trains on the data of all clients in one place, but sites",
    ("partition=label_imbalance",): "LabelImbalance divides the patients of one data set",
    ("data.features=[age,weight]",): "Unknown column weight",
    ("model.network=unet",): "model.network=unet is no network",
}


@pytest.mark.parametrize("more", REFUSED)
def test_what_does_not_fit_is_found_at_the_hospital(more, hospital, tmp_path, capsys):
    Agreed(SITES, (*EXPERIMENT[:-2], *more)).write(tmp_path / "agreed.json")
    (tmp_path / "site.yaml").write_text(f"site: Bern\ndata:\n  path: {hospital / 'ours.csv'}\n")
    with pytest.raises(SystemExit):
        look(tmp_path, capsys)
    assert REFUSED[more] in capsys.readouterr().err
    assert {p.name for p in tmp_path.iterdir()} == {"agreed.json", "site.yaml"}


def test_the_file_that_the_documents_show_can_be_copied(tmp_path):
    folder = write_files(DOCS / "sites.md", tmp_path)
    own = SiteFile.read(folder / "medfed.yaml")
    agreed, _, _ = Agreed.of(["experiment=heart_pfednet"], ["cleveland", "va"])
    with pytest.raises(DataError, match="/srv/heart does not exist"):
        own.config(agreed)
    (folder / "medfed.yaml").write_text(
        (folder / "medfed.yaml").read_text().replace("/srv/heart", str(tmp_path))
    )
    config = SiteFile.read(folder / "medfed.yaml").config(agreed)
    assert (config.data.reader.centres, config.threads) == (["va"], 2)


def test_traffic_of_nobody_is_none():
    assert traffic_of(Ledger(), "Bern") == []
