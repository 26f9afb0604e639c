import pickle
from pathlib import Path

import numpy as np
import pytest
import SimpleITK as sitk

from medfed.standalone.ct import Candidates, PatchSpec, extract, locate, to_unit
from medfed.standalone.errors import ConfigError, DataError
from medfed.standalone.volumes import read_geometry
from tests.sweeps import sweep

from .luna_files import FLIPS, by_hand, image_of, noise, stored

SPECS = {
    "2-D": PatchSpec((12, 10)),
    "2-D, odd": PatchSpec((7, 9)),
    "2.5-D": PatchSpec((12, 10), slices=3),
    "3-D": PatchSpec((12, 10, 6)),
    "2-D at 1 mm": PatchSpec((12, 10), slices=3, spacing=1.1),
    "3-D at 1 mm": PatchSpec((12, 10, 9), spacing=1.1),
}
# Inside, at borders and in corners; with fractions, so that rounding matters.
PLACES = np.array([(18, 20, 7), (17.4, 19.6, 6.7), (0, 0, 0), (35, 39, 13), (1.3, 38.7, 0.2)])


def candidates(image, places=PLACES):
    world = [image.TransformContinuousIndexToPhysicalPoint(p) for p in np.asarray(places).tolist()]
    n = len(world)
    return Candidates(np.array(world), np.zeros(n, dtype=np.int64), np.arange(1, n + 1), "c.csv")


def save(path, image, **options):
    sitk.WriteImage(image, str(path), **options)
    return path


def read_bytes(action):
    """Bytes that this process asks the system for during an action."""

    def count():
        return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])

    before = count()
    action()
    return count() - before


@sweep("name", ["2-D", "2-D, odd", "2.5-D", "3-D"])
def test_a_patch_equals_the_slices_cut_by_hand_with_simpleitk(tmp_path, name):
    spec, image = SPECS[name], image_of(noise())
    points = candidates(image)
    patches = extract(save(tmp_path / "1.2.3.mhd", image), points, spec)
    assert patches.shape == (len(PLACES), *spec.shape)
    assert patches.dtype == np.int16
    h, w, d = (*spec.size, spec.slices)[:3]
    for patch, point in zip(patches, points.world, strict=True):
        cut = np.clip(by_hand(image, point.tolist(), (w, h, d), spec.pad_hu), *spec.window)
        if len(spec.size) == 3:
            cut = cut.transpose(1, 2, 0)[None]  # (z, y, x) to (C, h, w, d)
        assert np.array_equal(patch, cut)


