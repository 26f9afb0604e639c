"""A weight tensor as a codebook: a few centres, and for each weight the index of its centre."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from medfed.delivery.packing import check_bits, pack
from medfed.errors import CheckpointError


@dataclass(frozen=True)
class Codebook:
    """A tensor whose elements are few different numbers.

    Attributes:
        indices: ``(n,)`` int64, which centre each element is.
        centers: ``(m,)`` the sorted numbers, m from 1 to 256.
        shape: The tensor's shape, of n elements.

    Example:
        >>> book = Codebook(torch.tensor([1, 0, 1, 1]), torch.tensor([-0.5, 2.0]), (2, 2))
        >>> book.dense(), book.bits
        (tensor([[ 2.0000, -0.5000],
                [ 2.0000,  2.0000]]), 1)
    """

    indices: Tensor
    centers: Tensor
    shape: tuple[int, ...]

    @property
    def bits(self) -> int:
        """Bits per element."""
        return max(1, math.ceil(math.log2(len(self.centers))))

    def dense(self) -> Tensor:
        """Returns the tensor, in the type of the centres."""
        return self.centers.index_select(0, self.indices).reshape(self.shape)

    def planes(self) -> Tensor:
        """Returns the indices as bit planes ``(bits, ceil(n / 8))``; see `packing.pack`."""
        return pack(self.indices, self.bits)

    def entropy(self) -> float:
        """Returns the entropy of the indices in bits per element.

        No code that treats the elements one by one can take fewer bits on average.

        Example:
            >>> Codebook(torch.tensor([0, 1, 1, 1]), torch.tensor([0.0, 1.0]), (4,)).entropy()
            0.8112781244591328
        """
        counts = torch.bincount(self.indices, minlength=len(self.centers)).double()
        shares = counts[counts > 0] / counts.sum()
        return max(0.0, float(-(shares * shares.log2()).sum()))


def from_centers(tensor: Tensor, centers: Tensor) -> Codebook:
    """Looks up a tensor in the centres that its elements equal.

    Args:
        tensor: Any shape; every element equals a centre exactly.
        centers: ``(m,)`` sorted, m from 1 to 256, of the tensor's type.

    Raises:
        CheckpointError: If an element is no centre, or the centres are not as above.

    Example:
        >>> from_centers(torch.tensor([[2.0, -1.0]]), torch.tensor([-1.0, 2.0])).indices
        tensor([1, 0])
    """
    if centers.ndim != 1 or not 1 <= len(centers) <= 256 or bool((centers.diff() < 0).any()):
        raise CheckpointError("Centres must be 1 to 256 numbers in increasing order.")
    flat = tensor.detach().reshape(-1).contiguous()
    centers = centers.detach().to(flat.dtype)
    indices = torch.searchsorted(centers, flat).clamp_(max=len(centers) - 1)
    if not torch.equal(centers.index_select(0, indices), flat):
        raise CheckpointError(
            "A weight is none of its parameter's centres; the centres belong to another model."
        )
    return Codebook(indices, centers.clone(), tuple(tensor.shape))


def fit(tensor: Tensor, bits: int) -> Codebook:
    """Quantises a trained tensor by k-means of its elements.

    Args:
        tensor: Any shape, finite.
        bits: 1 to 8; there are ``2**bits`` centres, or fewer where there are fewer numbers.

    Returns:
        The codebook; each element has the index of its nearest centre.

    Raises:
        ConfigError: If ``bits`` is outside 1 to 8.

    Example:
        >>> fit(torch.tensor([0.0, 0.2, 1.0, 1.2]), bits=1).centers
        tensor([0.1000, 1.1000])
    """
    # Imported late: compiled kernels come with it, and reading a bundle needs none of them.
    from medfed.personalize.functional import assign, initial_centers

    check_bits(bits)
    flat = tensor.detach().reshape(-1)
    centers = initial_centers(flat, bits).unique()
    return Codebook(assign(flat, centers).to(torch.int64), centers, tuple(tensor.shape))
