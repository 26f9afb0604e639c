"""CSV files row by row, with one sentence for whatever is wrong with them."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from medfed.common.errors import DataError
from medfed.common.files import original


@contextmanager
def csv_rows(path: Path, absent: str = "copy it there") -> Iterator[Iterator[list[str]]]:
    """Opens a CSV file.

    Args:
        path: The file, in UTF-8.
        absent: What to do where it does not exist.

    Yields:
        Its rows, the header first, without empty ones; a table that was written here and begins a
        cell with a quote, lest a spreadsheet take it for a formula, gives the cell without it.

    Raises:
        DataError: If it cannot be read.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.reader(file)
            yield ([original(cell) for cell in row] for row in rows if any(map(str.strip, row)))
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; {absent}.") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV ({error}); save it as UTF-8 CSV.") from error
