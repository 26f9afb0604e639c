"""Small hospitals with a bundle each: data, the task that evaluates it, and the exported model."""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import monai.bundle
import nibabel as nib
import numpy as np
import torch
from PIL import Image

from medfed.config.compose import described, load
from medfed.config.description import checked
from medfed.config.sections import Section
from medfed.datamodules.base import FederatedDataModule
from medfed.delivery.bundle.bundle import write_bundle
from medfed.delivery.bundle.networks import describe
from medfed.delivery.export.run_record import RunRecord
from medfed.delivery.predict.prediction import predict
from medfed.federation.split import float_entries
from medfed.models.task import TaskModule
from medfed.run.assembly import read_data, task_for
from tests.datamodules.picture_files import cohort

HEADS = ("data.generated.patients=4", "data.generated.hospitals=2", "data.patches_per_patient=1")
EXPERIMENTS = {
    # Slices of 24 x 24 in a network that halves them twice; one contrast is missing.
    "slices": (
        *("experiment=brats_pfednet", "data.generated.shape=[24,24,8]", "data.patch_size=[16,16]"),
        *("data.reader.regions=[whole,core,enhancing]", *HEADS),
        *("model.network.channels=[4,8,8]", "model.network.strides=[2,2]"),
    ),
    # Slices of 30 x 26, sides that this network refuses without a margin.
    "margins": (
        *("experiment=brats_pfednet", "data.generated.shape=[30,26,8]", "data.patch_size=[16,16]"),
        *(*HEADS, "model.network.channels=[4,8,8]", "model.network.strides=[2,2]"),
    ),
    # Windows of 16 x 16 x 8 over volumes of 24 x 20 x 10.
    "windows": (
        *("experiment=brats_pfednet", "data.generated.shape=[24,20,10]", "data.spatial_dims=3"),
        *("data.patch_size=[16,16,8]", *HEADS),
        *("model.network.channels=[4,8]", "model.network.strides=[2]", "partition=centre"),
    ),
    # Exclusive classes, of label values that are not 1 and 2.
    "classes": (
        *("data=brats_folder", "model=unet", "data.spatial_dims=3", "data.patch_size=[16,16,8]"),
        *("data.reader.modalities={CT: CT.nii.gz}", "data.reader.label=label.nii.gz"),
        *("data.reader.regions={organ: [2], lesion: [5]}", "data.patches_per_patient=1"),
        *("model.network.channels=[4,8]", "model.network.strides=[2]", "partition=round_robin"),
    ),
    "candidates": (
        *("experiment=luna16_pfednet", "data.generated.shape=[32,32,16]"),
        *("data.generated.hospitals=2", "data.generated.lookalikes=9", "data.test_fraction=0.34"),
        *("data.patches.size=[16,16]", "model.network.block_config=[1,1]", "partition=centre"),
        *("data.patches.slices=3", "data.augment=null", "data.generated.patients=6"),
    ),
    "digits": ("experiment=digits_pfednet", "model.network.channels=[4,4,4]"),
    "table": ("experiment=clinical_pfednet", "data.missing_indicator=true"),
    "outcome": ("experiment=diabetes_pfednet",),
    "survival": (
        *("data=csv", "data.outcome=survival", "data.time=days", "data.event=died"),
        *("data.centre=centre", "partition=centre", "model=survival", "data.intervals=4"),
        "algorithm=fedavg",
    ),
    "pictures": (
        *("experiment=retina_pfednet", "partition=centre", "data.patch_size=[16,16]"),
        *("data.patches_per_patient=1", "model.network.channels=[4,8]"),
        *("model.network.strides=[2]", "model.network.num_res_units=1"),
    ),
    "findings": (
        *("data=image_table", "model=findings", "partition=centre", "data.reader.color=grey"),
        *("data.reader.findings=[left,right]", "data.reader.size=[16,16]"),
        *("model.network.block_config=[1,1]", "model.network.stem=small", "algorithm=fedavg"),
    ),
    "lesions": (
        *("experiment=luna16_detection", "data.generated.shape=[64,64,24]"),
        *("data.generated.hospitals=2", "data.generated.patients=4", "data.patches_per_patient=1"),
        *("data.val_fraction=0.25", "data.test_fraction=0.25", "model.network.channels=[4,8]"),
    ),
}


@dataclass(frozen=True)
class Hospital:
    """One client of a federation.

    Attributes:
        client: Its id.
        config: The run's configuration.
        data: All clients' data.
        task: With the client's weights.
        bundle: The exported folder.
    """

    client: str
    config: Section
    data: FederatedDataModule
    task: TaskModule
    bundle: Path

    def predict(self, **keys: Any) -> None:
        """Does what the script does."""
        spelled = {k: v for k, v in {"bundle": self.bundle, **keys}.items() if v is not None}
        texts = {k: f'"{v}"' if isinstance(v, Path) else v for k, v in spelled.items()}
        predict(checked(load([f"{k}={v}" for k, v in texts.items()], "predict")))

    def copy(self, folder: Path) -> Path:
        """Returns a copy of the bundle that a test may damage."""
        return Path(shutil.copytree(self.bundle, folder / "bundle"))


