"""Every command that the documents show is composed as a user would type it; the site is whole.

What the documents say of the tree itself, such as a network's parameters, is that of the tree.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console

from medfed.commands.deploy import split
from medfed.commands.help import COMMANDS
from medfed.commands.methods import method, words, yamls
from medfed.commands.site import read
from medfed.config.compose import CONFIG_DIR, build, load
from medfed.federation.algorithm import Algorithm
from medfed.federation.card import Card
from medfed.federation.client import Client
from medfed.federation.split import ParameterSplit
from medfed.models.networks.personal_part import default_personal
from medfed.records.places import Places
from medfed.reports.sentences import card
from medfed.run.prepare import split_tree
from medfed.sites import policy
from medfed.sites.agreement import Agreed
from tests.checking import composed
from tests.pages import DOCS, PAGES, ROOT, write_files

# Where each group's options are explained.
EXPLAINED = {
    "adapters": "networks.md",
    "algorithm": "methods.md",
    "codec": "channel.md",
    "data": "data.md",
    "model": "networks.md",
    "partition": "data.md",
    "suites": "benchmark.md",
}
MARK = re.compile(r"<!-- table: (\w+) ?([^ ]*) -->")
NO_TABLES = ("answers", "undecided", "readme")  # lists, a page
MOST_WORDS = 50_000
CLIENTS = r"\bclient\.([a-z]\w*)"  # in an example of a method, or in a sentence
# Numbers of things in the tree, which change with it; results count the methods of a task.
COUNTED = re.compile(
    r"\b(?:\d[\d,]*\d|[a-z]*teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty(?:-\w+)?|dozens?)\s+"
    r"(?:methods|codecs|experiments|suites|partitions|readers|models|losses|files|modules|lines"
    r"|commands|keys|tests|mutations|benchmarks|scripts|pages|words)\b"
)
COUNTS_OF_RESULTS = {"evidence.md", "speed.md"}


def commands(page: Path) -> list[str]:
    matches = (
        re.match(r"\s*(?:\$ )?(medfed|python) (\S+.*?)(?:\s+#.*)?$", line)
        for line in page.read_text().splitlines()
    )
    lines = [m[2] for m in matches if m and (m[1] == "medfed" or ".py" in m[2])]
    return list(dict.fromkeys([*lines, *in_sentences(page)]))


def in_sentences(page: Path) -> list[str]:
    """The commands in running text, which may be parts of one; those of sites need files."""
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    shown = re.findall(r"`medfed ([a-z]+ [^`\n…]+)`", prose)
    shown = [line for line in shown if line.split()[0] in {*COMMANDS} - {"deploy", "init"}]
    return [re.sub(r"--help|RUN_FOLDER/\S+", "", command) for command in shown]


@pytest.mark.parametrize("page", [p for p in PAGES if commands(p)], ids=lambda page: page.stem)
def test_commands_compose(page, tmp_path, monkeypatch, subtests):
    monkeypatch.setattr(sys, "path", [*sys.path])
    for command in commands(page):
        with subtests.test(command=command):
            composes(page, command, tmp_path)


def composes(page, command, tmp_path):
    if "MY_FOLDER" in command:
        command = command.replace("MY_FOLDER", str(write_files(page, tmp_path)))
    script, *arguments = shlex.split(command)
    if script == "init":
        return  # its keys are those of train: tests/integration/test_init.py
    if script == "methods":
        assert {*arguments} <= {
            word for name, yaml in yamls().items() for word in words(name, yaml)
        }
        return
    if script == "site":
        assert read(arguments[0], arguments[1:])
        return
    if script == "deploy":
        own, rest = split(arguments)
        if own.onboard is None and own.provision is None:  # a federation has no study yet
            Agreed.of(rest, own.sites, own.cut)
        return
    if script not in COMMANDS:
        assert (ROOT / script).is_file() or f'title="{script}"' in page.read_text()
    if script in COMMANDS or script.startswith("scripts/"):
        # What a reader has: a run, or weights.
        here = [
            f"init.weights={tmp_path}" if a.startswith("init.weights=") else a for a in arguments
        ]
        placed = [a for a in here if "_FOLDER" not in a]
        composed([a for a in placed if not a.startswith("-")], name=Path(script).stem)


def test_links_lead_somewhere():
    made = {f"benchmark/{name}" for name in tables().REPORT}
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http") and target.removeprefix("../") not in made:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make (\w+)", (ROOT / "README.md").read_text())):
        assert f"\n{target}:" in makefile


@pytest.mark.parametrize("group", EXPLAINED)
def test_every_option_is_explained(group):
    text = (DOCS / EXPLAINED[group]).read_text()
    for option in (p.stem for p in (CONFIG_DIR / group).glob("*.yaml")):
        assert re.search(rf"(`|{group}=){option}\b", text), f"{EXPLAINED[group]} lacks {option}"


def test_every_page_is_in_the_navigation():
    def files(entries):
        for entry in entries:
            for target in entry.values():
                yield from [target] if isinstance(target, str) else files(target)

    listed = list(files(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(listed) == sorted(str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md"))


def test_the_documents_are_short():
    words = {p.relative_to(DOCS): len(p.read_text().split()) for p in DOCS.rglob("*.md")}
    assert sum(words.values()) <= MOST_WORDS, sorted(words.items(), key=lambda w: -w[1])[:5]


def test_the_site_builds_strictly_and_needs_no_network(tmp_path, monkeypatch):
    """Strict: also links, anchors and the names of the reference are checked."""
    load_config = pytest.importorskip("mkdocs.config").load_config
    written = pytest.importorskip("mkdocs.commands.build").build
    monkeypatch.setenv("REPORT", "false")  # its pictures take seconds
    written(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path)))
    fetched = re.compile(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(?:https?:)?//[^"]*')
    pages = {page: page.read_text() for page in sorted(tmp_path.rglob("*.html"))}
    assert len(pages) > 20
    assert not [m[0] for text in pages.values() for m in fetched.finditer(text)]
    for sheet in tmp_path.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//|@import", sheet.read_text())
    assert (tmp_path / "search" / "search_index.js").is_file()  # what a page from disk can load
    assert not [p.name for p, text in pages.items() if "Not measured yet" in text]
    assert not [p.name for p, text in pages.items() if "<!-- table" in text]
    raw = re.compile(r"<p>(?:(?!</p>|<pre).)*?^\s*(?:[-|] |```)", re.MULTILINE | re.DOTALL)
    assert not [(p.name, m[0]) for p, text in pages.items() for m in raw.finditer(text)]
    for source in sorted(DOCS.rglob("*.md")):
        site = pages[(tmp_path / source.relative_to(DOCS)).with_suffix(".html")]
        kinds = [kind for kind, _ in MARK.findall(source.read_text())]
        assert site.count("<table>") >= len([k for k in kinds if k not in NO_TABLES]), source.name
    row = r"<td><code>pfednet</code></td>\s*<td>similar clients</td>"
    assert re.search(row, pages[tmp_path / "methods_table.html"])
    assert "make demo" in pages[tmp_path / "index.html"]  # of README


@cache
def tables() -> ModuleType:
    """The hook that fills in the tables of the pages."""
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("tables", DOCS / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_table_is_asked_for_by_a_name_that_exists():
    claims = {p.stem for p in (ROOT / "benchmarks").rglob("claims/*.yaml")}
    asked = [pair for page in DOCS.rglob("*.md") for pair in MARK.findall(page.read_text())]
    assert len(asked) > 30
    assert {name for kind, name in asked if kind == "claim"} == claims
    assert {kind for kind, _ in asked} == {*tables().KINDS}
    suites = {p.stem: p.read_text() for p in (CONFIG_DIR / "suites").glob("*.yaml")}
    assert {name for kind, name in asked if kind in ("task", "dial")} <= {*suites}
    for page in DOCS.rglob("*.md"):
        text = page.read_text()
        made = [n for _, n in MARK.findall(text) if "(generated)" in suites.get(n, "")]
        assert not made or "generated" in text, f"{page.name} must call {made} generated"


def test_each_line_of_the_card_has_a_line_in_words():
    """After a benchmark: these lines are written by hand, and so is their change."""
    table = card(tables().judged(tables().found(DOCS / "benchmark")))
    rows = [dict(zip(table.head, (c.text for c in row), strict=True)) for row in table.rows]
    page = [line for line in (DOCS / "results.md").read_text().splitlines() if line[:1] == "|"]
    words = [line.strip("| ").split(" | ") for line in page]
    by_hand = {(place, data.partition(":")[0]): shown for place, data, shown in words[2:17]}
    extra = {("many hospitals of few patients", "real")}
    assert {*by_hand} == {(row["situation"], row["data"]) for row in rows} | extra
    titles = {"pfednet": "pFedNet", "ppfl": "PPFL", "fedrep": "FedRep"}
    for row in rows:
        shown = by_hand[row["situation"], row["data"]]
        gains = {
            name: " to ".join(
                dict.fromkeys(f"{float(n):.2f}" for n in re.findall(r"\+([\d.]+) \[", row[name]))
            )
            for name in ("over local training", "over FedAvg")
        }
        alone, average = gains.values()
        best = row["best shown"]
        if best == "none":
            assert shown.startswith("none: ")
        elif best == "local training":
            assert shown.startswith(f"FedAvg loses {average} against training alone")
        else:
            name = titles.get(best, best)
            assert shown.startswith(f"{name} gains {alone} over training alone")
            assert best == "FedAvg" or "bytes" in shown or f"{average} over FedAvg" in shown
        times = re.search(r"([\d.]+ to )?[\d.]+ times FedAvg's", row["cost of a run"])
        assert "bytes" not in row["situation"] or f"{times[0]} bytes" in shown


def test_what_a_task_cannot_tell_is_over_the_method_that_it_names():
    for line in tables().of_answers(tables().found(DOCS / "benchmark"), ""):
        best = "No method is shown to be better than FedAvg" in line
        room = re.search(r"gains?( over FedAvg)? of [\d.]+ (?:or more|would be)", line)
        assert room is None or (room[1] is not None) == best, line


def test_pages_of_stored_runs_have_the_seeds_that_they_name():
    frontier, detection = (tables()._stored(name) for name in ("frontier", "detection"))
    runs = [m for cohort in frontier.values() for m in cohort["runs"].values()]
    assert {len(seeds) for by_bound in runs for seeds in by_bound.values()} == {5}
    assert {len(seeds) for seeds in detection.values()} == {5}
    named = {
        n for k, n in MARK.findall((DOCS / "results/privacy.md").read_text()) if k == "privacy"
    }
    assert named == {*frontier}


def test_what_the_pages_count_is_counted():
    """Of the tree they name no number that no test holds."""
    for page in PAGES:
        if page.name not in COUNTS_OF_RESULTS and "results" not in page.parts:
            found = [m[0] for m in COUNTED.finditer(page.read_text())]
            assert not found, f"{page.name}: {found}; leave the number out, or compare it here"


def keys(node, prefix):
    """The dotted names of a file of configs/, below the section that it fills."""
    for name, value in node.items() if isinstance(node, dict) else ():
        yield f"{prefix}{name}"
        yield from keys(value, f"{prefix}{name}.")


def test_the_keys_that_the_pages_name_exist():
    """Those in running text; commands are composed as a whole."""
    known = set()
    for file in CONFIG_DIR.rglob("*.yaml"):
        group = file.relative_to(CONFIG_DIR).parts[0]
        below = "" if group in ("experiment", "suites") or "." in group else f"{group}."
        package = re.search(r"@package\s+(\S+)", text := file.read_text())
        if package:
            below = "" if package[1] == "_global_" else f"{package[1]}."
        known.update(keys(yaml.safe_load(text), below))
    named = re.compile(r"^'?([a-z_]+\.[a-z_.]+?)(?:=|$)")
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        words = (word for code in re.findall(r"`([^`\n]+)`", prose) for word in code.split())
        found = {match[1] for word in words if (match := named.match(word))}
        ours = {k for k in found if k.partition(".")[0] in {n.partition(".")[0] for n in known}}
        files = {
            k
            for k in ours
            if Path(k).suffix in (".json", ".csv", ".yaml", ".py", ".md", ".pt", ".html")
        }
        choices = {k for k in ours if k.startswith(("codec.", "client.", "hydra."))}
        assert not ours - files - choices - known, page.name


def networks():
    """The networks whose parameters their page names, with the data that it names."""
    text, facts = (DOCS / "networks.md").read_text(), {}
    row = re.compile(r"^\| `(\w+)` \| [^|]+ \| ([\d,]+) \(([^)]+)\)", re.MULTILINE)
    for name, count, of in row.findall(text):
        if of != "the same":
            inputs, outputs = re.findall(
                r"(\d+) (?:channels?|regions|classes|findings|anchors)", of
            )
            facts = {"in_channels": int(inputs), "out_channels": int(outputs), "spatial_dims": 2}
        yield pytest.param(name, facts, int(count.replace(",", "")), id=name)


def network(name, facts):
    config = load([f"model={name}", *(f"{key}={value}" for key, value in facts.items())])
    return build(config.model.network, _convert_="all")


@pytest.mark.parametrize(("name", "facts", "count"), [*networks()])
def test_networks_have_the_parameters_that_the_page_names(name, facts, count):
    assert sum(p.numel() for p in network(name, facts).parameters()) == count


def test_networks_of_tables_have_the_parameters_of_the_formula():
    row = re.compile(r"^\| `(\w+)` \| [^|]+ \| ([^|]*features[^|]*) \|", re.MULTILINE)
    found = dict(row.findall((DOCS / "networks.md").read_text()))
    assert len(found) == 6
    for name, formula in found.items():
        outputs = {"logistic": 2, "mlp": 2, "survival": 10}.get(name, 1)
        numbers = re.sub(r"\([a-z ]+\)", "", formula).replace("·", "*")
        numbers = numbers.replace("features", "7").replace("intervals", "10")
        facts = {"in_channels": 7, "out_channels": outputs}
        assert sum(p.numel() for p in network(name, facts).parameters()) == eval(numbers), name


def test_the_tree_of_a_network_is_the_one_that_prepare_shows(capsys):
    built = network("segresnet", {"in_channels": 4, "out_channels": 1, "spatial_dims": 2})
    drawn = split_tree(built, ParameterSplit.of(built, default_personal(built)), "PFedNet")
    Console(width=200).print(drawn)
    assert capsys.readouterr().out.strip() in (DOCS / "networks.md").read_text()


def test_what_a_method_writes_and_declares_has_the_names_that_the_page_gives():
    text = (DOCS / "extending" / "algorithm.md").read_text()
    cells = re.findall(r"^\| (`[^|]+`) \|", text[text.index("## What you must write") :], re.M)
    names = {name for cell in cells for name in re.findall(r"`(?:card\.)?(\w+)", cell)}
    known = {name for kind in (Algorithm, Card) for name in dir(kind)}
    known |= {*Algorithm.__annotations__, *Card.__annotations__}
    assert len(names) > 12
    assert names <= known


def coded():
    """The codecs and the bits per element that their page names."""
    row = re.compile(r"^\| ((?:`\w+`(?:, )?)+) \| [^|]+ \| ([\d., ]+) \|", re.MULTILINE)
    for names, bits in row.findall((DOCS / "channel.md").read_text()):
        each = bits.split(", ")
        for i, name in enumerate(re.findall(r"\w+", names)):
            yield pytest.param(name, each[min(i, len(each) - 1)].strip(), id=name)


@pytest.mark.parametrize(("name", "bits"), [*coded()])
def test_codecs_take_the_bits_that_the_page_names(name, bits):
    rng = np.random.default_rng(0)
    values = torch.from_numpy(rng.standard_normal(100_000))
    codec = build(load([f"codec.up={name}"]).codec.up)
    found = 8 * len(codec.encode(values, rng)) / len(values)
    digits = len(bits.partition(".")[2])
    assert found == pytest.approx(float(bits), abs=0.6 * 10**-digits, rel=0.02)


def test_a_default_is_measured_against_the_search_less_what_the_rate_alone_gains():
    def trials(*scores, key="algorithm.strength"):
        settings = ({}, {"optimizer.lr": 0.1, key: 2.0}, {"optimizer.lr": 0.3, key: 3.0})
        return {
            "trials": [{"setting": s, "score": v} for s, v in zip(settings, scores, strict=True)]
        }

    plain = {n: trials(0.5, 0.6, 0.4, key="optimizer.momentum") for n in ("local", "fedavg")}
    methods = {**plain, "ditto": trials(0.5, 0.8, 0.3), "apfl": trials(None, 0.8, 0.3)}
    default = yaml.safe_load((DOCS.parent / "configs/algorithm/fedprox.yaml").read_text())["mu"]
    methods["fedprox"] = trials(0.5, 0.6, 0.4, key="algorithm.mu")
    for trial in methods["fedprox"]["trials"][1:]:  # drawn, and yet the default
        trial["setting"]["algorithm.mu"] = default
    ends = {"floor": {"value": 0.5}, "in_one_place": {"value": 1.0}}
    other = {**plain, "ditto": trials(0.5, 0.59, 0.45)}
    tasks = {"x/y": {**ends, "methods": methods}, "y/z": {**ends, "methods": other}}
    found = {"tasks": {**tasks, "x/other": {**ends, "methods": {"ditto": {}}}}}
    # Of x/y 0.3 less 0.1 and -0.2 less -0.1, of y/z 0.09 less 0.1 and -0.05 less -0.1, over 0.5.
    row = "| `ditto` | strength 2 | 1 of 2 | +0.190 | −0.020 |"
    assert tables().of_defaults(found, "")[2:] == [row]


def test_tables_hold_the_numbers_of_the_findings():
    script = tables()
    mean = {"mean": -3.5, "low": -4.0, "high": -3.0, "p": 0.1, "error": 0.2, "detectable": None}
    other = {**mean, "mean": -3.0}
    against = {
        "local": {**mean, "mean": 0.5, "verdict": "better", "p_holm": 0.01, "patients": [0.1, 0.9]}
    }
    base = {"harmed": None, "bytes": {"up": 1200, "down": 300}, "setting": {}}
    base |= {"worst_client": -5, "worst_decile": None, "passes": 1, "failed_splits": 0}
    methods = {
        "local": {"mean": mean, "against": {}, **base},
        "fedavg": {"mean": other, "against": against, **base, "setting": {"optimizer.lr": 0.3}},
    }
    task = {
        "title": "", "situation": "", "data": "real", "same": True, "clients": ["a"],
        "overlap": 0, "splits": 2,
        "tested_patients": 9, "metric": "rmse", "smaller_is_better": True,
        "methods": methods, "left_out": [],
        "floor": {"value": 5.0}, "in_one_place": {"value": None, "low": None, "high": None},
    }  # fmt: skip
    claim = {
        "claim": "So.", "source": "A", "verdict": "refuted", "reasons": [], "parts": [
            {"asks": "a | b", "where": "x/y", "answer": "no", "mean": -0.5, "low": None,
             "high": None, "bound": -0.02, "p": 0.0421, "note": ""}
        ],
    }  # fmt: skip
    found = {"tasks": {"x/y": task, "x/z": task}, "claims": {"c": claim}, "dials": {}, "size": "s"}
    found["kept"] = {"k": {"head": ["seed", "rmse"], "rows": [[0, "1.0"]]}}

    def lines(kind):
        return script.filled(f"<!-- table: {kind} -->", found).splitlines()

    row = "| fedavg |  | 3.0000 [3.0000, 4.0000] | +0.5000 better | 0.010 | 1.5 kB |"
    assert row in lines("task x")
    assert "| `local` | 3.5000 | 3.5000 |" in lines("dial x")
    assert (
        "| `x/z` (real) | rmse | 5.0000 | – | 3.5000 | 3.0000 | 3.0000 | `fedavg` |"
        in "\n".join(lines("suites"))
    )
    assert "| `fedavg` | 0 of 1 | lr 0.3 |" in lines("tuned")
    for kind in ("task x", "dial x", "claim c", "tuned", "suites", "card", "answers"):
        assert "real" in script.filled(f"<!-- table: {kind} -->", found)
    told = "| it rests on | `x/y` (real) | a \\| b | **no** | −0.5000 |  | −0.02 | 0.042 |"
    assert told in lines("claim c")
    assert "| 0 | 1.0 |" in lines("kept k")
    assert lines("answers")[0].startswith(
        "- `x/y` (real): FedAvg (3.0000) is better than local training (by"
    )
    with pytest.raises(SystemExit, match="no table is of kind 'tsak'"):
        lines("tsak x")


def test_the_pages_name_what_methods_may_ask_of_a_client():
    known = {*dir(Client), *Client.__annotations__}
    named = {(page.name, n) for page in PAGES for n in re.findall(CLIENTS, page.read_text())}
    assert len(named) > 5
    assert not [f"{page}: client.{n}" for page, n in named if n not in known]


def methods_in(page, first, last):
    """The methods that a page names between two pieces of its text, of which one ends it."""
    text = (DOCS / page).read_text()
    start = text.index(first)
    named = re.findall(r"`(\w+)`", text[start : text.index(last, start)])
    return {*named} & {*yamls()}


def test_the_pages_name_the_methods_that_a_key_refuses_or_covers():
    """By what the methods declare, so that a new one must be named, too."""
    kinds = {name: method(name, file).kind for name, file in yamls().items()}
    refused = {n for n, kind in kinds.items() if kind.card.privacy_exposure != "gradients"}
    assert methods_in("privacy.md", "Methods that compare losses", "sketches (choose") == refused
    moments = {n for n, kind in kinds.items() if vars(kind).get("averages_moments")}
    assert methods_in("methods.md", "`local.optimizer_state=averaged` has", "with Adam") == moments
    sums = {n: {*kind.parts_averaged} for n, kind in kinds.items()}
    partly = {kinds[n].__name__ for n in sums if sums[n] and sums[n] != {*kinds[n].parts_sent}}
    for page in ("channel.md", "sites.md"):
        named = re.findall(r"Of (\w+), (\w+) and (\w+)[^.]*part", (DOCS / page).read_text())
        assert [{*map(str.lower, each)} for each in named] == [{*map(str.lower, partly)}], page


def test_a_method_has_the_key_mask_aware_where_it_is_defined():
    for name, file in yamls().items():
        kind = method(name, file).kind
        defined = bool(kind.parts_sent) and kind.supports_missing_channels
        assert ("mask_aware" in yaml.safe_load(file.read_text())) == defined, name


def test_scripts_have_the_options_that_the_pages_show():
    shown = re.compile(r"python ((?:benchmarks|docs|scripts)/[\w/]+\.py)((?: [^`\n#]+)?)")
    found = {pair for page in PAGES for pair in shown.findall(page.read_text())}
    assert len(found) > 40
    for script, arguments in found:
        source = (ROOT / script).read_text()
        options = re.findall(r"(?<= )--[\w-]+", arguments)
        missing = [option for option in options if f'"{option}"' not in source]
        assert not missing, f"{script} has no option {missing}"


INTERNAL = (".lock", ".lock.pid", "job.json", "validation.json")  # what no person opens


def test_the_pages_name_the_files_of_a_run_folder_and_of_a_site():
    """What is there may hold patients, or must not be lost."""
    code = "\n".join(c for page in PAGES for c in re.findall(r"`([^`\n]+)`", page.read_text()))
    places = {str(getattr(Places, name)) for name in vars(Places) if not name.startswith("_")}
    files = {name for name in places if name not in INTERNAL and "/" not in name} - {"folder"}
    assert len(files) > 30
    lacking = [name for name in sorted(files) if not re.search(rf"\b{re.escape(name)}\b", code)]
    assert not lacking, lacking
    for name in (policy.SPENT, policy.COUNTED, policy.PATIENTS, policy.NUMBERS):
        assert f"`{name}`" in (DOCS / "it.md").read_text(), name
    held = re.search(r"\| run folder \|.*", (DOCS / "export.md").read_text())[0]
    assert "`predictions`" in held
    assert "`checkpoints`" in held
