"""One tiny generated cohort for all tests of the data layer."""

from functools import partial

import pytest

from medfed.datamodules.generated.brats import BratsCohort
from medfed.datamodules.partitions.by_centre import ByCentre
from medfed.datamodules.readers.datalist import MSDReader
from medfed.datamodules.segmentation import SegmentationDataModule

COHORT = BratsCohort(hospitals=2, patients=3, shape=(40, 40, 8), seed=1)


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def cohort(root):
    return COHORT.ensure(root)[0]


@pytest.fixture
def make_brats(root):
    """A data module on the tiny cohort; keyword arguments override."""

    def make(reader=None, **settings):
        defaults = {
            "partition": ByCentre(),
            "root": str(root),
            "generated": COHORT,
            "patch_size": (16, 16),
            "patches_per_patient": 8,
            "batch_size": 3,
            "seed": 5,
        }
        reader = reader or partial(MSDReader, regions=("whole", "core", "enhancing"))
        return SegmentationDataModule(reader=reader, **{**defaults, **settings})

    return make
