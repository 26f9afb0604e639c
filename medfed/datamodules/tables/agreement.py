"""The agreement of clients with tables before training, and its messages.

All needed facts travel as JSON through the server, and their bytes are counted; no row leaves a
client. Each client's half and the server's are generators, so that the same messages pass within
one process and between hospitals. A fact is one class, with both halves. A count that no client can
have is refused by the client's name.

- Indicators: of the columns in which any client misses a training cell.
- Categories: the sorted union of those in training rows.
- A continuous outcome: its mean and deviation over all training rows, from a count and two sums.
- Pooled standardisation: each client sends, per column, its number of values, its median and its
  limits; all take the medians of these over clients, which no single client moves far. Then each
  sends sums and sums of squares of its values within these limits.
- Pooled scaling by minimum and maximum: ends far beyond those of most clients are left out.
- ComBat: also the names of columns of at most two values, and sums of products with covariates.

ComBat of columns of numbers across hospitals is fitted by sums that hospitals send: Johnson, Li and
Rabinovic, "Adjusting batch effects in microarray expression data using empirical Bayes methods",
Biostatistics 2007; by messages: Chen et al., "Privacy-preserving harmonization via distributed
ComBat", NeuroImage 2022. Column f of row j at hospital i is

    y_ijf = alpha_f + x_ij beta_f + sigma_f (gamma_if + delta_if e_ijf).

============  ================  =================================================================
symbol        here              fitted by
============  ================  =================================================================
alpha, sigma  ``Combat.whole``  least squares with a constant per hospital, from the sums of all
beta          ``slopes``        hospitals (`_pooled_fit`)
gamma, delta  `harmonised`      empirical Bayes over the columns of a hospital, which sends nothing
============  ================  =================================================================

The adjusted value is linear in the row, so that a bundle holds it as a scaling. Covariates x, and
columns that have at most two values everywhere, are not adjusted.
"""

from __future__ import annotations

import json
from typing import Literal, TypedDict

from msgspec import Meta

from medfed.common.floors import CATEGORY
from medfed.datamodules.extending import *
from medfed.datamodules.one_site import Claims, Half, Merging
from medfed.datamodules.readers.samples import Index
from medfed.datamodules.readers.table import in_order
from medfed.datamodules.tables import columns
from medfed.datamodules.tables.columns import Normalization
from medfed.functional.survival import BINS, histogram, quantile_cuts
from medfed.standalone.columns import Array, Columns, MinMax, Scaling, Standard
from medfed.standalone.csv_files import Categories

_map: Any = TypedDict  # made of what a run asks for
_Sum = Annotated[float, Meta(gt=-1e300, lt=1e300)]  # of table cells, which are below 1e30
_ENOUGH = 3  # columns from which a prior can be fitted
_STEPS, _CLOSE = 10_000, 1e-13
_BEYOND = 100  # times the range of most clients


def _sums_with(covariates: Sequence[int], apart: Array) -> dict[str, list[float]]:
    """Sums of the K covariates, their products, and with the cells (N, P), less all medians."""
    cells, known = np.nan_to_num(apart), (~np.isnan(apart)).astype(float)
    x = cells[:, covariates]
    sums = known.T @ x, np.einsum("np,nk,nl->pkl", known, x, x), cells.T @ x
    return {n: values.ravel().tolist() for n, values in zip(("x", "xx", "xy"), sums, strict=True)}


