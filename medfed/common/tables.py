"""A table: one content, written for a terminal, as Markdown and in LaTeX."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rich.box import SIMPLE_HEAD

from medfed.common.console import Table as Printed
from medfed.common.console import in_latex, in_markdown, short

_WORDS = 1000  # characters of a cell, which wraps


class Cell(NamedTuple):
    """A cell of a table."""

    text: str = ""  # a number or words
    ends: str = ""  # the interval of the number
    word: str = ""  # the verdict on the number: ``better``, ``worse`` or ``undecided``
    value: float = math.nan  # the number by which a page sorts
    low: float = math.nan  # the lower end of the interval
    high: float = math.nan  # the upper end

    @property
    def brief(self) -> str:
        """The number, with its verdict where it has one, else with its interval."""
        return f"{self.text} {self.word or self.ends}".rstrip()

    @property
    def kind(self) -> str:
        """The colour of the cell on a page."""
        return self.word if self.word in ("better", "worse") else ""


@dataclass(frozen=True)
class Table:
    """A table for the terminal, a page, CSV or LaTeX."""

    head: Sequence[str]  # the titles of the columns
    rows: Sequence[Sequence[Cell]]  # the cells of each line
    prose: Sequence[int] = ()  # columns of words
    kind: str = ""  # a class of the table on a page

    @classmethod
    def of(
        cls, head: Sequence[str], rows: Iterable[Sequence[str]], prose: Sequence[int] = ()
    ) -> Table:
        """Returns a table of plain texts."""
        return cls(head, [[Cell(text) for text in row] for row in rows], prose)

    def only(self, columns: Sequence[str]) -> Table:
        """Returns the columns with these titles."""
        indices = [i for i, title in enumerate(self.head) if title in columns]
        rows = [[row[i] for i in indices] for row in self.rows]
        prose = [n for n, i in enumerate(indices) if i in self.prose]
        return Table([self.head[i] for i in indices], rows, prose)

    def upright(self, name: str) -> Table:
        """Returns the table with its longer side downwards.

        Example:
            >>> Table.of(["a", "b", "c"], [["x", "1", "2"]]).upright("letter").markdown()
            ['| letter | x |', '|---:|---:|', '| b | 1 |', '| c | 2 |']
        """
        if len(self.rows) > len(self.head) - 1:
            return self
        head, *rows = zip(map(Cell, self.head), *self.rows, strict=True)
        titles = [name, *(cell.text for cell in head[1:])]
        return replace(self, head=titles, rows=rows)

    def markdown(self) -> list[str]:
        r"""Returns the lines of the table in Markdown.

        Example:
            >>> Table.of(["a", "b"], [["x|y", "1"]], prose=[0]).markdown()
            ['| a | b |', '|---|---:|', '| x\\|y | 1 |']
        """
        rule = "".join("---|" if i in self.prose else "---:|" for i in range(len(self.head)))
        texts = ([in_markdown(cell.brief) for cell in row] for row in self.rows)
        return [
            f"| {' | '.join(map(in_markdown, self.head))} |",
            f"|{rule}",
            *(f"| {' | '.join(row)} |" for row in texts),
        ]

    def printed(self, title: str) -> Printed:
        """Returns the table for a terminal."""
        table = Printed(box=SIMPLE_HEAD, title=short(title, _WORDS), title_justify="left")
        for i, column in enumerate(self.head):
            title = short(column, _WORDS) if column else ""
            table.add_column(title, justify="left" if i in self.prose else "right")
        for row in self.rows:
            table.add_row(*(short(cell.brief, _WORDS) if cell.brief else "" for cell in row))
        return table


def latex_cell(cell: Cell) -> str:
    """Returns a number with ± half of its interval, or with the ends if the metric cuts it."""
    if math.isnan(cell.value):
        return in_latex(cell.text)
    low, high = cell.low, cell.high
    text = cell.text.replace("%", r"\%")
    if abs(low + high - 2 * cell.value) < 1e-4:
        text += rf" \pm {high - cell.value:.4f}"
    elif not math.isnan(low):
        text += rf"\ {cell.ends}".replace("%", r"\%")
    return rf"$\mathbf{{{text}}}$" if cell.kind else f"${text}$"


def number(value: float, digits: int = 4, sign: str = "", word: str = "") -> Cell:
    """Returns a cell with a number, a dash where there is none.

    Example:
        >>> number(0.5).text, number(math.nan).text
        ('0.5000', '–')
    """
    text = "–" if math.isnan(value) else f"{value:{sign}.{digits}f}"
    return Cell(text, "", word, value)
