"""Compiled code and SciPy are imported on first use: they take longer than all the rest."""

from pathlib import Path

import medfed.functional
from tests.processes import with_torch

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


def test_no_module_imports_compiled_code(tmp_path):
    assert len(MODULES) > 8
    (tmp_path / "script.py").write_text(CODE)
    done = with_torch().run(tmp_path / "script.py", *MODULES)
    assert done.returncode == 0, done.stderr
