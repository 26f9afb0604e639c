"""Looks at your data and writes an experiment that trains on them: ``medfed init FOLDER``.

FOLDER is a folder or a file: a table, a list of volumes, scans or DICOM series in a folder per
case, pictures with masks or classes. The command says what it took for what, and how sure it is. It
asks for what it cannot know, or takes its best guess with ``yes=true``. Any key of ``medfed train``
answers a question at once, such as ``data.label=outcome``. It changes nothing in FOLDER.
"""

from __future__ import annotations

import re
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from medfed.commands.command_line import plain
from medfed.commands.help import print_usage
from medfed.common.console import say, wide_console
from medfed.common.errors import ConfigError, DataError, few
from medfed.common.files import refuse_special, write_text, writing
from medfed.config import compose, description, sections, spelling
from medfed.datamodules.readers import case_folders, cases, image_folder
from medfed.datamodules.readers.account import is_visible, visible_files
from medfed.datamodules.readers.table import meant_as_yes
from medfed.datamodules.segmentation import SegmentationDataModule
from medfed.datamodules.tables.columns import HOSPITAL, PATIENT, leaks
from medfed.datamodules.tables.datamodule import TabularDataModule
from medfed.run.prepare import LIKE
from medfed.standalone import csv_files, pictures, volumes

USAGE = "medfed init FOLDER [yes=true] [name=NAME] [into=FOLDER] [KEY=VALUE ...]"
_LABEL = re.compile(r"label|outcome|target|class|y|diagnosis|ill|died|dead|death|event|status")
_INSIDE = {"seg", "segmentation", "label", "labels", "mask", "masks", "gt", "roi", "truth"}
_FILE = "configs/experiment/{}.yaml"
_PERSON = r"^(.*?\d+)[_-]"  # the beginning of a file's name, if it is the patient
# What photographs of the retina have in their experiment, and others not.
_OTHER = {
    "partition": "auto",
    "augment": "light",
    "data.patches": "fresh",
    "data.reader.scale": 1.0,
}
_MANY = 10  # different numbers of a label above which it is a measurement
_PLACES = 50  # different texts of a column above which they are no hospitals
_NO_PLACES = {*"mfwd", *("male", "female", "man", "woman", "yes", "no", "true", "false", "y", "n")}
_FIRST = 10  # cases that are looked into


@dataclass
class Guess:
    """What a folder seems to hold.

    Attributes:
        data: The option of ``data=``.
        path: What ``data.path`` names.
        keys: Further keys of a run, with their values.
        took: What was taken for what: the fact, the value, and how sure that is.
        asks: By key: the question, what to answer by default, and the possible answers.
    """

    data: str
    path: Path
    keys: dict[str, Any] = field(default_factory=dict)
    took: list[tuple[str, object, str]] = field(default_factory=list)
    asks: dict[str, tuple[str, Any, Sequence[str]]] = field(default_factory=dict)

    def reads(self, **values: Any) -> None:
        """Adds keys of the reader."""
        self.keys |= {f"data.reader.{key}": value for key, value in values.items()}

    def answer(self, given: Mapping[str, Any], yes: bool) -> None:
        """Settles the open questions by the command line, the defaults or the user.

        Raises:
            ConfigError: If some stay open; it names their keys.
        """
        unanswered = []
        for key in [key for key in self.asks if key not in given]:
            question, best, choices = self.asks[key]
            question += f" ({few(choices, 12)})" if choices else ""
            value = best if yes else None
            if value is None and sys.stdin.isatty():
                value = input(f"{question} [{best or ''}] ").strip() or best
            if value is None:
                otherwise = f", or take {best} by yes=true" if best is not None else ""
                unanswered.append(f"{question} Answer by {key}=VALUE{otherwise}.")
                continue
            if isinstance(best, list) and isinstance(value, str) and value != "null":
                value = [word.strip() for word in value.strip("[]").split(",")]
            self.keys[key] = None if value == "null" else value
            self.took.append((key, value, "a guess, as yes=true allows" if yes else "answered"))
        if unanswered:
            raise ConfigError(" ".join(unanswered))
        self.asks.clear()
        self.keys |= given

    def experiment(self, name: str) -> str:
        """Returns the yaml of the experiment, upon the shipped one that fits the data."""
        one = "retina" if self.keys.get("data.reader.regions") is None else "brats"
        base = {**LIKE, "image_masks": one}.get(self.data, self.data) + "_pfednet"
        line = [f"experiment={base}", f"data={self.data}", "data.path=x"]
        usual = spelling.with_whole_data([*line, *(f"{key}=x" for key in self.keys)])[1:]
        keys: dict[str, Any] = dict(o.split("=", 1) for o in usual)
        keys = {k: None if v == "null" else v for k, v in keys.items()}
        keys |= {"data.path": str(self.path), **self.keys}
        groups = [key for key in keys if (compose.CONFIG_DIR / key).is_dir()]
        chosen = [{f"override /{group}": keys.pop(group)} for group in groups]
        content: dict[str, Any] = {"defaults": [base, *chosen, "_self_"], "name": name}
        for key, value in keys.items():
            sections.put(content, key, value)
        said = "".join(f"#   {what}: {value} ({why})\n" for what, value, why in self.took)
        return f"# @package _global_\n# medfed init took:\n{said}{description.as_yaml(content)}"

    def module(self, name: str) -> Any:
        """Builds the data module that training builds."""
        with tempfile.TemporaryDirectory() as folder:
            write_text(Path(folder, _FILE.format(name)), self.experiment(name))
            asked = compose.described([f"plugins={folder}", f"experiment={name}"])
            return compose.build(asked.data)


