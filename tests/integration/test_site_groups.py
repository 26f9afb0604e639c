"""Experiments on planted groups of sites, made small; other algorithms on the same clients."""

from __future__ import annotations

import json

import pytest

from medfed.config.compose import described
from medfed.standalone.errors import ConfigError
from tests.checking import check_overrides
from tests.integration.runs import data_and_task, run

FEW = (
    "partition.num_clients=4",
    "rounds=2",
    "tuned.membership_start=1",
    "evaluation.every=2",
    "local.steps=2",
    "logger=none",
    "progress=false",
)
LUNA = (
    "experiment=luna16_ppfl",
    "data.generated.hospitals=1",
    "data.generated.patients=12",
    "data.generated.shape=[48,48,24]",
    "data.generated.lookalikes=8",
    "data.patches.size=[16,16]",
    "model.network.stem=small",
    "model.network.block_config=[1]",
)
BRATS = (
    "experiment=brats_ppfl",
    "data.generated.hospitals=1",
    "data.generated.patients=12",
    "data.generated.shape=[32,32,8]",
    "data.patch_size=[16,16]",
    "data.patches_per_patient=4",
    "model.network.channels=[4,8]",
    "model.network.strides=[2]",
)


@pytest.mark.parametrize("options", [LUNA, BRATS], ids=["luna16", "brats"])
def test_shrunken_runs_report_the_planted_groups(options, cohort_root, tmp_path):
    summary, experiment = run(
        tmp_path, *options, *FEW, f"data.root={cohort_root}", "pictures.format=png"
    )
    written = json.loads((tmp_path / "summary.json").read_text())["memberships"]
    assert written == summary["memberships"]
    assert (written["models"], written["planted_groups"]) == (2, 2)
    assert -0.5 <= written["adjusted_rand"] <= 1
    plans = experiment.data.plans
    assert len(plans) == 4
    assert {n for n, p in plans.items() if p.label_order == (1, 0)} == {
        f"group_1_hospital_{i}" for i in range(2)
    }
    assert (tmp_path / "pictures" / "memberships_over_rounds.png").is_file()
    rows = (tmp_path / "memberships.csv").read_text().splitlines()
    assert len(rows) == 1 + 3 * 4  # the start and two rounds of four clients


@pytest.mark.parametrize("experiment", ["luna16_ppfl", "brats_ppfl"])
def test_other_algorithms_are_compared_on_the_same_clients(experiment):
    line = ["-m", f"experiment={experiment}", "algorithm=fedavg,local"]
    for config in check_overrides(line):
        assert not config.canonical.get("_target_")
        assert "membership_lr" not in config.algorithm


def test_another_algorithm_gets_one_network(cohort_root, tmp_path):
    options = (*LUNA, "algorithm=fedavg", *FEW, f"data.root={cohort_root}")
    summary, experiment = run(tmp_path, *options)
    assert "memberships" not in summary
    assert not any("canonical" in n for n in experiment.module.federation.server["shared"])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("partition.num_clients=99", r"num_clients=99 does not fit 12 patients"),
        ("partition.groups=0", r"partition\.groups=0 must be at least 1"),
        (
            "partition.scanners=[{},{gamma: 0}]",
            r"group_1_hospital_0: partition\.gamma must be in \(0, inf\), not 0",
        ),
        ("partition.lacks=[[MR],[]]", r"Unknown channel MR; known: CT"),
        ("partition.label_shift=2", r"label_shift=2 leaves the order of 2 classes"),
    ],
)
def test_mistakes_are_one_sentence(option, message, cohort_root):
    with pytest.raises(ConfigError, match=message):
        data_and_task(described([*LUNA, f"data.root={cohort_root}", option]))
