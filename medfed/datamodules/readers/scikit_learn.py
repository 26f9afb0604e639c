"""Data that come with scikit-learn, without a download: tables of real patients, and digits."""

from __future__ import annotations

from medfed.datamodules.extending import *
from medfed.datamodules.readers.samples import ImageSet, Samples
from medfed.datamodules.readers.table import Table


def breast_cancer() -> Table:
    """Breast cancer (Wisconsin): 569 patients, 30 features; 1 = malignant (0 in scikit-learn).

    Example:
        >>> table = breast_cancer()
        >>> table.features.shape, table.classes, int(table.labels.sum())
        ((569, 30), ('benign', 'malignant'), 212)
    """
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer()
    return _table(data, (data.target == 0).astype(np.int64), ("benign", "malignant"))


def diabetes() -> Table:
    """Diabetes: 442 patients, 10 features; the outcome is the disease's progression in a year.

    Source: B. Efron et al., "Least Angle Regression", Annals of Statistics 2004. Features are in
    their original units (age in years, body mass index, blood pressure, six blood values); the
    outcome is a score from 25 to 346.

    Example:
        >>> table = diabetes()
        >>> table.features.shape, table.classes, table.labels[:2].tolist()
        ((442, 10), ('progression',), [151.0, 75.0])
    """
    from sklearn.datasets import load_diabetes

    data = load_diabetes(scaled=False)
    return _table(data, np.asarray(data.target, dtype=np.float64), ("progression",))


def _table(data: Any, labels: NDArray[Any], classes: tuple[str, ...]) -> Table:
    names, features = tuple(map(str, data.feature_names)), np.asarray(data.data, dtype=np.float64)
    return Table(names, features, labels, classes, [f"row_{i}" for i in range(len(labels))])


EMBEDDED: dict[str, Callable[[], Table]] = {"breast_cancer": breast_cancer, "diabetes": diabetes}


def read_digits(path: Path | None = None) -> ImageSet:
    """Handwritten digits: 1,797 images of 8×8 pixels; their writers are unknown."""
    from sklearn.datasets import load_digits

    if path is not None:
        what = f"data.path={path} cannot be used: the digits come with scikit-learn"
        raise ConfigError(f"{what}; use data=image_folder or data=medmnist for your images.")
    data = load_digits()
    labels, images = np.asarray(data.target, dtype=np.int64), np.asarray(data.images, np.uint8)
    samples = Samples(labels, 10, [f"digit_{i}" for i in range(len(labels))])
    names = tuple(map(str, data.target_names))
    return ImageSet(images[:, None], ("grey",), names, samples, "scikit-learn's digits", peak=16)
