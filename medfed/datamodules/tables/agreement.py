"""The agreement of clients with tables before training, and its messages.

All needed facts travel as JSON through the server, and their bytes are counted: which columns have
missing cells, the names of categories, sums of a continuous outcome, and with pooled scaling counts
and sums. No row leaves a client. Training uses the decoded messages. Each client's half and the
server's are generators, so that the same messages pass within one process and between hospitals.
Messages are not trusted when they are read.

- Indicators: of the columns in which any client misses a training cell.
- Categories: the sorted union of those in training rows.
- A continuous outcome: its mean and deviation over all training rows, the units of all clients'
  models. Each client sends a count and two sums, not the summands.
- Pooled standardisation: each client sends, per column, its number of values and that number times
  its own median and limits; the sums give the means that all clients take. Then each sends sums and
  sums of squares of its values within these limits, which give the mean and standard deviation of
  all training rows together. A mean of medians is not the median of all rows, but no outlier moves
  it, and no one sees the summands of the sums.
- Pooled scaling by minimum and maximum: each client sends its own.
- ComBat: as pooled standardisation; also the names of columns of at most two values, and sums of
  products with the covariates.

ComBat of columns of numbers across hospitals is fitted by sums that hospitals send: Johnson, Li and
Rabinovic, "Adjusting batch effects in microarray expression data using empirical Bayes methods",
Biostatistics 2007; by messages: Chen et al., "Privacy-preserving harmonization via distributed
ComBat", NeuroImage 2022. Column f of row j at hospital i is

    y_ijf = alpha_f + x_ij beta_f + sigma_f (gamma_if + delta_if e_ijf).

============  ================  =================================================================
symbol        here              fitted by
============  ================  =================================================================
alpha, sigma  ``Combat.whole``  least squares with a constant per hospital, from the sums of all
beta          ``slopes``        hospitals (`pooled_fit`)
gamma, delta  `harmonised`      empirical Bayes over the columns of a hospital, which sends nothing
============  ================  =================================================================

The adjusted value is linear in the row, so that a bundle holds it as a scaling. Covariates x, and
columns that have at most two values everywhere, are not adjusted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypedDict, TypeVar

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from medfed.common.errors import DataError
from medfed.common.floors import CATEGORY
from medfed.common.schemas import parse_json
from medfed.datamodules.base import Exchanged
from medfed.datamodules.readers.samples import Index
from medfed.datamodules.readers.table import in_order
from medfed.datamodules.tables import columns
from medfed.datamodules.tables.columns import Normalization
from medfed.functional.survival import BINS, histogram, quantile_cuts
from medfed.standalone.columns import Array, Columns, MinMax, Scaling, Standard
from medfed.standalone.csv_files import Categories

Agreed = TypeVar("Agreed")
Merging = Generator[bytes, Sequence[bytes], None]
_map: Any = TypedDict  # made of what a run asks for
_Sum = Annotated[float, Meta(gt=-1e300, lt=1e300)]  # of table cells, which are below 1e30
_ENOUGH = 3  # columns from which a prior can be fitted
_STEPS, _CLOSE = 10_000, 1e-13


def sums_with(covariates: Sequence[int], apart: Array) -> dict[str, list[float]]:
    """Sums over the known cells of each column, of covariates, their products, and with the cells.

    Args:
        covariates: (K,) their positions.
        apart: (N, P) cells, less the medians of all; NaN is missing.
    """
    cells, known = np.nan_to_num(apart), (~np.isnan(apart)).astype(float)
    x = cells[:, covariates]
    sums = known.T @ x, np.einsum("np,nk,nl->pkl", known, x, x), cells.T @ x
    return {n: values.ravel().tolist() for n, values in zip(("x", "xx", "xy"), sums, strict=True)}


def pooled_fit(
    sums: Sequence[Mapping[str, Sequence[float]]], median: Array, covariates: int
) -> tuple[Array, Array, Array]:
    """Least squares with a constant per hospital, from every hospital's sums.

    Args:
        sums: Per hospital ``count``, ``sum`` and ``squares`` of the cells less the median, and
            those of `sums_with`.
        median: (P,).
        covariates: K.

    Returns:
        (P,) mean, (P,) deviation within hospitals, 1 where it is 0, and (P, K) slopes.

    Example:
        >>> none = {"x": [], "xx": [], "xy": []}
        >>> one = {"count": [2], "sum": [4], "squares": [10]} | none  # of 1 and 3
        >>> two = {"count": [2], "sum": [12], "squares": [74]} | none  # of 5 and 7
        >>> [x.tolist() for x in pooled_fit([one, two], np.zeros(1), 0)]
        [[4.0], [1.0], [[]]]
    """
    shape, k = (len(sums), len(median)), covariates
    sizes = {"count": (), "sum": (), "squares": (), "x": (k,), "xx": (k, k), "xy": (k,)}
    n, y, yy, x, xx, xy = (
        np.array([one[name] for one in sums], dtype=float).reshape(*shape, *more)
        for name, more in sizes.items()
    )
    each, whole = np.maximum(n, 1), np.maximum(n.sum(axis=0), 1)
    inner = (xx - x[..., None] * x[..., None, :] / each[..., None, None]).sum(axis=0)
    outer = (xy - x * (y / each)[..., None]).sum(axis=0)
    slopes = np.einsum("pkl,pl->pk", np.linalg.pinv(inner), outer)
    mean = (y.sum(axis=0) - (slopes * x.sum(axis=0)).sum(axis=1)) / whole
    rest = (yy - y**2 / each).sum(axis=0) - (slopes * outer).sum(axis=1)
    sd = np.sqrt(np.maximum(rest, 0) / whole)
    constant = sd <= 1e-9 * np.maximum(np.abs(median + mean), np.abs(mean))
    return median + mean, np.where(constant, 1.0, sd), slopes


@dataclass(frozen=True)
class Combat:
    """The agreement of all hospitals.

    Attributes:
        whole: The limits and medians of all, and their mean and deviation within hospitals.
        slopes: (P, K).
        covariates: (K,) positions of the covariates.
        kept: (P,) the columns that are not adjusted.
    """

    whole: Standard
    slopes: Array
    covariates: Sequence[int]
    kept: NDArray[np.bool_]

    def harmonised(self, train: Array) -> Standard:
        """Returns the scaling of a hospital, from its (N, P) training cells; NaN is missing."""
        whole, at = self.whole, list(self.covariates)
        cells = np.clip(train, whole.low, whole.high)
        x = np.nan_to_num(cells[:, at] - whole.median[at])
        apart = (cells - whole.mean - x @ self.slopes.T) / whole.sd
        moved = ~self.kept & (np.isfinite(apart).sum(axis=0) > 1)
        shift, scale = np.zeros(len(moved)), np.ones(len(moved))
        if moved.any():
            shift[moved], scale[moved] = location_and_scale(apart[:, moved])
        mean, slopes = whole.mean + whole.sd * shift, (1 - 1 / scale) / whole.sd * self.slopes.T
        return replace(
            whole,
            median=mean + scale * (whole.median - whole.mean),  # so that gaps are alike everywhere
            mean=mean,
            sd=whole.sd * scale,
            slopes=dict(zip(at, slopes, strict=True)),
        )


def location_and_scale(apart: Array) -> tuple[Array, Array]:
    """Johnson's gamma and delta of one hospital, by empirical Bayes over its columns.

    With fewer than three columns, or columns that are all alike, they are its means and deviations.

    Args:
        apart: (N, P) standardised cells; NaN is missing.

    Example:
        >>> [x.round(2).tolist() for x in location_and_scale(np.array([[1.0], [3.0]]))]
        [[2.0], [1.41]]
    """
    count = (~np.isnan(apart)).sum(axis=0)
    means, variances = np.nanmean(apart, axis=0), np.nanvar(apart, axis=0, ddof=1)
    wide, uneven = (np.var(v, ddof=1) if len(v) >= _ENOUGH else 0.0 for v in (means, variances))
    if not (wide > 0 and uneven > 0):
        return means, np.sqrt(np.where(variances > 0, variances, 1.0))
    a = 2 + variances.mean() ** 2 / uneven
    b = variances.mean() * (a - 1)
    gamma, delta = means, variances
    for _ in range(_STEPS):
        last = gamma, delta
        gamma = (wide * count * means + delta * means.mean()) / (wide * count + delta)
        delta = (b + np.nansum((apart - gamma) ** 2, axis=0) / 2) / (a - 1 + count / 2)
        if max(np.abs(gamma - last[0]).max(), np.abs(delta - last[1]).max()) < _CLOSE:
            break
    return gamma, np.sqrt(delta)


def converse(
    server: Merging, clients: Sequence[str], step: Callable[[str, bytes | None], bytes | None]
) -> tuple[list[bytes], list[Exchanged]]:
    """Passes messages between clients and the server's half until both have ended.

    Args:
        server: Its half.
        clients: In the order of the federation, in which sums are taken.
        step: Passes an answer to a client, first None, and returns its message, finally None.

    Returns:
        The answers, which a later client needs, and the byte records.
    """
    answers: list[bytes] = []
    exchanged: list[Exchanged] = []
    messages = [step(client, None) for client in clients]
    next(server, None)
    while all(content is not None for content in messages):
        contents = [content for content in messages if content is not None]
        exchanged += [(c, "up", len(t)) for c, t in zip(clients, contents, strict=True)]
        try:
            answers.append(server.send(contents))
        except StopIteration:
            break
        exchanged += [(c, "down", len(answers[-1])) for c in clients]
        messages = [step(client, answers[-1]) for client in clients]
    if any(content is not None for content in messages):
        odd = clients[next(at for at, content in enumerate(messages) if content is not None)]
        raise DataError(
            f"{odd} shares other facts about its data than the others; read all data alike."
        )
    return answers, exchanged


def converse_here(
    server: Merging, halves: Mapping[str, Generator[bytes, bytes, Agreed]]
) -> tuple[Agreed, list[Exchanged]]:
    """Passes the messages of clients that are all in this process.

    Args:
        server: Its half.
        halves: Those of the clients, in their order.

    Returns:
        What the clients have agreed on, and the byte records.
    """
    agreed: list[Agreed] = []

    def step(client: str, answer: bytes | None) -> bytes | None:
        try:
            return next(halves[client]) if answer is None else halves[client].send(answer)
        except StopIteration as stop:
            agreed.append(stop.value)
            return None

    _, exchanged = converse(server, list(halves), step)
    return agreed[0], exchanged


def packed(content: Mapping[str, Any]) -> bytes:
    """Returns a message as bytes.

    Raises:
        DataError: If a number is not finite.
    """
    try:
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    except ValueError as error:
        raise DataError(
            "The clients' sums of a column are not finite; look for cells that are not "
            "measurements."
        ) from error


def unpacked(content: bytes, form: Mapping[str, Any]) -> dict[str, Any]:
    """Reads an untrusted message.

    Args:
        content: The message.
        form: By key: the count of numbers, or a list of the allowed texts, or a mapping from keys
            to allowed texts.

    Raises:
        DataError: If it has another form.

    Example:
        >>> unpacked(b'{"count":[3]}', {"count": 1})
        {'count': [3.0]}
        >>> unpacked(b'{"count":["x"]}', {"count": 1})
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.DataError: A message about the columns of a table is malformed: \
count[0]: expected float, got str.
    """
    kinds: dict[str, Any] = {}
    for name, wanted in form.items():
        if isinstance(wanted, Mapping):
            kinds[name] = _map("Texts", dict.fromkeys(wanted, list[str]))
        elif isinstance(wanted, int):
            kinds[name] = Annotated[list[_Sum], Meta(min_length=wanted, max_length=wanted)]
        else:
            kinds[name] = list[Literal[tuple(wanted)]]  # type: ignore[misc]
    try:
        return dict(parse_json(content, _map("Message", kinds)))
    except ValueError as error:
        raise DataError(f"A message about the columns of a table is malformed: {error}.") from error


SUMS, SCALE = 3, 2  # how many numbers a client sends, and receives


def sums_of(outcomes: Array) -> list[float]:
    """Returns the count of (N,) outcomes, their sum and the sum of their squares.

    Example:
        >>> sums_of(np.array([5.0, 7.0]))
        [2.0, 12.0, 74.0]
    """
    return [float(len(outcomes)), float(outcomes.sum()), float(np.square(outcomes).sum())]


def scale_of(sums: Sequence[Sequence[float]]) -> list[float]:
    """Returns mean and deviation (divided by N) of all outcomes together.

    Args:
        sums: `sums_of` the outcomes of every client.

    Returns:
        The deviation is 1 where all outcomes are the same. Of its 16 digits, sums about 0 leave
        4 where the mean is a million times as large.

    Example:
        >>> scale_of([sums_of(np.array([5.0, 7.0])), sums_of(np.array([3.0, 9.0]))])
        [6.0, 2.23606797749979]
    """
    count, total, squares = (np.array([column]) for column in np.sum(sums, axis=0))
    mean, sd = columns.moments(count, np.zeros(1), total, squares)
    return [float(mean[0]), float(sd[0])]


Indicator = bool | Literal["auto"]


@dataclass(frozen=True)
class Agreement:
    """The clients' agreement on their tables.

    Attributes:
        columns: The inputs.
        scaling: The scaling of all clients, or None if each has its own.
        outcome: Mean and deviation of a continuous outcome; None for classes.
        cuts: The ends of the intervals of survival; empty for other outcomes.
        combat: What adjusts the scaling of each client; None: nothing does.
    """

    columns: Columns
    scaling: Scaling | None
    outcome: list[float] | None = None
    cuts: Sequence[float] = ()
    combat: Combat | None = None

    def scaling_of(self, train: Array) -> Scaling | None:
        """Returns the scaling of a client's (N, P) training cells; None if it has its own."""
        return self.scaling if self.combat is None else self.combat.harmonised(train)


