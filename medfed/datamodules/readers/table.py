"""Tables: one row per sample, numeric features, a label column; a centre and a patient column.

The reader decides which columns hold numbers, which hold categories, and which are no features.
"""

from __future__ import annotations

from typing import Literal

from medfed.datamodules.extending import *
from medfed.datamodules.readers import looks
from medfed.datamodules.readers.base import Account
from medfed.datamodules.readers.samples import check_rows, official_splits
from medfed.standalone import csv_files
from medfed.standalone.csv_files import Categories, Limits, missing_words
from medfed.standalone.names import alike, code_among, tidy
from medfed.standalone.pictures import SUFFIXES

_MOST_FOUND, _MOST_NAMED = 20, 100  # categories of a column that nobody, or somebody, named
_NUMBERED = 10  # rows from which 1, 2, 3 ... are taken for row numbers


def find_kinds(
    sheet: Sheet, names: Sequence[str], categorical: Sequence[str] | Literal["auto"], explicit: bool
) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Says which columns are features, and which of these hold categories.

    With ``auto`` a column without a cell that is, or was meant as, a number holds categories. It is
    left out, with a line, if it has more than 20, or one for every second row; so are dates and row
    numbers. What the user has named is refused instead.
    """
    auto = len(categorical) > 0
    declared: tuple[str, ...] = ()
    if auto and categorical != "auto":
        declared = check_names("column", categorical, names, f"{sheet.path}, data.categorical: ")
    left_out, categories = dict[str, str](), {}
    texts_of = {name: sheet.texts(name) for name in names if name not in declared}
    known_of = {n: dict.fromkeys(t for t in of if t is not None) for n, of in texts_of.items()}
    codes = {name: code_among(known) for name, known in known_of.items()}
    coded = {name: code for name, code in codes.items() if code}
    for name in names:
        if name in declared:
            categories[name] = _named(sheet, name)
            continue
        if not auto:
            continue
        texts, known = texts_of[name], known_of[name]
        rows = len(texts) - texts.count(None)
        first = int(texts[:1] == ["1"])
        numbered = texts == [str(n) for n in range(first, first + len(texts))]
        if not explicit and numbered and len(texts) >= _NUMBERED:
            left_out[name] = "row numbers"
        elif not explicit and known and all(map(csv_files.is_date, known)):
            left_out[name] = "dates or times"
        elif name not in coded and (not known or any(map(csv_files.like_a_number, known))):
            continue
        elif len(known) > _MOST_FOUND or (len(known) > 2 and 2 * len(known) > rows):
            what = f"{len(known)} different texts in {rows} rows"
            if explicit:
                mend = "leave it out of data.features, or name it in data.categorical"
                why = f"column {name} has {what}, which is no feature"
                raise DataError(f"{sheet.path}: {why}; {mend}.")
            left_out[name] = what
        else:
            categories[name] = tuple(sorted(known))
    if coded:
        _say_codes(sheet, coded, auto)
    if left_out:
        left = {name[:60] or "the one without a name": why for name, why in left_out.items()}
        listed = few([f"{name} ({why})" for name, why in left.items()], 8)
        keys = "data.features, data.categorical or data.ages"
        log.warning("%s: left out %s; set %s to change this.", sheet.path, listed, keys)
    columns = tuple(name for name in names if name not in left_out)
    _check_features(sheet, columns)
    for name, of in categories.items():
        for twice in alike(of)[:1]:
            both = " and ".join(map(repr, twice))
            log.warning("%s, column %s: %s count as different categories.", sheet.path, name, both)
    return columns, categories


def _say_codes(sheet: Sheet, coded: Mapping[str, str], auto: bool) -> None:
    """Says which columns hold codes; refuses them where the user has named the others."""
    such = few([f"{name[:60]} ({text[:20]})" for name, text in coded.items()], 8)
    what = "a leading zero, or nothing but texts like 1E50, means codes"
    if not auto:
        raise DataError(
            f"{sheet.path}: {what}: {such}; name the columns in data.categorical, leave them out "
            "by data.drop, or write their numbers without it."
        )
    log.warning("%s: %s, which are categories and no numbers: %s.", sheet.path, what, such)


def _named(sheet: Sheet, name: str) -> tuple[str, ...]:
    names = tuple(sorted({text for text in sheet.texts(name) if text is not None}, key=in_order))
    _check_categories(name, len(names))
    return names


def _check_categories(name: str, count: int) -> None:
    """Refuses more categories than a column may have.

    Example:
        >>> _check_categories("stage", 4)
    """
    if count > _MOST_NAMED:
        what = f"Column {name} of data.categorical has {count} categories"
        mend = f"{_MOST_NAMED} are possible, so join some, or leave it out with data.features"
        raise ConfigError(f"{what}; {mend}.")


def _check_features(sheet: Sheet, names: Sequence[str]) -> None:
    if not names:
        raise DataError(f"{sheet.path} has no feature column; there is nothing to learn from.")
    if "" in names:
        what = f"{sheet.path} has a column without a name, perhaps row numbers"
        raise DataError(f"{what}; name it in the header line, or name the others in data.features.")


def in_order(text: str) -> tuple[float, str]:
    """Sorts categories: numbers by size, then texts.

    Example:
        >>> sorted(["b", "10", "9", "a"], key=in_order)
        ['9', '10', 'a', 'b']
    """
    return as_number(text), text


def recode(
    features: NDArray[np.float64], names: Sequence[str], old: Categories, new: Categories
) -> NDArray[np.float64]:
    """Gives categories (N, F) their positions in other lists; -1 where they are in none.

    Example:
        >>> recode(np.array([[0.0], [1.0]]), ["sex"], {"sex": ("m", "f")}, {"sex": ("f",)}).tolist()
        [[-1.0], [0.0]]
    """
    recoded = features.copy()
    for at, name in enumerate(names):
        if name in old:
            codes = [float(new[name].index(t)) if t in new[name] else -1.0 for t in old[name]]
            known = features[:, at] >= 0  # neither missing nor unknown
            recoded[known, at] = np.array([*codes, -1.0])[features[known, at].astype(int)]
    return recoded


log = logging.getLogger(__name__)

Outcome = Literal["classes", "continuous", "survival"]
Unlabelled = Literal["error", "drop"]
# Of two labels the later one in the alphabet is positive, as yes is in English only.
Values = Sequence[str | int | float]


@dataclass(frozen=True)
class Table:
    """A table in memory.

    Attributes:
        names: (F) names of the feature columns.
        features: (N, F) float64; a missing cell is NaN, a category its position in `categories`.
        labels: (N,) int64 class indices, or float64: outcomes; (N, 2) float64 times and events.
        classes: (K) class names, or the name of the outcome.
        patients: (N) patient id of every row.
        centres: (N) hospital of every row; empty where none is known.
        files: (N) file of every row; empty where there is none.
        categories: The categories of every column that has some; other columns hold numbers.
        splits: (N) official split of every row, None where it is open; empty where there is none.
        accounts: How many rows and cells of a file were taken.
    """

    names: tuple[str, ...]
    features: NDArray[np.float64]
    labels: NDArray[Any]
    classes: tuple[str, ...]
    patients: Sequence[str]
    centres: Sequence[str] = ()
    files: Sequence[Path] = ()
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    splits: Sequence[Split | None] = ()
    accounts: Sequence[Account] = ()

    def __post_init__(self) -> None:
        check_rows(self, len(self.classes))


_WITHOUT = ", remove the row, or leave out all rows without a label by data.unlabelled=drop"


@dataclass(kw_only=True)
class CsvOptions:
    """How a CSV file is read."""

    # Feature columns; None takes all that have no other role.
    features: Sequence[str] | None = None
    centre: str | None = None  # column with the hospital, for the natural partition
    patient: str | None = None  # column with the patient; None makes every row a patient
    # Label values that count as class 1; None makes every distinct value a class.
    positive: Values | None = None
    # Label values that count as class 0, if `positive` is given; None takes all others.
    negative: Values | None = None
    header: Sequence[str] | None = None  # column names of a file without a header line
    # What the label column of a CSV file holds: ``"classes"``, or ``"continuous"`` numbers;
    # ``"survival"`` has the columns `time` and `event` instead: 1 if it happened, else 0, unless
    # `positive` says otherwise.
    outcome: Outcome = "classes"
    drop: Sequence[str] = ()  # columns of a CSV file that are no features
    # What to do about rows of a CSV file without a label, or with one that is neither in `positive`
    # nor in `negative`: ``"error"`` or ``"drop"``.
    unlabelled: Unlabelled = "error"
    unplaced: Unlabelled = "error"  # the same about rows without a hospital
    # Column with the time of the event, or of the last visit of a patient without it.
    time: str | None = None
    # Columns of ISO dates of a CSV file, each with the column of the date from which its years
    # count, such as ``{"admission": "birth"}``; they become features.
    ages: Mapping[str, str] | None = None
    # Column with the official splits (train, val, test); None makes random ones.
    split: str | None = None
    # Further words of missing cells in a CSV file, such as ``["k.A.", -9]``; ``"not none"`` keeps a
    # usual one as a category. Numbers do not count for names of patients and hospitals.
    missing: Values = ()
    # What a cell such as ``<0.5`` is in a column of numbers of a CSV file: an error (``"refuse"``),
    # ``"half"`` of 0.5, or its ``"value"`` 0.5; ``>10`` is 10 with both.
    limits: Limits = "refuse"

    def __post_init__(self) -> None:
        if isinstance(self.missing, str):
            write = f"'data.missing=[{self.missing}]'"
            raise ConfigError(f"data.missing is a list of words; write {write}.")
        check_fields("data", self)


def read_csv(
    path: Path,
    label: str,
    categorical: Sequence[str] | Literal["auto"] = (),
    classes: Sequence[str] | None = None,
    **options: Any,
) -> Table:
    """Reads a CSV file; cells such as an empty one, ``?`` or ``NaN`` are missing.

    `label`: the label column, of survival the event. `categorical`: feature columns that hold
    categories, whatever they are written as, besides those that hold texts, which ``auto`` takes
    alone; an empty list takes none, see `find_kinds`. `classes`: those of a federation that the
    table joins, though its rows may lack some. `options`: see `CsvOptions`.
    """
    settings = CsvOptions(**options)
    time, centre, patient, split = settings.time, settings.centre, settings.patient, settings.split
    sheet = Sheet.read(path, settings.header, missing_words(settings.missing), settings.limits)
    answers = {"data.event": label, "data.time": time} if time else {"data.label": label}
    for key, answer in answers.items():
        if answer.lower() in {f.lower() for f in settings.features or ()}:
            what = f"data.features names {answer}, which is {key}"
            raise ConfigError(f"{what}: the model would see the answer.")
    roles = {**answers, "data.centre": centre, "data.patient": patient, "data.split": split}

    def columns(key: str, names: Sequence[str]) -> tuple[str, ...]:
        return check_names("column", names, sheet.columns, f"{path}, {key}: ")

    used = sum((columns(key, [name]) for key, name in roles.items() if name), ())
    columns(", ".join(key for key, name in roles.items() if name), used)
    used += columns("data.drop", settings.drop) if settings.drop else ()
    dates = [columns("data.ages", pair) for pair in (settings.ages or {}).items()]
    years = [f"years from {begin} to {end}" for end, begin in dates]
    sheet = sheet.aged(years)
    gone = {*used, *sum(dates, ())}
    names = tuple(c for c in sheet.columns if c not in gone)
    if settings.features is not None:
        wanted = [*settings.features, *(name for name in years if name not in settings.features)]
        names = columns("data.features", wanted)
    whole = sheet
    labels_of = settings.positive, settings.negative
    if settings.outcome == "classes" and settings.positive is None and classes is None:
        _check_ticks(sheet, label)
    if settings.unlabelled == "drop":
        both = [_label(str(value)) for values in labels_of for value in values or ()]
        known = None if None in labels_of else {*both}
        for answer in answers.values():
            sheet = sheet.labelled(answer, known if answer == label else None)
    sheet = sheet.placed(centre or "", settings.unplaced)
    names, categories = find_kinds(sheet, names, categorical, settings.features is not None)
    _say_words(whole, [*filter(None, (*answers.values(), centre, patient)), *categories])
    labels, named = (
        (_outcomes(sheet, label), (label,))
        if settings.outcome == "continuous"
        else _survival(sheet, label, time, *labels_of)
        if time
        else _classes(sheet, label, *labels_of, classes)
    )
    rows = [f"row_{number - 1}" for number in sheet.numbers]
    words = [word for word in settings.missing if as_number(str(word)) == float("inf")]
    whose = replace(sheet, missing=missing_words(words))
    patients = whose.names(patient) if patient else rows
    centres = whose.names(centre, csv_files.NOWHERE.format("data")) if centre else ()
    files = [path] * len(sheet)
    cells = csv_files.read_cells(sheet, names, categories)
    columns_of = {n: cells[:, at] for at, n in enumerate(names) if n not in categories}
    columns_of[label] = np.array([as_number(text or "") for text in sheet.texts(label)])
    _say_codes_of_missing(sheet, columns_of)
    official = official_splits(sheet, split)
    return Table(
        *(names, cells, labels, named, patients, centres, files, categories, official),
        accounts=_accounts_of(sheet, names, categories),
    )


def _say_words(sheet: Sheet, names: Sequence[str]) -> None:
    """Says which usual words of the columns are read as missing cells, and how to keep them."""
    remarks = [
        (f'"{word}" in {count} cells of {name[:60]}', f"not {word}")
        for name in names
        for word, count in sheet.words_missing(name).items()
        if word.lower() in csv_files.MISSING
    ]
    if remarks:
        listed, keys = zip(*remarks, strict=True)
        text = "%s: read as missing: %s; 'data.missing=[%s]' keeps such a word as a category."
        log.warning(text, sheet.path, few(listed, 8), ",".join(dict.fromkeys(keys)))


def _check_ticks(sheet: Sheet, label: str) -> None:
    """Refuses labels of which one is written as an empty cell."""
    texts = Counter(sheet.texts(label))
    if texts[None] and len(texts) == 2:
        one, count = next((text, n) for text, n in texts.items() if text is not None)
        what = f"{count} cells are {one[:60]!r} and the other {texts[None]} are missing"
        mend = "if that means no, write a label such as 0 there; otherwise there is one class only"
        raise DataError(f"{sheet.path}, column {label}: {what}; {mend}.")


def _say_codes_of_missing(sheet: Sheet, columns: Mapping[str, NDArray[np.float64]]) -> None:
    """Names numbers such as -999 that stand for missing cells where no other is below 0."""
    cells = dict[str, str]()
    for name, column in columns.items():
        counts = Counter(f"{value:g}" for value in column[column < 0])
        if {*counts} <= {*_NEVER} and (column >= 0).any():
            cells |= {f"{code} in {n} cells of {name}": code for code, n in counts.items()}
    if cells:
        codes = ",".join(sorted({*cells.values()}))
        text = "%s: numbers that may mean missing cells: %s; 'data.missing=[%s]' reads them so."
        log.warning(text, sheet.path, few([*cells], 8), codes)


def _accounts_of(sheet: Sheet, names: Sequence[str], categories: Categories) -> list[Account]:
    """Returns what was taken of a sheet: its rows, and their cells in the columns `names`."""
    rows = {
        why: (len(numbers), f"data row {numbers[0]}" * (numbers[0] > 0))
        for why, numbers in sheet.left_out.items()
    }
    lacking: dict[str, tuple[int, str]] = {}
    for name in names:
        missing = sheet.lacking(name, () if name in categories else csv_files.MISSING)
        for number, text, lacks in zip(sheet.numbers, sheet[name], missing, strict=True):
            if lacks:
                why = f"missing ({text})" if text else "empty"
                first = f"{name[:60]} in data row {number}"
                count, example = lacking.get(why, (0, first))
                lacking[why] = (count + 1, example)
    path, known = str(sheet.path), len(names) * len(sheet)
    known -= sum(count for count, _ in lacking.values())
    cells = Account(path, f"cells of {len(names)} features", known, lacking)
    return [Account(path, "rows", len(sheet), rows), cells]


def counted(path: Path, features: NDArray[np.float64], left: int = 0) -> tuple[Account, Account]:
    """Returns what was taken of a file of which only the values are known; see `_accounts_of`.

    Example:
        >>> rows, cells = counted(Path("a.csv"), np.array([[1.0, np.nan]]), 2)
        >>> rows.total, rows.taken, cells.total, cells.taken
        (3, 1, 2, 1)
    """
    gone, cells = int(np.isnan(features).sum()), f"cells of {features.shape[1]} features"
    rows = Account(str(path), "rows", len(features), {"incomplete": (left, "")} if left else {})
    missing = {"missing": (gone, "")} if gone else {}
    return rows, Account(str(path), cells, features.size - gone, missing)


def join_tables(tables: Mapping[str, Table]) -> Table:
    """Puts the tables of several hospitals below each other, with the union of categories.

    Example:
        >>> def of(*texts):
        ...     codes = np.arange(len(texts), dtype=float)[:, None]
        ...     labels, ids = np.zeros(len(texts), np.int64), texts
        ...     return Table(("sex",), codes, labels, ("no", "yes"), ids, categories={"sex": texts})
        >>> both = join_tables({"a": of("m"), "b": of("f", "m")})
        >>> both.features.ravel().tolist(), both.categories, both.centres
        ([1.0, 0.0, 1.0], {'sex': ('f', 'm')}, ['a', 'b', 'b'])
    """
    centre, first = next(iter(tables.items()))
    for name, table in tables.items():
        if (table.names, table.classes) != (first.names, first.classes):
            raise DataError(
                f"{name} has the columns {few(table.names)} and the classes {few(table.classes)}, "
                f"but {centre} {few(first.names)} and {few(first.classes)}; name them alike."
            )
        if set(table.categories) != set(first.categories):
            odd = min(set(table.categories) ^ set(first.categories))
            raise DataError(
                f"Column {odd} holds texts at one of {centre} and {name} and numbers at the other; "
                "mend one, or name the column in data.categorical."
            )
    of = {c: [t.categories[c] for t in tables.values()] for c in first.categories}
    union = {c: tuple(sorted(set().union(*texts))) for c, texts in of.items()}
    parts = [recode(t.features, t.names, t.categories, union) for t in tables.values()]
    return Table(
        first.names,
        np.concatenate(parts),
        np.concatenate([t.labels for t in tables.values()]),
        first.classes,
        patients=[p for t in tables.values() for p in t.patients],
        centres=[name for name, t in tables.items() for _ in t.patients],
        files=[file for t in tables.values() for file in t.files],
        categories=union,
        accounts=[account for t in tables.values() for account in t.accounts],
    )


def with_categories(table: Table, names: Sequence[str]) -> Table:
    """Takes the numbers of some columns for categories.

    Example:
        >>> cells, labels = np.array([[4.0], [np.nan], [2.0]]), np.zeros(3, np.int64)
        >>> table = Table(("cp",), cells, labels, ("no", "yes"), ["a", "b", "c"])
        >>> found = with_categories(table, ["cp"])
        >>> found.features.ravel().tolist(), dict(found.categories)
        ([1.0, nan, 0.0], {'cp': ('2', '4')})
    """
    known = check_names("column", names, table.names, "data.categorical: ") if names else ()
    features, categories = table.features.copy(), dict(table.categories)
    for name in known:
        column = features[:, table.names.index(name)]
        if name not in categories:
            values, codes = np.unique(column, return_inverse=True)
            values = values[~np.isnan(values)]
            _check_categories(name, len(values))
            column[:] = np.where(np.isnan(column), np.nan, codes)
            categories[name] = tuple(tidy(repr(float(v))) for v in values)
    return replace(table, features=features, categories=categories)


def _outcomes(sheet: Sheet, name: str, what: str = "outcome") -> NDArray[np.float64]:
    """One number per row."""
    cells = sheet.known(name, _WITHOUT)
    outcomes = np.array([as_number(text) for text in sheet.with_points(cells)])
    if len(odd := np.flatnonzero(~np.isfinite(outcomes))):
        text = cells[odd[0]]
        mend = f"write {csv_files.meant(text) or 'a number'}, or name another column"
        mend += " or set data.outcome=classes" * (what == "outcome")
        what = f"the {what} {text[:60]!r} is not a number; {mend}"
        raise sheet.bad(odd[0], f", column {name}: {what}.")
    return outcomes


def _survival(
    sheet: Sheet, event: str, time: str, positive: Values | None, negative: Values | None
) -> tuple[NDArray[np.float64], tuple[str, ...]]:
    """Time and event per row, and the names of the two states."""
    states = {_label(text) for text in sheet.known(event, _WITHOUT)}
    if positive is None and len(states) == 2 and not states <= {"0", "1"}:
        what = f"{sheet.path}, column {event}: the values are {few(sorted(states))}, not 1 and 0"
        such = f"data.positive=[{max(states)}]"
        raise DataError(f"{what}; say which one means that the event happened, such as {such}.")
    if positive is None:
        positive, negative = [1], [0] if negative is None else negative
    happened, _ = _classes(sheet, event, positive, negative)
    times = _outcomes(sheet, time, "time")
    if len(odd := np.flatnonzero(times < 0)):
        what = f"the time {times[odd[0]]:g} is negative; mend the row"
        raise sheet.bad(odd[0], f", column {time}: {what}.")
    return np.stack([times, happened.astype(float)], axis=1), ("no event", "event")


def _label(text: str) -> str:
    """A label, of which 1 and 1.0 are the same."""
    return tidy(fold(text))


def _classes(
    sheet: Sheet,
    label: str,
    positive: Values | None,
    negative: Values | None,
    joined: Sequence[str] | None = None,
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Class index per row, and the class names."""
    values = sheet.names(label, _WITHOUT, _label)
    if positive is not None:
        wanted = {_label(str(p)) for p in positive}
        known = set(values) if negative is None else {_label(str(n)) for n in negative}
        _check_labels(sheet, values, wanted if joined is None else set(), known | wanted)
        rest = Counter(v for v in values if v not in wanted)
        if negative is None and len(rest) > 1:
            listed = few([f"{value[:40]} ({count})" for value, count in rest.most_common()], 8)
            text = "%s: beside data.positive all labels count as negative: %s; see data.negative."
            log.warning(text, sheet.path, listed)
        return np.array([v in wanted for v in values], dtype=np.int64), ("negative", "positive")
    if joined is not None:
        _check_labels(sheet, values, set(), {*joined})
        return np.array([joined.index(v) for v in values], dtype=np.int64), tuple(joined)
    names = sorted(set(values), key=lambda v: (as_number(v), v))
    if len(names) < 2 or len(names) > 50:
        raise DataError(
            f"{sheet.path}: the label column has {len(names)} distinct value(s); 2 to 50 classes "
            "are possible. Name the column in data.label, or the values of class 1 in "
            "data.positive; a measurement needs data.outcome=continuous model=linear."
        )
    if len(values) >= 10 and len(names) > 2 and 2 * len(names) > len(values):
        raise DataError(
            f"{sheet.path}: the label column has {len(names)} distinct values in {len(values)} "
            "rows, so it is probably an id or a measurement; name another one in data.label, or "
            "set data.outcome=continuous model=linear."
        )
    if lone := [name for name, count in Counter(values).items() if count == 1 and len(names) > 2]:
        log.warning("%s: the class %s has a single row.", sheet.path, lone[0][:60])
    if (yes := looks.which_is_yes(names)) is not None:
        what = f"{sheet.path}: the labels {names[0]} and {names[1]} look like yes and no"
        mend = f"say which one is the positive class, such as data.positive=[{yes}]"
        raise DataError(f"{what}; {mend}.")
    if len(names) == 2 and as_number(names[1]) == float("inf"):
        text = "%s: the positive class is %s, not %s; set data.positive to change this."
        log.info(text, sheet.path, names[1][:60], names[0][:60])
    index = {name: i for i, name in enumerate(names)}
    return np.array([index[v] for v in values], dtype=np.int64), tuple(names)


