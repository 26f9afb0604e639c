"""Risk from tabular features by logistic regression: classification plus an L2 penalty."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from medfed.errors import ConfigError
from medfed.models.classification import ClassificationTask
from medfed.models.losses import l2_penalty
from medfed.models.task import Batch


class RiskTask(ClassificationTask):
    """Logistic regression on features.

    Batches: ``image (B, F)`` features, ``label (B,)`` class indices. Metrics and further arguments
    are those of :class:`medfed.models.classification.ClassificationTask`.

    Args:
        *args: As for classification.
        l2: The training loss gains ``l2 / 2`` times the squared norm of all weights except biases;
            the ``loss`` metric does not.
        **kwargs: As for classification.

    Raises:
        ConfigError: If ``l2`` is negative.
    """

    def __init__(self, *args: Any, l2: float = 0.0, **kwargs: Any) -> None:
        if l2 < 0:
            raise ConfigError(f"l2 must not be negative, not {l2}.")
        super().__init__(*args, **kwargs)
        self.l2 = l2

    def loss(self, batch: Batch) -> Tensor:
        """Returns the penalised training loss."""
        loss = super().loss(batch)
        return loss if self.l2 == 0 else loss + l2_penalty(self.network, self.l2)
