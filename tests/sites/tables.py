"""Hospitals with a table each, beside one table of all."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

SITES = ("Basel", "Bern", "Chur")
EXPERIMENT = (
    *("experiment=clinical_pfednet", "data=csv", "data.label=ill", "data.centre=hospital"),
    *("data.patient=patient", "data.scaling=pooled", "rounds=3", "local.steps=2"),
    *("logger=none", "progress=false"),
)


def write_table(path: Path, sites: tuple[str, ...]) -> None:
    """Writes the rows of some hospitals."""
    rng = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["patient", "hospital", "age", "sex", "crp", "ill"])
        for n in range(240):
            row = [f"P{n:03d}", SITES[n % 3], round(rng.normal(60, 9), 1), "fm"[rng.integers(2)]]
            row += [round(rng.lognormal(), 2) if n % 7 else "", rng.integers(2)]
            if row[1] in sites:
                out.writerow(row)
