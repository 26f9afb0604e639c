"""Learns from training rows how the columns of a table become inputs.

Only training rows determine the scaling of numbers:

- ``standard``: less the mean, divided by the deviation, as by scikit-learn's ``StandardScaler``; a
  missing cell becomes the median. Values beyond 3 interquartile ranges from the quartiles (Tukey,
  "Exploratory Data Analysis", 1977: "far out") count as that limit, so that none rules the others.
- ``minmax``: a rounded range of nearly all values (see `value_range`) becomes -1 to 1, and values
  beyond it its ends; a missing cell becomes 0. No end is a patient's value.
- ``exact_minmax``: as ``minmax``, with the smallest and the largest value, each of one patient; for
  public data. One outlier squeezes all other values.
- ``none``: as they are, to repeat what others did; a missing cell becomes the median.

Before training, log lines list the changes, and the columns without information.
"""

from __future__ import annotations

import math
from typing import Literal

from medfed.common.floors import CATEGORY, LEAST
from medfed.datamodules.extending import *
from medfed.functional.scores import area
from medfed.standalone.columns import Array, Columns, MinMax, Scaling, Standard

Normalization = Literal["standard", "minmax", "exact_minmax", "none"]
ByClient = Mapping[str, Array]
_ANY = 1e30  # readers refuse larger numbers
_FAR = 3.0  # interquartile ranges
_CODES = 10  # different values of a column, or of a label, that may be codes
_TELLS = 0.99  # AUROC or rank correlation of a possible leak
_FEWEST = 10  # rows of a class and of all others
_ROWS = 50  # from which different whole numbers in all rows are remarkable


def fit(name: Normalization, train: Array) -> Scaling:
    """Learns a scaling from (N, P) training values; NaN is missing."""
    if name == "none":
        zeros, ones = np.zeros(train.shape[1]), np.ones(train.shape[1])
        return Standard(-_ANY * ones, _ANY * ones, limits(train)[1], zeros, ones)
    return fit_standard(train) if name == "standard" else fit_minmax(name, train)


def fit_minmax(name: Normalization, train: Array) -> MinMax:
    """Learns both ends, rounded or exact.

    Example:
        >>> train = np.array([[31.4, np.nan], [70.2, np.nan]])
        >>> fit_minmax("exact_minmax", train).maximum.tolist()
        [70.2, 0.0]
        >>> fit_minmax("minmax", train).maximum.tolist()
        [80.0, 0.0]
    """
    if name == "minmax":
        low, high = map(np.nan_to_num, value_range(train, least=1))
        return MinMax(low, high)
    # For a column without values NumPy would warn and give NaN.
    known = np.where(np.isnan(train).all(axis=0), 0.0, train)
    return MinMax(np.nanmin(known, axis=0), np.nanmax(known, axis=0), exact=True)


def fit_standard(train: Array) -> Standard:
    """Learns limits, median, mean and deviation of the values; without any, a column is 0."""
    low, median, high = limits(train)
    clipped = np.clip(train, low, high)
    count = (~np.isnan(train)).sum(axis=0)
    rest = clipped - median
    mean, sd = moments(count, median, np.nansum(rest, 0), np.nansum(rest**2, 0))
    return Standard(low, high, median, mean, sd)


def moments(count: Array, about: Array, total: Array, squares: Array) -> tuple[Array, Array]:
    """Mean and deviation (divided by N) of P columns, from sums of differences and their squares.

    Example:
        >>> one = np.ones(1)
        >>> [x.tolist() for x in moments(2 * one, 5 * one, 2 * one, 4 * one)]  # of 5 and 7
        [[6.0], [1.0]]
    """
    shift = total / np.maximum(count, 1)
    variance = np.maximum(squares / np.maximum(count, 1) - shift**2, 0)
    # A deviation from rounding errors of a constant column counts as 0.
    constant = np.sqrt(variance) <= 1e-9 * np.maximum(np.abs(about + shift), np.abs(shift))
    return about + shift, np.where(constant, 1.0, np.sqrt(variance))


def limits(train: Array) -> tuple[Array, Array, Array]:
    """(P,) limits beyond which values of (N, P) are far out, and the medians between them.

    They are 3 interquartile ranges beyond the quartiles. If a quarter of the values or more are
    equal, such as zeros, the quartiles are those of the other values together with that value.
    """
    table = np.zeros((3, train.shape[1]))
    for at, column in enumerate(train.T):
        known = column[~np.isnan(column)]
        if len(known):
            table[:, at] = _limits(known)
    low, median, high = table
    return low, median, high


