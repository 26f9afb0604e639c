"""Volumes that a JSON file lists: any task of the Medical Segmentation Decathlon, any MONAI list.

``{"training": [{"image": "imagesTr/a.nii.gz", "label": "labelsTr/a.nii.gz"}, ...]}``, where an
image may be a file with all channels or a list of one file each, with ``modality`` (or
``channel_names``) and ``labels`` as further entries. The index or the user defines the regions'
label values.
"""

from __future__ import annotations

from typing import NamedTuple

from medfed.datamodules.extending import *
from medfed.datamodules.readers import looks, trees
from medfed.datamodules.readers.cases import CaseReader, as_names
from medfed.datamodules.readers.centres import hospitals_of, read_json
from medfed.standalone.names import fold as fold_name
from medfed.standalone.volume_files import SUFFIXES, existing

Regions = dict[str, tuple[int, ...]]
Wanted = Mapping[str, Sequence[int]] | Sequence[str]  # values by region, or names


def _listed_labels(labels: object, path: Path) -> Regions:
    """Reads the entry ``labels`` of a ``dataset.json``.

    Example:
        >>> _listed_labels({"0": "background", "2": "tumour", "1": "liver"}, Path("dataset.json"))
        {'liver': (1,), 'tumour': (2,)}
        >>> _listed_labels({"background": 0, "whole": [1, 2], "core": 2}, Path("dataset.json"))
        {'whole': (1, 2), 'core': (2,)}
    """
    regions: Regions = {}
    try:
        assert isinstance(labels, Mapping)
        if all(str(key).isdigit() for key in labels):
            by_value = sorted((int(key), str(name)) for key, name in labels.items())
            regions = {name: (value,) for value, name in by_value if value}
            assert len(regions) == len([value for value, _ in by_value if value])
        else:
            for name, label in labels.items():
                values = tuple(label) if isinstance(label, list | tuple) else (label,)
                assert values
                assert all(type(v) is int and 0 <= v < 256 for v in values)
                if values != (0,):
                    regions[str(name)] = values
        assert regions
    except (AssertionError, TypeError, ValueError):
        usual = '{"0": "background", "1": "NAME", ...}, or set data.reader.regions={NAME: [1]}'
        what = f"{path} has no usable labels ({str(labels)[:80]})"
        raise DataError(f"{what}; write {usual}.") from None
    if "ignore" in regions:
        raise DataError(
            f"{path} has the label ignore, which is not supported: its voxels would count as "
            "background; give them a value in the masks, and remove the label."
        )
    return regions


def _chosen_regions(wanted: Wanted | None, listed: Regions) -> Regions:
    """Returns label values by region: the user's, those of the names that he chose, or all.

    Example:
        >>> listed = {"liver": (1,), "tumour": (2,)}
        >>> _chosen_regions(["tumour"], listed)
        {'tumour': (2,)}
        >>> _chosen_regions({"whole": [1, 2], "tumour": [2]}, listed)
        {'whole': (1, 2), 'tumour': (2,)}
    """
    if wanted is None:
        return listed
    if not isinstance(wanted, Mapping):
        if isinstance(wanted, str):
            wanted = [wanted]
        where = "data.reader.regions: "
        return {name: listed[name] for name in check_names("region", wanted, list(listed), where)}
    regions = {str(name): tuple(values) for name, values in wanted.items()}
    whole = all(type(v) is int and 0 < v < 256 for values in regions.values() for v in values)
    if not regions or not all(regions.values()) or not whole:
        raise ConfigError(
            f"data.reader.regions={dict(wanted)} must give each region its label values, such as "
            "{liver: [1, 2], tumour: [2]}, or name regions of the data set."
        )
    return regions


log = logging.getLogger(__name__)

_LISTS: dict[str, Split] = {"training": "train", "validation": "val", "test": "test"}


class _Case(NamedTuple):
    """A case that a list or a folder names."""

    images: Sequence[Path | None]  # one with all channels, or one each; None where it is missing
    mask: Path
    entry: Mapping[str, Any]  # what the list says of it
    split: Split | None = None


