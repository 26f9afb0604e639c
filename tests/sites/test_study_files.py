"""From ``medfed deploy study=`` to the page: the agreement, the site's file, its check, the run."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest

from medfed.commands.deploy import split
from medfed.delivery.main import open_bundle
from medfed.sites import actions, deploying
from medfed.sites.agreement import Agreed
from medfed.sites.words import VetoError
from medfed.studies.plan import Plan, read_plan
from tests.sites.direct import Direct
from tests.sites.studies import KEYS, NAMES, simulation

PLAN = """
columns:
  age: [20, 40, 60, 80, 100]
  sex: [f, m]
  outcome: ["0", "1"]
by: outcome
models: [{of: [age, sex]}]
"""


@pytest.fixture
def study(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN, encoding="utf-8")
    return path


def site_file(folder: Path, name: str, table: Path, agreed: str = "") -> Path:
    path = folder / name / "local" / "medfed.yaml"
    path.parent.mkdir(parents=True)
    text = f"site: {name}\ndata: {{path: {table}}}\npolicy: {{least: 25}}\n"
    path.write_text(text + (f"agreed: {agreed}\n" if agreed else ""), encoding="utf-8")
    return path


def test_from_a_command_line_to_the_page(tables, study, tmp_path, capsys):
    words = ["data=csv", "data.label=dead", "data.patient=id", "data.centre=centre"]
    line = [f"sites=[{','.join(NAMES)}]", f"study={study}", f"dry_run={tmp_path / 'job'}", *words]
    keys, rest = split(line)
    deployment = actions.deployment_of(keys, rest)
    _, path, approval = actions.write_job(deployment, tmp_path / "job")
    agreed = Agreed.read(path)
    assert agreed.digest == approval
    assert agreed.plan is not None
    files = {
        name: site_file(tmp_path / "kits", name, tables / f"{name}.csv", approval) for name in NAMES
    }
    actions.check(path, files["alpha"])
    said = capsys.readouterr().out
    assert "nothing is trained, and no row leaves" in said
    assert "logistic regression of outcome" in said
    started = {
        name: deploying.start_site(
            file, deploying.encoded(agreed.record()), name, print, open_bundle
        )
        for name, file in files.items()
    }
    made = deploying.Deployment.of(deployment.text())
    out = tmp_path / "out"
    made = deploying.replace(made, folder=str(out), output=str(tmp_path))
    deploying.run_coordinator(made.text(), Direct(started))
    assert deploying.outcome(tmp_path) == ("finished", "")
    found = json.loads((out / "study.json").read_text(encoding="utf-8"))
    assert found["remarks"] == []
    plan = read_plan(study)
    expected = [
        [t.title, [*t.head], [[*line] for line in t.lines]] for t in simulation(tables, plan)
    ]
    assert [[t["title"], t["head"], t["lines"]] for t in found["tables"]] == expected
    assert (out / "study.html").is_file()


READS = {
    # 27 of age, 12 of sex, 8 of outcome, 6 of a step; 11 earlier.
    "numbers": (PLAN, NAMES, "", "64 numbers of these patients would then have left (of a"),
    "patients": (PLAN, NAMES, "", "from 107 patients of all sites on"),
    "none allowed": (
        PLAN,
        NAMES,
        "policy: {plans: 0}",
        "policy.plans of this site's file is 0",
    ),
    "other names": ("columns: {sex: [F, M]}", NAMES, "", "sex: no patient is F, M, and 150 are of"),
    "codes": ("columns: {dose: [1, 2, 3]}", NAMES, "", "dose holds whole numbers, and its bins be"),
    "two sites": (PLAN, NAMES[:2], "", "age 0 left out: a sum needs 3 sites"),
}


@pytest.mark.parametrize("kind", READS)
def test_a_hospital_reads_what_the_study_will_meet(kind, tables, study, tmp_path, capsys):
    """Each check said that the site is ready, and the study then failed or said nothing."""
    text, names, lines, words = READS[kind]
    study.write_text(text, encoding="utf-8")
    with (tables / "alpha.csv").open(encoding="utf-8") as file:
        rows = [line.strip() for line in file]
    table = [f"{row},{n % 3 + 1 if n else 'dose'}" for n, row in enumerate(rows)]
    (tmp_path / "alpha.csv").write_text("\n".join(table), encoding="utf-8")
    (tmp_path / "site.yaml").write_text(f"site: alpha\ndata: {{path: alpha.csv}}\n{lines}\n")
    line = [f"sites=[{','.join(names)}]", f"study={study}", f"dry_run={tmp_path}", *KEYS]
    _, path, _ = actions.write_job(actions.deployment_of(*split(line)), tmp_path / "job")
    typed = capsys.readouterr().err
    assert ("Left out, as a sum needs 3 sites: age, sex" in typed) == (kind == "two sites")
    earlier = {"alpha.csv": {"0/1": 3}, str(tmp_path / "alpha.csv"): {"other/0/1": 7, "x/0": 4}}
    (tmp_path / "medfed").mkdir()
    (tmp_path / "medfed" / "numbers.json").write_text(json.dumps(earlier))
    refused = pytest.raises(VetoError, match=words) if kind == "none allowed" else nullcontext()
    with refused:
        actions.check(path, tmp_path / "site.yaml")
        assert words in " ".join(capsys.readouterr().out.split())


def test_a_study_that_was_not_approved_does_not_start(tables, study, tmp_path):
    agreed, _, _ = Agreed.of(
        ["data=csv", "data.label=dead"], NAMES, False, msgspec.to_builtins(read_plan(study))
    )
    file = site_file(tmp_path, "alpha", tables / "alpha.csv", "f" * 64)
    made = deploying.start_site(
        file, deploying.encoded(agreed.record()), "alpha", print, open_bundle
    )
    assert made == deploying.Broken("alpha", "agreed", "refused")


def test_the_hash_of_an_agreement_to_train_stays(tmp_path):
    """The record of training has no plan, so that approvals from before hold."""
    agreed, _, _ = Agreed.of(["data=csv", "data.label=dead"], NAMES)
    assert "plan" not in agreed.record()
    other, _, _ = Agreed.of(
        ["data=csv", "data.label=dead"], NAMES, False, {"columns": {"age": [1, 2]}}
    )
    assert other.digest != agreed.digest
    assert Plan({"age": [1, 2]}).check("plan")
