"""Pictures with masks: a CSV that names them, or folders of both, also of hospitals and splits.

They also give each picture's patient and hospital.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from medfed.datamodules.extending import *
from medfed.datamodules.readers import looks, trees
from medfed.datamodules.readers.cases import check_one_place
from medfed.datamodules.readers.centres import LISTS, named_centres
from medfed.datamodules.readers.samples import channel_names
from medfed.standalone import pictures
from medfed.standalone.pictures import SUFFIXES, Color

_INDEX = "images.csv"
_WRITE = f"write an {_INDEX} with the columns image, mask, patient and centre"
ByRole = Mapping[str, str | None]


class Pair(NamedTuple):
    """A picture and its mask."""

    image: Path  # the picture
    mask: Path
    patient: str
    centre: str | None  # the hospital; None if none is named
    place: str  # the place in the list, for error sentences
    split: Split | None = None  # its official split


def _list_pairs(
    path: Path, columns: ByRole, pattern: str | None, unplaced: str, others: Mapping[str, str]
) -> list[Pair]:
    """Lists pictures and masks, and checks that all files exist."""
    index = path / _INDEX if path.is_dir() else path
    if index.is_file():
        sheet = Sheet.read(index).placed(columns["centre"] or "", unplaced)
        pairs = _from_csv(sheet, columns, pattern)
    elif not (pairs := _from_folders(path, columns, pattern)):
        what = f"{path} is no CSV file and has neither {_INDEX} nor the folders images and masks"
        raise DataError(f"{what}; {_WRITE}.")
    if others:
        known = sorted({p.centre for p in pairs if p.centre is not None})
        names = check_names("centre", [*others], known, "data.reader.other_masks: ")
        others = dict(zip(names, others.values(), strict=True))
    ends = [(p, others.get(p.centre or "", "")) for p in pairs]
    pairs = [p._replace(mask=p.mask.with_stem(p.mask.stem + end)) for p, end in ends]
    _check(pairs)
    return pairs


def _from_csv(sheet: Sheet, columns: ByRole, pattern: str | None) -> list[Pair]:
    cells = listed_columns(sheet, columns, ("image", "mask"))
    images, masks = (looks.files_in(sheet, str(columns[role])) for role in ("image", "mask"))
    patients = cells.get("patient") or persons_of(cells["image"], pattern, sheet.path, looks.COLUMN)
    centres: Sequence[str | None] = cells.get("centre") or [None] * len(patients)
    places = [f"{sheet.path}, data row {number}" for number in sheet.numbers]
    return [*map(Pair, images, masks, patients, centres, places)]


def _from_folders(path: Path, columns: ByRole, pattern: str | None) -> list[Pair]:
    """The pairs that names tell in folders of pictures, masks, hospitals, patients or splits."""
    role = None if pattern else columns["patient"]
    try:
        listed = trees.list_of(path, columns["centre"], role, looks.is_picture) or {}
    except DataError as error:
        raise DataError(str(error).replace(trees.LISTED, _WRITE)) from error
    entries = [(e, s) for s, name in trees.LISTS.items() for e in listed.get(name, ())]
    below = [next(filter(None, entry["image"])) for entry, _ in entries]
    images, masks = [path / name for name in below], [path / e["label"] for e, _ in entries]
    every = {*filter(looks.is_picture, visible_files(path))} if "modality" in listed else set()
    if lost := every.difference(images, masks):
        what = f"{min(lost)} belongs to no pair of picture and mask ({len(lost)} such files)"
        raise DataError(f"{what}; add what is missing, remove the file, or {_WRITE}.")
    names = [image.name for image in images]
    names = names if len({*names}) == len(names) else below
    persons = [e.get(role) for e, _ in entries]
    if None in persons:
        of = zip(names, persons_of(names, pattern, path, _PATTERN), strict=True)
        persons = [str(Path(who).with_suffix("")) if who == name else who for name, who in of]
    cases = [trees.stem(image) for image in images]
    named = map(named_centres(path, cases).get, cases)
    centres = [e.get(columns["centre"], of) for (e, _), of in zip(entries, named, strict=True)]
    # Splits without cases get training cases.
    splits = [None if split == "train" else split for _, split in entries]
    return [*map(Pair, images, masks, persons, centres, map(str, images), splits)]


def _check(pairs: Sequence[Pair]) -> None:
    """Refuses files that are missing or named twice."""
    owners: dict[Path, str] = {}
    for pair in pairs:
        if lost := [file for file in (pair.image, pair.mask) if not file.is_file()]:
            raise DataError(f"{pair.place}: {lost[0]} does not exist; add it, or remove the row.")
        if (before := owners.setdefault(pair.image.resolve(), pair.place)) != pair.place:
            raise DataError(f"{pair.place}: {pair.image} is already in {before}; remove one.")


log = logging.getLogger(__name__)

_PATTERN = 'Where one has several, set data.reader.patient_pattern, such as "^(p[0-9]+)_".'
_WHITE = (1, 255, 65535)  # what a mask of one region has inside it


class ImageMasksReader(VolumeReader):
    """Reads pictures and masks; a patient with several pictures is a stack (C, w, h, N) of them.

    Smaller pictures are padded with 0 to the largest, and `spacing` is NaN, as pictures do not
    state it. `path`: a CSV file, a folder with ``images.csv``, or one with the folders ``images``
    and ``masks``, whose files have equal names but for the ending, or such as `trees` reads.
    `scale`: resamples by this factor. `regions`: label values of every region, such as ``{vessel:
    [1], disc: [2, 3]}``; or, of masks that are 0 outside, a list of the region's name; None names
    it ``foreground``.
    """

    endings = SUFFIXES

    @checked("data.reader")
    def __init__(
        self,
        path: Path,
        image: str = "image",
        mask: str = "mask",
        patient: str | None = "patient",
        centre: str | None = "centre",
        patient_pattern: str | None = None,
        other_masks: Mapping[str, str] | None = None,
        color: Color | None = None,
        scale: Annotated[float, within("(0, 1]")] = 1.0,
        regions: Mapping[str, Sequence[int]] | Sequence[str] | None = None,
        known_labels: Sequence[int] = (),
        normalization: pictures.Normalization = "zscore",
        unplaced: Literal["error", "drop"] = "error",
    ) -> None:
        self._path, self.scale, self.normalization = path, scale, normalization
        self._others = dict(other_masks or {})
        self._values = _region_values(("foreground",) if regions is None else regions)
        self._known = {*known_labels, *(v for values in self._values.values() for v in values)}
        self.regions = tuple(self._values)
        columns = {"image": image, "mask": mask, "patient": patient, "centre": centre}
        pairs = _list_pairs(path, columns, patient_pattern, unplaced, self._others)
        self.color, sizes = _one_color(pairs, color)
        self._sizes = {file: pictures.scaled(of, scale) for file, of in sizes.items()}
        self._pairs: dict[str, list[Pair]] = {}  # those of each patient
        for pair in pairs:
            self._pairs.setdefault(pair.patient, []).append(pair)
        for name, of in self._pairs.items():
            check_one_place(name, [(p.place, p.centre, p.split) for p in of])
        self.channels = channel_names(1 if self.color == "grey" else 3)

    def indices(self) -> list[Path]:
        """See `Reader.indices`."""
        return [self._path / name for name in (_INDEX, *LISTS)]

    def patients(self) -> list[Patient]:
        """See `Reader.patients`."""
        return [
            Patient(name, dict(_files(of)), of[0].centre, split=of[0].split)
            for name, of in sorted(self._pairs.items())
        ]

    def read(self, patient: Patient) -> dict[str, Tensor]:
        """See `VolumeReader.read`."""
        images, labels = [], []
        for pair in self._pairs[patient.id]:
            image = pictures.load_picture(pair.image, self.color, self.scale, self.normalization)
            images.append(torch.from_numpy(image))
            labels.append(torch.from_numpy(self._label(pair.mask)))
        size = [max(sides) for sides in zip(*(i.shape[1:] for i in images), strict=True)]
        if any(list(i.shape[1:]) != size for i in images):
            text = "Patient %s has pictures of different sizes; the smaller are padded to %d x %d."
            log.warning(text, patient.id, *size)
        stacks = (torch.stack([_padded(p, size) for p in parts], -1) for parts in (images, labels))
        return dict(zip(("image", "label"), stacks, strict=True))

    def shape(self, patient: Patient) -> tuple[int, ...]:
        """See `VolumeReader.shape`: width, height and number of pictures."""
        sizes = [self._sizes[pair.image] for pair in self._pairs[patient.id]]
        width, height = (max(sides) for sides in zip(*sizes, strict=True))
        return width, height, len(sizes)

    def spacing(self, patient: Patient) -> tuple[float, ...]:
        """See `Reader.spacing`: it is unknown for pictures."""
        return (np.nan, np.nan, np.nan)

    @property
    def exclusive(self) -> bool:
        """See `VolumeReader.exclusive`."""
        return are_exclusive(self._by_region())

    def layout(self) -> dict[str, object]:
        """How pictures are read, so that others can be read in the same way."""
        return {"color": self.color, "scale": self.scale, "regions": self._by_region()}

    def record(self) -> dict[str, object]:
        """See `Reader.record`."""
        normalization = {"normalization": self.normalization}
        return {**super().record(), **self.layout(), **normalization, "other_masks": self._others}

    def _by_region(self) -> dict[str, list[int]]:
        """Label values by region; 255 for masks of one region, which viewers show as white."""
        return {name: list(values) or [255] for name, values in self._values.items()}

    def _label(self, file: Path) -> NDArray[np.uint8]:
        """(R, w, h) of a mask."""
        mask = pictures.read_mask(file)
        values = np.unique(mask).tolist()
        if self._known:
            strange = sorted({*values} - {0, *self._known})
        else:
            strange = values[1:] if values[-1] in _WHITE and len(values) > 2 else []
            strange = strange or sorted({values[-1]} - {0, *_WHITE})
        if strange:
            raise DataError(_strange(file, values, strange, sorted({0, *self._known})))
        mask = pictures.upright(pictures.shrink_mask(mask, self.scale))
        regions = [np.isin(mask, v) if v else mask != 0 for v in self._values.values()]
        return np.stack(regions).astype(np.uint8)


def _region_values(
    regions: Mapping[str, Sequence[int]] | Sequence[str],
) -> dict[str, tuple[int, ...]]:
    """Label values by region; empty for a single region in masks that are 0 outside."""
    if isinstance(regions, Mapping):
        values = {str(name): tuple(v) for name, v in regions.items()}
        if values and all(v and all(type(x) is int and x > 0 for x in v) for v in values.values()):
            return values
    elif len(regions) == 1 and not isinstance(regions, str):
        return {str(regions[0]): ()}
    what = f"data.reader.regions={regions} must give each region its label values"
    such = "{vessel: [1], disc: [2, 3]}, or the name of the only one: [vessel]"
    raise ConfigError(f"{what}, such as {such}.")


def _strange(file: Path, values: list[int], strange: list[int], known: list[int]) -> str:
    """Describes what is wrong with the values of a mask."""
    if len(values) > 50 or file.suffix.lower() in (".jpg", ".jpeg"):
        what = f"{len(values)} different values, as masks have after JPEG or smoothing"
        return f"{file} has {what}; save label values without loss (PNG, TIFF)."
    if known == [0]:
        what = f"{file} has the values {', '.join(map(str, values))}, but a mask of one region"
        mend = "name them in data.reader.regions, such as {vessel: [1]}"
        return f"{what} has 0 and 1, or 0 and 255; {mend}."
    what = f"{file}: unknown label value {strange[0]}; known: {', '.join(map(str, known))}"
    mend = "name the value in data.reader.regions or data.reader.known_labels"
    return f"{what}. Check the mask, or {mend}."


def _one_color(
    pairs: Sequence[Pair], wanted: Color | None
) -> tuple[Color, dict[Path, tuple[int, int]]]:
    """Checks that masks fit their pictures, and that all pictures are grey, or all coloured.

    Also returns the width and height of every picture.
    """
    of: dict[Color, Path] = {}
    sizes: dict[Path, tuple[int, int]] = {}
    for pair in pairs:
        width, height, color = pictures.picture_header(pair.image)
        of.setdefault(color, pair.image)
        sizes[pair.image] = width, height
        if (size := pictures.picture_header(pair.mask)[:2]) != (width, height):
            raise DataError(
                f"{pair.mask} has {size[0]} x {size[1]} pixels, but {pair.image} has {width} x "
                f"{height}; a mask must have the size of its picture."
            )
    if wanted is None and len(of) > 1:
        what = f"{of['grey']} is grey and {of['rgb']} has colours"
        raise DataError(f"{what}; set data.reader.color=grey or data.reader.color=rgb for all.")
    return next(iter(of)) if wanted is None else wanted, sizes


def _files(pairs: Sequence[Pair]) -> Iterator[tuple[str, Path]]:
    """The files of a patient, by role."""
    for n, pair in enumerate(pairs):
        yield f"image_{n}", pair.image
        yield f"mask_{n}", pair.mask


def _padded(picture: Tensor, size: Sequence[int]) -> Tensor:
    width, height = (n - have for n, have in zip(size, picture.shape[1:], strict=True))
    return functional.pad(picture, (0, height, 0, width))


def looks_like(path: Path, answers: looks.Answers) -> looks.Guess | None:
    """Guesses by a CSV that names pictures twice, or by two folders; see `looks`."""
    guess, grouped = looks.Guess("image_masks", path), False
    if (index := looks.index_of(path)) is not None:
        sheet, (image, *others) = index
        if not others:
            return None
        guess.path, mask = sheet.path, answers.get("data.reader.mask", others[0])
        if len(others) > 1:
            guess.ask("data.reader.mask", "Which column is the mask?", mask, others)
        guess.reads(image=image, mask=mask)
        looks.roles(guess, sheet, "data.reader.", answers, [image, *others])
        images, masks = (looks.files_in(sheet, column) for column in (image, mask))
        looks.regions(guess, masks, white=True)
    elif any(looks.may_be_mask(f.parent.name) for f in visible_files(path) if looks.is_picture(f)):
        try:
            _, entries, _, grouped = trees.guess_list(guess, answers, looks.is_picture)
            images = [path / next(filter(None, entry["image"])) for entry in entries]
            masks = [path / entry["label"] for entry in entries]
            looks.regions(guess, masks, white=True)
        except DataError as error:
            return looks.Guess("image_masks", path, sure=False, refused=error)
        if not grouped:
            guess.ask_names([file.name for file in images], answers)
    else:
        return None
    looks.colours(guess, images, compare=True)
    return guess
