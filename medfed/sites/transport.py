"""How bytes reach the sites and come back: a protocol, and two transports to test with.

A transport knows nothing of what it carries. At the coordinator it calls a site with a request and
returns the reply, or raises :class:`Silent` when none came in time; calls to several sites are made
at once, from as many threads. At a site it hands each request to :class:`Answers` and sends what
that returns; it may do so from several threads, hand on a request twice, late, or not at all, and
lose a reply. Nothing else is asked of it: bytes that others wrote are refused by both ends.

A transport of one's own is a class with :meth:`Transport.call`, and at the other end a call of
:meth:`Answers.answer`. It must see to it that only the named site can be called by its name
(mutual TLS, say), as names are believed.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

LIMIT = 1 << 32
"""Bytes of the largest request or reply that a pipe takes."""


class Silent(Exception):  # noqa: N818 - it is no error of the program: hospitals go silent
    """No reply came: the site is down, too slow, or its reply was lost."""


class Answers(Protocol):
    """A site, as the transport at its end sees it: :class:`medfed.sites.site.Site`."""

    def answer(self, request: bytes) -> bytes:
        """Returns the reply to a request; never raises, whatever the bytes are."""


class Transport(Protocol):
    """The coordinator's end."""

    def call(self, site: str, request: bytes, timeout: float) -> bytes:
        """Sends a request to a site and waits for its reply; called from many threads at once.

        Args:
            site: Its name.
            request: The bytes.
            timeout: Seconds to wait.

        Returns:
            The reply.

        Raises:
            Silent: If none came in time, or the site is known to be down.
        """


class Direct:
    """Sites in this process, for tests and for a rehearsal; every message crosses as bytes.

    Args:
        sites: The sites by name; one may be replaced, or taken away.
    """

    def __init__(self, sites: Mapping[str, Answers]) -> None:
        self.sites = dict(sites)
        # Training draws from the random stream of the process, so one after the other.
        self._lock = threading.Lock()

    def call(self, site: str, request: bytes, timeout: float) -> bytes:
        """See :meth:`Transport.call`; there is no waiting."""
        if site not in self.sites:
            raise Silent
        with self._lock:
            return bytes(self.sites[site].answer(bytes(request)))


class Pipes:
    """Each site a process of its own on this machine, at the other end of a pipe.

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
        self._late: dict[str, int] = dict.fromkeys(starts, 0)
        self.processes: dict[str, BaseProcess] = {}
        for site in starts:
            self.start(site)

    def start(self, site: str) -> None:
        """Starts a site's process, again if it has ended."""
        # Forked from a process that has imported once and done nothing else, where there is such.
        there = "forkserver" in multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("forkserver" if there else "spawn")
        if there:
            context.set_forkserver_preload(["medfed.sites.workplace"])
        own, other = context.Pipe()
        process: BaseProcess = context.Process(
            target=serve, args=(other, self._starts[site]), daemon=True
        )
        process.start()
        other.close()
        self._ends[site], self.processes[site], self._late[site] = own, process, 0

    def call(self, site: str, request: bytes, timeout: float) -> bytes:
        """See :meth:`Transport.call`."""
        end = time.monotonic() + timeout
        if not self._locks[site].acquire(timeout=timeout):
            raise Silent
        try:
            pipe = self._ends[site]
            pipe.send_bytes(request)
            self._late[site] += 1
            while pipe.poll(max(0.0, end - time.monotonic())):
                reply = pipe.recv_bytes(LIMIT)
                self._late[site] -= 1
                if not self._late[site]:  # else it is of a call that nobody waits for any more
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
