"""CSV files: their rows and cells, and an error sentence for each fault."""

from __future__ import annotations

import csv
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property, lru_cache
from io import StringIO
from itertools import compress
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .errors import DataError, did_you_mean, few
from .files import kind_of, original, reading
from .names import fold, same, tidy

Categories = Mapping[str, Sequence[str]]
_NO_TEXT = re.compile(rb"[\x00-\x08\x0e-\x1f\x7f\x81\x8d\x8f\x90\x9d]")  # in no Latin-1 file
_SEPARATOR = re.compile(r'"?sep=([^\w\s"]|\t)"?[,;\t ]*(?:\r?\n|\r|$)', re.IGNORECASE)
_QUOTED = re.compile(r'"[^"]*"')


def csv_rows(path: Path, absent: str = "copy it there") -> Iterator[list[str]]:
    """Reads the rows of a CSV file, the header first, without empty ones, as they were written."""
    return (row for row in _rows(path, _text(path, absent)[0]) if any(map(str.strip, row)))


def _text(path: Path, absent: str) -> tuple[str, bool]:
    """The text of a file, and whether it is in Windows' Latin-1 instead of UTF-8."""
    with reading(path, "CSV", "save it as UTF-8 CSV", absent):
        if path.is_dir():
            raise DataError(f"{path} is a folder; name a CSV file.")
        content = path.read_bytes()
    wide = content[:2] in (b"\xff\xfe", b"\xfe\xff")  # the byte-order marks of UTF-16
    if not wide and (kind := kind_of(path)):
        raise DataError(f"{path} is {kind}, not a CSV file; save it as CSV UTF-8.")
    try:
        text, latin = content.decode("utf-16" if wide else "utf-8-sig"), False
    except UnicodeDecodeError as error:
        if _NO_TEXT.search(content):
            byte = error.object[error.start]
            why = f"{path} is not UTF-8 (byte {byte:#04x}); save it as CSV UTF-8."
            raise DataError(why) from error
        text, latin = content.decode("cp1252"), True
    if (at := text.find("\0")) >= 0:
        line = text.count("\n", 0, at) + 1
        raise DataError(f"{path}, line {line}: a NUL byte; save it as CSV UTF-8.")
    return text, latin


def _rows(path: Path, text: str) -> Iterator[list[str]]:
    # Strict: otherwise an open quote would swallow rows until the next quote.
    separator = delimiter(text)
    if declared := _SEPARATOR.match(text):
        text = text[declared.end() :]
    rows = csv.reader(StringIO(text, newline=""), strict=True, delimiter=separator)
    plain = text.isascii() and "'" not in text  # so that every cell is as it was written
    try:
        yield from (row if plain else list(map(original, row)) for row in rows if row)
    except csv.Error as error:
        why = str(error).replace("unexpected end of data", "a quote is not closed")
        raise DataError(f"{path} cannot be read as CSV ({why}); save it as UTF-8 CSV.") from error


def delimiter(text: str) -> str:
    """Finds the separator: Excel's ``sep=;``, or the commonest of comma, semicolon, tab and bar.

    Example:
        >>> delimiter("age;weight, kg;sex")
        ';'
        >>> delimiter("sep=|")
        '|'
    """
    if separator := _SEPARATOR.match(text):
        return separator[1]
    first = next((line for line in StringIO(text, newline="") if line.strip(" ,;\t\r\n")), "")
    return max(",;\t|", key=_QUOTED.sub("", first).count)


