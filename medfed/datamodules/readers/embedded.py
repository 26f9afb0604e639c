"""Tables that come with scikit-learn: real patients, and nothing to download."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from medfed.datamodules.readers.table import Table
from medfed.errors import ConfigError, did_you_mean


def breast_cancer() -> Table:
    """Breast cancer (Wisconsin): 569 patients, 30 features; 1 = malignant.

    Scikit-learn codes malignant as 0; here the disease is the positive class.

    Example:
        >>> table = breast_cancer()
        >>> table.features.shape, table.classes, int(table.labels.sum())
        ((569, 30), ('benign', 'malignant'), 212)
    """
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer()
    return Table(
        names=tuple(str(name) for name in data.feature_names),
        features=np.asarray(data.data, dtype=np.float64),
        labels=(data.target == 0).astype(np.int64),
        classes=("benign", "malignant"),
        patients=tuple(f"row_{i}" for i in range(len(data.target))),
    )


def diabetes() -> Table:
    """Diabetes: 442 patients, 10 features; the outcome is the disease's progression in a year.

    Source: B. Efron et al., "Least Angle Regression", Annals of Statistics 2004. Features are in
    their own units (age in years, body mass index, blood pressure, six blood values); the outcome
    is a score from 25 to 346.

    Example:
        >>> table = diabetes()
        >>> table.features.shape, table.classes, table.labels[:2].tolist()
        ((442, 10), ('progression',), [151.0, 75.0])
    """
    from sklearn.datasets import load_diabetes

    data = load_diabetes(scaled=False)
    return Table(
        names=tuple(str(name) for name in data.feature_names),
        features=np.asarray(data.data, dtype=np.float64),
        labels=np.asarray(data.target, dtype=np.float64),
        classes=("progression",),
        patients=tuple(f"row_{i}" for i in range(len(data.target))),
    )


EMBEDDED: dict[str, Callable[[], Table]] = {"breast_cancer": breast_cancer, "diabetes": diabetes}


def embedded(name: str) -> Table:
    """Reads a table by its name.

    Args:
        name: One of `EMBEDDED`.

    Raises:
        ConfigError: If there is no such table.

    Example:
        >>> len(embedded("diabetes").names)
        10
    """
    if name not in EMBEDDED:
        raise ConfigError(
            f"Unknown data.embedded={name}{did_you_mean(name, EMBEDDED)}; choose "
            f"{' or '.join(EMBEDDED)}."
        )
    return EMBEDDED[name]()
