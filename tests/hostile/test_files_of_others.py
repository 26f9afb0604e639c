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
assert len(ROWS) > 300
pytestmark = pytest.mark.filterwarnings("ignore")  # while files are made, not while they are read


@sweep("name", ROWS)
def test_what_others_read_is_read(name, tmp_path):
    verdicts = verdicts_of(ROWS[name], tmp_path)
    assert verdicts
    assert set(verdicts) <= set(CHECKS)
    wrong = [f"{k}: {v}" for k, v in verdicts.items() if v.startswith("WRONG")]
    assert not wrong, wrong
    refused = [v for v in verdicts.values() if v != "equal"]
    assert len(refused) <= 1
    assert all(v.startswith("refused: ") for v in refused)


@pytest.mark.parametrize("kind", KINDS)
def test_odd_headers_and_cells(kind, tmp_path):
    wrong = []
    for number in range(MUTATIONS):
        place = tmp_path / str(number)
        place.mkdir()
        what, fault = mutated(number, place, only=kind)
        wrong += [f"{what}: {fault}"] * bool(fault)
    assert not wrong, wrong
