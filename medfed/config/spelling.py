"""Translates the command line from the user's spelling to Hydra's.

Any path is taken as the shell gives it; one that is in quotes as a whole is in Hydra's spelling.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from medfed.config.allowed import add_plugin_folders, yamls_of
from medfed.standalone.errors import ConfigError, did_you_mean
from medfed.standalone.files import refuse_special

PLUGINS = "plugins="
WORKERS = "sweep.workers"  # no key of a run: how many runs of a sweep go at once
MOST_WORKERS = 64
# Sections whose options are in a group with another name.
GROUPS = {"codec.up": "codec", "codec.down": "codec"}
# The keys of Hydra that are allowed: folders and sweeps. Others load code (launchers, sweepers,
# callbacks, logging), read yamls from anywhere (searchpath), or set environment variables.
HYDRA = re.compile(
    r"hydra\.(run\.dir|sweep\.(dir|subdir)|job\.(name|config\.override_dirname\.[\w.]+)|verbose"
    r"|output_subdir|mode)"  # Lightning sets output_subdir for its ranks
)
SEARCHPATH = "hydra.searchpath="
# Keys that take several values, in commands that do not sweep.
LISTS = ("k", "weights", "suite", "methods", "variants", "bands", "subsets")
# Keys of clients, which have any name: "Basel, West", "St. Mary's (A)", "01". Whoever knows the
# names divides a text by :func:`names_in`.
NAMES = ("client", "init.client", "keep_out", "cohort.clients", "sites")
# Keys whose value is the path of a file or folder; those of PATH_LISTS take several.
PATHS = re.compile(
    r"run|resume|folder|plan|study|out|input|output|candidates|onboard|patients|data_root|paths\.\w+"
    r"|kit|published|dry_run|provision|approve|lock|init\.weights|partition\.file"
    r"|hydra\.(run|sweep)\.dir|hydra\.sweep\.subdir|data\.(path|root|cache)"
    r"|data\.reader\.(file|sites\.file|candidates|annotations)|algorithm\.affinity\.weights"
)
# Of these, what must be there before a run; other paths have sentences of their own.
EXISTING = ("data.path", "partition.file")
PATH_LISTS = ("runs", "bundle", "of", "plugins")
_PART = re.compile(r"""\s*(?:"[^"]*"|'(?:[^'\\]|\\.)*')\s*(?=,|\Z)|[^,]*""", re.DOTALL)
_QUOTED = re.compile(r"""("[^"]*"|'(?:[^'\\]|\\.)*')""", re.DOTALL)
_PLAIN = re.compile(r"(\.{0,2}/|[A-Za-z_])[A-Za-z0-9_/.-]*")  # the same without quotes
_WORDS = ("null", "true", "false", "inf", "nan")
_SWEPT = re.compile(r"(choice|glob|range|interval|shuffle|sort|tag)\(.*\)", re.DOTALL)


def key_of(override: str) -> str:
    """Returns the key of an override, without its signs.

    Example:
        >>> key_of("++optimizer.lr=0.1")
        'optimizer.lr'
    """
    return override.partition("=")[0].strip().lstrip("+~")


def to_hydra_overrides(arguments: Sequence[str], sweeps: bool = False) -> list[str]:
    """Returns a command line in Hydra's spelling, and makes its plugins importable."""
    whole = [part for argument in arguments for part in _option_and_keys(argument)]
    made = with_plugins([a for a in hydra_spelling(whole, sweeps) if not a.startswith(SEARCHPATH)])
    for argument in arguments:
        if argument in made and argument.startswith(SEARCHPATH):
            continue  # the first rank passes its translated command line to the others
        key = re.sub(r"\s", "", argument.partition("=")[0]).lstrip("+~")
        # Also as a group, and as the place of another group: group@hydra.launcher.
        if re.search(r"(^|[./@:])hydra($|[./@:])", key) and not HYDRA.fullmatch(key):
            raise ConfigError(
                f"{key} is for Hydra's own use; set hydra.run.dir, hydra.sweep.dir or "
                "hydra.sweep.subdir, run several at once by sweep.workers=N, and add code and "
                "yamls by plugins=FOLDER."
            )
    return made


def _option_and_keys(argument: str) -> list[str]:
    """Translates a written-out optimizer or scheduler to the option ``own`` and its keys."""
    written = re.fullmatch(r"(optimizer|scheduler)=\{(.*)\}", argument, re.DOTALL)
    if written is None:
        return [argument]
    group, inside = written.groups()
    # Split at commas outside of brackets.
    parts = re.findall(r"((?:[^,\[{(]|\[[^\]]*\]|\{[^}]*\}|\([^)]*\))+),?", inside)
    pairs = [part.partition(":")[::2] for part in parts]
    return [f"{group}=own", *(f"++{group}.{key.strip()}={value.strip()}" for key, value in pairs)]


