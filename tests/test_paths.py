"""Any path of a file or folder is taken as it is, by every key that names one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medfed.commands.help import COMMANDS
from medfed.config.compose import CONFIG_DIR, load, parse
from medfed.config.description import resolved
from medfed.config.sections import select
from medfed.config.spelling import (
    PATH_LISTS,
    as_text,
    hydra_spelling,
    literal,
    names_in,
    paths_in,
    to_hydra_overrides,
    unquoted,
    with_paths,
)

# The keys of which a value is a path, by command; train stands for what is composed like it.
KEYS = {
    "train": [
        *("data.path", "data.root", "data.cache", "folder", "resume", "init.weights"),
        *("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir"),
    ],
    "train partition=saved": ["partition.file"],
    "train data=luna16": ["data.reader.candidates"],
    "train data=image_table": ["data.reader.file"],
    "train data=brats_folder": ["data.reader.sites.file"],
    "train algorithm=ppfl": ["algorithm.affinity.weights"],
    "benchmark": ["out", "data_root", "paths.heart", "published"],
    "report": ["runs", "out"],
    "look": ["of", "folder"],
    "study": ["plan", "folder"],
    "export": ["run", "out"],
    "audit": ["run", "out"],
    "adopt": ["bundle", "out"],
    "evaluate": ["run", "onboard"],
    "evaluate by=sex": ["patients"],
    "predict": ["bundle", "input", "output", "candidates"],
    "deploy": [
        "kit",
        "folder",
        "resume",
        "dry_run",
        "run",
        "provision",
        "approve",
        "lock",
        "study",
    ],
}
EVERY = [(words, key) for words, keys in KEYS.items() for key in keys]
NAMES = [
    *("a b", "a (1)", "[1]", "a[1].nii", "{x}", "a,b", "a=1,b=2", "#1", "a&b", "it's", 'say "a"'),
    *(
        "a;b",
        "!a",
        "~a",
        "a~",
        "$a",
        "a$",
        "Größe/März",
        "日本",
        "C:\\data",
        "a\\",
        "'",
        '"',
        "\\'",
    ),
    *("null.csv", "1", "1.50", "1e3", "true", "x:y", "a:", "-a", "@a", "+a", "%a", "*", "?", "a|b"),
    *(
        "<a>",
        "a''b",
        '""x',
        "x=[1,2]",
        "choice(a,b)",
        "range(3)",
        "a, b",
        "\\\\x",
        "`a`",
        "^a",
        ".",
    ),
]


def back(words: str, argument: str, sweeps: bool = False) -> object:
    """The value that a command gets for the key of an argument."""
    name, *others = words.split()
    (one,) = parse([next(iter(hydra_spelling([argument], sweeps)))], "The line")
    assert not one.is_sweep_override()
    key = one.get_key_element().lstrip("+")
    if key.startswith("hydra."):
        return one.value()
    return select(resolved(load([*others, argument], name)), key)


@pytest.mark.parametrize(("words", "key"), EVERY, ids=lambda value: value)
def test_every_key_of_a_path_gets_the_path(words, key):
    name = "Größe (1), 'a' [b] {c} = #&;!~$ \\\"x\\"
    found = back(words, f"{key}=/data/{name}")
    expected = f"/data/{name}"
    assert found == (
        [expected[: expected.index(",")], expected[expected.index(",") + 1 :].strip()]
        if key in PATH_LISTS
        else expected
    )


@pytest.mark.parametrize("name", NAMES)
def test_odd_names(name):
    assert back("train", f"data.path={name}") == os.path.expanduser(name)
    assert back("predict", f"input=in/{name}") == f"in/{name}"
    if "," not in name:
        assert back("report", f"runs=a/{name}") == f"a/{name}"


printable = st.text(
    st.characters(blacklist_categories=("C",), blacklist_characters="\u2028\u2029"), min_size=1
)


def is_plain(path: str) -> bool:
    """Neither an interpolation, nor a word for nothing, nor in quotes as a whole."""
    quoted = len(path) > 1 and path[0] == path[-1] and path[0] in "'\""
    return "${" not in path and path not in ("null", "???") and not quoted


@given(printable.filter(is_plain))
def test_any_path_comes_back_from_hydra(path):
    for key in ("data.path", "out", "hydra.run.dir"):
        (argument,) = hydra_spelling([f"{key}={path}"])
        (override,) = parse([argument], "The line")
        assert override.value() == os.path.expanduser(path)
        assert hydra_spelling([argument]) == [argument]  # another rank translates it again
    if "," not in path:
        for key in ("runs", "bundle", "of"):
            for argument in hydra_spelling([f"{key}=a/{path}"]):
                assert parse([argument], "The line")[0].value() == f"a/{path}"


@given(printable)
def test_quotes_are_undone(text):
    assert unquoted(literal(text)) == text


def test_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/my name")
    assert with_paths("data.path=~/a.csv") == "data.path='/home/my name/a.csv'"
    assert with_paths("runs=[~/a,~/b]") == "runs=['/home/my name/a','/home/my name/b']"


def test_a_comma_divides_where_no_such_file_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert paths_in("a,b=1,c") == ["a", "b=1", "c"]
    Path("a,b=1").mkdir()
    assert paths_in("a,b=1,c") == ["a,b=1", "c"]
    assert with_paths("bundle=a,b=1") == "bundle='a,b=1'"
    Path("[x]").mkdir()
    assert with_paths("runs=[x]") == "runs='[x]'"
    assert with_paths("data.path=a,b=1,c.csv", sweeps=True) == "data.path='a,b=1',c.csv"
    assert with_paths("hydra.sweep.dir=a,c", sweeps=True) == "hydra.sweep.dir='a,c'"
    assert with_paths("data.path=choice(a,b)", sweeps=True) == ""


def test_plugins_in_any_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [])
    folder = tmp_path / "it's [mine], (1) = ü"
    (folder / "configs" / "algorithm").mkdir(parents=True)
    shipped = (CONFIG_DIR / "algorithm" / "fedavg.yaml").read_text()
    (folder / "configs" / "algorithm" / "mine.yaml").write_text(shipped)
    config = load([f"plugins={folder}", "algorithm=mine"])
    assert config.plugins == [str(folder)]
    assert config.algorithm._target_.endswith("FedAvg")
    again = to_hydra_overrides([f"plugins={folder}"])
    assert to_hydra_overrides(again) == again


def test_no_key_of_a_path_is_forgotten():
    """Each key whose comment speaks of a file or folder is one of these, or no path."""
    from medfed.commands.help import keys

    named = {key for keys_of in KEYS.values() for key in keys_of} | {"plugins"}
    others = {"name", "init.client", "init.adopt", "init.rename", "source", "report_only", "show"}
    others |= {"format", "pictures.format", "data", "renew", "cut", "k", "picture", "overwrite"}
    for command in COMMANDS:
        for key in keys((CONFIG_DIR / f"{command}.yaml").read_text()):
            speaks = any(f" {word}" in f" {key.comment}" for word in ("folder", "file", "path"))
            assert not speaks or key.name in named | others, (command, key)


ANY_NAMES = [
    *("Basel, West", "St. Mary's (A)", "01", "1", "1.50", "null", "true", "Zürich; Nord", "a=b"),
    *('The "Old" Hospital', "C:\\x", "{x}", "a: b", "#1", "50 %", "-3", "Ben & Co", "x" * 60),
]


@pytest.mark.parametrize("name", ANY_NAMES)
def test_a_client_of_any_name_is_chosen_by_its_name(name):
    known = [*ANY_NAMES, "Basel", "West"]
    (alone,) = parse(hydra_spelling([f"client={name}"]), "The line")
    if name != "null":  # alone it says that there is no choice
        assert names_in(alone.value(), known) == [name]
        (one,) = parse(hydra_spelling([f"init.client={name}"]), "The line")
        assert one.value() == name
    (both,) = parse(hydra_spelling([f"client=West, {name}"]), "The line")
    assert names_in(both.value(), known) == ["West", name]
    for key in ("client", "keep_out", "cohort.clients", "sites"):
        text = as_text([name, "Basel"])  # in quotes where it needs them, as a person would write it
        (line,) = hydra_spelling([f"{key}={text}"])
        assert parse([line], "The line")[0].value() == [name, "Basel"]
        assert hydra_spelling([line]) == [line]


def test_quotes_keep_what_a_comma_would_divide():
    assert names_in("'Basel, West',Bonn", []) == ["Basel, West", "Bonn"]
    assert names_in("Basel, West", ["Basel", "West"]) == ["Basel", "West"]
    assert names_in("Basel, West", ["Basel", "West", "Basel, West"]) == ["Basel, West"]
    assert hydra_spelling(["keep_out=[a],[b]"], True) == ["keep_out=[a],[b]"]  # a sweep
