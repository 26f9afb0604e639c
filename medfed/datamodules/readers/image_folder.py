"""Images of one class each, in any format of `pictures`: folders named by class, or a CSV."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Literal

from medfed.datamodules.extending import *
from medfed.datamodules.readers import looks
from medfed.datamodules.readers.samples import (
    SPLIT_NAMES,
    ImageSet,
    Samples,
    channel_names,
    official_splits,
    open_training,
)
from medfed.standalone.pictures import SUFFIXES, Color, has_colours, read_image, white_of

log = logging.getLogger(__name__)


@checked("data.reader")
def read_image_folder(
    path: Path | None,
    size: Sequence[int] = (64, 64),
    color: Color = "grey",
    patient_pattern: str | None = None,
    centre_pattern: str | None = None,
    classes: Sequence[str] | None = None,
    joined: Sequence[str] | None = None,
    outer: Literal["classes", "hospitals"] | None = None,
) -> ImageSet:
    """Reads ``path/CLASS/**/*.png`` and its like into memory, at one size.

    Folders called train, val and test, or alike (``Training``, ``valid``), are the official splits;
    one without a folder is taken from the training images. `size`: height and width, whatever the
    aspect ratio. `joined`: the classes of a federation, of which some may be lacking.
    """
    path = given_path(path)
    here = _folders(path)
    splits = {} if set(classes or joined or ()) & set(here) else _official(path, here)
    if not (splits or outer or centre_pattern or classes) and (
        same_ones := _inner_folders(path, here)
    ):
        raise DataError(
            f"{path}: the folders {few(here, 4)} hold the same folders, {few(same_ones, 4)}; say "
            "what the outer ones are by data.reader.outer=hospitals or data.reader.outer=classes."
        )
    hospitals = here if outer == "hospitals" and not splits else []
    roots = [path / folder for folder in [*splits, *hospitals]] or [path]
    every = sorted({name for root in roots for name in _folders(root)})
    if odd := [name for name in every if looks.may_be_mask(name) and not (classes or joined)]:
        what = f"{roots[0] / odd[0]} seems to hold masks, not pictures of a class"
        mend = "data=image_masks reads them; if it is a class, name all by data.reader.classes"
        raise DataError(f"{what}: {mend}.")
    names = _joined_classes(path, joined, every if classes is None else classes)
    same(names, f"{path}, classes", lambda at: f"the folder {names[at]}")
    if len(names) < 2:
        what = "must hold a folder for each of two classes or more; found"
        raise DataError(f"{roots[0]} {what}: {', '.join(names) or 'none'}.")
    listed: list[tuple[Path, int, Split | None]] = []
    left: dict[Path, str] = {}
    for root, (label, name) in product(roots, enumerate(names)):
        may_lack = joined or hospitals or splits.get(root.name, "train") != "train"
        if may_lack and not (root / name).is_dir():
            continue  # a test without a rare class is none the worse
        images, masks = pictures_in(root / name)
        listed += [(image, label, splits.get(root.name)) for image in images]
        left |= dict.fromkeys(masks, "masks of pictures beside them")
    if not listed:
        raise DataError(f"{path} has no folder of the classes {few(names)}; name the others so.")
    files, labels, official = zip(*listed, strict=True)
    below = [f.relative_to(path).as_posix() for f in files]
    centres = [name.partition("/")[0] for name in below] if hospitals else []
    if centre_pattern and not hospitals:
        where = zip(below, files, strict=True)
        centres = [search_name("centre", centre_pattern, name, file) for name, file in where]
    patients = persons_of(below, patient_pattern, path)
    samples = Samples(np.array(labels), len(names), patients, centres, official, files)
    return replace(_decoded(samples, names, size, color, path), left=left)


@checked("data.reader")
def read_image_table(
    path: Path | None,
    size: Sequence[int] = (64, 64),
    color: Color = "grey",
    image: str = "image",
    label: str = "label",
    patient: str = "patient",
    centre: str = "centre",
    split: str = "split",
    classes: Sequence[str] | None = None,
    joined: Sequence[str] | None = None,
    findings: Sequence[str] | None = None,
    uncertain: Literal["error", "missing", "positive", "negative"] = "error",
    file: str = "{}",
    patient_pattern: str | None = None,
    unplaced: Literal["error", "drop"] = "error",
) -> ImageSet:
    """Reads the images that a CSV names into memory, at one size.

    Paths start at the CSV's folder; `findings` are columns of 1, 0 or empty, where nobody looked;
    `uncertain` is what -1 is. With findings, labels are (N, K) float32, NaN for empty cells.
    """
    path = given_path(path)
    sheet = Sheet.read(path).placed(centre, unplaced)
    columns = {"image": image, "patient": patient, "centre": centre, "split": split}
    if findings is None:
        cells = listed_columns(sheet, {**columns, "label": label}, ("image", "label"))
        there = {*cells["label"]}
        names = _joined_classes(path, joined, [*map(str, classes or sorted(there))])
        strange = [] if joined else [name for name in names if name not in there]
        if len(names) < 2 or strange:
            what = f"no label {strange[0]}" if len(names) > 1 else f"the only label {few(names)}"
            raise DataError(
                f"{path}, column {label}, has {what}; name two labels or more by "
                "data.reader.classes, or the column by data.reader.label."
            )
        if not (joined or classes) and len(sheet) >= 10 and 2 * len(names) > len(sheet):
            raise DataError(
                f"{path}, column {label}, has {len(names)} different labels in {len(sheet)} "
                "rows, so it is probably an id or a measurement; name another column by "
                "data.reader.label, or the labels by data.reader.classes."
            )
        labels = np.array([names.index(t) if t in names else -1 for t in cells["label"]])
        rows = np.flatnonzero(labels >= 0).tolist()
    else:
        cells = listed_columns(sheet, columns, ("image",))
        names = check_names("finding", findings, sheet.columns)
        labels = _finding_labels(sheet, names, uncertain)
        rows = list(range(len(labels)))
    official = official_splits(sheet, split)
    of = {role: [texts[n] for n in rows] for role, texts in cells.items()}
    of["image"] = slashed(path.parent, (file.replace("{}", name) for name in of["image"]))
    files = [path.parent / name for name in of["image"]]
    if (lost := next((n for n, f in enumerate(files) if not f.is_file()), None)) is not None:
        mend = "copy it there, or say by data.reader.file where the files of such names lie"
        what = f"{files[lost]} does not exist; {mend}, such as 'images/{{}}.jpg'"
        raise sheet.bad(rows[lost], f": {what}.")
    if twice := [file for file, count in Counter(files).items() if count > 1]:
        raise DataError(f"{path} names {twice[0]} in two rows; remove one.")
    patients = of.get("patient") or persons_of(of["image"], patient_pattern, path, looks.COLUMN)
    splits, centres = [official[n] for n in rows if official], of.get("centre", ())
    samples = Samples(labels[rows], len(names), patients, centres, splits, files)
    return _decoded(samples, names, size, color, path)


def _joined_classes(path: Path, joined: Names | None, names: Names) -> tuple[str, ...]:
    """Returns the classes of a federation that images join, or the images' own."""
    if joined and (unknown := [name for name in names if name not in joined]):
        what = f"{path} has the class {few(unknown)}, which the federation does not have"
        mend = f"its classes are {few(joined)}: rename the class, or leave its images out"
        raise DataError(f"{what}; {mend}.")
    return tuple(joined or names)


