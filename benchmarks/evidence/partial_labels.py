"""Dice of two regions of which each hospital outlines one, on real pictures of several hospitals.

The first half of the hospitals outlines the tumour, the others the rest of the head (what is not
black). Three runs differ in what they know of it: everybody outlines both; ``data.annotated`` says
who outlines what; or nothing says it, and what a hospital does not outline is background there.
Each region is measured on the test patients of those that outline it in the second run.

    python benchmarks/evidence/partial_labels.py FOLDER --rounds 6

FOLDER has ``images.csv`` with the columns image, mask, patient and centre.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from medfed.config.compose import described
from medfed.run.train import train

REGIONS = ("tumour", "head")
BLACK = 15  # grey values up to this one are air


def halves(centres: list[str]) -> dict[str, str]:
    """The region of every hospital."""
    names = sorted(set(centres))
    return {name: REGIONS[2 * n // len(names)] for n, name in enumerate(names)}


def write(source: Path, folder: Path, removed: bool) -> dict[str, str]:
    """Writes pictures and masks with both regions, or with the hospital's alone."""
    with (source / "images.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    region = halves([row["centre"] for row in rows])
    folder.mkdir(parents=True)
    for n, row in enumerate(rows):
        image = Image.open(source / row["image"]).convert("L")
        tumour = np.asarray(Image.open(source / row["mask"]).convert("L")) > 0
        mask = np.where(tumour, 1, 2 * (np.asarray(image) > BLACK)).astype(np.uint8)
        if removed:
            mask[mask != 1 + REGIONS.index(region[row["centre"]])] = 0
        row |= {"image": f"{n}.png", "mask": f"{n}_mask.png"}
        image.save(folder / row["image"])
        Image.fromarray(mask).save(folder / row["mask"])
    with (folder / "images.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return region


def main() -> None:
    """Prints a line per run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        for name, removed in (("everybody outlines both", False), ("data.annotated", True)):
            region = write(given.source, work / name, removed)
        told = ", ".join(f"{hospital}: [{of}]" for hospital, of in region.items())
        runs = {
            "everybody outlines both": (work / "everybody outlines both", ()),
            "data.annotated": (work / "data.annotated", (f"data.annotated={{{told}}}",)),
            "left as background": (work / "data.annotated", ()),
        }
        for name, (data, keys) in runs.items():
            config = described(
                [
                    *("experiment=retina_pfednet", "partition=auto", "algorithm=fedavg"),
                    *("~data.reader.regions", "+data.reader.regions={tumour: [1], head: [2]}"),
                    *(f"rounds={given.rounds}", f"evaluation.every={given.rounds}"),
                    *("data.patches_per_patient=32", "logger=none", "pictures.format=none"),
                    *("progress=false", "model.surface=false", f"seed={given.seed}"),
                    *(f"data.path={data}", f"data.root={work}", f"folder={work / 'runs' / name}"),
                    *keys,
                ]
            )
            clients = train(config)[0]["clients"]
            dice = {
                r: np.mean([clients[c][f"dice/{r}"] for c, of in region.items() if of == r])
                for r in REGIONS
            }
            lines.append(f"{name:24} " + ", ".join(f"{r} {v:.3f}" for r, v in dice.items()))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
