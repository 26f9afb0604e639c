"""Names from outside in all that is printed and written, read by parsers that are not medfed's."""

from __future__ import annotations

import csv
import json
import re
import shutil
import unicodedata
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from medfed.commands.main import main
from medfed.common.console import Terminal, in_latex, in_markdown
from medfed.reports.look import read_descriptions, write_look
from medfed.reports.report import report_runs
from medfed.sites.status import show
from medfed.standalone.files import csv_text, original
from tests.integration.runs import CLINICAL

# Attacks on a terminal, LaTeX, spreadsheets, HTML, Markdown and SVG; each brings a line of its own.
ATTACKS = (
    "\x1b]0;title\x07\x1b[31m",
    "[/nope][link=http://x]y",
    "\n\\input{/etc/passwd}",
    "$x$ %&#_{}~^\\write18{id}",
    "\rerror: Everything is lost.",
    "</title></td><script>alert(1)</script><img src=x onerror=alert(1)>",
    "![x](http://x/y.png)|<b>\n# Heading\n\n- item",
    "\u202eabc\u2066\u200f",
    "a;=cmd|' /C calc'!A0",
    "\t＝1+1\t@SUM(1)",
    "--><!--]]>&lt;&#x3c;",
    ":warning: \x9b31m\x00\x7f\ud800",
)
NAMES = ("=" + "".join(ATTACKS[:6]), "-" + "".join(ATTACKS[6:]))


