"""The tables of these pages: MkDocs fills them in when it builds the site.

``<!-- table: KIND NAME -->`` in a page becomes a table; none is committed. After a benchmark

    python docs/tables.py outputs/benchmark/report

keeps its ``findings.json`` in ``docs/benchmark``.

=================  ===============================================================
``task SUITE``     the methods of a suite's first task (or of ``SUITE/VARIANT``)
``dial SUITE``     what methods reach on all of a suite's tasks
``claim NAME``     a claim, its verdict, what it rests on, and what was asked why
``tuned``          what tuning chose, by method and suite
``defaults``       points of the search that do better than a method's defaults over suites
``suites``         a constant, all patients in one place, and what is better, by suite
``card``           the decision card
``answers``        what can be said of each task, in words
``kept NAME``      a table that benchmarks/evidence/memberships.py has left
``evidence``       what benchmarks/evidence/evidence.py prints
``privacy NAME``   what benchmarks/trust/frontier.py prints of a cohort
``detection``      what benchmarks/evidence/detection.py prints; ``paired``: by seed and hospital
``methods``        what each method keeps, sends and costs
``references``     what each file of tests/references checks
``requests``       what a site checks before it answers a request
``readme``         README.md, with which the site begins
=================  ===============================================================
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from medfed.benchmark.tasks import sentences_of
from medfed.commands import methods
from medfed.common.tables import Table
from medfed.functional.statistics import Difference
from medfed.reports.findings import Judged, Report
from medfed.reports.report import page as report_page
from medfed.reports.report import table_csv
from medfed.reports.sentences import answer, card, lines_of
from medfed.reports.tables import methods_table
from medfed.reports.tasks import Scores, Task
from medfed.reports.verdicts import Gain, Harm, Verdict, Verdicts
from medfed.sites import gate
from medfed.sites.words import words_for

DOCS = Path(__file__).parent
FINDINGS = "findings.json"
BESIDE = ("memberships.json",)
REPORT = ("report.html", "table.csv")
LARGEST = 2_000_000  # bytes of docs/benchmark
# Methods whose stored results are of earlier defaults (CHANGELOG.md has both).
EARLIER = {
    "easgd": "alpha=null in place of alpha=0.5",
    "clusteredfl": "epsilon_1=0.1 in place of 0.2",
    "fedmgda": "decay=1 in place of 0.99",
}
_MARK = re.compile(r"<!-- table: (?P<asked>[^>]+?) -->")

Findings = Mapping[str, Any]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Reserves the places of the benchmark's page and table (MkDocs calls this)."""
    for name in REPORT:
        files.append(File.generated(config, f"benchmark/{name}", content="`make docs` fills this."))
    return files


