"""Prints what each method does; ``medfed methods apfl`` prints what it keeps, sends and costs.

A method is found by its other names, too, and ``medfed methods few_patients`` lists the methods for
hospitals that have few.

``plugins=FOLDER`` adds your methods.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table

from medfed.commands.help import keys, print_usage
from medfed.commands.sentences import without_hydra
from medfed.common.console import Terminal
from medfed.common.processes import loading
from medfed.config.allowed import method_yamls
from medfed.config.spelling import plugin_folders
from medfed.standalone.errors import ConfigError, did_you_mean, few

if TYPE_CHECKING:
    from medfed.federation.card import Card

USAGE = "medfed methods [NAME or NEED] [plugins=FOLDER]"
COLUMNS = (
    *("algorithm=", "paper", "stays personal", "down", "up"),
    *("passes", "kept at the client", "at the server", "tasks", "cohort"),
    "note",
)


class Method(NamedTuple):
    """A method that a run may choose."""

    name: str  # its name in ``algorithm=NAME``
    yaml: Path  # its hyper-parameters
    kind: Any  # its class

    @property
    def row(self) -> tuple[str, ...]:
        """The cells of a table."""
        from medfed.federation.card import in_words

        card: Card = self.kind.card
        passes = f"{card.passes:g}" + (f", and {card.extra_passes}" if card.extra_passes else "")
        most = "at most " if card.at_most else ""
        return (
            *(self.name, card.paper, card.keeps, most + in_words(card.down)),
            most + in_words(card.up),
            *(passes, in_words(card.client), in_words(card.server), card.tasks),
            "all" if card.full_cohort else "any",
            card.note or "–",
        )


@without_hydra(partial(print_usage, USAGE))
def main(arguments: Sequence[str]) -> None:
    """Runs the command."""
    with loading():
        files = yamls([a for a in arguments if a.startswith("plugins=")])
        names = [a for a in arguments if not a.startswith("plugins=")]
        needs = sorted({need for path in files.values() for need in comment_words(path, "for")})
        chosen = dict.fromkeys(files) if not names else {}
        for name in names:
            matching = [n for n, path in files.items() if _bare(name) in map(_bare, words(n, path))]
            if not matching:
                known = [word for n, path in files.items() for word in words(n, path)]
                raise ConfigError(
                    f"Unknown method {name!r}{did_you_mean(name, known)}; the methods are "
                    f"{', '.join(files)}."
                )
            chosen |= dict.fromkeys(matching)
        rows = by_family(method(name, files[name]) for name in chosen)
        if names and not {*map(_bare, needs)} & {*map(_bare, names)}:
            for one in rows:
                print_page(one)
        else:
            print_table(rows)
            print(f"medfed methods NEED lists those for {few(needs, 9)}.")


def comment_words(yaml: Path, about: str) -> dict[str, str]:
    """Returns what a comment at the head of a yaml lists, each with what is in its parentheses.

    `about` is ``also``, with other names, or ``for``, with what hospitals have that it is for.
    """
    listed = re.search(rf"^# {about}: (.*)$", yaml.read_text("utf-8"), re.MULTILINE)
    items = re.findall(r"([\w-]+)(?: \(([^)]*)\))?", listed[1]) if listed else []
    return dict(items)


def words(name: str, yaml: Path) -> list[str]:
    """Returns all words by which a method is found."""
    return [name, *comment_words(yaml, "also"), *comment_words(yaml, "for")]


def _bare(name: str) -> str:
    return re.sub("[-_ ]", "", name.lower())


def yamls(plugins: Sequence[str] = ()) -> dict[str, Path]:
    """Returns the yaml of each method by name, in order."""
    return method_yamls(folder for option in plugins for folder in plugin_folders(option))


def method(name: str, yaml: Path) -> Method:
    """Loads the class that a method's yaml names."""
    from hydra.utils import get_class
    from omegaconf import OmegaConf

    from medfed.config.allowed import check_targets

    target = str(OmegaConf.load(yaml)._target_)
    check_targets({"_target_": target}, f"algorithm={name}", exists=True)
    return Method(name, yaml, get_class(target))


def by_family(methods: Iterator[Method]) -> list[Method]:
    """Returns methods ordered by family, then by name."""
    from typing import get_args

    from medfed.federation.card import Family

    # A method of one's own may be of a family of its own, which comes last.
    order = {family: number for number, family in enumerate(get_args(Family))}
    return sorted(
        methods,
        key=lambda m: (order.get(m.kind.card.family, len(order)), m.kind.card.family, m.name),
    )


def print_table(methods: Sequence[Method]) -> None:
    """Prints what each method does, as wide as the terminal, with a section per family."""
    table = Table(box=SIMPLE_HEAD, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    family = None
    for one in methods:
        card = one.kind.card
        if card.family != family:
            family = card.family
            table.add_section()
            table.add_row(family, style="bold")
        note = f" {card.note[:1].upper()}{card.note[1:]}." if card.note else ""
        table.add_row(one.name, head(one.yaml) + note)
    Terminal().print(table)
    print("medfed methods NAME shows what a method keeps, sends and costs, and its keys.")


def head(yaml: Path) -> str:
    """Returns the comment with which a yaml begins."""
    lines = itertools.takewhile(lambda s: s.startswith("#"), yaml.read_text("utf-8").splitlines())
    description = (line for line in lines if not line.startswith(("# also: ", "# for: ")))
    return " ".join(line.lstrip("# ") for line in description)


def print_page(one: Method) -> None:
    """Prints a method's row, its paper, symbols and deviations, and its hyper-parameters."""
    from medfed.federation.card import UNPROTECTED, tuned

    print(f"algorithm={one.name} ({one.kind.card.family})\n")
    for name, more in comment_words(one.yaml, "also").items():
        print(f"  {'also ' + name:<20}{f'algorithm={one.name} {more}'.strip()}")
    for title, cell in zip(COLUMNS[1:], one.row[1:], strict=True):
        print(f"  {title:<20}{cell}")
    covered = " and ".join(one.kind.parts_averaged)
    print(f"  {'aggregation':<20}{f'any, of {covered}' if covered else 'mean'}")
    reason = UNPROTECTED.get(one.kind.card.privacy_exposure)
    print(f"  {'privacy.example':<20}{f'refused: it {reason}' if reason else 'covered'}")
    for name, over in tuned(one.kind).items():
        print(f"  {'tuned':<20}algorithm.{name} from {over.low:g} to {over.high:g}")
    module = sys.modules[one.kind.__module__]
    print("\n" + (module.__doc__ or "").strip().replace("``", "") + "\n")
    for key in keys(one.yaml.read_text(encoding="utf-8")):
        print(f"  algorithm.{key.name}={key.default}  {key.comment}")
    print()