@dataclass(frozen=True)
class Question:
    """The settings that clients need to agree.

    Attributes:
        names: (F) columns.
        indicator: Which columns have an indicator: all, none, or with ``auto`` those in which any
            client misses a training cell.
        normalization: How numbers are scaled.
        pooled: Whether all clients share one scaling.
        categorical: The columns that have categories.
        continuous: Whether to agree on the scale of a continuous outcome.
        intervals: Of survival, on whose ends to agree; 0 for none.
        covariates: Of ComBat; None: there is no ComBat.
    """

    names: Sequence[str]
    indicator: Indicator
    normalization: Normalization
    pooled: bool
    categorical: Sequence[str] = ()
    continuous: bool = False
    intervals: int = 0

    @property
    def outcomes(self) -> bool:
        """Whether to agree on facts about outcomes."""
        return self.continuous or self.intervals > 0

    covariates: Sequence[str] | None = None

    @property
    def numeric(self) -> list[str]:
        """The P columns of numbers."""
        return [name for name in self.names if name not in self.categorical]

    @property
    def positions(self) -> list[int]:
        """Those of the K covariates among them."""
        return [self.numeric.index(name) for name in self.covariates or ()]

    @property
    def products(self) -> dict[str, int]:
        """How many numbers ComBat sends besides those of pooled standardisation."""
        p, k = len(self.numeric), len(self.positions)
        return {} if self.covariates is None else {"x": p * k, "xx": p * k**2, "xy": p * k}

    @property
    def ends(self) -> tuple[str, ...]:
        """The statistics of each column of numbers for pooled scaling."""
        standard = self.normalization == "standard"
        return ("low", "median", "high") if standard else ("minimum", "maximum")