log = logging.getLogger(__name__)
AGE = re.compile("years from (.+) to (.+)")
_LARGEST = 1e30  # larger numbers overflow when they are scaled
_LACKING = (
    "? . nan -nan na <na> n/a n.a. #n/a #na none null nat #null! #div/0! #value! #ref! #num! "
    "#name? 1.#ind -1.#ind 1.#qnan -1.#qnan"
)
MISSING = frozenset(["", "#n/a n/a", *_LACKING.split()])  # as programs write them; lower case
_DECIMAL_COMMA = re.compile(r"([<>≤≥]=?\s*)?[+-]?\d+(,\d+)?")
# 1.020 of a column that may write thousands with points, and 7,5 of a file that surely does not
# write decimals with points; whole numbers that a writer of such thousands would have written so.
_THOUSANDS, _SURE_COMMA = re.compile(r"[+-]?[1-9]\d{0,2}\.\d{3}"), re.compile(r"\d+,\d{1,2}")
_FROM_1000 = re.compile(r"[+-]?\d{4,}")
_THREE = re.compile(r"([+-]?\d{1,3})[.,](\d{3})")
_WITH_UNIT = re.compile(
    r"([+-]?\d+(?:[\s'’]\d{3})*(?:[.,]\d+)?)(?:\s*%|\s*[A-Za-zµμ]{2}[^,]*|\s[A-Za-z])?"
)
_MONTH = r"(jan|feb|mar|mär|apr|ma[iy]|jun|jul|aug|sep|o[ck]t|nov|de[cz])[a-z]*"
_DATE = re.compile(
    r"\d{4}[-/]\d\d?[-/]\d\d?([T ].*)?|\d\d?[./]\d\d?[./]\d{2,4}( .*)?|\d\d?:\d\d(:\d\d)?"
    rf"|\d\d?[-. ]*{_MONTH}[-., ]*\d{{2,4}}( .*)?|(19|20)\d\d(0[1-9]|1[0-2])([0-2]\d|3[01])",
    re.IGNORECASE,
)
# Cells probably meant as numbers: 4,1 and 1'041 and 1_5, <5 and ≥ 90, inf.
_LIKE_A_NUMBER = re.compile(r"[<>≤≥≈~=±+\-\s]*([.,]?\d|inf)", re.IGNORECASE)
_NAMES = ("patient", "centre", "label")  # roles whose cells are names
_LIMIT = re.compile(r"([<>≤≥])=?\s*([\d.,]+)")
# Whether a cell is a date or a time of day, a limit of detection, or meant as a number.
is_date, is_limit, like_a_number = _DATE.fullmatch, _LIMIT.fullmatch, _LIKE_A_NUMBER.match
_MEND = " or remove the row"
NOWHERE = ", remove the row, or leave out all rows without a hospital by {}.unplaced=drop"
Limits = Literal["refuse", "half", "value"]