def _limits(values: Array) -> tuple[float, float, float]:
    median = float(np.median(values))
    distinct, counts = np.unique(values, return_counts=True)
    top = np.lexsort((-np.abs(distinct - median), counts))[-1]
    common, often = distinct[top], counts[top] > 1 and 4 * counts[top] >= len(values)
    others = values[values != common] if often else values
    first, third = np.quantile(others if len(others) else values, (0.25, 0.75))
    if often:
        first, third = min(first, common), max(third, common)
    reach = _FAR * (third - first)
    return float(first - reach), median, float(third + reach)


def value_range(train: Array, least: int = 0, share: float = 0.025) -> tuple[Array, Array]:
    """A rounded range of nearly all of (N, P) training values, whose ends are no patient's.

    From the share `share` of the values below to that above, or from the second to the last but
    one; where these are not a few codes, a quarter of that width further, and the whole where few
    values are known; outwards to two digits of it. NaN where fewer than `least` are known.
    """
    ends = np.full((2, train.shape[1]), np.nan)
    for at, column in enumerate(train.T):
        known = column[~np.isnan(column)]
        if len(known) < (least or LEAST):
            continue
        cut = min(max(share, 1 / max(len(known) - 1, 1)), 0.25)  # no end follows one value alone
        low, high = np.quantile(known, (cut, 1 - cut)).tolist()
        width, few = high - low, len(known) < LEAST
        if few and not width:
            continue
        if few or len(np.unique(known)) > _CODES:
            margin = width if few else width / 4
            low, high = low - margin, high + margin
        digits = 1 - math.floor(math.log10(width)) if width > 0 else 2
        ends[:, at] = [_outwards(low, math.floor, digits), _outwards(high, math.ceil, digits)]
    return ends[0], ends[1]


def _outwards(value: float, to: Callable[[float], int], digits: int) -> float:
    scale = 10.0**digits
    return round(to(round(value * scale, 6)) / scale, max(digits, 0))


log = logging.getLogger("medfed.datamodules.tables.datamodule")
_END = r"([ _-]?(id|no|nr|num|number|nummer|name|code|kennung|番号|号))?"
_HOSPITALS = (
    "hosp(ital)?|centre|center|site|institution|clinic|klinik(um)?|krankenhaus|spital|zentrum"
    "|standort|einrichtung|h[oô]pital|clinique|[eé]tablissement|centro|cl[ií]nica|ospedale|sede"
    "|institución|instituição|ziekenhuis|centrum|sjukhus|sygehus|sykehus|sairaala|szpital|ośrodek"
    "|(redcap_)?data_access_group|nemocnice|kórház|hastane|больница|клиника|центр|病院|施設|医院|中心|병원|기관|sito|sitio|standplaats|lieu"
)
_PATIENTS = (
    "patient(en|in)?|record_id|study_id|subject|person|participant|mrn|pid|fallnummer|paciente?|paziente|pati[eë]nt|pacjent"
    "|potilas|hasta|пациент|患者|病人|환자"
)
HOSPITAL = re.compile(rf"({_HOSPITALS}){_END}", re.IGNORECASE)
PATIENT = re.compile(rf"({_PATIENTS}){_END}|id", re.IGNORECASE)


def say(columns: Columns, train: ByClient, scalings: Mapping[str, Scaling]) -> None:
    """Logs the changes to training cells (N, F) of every client, one line each."""
    rows, names = np.concatenate(list(train.values())), columns.names
    standard = any(isinstance(scaling, Standard) for scaling in scalings.values())
    gaps = np.isnan(rows).mean(axis=0)
    shares = [f"{names[at]} {100 * gaps[at]:.0f} %" for at in np.flatnonzero(gaps)]
    if shares and standard:
        beside = "; an indicator marks them" if columns.indicators else ""
        log.info("Missing training cells become the median%s: %s.", beside, few(shares, 8))
    far: Counter[str] = Counter()
    for client, scaling in scalings.items():
        if isinstance(scaling, Standard):
            values = train[client][:, columns.numeric]
            counts = np.sum((values < scaling.low) | (values > scaling.high), axis=0)
            far.update({names[at]: int(n) for at, n in zip(columns.numeric, counts, strict=True)})
    if far := +far:
        what = "Training values far from all others (3 interquartile ranges beyond the quartiles)"
        listed = few([f"{count} of {name}" for name, count in far.most_common()], 8)
        log.warning("%s are set to that limit: %s.", what, listed)
    if alike := [n for n in _constant(names, rows) if n not in columns.indicators]:
        log.warning("One value in all training rows, so without information: %s.", few(alike, 8))


