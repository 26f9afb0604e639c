"""The ``.npz`` files of MedMNIST: small images with official splits.

Source: J. Yang et al., "MedMNIST v2", Scientific Data 10:41, 2023. A file holds
``{train,val,test}_images``, uint8 (n, h, w), (n, h, w, 3) or (n, d, h, w), and
``{train,val,test}_labels``, integers (n, 1); of several findings per picture, as in ChestMNIST,
0 or 1, (n, K), which ``model=findings`` learns.
"""

from __future__ import annotations

from medfed.datamodules.extending import *
from medfed.datamodules.readers import looks
from medfed.datamodules.readers.samples import ImageSet, Samples, channel_names
from medfed.standalone.pictures import arrays_of, channels_first

Bytes = NDArray[np.uint8]
Labels = NDArray[np.int64]
Arrays = Mapping[str, Bytes]
NPZ = "{train,val,test}_images and {train,val,test}_labels of the MedMNIST convention"
_MOST_CLASSES = 1000


def read_medmnist(
    path: Path | None, classes: Sequence[str] | None = None, joined: Sequence[str] | None = None
) -> ImageSet:
    """Reads a file in the MedMNIST convention into memory.

    MedMNIST does not say which images belong to one patient, so each image is a patient here.
    `joined`: the classes of a federation, of which some may be lacking.
    """
    path = given_path(path)
    with arrays_of(path) as arrays:
        return _image_set(path, arrays, joined or classes, joined is not None)


def _image_set(path: Path, arrays: Arrays, classes: Sequence[str] | None, joins: bool) -> ImageSet:
    wanted = [f"{split}_{kind}" for split in SPLITS for kind in ("images", "labels")]
    if lacking := [name for name in wanted if name not in arrays]:
        raise DataError(f"{path} lacks {', '.join(lacking)}; it must hold {NPZ}.")
    labels = {split: _labels(path, split, arrays[f"{split}_labels"]) for split in SPLITS}
    if len({of.shape[1:] for of in labels.values()}) > 1:
        counts = few([f"{split} {of[:1].size}" for split, of in labels.items()])
        raise DataError(f"{path}: the splits differ in labels per image ({counts}); mend the file.")
    joined = np.concatenate(list(labels.values()))
    names = _class_names(path, joined, classes)
    least = 1 if joins else 2
    if len(present := np.unique(joined)) < least and joined.ndim == 1:
        only = f"only the class {names[present[0]]}" if len(present) else "no images"
        raise DataError(f"{path} has {only}; a classification needs images of two classes.")
    ids = [f"{split}_{n}" for split in SPLITS for n in range(len(labels[split]))]
    images = _images(path, arrays, labels)
    values = joined if joined.ndim == 1 else joined.astype(np.float32)
    splits = [split for split in SPLITS for _ in labels[split]]
    samples = Samples(values, len(names), ids, (), splits, [path] * len(ids))
    return ImageSet(images, channel_names(images.shape[1]), names, samples, str(path))


def _labels(path: Path, split: str, values: Bytes) -> Labels:
    """(n,) class indices of one split, or (n, K) findings."""
    key = f"{path}, {split}_labels"
    if values.dtype.kind not in "iu" or values.ndim not in (1, 2):
        raise DataError(f"{key}: {values.dtype} {values.shape} must be integers (n, 1) or (n, K).")
    several = values.ndim == 2 and values.shape[1] > 1
    labels = (values if several else values.reshape(-1)).astype(np.int64)
    if several and labels.max(initial=0) > 1:
        raise DataError(f"{key}: the finding {labels.max()} is unknown; known: 0 and 1.")
    if len(labels) and labels.min() < 0:
        raise DataError(f"{key}: the label {labels.min()} is negative; classes count from 0.")
    return labels


def _class_names(path: Path, labels: Labels, classes: Sequence[str] | None) -> tuple[str, ...]:
    count = labels.shape[1] if labels.ndim == 2 else int(labels.max(initial=-1)) + 1
    if count > max(_MOST_CLASSES, len(classes or ())):
        raise DataError(
            f"{path} has labels up to {count - 1}; classes count from 0, and more than "
            f"{_MOST_CLASSES} are only read with their names in data.reader.classes."
        )
    names = tuple(map(str, range(count)) if classes is None else classes)
    if len(names) < count:
        what = f"data.reader.classes names {len(names)} classes"
        raise DataError(f"{path} has labels up to {count - 1}, but {what}.")
    return names


def _images(path: Path, arrays: Arrays, labels: Mapping[Split, Labels]) -> Bytes:
    """All images, channels first; split by split, to avoid two copies of all in memory."""
    out = np.empty(0, np.uint8)
    filled = 0
    for split in SPLITS:
        images = channels_first(path, split, arrays[f"{split}_images"])
        if len(images) != len(labels[split]):
            what = f"{path}: {len(images)} {split}_images"
            raise DataError(f"{what}, but {len(labels[split])} {split}_labels.")
        if filled == 0:
            out = np.empty((sum(map(len, labels.values())), *images.shape[1:]), np.uint8)
        if images.shape[1:] != out.shape[1:]:
            what = f"{path}: {split}_images are {images.shape[1:]}, the others {out.shape[1:]}"
            raise DataError(f"{what}; all must have one size.")
        out[filled : filled + len(images)] = images
        filled += len(images)
    return out


def looks_like(path: Path, answers: looks.Answers) -> looks.Guess | None:
    """Guesses by the ending, and looks whether a picture has several labels; see `looks`."""
    files = [f for f in looks.visible(path) if f.suffix == ".npz"] or [path]
    if files[0].suffix != ".npz":
        return None
    if len(files) > 1:
        return looks.several("medmnist", path, files)
    guess = looks.Guess("medmnist", files[0])
    with arrays_of(files[0]) as arrays:
        labels = arrays["train_labels"] if "train_labels" in arrays else np.empty(0)
    if labels.ndim == 2 and labels.shape[1] > 1:
        guess.keys["model"] = "findings"
        guess.took.append(("labels", f"{labels.shape[1]} findings per picture", "sure: its labels"))
    return guess
