"""Hospitals agree on one plan by messages; alone they have others."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from medfed.config.compose import build, described
from medfed.datamodules.base import converse_here
from medfed.datamodules.one_site import OwnData
from medfed.datamodules.partitions.by_centre import ByCentre
from medfed.datamodules.planning import Agreed, Planning
from medfed.functional.planning import Fingerprint, Planner
from medfed.standalone.errors import ConfigError, DataError
from medfed.standalone.preparation import Preparation

SMALL = (
    *("experiment=nnunet", "data.generated.patients=6", "data.generated.shape=[44,40,16]"),
    *("data.generated.hospitals=3", "data.planning.memory_gb=0.02", "data.planning.features=8"),
    *("data.patches_per_patient=2",),
)


def module(root, *more):
    data = build(described([*SMALL, f"data.root={root}", *more]).data)
    data.prepare_data()
    return data


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("planning")


@pytest.fixture(scope="module")
def whole(root):
    data = module(root)
    data.setup()
    return data


def measured(data, clients):
    """Shapes without air, spacings and grey values of regions, as no code of ours measures them."""
    shapes, spacings, grey = [], [], []
    for client in clients:
        for case, _ in data.cases_among(data.plans[client].patients["train"]):
            image, label, _ = data.unprepared(case, data.plans[client])
            inside = np.argwhere((image != 0).any(0).numpy())
            shapes.append(inside.max(0) - inside.min(0) + 1)
            spacings.append(data.scans.spacing(data.cases[case]))
            grey.append(image[0][label.bool().any(0)].double().numpy())
    return np.array(shapes), np.array(spacings), grey


def pooled_plan(data, clients):
    shapes, spacings, _ = measured(data, clients)
    planner = Planner(1, len(data.class_names) + 1, memory_gb=0.02, features=8)
    mm, voxels = spacings[:, ::-1], shapes[:, ::-1]
    return planner.plan(Fingerprint(mm, voxels, mm * voxels), "3d_fullres").mirrored()


def test_exact_messages_give_the_plan_of_pooled_data_and_histograms_nearly(root, whole):
    exact = module(root, "data.planning.exact=true")
    exact.setup()
    pooled = pooled_plan(exact, exact.plans)
    got = exact.agreed.plan
    assert replace(got, spacing=pooled.spacing) == pooled
    assert got.spacing == pytest.approx(pooled.spacing, rel=1e-12)
    nearly = whole.agreed.plan
    assert nearly.spacing == pytest.approx(pooled.spacing, rel=0.012)  # half a bin
    assert replace(nearly, spacing=pooled.spacing) == pooled


def test_alone_hospitals_have_networks_that_cannot_be_averaged(root, whole):
    alone = [pooled_plan(whole, [client]) for client in whole.plans]
    networks = {(plan.strides, plan.kernel_sizes, plan.patch_size) for plan in alone}
    assert len(networks) > 1
    agreed = {(c.train["image"].shape[1:], c.batch_size) for c in whole.clients.values()}
    assert agreed == {((1, *whole.agreed.plan.patch_size), whole.agreed.plan.batch_size)}


def test_grey_values_of_ct_are_those_of_all_cases_alike(whole):
    _, _, grey = measured(whole, whole.plans)
    mean = np.mean([values.mean() for values in grey])
    sd = np.sqrt(np.mean([np.square(values).mean() for values in grey]) - mean**2)
    rng = np.random.default_rng(0)  # nnU-Net draws as many voxels of every case
    drawn = np.concatenate([rng.choice(values, 20_000) for values in grey])
    ((low, high, *moments),) = whole.agreed.grey
    assert moments == pytest.approx([mean, sd], rel=1e-9)
    assert [low, high] == pytest.approx(np.percentile(drawn, [0.5, 99.5]), abs=16)  # a bin
    apart = np.mean([values.std() for values in grey])
    assert abs(apart - sd) > 0.02 * sd  # the mean of the hospitals' own would be wrong
    (rule,) = whole.preparation.rules
    seen = torch.tensor([[low - 50, mean, high + 50]])
    expected = (torch.tensor([[low, mean, high]]) - mean) / sd
    torch.testing.assert_close(rule.apply(seen.clone()), expected, rtol=1e-5, atol=1e-5)
    for client in whole.plans:
        record = json.loads(json.dumps(whole.preprocessing(client)))
        assert Preparation.from_record(record, 1) == whole.preparation
        assert record["plan"]["patch_size"] == list(whole.agreed.plan.patch_size)


def test_sites_agree_on_the_same_as_a_simulation(whole, root):
    sites = list(whole.plans)
    halves, modules = {}, {}
    for site in sites:
        modules[site] = module(root)
        modules[site].partition = OwnData(ByCentre(), site, sites)
        halves[site] = modules[site].setup_alone(site)
    server = build(described([*SMALL, f"data.root={root / 'none'}"]).data)  # it has no data
    _, exchanged = converse_here(server.merging(whole.facts()), halves)
    assert exchanged == whole.exchanged
    assert [way for _, way, _ in exchanged] == ["up"] * 3 + ["down"] * 3
    assert max(size for _, _, size in exchanged) < 8000
    for site, data in modules.items():
        assert (data.agreed, data.preparation) == (whole.agreed, whole.preparation)
        first, second = (d.clients[site].train_inputs(2) for d in (data, whole))
        assert torch.equal(first, second)


def test_few_patients_are_told_and_exact_sizes_are_one_patients(root, whole):
    (few,) = whole.summaries("hospital_0")
    assert "3 of at least 45" in few.too_few()
    exact = replace(whole.planning, exact=True).statistic("a", 1000, ["FLAIR"])
    assert "1 of at least 20" in exact.too_few()
    assert whole.planning.statistic("a", 30, ["FLAIR"]).too_few() is None


def test_what_the_user_sets_wins(root):
    keys = ("data.patch_size=[16,16,8]", "data.batch_size=3", "data.spacing=[9,9,12]")
    data = module(root, *keys, "data.normalize=zscore")
    data.setup()
    plan = data.agreed.plan
    assert (plan.patch_size, plan.batch_size, plan.spacing) == ((16, 16, 8), 3, (9, 9, 12))
    assert data.preparation.rules[0].name == "zscore"
    assert {*data.fixed} == {"patch_size", "batch_size", "spacing"}
    flat = module(root, "data.spatial_dims=2", "data.patch_size=[32,16]")
    flat.setup()
    assert flat.agreed.plan.configuration == "2d"
    assert flat.size == (32, 16, 1)
    assert len(flat.spacing) == 2


def test_without_planning_patches_have_a_size():
    with pytest.raises(ConfigError, match="may be null only if clients plan"):
        build(described(["data=datalist", "data.patch_size=null"]).data)


def message(**changed):
    return json.dumps({**json.loads(EMPTY), **changed}).encode()


EMPTY = json.dumps(
    {
        "spacings": [[0] * 451] * 3, "extents": [[0] * 451] * 3, "cases": 1, "smaller": 0,
        "known": [], "grey": [], "shares": [],
    }
)  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({}, "histograms do not count its cases"),
        ({"spacings": [[1]] * 3}, "inhomogeneous|another size"),
        ({"spacings": "x"}, "spacings: expected array, got str"),
        ({"smaller": 2}, "another size"),
        ({"cases": -1}, "cases"),
    ],
)
def test_messages_that_cannot_be_are_refused(changed, sentence):
    with pytest.raises(
        DataError, match=f"A message about training cases is malformed: .*({sentence})"
    ):
        Planning().server_answer([message(**changed)], ["FLAIR"], 2, 3)
    with pytest.raises(DataError, match="plan of the server is malformed"):
        Agreed.read(b'{"plan": {"spacing": [1]}}')
