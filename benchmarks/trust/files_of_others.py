"""What medfed reads in files as others make them, as a table: volumes, pictures, arrays, tables.

    python benchmarks/trust/files_of_others.py [-k WORDS] [--mutations 2000]

Each row makes files in some oddity and compares what medfed reads with what another library reads
in them: nibabel, SimpleITK, pydicom, Pillow, NumPy or Python's csv, or with what was written where
none of these reads it. Checked are, where a row has them:

- shape and spacing: the sizes of a volume to the right, to the front and to the head, and the mm
  between its voxels; the sizes of a picture; the rows and columns of a table;
- values and orientation: each voxel, by its place in mm; each pixel; each cell;
- count: channels, samples by class, cases, hospitals;
- patients: who they are, or how many;
- account: files, rows and cells that were taken or left out, and the line that says what was odd.

A cell is equal, WRONG, or the number of a sentence of refusal below the table. With `--mutations`
the numbers of headers (volumes, PNG, TIFF, arrays of npz) and the cells of tables and lists are
replaced by odd ones: each is read as another reader reads it, or refused in one sentence that names
the file. The exit status is 1 if
anything is wrong. The table takes some seconds on one core, 2,000 mutations half a minute.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.odd_files import CHECKS, verdicts_of  # noqa: E402
from tests.odd_mutations import KINDS, mutated  # noqa: E402
from tests.odd_sets import SETS, Set  # noqa: E402
from tests.odd_volumes import VOLUMES, Volume  # noqa: E402


def table(rows: Mapping[str, Mapping[str, str]]) -> str:
    """Returns the verdicts in Markdown, with the sentences of refusals below."""
    sentences = dict.fromkeys(v for row in rows.values() for v in row.values() if ": " in v)
    numbers = {sentence: str(number) for number, sentence in enumerate(sentences, 1)}
    lines = [f"| files | {' | '.join(CHECKS)} |", "|---" * (len(CHECKS) + 1) + "|"]
    for name, row in rows.items():
        cells = (row.get(check, "") for check in CHECKS)
        shown = (f"{v.partition(':')[0]} ({numbers[v]})" if v in numbers else v for v in cells)
        lines.append(f"| {name} | {' | '.join(shown)} |")
    notes = [f"{n}. {text.removeprefix('refused: ')}" for text, n in numbers.items()]
    return "\n".join([*lines, "", *notes])


def mutations(count: int, seed: int) -> dict[str, str]:
    """Returns what is wrong with each mutation that is not read right or refused."""
    wrong = {}
    for number in range(count):
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder, "set")
            place.mkdir()
            what, fault = mutated(number, place, seed)
        if fault:
            wrong[what] = fault
    return wrong


def main() -> int:
    """Prints the table; returns whether anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-k", default="", metavar="WORDS", help="the rows with these in their name")
    parser.add_argument("--mutations", type=int, default=0, metavar="N", help="as many besides")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations")
    asked = parser.parse_args()
    for library in ("nibabel.global", "pydicom"):
        logging.getLogger(library).setLevel(logging.CRITICAL + 1)
    every: dict[str, Volume | Set] = {**VOLUMES, **SETS}
    rows: dict[str, dict[str, str]] = {}
    for name, row in every.items():
        if asked.k.lower() in name.lower():
            with tempfile.TemporaryDirectory() as folder:
                rows[name] = verdicts_of(row, Path(folder))
    print(table(rows))
    bad = sum(v.startswith("WRONG") for row in rows.values() for v in row.values())
    refused = sum(any(v.startswith("refused") for v in row.values()) for row in rows.values())
    print(f"\n{len(rows)} rows: {refused} refused by name, {bad} cells WRONG.")
    if asked.mutations:
        wrong = mutations(asked.mutations, asked.seed)
        for what, fault in wrong.items():
            print(f"WRONG: mutation {what}: {fault}")
        kinds = ", ".join(KINDS)
        print(f"{asked.mutations} mutations ({kinds}): {len(wrong)} WRONG.")
        bad += len(wrong)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