class DatalistReader(CaseReader):
    """Reads the volumes of a list.

    `path`: the JSON file, the folder with its ``dataset.json``, or a folder with ``images`` and
    ``labels``, whose volumes have equal names. `regions`: label values by region, ``{liver: [1, 2],
    tumour: [2]}``, or names of the list's labels; None takes all of these.
    """

    normalize: object = None  # by the names of the channels: a window for CT
    any_size = True
    elsewhere = (
        "set data.path to a folder with a dataset.json, or to the JSON file that lists the cases; "
        "for folders of images and labels name the masks' values by data.reader.regions={NAME: [1]}"
    )

    def __init__(
        self,
        path: Path,
        channels: Sequence[str] | None = None,
        regions: Wanted | None = None,
        patient: str | None = "patient",
        centre: str | None = "centre",
        fold: int | None = None,
        series: str | Sequence[str] | None = None,
        **more: Any,
    ) -> None:
        self._file = path / "dataset.json" if path.is_dir() else path
        if self._file.exists():
            self._index = read_json(self._file)
            self._listed = self._list(fold)
        elif isinstance(regions, Mapping) and (listed := trees.list_of(path, centre, patient)):
            self._file = path / Path(listed["training"][0]["label"]).parts[0]
            self._index = listed
            self._listed = self._list(fold)
        else:
            raise DataError(f"{self._file} does not exist; {self.elsewhere}.")
        self._patient, self._centre, self.series = patient, centre, as_names(series)
        known = self._channel_names()
        names = check_names("channel", channels or known, known)
        labels = self._labels_of(regions)
        chosen = _chosen_regions(regions, labels)
        values = {v for each in (*labels.values(), *chosen.values()) for v in each}
        super().__init__(self._file.parent, names, chosen, sorted(values), series=series, **more)
        self._select = [known.index(name) for name in names]
        self._known = known
        self.in_file = len(known)

    def cases(self) -> list[Patient]:
        """See `CaseReader.cases`."""
        present = set(existing({path for case in self._listed for path in case.images if path}))
        folder = self._file.parent
        if not present and any((folder / "imagesTr").glob("*_0000.*")):
            raise DataError(
                f"{self._file} lists cases, of which imagesTr has a file for each channel (_0000), "
                f"as nnU-Net wants it; read the folder by data=nnunet data.path={folder}."
            )
        patients = []
        for name, (images, mask, entry, split) in zip(self._ids(), self._listed, strict=True):
            if 1 < len(images) != len(self._known):
                raise DataError(
                    f"{self._file}: case {name} lists {len(images)} images for "
                    f"{len(self._known)} channels; list one each, or null for a missing one."
                )
            whole = len(images) == 1  # a file with all channels
            of = {c: images[0 if whole else self._known.index(c)] for c in self.channels}
            there = {c: path for c, path in of.items() if path in present}
            lost = {c: path or f"The {c} of {name}" for c, path in of.items() if c not in there}
            why = f"is missing, but {mask} is there; copy it there or remove the mask"
            lacks = {c: f"{what} {why}." for c, what in lost.items()}
            if whole and there:
                there = {"image": there[self.channels[0]]}
            centre = None if (at := entry.get(self._centre or "")) is None else fold_name(str(at))
            done = self._outlined(name, entry["annotated"]) if "annotated" in entry else None
            roles = {**there, "label": mask}
            patients.append(Patient(name, roles, centre, split=split, lacks=lacks, annotated=done))
            if self._pattern is None and (person := entry.get(self._patient or "")) is not None:
                self._person[name] = fold_name(str(person))
        return patients

    def indices(self) -> list[Path]:
        """See `Reader.indices`."""
        return [*super().indices(), self._file]

    def _outlined(self, case: str, names: object) -> tuple[str, ...]:
        """The regions that an entry lists as ``annotated``."""
        listed = [str(name) for name in (names if isinstance(names, list) else [names])]
        known = {*self.regions, *self._labels_of(self._region_labels)}
        outlined = tuple(region for region in self.regions if region in listed)
        if not outlined or set(listed) - known:
            raise DataError(
                f"{self._file}: case {case} has annotated {str(names)[:80]}; list one or more of "
                f"{few(self.regions)}, or leave the entry out if all are annotated."
            )
        return outlined

    def layout(self) -> dict[str, object]:
        """See `VolumeReader.layout`."""
        return {**super().layout(), "file_channels": list(self._known)}

    def _list(self, fold: int | None) -> list[_Case]:
        """The cases with a mask, and their split if the list has one."""
        listed = list[_Case]()
        for name, split in _LISTS.items():
            entries = self._index.get(name, [])
            for entry in entries if isinstance(entries, list) else []:
                if isinstance(entry, dict) and "image" in entry and "label" in entry:
                    of = entry["image"]
                    several = isinstance(of, list) and len(of) > 0
                    images = [n if n is None else self._place(n) for n in (of if several else [])]
                    images = images or [self._place(of)]
                    listed.append(_Case(images, self._place(entry["label"]), entry, split))
                elif name == "training":
                    what = f"the training case {str(entry)[:80]}"
                    raise DataError(f"{self._file}: {what} is no pair of image and label.")
        if not (trained := sum(case.split == "train" for case in listed)):
            raise DataError(f"{self._file} lists no training cases.")
        self._check_count(trained, "it lists")
        return self._split(listed, fold)

    def _place(self, name: object) -> Path:
        """The file of a name in the list."""
        if not isinstance(name, str) or not name:
            raise DataError(f"{self._file}: {str(name)[:80]!r} is no path of a volume.")
        folder = self._file.parent
        return folder / (slashed(folder, [name])[0] if "\\" in name else name)

    def _split(self, listed: list[_Case], fold: int | None) -> list[_Case]:
        """The cases with their final split, of which a fold is the test."""
        if fold is None:  # splits without cases in the list get training cases
            return [c._replace(split=None) if c.split == "train" else c for c in listed]
        folds = [case.entry.get("fold") for case in listed]
        if fold not in folds:
            which = ", ".join(sorted({str(of) for of in folds if of is not None})) or "none"
            what = f"data.reader.fold={fold} has no cases in {self._file}"
            raise ConfigError(f"{what}; it has the folds {which}.")
        pairs = zip(listed, folds, strict=True)
        return [case._replace(split="test" if of == fold else None) for case, of in pairs]

    def _check_count(self, there: int, where: str) -> None:
        if (count := self._index.get("numTraining")) not in (None, there):
            text = "%s says numTraining %s, but %s %d masks."
            log.warning(text, self._file, str(count)[:20], where, there)

    def _channel_names(self) -> list[str]:
        names = self._index.get("modality", self._index.get("channel_names"))
        if isinstance(names, list):
            names = {str(n): name for n, name in enumerate(names)}
        if names is None:
            one, *others = self._listed[0].images
            count = read_geometry(one, series=self.series).channels if one and not others else 0
            return [f"channel_{n}" for n in range(count or 1 + len(others))]
        if isinstance(names, str):
            return [names]
        try:
            channels = [str(name) for _, name in sorted((int(k), v) for k, v in names.items())]
            # MSD's prostate and others repeat a name.
            twice = {name for name, count in Counter(channels).items() if count > 1}
            assert channels
            return [f"{name}_{n}" if name in twice else name for n, name in enumerate(channels)]
        except (AssertionError, AttributeError, ValueError):
            what = f"{self._file} has no usable channel names ({str(names)[:80]})"
            raise DataError(what + '; write {"modality": {"0": "CT"}}.') from None

    def _labels_of(self, wanted: object) -> Regions:
        """The list's entry, unless the user gives all of it."""
        if "labels" not in self._index and isinstance(wanted, Mapping):
            return {}
        return _listed_labels(self._index.get("labels"), self._file)

    def _ids(self) -> list[str]:
        """The stems of the images, with the names of one or two folders if stems repeat."""
        ids = _names_of([case.images[0] or case.mask for case in self._listed])
        if twice := [name for name, count in Counter(ids).items() if count > 1]:
            raise DataError(f"{self._file} lists {few(twice, 3)} twice; list each case once.")
        return ids


