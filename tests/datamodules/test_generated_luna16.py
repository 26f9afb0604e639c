import json

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk
from scipy.ndimage import center_of_mass, label

from medfed.common.seeding import numpy_rng
from medfed.datamodules.generated.luna16 import (
    FLIPPED,
    Canvas,
    CtHospital,
    LunaCohort,
    add_lookalikes,
    add_nodules,
    make_chest,
    write_scan,
)
from medfed.datamodules.readers.luna16 import Luna16Reader
from medfed.standalone.ct import hounsfield, locate, read_points
from medfed.standalone.errors import ConfigError, DataError
from medfed.standalone.files import sha256
from medfed.standalone.volumes import read_geometry

TINY = LunaCohort(hospitals=3, patients=4, shape=(48, 44, 24), lookalikes=10, seed=1)
BARE = {"hospitals": 1, "patients": 2, "shape": (24, 24, 16), "lookalikes": 4}


@pytest.fixture(scope="module")
def luna(tmp_path_factory):
    return TINY.ensure(tmp_path_factory.mktemp("luna"))[0]


def hashes(folder):
    return {str(p.relative_to(folder)): sha256(p) for p in folder.rglob("*") if p.is_file()}


def test_layout_is_that_of_luna16(luna):
    reader = Luna16Reader(luna, negatives_per_positive=None)
    patients = reader.patients()
    assert len(patients) == 12
    assert {p.files["raw"].parent.name for p in patients} == {f"subset{n}" for n in range(10)}
    assert len({p.centre for p in patients}) == 3
    assert set(json.loads((luna / "centres.json").read_text())) == {p.id for p in patients}
    assert all(p.id.startswith("2.25.") and len(p.id) <= 64 for p in patients)
    spacings, directions = [], []
    for patient in patients:
        image = sitk.ReadImage(str(patient.files["header"]))
        assert image.GetPixelID() == sitk.sitkInt16
        assert image.GetSize() == TINY.shape
        spacings.append(image.GetSpacing())
        directions.append(image.GetDirection())
        voxels = sitk.GetArrayViewFromImage(image)
        assert voxels.min() >= -1024
        assert (voxels < -700).mean() > 0.15  # lung
    assert directions.count(FLIPPED) == 3  # one in four
    slices = [z for _, _, z in spacings]
    assert 1 <= min(slices) < 1.5 < max(slices) <= 2.5
    assert len(set(spacings)) == 12


def test_candidates_are_the_annotated_nodules_and_others(luna):
    reader = Luna16Reader(luna, negatives_per_positive=None)
    nodules = read_points(luna / "annotations.csv", "diameter_mm")
    assert all(4 <= diameter <= 20 for of in nodules.values() for diameter in of.value)
    counts = np.sum([p.counts for p in reader.patients()], axis=0)
    assert counts[0] > counts[1] >= sum(map(len, nodules.values())) >= 12
    for series, mine in nodules.items():
        candidates = reader.candidates_of(series)
        gaps = candidates.world[:, None] - mine.world[None]
        inside = np.linalg.norm(gaps, axis=2) < mine.value / 2 + 2.6
        assert inside[candidates.label == 1].any(axis=1).all()
        assert inside[candidates.label == 1].any(axis=0).all()
        far = np.linalg.norm(gaps[candidates.label == 0], axis=2) - mine.value / 2
        assert (far > 2).all()


def test_annotated_nodules_are_found_to_half_a_voxel_in_the_files(tmp_path):
    """Balls painted without noise, written both ways round: their middles come from the voxels."""
    rng = np.random.default_rng(0)
    for n, flipped in enumerate((False, True)):
        spacing = (0.7, 0.7, 2.0)
        canvas = Canvas(np.full((30, 60, 60), -900, dtype=np.float32), spacing)
        truth = [np.array([-10.3, 9.1, -14.2]), np.array([7.7, -8.4, 15.9])]
        for place in truth:
            canvas.blob(place, 5.0, 50.0, stretch=(1.0, 1.1, 0.9))
        middle = rng.uniform(-100, 100, 3)
        origin = middle + canvas.half * ([1, 1, -1] if flipped else [-1, -1, -1])
        voxels = canvas.hu.astype(np.int16)
        voxels = voxels[:, ::-1, ::-1] if flipped else voxels
        direction = FLIPPED if flipped else np.eye(3).ravel()
        header = write_scan(tmp_path, f"1.{n}", voxels, spacing, origin, direction)
        scan = read_geometry(header, "LPS")
        read = hounsfield(header, scan)
        blobs, count = label(read > -500)
        assert count == 2
        found = np.array(center_of_mass(read + 900.0, blobs, [1, 2]))[:, ::-1]  # x, y, z
        located = locate(scan, np.array([place + middle for place in truth]))
        assert np.abs(found - located).max() < 0.5
        # The header's numbers, read by nibabel's algebra instead of SimpleITK's.
        image = sitk.ReadImage(str(header))
        affine = np.array(image.GetDirection()).reshape(3, 3) * image.GetSpacing()
        index = nib.affines.apply_affine(
            np.linalg.inv(nib.affines.from_matvec(affine, image.GetOrigin())), truth + middle
        )
        index = np.where([flipped, flipped, False], np.array([59, 59, 29]) - index, index)
        assert np.abs(index - located).max() < 1e-6


