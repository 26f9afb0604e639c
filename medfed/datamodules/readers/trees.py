"""Which images belong to a mask, by names: in two folders, or of volumes in folders of folders.

As ``BASEL/case_1/t1.nii.gz`` beside ``seg.nii.gz``, ``BASEL/images/1.nii.gz`` with
``BASEL/labels/1.nii.gz``, ``BASEL/case_1_t1.nii.gz`` beside ``case_1_seg.nii.gz``, or BIDS. Words
that all masks have and no image has are the masks' own. An image belongs to the mask whose other
words it has, in their order, and what it has beyond them is its contrast. Folders of visits, such
as ``baseline`` and ``followup``, are no hospitals and no patients.
"""

from __future__ import annotations

from itertools import permutations

from medfed.datamodules.extending import *
from medfed.datamodules.readers import looks
from medfed.datamodules.readers.samples import SPLIT_NAMES
from medfed.datamodules.tables.columns import HOSPITAL

log = logging.getLogger(__name__)
_PARTICIPANTS = "participants.tsv"  # of BIDS
FOLDER = "folder"
LISTS: dict[Split, str] = {"train": "training", "val": "validation", "test": "test"}
# Names of folders, beside numbers, that divide the scans of a patient, or patients by disease.
_VISIT = re.compile(
    r"[\W\d_]*((t|v|baseline|bl|follow.?up|fu|pre|post|visit|session|ses|time.?point|tp|week|month|day"
    r"|year|ct|mri?|pet|hgg|lgg|controls?|patients)[\W\d_]*)+",
    re.IGNORECASE,
)
LISTED = 'list the pairs in a file: {"training": [{"image": FILE, "label": FILE}, ...]}'
Words = dict[Path, tuple[str, ...]]
_FOLDERS = (("images", "masks"), ("images", "labels"), ("imagesTr", "labelsTr"))


def folders_of(path: Path) -> tuple[str, str] | None:
    """Finds the folders of images and of masks, by their names."""
    return next((pair for pair in _FOLDERS if all((path / name).is_dir() for name in pair)), None)


def stem(file: Path) -> str:
    """Returns the name of a case by its first file."""
    picture = looks.is_picture(file)
    name = file.stem if picture else stem_of(file)
    return name if picture and file.parent.name != "imagesTr" else name.removesuffix("_0000")


def _paired(path: Path, wanted: Callable[[Path], bool]) -> list[dict[str, Any]]:
    """Lists the images and masks of equal names in two folders; none where all names differ."""
    names, sides = folders_of(path) or (), list[dict[str, Path]]()
    for name in names:
        side: dict[str, Path] = {}
        for file in filter(wanted, looks.visible(path / name)):
            if (twin := side.setdefault(stem(file), file)) != file:
                both = f"{twin.name} and {file.name}"
                raise DataError(f"{path / name} has {both}; remove or rename one.")
        sides.append(side)
    if not names or (all(sides) and sides[0].keys().isdisjoint(sides[1])):
        return []
    images, masks = sides
    if lacking := sorted(images.keys() ^ masks.keys()):
        what, where = ("mask", names[1]) if lacking[0] in images else ("image", names[0])
        raise DataError(
            f"{(images | masks)[lacking[0]]} has no {what} {path / where / lacking[0]}.* (of "
            f"{len(lacking)} without one); add it, or remove the file."
        )
    below = {f: f.relative_to(path).as_posix() for f in (*images.values(), *masks.values())}
    return [{"image": [below[images[n]]], "label": below[masks[n]]} for n in sorted(images)]


