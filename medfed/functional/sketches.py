"""Sketches: small tensors by which clients are compared without sending their data.

A data sketch B from Frequent Directions approximates the data A by its second moments, and B is
unique only up to a rotation of its rows: two clients with the same data may send different B. What
can be compared is B^T B. The clients send B, a few rows, and the server forms B^T B; see
:func:`sketch_vector`, whose Euclidean distance is the Frobenius distance of the second moments.

The unbiased compressor C: some entries of a vector, drawn at random, times size / kept.

Its variance is at most omega |v|^2, omega = size / kept - 1. With :func:`acceleration`, the
constants of an accelerated method under it: Li, Kovalev, Qian, Richtarik, ICML 2020.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from medfed.common.seeding import torch_rng


def frequent_directions(rows: Tensor, size: int) -> Tensor:
    """Summarises many rows by a few, in one pass.

    Source: Liberty 2013 and Ghashami et al. 2016, with a buffer of twice the size and the
    (size + 1)-th squared singular value subtracted, so that ``||A^T A - B^T B||_2 <=
    ||A||_F^2 / (size + 1)`` and A^T A - B^T B has no negative eigenvalue.

    Example:
        >>> frequent_directions(torch.tensor([[3.0, 0.0], [4.0, 0.0]]), size=1)
        tensor([[5., 0.]])
    """
    if not bool(torch.isfinite(rows).all()):
        raise ValueError("The rows to be sketched hold NaN or infinity.")
    sketch = torch.zeros(0, rows.shape[1], dtype=torch.float64)
    for chunk in rows.detach().cpu().double().split(size):
        sketch = _shrink(torch.cat([sketch, chunk]), size)
    return functional.pad(sketch, (0, 0, 0, size - sketch.shape[0])).to(rows)


def data_sketch(images: Tensor, size: int = 8, pixels: int = 16) -> Tensor:
    """Frequent Directions of flattened, resized images or of tabular rows.

    Rows are divided by sqrt(n), so that clients of different sizes are compared by their second
    moments per sample. The moments are not centred: a shift of intensity is a difference, too.

    Example:
        >>> data_sketch(torch.ones(5, 1, 32, 32), size=2, pixels=4).shape
        torch.Size([2, 16])
    """
    return frequent_directions(_rows(images, pixels) / math.sqrt(images.shape[0]), size)


def covariance_sketch(features: Tensor, size: int = 8) -> Tensor:
    """Frequent Directions of centred features: B^T B approximates their covariance (divided by n).

    Example:
        >>> covariance_sketch(torch.tensor([[1.0, 0.0], [3.0, 0.0]]), size=1)
        tensor([[1., 0.]])
    """
    centred = features - features.mean(0)
    return frequent_directions(centred / math.sqrt(len(features)), size)


def kernel_sketch(images: Tensor, frequencies: int = 512, pixels: int = 16) -> Tensor:
    """The mean of random Fourier features, whose distance is that of distributions (MMD).

    Source: Rahimi, Recht 2007, of the kernel exp(-|x - y|^2 / (2 d)) over rows of d standardised
    numbers; Gretton et al. 2012. |sketch(X) - sketch(Y)|^2 estimates the squared maximum mean
    discrepancy of X and Y up to about 1 / sqrt(frequencies). The frequencies are the same at all
    clients.

    Example:
        >>> kernel_sketch(torch.zeros(3, 2), frequencies=4).tolist()
        [0.5, 0.5, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0]
    """
    rows = _rows(images, pixels).double()
    draw = torch_rng(0, "frequencies", rows.shape[1])
    waves = torch.randn(rows.shape[1], frequencies, generator=draw, dtype=torch.float64)
    angles = rows.cpu() @ waves / math.sqrt(rows.shape[1])
    mean = torch.cat([angles.cos(), angles.sin()], dim=1).mean(0) / math.sqrt(frequencies)
    return mean.to(images)


def _rows(images: Tensor, pixels: int) -> Tensor:
    """Flattens images after averaging every spatial axis down to at most ``pixels``."""
    if images.ndim > 2:
        # One spatial axis after the other: an average over a box is an average of averages.
        images = images.detach().float()
        for axis in range(2, images.ndim):
            images = _average(images, axis, pixels)
    return images.flatten(1)


def label_sketch(counts: Tensor, channels: Tensor | None = None) -> Tensor:
    """The shares of the labels ``(K,)``, and of the channels ``(C,)`` that are there."""
    parts = [counts] if channels is None else [counts, channels]
    wide = [part.detach().cpu().double() for part in parts]
    return torch.cat([w / w.sum().clamp(min=torch.finfo(w.dtype).tiny) for w in wide])


def sketch_vector(sketch: Tensor) -> Tensor:
    """Makes a sketch comparable by Euclidean distance.

    Example:
        >>> rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> torch.equal(sketch_vector(rows), sketch_vector(rows.flip(0)))
        True
    """
    wide = sketch.detach().double()
    if wide.ndim == 1:
        return wide
    i, j = torch.triu_indices(wide.shape[1], wide.shape[1], device=wide.device)
    upper = (wide.T @ wide)[i, j]
    # sqrt(2) off the diagonal, so that distances of vectors are Frobenius distances of matrices.
    return torch.where(i == j, upper, math.sqrt(2.0) * upper)


def _shrink(rows: Tensor, size: int) -> Tensor:
    """At most ``size`` rows whose second moments are nearly those of the given rows."""
    if rows.shape[0] <= size:
        return rows
    _, s, vt = torch.linalg.svd(rows, full_matrices=False)
    drop = s[size] if s.shape[0] > size else s.new_zeros(())
    weights = torch.sqrt(torch.relu(s[:size].square() - drop.square()))
    directions = vt[:size]
    # The sign of a singular vector is arbitrary; a fixed one keeps the bits the same everywhere.
    peak = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    shrunk: Tensor = weights.unsqueeze(1) * directions * torch.where(peak < 0, -1.0, 1.0)
    return shrunk


def _average(images: Tensor, axis: int, length: int) -> Tensor:
    """Averages one axis down to at most ``length``."""
    last = images.movedim(axis, -1)
    length = min(length, last.shape[-1])
    flat = functional.adaptive_avg_pool1d(last.reshape(1, -1, last.shape[-1]), length)
    averaged: Tensor = flat.reshape(*last.shape[:-1], length)
    return averaged.movedim(-1, axis)


def number_kept(size: int, share: float) -> int:
    """Returns how many of so many entries are kept.

    Example:
        >>> number_kept(8, 0.25), number_kept(8, 0.01)
        (2, 1)
    """
    return max(1, round(share * size))


def random_entries(vector: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Returns which ones of a vector, in the order in which they were drawn.

    Example:
        >>> random_entries(torch.ones(8), 0.25, torch.Generator().manual_seed(0)).shape
        torch.Size([2])
    """
    count = number_kept(len(vector), share)
    return torch.randperm(len(vector), generator=generator)[:count].to(vector.device)


def only(vector: Tensor, where: Tensor) -> Tensor:
    """Returns a vector with zeros in all other places.

    Example:
        >>> only(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2, 0]))
        tensor([1., 0., 3.])
    """
    return torch.zeros_like(vector).index_copy(0, where, vector[where])


def acceleration(
    eta: float, mu: float, size: int, share: float, clients: int
) -> tuple[float, float, float, float]:
    """Returns alpha, theta1, gamma and q: of the shifts, of the two steps, of the anchor."""
    count = number_kept(size, share)
    omega = size / count - 1
    bold = math.sqrt(clients / (32 * omega)) - 1 if omega else math.inf
    q = min(1.0, max(1.0, bold) / (2 * (1 + omega)))
    theta = min(0.25, math.sqrt(eta * mu / q))
    return count / size, theta, eta / (2 * (theta + eta * mu)), q
