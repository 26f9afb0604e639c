"""Ctrl-C and SIGTERM: an exception in the main thread, so that whatever is open is cleaned up."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

PARENT = "MEDFED_PARENT"
"""The environment variable in which a further rank finds the process that it must not outlive."""
_BOTH = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """Another process has asked this one to end (SIGTERM), as a queue does whose time is up."""


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Ends the process with status 130 on Ctrl-C and 143 on SIGTERM, and one line on stderr.

    The line is the exception's own, where whoever passed it on could say how to go on. Only the
    first signal counts, so that a second one does not tear what the first one makes tidy. Who
    ignores a signal, as ``nohup`` and jobs in the background do, goes on to ignore it.
    """
    before = {number: signal.getsignal(number) for number in _BOTH}
    main = threading.current_thread() is threading.main_thread()
    ours = [n for n, old in before.items() if main and old is not signal.SIG_IGN]

    def interrupt(number: int, _: FrameType | None) -> NoReturn:
        for each in ours:
            signal.signal(each, signal.SIG_IGN)
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield
    except KeyboardInterrupt as error:
        asked = isinstance(error, Terminated)
        how = str(error) or "what was finished is whole and kept: run it again."
        print(f"{'Terminated' if asked else 'Interrupted'}; {how}", file=sys.stderr)
        sys.exit(128 + (signal.SIGTERM if asked else signal.SIGINT))
    finally:
        for number in ours:
            if signal.getsignal(number) is interrupt:
                signal.signal(number, before[number])


@contextmanager
def held(*numbers: signal.Signals) -> Iterator[None]:
    """Holds signals back; processes that are started meanwhile never get them.

    They are for those whose end another process sees to: on Ctrl-C a terminal signals them all.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """Ends a further rank as soon as the process is gone that has started it, however it ended."""
    parent = os.environ.get(PARENT)
    if parent is None:
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
