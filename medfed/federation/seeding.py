"""Seeds derived from what they are for, never from a global stream.

A run draws the same numbers on one rank or on eight, straight or resumed, because each draw is
keyed by (seed, round, client, phase, purpose) alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive_seed(*key: str | int) -> int:
    """Returns a 63-bit seed that depends on all of ``key`` and nothing else.

    Args:
        key: Any strings and integers, by convention (seed, round, client, phase, purpose).

    Example:
        >>> derive_seed(0, 1, "hospital_0") == derive_seed(0, 1, "hospital_0")
        True
        >>> derive_seed(0, 1, "hospital_0") == derive_seed(0, 11, "hospital_0")
        False
    """
    text = "\x1f".join(f"{type(k).__name__}:{k}" for k in key)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Runs its body (dropout, augmentation) under ``seed`` and restores the global streams.

    Args:
        seed: Seed of the body.
        device: The device on which the body draws.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        if device.type == "cpu":
            # torch.manual_seed would also format a stack trace for a GPU that is not in use.
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)
        yield
