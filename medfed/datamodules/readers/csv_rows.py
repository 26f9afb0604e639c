"""CSV files row by row, with one sentence for whatever is wrong with them."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from medfed.common.errors import DataError
from medfed.common.files import original

_MAGIC = {
    b"PK\x03\x04": "an Excel or zip file",
    b"\xd0\xcf\x11\xe0": "an old Excel file",
    b"\x1f\x8b": "a gzip file",
    b"PAR1": "a Parquet file",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
}


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
        _check_kind(path)
        with path.open(newline="", encoding="utf-8-sig") as file:
            # Strict, since a quote left open would otherwise swallow rows until the next one.
            yield _rows(path, csv.reader(_lines(path, file), strict=True))
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; {absent}.") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 (byte {error.object[error.start]:#04x}), but probably Latin-1; "
            "save it as CSV UTF-8."
        ) from error
    except (OSError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV ({error}); save it as UTF-8 CSV.") from error


def _check_kind(path: Path) -> None:
    """Refuses what is no text file, by its first bytes."""
    if path.is_dir():
        raise DataError(f"{path} is a folder; name a CSV file.")
    with path.open("rb") as file:
        begin = file.read(8)
    for magic, kind in _MAGIC.items():
        if begin.startswith(magic):
            raise DataError(f"{path} is {kind}, no CSV file; save it as CSV UTF-8.")


def _lines(path: Path, file: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(file, start=1):
        if "\0" in line:
            raise DataError(f"{path}, line {number}: a NUL byte; save it as CSV UTF-8.")
        yield line


def _rows(path: Path, rows: Iterable[list[str]]) -> Iterator[list[str]]:
    filled = ([original(cell) for cell in row] for row in rows if any(map(str.strip, row)))
    for first in filled:
        for name, sign in (("semicolons", ";"), ("tabs", "\t")):
            if len(first) <= first[0].count(sign):
                raise DataError(
                    f"{path} separates its cells by {name}; save it with commas between cells, and "
                    "points in decimal numbers."
                )
        yield first
        break
    yield from filled
