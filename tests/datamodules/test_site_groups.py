"""Planted groups of sites: scanners, channels and label orders by group, in every data module."""

import json
from functools import partial

import numpy as np
import pytest
import torch

from medfed.config.compose import described, load
from medfed.config.description import describe
from medfed.datamodules.generated.luna16 import LunaCohort
from medfed.datamodules.luna16 import Luna16DataModule
from medfed.datamodules.partitions.by_group import ChannelMissing, SiteGroups, group_of
from medfed.datamodules.partitions.saved import Saved
from medfed.datamodules.readers.base import Patient
from medfed.datamodules.readers.datalist import MSDReader
from medfed.datamodules.readers.luna16 import Luna16Reader
from medfed.datamodules.scanner import UNCHANGED
from medfed.run.memberships import planted_groups
from medfed.standalone.ct import PatchSpec
from medfed.standalone.errors import ConfigError, DataError
from tests.integration.runs import data_and_task
from tests.sweeps import sweep

SCANNERS = [{}, {"gamma": 1.5, "noise": 0.1}]
CHANNELS = ("FLAIR", "T1w", "T1gd", "T2w")
DIGITS = ("data=digits", "partition=site_groups")


@sweep(("clients", "groups"), [(1, 1), (6, 2), (7, 3), (12, 3)])
@sweep("size", [12, 41])
def test_clients_and_groups_are_even(clients, groups, size):
    patients = [Patient(f"p{i}") for i in range(size)]
    dealt = SiteGroups(clients, groups).assign(patients, seed=3)
    found = planted_groups(list(dealt))
    assert found == tuple(sorted(found))
    per_group = np.bincount(found, minlength=groups)
    assert per_group.sum() == clients
    assert np.ptp(per_group) <= 1
    assert np.ptp([len(ids) for ids in dealt.values()]) <= 1


def test_hospitals_of_a_group_have_one_scanner_with_noise_of_their_own():
    partition = SiteGroups(5, 2, SCANNERS)
    sites = partition.scanners_of(partition.names(), seed=4)
    assert sorted(sites) == [n for n in partition.names() if group_of(n) == 1]
    for name, site in sites.items():
        expected = {"client": name, "seed": 4, **UNCHANGED, "gamma": 1.5, "noise": 0.1}
        assert site.record() == expected
    image = torch.zeros(1, 8, 8)
    first, second, _ = (site.apply(image, "p") for site in sites.values())
    assert (first - second).abs().max() > 0.01
    assert SiteGroups(5, 2, [{}, {}]).scanners_of(partition.names(), 0) == {}


def test_groups_lack_channels():
    partition = SiteGroups(4, 2, lacks=[["flair", "T2w"], []])
    present = partition.availability(partition.names(), CHANNELS, 0)
    for name, has in present.items():
        expected = [True] * 4 if group_of(name) else [False, True, True, False]
        assert has.tolist() == expected


@pytest.mark.parametrize(("groups", "classes", "shift"), [(2, 2, 1), (3, 3, 1), (3, 10, 4)])
def test_no_network_is_right_in_two_groups(groups, classes, shift):
    partition = SiteGroups(groups, groups, label_shift=shift)
    orders = partition.label_orders(partition.names(), classes, 0)
    everyone = [orders.get(n, tuple(range(classes))) for n in partition.names()]
    for order in everyone:
        assert sorted(order) == list(range(classes))
    for k in range(classes):
        assert len({order[k] for order in everyone}) == groups


def test_wrappers_keep_the_label_order():
    inner = SiteGroups(2, label_shift=1)
    wrapped = ChannelMissing(inner, "none")
    assert wrapped.label_orders(inner.names(), 2, 0) == inner.label_orders(inner.names(), 2, 0)


@pytest.fixture(scope="module")
def digits():
    """The same digits with and without planted groups."""
    planted = ("partition.label_shift=3", "partition.scanners=[{},{gamma: 2.0}]")
    options = [(), planted]
    return [data_and_task(described([*DIGITS, "model=small_cnn", *o]))[0] for o in options]


def test_labels_of_all_splits_are_renamed_and_nothing_else(digits):
    plain, shifted = digits
    assert shifted.splits()["clients"] == plain.splits()["clients"]
    for name, client in shifted.clients.items():
        shift = 3 * group_of(name)
        for split in ("train", "val", "test"):
            ours = torch.cat([b["label"] for b in client.eval_batches(split)])
            theirs = torch.cat([b["label"] for b in plain.clients[name].eval_batches(split)])
            assert torch.equal(ours, (theirs + shift) % 10)
            images, before = (
                torch.cat([b["image"] for b in c.eval_batches(split)]).double()
                for c in (client, plain.clients[name])
            )
            expected = ((before + 1) / 2) ** (2.0 if shift else 1.0) * 2 - 1
            torch.testing.assert_close(images, expected, atol=1e-6, rtol=0)
        counts = torch.bincount(client.train["label"], minlength=10).float()
        assert torch.equal(client.label_counts, counts)


