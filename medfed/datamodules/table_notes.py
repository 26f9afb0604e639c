"""Lines about a table before training: what is altered, and what tells nothing."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from medfed.datamodules.readers.base import few
from medfed.datamodules.table_columns import Array, Columns
from medfed.datamodules.table_scaling import Scaling, Standard

log = logging.getLogger("medfed.datamodules.tabular")
_END = r"([ _-]?(id|no|nr|number|name|code))?"
_HOSPITAL = re.compile(rf"(hospital|centre|center|site|institution|clinic){_END}", re.IGNORECASE)
_PATIENT = re.compile(rf"(patient|subject|person|participant|mrn|pid){_END}|id", re.IGNORECASE)


def say(columns: Columns, train: Mapping[str, Array], scalings: Mapping[str, Scaling]) -> None:
    """Names what becomes of training cells, a line each.

    Args:
        columns: What the columns are.
        train: (N, F) training rows of every client.
        scalings: That of every client.
    """
    rows, names = np.concatenate(list(train.values())), columns.names
    standard = any(isinstance(scaling, Standard) for scaling in scalings.values())
    gaps = np.isnan(rows).mean(axis=0)
    shares = [f"{names[at]} {100 * gaps[at]:.0f} %" for at in np.flatnonzero(gaps)]
    if shares and standard:
        beside = "; an indicator says where" if columns.indicators else ""
        log.info("Missing training cells become the median%s: %s.", beside, few(shares, 8))
    if far := _far_out(columns, train, scalings):
        log.warning(
            "Training values far from all others (3 interquartile ranges beyond the quartiles) "
            "count as that limit: %s.",
            few([f"{count} of {name}" for name, count in far.most_common()], 8),
        )
    known = [column[~np.isnan(column)] for column in rows.T]
    alike = [n for n, c in zip(names, known, strict=True) if len(c) and np.ptp(c) == 0]
    if alike:
        log.warning("The same in all training rows, so of no use: %s.", few(alike, 8))


def role_remarks(names: Sequence[str], centre: str | None, patient: str | None) -> list[str]:
    """Says which columns look like hospitals or patients, where nobody has named such a column.

    Args:
        names: Of all columns but the label.
        centre: ``data.centre``.
        patient: ``data.patient``.

    Example:
        >>> role_remarks(["age", "Hospital"], None, None)
        ['If the column Hospital says where patients come from, set data.centre=Hospital.']
        >>> role_remarks(["age", "patient_id"], "place", None)
        ['If the column patient_id tells patients apart, set data.patient=patient_id: else the \
rows of one may stand in several splits.']
    """
    found = []
    for name in names:
        if centre is None and _HOSPITAL.fullmatch(name):
            found.append(
                f"If the column {name} says where patients come from, set data.centre={name}."
            )
        if patient is None and _PATIENT.fullmatch(name):
            found.append(
                f"If the column {name} tells patients apart, set data.patient={name}: else the "
                "rows of one may stand in several splits."
            )
    return found


def say_unknown(columns: Columns, rows: Array) -> None:
    """Names columns with categories that no training row has; (N, F) rows, -1 for these."""
    for name in columns.categories:
        if count := int((rows[:, columns.names.index(name)] < 0).sum()):
            log.warning(
                "Rows outside of training with a category of %s that no training row has: %d; it "
                "counts as none.",
                name,
                count,
            )


def _far_out(
    columns: Columns, train: Mapping[str, Array], scalings: Mapping[str, Scaling]
) -> Counter[str]:
    """Training values beyond the limits, by column."""
    found: Counter[str] = Counter()
    for client, scaling in scalings.items():
        if isinstance(scaling, Standard):
            counts = scaling.far_out(train[client][:, columns.numeric]).tolist()
            names = [columns.names[at] for at in columns.numeric]
            found.update({n: c for n, c in zip(names, counts, strict=True) if c})
    return found
