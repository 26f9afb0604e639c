"""Lists and nnU-Net's folders trained for a step: slices, slices with neighbours, and volumes."""

from __future__ import annotations

import json
import math

import pytest

from medfed.run.evaluation import evaluate_run
from tests.datamodules.organ_layouts import write_datalist, write_nnunet
from tests.integration.runs import run

TINY = (
    "experiment=organs_pfednet",
    "partition=round_robin",
    "partition.num_clients=2",
    "rounds=1",
    "local.steps=2",
    "logger=none",
    "progress=false",
    "augment=none",
    "data.patches_per_patient=4",
    "data.batch_size=4",
    "data.patch_size=[8,8]",
    "model.network.channels=[4,8]",
    "model.network.strides=[2]",
)
LAYOUTS = {
    "slices": (write_datalist, ("data.spacing=[1.0,1.5]", "data.crop_foreground=true")),
    "neighbours": (write_datalist, ("data.spacing=null", "data.slices=3", "data.memory_gb=0")),
    "volumes": (
        write_nnunet,
        (
            "data=nnunet",
            "data.spatial_dims=3",
            "data.patch_size=[8,8,4]",
            "data.spacing=[1.0,1.5,2.0]",
            "data.crop_foreground=true",
        ),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run(name, tmp_path):
    write, settings = LAYOUTS[name]
    path = write(tmp_path / "data", 6)
    folder = tmp_path / "run"
    places = (f"data.path={path}", f"data.root={tmp_path / 'root'}")
    summary, experiment = run(folder, *TINY, *places, *settings, "pictures.format=png")
    assert experiment.task.activation == "softmax"
    for scores in summary["clients"].values():
        assert all(math.isfinite(scores[m]) for m in ("loss", "dice/liver", "dice/tumour", "hd95"))
    facts = json.loads((folder / "preprocessing.json").read_text())["hospital_0"]
    assert (facts["resampled_to"] is None) == (name == "neighbours")
    again = evaluate_run(folder)  # reads the data anew
    assert again["clients"] == json.loads((folder / "summary.json").read_text())["clients"]
    assert (folder / "pictures" / "contours.png").is_file()
