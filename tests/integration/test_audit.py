"""medfed audit: what the messages and models of a run give away."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import numpy as np
import pytest

from medfed.commands.main import main
from medfed.functional.leakage import auc
from medfed.run.audit import Audit, attack, audit, page, sentences, write_audit
from medfed.standalone.errors import CheckpointError
from tests.integration.runs import left_in, run

MLP = ("model=mlp", "model.network.hidden_channels=[64]", "logger=none", "progress=false")
COLOURS = (
    *("experiment=medmnist_pfednet", "algorithm=fedavg", "rounds=1", "local.steps=1"),
    *("data.generated.images=[60,30,30]", "partition=round_robin", "partition.num_clients=2"),
    *("logger=none", "progress=false"),
)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A hundred and twenty patients whose label is chance, so that only memory can know it."""
    rng = np.random.default_rng(0)
    names = [f"x{i}" for i in range(12)]
    rows = [",".join([*names, "ill", "place"])]
    for n in range(120):
        values = [f"{v:.4f}" for v in rng.normal(size=12)]
        rows.append(",".join([*values, str(rng.integers(2)), ("Chur", "Bern")[n % 2]]))
    path = tmp_path_factory.mktemp("chance") / "table.csv"
    path.write_text("\n".join(rows) + "\n")
    return path


def trained(folder, table, *keys):
    """A run that learns by heart."""
    data = ("data=csv", f"data.path={table}", "data.label=ill", "data.centre=place")
    fit = ("partition=centre", "rounds=2", "local.steps=150", "optimizer.lr=0.1")
    run(folder, "experiment=clinical_pfednet", *data, *fit, *MLP, *keys)
    return folder


@pytest.fixture(scope="module")
def ditto(tmp_path_factory, table):
    return trained(tmp_path_factory.mktemp("audit") / "run", table, "algorithm=ditto")


@pytest.fixture(scope="module")
def measured(ditto) -> Audit:
    return audit(ditto, shadows=8, rounds=2)


def test_rows_of_single_steps(measured):
    single = {r.batch: r for r in measured.rows if not r.own and r.client == "Chur"}
    assert (single[1].used, single[1].found) == (2, 2)
    assert single[4].used == 8
    assert single[4].found >= 6
    assert single[16].used == 32
    assert single[16].found < 16
    own = [r for r in measured.rows if r.own]
    assert [(r.client, r.batch, r.steps) for r in own] == [("Bern", 32, 150), ("Chur", 32, 150)]
    assert measured.layer == "Linear"


def test_labels_learned_by_heart_show_who_was_in_training(measured):
    models = {g.model for g in measured.guesses}
    assert models == {"personal model", "shared model"}
    alike = {g.client: g for g in measured.guesses if not g.of_run and g.model == "personal model"}
    assert list(alike) == ["Bern", "Chur", "all"]
    assert alike["all"].patients == alike["Bern"].patients + alike["Chur"].patients == 72
    assert alike["all"].auc[0] > 0.7
    assert alike["all"].auc[1] > 0.6
    (own,) = (
        g for g in measured.guesses if g.of_run and g.client == "all" and g.model == "shared model"
    )
    assert (own.patients, own.others, own.allowed) == (72, 24, 0)
    assert own.auc[0] > 0.6


def test_a_model_that_learned_nothing_shows_nobody(tmp_path, table):
    still = trained(tmp_path / "still", table, "algorithm=fedavg", "optimizer.lr=1e-30")
    found = audit(still, shadows=4, rounds=1)
    assert {g.model for g in found.guesses} == {"shared model"}
    assert "All clients use the shared model; there is no personal one." in found.notes
    for guess in found.guesses:
        assert guess.auc[1] <= 0.5 <= guess.auc[2]
    assert not any("better than chance" in s for s in sentences(found))


def test_under_differential_privacy_the_same_attacks_fail(tmp_path, table, measured):
    noise = "privacy.example={epsilon:1,delta:1e-3,clip:1.0}"
    keys = ("algorithm=ditto", "local.steps=20", noise)
    found = audit(trained(tmp_path / "run", table, *keys), shadows=4, rounds=2)
    assert sum(r.found for r in found.rows) == 0 < sum(r.found for r in measured.rows)
    for guess in found.guesses:
        assert guess.auc[1] <= 0.5
    alike = [
        {g.model: g.auc[0] for g in each.guesses if g.client == "all" and not g.of_run}
        for each in (found, measured)
    ]
    assert all(area < alike[1][model] - 0.1 for model, area in alike[0].items())


def test_attacks_without_memory_are_guesses():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(30):
        inside = rng.permuted(np.tile(np.arange(40) % 2 == 0, (8, 1)), axis=1)
        sure = [(rng.normal(size=40), rng.normal(size=30)) for _ in inside]
        scores, members = attack(sure, inside, (rng.normal(size=40), rng.normal(size=30)), True)
        assert members.sum() == 40
        _, low, high = auc(scores, members)
        covered += low <= 0.5 <= high
    assert covered >= 25


