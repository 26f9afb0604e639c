"""Naming a method must not load what only some runs need: a hospital may have none of it."""

from __future__ import annotations

import re

from medfed.config.compose import CONFIG_DIR
from tests.processes import with_torch

HEAVY = (
    *("numba", "scipy", "networkx", "matplotlib", "sklearn", "pandas"),
    *("pytorch_lightning", "monai", "torchmetrics", "hydra", "omegaconf"),
)


def test_methods_import_torch_and_numpy_alone(tmp_path):
    """All methods that ship, in one fresh process."""
    yamls = (CONFIG_DIR / "algorithm").glob("*.yaml")
    targets = {t for y in yamls for t in re.findall(r"_target_: (\S+)\.\w+", y.read_text())}
    assert len(targets) > 10
    code = f"import sys, {', '.join(sorted(targets))}; print(*sys.modules)"
    (tmp_path / "script.py").write_text(code)
    done = with_torch().run(tmp_path / "script.py")
    assert done.returncode == 0, done.stderr
    assert not {name.partition(".")[0] for name in done.stdout.split()} & set(HEAVY)
