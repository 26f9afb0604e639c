"""Imports some modules once, and runs scripts in forks of itself: MODULES.

A line of JSON in: folder, files for what is printed, script and arguments. A line out: its status.
"""

import gc
import importlib
import json
import os
import runpy
import sys
import traceback


def main() -> None:
    """Imports, and answers until the input ends."""
    sys.path[0] = ""  # the folder of work, as of `python -c`
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()  # no fork searches through all that was imported
    for line in sys.stdin:
        folder, files, script, *arguments = json.loads(line)
        if (pid := os.fork()) == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number, file in enumerate(files, 1):
                os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            os.chdir(folder)
            sys.argv = [script, *arguments]
            status = 0
            try:
                runpy.run_path(script, run_name="__main__")
            except SystemExit as end:
                status = end.code or 0
            except BaseException:
                traceback.print_exc()
                status = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