def controlled(text: str) -> None:
    """No character but the end of a line does anything."""
    odd = [c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    assert not [c for c in odd if c != "\n"]


def shown_safely(text: str) -> None:
    """A terminal shows the text: nothing controls it, and no name has brought a line."""
    controlled(text)
    assert not [line for line in text.split("\n") if line.startswith(("\\input", "error:", "# H"))]


class Tags(HTMLParser):
    """What an HTML page holds besides its words."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.words: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_comment(self, data):
        raise AssertionError(f"a comment: {data}")

    def handle_data(self, data):
        self.words.append(data)


def html(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    controlled(page)
    tags = Tags(page)
    assert tags.tags.count("script") == 1  # that of the page
    assert tags.tags.count("b") <= 1
    assert {"img", "iframe", "object", "link"}.isdisjoint(tags.tags)
    assert not [name for name in tags.attributes if name.startswith("on")]


NUMBER = re.compile(r"[-+]?[\d.,eE+-]*(inf|nan)?")


def spreadsheet(text: str) -> None:
    """No cell begins as a formula, by whichever separator a spreadsheet divides the lines.

    No cell controls the terminal on which somebody prints the file.
    """
    assert not [c for c in text if unicodedata.category(c) == "Cc" and c not in "\t\r\n"]
    for separator in ",;\t":
        for row in csv.reader(text.splitlines(), delimiter=separator):
            for cell in row:
                start = unicodedata.normalize("NFKC", cell.lstrip(" \"'"))[:1]
                guarded = cell.lstrip(' "').startswith("'")
                assert guarded or start not in tuple("=+-@") or NUMBER.fullmatch(cell), cell


WORDS = {
    *("begin", "end", "toprule", "midrule", "bottomrule", "multicolumn", "mathbf", "pm", "\\", " "),
    *("textbackslash", "textasciitilde", "textasciicircum", *"_%&#{}$"),
}
TOKEN = re.compile(r"\\([A-Za-z]+|.)|(^%[^\n]*\n)|([{}$&#%~^_])|.", re.DOTALL | re.MULTILINE)


def latex(text: str) -> None:
    """Only known commands, in balanced braces and formulas, one row of the table per line."""
    depth = formulas = 0
    for token in TOKEN.finditer(text):
        command, _, special = token.groups()
        assert command is None or command in WORDS, command
        depth += {"{": 1, "}": -1}.get(special or "", 0)
        formulas += special == "$"
        assert depth >= 0
        assert special not in ("#", "%", "~", "^")
        assert special != "_" or formulas % 2
    assert depth == 0
    assert formulas % 2 == 0
    shown_safely(text)
    for line in text.split("\n"):
        assert re.match(r"(%.*|\\(begin|end|toprule|midrule|bottomrule).*|.* \\\\|)$", line), line


def markdown(path: Path) -> list[str]:
    """Returns the pictures of a page, which has no markup but that of medfed."""
    page = path.read_text(encoding="utf-8")
    shown_safely(page)
    blocks = MarkdownIt("commonmark").enable("table").parse(page)
    every = [t for block in blocks for t in (block, *(block.children or ()))]
    assert {"html_block", "html_inline", "link_open"}.isdisjoint(t.type for t in every)
    assert not [t for t in blocks if t.type == "heading_open" and t.level > 0]
    return [str(t.attrs["src"]) for t in every if t.type == "image"]


def svg(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    shown_safely(text)
    tags = {node.tag.rpartition("}")[2] for node in ElementTree.fromstring(text).iter()}
    assert tags.isdisjoint({"script", "a", "image", "foreignObject"})


def renamed(folder: Path, names: dict[str, str]) -> None:
    """Gives clients other names in all records of a run folder, as its sender could."""

    def other(content):
        if isinstance(content, dict):
            return {names.get(key, key): other(value) for key, value in content.items()}
        if isinstance(content, list):
            return [other(value) for value in content]
        return names.get(content, content) if isinstance(content, str) else content

    for path in folder.rglob("*.json"):
        path.write_text(json.dumps(other(json.loads(path.read_text()))))
    for path in folder.rglob("*.csv"):
        with path.open(newline="") as file:
            rows = [[names.get(cell, cell) for cell in row] for row in csv.reader(file)]
        text = csv_text(rows[0], rows[1:])
        path.write_text(text.encode(errors="replace").decode())


@pytest.fixture(scope="module")
def received(finished_run, tmp_path_factory) -> Path:
    """Runs of two methods and seeds, in folders and with clients of hostile names."""
    root = tmp_path_factory.mktemp("received") / "\n\\input{/etc/passwd}[/nope]\x1b[31m;=1"
    clients = [name.replace("\ud800", "").replace("\x00", "") for name in NAMES]
    names = {f"hospital_{n}": name for n, name in enumerate(clients)}
    names |= {"clinical": clients[0], "malignant": clients[1]}
    for method in ("local", "fedavg"):
        for seed in (0, 1):
            overrides = (f"algorithm={method}", f"seed={seed}", "rounds=2")
            folder = root / f"{method}\n# Heading\x1b[1m{seed}"
            shutil.copytree(finished_run(*CLINICAL, *overrides), folder)
            renamed(folder, names)
    return root


def checked(folder: Path) -> dict[str, int]:
    """Reads all files that were written; returns how many of each kind."""
    counts: dict[str, int] = {}
    for path in folder.rglob("*"):
        kind = path.suffix
        counts[kind] = counts.get(kind, 0) + 1
        if kind == ".html":
            html(path)
        elif path.parent.parent.name == "log":  # Lightning's logger
            controlled(path.read_text(encoding="utf-8"))
        elif kind == ".csv":
            spreadsheet(path.read_text(encoding="utf-8"))
        elif kind == ".tex":
            latex(path.read_text(encoding="utf-8"))
        elif kind == ".svg":
            svg(path)
        elif kind == ".md":
            assert all(re.fullmatch(r"figures/[\w-]+\.png", name) for name in markdown(path))
    return counts


def test_a_report_on_received_runs(received, tmp_path, capsys):
    report_runs(str(received), tmp_path)
    shown_safely(capsys.readouterr().out)
    counts = checked(tmp_path)
    assert min(counts[kind] for kind in (".html", ".csv", ".tex", ".svg", ".md")) > 0


def test_looks_of_hospitals(tmp_path, capsys):
    files = []
    for n, name in enumerate(NAMES):
        whole = name.replace("\ud800", "")
        tables = {
            "Patients": {"train": 50 + n, whole: 3},
            f"Shares of {whole}": {whole: 0.5 + n / 10, "b": 0.5 - n / 10},
            "Means": {whole: 1.0 + n, "age": 3.0},
        }
        look = {"hospital": whole, "least": 5, "tables": tables}
        files.append(tmp_path / f"{n}.json")
        files[-1].write_text(json.dumps({"hospitals": [look]}))
    write_look(read_descriptions(files), tmp_path / "page")
    shown_safely(capsys.readouterr().out)
    assert checked(tmp_path / "page")[".html"] == 1


def test_the_status_of_a_received_run(tmp_path, capsys):
    """A status.json names sites, states and what happens."""
    name = NAMES[0]
    site = {"state": name, "since": name, "round": 0, "epsilon": 1.0}
    status = {"rounds": 2, "doing": name, "since": name, "sites": {name: site, NAMES[1][:40]: site}}
    (tmp_path / "status.json").write_text(json.dumps(status))
    show(tmp_path)
    printed = capsys.readouterr().out
    assert "[/nope]" in printed
    shown_safely(printed)


@pytest.mark.parametrize("name", [*ATTACKS, *NAMES])
def test_each_escape_of_each_attack(name, capsys):
    console = Terminal(width=1000)
    console.print(name, name)
    shown_safely(capsys.readouterr().out)
    latex(f"{in_latex(name)} \\\\\n")
    spreadsheet(csv_text([name, name], [[name, 1]]))
    page = (
        MarkdownIt("commonmark").enable("table").render(f"| {in_markdown(name)} | x |\n|---|---|\n")
    )
    assert set(re.findall(r"<(\w+)", page)) <= {"table", "thead", "tr", "th"}
    assert page.count("<th>") == 2


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "utf-8"])
def test_a_terminal_of_any_encoding(encoding, tmp_path):
    with (tmp_path / "out").open("w", encoding=encoding) as file:
        Terminal(file=file, width=300).print("数 – é \udcff", "…")
    text = (tmp_path / "out").read_text(encoding)
    assert text.endswith("\\udcff …\n" if encoding != "ascii" else "\\udcff \\u2026\n")
    assert text.startswith("数 – é" if encoding == "utf-8" else "\\u6570 ")


@given(
    st.lists(
        st.text(alphabet="=+-@＝;\t\r\n'\" ,a1.\x1b\x00\x9b\x7f", max_size=9),
        min_size=1,
        max_size=4,
    )
)
def test_a_cell_is_read_as_it_was_written(cells):
    text = csv_text(["column"] * len(cells), [cells])
    spreadsheet(text.partition("\n")[2])
    _, row = csv.reader(text.replace("\r\n", "\r\n").splitlines(keepends=True))
    assert [*map(original, row)] == cells


# What a table can hold: names of columns are printable, and white space in names is one space.
COLUMN = "=x;@y [/nope]$_&%{}\\input"
CENTRES = tuple("".join(ATTACKS[n : n + 6]).translate({0: None, 0xD800: None}) for n in (0, 6))


def table_of(path: Path) -> Path:
    """A table whose hospitals, patients, categories, classes and columns have hostile names."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["patient", "centre", COLUMN, "group", "label"])
        for n in range(120):
            centre, group = CENTRES[n % 2], ("@" + ATTACKS[1], "+" + ATTACKS[5])[n // 2 % 2]
            label = ("-" + ATTACKS[3], "=" + ATTACKS[0])[n // 4 % 2]
            rows.writerow([f"=p{n}\x1b[31m[/nope];@{n}", centre, (n * 37 % 100) / 9, group, label])
    return path


def test_a_run_on_a_table_of_such_names_and_all_that_follows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    table, run = table_of(tmp_path / "table.csv"), str(tmp_path / "run")
    data = ("data=csv", f"data.path={table}", "partition=centre", "data.centre=centre")
    data = (*data, "data.patient=patient", "data.label=label")
    main(["prepare", "experiment=clinical_pfednet", *data, "folder=seen"])
    few = ("rounds=1", "local.steps=2", "logger=csv", "pictures.format=svg", "algorithm=fedavg")
    main(["train", "experiment=clinical_pfednet", *data, *few, f"hydra.run.dir={run}"])
    main(["evaluate", f"run={run}", "by=group", "least=1"])
    main(["evaluate", f"run={run}", "across=true"])
    main(["export", f"run={run}", "out=bundles"])
    bundle = next(path for path in (tmp_path / "bundles").iterdir() if path.is_dir())
    main(["predict", f"bundle={bundle}", f"input={table}", "output=predicted.csv"])
    main(["look", *data, "folder=looked"])
    printed = capsys.readouterr()
    shown_safely(printed.out)
    shown_safely(printed.err)
    assert "[/nope]" in printed.out
    table.unlink()
    counts = checked(tmp_path)
    assert min(counts[kind] for kind in (".html", ".csv", ".svg")) > 0
    with (tmp_path / "predicted.csv").open(newline="", encoding="utf-8") as file:
        assert original(list(csv.DictReader(file))[7]["patient"]) == "=p7\x1b[31m[/nope];@7"


def test_a_hospital_on_a_table_of_such_names(tmp_path, monkeypatch, capsys):
    """What a hospital reads of its table, and the description that it may hand out."""
    monkeypatch.chdir(tmp_path)
    table_of(tmp_path / "table.csv")
    one = ("sites=[a,b,c]", *KEYS, "data.scaling=client", "rounds=1")
    main(["deploy", "dry_run=.", "experiment=clinical_pfednet", *one])
    (tmp_path / "site.yaml").write_text("site: a\ndata: {path: table.csv}\n")
    capsys.readouterr()
    for what in (["check"], ["describe", "folder=described"]):
        main(["site", *what, "agreed=agreed.json", "local=site.yaml"])
    printed = capsys.readouterr()
    shown_safely(printed.out)
    shown_safely(printed.err)
    assert "[/nope]" in printed.out
    assert checked(tmp_path / "described")[".html"] == 1


KEYS = ("data.patient=patient", "data.label=label", "data=csv", "local.steps=1")
SUITE = """\
title: "{}"
situation: few patients
experiment: clinical_pfednet
path: true
lr: [0.01, 0.1]
splits: folds
methods: [fedavg]
overrides: [data=csv, data.patient=patient, data.label=label, data.centre=centre]
variants: {{centres: {{}}}}
sizes:
  smoke: {{splits: 2, trials: 2, overrides: [rounds=1, local.steps=1]}}
  small: {{splits: 2, trials: 2}}
  full: {{splits: 2, trials: 2}}
"""


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_advice_and_a_benchmark_on_a_table_of_such_names(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    table = table_of(tmp_path / "table.csv")
    few = ("methods=[local,fedavg]", "folds=2", "pilot_rounds=1", "workers=1", "out=advised")
    asked = (*KEYS, "data.centre=centre", "partition=centre", "data.path=table.csv")
    main(["advise", "experiment=clinical_pfednet", *asked, *few])
    (tmp_path / "mine" / "suites").mkdir(parents=True)
    (tmp_path / "mine" / "suites" / "odd.yaml").write_text(SUITE.format("[/nope]</td><script>"))
    of = ("suite=odd", "methods=[fedavg]", "size=smoke", "plugins=mine", "workers=1")
    main(["benchmark", *of, "paths.odd=table.csv", "out=compared"])
    printed = capsys.readouterr()
    shown_safely(printed.out)
    shown_safely(printed.err)
    assert "[/nope]" in printed.out
    table.unlink()
    assert checked(tmp_path)[".html"]