Half = Generator[bytes, bytes, Agreement]


def agree(
    question: Question,
    train: Mapping[str, Array],
    categories: Categories,
    outcomes: Mapping[str, Array] | None = None,
    patients: Mapping[str, Index] | None = None,
) -> tuple[Agreement, list[Exchanged]]:
    """Runs the agreement of clients that are all in this process.

    Args:
        question: The settings.
        train: (N, F) training rows of every client; NaN is missing, a category its position.
        categories: Of the columns that have some.
        outcomes: (N,) outcomes of every client's rows, if they are continuous; (N, 2) times and
            events.
        patients: (N,) the patient of every client's rows; None: each row is one.

    Returns:
        The agreement, and its byte records; none if no messages are needed.

    Example:
        >>> rows = {"a": np.array([[1.0]]), "b": np.array([[np.nan], [3.0]])}
        >>> agreed, exchanged = agree(Question(["age"], "auto", "standard", False), rows, {})
        >>> agreed.columns.indicators, exchanged[1]
        (('age',), ('b', 'up', 19))
    """
    halves = {
        c: tell(question, rows, categories, (outcomes or {}).get(c), (patients or {}).get(c))
        for c, rows in train.items()
    }
    return converse_here(merge(question), halves)


def tell(
    question: Question,
    rows: Array,
    categories: Categories,
    outcomes: Array | None = None,
    patients: Index | None = None,
) -> Half:
    """A client's half: yields its messages, receives the server's answers.

    Args:
        question: The settings.
        rows: (N, F) the client's training rows.
        categories: The client's, of the columns that have some.
        outcomes: (N,) of the rows, if they are continuous; (N, 2) times and events.
        patients: (N,) of the rows; None: each row is one.

    Returns:
        The agreement.

    Raises:
        DataError: If an answer is malformed.
    """
    names, pooled, ends = question.names, question.pooled, question.ends
    numbers = rows[:, [at for at, name in enumerate(names) if name not in categories]]
    patients = np.arange(len(rows)) if patients is None else patients
    first = _about(rows, names, categories, question.indicator, patients)
    if pooled:
        first |= _extent(numbers, question.normalization)
    if question.covariates is not None:
        known = [column[~np.isnan(column)] for column in numbers.T]
        pairs = zip(question.numeric, known, strict=True)
        first["kept"] = [n for n, cells in pairs if len(np.unique(cells)) < 3]
    if question.intervals and outcomes is not None:
        first["events"] = histogram(*outcomes.T)
    elif outcomes is not None:
        first["outcome"] = sums_of(outcomes)
    if not first:
        return Agreement(
            Columns(tuple(names), {}, tuple(names) if question.indicator else ()), None
        )
    width = numbers.shape[1]
    form: dict[str, Any] = {"indicators": names, "categories": dict.fromkeys(categories)}
    form |= dict.fromkeys(ends, width) if pooled else {}
    form |= {"outcome": SCALE} if question.continuous else {}
    form |= {"cuts": question.intervals} if question.intervals else {}
    form |= {} if question.covariates is None else {"kept": question.numeric}
    answer = unpacked((yield packed(first)), form)
    shared = {name: tuple(answer["categories"][name]) for name in categories}
    agreed = Columns(tuple(names), shared, tuple(n for n in names if n in answer["indicators"]))
    facts = answer.get("outcome"), answer.get("cuts", ())
    if not pooled:
        return Agreement(agreed, None, *facts)
    limits_of_all = [np.array(answer[end]) for end in ends]
    low, *_, high = limits_of_all
    if question.normalization != "standard":
        return Agreement(
            agreed, MinMax(low, high, question.normalization == "exact_minmax"), *facts
        )
    median = limits_of_all[1]
    apart = np.clip(numbers, low, high) - median
    sums = {
        "count": (~np.isnan(apart)).sum(axis=0).tolist(),
        "sum": np.nansum(apart, axis=0).tolist(),
        "squares": np.nansum(apart**2, axis=0).tolist(),
    }
    form = dict.fromkeys(("mean", "sd"), width)
    if question.covariates is not None:
        sums |= sums_with(question.positions, apart)
        form["slopes"] = question.products["x"]
    last = unpacked((yield packed(sums)), form)
    standard = Standard(low, high, median, np.array(last["mean"]), np.array(last["sd"]))
    if question.covariates is None:
        return Agreement(agreed, standard, *facts)
    slopes = np.array(last["slopes"]).reshape(width, len(question.positions))
    kept = np.isin(question.numeric, answer["kept"])
    combat = Combat(standard, slopes, question.positions, kept)
    return Agreement(agreed, standard, *facts, combat)


