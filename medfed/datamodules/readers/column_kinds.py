"""Which columns of a table hold numbers, which hold categories, and which are no features."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from medfed.common.errors import ConfigError, DataError
from medfed.datamodules.readers.base import check_names, few
from medfed.datamodules.readers.sheet import Sheet, as_number, like_a_number

log = logging.getLogger(__name__)
_MOST_FOUND, _MOST_NAMED = 20, 100  # categories of a column that nobody, or somebody, named
_NUMBERED = 10  # rows from which 1, 2, 3 ... are taken for row numbers

Categories = Mapping[str, Sequence[str]]


def find_kinds(
    sheet: Sheet,
    names: Sequence[str],
    categorical: Sequence[str] | Literal["auto"],
    given: bool,
) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Says which columns are features, and which of these hold categories.

    With ``auto`` a column without a cell that is, or was meant as, a number holds categories. It is
    left out, and a line says so, if it has too many of them: more than 20, or one for every second
    row, as ids, dates and remarks have. So are row numbers (1, 2, 3 ...). What the user has named
    is not left out but refused.

    Args:
        sheet: The cells.
        names: The columns that have no other role.
        categorical: Columns that hold categories, also numbered ones; or ``auto``.
        given: Whether the user has named the features.

    Returns:
        The features, and the sorted categories of those that have some.

    Raises:
        ConfigError: If `categorical` names what is no feature, or has more than 100 categories.
        DataError: If no feature is left, or a column has no name.
    """
    auto = categorical == "auto"
    declared = () if auto else _declared(sheet, names, categorical)
    kept, left_out, categories = [], {}, {}
    for name in names:
        if name in declared:
            categories[name] = _named(sheet, name)
        elif auto and not given and _are_row_numbers(sheet, name):
            left_out[name or "the one without a name"] = "row numbers"
            continue
        elif auto and (distinct := _texts_of(sheet, name)):
            rows = sum(text is not None for text in sheet.texts(name))
            if len(distinct) > _MOST_FOUND or (len(distinct) > 2 and 2 * len(distinct) > rows):
                what = f"{len(distinct)} different texts in {rows} rows"
                if given:
                    raise DataError(
                        f"{sheet.path}: column {name} has {what}, which is no feature; leave it "
                        "out of data.features, or name it in data.categorical."
                    )
                left_out[name] = what
                continue
            categories[name] = distinct
        kept.append(name)
    if left_out:
        listed = few([f"{name[:60]} ({why})" for name, why in left_out.items()], 8)
        log.warning(
            "%s: left out %s; data.features and data.categorical say otherwise.", sheet.path, listed
        )
    _check_features(sheet, kept)
    _say_alike(sheet, categories)
    return tuple(kept), categories


def _declared(sheet: Sheet, names: Sequence[str], categorical: Sequence[str]) -> tuple[str, ...]:
    try:
        return check_names("column", categorical, names) if categorical else ()
    except ConfigError as error:
        raise ConfigError(f"{sheet.path}, data.categorical: {error}") from error


def _named(sheet: Sheet, name: str) -> tuple[str, ...]:
    found = tuple(sorted({text for text in sheet.texts(name) if text is not None}, key=in_order))
    check_count(name, len(found))
    return found


def check_count(name: str, count: int) -> None:
    """Refuses more categories than a column may have.

    Raises:
        ConfigError: Naming the column.

    Example:
        >>> check_count("stage", 4)
    """
    if count > _MOST_NAMED:
        raise ConfigError(
            f"Column {name} of data.categorical has {count} categories; {_MOST_NAMED} are "
            "possible, so join some, or leave it out with data.features."
        )


def _texts_of(sheet: Sheet, name: str) -> tuple[str, ...]:
    """The categories of a column; none where it holds a number, or nothing."""
    found = {text for text in sheet.texts(name) if text is not None}
    return () if any(map(like_a_number, found)) else tuple(sorted(found))


def _are_row_numbers(sheet: Sheet, name: str) -> bool:
    texts = sheet.texts(name)
    if len(texts) < _NUMBERED or texts[0] not in ("0", "1"):
        return False
    return texts == [str(n) for n in range(int(texts[0]), int(texts[0]) + len(texts))]


def _check_features(sheet: Sheet, names: Sequence[str]) -> None:
    if not names:
        raise DataError(f"{sheet.path} has no feature column; there is nothing to learn from.")
    if "" in names:
        raise DataError(
            f"{sheet.path} has a column without a name, perhaps row numbers; name it in the header "
            "line, or name the others in data.features."
        )


def _say_alike(sheet: Sheet, categories: Categories) -> None:
    for name, texts in categories.items():
        alike: dict[str, list[str]] = {}
        for text in texts:
            alike.setdefault(text.lower(), []).append(text)
        if twice := next((same for same in alike.values() if len(same) > 1), None):
            log.warning(
                "%s, column %s: %s count as different categories.",
                sheet.path,
                name,
                " and ".join(twice),
            )


def in_order(text: str) -> tuple[float, str]:
    """Sorts categories: numbers by size, then texts.

    Example:
        >>> sorted(["b", "10", "9", "a"], key=in_order)
        ['9', '10', 'a', 'b']
    """
    return as_number(text), text


def read_cells(sheet: Sheet, names: Sequence[str], categories: Categories) -> NDArray[np.float64]:
    """Reads the features.

    Args:
        sheet: The cells.
        names: F columns.
        categories: Of those that have some.

    Returns:
        (N, F): numbers, or the position of the category, -1 where it is none; NaN where missing.

    Raises:
        DataError: If a cell of another column is no number.
    """
    numeric = [at for at, name in enumerate(names) if name not in categories]
    found = np.empty((len(sheet.rows), len(names)))
    found[:, numeric] = sheet.numbers([names[at] for at in numeric])
    for at, name in enumerate(names):
        if name in categories:
            position = {text: float(code) for code, text in enumerate(categories[name])}
            found[:, at] = [
                np.nan if text is None else position.get(text, -1.0) for text in sheet.texts(name)
            ]
    return found


def recode(
    features: NDArray[np.float64], names: Sequence[str], old: Categories, new: Categories
) -> NDArray[np.float64]:
    """Gives categories their positions in other lists.

    Args:
        features: (N, F), see `read_cells`.
        names: F columns.
        old: Categories by column, to which the positions refer.
        new: Those to which they shall refer.

    Returns:
        (N, F); -1 where a category is not in the new list.

    Example:
        >>> recode(np.array([[0.0], [1.0]]), ["sex"], {"sex": ("m", "f")}, {"sex": ("f",)}).tolist()
        [[-1.0], [0.0]]
    """
    found = features.copy()
    for at, name in enumerate(names):
        if name in old:
            codes = [float(new[name].index(t)) if t in new[name] else -1.0 for t in old[name]]
            known = features[:, at] >= 0  # neither missing nor unknown
            found[known, at] = np.array([*codes, -1.0])[features[known, at].astype(int)]
    return found