@plain(partial(print_usage, USAGE), needs_words=True)
def main(given: Sequence[str]) -> None:
    """Runs the command."""
    init(given)


def init(given: Sequence[str]) -> Path:
    """Looks, asks, tries the guess on the first cases, and writes the experiment.

    Args:
        given: The command line.

    Returns:
        The experiment's file.

    Raises:
        MedfedError: If nothing known is there, a question is open, or the data cannot be read.
    """
    places = [a for a in given if "=" not in a]
    if len(places) != 1:
        raise ConfigError(f"medfed init takes one folder or file, not {len(places)}: {USAGE}.")
    refuse_special(path := Path(places[0]).expanduser())
    path = path.resolve()
    typed = spelling.hydra_spelling([a for a in given if "=" in a])
    keys: dict[str, Any] = {o.key_or_group: o.value() for o in compose.parse(typed, "The command")}
    yes, into = keys.pop("yes", False) is True, str(keys.pop("into", "medfed_experiments"))
    name = re.sub(r"\W+", "_", str(keys.pop("name", path.stem))).strip("_").lower() or "mine"
    if (file := Path(into, _FILE.format(name))).exists():
        raise ConfigError(f"{file} exists; choose another name by name=NAME.")
    if not path.exists():
        raise DataError(f"{path} does not exist; name a folder or a file.")
    guess = guessed(path, keys)
    guess.took.insert(0, ("data", f"{guess.data} at {guess.path}", "sure: the layout"))
    guess.answer(keys, yes)
    remarks = tried(guess, keys, name, yes)
    with writing(file.parent, "name another folder by into=FOLDER"):
        write_text(file, guess.experiment(name))
    words = shlex.join([f"plugins={into}", f"experiment={name}"])
    took = [f"{what:<16}{value}  ({why})" for what, value, why in guess.took]
    then = f"Look:    medfed prepare {words} show=true", f"Train:   medfed train {words}"
    say(wide_console(), *took, *remarks, f"Written: {file}", *then)
    return file


