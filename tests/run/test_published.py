"""``suite=published``: others' tables beside our rerun of them."""

from __future__ import annotations

import json
import math
import re
import runpy
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest
import yaml
from PIL import Image
from scipy.stats import t as student

from medfed.api import train
from medfed.benchmark.main import MARGIN, benchmark, difference, mean_of
from medfed.benchmark.plan import groups
from medfed.benchmark.suite import Published, suites, wanted_of
from medfed.commands.benchmark import main
from medfed.config import allowed
from medfed.standalone.errors import CheckpointError, ConfigError

REPEATS = {name: suite for name, suite in suites().items() if suite.repeats}
LISTS = Path(__file__).parents[2] / "benchmarks/evidence/centres.py"
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


@pytest.mark.parametrize(
    ("ours", "word"),
    [
        ([0.71, 0.72, 0.73], "holds"),
        ([0.6, 0.7, 0.8], "cannot tell"),
        ([0.8, 0.81, 0.82], "does not hold"),
    ],
    ids=["alike", "noisy", "apart"],
)
def test_a_published_run_without_a_deviation_is_compared_with_the_interval_of_our_mean(ours, word):
    text, says = difference(ours, [0.72])
    gap, spread = np.mean(ours) - 0.72, np.std(ours, ddof=1)
    half = student.ppf(0.975, len(ours) - 1) * spread / math.sqrt(len(ours))
    assert text == f"{gap:+.3f} [{gap - half:+.3f}, {gap + half:+.3f}]"
    assert says == word


@pytest.mark.parametrize(
    ("ours", "known", "told"),
    [
        ([0.7], [0.72], ("-0.020", "cannot tell")),
        ([], [0.72], ("", "not computed")),
        ([0.7, 0.8], [], ("", "not known")),
        ([0.7, 0.7], [0.72], ("-0.020", "cannot tell")),
    ],
    ids=["one run of ours", "no run", "no number", "no spread"],
)
def test_what_too_few_numbers_say(ours, known, told):
    assert difference(ours, known) == told


@pytest.mark.parametrize("name", REPEATS)
def test_a_shipped_table_names_methods_its_source_and_how_to_get_the_data(name):
    suite = REPEATS[name]
    assert suite.source
    assert suite.fetch
    assert suite.metric
    assert {size.trials for size in suite.sizes.values()} == {1}  # nothing is tuned
    rows = [(row.method, row.table, row.over, row.variant) for row in suite.published]
    assert len({*rows}) == len(rows)
    assert {method for method, *_ in rows} <= {*allowed.method_yamls()}
    assert {len(row.means) for row in suite.published} <= ({5} if "flamby" in name else {1})
    assert all(0 < mean < 1 for row in suite.published for mean in row.means)
    chosen, methods, _ = wanted_of("published", None, "small", False)
    assert [one.name for one in chosen] == [*REPEATS]
    assert {m.name for m in methods[name]} == {method for method, *_ in rows} or not rows
    assert not {one.name for one in wanted_of("all", None, "small", False)[0]} & {*REPEATS}


def test_without_the_data_a_sentence_says_what_to_fetch_and_where_to_put_it(tmp_path):
    with pytest.raises(ConfigError) as caught:
        benchmark("published", out=tmp_path, workers=0)
    for name, suite in REPEATS.items():
        way = f"it needs data ({suite.fetch}); name their folder by paths.{name}=FOLDER."
        assert way in str(caught.value)
    assert not [*tmp_path.iterdir()]


def test_a_folder_in_another_layout_is_told_what_the_suite_needs(tmp_path):
    (tmp_path / "data").mkdir()
    smaller("bladder", tmp_path / "plug", splits=1)
    with pytest.raises(CheckpointError) as caught:
        benchmark(
            "bladder", out=tmp_path / "out", workers=0,
            plugins=[str(tmp_path / "plug")], paths={"bladder": str(tmp_path / "data")},
        )  # fmt: skip
    assert "dataset.json does not exist" in str(caught.value)
    assert f" suite=bladder needs {REPEATS['bladder'].fetch}." in str(caught.value)


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