def merge(question: Question) -> Merging:
    """The server's half: receives the messages of all clients, in order, and yields its answers.

    Raises:
        DataError: If a client's message has the wrong form.
    """
    names, categorical, pooled = question.names, question.categorical, question.pooled
    if not (question.indicator == "auto" or categorical or pooled or question.outcomes):
        return
    form: dict[str, Any] = {} if question.indicator != "auto" else {"missing": list(names)}
    form |= {"categories": dict.fromkeys(categorical)} if categorical else {}
    width = len(question.numeric)
    form |= dict.fromkeys(("count", *question.ends), width) if pooled else {}
    form |= {} if question.covariates is None else {"kept": question.numeric}
    form |= {"outcome": SUMS} if question.continuous else {}
    form |= {"events": BINS} if question.intervals else {}
    messages = [unpacked(content, form) for content in (yield b"")]
    answer = _merged(messages, question)
    if question.continuous:
        answer["outcome"] = scale_of([one["outcome"] for one in messages])
    if question.intervals:
        counts = np.sum([one["events"] for one in messages], axis=0)
        if not counts.any():
            raise DataError("No training patient of any client had the event; check data.event.")
        answer["cuts"] = quantile_cuts(counts, question.intervals)
    contents = yield packed(answer)
    if pooled and question.normalization == "standard":
        sums = dict.fromkeys(("count", "sum", "squares"), width)
        messages = [unpacked(content, sums | question.products) for content in contents]
        count, total, squares = (np.sum([one[name] for one in messages], axis=0) for name in sums)
        mean, sd = columns.moments(count, np.array(answer["median"]), total, squares)
        fitted = {"mean": mean, "sd": sd}
        if question.covariates is not None:
            kept = np.isin(question.numeric, answer["kept"])
            within = pooled_fit(messages, np.array(answer["median"]), len(question.positions))
            fitted = {"mean": np.where(kept, mean, within[0]), "sd": np.where(kept, sd, within[1])}
            fitted["slopes"] = np.where(kept[:, None], 0.0, within[2]).ravel()
        yield packed({name: values.tolist() for name, values in fitted.items()})