def _pooled_fit(
    sums: Sequence[Mapping[str, Sequence[float]]], median: Array, covariates: int
) -> tuple[Array, Array, Array]:
    """(P,) mean, (P,) deviation within hospitals, and (P, K) slopes, from every hospital's sums.

    Example:
        >>> none = {"x": [], "xx": [], "xy": []}
        >>> one = {"count": [2], "sum": [4], "squares": [10]} | none  # of 1 and 3
        >>> two = {"count": [2], "sum": [12], "squares": [74]} | none  # of 5 and 7
        >>> [x.tolist() for x in _pooled_fit([one, two], np.zeros(1), 0)]
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
    """The agreement of all hospitals."""

    whole: Standard  # the limits and medians of all, and their mean and deviation within hospitals
    slopes: Array  # (P, K)
    covariates: Sequence[int]  # (K,) positions of the covariates
    kept: NDArray[np.bool_]  # (P,) the columns that are not adjusted

    def harmonised(self, train: Array) -> Standard:
        """Returns the scaling of a hospital, from its (N, P) training cells; NaN is missing."""
        whole, at = self.whole, list(self.covariates)
        cells = np.clip(train, whole.low, whole.high)
        x = np.nan_to_num(cells[:, at] - whole.median[at])
        apart = (cells - whole.mean - x @ self.slopes.T) / whole.sd
        moved = ~self.kept & (np.isfinite(apart).sum(axis=0) > 1)
        shift, scale = np.zeros(len(moved)), np.ones(len(moved))
        if moved.any():
            shift[moved], scale[moved] = _location_and_scale(apart[:, moved])
        mean, slopes = whole.mean + whole.sd * shift, (1 - 1 / scale) / whole.sd * self.slopes.T
        return replace(
            whole,
            median=mean + scale * (whole.median - whole.mean),  # so that gaps are alike everywhere
            mean=mean,
            sd=whole.sd * scale,
            slopes=dict(zip(at, slopes, strict=True)),
        )


def _location_and_scale(apart: Array) -> tuple[Array, Array]:
    """Johnson's gamma and delta of a hospital's (N, P) cells, by empirical Bayes over columns.

    Example:
        >>> [x.round(2).tolist() for x in _location_and_scale(np.array([[1.0], [3.0]]))]
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


def packed(content: Mapping[str, Any]) -> bytes:
    """Returns a message as bytes."""
    try:
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    except ValueError as error:
        what = "The clients' sums of a column are not finite"
        raise DataError(f"{what}; look for cells that are not measurements.") from error


def unpacked(content: bytes, form: Mapping[str, Any]) -> dict[str, Any]:
    """Reads an untrusted message.

    Example:
        >>> unpacked(b'{"count":[3]}', {"count": 1})
        {'count': [3.0]}
        >>> unpacked(b'{"count":["x"]}', {"count": 1})
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.DataError: A message about the columns of a table is malformed: count[0]: expected float, got str.
    """  # noqa: E501
    kinds: dict[str, Any] = {}
    for name, wanted in form.items():
        if isinstance(wanted, Mapping):
            kinds[name] = _map("Texts", dict.fromkeys(wanted, list[str]))
        elif wanted is None:  # of any number of clients
            kinds[name] = list[_Sum]
        elif isinstance(wanted, int):
            kinds[name] = Annotated[list[_Sum], Meta(min_length=wanted, max_length=wanted)]
        else:
            kinds[name] = list[Literal[tuple(wanted)]]  # type: ignore[misc]
    try:
        return dict(parse_json(content, _map("Message", kinds)))
    except ValueError as error:
        raise DataError(f"A message about the columns of a table is malformed: {error}.") from error


SUMS, SCALE = 3, 2  # how many numbers a client sends, and receives


Indicator = bool | Literal["auto"]


@dataclass(frozen=True)
class Agreement:
    """The clients' agreement on their tables."""

    columns: Columns  # the inputs
    scaling: Scaling | None  # the scaling of all clients, or None if each has its own
    # Mean and deviation of a continuous outcome; None for classes.
    outcome: list[float] | None = None
    cuts: Sequence[float] = ()  # the ends of the intervals of survival; empty for other outcomes
    combat: Combat | None = None  # what adjusts the scaling of each client; None: nothing does

    def scaling_of(self, train: Array) -> Scaling | None:
        """Returns the scaling of a client's (N, P) training cells; None if it has its own."""
        return self.scaling if self.combat is None else self.combat.harmonised(train)


@dataclass(frozen=True)
class AgreementSettings:
    """The settings that clients need to agree."""

    names: Sequence[str]  # (F) columns
    # Which columns have an indicator: all, none, or with ``auto`` those in which any client misses
    # a training cell.
    indicator: Indicator
    normalization: Normalization  # how numbers are scaled
    pooled: bool  # whether all clients share one scaling
    categorical: Sequence[str] = ()  # the columns that have categories
    continuous: bool = False  # whether to agree on the scale of a continuous outcome
    intervals: int = 0  # of survival, on whose ends to agree; 0 for none

    covariates: Sequence[str] | None = None  # of ComBat; None: there is no ComBat

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


