"""Volumes in a cache, and the base classes of data modules whose data are on disk.

A z-scored volume is zero outside the head, and if the scanner wrote integers each channel has few
values. So the cache stores the box around the head, as two-byte indices into a table of the
channel's values. Reading restores the stored volume bit by bit.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Generic, TypeVar

import torch
from torch import Tensor

from medfed.datamodules.augmentation import Augment, Augmentation
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.cache.store import Arrays, Recipe, Store, build, find
from medfed.datamodules.extending import *
from medfed.datamodules.generated.cohort import Cohort, ScanCohort
from medfed.datamodules.readers.base import Account, account_of, expanded
from medfed.standalone import dicom
from medfed.standalone.preparation import Preparation, bounding_box, millimetres, one_thread
from medfed.standalone.volume_files import files_of_case

_ALIKE = 1.1  # voxels of hospitals differ if their medians' ratio along an axis is larger


def read_case(
    reader: VolumeReader, case: Patient, preparation: Preparation | None = None
) -> Arrays:
    """Reads one case as `encode` stores it; with ``grid`` if label and image differ in it."""
    with one_thread():
        sample = reader.prepared(case, preparation)
        arrays = encode(sample["image"].numpy(), sample["label"].numpy())
    return arrays | ({"grid": sample["grid"].numpy()} if "grid" in sample else {})


def cached_volume(store: Store, patient: str) -> dict[str, Tensor]:
    """Reads one patient from the cache."""
    arrays = store.arrays(patient)
    image, label = decode(arrays)
    volume = {"image": torch.from_numpy(image), "label": torch.from_numpy(label)}
    if "grid" in arrays:
        volume["grid"] = torch.from_numpy(np.array(arrays["grid"]))
    return volume


def encode(image: NDArray[np.float32], label: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
    """Crops a volume to its non-zero box, and replaces its values by indices if they are few.

    Returns ``box`` (3, 3): first voxel and end of the box, and the volume's size; ``label_box`` if
    the label has another grid; ``label`` (R, h, w, d); and ``image`` (C, h, w, d), or ``codes``
    uint16 with ``values`` (C, K).

    Example:
        >>> image = np.zeros((1, 4, 4, 4), np.float32)
        >>> image[0, 1:3, 2, 0] = 7.5, -0.5
        >>> stored = encode(image, np.zeros((1, 4, 4, 4), np.uint8))
        >>> stored["codes"].ravel().tolist(), stored["values"].tolist()
        ([1, 0], [[-0.5, 7.5]])
        >>> bool((decode(stored)[0] == image).all())
        True
    """
    inside, labelled = (image != 0).any(axis=0), (label != 0).any(axis=0)
    if inside.shape == labelled.shape:
        # One box for both: an annotation may reach into air, where the image is 0.
        box = label_box = bounding_box(inside | labelled)
    else:
        box, label_box = bounding_box(inside), bounding_box(labelled)
    arrays = {"box": _spans(box, inside), "label": np.ascontiguousarray(label[:, *label_box])}
    if inside.shape != labelled.shape:
        arrays["label_box"] = _spans(label_box, labelled)
    cropped = np.ascontiguousarray(image[:, *box])
    values = [np.unique(channel) for channel in cropped]
    longest = max(map(len, values))
    if longest > 2**16:
        return {**arrays, "image": cropped}
    codes = [np.searchsorted(v, c) for v, c in zip(values, cropped, strict=True)]
    tables = [np.pad(v, (0, longest - len(v))) for v in values]
    return {**arrays, "codes": np.stack(codes).astype(np.uint16), "values": np.stack(tables)}


def decode(arrays: Arrays) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Undoes `encode`: image (C, H, W, D) and label (R, H, W, D), in memory."""
    (x, y, z), size = _box(arrays["box"])
    stored = arrays.get("codes", arrays.get("image"))
    assert stored is not None
    image = np.zeros((len(stored), *size), dtype=np.float32)
    for channel, values in enumerate(stored):
        inside = arrays["values"][channel].take(values) if "values" in arrays else values
        image[channel, x, y, z] = inside
    (x, y, z), size = _box(arrays.get("label_box", arrays["box"]))
    label = np.zeros((len(arrays["label"]), *size), dtype=np.uint8)
    label[:, x, y, z] = arrays["label"]
    return image, label


def _spans(box: Sequence[slice], mask: NDArray[np.bool_]) -> NDArray[Any]:
    spans = [[s.start for s in box], [s.stop for s in box], list(mask.shape)]
    return np.array(spans, dtype=np.int64)


def _box(spans: NDArray[Any]) -> tuple[list[slice], list[int]]:
    starts, ends, size = np.asarray(spans).tolist()
    return [slice(a, b) for a, b in zip(starts, ends, strict=True)], size


def uneven_sizes(sizes: Mapping[str, Any], dims: int) -> tuple[str, list[float]] | None:
    """Which clients have voxels of other sizes (3,) along the first `dims`, and the middle size.

    Example:
        >>> sizes = {"a": np.array([1.0, 1.0, 3.0]), "b": np.array([2.0, 2.0, 3.0])}
        >>> uneven_sizes(sizes, 2)
        ('Clients differ in the size of voxels: 1 × 1 × 3 mm at a, 2 × 2 × 3 mm at b.', [1.5, 1.5])
    """
    along = np.array([*sizes.values()])[:, :dims]
    if not np.isfinite(along).all() or (along.max(axis=0) <= _ALIKE * along.min(axis=0)).all():
        return None
    clients: dict[str, list[str]] = {}
    for client, size in sizes.items():
        clients.setdefault(f"{millimetres(size)} mm", []).append(client)
    listed = few([f"{size} at {few(names, 4)}" for size, names in clients.items()], 4)
    middle = np.median(along, axis=0).round(3).tolist()
    return f"Clients differ in the size of voxels: {listed}.", middle