def hydra_spelling(arguments: Sequence[str], sweeps: bool = False) -> list[str]:
    """Translates a command line to Hydra's spelling.

    Paths are quoted, and ``~`` in front of one is the home folder. ``codec.up=stc`` becomes
    ``codec@codec.up=stc`` if it names an option, values with umlauts are quoted, and ``k=1,5`` is a
    list rather than a sweep.

    Example:
        >>> hydra_spelling(["codec.up=stc,fp32", "codec.up.sparsity=0.1", "codec@codec.down=stc"])
        ['codec@codec.up=stc,fp32', 'codec.up.sparsity=0.1', 'codec@codec.down=stc']
        >>> hydra_spelling(["run=a/0_seed=1", "runs=[a=1,b]", "split=val", "k=1,5"])
        ["run='a/0_seed=1'", "runs=['a=1',b]", 'split=val', 'k=[1,5]']
        >>> hydra_spelling(["client=Köln, Süd", "keep_out=[Bonn,01]", "data.ages=[Größe, Alter]"])
        ["client='Köln, Süd'", "keep_out=[Bonn,'01']", 'data.ages=["Größe", Alter]']
        >>> hydra_spelling(["data.path=a,b.csv"]), hydra_spelling(["data.path=a,b.csv"], True)
        (["data.path='a,b.csv'"], ['data.path=a,b.csv'])
    """
    return [
        with_paths(each, sweeps) or _with_names(each, sweeps) or _with_signs(_quoted(each))
        for each in arguments
    ]


def _quoted(argument: str) -> str:
    """Puts quotes around values with letters that Hydra's grammar lacks, such as umlauts."""
    key, assigns, value = argument.partition("=")
    if value.isascii() or {"'", '"'} & set(value):
        return argument
    texts = re.sub(
        r"[^\[\]{},:]+", lambda m: m[0] if m[0].isascii() else f'"{m[0].strip()}"', value
    )
    return f"{key}{assigns}{texts}"


def _with_names(argument: str, sweeps: bool) -> str:
    """The same with names of clients in quotes; empty if its key takes none, or is swept over."""
    key, _, value = argument.partition("=")
    if key.lstrip("+") not in NAMES or value in ("", "null", "???", "[]"):
        return ""
    if listed := re.fullmatch(r"\[([^][]*)\]", value):
        return f"{key}=[{','.join(map(_plain_or_quoted, names_in(listed[1], ())))}]"
    if sweeps or value.startswith("["):
        return ""
    return f"{key}={_plain_or_quoted(unquoted(value) if _QUOTED.fullmatch(value) else value)}"


def names_in(text: str, known: Collection[str]) -> list[str]:
    """Returns the names between the commas of a text; a comma in quotes or of a known name stays.

    Example:
        >>> names_in("Basel, West, Bonn", ["Basel, West"]), names_in("'Basel, West',Bonn", [])
        (['Basel, West', 'Bonn'], ['Basel, West', 'Bonn'])
    """
    return [unquoted(n.strip()) for n in _divided(text, lambda name: name.strip() in known)]


def _with_signs(argument: str) -> str:
    key, assigns, value = argument.partition("=")
    if not assigns:
        return argument
    if key == "init.rename" and value.startswith("{"):
        return f"++{argument}"  # its names are new keys to Hydra
    if key in GROUPS and re.fullmatch(r"[\w,()*-]+", value) and value != "null":
        return f"{GROUPS[key]}@{argument}"
    if key in LISTS and "," in value and "[" not in value:
        return f"{key}=[{value}]"
    return argument


def with_plugins(overrides: Sequence[str]) -> list[str]:
    """Makes the folders of ``plugins=`` importable and their yamls known to Hydra.

    Example:
        >>> with_plugins(["seed=1", "plugins=null"])
        ['seed=1', 'plugins=null']
        >>> with_plugins(["plugins=/no/such/folder"])
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.ConfigError: plugins names /no/such/folder, which is no folder; \
name one that holds Python modules and configs.
    """
    translated = [o for o in overrides if not o.startswith(PLUGINS)]
    for override in (o for o in overrides if o.startswith(PLUGINS)):
        if folders := plugin_folders(override):
            override = PLUGINS + _in_brackets(map(str, folders))
            places = _in_brackets(f"file://{yamls_of(f)}" for f in folders)
            translated.append(SEARCHPATH + places)
        translated.append(override)
    return translated


def plugin_folders(override: str) -> list[Path]:
    """Returns the folders of ``plugins=FOLDER``, and makes them importable."""
    names = [unquoted(name) for name in paths_in(override.removeprefix(PLUGINS))]
    folders = [Path(name).expanduser() for name in names if name != "null"]
    for folder in folders:
        refuse_special(folder, f"{PLUGINS}{folder}")
    resolved = [folder.resolve() for folder in folders]
    add_plugin_folders(resolved)
    return resolved


