"""Quantising a trained model: k-means per layer, then a few steps that move the centres.

A step of fine-tuning is a gradient step on all parameters, after which each quantised tensor is
brought back to its centres: a centre becomes the mean of its weights. For plain gradient descent
that moves centre j by the sum of its weights' gradients, times the step size over their number
(Han et al., "Deep compression", ICLR 2016, without the division); assignments stay. What is not
quantised (biases, normalisation, first and last layer) is trained along.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from medfed.delivery.codebook import Codebook, fit
from medfed.delivery.packing import check_bits
from medfed.errors import ConfigError, did_you_mean
from medfed.federation.client import AfterStep, ClientData, GradientAt
from medfed.federation.training import LocalTrainer
from medfed.personalize.quantized_layers import layer_weights

FULL = 32
Tensors = dict[str, Tensor]


def choose_bits(
    network: nn.Module, bits: int, layers: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Decides which tensors are quantised, and with how many bits.

    Args:
        network: The network.
        bits: 1 to 8 for the weights of all convolutions and linear layers but the first and the
            last one, or 32 for none.
        layers: Bits (or 32) by patterns of weight names; later patterns win, and first and last
            layer can be named, too.

    Returns:
        Bits by parameter name.

    Raises:
        ConfigError: If bits are out of range or a pattern matches no weight.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
        >>> choose_bits(net, 2), choose_bits(net, 2, {"1.*": 4, "2.*": 32, "3.*": 8})
        ({'1.weight': 2, '2.weight': 2}, {'1.weight': 4, '3.weight': 8})
    """
    weights = layer_weights(network)
    _check(bits, "bits")
    chosen = dict.fromkeys(weights[1:-1], bits)
    for pattern, value in (layers or {}).items():
        _check(value, f"layers.{pattern}")
        matched = [n for n in weights if fnmatchcase(n, pattern)]
        if not matched:
            hint = did_you_mean(
                pattern, [*weights, *(f"{n.rpartition('.')[0]}.*" for n in weights)]
            )
            raise ConfigError(
                f"The pattern {pattern!r} of layers matches no weight of a convolution or linear "
                f"layer{hint or '; they are ' + ', '.join(weights[:6])}."
            )
        chosen.update(dict.fromkeys(matched, value))
    return {n: chosen[n] for n in weights if chosen.get(n, FULL) != FULL}


def quantise(weights: Mapping[str, Tensor], bits: Mapping[str, int]) -> dict[str, Codebook]:
    """Fits a codebook to each of the chosen tensors, see :func:`medfed.delivery.codebook.fit`.

    Args:
        weights: All entries of the model.
        bits: Bits by name.
    """
    return {name: fit(weights[name], count) for name, count in bits.items()}


def with_codebooks(weights: Mapping[str, Tensor], books: Mapping[str, Codebook]) -> Tensors:
    """Returns the entries with the quantised ones in place of the trained ones."""
    return {**weights, **{n: b.dense().to(weights[n].dtype) for n, b in books.items()}}


def finetune(
    trainer: LocalTrainer,
    data: ClientData,
    weights: Mapping[str, Tensor],
    books: Mapping[str, Codebook],
    steps: int,
    rate: float,
) -> tuple[Tensors, dict[str, Codebook]]:
    """Moves centres, and what is not quantised, by gradient steps on a client's training data.

    Args:
        trainer: The run's training loop.
        data: The client's data.
        weights: All entries of the model; quantised ones are taken from the codebooks.
        books: Codebooks by name.
        steps: Gradient steps, 0 or more.
        rate: Step size of the run's optimizer.

    Returns:
        All entries, and the codebooks with new centres.

    Raises:
        NonFiniteError: If the loss becomes NaN or infinite.
    """
    start = with_codebooks(weights, books)
    if not steps:
        return start, dict(books)
    moved = dict(books)
    after = _back_to_centers(moved)
    end, _ = trainer.run(
        data,
        start,
        ("export", data.id),
        rate,
        update="all",
        steps=steps,
        penalty=None,
        after_step=after,
        memory=None,
    )
    sorted_books = {n: _sorted(b) for n, b in moved.items()}
    return with_codebooks(end, sorted_books), sorted_books


def _back_to_centers(books: dict[str, Codebook]) -> AfterStep:
    def project(weights: Mapping[str, Tensor], _: GradientAt) -> None:
        for name, book in books.items():
            centers = mean_of_clusters(weights[name], book)
            books[name] = moved = replace(book, centers=centers)
            weights[name].copy_(moved.dense())

    return project


def mean_of_clusters(weights: Tensor, book: Codebook) -> Tensor:
    """Returns the mean of each centre's weights; a centre without weights stays.

    Args:
        weights: A tensor of the codebook's shape.
        book: Which centre each element belongs to.

    Returns:
        (m,), of the type of the centres, summed in double precision.

    Example:
        >>> book = Codebook(torch.tensor([0, 1, 1]), torch.tensor([0.0, 4.0, 9.0]), (3,))
        >>> mean_of_clusters(torch.tensor([1.0, 5.0, 6.0]), book)
        tensor([1.0000, 5.5000, 9.0000])
    """
    m = len(book.centers)
    index = book.indices.to(weights.device)
    flat = weights.detach().reshape(-1).double()
    sums = torch.bincount(index, weights=flat, minlength=m)
    counts = torch.bincount(index, minlength=m)
    means = torch.where(counts > 0, sums / counts.clamp(min=1), book.centers.to(sums))
    return means.to(book.centers.dtype)


def _sorted(book: Codebook) -> Codebook:
    """The same codebook with its centres in order again, which a step may have changed."""
    centers, order = book.centers.sort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return Codebook(place[book.indices].cpu(), centers.cpu(), book.shape)


def _check(bits: int, name: str) -> None:
    if bits != FULL:
        try:
            check_bits(bits, name)
        except ConfigError as error:
            raise ConfigError(f"{str(error).rstrip('.')}, or 32 for none.") from None
