"""Translates the command line from the user's spelling to Hydra's."""

from __future__ import annotations

import re
from collections.abc import Sequence

from medfed.config.allowed import with_plugins
from medfed.config.paths import with_paths
from medfed.standalone.errors import ConfigError

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
LISTS = ("k", "client", "weights", "suite", "methods", "variants")


def key_of(override: str) -> str:
    """Returns the key of an override, without its signs.

    Example:
        >>> key_of("++optimizer.lr=0.1")
        'optimizer.lr'
    """
    return override.partition("=")[0].strip().lstrip("+~")


def to_hydra_overrides(arguments: Sequence[str], sweeps: bool = False) -> list[str]:
    """Returns a command line in Hydra's spelling, and makes its plugins importable.

    Example:
        >>> to_hydra_overrides(["hydra.run.dir=runs/a (1)", "seed=1"])
        ["hydra.run.dir='runs/a (1)'", 'seed=1']
        >>> to_hydra_overrides(["+hydra.callbacks.mine._target_=os.system"])
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.ConfigError: hydra.callbacks.mine._target_ is for Hydra's own use; set hydra.run.dir, hydra.sweep.dir or hydra.sweep.subdir, and add code and yamls by plugins=FOLDER.
    """  # noqa: E501
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
                "hydra.sweep.subdir, and add code and yamls by plugins=FOLDER."
            )
    return made


def _option_and_keys(argument: str) -> list[str]:
    """Translates a written-out optimizer or scheduler to the option ``own`` and its keys.

    Example:
        >>> _option_and_keys("optimizer={_target_: torch.optim.Adam, betas: [0.8,0.9]}")
        ['optimizer=own', '++optimizer._target_=torch.optim.Adam', '++optimizer.betas=[0.8,0.9]']
    """
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
        >>> hydra_spelling(["run=a/0_seed=1", "runs=[a=1,b]", "split=val", "k=1,5", "client=a,b"])
        ["run='a/0_seed=1'", "runs=['a=1',b]", 'split=val', 'k=[1,5]', 'client=[a,b]']
        >>> hydra_spelling(["client=Köln,Bonn", "data.features=[Größe, Alter]"])
        ['client=["Köln",Bonn]', 'data.features=["Größe", Alter]']
        >>> hydra_spelling(["data.path=a,b.csv"]), hydra_spelling(["data.path=a,b.csv"], True)
        (["data.path='a,b.csv'"], ['data.path=a,b.csv'])
    """
    return [with_paths(argument, sweeps) or _spelled(_quoted(argument)) for argument in arguments]


def _quoted(argument: str) -> str:
    """Puts quotes around values with letters that Hydra's grammar lacks, such as umlauts."""
    key, assigns, value = argument.partition("=")
    if value.isascii() or {"'", '"'} & set(value):
        return argument
    texts = re.sub(
        r"[^\[\]{},:]+", lambda m: m[0] if m[0].isascii() else f'"{m[0].strip()}"', value
    )
    return f"{key}{assigns}{texts}"


def _spelled(argument: str) -> str:
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
