"""Centres cut into several clients: everybody once, nobody elsewhere, evenly, by the seed."""

import pytest

from medfed.datamodules.partitions.by_centre import CentreSplit
from medfed.datamodules.readers.base import Patient
from medfed.standalone.errors import ConfigError
from tests.sweeps import sweep

PATIENTS = [Patient(f"{c}{n}", centre=c) for c, count in (("x", 7), ("y", 4)) for n in range(count)]


@sweep("seed", range(5))
def test_every_patient_stays_in_the_centre_and_has_one_client(seed):
    found = CentreSplit({"x": 3}).assign(PATIENTS, seed)
    assert list(found) == ["x_0", "x_1", "x_2", "y"]
    assert sorted(i for ids in found.values() for i in ids) == sorted(p.id for p in PATIENTS)
    assert all(i[0] == name[0] for name, ids in found.items() for i in ids)
    assert sorted(len(ids) for name, ids in found.items() if name[0] == "x") == [2, 2, 3]
    assert found == CentreSplit({"x": 3, "y": 1}).assign(PATIENTS[::-1], seed)
    assert any(found != CentreSplit({"x": 3}).assign(PATIENTS, s) for s in range(5))


@sweep(
    ("parts", "message"),
    [
        (0, r"partition\.parts=0 must be"),
        ({"x": 0}, r"must be a number of at least 1, or one per centre"),
        ({"z": 2}, r"partition\.parts names z, which is no centre.*the centres are x, y"),
        (5, r"y has 4 patients, too few for 5"),
    ],
)
def test_bad_parts_are_one_sentence(parts, message):
    with pytest.raises(ConfigError, match=message):
        CentreSplit(parts).assign(PATIENTS, seed=0)
