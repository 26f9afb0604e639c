"""Compiled code and SciPy are imported on first use: they take longer than all the rest."""

import subprocess
import sys
from pathlib import Path

import medfed.functional

MODULES = [
    f"medfed.functional.{path.stem}"
    for path in sorted(Path(medfed.functional.__file__).parent.glob("*.py"))
    if path.stem != "kernels"
]
CODE = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    assert not {"numba", "scipy"} & sys.modules.keys(), name
"""


def test_no_module_imports_compiled_code():
    assert len(MODULES) > 8
    done = subprocess.run(
        [sys.executable, "-c", CODE, *MODULES], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
