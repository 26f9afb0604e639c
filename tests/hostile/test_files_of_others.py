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

MUTATIONS = 40  # of each kind; the script makes thousands
pytestmark = pytest.mark.filterwarnings("ignore")  # what medfed reads may warn of nothing, though


@sweep("name", [*VOLUMES, *SETS])
def test_files_of_others_are_read_right_or_refused_by_name(name, tmp_path):
    verdicts = verdicts_of({**VOLUMES, **SETS}[name], tmp_path)
    assert verdicts
    assert set(verdicts) <= set(CHECKS)
    assert not [f"{k}: {v}" for k, v in verdicts.items() if v.startswith("WRONG")]
    refused = [v for v in verdicts.values() if v != "equal"]
    assert len(refused) <= 1
    assert all(v.startswith("refused: ") for v in refused)


@pytest.mark.parametrize("kind", KINDS)
def test_odd_headers_and_cells_are_read_right_or_refused_by_name(kind, tmp_path):
    wrong = []
    for number in range(MUTATIONS):
        place = tmp_path / str(number)
        place.mkdir()
        what, fault = mutated(number, place, only=kind)
        wrong += [f"{what}: {fault}"] * bool(fault)
    assert not wrong


def test_rows_cover_what_hospitals_have():
    kinds = {name.partition(":")[0] for name in (*VOLUMES, *SETS)}
    assert kinds >= {"NIfTI", "NRRD", "MetaImage", "DICOM", "picture", "table", "name", "list"}
    assert len({*VOLUMES, *SETS}) >= 60
