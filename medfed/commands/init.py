"""Looks at your data and writes an experiment that trains on them: ``medfed init FOLDER``.

FOLDER is a folder or a file: a table, a list of volumes, scans or DICOM series in a folder per
case, pictures with masks or classes. The command says what it took for what, and how sure it is. It
asks for what it cannot know, or takes its best guess with ``yes=true``. Any key of ``medfed train``
answers a question at once, such as ``data.label=outcome``. It changes nothing in FOLDER.
"""

from __future__ import annotations

import importlib
import logging
import re
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from medfed.commands.help import print_usage
from medfed.commands.sentences import without_hydra
from medfed.common.console import logged_by, say, wide_console
from medfed.config import allowed, compose, description, sections, spelling
from medfed.config.spelling import as_text
from medfed.datamodules.readers.looks import FIRST, NO, Guess, Question
from medfed.datamodules.segmentation import SegmentationDataModule
from medfed.datamodules.splits import check_measurable
from medfed.datamodules.tables.columns import leaks
from medfed.datamodules.tables.datamodule import TabularDataModule
from medfed.run.prepare import LIKE
from medfed.standalone.errors import ConfigError, DataError, MedfedError, few
from medfed.standalone.files import refuse_special, write_text, writing

USAGE = "medfed init FOLDER [yes=true] [name=NAME] [into=FOLDER] [KEY=VALUE ...]"
READERS = ["heart", "luna16", "datalist", "medmnist", "image_masks", "image_folder"]
READERS += ["case_folders", "table"]
_FILE = "configs/experiment/{}.yaml"
_PLACE = ("data", "data.path")
# Photographs of the retina, whose experiment pictures take, are of few cameras and halved.
_PICTURES = {"partition": "auto", "data.reader.scale": 1.0}
_EXPERIMENTS = {"image_masks": "retina_pfednet", "luna16_scans": "luna16_detection"}
# The experiment of data without one of their own, by their kind.
_BASES = {"TabularDataModule": "clinical", "ImageDataModule": "medmnist"}
_KEY = re.compile(r"(?<![\w/])(data\.(?:reader\.)?\w+)(?:=(\[[^\]]*\]|[\w.-]*\w))?")


def _plugins(keys: Mapping[str, Any], *more: str) -> list[str]:
    folders = [*sections.listed(keys.get("plugins")), *more]
    return [f"plugins={folders[0] if len(folders) == 1 else as_text(folders)}"] if folders else []


def guessed(path: Path, answers: Mapping[str, Any]) -> Guess:
    """Says what a folder or file seems to hold, by the guesses of all readers."""
    path = path / str(answers.get("data.path", ""))
    modules = [("", f"medfed.datamodules.readers.{name}") for name in READERS]
    for folder in sections.listed(answers.get("plugins")):
        for file in sorted(allowed.yamls_of(Path(folder)).glob("data/*.yaml")):
            made = compose.load([f"plugins={folder}", f"data={file.stem}"]).data.get("reader")
            modules.append((file.stem, str(made["_target_"]).rpartition(".")[0]))
    guesses: list[Guess] = []
    for name, module_name in modules:
        looks_like = getattr(importlib.import_module(module_name), "looks_like", lambda *_: None)
        if (guess := looks_like(path, answers)) is not None:
            guess.data = guess.data or name
            guesses.append(guess)
    sure = [g for g in guesses if g.sure] or [g for g in guesses if not g.refused] or guesses
    if not sure:
        raise DataError(
            f"{path} has no table and no layout that docs/data.md names; name another folder or a "
            "file in it, and save sheets of Excel as CSV."
        )
    chosen: Guess = next((g for g in guesses if g.data == answers.get("data")), sure[0])
    if len(sure) > 1:
        names = [g.data for g in sure]
        chosen.asks["data"] = Question("What is it?", sure[0].data, names)
    return chosen