def test_a_page_says_why_a_row_is_not_computed(tmp_path):
    refused = SUITE[: SUITE.index("published:")].replace("[rounds=1", "[optimizer=adam, rounds=1")
    (tmp_path / "plug" / "suites").mkdir(parents=True)
    (tmp_path / "plug" / "suites" / "paper.yaml").write_text(
        refused + "methods: [fedavg, fednova]\n"
    )
    benchmark("paper", out=tmp_path, workers=0, plugins=[str(tmp_path / "plug")])
    page = (tmp_path / "published.md").read_text()
    assert "paper/plain/fednova/final_trial_0_split_0 and 1 more could not be computed: " in page
    assert rows_of(tmp_path / "published.md")["fednova"] == ["", "", "", "not computed"]
    assert rows_of(tmp_path / "published.md")["fedavg"][3] == "not known"
    assert "The numbers of suite=paper are not known here: give them by published=FILE.csv" in page


def test_what_this_machine_lacks_is_no_result(tmp_path, monkeypatch):
    """A job on a machine with the GPU or the package, in the same folder, computes the cells."""
    lacks = SUITE[: SUITE.index("published:")].replace("[rounds=1", "[channel.up.zstd=3, rounds=1")
    (tmp_path / "plug" / "suites").mkdir(parents=True)
    (tmp_path / "plug" / "suites" / "paper.yaml").write_text(lacks + "methods: [fedavg]\n")

    def run():
        plugins = [str(tmp_path / "plug")]
        benchmark("paper", out=tmp_path, workers=0, plugins=plugins)

    with monkeypatch.context() as without:
        without.setitem(sys.modules, "zstandard", None)
        with pytest.raises(CheckpointError) as caught:
            run()
    assert str(caught.value).endswith("needs the package zstandard: pip install zstandard.")
    assert not [*tmp_path.glob("cells/**/*.json")]
    run()
    assert "fedavg" in rows_of(tmp_path / "published.md")


def test_a_mean_is_over_hospitals_or_over_patients():
    result = {
        "metric": ["auroc", "max"],
        "clients": {"a": {"auroc": 0.5}, "b": {"auroc": 1.0}},
        "patients": {"a": {"test": 30}, "b": {"test": 10}},
    }
    assert mean_of(result, Published("fedavg", (0.0,))) == 0.75
    assert mean_of(result, Published("fedavg", (0.0,), over="patients")) == 0.625
    assert mean_of(result, Published("fedavg", (0.0,), over="a")) == 0.5


@pytest.mark.parametrize("over", ["hospitals", "patients"])
def test_hospitals_whose_patients_leave_the_metric_undefined_are_no_part_of_a_mean(over):
    scores = {"a": {"auroc": 0.5}, "b": {"auroc": None}}  # as a cell's file has it
    patients = {c: {"test": 10} for c in "abc"}
    result = {"metric": ["auroc", "max"], "clients": scores, "patients": patients}
    assert mean_of(result, Published("fedavg", (0.0,), over=over)) == 0.5
    none = {**result, "clients": {"b": scores["b"]}}
    assert math.isnan(mean_of(none, Published("fedavg", (0.0,), over=over)))


def scans_of_centres(folder):
    """FedBCa's folders: bright tumours, of which one case has two masks."""
    rng = np.random.default_rng(0)
    for centre, number in (("Center1", 5), ("Center2", 6)):
        for case in range(number):
            image, masks = rng.normal(size=(24, 24, 3)), np.zeros((2, 24, 24, 3))
            masks[0, 4:10, 5:12], masks[1, 14:20, 12:18] = 1, 1
            image += 6 * masks.any(0)
            twice = case == 0
            parts = masks if twice else [masks.any(0)]
            for n, part in enumerate(parts, 1):
                file = f"Annotation/{case:03d}{f'_{n}' * twice}.nii.gz"
                save(folder / centre / file, part)
            save(folder / centre / f"T2WI/{case:03d}.nii.gz", image)
    save(folder / "Center2" / "T2WI" / "077.nii.gz", image)  # without a mask


def save(file, voxels):
    file.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(voxels.astype(np.float32), np.eye(4)), file)


def pictures_of_sources(folder):
    """Fed-Polyp's folders: TIFF from one source, masks of grey values from the other."""
    rng = np.random.default_rng(0)
    for source, ending in (("CVC-300", "png"), ("CVC-ClinicDB", "tif")):
        for n in range(1, 9):
            mask = np.zeros((32, 40), np.uint8)
            mask[8:20, 10:30] = 255 if ending == "tif" else 180
            image = rng.integers(0, 90, (32, 40, 3)) + (mask[..., None] > 0) * 150
            for part, pixels in (("images", image.astype(np.uint8)), ("masks", mask)):
                (folder / source / part).mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(folder / source / part / f"{n}.{ending}")


