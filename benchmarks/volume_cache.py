"""What the cache of volumes gains over MONAI's ``PersistentDataset``, which keeps tensors as files.

Generated heads (four contrasts) and abdomens (CT), prepared alike: read, normalised,
regions made. Both keep the result on disk; the page cache is warm. Measured are

1. bytes on disk per case,
2. the time to read a case whole, as evaluation does,
3. the time to cut 16 patches of 64 x 64 out of as many cases, as a training batch does: of MONAI's,
   each case is loaded and cropped; ours are mapped, and the patches alone are read.

What is read is compared bit by bit. Run with ``python benchmarks/volume_cache.py``.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data import PersistentDataset
from monai.transforms import Compose, Transform

from medfed.datamodules.cache.store import Item, Recipe, build
from medfed.datamodules.cache.volumes import cached_volume, read_volume
from medfed.datamodules.generated.brats import BratsCohort
from medfed.datamodules.generated.organs import OrgansCohort
from medfed.datamodules.patches import PatchRows, volume_of_cache
from medfed.datamodules.readers.datalist import DatalistReader
from medfed.standalone.preparation import Preparation, rules_of

SIZE = 64


def median_ms(run: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def compare(path: Path, folder: Path, repeats: int) -> dict[str, tuple[float, float]]:
    """MONAI's number and ours, by what is measured."""
    reader = DatalistReader(path)
    preparation = Preparation(rules_of(None, reader.channels))
    cases = reader.patients()

    class Prepare(Transform):  # of a plain function, MONAI would keep nothing
        def __call__(self, number: int) -> dict[str, torch.Tensor]:
            return reader.prepared(cases[number], preparation)

    theirs = PersistentDataset(list(range(len(cases))), Compose([Prepare()]), folder / "monai")
    items = tuple(Item(c.id, tuple(c.files.values()), args=(reader, c, preparation)) for c in cases)
    recipe = Recipe("benchmark", {}, items, read_volume, joined=False)
    ours = build(recipe, folder, workers=1, quiet=True)
    for number, case in enumerate(cases):  # also fills theirs
        one, two = theirs[number], cached_volume(ours, case.id)
        assert all(one[key].equal(two[key]) for key in ("image", "label"))
    rng = np.random.default_rng(0)
    volumes = []
    for case in cases:
        label = cached_volume(ours, case.id)["label"]
        inside = label.any(dim=0)
        has = torch.ones(len(reader.channels), dtype=torch.bool)
        volumes.append(volume_of_cache(ours.arrays(case.id), label, inside, has, rng))
    room = [np.maximum(np.array(v.shape) - (SIZE, SIZE, 1), 0) for v in volumes]
    at = [[n % len(cases), *rng.integers(0, room[n % len(cases)] + 1)] for n in range(16)]
    rows = PatchRows(volumes, np.array(at), (SIZE, SIZE, 1), slices=1)

    def their_patches() -> torch.Tensor:
        return torch.stack(
            [theirs[n]["image"][:, x : x + SIZE, y : y + SIZE, z] for n, x, y, z in at]
        )

    def our_patches() -> torch.Tensor:
        return rows.take(torch.arange(16))

    assert their_patches().equal(our_patches())
    size = sum(f.stat().st_size for f in (folder / "monai").iterdir())
    return {
        "MB per case": (size / 1e6 / len(cases), ours.num_bytes / 1e6 / len(cases)),
        "ms, a case": (
            median_ms(lambda: theirs[0], repeats),
            median_ms(lambda: cached_volume(ours, cases[0].id), repeats),
        ),
        "ms, 16 patches": (median_ms(their_patches, repeats), median_ms(our_patches, repeats)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cohorts = {
        "heads, 4 x 128 x 128 x 64": BratsCohort(1, args.cases, (128, 128, 64)),
        "CT, 160 x 128 x 48": OrgansCohort(1, args.cases, (160, 128, 48)),
    }
    print(f"{args.cases} cases, one thread, page cache warm; medians of {args.repeats}")
    print(f"{'':28}{'':16}{'MONAI':>9}{'ours':>9}{'ratio':>8}")
    for name, cohort in cohorts.items():
        with tempfile.TemporaryDirectory() as folder:
            path, _ = cohort.ensure(Path(folder))
            for what, (one, two) in compare(path, Path(folder), args.repeats).items():
                print(f"{name:28}{what:16}{one:9.1f}{two:9.1f}{one / two:8.1f}", flush=True)


if __name__ == "__main__":
    main()