def _check_labels(sheet: Sheet, values: Sequence[str], wanted: set[str], known: set[str]) -> None:
    """Refuses labels that are neither positive nor negative, and positives that never occur."""
    for at, value in enumerate(values):
        if value not in known:
            listed = ", ".join(sorted(known))
            raise sheet.bad(at, f": the label {value[:60]} is none of {listed}; mend the row.")
    if wanted and not wanted & set(values):
        what = f"{sheet.path}: no row has a label of data.positive ({', '.join(sorted(wanted))})"
        those = f"the labels are {', '.join(v[:40] for v in sorted(set(values))[:10])}"
        raise DataError(f"{what}; {those}.")


# Columns of survival: when, and whether it happened.
_TIME = re.compile(
    r"(.*[\W_])?(time|days?|months?|survival|duration|tte|tage?|zeit)([\W_].*)?", re.I
)
_EVENT = re.compile(
    r"event|status|dead|death|died|relapse|recurrence|progress|ereignis|tod", re.IGNORECASE
)
_CATEGORIES = ("none", "NONE", "null")  # no program's None or NaN: perhaps a grade, or zero
_NEVER = ("-9", "-99", "-999", "-9999")  # of columns whose other numbers are not below 0


def looks_like(path: Path, answers: looks.Answers) -> looks.Guess | None:
    """Guesses what the columns of a table hold; see `looks`."""
    tables = [f for f in looks.visible(path) if f.suffix.lower() in (".csv", ".tsv")]
    tables = [path] if path.is_file() else [f for f in tables if f.name != "centres.csv"]
    if len(tables) > 1:
        return looks.several("csv", path, tables)
    other = path.suffix.lower() in (".npz", ".json", *SUFFIXES, ".gz") or is_volume(path)
    if not tables or other or looks.index_of(tables[0]):
        return None
    header = answers.get("data.header")
    sheet = Sheet.read(tables[0], header) if header else looks.sheet_of(tables[0])
    sheet = replace(sheet, missing=missing_words(answers.get("data.missing") or ()))
    guess = looks.Guess("csv", tables[0], sure=path.is_file())
    if all(as_number(name) < float("inf") for name in sheet.columns):
        guess.ask("data.header", "The first line holds numbers. What are the names of the columns?")
        return guess
    dropped = answers.get("data.drop") or []
    label_key = "data.event" if "data.event" in answers else "data.label"
    label = looks.label_of(guess, sheet, label_key, answers, dropped)
    looks.roles(guess, sheet, "data.", answers, [str(label), *dropped])
    centre = {**guess.keys, **answers}.get("data.centre")
    used = {str(label), *dropped, *guess.keys.values(), answers.get("data.patient")}
    others = {c: of for c, of in looks.distinct(sheet).items() if c not in used}
    _ask_cells(guess, sheet, answers, others, label)
    if "data.missing" in guess.asks:
        return guess  # the answer says which rows have a label, and which labels there are
    for key, column in (("data.unlabelled", label), ("data.unplaced", centre)):
        if column and sheet.has(column) and (lacking := sheet.texts(column).count(None)):
            no = f"no {column}{sheet.named_missing(column)}"
            question = f"{lacking} of {len(sheet)} rows have {no}. Leave them out?"
            guess.ask(key, question, "drop", ("drop", "error"))
    if label is not None and sheet.has(label):
        _ask_label(guess, sheet, label, answers)
    return guess


