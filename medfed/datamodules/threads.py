"""How many threads data are made on; apart, because worker processes import little."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Runs PyTorch on one thread, and restores the number afterwards.

    The sums in a z-score depend on how many threads add them up; data must not. (On a busy machine
    it is faster, too: the tensors of one volume are small.)

    Example:
        >>> with one_thread():
        ...     torch.get_num_threads()
        1
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
