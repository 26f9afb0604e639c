"""Before its first step, a run has imported nothing that only its end or few runs need."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LATE = ("matplotlib", "wandb", "scipy", "sklearn", "networkx", "SimpleITK", "nibabel", "pandas")


def at_once(module: str) -> set[str]:
    """What a module of ours imports when it is imported, not what its functions do."""
    path = ROOT / Path(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module))
    return found


@pytest.mark.parametrize(
    "start",
    [
        "medfed.run.train",
        "medfed.models.classification",
        "medfed.models.regression",
        "medfed.models.segmentation",
    ],
)
def test_training_imports_no_plotting_nor_statistics(start):
    reached, found = set(), {start}
    while found - reached:
        module = (found - reached).pop()
        reached.add(module)
        found |= {m for m in at_once(module) if m.startswith("medfed.")}
    ours = [m for m in reached if m.split(".")[1] in ("run", "models", "common")]
    assert len(ours) > 3
    late = {m: [o for o in at_once(m) if o.split(".")[0] in LATE] for m in ours}
    assert {m: others for m, others in late.items() if others} == {}
