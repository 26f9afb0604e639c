"""Volumes in one folder per case, one file per contrast, such as those of the BraTS challenges.

BraTS challenges, 2017 to 2021 and, by name, 2023: ``<case>/<case>_flair.nii.gz``, ``_t1``,
``_t1ce``, ``_t2`` and ``_seg`` (2023: ``-t2f``, ``-t1n``, ``-t1c``, ``-t2w``, ``-seg``), packed or
not. The cases of 2017 to 2019 lie in ``HGG`` and ``LGG``. Labels: 1 necrotic and non-enhancing
tumour, 2 oedema, 4 enhancing tumour (3 since 2023).
"""

from __future__ import annotations

from medfed.datamodules.extending import *
from medfed.datamodules.readers import looks, trees
from medfed.datamodules.readers.cases import CaseReader
from medfed.datamodules.readers.centres import hospitals_of, institutions
from medfed.standalone.contrasts import FILES, AbsentFileError, Pattern, alternatives, find_file

log = logging.getLogger(__name__)
_FILES, _WHOLE = {"FLAIR": "FLAIR.nii.gz", "T1": "T1.nii.gz"}, {"whole": [1]}


class FolderReader(CaseReader):
    """Reads folders such as ``case_0/FLAIR.nii.gz``, ``case_0/T1.nii.gz``, ``case_0/GT_W.nii.gz``.

    `modalities`: file name or glob pattern per channel, or a list of alternatives. `regions`: label
    values of every region, such as ``{whole: [1, 2, 4], enhancing: [4]}``; no others may occur.
    """

    def __init__(
        self,
        path: Path,
        modalities: Mapping[str, Pattern] | None,
        label: Pattern,
        regions: Mapping[str, Sequence[int]] | None,
        channels: Sequence[str] | None = None,
        known_labels: Sequence[int] = (),
        **more: Any,
    ) -> None:
        modalities, regions = modalities or _FILES, regions or _WHOLE
        for key, files, such in (("modalities", modalities, _FILES), ("regions", regions, _WHOLE)):
            if not isinstance(files, Mapping):
                what = str(such).replace("'", "")
                raise ConfigError(f"data.reader.{key} is a map; write data.reader.{key}='{what}'.")
        names = check_names("channel", channels or list(modalities), list(modalities))
        values = {value for region in regions.values() for value in region}
        super().__init__(path, names, regions, sorted(values.union(known_labels)), **more)
        self._patterns = {**{name: modalities[name] for name in names}, "label": label}

    def cases(self) -> list[Patient]:
        """See `CaseReader.cases`; the id is the folder's name."""
        if not self.path.is_dir():
            raise DataError(f"{self.path} is not a folder; set data.path to the folder of cases.")
        folders = self.case_folders()
        if not folders:
            raise DataError(f"{self.path} has no case folders; set data.path to their parent.")
        placed = self.origins.of(sorted(folder.name for folder in folders))
        return [self._case(folder) for folder in folders if folder.name in placed]

    def _case(self, folder: Path) -> Patient:
        files, lacks = {}, {}
        for role, pattern in self._patterns.items():
            try:
                files[role] = find_file(folder, role, pattern)
            except AbsentFileError as error:
                if role == "label":
                    raise
                lacks[role] = str(error)
        return Patient(folder.name, files, lacks=lacks)

    def layout(self) -> dict[str, object]:
        """See `VolumeReader.layout`."""
        files = {n: alternatives(self._patterns[n]) for n in self.channels}
        return {**super().layout(), "files": files}

    def case_folders(self) -> list[Path]:
        """Lists the folders of the cases."""
        return [folder for folder in looks.visible(self.path) if folder.is_dir()]


MASK = ("*_seg.nii.gz", "*_seg.nii", "*-seg.nii.gz", "*-seg.nii")