def nnunet_folder(folder):
    """nnU-Net's raw folder of ACDC: two moments of each heart."""
    rng = np.random.default_rng(0)
    for patient in range(5):
        for moment in (1, 12):
            name, mask = f"patient{patient:03d}_frame{moment:02d}", np.zeros((16, 16, 8))
            mask[3:6], mask[7:10], mask[12:14] = 1, 2, 3
            save(
                folder / "imagesTr" / f"{name}_0000.nii.gz", rng.normal(size=mask.shape) + 3 * mask
            )
            save(folder / "labelsTr" / f"{name}.nii.gz", mask)
    labels = {"background": 0, "RV": 1, "MLV": 2, "LVC": 3}
    about = {"channel_names": {"0": "cineMRI"}, "labels": labels, "file_ending": ".nii.gz"}
    (folder / "dataset.json").write_text(json.dumps(about | {"numTraining": 10}))


SMALL = [
    *("rounds=1", "local.steps=2", "evaluation.every=1"),
    *("data.patches_per_patient=2", "evaluation.calibration=null", "model.surface=false"),
]
UNET = ["model.network.channels=[4,8]", "model.network.strides=[2]"]
SHIPPED = {
    "bladder": (scans_of_centres, [*UNET, "data.patch_size=[16,16]"], ["fedavg"]),
    "polyp": (pictures_of_sources, [*UNET, "data.patch_size=[16,16]"], ["fedavg", "fednova"]),
    "resenc_acdc": (
        nnunet_folder,
        [
            *("trainer=cpu", "data.patch_size=[16,16,8]", "data.planning.features=4"),
            *("data.batch_size=2", "data.spatial_dims=3"),
        ],
        ["pooled"],
    ),
}


def smaller(name, folder, splits=2, variants=("plain", "M")):
    """Writes a shipped suite with few steps, as a suite of a plugin folder."""
    content = yaml.safe_load((allowed.CONFIG_DIR / "suites" / f"{name}.yaml").read_text("utf-8"))
    content["overrides"] += [*SMALL, *SHIPPED[name][1]]
    content["sizes"]["small"]["splits"] = splits
    methods = SHIPPED[name][2]
    rows = [row for row in content.get("published", ()) if row["method"] in methods]
    content["published"] = [r for r in rows if r.get("variant", "plain") in variants]
    content["methods"] = methods
    (folder / "suites").mkdir(parents=True)
    (folder / "suites" / f"{name}.yaml").write_text(yaml.safe_dump(content))


def rows_of(page):
    lines = (line for line in page.read_text().splitlines() if line.startswith("| "))
    cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {name: rest for name, *rest in cells if name != "method"}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_table_is_repeated_on_data_of_its_layout(name, tmp_path, capsys):
    data, plug, out = tmp_path / "data", tmp_path / "plug", tmp_path / "out"
    SHIPPED[name][0](data)
    if name == "resenc_acdc":
        pytest.importorskip("dynamic_network_architectures")
    else:
        lists = runpy.run_path(str(LISTS))["list_bladder" if name == "bladder" else "list_polyps"]
        assert lists(data) == {"bladder": 11, "polyp": 16}[name]
    smaller(name, plug)
    given = tmp_path / "given.csv"
    given.write_text("method,value\nfedavg,0.8\nfedavg,0.9\nfednova,0.5\n")
    benchmark(
        name, out=out, workers=0, plugins=[str(plug)], paths={name: str(data)},
        published=given if name == "polyp" else None,
    )  # fmt: skip
    rows = rows_of(out / "published.md")
    if name == "polyp":
        assert rows["fedavg"][0] == f"0.850 ± {math.sqrt(0.005):.3f}"
        assert rows["fednova"][0] == "0.500"
    elif name == "bladder":
        lines = (out / "published.md").read_text().splitlines()
        assert [n for n in rows if n.startswith("fedavg (")] == [
            f"fedavg (Center{n})" for n in (1, 2)
        ]
        assert (
            "| fedavg | 0.828 |  |  | no hospital Center3 (did you mean Center2, Center1?) |"
            in lines
        )
    for method in SHIPPED[name][2]:
        whole = [cells for row, cells in rows.items() if row.partition(" ")[0] == method]
        assert any(cells[3] in ("holds", "cannot tell", "does not hold") for cells in whole), rows
    assert "one run: its interval is Student" in (out / "published.md").read_text()


