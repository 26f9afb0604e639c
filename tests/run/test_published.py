"""``suite=published``: others' tables beside our rerun of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import t as student

from medfed.api import train
from medfed.benchmark.main import benchmark
from medfed.benchmark.published import MARGIN, difference, mean_of
from medfed.benchmark.suite import Published, suites, wanted_of
from medfed.config import allowed
from medfed.standalone.errors import ConfigError

REPEATS = {name: suite for name, suite in suites().items() if suite.published}
KEYS = ("rounds=1", "local.steps=2", "evaluation.every=1", "evaluation.calibration=null")
SUITE = f"""
title: A table of a paper
source: a paper
experiment: clinical_pfednet
overrides: [{", ".join(KEYS)}]
lr: [0.1, 0.1]
splits: seed
variants: {{plain: {{}}}}
sizes: {{small: {{splits: 2, trials: 1}}}}
metric: accuracy
published:
  - {{method: fedavg, means: [0.0, 0.001]}}
  - {{method: fedavg, table: all patients, over: patients, means: [0.5, 0.6, 0.7]}}
"""


def welch(one, other):
    """The 95 % interval of a difference of means, by the textbook."""
    parts = [np.var(v, ddof=1) / len(v) for v in (one, other)]
    freedom = sum(parts) ** 2 / sum(
        p**2 / (len(v) - 1) for p, v in zip(parts, (one, other), strict=True)
    )
    half = student.ppf(0.975, freedom) * math.sqrt(sum(parts))
    gap = np.mean(one) - np.mean(other)
    return gap, gap - half, gap + half


@pytest.mark.parametrize(
    ("apart", "spread", "word"),
    [(0.0, 0.01, "holds"), (0.01, 0.2, "cannot tell"), (0.3, 0.01, "does not hold")],
    ids=["alike", "noisy", "apart"],
)
def test_a_row_holds_where_welch_s_interval_says_so(apart, spread, word):
    rng = np.random.default_rng(0)
    known = 0.7 + spread * rng.standard_normal(5)
    ours = known + apart + 0.001 * rng.standard_normal(5)
    text, says = difference(ours.tolist(), known.tolist())
    gap, low, high = welch(ours, known)
    assert text == f"{gap:+.3f} [{low:+.3f}, {high:+.3f}]"
    assert says == word
    assert (low <= 0 <= high) == (word != "does not hold")
    assert (max(-low, high) <= MARGIN) == (word == "holds")


@pytest.mark.parametrize("name", REPEATS)
def test_a_shipped_table_names_methods_its_source_and_how_to_get_the_data(name):
    suite = REPEATS[name]
    assert suite.source
    assert suite.fetch
    assert suite.metric
    assert {size.trials for size in suite.sizes.values()} == {1}  # nothing is tuned
    rows = [(row.method, row.table) for row in suite.published]
    assert len({*rows}) == len(rows)
    assert {method for method, _ in rows} <= {*allowed.method_yamls()}
    assert {len(row.means) for row in suite.published} == {5}
    assert all(0 < mean < 1 for row in suite.published for mean in row.means)
    chosen, methods, _ = wanted_of("published", None, "small", False)
    assert [one.name for one in chosen] == [*REPEATS]
    assert {m.name for m in methods[name]} == {method for method, _ in rows}
    assert not {one.name for one in wanted_of("all", None, "small", False)[0]} & {*REPEATS}


def test_without_the_data_a_sentence_says_what_to_fetch_and_where_to_put_it(tmp_path):
    with pytest.raises(ConfigError) as caught:
        benchmark("published", out=tmp_path, workers=0, quiet=True)
    for name, suite in REPEATS.items():
        way = f"it needs data ({suite.fetch}); name their folder by paths.{name}=FOLDER."
        assert way in str(caught.value)
    assert not [*tmp_path.iterdir()]


def test_ours_are_the_means_of_plain_runs(tmp_path, capsys):
    folder = tmp_path / "plug"
    (folder / "suites").mkdir(parents=True)
    (folder / "suites" / "paper.yaml").write_text(SUITE)
    benchmark("paper", out=tmp_path / "out", workers=0, plugins=[str(folder)])
    quiet = ("pictures.format=none", "logger=none", "progress=false")
    runs = [
        train(
            "experiment=clinical_pfednet", *KEYS, "algorithm=fedavg", *quiet,
            seed=seed, folder=tmp_path / f"run_{seed}",
        )
        for seed in (0, 1)
    ]  # fmt: skip
    over_hospitals = [run.summary["federation"]["accuracy"]["mean"] for run in runs]
    over_patients = [run.summary["pooled"]["accuracy"] for run in runs]
    page = (tmp_path / "out" / "published.md").read_text()
    printed = capsys.readouterr().out
    for name, means, word in (
        ("fedavg", over_hospitals, "does not hold"),
        ("fedavg (all patients)", over_patients, ""),
    ):
        (row,) = (line for line in page.splitlines() if line.startswith(f"| {name} | "))
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[2] == f"{np.mean(means):.3f} ± {np.std(means, ddof=1):.3f}"
        assert cells[4].startswith(word)
        assert cells[3] in printed
    assert "Published: a paper." in page
    assert not (tmp_path / "out" / "report").exists()  # it compares no methods


def test_a_mean_is_over_hospitals_or_over_patients():
    result = {
        "metric": ["auroc", "max"],
        "clients": {"a": {"auroc": 0.5}, "b": {"auroc": 1.0}},
        "patients": {"a": {"test": 30}, "b": {"test": 10}},
    }
    assert mean_of(result, Published("fedavg", (0.0,))) == 0.75
    assert mean_of(result, Published("fedavg", (0.0,), over="patients")) == 0.625


def test_the_page_has_the_published_numbers_of_the_suites():
    page = (allowed.CONFIG_DIR.parent / "docs" / "results" / "published.md").read_text("utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith("| `")
    ]
    known = {
        (row.method, row.table): f"{np.mean(row.means):.3f} ± {np.std(row.means, ddof=1):.3f}"
        for name in ("flamby_heart", "flamby_tcga_brca")
        for row in REPEATS[name].published
    }
    shown = [(name, published) for name, published, *_ in rows]
    assert sum(name.count("`") // 2 for name, _ in shown) == 18
    for (method, table), numbers in known.items():
        assert any(
            f"`{method}`" in name and name.endswith(table) and numbers == published
            for name, published in shown
        ), method
    for _, published, ours, gap, _ in rows:
        apart = float(ours.split()[0]) - float(published.split()[0])
        assert abs(float(gap.split()[0]) - apart) < 0.0011  # of rounded numbers