@dataclass(frozen=True)
class Sheet:
    """The cells of a file; data rows count from 1."""

    path: Path  # the file
    cells: Mapping[str, list[str]]  # those of every row, by column
    numbers: Sequence[int]  # the rows' numbers in the file
    # Whether the separator is not a comma, so that ``27,5`` can only be a number.
    decimal_comma: bool = False
    missing: Collection[str] = MISSING  # words of missing cells, as `missing_words` returns them
    # What a cell such as ``<0.5`` is among numbers: an error; half of 0.5, and of ``>10`` 10; or
    # the value of either.
    limits: Limits = "refuse"
    # By reason, the numbers of rows that were left out; 0 for empty ones.
    left_out: Mapping[str, Sequence[int]] = field(default_factory=dict)
    # Whether errors may advise keys of ``data``: a bundle's input is read as the bundle says.
    has_keys: bool = True

    @classmethod
    def read(
        cls,
        path: Path,
        header: Sequence[str] | None = None,
        missing: Collection[str] = MISSING,
        limits: Limits = "refuse",
        has_keys: bool = True,
    ) -> Sheet:
        """Reads a file; drops columns without a name and without cells, as from trailing commas."""
        content, latin = _text(path, f"set {'data.path' if has_keys else 'input'} to a CSV file")
        every = list(_rows(path, content))
        rows = [row for row in every if any(map(str.strip, row))]
        empty = len(every) - (every.index(rows[0]) if rows else 0) - len(rows)
        if latin:
            texts = (cell for row in rows for cell in row)
            _say_latin(path, next(text for text in texts if not text.isascii())[:40])
        columns = [c.strip() for c in (rows.pop(0) if header is None and rows else header or [])]
        if not rows:
            raise DataError(f"{path} has no data rows.")
        columns, rows = _without_empty(columns, rows)
        if long := next((c for c in columns if len(c) > 200 or not c.isprintable()), None):
            what = f"{path}: no column can be called {long[:40]!r}…"
            mend = f"give it a header line{', or name its columns in data.header' * has_keys}"
            raise DataError(f"{what}; {mend}.")
        count = Counter(c.lower() for c in columns)
        named = len(columns) - count[""]
        if header is None and 2 * named < len(rows[0]):
            what = f"{path}: the first line names {named} of {len(rows[0])} columns"
            raise DataError(f"{what}; if it is a title, remove the lines above the header.")
        if twice := {c for c in columns if count[c.lower()] > 1}:
            what = f"{path}: column {min(twice) or 'without a name'} occurs twice"
            raise DataError(f"{what}; give every column a different name.")
        for number, row in enumerate(rows, start=1):
            if len(row) != len(columns):
                what = f"{len(row)} cells, but {len(columns)} columns; mend the row"
                mend = " or data.header" * has_keys
                raise DataError(f"{path}, data row {number}: {what}{mend}.")
        cells = {c: [row[at].strip() for row in rows] for at, c in enumerate(columns)}
        left_out = {"empty": [0] * empty} if empty else {}
        numbers, commas = range(1, len(rows) + 1), delimiter(content) != ","
        return cls(path, cells, numbers, commas, missing, limits, left_out, has_keys)

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self.numbers)

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self.cells)

    @cached_property
    def _by_name(self) -> dict[str, list[str]]:
        return {column.lower(): cells for column, cells in self.cells.items()}

    def has(self, name: str) -> bool:
        """Whether there is a column of this name, in any case."""
        return name.lower() in self._by_name

    def __getitem__(self, name: str) -> list[str]:
        """The cells of a column."""
        return self._by_name[name.lower()]

    def bad(self, at: int, what: str) -> DataError:
        """Returns the sentence about a row, which is at this place, from 0."""
        return DataError(f"{self.path}, data row {self.numbers[at]}{what}")

    def labelled(self, name: str, known: Collection[str] | None = None) -> Sheet:
        """The rows that have a label, if given one of `known`; a line names the others."""
        rows = [t is not None and (known is None or t in known) for t in self.texts(name)]
        if all(rows):
            return self
        if not any(rows):
            raise DataError(f"{self.path}: no row has a {name}; name another column.")
        numbers, words = [*compress(self.numbers, rows)], self.named_missing(name)
        gone = sorted({*self.numbers} - {*numbers})
        reason = f"no {name}{' of those named' * (known is not None)}{words}"
        text = "%s: %d of %d rows have no %s%s and are left out: data rows %s."
        log.warning(text, self.path, len(gone), len(self), name, words, few([*map(str, gone)], 10))
        cells = {column: [*compress(of, rows)] for column, of in self.cells.items()}
        return replace(self, cells=cells, numbers=numbers, left_out={**self.left_out, reason: gone})

    def aged(self, names: Sequence[str]) -> Sheet:
        """Adds columns such as ``years from birth to admission``, by the ISO dates in both."""
        cells = dict(self.cells)
        for name in (name for name in names if not self.has(name)):
            begins, ends = map(self._dates, AGE.fullmatch(name).groups())  # type: ignore[union-attr]
            years = (ends - begins) / np.timedelta64(31_557_600, "s")  # of 365.25 days
            if below := int((years < 0).sum()):
                text = "%s: %s are below 0 in %d of %d rows; mend the dates or swap the columns."
                log.warning(text, self.path, name, below, len(self))
            cells[name] = [f"{each:.4f}" for each in years]
        return replace(self, cells=cells)

    def _dates(self, name: str) -> NDArray[Any]:
        dates = np.full(len(self), "NaT", dtype="datetime64[s]")
        for at, (text, lacks) in enumerate(zip(self[name], self.lacking(name), strict=True)):
            try:
                if not lacks:
                    dates[at] = datetime.fromisoformat(text).replace(tzinfo=None)
            except ValueError:
                what = f", column {name}: {text[:40]!r} is no ISO date, such as 2019-01-31; write "
                what += f"it so{', or leave the column out of data.ages' * self.has_keys}."
                raise self.bad(at, what) from None
        return dates

    def texts(self, name: str) -> list[str | None]:
        """(N) cells of a column, numbers in one spelling; None for a missing cell."""
        texts = list(map(tidy, map(fold, self[name])))
        return [None if text.lower() in self.missing else text for text in texts]

    def words_missing(self, name: str) -> Counter[str]:
        """How many cells of a column hold each word that is read as missing, such as none."""
        return Counter(t for t in compress(self[name], self.lacking(name)) if t[:1].isalpha())

    def named_missing(self, name: str) -> str:
        """The words of `words_missing` in brackets; empty if there are none."""
        counts = self.words_missing(name).items()
        listed = few([f'"{word}" in {count} cells' for word, count in counts], 4)
        return f" ({listed})" if counts else ""

    def placed(self, centre: str, unplaced: str) -> Sheet:
        """The rows that name a hospital, if the others shall be dropped."""
        return self.labelled(centre) if unplaced == "drop" and self.has(centre) else self

    def known(self, name: str, instead: str = _MEND) -> list[str]:
        """The cells of a column that may not be missing: label, patient or centre."""
        cells, lacking = self[name], self.lacking(name)
        if any(lacking):
            text = cells[at := lacking.index(True)]
            what = "the cell is missing" + f" ({text} counts so)" * bool(text)
            raise self.bad(at, f", column {name}: {what}; fill it in{instead}.")
        return cells

    def names(self, name: str, instead: str = _MEND, of: Callable[[str], str] = fold) -> list[str]:
        """The names in a column, of labels, patients, hospitals or cases; see `names.same`."""
        texts, first = self.known(name, instead), dict[str, str]()
        where = f"{self.path}, column {name}"
        read = same(list(map(of, texts)), where, lambda at: f"data row {self.numbers[at]}")
        for text, one in zip(texts, read, strict=True):
            if (other := first.setdefault(one, text)) != text:
                log.warning("%s: %r and %r are read as one, %s.", where, other, text, one)
                break
        return read

    def lacking(self, name: str, among: Collection[str] = ()) -> list[bool]:
        """Says which cells of a column are missing, by the file's words and those in `among`."""
        words = [text.lower() for text in map(tidy, map(fold, self[name]))]
        return [word in self.missing or word in among for word in words]

    def values(self, names: Sequence[str]) -> NDArray[np.float64]:
        """(N, F) feature cells, NaN for a missing cell."""
        values = np.full((len(self), len(names)), np.nan)
        wrong: dict[str, list[tuple[int, str]]] = {}
        commas: dict[str, str] = {}
        limited: list[str] = []
        for column, name in enumerate(names):
            lacking = self.lacking(name, MISSING)  # none is no category here
            cells = [(at, text) for at, text in enumerate(self[name]) if not lacking[at]]
            limits = [_LIMIT.fullmatch(t) if self.limits != "refuse" else None for _, t in cells]
            bare = [m[2] if m else text for m, (_, text) in zip(limits, cells, strict=True)]
            points = self.with_points(bare)
            for (at, text), limit, point in zip(cells, limits, points, strict=True):
                value = as_number(point)
                if not abs(value) < _LARGEST:
                    wrong.setdefault(name, []).append((at, text))
                elif limit is not None:
                    value /= 2 if self.limits == "half" and limit[1] in "<≤" else 1
                    limited.append(f"{text} of {name} ({value:g})")
                elif text != point:
                    commas.setdefault(name, text)
                values[at, column] = value
            if name in wrong and self.decimal_comma:  # the rarer spelling is wrong
                pairs = zip(cells, bare, strict=True)
                dotted = [cell for cell, text in pairs if not _DECIMAL_COMMA.fullmatch(text)]
                marks = Counter("".join(text for each in names for text in self[each]))
                odd = [dotted, wrong[name]] if marks[","] > marks["."] else [wrong[name], dotted]
                wrong[name] = min((cells for cells in odd if cells), key=len)
        if wrong:
            raise self._no_numbers(wrong)
        if limited:
            what = "half of the limit" if self.limits == "half" else "the limit"
            listed = few(list(dict.fromkeys(limited)), 4)
            text = "%s: %d cells are limits, and count as %s (data.limits=%s), such as %s."
            log.warning(text, self.path, len(limited), what, self.limits, listed)
        if commas:
            first, listed = next(iter(commas.values())), ", ".join(commas)
            text = "%s: decimal commas in %s; %s is read as %s."
            log.warning(text, self.path, listed, first, first.replace(",", "."))
        return values

    def _no_numbers(self, wrong: Mapping[str, list[tuple[int, str]]]) -> DataError:
        """The sentence about cells that are not numbers, by column."""
        name, cells = next(iter(wrong.items()))
        at, text = cells[0]
        drop = f"'data.drop=[{','.join(wrong)}]'" if len(wrong) < 20 else "data.drop"
        texts = sorted({t[:20] for cells in wrong.values() for _, t in cells})
        limits = any(map(is_limit, texts))
        limit = "take limits by data.limits=half or data.limits=value, " if limits else ""
        if len(texts) < 7 and not any(map(str.isdigit, "".join(texts))):
            words = f"'data.missing=[{','.join(texts)}]'"
            limit = f"take {' and '.join(texts)} for missing by {words}, "
        if len(wrong) > 1 and {place for of in wrong.values() for place, _ in of} == {0}:
            what = f": {len(wrong)} cells are not numbers, such as {text[:40]!r} of {name}, but all"
            return self.bad(0, f"{what} below are; if it is a second header line, remove it.")
        if len(wrong) > 1:
            first = [
                f"{n[:60]} ({_dated(t[:20], ' ')} in data row {self.numbers[place]})"
                for n, ((place, t), *_) in wrong.items()
            ]
            mend = f"leave columns such as dates out by {drop}, name those with categories in "
            mend = f"{mend}data.categorical, {limit}and mend the others" * self.has_keys
            what = f"{len(wrong)} columns have cells that are not numbers: {few(first, 8)}"
            return DataError(f"{self.path}: {what}; {mend or 'mend them or empty them'}.")
        others = f" (nor are {len(cells) - 1} other cells)" if len(cells) > 1 else ""
        a_number = "a number" + " with a decimal point" * ("," in text and not limits)
        a_number = meant(text, "," if self._has_commas else ".") or a_number
        is_one = abs(as_number(text)) < _LARGEST
        kind = "with a decimal comma, as others are" if is_one else "(below 1e30)"
        mend = f", leave it empty, name the column in data.categorical, or leave it out by {drop}"
        mend = f"{limit}write {a_number}{mend}" * self.has_keys
        what = f", column {name}: {_dated(text[:40], ' is ')} not a number {kind}{others}; "
        return self.bad(at, f"{what}{mend or f'write {a_number} or leave it empty'}.")

    @cached_property
    def _has_commas(self) -> bool:
        """Whether some number has a decimal comma."""
        cells = (cell for of in self.cells.values() for cell in of)
        return self.decimal_comma and any(map(_SURE_COMMA.fullmatch, cells))

    def _are_thousands(self, numbers: Sequence[str]) -> bool:
        """Whether 1.020 probably is 1020: beside 7,5 in the file, or beside 987 in the column."""
        points = [text for text in numbers if "." in text]
        if not points or not all(map(_THOUSANDS.fullmatch, points)):
            return False
        whole = [text for text in numbers if "." not in text]
        beside = bool(whole) and any(text[-1] == "0" for text in points)
        return not any(map(_FROM_1000.fullmatch, whole)) and (beside or self._has_commas)

    def with_points(self, texts: Sequence[str]) -> Sequence[str]:
        """Turns decimal commas into points, unless all cells may be thousands, like 1,234.

        A point of thousands becomes no number's.
        """
        numbers = [text for text in texts if any(map(str.isdigit, text))]
        if self._are_thousands(numbers):
            return [t.replace(".", "'") for t in texts]
        commas = self.decimal_comma and all(map(_DECIMAL_COMMA.fullmatch, numbers))
        if commas and any("," in t and len(t.partition(",")[2]) != 3 for t in numbers):
            return [t.replace(",", ".") for t in texts]
        return texts