def list_of(
    path: Path,
    centre: str | None = "centre",
    patient: str | None = "patient",
    wanted: Callable[[Path], bool] = is_volume,
) -> dict[str, Any] | None:
    """Returns the cases below a folder as a list in MONAI's form; None without such files.

    `centre`: the entry of the hospital: ``folder`` takes the first folders that differ for it,
    ``centre`` if they are called like hospitals, and None takes them for patients. `patient`: the
    entry of the patient; None leaves patients to the names. `wanted`: the files to list. Raises
    `DataError` where names do not tell, such as if an image fits two masks.
    """
    if pairs := _paired(path, wanted):
        return {LISTS["train"]: pairs}
    files = list(filter(wanted, visible_files(path)))
    # A mask of the brain is neither an image nor what to learn.
    files = [f for f in files if not re.search("brain[_-]?mask", f.name.lower())]
    alone = {f: f.name.removesuffix(suffix_of(f) or f.suffix) for f in files}
    texts = {f: "/".join((*f.relative_to(path).parts[:-1], alone[f])) for f in files}
    masks = [file for file in files if looks.INSIDE & looks.words(texts[file])]
    others = sorted({*files}.difference(masks))
    if len(files) < 2:
        return None
    if not masks or not others:
        what = f"{'each' if masks else 'no'} name of a file has a word for a mask, such as mask"
        raise DataError(f"{path}: {what}, label, seg or gt; {LISTED}.")
    folders: dict[Path, dict[str, Path]] = {}
    why = f"{path}: names of files do not tell which image belongs to {masks[0]}; {LISTED}."
    for words_of in (_words, _different_words, _pieces):
        words = {file: words_of(texts[file].lower()) for file in files}
        images = {image: words[image] for image in others}
        common = _in_all({m: words[m] for m in masks}).difference(*images.values()) | looks.INSIDE
        cases = {mask: tuple(w for w in words[mask] if w not in common) for mask in masks}
        stems = {image: words_of(alone[image].lower()) for image in others}
        # Folders such as images.
        alike = _in_all(images).difference(*stems.values(), *cases.values())
        images = {image: tuple(w for w in of if w not in alike) for image, of in images.items()}
        spelled = {image: {w.lower(): w for w in words_of(texts[image])} for image in others}
        try:
            folders = _contrasts(cases, images, spelled, stems)
        except DataError as error:
            why = str(error)
        if 2 * len(folders) > len(masks):
            break
    words_of = _pieces if words_of is _pieces else _words
    counts = Counter(name for of in folders.values() for name in of)
    # What one mask has is no contrast, perhaps an image of another mask, which is missing.
    channels = [name for name, count in counts.items() if count > 1 and 2 * count >= len(folders)]
    if len(folders) < 2 or not channels:
        raise DataError(why)
    cases = {mask: cases[mask] for mask in sorted(folders)}
    facts = _facts(path, cases, common, centre, patient)
    index: dict[str, Any] = {"modality": {str(n): name for n, name in enumerate(channels)}}
    for mask, (split, more) in zip(cases, facts, strict=True):
        of = folders[mask]
        there = [of[name] for name in channels if name in of]
        _check_case(mask, cases[mask], {image: words_of(texts[image].lower()) for image in there})
        names = [of[c].relative_to(path).as_posix() if c in of else None for c in channels]
        entry = {"image": names, "label": mask.relative_to(path).as_posix(), **more}
        index.setdefault(split, []).append(entry)
    return index


def guess_list(
    guess: looks.Guess, answers: looks.Answers, wanted: Callable[[Path], bool] = is_volume
) -> tuple[dict[str, Any], list[dict[str, Any]], list[str], bool]:
    """Lists the cases below a guess's folder; asks whether folders are hospitals and patients.

    Returns the list, its entries, their hospitals, and whether any names a patient.
    """
    roles = (answers.get(f"data.reader.{role}", role) for role in ("centre", "patient"))
    centre, person = (None if key in (None, "null") else str(key) for key in roles)
    content = list_of(guess.path, centre, person, wanted) or {}
    folders = list_of(guess.path, FOLDER, None, wanted) or {}
    entries, whole = (
        [e for n in LISTS.values() for e in of.get(n, ())] for of in (content, folders)
    )
    placed = [entry.get(centre or "", "") for entry in entries]
    if any(places := placed if any(placed) else [entry.get(FOLDER, "") for entry in whole]):
        best = "centre" if any(placed) else "null"
        text, choices = f"Are these hospitals ({_counted(places)})?", (FOLDER, looks.NO)
        guess.ask("data.reader.centre", text, best, choices)
    people = [entry["patient"] for entry in entries if "patient" in entry]
    if people and are_groups(people):
        text = f"Is each of these folders one patient ({_counted(people)})?"
        guess.ask("data.reader.patient", text, None, ("patient", looks.NO))
    return content, entries, placed, bool(people)