@pytest.mark.parametrize("name", ["2-D at 1 mm", "3-D at 1 mm"])
def test_resampled_patches_equal_a_resampling_of_the_whole_scan(tmp_path, name):
    spec, image = SPECS[name], image_of(noise())
    points = candidates(image)
    patches = extract(save(tmp_path / "1.2.3.mhd", image), points, spec)
    whole = sitk.ConstantPad(image, [20] * 3, [20] * 3, -1000)
    whole = sitk.Clamp(whole, sitk.sitkFloat64, -1000, 400)
    h, w, d = (*spec.size, spec.slices)[:3]
    step = (1.1, 1.1, 1.1 if len(spec.size) == 3 else image.GetSpacing()[2])
    for patch, point in zip(patches, points.world, strict=True):
        voxel = image.TransformPhysicalPointToIndex(point.tolist())
        centre = image.TransformIndexToPhysicalPoint(voxel)
        grid = sitk.Image([w, h, d], sitk.sitkInt16)
        grid.SetSpacing(step)
        grid.SetOrigin([c - n // 2 * s for c, n, s in zip(centre, (w, h, d), step, strict=True)])
        cut = sitk.Resample(whole, grid, sitk.Transform(), sitk.sitkLinear, -1000)
        cut = sitk.GetArrayFromImage(cut)
        cut = cut.transpose(1, 2, 0)[None] if len(spec.size) == 3 else cut
        assert np.abs(patch - cut).max() < 0.501  # half a HU, as rounded


@sweep("name", list(SPECS))
def test_a_scan_gives_the_same_patches_however_it_is_stored(tmp_path, name):
    image = image_of(noise())
    points = candidates(image)
    expected = extract(save(tmp_path / "plain.mhd", image), points, SPECS[name])
    assert len(np.unique(expected)) > 50
    orders = [((0, 1, 2), signs) for signs in FLIPS[1:]]
    orders += [((2, 0, 1), (1, -1, 1)), ((1, 0, 2), (-1, 1, 1)), ((1, 2, 0), (1, 1, -1))]
    for n, (order, signs) in enumerate(orders):
        path = save(tmp_path / f"{n}.1.2.mhd", stored(image, signs, order))
        assert np.array_equal(extract(path, points, SPECS[name]), expected), (order, signs)


def test_planted_voxels_are_found_to_half_a_voxel_under_flips_and_anisotropy(tmp_path):
    """The places come from the header's numbers and NumPy alone."""
    rng = np.random.default_rng(3)
    for n, signs in enumerate(FLIPS):
        spacing, origin = rng.uniform(0.5, 2.5, 3), rng.uniform(-300, 300, 3)
        planted = rng.integers(0, [36, 40, 14], (5, 3))  # x, y, z in the order of the file
        voxels = np.full((14, 40, 36), -900, dtype=np.int16)
        voxels[tuple(planted.T[::-1])] = 300
        image = sitk.GetImageFromArray(voxels)
        image.SetSpacing(spacing.tolist())
        image.SetOrigin(origin.tolist())
        image.SetDirection(np.diag(signs).astype(float).ravel().tolist())
        header = save(tmp_path / f"1.{n}.mhd", image)
        off = rng.uniform(-0.45, 0.45, (5, 3))
        world = origin + (planted + off) * spacing * signs
        points = Candidates(world, np.ones(5, dtype=np.int64), np.arange(5))
        located = locate(read_geometry(header, "LPS"), world)
        mirrored = np.where(np.array(signs) < 0, [35, 39, 13] - planted - off, planted + off)
        assert np.abs(located - mirrored).max() < 1e-6
        assert (extract(header, points, PatchSpec((3, 3)))[:, 0, 1, 1] == 300).all()


def test_axes_of_a_patch_are_the_patients(tmp_path):
    z, y, x = np.ogrid[:14, :40, :36]
    image = stored(image_of((10 * x + y - 20 * z).astype(np.int16)), (-1, 1, -1), (2, 0, 1))
    plain = image_of(noise())
    (patch,) = extract(save(tmp_path / "a.mhd", image), candidates(plain, PLACES[:1]),
                       PatchSpec((4, 6, 3)))  # fmt: skip
    assert (np.diff(patch, axis=1) == 1).all()  # h: front to back
    assert (np.diff(patch, axis=2) == 10).all()  # w: right to left
    assert (np.diff(patch, axis=3) == -20).all()  # d: foot to head


def test_borders_are_padded_with_air_and_never_shifted(tmp_path):
    voxels = np.full((14, 40, 36), 100, dtype=np.int16)
    voxels[0, 39, 35] = 99  # a scan of one value would be refused
    image = image_of(voxels)
    corner = candidates(image, [(0, 39, 0)])
    patch = extract(save(tmp_path / "a.mhd", image), corner, PatchSpec((8, 8), slices=3))[0]
    assert (patch[0] == -1000).all()  # the slice below the first
    assert (patch[1, :5, 4:] == 100).all()
    assert (patch[1, 5:] == -1000).all()
    assert (patch[1, :, :4] == -1000).all()
    bright = PatchSpec((8, 8), pad_hu=-3000, window=(-600, 400))
    assert extract(tmp_path / "a.mhd", corner, bright).min() == -600


def test_a_packed_scan_gives_the_patches_of_a_plain_one(tmp_path):
    image = image_of(noise())
    rng = np.random.default_rng(1)
    points = candidates(image, rng.integers(0, [36, 40, 14], (60, 3)))
    header = save(tmp_path / "1.mhd", image)
    whole = save(tmp_path / "2.mhd", image, useCompression=True)
    for spec in SPECS.values():
        assert np.array_equal(extract(header, points, spec), extract(whole, points, spec))


def test_a_plain_scan_is_never_read_whole(tmp_path):
    image = image_of(noise((80, 128, 128)))  # 2.6 MB
    header = save(tmp_path / "1.mhd", image)
    points = candidates(image, [(20, 20, 5), (60, 60, 40), (61, 58, 40), (100, 100, 70)])
    assert read_bytes(lambda: extract(header, points, PatchSpec())) < 20_000


@sweep("stem", ["mha", "zraw", "float", "uint8", "msb"])
def test_unusual_storage_gives_the_same_patches(tmp_path, stem):
    image = image_of(noise().clip(0, 250))
    points = candidates(image)
    expected = extract(save(tmp_path / "1.mhd", image), points, SPECS["3-D"])
    path = tmp_path / ("2.2.mha" if stem == "mha" else "2.2.mhd")
    kinds = {"float": sitk.sitkFloat32, "uint8": sitk.sitkUInt8}
    save(path, sitk.Cast(image, kinds.get(stem, sitk.sitkInt16)), useCompression=stem == "zraw")
    if stem == "msb":
        raw = path.with_suffix(".raw")
        raw.write_bytes(np.frombuffer(raw.read_bytes(), dtype="<i2").astype(">i2").tobytes())
        path.write_text(path.read_text().replace("OrderMSB = False", "OrderMSB = True"))
    assert np.array_equal(extract(path, points, SPECS["3-D"]), expected)


def test_a_header_as_luna16_writes_it(tmp_path):
    voxels = noise((5, 12, 12))
    (tmp_path / "1.3.6.1.4.1.raw").write_bytes(voxels.tobytes())
    (tmp_path / "1.3.6.1.4.1.mhd").write_text(
        "ObjectType = Image\nNDims = 3\nBinaryData = True\nBinaryDataByteOrderMSB = False\n"
        "CompressedData = False\nTransformMatrix = 1 0 0 0 1 0 0 0 1\nOffset = -195 -195 -378\n"
        "CenterOfRotation = 0 0 0\nAnatomicalOrientation = RAI\nElementSpacing = 0.76 0.76 2.5\n"
        "DimSize = 12 12 5\nElementType = MET_SHORT\nElementDataFile = 1.3.6.1.4.1.raw\n"
    )
    world = np.array([[-195 + 0.76 * 4, -195 + 0.76 * 7, -378 + 2.5 * 3]])
    point = Candidates(world, np.array([1]), np.array([1]))
    patch = extract(tmp_path / "1.3.6.1.4.1.mhd", point, PatchSpec((2, 2), window=(-1200, 700)))
    assert np.array_equal(patch[0, 0], voxels[3, 6:8, 3:5])


@sweep("place", [(-0.6, 5, 5), (36, 5, 5), (5, 39.6, 5), (5, 5, -30)])
def test_coordinates_outside_the_scan_name_the_row(tmp_path, place):
    image = image_of(noise())
    header = save(tmp_path / "1.2.mhd", image)
    points = candidates(image, [(5, 5, 5), place])
    with pytest.raises(
        DataError, match=r"c\.csv, data row 2: \(.*mm lies outside scan .*1\.2\.mhd"
    ):
        extract(header, points, PatchSpec())


def test_to_unit_is_the_line_through_the_window():
    hu = np.arange(-1000, 401, dtype=np.int16)
    unit = to_unit(hu, (-1000, 400))
    assert unit.dtype == np.float32
    assert np.allclose(unit, np.interp(hu, [-1000, 400], [-1, 1]), atol=1e-6)
    assert (unit[0], unit[-1]) == (-1, 1)


@sweep(
    ("settings", "message"),
    [
        ({"size": (32,)}, "must be 2 or 3 positive numbers"),
        ({"size": (32, 0)}, "must be 2 or 3 positive numbers"),
        ({"slices": 2}, "slices=2 must be an odd number"),
        ({"size": (8, 8, 8), "slices": 3}, "and 1 for 3-D patches"),
        ({"spacing": 0.0}, "spacing must be positive, not 0.0"),
        ({"spacing": float("nan")}, "spacing must be positive, not nan"),
        ({"window": (400, -1000)}, "the lower HU first"),
        ({"window": (-1000.5, 400)}, "two HU"),
        ({"window": (-1000, 40000)}, "two HU"),
        ({"pad_hu": -40000}, "pad_hu"),
    ],
)
def test_impossible_patches_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        PatchSpec(**settings)


def test_a_patch_spec_from_configuration_is_pickled_and_equal():
    spec = PatchSpec([16, 16], window=[-1000, 400])
    assert spec == pickle.loads(pickle.dumps(spec)) == PatchSpec((16, 16))


def test_scans_without_candidates_give_no_patches(tmp_path):
    header = save(tmp_path / "1.mhd", image_of(noise()))
    none = Candidates(np.empty((0, 3)), np.empty(0, np.int64), np.empty(0, np.int64))
    assert extract(header, none, PatchSpec()).shape == (0, 1, 32, 32)
