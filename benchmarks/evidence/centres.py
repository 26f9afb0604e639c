"""Lists of two published cohorts with a folder per centre, as ``medfed benchmark`` reads them.

    python benchmarks/evidence/centres.py bladder FOLDER
    python benchmarks/evidence/centres.py polyp FOLDER

*bladder* (``suite=bladder``): K. Cao et al., "A multicenter bladder cancer MRI dataset and baseline
evaluation of federated learning in clinical application", Scientific Data 11:1147, 2024. Of
``CENTRE/T2WI/001.nii.gz`` the masks are ``CENTRE/Annotation/001.nii.gz``, or one per tumour,
``001_1.nii.gz`` and so on. Their union goes to ``CENTRE/tumour``, the list to ``dataset.json``.

*polyp* (``suite=polyp``): Fed-Polyp of M. Zhu et al., "FL-MedSegBench", arXiv 2603.11659. Of
``SOURCE/images/NAME`` the mask is the file of the same stem in ``SOURCE/masks``. As the authors do,
what is brighter than 100 is polyp: that goes to ``SOURCE/polyp``, the list to ``images.csv``. No
patients are named, so each picture counts as one.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import nibabel
import numpy as np
from PIL import Image

BRIGHT = 100  # of 255


def cases_of(folder: Path, images: str, masks: str) -> Iterator[tuple[Path, str, list[Path]]]:
    """Yields each image, its name without endings, and its masks; says which have none."""
    places = sorted(folder.glob(f"*/{images}"))
    if not places:
        raise SystemExit(
            f"{folder} holds no folder CENTRE/{images}; name the folder of the centres."
        )
    for place in places:
        of: dict[str, list[Path]] = {}
        for mask in sorted((place.parent / masks).glob("[!.]*")):
            name = mask.name.partition(".")[0]
            of.setdefault(name, []).append(mask)
            number = name.rpartition("_")
            if masks == "Annotation" and number[0]:
                of.setdefault(number[0], []).append(mask)
        for image in sorted(place.glob("[!.]*")):
            name = image.name.partition(".")[0]
            if name in of:
                yield image, name, of[name]
            else:
                print(f"{image} has no mask and is left out.")


def check_listed(folder: Path, listed: Sequence[object]) -> None:
    """Refuses an empty list before it is written."""
    if not listed:
        raise SystemExit(f"No image in {folder} has a mask.")


def list_bladder(folder: Path) -> int:
    """Writes the unions of masks, and the list; returns the number of scans."""
    entries = []
    for image, name, masks in cases_of(folder, "T2WI", "Annotation"):
        volumes = [nibabel.load(mask) for mask in masks]
        union = np.any([np.asarray(volume.dataobj) > 0 for volume in volumes], axis=0)
        centre = image.parents[1].name
        label = image.parents[1] / "tumour" / f"{name}.nii.gz"
        label.parent.mkdir(exist_ok=True)
        nibabel.save(nibabel.Nifti1Image(union.astype(np.uint8), volumes[0].affine), label)
        both = (("image", image), ("label", label))
        files = {role: file.relative_to(folder).as_posix() for role, file in both}
        entries.append({**files, "patient": f"{centre}_{name}", "centre": centre})
    check_listed(folder, entries)
    listed = {
        "channel_names": {"0": "T2w"},
        "labels": {"background": 0, "tumour": 1},
        "training": entries,
    }
    (folder / "dataset.json").write_text(json.dumps(listed, indent=1), encoding="utf-8")
    return len(entries)


def list_polyps(folder: Path) -> int:
    """Writes masks of two values, and the list; returns the number of pictures."""
    rows = []
    for image, name, (mask, *_) in cases_of(folder, "images", "masks"):
        bright = np.asarray(Image.open(mask).convert("L")) > BRIGHT
        source, binary = image.parents[1].name, image.parents[1] / "polyp" / f"{name}.png"
        binary.parent.mkdir(exist_ok=True)
        Image.fromarray(np.where(bright, 255, 0).astype(np.uint8)).save(binary)
        files = [file.relative_to(folder).as_posix() for file in (image, binary)]
        rows.append([*files, f"{source}_{name}", source])
    check_listed(folder, rows)
    with (folder / "images.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["image", "mask", "patient", "centre"], *rows])
    return len(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cohort", choices=["bladder", "polyp"])
    parser.add_argument("folder", type=Path, help="the folder of the centres' folders")
    asked = parser.parse_args()
    number = (list_bladder if asked.cohort == "bladder" else list_polyps)(asked.folder)
    print(f"{number} images listed.")
