"""Quantising a trained model: which layers with how many bits, and k-means per layer."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import Tensor, nn

from medfed.common.errors import ConfigError, did_you_mean
from medfed.delivery.bundle.weights import Codebook, check_bits, fit
from medfed.personalize.quantized_layers import layer_weights

FULL = 32


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
    given = {"bits": bits, **{f"layers.{p}": b for p, b in (layers or {}).items()}}
    for name, value in given.items():
        if value != FULL:
            check_bits(value, name, ", or 32 for none")
    chosen = dict.fromkeys(weights[1:-1], bits)
    for pattern, value in (layers or {}).items():
        matched = [n for n in weights if fnmatchcase(n, pattern)]
        if not matched:
            layer_names = [f"{n.rpartition('.')[0]}.*" for n in weights]
            hint = did_you_mean(pattern, [*weights, *layer_names])
            raise ConfigError(
                f"The pattern {pattern!r} of layers matches no weight of a convolution or linear "
                f"layer{hint or '; they are ' + ', '.join(weights[:6])}."
            )
        chosen.update(dict.fromkeys(matched, value))
    return {n: chosen[n] for n in weights if chosen.get(n, FULL) != FULL}


def quantise(weights: Mapping[str, Tensor], bits: Mapping[str, int]) -> dict[str, Codebook]:
    """Fits a codebook to each chosen tensor, see :func:`medfed.delivery.bundle.weights.fit`.

    Args:
        weights: All entries of the model.
        bits: Bits by name.
    """
    return {name: fit(weights[name], count) for name, count in bits.items()}
