"""The benchmarks run; what they measure is no test."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path

import pytest
import yaml

from tests import processes
from tests.datamodules.picture_files import cohort
from tests.integration.test_bad_data import write_heart

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("adapters.py --ranks 4 --width 48", "( 1.08%)"),
        ("round_overhead.py --rounds 1 --clients 2 --blocks 1", "medfed / peer:"),
        (
            "nnunet.py generated FOLDER/new --rounds 1 --steps 1 --seeds 1 --memory 0.01 "
            "--features 4",
            "agreed plans ",
        ),
        ("layouts.py --steps 1 --networks small_cnn", "| small_cnn | 32×1×32×32 |"),
        ("inference.py --networks small_cnn --repeats 1", "| small_cnn | 97 | "),
        ("network_lasso.py --largest 4", "ns/column"),
        ("loading.py --patches 64 --layers 1 --epochs 1 --per-head 2 --dims 2", "2-D nnunet"),
        ("prepare.py --scans 2 --size 64 64 32 --repeats 1 --kills 0", "620 candidates per scan"),
        ("ppfl_overhead.py --rounds 1 --steps 1 --batch-size 4 --networks small_cnn", "ratio"),
        ("qupel_overhead.py --rounds 1 --steps 1 --batch-size 4 --networks unet", "ratio"),
        ("codecs.py --elements 1000 --repeats 1", "runlength_codebook"),
        ("mixture_floor.py --clients 2 --samples 20 --seeds 1", "seed 0: half L1"),
        (
            "memberships.py FOLDER/new --only linear clinical --rounds 1 --seeds 0 1",
            "| 20 | fine-tuning |",
        ),
        ("outcome_units.py FOLDER/new --methods fedadam --rounds 1", "| a constant | 79.21 "),
        ("fused_lasso.py --largest 3", "ns/element"),
        ("bundle_sizes.py --networks unet --bits 2", "seconds of k-means"),
        ("kill.py --kills 1 --kinds train", "left over"),
        ("fuzz.py --inputs 20 --messages", "links with memory"),
        ("fuzz_sites.py --inputs 150 --rounds 3", "simulation of the same cohorts: yes"),
        ("readers.py FOLDER --scales 1", "pictures read twice"),
        ("attacks.py --rounds 1 --sites 3 --aggregations mean krum", "| none | 0.9"),
        ("masks.py --sites 4 --million 0.001", "| 4 | 1 | "),
        (
            "frontier.py digits --methods fedavg --seeds 1 --rounds 1 --steps 1 "
            "--shadows 4 --figure FOLDER/frontier.png",
            "| fedavg | 3 | shared model | ",
        ),
        ("pfednet_figures.py --out FOLDER", "pfednet_gamma.png"),
        ("inversion.py --messages 1 --iterations 5 --only noise", "| clip 1, noise 0.1 | "),
        ("privacy.py --steps 1 --networks logistic", "logistic        all"),
        ("bare_loop.py --seeds 1 --epochs 12", "within one point: yes"),
        ("side_by_side.py --rounds 2 --steps 2", "equal to 1e-6: yes"),
        ("scale.py --clients 20 --methods fedavg", "\nfedavg         20 "),
        ("verdict_rule.py --repeats 20 --cases 1", "| 5 | 0 | 6 |"),
        ("house.py --repeats 0", "modules that one neighbour reads"),
        ("same_results.py --only ^methods.apfl$", "3 hashes"),
        ("methods.py ditto --rounds 1 --blocks 1", "1 methods: median"),
        (
            "gpu.py --device cpu --size tiny --networks unet_2d --clients 2 --steps 2 --repeats 1 "
            "--sides bare medfed",
            "| unet_2d | 2 | medfed |",
        ),
        (
            "methods.py scaffold ppfl --network small_cnn --rounds 2 --steps 2 --batch-size 2",
            "memory and bytes as the cards say: all\n",
        ),
        ("quantization.py --largest 3 --blocks 1 --batch-size 2 --networks U-Net", "step_centers"),
    ],
)
def test_runs(command, expected, tmp_path):
    if "FOLDER " in command:
        for row in cohort(tmp_path, patients=1):
            mask = tmp_path / row["mask"]
            shutil.copy(mask, mask.with_stem(mask.stem + "_second_reader"))
    command = command.replace("FOLDER", str(tmp_path))
    script, *options = command.split()
    done = processes.run(f"benchmarks/{script}", *options)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def test_a_published_table_of_privacy_is_accounted_again(tmp_path):
    write_heart(tmp_path / "heart")
    rows = ["perf,e,d,seed", "0.5,,,1", "0.7,,,2", "0.9,1.0,0.1,1"]
    rows += [f"0.6,{e},0.0001,1" for e in ("10.0", "1.0", "0.1")]
    (tmp_path / "dp.csv").write_text("\n".join(rows) + "\n")
    kept = tmp_path / "kept.json"
    words = ["heart_flamby", str(tmp_path / "heart"), "--published", str(tmp_path / "dp.csv")]
    words += ["--store", str(kept), "--rounds", "1", "--steps", "1", "--seeds", "1"]
    done = processes.run("benchmarks/frontier.py", *words)
    assert done.returncode == 0, done.stderr
    assert "| none | 0.600 ± 0.141 | unbounded | " in done.stdout
    assert "| 1 | 0.600 ± 0.000 | 1.5, 1.6, 4.1, 2.3 | " in done.stdout
    assert "| 0.1 | 0.600 ± 0.000 | 0.15, 0.16, 0.41, 0.23 | " in done.stdout
    published = runpy.run_path(str(ROOT / "benchmarks" / "frontier.py"))["published"]
    assert all(line in done.stdout for line in published(json.loads(kept.read_text())))


@pytest.mark.parametrize("family", sorted((ROOT / "benchmarks/mutations").glob("*.yaml")))
def test_every_mutation_still_fits_its_line(family):
    listed = yaml.safe_load(family.read_text("utf-8"))
    assert all((ROOT / test).is_file() for test in listed["tests"])
    for file, was, now in listed["mutations"]:
        assert (ROOT / file).read_text("utf-8").count(was) == 1, was
        assert now != was