@dataclass(frozen=True)
class TrainRows:
    """A client's training rows, for its half of the agreement."""

    rows: Array  # (N, F); NaN is missing, a category its position
    # The client's, of the columns that have some.
    categories: Categories = field(default_factory=dict)
    # (N,) classes or continuous outcomes; (N, 2) times and events; empty where none is needed.
    outcomes: Array = field(default_factory=lambda: np.empty(0))
    patients: Index | None = None  # (N,); None: each row is one
    # The patients behind each column's sums, once they are computed.
    contributing: dict[str, int] = field(default_factory=dict)

    def patients_in(self, rows: NDArray[np.bool_]) -> int:
        """How many patients have some rows."""
        return int(rows.sum()) if self.patients is None else len(np.unique(self.patients[rows]))


Form = Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Fact:
    """A fact on which clients agree: what they send and what the server makes of it."""

    settings: AgreementSettings  # the settings
    sent: Form  # the form of a client's message, see `unpacked`
    answered: Form  # that of the answer to all

    def numbers(self, rows: TrainRows) -> Array:
        """(N, P) the columns of numbers."""
        return rows.rows[:, [self.settings.names.index(name) for name in self.settings.numeric]]

    def ask(self, rows: TrainRows, agreed: Mapping[str, Any]) -> dict[str, Any]:
        """A client's half: returns its message, after the answers before."""
        raise NotImplementedError

    def merge(self, messages: Messages, agreed: dict[str, Any], claims: Claims) -> dict[str, Any]:
        """The server's half: returns the answer to the messages of all clients."""
        raise NotImplementedError


class Indicators(Fact):
    """The columns that have an indicator of missing cells."""

    def ask(self, rows: TrainRows, agreed: Mapping[str, Any]) -> dict[str, Any]:
        """See the base class: names of columns that miss a cell."""
        gaps = np.flatnonzero(np.isnan(rows.rows).any(axis=0)).tolist()
        return {name: [self.settings.names[at] for at in gaps] for name in self.sent}

    def merge(self, messages: Messages, agreed: dict[str, Any], claims: Claims) -> dict[str, Any]:
        """See the base class: those that miss a cell anywhere."""
        names, every = self.settings.names, self.settings.indicator
        gaps = {name for one in messages for name in one.get("missing", ())}
        chosen = gaps if every == "auto" else {*names} if every else set()
        return {"indicators": [name for name in names if name in chosen]}


class Levels(Fact):
    """The categories of columns."""

    def ask(self, rows: TrainRows, agreed: Mapping[str, Any]) -> dict[str, Any]:
        """See the base class: names, without those of few patients."""
        named: dict[str, list[str]] = {}
        for name, texts in rows.categories.items():
            coded = rows.rows[:, self.settings.names.index(name)]
            patients = {c: rows.patients_in(coded == c) for c in np.unique(coded) if c >= 0}
            named[name] = [texts[int(code)] for code, n in patients.items() if n >= CATEGORY]
        return {"categories": named}

    def merge(self, messages: Messages, agreed: dict[str, Any], claims: Claims) -> dict[str, Any]:
        """See the base class: the sorted union; names that differ in case are refused."""
        of = {n: [m["categories"][n] for m in messages] for n in self.settings.categorical}
        for column, sent in of.items():
            whose = [(text, claims.name(at)) for at, texts in enumerate(sent) for text in texts]
            same([text for text, _ in whose], f"Column {column}", lambda at: whose[at][1])  # noqa: B023
            for at, texts in enumerate(sent):
                others = {text for text, who in whose if who != claims.name(at)}
                if texts and others and not others & {*texts}:
                    what = f"{claims.name(at)} alone has the categories {few(texts)} of {column}"
                    claims.remarks.append(f"{what}, and has none of the others'; check its codes.")
        return {"categories": {n: sorted(set().union(*s), key=in_order) for n, s in of.items()}}