AnyReader = TypeVar("AnyReader", bound=Reader)


@dataclass(eq=False, repr=False)
class OnDiskDataModule(FederatedDataModule):
    """Base of the data modules whose data are in a file or folder."""

    _: KW_ONLY
    path: str | None = None  # the data; None generates `generated` below `root`
    root: str = "data"  # folder for generated data
    # The cohort to generate if `path` is None. If it has patients for testing, they decide
    # `test_fraction`, and `val_fraction` is a share of the others.
    generated: Cohort | None = None
    # How to alter training images: a recipe of `configs/augment`, a random MONAI dict transform of
    # one sample's ``image`` and ``label``, or None.
    augment: Augmentation | Augment | None = None
    # Axes along which a recipe may flip images without changing their meaning.
    flips: Sequence[int] = ()
    # Processes that make training batches ahead; 0 makes them on demand.
    workers: Annotated[int, within("[0, 64]")] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(isinstance(axis, int) and axis >= 0 for axis in self.flips):
            raise ConfigError(f"data.flips={[*self.flips]} must be axes: 0, 1, and 2 of volumes.")
        made = self.generated if self.path is None else None
        if isinstance(made, ScanCohort) and made.test_patients:
            self.test_fraction = made.test_patients / made.each
            self.val_fraction *= made.patients / made.each

    @cached_property
    def source(self) -> Path | None:
        """The folder of the data; generates them first if needed."""
        if self.path is None and self.generated is not None:
            made, self.description = self.generated.provide(Path(self.root).expanduser())
            return made
        path = expanded(self.path)
        self.description = f"Data: {path}."
        return path

    def files_with(
        self,
        endings: Collection[str],
        reasons: Mapping[Path, str],
        more: Sequence[Path] = (),
        series: Sequence[str] = (),
    ) -> list[Account]:
        """Counts the files that the patients have, and all others beside them."""
        if (path := self.source) is None:
            return []
        volumes = [file for p in self.patients.values() for file in p.files.values()]
        return [account_of(path, [*files_of_case(volumes, series), *more], endings, reasons)]


@dataclass(eq=False, repr=False)
class CachedDataModule(OnDiskDataModule, Generic[AnyReader]):
    """Base of the data modules that cache data which are slow to read."""

    reader: Callable[[Path], AnyReader]  # makes the reader for a folder
    _: KW_ONLY
    cache: str | None = None  # folder of caches; None is ``cache`` below `root`
    store: Store | None = field(default=None, init=False)  # the cache, once it is open

    @cached_property
    def scans(self) -> AnyReader:
        """The reader of these data."""
        return self.reader(given_path(self.source))

    @property
    def caches(self) -> Path:
        """The folder of caches; never in the folder of the user's data."""
        chosen = Path(self.cache or Path(self.root, "cache")).expanduser()
        if self.path is None:
            return chosen
        data = Path(self.path).expanduser().resolve()
        if not data.is_dir() and chosen.resolve().parent == data.parent:
            data = data.parent  # of a list
        if not data.is_dir() or not chosen.resolve().is_relative_to(data):
            return chosen
        if self.cache is not None:
            raise ConfigError(
                f"data.cache={self.cache} lies in the data, {data}, and would be read as a part of "
                "them; choose a folder beside them."
            )
        return data.parent / f"{data.name}_cache"

    def list_patients(self) -> list[Patient]:
        """See the base class."""
        return self.scans.patients()

    @property
    def accounts(self) -> Sequence[Account]:
        """See the base class."""
        reader = self.scans
        folders = {f for p in self.patients.values() for f in p.files.values() if f.is_dir()}
        others = dict.fromkeys(files_of_case(folders), "another series")
        others |= {f: kind for folder in folders for f, kind in dicom.others(folder).items()}
        return self.files_with(
            reader.endings, {**others, **reader.left()}, reader.indices(), reader.series
        )

    def preprocessing(self, client: str) -> dict[str, Any]:
        """See the base class, with the distances of the training scans' voxels."""
        scans = [self.patients[i] for i in self.plans[client].patients["train"]]
        spacings = np.array(self.scans.spacings(scans))
        return {
            **super().preprocessing(client),
            "spacing": np.median(spacings, axis=0).tolist(),
            "spacing_range": [spacings.min(axis=0).tolist(), spacings.max(axis=0).tolist()],
        }

    @abstractmethod
    def recipe(self) -> Recipe:
        """The cache's recipe."""

    def build_cache(self, workers: int | None = None) -> Store:
        """Makes the cache, or completes or verifies the existing one."""
        self.store = build(self.recipe(), self.caches, workers)
        return self.store

    def find_cache(self) -> Store | None:
        """Opens the cache, if it is finished."""
        self.store = self.store or find(self.recipe(), self.caches)
        return self.store
