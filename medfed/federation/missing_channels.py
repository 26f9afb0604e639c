"""Missing channels: which weights read a channel, and their mean over the clients that have it.

With a_n the weight of client n, m_nc whether it has channel c, Δ_n its displacement, and the sums
over a round's cohort, the weights that read channel c follow

    W[:, c] ← W[:, c] + Σ a_n m_nc Δ_n[:, c] / Σ a_n m_nc

and do not change if no client has c; all other weights are averaged as usual. There is no paper. A
client without a channel learns nothing about its weights, but weight decay or noise still move
them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from medfed.common.seeding import torch_rng
from medfed.common.tensors import Tensors, weighted_mean
from medfed.federation.split import float_entries
from medfed.standalone.errors import CodecError, ConfigError
from medfed.standalone.outputs import tensors_in

LACKS = "lacks/"
_DRAWS = 3
_JITTER = 0.02  # on the weights: a layer that starts at zero hides all layers before it
_NOISE = 1e-10  # of the largest gradient; smaller values are rounded zeros


def entries_reading(network: nn.Module, shape: Sequence[int]) -> Tensors:
    """Finds the entries of a network that read one channel: without it their gradient is zero.

    It tries several random inputs and weights, in double precision, on a copy in evaluation mode.
    Such entries are not only in the first layer: a UNETR reads its input in three layers, a
    residual U-Net in two. `shape`: the shape of one input, ``(C, *spatial)``; a smaller patch is
    used if possible. Returns for each parameter that reads a channel a mask ``(C, *parameter)``
    bool; nothing for one channel, which no client can lack.

    Example:
        >>> network = nn.Sequential(nn.Conv2d(2, 3, 1), nn.Conv2d(3, 1, 1))
        >>> masks = entries_reading(network, (2, 4, 4))
        >>> list(masks), masks["0.weight"][1, 0, :, 0, 0].tolist()
        (['0.weight'], [False, True])
    """
    if shape[0] < 2:
        return {}
    network = _smooth(copy.deepcopy(network).cpu().double().eval().requires_grad_(True))
    shape = _smaller(network, shape)
    live = {n: t for n, t in float_entries(network).items() if isinstance(t, nn.Parameter)}
    start = {n: t.detach().clone() for n, t in live.items()}
    alive = {n: torch.zeros_like(t, dtype=torch.bool) for n, t in live.items()}
    silent = {n: torch.ones(shape[0], *t.shape, dtype=torch.bool) for n, t in live.items()}
    for draw in range(_DRAWS):
        rng = torch_rng(0, "channels", draw)
        with torch.no_grad():
            for name, parameter in live.items():
                noise = torch.randn(parameter.shape, generator=rng, dtype=torch.float64)
                parameter.copy_(start[name] + _JITTER * noise)
        image = torch.randn(1, *shape, generator=rng, dtype=torch.float64)
        gradients = _gradients(network, image, live, draw)
        least = _NOISE * max(float(g.abs().max()) for g in gradients.values() if g.numel())
        for name, gradient in gradients.items():
            alive[name] |= gradient.abs() > least
        for channel in range(shape[0]):
            without = image.clone()
            without[:, channel] = 0
            for name, gradient in _gradients(network, without, live, draw).items():
                silent[name][channel] &= gradient == 0
    masks = {n: silent[n] & alive[n] for n in live}
    partial = {n: mask for n, mask in masks.items() if bool(mask.any())}
    for channel in range(shape[0]):
        if not any(bool(mask[channel].any()) for mask in partial.values()):
            raise ConfigError(
                f"algorithm.mask_aware=true: no weight of this network reads input channel "
                f"{channel} alone; set it to false, or choose a model whose first layer reads "
                "channels separately."
            )
    return partial


def _smooth(network: nn.Module) -> nn.Module:
    """Removes ReLUs, behind which a weight may have no gradient by chance."""
    for module in network.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU | nn.ReLU6):
                setattr(module, name, nn.Softplus())
    return network


def _smaller(network: nn.Module, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the smallest of a few patches that the network accepts: a full one takes minutes."""
    for side in (32, 64):
        small = (shape[0], *(min(s, side) for s in shape[1:]))
        try:
            with torch.no_grad():
                network(torch.zeros(1, *small, dtype=torch.float64))
        except (RuntimeError, ValueError, AssertionError, IndexError, TypeError):
            continue  # too small for its levels, or made for one size
        return small
    return tuple(shape)


def _gradients(network: nn.Module, image: Tensor, live: Mapping[str, Tensor], draw: int) -> Tensors:
    """Returns the gradients of a random sum of all outputs."""
    rng = torch_rng(0, "outputs", draw)
    with torch.enable_grad():
        terms = [
            (out * torch.randn(out.shape, generator=rng, dtype=torch.float64)).sum()
            for out in tensors_in(network(image))
        ]
        of_inputs = torch.autograd.grad(
            torch.stack(terms).sum(), list(live.values()), allow_unused=True, materialize_grads=True
        )
    return dict(zip(live, of_inputs, strict=True))


def mean_where_present(
    items: Sequence[Mapping[str, Tensor]],
    weights: Sequence[float],
    present: Tensor,
    reads: Mapping[str, Tensor],
) -> Tensors:
    """Returns a weighted mean; weights that read a channel count only clients that have it.

    If all clients have all channels it equals :func:`medfed.common.tensors.weighted_mean` bit for
    bit. `present` is ``(N, C)`` bool, each client's channels. The result is the mean; 0 for weights
    that read a channel which no client has.

    Example:
        >>> reads = {"w": torch.tensor([[True, False], [False, True]])}
        >>> items = [{"w": torch.tensor([2.0, 5.0])}, {"w": torch.tensor([4.0, 5.0])}]
        >>> present = torch.tensor([[True, False], [True, False]])
        >>> mean_where_present(items, [1, 3], present, reads)
        {'w': tensor([3.5000, 0.0000])}
    """
    mean = weighted_mean(items, weights)
    for name in mean.keys() & reads.keys():
        mask = reads[name].to(mean[name].device)
        # (N, *entry): whether a client has every channel that an entry reads.
        has = torch.stack([~mask[~here.to(mask.device)].any(0) for here in present])
        if bool(has.all()):
            continue
        total, share = torch.zeros_like(mean[name]), torch.zeros_like(mean[name])
        for item, weight, there in zip(items, weights, has, strict=True):
            total += torch.where(there, item[name] * weight, 0)
            share += there.to(share) * weight
        over_present = torch.where(share > 0, total / share, 0)
        mean[name] = torch.where(has.all(0), mean[name], over_present)
    return mean


def lacks(channels: Tensor) -> dict[str, float]:
    """Encodes the missing channels as scalars of a message: a number each, 8 bytes.

    `channels` is ``(C,)`` bool, those that are there.

    Example:
        >>> lacks(torch.tensor([True, False, True, False]))
        {'lacks/0': 1.0, 'lacks/1': 3.0}
    """
    missing = (~channels.bool()).nonzero().flatten().tolist()
    return {f"{LACKS}{k}": float(channel) for k, channel in enumerate(missing)}


def presence(scalars: Mapping[str, float], count: int) -> Tensor:
    """Reads the scalars of :func:`lacks`.

    Returns ``(C,)`` bool.

    Example:
        >>> presence({"lacks/0": 1.0, "reach": 0.5}, 3).tolist()
        [True, False, True]
    """
    present = torch.ones(count, dtype=torch.bool)
    for name, value in scalars.items():
        if name.startswith(LACKS):
            if value not in range(count):
                raise CodecError(f"A reply lacks channel {value:g}, of {count} channels.")
            present[int(value)] = False
    return present