def _about(
    rows: Array, names: Sequence[str], categories: Categories, indicator: Indicator, patients: Index
) -> dict[str, Any]:
    """A client's message about its columns, without categories of few patients."""
    message: dict[str, Any] = {}
    if indicator == "auto":
        gaps = np.flatnonzero(np.isnan(rows).any(axis=0))
        message["missing"] = [names[at] for at in gaps.tolist()]
    if categories:
        coded = {name: rows[:, names.index(name)] for name in categories}
        message["categories"] = {
            name: [
                texts[int(code)]
                for code in np.unique(coded[name])
                if code >= 0 and len(np.unique(patients[coded[name] == code])) >= CATEGORY
            ]
            for name, texts in categories.items()
        }
    return message


def _extent(values: Array, normalization: Normalization) -> dict[str, Any]:
    """The range of a client's values that the server needs."""
    count = (~np.isnan(values)).sum(axis=0)
    message: dict[str, Any] = {"count": count.tolist()}
    if normalization != "standard":
        fitted = columns.fit_minmax(normalization, values)
        return message | {"minimum": fitted.minimum.tolist(), "maximum": fitted.maximum.tolist()}
    for name, values_of in zip(("low", "median", "high"), columns.limits(values), strict=True):
        message[name] = (count * values_of).tolist()
    return message


