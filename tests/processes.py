"""Scripts in processes of their own, which need not import the libraries anew.

A server imports them once per session and forks. What scripts import by themselves shows in forks
of a process that has imported less (:class:`Forks`), and so does what a wheel brings.
"""

from __future__ import annotations

import atexit
import functools
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from multiprocessing.context import BaseContext
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SERVERS: set[int] = set()  # processes that serve all tests of a session
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preloaded"])


@functools.cache
def _folder() -> str:
    """Where processes write; made by who starts one, as those end without tidying up."""
    folder = tempfile.TemporaryDirectory(prefix="medfed-tests-", ignore_cleanup_errors=True)
    atexit.register(folder.cleanup)
    return folder.name


class Started:
    """A process that runs a script: what ``subprocess.Popen`` tells of one.

    It leads a session and a group of its own, as after ``start_new_session=True``.

    Args:
        script: The Python file.
        arguments: Its command line.
        cwd: Where it works.
        together: Whether errors go with the output.
        env: Further variables of its environment.
        context: What starts it; a fork of this process is for one that has imported the libraries
            and has done nothing with them.
    """

    def __init__(
        self,
        script: str | Path,
        *arguments: str,
        cwd: Path = ROOT,
        together: bool = False,
        env: Mapping[str, str] | None = None,
        context: BaseContext = CONTEXT,
    ) -> None:
        self.args = [str(script), *arguments]
        folder = Path(tempfile.mkdtemp(dir=_folder()))
        self._out, self._err = folder / "out", folder / "err"
        self._out.touch()
        self._err.touch()
        # What a process that was killed leaves of its temporary files goes with the session's.
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder), **(env or {})}
        files = (self._out, self._out if together else self._err)
        self._process = context.Process(  # type: ignore[attr-defined]  # of all but the base
            target=_run, args=(self.args, str(cwd), environ, files)
        )
        self._process.start()
        self.pid = self._process.pid or 0
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self.returncode = self._process.exitcode
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return int(self.returncode or 0)

    def told(self) -> tuple[str, str]:
        """Returns what it has printed so far."""
        return self._out.read_text("utf-8"), self._err.read_text("utf-8")

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return self.told()


def run(
    script: str | Path, *arguments: str, timeout: float = 240, **settings: object
) -> subprocess.CompletedProcess[str]:
    """Runs a script to its end, as ``subprocess.run`` with text that is captured."""
    started = Started(script, *arguments, **settings)  # type: ignore[arg-type]
    try:
        out, err = started.communicate(timeout)
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(started.args, started.returncode or 0, out, err)


class Forks:
    """Scripts in forks of one Python that has imported some modules, and no others.

    Args:
        modules: The modules.
        python: Which Python.
        env: Its environment; that of this process by default.
        cwd: Where it begins.
    """

    def __init__(
        self,
        *modules: str,
        python: Path | str = sys.executable,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [str(python), str(ROOT / "tests" / "forks.py"), *modules]
        self._server = subprocess.Popen(command, cwd=cwd, env=env, **pipes)  # type: ignore[call-overload]
        SERVERS.add(self._server.pid)
        self._files = [str(Path(_folder()) / f"{name}-{self._server.pid}") for name in "oe"]
        atexit.register(self.end)

    def run(
        self, script: str | Path, *arguments: str, cwd: Path = ROOT
    ) -> subprocess.CompletedProcess[str]:
        """Runs a script to its end, as :func:`run` does."""
        command = [str(script), *arguments]
        self._server.stdin.write(json.dumps([str(cwd), self._files, *command]) + "\n")
        self._server.stdin.flush()
        status = self._server.stdout.readline()
        out, err = (Path(file).read_text("utf-8") for file in self._files)
        return subprocess.CompletedProcess(command, int(status), out, err)

    def end(self) -> None:
        """Ends the server."""
        self._server.communicate(timeout=60)
        atexit.unregister(self.end)


@functools.cache
def with_torch() -> Forks:
    """A Python that has imported PyTorch alone."""
    return Forks("torch")


def free_port() -> str:
    """Returns a port of this machine that nothing listens on.

    It stays taken for everybody else: a socket keeps it that does not listen, beside which one that
    does may be bound.
    """
    probe = socket.socket()
    atexit.register(probe.close)
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(("127.0.0.1", 0))
    return str(probe.getsockname()[1])


def ranks(script: str | Path, *arguments: str, **settings: object) -> list[Started]:
    """Starts both ranks of a run on this machine, as its launcher starts the second."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "NODE_RANK": "0"}
    return [
        Started(script, *arguments, env={**group, "LOCAL_RANK": rank}, **settings)  # type: ignore[arg-type]
        for rank in ("0", "1")
    ]


def _run(command: list[str], cwd: str, environ: dict[str, str], files: tuple[Path, Path]) -> None:
    os.setsid()
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    # Python's own objects for them may be of the server's beginnings.
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False, buffering=1)
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None  # as the environment says
    os.chdir(cwd)
    sys.argv = command
    sys.path[0:0] = [str(Path(command[0]).resolve().parent)]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    status: object = 0
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    if isinstance(status, str):
        print(status, file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    raise SystemExit(status or 0)