def test_the_record_makes_the_same_clients_again(digits, tmp_path):
    _, shifted = digits
    file = tmp_path / "splits.json"
    file.write_text(json.dumps(shifted.splits()))
    config = load(["data=digits", "model=small_cnn", "partition=saved", f"partition.file={file}"])
    again = data_and_task(describe(config))[0]
    for name, client in shifted.clients.items():
        assert torch.equal(again.clients[name].train["label"], client.train["label"])
    record = shifted.splits()["partition"]
    assert record["group_1_hospital_0"]["label_order"] == [3, 4, 5, 6, 7, 8, 9, 0, 1, 2]
    assert "label_order" not in record["group_0_hospital_0"]
    record["group_1_hospital_0"]["label_order"] = [0, 0]
    file.write_text(json.dumps({"clients": {"group_1_hospital_0": ["a"]}, "partition": record}))
    with pytest.raises(DataError, match=r"label_order of client group_1_hospital_0 is no order"):
        Saved(str(file)).label_orders(["group_1_hospital_0"], 2, 0)


def test_ct_patches(tmp_path):
    def labels(partition):
        data = Luna16DataModule(
            partition=partition,
            reader=Luna16Reader,
            patches=PatchSpec(size=(16, 16)),
            root=str(tmp_path),
            generated=LunaCohort(1, 6, (48, 48, 24), lookalikes=8, seed=1),
        )
        data.setup()
        return {n: c.train["label"] for n, c in data.clients.items()}

    plain, shifted = labels(SiteGroups(2)), labels(SiteGroups(2, label_shift=1))
    assert torch.equal(shifted["group_0_hospital_0"], plain["group_0_hospital_0"])
    assert torch.equal(shifted["group_1_hospital_0"], 1 - plain["group_1_hospital_0"])


def test_volumes(make_brats):
    """Contrasts, scanner and order of regions by group."""
    data = make_brats(partition=SiteGroups(2, 2, SCANNERS, lacks=[["T1w"], ["FLAIR"]]))
    data.setup()
    for name, missing in (("group_0_hospital_0", 1), ("group_1_hospital_0", 0)):
        images = data.clients[name].samples(torch.arange(8))["image"]
        assert images.abs().amax((0, 2, 3)).eq(0).nonzero().flatten().tolist() == [missing]
    shifted = make_brats(partition=SiteGroups(2, label_shift=1))
    shifted.setup()
    for name, order in (("group_0_hospital_0", [0, 1, 2]), ("group_1_hospital_0", [2, 0, 1])):
        ours, theirs = (d.clients[name] for d in (shifted, data))
        # What was whole, core, enhancing is called 1, 2, 0 in group 1.
        assert torch.equal(ours.train["label"], theirs.train["label"][:, order])
        for split in ("val", "test"):
            for one, two in zip(ours.eval_batches(split), theirs.eval_batches(split), strict=True):
                assert torch.equal(one["label"], two["label"][:, order])
    one_region = partial(MSDReader, regions=("whole",))
    with pytest.raises(ConfigError, match=r"leaves the order of 1 class \(or regions\) as it is"):
        make_brats(one_region, partition=SiteGroups(2, label_shift=1)).setup()


@sweep(
    ("make", "message"),
    [
        (lambda: SiteGroups(6, 0), r"groups=0 must be at least 1"),
        (lambda: SiteGroups(2, 3), r"groups=3 must be .* partition\.num_clients=2 at least as"),
        (lambda: SiteGroups(6).assign([Patient("a")], 0), r"num_clients=6 does not fit 1 patients"),
        (lambda: SiteGroups(6, 2, [{}]), r"partition\.scanners has 1 entries for 2 groups"),
        (lambda: SiteGroups(2, 2, [{}, {"gama": 1}]), r"Unknown setting of a scanner gama"),
        (
            lambda: SiteGroups(2, 2, [{}, {"resolution": 2}]),
            r"group_1_hospital_0: .*resolution must be in \(0, 1\], not 2",
        ),
        (lambda: SiteGroups(2, lacks=[[]]), r"partition\.lacks has 1 entries"),
        (lambda: SiteGroups(2, label_shift=-1), r"label_shift must not be negative, not -1"),
        (lambda: lacking([["FLAIRE"], []]), r"Unknown channel FLAIRE; .*did you mean FLAIR"),
        (lambda: lacking([CHANNELS, []]), r"takes every channel from group 0; leave it at least"),
        (
            lambda: SiteGroups(2, label_shift=2).label_orders([], 2, 0),
            r"label_shift=2 leaves the order of 2 classes \(or regions\) as it is",
        ),
    ],
)
def test_bad_settings(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def lacking(lacks):
    partition = SiteGroups(2, lacks=lacks)
    return partition.availability(partition.names(), CHANNELS, 0)
