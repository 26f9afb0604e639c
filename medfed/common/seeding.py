"""Derives each seed from its purpose, never from a global stream.

Each draw depends only on (seed, round, client, phase, purpose). So a run draws the same numbers on
one rank or on eight, uninterrupted or resumed, and a new patient or hospital does not change the
random choices for the others. PyTorch is imported only in functions, because the worker processes
that read scans do not need it.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def derive_seed(*key: object) -> int:
    """Turns names and numbers into one 31-bit seed that depends only on them."""
    # NumPy writes its numbers and names in another way, and each version in its own.
    key = tuple([k.item() if isinstance(k, np.generic) else k for k in key])
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:4], "big") >> 1


def numpy_rng(*key: object) -> np.random.Generator:
    """Returns a separate NumPy generator for the given purpose."""
    return np.random.default_rng(derive_seed(*key))


def torch_rng(*key: object) -> torch.Generator:
    """Returns a separate PyTorch generator on the CPU for the given purpose."""
    import torch

    return torch.Generator().manual_seed(derive_seed(*key))


def coin(chance: float, *key: object) -> bool:
    """Tosses a coin with the same outcome for everyone who asks."""
    return derive_seed(*key) < chance * 2**31
