"""Tables, for clinical risk or a continuous outcome: any CSV, or one that scikit-learn has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medfed.common.checks import check_known
from medfed.common.errors import ConfigError, DataError
from medfed.common.files import ExistingPath
from medfed.common.seeding import derive_seed
from medfed.datamodules.base import FederatedDataModule, expanded
from medfed.datamodules.client_data import Batch, ClientData
from medfed.datamodules.plans import ClientPlan
from medfed.datamodules.readers.base import Patient
from medfed.datamodules.readers.samples import Index, Samples
from medfed.datamodules.readers.scikit_learn import embedded as read_embedded
from medfed.datamodules.readers.table import Outcome, Table, check_outcome, read_csv
from medfed.datamodules.splits import SPLITS, Split

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from sklearn.preprocessing import MinMaxScaler


@dataclass(eq=False, repr=False)
class TabularDataModule(FederatedDataModule):
    """Rows of a table, scaled to [-1, 1]; ``image`` is (B, F), ``label`` (B,) int64 or an outcome.

    An outcome is float32, in its own unit: nothing is done to it.

    Attributes:
        path: A CSV file (or what `reader` reads); None takes the table `embedded`.
        label: Name of the label column.
        features: Feature columns; None takes all that have no other role.
        centre: Column with the hospital, for the natural partition.
        patient: Column with the patient; None makes every row a patient.
        positive: Label values that count as class 1; None makes every distinct value a class.
        header: Column names of a file without a header line.
        scaling: Whose training rows the minimum and maximum come from. ``"client"``: the client's
            own, so nothing leaves a hospital; ``"pooled"``: all clients', so that one unit means
            the same everywhere, at the price of 2F numbers per client that would have to be
            exchanged once beforehand (not counted in the ledger).
        missing_indicator: Whether to append, per feature, 1 where the cell was missing.
        reader: Reads `path` where it is no CSV file; the columns are then the reader's affair.
        negative: Label values that count as class 0, where `positive` is given; None takes all
            others.
        outcome: What the label column of a CSV file holds: ``"classes"``, or ``"continuous"``
            numbers.
        embedded: A table that comes with scikit-learn: ``"breast_cancer"`` or ``"diabetes"``.
        eval_batch_size: Rows per evaluation batch.

    Raises:
        ConfigError: If a choice is unknown, or classes are named of a continuous outcome.
    """

    _: KW_ONLY
    path: ExistingPath | None = None
    label: str = "label"
    features: Sequence[str] | None = None
    centre: str | None = None
    patient: str | None = None
    positive: Sequence[str | int | float] | None = None
    header: Sequence[str] | None = None
    scaling: Literal["client", "pooled"] = "client"
    missing_indicator: bool = False
    reader: Callable[[Path], Table] | None = None
    negative: Sequence[str | int | float] | None = None
    outcome: Outcome = "classes"
    embedded: str = "breast_cancer"
    eval_batch_size: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        check_known("data.scaling", self.scaling, ("client", "pooled"))
        check_outcome(self.outcome)
        if self.outcome == "continuous" and not (self.positive is None and self.negative is None):
            raise ConfigError(
                "data.positive and data.negative name classes; leave them out with "
                "data.outcome=continuous."
            )
        self.pooled_scaler: MinMaxScaler | None = None  # of a federation that these data join
        self.scalers: dict[str, MinMaxScaler] = {}

    @cached_property
    def table(self) -> Table:
        """All rows."""
        if (path := expanded(self.path)) is None:
            return read_embedded(self.embedded)
        if self.reader is not None:
            return self.reader(path)
        roles = (self.label, self.features, self.centre, self.patient)
        return read_csv(path, *roles, self.positive, self.header, self.negative, self.outcome)

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
        indicators = tuple(f"{name} missing" for name in names) if self.missing_indicator else ()
        self.channel_names = names + indicators
        self.class_names = self.table.classes

    def list_patients(self) -> list[Patient]:
        """One patient per distinct id, with its centre, and its label where all its rows agree."""
        return self.samples.list_patients()

    def build_clients(self, plans: Mapping[str, ClientPlan]) -> dict[str, ClientData]:
        """Scales every client's rows by training statistics; see the base class."""
        features = self.table.features
        chosen = {client: self._select(client, plan) for client, plan in plans.items()}
        train = {client: features[parts["train"][0]] for client, parts in chosen.items()}
        if self.scaling == "pooled" and self.pooled_scaler is None:
            pooled = [rows for c, rows in train.items() if c not in self.keep_out]
            self.pooled_scaler = fit_scaler(np.concatenate(pooled))
        clients = {}
        for name, plan in plans.items():
            scaler = fit_scaler(train[name]) if self.pooled_scaler is None else self.pooled_scaler
            self.scalers[name] = scaler
            blocks = {s: self._block(*chosen[name][s], scaler, plan.channels) for s in SPLITS}
            clients[name] = self.labelled_client(name, plan, blocks)
        return clients

    def preprocessing(self, client: str) -> dict[str, Any]:
        """See the base class: features from the minimum to the maximum scaled to [-1, 1]."""
        scaler, names = self.scalers[client], list(self.table.names)
        limits = {"minimum": scaler.data_min_.tolist(), "maximum": scaler.data_max_.tolist()}
        indicator = self.missing_indicator
        return {
            **super().preprocessing(client),
            "normalization": {"name": "minmax", **limits, "to": [-1, 1], "missing": 0},
            "input": {"kind": "table", "features": names, "missing_indicator": indicator},
        }

    def _select(self, client: str, plan: ClientPlan) -> dict[Split, tuple[Index, Index]]:
        if plan.scanner is not None:
            raise ConfigError(
                f"Client {client} has a scanner, but tables have no images; choose another "
                "partition than site_effect."
            )
        return {
            split: self.samples.select(
                plan.patients[split], plan.shares, derive_seed(self.seed, client, split)
            )
            for split in SPLITS
        }

    def _block(self, index: Index, case: Index, scaler: MinMaxScaler, present: Tensor) -> Batch:
        image = scale(self.table.features[index], scaler, self.missing_indicator)
        label = torch.from_numpy(self.samples.labels[index])
        return {
            "image": torch.from_numpy(image) * present,
            "label": label.float() if label.is_floating_point() else label,
            "case": torch.from_numpy(case),
        }


