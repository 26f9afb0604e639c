"""The house: no cycle, one training loop, declared packages; pyproject.toml has the layers."""

import ast
import functools
import itertools
import re
import runpy
import sys
import tomllib
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "medfed"
FILES = {
    ".".join(("medfed", *p.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): p
    for p in sorted(PACKAGE.rglob("*.py"))
}


def imported(path: Path) -> set[str]:
    """The modules that a file imports, also within functions and for type checking."""
    return imported_by(ast.parse(path.read_text(encoding="utf-8")), path)


def imported_by(tree: ast.AST, path: Path) -> set[str]:
    """The modules that a part of a file imports."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                assert path.parent.name == "standalone", f"{path} has a relative import"
                module = f"medfed.standalone{'.' * bool(module)}{module}"
            found |= {
                full if (full := f"{module}.{name.name}") in FILES else module
                for name in node.names
            }
    return found


@functools.cache
def imports() -> dict[str, set[str]]:
    return {module: imported(path) for module, path in FILES.items()}


def room(module: str) -> str:
    """The folder of the package in which a module lies, or the module itself at the top."""
    return module.split(".")[1] if "." in module else ""


def test_no_cycle():
    graph = nx.DiGraph((m, o) for m, others in imports().items() for o in others if o in FILES)
    cycles = [sorted(c) for c in nx.strongly_connected_components(graph) if len(c) > 1]
    assert not cycles


@pytest.mark.parametrize(
    ("door", "folders", "before"),
    [
        ("method", ["personalize"], ()),
        (
            "datamodules.extending",
            [
                f"datamodules/{folder}"
                for folder in ("", "generated", "readers", "partitions", "tables")
            ],
            (
                *("readers/base.py", "readers/persons.py", "splits.py", "extending.py"),
                "segmentation.py",
            ),
        ),
    ],
    ids=["methods", "data"],
)
def test_extensions_take_what_they_are_written_with_from_one_module(door, folders, before):
    """None imports from elsewhere what that module gives; its groups name all of it.

    `before`: the files that it imports itself.
    """
    tree = ast.parse((PACKAGE / f"{door.replace('.', '/')}.py").read_text(encoding="utf-8"))
    imported = (n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom))
    given = {alias.asname or alias.name for n in imported for alias in n.names}
    (listed,) = (ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign))
    assert sorted(listed) == sorted(given - {"annotations"})
    for path in sorted(p for folder in folders for p in (PACKAGE / folder).glob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        names = {
            alias.asname or alias.name
            for node in nodes
            if isinstance(node, ast.Import)
            or (isinstance(node, ast.ImportFrom) and node.module != f"medfed.{door}")
            for alias in node.names
        }
        assert path.as_posix().endswith(before) or not names & set(listed), path.name


LATE = {
    *("scipy", "sklearn", "pandas", "networkx", "numba", "statsmodels", "skimage"),
    *("nibabel", "SimpleITK", "pydicom", "highdicom", "pynrrd", "onnx", "onnxruntime"),
}
FIRST = {"torch", "monai", "pytorch_lightning", "matplotlib"}  # most runs need these
ANSWERING = ("deploy", "export", "help", "hospital", "main", "methods", "predict", "report", "site")
NEEDED = {"doctor": {"numba"}, "study": {"scipy"}}
# What a command must not import before its own work asks for it.
WITHOUT = {
    path.stem: (LATE | (FIRST if path.stem in ANSWERING else set())) - NEEDED.get(path.stem, set())
    for path in sorted((PACKAGE / "commands").glob("[a-z]*.py"))
}


@functools.cache
def at_once(module: str, late: bool = False) -> set[str]:
    """The modules that one imports when it is imported; with `late` also within functions."""
    found, nodes = set(), [ast.parse(FILES[module].read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            alone = ast.Module([node], [])
            found |= imported_by(alone, FILES[module])
        skipped = isinstance(node, ast.FunctionDef) and not late
        if not skipped and not (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        ):
            nodes += ast.iter_child_nodes(node)
    return found


def ways_to(libraries: set[str], start: dict[str, str]) -> list[str]:
    """How a library is reached from some modules by what is imported at once."""
    waiting, ways = [*start], []
    while waiting:
        way = start[module := waiting.pop()]
        ways += [f"{way} < {module}"] if module.split(".")[0] in libraries else []
        within = itertools.accumulate(module.split("."), "{}.{}".format)  # its packages, too
        for name in within if module in FILES else ():
            for other in at_once(name) - start.keys() if name in FILES else ():
                start[other] = f"{module} < {way}"
                waiting.append(other)
    return ways


@pytest.mark.parametrize("command", WITHOUT)
def test_no_command_waits_for_a_library_that_few_runs_need(command):
    module = f"medfed.commands.{command}"
    start = dict.fromkeys({module, *at_once(module, late=True)}, command)
    assert not (ways := ways_to(WITHOUT[command], start)), ways


def test_no_part_that_a_configuration_names_waits_for_a_library_that_few_runs_need():
    named = "".join(path.read_text() for path in (ROOT / "configs").rglob("*.yaml"))
    parts = {part for part in re.findall(r"_target_: (medfed\.\S+)\.\w+", named) if part in FILES}
    assert len(parts) > 100
    parts -= {part for part in parts if ".generated." in part}  # which are made up
    assert not (ways := ways_to(LATE, dict.fromkeys(parts, "configs"))), ways


def test_the_federation_draws_nothing():
    """Neither the rounds nor what travels need a plotting library."""
    for module, others in imports().items():
        if room(module) in ("common", "functional", "config", "federation"):
            allowed = module == "medfed.common.figures"
            assert allowed or not any(o.startswith("matplotlib") for o in others), module


def test_backward_is_called_in_one_place():
    calls = [
        str(path.relative_to(PACKAGE))
        for path in FILES.values()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("backward", "manual_backward")
    ]
    assert calls == ["federation/engine/gradients.py"]


def test_every_imported_package_is_declared():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    extras = {e: d for e, d in project["optional-dependencies"].items() if e != "dev"}
    wanted = [*project["dependencies"], *itertools.chain(*extras.values())]
    declared = {re.split(r"[<>=!~\[ ]", d)[0].lower() for d in wanted}
    distributions = {
        "PIL": "pillow",
        "sklearn": "scikit-learn",
        "yaml": "pyyaml",
        "hydra": "hydra-core",
        "pytorch_lightning": "pytorch-lightning",
        "dynamic_network_architectures": "dynamic-network-architectures",
    }
    known = {*sys.stdlib_module_names, "medfed"}
    for module, others in imports().items():
        for other in others:
            root = other.partition(".")[0]
            name = distributions.get(root, root).lower()
            assert root in known or name in declared, f"{module} imports {root}"


def test_the_picture_of_the_house_is_of_todays_imports_and_words():
    """After a change: ``python docs/house_picture.py``."""
    script = runpy.run_path(str(ROOT / "docs/house_picture.py"))
    assert f">{script['described']()}<" in (ROOT / "docs/house.svg").read_text()


def test_the_way_through_the_house_leads_to_files():
    page = (ROOT / "docs/design.md").read_text()
    files = re.findall(r"`([a-z]+/[a-z_/]+\.py)`", page)
    assert len(files) > 15
    assert all((ROOT / "medfed" / f).exists() or (ROOT / f).exists() for f in files)


def test_each_question_of_the_house_is_answered_by_functions_that_are_there():
    house = runpy.run_path(str(ROOT / "benchmarks/project/house.py"))
    answers = house["questions"](ROOT)
    assert len(answers) == 6
    for file, names in itertools.chain.from_iterable(answers.values()):
        for name in names:
            assert house["spans"](PACKAGE / file, name), f"docs/design.md: {file} has no {name}"
    counts = [count for _, count in house["reading"](ROOT)]
    assert all(0 < read < opened for opened, read in zip(counts[::2], counts[1::2], strict=True))


# Where a docstring is sentences and an example; `functional` and methods list all arguments.
BRIEF = {"benchmark", "commands", "common", "config", "datamodules", "models", "records"}
BRIEF |= {"delivery", "federation", "reports", "sites", "standalone", "studies"}
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields):$", re.MULTILINE)


def test_docstrings_have_sections_where_a_page_shows_them():
    pages = "".join(page.read_text() for page in (PACKAGE.parent / "docs").rglob("*.md"))
    shown = tuple(f"{name}." for name in re.findall(r"^::: (\S+)", pages, re.MULTILINE))
    for module, path in FILES.items():
        for top in ast.parse(path.read_text()).body if room(module) in BRIEF else []:
            if f"{module}.{getattr(top, 'name', '')}.".startswith(shown):
                continue
            parts = (n for n in ast.walk(top) if isinstance(n, ast.FunctionDef | ast.ClassDef))
            wordy = [n.name for n in parts if SECTION.search(ast.get_docstring(n) or "")]
            assert not wordy, f"{path}: say the arguments of {wordy[0]} in sentences"


# Participles that say nothing of what a thing is, and the files that may not give them up: each
# is a user's key, a key of a file or a message, or a term of the field (unseen patients).
VAGUE = {"own", "found", "said", "held", "seen", "given", "kept", "asked", "shown", "settled"}
WRITTEN = {
    "benchmark/absence.py": {"seen"},
    "datamodules/planning.py": {"kept"},
    "datamodules/tables/agreement.py": {"kept"},
    "personalize/fedamp.py": {"own"},
    "personalize/perfedavg.py": {"held"},
    "run/audit.py": {"own", "found"},
    "sites/wire.py": {"given"},
}


def names_given(tree: ast.AST) -> set[str]:
    """The names that a file binds: of functions, classes, arguments, variables, attributes."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def test_names_are_nouns_and_verbs():
    for path in FILES.values():
        vague = {
            n for n in names_given(ast.parse(path.read_text())) if n.lower().strip("_") in VAGUE
        }
        place = path.relative_to(PACKAGE).as_posix()
        assert vague == WRITTEN.get(place, set()), f"{path}: name what it is, not {sorted(vague)}"