def _ask_label(guess: looks.Guess, sheet: Sheet, label: str, answers: looks.Answers) -> None:
    """Asks which of two labels is positive."""
    names = sorted({text for text in sheet.texts(label) if text is not None}, key=in_order)
    times = [c for c in sheet.columns if _TIME.fullmatch(c) and c != label]
    if _EVENT.search(label) and len(names) == 2 and times:
        text = f"Is {times[0]} the time of {label} or of the last visit, so that survival counts?"
        guess.ask("data.time", text, times[0], (*times, looks.NO))
    if answers.get("data.time"):
        guess.keys |= {"data.outcome": "survival", "data.event": label, "model": "survival"}
    if answers.get("data.outcome") or answers.get("data.time") or answers.get("data.positive"):
        return
    numbers = map(as_number, sheet.with_points(names))
    if len(names) > looks.MANY and all(n < float("inf") for n in numbers):
        guess.keys |= {"data.outcome": "continuous", "model": "linear"}
        guess.took.append(("outcome", "continuous", "probably: many different numbers"))
    elif len(names) == 2 and looks.is_plainly_positive(names):
        guess.took.append(("positive class", names[1], "probably: its name; data.positive"))
    elif len(names) == 2:
        best = looks.which_is_yes(names) or names[1]
        guess.ask("data.positive", f"Which label of {label} is the positive class?", [best], names)