@dataclass
class Interview:
    """What is found, asked and answered; each line is printed once."""

    typed: Mapping[str, Any]  # keys on the command line, which nobody is asked about
    yes: bool  # whether the best guess answers
    # The answers so far, by key; without a terminal also the best guesses, so that questions that
    # follow from them are found, too.
    answers: dict[str, Any] = field(default_factory=dict)
    # The questions without an answer, by key.
    open: dict[str, Question] = field(default_factory=dict)
    lines: dict[str, None] = field(default_factory=dict)  # what was printed
    _texts: set[str] = field(default_factory=set)

    @property
    def keys(self) -> dict[str, Any]:
        """All settled keys."""
        return {**self.answers, **self.typed}

    def say(self, *lines: str) -> None:
        """Prints the lines that are new."""
        for line in lines:
            if line not in self.lines:
                say(wide_console(), line)
            self.lines[line] = None

    def tell(self, took: Sequence[tuple[str, object, str]]) -> None:
        """Prints what was taken for what."""
        self.say(*(f"{what:<15} {value}  ({why})" for what, value, why in took))

    def settle(self, asks: Mapping[str, Question]) -> bool:
        """Settles questions by the user, or by the best guesses; says whether any is new."""
        new = {k: q for k, q in asks.items() if k not in self.typed and q.text not in self._texts}
        for key, question in new.items():
            self._texts.add(question.text)
            value, why = question.best, "a guess, as yes=true allows"
            if not self.yes and (answer := _answer(key, question)) is not None:
                value, why = answer, "answered"
            elif not self.yes or value is None:
                before = f"{self.open[key].text} " if key in self.open else ""
                self.open[key] = question._replace(text=before + question.text)
            if value in (None, "null"):
                value = self.answers.get(key)  # as before the question
            self.answers[key] = value
            if key not in self.open:
                self.tell([(key, value, why)])
        return bool(new)

    def close(self, error: MedfedError | None = None) -> None:
        """Raises the error, or that questions are open, after printing what there is to answer."""
        for key, question in self.open.items():
            otherwise = f", or take {as_text(question.best)} by yes=true"
            otherwise *= question.best is not None
            self.say(f"{_with_choices(question)} Answer by {key}=VALUE{otherwise}.")
        answered = {k: v for k, v in self.answers.items() if k not in self.open}
        if answered and not self.yes and (error or self.open):
            command = shlex.join(f"{key}={as_text(value)}" for key, value in answered.items())
            self.say(f"You have answered: {command}")
        if self.open:
            count = f"{len(self.open)} question{'s are' if len(self.open) > 1 else ' is'} open"
            keys = " ".join(f"{key}=VALUE" for key in self.open)
            raise ConfigError(f"{count}; nothing is written. Answer by {keys}.")
        if error:
            raise error


def _with_choices(question: Question) -> str:
    return question.text + f" ({few(question.choices, 12)})" * bool(question.choices)


def _answer(key: str, question: Question) -> Any:
    """What the user answers, in the spelling of a command line; None without a terminal."""
    best, several = question.best, isinstance(question.best, list)
    try:
        best_text = "" if best is None else as_text(best)
        typed = (
            input(f"{_with_choices(question)} [{best_text}] ").strip()
            if sys.stdin.isatty()
            else None
        )
    except EOFError:
        typed = None
    if not typed:
        return best if typed == "" else None
    if typed in question.choices:
        return [typed] if several else typed
    value: Any = typed
    with suppress(ConfigError):
        (read,) = compose.parse(spelling.hydra_spelling([f"{key}={typed}"]), "The answer")
        divides = read.is_sweep_override()
        value = spelling.names_in(typed, question.choices) if divides else read.value()
    if several and isinstance(value, str):
        value = spelling.names_in(value.strip("[]"), question.choices)
    numbers = several and isinstance(best[0], float)
    texts = isinstance(value, list) and not numbers
    return [str(v).strip() for v in value] if texts else value or "null"