def _case_of(file: Path) -> str:
    """The case of a channel's file, as nnU-Net names it."""
    return re.sub(r"_\d{4}$", "", stem_of(file))


def _names_of(files: Sequence[Path]) -> list[str]:
    """The stems of files, with the names of folders where stems repeat."""
    names = [stem_of(file).removesuffix("_0000") for file in files]
    for folders in range(1, 5):  # as HOSPITAL/images/001.nii.gz
        if len(set(names)) < len(names):
            names = ["_".join([*p.parent.parts[-folders:], stem_of(p)]) for p in files]
    return names


class NnunetReader(DatalistReader):
    """Reads a raw data set of nnU-Net, whose ``imagesTr/CASE_0000.nii.gz`` is a first channel."""

    def __init__(self, path: Path, **more: Any) -> None:
        self._folder = path
        super().__init__(path / "dataset.json", **more)

    def _list(self, fold: int | None) -> list[_Case]:
        if fold is not None:
            raise ConfigError("data.reader.fold is for lists; nnU-Net's folders have no folds.")
        ending = str(self._index.get("file_ending", ".nii.gz"))
        labels, images = self._folder / "labelsTr", self._folder / "imagesTr"
        if ending.lower() not in SUFFIXES:
            what = f"{self._file} names the ending {ending}, but medfed reads nnU-Net's volumes"
            mend = (
                "for pictures use data=image_masks, which reads imagesTr and labelsTr of pictures"
            )
            raise DataError(f"{what} alone ({', '.join(SUFFIXES)}): {mend}.")
        names = sorted(p.name for p in labels.glob(f"*{ending}") if is_visible(p.name))
        if not names:
            raise DataError(f"{labels} has no masks (*{ending}); set data.path to a raw data set.")
        if "channel_names" not in self._index and "modality" not in self._index:
            usual = '{"channel_names": {"0": "CT"}}'
            raise DataError(f"{self._file} lacks channel_names; write {usual}.")
        ends = [f"_{n:04d}{ending}" for n in range(len(self._channel_names()))]
        cases = [name.removesuffix(ending) for name in names]
        self._ending = ending
        self._count(images, cases)
        pairs = zip(cases, names, strict=True)
        return [_Case([images / f"{c}{e}" for e in ends], labels / name, {}) for c, name in pairs]

    def _count(self, images: Path, masked: Collection[str]) -> None:
        """Says which images have no mask, and where the list counts other cases."""
        self._left = {
            file: "no mask in labelsTr"
            for file in images.glob(f"*{self._ending}")
            if is_visible(file.name) and _case_of(file) not in masked
        }
        if idle := sorted({*map(_case_of, self._left)}):
            text = "%s: %d cases have no mask in labelsTr and are left out: %s."
            log.warning(text, self._folder, len(idle), few(idle, 4))
        self._check_count(len(masked), "labelsTr has")

    def left(self) -> Mapping[Path, str]:
        """See `Reader.left`."""
        return self._left

    def layout(self) -> dict[str, object]:
        """See `VolumeReader.layout`."""
        layout = super().layout()
        if len(self._known) == 1:
            return layout
        numbers = {name: self._known.index(name) for name in self.channels}
        return {**layout, "files": {c: [f"*_{n:04d}{self._ending}"] for c, n in numbers.items()}}


