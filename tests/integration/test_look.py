"""``medfed look``: the numbers, what is withheld, and the page."""

from __future__ import annotations

import json

import numpy as np
import pytest

from medfed.commands.look import main
from medfed.config.compose import build
from medfed.config.compose import described as composed
from medfed.datamodules.patient_columns import patient_columns
from medfed.reports.look import DEVIATIONS, LABELS, MEANS, MISSING, tables
from medfed.studies.described import described
from tests.datamodules.organ_layouts import write_datalist

ROWS = 200


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A table of two hospitals, with rare values, and its path."""
    random = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("look") / "table.csv"
    lines = ["age,sex,grade,gap,hospital,label"]
    for n in range(ROWS):
        sex = int(n % 20 == 1)  # a few women in each hospital
        gap = "" if n % 40 < 2 else f"{random.normal():.3f}"
        grade = "rare" if n % 34 == 0 else ("low", "high")[n % 2]
        lines.append(
            f"{random.normal(60, 9):.2f},{sex},{grade},{gap},{'ab'[n % 3 > 0]},{n % 5 > 1:d}"
        )
    path.write_text("\n".join(lines) + "\n")
    return path


def look(path, *more: str):
    keys = ["data=csv", f"data.path={path}", "data.centre=hospital", "partition=centre", *more]
    data = build(composed(keys).data)
    data.plan()
    return data


def test_numbers_are_those_of_the_training_rows(table):
    data = look(table)
    for client in data.plans:
        made = described(data, client)["tables"]
        index = [int(p.removeprefix("row_")) for p in data.plans[client].patients["train"]]
        rows = data.table.features[index]
        for at, name in enumerate(data.table.names):
            assert made[MISSING][name] == np.isnan(rows[:, at]).mean()
        for name in ("age", "sex", "gap"):
            values = rows[:, data.table.names.index(name)]
            assert made[MEANS][name] == float(f"{np.nanmean(values):.4g}")
            assert made[DEVIATIONS][name] == float(f"{np.nanstd(values):.4g}")
        assert made[LABELS]["1"] == data.table.labels[index].mean()
        assert sum(made["Shares of grade"].values()) == pytest.approx(1)


def test_cells_of_few_patients_are_withheld(table):
    data = look(table)
    least = 20
    for client in data.plans:
        made = described(data, client, least)["tables"]
        plain = described(data, client)["tables"]
        count = len(data.plans[client].patients["train"])
        for name, value in plain[MISSING].items():
            few = 0 < round(value * count) < least
            assert (made[MISSING][name] is None) == few
        assert made[MEANS]["age"] == plain[MEANS]["age"]
        assert made[MEANS]["sex"] is made[DEVIATIONS]["sex"] is None  # it would count the women
        grades = made["Shares of grade"]
        assert grades["rare"] is None
        assert sum(value is None for value in grades.values()) > 1  # the rest would give it away
    assert "withheld" in "\n".join(tables([described(data, "a", least)])[MEANS].markdown())
    whole = described(data, "a", 10_000)
    assert list(whole["tables"]) == ["Patients"]
    assert set(whole["tables"]["Patients"].values()) == {None}


def test_volumes_and_pictures(tmp_path):
    keys = ["data=brats", f"data.root={tmp_path}", "data.generated.hospitals=2"]
    keys += [
        "data.generated.patients=3",
        "data.generated.shape=[24,24,8]",
        "data.patch_size=[16,16]",
    ]
    data = build(composed(keys).data)
    data.prepare_data()
    data.plan()
    client = next(iter(data.plans))
    made = described(data, client)["tables"]
    (case,) = (c for c, _ in data.cases_among(data.plans[client].patients["train"]))
    raw = data.scans.raw(data.cases[case])
    for at, name in enumerate(data.channel_names):
        voxels = raw["image"][at][raw["image"][at] != 0].numpy().astype(float)
        np.testing.assert_allclose(made[MEANS][f"{name} mean"], voxels.mean(), rtol=1e-3)
        np.testing.assert_allclose(made[MEANS][f"{name} deviation"], voxels.std(), rtol=1e-3)
    for axis, spacing in zip("xyz", raw["spacing"].tolist(), strict=True):
        assert made[MEANS][f"spacing {axis}"] == float(f"{spacing:.4g}")
    assert made[LABELS] == {"whole": 1.0}


@pytest.mark.parametrize("header", ["", "case,hospital\n"], ids=["no header", "header"])
def test_hospitals_beside_scans_are_no_columns_of_patients(header, tmp_path):
    folder = write_datalist(tmp_path / "list", index={"modality": {"0": "MRI"}})
    lines = "".join(f"organ_{n:02d},{'Basel' if n < 3 else 'Bern'}\n" for n in range(6))
    (folder / "centres.csv").write_text(header + lines)
    keys = ["data=datalist", f"data.path={folder}", f"data.root={tmp_path}", "partition=auto"]
    data = build(composed([*keys, "data.patch_size=[8,8]"]).data)
    data.prepare_data()
    data.plan()
    assert set(data.plans) == {"Basel", "Bern"}
    assert patient_columns(data) == {}


def test_the_command_writes_a_page_and_joins_files(table, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = ["data=csv", f"data.path={table}", "data.centre=hospital", "partition=centre"]
    main([*keys, "least=20", "folder=one"])
    page = (tmp_path / "one" / "look.html").read_text()
    assert "withheld" in page
    assert "<svg" in page
    assert "http" not in page
    made = json.loads((tmp_path / "one" / "look.json").read_text())["hospitals"]
    assert [one["hospital"] for one in made] == ["a", "b"]
    for at, one in enumerate(made):
        (tmp_path / f"{at}.json").write_text(json.dumps({"hospitals": [one]}))
    main(["of=[0.json,1.json]", "folder=two"])
    assert (tmp_path / "two" / "look.html").read_text() == page


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (["of=[0.json,0.json]"], "describe va twice"),
        (["of=[no.json]"], "no.json is missing"),
        (["of=[bad.json]"], "bad.json is not as a run writes it"),
        (["data=csv"], "data.path has no value yet"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    keys, sentence, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    one = {"hospital": "va", "least": 0, "tables": {"Patients": {"train": 3}}}
    (tmp_path / "0.json").write_text(json.dumps({"hospitals": [one]}))
    (tmp_path / "bad.json").write_text(json.dumps({"hospitals": [{"hospital": "va"}]}))
    with pytest.raises(SystemExit):
        main([*keys, "folder=out"])
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
