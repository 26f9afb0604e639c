"""CER, the communication-efficient regulariser: what is sent, drawn together along its length.

pFedNet (the first of the project's source papers), its communication-efficient regulariser, in the
corrected and exact form of :mod:`medfed.functional`: a vector g that is about to be
coded becomes the w that minimises ||w - g||^2 / 2 + gamma (sum_i |w_i - w_{i+1}| + |w_d|). Equal
neighbours are what run-length codes save on; see :class:`medfed.federation.wire.link.Link` for its
place after the residual and before the codec.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from medfed.common.errors import ConfigError
from medfed.common.tensors import Layout, flatten
from medfed.functional.fused_lasso import fused_lasso, fused_lasso_blocks


@dataclass(frozen=True)
class CER:
    """Replaces a vector by the solution of the fused lasso.

    Attributes:
        gamma: How strongly neighbours are drawn together; 0: not at all, infinity: to zero.
        relative: Whether gamma is multiplied by the mean magnitude of the vector, so that it means
            the same in every round; otherwise it is absolute.
        per_tensor: Whether each parameter tensor is a vector of its own; they are solved in
            parallel. Otherwise the whole part is one vector, as in the paper.

    Raises:
        ConfigError: If gamma is negative.

    Example:
        >>> import torch
        >>> cer = CER(gamma=0.5, relative=False)
        >>> cer(torch.tensor([4.0, 1.0, 2.0]), (("w", (3,), "float32"),))
        tensor([3.5000, 1.5000, 1.5000])
    """

    gamma: float = 0.0
    relative: bool = True
    per_tensor: bool = False

    def __post_init__(self) -> None:
        if not self.gamma >= 0:
            raise ConfigError(f"cer.gamma must be 0 or more, not {self.gamma}.")

    @property
    def active(self) -> bool:
        """Whether it changes anything."""
        return self.gamma > 0

    def __call__(self, flat: Tensor, layout: Layout) -> Tensor:
        """Returns the vector of shape (d,) that is coded in place of ``flat``.

        Args:
            flat: ``(d,)`` finite floats.
            layout: The tensors that it consists of.
        """
        if not self.per_tensor:
            return fused_lasso(flat, self._strength(flat))
        blocks = flat.split([math.prod(shape) for _, shape, _ in layout])
        solved = fused_lasso_blocks(blocks, [self._strength(block) for block in blocks])
        return flatten({row[0]: block for row, block in zip(layout, solved, strict=True)})

    def _strength(self, vector: Tensor) -> float:
        if not self.relative or vector.numel() == 0:
            return self.gamma
        mean = float(vector.double().abs().mean())
        # Infinity times zero is not a number, but the zero vector is its own solution.
        return self.gamma * mean if mean else 0.0
