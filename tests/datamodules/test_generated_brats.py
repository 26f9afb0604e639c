import json

import nibabel as nib
import numpy as np
import pytest

from medfed.common.errors import ConfigError, DataError
from medfed.common.files import sha256
from medfed.common.seeding import numpy_rng
from medfed.datamodules.generated.brats import BratsCohort
from medfed.datamodules.generated.head import make_head
from medfed.datamodules.generated.hospitals import MriHospital
from medfed.datamodules.readers.msd import MSDReader

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
