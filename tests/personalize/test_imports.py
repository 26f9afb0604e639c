"""Naming a method must not load what only some runs need: a hospital may have none of it."""

from __future__ import annotations

import re
import subprocess
import sys

from medfed.config.compose import CONFIG_DIR

HEAVY = (
    *("numba", "scipy", "networkx", "matplotlib", "sklearn", "pandas"),
    *("pytorch_lightning", "monai", "torchmetrics", "hydra", "omegaconf"),
)


def test_methods_import_torch_and_numpy_alone():
    """All methods that ship, in one fresh process."""
    yamls = (CONFIG_DIR / "algorithm").glob("*.yaml")
    targets = {t for y in yamls for t in re.findall(r"_target_: (\S+)\.\w+", y.read_text())}
    assert len(targets) > 10
    code = f"import sys, {', '.join(sorted(targets))}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {name.partition(".")[0] for name in done.stdout.split()} & set(HEAVY)