def test_sketches_and_quantised_models(tmp_path, table):
    deep = "model.network.hidden_channels=[16,16]"
    folder = trained(tmp_path / "run", table, "algorithm=pfednet", deep, "local.steps=2")
    found = audit(folder, shadows=4, rounds=1)
    assert [(f.part, f.clients, f.pairs) for f in found.fingerprints] == [("sketch", 2, 2)]
    models = dict.fromkeys(g.model for g in found.guesses)
    assert list(models) == [f"personal model{bits}" for bits in ("", ", 4 bits", ", 2 bits")]
    assert any("A client's sketch" in sentence for sentence in sentences(found))
    assert found.notes == ("What the server sends is no whole model, so none is attacked.",)


def test_masks_hide_single_messages_and_models_still_show_members(tmp_path):
    keys = ("algorithm=fedavg", "channel.secure=masks", "rounds=1", "partition.num_clients=3")
    run(tmp_path / "run", "experiment=clinical_pfednet", *MLP, *keys, "local.steps=2")
    found = audit(tmp_path / "run", shadows=4, rounds=1)
    assert found.rows
    assert sum(r.found for r in found.rows) == 0
    assert "The server sees sums over clients; these are not searched for rows." in found.notes
    assert len(found.guesses) == 8


def test_a_convolution_gives_no_row_exactly(tmp_path):
    run(tmp_path / "run", *COLOURS, f"data.root={tmp_path}")
    found = audit(tmp_path / "run", shadows=4)
    assert (found.layer, found.rows, found.rounds) == ("Conv2d", (), 1)
    assert "rows do not follow exactly" in sentences(found)[0]


def test_the_command_writes_a_page_and_never_over_it(ditto, measured, capsys):
    logging.getLogger().handlers.clear()
    before = {n: (ditto / n).read_bytes() for n in left_in(ditto)}
    main(["audit", str(ditto), "shadows=4", "rounds=1"])
    text = capsys.readouterr().out
    assert "Trains 4 federations of " in text
    assert "guessed from the personal model: AUC" in text
    after = {n: (ditto / n).read_bytes() for n in left_in(ditto)}
    assert set(after) - set(before) == {"audit/audit.html", "audit/audit.json"}
    assert {n: after[n] for n in before} == before
    record = json.loads(after["audit/audit.json"])
    assert (record["shadows"], record["summary"]["algorithm"]) == (4, "ditto")
    with pytest.raises(SystemExit):
        main(["audit", f"run={ditto}"])
    assert "audit is not empty; name an empty one by out=FOLDER." in capsys.readouterr().err
    assert {n: (ditto / n).read_bytes() for n in left_in(ditto)} == after


def test_a_page_that_cannot_be_kept_is_refused_before_any_training(ditto, tmp_path, capsys):
    (tmp_path / "file").touch()
    before = left_in(ditto)
    with pytest.raises(SystemExit):
        main(["audit", str(ditto), f"out={tmp_path / 'file' / 'page'}"])
    told = capsys.readouterr()
    assert "Cannot write" in told.err
    assert "choose another out=FOLDER." in told.err
    assert "Trains" not in told.out
    assert left_in(ditto) == before


def test_names_on_the_page_are_no_markup(measured, tmp_path):
    name = "<script>alert(1)</script>"
    rows = tuple(replace(r, client=name) for r in measured.rows)
    guesses = tuple(replace(g, client=name) for g in measured.guesses)
    summary = {**measured.summary, "name": name}
    hostile = replace(measured, summary=summary, rows=rows, guesses=guesses)
    assert name not in page(hostile)
    assert "http" not in page(hostile).replace("http://www.w3.org", "")
    write_audit(measured, tmp_path / "page")
    assert "AUC" in (tmp_path / "page" / "audit.html").read_text()


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("shadows=3", "shadows must be a whole number of at least 4, not 3."),
        ("rounds=0", "rounds must be a whole number of at least 1, not 0"),
        ("minutes=0.0", "minutes must be a number above 0.0, not 0.0"),
        ("tolerance=-1.0", "tolerance must be a number of at least 0.0, not -1.0"),
        ("tolerance=null", "tolerance must be a number, not None"),
        ("shadows=many", "shadows must be a whole number or null, not 'many'"),
        ("rounds=1.5", "rounds must be a whole number, not 1.5"),
    ],
)
def test_mistakes_are_one_sentence(ditto, key, message, capsys):
    with pytest.raises(SystemExit):
        main(["audit", str(ditto), key])
    assert message in capsys.readouterr().err


def test_an_unfinished_run_is_refused(ditto, tmp_path):
    (tmp_path / "config.yaml").write_bytes((ditto / "config.yaml").read_bytes())
    with pytest.raises(CheckpointError, match="has not finished"):
        audit(tmp_path)
