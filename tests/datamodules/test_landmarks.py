"""Landmarks of grey values that hospitals agree on by messages."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from medfed.common.errors import ConfigError
from medfed.config.compose import build, described
from medfed.datamodules.one_site import OwnData, setup_alone
from medfed.datamodules.partitions.by_centre import ByCentre
from medfed.datamodules.preparation import PERCENTILES, Preparation, Rule
from medfed.datamodules.tables.agreement import converse


def module(root, *more):
    keys = ["data=brats", "data.generated.hospitals=2", "data.generated.patients=3"]
    keys += ["data.generated.shape=[24,24,8]", "data.patch_size=[16,16]", f"data.root={root}"]
    data = build(described([*keys, "data.normalize=landmarks", *more]).data)
    data.prepare_data()
    return data


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("landmarks")


@pytest.fixture(scope="module")
def whole(root):
    data = module(root)
    data.setup()
    return data


def inside(image):
    return image[image != 0].numpy().astype(float)


def test_the_scale_is_the_mean_of_all_training_scans_and_every_scan_has_it(whole):
    for at, rule in enumerate(whole.preparation.rules):
        every = []
        for plan in whole.plans.values():
            for case, _ in whole.cases_among(plan.patients["train"]):
                voxels = inside(whole.scans.raw(whole.cases[case])["image"][at])
                every.append(np.percentile((voxels - voxels.mean()) / voxels.std(), PERCENTILES))
        np.testing.assert_allclose(rule.scale, np.mean(every, axis=0), atol=1e-5)
    for client, plan in whole.plans.items():
        for split in ("train", "test"):
            case, _ = whole.cases_among(plan.patients[split])[0]
            seen = whole.seen(case, plan).image
            for image, rule in zip(seen, whole.preparation.rules, strict=True):
                assert (image != 0).any()
                reached = np.percentile(inside(image), PERCENTILES)
                np.testing.assert_allclose(reached, rule.scale, atol=0.02)
        record = json.loads(json.dumps(whole.preprocessing(client)))
        assert Preparation.from_record(record, len(whole.channel_names)) == whole.preparation
    assert [way for _, way, _ in whole.exchanged] == ["up", "up", "down", "down"]


def test_sites_agree_on_the_same_as_a_simulation(whole, root):
    sites = list(whole.plans)
    halves, modules = {}, {}
    for site in sites:
        modules[site] = module(root)
        modules[site].partition = OwnData(ByCentre(), site, sites)
        halves[site] = setup_alone(modules[site], site)
    waiting = {site: next(half) for site, half in halves.items()}

    def step(site, answer):
        try:
            return waiting[site] if answer is None else halves[site].send(answer)
        except StopIteration:
            return None

    _, exchanged = converse(whole.merging(whole.facts()), sites, step)
    assert exchanged == whole.exchanged
    for site, data in modules.items():
        assert data.preparation == whole.preparation
        first, second = (d.clients[site].train_inputs(4) for d in (data, whole))
        assert torch.equal(first, second)


def test_a_cache_can_be_made_before_training(root):
    data = module(root)
    data.build_cache(1)
    assert data.preparation.rules[0].scale


@pytest.mark.parametrize("scale", [(1.0, 2.0), (*range(10), float("nan")), (*range(10), 3.0)])
def test_landmarks_of_a_bundle_are_checked(scale):
    with pytest.raises(ConfigError, match="11 numbers that do not fall"):
        Rule("landmarks", scale=scale)