_TUMOUR = {"whole": (1, 2, 3), "core": (2, 3), "enhancing": (3,)}


class MSDReader(DatalistReader):
    """Reads MSD Task01_BrainTumour and generated cohorts in its layout.

    Images are 4-D with the channels FLAIR, T1w, T1gd and T2w; labels are 1 oedema, 2 non-enhancing
    and 3 enhancing tumour: 1 and 2 are exchanged in the BraTS challenges.
    """

    normalize: object = "zscore_nonzero"
    any_size = False
    elsewhere = (
        "set data.path to a folder in the layout of MSD Task01_BrainTumour, or use "
        "data=brats_challenge or data=brats_folder for one folder per case"
    )

    def __init__(
        self,
        path: Path,
        channels: Sequence[str] = ("FLAIR", "T1w", "T1gd", "T2w"),
        regions: Sequence[str] = ("whole",),
        **more: Any,
    ) -> None:
        chosen = {n: _TUMOUR[n] for n in check_names("region", regions, list(_TUMOUR))}
        super().__init__(path / "dataset.json", channels, chosen, **more)

    def _labels_of(self, wanted: object) -> Regions:
        """The values that may occur, independent of the list's names."""
        return {"whole": _TUMOUR["whole"]}


_BRAIN = {"flair", "t1w", "t1gd", "t2w"}


