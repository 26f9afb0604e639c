import json

import nibabel as nib
import numpy as np
import pytest

from medfed.common.seeding import numpy_rng
from medfed.datamodules.generated.brats import BratsCohort, MriHospital, make_head
from medfed.datamodules.partitions.by_centre import ByCentre
from medfed.datamodules.readers.datalist import MSDReader
from medfed.datamodules.segmentation import SegmentationDataModule
from medfed.datamodules.splits import split_patients
from medfed.standalone.errors import ConfigError, DataError
from medfed.standalone.files import sha256
from tests.sweeps import sweep

from .conftest import COHORT


def hashes(folder):
    return {str(p.relative_to(folder)): sha256(p) for p in folder.rglob("*") if p.is_file()}


def test_layout_is_that_of_msd(cohort):
    index = json.loads((cohort / "dataset.json").read_text())
    assert index["modality"] == {"0": "FLAIR", "1": "T1w", "2": "T1gd", "3": "T2w"}
    assert len(index["training"]) == 6
    image = nib.load(cohort / index["training"][0]["image"])
    label = nib.load(cohort / index["training"][0]["label"])
    assert image.shape == (40, 40, 8, 4)
    assert label.shape == (40, 40, 8)
    assert np.allclose(image.affine, label.affine)
    assert nib.aff2axcodes(image.affine) == ("L", "A", "S")  # not RAS, as in real files


def test_written_then_read_label_maps_are_equal(cohort):
    reader = MSDReader(cohort, regions=("whole", "core", "enhancing"))
    hospitals = {h.name: h for h in MriHospital.draw(COHORT.hospitals, COHORT.seed)}
    for patient in reader.patients():
        rng = numpy_rng(COHORT.seed, "brats", patient.id)
        truth = make_head(rng, COHORT.shape, hospitals[patient.centre]).label
        read = reader.read(patient)["label"].numpy()
        assert np.array_equal(read[0], np.isin(truth, (1, 2, 3)))
        assert np.array_equal(read[1], np.isin(truth, (2, 3)))
        assert np.array_equal(read[2], truth == 3)


def test_every_patient_has_a_tumour_and_a_stripped_skull(cohort):
    reader = MSDReader(cohort, regions=("whole",))
    for patient in reader.patients():
        sample = reader.read(patient)
        brain = (sample["image"] != 0).any(dim=0)
        assert 0.2 < brain.float().mean() < 0.6
        tumour = sample["label"][0].bool()
        assert 0 < tumour.sum() < 0.6 * brain.sum()
        assert not (tumour & ~brain).any()


def test_same_seed_same_bytes_other_seed_other_bytes(tmp_path):
    small = {"hospitals": 1, "patients": 1, "shape": (16, 16, 8)}
    first, new = BratsCohort(**small, seed=3).ensure(tmp_path / "a")
    again, _ = BratsCohort(**small, seed=3).ensure(tmp_path / "b")
    other, _ = BratsCohort(**small, seed=4).ensure(tmp_path / "a")
    assert new
    assert hashes(first) == hashes(again)
    assert first.name == again.name != other.name
    assert hashes(first)["imagesTr/BRATS_001.nii.gz"] != hashes(other)["imagesTr/BRATS_001.nii.gz"]


def test_a_cohort_keeps_its_name_where_nothing_that_came_later_is_set():
    assert BratsCohort().name == "brats_6e43cec7f5"  # as before there was an outline
    assert BratsCohort(outline=1, strength=[0.6, 1.0], sample=0).name == BratsCohort().name
    changed = [
        *({"outline": 0.0}, {"strength": (1.0, 1.0)}, {"blur": (0.1, 0.2)}),
        *({"sample": 1}, {"test_patients": 2}),
    ]
    assert len({BratsCohort(**own).name for own in ({}, *changed)}) == 6


