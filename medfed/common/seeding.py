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
    """Turns names and numbers into one 31-bit seed that depends only on them.

    Python's ``hash`` would differ between processes.

    Args:
        key: Anything whose ``repr`` is stable: strings, integers, tuples of them; by convention
            (seed, round, client, phase, purpose).

    Returns:
        An integer in [0, 2^31), accepted by NumPy, PyTorch and MONAI alike.

    Example:
        >>> derive_seed(7, "split", "hospital_0") == derive_seed(7, "split", "hospital_0")
        True
        >>> derive_seed(0, 1, "hospital_0") == derive_seed(0, 11, "hospital_0")
        False
    """
    digest = hashlib.sha256(repr(key).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def numpy_rng(*key: object) -> np.random.Generator:
    """Returns a separate NumPy generator for the given purpose.

    Example:
        >>> int(numpy_rng(0, "a").integers(100)) == int(numpy_rng(0, "a").integers(100))
        True
    """
    return np.random.default_rng(derive_seed(*key))


def torch_rng(*key: object) -> torch.Generator:
    """Returns a separate PyTorch generator on the CPU for the given purpose.

    Example:
        >>> import torch
        >>> a, b = torch_rng(0, "a"), torch_rng(0, "a")
        >>> bool((torch.randperm(9, generator=a) == torch.randperm(9, generator=b)).all())
        True
    """
    import torch

    return torch.Generator().manual_seed(derive_seed(*key))


def coin(chance: float, *key: object) -> bool:
    """Tosses a coin with the same outcome for everyone who asks.

    A method with random rounds tosses it in ``phases`` and again in ``round``.

    Args:
        chance: Probability of heads, in [0, 1].
        key: As for :func:`derive_seed`: the run's seed, the round, the purpose.

    Example:
        >>> [coin(0.5, 7, number, "talk") for number in range(6)]
        [False, False, True, True, False, False]
        >>> coin(0.0, 7), coin(1.0, 7)
        (False, True)
    """
    return derive_seed(*key) < chance * 2**31
