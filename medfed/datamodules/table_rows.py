"""The rows of a table: which columns are features, labels, hospitals and patients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from medfed.common.errors import ConfigError, DataError
from medfed.common.files import ExistingPath
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.duplicates import Sample, rows_mean_something
from medfed.datamodules.readers.base import Patient, expanded
from medfed.datamodules.readers.csv_rows import csv_rows
from medfed.datamodules.readers.samples import Samples
from medfed.datamodules.readers.scikit_learn import embedded as read_embedded
from medfed.datamodules.readers.table import (
    Outcome,
    Table,
    check_outcome,
    read_csv,
    with_categories,
)
from medfed.datamodules.table_notes import role_remarks

log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class TableRows(FederatedDataModule):
    """Reads any CSV, or a table that scikit-learn has.

    Attributes:
        path: A CSV file (or what `reader` reads); None takes the table `embedded`.
        label: Name of the label column.
        features: Feature columns; None takes all that have no other role.
        centre: Column with the hospital, for the natural partition.
        patient: Column with the patient; None makes every row a patient.
        positive: Label values that count as class 1; None makes every distinct value a class.
        header: Column names of a file without a header line.
        categorical: Columns that hold categories, also numbered ones; None takes the columns of a
            CSV file that hold texts, as `readers.column_kinds.find_kinds` says.
        reader: Reads `path` where it is no CSV file; the columns are then the reader's affair.
        negative: Label values that count as class 0, where `positive` is given; None takes all
            others.
        outcome: What the label column of a CSV file holds: ``"classes"``, or ``"continuous"``
            numbers.
        embedded: A table that comes with scikit-learn: ``"breast_cancer"`` or ``"diabetes"``.
        eval_batch_size: Rows per evaluation batch.

    Raises:
        ConfigError: If classes are named of a continuous outcome, or it is neither.
    """

    _: KW_ONLY
    path: ExistingPath | None = None
    label: str = "label"
    features: Sequence[str] | None = None
    centre: str | None = None
    patient: str | None = None
    positive: Sequence[str | int | float] | None = None
    header: Sequence[str] | None = None
    categorical: Sequence[str] | None = None
    reader: Callable[[Path], Table] | None = None
    negative: Sequence[str | int | float] | None = None
    outcome: Outcome = "classes"
    embedded: str = "breast_cancer"
    eval_batch_size: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        check_outcome(self.outcome)
        if self.outcome == "continuous" and not (self.positive is None and self.negative is None):
            raise ConfigError(
                "data.positive and data.negative name classes; leave them out with "
                "data.outcome=continuous."
            )

    @cached_property
    def table(self) -> Table:
        """All rows."""
        if (path := expanded(self.path)) is not None and self.reader is None:
            return read_csv(
                path,
                self.label,
                self.features,
                self.centre,
                self.patient,
                self.positive,
                self.header,
                self.negative,
                self.outcome,
                "auto" if self.categorical is None else self.categorical,
            )
        whole = read_embedded(self.embedded) if path is None else self.reader(path)  # type: ignore[misc]
        return with_categories(whole, self.categorical or ())

    @property
    def plan_names(self) -> tuple[str, ...]:
        """See the base class."""
        return self.table.names

    @cached_property
    def samples(self) -> Samples:
        """What is known of the rows beside their features."""
        t = self.table
        return Samples(t.labels, len(t.classes), t.patients, t.centres, files=t.files)

    def prepare_data(self) -> None:
        """Reads the table, so that names and sizes are known."""
        count, names = len(self.table.features), self.table.names
        empty = np.isnan(self.table.features).all(axis=0)
        if empty.all():
            raise DataError(f"{expanded(self.path)} has only missing cells; fill them in.")
        if empty.any():
            first = names[int(empty.argmax())]
            log.warning("%d columns have no value and count as 0, such as %s.", empty.sum(), first)
        self.description = f"Data: {expanded(self.path)}, {count} rows."
        if self.path is None:
            self.description = (
                f"Data: scikit-learn's {self.embedded.replace('_', ' ')}, {count} patients "
                "(your own: data=csv data.path=/path/to/table.csv data.label=COLUMN)."
            )
        self.channel_names = names  # until the clients have agreed
        self.class_names = self.table.classes

    def data_remarks(self) -> list[str]:
        """See the base class: columns that may have another role than that of a feature."""
        path = expanded(self.path)
        if path is None or self.reader is not None or self.features is not None:
            return []
        with csv_rows(path) as rows:
            columns = [c.strip() for c in self.header or next(rows)]
        free = [c for c in columns if c.lower() != self.label.lower()]
        return role_remarks(free, self.centre, self.patient)

    def contents(self) -> tuple[str, Iterator[Sample]]:
        """See the base class: rows, where equal ones are hardly chance."""
        table, classes = self.table, not self.samples.continuous
        rows = table.features if rows_mean_something(table.features) else table.features[:0]
        return "rows", (
            # A label may be an outcome, and then differs without being wrong.
            Sample(patient, patient, row.tobytes(), int(label) if classes else None)
            for row, patient, label in zip(rows, table.patients, table.labels, strict=False)
        )

    def list_patients(self) -> list[Patient]:
        """One patient per distinct id, with its centre, and its label where all its rows agree."""
        return self.samples.list_patients()