def looks_like(path: Path, answers: looks.Answers) -> looks.Guess | None:
    """Guesses by the JSON files and what they list; see `looks`."""
    if path.name == "dataset.json":
        path = path.parent
    files = [path] if path.suffix.lower() == ".json" else sorted(path.glob("[!.]*.json"))
    index = {f: read_json(f) for f in files if f.name != "centres.json"}
    lists = [f for f, content in index.items() if isinstance(content.get("training"), list)]
    usual, placed, grouped = path / "dataset.json", list[str](), False
    if usual in index and (usual not in lists or _is_numbered(path, index[usual]["training"])):
        every = looks.visible(path / "labelsTr")
        masks = [file for file in every if suffix_of(file)]
        if any(map(looks.is_picture, every)):
            return None  # image_masks reads them
        guess, content = looks.Guess("nnunet", path), index[usual]
        names = [stem_of(file) for file in masks]
    elif len(lists) > 1 and usual not in lists:
        return looks.several("datalist", path, lists)
    elif lists or path in index:
        file = usual if usual in lists else (lists or [path])[0]
        guess, content = looks.Guess("datalist", path if file == usual else file), index[file]
        entries = [e for e in content.get("training") or () if isinstance(e, dict)]
        masks = [file.parent / e["label"] for e in entries if isinstance(e.get("label"), str)]
        names = [trees.stem(Path(image)) for image in filter(None, map(_first, entries))]
        sheet, others = looks.sheet_of_entries(file, entries), ("image", "label", "fold")
        looks.roles(guess, sheet, "data.reader.", answers, others)
        if centre := {**guess.keys, **answers}.get("data.reader.centre"):
            placed = [str(e.get(centre, "")) for e in entries if _first(e)]
    elif path.is_dir():
        guess = looks.Guess("datalist", path)
        try:
            content, entries, placed, grouped = trees.guess_list(guess, answers)
        except DataError as error:
            return looks.Guess("datalist", path, sure=False, refused=error)
        if not content:
            return None
        masks = [path / entry["label"] for entry in entries]
        names = _names_of([path / _first(entry) for entry in entries])
        guess.sure = any(placed) or "modality" not in content
        if contrasts := few([*content.get("modality", {}).values()], 6):
            guess.took.append(("images of a mask", contrasts, "probably: their names"))
    else:
        return None
    if "data.reader.patient" not in guess.keys and not grouped:
        places = hospitals_of(path, names) or placed
        if not any(places):
            places = looks.sites_of(guess, names, answers) or places
        guess.ask_names(names, answers, places)
    named = content.get("modality")
    channels = {str(c).lower() for c in named.values()} if isinstance(named, Mapping) else set()
    if guess.data == "datalist" and guess.path == path and channels == _BRAIN:
        guess = looks.Guess("brats", path)
        guess.asks["data.reader.regions"] = looks.brats_regions()
    elif "labels" not in content and masks:
        looks.regions(guess, masks)
    return guess


def _first(entry: Any) -> str:
    """The first image of an entry; empty where it has none."""
    image = entry.get("image") if isinstance(entry, Mapping) else None
    return str(next((i for i in (image if isinstance(image, list) else [image]) if i), ""))


def _is_numbered(path: Path, entries: Sequence[Any]) -> bool:
    """Whether a list has nnU-Net's names of cases, whose files have a number for the channel."""
    there = bool(entries) and existing([path / _first(entries[0])])
    return any((path / "imagesTr").glob("*_0000.*")) and not there
