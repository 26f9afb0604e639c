"""How far a long task is: a rich bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from medfed.common.names import cell

SECONDS = 10.0  # between plain lines


def bar(console: Console, what: str, width: int, *columns: ProgressColumn) -> Progress:
    """Returns a bar: what is done, how far it is, some columns, the time gone and the time left."""
    time_left = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    return Progress(
        TextColumn(what), BarColumn(bar_width=width), *columns, *time_left, console=console
    )


class Steps:
    """Counts finished items; a context manager.

    Args:
        total: How many there are.
        quiet: Whether to show nothing.
        console: Where to write; standard error by default.
        verb: What is being done; "prepar" gives "preparing" and "prepared".
    """

    def __init__(
        self,
        total: int,
        quiet: bool = False,
        console: Console | None = None,
        verb: str = "prepar",
    ) -> None:
        self.verb = verb
        self.total = total
        self.quiet = quiet
        self.console = console or Console(file=sys.stderr)
        self.done = 0
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._began = self._spoke = time.monotonic()

    def __enter__(self) -> Steps:
        if self.console.is_terminal and not self.quiet:
            count, item = MofNCompleteColumn(), TextColumn("{task.fields[item]}")
            self._bar = bar(self.console, f"{self.verb}ing", 32, count, item)
            self._task = self._bar.add_task("", total=self.total, item="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, item: str) -> None:
        """Counts one item.

        Args:
            item: Its id; the end of it is shown.
        """
        self.done += 1
        if self._bar:
            self._bar.update(self._task, advance=1, item=cell(item[-24:]))
            return
        now = time.monotonic()
        if self.quiet or (now - self._spoke < SECONDS and self.done < self.total):
            return
        self._spoke, spent = now, now - self._began
        left = spent / self.done * (self.total - self.done)
        self.console.print(
            f"{self.verb}ed {self.done}/{self.total}  {spent:.0f} s, about {left:.0f} s left",
            highlight=False,
        )