def _counted(names: Sequence[str]) -> str:
    return few([f"{name} {n}" for name, n in Counter(names).items()], 6)


def _words(name: str) -> tuple[str, ...]:
    return tuple(filter(None, re.split(r"[\W_]+", name)))


def _different_words(name: str) -> tuple[str, ...]:
    """As of ``P1/t1`` beside ``P1/P1_seg``."""
    return tuple(dict.fromkeys(_words(name)))


def _pieces(name: str) -> tuple[str, ...]:
    """As of ``img0001`` beside ``label0001``; the 1 of T1 is no number of a case."""
    return tuple(filter(None, re.split(r"[\W_]+|(?<=[^\W\d_])(?=\d\d)", name)))


def _in_all(words: Words) -> set[str]:
    return set.intersection(*map(set, words.values()))


def _beyond(words: Sequence[str], case: Sequence[str]) -> dict[int, str] | None:
    """Returns the words that are not a case's, by place; the case's must follow in their order.

    Example:
        >>> _beyond(["p1", "t2", "p1", "t1"], ["p1", "p1"]), _beyond(["p1", "t1"], ["p2"])
        ({1: 't2', 3: 't1'}, None)
    """
    awaited, others = list(case), dict[int, str]()
    for place, word in enumerate(words):
        if awaited and word == awaited[0]:
            awaited.pop(0)
        else:
            others[place] = word
    return None if awaited else others


def _check_case(mask: Path, case: Sequence[str], images: Words) -> None:
    """Refuses P1_post_T1_pre beside P1_pre_T1_pre: it is of P1_post_seg, which is missing."""
    for (image, words), (other, usual) in permutations(images.items(), 2):
        pairs = zip(words, usual, strict=False)
        differ = {at: pair for at, pair in enumerate(pairs) if pair[0] != pair[1]}
        of_case = len(words) == len(usual) and {word for _, word in differ.values()} <= {*case}
        if of_case and differ.keys() - (_beyond(usual, case) or {}).keys():
            there, here = next(iter(differ.values()))
            what = f"{image} fits {mask}, but has {there} where {other} has {here}"
            raise DataError(f"{what}; {LISTED}.")


def _contrasts(
    cases: Words, images: Words, spelled: Mapping[Path, Mapping[str, str]], stems: Words
) -> dict[Path, dict[str, Path]]:
    """Returns the images of each mask by their contrasts, from the words of all."""
    often = Counter(word for of in cases.values() for word in of)
    by_word: dict[str, list[Path]] = {}  # the rarest word of each mask
    for mask, of in cases.items():
        by_word.setdefault(min(of, key=lambda w: (often[w], w), default=""), []).append(mask)
    beyond: dict[tuple[Path, Path], Collection[str]] = {}  # by mask and image
    for image, of in images.items():
        near = {mask for word in (*of, "") for mask in by_word.get(word, ())}
        # In order, as sub-1/ses-2 and sub-2/ses-1 have the same words.
        rest = {m: left for m in near if (left := _beyond(of, cases[m])) is not None}
        most = max((len(cases[mask]) for mask in rest), default=0)
        best = sorted(mask for mask in rest if len(cases[mask]) == most)
        if len(best) > 1:
            raise DataError(f"{image} fits two masks, {best[0]} and {best[1]}; {LISTED}.")
        beyond |= {(mask, image): rest[mask].values() for mask in best}
    twins = ""
    for whole in (False, True):  # pre/T1 and orig/T1 differ in their folders alone
        folders: dict[Path, dict[str, Path]] = {}
        for (mask, image), more in beyond.items():
            words = dict.fromkeys(w for w in more if whole or w in stems[image])
            name = "_".join(spelled[image][word] for word in words) or "image"
            if (twin := folders.setdefault(mask, {}).setdefault(name, image)) != image:
                twins = f"{twin} and {image} are alike beside {mask}; {LISTED}."
                break
        else:
            return folders
    raise DataError(twins)


