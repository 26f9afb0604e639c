"""Hospitals and cases without a file of a contrast: who has which, from files to batches."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from medfed.datamodules.augmentation import ChannelDropout
from medfed.datamodules.duplicates import find_duplicates
from medfed.datamodules.one_site import OwnData
from medfed.datamodules.partitions.by_centre import ByCentre
from medfed.datamodules.partitions.by_group import ChannelMissing
from medfed.datamodules.partitions.saved import Saved
from medfed.datamodules.segmentation import SegmentationDataModule
from medfed.run.cohort import cohort_record
from medfed.standalone.errors import ConfigError, DataError
from tests.datamodules.absent_contrasts import BRATS, LAYOUTS, write_folders
from tests.datamodules.brats_layouts import make_head, save

LACKING = (0, 3, 4, 5)  # one of hospital a, all of hospital b


def made(path, reader, missing="zero", **settings):
    defaults = {
        "partition": ByCentre(),
        "path": str(path),
        "root": str(path.parent / "root"),
        "patch_size": (8, 8),
        "patches_per_patient": 4,
        "batch_size": 4,
        "patches": "fresh",
    }
    return SegmentationDataModule(
        reader=partial(reader, missing=missing), **{**defaults, **settings}
    )


def batches(client):
    """All batches of a client: of an epoch, and of both evaluations."""
    yield from client.train_batches(0)
    for split in ("val", "test"):
        yield from client.eval_batches(split)


@pytest.fixture
def folders(tmp_path):
    return write_folders(tmp_path / "data", LACKING)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_case_without_a_contrast_is_zero_there_and_says_so(name, tmp_path):
    write, reader = LAYOUTS[name]
    data = made(write(tmp_path / "data", LACKING), reader)
    data.setup()
    a, b = data.clients["a"], data.clients["b"]
    assert b.channels.tolist() == [False, True]
    assert a.channels.tolist() == [True, True]
    assert data.plans["a"].partial == {"FLAIR": (2, 3)}
    assert data.plans["b"].partial == {}
    for client in (a, b):
        for batch in batches(client):
            image, has = batch["image"], batch["channels"]
            filled = image.flatten(2).any(-1)
            assert torch.equal(filled, has)  # zero where it is absent, and there alone
    lacked = [batch["channels"][:, 0] for batch in batches(a)]
    assert {bool(x) for x in torch.cat(lacked)} == {True, False}


@pytest.mark.parametrize("name", LAYOUTS)
def test_by_default_a_missing_file_is_named_with_the_key(name, tmp_path):
    write, reader = LAYOUTS[name]
    folder = write(tmp_path / "data", (0,))
    with pytest.raises(DataError, match=r"data\.reader\.missing=zero\.") as caught:
        made(folder, reader, "error").setup()
    assert "\n" not in str(caught.value)
    assert "FLAIR" in str(caught.value)


def test_by_default_a_hospital_may_lack_what_its_table_says(tmp_path):
    folder = write_folders(tmp_path / "data", (3, 4, 5))
    table = ChannelMissing(ByCentre(), "table", table={"b": ["T1w"]})
    data = made(folder, BRATS, "error", partition=table)
    data.setup()
    assert data.clients["b"].channels.tolist() == [False, True]
    with pytest.raises(DataError, match=r"If b has no FLAIR of some cases, set data\.reader"):
        made(folder, BRATS, "error").setup()


def test_training_goes_by_the_training_cases(folders):
    """Hospital a has FLAIR of its test case only."""
    saved = folders.parent / "splits.json"
    parts = {"train": ["case_0"], "val": ["case_1"], "test": ["case_2"]}
    others = {"train": ["case_3"], "val": ["case_4"], "test": ["case_5"]}
    saved.write_text(json.dumps({"clients": {"a": parts, "b": others}}))
    data = made(folders, BRATS, partition=Saved(str(saved)))
    data.setup()
    assert data.clients["a"].channels.tolist() == [False, True]
    assert not any(batch["image"][:, 0].any() for batch in batches(data.clients["a"]))


def test_memory_cache_and_fixed_patches_agree(folders):
    usual = made(folders, BRATS)
    usual.setup()
    cached = made(folders, BRATS, memory_gb=0)
    cached.build_cache(workers=1)
    cached.setup()
    assert cached.store is not None
    for client in usual.clients:
        pairs = zip(batches(usual.clients[client]), batches(cached.clients[client]), strict=True)
        for one, other in pairs:
            assert all(torch.equal(one[key], other[key]) for key in one)
    fixed = made(folders, BRATS, patches="fixed")
    fixed.setup()
    seen = [batch["channels"] for batch in fixed.clients["a"].train_batches(0)]
    flair = torch.cat(seen)[:, 0]
    absent = [bool("FLAIR" in fixed.cases[i].lacks) for i in fixed.plans["a"].patients["train"]]
    assert int((~flair).sum()) == 4 * sum(absent)


def test_a_window_leaves_an_absent_channel_at_zero(folders):
    """Zero itself is 0.41 in the window of soft tissue."""
    data = made(folders, BRATS, normalize={"window": [-175, 250]}, spacing=(2.0, 2.0))
    data.setup()
    for batch in batches(data.clients["b"]):
        assert not batch["image"][:, 0].any()
        assert batch["image"][:, 1].any()


def test_neighbouring_slices_of_an_absent_channel_are_absent(folders):
    data = made(folders, BRATS, slices=3)
    data.setup()
    for batch in batches(data.clients["a"]):
        has = batch["channels"].view(-1, 2, 3)
        assert (has == has[..., :1]).all()


def test_a_lost_channel_is_one_that_the_case_has():
    present = torch.tensor([[True, True, False], [False, True, False]] * 20)
    image = torch.ones(40, 3, 2, 2) * present.view(40, 3, 1, 1)
    altered, kept = ChannelDropout(1.0, "sqrt")(image, present, seed=1)
    assert (kept <= present).all()
    assert kept.any(1).all()
    assert (kept[1::2] == present[1::2]).all()  # its only channel stays
    lost = kept[::2].sum(1) == 1
    assert lost.any()
    assert torch.allclose(altered[::2][lost].amax((1, 2, 3)), torch.tensor(2.0).sqrt())


def test_tables_and_records_name_who_has_what(folders, tmp_path):
    data = made(folders, BRATS)
    data.setup()
    had = cohort_record(data).clients
    assert had["b"].removed == ["FLAIR"]
    assert "FLAIR in 2 of 3 cases" in had["a"].notes
    partition = data.splits()["partition"]
    assert partition["a"]["channels_of_cases"] == {"FLAIR": (2, 3)}
    assert "channels_of_cases" not in partition["b"]
    facts = data.preprocessing("a"), data.preprocessing("b")
    assert [f["present"] for f in facts] == [["FLAIR", "T1w"], ["T1w"]]
    assert facts[0]["channels_of_cases"] == {"FLAIR": (2, 3)}
    saved = tmp_path / "splits.json"
    saved.write_text(json.dumps(data.splits()))
    again = made(folders, BRATS, partition=Saved(str(saved)))
    again.setup()
    assert again.splits()["partition"] == partition


def test_a_contrast_that_no_case_has_is_a_typing_error(tmp_path):
    folder = write_folders(tmp_path / "data", range(6))
    with pytest.raises(DataError, match=r"No case has a file of FLAIR .*of 6: FLAIR 0, T1w 6\)"):
        made(folder, BRATS).setup()
    # At a site it is another matter: other sites may have it.
    site = made(folder, BRATS, partition=OwnData(ByCentre(), "a", ["a", "b"]))
    site.plan()
    assert site.absent == ["FLAIR"]


def test_cases_that_leave_nothing_are_refused(tmp_path):
    folder = write_folders(tmp_path / "data", LACKING)
    table = ChannelMissing(ByCentre(), "table", table={"b": ["FLAIR"]})
    with pytest.raises(DataError, match=r"Case case_\d of client b has none of the channels"):
        made(folder, BRATS, partition=table).setup()
    (folder / "case_0" / "case_0_t1.nii.gz").unlink()
    with pytest.raises(DataError, match=r"case_0: 0 files match \*_flair"):
        made(folder, BRATS).setup()


def test_the_cache_is_made_of_what_may_be_missing(folders):
    with pytest.raises(DataError, match=r"data\.reader\.missing=zero"):
        made(folders, BRATS, "error").build_cache(workers=1)


def test_another_word_is_refused(folders):
    with pytest.raises(ConfigError, match=r"data\.reader\.missing='skip' is unknown; choose error"):
        made(folders, BRATS, "skip").setup()


def test_empty_volumes_are_no_copies(tmp_path):
    folder = write_folders(tmp_path / "data", ())
    for n in (0, 3):
        head = make_head(n)
        save(folder / f"case_{n}" / f"case_{n}_flair.nii.gz", head.images[0] * 0, head.affine)
    data = made(folder, BRATS)
    data.setup()
    clients = {name: plan.patients for name, plan in data.plans.items()}
    assert not find_duplicates(data.contents()[0], clients, data.contents()[1]).groups
    twin = folder / "case_5" / "case_5_t1.nii.gz"
    twin.write_bytes((folder / "case_1" / "case_1_t1.nii.gz").read_bytes())
    data = made(folder, BRATS)
    data.setup()
    assert len(find_duplicates(*[data.contents()[0], clients, data.contents()[1]]).groups) == 1


def test_a_list_of_another_length_is_refused(tmp_path):
    write, reader = LAYOUTS["list"]
    folder = write(tmp_path / "data", ())
    index = json.loads((folder / "dataset.json").read_text())
    index["training"][0]["image"] *= 2
    (folder / "dataset.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"lists 4 images for 2 channels; list one each, or null"):
        made(folder, reader).setup()
