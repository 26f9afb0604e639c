"""Runs a module, or a file, as where some packages are not installed: NAMES MODULE ARGUMENTS.

In a fork of tests/processes.py, MONAI and PyTorch are there already; of the packages that are
missing nothing stays, and an import of them fails.
"""

import os
import runpy
import sys


def main() -> None:
    """Takes the packages away, and runs."""
    lacking, module, *arguments = sys.argv[1:]
    for name in [*sys.modules]:
        if name.partition(".")[0] in lacking.split(","):
            del sys.modules[name]
    sys.modules.update(dict.fromkeys(lacking.split(",")))
    # As `python -m` in this folder: neither the repository nor this script's folder is looked into.
    sys.path[:] = [os.getcwd(), *(p for p in sys.path if "site-packages" in p or "lib/python" in p)]
    sys.argv = [module, *arguments]
    if module.endswith(".py"):
        runpy.run_path(module, run_name="__main__")
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
