"""Every command that the documents show is composed as a user would type it; the site is whole."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from medfed.commands.deploy import split
from medfed.commands.help import COMMANDS
from medfed.commands.methods import main
from medfed.commands.site import read
from medfed.config.compose import CONFIG_DIR, composed
from medfed.sites.agreement import Agreed
from tests.pages import DOCS, PAGES, ROOT, write_files

# Where each group's options are explained.
EXPLAINED = {
    "adapters": "starts.md",
    "algorithm": "methods.md",
    "codec": "channel.md",
    "data": "data.md",
    "model": "networks.md",
    "partition": "data.md",
}


def commands(page: Path) -> list[str]:
    matches = (
        re.match(r"\s*(?:\$ )?(medfed|python) (\S+.*?)(?:\s+#.*)?$", line)
        for line in page.read_text().splitlines()
    )
    return list(dict.fromkeys(m[2] for m in matches if m and (m[1] == "medfed" or ".py" in m[2])))


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
    if script == "site":
        assert read(arguments[0], arguments[1:])
        return
    if script == "deploy":
        own, rest = split(arguments)
        if own.onboard is None:
            Agreed.of(rest, own.sites, own.cut)
        return
    if script not in COMMANDS:
        assert (ROOT / script).is_file() or f'title="{script}"' in page.read_text()
    if script in COMMANDS or script.startswith("scripts/"):
        placed = [a for a in arguments if "_FOLDER" not in a]  # of a run that a reader has
        composed([a for a in placed if not a.startswith("-")], name=Path(script).stem)


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
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


def test_the_table_of_methods_is_that_of_the_command(capsys):
    """After a change: ``medfed methods --markdown`` prints it anew."""
    main(["--markdown"])
    assert capsys.readouterr().out in (DOCS / "methods.md").read_text()


def test_every_page_is_in_the_navigation():
    def files(entries):
        for entry in entries:
            for target in entry.values():
                yield from [target] if isinstance(target, str) else files(target)

    listed = list(files(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(listed) == sorted(str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md"))


def test_the_site_builds_strictly_and_needs_no_network(tmp_path):
    """Strict: also links, anchors and the names of the reference are checked."""
    pytest.importorskip("mkdocs")
    command = ["mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert built.returncode == 0, built.stdout + built.stderr
    fetched = re.compile(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(?:https?:)?//[^"]*')
    pages = sorted(tmp_path.rglob("*.html"))
    assert len(pages) > 20
    assert not [m[0] for page in pages for m in fetched.finditer(page.read_text())]
    for sheet in tmp_path.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//|@import", sheet.read_text())
    assert (tmp_path / "search" / "search_index.js").is_file()  # what a page from disk can load


def tables():
    """The script that writes the tables of the pages."""
    spec = importlib.util.spec_from_file_location("tables", DOCS / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_stands_in_tables_is_what_the_benchmark_found():
    """After a benchmark: ``python docs/tables.py REPORT`` writes them anew."""
    script = tables()
    findings = script.found(DOCS / "benchmark")
    marked = [page for page in sorted(DOCS.rglob("*.md")) if "<!-- table: " in page.read_text()]
    assert len(marked) >= 4
    for page in marked:
        text = page.read_text()
        assert text.count("<!-- table: ") == text.count("<!-- end -->"), page.name
        assert script.filled(text, findings) == text, f"{page.name}: python docs/tables.py"
        for asked in re.findall(r"<!-- table: (\w+) ?([^ ]*) -->", text):
            known = {
                "claim": DOCS.parent / "benchmarks/evidence/claims",
                "task": CONFIG_DIR / "suites",
            }
            folder = known.get(asked[0].replace("dial", "task"))
            assert folder is None or (folder / f"{asked[1]}.yaml").is_file(), asked


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
        "title": "", "situation": "", "same": True, "clients": ["a"], "overlap": 0, "splits": 2,
        "tested_patients": 9, "metric": "rmse", "smaller_is_better": True,
        "methods": methods, "left_out": [],
        "floor": {"value": 5.0}, "in_one_place": {"value": None, "low": None, "high": None},
    }  # fmt: skip
    claim = {
        "claim": "So.", "source": "A", "verdict": "refuted", "reasons": [], "parts": [
            {"asks": "a | b", "where": "x/y", "answer": "no", "mean": -0.5, "low": None,
             "high": None, "bound": -0.02, "note": ""}
        ],
    }  # fmt: skip
    found = {"tasks": {"x/y": task, "x/z": task}, "claims": {"c": claim}, "dials": {}, "size": "s"}
    found["kept"] = {"k": {"head": ["seed", "rmse"], "rows": [[0, "1.0"]]}}

    def lines(kind):
        return script.filled(f"<!-- table: {kind} -->\nold\n<!-- end -->", found).splitlines()

    row = "| fedavg |  | 3.0000 [3.0000, 4.0000] | +0.5000 better | 1.5 kB |"
    assert row in lines("task x")
    assert "| `local` | 3.5000 | 3.5000 |" in lines("dial x")
    assert "| `x/z` | rmse | 5.0000 | – | 3.5000 | 3.0000 | 3.0000 | `fedavg` |" in "\n".join(
        lines("suites")
    )
    assert "| `fedavg` | 0 of 1 | lr 0.3 |" in lines("tuned")
    told = "| it rests on | `x/y` | a \\| b | **no** | −0.5000 |  | −0.02 |"
    assert told in lines("claim c")
    assert "| 0 | 1.0 |" in lines("kept k")
    assert lines("answers")[2].startswith(
        "- `x/y`: FedAvg (3.0000) is better than local training (by"
    )
    with pytest.raises(SystemExit, match="no table is of kind 'tsak'"):
        lines("tsak x")
