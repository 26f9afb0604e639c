"""BraTS runs whose volumes come from the cache, and runs on real volumes of full size."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

from medfed.config.compose import described
from medfed.datamodules.client_data import BlocksOnDemand
from medfed.run.prepare import prepare
from medfed.standalone.errors import DataError
from tests.integration.runs import IMAGING, ROOT, imaging, outcome, run, typed

REAL = Path(os.environ.get("MEDFED_SHARED", ROOT.parent / "shared")) / "data" / "brats2018"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason=f"the real sample is not at {REAL}")


def test_a_run_that_maps_its_volumes_is_the_run_that_holds_them(tmp_path, cohort_root, caplog):
    small = (*imaging(cohort_root), f"data.cache={tmp_path / 'cache'}")
    run(tmp_path / "held", *small)
    assert not (tmp_path / "cache").exists()
    caplog.set_level(logging.INFO)
    _, experiment = run(tmp_path / "mapped", *small, "data.memory_gb=0")
    assert f"Prepared the volumes once, in {tmp_path / 'cache'}" in caplog.text
    blocks = experiment.data.clients["hospital_0"].evaluation["val"]
    assert isinstance(blocks, BlocksOnDemand)
    assert outcome(tmp_path / "mapped") == outcome(tmp_path / "held")
    splits = [(tmp_path / name / "splits.json").read_bytes() for name in ("held", "mapped")]
    assert splits[0] == splits[1]


def test_volumes_are_prepared_ahead(tmp_path, cohort_root, caplog):
    small = [o for o in imaging(cohort_root) if o.startswith("data.")]
    overrides = ["data=brats", *small, f"data.cache={tmp_path}"]
    caplog.set_level(logging.INFO)
    prepare(typed(overrides))
    assert "Items: 8" in caplog.text
    assert "To train on these data: medfed train experiment=brats_pfednet" in caplog.text
    (folder,) = tmp_path.glob("volumes_*")
    assert len(list(folder.glob("items/*.codes.npy"))) == 8


def test_a_torn_cache_is_not_taken_for_a_whole_one(tmp_path, cohort_root):
    small = (*imaging(cohort_root), f"data.cache={tmp_path / 'cache'}", "data.memory_gb=0")
    prepared = described([o for o in small if o.startswith("data.")] + ["data=brats"], "prepare")
    prepare(prepared)
    torn = next((tmp_path / "cache").glob("volumes_*/items/*.codes.npy"))
    torn.write_bytes(torn.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"codes\.npy is missing or not of the \d+ bytes"):
        run(tmp_path / "run", *small)
    prepare(prepared)
    summary, _ = run(tmp_path / "again", *small)
    assert set(summary["clients"]) == {"hospital_0", "hospital_1"}


REAL_RUN = (
    *IMAGING,
    "data=brats_folder",
    f"data.path={REAL}",
    "partition.preset=lack_k",
    "partition.channel=T1",
    "partition.clients=[hospital_1]",
)


@needs_real
@pytest.mark.parametrize(
    "settings",
    [
        ("data.patch_size=[64,64]", "data.eval_every=24"),
        ("data.spatial_dims=3", "data.patch_size=[80,80,40]", "rounds=1", "model.overlap=0"),
    ],
    ids=["slices", "volumes by sliding windows"],
)
def test_six_real_patients_train_with_two_channels_and_one_missing(settings, tmp_path):
    cache = f"data.cache={tmp_path / 'cache'}"
    summary, experiment = run(tmp_path / "run", *REAL_RUN, *settings, cache, "pictures.format=png")
    assert experiment.data.channel_names == ("FLAIR", "T1")
    both, lacking = experiment.data.clients.values()
    assert both.channels.tolist() == [True, True]
    assert lacking.channels.tolist() == [True, False]
    (test_block,) = lacking.evaluation["test"]
    assert {240} <= set(test_block["image"].shape)
    assert not test_block["image"][:, 1].any()
    assert all(0 <= c["iou"] <= 1 for c in summary["clients"].values())
    assert (tmp_path / "run" / "pictures" / "contours.png").stat().st_size > 1000
    assert torch.get_num_threads() == experiment.config.threads
