"""Volumes in folders of folders: which images belong to a mask, and to which hospital, by names.

As ``BASEL/case_1/t1.nii.gz`` beside ``seg.nii.gz``, ``BASEL/images/1.nii.gz`` with
``BASEL/labels/1.nii.gz``, ``BASEL/case_1_t1.nii.gz`` beside ``case_1_seg.nii.gz``, or BIDS. Words
that all masks have and no image has are the masks' own. An image belongs to the mask whose other
words it has, and what it has beyond them is its contrast.
"""

from __future__ import annotations

from medfed.datamodules.extending import *
from medfed.datamodules.readers import looks
from medfed.datamodules.tables.columns import HOSPITAL

_PARTICIPANTS = "participants.tsv"  # of BIDS
FOLDER = "folder"
_SPLITS = {"train": "training", "val": "validation", "test": "test"}
_SPLITS |= {"training": "training", "validation": "validation", "testing": "test"}
_MEND = "give both the words of their case and leave one mask of each, or write a dataset.json"
Words = dict[Path, tuple[str, ...]]


def list_of(path: Path, centre: str | None = "centre") -> dict[str, Any] | None:
    """Returns the cases below a folder as a list in MONAI's form; None without masks or images.

    Names that do not tell which belong together are refused.

    `centre`: the entry of the hospital: ``folder`` takes the first folders that differ for it,
    ``centre`` if they are called like hospitals, and None takes them for patients.
    """
    files = [file for file in visible_files(path) if suffix_of(file)]
    words = {file: _words("/".join(_stems(path, file))) for file in files}
    masks = {file: of for file, of in words.items() if looks.INSIDE & {*of}}
    images = {file: of for file, of in words.items() if file not in masks}
    if len(masks) < 2 or not images:
        return None
    own = looks.INSIDE | _in_all(masks).difference(*images.values())
    cases = {mask: tuple(w for w in of if w not in own) for mask, of in masks.items()}
    of_cases = (*cases.values(), *(_words(stem_of(image)) for image in images))
    alike = _in_all(images).difference(*of_cases)  # folders such as images
    found = _contrasts(
        cases, {image: tuple(w for w in of if w not in alike) for image, of in images.items()}
    )
    counts = Counter(name for of in found.values() for name in of)
    channels = [name for name, count in counts.items() if 2 * count >= len(found)]
    if len(found) < 2 or not channels:
        some = f"such as {min(images)} and {min(masks)}"
        raise DataError(f"By their names, few images fit a mask, {some}: {_MEND}.")
    facts = _facts(path, sorted(found), own, centre)
    index: dict[str, Any] = {"modality": {str(n): name for n, name in enumerate(channels)}}
    for mask, (split, more) in zip(sorted(found), facts, strict=True):
        of = found[mask]
        names = [of[c].relative_to(path).as_posix() if c in of else None for c in channels]
        entry = {"image": names, "label": mask.relative_to(path).as_posix(), **more}
        index.setdefault(split, []).append(entry)
    return index if "training" in index else None


def are_hospitals(path: Path) -> bool:
    """Whether the folders here are of hospitals, each with volumes of several cases."""
    listed = list_of(path)
    return listed is not None and any("centre" in entry for entry in listed["training"])


def _stems(path: Path, file: Path) -> list[str]:
    return [*file.relative_to(path).parts[:-1], stem_of(file)]


def _words(name: str) -> tuple[str, ...]:
    """The different words of a name, in order."""
    return tuple(dict.fromkeys(filter(None, re.split(r"[\W_]+", name.lower()))))


def _in_all(words: Words) -> set[str]:
    return set.intersection(*map(set, words.values()))


def _contrasts(cases: Words, images: Words) -> dict[Path, dict[str, Path]]:
    """Returns the images of each mask by their contrasts."""
    often = Counter(word for of in cases.values() for word in of)
    by_word: dict[str, list[Path]] = {}  # the rarest word of each mask
    for mask, of in cases.items():
        by_word.setdefault(min(of, key=lambda w: (often[w], w), default=""), []).append(mask)
    found: dict[Path, dict[str, Path]] = {}
    others: dict[Path, tuple[Path, Path]] = {}  # masks that an image would fit, too
    spellings = dict[str, str]()  # T1 and t1 are one contrast
    for image, of in images.items():
        near = [mask for word in (*of, "") for mask in by_word.get(word, ())]
        # In order, as sub-1/ses-2 and sub-2/ses-1 have the same words.
        near = [m for m in near if tuple(w for w in of if w in cases[m]) == cases[m]]
        most = max((len(cases[mask]) for mask in near), default=0)
        best = [mask for mask in near if len(cases[mask]) == most]
        others |= {mask: (image, best[0]) for mask in near if mask != best[0]}
        for mask in best[:1]:
            beyond = {*of}.difference(cases[mask])
            named = [w for w in re.split(r"[\W_]+", stem_of(image)) if w.lower() in beyond]
            name = "_".join(named) or "image"
            name = spellings.setdefault(name.lower(), name)
            if (twin := found.setdefault(mask, {}).setdefault(name, image)) != image:
                raise DataError(f"{twin} and {image} fit one mask alike, {mask.name}: {_MEND}.")
    if left := next((mask for mask in others if mask not in found), None):
        image, mask = others[left]
        raise DataError(f"{image} fits two masks, {mask.name} and {left.name}: {_MEND}.")
    return found


def _facts(
    path: Path, masks: Sequence[Path], own: set[str], centre: str | None
) -> list[tuple[str, dict[str, str]]]:
    """Returns the split of each mask, and its hospital and patient, by the folders around it."""
    folders = [[*mask.relative_to(path).parts[:-1]] for mask in masks]
    levels = [[*level] for level in zip(*folders, strict=False)]  # those that all masks have
    levels = [level for level in levels if not all(looks.words(name) <= own for name in level)]
    splits = next((level for level in levels if all(n.lower() in _SPLITS for n in level)), None)
    # The first folders that differ are hospitals if they are few, and those below are patients.
    differ = [level for level in levels if level is not splits and len({*level}) > 1]
    centres = _of_participants(path, masks) if centre else None
    are_few = bool(differ) and 2 * len({*differ[0]}) <= len(masks)
    if centre and centres is None and are_few:
        likely = centre == FOLDER or all(map(_may_be_hospital, differ[0]))
        centres = differ.pop(0) if likely else None
    patients = differ[0] if differ else None
    if patients and centres:  # 1 of BASEL and 1 of BERN are two
        pairs = {*zip(patients, centres, strict=True)}
        if len(pairs) > len({*patients}):
            patients = [f"{c}_{p}" for p, c in zip(patients, centres, strict=True)]
    facts = list[tuple[str, dict[str, str]]]()
    for at in range(len(masks)):
        more = {str(centre): centres[at]} if centres and centres[at] else {}
        more |= {"patient": patients[at]} if patients else {}
        facts.append((_SPLITS[splits[at].lower()] if splits else "training", more))
    return facts


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