def on_post_build(config: MkDocsConfig) -> None:
    """Writes that page and table; ``REPORT=false`` saves the seconds (MkDocs calls this)."""
    if os.environ.get("REPORT") != "false":
        for name, text in rendered(found(DOCS / "benchmark")).items():
            (Path(config.site_dir) / "benchmark" / name).write_text(text, encoding="utf-8")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fills in the tables of a page (MkDocs calls this)."""
    return filled(markdown, found(DOCS / "benchmark"))


def main(arguments: Sequence[str]) -> None:
    """Keeps the findings of a report."""
    source = Path(arguments[0] if arguments else "") / FINDINGS
    if not source.is_file():
        sys.exit(f"error: {source} does not exist; name the report folder of a benchmark.")
    kept = DOCS / "benchmark"
    compact = json.dumps(json.loads(source.read_bytes()), separators=(",", ":"))
    (kept / FINDINGS).write_text(compact, encoding="utf-8")
    if (size := sum(file.stat().st_size for file in kept.iterdir())) > LARGEST:
        sys.exit(f"error: the files of {kept} have {size} bytes, more than {LARGEST}.")


@cache
def found(folder: Path) -> Findings:
    """Reads what a benchmark found; nothing where none is kept."""
    path = folder / FINDINGS
    findings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for name in BESIDE:
        if findings and (folder / name).is_file():
            kept = json.loads((folder / name).read_text(encoding="utf-8"))
            findings["kept"] = findings.get("kept", {}) | kept
    return findings


def filled(text: str, findings: Findings) -> str:
    """Returns a page with its tables.

    Args:
        text: The page.
        findings: Of a benchmark; empty: none was kept.
    """

    def table(match: re.Match[str]) -> str:
        kind, _, name = match["asked"].partition(" ")
        if kind not in KINDS:
            sys.exit(f"error: no table is of kind {kind!r}; they are {', '.join(KINDS)}.")
        lines = KINDS[kind](findings, name) if findings else []
        return "\n".join(lines or ["*Not measured yet: `medfed benchmark` measures it.*"])

    return _MARK.sub(table, text)


def _tasks(findings: Findings, name: str) -> dict[str, Any]:
    """The tasks of a suite, the first of which it is tuned on; or the one that is named."""
    tasks = findings["tasks"]
    return {k: v for k, v in tasks.items() if name in (k, k.partition("/")[0])}


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """A table in Markdown; empty without rows."""
    if not rows:
        return []
    line = "|" + "---|" * left + "---:|" * (len(head) - left)
    body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return ["| " + " | ".join(head) + " |", line, *body]


def _number(value: Any, sign: str = "", digits: int = 4) -> str:
    known = isinstance(value, int | float) and math.isfinite(value)
    return f"{value:{sign}.{digits}f}".replace("-", "−") if known else "–"


def _named(task: str, data: str) -> str:
    return f"`{task}` ({data})" if data else f"`{task}`"


def _data(findings: Findings, where: str) -> str:
    """What the data of a suite, or of one of its tasks, are."""
    suite = where.partition("/")[0]
    every = (task["data"] for n, task in findings["tasks"].items() if n.partition("/")[0] == suite)
    return next(every, "")


def _told(task: Any, key: str, method: Any) -> Any:
    value = method["mean"][key]
    return -value if task["smaller_is_better"] and value is not None else value


def of_task(findings: Findings, name: str) -> list[str]:
    """Methods, best first."""
    for wanted, own in list(_tasks(findings, name).items())[:1]:
        ((task, verdicts),) = judged({**findings, "tasks": {wanted: own}})
        better = "smaller" if task.falls else "larger"
        head = f"{_named(wanted, own['data'])}, size `{findings['size']}`: {task.metric}"
        told = (
            f"{head}, {better} is better, over {task.splits} splits. "
            f"A constant reaches {_number(own['floor']['value'])}, all "
            f"patients in one place {_in_one_place(own)}. Differences are turned so that "
            "larger is better; better and worse: p < 0.05 (Holm)."
        )
        shown = ("method", "harmed", "mean", "− local", "− FedAvg", "p (Holm)", "sent")
        notes = [f"- {note}" for note in own["left_out"]]
        table = _minus(methods_table(task, verdicts).only(shown))
        return [told, "", *table, *([""] if notes else []), *notes]
    return []


def _minus(table: Table) -> list[str]:
    return [re.sub(r"-(?=[\d.])", "−", line) for line in table.markdown()]


def _in_one_place(task: Any) -> str:
    pooled = task["in_one_place"]
    ends = " to ".join(_number(pooled[end]) for end in ("low", "high"))
    return _number(pooled["value"]) + f" ({ends})" * (pooled["value"] is not None)


def of_dial(findings: Findings, name: str) -> list[str]:
    """Means of the methods that are on all tasks of a suite."""
    tasks = _tasks(findings, name)
    if len(tasks) < 2:
        return []
    first = next(iter(tasks.values()))["methods"]
    names = [n for n in first if all(n in t["methods"] for t in tasks.values())]
    rows = [
        (f"`{n}`", *(_number(_told(t, "mean", t["methods"][n])) for t in tasks.values()))
        for n in names
    ]
    crossed = findings["dials"].get(name, {}).get("crossings", {})
    places = [
        f"{pair} between {', '.join(f'{low:g} and {high:g}' for low, high in ends)}"
        for pair, ends in crossed.items()
    ]
    told = ["", f"Crossings on the dial: {'; '.join(places)}."] if places else []
    head = ("method", *(k.partition("/")[2] for k in tasks))
    return [f"{_named(name, _data(findings, name))}:", "", *_rows(head, rows), *told]


def of_claim(findings: Findings, name: str) -> list[str]:
    """A claim with all that was asked."""
    one = findings.get("claims", {}).get(name)
    if one is None:
        return []
    rows = []
    for kind, key in (("it rests on", "parts"), ("why", "reasons")):
        for asked in one[key]:
            note = f" ({asked['note']})" if asked["note"] else ""
            ends = f"{_number(asked['low'], '+')} to {_number(asked['high'], '+')}"
            rows.append(
                (
                    kind,
                    _named(asked["where"], _data(findings, asked["where"])),
                    asked["asks"] + note,
                    f"**{asked['answer']}**",
                    _number(asked["mean"], "+"),
                    ends if asked["low"] is not None else "",
                    f"{asked['bound']:g}".replace("-", "−"),
                    "< 0.001" if asked["p"] < 0.001 else f"{asked['p']:.3f}",
                )
            )
    head = ("", "where", "statement", "answer", "mean", "95 %", "bound", "p (Holm)")
    told = f"**{one['claim']}** ({one['source']}): **{one['verdict']}**."
    return [told, "", *_rows(head, rows, left=4)]


def of_tuned(findings: Findings, name: str) -> list[str]:
    """What tuning chose; a dash: the defaults."""
    bases: dict[str, Any] = {}
    for where, task in findings["tasks"].items():
        bases.setdefault(where.partition("/")[0], task)
    methods = dict.fromkeys(n for task in bases.values() for n in task["methods"])

    def setting(task: Any, method: str) -> str:
        own = task["methods"].get(method)
        if own is None:
            return ""
        parts = [f"{k.rpartition('.')[2]} {v:g}" for k, v in own["setting"].items()]
        return ", ".join(parts) or "–"

    rows = []
    for method in methods:
        cells = [setting(task, method) for task in bases.values()]
        kept, of = cells.count("–"), sum(cell != "" for cell in cells)
        rows.append((f"`{method}`", f"{kept} of {of}", *cells))
    head = ("method", "defaults were best", *(_named(n, t["data"]) for n, t in bases.items()))
    return _rows(head, rows, left=len(head))


def of_defaults(findings: Findings, name: str) -> list[str]:
    """By method the point of the search that gains most over its defaults, over suites.

    All methods try the same learning rates. What a point gains on validation patients, less the
    median gain of all methods at that point, is due to the method: a share of the way from a
    constant to all patients in one place.
    """
    gains: dict[tuple[str, int], list[float]] = {}
    points: dict[tuple[str, int], str] = {}
    for task in findings["tasks"].values():
        spans = [task[n]["value"] for n in ("floor", "in_one_place")]
        if None in spans or spans[0] == spans[1]:
            continue
        all_own = task["methods"].items()
        own = {n: [(t["setting"], t["score"]) for t in m.get("trials", ())] for n, m in all_own}
        count = max(map(len, own.values()), default=0)
        for point in range(1, count):
            found = {
                n: (t[point][1] - t[0][1]) / abs(spans[1] - spans[0])
                for n, t in own.items()
                if len(t) > point and None not in (t[0][1], t[point][1])
            }
            usual = median(found.values()) if found else 0.0
            for method, gain in found.items():
                usually = _defaults(method)
                changed = ((*k.partition("."), v) for k, v in own[method][point][0].items())
                told = [
                    f"{name} {v:g}"
                    for part, _, name, v in changed
                    if part == "algorithm" and v != usually.get(name)
                ]
                if told:
                    gains.setdefault((method, point), []).append(gain - usual)
                    points[method, point] = ", ".join(told)
    most = max(map(len, gains.values()), default=0)
    best: dict[str, int] = {}
    for (method, point), found in gains.items():  # only what was tried on most suites
        if 2 * len(found) > most and (
            method not in best or median(found) > median(gains[method, best[method]])
        ):
            best[method] = point
    rows = []
    for key in sorted(best.items(), key=lambda b: -median(gains[b])):
        ahead = f"{sum(g > 0 for g in gains[key])} of {len(gains[key])}"
        least = [_number(pick(gains[key]), "+", 3) for pick in (median, min)]
        rows.append((f"`{key[0]}`", points[key], ahead, *least))
    head = ("method", "instead of its defaults", "better on", "median gain", "least")
    return _rows(head, rows, left=2)


@cache
def _defaults(method: str) -> Mapping[str, Any]:
    """The keys of a method as they are shipped, none where it is not."""
    file = DOCS.parent / "configs" / "algorithm" / f"{method}.yaml"
    return yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}


def of_suites(findings: Findings, name: str) -> list[str]:
    """Each task: a constant, all patients in one place, best method, and how many are better."""
    rows = []
    for where, task in findings["tasks"].items():
        own = {n: m for n, m in task["methods"].items() if not n.startswith("pooled")}
        best = max(own, key=lambda n: own[n]["mean"]["mean"])
        told = [
            sum(m["against"].get(r, {}).get("verdict") == "better" for m in own.values())
            for r in ("local", "fedavg")
        ]
        cells = [
            _told(task, "mean", own[n]) if n in own else None for n in ("local", "fedavg", best)
        ]
        rows.append(
            (
                _named(where, task["data"]),
                task["metric"],
                _number(task["floor"]["value"]),
                _in_one_place(task),
                *map(_number, cells),
                f"`{best}`",
                *(f"{n} of {len(own)}" for n in told),
            )
        )
    values = ("constant", "all in one place (95 %)", "local", "FedAvg", "best")
    head = ("task", "metric", *values, "of", "better than local", "than FedAvg")
    return _rows(head, rows, left=2)


def of_answers(findings: Findings, name: str) -> list[str]:
    """The first sentence of a report on each task."""
    return [
        f"- {_named(task.name, task.data)}: {answer(task, verdicts)[0].replace('-', '−')}"
        for task, verdicts in judged(findings)
    ]


def of_kept(findings: Findings, name: str) -> list[str]:
    """A table as another script has left it."""
    if name not in findings.get("kept", {}):
        return []
    table = findings["kept"][name]
    return _rows(table["head"], [[str(cell) for cell in row] for row in table["rows"]], left=0)


def judged(findings: Findings) -> list[Judged]:
    """Returns the tasks with their verdicts, without the scores of single splits."""
    tasks: list[Judged] = []
    for where, own in findings["tasks"].items():
        suite, _, variant = where.partition("/")
        task = Task(suite, variant, own["metric"], own["smaller_is_better"], (*own["clients"],))
        task.title, task.situation, task.same = own["title"], own["situation"], own["same"]
        task.data = own["data"]
        task.overlap, task.patients = own["overlap"], own["tested_patients"]
        task.left_out = {note.partition(" ")[0]: note for note in own["left_out"]}
        if constant := own["floor"].get("name"):
            floor = task.raw(_known(own["floor"]["value"]))
            task.floor[constant] = np.full((own["splits"], 1), floor)
        verdicts = Verdicts()
        for name, kept in own["methods"].items():
            none = np.full((own["splits"], len(task.clients)), np.nan)
            sent = (kept["bytes"]["up"], kept["bytes"]["down"])
            setting = kept["setting"]
            scores = Scores(
                name, none, none[:0], sent, kept["passes"], kept["failed_splits"], setting
            )
            task.scores[name] = scores
            verdicts[name] = Verdict(
                scores,
                Difference(**_known(kept["mean"])),
                *(_known(kept[n]) for n in ("worst_client", "worst_decile")),
                {r: _gain(_known(one)) for r, one in kept["against"].items()},
                None if kept["harmed"] is None else _harm(_known(kept["harmed"])),
            )
        tasks.append((task, verdicts))
    return tasks


def rendered(findings: Findings) -> dict[str, str]:
    """Returns the files of the site that the findings decide."""
    if not findings:
        return {}
    tasks = judged(findings)
    report = Report(findings["size"], tasks, dials=findings["dials"])
    report.answers = {task.name: answer(task, verdicts) for task, verdicts in tasks}
    names = {name for _, verdicts in tasks for name in verdicts}
    stale = [f"{name} ({was})" for name, was in EARLIER.items() if name in names]
    report.notes = [f"The results of {', '.join(stale)} are of earlier defaults."] * bool(stale)
    report.notes += sentences_of(report.dials)
    nothing = {"floor": ("", 0.0), "weak": [], "has_courses": False, "still": [], "needed": []}
    for task, _ in tasks:
        report.notes += lines_of("notes_on_task.txt", task=task, **nothing)
    report.commands, report.libraries = findings["commands"], findings["libraries"]
    return dict(zip(REPORT, (report_page(report), table_csv(report)), strict=True))


def _known(kept: Any) -> Any:
    """Reads what JSON cannot hold: a number that is not known."""
    if isinstance(kept, dict):
        return {name: _known(value) for name, value in kept.items()}
    return math.nan if kept is None else kept


def _gain(one: dict[str, Any]) -> Gain:
    patients, p, word = (*one.pop("patients"),), one.pop("p_holm"), one.pop("verdict")
    return Gain(Difference(**one), word, p, patients)


def _harm(one: dict[str, Any]) -> Harm:
    unknown = (math.nan,) * 3
    gains = {
        c: Gain(Difference(*ends, *unknown), word) for c, (*ends, word) in one["gains"].items()
    }
    shares = (one[name] for name in ("share", "low", "high"))
    return Harm(*shares, (*one["clients"],), (*one["surely"],), gains)


def of_card(findings: Findings, name: str) -> list[str]:
    """The decision card of all tasks."""
    return _minus(card(judged(findings)))


def of_evidence(findings: Findings, name: str) -> list[str]:
    """All tables of real hospitals."""
    return list(_script("evidence")["pages"](_stored("evidence")))


def of_privacy(findings: Findings, name: str) -> list[str]:
    """Scores by epsilon, and what an attack finds."""
    return list(_script("frontier")["table"](_stored("frontier"), name))


def of_detection(findings: Findings, name: str) -> list[str]:
    """Nodules found, by method; or in pairs of a seed and a hospital."""
    return list(_script("detection")[name or "table"](_stored("detection")))


def of_methods(findings: Findings, name: str) -> list[str]:
    """Every method's row."""
    files = methods.yamls()
    listed = methods.by_family(methods.method(name, files[name]) for name in files)
    rows = [(f"`{one.name}`", one.kind.card.family, *one.row[1:]) for one in listed]
    head = ("`algorithm=`", "family", *methods.COLUMNS[1:])
    return _rows(head, rows, left=len(head))


