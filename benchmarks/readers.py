"""How far two people agree who drew the same masks: what a model trained by one can reach.

Of every picture with a second mask beside its own (``01_vessels_second_reader.png`` beside
``01_vessels.png``) the Dice of the two, at the scales of `data.reader.scale`, and its mean, least
and greatest over the pictures of each hospital.

Run with ``python benchmarks/readers.py FOLDER``: the folder of ``images.csv``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from medfed.datamodules.readers.image_masks import list_pairs
from medfed.standalone.pictures import read_mask, shrink_mask

ROLES = ("image", "mask", "patient", "centre")


def dice(one: Path, other: Path, scale: float) -> float:
    """Dice of what is not 0 in two masks, made smaller by a scale."""
    a, b = (shrink_mask((read_mask(path) > 0).astype(np.int64), scale) for path in (one, other))
    return float(2 * (a & b).sum() / (a.sum() + b.sum()))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a line per hospital and scale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--suffix", default="_second_reader")
    parser.add_argument("--scales", type=float, nargs="+", default=[1.0, 0.5])
    options = parser.parse_args(arguments)
    masks: dict[str, list[tuple[Path, Path]]] = {}
    for pair in list_pairs(options.folder, dict(zip(ROLES, ROLES, strict=True)), None):
        second = pair.mask.with_stem(pair.mask.stem + options.suffix)
        if second.is_file():
            masks.setdefault(pair.centre or "all", []).append((pair.mask, second))
    for scale in options.scales:
        for centre, pairs in sorted(masks.items()):
            found = [dice(one, other, scale) for one, other in pairs]
            print(
                f"scale {scale:g}, {centre}: {len(found)} pictures read twice, Dice "
                f"{np.mean(found):.4f} ({min(found):.4f} to {max(found):.4f})"
            )


if __name__ == "__main__":
    main()