def missing_words(words: Sequence[object]) -> Collection[str]:
    """The words of missing cells and further ones; ``not none`` keeps a usual one as a category."""
    read = {tidy(fold(str(word))).lower() for word in words}
    usual = {word for word in MISSING if f"not {word}" in read}
    return (MISSING | {word for word in read if word.removeprefix("not ") not in usual}) - usual


@lru_cache(1 << 10)  # a file may be read several times
def _say_latin(path: Path, such: str) -> None:
    text = "%s is not UTF-8 and is read as Latin-1, such as %r; if that is wrong, save it as UTF-8."
    log.warning(text, path, such)


def _without_empty(columns: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Drops columns that have neither a name nor a cell, and empty cells beyond the last column."""
    blank = [at for at, name in enumerate(columns) if not name]
    gone = {a for a in blank if not any(len(r) > a and r[a].strip() for r in rows)}
    names = [name for at, name in enumerate(columns) if at not in gone]
    if gone:
        rows = [[cell for at, cell in enumerate(row) if at not in gone] for row in rows]
    for row in rows:
        while len(row) > len(names) and not row[-1].strip():
            row.pop()
    return names, rows


def listed_columns(
    sheet: Sheet, columns: Mapping[str, str | None], needed: Sequence[str]
) -> dict[str, list[str]]:
    """Returns the columns of a table that lists pictures; unnamed roles may have none."""
    cells = {}
    for role, name in columns.items():
        if name and sheet.has(name):
            instead = NOWHERE.format("data.reader") if role == "centre" else _MEND
            cells[role] = (sheet.names if role in _NAMES else sheet.known)(name, instead)
        elif name and (role in needed or name != role):
            what = f"{sheet.path} has no column {name}{did_you_mean(name, sheet.columns)}"
            raise DataError(f"{what}; it has {few(sheet.columns)}: set data.reader.{role}=COLUMN.")
    return cells


def meant(text: str, decimal_mark: str = ".") -> str:
    """What to write instead of a number with thousands or a unit; empty for other texts.

    Example:
        >>> meant("1.020"), meant("90 %"), meant("1'020,5 mg/l"), meant("4,1"), meant("1a")
        ('1020 or 1.02, whichever it means', '90', '1020.5', '', '')
    """
    if match := _THREE.fullmatch(text):
        other = f"{float('.'.join(match.groups())):g}".replace(".", decimal_mark)
        return f"{match[1]}{match[2]} or {other}, whichever it means"
    match = _WITH_UNIT.fullmatch(text)
    bare = re.sub(r"[\s'’]", "", match[1]).replace(",", ".") if match else ""
    return bare if bare != text.replace(",", ".") else ""


def _dated(text: str, verb: str) -> str:
    """A cell with the words that it is a date, if it is one."""
    return f"{text!r}{verb}a date or time," if is_date(text) else f"{text!r}{verb.rstrip()}"


def as_number(text: str) -> float:
    """Reads a number; other text gives infinity."""
    try:
        return float("inf") if "_" in text else float(text)  # Python's own spelling of 15
    except ValueError:
        return float("inf")


def read_cells(sheet: Sheet, names: Sequence[str], categories: Categories) -> NDArray[np.float64]:
    """(N, F) numbers, or the position of the category, -1 where it is none; NaN where missing."""
    numeric = [at for at, name in enumerate(names) if name not in categories]
    cells = np.empty((len(sheet), len(names)))
    cells[:, numeric] = sheet.values([names[at] for at in numeric])
    for at, name in enumerate(names):
        if name in categories:
            position = {text: float(code) for code, text in enumerate(categories[name])}
            texts = sheet.texts(name)
            cells[:, at] = [np.nan if t is None else position.get(t, -1.0) for t in texts]
    return cells


def read_features(
    path: Path,
    names: Sequence[str],
    categories: Mapping[str, Sequence[str]] | None = None,
    missing: Sequence[object] = (),
    limits: Limits = "refuse",
) -> tuple[NDArray[np.float64], dict[str, list[str]], dict[str, list[str | None]]]:
    """Reads the features (N, F) of a table that may lack labels, by name in any order and case.

    Also returns the cells of all other columns, and those of the columns with categories.
    """
    sheet = Sheet.read(path, None, missing_words(missing), limits, has_keys=False)
    categories = categories or {}
    ages = {name: match.groups() for name in names if (match := AGE.fullmatch(name))}
    sheet = sheet.aged([name for name, dates in ages.items() if all(map(sheet.has, dates))])
    if lacking := [name for name in names if not sheet.has(name)]:
        what = f"{path} lacks the column{'s' * (len(lacking) > 1)} {few(lacking)}"
        raise DataError(f"{what}; it needs {few(names)}. Leave the cells of unknown values empty.")
    used = {name.lower() for name in names}
    columns = {name: cells for name, cells in sheet.cells.items() if name.lower() not in used}
    texts = {name: sheet.texts(name) for name in categories}
    return read_cells(sheet, names, categories), columns, texts