def _facts(
    path: Path, cases: Words, common: set[str], centre: str | None, patient: str | None
) -> list[tuple[str, dict[str, str]]]:
    """Returns the split of each mask, and its hospital and patient, by the folders around it."""
    masks, not_places = [*cases], common | {"labeled", "labelled"}
    folders = [mask.relative_to(path).parts[:-1] for mask in masks]
    folders = [tuple(f for f in of if not looks.words(f) <= not_places) for of in folders]
    levels = [[*level] for level in zip(*folders, strict=False)]  # those that all masks have
    kinds = [{SPLIT_NAMES.get(name.lower()) for name in level} for level in levels]
    pairs = zip(levels, kinds, strict=True)
    splits = next((level for level, kind in pairs if {"train"} <= kind <= {*LISTS}), None)
    differ = [level for level in levels if level is not splits and len({*level}) > 1]
    often = [level for level in differ if 2 * len({*level}) <= len(masks)]
    visits = [level for level in often if all(map(_VISIT.fullmatch, level))]
    differ = [level for level in differ if level not in visits]
    # The first folders that differ are hospitals if they are few, and those below are patients.
    centres = _of_participants(path, masks) if centre else None
    if centre and centres is None and differ[:1] in ([level] for level in often):
        likely = centre == FOLDER or all(map(_may_be_hospital, differ[0]))
        centres = differ.pop(0) if likely else None
    bids = (level for level in differ if all(n.startswith("sub-") for n in level))
    patients = next(iter((*bids, *differ)), None)
    if patients is None and visits:  # baseline/P1_seg and followup/P1_seg
        when = [_words("/".join(of).lower()) for of in zip(*visits, strict=True)]
        rest = [[w for w in cases[m] if w not in of] for m, of in zip(masks, when, strict=True)]
        patients = ["_".join(of) for of in rest] if all(rest) else None
    # 1 of BASEL and 1 of BERN are two.
    if patients and centres and len({*zip(patients, centres, strict=True)}) > len({*patients}):
        patients = [f"{c}_{p}" for p, c in zip(patients, centres, strict=True)]
    if patient and patients and are_groups(patients):
        which, more = few(sorted({*patients}), 3), "data.reader.patient=null takes names of files"
        log.warning("%s: each of the folders %s counts as one patient; %s.", path, which, more)
    facts = list[tuple[str, dict[str, str]]]()
    for at in range(len(masks)):
        names = ((centre, centres[at] if centres else ""), (patient, patients and patients[at]))
        known = {key: name for key, name in names if key and name}
        facts.append((LISTS[SPLIT_NAMES[splits[at].lower()] if splits else "train"], known))
    return facts


def are_groups(patients: Sequence[str]) -> bool:
    """Says whether so few have so many masks each that they may be no patients.

    Example:
        >>> are_groups(["Batch 1", "Batch 2"] * 6), are_groups(["P1", "P2", "P3"] * 3)
        (True, False)
    """
    return len({*patients}) < min(10, len(patients) / 4)


def _may_be_hospital(folder: str) -> bool:
    """Whether a name says hospital, or is no patient's, which has a number."""
    numbered = re.search(r"(?<![^\W_])\d|\d(?![^\W_])", folder)  # I2CVB is not
    return not numbered or any(map(HOSPITAL.fullmatch, looks.words(re.sub(r"\d", "", folder))))


def _of_participants(path: Path, masks: Sequence[Path]) -> list[str] | None:
    """Returns the hospitals by a column of BIDS' table of participants; empty where it has none."""
    if not (path / _PARTICIPANTS).is_file():
        return None
    sheet = looks.sheet_of(path / _PARTICIPANTS)
    column = next((c for c in sheet.columns if HOSPITAL.fullmatch(c)), None)
    if column is None:
        return None
    persons = zip(sheet.texts(sheet.columns[0]), sheet.texts(column), strict=True)
    place = {person: text for person, text in persons if person and text}
    return [next((place[part] for part in mask.parts if part in place), "") for mask in masks]
