"""Small generated photographs with vessels, as a hospital might have them."""

import csv

import numpy as np
from PIL import Image

from medfed.common.seeding import numpy_rng


def vessels(rng, width, height):
    """(height, width) bool: a few dark lines, two pixels thick."""
    mask = np.zeros((height, width), bool)
    for _ in range(4):
        x = np.arange(width)
        y = (height * rng.random() + rng.normal() * x / 4).astype(int)
        for thick in (0, 1):
            inside = (y + thick >= 0) & (y + thick < height)
            mask[(y + thick)[inside], x[inside]] = True
    return mask


def picture(rng, width=40, height=32):
    """A colour photograph (height, width, 3) uint8, and its mask."""
    mask = vessels(rng, width, height)
    base = rng.integers(140, 200, 3) + rng.normal(0, 6, (height, width, 3))
    return np.clip(base - 70 * mask[..., None], 0, 255).astype(np.uint8), mask


def cohort(folder, centres=2, patients=3, eyes=2, seed=0):
    """Writes images.csv with pictures and masks; returns its rows."""
    rows = []
    for c in range(centres):
        (folder / f"centre_{c}").mkdir(parents=True, exist_ok=True)
        for p in range(patients):
            for e in range(eyes):
                rng = numpy_rng(seed, "eye", c, p, e)
                image, mask = picture(rng, 40 + 8 * c)
                name = f"centre_{c}/{p}{'LR'[e]}"
                Image.fromarray(image).save(folder / f"{name}.png")
                Image.fromarray(mask).save(folder / f"{name}_mask.png")
                rows.append(
                    {
                        "image": f"{name}.png",
                        "mask": f"{name}_mask.png",
                        "patient": f"c{c}p{p}",
                        "centre": f"centre_{c}",
                    }
                )
    write_index(folder, rows)
    return rows


def write_index(folder, rows, name="images.csv"):
    with (folder / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
