"""Tables, for clinical risk or a continuous outcome: any CSV, or one that scikit-learn has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.preprocessing import MinMaxScaler
from torch import Tensor

from medfed.datamodules.base import ClientPlan, FederatedDataModule, resolve_root
from medfed.datamodules.classified import check_outcome, labelled_client
from medfed.datamodules.client_data import SPLITS, Batch, ClientData, Split
from medfed.datamodules.partitions.base import Partition
from medfed.datamodules.readers.base import Patient
from medfed.datamodules.readers.embedded import embedded as read_embedded
from medfed.datamodules.readers.table import Outcome, Table, read_csv
from medfed.datamodules.samples import Samples
from medfed.datamodules.seeding import derive_seed
from medfed.errors import ConfigError

Index = NDArray[np.int64]


class TabularDataModule(FederatedDataModule):
    """Rows of a table, scaled to [-1, 1]; ``image`` is (B, F), ``label`` (B,) int64 or an outcome.

    An outcome is float32, in its own unit: nothing is done to it.

    Args:
        partition: Assigns patients to clients.
        seed: Seed of partition and splits.
        path: A CSV file (or what `reader` reads); None takes the table `embedded`.
        label: Name of the label column.
        features: Feature columns; None takes all that have no other role.
        centre: Column with the hospital, for the natural partition.
        patient: Column with the patient; None makes every row a patient.
        positive: Label values that count as class 1; None makes every distinct value a class.
        header: Column names of a file without a header line.
        val_fraction: Share of validation patients per client.
        test_fraction: Share of test patients per client.
        batch_size: Rows per training batch.
        eval_batch_size: Rows per evaluation batch.
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

    Raises:
        ConfigError: If a choice is unknown, or classes are named of a continuous outcome.
    """

    def __init__(
        self,
        partition: Partition,
        seed: int = 0,
        path: str | None = None,
        label: str = "label",
        features: Sequence[str] | None = None,
        centre: str | None = None,
        patient: str | None = None,
        positive: Sequence[str | int | float] | None = None,
        header: Sequence[str] | None = None,
        val_fraction: float = 0.2,
        test_fraction: float = 0.2,
        batch_size: int = 32,
        eval_batch_size: int = 1024,
        scaling: Literal["client", "pooled"] = "client",
        missing_indicator: bool = False,
        reader: Callable[[Path], Table] | None = None,
        negative: Sequence[str | int | float] | None = None,
        outcome: Outcome = "classes",
        embedded: str = "breast_cancer",
    ) -> None:
        super().__init__(partition, seed, val_fraction, test_fraction)
        if scaling not in ("client", "pooled"):
            raise ConfigError(f"Unknown data.scaling={scaling}; known: client, pooled.")
        check_outcome(outcome)
        if outcome == "continuous" and not (positive is None and negative is None):
            raise ConfigError(
                "data.positive and data.negative name classes; leave them out with "
                "data.outcome=continuous."
            )
        self.path = resolve_root(path)
        self.embedded = embedded
        self.columns = (label, features, centre, patient, positive, header, negative, outcome)
        self.read = reader or (lambda file: read_csv(file, *self.columns))
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.scaling = scaling
        self.missing_indicator = missing_indicator
        self.table: Table | None = None
        self.pooled_scaler: MinMaxScaler | None = None  # of a federation that these data join
        self.scalers: dict[str, MinMaxScaler] = {}

    def prepare_data(self) -> None:
        """Reads the table, so that names and sizes are known."""
        if self.table is not None:
            return
        if self.path is None:
            self.table = read_embedded(self.embedded)
            self.description = (
                f"Data: scikit-learn's {self.embedded.replace('_', ' ')}, "
                f"{len(self.table.labels)} patients "
                "(your own: data=csv data.path=/path/to/table.csv data.label=COLUMN)."
            )
        else:
            self.table = self.read(self.path)
            self.description = f"Data: {self.path}, {len(self.table.labels)} rows."
        names = self.table.names
        if self.missing_indicator:
            names += tuple(f"{name} missing" for name in names)
        self.channel_names = names
        self.class_names = self.table.classes

    def list_patients(self) -> list[Patient]:
        """One patient per distinct id, with its centre, and its label where all its rows agree."""
        self.prepare_data()
        assert self.table is not None
        table = self.table
        self.samples = Samples(
            table.labels, self.num_classes, table.patients, table.centres or (), files=table.files
        )
        return self.samples.list_patients()

    def build_clients(self, plans: Mapping[str, ClientPlan]) -> dict[str, ClientData]:
        """Scales every client's rows by training statistics; see the base class."""
        assert self.table is not None
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
            clients[name] = labelled_client(
                name, plan, blocks, self.num_classes, self.batch_size, self.eval_batch_size
            )
        return clients

    def preprocessing(self, client: str) -> dict[str, Any]:
        """See the base class: features from the minimum to the maximum scaled to [-1, 1]."""
        assert self.table is not None
        scaler = self.scalers[client]
        return {
            **super().preprocessing(client),
            "normalization": {
                "name": "minmax",
                "minimum": scaler.data_min_.tolist(),
                "maximum": scaler.data_max_.tolist(),
                "to": [-1, 1],
                "missing": 0,
            },
            "input": {
                "kind": "table",
                "features": list(self.table.names),
                "missing_indicator": self.missing_indicator,
            },
        }

    def _select(self, client: str, plan: ClientPlan) -> dict[Split, tuple[Index, Index]]:
        if plan.site is not None:
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
        assert self.table is not None
        image = scale(self.table.features[index], scaler, self.missing_indicator)
        label = torch.from_numpy(self.table.labels[index])
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