def test_centres_unite_masks_and_say_which_scan_has_none(tmp_path, capsys):
    scans_of_centres(tmp_path)
    runpy.run_path(str(LISTS))["list_bladder"](tmp_path)
    listed = json.loads((tmp_path / "dataset.json").read_text())["training"]
    assert "077.nii.gz has no mask and is left out" in capsys.readouterr().out
    first = next(entry for entry in listed if entry["patient"] == "Center1_000")
    union = nibabel.load(tmp_path / first["label"]).get_fdata()
    parts = [nibabel.load(tmp_path / f"Center1/Annotation/000_{n}.nii.gz") for n in (1, 2)]
    assert np.array_equal(union, sum(part.get_fdata() for part in parts))
    assert union.sum() > parts[0].get_fdata().sum() > 0
    assert {entry["centre"] for entry in listed} == {"Center1", "Center2"}


@pytest.mark.parametrize("cohort", ["list_bladder", "list_polyps"])
@pytest.mark.parametrize("lacks", ["folder", "centres", "masks"])
def test_a_folder_without_a_cohort_is_named_and_gets_no_list(cohort, lacks, tmp_path):
    if lacks == "masks":
        for name in ("T2WI", "images"):
            (tmp_path / "Center1" / name).mkdir(parents=True)
            (tmp_path / "Center1" / name / "001.nii.gz").touch()
    folder = tmp_path / "absent" if lacks == "folder" else tmp_path
    with pytest.raises(SystemExit, match=re.escape(str(folder))):
        runpy.run_path(str(LISTS))[cohort](folder)
    assert not [*tmp_path.glob("*.json"), *tmp_path.glob("*.csv")]


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ("method,value\nfedavg,81.9%\n", "line 2: value=81.9% is no number with a decimal point"),
        ("method;value\nfedavg;0,8\n", "line 2: value=0,8 is no number with a decimal point"),
        ("method,value\nfedavg,\n", "line 2: value= is no number"),
        ("method,score\nfedavg,0.8\n", "has no column value; it has method, score."),
        ("method,value,seed\nfedavg,0.8,1\n", "has no key 'seed'"),
        ("method,value\nFedAvg,0.8\n", "line 2: medfed has no method FedAvg (did you mean fedavg"),
        ("method,value,variant\nfedavg,0.8,table_5\n", "did you mean table_4"),
        ("method,value\n", "has no published values"),
        ("", "has no published values"),
    ],
    ids=[
        "percent",
        "comma",
        "empty",
        "column",
        "further",
        "method",
        "variant",
        "header",
        "nothing",
    ],
)
def test_a_table_that_cannot_be_read_is_refused_before_any_run(table, sentence, tmp_path):
    (tmp_path / "paper.csv").write_text(table)
    with pytest.raises(ConfigError) as caught:
        wanted_of("bladder", None, "small", False, published=tmp_path / "paper.csv")
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("suite", "metric"), [("bladder", "dice"), ("digits", "balanced_accuracy")]
)
def test_percent_is_refused_before_any_run(suite, metric, tmp_path):
    (tmp_path / "paper.csv").write_text("method,value\nfedavg,81.9\n")
    chosen, methods, _ = wanted_of(suite, None, "small", False, (), tmp_path / "paper.csv")
    sentence = (
        f"the published {metric} of fedavg, 81.9, is outside of 0 to 1; write 81.9 % as 0.819"
    )
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        groups(chosen, methods, "small", paths={suite: tmp_path})


def test_a_table_belongs_to_one_suite(tmp_path, capsys):
    (tmp_path / "paper.csv").write_text("method;value\nfedavg;0.8\n")
    with pytest.raises(SystemExit):
        main(["suite=[heart,digits]", f"published={tmp_path / 'paper.csv'}"])
    assert "name one suite" in capsys.readouterr().err
    (suite,), methods, _ = wanted_of("digits", None, "small", False, (), tmp_path / "paper.csv")
    assert suite.published == (Published("fedavg", (0.8,)),)
    assert [m.name for m in methods["digits"]] == ["fedavg"]


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