class BratsChallengeReader(FolderReader):
    """Reads the training folder of a BraTS challenge.

    The hospital of a case comes from ``centres.json`` or ``centres.csv``, else from its name (2017
    to 2019) or ``name_mapping.csv`` (2020), else from a block of cases.
    """

    def __init__(
        self,
        path: Path,
        channels: Sequence[str] = ("FLAIR", "T1w", "T1gd", "T2w"),
        regions: Sequence[str] = ("whole",),
        enhancing: int = 4,
        **more: Any,
    ) -> None:
        if enhancing not in (3, 4):
            raise ConfigError(
                f"data.reader.enhancing={enhancing} must be 4 (BraTS 2017 to 2021) or 3 (since "
                "2023); 1 is the necrotic and non-enhancing tumour and 2 the oedema."
            )
        values = {"whole": (1, 2, enhancing), "core": (1, enhancing), "enhancing": (enhancing,)}
        chosen = {name: values[name] for name in check_names("region", regions, list(values))}
        super().__init__(path, FILES, MASK, chosen, channels, values["whole"], **more)
        self.origins = replace(self.origins, of_brats=True)

    def case_folders(self) -> list[Path]:
        """Lists the folders here; of one without images, such as ``HGG``, the folders in it."""
        cases: list[Path] = []
        for folder in super().case_folders():
            # A case has images; a folder that holds only folders, such as HGG, is a group of cases.
            inner = [f for f in looks.visible(folder) if f.is_dir()]
            cases += [folder] if any(folder.glob("[!.]*.nii*")) or not inner else inner
        names: dict[str, Path] = {}
        for folder in cases:
            if (first := names.setdefault(folder.name, folder)) != folder:
                raise DataError(f"Case {folder.name} is in {first} and in {folder}; remove one.")
        return cases


def looks_like(path: Path, answers: looks.Answers) -> looks.Guess | None:
    """Guesses by the names of volumes in the folders of cases; see `looks`."""
    folders = [f for f in looks.visible(path) if f.is_dir() and not trees.folders_of(path)]
    groups = [f for f in folders if f.name in ("HGG", "LGG")]
    folders = [f for group in groups for f in looks.visible(group) if f.is_dir()] or folders
    of = {f: [v for v in looks.visible(f) if is_volume(v)] for f in folders if not is_volume(f)}
    scans = [v for case in of.values() for v in case if len(case) > 1]
    if not scans:
        return None
    names = [folder.name for folder in of]
    known = [c for c, such in FILES.items() if any(v.match(n) for v in scans for n in such)]
    if len(known) > 1 and any(v.match(p) for v in scans for p in MASK):
        enhancing = 3 if any(v.match("*-seg.*") for v in scans) else 4
        keys = {"data.reader.channels": known, "data.reader.enhancing": enhancing}
        guess = looks.Guess("brats_challenge", path, keys)
        guess.asks["data.reader.regions"] = looks.brats_regions()
        if not (hospitals_of(path, names) or institutions(path, names)):
            looks.sites_of(guess, names, answers)
        return guess
    listed = any(f.name != "centres.json" for f in path.glob("*.json"))
    guess = looks.Guess("brats_folder", path, sure=not listed and not groups)
    patterns = dict[str, list[Path]]()
    named = Counter(v.name for v in scans)
    for scan in scans:
        rest = scan.name.removeprefix(scan.parent.name)
        pattern = scan.name if named[scan.name] > 1 or rest == scan.name else f"*{rest}"
        patterns.setdefault(pattern, []).append(scan)
    if rare := [p for p, files in patterns.items() if len(files) == 1 < len(of)]:
        guess.took.append(("files of one case", few(rare, 4), "left out: others lack them"))
        patterns = {p: files for p, files in patterns.items() if p not in rare} or patterns
    masks = [p for p in patterns if looks.may_be_mask(stem_of(Path(p)))]
    best = masks[0] if len(masks) == 1 else None
    # Folders of several masks each are rather pairs of any kind.
    guess.sure &= best is not None and not any(looks.may_be_mask(stem_of(Path(p))) for p in rare)
    mask = answers.get("data.reader.label", best)
    places = hospitals_of(path, names) or looks.sites_of(guess, names, answers)
    guess.ask_names(names, answers, places)
    if best is None:
        text = "Which file of a case is the mask?"
        guess.ask("data.reader.label", text, None, masks or [*patterns])
    if mask not in patterns:
        return guess
    images = {stem_of(Path(p)).strip("*_- "): p for p in patterns if p not in (mask, *masks)}
    guess.took.append(("mask", mask, "probably: its name" if best else "as you say"))
    guess.reads(modalities=images, label=mask)
    if len(series := [n for n, p in images.items() if patterns[p][0].is_dir()]) > 1:
        question = f"A case has the DICOM series {few(series)}. Is each a channel?"
        guess.ask("data.reader.channels", question, [*images], [*images])
    looks.regions(guess, patterns[mask])
    guess.keys["data.flips"] = []
    if any("ct" in looks.words(name) for name in images):
        guess.keys["data.normalize"] = {"window": [-175, 250]}  # HU of soft tissue
    return guess