class OutcomeScale(Fact):
    """The mean and deviation of a continuous outcome."""

    def ask(self, rows: TrainRows, agreed: Mapping[str, Any]) -> dict[str, Any]:
        """See the base class: a count and two sums."""
        sums = len(rows.outcomes), rows.outcomes.sum(), np.square(rows.outcomes).sum()
        return {"outcome": [*map(float, sums)]}

    def merge(self, messages: Messages, agreed: dict[str, Any], claims: Claims) -> dict[str, Any]:
        """See the base class: mean and deviation of all."""
        sums = np.array([one["outcome"] for one in messages])
        count = claims.counted("outcomes", sums[:, :1].tolist())[:, 0]
        wrong = _contradict(count, sums[:, 1], sums[:, 2])
        claims.refuse(wrong, "sums of the outcome that no data have")
        means, squares = (column / np.maximum(count, 1) for column in sums.T[1:])
        sds = np.sqrt(np.maximum(squares - means**2, 0))
        sds[sds <= 1e-7 * np.abs(means)] = 0  # a constant, or a single patient
        distance = np.abs(means - np.median(means))
        reach = max(np.median(distance), np.median(sds[sds > 0]) if sds.any() else 0)
        if len(means) > 2 and reach:  # of two nobody knows which is wrong
            far = np.maximum(distance, sds) > _BEYOND * reach
            claims.refuse(far, "outcomes far from those of all others")
        whole = np.sum(sums, axis=0)[:, None]
        mean, sd = columns.moments(whole[0], np.zeros(1), whole[1], whole[2])
        return {"outcome": [float(mean[0]), float(sd[0])]}


class Cuts(Fact):
    """The ends of the intervals of survival."""

    def ask(self, rows: TrainRows, agreed: Mapping[str, Any]) -> dict[str, Any]:
        """See the base class: counts of events in wide bins of time."""
        return {"events": histogram(*rows.outcomes.T)}

    def merge(self, messages: Messages, agreed: dict[str, Any], claims: Claims) -> dict[str, Any]:
        """See the base class: quantiles of all events."""
        each = claims.counted("events", [one["events"] for one in messages])
        claims.counted("events", each.sum(axis=1, keepdims=True).tolist())
        if not each.any():
            raise DataError("No training patient of any client had the event; check data.event.")
        return {"cuts": quantile_cuts(each.sum(axis=0).tolist(), self.settings.intervals)}


class Ends(Fact):
    """The range of each column of numbers, for pooled scaling."""

    def ask(self, rows: TrainRows, agreed: Mapping[str, Any]) -> dict[str, Any]:
        """See the base class: counts of values, and limits and medians, or minima and maxima."""
        values, normalization = self.numbers(rows), self.settings.normalization
        if normalization == "standard":
            ends: tuple[Array, ...] = columns.limits(values)
        else:
            fitted = columns.fit_minmax(normalization, values)
            ends = fitted.minimum, fitted.maximum
        message = {n: end.tolist() for n, end in zip(self.settings.ends, ends, strict=True)}
        return {"count": (~np.isnan(values)).sum(axis=0).tolist(), **message}

    def merge(self, messages: Messages, agreed: dict[str, Any], claims: Claims) -> dict[str, Any]:
        """See the base class: medians over the clients that have values; or the widest range."""
        counts = claims.counted("values of a column", [one["count"] for one in messages])
        agreed["counts"] = counts
        names, empty = self.settings.ends, counts == 0
        ends = {n: np.array([one[n] for one in messages], dtype=float) for n in names}
        low, high = ends[names[0]], ends[names[-1]]
        claims.refuse(~empty & (low > high), "ends of a column that no data have")
        # A client without a value has ends of 0, which must not count; nor does a constant column.
        varies = ~empty & (high > low)
        used = np.where(varies.any(axis=0), varies, ~empty)
        limits = {n: np.where(used, values, np.nan) for n, values in ends.items()}
        middle = {n: _median(values) for n, values in limits.items()}
        centre = (middle[names[0]] + middle[names[-1]]) / 2
        reach = np.maximum(middle[names[-1]] - middle[names[0]], np.abs(centre) * 1e-9)
        far = {n: np.abs(values - centre) > _BEYOND * reach for n, values in limits.items()}
        most = used.sum(axis=0) > 2  # of two nobody knows which is wrong
        claims.remark(np.any([*far.values()], axis=0) & most, _BEYOND, self.settings.numeric)
        if self.settings.normalization == "standard":
            return {n: values.tolist() for n, values in middle.items()}
        answer: dict[str, Any] = {}
        for n, pick, none in (("minimum", np.min, np.inf), ("maximum", np.max, -np.inf)):
            end = pick(np.where(empty | (far[n] & most), none, ends[n]), axis=0)
            answer[n] = np.where(counts.any(axis=0), end, 0.0).tolist()
        return answer


