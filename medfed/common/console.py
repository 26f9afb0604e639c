"""Text for the terminal: a console that does not squeeze tables, readable sizes, and progress.

It also turns names from the data (clients, patients, centres) into file names and safe text.
Progress is a bar on a terminal and plain lines elsewhere.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import sys
import time
import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO

from rich import filesize, progress, table
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

from medfed.standalone.errors import few

_BYTES = 120  # characters of a file name, so that a suffix and a prefix fit on every file system
_NAME_LENGTH, _DRAWN = 40, 24  # characters of a name in tables and sentences, and in figures
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\.|$)", re.IGNORECASE)  # reserved by Windows


def file_names(names: Iterable[str]) -> dict[str, str]:
    """Gives every name a unique file name, without a folder and valid on every system.

    Example:
        >>> file_names(["hospital_0", "St. Mary's"])
        {'hospital_0': 'hospital_0', "St. Mary's": "St. Mary's"}
        >>> file_names(["../x", "a", "A"])
        {'../x': '_x-d6b96a97', 'a': 'a-ca978112', 'A': 'A-559aead0'}
    """
    # An ordinary name is its own file name. In a name that some system would refuse, ``_``
    # replaces the characters, and a hash is added; names that differ only by upper case get a
    # hash, too.
    files = {name: safe if (safe := _safe(name)) == name else _marked(name) for name in names}
    while True:
        count = Counter(map(_folded, files.values()))
        twins = [n for n, file in files.items() if count[_folded(file)] > 1]
        if not twins:
            return files
        files |= {name: _marked(files[name], name) for name in twins}


def short(name: str, most: int = _NAME_LENGTH) -> str:
    r"""Returns a name for a sentence or a picture: on one line, printable, and not too long."""
    text = visible(name) or "''"
    return text if len(text) <= most else f"{text[: most - 9]}…{text[-8:]}"


def grouped(facts: Mapping[str, str], most: int = 8) -> str:
    """Lists names by what is said of each; of very many, only the first.

    Example:
        >>> grouped({"a": "2 patients", "b": "3 patients", "c": "2 patients"})
        'a, c (2 patients each); b (3 patients)'
    """
    alike: dict[str, list[str]] = {}
    for name, fact in facts.items():
        alike.setdefault(fact, []).append(short(name))
    each = ((fact + " each" * (len(names) > 1), names) for fact, names in alike.items())
    return "; ".join(f"{few(names, most)} ({fact})" for fact, names in each)


def evenly(names: Sequence[str], most: int) -> list[str]:
    """Picks some of very many names, spread evenly; the same names every time."""
    count = min(most, len(names))
    return [names[n * len(names) // count] for n in range(count)]


def visible(text: str) -> str:
    r"""Escapes the characters that would break a line or control a terminal.

    Example:
        >>> visible("a\nb\x1b[31m")
        'a\\nb\\x1b[31m'
    """
    return "".join(c if _visible(c) else ascii(c)[1:-1] for c in text)


def in_markdown(value: Any) -> Any:
    r"""Returns texts for a Markdown page, also those in lists and mappings.

    Example:
        >>> in_markdown("p < 0.05"), in_markdown("A</h1><img src=x>")
        ('p < 0.05', 'A&lt;/h1>&lt;img src=x>')
        >>> in_markdown({"a|b": ["![x](http://y)\n# B"]})
        {'a\\|b': ['![x]&#40;http://y)\\n# B']}
    """
    if isinstance(value, str):
        text = re.sub(r"<(?=[A-Za-z/!?])", "&lt;", visible(value))
        return text.replace("](", "]&#40;").replace("|", r"\|")
    if isinstance(value, Mapping):
        return {in_markdown(name): in_markdown(each) for name, each in value.items()}
    return [in_markdown(each) for each in value] if isinstance(value, list | tuple) else value


_LATEX = {c: f"\\{c}" for c in "_%&#{}$"} | {"\\": r"\textbackslash{}", "−": "$-$"}
_LATEX |= {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}


def in_latex(text: str) -> str:
    r"""Returns a text for LaTeX, in which it is words alone."""
    return "".join(_LATEX.get(c, c) for c in visible(text))


def caption(name: str, most: int = _DRAWN) -> str:
    r"""Returns a name for a figure, with its dollar signs escaped, as these begin a formula."""
    text = short(name, most).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text  # legends omit names with _


def _visible(character: str) -> bool:
    return unicodedata.category(character)[0] != "C" and character not in "\u2028\u2029"


def _safe(name: str, most: int = _BYTES) -> str:
    text = re.sub(r"""[<>:"/\\|?*]+""", "_", name)
    text = "".join(c if _visible(c) else "_" for c in text).strip(". ")
    text = f"_{text}" if not text or _RESERVED.match(text) else text
    while len(text.encode()) > most:
        text = text[:-1].rstrip(". ")
    return text


def _marked(file: str, name: str | None = None) -> str:
    whole = (file if name is None else name).encode(errors="surrogatepass")
    return f"{_safe(file, _BYTES - 9)}-{hashlib.sha256(whole).hexdigest()[:8]}"


