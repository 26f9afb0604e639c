"""Seeds for every random choice in the data layer, independent of order and of global streams."""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def derive_seed(*parts: object) -> int:
    """Turns names and numbers into one 31-bit seed.

    The seed depends on the values alone, so that adding a patient or a hospital leaves the random
    choices for all the others as they were. (Python's own ``hash`` differs between processes.)

    Args:
        *parts: Anything whose ``repr`` is stable: strings, integers, tuples of them.

    Returns:
        An integer in [0, 2^31), accepted by NumPy, PyTorch and MONAI alike.

    Example:
        >>> derive_seed(7, "split", "hospital_0") == derive_seed(7, "split", "hospital_0")
        True
        >>> derive_seed(7, "split", "hospital_0") == derive_seed(7, "split", "hospital_1")
        False
    """
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def numpy_rng(*parts: object) -> np.random.Generator:
    """A NumPy generator of its own for the given purpose.

    Args:
        *parts: As for `derive_seed`.

    Returns:
        A fresh generator.

    Example:
        >>> int(numpy_rng(0, "a").integers(100)) == int(numpy_rng(0, "a").integers(100))
        True
    """
    return np.random.default_rng(derive_seed(*parts))


def torch_rng(*parts: object) -> torch.Generator:
    """A CPU PyTorch generator of its own for the given purpose.

    Args:
        *parts: As for `derive_seed`.

    Returns:
        A fresh generator.

    Example:
        >>> a, b = torch_rng(0, "a"), torch_rng(0, "a")
        >>> bool((torch.randperm(9, generator=a) == torch.randperm(9, generator=b)).all())
        True
    """
    return torch.Generator().manual_seed(derive_seed(*parts))