def experiment(guess: Guess, keys: Mapping[str, Any], name: str, notes: Sequence[str] = ()) -> str:
    """Returns the yaml of an experiment upon the shipped one that fits the data."""
    base = _EXPERIMENTS.get(guess.data, f"{LIKE.get(guess.data, guess.data)}_pfednet")
    if guess.data == "image_masks":
        keys = {**_PICTURES, **keys}
        base = "brats_pfednet" if keys.get("data.reader.regions") else base
    if not (compose.CONFIG_DIR / f"experiment/{base}.yaml").is_file():
        made = compose.load([*_plugins(keys), f"data={guess.data}", "data.path=x"]).data._target_
        base = f"{_BASES.get(made.rpartition('.')[2], 'organs')}_pfednet"
    line = [f"experiment={base}", f"data={guess.data}", "data.path=x"]
    chosen_keys = [f"{key}=x" for key in keys if key != "plugins"]
    usual = compose.with_other_data([*line, *chosen_keys])[1:]
    whole: dict[str, Any] = dict(o.split("=", 1) for o in usual)
    whole = {k: None if v == "null" else v for k, v in whole.items()}
    whole |= {**keys, "data": guess.data, "data.path": str(guess.path)}
    groups = [key for key in whole if (compose.CONFIG_DIR / key).is_dir()]
    chosen = [{f"override /{group}": whole.pop(group)} for group in groups]
    content: dict[str, Any] = {"defaults": [base, *chosen, "_self_"], "name": name}
    for key, value in whole.items():
        sections.put(content, key, value)
    head = "".join(f"#   {line}\n" for line in notes)
    return f"# @package _global_\n# medfed init took:\n{head}{description.as_yaml(content)}"


def module(guess: Guess, keys: Mapping[str, Any], name: str) -> tuple[Any, Any]:
    """Builds the description and the data module of training."""
    with tempfile.TemporaryDirectory() as folder:
        write_text(Path(folder, _FILE.format(name)), experiment(guess, keys, name))
        config = compose.described([*_plugins(keys, folder), f"experiment={name}"])
        return config, compose.build(config.data)