def _folded(file: str) -> str:
    return unicodedata.normalize("NFKC", file).casefold()


class Terminal(Console):
    """A console that prints a string as it is, on one line, on any encoding."""

    # Names come from outside: none brings colours, emoji or lines, or controls the terminal.
    # What has several lines is a :class:`rich.text.Text`.

    def render_str(self, text: str, **how: Any) -> Text:  # type: ignore[override]
        """Returns a string as Rich draws it in titles, cells, branches of trees, and lines."""
        plain = visible(text).encode(self.encoding, "backslashreplace").decode(self.encoding)
        plainly = dict.fromkeys(("emoji", "markup", "highlight"), False)
        return super().render_str(plain, **how | plainly)


def wide_console() -> Terminal:
    """Returns a console that does not squeeze tables if there is no terminal."""
    console = Terminal()
    return console if console.is_terminal else Terminal(width=140)


class Table(table.Table):
    """A table that cuts no word: its columns wrap, and where they cannot, each cell has a line."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Renders it; a column is as wide as its longest word, or wider."""
        written = [[c.header, *c.cells] for c in self.columns]
        texts = [[_plain(console, cell) for cell in column] for column in written]
        most = [max(map(cell_len, "\n".join(column).split("\n"))) for column in texts]
        words = [max(map(cell_len, " ".join(column).split()), default=1) for column in texts]
        least = [m if c.no_wrap else w for c, m, w in zip(self.columns, most, words, strict=True)]
        for column, width in zip(self.columns, least, strict=True):
            column.width = width
        whole = Measurement.get(console, options.update(max_width=100_000), self).minimum
        if (room := options.max_width - whole) < 0:
            heads, *rows = zip(*texts, strict=True)
            yield _plain(console, self.title or "")
            for row in rows:
                pairs = zip(heads, row, strict=True)
                yield Text("\n".join(["", *(f"{head}: {cell}" for head, cell in pairs if cell)]))
            return
        order = sorted(range(len(most)), key=lambda i: most[i] - least[i])
        for left, i in zip(range(len(order), 0, -1), order, strict=True):
            more = min(most[i] - least[i], room // left)
            self.columns[i].width, room = least[i] + more, room - more
        yield from super().__rich_console__(console, options)


def _plain(console: Console, cell: Any) -> str:
    """What is drawn of a cell."""
    return cell.plain if isinstance(cell, Text) else console.render_str(str(cell)).plain


def say(console: Console, *lines: str, style: str = "") -> None:
    """Prints each sentence on a line of its own, without wrapping it."""
    for line in lines:
        console.print(line, style=style or None, soft_wrap=True)


_made = logging.getLogRecordFactory()


def _record(*args: Any, **kwargs: Any) -> logging.LogRecord:
    """A record of which each message of medfed is one line, whichever handler writes it."""
    record = _made(*args, **kwargs)
    if record.name.partition(".")[0] == "medfed":
        record.msg, record.args = visible(record.getMessage()), ()
    return record


logging.setLogRecordFactory(_record)


def escape_unknown() -> None:
    """Lets standard output and error escape what their encoding lacks, on Windows and in pipes."""
    logging.raiseExceptions = False  # a full disk stops the run where it writes its results
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def output_refused(failed: OSError | None = None) -> str:
    """Says why standard output takes no more, as on a full device; empty if it does."""
    if failed is not None and failed.filename is not None:
        return ""
    try:
        print(end="" if failed is None else "\n", flush=True)
    except OSError as error:
        why = f"Standard output takes no more ({error.strerror})"
        return f"{why}; send it elsewhere, or make room."
    return ""


def size(count: int) -> str:
    """Returns a number of bytes in a readable unit."""
    return re.sub("bytes?", "B", filesize.decimal(count))


def brief(value: float) -> str:
    """Writes a number in two digits, a larger one whole."""
    return f"{value:.2g}" if abs(value) < 99.5 else f"{value:.0f}"


@contextmanager
def levels(wanted: Mapping[str, int]) -> Iterator[None]:
    """Gives loggers other levels for a while."""
    before = {log: log.level for log in map(logging.getLogger, wanted)}
    for log, level in zip(before, wanted.values(), strict=True):
        log.setLevel(level)
    try:
        yield
    finally:
        for log, level in before.items():
            log.setLevel(level)


@contextmanager
def logged_by(handler: logging.Handler, logger: str = "") -> Iterator[None]:
    """Also gives the records of a logger to a handler, for a while."""
    log = logging.getLogger(logger)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()


@contextmanager
def without_remarks() -> Iterator[None]:
    """Hides Lightning's warnings about things that a federated run does on purpose."""
    # These loggers, because the import of Lightning sets the level of their parents.
    names = (
        "pytorch_lightning.utilities.rank_zero",
        "pytorch_lightning.trainer.connectors.checkpoint_connector",
        "pytorch_lightning.trainer.connectors.signal_connector",
        "lightning_fabric.utilities.rank_zero",
        "lightning_fabric.utilities.distributed",
    )
    with levels(dict.fromkeys(names, logging.WARNING)), warnings.catch_warnings():
        # Lightning 2.6 uses a type of PyTorch's pytrees that newer PyTorch deprecates.
        warnings.filterwarnings("ignore", message=".*LeafSpec.*")
        # PyTorch 2.11 says so of our graphs, whose invariants are checked.
        warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly")
        yield


# The environment variable that names the folder in which the runs of a sweep note their sentences.
PRINTED = "MEDFED_PRINTED"


class RunStream:
    """Standard output or error of one run of a sweep, which passes on whole lines."""

    def __init__(self, stream: TextIO, mark: str = "") -> None:
        self.stream, self.mark, self.once, self._text = stream, mark, False, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def isatty(self) -> bool:
        """Whether a bar may move there."""
        return not self.mark and self.stream.isatty()

    def write(self, text: str) -> int:
        """Takes text; a line, or several written together, is passed on once it is complete."""
        self._text += text
        if self._text.endswith("\n"):
            block, self._text = self._text, ""
            if not (self.once and _was_printed(block)):
                lines = block.splitlines(keepends=True)
                self.stream.write("".join(self.mark + line for line in lines))
                self.stream.flush()
        return len(text)

    def flush(self) -> None:
        """Passes on what is no whole line yet."""
        if not self.mark:
            self.stream.write(self._text)
            self._text = ""
            self.stream.flush()


def _was_printed(block: str) -> bool:
    """Whether any run of the same sweep has printed it; if not, notes that one has now."""
    folder = os.environ.get(PRINTED)
    if folder is None:
        return False
    words = " ".join(re.sub(r"\d+(\.\d+)?|[─━]+", " 0 ", block).split())
    name = hashlib.sha256(words.encode(errors="surrogatepass")).hexdigest()
    try:
        os.close(os.open(os.path.join(folder, name), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return True
    except OSError:  # another machine's folder
        pass
    return False


@contextmanager
def as_run(mark: str) -> Iterator[None]:
    """Gives the output of a run of a sweep, also of its log, to a :class:`RunStream`."""
    usual, handlers = sys.stdout, logging.getLogger().handlers
    moved: list[Any] = [h for h in handlers if getattr(h, "stream", None) is usual]
    out, err = RunStream(sys.stdout, mark), RunStream(sys.stderr, mark) if mark else sys.stderr
    with redirect_stdout(out), redirect_stderr(err):  # type: ignore[type-var]
        try:
            for handler in moved:
                handler.setStream(out)
            yield
        finally:
            for handler in moved:
                handler.setStream(usual)


def swept() -> bool:
    """Whether a run of a sweep prints, which has a line where a run alone has a table."""
    return isinstance(sys.stdout, RunStream)


@contextmanager
def only_news() -> Iterator[None]:
    """Leaves out what an earlier run of the same sweep has printed, such as facts of the data."""
    stream: Any = sys.stdout
    if isinstance(stream, RunStream):
        stream.once = True
    try:
        yield
    finally:
        if isinstance(stream, RunStream):
            stream.once = False


SECONDS = 10.0  # seconds between plain lines


def bar(
    console: Console, what: str, width: int, *columns: progress.ProgressColumn
) -> progress.Progress:
    """Returns a bar: the task, its progress, some columns, elapsed and remaining time."""
    begins = progress.TextColumn(what), progress.BarColumn(bar_width=width)
    ends = progress.TimeElapsedColumn(), progress.TextColumn("left"), progress.TimeRemainingColumn()
    return progress.Progress(*begins, *columns, *ends, console=console)


class Steps:
    """Counts finished items; a context manager."""

    def __init__(
        self, total: int, quiet: bool = False, console: Console | None = None, verb: str = "prepar"
    ) -> None:
        self.verb = verb
        self.total = total
        self.quiet = quiet
        self.console = console or Terminal(file=sys.stderr)
        self.done = 0
        self._bar: progress.Progress | None = None
        self._task = progress.TaskID(0)
        self._began = self._spoke = time.monotonic()

    def __enter__(self) -> Steps:
        if self.console.is_terminal and not self.quiet:
            count = progress.MofNCompleteColumn()
            item = progress.TextColumn("{task.fields[item]}", markup=False)
            self._bar = bar(self.console, f"{self.verb}ing", 32, count, item)
            self._task = self._bar.add_task("", total=self.total, item="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, item: str) -> None:
        """Moves the bar on by one item, and shows its name."""
        self.done += 1
        if self._bar:
            self._bar.update(self._task, completed=self.done, item=short(item[-24:]))
            return
        now = time.monotonic()
        if self.quiet or (now - self._spoke < SECONDS and self.done < self.total):
            return
        self._spoke, spent = now, now - self._began
        left = spent / self.done * (self.total - self.done)
        pace = f"{spent:.0f} s, about {left:.0f} s left"
        self.console.print(f"{self.verb}ed {self.done}/{self.total}  {pace}")
