"""Who may import whom, and that there is one training loop."""

import ast
import itertools
import re
import sys
import tomllib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "medfed"
PARTS = ("federation", "personalize", "models", "datamodules")
MAY_IMPORT = {
    "federation": (),
    "personalize": ("federation",),
    "personalize/functional": (),
    "models": (),
    "datamodules": (),
}


def imported(path: Path) -> set[str]:
    """The modules that a file imports, also within functions and for type checking."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            module = node.module or ""
            found |= {module, *(f"{module}.{name.name}" for name in node.names)}
    return found


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_arrows(folder):
    own = folder.partition("/")[0]
    forbidden = [p for p in PARTS if p not in (own, *MAY_IMPORT[folder])]
    files = sorted((PACKAGE / folder).rglob("*.py"))
    assert files
    for path in files:
        for module in imported(path):
            wrong = [p for p in forbidden if f"{module}.".startswith(f"medfed.{p}.")]
            assert not wrong, f"{path.relative_to(PACKAGE)} imports {module}"
            if folder == "personalize/functional":
                inside = module.startswith(("medfed.personalize.functional", "medfed.errors"))
                assert inside or not module.startswith("medfed."), f"{path.name} imports {module}"


def test_backward_is_called_in_one_place():
    calls = [
        str(path.relative_to(PACKAGE))
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("backward", "manual_backward")
    ]
    assert calls == ["federation/training.py"]


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
    }
    known = {*sys.stdlib_module_names, "medfed"}
    for path in sorted(PACKAGE.rglob("*.py")):
        for module in imported(path):
            root = module.partition(".")[0]
            name = distributions.get(root, root).lower()
            assert root in known or name in declared, f"{path.name} imports {root}"
