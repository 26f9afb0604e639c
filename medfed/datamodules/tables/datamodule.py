"""Tables, for clinical risk or a continuous outcome: their rows and the clients' inputs.

The user or the reader names the columns of features, labels, hospitals and patients.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from medfed.common.floors import Statistic
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.client_data import Batch, ClientData
from medfed.datamodules.duplicates import Sample, rows_mean_something
from medfed.datamodules.extending import *
from medfed.datamodules.one_site import Claims, Half, Merging
from medfed.datamodules.plans import ClientPlan
from medfed.datamodules.readers import table as tables
from medfed.datamodules.readers.base import Account, expanded
from medfed.datamodules.readers.last_read import read_once
from medfed.datamodules.readers.samples import Index, Samples
from medfed.datamodules.readers.scikit_learn import EMBEDDED
from medfed.datamodules.readers.table import Table
from medfed.datamodules.tables import agreement, columns
from medfed.datamodules.tables.columns import Normalization
from medfed.functional.survival import BINS
from medfed.standalone.checks import checked_scale
from medfed.standalone.columns import Array, Columns, Scaling

log = logging.getLogger(__name__)
Rows = tuple[Index, Index]


@dataclass(eq=False, repr=False)
class TabularDataModule(FederatedDataModule, tables.CsvOptions):
    """Rows of a table; ``image`` is (B, C), ``label`` (B,) int64 or an outcome.

    The clients agree on the C inputs: see `agreement`. An outcome is float32, in its unit; the
    model predicts in standard units, with the agreed mean and deviation. Survival is (B, 2): times
    and events; the ``class_names`` are the ends of the agreed intervals.
    """

    _: KW_ONLY
    path: str | None = None  # a CSV file (or what `reader` reads); None takes the table `embedded`
    label: str = "label"  # name of the label column
    # Columns that hold categories, also numbered ones, besides the columns of a CSV file that hold
    # texts, as `readers.table.find_kinds` says; an empty list: all columns hold numbers.
    categorical: Sequence[str] | None = None
    # Reads `path` if it is not a CSV file; the reader then decides the columns.
    reader: Callable[[Path], Table] | None = None
    # A table that comes with scikit-learn: ``"breast_cancer"`` or ``"diabetes"``.
    embedded: str = "breast_cancer"
    eval_batch_size: int = 1024  # rows per evaluation batch
    # ``"standard"``: mean 0 and standard deviation 1, missing cells the median; ``"minmax"``: a
    # rounded range from -1 to 1, missing cells 0; ``"exact_minmax"``: from the smallest to the
    # largest value, of public data; ``"none"``: as they are, missing cells the median, to repeat
    # what others did. See `columns`.
    normalization: Normalization = "standard"
    # The training rows that determine the scaling. ``"client"``: the client's, so that no
    # statistics leave a hospital; ``"pooled"``: all clients', so that units are equal everywhere,
    # but clients exchange sums before the first round; ``"combat"``: by such sums, and then each
    # client's columns are adjusted in location and scale, see `combat`.
    scaling: Literal["client", "pooled", "combat"] = "client"
    # Columns of numbers whose effects on the others ``"combat"`` keeps.
    covariates: Sequence[str] = ()
    # Which columns have an input that is 1 if the cell is missing: all (True), none, or with
    # ``"auto"`` those in which any client misses a training cell.
    missing_indicator: agreement.Indicator = "auto"
    # Mean and deviation of continuous outcomes, the units of the model; None: those of all clients'
    # training rows, for which each client sends three sums. ``(0, 1)`` does not scale outcomes.
    outcome_scale: Sequence[float] | None = None
    # Column that is 1 if the event happened, else 0; `positive` may name other values.
    event: str | None = None
    # Number of intervals of time, which have as many events each over all clients, as the sum of
    # their histograms says.
    intervals: Annotated[int, check_positive] = 10
    cuts: Sequence[float] | None = None  # the ends of the intervals; None lets the clients agree

    def __post_init__(self) -> None:
        super().__post_init__()
        survival = self.outcome == "survival"
        if not survival == (self.time is not None) == (self.event is not None):
            needs = "data.outcome=survival needs data.time=COLUMN and data.event=COLUMN"
            raise ConfigError(f"{needs}, and other outcomes have neither.")
        cuts = [] if self.cuts is None else [0.0, *self.cuts]
        if cuts and not (survival and cuts[1:] and all(a < b for a, b in pairwise(cuts))):
            what = "data.cuts are the ends of intervals of data.outcome=survival"
            raise ConfigError(f"{what}; give increasing times above 0, or leave it at null.")
        if self.outcome == "continuous" and not (self.positive is None and self.negative is None):
            what = "data.positive and data.negative name classes"
            raise ConfigError(f"{what}; leave them out with data.outcome=continuous.")
        alone = {"combat": ("minmax", "exact_minmax", "none"), "pooled": ("none",), "client": ()}
        if self.normalization in alone[self.scaling]:
            raise ConfigError(f"data.scaling={self.scaling} needs data.normalization=standard.")
        if self.covariates and self.scaling != "combat":
            raise ConfigError("data.covariates are for data.scaling=combat; leave them out.")
        if self.outcome_scale is not None:
            self.outcome_scale = checked_scale(self.outcome_scale, "data.outcome_scale")
        self.joined: tuple[str, ...] | None = None
        self.scalings: dict[str, Scaling] = {}
        self.train: dict[str, agreement.TrainRows] = {}
        self.train_patients: dict[str, Index] = {}  # (N,) of each client's training rows

    @cached_property
    def table(self) -> Table:
        """All rows."""
        if (path := expanded(self.path)) is not None and self.reader is None:
            options = {f.name: getattr(self, f.name) for f in fields(tables.CsvOptions)}
            options["categorical"] = "auto" if self.categorical is None else self.categorical
            facts = {"label": self.event or self.label, "classes": self.joined}
            of: Table = read_once(self, Table, tables.read_csv, path, **facts, **options)
            texts = {*of.categories} - {*(self.categorical or ())}
            if self.joined is not None and texts:
                what = "holds texts, but numbers at the other hospitals; write numbers"
                raise DataError(f"{path}: column {min(texts)} {what}.")
            return of
        if path is None:
            check_known("data.embedded", self.embedded, EMBEDDED)
            whole = EMBEDDED[self.embedded]()
        else:
            whole = read_once(self, Table, self.reader, path)  # type: ignore[arg-type]
        return tables.with_categories(whole, self.categorical or ())

    @property
    def plan_names(self) -> tuple[str, ...]:
        """See the base class."""
        return self.table.names

    @cached_property
    def samples(self) -> Samples:
        """The facts about the rows other than their features."""
        t = self.table
        return Samples(t.labels, len(t.classes), t.patients, t.centres, t.splits, t.files)

    def prepare_data(self) -> None:
        """Reads the table, so that names and sizes are known."""
        count, names = len(self.table.features), self.table.names
        empty = np.isnan(self.table.features).all(axis=0)
        if empty.all():
            raise DataError(f"{expanded(self.path)} has only missing cells; fill them in.")
        if empty.any():
            first = names[int(empty.argmax())]
            log.warning("%d columns have no value and become 0, such as %s.", empty.sum(), first)
        self.description = f"Data: {expanded(self.path)}, {count} rows."
        if self.path is None:
            yours = "for your data: data=csv data.path=/path/to/table.csv data.label=COLUMN"
            name = self.embedded.replace("_", " ")
            self.description = f"Data: scikit-learn's {name}, {count} patients ({yours})."
        self.channel_names = names  # until the clients have agreed
        self.class_names = self.table.classes
        if self.outcome_scale is not None and not self.samples.continuous:
            raise ConfigError("data.outcome_scale is for continuous outcomes; leave it at null.")
        if self.cuts and (longest := float(self.samples.labels[:, 0].max())) < self.cuts[0]:
            text = "data.cuts begins with %g, but the longest time is %g; write both in one unit."
            log.warning(text, self.cuts[0], longest)

    @property
    def accounts(self) -> Sequence[Account]:
        """See the base class."""
        path = expanded(self.path)
        return self.table.accounts or (tables.counted(path, self.table.features) if path else ())

    def data_remarks(self) -> list[str]:
        """See the base class: labels that are perhaps outcomes, columns that are no features."""
        path, keys = expanded(self.path), "set data.outcome=continuous model=linear"
        remarks = columns.class_remarks(self.class_names, keys)
        if path is None or self.reader is not None or self.features is not None:
            return remarks
        header = [c.strip() for c in self.header or next(csv_rows(path))]
        answers = (self.event or self.label, self.time or "")
        other = {name.lower() for name in (*answers, *self.drop)}
        free = [c for c in header if c.lower() not in other]
        return [*remarks, *columns.role_remarks(free, self.centre, self.patient)]

    def contents(self) -> tuple[str, Iterator[Sample]]:
        """See the base class: rows, if equal ones are unlikely by chance."""
        table, classes = self.table, not self.samples.continuous
        rows = table.features if rows_mean_something(table.features) else table.features[:0]
        return "rows", (
            # Labels that are continuous outcomes may differ without being wrong.
            Sample(patient, patient, row.tobytes(), int(label) if classes else None)
            for row, patient, label in zip(rows, table.patients, table.labels, strict=False)
        )

    def list_patients(self) -> list[Patient]:
        """One patient per distinct id, with its centre, and its label if all its rows agree."""
        return self.samples.list_patients()

    @property
    def columns(self) -> Columns:
        """The inputs; call `setup` first."""
        inputs: Columns = self.agreed.columns
        return inputs

    @property
    def agreed_outcome_scale(self) -> list[float] | None:
        """Mean and deviation of continuous outcomes, None for classes; call `setup` first."""
        scale = self.outcome_scale or self.agreed.outcome
        return None if scale is None else list(scale)

    @property
    def survival(self) -> bool:
        """Whether labels are times and events."""
        return self.samples.survival

    def join(self, federation: FederatedDataModule) -> None:
        """See the base class."""
        assert isinstance(federation, TabularDataModule)
        super().join(federation)
        self.outcome_scale = federation.outcome_scale
        self.categorical = tuple(federation.columns.categories)
        if self.path is not None and self.reader is None:
            self.features = federation.columns.names
            self.joined = federation.table.classes

    def build_clients(self, plans: Mapping[str, ClientPlan]) -> dict[str, ClientData]:
        """Scales by training statistics, as agreed; see the base class."""
        table, agreed = self.table, self.columns
        chosen = {name: self._choose(name, plan) for name, plan in plans.items()}
        if self.survival:
            self.class_names = tuple(f"{cut:g}" for cut in self.cuts or self.agreed.cuts)
        rows = tables.recode(table.features, table.names, table.categories, agreed.categories)
        self.channel_names = tuple(name for name, _ in agreed.inputs())
        sources = [table.names.index(column) for _, column in agreed.inputs()]
        clients = {}
        for name, plan in plans.items():
            # Only training rows: a test row that changes the scale would leak into training.
            numbers = self._numbers(name)
            scaling = self.agreed.scaling_of(numbers) or columns.fit(self.normalization, numbers)
            self.scalings[name] = scaling
            present = plan.channels[sources]
            blocks = {s: self._block(rows, *chosen[name][s], scaling, present) for s in SPLITS}
            clients[name] = self.labelled_client(name, replace(plan, channels=present), blocks)
        train = {client: of.rows for client, of in self.train.items()}
        columns.say(agreed, train, self.scalings)
        self.remarks += columns.constant_remarks(table.names, train)
        if self.samples.continuous and self.agreed_outcome_scale is not None:
            self.remarks += columns.outcome_remarks(*self.agreed_outcome_scale)
        labels = {client: of.outcomes for client, of in self.train.items()}
        self.remarks += columns.leak_remarks(table.names, table.categories, train, labels)
        columns.say_unknown(agreed, rows)
        return clients

    def _choose(self, client: str, plan: ClientPlan) -> dict[Split, Rows]:
        """The rows of a client's splits; training rows are kept."""
        if plan.scanner is not None:
            what = f"Client {client} has a scanner, but tables have no images"
            raise ConfigError(f"{what}; set partition.scanners=null.")
        seeds = {s: derive_seed(self.seed, client, s) for s in SPLITS}
        of = {s: self.samples.select(plan.patients[s], plan.shares, seeds[s]) for s in SPLITS}
        if client not in self.train:
            index, patients = of["train"]
            facts = self.table.features[index], self.table.categories, self.samples.labels[index]
            self.train[client] = agreement.TrainRows(*facts, patients)
            self.train_patients[client] = patients
        return of

    def half(self, client: str) -> Half[agreement.Agreement]:
        """See the base class: missing cells, categories, sums of outcomes, pooled scaling."""
        self._choose(client, self.plans[client])
        settings = self._agreement_settings(self.facts())
        return (yield from agreement.client_side(settings, self.train[client]))

    def merging(self, facts: Mapping[str, Any], claims: Claims | None = None) -> Merging:
        """See the base class."""
        yield from agreement.server_side(self._agreement_settings(facts), claims)

    def facts(self) -> dict[str, Any]:
        """See the base class; adds the columns with categories, and the label."""
        continuous = self.samples.continuous and not self.survival
        more = {"survival": True} if self.survival else {}
        categories = sorted(self.table.categories)
        return {**super().facts(), "categories": categories, "continuous": continuous, **more}

    def summaries(self, client: str) -> list[Statistic]:
        """See the base class: sums of outcomes, and what pooled scaling needs of a column."""
        settings, patients = self._agreement_settings(self.facts()), self.train_patients[client]
        sent: list[tuple[str, str, int, int]] = []  # what, by which key, numbers and patients
        count = len(np.unique(patients))
        if settings.continuous:
            sent.append(("the sums of the outcome", "data.outcome_scale", agreement.SUMS, count))
        if settings.intervals:
            sent.append(("the counts of events by time", "data.cuts", BINS, count))
        for name, column in zip(settings.names, self.train[client].rows.T, strict=True):
            known = len(np.unique(patients[~np.isnan(column)]))
            if not (settings.pooled and known) or name in settings.categorical:
                continue
            key, what = "data.scaling", f"the quartiles and sums of {name}"
            if settings.normalization == "exact_minmax":  # each is the value of one patient
                key += " and data.normalization"
                what, known = f"the smallest and the largest {name}", 1
            elif settings.normalization == "minmax":
                what = f"the range of {name}"
            size = len(settings.ends) + len(settings.positions) ** 2
            sent.append((what, key, size, known))
            if name in self.train[client].contributing:
                most, known = known, self.train[client].contributing[name]
                far = ", beyond which most values lie (another unit?)" * (2 * known < most)
                what = f"the sums of {name} within the limits{far}"
                sent.append((what, key, size, known))
        return [Statistic(client, *each) for each in sent]

    def _agreement_settings(self, facts: Mapping[str, Any]) -> agreement.AgreementSettings:
        """The settings of the agreement of clients with these `facts`."""
        stay: Sequence[str] | None = () if self.scaling == "combat" else None
        if self.covariates:
            numbers = [name for name in facts["channels"] if name not in facts["categories"]]
            stay = check_names("column of numbers", self.covariates, numbers)
        return agreement.AgreementSettings(
            names=facts["channels"],
            indicator=self.missing_indicator,
            normalization=self.normalization,
            pooled=self.scaling != "client",
            categorical=facts["categories"],
            covariates=stay,
            continuous=facts.get("continuous", False) and self.outcome_scale is None,
            intervals=self.intervals if facts.get("survival") and self.cuts is None else 0,
        )

    def _numbers(self, client: str) -> Array:
        """Training values of a client's columns of numbers."""
        return self.train[client].rows[:, self.columns.numeric]

    def preprocessing(self, client: str) -> dict[str, Any]:
        """See the base class; ``input`` also has the columns and their rounded range."""
        scaling, plan = self.scalings[client], self.plans[client]
        ranges = columns.value_range(self._numbers(client), share=0)
        low, high = ([None if np.isnan(v) else v for v in end.tolist()] for end in ranges)
        ends = {"lowest": low, "highest": high}
        has = set(plan.record(self.plan_names)["channels"])
        return {
            **super().preprocessing(client),
            "present": [name for name, column in self.columns.inputs() if column in has],
            "normalization": scaling.facts(),
            "input": {**self.columns.facts(), **ends, **self._reading()},
        }

    def _reading(self) -> dict[str, Any]:
        """How cells are read, where it is not the usual way."""
        words = {"missing": list(map(str, self.missing))} if self.missing else {}
        return words | ({"limits": self.limits} if self.limits != "refuse" else {})

    def _block(
        self, rows: Array, index: Index, case: Index, scaling: Scaling, present: Tensor
    ) -> Batch:
        taken = rows[index]
        image = self.columns.encode(taken, scaling.scale(taken[:, self.columns.numeric]))
        label = torch.from_numpy(self.samples.labels[index])
        keeps = self.survival or not label.is_floating_point()
        return {
            "image": torch.from_numpy(image) * present,
            "label": label if keeps else label.float(),
            "case": torch.from_numpy(case),
        }