def test_nodules_stand_out_from_the_lung_where_the_annotations_say(luna):
    reader = Luna16Reader(luna)
    nodules = read_points(luna / "annotations.csv", "diameter_mm")
    contrast = []
    for series, mine in nodules.items():
        header = next(p.files["header"] for p in reader.patients() if p.id == series)
        scan = read_geometry(header, "LPS")
        read = hounsfield(header, scan)
        x, y, z = np.rint(locate(scan, mine.world)).astype(int).T
        contrast.extend((read[z, y, x] - np.median(read[read < -600])).tolist())
    assert np.median(contrast) > 400
    assert np.mean(np.array(contrast) > 100) > 0.9


def test_same_seed_same_bytes_other_seed_other_bytes(tmp_path):
    first, new = LunaCohort(**BARE, seed=3).ensure(tmp_path / "a")
    again, _ = LunaCohort(**BARE, seed=3).ensure(tmp_path / "b")
    other, _ = LunaCohort(**BARE, seed=4).ensure(tmp_path / "a")
    assert new
    assert hashes(first) == hashes(again)
    assert first.name == again.name != other.name
    assert not set(hashes(first).values()) & set(hashes(other).values()) - {
        sha256(first / "annotations.csv")
    }


def test_a_scan_does_not_depend_on_how_many_others_there_are(tmp_path):
    few, _ = LunaCohort(**BARE).ensure(tmp_path)
    more, _ = LunaCohort(**{**BARE, "patients": 3}).ensure(tmp_path)
    raw = {p.name: sha256(p) for p in few.rglob("*.raw")}
    assert raw.items() <= {p.name: sha256(p) for p in more.rglob("*.raw")}.items()


def test_generated_once_and_nothing_half_written(tmp_path, monkeypatch):
    spec = LunaCohort(**BARE)

    def full(self, folder):
        (folder / "subset0").mkdir()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(LunaCohort, "write", full)
        with pytest.raises(DataError, match="No space left"):
            spec.ensure(tmp_path)
    assert list((tmp_path / "generated").iterdir()) == []
    assert [new for _, new in (spec.ensure(tmp_path), spec.ensure(tmp_path))] == [True, False]


def test_a_scan_that_cannot_be_written_is_an_oserror(tmp_path):
    with pytest.raises(OSError, match="cannot be written"):
        write_scan(tmp_path / "nowhere", "1.2", np.zeros((2, 2, 2), dtype=np.int16))


def test_impossible_sizes_are_refused():
    with pytest.raises(ConfigError, match="at least 1 hospital"):
        LunaCohort(shape=(8, 80, 20))
    with pytest.raises(ConfigError, match="at least 1 hospital"):
        LunaCohort(patients=0)


def test_hospitals_differ_in_every_trait():
    hospitals = CtHospital.draw(5, seed=0)
    for trait, (low, high) in CtHospital.traits().items():
        values = sorted(getattr(h, trait) for h in hospitals)
        assert values == pytest.approx(np.linspace(low, high, 5))


def test_tubes_and_blobs_have_the_volume_of_their_shapes():
    spacing = (0.5, 0.5, 0.5)
    canvas = Canvas(np.zeros((60, 60, 60), dtype=np.float32), spacing)
    canvas.blob(np.array([1.0, -2.0, 0.5]), 6.0, 1.0)
    assert canvas.hu.sum() * 0.125 == pytest.approx(4 / 3 * np.pi * 6**3, rel=0.02)
    canvas.hu[:] = 0
    canvas.tube(np.array([-5.0, 0, 1]), np.array([4.0, 1, 0]), 2.0, 1.0)
    length = np.linalg.norm([9, 1, -1])
    assert canvas.hu.sum() * 0.125 == pytest.approx(
        np.pi * 4 * length + 4 / 3 * np.pi * 8, rel=0.03
    )
    canvas.tube(np.array([-5.0, 0, 1]), np.array([4.0, 1, 0]), 1.0, -3.0, dark=True)
    assert canvas.hu.min() == -3


def test_nodules_keep_apart_and_lookalikes_keep_away():
    (hospital,) = CtHospital.draw(1, seed=0)
    rng = numpy_rng(0, "test")
    chest = make_chest(rng, (64, 64, 32), (2.5, 2.5, 2.0), hospital)
    add_nodules(chest)
    nodules, places = chest.nodules, add_lookalikes(chest, 30)
    assert nodules
    assert len(places) > 10
    for n, one in enumerate(nodules):
        radius = one.diameter / 2
        assert (np.abs(one.centre) + radius <= chest.canvas.half).all()
        gaps = [np.linalg.norm(one.centre - o.centre) - o.diameter / 2 for o in nodules[:n]]
        gaps += [np.linalg.norm(one.centre - place) for place in places]
        assert min(gaps, default=99) > radius + 2
