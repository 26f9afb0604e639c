"""The short tier keeps nine of ten cases, and something of everything that the README promises."""

from __future__ import annotations

import json

import pytest

from tests import changed, tiers

PROMISES = {
    "the first example",
    "resume after a kill",
    "two ranks",
    "a site",
    "a bundle of a network of one's own",
    "a report",
    "a dead rank",
    "the wheel",
    "settings are checked first",
}


def test_nine_of_ten_cases_are_short():
    measured = json.loads(tiers.RECORD.read_text())
    assert len(measured["cases"]) <= 0.1 * measured["all"]


def test_short_cases_and_the_rest_are_all(request):
    items = request.session.items
    short, rest = tiers.of_tier(items, "short")
    assert sorted(i.nodeid for i in (*short, *rest)) == sorted(i.nodeid for i in items)


def test_each_promise_and_each_hostile_family_has_a_short_case(request):
    if len(request.session.items) < 3000:
        pytest.skip("a part of the tests runs")
    short, _ = tiers.of_tier(request.session.items, "short")
    marked = {m.args[0] for item in short for m in item.iter_markers("promise")}
    assert marked == PROMISES
    families = {path.name for path in tiers.RECORD.parent.glob("hostile/test_*.py")}
    assert families <= {item.path.name for item in short if item.path.parent.name == "hostile"}


@pytest.mark.parametrize(
    ("path", "tested", "untested"),
    [
        ("tests/toys.py", "tests/federation/test_training.py", "tests/test_docs.py"),
        ("medfed/functional/lasso.py", "", "tests/datamodules/test_splits.py"),
        (
            "medfed/personalize/fedprox.py",
            "tests/contract/test_contract.py",
            "tests/functional/test_prox.py",
        ),
        (
            "medfed/delivery/bundle/onnx_file.py",
            "tests/delivery/test_onnx.py",
            "tests/functional/test_prox.py",
        ),
        ("configs/algorithm/ditto.yaml", "tests/test_config.py", "tests/functional/test_prox.py"),
        ("docs/index.md", "tests/test_docs.py", "tests/test_config.py"),
    ],
)
def test_a_change_runs_what_it_can_break(path, tested, untested):
    files = changed.tests_of([path])
    assert files is not None
    assert not tested or tested in files
    assert untested not in files


def test_a_change_of_the_settings_of_all_tests_runs_all():
    assert changed.tests_of(["docs/index.md", "tests/conftest.py"]) is None


def test_a_change_reaches_who_imports_it_through_others():
    """The set is that of a walk over the sources by the standard library's parser."""
    import ast

    def imports(path):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                yield node.module
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)

    paths = (p.relative_to(changed.ROOT) for p in (changed.ROOT / "medfed").glob("**/*.py"))
    files = {changed._module(str(path)): changed.ROOT / path for path in paths}
    target = "medfed.functional.graph"
    reached, before = {target}, 0
    while len(reached) > before:
        before = len(reached)
        reached |= {name for name, path in files.items() if reached & set(imports(path))}
    assert reached <= {*changed._importers(target)}
