"""Means and deviations of channels over a client's training images, and FedRDN, which mixes them.

Yan et al., "A Simple Data Augmentation for Feature Distribution Skewed Federated Learning"
(FedRDN), CVPR 2025. Before training each client i sends mu_i and sigma_i, and receives those of
all. A client normalises a training image x, after other augmentation, by those of a client j,

    (x - mu_j) / sigma_j,

where j is drawn for each image, all alike. It normalises other images by its own, and sends nothing
else. Deviation from the authors' code: that draws mu and sigma of different clients, once a batch.

============  ==================================================================================
symbol        here
============  ==================================================================================
mu, sigma     ``channel_statistics``, over all pixels of all training images in [-1, 1]
j             ``rows`` in ``_drawn``, which undoes mu_i and sigma_i and takes j's
============  ==================================================================================

A channel that a client lacks, or of equal values, has sigma 0. Others do not use it, nor a sigma
below a hundredth of their own, which would let one client ruin all models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medfed.datamodules.client_data import ArrayRows, Rows, gather
from medfed.datamodules.extending import *
from medfed.datamodules.one_site import Claims
from medfed.standalone.columns import Array
from medfed.standalone.pictures import Pixels, standardized

Convert = Callable[[NDArray[Any]], Pixels]
_AT_ONCE = 1024  # images
_BELOW = 100  # times less than a client's own


def channel_statistics(images: Tensor | Rows) -> Array:
    """Returns (2, C) means and deviations of (N, C, ...) images; 0 where all values are equal."""
    parts = torch.arange(images.shape[0]).split(_AT_ONCE)
    first = gather(images, parts[0][:1]).flatten(2)[0, :, :1].double().numpy()
    total, squares, count = np.zeros(len(first)), np.zeros(len(first)), 0
    for index in parts:
        # Less the first value, so that equal values have deviation 0, without rounding.
        apart = gather(images, index).flatten(2).double().numpy() - first
        total += apart.sum(axis=(0, 2))
        squares += (apart**2).sum(axis=(0, 2))
        count += apart[:, 0].size
    mean = total / count
    return np.stack([first[:, 0] + mean, np.sqrt(np.maximum(squares / count - mean**2, 0))])


def normalized(images: Tensor | ArrayRows, statistics: Array) -> Tensor | ArrayRows:
    """Normalises (N, C, *spatial) images by (2, C) statistics; those on disk when they are read."""
    if isinstance(images, ArrayRows):
        return replace(images, convert=partial(_then, images.convert, statistics))
    return torch.from_numpy(standardized(images.numpy(), *statistics))


def random_statistics(channel: Array, every: Sequence[float]) -> Callable[[Tensor, int], Tensor]:
    """Changes a batch from a client's statistics (2, C) to those of a client drawn by a seed."""
    if not every or len(every) % channel.size:
        raise DataError(
            "The server's answer about channels is not as medfed makes it; compare versions."
        )
    mean, sd = channel
    others, theirs = np.array(every).reshape(-1, *channel.shape).swapaxes(0, 1)
    used = (sd > 0) & (_BELOW * theirs >= sd)
    divisor = np.where(used, theirs, 1.0)
    scale = torch.from_numpy(np.where(used, sd, 1.0) / divisor).float()
    shift = torch.from_numpy(np.where(used, mean - others, 0.0) / divisor).float()
    return partial(_drawn, scale, shift)


def _drawn(scale: Tensor, shift: Tensor, image: Tensor, seed: int) -> Tensor:
    """Multiplies and shifts each (B, C, *spatial) image by a row of (H, C)."""
    rows = torch.randint(len(scale), (len(image),), generator=torch_rng(seed, "client"))
    shape = (*image.shape[:2], *[1] * (image.ndim - 2))
    return image * scale[rows].view(shape) + shift[rows].view(shape)


def _then(convert: Convert, statistics: Array, values: NDArray[Any]) -> Pixels:
    return standardized(convert(values), *statistics)


def collected(messages: Sequence[Sequence[float]], claims: Claims) -> list[float]:
    """The server's half: the numbers of all clients, if those of images in [-1, 1]."""
    mean, sd = np.split(np.array(messages, float), 2, axis=1)
    wrong = (sd < 0) | (mean**2 + sd**2 > 1 + 1e-9)
    claims.refuse(wrong, "means and deviations of channels that no images have")
    return [number for numbers in messages for number in numbers]