def outcome_remarks(mean: float, sd: float) -> list[str]:
    """Says of an outcome that tables would show nothing of it; refuses one that would be rounded.

    Example:
        >>> outcome_remarks(7.4, 0.05), outcome_remarks(310.0, 0.5)
        ([], [])
        >>> outcome_remarks(5e-9, 4e-9)
        ['The outcome deviates by 4e-09, less than tables show; change its unit.']
    """
    if sd < 1e-5 * abs(mean):
        raise DataError(
            f"The outcome (data.label) is about {mean:.8g} and deviates by {sd:.2g}, which single "
            f"precision would round; subtract a constant such as {mean:.3g} from the column."
        )
    advice = "less than tables show; change its unit."
    return [f"The outcome deviates by {sd:.2g}, {advice}"] * (sd < 0.01)


def class_remarks(classes: Names, mend: str) -> list[str]:
    """Says of classes that are many different numbers that they look like a measurement.

    Example:
        >>> class_remarks([str(age) for age in range(40, 84)], "set model=linear")
        ['The labels are 44 different numbers, each of which is a class; if they measure \
something, such as an age, set model=linear.']
        >>> class_remarks([str(digit) for digit in range(10)], "set model=linear")
        []
    """
    if len(classes) <= _CODES or not all(as_number(name) < math.inf for name in classes):
        return []
    what = f"The labels are {len(classes)} different numbers, each of which is a class"
    return [f"{what}; if they measure something, such as an age, {mend}."]


def constant_remarks(names: Sequence[str], train: ByClient) -> list[str]:
    """Remarks on columns that are constant or empty at a hospital, but not at all of them.

    Example:
        >>> constant_remarks(["age", "sex"], {"A": np.array([[5, 1], [6, 1]]), "B": np.eye(2)})
        ['All training rows of a hospital have one value of a column, which tells nothing there: sex at A.']
        >>> constant_remarks(["age"], {"A": np.array([[5.0]]), "B": np.array([[np.nan]])})
        ['No training row of a hospital has a value of a column: age at B.']
    """  # noqa: E501
    one = "All training rows of a hospital have one value of a column, which tells nothing there"
    none, remarks = "No training row of a hospital has a value of a column", list[str]()
    for what, columns_of in ((one, _constant), (none, _empty)):
        everywhere = columns_of(names, np.concatenate(list(train.values())))
        by_client = {client: columns_of(names, rows) for client, rows in train.items()}
        pairs = [f"{n} at {c}" for c, of in by_client.items() for n in of if n not in everywhere]
        remarks += [f"{what}: {few(pairs, 8)}."] if pairs else []
    return remarks


def _empty(names: Names, rows: Array) -> list[str]:
    columns = zip(names, rows.T, strict=True)
    return [name for name, column in columns if len(column) and np.isnan(column).all()]


def _constant(names: Names, rows: Array) -> list[str]:
    known = [column[~np.isnan(column)] for column in rows.T]
    return [n for n, c in zip(names, known, strict=True) if len(c) > 1 and np.ptp(c) == 0]


def leak_remarks(
    names: Names, categories: Mapping[str, Names], train: ByClient, labels: ByClient
) -> list[str]:
    """Remarks on columns that alone predict the label in training, or number the rows.

    Example:
        >>> rows = np.array([[n % 7, n % 7 > 2, 100 + 3 * n] for n in range(60)], dtype=float)
        >>> train, dead = {"A": rows}, {"A": rows[:, 1].astype(int)}
        >>> for remark in leak_remarks(["age", "autopsy", "mrn"], {}, train, dead):
        ...     print(remark)
        Columns that alone predict the label in training, with their AUROC: age (1.000), autopsy (1.000). Leave out what is known only after the outcome: 'data.drop=[age,autopsy]'.
        Columns with a different whole number in every training row, as identifiers have: mrn. Leave out those that are none of a patient's measurements: 'data.drop=[mrn]'.
    """  # noqa: E501
    rows, answers = np.concatenate(list(train.values())), np.concatenate(list(labels.values()))
    alone, numbered = leaks(names, categories, rows, answers)
    sentences = []
    if alone:
        measure = "AUROC" if answers.dtype.kind == "i" else "rank correlation"
        measure += " or AUROC" * (answers.ndim == 2)
        what = f"Columns that alone predict the label in training, with their {measure}"
        mend = f"Leave out what is known only after the outcome: 'data.drop=[{','.join(alone)}]'"
        sentences.append(f"{what}: {few(list(alone.values()), 8)}. {mend}.")
    if numbered:
        what = "Columns with a different whole number in every training row, as identifiers have"
        drop = f"'data.drop=[{','.join(numbered)}]'"
        mend = f"Leave out those that are none of a patient's measurements: {drop}"
        sentences.append(f"{what}: {few(numbered, 8)}. {mend}.")
    return sentences


