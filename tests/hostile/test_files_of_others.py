"""Files as others make them: read as other libraries read them, or refused by name.

`benchmarks/trust/files_of_others.py` prints the same rows as a table.
"""

from __future__ import annotations

import pytest

from tests.odd_files import CHECKS, verdicts_of
from tests.odd_mutations import KINDS, mutated
from tests.odd_sets import SETS
from tests.odd_volumes import VOLUMES
from tests.sweeps import sweep

MUTATIONS = 30  # of each kind; the script makes thousands
ROWS = {**VOLUMES, **SETS}
pytestmark = pytest.mark.filterwarnings("ignore")  # while files are made, not while they are read


def of(*kinds):
    return [name for name in ROWS if name.partition(":")[0] in kinds]


def check(name, folder):
    verdicts = verdicts_of(ROWS[name], folder)
    assert verdicts
    assert set(verdicts) <= set(CHECKS)
    wrong = [f"{k}: {v}" for k, v in verdicts.items() if v.startswith("WRONG")]
    assert not wrong, wrong
    refused = [v for v in verdicts.values() if v != "equal"]
    assert len(refused) <= 1
    assert all(v.startswith("refused: ") for v in refused)


@sweep("name", of("NIfTI", "NRRD", "MetaImage"))
def test_volumes(name, tmp_path):
    check(name, tmp_path)


@sweep("name", of("DICOM"))
def test_dicom(name, tmp_path):
    check(name, tmp_path)


@sweep("name", of("picture", "mask", "npz"))
def test_pictures(name, tmp_path):
    check(name, tmp_path)


@sweep("name", of("table"))
def test_tables(name, tmp_path):
    check(name, tmp_path)


@sweep("name", of("name"))
def test_names(name, tmp_path):
    check(name, tmp_path)


@sweep("name", of("list", "LUNA16"))
def test_lists(name, tmp_path):
    check(name, tmp_path)


@pytest.mark.parametrize("name", of("account"))
def test_accounts(name, tmp_path):
    check(name, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_odd_headers_and_cells(kind, tmp_path):
    wrong = []
    for number in range(MUTATIONS):
        place = tmp_path / str(number)
        place.mkdir()
        what, fault = mutated(number, place, only=kind)
        wrong += [f"{what}: {fault}"] * bool(fault)
    assert not wrong, wrong


def test_every_row_is_in_a_test():
    kinds = ("NIfTI", "NRRD", "MetaImage", "DICOM", "picture", "mask", "npz", "table", "name")
    assert of(*kinds, "list", "LUNA16", "account") == [*ROWS]
    assert len(ROWS) > 300
