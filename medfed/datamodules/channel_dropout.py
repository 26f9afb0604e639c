"""Channel dropout: training samples lose some of the channels that their hospital has.

Wagner et al.: Feasibility of federated learning from client databases with different brain diseases
and MRI modalities (FedUniBrain), WACV 2025: 0 to C − 1 channels of every sample become zero, and
nothing is rescaled, which is ``chance=1`` and ``rescale=None`` here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from medfed.common.errors import ConfigError
from medfed.common.seeding import torch_rng
from medfed.common.tensors import onto


@dataclass(frozen=True)
class ChannelDropout:
    """Takes channels from training samples, whose values there become zero.

    Attributes:
        chance: That a sample may lose channels: then 0 to P − 1 of the P that its client has, each
            number as likely as the other, and each set of so many.
        rescale: ``sqrt`` multiplies what is left by the root of P over the number that is left,
            which keeps the variance of their sum; ``None`` does not. P over that number would
            double it for two of four.
        planes: How many channels in a row are one contrast, as with neighbouring slices; they are
            lost together.

    Raises:
        ConfigError: If the chance is not in [0, 1], or the rescaling unknown.

    Example:
        >>> image, present = torch.ones(1, 3, 1, 1), torch.tensor([True, True, False])
        >>> [ChannelDropout(1.0)(image, present, seed=s)[1].tolist()[0] for s in (0, 1)]
        [[False, True, False], [True, False, False]]
    """

    chance: float = 0.0
    rescale: Literal["sqrt"] | None = None
    planes: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.chance <= 1:
            raise ConfigError(f"augment.channel_dropout={self.chance} must be in [0, 1].")
        if self.rescale not in (None, "sqrt"):
            raise ConfigError(f"augment.rescale={self.rescale!r} is unknown; choose null or sqrt.")

    def __call__(self, image: Tensor, present: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Alters a batch; what is drawn depends on the seed alone.

        Args:
            image: ``(B, C, ...)``, zero where a channel is missing.
            present: ``(C,)`` bool, the channels that the client has.
            seed: Of this batch.

        Returns:
            The image and the channels that each sample has left, ``(B, C)`` bool.
        """
        rng, there = torch_rng(seed, "channel_dropout"), present[:: self.planes].cpu()
        coins, counts = torch.rand(len(image), generator=rng), torch.rand(len(image), generator=rng)
        places = torch.rand(len(image), len(there), generator=rng)
        lost = (counts * int(there.sum())).long() * (coins < self.chance)
        # Of the channels that are there those with the smallest numbers go.
        rank = torch.where(there, places, torch.inf).argsort(1).argsort(1)
        kept = there & (rank >= lost[:, None])
        kept = onto(kept.repeat_interleave(self.planes, 1), image.device)
        return self.only(image, kept, present), kept

    def only(self, image: Tensor, kept: Tensor, present: Tensor) -> Tensor:
        """Returns images with some channels alone.

        Args:
            image: ``(B, C, ...)``.
            kept: ``(B, C)`` bool, of each at least one.
            present: ``(C,)`` bool, the channels that the client has.
        """
        factor = kept.to(image.dtype)
        if self.rescale == "sqrt":
            factor *= (onto(present.sum(), image.device) / kept.sum(1, keepdim=True)).sqrt()
        return image * factor.view(*factor.shape, *[1] * (image.ndim - 2))