def _ask_missing(guess: looks.Guess, lacking: Names, sheet: Sheet, columns: set[str]) -> None:
    """Asks which words stand for missing cells; ``none`` among words is probably a category."""
    kinds = {c: texts for c, texts in looks.distinct(sheet).items() if c in columns}
    answers = {
        name: counts
        for name, texts in kinds.items()
        if 0 < len(texts) <= _MOST_FOUND and not any(map(csv_files.like_a_number, texts))
        if (counts := {w: n for w, n in sheet.words_missing(name).items() if w in _CATEGORIES})
    }
    words = sorted({word for counts in answers.values() for word in counts})
    questions = [f"Do {few(lacking, 12)} among numbers stand for missing cells?"] * bool(lacking)
    if words:
        where = few([f"{sum(of.values())} cells of {c}" for c, of in answers.items()], 8)
        no = [f"not {word}" for word in words]
        questions.append(f"Is {few(words)} in {where} a category ({few(no)}), or a missing cell?")
    if questions:
        best = [*lacking, *(f"not {word}" for word in words)]
        guess.ask("data.missing", " ".join(questions), best, (looks.NO,))


def _ask_cells(
    guess: looks.Guess,
    sheet: Sheet,
    answers: looks.Answers,
    kinds: Mapping[str, set[str]],
    label: str | None,
) -> None:
    """Asks about cells that are no numbers in columns of numbers."""
    lacking: set[str] = set()
    limited, others = [], dict[str, list[str]]()
    for name, every in kinds.items():
        texts = [text for text in every if text.lower() not in csv_files.MISSING]
        numbers = [as_number(t) for t in sheet.with_points([*texts])]
        odd = [t for t, n in zip(texts, numbers, strict=True) if n == float("inf")]
        if all(n >= 0 or t in _NEVER for t, n in zip(texts, numbers, strict=True)):
            lacking |= {t for t in texts if t in _NEVER}
        some = any(map(csv_files.like_a_number, texts)) and not code_among(texts)
        if not odd or not some or all(map(csv_files.is_date, texts)):
            continue
        limits = [t for t in odd if t[0] in "<>≤≥" and csv_files.is_limit(t)]
        plain = [t for t in odd if not any(map(str.isdigit, t))]
        if len(plain) > 3 or len(odd) > len(limits) + len(plain):
            others[name] = odd
            continue
        lacking |= {*plain}
        limited += limits
        refused = limits if answers.get("data.limits") == "refuse" else []
        if wrong := [*(plain if "data.missing" in answers else ()), *refused]:
            others[name] = wrong
    if "data.missing" not in answers:
        _ask_missing(guess, sorted(lacking), sheet, {*kinds, label or ""})
    if limited:
        question = f"What are limits among numbers, such as {limited[0]}?"
        guess.ask("data.limits", question, "half", ("half", "value", "refuse"))
    if others:
        listed = few([f"{name} ({few(sorted(odd), 3)})" for name, odd in others.items()], 12)
        question = f"Numbers and texts are mixed in {listed}. Leave these columns out?"
        guess.ask("data.drop", question, [*(answers.get("data.drop") or []), *others], (looks.NO,))
