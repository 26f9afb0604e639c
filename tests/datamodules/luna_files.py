"""Small scans in the layout of LUNA16, and the same voxels by independent means."""

import itertools

import numpy as np
import SimpleITK as sitk

HEADER = "seriesuid,coordX,coordY,coordZ,class"
SPACING, ORIGIN = (0.7, 0.9, 2.5), (-120.3, -80.1, -310.7)
FLIPS = list(itertools.product([1, -1], repeat=3))
OUTSIDE = -5000  # no HU of any test


def noise(shape=(14, 40, 36), seed=0):
    """(z, y, x) int16 HU, from below the window to above it."""
    return np.random.default_rng(seed).integers(-1200, 700, shape).astype(np.int16)


def image_of(voxels, spacing=SPACING, origin=ORIGIN):
    """The anatomy, stored along the patient's axes."""
    image = sitk.GetImageFromArray(voxels)
    image.SetSpacing(spacing)
    image.SetOrigin(origin)
    return image


def stored(image, signs, order=(0, 1, 2)):
    """The same anatomy at the same places, stored in another order of the voxels."""
    return sitk.PermuteAxes(sitk.Flip(image, [s < 0 for s in signs], False), order)


def write_csv(path, rows, header=HEADER):
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")


def write_luna(folder, scans, rows):
    """Headers and voxels of {series: image} in subsets, and the candidates' CSV."""
    for n, (series, image) in enumerate(scans.items()):
        subset = folder / f"subset{n % 10}"
        subset.mkdir(exist_ok=True)
        sitk.WriteImage(image, str(subset / f"{series}.mhd"))
    write_csv(folder / "candidates.csv", rows)


def by_hand(image, point, size, fill):
    """SimpleITK's own nearest voxels on a grid (z, y, x) centred on the voxel of a point.

    The image is stored along the patient's axes. The filter is used instead of any slicing.
    """
    centre = image.TransformPhysicalPointToIndex(point)
    corner = [c - s // 2 for c, s in zip(centre, size, strict=True)]
    grid = sitk.Image(list(size), sitk.sitkInt16)
    grid.SetSpacing(image.GetSpacing())
    grid.SetOrigin(image.TransformContinuousIndexToPhysicalPoint([float(c) for c in corner]))
    cut = sitk.Resample(image, grid, sitk.Transform(), sitk.sitkNearestNeighbor, fill)
    return sitk.GetArrayFromImage(cut)
