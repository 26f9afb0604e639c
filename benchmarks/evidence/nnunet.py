"""Trains the network of an agreed plan beside today's U-Net, at the same number of steps.

Prints for each data set, network and seed the mean test Dice over hospitals (of cases, so slices
and volumes compare) and CPU seconds, and how hospitals would have planned alone:

    python benchmarks/evidence/nnunet.py brats BRATS_FOLDER    # folders of cases, two hospitals
    python benchmarks/evidence/nnunet.py lgg LGG_FOLDER        # images.csv, image and mask by slice
    python benchmarks/evidence/nnunet.py generated OUT_FOLDER  # CT of organs, which it makes there
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import logging
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path

import nibabel as nib
import numpy as np
from PIL import Image

import medfed
from medfed.config.compose import build, described
from medfed.datamodules.base import FederatedDataModule

UNET = ("experiment=organs_pfednet", "data.spacing=null", "augment=light")
PLANNED = ("experiment=nnunet",)
ADAM = ("optimizer=adam", "optimizer.lr=0.003", "scheduler=constant")  # as of the U-Net


def stacked(folder: Path, out: Path) -> tuple[str, ...]:
    """Writes each patient's slices as one NIfTI volume of thick slices, and their list."""
    with (folder / "images.csv").open() as file:
        rows = list(csv.DictReader(file))
    listed = []
    for patient in sorted({row["patient"] for row in rows}):
        own = [row for row in rows if row["patient"] == patient]
        files = {}
        for key, kind in (("image", np.float32), ("label", np.uint8)):
            name = "mask" if key == "label" else key
            mode = "L" if key == "label" else "RGB"  # whose channels are contrasts
            pictures = [Image.open(folder / row[name]).convert(mode) for row in own]
            slices = np.stack([np.asarray(picture) for picture in pictures], 2)
            slices = slices > 0 if key == "label" else slices
            files[key] = f"{patient}_{key}.nii.gz"
            affine = np.diag([1.0, 1.0, 6.0, 1.0])
            nib.save(nib.Nifti1Image(slices.astype(kind), affine), out / files[key])
        listed.append({**files, "patient": patient, "centre": own[0]["centre"]})
    about = {
        "labels": {"0": "background", "1": "tumour"},
        "modality": {"0": "pre", "1": "FLAIR", "2": "post"},
        "training": listed,
    }
    (out / "list.json").write_text(json.dumps(about))
    return "data=datalist", f"data.path={out / 'list.json'}", "partition=centre"


def data_of(name: str, folder: Path, scratch: Path) -> tuple[str, ...]:
    """The overrides that name a data set."""
    if name == "lgg":
        return stacked(folder, scratch)
    if name == "brats":
        two = ("data.reader.hospitals=2", "partition=auto")
        return ("data=brats_folder", f"data.path={folder}", *two)
    small = ("data.generated.shape=[44,40,12]", "data.generated.patients=4")
    return (f"data.root={folder}", "data.generated.hospitals=2", *small)


def plans_alone(overrides: tuple[str, ...]) -> dict[str, str]:
    """The patch and strides that each hospital plans by itself, and all together."""
    found = {}
    data = planned(overrides)
    for client in [None, *data.plans]:
        one = planned(overrides)
        one.plans = {n: p for n, p in one.plans.items() if client in (None, n)}
        one._agree()  # type: ignore[attr-defined]
        plan = one.agreed.plan  # type: ignore[attr-defined]
        strides = " ".join("".join(map(str, s)) for s in plan.strides)
        found[client or "agreed"] = f"{'×'.join(map(str, plan.patch_size))}, strides {strides}"
    return found


def planned(overrides: tuple[str, ...]) -> FederatedDataModule:
    """A data module that knows its hospitals and has read no scan."""
    data: FederatedDataModule = build(described([*PLANNED, *overrides]).data)
    data.plan()
    return data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=["brats", "lgg", "generated"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--dims", type=int, nargs="*", default=[2])
    parser.add_argument("--memory", type=float, default=0.1, help="GB that plans may take")
    parser.add_argument("--features", type=int, default=8)
    parser.add_argument("--residual", nargs="*", default=[], help="M, L or XL: ResEnc beside it")
    parser.add_argument("--only", nargs="*", default=[], help="networks, as the table names them")
    parser.add_argument("--methods", nargs="*", default=["fedavg"])
    parser.add_argument("--more", nargs="*", default=[], help="overrides of all runs")
    given = parser.parse_args()
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as scratch:
        data = (*data_of(given.name, given.folder, Path(scratch)), *given.more)
        full = plans_alone((*data, f"data.spatial_dims={2 if given.name == 'lgg' else 3}"))
        for client, text in full.items():
            print(f"{client} plans {text}", flush=True)
        small = (
            f"data.planning.memory_gb={given.memory}",
            f"data.planning.features={given.features}",
        )
        networks: dict[str, tuple[str, ...]] = {
            f"{name}, {d}-D": (*PLANNED, *small, f"data.spatial_dims={d}", *of)
            for d in given.dims
            for name, of in {
                "planned": (),
                "planned, Adam": ADAM,
                **{f"ResEnc {r}": (f"data.planning.residual={r}",) for r in given.residual},
            }.items()
        }
        networks["U-Net, 2-D"] = UNET
        networks = {name: of for name, of in networks.items() if name in (given.only or networks)}
        print("| method | network | seed | Dice | CPU seconds |\n|---|---|---:|---:|---:|")
        for method in given.methods:
            for name, of in networks.items():
                scores = [one_run(given, method, (*of, *data), seed) for seed in range(given.seeds)]
                for seed, (dice, seconds) in enumerate(scores):
                    print(f"| {method} | {name} | {seed} | {dice:.3f} | {seconds:.0f} |")
                every = [dice for dice, _ in scores]
                print(f"{method}, {name}: {np.mean(every):.3f} ± {np.std(every):.3f}", flush=True)


def one_run(
    given: argparse.Namespace, method: str, overrides: tuple[str, ...], seed: int
) -> tuple[float, float]:
    """Mean test Dice over hospitals, and CPU seconds."""
    began = time.process_time()
    printed = io.StringIO()  # the run's own tables
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(printed):
        result = medfed.train(
            *(*overrides, f"algorithm={method}", f"seed={seed}", f"rounds={given.rounds}"),
            *(f"local.steps={given.steps}", f"evaluation.every={given.rounds}", "logger=none"),
            *("model.surface=false", "pictures.format=none", "progress=false"),
            f"data.cache={folder}",
            folder=Path(folder, "run"),
        )
        dice = result.summary["federation"]["dice_case"]["mean"]
    return float(dice), time.process_time() - began


if __name__ == "__main__":
    main()
