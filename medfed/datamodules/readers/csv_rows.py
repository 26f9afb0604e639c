"""CSV files row by row, with one sentence for whatever is wrong with them."""

from __future__ import annotations

import csv
import re
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

_QUOTED = re.compile(r'"[^"]*"')


@contextmanager
def csv_rows(path: Path, absent: str = "copy it there") -> Iterator[Iterator[list[str]]]:
    """Opens a CSV file.

    Args:
        path: The file, in UTF-8; its cells are separated as `delimiter` says.
        absent: What to do where it does not exist.

    Yields:
        Its rows, the header first, without empty ones; a table that was written here and begins a
        cell with a quote, lest a spreadsheet take it for a formula, gives the cell without it.

    Raises:
        DataError: If it cannot be read.
    """
    try:
        _check_kind(path)
        sign = delimiter(path)
        with path.open(newline="", encoding="utf-8-sig") as file:
            # Strict, since a quote left open would otherwise swallow rows until the next one.
            rows = csv.reader(_lines(path, file), strict=True, delimiter=sign)
            yield ([original(cell) for cell in row] for row in rows if any(map(str.strip, row)))
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


def delimiter(path: Path) -> str:
    """Finds what separates the cells: a comma, a semicolon or a tab, whichever splits more.

    Args:
        path: A file whose first line that is not empty is the header, or a row.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        ...     _ = file.write("age;weight, kg;sex")
        ...     file.flush()
        ...     delimiter(Path(file.name))
        ';'
    """
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        first = next((line for line in file if line.strip(" ,;\t\r\n")), "")

    bare = _QUOTED.sub("", first)
    return max(",;\t", key=bare.count)