class Unadjusted(Fact):
    """The columns that ComBat does not adjust."""

    def ask(self, rows: TrainRows, agreed: Mapping[str, Any]) -> dict[str, Any]:
        """See the base class: names of columns of at most two values."""
        known = [column[~np.isnan(column)] for column in self.numbers(rows).T]
        pairs = zip(self.settings.numeric, known, strict=True)
        return {"kept": [name for name, cells in pairs if len(np.unique(cells)) < 3]}

    def merge(self, messages: Messages, agreed: dict[str, Any], claims: Claims) -> dict[str, Any]:
        """See the base class: those that have at most two everywhere, and the covariates."""
        every = [{*one["kept"], *(self.settings.covariates or ())} for one in messages]
        return {"kept": [n for n in self.settings.numeric if all(n in names for names in every)]}


class Moments(Fact):
    """Mean and deviation of each column of numbers, within the agreed limits."""

    def ask(self, rows: TrainRows, agreed: Mapping[str, Any]) -> dict[str, Any]:
        """See the base class: sums over the values, less the agreed medians.

        Only patients strictly within the limits of a column, and of all covariates, stand behind
        its sums.
        """
        low, median, high = (np.array(agreed[end]) for end in self.settings.ends)
        values = self.numbers(rows)
        within, wide = (low < values) & (values < high), low < high
        known = within[:, self.settings.positions].all(axis=1)
        for at, name in enumerate(self.settings.numeric):
            if wide[at] and not np.isnan(values[:, at]).all():
                rows.contributing[name] = rows.patients_in(within[:, at] & known)
        apart = np.clip(values, low, high) - median
        sums = {
            "count": (~np.isnan(apart)).sum(axis=0).tolist(),
            "sum": np.nansum(apart, axis=0).tolist(),
            "squares": np.nansum(apart**2, axis=0).tolist(),
        }
        if self.settings.covariates is not None:
            sums |= _sums_with(self.settings.positions, apart)
        return sums

    def merge(self, messages: Messages, agreed: dict[str, Any], claims: Claims) -> dict[str, Any]:
        """See the base class: least squares with ComBat."""
        names = ("count", "sum", "squares")
        count, total, squares = (np.array([one[n] for one in messages], float) for n in names)
        low, median, high = (np.array(agreed[end]) for end in self.settings.ends)
        reach = np.maximum(high - median, median - low)
        wrong = (count != agreed["counts"]) | _contradict(count, total, squares)
        wrong |= np.abs(total) > _beyond(count * reach)
        wrong |= np.sqrt(np.maximum(squares, 0)) > _beyond(np.sqrt(count) * reach)
        claims.refuse(wrong, "counts or sums of a column that no data have")
        summed = (each.sum(axis=0) for each in (count, total, squares))
        mean, sd = columns.moments(next(summed), median, next(summed), next(summed))
        fitted = {"mean": mean, "sd": sd}
        if self.settings.covariates is not None:
            k = len(self.settings.positions)
            most = _beyond(count * reach.max(initial=0))[..., None]
            for name, size in (("x", k), ("xx", k**2), ("xy", k)):
                each = np.array([one[name] for one in messages], float).reshape(*count.shape, size)
                bound = most if name == "x" else most * reach.max(initial=0)
                claims.refuse(np.abs(each) > bound, "products of columns that no data have")
            plain = np.isin(self.settings.numeric, agreed["kept"])
            within = _pooled_fit(messages, median, k)
            fitted = {
                "mean": np.where(plain, mean, within[0]),
                "sd": np.where(plain, sd, within[1]),
            }
            fitted["slopes"] = np.where(plain[:, None], 0.0, within[2]).ravel()
        return {name: values.tolist() for name, values in fitted.items()}


