"""What a hospital's training patients are like, in the columns of studies: ``medfed look``.

A cell of fewer patients than `least` is None, and so is a cell that would follow from it and the
others: the second smallest of a division, and a share whose complement is too small. Statistics
have the floor of :mod:`medfed.common.floors`; all of them count patients, not samples.
"""

from __future__ import annotations

import numpy as np

from medfed.common.floors import Statistic, divided
from medfed.datamodules.base import FederatedDataModule
from medfed.reports.look import DEVIATIONS, LABELS, MEANS, MISSING, Cells, Description
from medfed.studies.cohorts import COHORTS, Cohort
from medfed.studies.rows import OUTCOME

_CODES = 3  # values of a column whose mean and deviation give their counts away


def share(have: int, of: int, least: int) -> float | None:
    """Returns a share of patients; None if too few have it, or too few have it not.

    Example:
        >>> share(30, 40, least=5), share(38, 40, least=5), share(40, 40, least=5)
        (0.75, None, 1.0)
    """
    return None if 0 < have < least or 0 < of - have < least else have / max(of, 1)


def described(data: FederatedDataModule, client: str, least: int = 0) -> Description:
    """Describes one client's training patients."""
    plan, tables = data.plans[client], dict[str, Cells]()
    tables["Patients"] = {**divided({s: len(p) for s, p in plan.patients.items()}, least)}
    patients = [data.patients[name] for name in plan.patients["train"]]
    if not 0 < len(patients) < least:
        if all(p.label is not None or p.counts is not None for p in patients):
            has = np.array([p.class_counts(data.num_classes) for p in patients]) > 0
            counts = dict(zip(data.class_names, has.sum(axis=0).tolist(), strict=True))
            printed = divided(counts, least) if (has.sum(axis=1) <= 1).all() else {**counts}
            tables[LABELS] = {
                name: None if printed[name] is None else share(count, len(has), least)
                for name, count in counts.items()
            }
        if isinstance(data, COHORTS):
            tables |= _of_columns(Cohort(data, client, splits=("train",)), least)
    return Description(hospital=client, least=least, tables={t: c for t, c in tables.items() if c})


def _of_columns(cohort: Cohort, least: int) -> dict[str, Cells]:
    """Tables of all columns, each of the patients whose cells are known."""
    rows, regions = cohort.rows(), [*cohort.data.class_names]
    columns, count = dict(rows.columns), len(np.unique(rows.patients))
    tables: dict[str, Cells] = {title: {} for title in (LABELS, MISSING, MEANS, DEVIATIONS)}
    if rows.survival is not None:
        columns[OUTCOME] = rows.survival[:, 0]
    for name, column in columns.items():
        if name == OUTCOME and name in rows.categories:
            continue  # its shares are those of the labels
        known, least_of_values = ~np.isnan(column), [count]
        cells, owners = column[known], rows.patients[known]
        of, without = len(np.unique(owners)), len(np.unique(rows.patients[~known]))
        tables[MISSING][name] = share(without, count, least)

        def behind(value: float) -> int:
            return len(np.unique(owners[cells == value]))  # noqa: B023 - of this column alone

        if name in regions:  # a finding
            tables[LABELS][name] = share(behind(1), of, least)
        elif texts := rows.categories.get(name):
            printed = divided({text: behind(n) for n, text in enumerate(texts)}, least)
            tables[f"Shares of {name}"] = {
                text: None if n is None else n / max(of, 1) for text, n in printed.items()
            }
        elif of:
            if len(values := np.unique(cells)) <= _CODES:
                least_of_values = [behind(value) for value in values]
            few = least and Statistic("", "", "", 2, min(of, *least_of_values)).too_few(least)
            for title, value in ((MEANS, cells.mean()), (DEVIATIONS, cells.std())):
                tables[title][name] = None if few else float(f"{value:.4g}")
            region = name.rpartition(" ")[0]
            if region in regions:
                has = len(np.unique(owners[cells > 0]))
                tables[LABELS][region] = share(has, count, least)
    return {title: cells for title, cells in tables.items() if cells}