def _merged(messages: Sequence[Mapping[str, Any]], question: Question) -> dict[str, Any]:
    """The server's result of the first messages."""
    names, indicator = question.names, question.indicator
    gaps = {name for one in messages for name in one.get("missing", ())}
    chosen = gaps if indicator == "auto" else {*names} if indicator else set()
    union = {
        name: sorted({text for one in messages for text in one["categories"][name]}, key=in_order)
        for name in question.categorical
    }
    answer: dict[str, Any] = {"indicators": [n for n in names if n in chosen]}
    answer["categories"] = union
    if (stay := question.covariates) is not None:
        every = [{*one["kept"], *stay} for one in messages]
        answer["kept"] = [n for n in question.numeric if all(n in kept for kept in every)]
    if not question.pooled:
        return answer
    counts = np.array([one["count"] for one in messages])
    if question.normalization != "standard":
        for name, end, none in (("minimum", np.min, np.inf), ("maximum", np.max, -np.inf)):
            # A client without a value in a column has ends of 0, which must not count.
            values = np.where(counts > 0, np.array([one[name] for one in messages]), none)
            answer[name] = np.where(counts.any(axis=0), end(values, axis=0), 0.0).tolist()
        return answer
    for name in question.ends:
        total = np.sum([one[name] for one in messages], axis=0)
        answer[name] = (total / np.maximum(counts.sum(axis=0), 1)).tolist()
    return answer
