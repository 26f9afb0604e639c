"""Makes ``nnunet_plans.json``: what nnU-Net itself plans for fingerprints.

nnU-Net is no dependency: it brings 55 packages, replaces PyTorch by a build for CUDA, and plans
below folders that environment variables name. So the plans are made once, in an environment apart:

    python -m venv /tmp/nnunet
    /tmp/nnunet/bin/pip install torch==2.13.0 numpy scipy scikit-image SimpleITK pandas tqdm \
        nibabel scikit-learn tifffile requests timm
    /tmp/nnunet/bin/pip install --no-deps nnunetv2==2.8.1 dynamic-network-architectures==0.4.4 \
        batchgenerators batchgeneratorsv2 acvl-utils
    /tmp/nnunet/bin/python tests/references/make_nnunet_plans.py tests/references/nnunet_plans.json

Axes are in nnU-Net's order, (z, y, x); each plan has nnU-Net's transposition.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(tempfile.mkdtemp())
for name in ("raw", "preprocessed", "results"):
    os.environ[f"nnUNet_{name}"] = str(FOLDER / name)
DATASET = "Dataset001_Plan"
KEPT = ("batch_size", "patch_size", "spacing")
# Typical spacing and size (z, y, x), and how much cases differ.
TYPICAL = {
    "brats": ((1.0, 1.0, 1.0), (140, 172, 138), 0.0, 0.06),
    "thin-slice CT": ((0.7, 0.68, 0.68), (520, 512, 512), 0.12, 0.1),
    "thin-slice CT of the whole body": ((0.6, 0.9, 0.9), (1400, 512, 512), 0.05, 0.1),
    "CT of 5 mm": ((5.0, 0.78, 0.78), (90, 512, 512), 0.15, 0.2),
    "CT of 2.5 mm": ((2.5, 0.78, 0.78), (120, 512, 512), 0.2, 0.2),
    "CT in x": ((0.8, 0.8, 3.1), (300, 280, 60), 0.05, 0.1),
    "ACDC": ((10.0, 1.5, 1.5), (9, 220, 200), 0.15, 0.15),
    "prostate": ((3.6, 0.62, 0.62), (20, 320, 320), 0.1, 0.1),
    "coarsest in y": ((1.0, 4.0, 1.0), (180, 40, 160), 0.05, 0.1),
    "hippocampus": ((1.0, 1.0, 1.0), (36, 50, 35), 0.0, 0.1),
    "single slices": ((999.0, 1.0, 1.0), (1, 400, 380), 0.0, 0.1),
    "cube": ((1.0, 1.0, 1.0), (128, 128, 128), 0.0, 0.0),
}


def fingerprints() -> list[dict[str, Any]]:
    rng = np.random.default_rng(35)
    every = []

    def add(name: str, spacing: Any, size: Any, cases: int, of: float, by: float) -> None:
        spacings = np.array(spacing) * np.exp(of * rng.standard_normal((cases, 3)))
        if of:
            spacings[:, -1] = spacings[:, -2] if spacing[1] == spacing[2] else spacings[:, -1]
        shapes = np.maximum(1, np.array(size) * np.exp(by * rng.standard_normal((cases, 3))))
        shapes = np.where(np.array(size) == 1, 1, shapes.round())
        every.append(
            {
                "name": name,
                "channels": int(rng.integers(1, 5)),
                "labels": int(rng.integers(2, 6)),
                "spacings": spacings.round(4).tolist(),
                "shapes": shapes.astype(int).tolist(),
            }
        )

    for name, (spacing, size, of, by) in TYPICAL.items():
        add(name, spacing, size, 6, of, by)
        add(f"{name}, many cases", spacing, size, 15, of, by)
    for number in range(16):
        spacing = np.exp(rng.uniform(np.log(0.4), np.log(4.0), 3))
        size = np.exp(rng.uniform(np.log(20), np.log(400), 3))
        add(f"random {number}", spacing, size, int(rng.integers(3, 9)), 0.15, 0.2)
    return every


def main() -> None:
    import torch
    from nnunetv2.experiment_planning.experiment_planners import default_experiment_planner as base
    from nnunetv2.experiment_planning.experiment_planners.residual_unets import (
        residual_encoder_unet_planners as residual,
    )

    base.get_filenames_of_train_images_and_targets = lambda *_: {}
    base.ExperimentPlanner.determine_reader_writer = lambda self: object
    planners = {
        None: base.ExperimentPlanner,
        "M": residual.nnUNetPlannerResEncM,
        "L": residual.nnUNetPlannerResEncL,
    }
    raw, made = FOLDER / "raw" / DATASET, FOLDER / "preprocessed" / DATASET
    raw.mkdir(parents=True)
    made.mkdir(parents=True)
    results = []
    for number, one in enumerate(fingerprints()):
        about = {
            "channel_names": {str(n): "MRI" for n in range(one["channels"])},
            "labels": {str(n): n for n in range(one["labels"])},
            "numTraining": len(one["shapes"]),
            "file_ending": ".nii.gz",
        }
        facts = {
            "spacings": one["spacings"],
            "shapes_after_crop": one["shapes"],
            "median_relative_size_after_cropping": 1.0,
            "foreground_intensity_properties_per_channel": {},
        }
        (raw / "dataset.json").write_text(json.dumps(about))
        (made / "dataset_fingerprint.json").write_text(json.dumps(facts))
        asked = [(None, 8.0)] + [(None, 1.0)] * (number % 2) + [(None, 0.2)] * (number % 4 == 0)
        asked += [("M", 8.0)] * (number % 3 == 0) + [("L", 24.0)] * (number % 6 == 0)
        one["plans"] = []
        for preset, memory in asked:
            for old in made.glob("*Plans.json"):
                old.unlink()  # nnU-Net would keep its configurations
            # No weights: planning needs the sizes of the feature maps only.
            with torch.device("meta"), redirect_stdout(sys.stderr):
                planner = planners[preset](DATASET, gpu_memory_target_in_gb=memory)
                plans = planner.plan_experiment()
            for name, plan in plans["configurations"].items():
                if "architecture" in plan:
                    one["plans"].append(kept(plan, name, preset, memory, plans))
        results.append(one)
        print(number, one["name"], len(one["plans"]), file=sys.stderr)
    content = {
        "made_by": {n: version(n) for n in ("nnunetv2", "dynamic_network_architectures")},
        "fingerprints": results,
    }
    lines = json.dumps(content, separators=(",", ":")).replace('{"name"', '\n{"name"')
    Path(sys.argv[1]).write_text(lines.replace('{"configuration"', '\n {"configuration"') + "\n")


def kept(plan: Any, name: str, preset: str | None, memory: float, plans: Any) -> dict[str, Any]:
    network = plan["architecture"]["arch_kwargs"]
    of = json.loads(json.dumps({key: plan[key] for key in KEPT}, default=lambda n: n.tolist()))
    return {
        "configuration": name,
        "residual": preset,
        "memory_gb": memory,
        "axes": plans["transpose_forward"],
        **of,
        "strides": network["strides"],
        "kernel_sizes": network["kernel_sizes"],
        "features": network["features_per_stage"],
        "blocks": network.get("n_conv_per_stage") or network["n_blocks_per_stage"],
        "decoder_blocks": network["n_conv_per_stage_decoder"],
    }


if __name__ == "__main__":
    main()