def of_references(findings: Findings, name: str) -> list[str]:
    """What each file with an independent loop checks, of which methods."""
    files = methods.yamls()
    named = {methods.method(n, files[n]).kind.__name__: f"`{n}`" for n in files}
    rows = []
    for file in sorted((DOCS.parent / "tests" / "references").glob("test_*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        loaded = {alias.name for node in imports for alias in node.names}
        checked = ", ".join(sorted(named[name] for name in loaded & named.keys()))
        says = (ast.get_docstring(tree) or "").partition("\n")[0]
        tests = [n.name for n in tree.body if isinstance(n, ast.FunctionDef)]
        words = [n.removeprefix("test_").replace("_", " ") for n in tests if n.startswith("test_")]
        if checked:
            rows.append((f"`{file.name}`", checked, says, "; ".join(words)))
    return _rows(("file", "methods", "compares", "its tests"), rows, left=4)


def of_requests(findings: Findings, name: str) -> list[str]:
    """Each kind of request, by the gate's table."""
    meanings, rows = words_for("requests"), list[tuple[str, ...]]()
    for kind, rule in gate.RULES.items():
        tag, every = str(kind.__struct_config__.tag), (*rule.checks, *rule.leaving)
        counts = [check.what for check in every if isinstance(check, gate.Count)]
        holds = [check.__doc__ or "" for check in every if not isinstance(check, gate.Count)]
        keys = ", ".join(f"`{key}`" for key in rule.policy)
        line = (f"`{tag}`", meanings[tag], " ".join(holds), "; ".join(counts), keys, rule.leaves)
        rows.append(line)
    head = ("request", "what it is", "what must hold", "counted", "policy", "what leaves")
    return _rows(head, rows, left=len(head))


def of_readme(findings: Findings, name: str) -> list[str]:
    """The first page, whose links lead into the site; others become text."""
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8").partition("\n## More\n")[0]
    text = text.replace("](docs/", "](")
    return [re.sub(r"(?<!!)\[([^\]]+)\]\((?!#|http)([^)]+)\)", _inside, text)]


def _inside(link: re.Match[str]) -> str:
    path = link[2].partition("#")[0]
    return link[0] if (DOCS / path).exists() and not path.startswith("..") else link[1]


@cache
def _script(name: str) -> dict[str, Any]:
    """The functions of a script of benchmarks/."""
    (path,) = (DOCS.parent / "benchmarks").rglob(f"{name}.py")
    return runpy.run_path(str(path))


@cache
def _stored(name: str) -> Any:
    return json.loads((DOCS / f"{name}.json").read_text(encoding="utf-8"))


KINDS: dict[str, Callable[[Findings, str], list[str]]] = {
    "card": of_card,
    "task": of_task,
    "dial": of_dial,
    "claim": of_claim,
    "tuned": of_tuned,
    "defaults": of_defaults,
    "suites": of_suites,
    "answers": of_answers,
    "kept": of_kept,
    "evidence": of_evidence,
    "privacy": of_privacy,
    "detection": of_detection,
    "methods": of_methods,
    "references": of_references,
    "requests": of_requests,
    "readme": of_readme,
}

if __name__ == "__main__":
    main(sys.argv[1:])