def tried(guess: Guess, given: Mapping[str, Any], name: str, yes: bool) -> list[str]:
    """Reads patients and first cases as training will; returns remarks on them.

    Raises:
        MedfedError: If training could not read them.
    """
    data = guess.module(name)
    if isinstance(data, TabularDataModule) and data.path is not None and data.positive is None:
        _ask_positive(guess, data)
        guess.answer(given, yes)
        data = guess.module(name)
    if isinstance(data, SegmentationDataModule):
        every = [case for p in data.scans.patients() for case in data.scans.cases_of(p)]
        if lacking := Counter(channel for case in every for channel in case.lacks):
            counts = ", ".join(f"{channel} {n}" for channel, n in lacking.items())
            question = f"Of {len(every)} cases some lack a contrast ({counts}): take them?"
            guess.asks["data.reader.missing"] = (question, "zero", ["zero", "error"])
            guess.answer(given, yes)
        side = max(8, min(min(data.scans.shape(case)[:2]) for case in every[:_FIRST]) // 16 * 16)
        guess.keys.setdefault("data.patch_size", [min(side, n) for n in data.patch_size or ()])
        data = guess.module(name)
        size = data.scans.shape(every[0]), np.round(data.scans.spacing(every[0]), 2).tolist()
        guess.took.append(("voxels, mm", size, "sure: the first case"))
        for case in every[:2]:
            data.scans.prepared(case, data.preparation)
    if isinstance(data, TabularDataModule) and data.outcome == "classes":
        table = data.table
        alone, _ = leaks(table.names, table.categories, table.features, table.labels)
        if alone:
            question = f"Columns that alone predict the label (AUROC): {few([*alone.values()], 8)}."
            drop = [*(guess.keys.get("data.drop") or []), *alone]
            guess.asks["data.drop"] = (f"{question} Leave them out?", drop, ["null: no"])
            guess.answer(given, yes)
            data = guess.module(name)
    data.plan()
    patients = list(data.patients.values())
    centres = Counter(p.centre for p in patients if p.centre is not None and not p.invented)
    splits = Counter(p.split for p in patients if p.split is not None)
    facts = {
        "channels": data.plan_names,
        "labels": data.class_names,
        "patients": [str(len(patients))],
        "hospitals": [f"{c} {n}" for c, n in centres.items()] or ["none named"],
        "official splits": [f"{s} {n}" for s, n in splits.items()] or ["none"],
    }
    guess.took += [(what, few(found, 12), "as training reads it") for what, found in facts.items()]
    return [*(account.sentence() for account in data.accounts), *map(str, data.remarks)]


def _ask_positive(guess: Guess, data: TabularDataModule) -> None:
    """Asks which of two labels is positive where the alphabet does not say it."""
    if data.reader is not None or data.outcome != "classes":
        return
    sheet = csv_files.Sheet.read(Path(str(data.path)), data.header)
    if data.label.lower() not in sheet.places:
        return
    names = sorted({text for text in sheet.texts(data.label) if text is not None})
    if (best := meant_as_yes(names)) is not None:
        question = f"Which label of {data.label} is the positive class?"
        guess.asks["data.positive"] = (question, [best], names)


def guessed(path: Path, given: Mapping[str, Any]) -> Guess:
    """Says what a folder or file seems to hold.

    Raises:
        DataError: If it is nothing that a reader takes.
        ConfigError: If it is several tables.
    """
    if path.is_file() and path.suffix in (".npz", ".json"):
        return Guess("medmnist" if path.suffix == ".npz" else "datalist", path)
    if path.is_file():
        return _table(path, given)
    if guess := _listed(path) or _pictures(path, given) or _scans(path, given):
        return guess
    files = [f for f in _visible(path) if f.suffix.lower() in (".csv", ".tsv", ".npz")]
    if len(files) == 1:
        return guessed(files[0], given)
    if not files:
        raise DataError(f"{path} has no table and no layout that docs/data.md names; name another.")
    names = few([file.name for file in files])
    raise ConfigError(f"{path} has {len(files)} tables ({names}); say which: medfed init TABLE.")


def _visible(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if is_visible(p.name))


def _listed(path: Path) -> Guess | None:
    """Data sets that a file, or the names of files, give away."""
    if heart := sorted(f.name.split(".")[1] for f in path.glob("processed.*.data")):
        return Guess("heart", path, {"data.reader.centres": heart})
    if any(path.glob("subset*")) and any(path.glob("candidates*.csv")):
        return Guess("luna16", path)
    index = {f: cases.read_json(f) for f in path.glob("*.json") if f.name != "centres.json"}
    lists = [f for f, content in index.items() if isinstance(content.get("training"), list)]
    usual = path / "dataset.json"
    if usual in index and usual not in lists:
        return Guess("nnunet", path)
    if len(lists) != 1:
        return None
    names = index[lists[0]].get("modality")
    names = {str(n).lower() for n in names.values()} if isinstance(names, dict) else set()
    brain = names == {"flair", "t1w", "t1gd", "t2w"} and lists == [usual]
    return Guess("brats" if brain else "datalist", path if lists == [usual] else lists[0])


def _table(path: Path, given: Mapping[str, Any]) -> Guess:
    """A CSV of patients, or one that names pictures."""
    sheet = csv_files.Sheet.read(path)
    first = dict(zip(sheet.columns, sheet.rows[0], strict=True))
    files = [c for c, cell in first.items() if _is_picture(path.parent / cell.strip())]
    kinds = {c: {t for t in sheet.texts(c) if t is not None} for c in sheet.columns}
    roles = {"centre": HOSPITAL, "patient": PATIENT}
    named = {r: c for r, of in roles.items() for c in sheet.columns[::-1] if of.fullmatch(c)}
    guess = Guess("csv", path, {f"data.{role}": column for role, column in named.items()})
    guess.took += [(role, column, "probably: its name") for role, column in named.items()]
    key = "data.reader.label" if files else "data.label"
    if files:
        masks = [c for c in files[1:] if _INSIDE & _words(c)] or files[1:]
        guess.data, guess.keys = "image_masks" if masks else "image_table", {}
        guess.reads(**named, image=files[0], **({"mask": masks[0]} if masks else {}))
        of = {c: [path.parent / text for _, text in sheet.cells(c)] for c in (files[0], *masks[:1])}
        _colors(guess, of[files[0]])
        if masks:
            _regions(guess, of[masks[0]])
            return guess
    alike = [c for c in sheet.columns if _LABEL.fullmatch(c.lower())]
    label = given.get(key, alike[0] if len(alike) == 1 else None)
    choices = alike or [c for c in sheet.columns if 2 <= len(kinds[c]) <= _MANY]
    guess.asks[key] = ("Which column is the label?", label, choices)
    others = [c for c in sheet.columns if c not in (label, *named.values())]
    if odd := [c for c in others if _mixed(sheet, kinds[c])]:
        question = f"Numbers and texts are mixed in {few(odd, 12)}. Leave these columns out?"
        guess.asks["data.drop"] = (question, odd, ["null: no"])
    texts = kinds.get(str(label), set())
    if files:
        return guess
    if "centre" not in named and (places := [c for c in others if _may_be_places(sheet, kinds[c])]):
        question = "Does one of these columns name the hospital? Without it, clients are random."
        guess.asks["data.centre"] = (question, "null", [*places, "null: no"])
    if not texts:
        return guess
    if len(texts) > _MANY and all(csv_files.as_number(t) < float("inf") for t in texts):
        guess.keys |= {"data.outcome": "continuous", "model": "linear"}
        guess.took.append(("outcome", "continuous", "probably: many different numbers"))
    return guess


def _may_be_places(sheet: csv_files.Sheet, texts: Collection[str]) -> bool:
    """Whether a column has few texts, each in several rows, that are no sexes and no answers."""
    several = 2 <= len(texts) <= _PLACES and 4 * len(texts) <= len(sheet.rows)
    known = {*map(str.lower, texts)} <= _NO_PLACES or meant_as_yes(sorted(texts)) is not None
    return several and not known and not any(map(csv_files.like_a_number, texts))


def _mixed(sheet: csv_files.Sheet, texts: Collection[str]) -> bool:
    """Whether only some cells are numbers, and not all are dates."""
    numbers = [csv_files.as_number(t) < float("inf") for t in sheet.with_points([*texts])]
    some = any(map(csv_files.like_a_number, texts))
    return some and not all(numbers) and not all(map(csv_files.is_date, texts))


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in pictures.SUFFIXES and path.is_file()


def _colors(guess: Guess, files: Sequence[Path]) -> None:
    """The colours and size of the first pictures."""
    heads = [pictures.picture_header(file) for file in files[:_FIRST]]
    guess.reads(color="rgb" if any(color == "rgb" for _, _, color in heads) else "grey")
    guess.took.append(("first picture", heads[0], "sure: its header"))
    compared = guess.data == "image_masks" and guess.keys["data.reader.color"] == "rgb"
    some, pairs = files[:: 1 + len(files) // 100] if compared else [], Counter[str]()
    for file in some:
        of = zip(("red", "green", "blue"), pictures.read_picture(file, "rgb")[0], strict=True)
        pairs.update(f"{a} = {b}" for (a, x), (b, y) in combinations(of, 2) if (x == y).all())
    if pairs:
        equal = f"{few([f'{pair} in {n}' for pair, n in pairs.items()])} of {len(some)} pictures"
        guess.took.append(("equal channels", equal, "perhaps a copy for a contrast not taken"))


def _regions(guess: Guess, files: Sequence[Path]) -> None:
    """The values of masks, and names for them."""
    values: set[int] = set()
    for file in files[:_FIRST]:
        picture = _is_picture(file)
        voxels = pictures.read_mask(file) if picture else volumes.read_volume(file).voxels.numpy()
        values |= {int(v) for v in np.unique(voxels) if v}
    inside = sorted(values)
    if not 0 < len(inside) < 50 or not 0 < inside[0] <= inside[-1] < 256:
        raise DataError(f"{files[0]} is no mask of a few label values; name it by data.reader.")
    called = {"foreground" if len(inside) == 1 else f"label_{v}": [v] for v in inside}
    flat = guess.data == "image_masks"
    guess.keys |= _OTHER if flat else {"data.flips": []}
    guess.reads(regions=None if flat and inside in ([1], [255]) else called)
    guess.took.append(("mask values", inside, "in the first masks; data.reader.regions"))


def _pictures(path: Path, given: Mapping[str, Any]) -> Guess | None:
    """Class folders, pictures with masks, or the CSV of either."""
    for file in sorted(path.glob("*.csv"), key=lambda f: f.name != "images.csv"):
        if file.name != "centres.csv" and (guess := _table(file, given)).data != "csv":
            return guess
    below = {f.name: [p for p in visible_files(f) if _is_picture(p)] for f in _visible(path)}
    below = {name: files for name, files in below.items() if files}
    split = any(name.lower().startswith("train") for name in below)
    if len(below) < 2 - split:
        return None
    guess = Guess("image_masks" if {*below} >= {"images", "masks"} else "image_folder", path)
    if guess.data == "image_masks":
        _regions(guess, below.pop("masks"))
    elif masks := [m for name in below for m in image_folder.pictures_in(path / name)[1]]:
        below = {name: image_folder.pictures_in(path / name)[0] for name in below}
        said = f"{len(masks)}, such as {masks[0].name}"
        guess.took.append(("masks beside pictures", said, "left out: named as their pictures"))
    files = [file for of in below.values() for file in of]
    _colors(guess, files)
    people = Counter(m[1] for m in (re.match(_PERSON, file.name) for file in files) if m)
    if people.total() == len(files) > len(people) >= 5 and not split:
        question = f"Does the name {files[0].name} begin with the patient, {next(iter(people))}?"
        guess.asks["data.reader.patient_pattern"] = (question, _PERSON, ["null: no"])
    return guess


def _words(text: str) -> set[str]:
    return set(re.split(r"[\W_]+", text.lower()))


def _scans(path: Path, given: Mapping[str, Any]) -> Guess | None:
    """A folder per case, with a volume per contrast and a mask."""
    folders = [f for f in _visible(path) if f.is_dir()]
    inner = [c for f in folders if f.name in ("HGG", "LGG") for c in _visible(f) if c.is_dir()]
    of = [[v for v in _visible(f) if volumes.is_volume(v)] for f in inner or folders]
    scans = [v for case in of for v in case if len(case) > 1]
    named = Counter(v.name for v in scans)
    known = volumes.FILES.items()
    contrasts = [c for c, names in known if any(v.match(n) for v in scans for n in names)]
    if len(contrasts) > 1 and any(v.match(p) for v in scans for p in case_folders.MASK):
        enhancing = 3 if any(v.match("*-seg.*") for v in scans) else 4
        keys = {"data.reader.channels": contrasts, "data.reader.enhancing": enhancing}
        return Guess("brats_challenge", path, keys)
    patterns: dict[str, list[Path]] = {}
    for scan in scans:
        rest = scan.name.removeprefix(scan.parent.name)
        pattern = scan.name if named[scan.name] > 1 or rest == scan.name else f"*{rest}"
        patterns.setdefault(pattern, []).append(scan)
    if not scans:
        return None
    guess = Guess("brats_folder", path)
    masks = [p for p in patterns if _INSIDE & _words(volumes.stem_of(Path(p)))]
    masks = [p for p in patterns if p == given.get("data.reader.label")] or masks
    if len(masks) != 1:
        guess.asks["data.reader.label"] = ("Which file of a case is the mask?", None, [*patterns])
        return guess
    images = {volumes.stem_of(Path(p)).strip("*_- "): p for p in patterns if p != masks[0]}
    guess.took.append(("mask", masks[0], "probably: its name"))
    guess.reads(modalities=images, label=masks[0])
    _regions(guess, patterns[masks[0]])
    if any("ct" in _words(name) for name in images):
        guess.keys["data.normalize"] = {"window": [-175, 250]}  # HU of soft tissue
    return guess