def _steps(settings: AgreementSettings) -> list[list[Fact]]:
    """The facts that each message of a client holds; none if nothing needs to be agreed."""
    names, numbers, auto = settings.names, settings.numeric, settings.indicator == "auto"
    levels = {"categories": dict.fromkeys(settings.categorical)}
    ends, combat = dict.fromkeys(settings.ends, len(numbers)), settings.covariates is not None
    table: list[tuple[object, type[Fact], Form, Form]] = [  # whether, which, sent, answered
        (settings.categorical, Levels, levels, levels),
        (settings.continuous, OutcomeScale, {"outcome": SUMS}, {"outcome": SCALE}),
        (settings.intervals, Cuts, {"events": BINS}, {"cuts": settings.intervals}),
        (settings.pooled, Ends, {"count": len(numbers), **ends}, ends),
        (combat, Unadjusted, {"kept": numbers}, {"kept": numbers}),
    ]
    first: list[Fact] = [kind(settings, *forms) for is_on, kind, *forms in table if is_on]
    if not auto and not first:
        return []
    first.insert(0, Indicators(settings, {"missing": names} if auto else {}, {"indicators": names}))
    if not settings.pooled or settings.normalization != "standard":
        return [first]
    sums = dict.fromkeys(("count", "sum", "squares"), len(numbers)) | settings.products
    fitted = dict.fromkeys(("mean", "sd"), len(numbers))
    slopes = {"slopes": settings.products["x"]} if combat else {}
    return [first, [Moments(settings, sums, fitted | slopes)]]


def client_side(settings: AgreementSettings, rows: TrainRows) -> Half[Agreement]:
    """A client's half: yields its messages, receives the server's answers."""
    agreed = dict[str, Any]()
    for facts in _steps(settings):
        message = {k: v for fact in facts for k, v in fact.ask(rows, agreed).items()}
        form = {k: v for fact in facts for k, v in fact.answered.items()}
        agreed |= unpacked((yield packed(message)), form)
    names = settings.names
    chosen = agreed.get("indicators", names if settings.indicator else ())
    shared = {n: tuple(agreed["categories"][n]) for n in rows.categories}
    inputs = Columns(tuple(names), shared, tuple(n for n in names if n in chosen))
    scaling: Scaling | None = None
    combat = None
    if settings.pooled and settings.normalization == "standard":
        low, median, high = (np.array(agreed[end]) for end in settings.ends)
        scaling = Standard(low, high, median, np.array(agreed["mean"]), np.array(agreed["sd"]))
        if settings.covariates is not None:
            slopes = np.array(agreed["slopes"]).reshape(len(median), len(settings.positions))
            plain = np.isin(settings.numeric, agreed["kept"])
            combat = Combat(scaling, slopes, settings.positions, plain)
    elif settings.pooled:
        least, most = (np.array(agreed[end]) for end in settings.ends)
        scaling = MinMax(least, most, settings.normalization == "exact_minmax")
    return Agreement(inputs, scaling, agreed.get("outcome"), agreed.get("cuts", ()), combat)


def server_side(settings: AgreementSettings, claims: Claims | None = None) -> Merging:
    """The server's half: receives the messages of all clients, in order, and yields its answers."""
    claims, agreed, answer = claims or Claims(), dict[str, Any](), b""
    for facts in _steps(settings):
        form = {k: v for fact in facts for k, v in fact.sent.items()}
        messages = [unpacked(content, form) for content in (yield answer)]
        merged = {k: v for f in facts for k, v in f.merge(messages, agreed, claims).items()}
        agreed |= merged
        answer = packed(merged)
    if answer:
        yield answer


def _median(values: Array) -> Array:
    """(P,) medians of (C, P); 0 where no client has a value."""
    known = ~np.isnan(values).all(axis=0)
    return np.where(known, np.nanmedian(np.where(known, values, 0.0), axis=0), 0.0)


def _beyond(values: Array) -> Array:
    """A little more, for rounding errors of sums."""
    return values * (1 + 1e-9) + 1e-9


def _contradict(count: Array, total: Array, squares: Array) -> NDArray[np.bool_]:
    """Whether a count, a sum and a sum of squares are of no numbers."""
    most = np.sqrt(count) * np.sqrt(np.maximum(squares, 0))
    return (squares < 0) | (np.abs(total) > _beyond(most))