def _finding_labels(sheet: Sheet, names: Sequence[str], uncertain: str) -> NDArray[np.float32]:
    """(N, K) 1, 0, or NaN for empty cells."""
    values = {"0": 0.0, "1": 1.0, None: math.nan}
    if uncertain != "error":
        values["-1"] = {"missing": math.nan, "positive": 1.0, "negative": 0.0}[uncertain]
    columns = [sheet.texts(name) for name in names]
    for name, texts in zip(names, columns, strict=True):
        for at, text in enumerate(texts):
            if text not in values:
                why = f"{str(text)[:40]!r} must be 1, 0 or empty; data.reader.uncertain takes -1."
                raise sheet.bad(at, f", column {name}: {why}")
    return np.array([[values[text] for text in texts] for texts in columns], np.float32).T


def _decoded(
    samples: Samples, names: tuple[str, ...], size: Sequence[int], color: Color, path: Path
) -> ImageSet:
    """Reads the images of the samples."""
    if len(size) != 2 or min(size) < 1:
        raise ConfigError(f"data.reader.size={list(size)} must be a height and a width above 0.")
    some = samples.files[:: 1 + len(samples.files) // looks.FIRST]
    if color == "grey" and (coloured := next(filter(has_colours, some), None)):
        text = "%s has colours; data.reader.color=rgb reads them, and grey their brightness alone."
        log.warning(text, coloured)
    with ThreadPoolExecutor(max_workers=4) as pool:  # decoding releases the interpreter's lock
        # A white for all, so that their brightness stays comparable.
        white = white_of(f for f in samples.files if f.suffix.lower() in (".png", ".tif", ".tiff"))
        if white < 65535:
            text = "%s: the grey values of 16 bits use %d bits; 0 to %d become 0 to 255."
            log.warning(text, path, white.bit_length(), white)
        read = partial(read_image, size=size, color=color, white=white)
        images = list(pool.map(read, samples.files))
    stacked, opened = np.stack(images), replace(samples, splits=open_training(samples.splits))
    channels = channel_names(stacked.shape[1])
    return ImageSet(stacked, channels, names, opened, str(path), converted=True, white=white)


def _folders(path: Path) -> list[str]:
    if not path.is_dir():
        raise DataError(f"{path} is not a folder; set data.path to the folder of class folders.")
    return sorted(f.name for f in path.iterdir() if f.is_dir() and is_visible(f.name))


def _inner_folders(path: Path, folders: Sequence[str]) -> list[str]:
    """Lists the folders that are in each of several folders, if two or more are."""
    inner = [{n for n in _folders(path / f) if not looks.may_be_mask(n)} for f in folders]
    shared = set.intersection(*inner) if len(inner) > 1 else set()
    return sorted(shared) if len(shared) > 1 else []


def _official(path: Path, folders: Sequence[str]) -> Mapping[str, Split]:
    """The split of every folder; empty where the folders are classes."""
    splits = {name: SPLIT_NAMES[name.lower()] for name in folders if name.lower() in SPLIT_NAMES}
    if not splits:
        return {}
    others = [name for name in folders if name not in splits]
    if others or "train" not in splits.values() or len({*splits.values()}) < len(splits):
        what = f"{path} holds the folders {few(folders)}, of which {few(sorted(splits))} look like"
        mend = "leave one folder per split there (train, val, test), or name the folders that are"
        such = "'data.reader.classes=[benign,malignant]'"
        raise DataError(f"{what} splits: {mend} classes, such as {such}.")
    named = ", ".join(f"{name} ({split})" for name, split in splits.items())
    log.info("%s: %s are the splits; data.official_splits=false makes others.", path, named)
    return splits


_MASK = re.compile(
    r"(.+?)[ _.-]*(masks?|seg(mentation)?|labels?|gt|roi|annotation|superpixels)([ _-]?\d+)?",
    re.IGNORECASE,
)


def pictures_in(folder: Path) -> tuple[list[Path], list[Path]]:
    """Lists the pictures of a class, and the masks named or put beside them as such."""
    files = _pictures_of(folder)
    named = {(file.parent, file.stem) for file in files}
    named |= {(f.parent.parent, f.stem) for f in files if not looks.may_be_mask(f.parent.name)}
    beside = [f for f in files if (of := _MASK.fullmatch(f.stem)) and (f.parent, of[1]) in named]
    within = [f for f in files if looks.may_be_mask(f.parent.name)]
    masks = sorted({*beside, *(f for f in within if (f.parent.parent, f.stem) in named)})
    if not files:
        what = "has no images" if folder.is_dir() else "is not a folder"
        raise DataError(
            f"{folder} {what}; add images ({', '.join(SUFFIXES)}), or choose the class folders by "
            "data.reader.classes."
        )
    return sorted({*files}.difference(masks)), masks


def looks_like(path: Path, answers: looks.Answers) -> looks.Guess | None:
    """Guesses by a CSV that names pictures, or by folders of pictures; see `looks`."""
    if (index := looks.index_of(path)) is not None:
        sheet, files = index
        return _listed(sheet, files[0], answers) if len(files) == 1 else None
    if (elsewhere := _named_elsewhere(path)) is not None:
        return _listed(*elsewhere[:2], answers, elsewhere[2])
    every = {f.name: _pictures_of(f) for f in looks.visible(path) if f.is_dir()}
    below = {name: files for name, files in every.items() if files}
    split = [name for name in below if SPLIT_NAMES.get(name.lower()) == "train"]
    masked = map(looks.may_be_mask, (n for name in [".", *split] for n in _folders(path / name)))
    if len(below) < 2 - bool(split) or any(masked):
        return None  # image_masks reads them
    guess = looks.Guess("image_folder", path)
    images = [file for name in below for file in pictures_in(path / name)[0]]
    looks.colours(guess, images)
    if not split and (inner := _inner_folders(path, [*below])):
        text = f"The folders {few([*below], 4)} each hold {few(inner, 4)}. What are the outer ones?"
        guess.ask("data.reader.outer", text, None, ("hospitals", "classes"))
    if not split:
        guess.ask_names([file.name for file in images], answers)
    return guess


def _pictures_of(folder: Path) -> list[Path]:
    return [f for f in visible_files(folder) if f.suffix.lower() in SUFFIXES]


def _named_elsewhere(path: Path) -> tuple[Sheet, str, str] | None:
    """A table that names pictures without folder or ending, the column, and where they lie."""
    tables = [path] if path.is_file() else [*path.glob("[!.]*.csv")]
    if len(tables) != 1 or tables[0].suffix.lower() != ".csv":
        return None
    folder, sheet = tables[0].parent, looks.sheet_of(tables[0])
    names = {name: file for file in _pictures_of(folder) for name in (file.stem, file.name)}
    for column, cells in sheet.cells.items():
        if (file := names.get(name := cells[0])) is not None:
            where = file.relative_to(folder).parent / file.name.replace(name, "{}", 1)
            files = {folder / str(where).replace("{}", text) for text in cells}
            # A label of a few values is no name, also where files are called 0.png and 1.png.
            if 2 * len(files) > len(cells) and all(file.is_file() for file in files):
                return sheet, column, where.as_posix()
    return None


def _listed(sheet: Sheet, image: str, answers: looks.Answers, file: str = "{}") -> looks.Guess:
    guess, kinds = looks.Guess("image_table", sheet.path), looks.distinct(sheet)
    guess.reads(image=image, **({} if file == "{}" else {"file": file}))
    marks = [c for c, of in kinds.items() if of and of <= {"0", "1", "-1"}]
    alike = {"label", "class", "diagnosis", "target"} & set(map(str.lower, kinds))
    if len(marks) > 1 and not alike and "data.reader.label" not in answers:
        wanted = answers.get("data.reader.findings", marks)
        question = "Are these columns findings, of which a picture may have several? Else "
        question += "name the column of classes by data.reader.label=COLUMN."
        guess.ask("data.reader.findings", question, marks, marks)
        guess.keys["model"] = "findings"
        if any("-1" in kinds.get(name, ()) for name in wanted):
            key, question = "data.reader.uncertain", "What is a finding of -1, which is uncertain?"
            guess.ask(key, question, "missing", ("missing", "positive", "negative"))
        taken = marks
    else:
        taken = [str(looks.label_of(guess, sheet, "data.reader.label", answers, [image]))]
    looks.roles(guess, sheet, "data.reader.", answers, [image, *taken])
    looks.colours(guess, looks.files_in(sheet, image, file))
    return guess
