"""The benchmarks run; what they measure is no test."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from medfed.config.compose import described
from tests import processes
from tests.datamodules.picture_files import cohort
from tests.integration.test_bad_data import write_heart

ROOT = Path(__file__).resolve().parents[1]
NOT_HERE = {
    "speed/sites.py": "needs NVIDIA FLARE",
    "project/mutations.py": "forks a Python that knows nothing of medfed yet",
    "project/personas.py": "takes minutes",
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("speed/round_overhead.py --rounds 1 --clients 2 --blocks 1", "medfed / peer:"),
        (
            "evidence/nnunet.py generated FOLDER/new --rounds 1 --steps 1 --seeds 1 --memory 0.01 "
            "--features 4",
            "agreed plans ",
        ),
        (
            "speed/training.py layouts --steps 1 --networks small_cnn",
            "| small_cnn | 32×1×32×32 |",
        ),
        (
            "speed/training.py loading --patches 64 --layers 1 --epochs 1 --per-head 2 --dims 2",
            "2-D nnunet",
        ),
        ("speed/training.py run experiment=clinical_pfednet rounds=1", "gradient steps"),
        ("speed/bundles.py --networks small_cnn --repeats 1 --models", "| small_cnn | 97 | "),
        ("speed/kernels.py network_lasso --largest 4", "ns/column"),
        (
            "speed/prepare.py scans --scans 2 --size 64 64 32 --repeats 1",
            "620 candidates per scan",
        ),
        ("speed/prepare.py volumes --repeats 1", "ms, 16 patches"),
        ("speed/codecs.py --elements 1000 --repeats 1", "runlength_codebook"),
        (
            "evidence/memberships.py FOLDER/new --only linear clinical --rounds 1 --seeds 0 1",
            "| 20 | fine-tuning |",
        ),
        ("speed/kernels.py fused_lasso --largest 3", "ns/element"),
        ("speed/bundles.py --networks --models unet --bits 2", "seconds of k-means"),
        ("trust/kill.py --kills 1 --kinds train", "left over"),
        ("trust/fuzz.py --inputs 20 --messages", "links with memory"),
        ("trust/coordinators.py --sequences 2 --holes 0", "nothing was broken"),
        ("trust/fuzz_sites.py --inputs 150 --rounds 3", "simulation of the same cohorts: yes"),
        (
            "evidence/detection.py FOLDER --rounds 0 --store docs/detection.json",
            "| pfednet − local |",
        ),
        ("evidence/partial_labels.py FOLDER/eyes --rounds 1", "left as background"),
        ("evidence/flamby.py heart FOLDER/heart FOLDER/flamby.csv", "test patients: "),
        ("trust/attacks.py --rounds 1 --sites 3 --aggregations mean krum", "| none | 0.9"),
        ("trust/masks.py --sites 4 --million 0.001", "| 4 | 1 | "),
        ("trust/networks_of_others.py --only recurrent", "| recurrent | "),
        ("trust/files_of_others.py -k nrrd --mutations 12", "12 mutations (NIfTI, table, "),
        (
            "trust/frontier.py digits --methods fedavg --seeds 1 --rounds 1 --steps 1 "
            "--shadows 4 --figure FOLDER/frontier.png",
            "| fedavg | 3 | shared model | ",
        ),
        ("evidence/pfednet_figures.py --out FOLDER", "pfednet_gamma.png"),
        ("trust/inversion.py --messages 1 --iterations 5 --only noise", "| clip 1, noise 0.1 | "),
        ("trust/privacy.py --steps 1 --networks logistic", "logistic        all"),
        ("evidence/bare_loop.py --seeds 1 --epochs 12", "within one point: yes"),
        ("evidence/normalization.py stroke FOLDER/none.csv --out FOLDER/new --splits", ""),
        ("evidence/side_by_side.py --rounds 2 --steps 2", "equal to 1e-6: yes"),
        ("speed/scale.py clients --clients 20 --methods fedavg", "\nfedavg                  20 "),
        ("speed/scale.py models --millions 1 --methods fedavg", "\nfedavg                   1 "),
        ("speed/scale.py sweep --runs 2 --workers 2 --rounds 1", "CPU time of 2 workers"),
        ("evidence/verdict_rule.py --repeats 20 --cases 1", "| 5 | 0 | 6 |"),
        (
            "evidence/levels.py FOLDER/ist.csv rounds=2 local.steps=1 --splits 1",
            "| pfednet | shift | ",
        ),
        (
            "evidence/coverage.py FOLDER/ist.csv rounds=2 --splits 1 --least 60",
            "| medfed's, recalibrated | 0.",
        ),
        (
            "evidence/walk.py --heart FOLDER/heart --only train evaluate --overrides rounds=2",
            "| `medfed evaluate by=sex` | ",
        ),
        ("evidence/studies.py FOLDER/trial.csv --least 100", "| hazard, 18 intervals |"),
        ("evidence/selection.py --repeats 5", "| 40 36 24 18 2, peaks 1 apart |"),
        ("project/house.py --repeats 0", "docstring lines  "),
        ("project/same_results.py --only ^methods.apfl$", "3 hashes"),
        ("speed/methods.py ditto --rounds 1 --blocks 1", "1 methods: median"),
        (
            "speed/gpu.py --device cpu --size tiny --networks unet_2d perceptron --clients 2 "
            "--steps 2 --repeats 1 --sides bare indexed graph medfed copied ahead graphs unfused",
            "| perceptron | 2 | unfused |",
        ),
        ("speed/gpu.py --device cpu --size tiny --networks perceptron --bits", "deterministic"),
        (
            "speed/methods.py scaffold ppfl --network small_cnn --rounds 2 --steps 2 "
            "--batch-size 2",
            "memory and bytes as the cards say: all\n",
        ),
        (
            "speed/peers.py --nets perceptron --clients 2 --rounds 2 --many 0",
            "perceptron  medfed",
        ),
        ("speed/kernels.py quantised --blocks 1 --batch-size 2 --networks U-Net", "maps "),
    ],
)
def test_runs(command, expected, tmp_path):
    if "FOLDER/heart" in command:
        write_heart(tmp_path / "heart")
    if "FOLDER/ist" in command:
        features = described(["experiment=stroke", f"data.path={tmp_path}"]).data.features
        rng, names = np.random.default_rng(0), ["HOSPNUM", "OCCODE", *features]
        rows = [[n % 2, *rng.integers(1, 5, size=len(names) - 1)] for n in range(260)]
        lines = [",".join(map(str, row)) for row in [names, *rows]]
        (tmp_path / "ist.csv").write_text("\n".join(lines))
    if "FOLDER/trial" in command:
        write_trial(tmp_path / "trial.csv")
    if "FOLDER/eyes" in command:
        cohort(tmp_path / "eyes", patients=5)
        for path in (tmp_path / "eyes").rglob("*.png"):  # twice as large as a patch
            picture = Image.open(path)
            large = (4 * picture.width, 4 * picture.height)
            picture.resize(large, Image.Resampling.NEAREST).save(path)
    command = command.replace("FOLDER", str(tmp_path))
    script, *options = command.split()
    done = processes.run(f"benchmarks/{script}", *options)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def test_the_house_counts_code_and_docstrings_apart(tmp_path):
    file = tmp_path / "module.py"
    content = '"""One.\n\nThree.\n"""\n# none\nclass A:\n    """Five."""\n\n    x = """no"""\n'
    file.write_text(content + "def f():\n    return 1\n")
    house = runpy.run_path(str(ROOT / "benchmarks/project/house.py"))
    assert house["docstring_lines"](file) == {1, 2, 3, 4, 7}
    assert house["code_lines"](file) == len(["class A:", "x", "def f():", "return"])


# Who passes more files on the way to the first gradient makes room elsewhere, or says here why not.
MOVES = {"moves between files to the first gradient": 1186}
MOVES |= {"files visited to the first gradient": 101}


@pytest.mark.long
def test_the_way_to_the_first_gradient_does_not_grow():
    house = runpy.run_path(str(ROOT / "benchmarks/project/house.py"))
    counts = house["first_gradient"](ROOT)
    grown = {name: counts[name] for name, most in MOVES.items() if counts[name] > 1.05 * most}
    assert not grown, f"above {MOVES} by more than 5 %"


def write_trial(path):
    """Writes three hospitals of a trial: what is known of patients, and when they died."""
    rng, lines = np.random.default_rng(0), ["HOSPNUM,AGE,SEX,RSBP,RATRIAL,TD,DIED"]
    for n in range(450):
        age, days = int(rng.normal(72, 11)), int(rng.exponential(150)) + 1
        known = [n % 3, age, "FM"[rng.integers(2)], int(rng.normal(160, 25)), "NY"[rng.integers(2)]]
        lines.append(",".join(map(str, [*known, days, rng.integers(2)])))
    path.write_text("\n".join(lines))


def test_every_benchmark_is_in_some_test():
    tests = "\n".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py"))
    scripts = [p.relative_to(ROOT / "benchmarks") for p in (ROOT / "benchmarks").rglob("*.py")]
    unseen = set()
    for script in scripts:
        content = (ROOT / "benchmarks" / script).read_text("utf-8")
        module = ".".join(("benchmarks", *script.with_suffix("").parts))
        known = f"{script.as_posix()} " in tests or f'{script.as_posix()}"' in tests
        if '__name__ == "__main__"' in content and not known and module not in tests:
            unseen.add(script.as_posix())
    assert unseen == set()
    assert {*NOT_HERE} <= {script.as_posix() for script in scripts}


def test_a_published_table_of_privacy_is_accounted_again(tmp_path):
    write_heart(tmp_path / "heart")
    rows = ["perf,e,d,seed", "0.5,,,1", "0.7,,,2", "0.9,1.0,0.1,1"]
    rows += [f"0.6,{e},0.0001,1" for e in ("10.0", "1.0", "0.1")]
    (tmp_path / "dp.csv").write_text("\n".join(rows) + "\n")
    kept = tmp_path / "kept.json"
    words = ["heart_flamby", str(tmp_path / "heart"), "--published", str(tmp_path / "dp.csv")]
    words += ["--store", str(kept), "--rounds", "1", "--steps", "1", "--seeds", "1"]
    done = processes.run("benchmarks/trust/frontier.py", *words)
    assert done.returncode == 0, done.stderr
    assert "| none | 0.600 ± 0.141 | unbounded | " in done.stdout
    assert "| 1 | 0.600 ± 0.000 | 1.5, 1.6, 4.1, 2.3 | " in done.stdout
    assert "| 0.1 | 0.600 ± 0.000 | 0.15, 0.16, 0.41, 0.23 | " in done.stdout
    published = runpy.run_path(str(ROOT / "benchmarks/trust/frontier.py"))["published"]
    assert all(line in done.stdout for line in published(json.loads(kept.read_text())))


def test_the_floor_of_mixtures_is_their_likeliest():
    """Where a row tells its model surely, the likeliest mixture is how often each occurs."""
    fit = runpy.run_path(str(ROOT / "benchmarks/evidence/memberships.py"))["fit"]
    rows = np.eye(3)[[0] * 6 + [1] * 3 + [2]]
    assert fit(rows) == pytest.approx([0.6, 0.3, 0.1], abs=1e-4)


@pytest.mark.parametrize("family", sorted((ROOT / "benchmarks/project/mutations").glob("*.yaml")))
def test_every_mutation_still_fits_its_line(family):
    listed = yaml.safe_load(family.read_text("utf-8"))
    assert all((ROOT / test).is_file() for test in listed["tests"])
    for file, was, now in listed["mutations"]:
        assert (ROOT / file).read_text("utf-8").count(was) == 1, was
        assert now != was