def examined(guess: Guess, talk: Interview, name: str) -> dict[str, Any]:
    """Reads patients and first cases as training will; asks, and says what it finds."""
    answers = {k: v for k, v in talk.answers.items() if v is not None}
    keys = {**guess.keys, **answers, **talk.typed}
    keys = {k: v for k, v in keys.items() if k not in _PLACE}
    facts: list[tuple[str, object, str]] = []
    config, data = module(guess, keys, name)
    if isinstance(data, SegmentationDataModule):
        every = [case for p in data.scans.patients() for case in data.scans.cases_of(p)]
        if lacking := Counter(channel for case in every for channel in case.lacks):
            counts = ", ".join(f"{channel} {n}" for channel, n in lacking.items())
            text = f"Of {len(every)} cases some lack a contrast ({counts}): take them?"
            question = Question(text, "zero", ("zero", "error"))
            if talk.settle({"data.reader.missing": question}):
                return examined(guess, talk, name)
        shapes = [data.scans.shape(case) for case in every[:FIRST]]
        side = max(8, min(min(shape[:2]) for shape in shapes) // 16 * 16)
        keys.setdefault("data.patch_size", [min(side, n) for n in data.patch_size or ()])
        few_slices = min(shape[2] for shape in shapes) < 8 * data.eval_every
        if few_slices and data.eval_every > 1 and "data.eval_every" not in keys:
            keys["data.eval_every"] = 1
            facts.append(("data.eval_every", 1, "few slices, so validation measures all"))
        config, data = module(guess, keys, name)
        spacing = np.round(data.scans.spacing(every[0]), 2)
        if not np.isnan(spacing).any():  # pictures do not state it
            facts.append(("voxels, mm", (shapes[0], spacing.tolist()), "sure: the first case"))
        for case in every[:2]:
            data.scans.prepared(case, data.preparation)
    if config.rounds < config.evaluation.every and "evaluation.every" not in keys:
        keys["evaluation.every"] = 1
        facts.append(("evaluation.every", 1, f"there are {config.rounds} rounds"))
    if isinstance(data, TabularDataModule):
        of = data.table
        alone, _ = leaks(of.names, of.categories, of.features, of.labels)
        if alone:
            text = f"Columns that alone predict the label: {few([*alone.values()], 8)}."
            drop = [*(keys.get("data.drop") or []), *alone]
            question = Question(f"{text} Leave them out?", drop, (NO,))
            if talk.settle({"data.drop": question}):
                return examined(guess, talk, name)
    data.plan()
    check_measurable({client: plan.patients for client, plan in data.plans.items()})
    if isinstance(data, SegmentationDataModule) and (uneven := data.uneven()) is not None:
        question = Question("Resample images to one size?", uneven[1], (NO,))
        talk.say(uneven[0])
        if talk.settle({"data.spacing": question}):
            return examined(guess, talk, name)
    patients = list(data.patients.values())
    centres = Counter(p.centre for p in patients if p.centre is not None and not p.invented)
    splits = Counter(p.split for p in patients if p.split is not None)
    of_classes = {word: getattr(data, word, None) for word in ("negative", "positive")}
    labels = [f"{word}: {few([*map(str, of)])}" for word, of in of_classes.items() if of]
    names = {
        "channels": data.plan_names,
        "labels": labels or data.class_names,
        "patients": [str(len(patients))],
        "hospitals": [f"{c} {n}" for c, n in centres.items()] or ["none named"],
        "official splits": [f"{s} {n}" for s, n in splits.items()] or ["none"],
    }
    talk.tell(facts + [(w, few(of, 12), "as training reads it") for w, of in names.items()])
    talk.say(*(account.sentence() for account in data.accounts), *map(str, data.remarks))
    return keys


def _questions_of(error: MedfedError) -> dict[str, Question]:
    """The question that an error is, if its sentence names a key of the data."""
    for key, value in _KEY.findall(str(error)):
        if key not in (*_PLACE, "data.reader", "data.header"):
            such = () if not value or value.isupper() else (value,)  # COLUMN stands for a name
            return {key: Question(str(error), None, such)}
    return {}


def interviewed(
    path: Path, typed: Mapping[str, Any], name: str, yes: bool
) -> tuple[Guess, Interview, dict[str, Any]]:
    """Looks, asks and looks again, until no question is open."""
    talk, warnings = Interview(typed, yes), logging.Handler(logging.WARNING)
    # The log's warnings are printed among the findings.
    warnings.emit = lambda record: talk.say(record.getMessage())  # type: ignore[method-assign]
    with logged_by(warnings, "medfed"):
        while True:
            try:
                guess = guessed(path, talk.keys)
                layout = "sure: the layout" if guess.sure else "probably"
                talk.tell([("data", f"{guess.data} at {guess.path}", layout), *guess.took])
                if guess.refused is not None:
                    raise guess.refused
                if talk.settle(guess.asks):
                    continue
                if any(question.best is None for question in talk.open.values()):
                    talk.close()
                keys = examined(guess, talk, name)
                talk.close()
                return guess, talk, keys
            except MedfedError as error:
                if talk.open or not talk.settle(_questions_of(error)):
                    talk.close(error)
                    raise


@without_hydra(partial(print_usage, USAGE), needs_words=True)
def main(words: Sequence[str]) -> None:
    """Runs the command."""
    init(words)


def init(arguments: Sequence[str]) -> Path:
    """Looks, asks, tries the guess on the first cases, and writes the experiment."""
    places = [a for a in arguments if "=" not in a]
    if len(places) != 1:
        raise ConfigError(f"medfed init takes one folder or file, not {len(places)}: {USAGE}.")
    refuse_special(path := Path(places[0]).expanduser())
    path = path.resolve()
    typed = spelling.hydra_spelling([a for a in arguments if "=" in a])
    keys: dict[str, Any] = {o.key_or_group: o.value() for o in compose.parse(typed, "The command")}
    yes, into = keys.pop("yes", False) is True, str(keys.pop("into", "medfed_experiments"))
    chosen = keys.pop("name", None)
    name = re.sub(r"\W+", "_", str(chosen or path.stem)).strip("_").lower() or "mine"
    if (compose.CONFIG_DIR / f"experiment/{name}.yaml").exists():  # which would hide it
        if chosen:
            raise ConfigError(f"name={name} is an experiment of medfed's; choose another name.")
        name += "_data"
    if (file := Path(into, _FILE.format(name))).exists():
        raise ConfigError(f"{file} exists; choose another name by name=NAME.")
    if not path.exists():
        raise DataError(f"{path} does not exist; name a folder or a file.")
    guess, talk, keys = interviewed(path, keys, name, yes)
    with writing(file.parent, "name another folder by into=FOLDER"):
        write_text(file, experiment(guess, keys, name, list(talk.lines)))
    words = shlex.join([*_plugins(keys, into), f"experiment={name}"])
    then = f"Look:    medfed prepare {words} show=true", f"Train:   medfed train {words}"
    say(wide_console(), f"Written: {file}", *then)
    return file