def fit_scaler(train: NDArray[np.float64]) -> MinMaxScaler:
    """Learns minimum and maximum per feature, ignoring missing cells.

    Args:
        train: (N, F) training rows; NaN is missing. A feature without any value becomes 0.

    Returns:
        A scaler to [-1, 1] that clips what lies outside the training range.

    Example:
        >>> fit_scaler(np.array([[0.0], [4.0]])).transform([[1.0], [8.0]]).ravel().tolist()
        [-0.5, 1.0]
    """
    from sklearn.preprocessing import MinMaxScaler

    empty = np.isnan(train).all(axis=0)
    return MinMaxScaler(feature_range=(-1, 1), clip=True).fit(np.where(empty, 0.0, train))


def scale(
    rows: NDArray[np.float64], scaler: MinMaxScaler, missing_indicator: bool = False
) -> NDArray[np.float32]:
    """Scales rows and fills missing cells with 0, the middle of the range.

    Args:
        rows: (N, F); NaN is missing.
        scaler: From `fit_scaler`.
        missing_indicator: Whether to append (N, F) indicators of missing cells.

    Returns:
        (N, F), or (N, 2F) with indicators.

    Example:
        >>> scaler = fit_scaler(np.array([[0.0], [4.0]]))
        >>> scale(np.array([[4.0], [np.nan]]), scaler, missing_indicator=True).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    missing = np.isnan(rows)
    filled = np.nan_to_num(scaler.transform(rows)) if len(rows) else rows
    out = np.concatenate([filled, missing], axis=1) if missing_indicator else filled
    return np.ascontiguousarray(out, dtype=np.float32)