def write_organs(folder: Path) -> Path:
    """Eight cases of an organ with a lesion; slices are thick, axes not in the body's order."""
    rng = np.random.default_rng(3)
    affine = np.array([[0, 0, 3.0, 5], [-1, 0, 0, 8], [0, 1, 0, -4], [0, 0, 0, 1]])
    for case in range(8):
        label = np.zeros((20, 10, 24), np.uint8)
        label[3:15, 2:8, 4 : 16 + case] = 2
        label[6:10, 4:6, 6:12] = 5
        voxels = 40.0 * label + rng.normal(100, 10, label.shape)
        (folder / f"case_{case}").mkdir(parents=True)
        for name, array in (("CT", voxels.astype(np.float32)), ("label", label)):
            file = folder / f"case_{case}" / f"{name}.nii.gz"
            nib.save(nib.Nifti1Image(array, affine), file)
    return folder


def write_followed(folder: Path) -> Path:
    """Patients of two hospitals, with the time until death or the last visit."""
    rng = np.random.default_rng(1)
    rows = ["age,sex,centre,days,died"]
    for n in range(120):
        days = f"{rng.exponential(300) + 1:.1f}"
        rows.append(f"{rng.normal(60, 10):.1f},{'fm'[n % 2]},{'ab'[n // 60]},{days},{n % 3 > 0:d}")
    folder.mkdir()
    (folder / "table.csv").write_text("\n".join(rows) + "\n")
    return folder / "table.csv"


def write_pictures(folder: Path) -> Path:
    """Photographs with masks."""
    cohort(folder)
    return folder


def write_findings(folder: Path) -> Path:
    """Images of two findings each."""
    folder.mkdir()
    rng = np.random.default_rng(2)
    rows = ["image,left,right,centre"]
    for n in range(24):
        Image.fromarray(rng.integers(0, 255, (16, 16), np.uint8)).save(folder / f"{n}.png")
        rows.append(f"{n}.png,{n % 2},{n // 2 % 2},{'ab'[n // 12]}")
    (folder / "table.csv").write_text("\n".join(rows) + "\n")
    return folder / "table.csv"


FILES = {
    "classes": write_organs,
    "survival": write_followed,
    "pictures": write_pictures,
    "findings": write_findings,
}
SHIPPED = ("digits", "table", "outcome")


def make_hospital(name: str, root: Path, *overrides: str) -> Hospital:
    """Reads the data, draws weights and exports them; nothing is trained."""
    settings = [f"data.root={root}"]
    if name in (*SHIPPED, *FILES):
        settings = [f"data.path={FILES[name](root / name)}"] if name in FILES else []
    run = described([*EXPERIMENTS[name], *settings, *overrides, f"folder={root}", "threads=1"])
    data = read_data(run)
    run, task = task_for(run, data)
    config = run.values
    client = next(iter(data.plans))
    generator = torch.Generator().manual_seed(7)
    for tensor in task.network.state_dict().values():
        if tensor.is_floating_point():
            tensor.add_(0.2 * torch.randn(tensor.shape, generator=generator).clamp(-2, 2))
    bundle = root / f"bundle_{name}"
    summary = {"algorithm": "pfednet", "clients": {client: {"loss": 1.0}}}
    preprocessing = {client: data.preprocessing(client)}
    record = RunRecord(root)
    vars(record).update(
        config=config,
        summary=summary,
        splits=data.splits(),
        versions={"commit": "unknown"},
        preprocessing=preprocessing,
    )
    facts = record.facts(client, describe(dict(config.model.network)))
    write_bundle(bundle, facts, float_entries(task.network), {})
    return Hospital(client, config, data, task, bundle)


def same_files(made: Path, expected: Path) -> list[str]:
    """Compares every file of a folder to the byte with the one of that name; returns the names."""
    names = sorted(p.relative_to(made).as_posix() for p in made.rglob("*") if p.is_file())
    for name in names:
        assert (made / name).read_bytes() == (expected / name).read_bytes(), name
    assert names
    return names


@contextmanager
def inside(bundle: Path, monkeypatch) -> Iterator[None]:
    """As in a bundle's folder, in this process, which is quicker than another."""
    monkeypatch.syspath_prepend(str(bundle))
    monkeypatch.chdir(bundle)
    for name in [n for n in sys.modules if n == "scripts" or n.startswith("scripts.")]:
        monkeypatch.delitem(sys.modules, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of MONAI's own making
        yield
    for name in [n for n in sys.modules if n == "scripts" or n.startswith("scripts.")]:
        del sys.modules[name]


def run_by_monai(bundle: Path, source: Path, target: Path, monkeypatch, **keys: Any) -> None:
    """Runs a bundle's own configuration."""
    with inside(bundle, monkeypatch):
        paths = {"dataset_dir": str(source), "output_dir": str(target)}
        monai.bundle.run(config_file="configs/inference.json", **paths, **keys)