def test_without_habits_all_hospitals_outline_alike(tmp_path):
    """The heads are the same, and only the outline of their oedema differs."""
    small = {"hospitals": 2, "patients": 1, "shape": (32, 32, 8), "seed": 3}

    def read(part, **own):
        folder = BratsCohort(**small, **own).ensure(tmp_path)[0] / part
        return [np.asarray(nib.load(p).dataobj) for p in sorted(folder.iterdir())]

    usual, alike, wide = (read("labelsTr", outline=o) for o in (1.0, 0.0, 2.0))
    for a, b, c in zip(usual, alike, wide, strict=True):
        assert np.array_equal(a > 1, b > 1)  # the core is where it is
        sizes = [int((x == 1).sum()) for x in (b, a, c)]
        assert sizes in (sorted(sizes), sorted(sizes, reverse=True))
        assert sizes[0] != sizes[2]
    assert all(map(np.array_equal, read("imagesTr"), read("imagesTr", outline=0.0)))
    blurred, sharp = (read("imagesTr", blur=(width, width)) for width in (2.0, 0.1))
    assert all(a.std() < b.std() for a, b in zip(blurred, sharp, strict=True))


def test_another_sample_is_of_the_same_hospitals(tmp_path):
    small = {"hospitals": 2, "patients": 1, "shape": (16, 16, 8)}
    first, second = (BratsCohort(**small, sample=n) for n in (0, 1))
    kind, seed = MriHospital, first.seed
    assert first.owners(kind, seed) == second.owners(kind, seed)
    one, other = (hashes(c.ensure(tmp_path)[0]) for c in (first, second))
    assert all(one[f] != other[f] for f in one if f.endswith(".gz"))


def test_test_patients_are_beside_those_that_are_trained_on(tmp_path):
    made = BratsCohort(hospitals=2, patients=5, shape=(16, 16, 8), test_patients=10)
    data = SegmentationDataModule(ByCentre(), reader=MSDReader, generated=made, val_fraction=0.2)
    ids = [str(n) for n in range(made.each)]
    parts = split_patients(ids, data.val_fraction, data.test_fraction, seed=0)
    assert [len(parts[s]) for s in ("train", "val", "test")] == [4, 1, 10]
    assert len(made.owners(MriHospital, made.seed)) == 30
    path = {"path": str(tmp_path), "test_fraction": 0.4}
    real = SegmentationDataModule(ByCentre(), reader=MSDReader, generated=made, **path)
    assert (real.val_fraction, real.test_fraction) == (0.2, 0.4)  # real data have no such patients


@sweep(
    ("own", "message"),
    [
        ({"outline": -1}, r"data\.generated\.outline must not be negative"),
        ({"blur": [0.9, 0.1]}, r"data\.generated\.blur=\[0\.9, 0\.1\] must be two positive"),
        ({"strength": [1.0]}, r"data\.generated\.strength=\[1\.0\] must be two"),
        ({"test_patients": -1}, r"data\.generated\.test_patients must not be negative"),
    ],
)
def test_impossible_parameters_are_refused(own, message):
    with pytest.raises(ConfigError, match=message):
        BratsCohort(**own)


def test_generated_once_and_nothing_half_written(tmp_path, monkeypatch):
    spec = BratsCohort(hospitals=1, patients=1, shape=(16, 16, 8))

    def full(self, folder):
        (folder / "imagesTr").mkdir()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(BratsCohort, "write", full)
        with pytest.raises(DataError, match="No space left"):
            spec.ensure(tmp_path)
    assert list((tmp_path / "generated").iterdir()) == []
    assert [new for _, new in (spec.ensure(tmp_path), spec.ensure(tmp_path))] == [True, False]


def test_a_root_that_is_a_file_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"set data\.root"):
        BratsCohort().ensure(tmp_path / "file")


def test_impossible_sizes_are_refused():
    with pytest.raises(ConfigError, match="at least 1 hospital"):
        BratsCohort(shape=(4, 80, 20))


def test_hospitals_differ_in_every_trait():
    hospitals = MriHospital.draw(5, seed=0)
    for trait, (low, high) in MriHospital.traits().items():
        values = sorted(getattr(h, trait) for h in hospitals)
        assert values == pytest.approx(np.linspace(low, high, 5))
