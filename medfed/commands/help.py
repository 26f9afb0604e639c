"""Help: the commands, and each one's groups, keys and comments, read from its primary config."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from medfed.common.console import Terminal
from medfed.config.compose import CONFIG_DIR

OVERVIEW = (Path(__file__).parent / "overview.txt").read_text(encoding="utf-8")
NAMES = tuple(line.split()[0] for line in OVERVIEW.split("\n\n")[1].splitlines())
"""All commands."""
GONE = {"compare": "report"}
"""Commands of 0.1, and what does the same now."""
COMMANDS = tuple(name for name in NAMES if (CONFIG_DIR / f"{name}.yaml").is_file())
"""Those with a primary config."""


class Key(NamedTuple):
    """A key of a primary config, with the default and comment of its file."""

    name: str
    default: str
    comment: str


def print_help(name: str, doc: str) -> None:
    """Prints what a command does, its groups with their options, and its keys."""
    text = (CONFIG_DIR / f"{name}.yaml").read_text("utf-8")
    first, _, rest = doc.replace("``", "").strip().partition("\n")
    console = Terminal(soft_wrap=True)
    print(f"{first}\n")
    if rest.strip():
        print(f"{rest.strip()}\n")
    print(f"Usage: medfed {name} KEY=VALUE ...\n")
    if chosen := list(groups(text)):
        table = Table(title="Groups, chosen by GROUP=OPTION (* the default)", title_justify="left")
        table.add_column("group", no_wrap=True)
        table.add_column("options")
        for group, default in chosen:
            names = sorted(p.stem for p in (CONFIG_DIR / group.split("@")[0]).glob("*.yaml"))
            options = [f"{o}*" if o == default else o for o in names]
            table.add_row(group.rpartition("@")[2], ", ".join(options))
        console.print(table)
    table = Table(title="Keys", title_justify="left")
    for column in ("key", "default", ""):
        table.add_column(column, no_wrap=column != "")
    for key in keys(text):
        table.add_row(*key)
    console.print(table)
    print(
        f"\nmedfed {name} --cfg job [KEY=VALUE ...] prints the whole configuration with the keys "
        "of the chosen options."
    )


def print_usage(usage: str, doc: str) -> None:
    """Prints the help of a command that has no primary config."""
    print(f"{doc.replace('``', '').strip()}\n\nUsage: {usage}")


def groups(text: str) -> Iterator[tuple[str, str]]:
    r"""Yields the groups of a primary config with their defaults.

    Example:
        >>> list(groups("defaults:\n  - _self_\n  - data: brats\n  - codec@codec.up: fp32\n"))
        [('data', 'brats'), ('codec@codec.up', 'fp32')]
    """
    for match in re.finditer(r"^  - ([\w@.]+): (\w+)$", text, re.MULTILINE):
        yield match[1], "" if match[2] == "null" else match[2]


def keys(text: str) -> Iterator[Key]:
    r"""Yields the keys of a primary config; a key of a section has the section's name in front.

    Example:
        >>> list(keys("a:        # a section\n  b: 1    # one\nhydra:\n  run: x\n"))
        [Key(name='a.b', default='1', comment='one')]
    """
    stack: list[tuple[int, str]] = []
    for line in text.splitlines():
        match = re.match(r"^( *)(\w+):(?: +([^#]*?))?(?: +# (.*))?$", line)
        if match is None or match[2].startswith("_"):
            continue
        indent = len(match[1])
        stack = [s for s in stack if s[0] < indent]
        path = ".".join([*(s[1] for s in stack), match[2]])
        if path.split(".")[0] in ("hydra", "defaults", "folder", "tuned"):
            stack.append((indent, match[2]))
        elif match[3]:
            yield Key(path, match[3], match[4] or "")
        else:
            stack.append((indent, match[2]))
