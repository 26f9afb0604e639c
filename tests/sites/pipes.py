"""A transport: each site is a process on this machine, at the other end of a pipe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from medfed.sites.wire import Answers, Silent
from tests.processes import CONTEXT

LIMIT = 1 << 32  # bytes of the largest request or reply that a pipe takes


class Pipes:
    """Each site is a process on this machine, at the other end of a pipe.

    Args:
        starts: By site, what its process makes the site of: a function that can be pickled.

    Example:
        >>> pipes = Pipes({})
        >>> pipes.close()
    """

    def __init__(self, starts: Mapping[str, Callable[[], Answers]]) -> None:
        self._starts = dict(starts)
        self._locks = {site: threading.Lock() for site in starts}
        self._ends: dict[str, Connection] = {}
        self._unanswered: dict[str, int] = dict.fromkeys(starts, 0)
        self.processes: dict[str, BaseProcess] = {}
        for site in starts:
            self.start(site)

    def start(self, site: str) -> None:
        """Starts a site's process, again if it has ended."""
        ours, theirs = CONTEXT.Pipe()
        process: BaseProcess = CONTEXT.Process(
            target=serve, args=(theirs, self._starts[site]), daemon=True
        )
        process.start()
        theirs.close()
        self._ends[site], self.processes[site], self._unanswered[site] = ours, process, 0

    def call(self, site: str, request: bytes, timeout: float) -> bytes:
        """See :meth:`Transport.call`."""
        end = time.monotonic() + timeout
        if not self._locks[site].acquire(timeout=timeout):
            raise Silent
        try:
            pipe = self._ends[site]
            pipe.send_bytes(request)
            self._unanswered[site] += 1
            while pipe.poll(max(0.0, end - time.monotonic())):
                reply = pipe.recv_bytes(LIMIT)
                self._unanswered[site] -= 1
                if not self._unanswered[
                    site
                ]:  # otherwise it answers an earlier call, which no longer waits
                    return reply
            raise Silent
        except (OSError, EOFError) as error:
            raise Silent from error
        finally:
            self._locks[site].release()

    def close(self) -> None:
        """Ends all processes."""
        for pipe in self._ends.values():
            pipe.close()
        for process in self.processes.values():
            process.join(5)
            process.kill()


def serve(pipe: Connection, start: Callable[[], Answers]) -> None:
    """Answers what comes through a pipe until its other end is closed.

    Args:
        pipe: This end.
        start: Makes the site.
    """
    site = start()
    try:
        while True:
            pipe.send_bytes(site.answer(pipe.recv_bytes(LIMIT)))
    except (EOFError, OSError):
        return