def _in_brackets(values: Iterable[str]) -> str:
    return "[" + ",".join(map(literal, values)) + "]"


def is_path_key(key: str) -> bool:
    """Returns whether the values of a key are paths."""
    return key in PATH_LISTS or PATHS.fullmatch(key) is not None


def with_paths(argument: str, sweeps: bool = False) -> str:
    """Returns an argument with its paths quoted for Hydra; empty if its key takes no paths.

    Example:
        >>> with_paths("out=a (1)"), with_paths("runs=[a,b]"), with_paths("seed=1")
        ("out='a (1)'", 'runs=[a,b]', '')
    """
    key, _, value = argument.partition("=")
    name = key.lstrip("+")
    if value in ("", "null", "???") or not is_path_key(name):
        return ""
    if name in PATH_LISTS:
        names = paths_in(value)
        listed = ",".join(map(_path, names))
        return f"{key}={listed}" if names == [value] else f"{key}=[{listed}]"
    if name == "algorithm.affinity.weights" and value.startswith("[["):
        return ""  # rows of numbers
    if sweeps and not name.startswith("hydra."):
        if _SWEPT.fullmatch(value):
            return ""
        return f"{key}={','.join(map(_path, _divided(value, _exists)))}"
    return f"{key}={_path(value)}"


def paths_in(value: str) -> list[str]:
    """Returns the paths that a value names: one, or several between commas and in brackets."""
    if value.startswith("[") and value.endswith("]") and not _exists(value):
        value = value[1:-1].strip()
    return _divided(value, _exists) if value else []


def _divided(value: str, is_name: Callable[[str], bool]) -> list[str]:
    """Divides at commas outside of quotes; a comma within the name of what exists stays there."""
    parts, at = list[str](), 0
    while at <= len(value):
        part = _PART.match(value, at)
        assert part is not None  # it also matches nothing
        parts, at = [*parts, part[0]], part.end() + 1
    if len(parts) == 1 or not all(part.strip() for part in parts):
        return [value]
    names: list[str] = []
    while parts:
        several = (n for n in range(len(parts), 1, -1) if is_name(",".join(parts[:n])))
        count = next(several, 1)
        names.append(parts[0].strip() if count == 1 else ",".join(parts[:count]))
        parts = parts[count:]
    return names


def _exists(path: str) -> bool:
    return os.path.exists(os.path.expanduser(path))  # also of a name that is too long


def _path(text: str) -> str:
    return _plain_or_quoted(os.path.expanduser(unquoted(text)))


def _plain_or_quoted(text: str) -> str:
    is_plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    return text if is_plain else literal(text)


def unquoted(text: str) -> str:
    r"""Returns a text without quotes around all of it, as Hydra reads it."""
    quote = text[:1]
    if len(text) < 2 or quote not in ("'", '"') or not text.endswith(quote):
        return text
    escaped = rf"(\\+)({quote}|\Z)"
    return re.sub(escaped, lambda m: m[1][: len(m[1]) // 2] + m[2], text[1:-1])


def literal(text: str) -> str:
    r"""Returns a text in quotes, as Hydra reads it; an interpolation in it stays one.

    Example:
        >>> print(literal("it's"), literal("a\\"))
        'it\'s' 'a\\'
    """
    return "'" + re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + m[2].replace("'", r"\'"), text) + "'"


def as_text(value: Any) -> str:
    """Writes a Python value as an override has it.

    Example:
        >>> as_text(None), as_text([1, "a"]), as_text(0.5), as_text(True), as_text("a, b")
        ('null', '[1,a]', '0.5', 'true', '"a, b"')
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(as_text, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{as_text(v)}" for k, v in value.items()) + "}"
    text = str(value)
    return text if re.fullmatch(r"[\w./:@${}*+-]+", text) else '"' + text.replace('"', '\\"') + '"'


def workers_of(arguments: Sequence[str]) -> tuple[int, list[str]]:
    """Takes how many runs go at once from a command line; 0: one by one, in this process.

    Example:
        >>> workers_of(["-m", "seed=0,1", "sweep.workers=2"])
        (2, ['-m', 'seed=0,1'])
        >>> workers_of(["sweep.worker=2"])
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.ConfigError: Unknown key 'sweep.worker' (did you mean \
sweep.workers?); sweep has workers.
    """
    workers, others = 0, []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key.startswith("sweep."):
            workers = _workers(key, value)
        else:
            others.append(argument)
    return workers, others


def _workers(key: str, value: str) -> int:
    if key != WORKERS:
        raise ConfigError(f"Unknown key {key!r}{did_you_mean(key, [WORKERS])}; sweep has workers.")
    if not (value.isdecimal() and 1 <= int(value) <= MOST_WORKERS):
        raise ConfigError(f"{key} must be a whole number from 1 to {MOST_WORKERS}, not {value}.")
    return int(value)