def leaks(
    names: Sequence[str], categories: Collection[str], rows: Array, labels: NDArray[Any]
) -> tuple[dict[str, str], list[str]]:
    """Finds the columns that alone predict the label, in words, and those like identifiers.

    Labels (N,) are classes or outcomes; (N, 2) are times and events.
    """
    outcomes = labels if labels.dtype.kind == "f" else None
    classes = labels if outcomes is None else np.zeros(len(labels), int)
    if labels.ndim == 2:
        outcomes, classes = labels[:, 0], labels[:, 1].astype(int)
    alone: dict[str, str] = {}
    numbered = []
    for name, column in zip(names, rows.T, strict=True):
        known = ~np.isnan(column)
        cells = column[known]
        if (auroc := _auroc(cells, classes[known], name in categories)) >= _TELLS:
            alone[name] = f"{name} ({auroc:.3f})"
        elif (auroc := _auroc(known.astype(float), classes, False)) >= _TELLS:
            alone[name] = f"whether {name} is missing ({auroc:.3f})"
        elif outcomes is not None and (rho := _rank_correlation(cells, outcomes[known])) >= _TELLS:
            alone[name] = f"{name} ({rho:.3f})"
        different = len(np.unique(cells)) == len(cells) >= _ROWS and (cells % 1 == 0).all()
        if different and name not in categories:
            numbered.append(name)
    return alone, numbered


def _rank_correlation(cells: Array, outcomes: Array) -> float:
    """Spearman's, without its sign; 0 where too few rows or only one value are known."""
    if len(cells) < 2 * _FEWEST or np.ptp(cells) == 0 or np.ptp(outcomes) == 0:
        return 0.0
    from scipy import stats  # imported here: naming a reader needs none

    return abs(float(stats.spearmanr(cells, outcomes).statistic))


def _auroc(cells: Array, classes: Array, categorical: bool) -> float:
    """The best AUROC of (N,) cells for one class; 0 where a class has too few rows."""
    best = 0.0
    for number in np.unique(classes):
        positive = classes == number
        if min(positive.sum(), (~positive).sum()) < _FEWEST:
            continue
        scores = cells
        if categorical:  # the share of the class among the rows of a category
            codes = np.unique(cells, return_inverse=True)[1]
            scores = (np.bincount(codes, positive) / np.bincount(codes))[codes]
        auroc = float(area(scores, positive, np.ones((1, len(scores))))[0])
        best = max(best, auroc, 1 - auroc)
    return best


def role_remarks(names: Sequence[str], centre: str | None, patient: str | None) -> list[str]:
    """Remarks on columns that look like hospitals or patients, if the user has named none.

    Example:
        >>> role_remarks(["age", "Hospital"], None, None)
        ['If the column Hospital names the hospitals, set data.centre=Hospital.']
        >>> role_remarks(["age", "patient_id"], "place", None)
        ['If the column patient_id identifies patients, set data.patient=patient_id: otherwise the \
rows of one patient may be in several splits.']
    """
    sentences = []
    for name in names:
        if centre is None and HOSPITAL.fullmatch(name):
            sentences.append(f"If the column {name} names the hospitals, set data.centre={name}.")
        if patient is None and PATIENT.fullmatch(name):
            mend = f"If the column {name} identifies patients, set data.patient={name}"
            why = "otherwise the rows of one patient may be in several splits"
            sentences.append(f"{mend}: {why}.")
    return sentences


def say_unknown(columns: Columns, rows: Array) -> None:
    """Logs columns with categories that have no input; (N, F) rows, -1 for these."""
    for name in columns.categories:
        if count := int((rows[:, columns.names.index(name)] < 0).sum()):
            rare = f"fewer than {CATEGORY} training patients of every client have"
            text = "Rows whose category of %s %s: %d; they count as having none."
            log.warning(text, name, rare, count)
