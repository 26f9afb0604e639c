"""A network's outputs: one tensor, several under deep supervision, or further values.

======================  ============================================================================
a tensor                the output; with one axis more than the image, as MONAI's DynUNet gives in
                        training, ``(B, heads, C, *spatial)``, a stack of heads
a list or a tuple       a head, and further heads: tensors as the first one, of its size or smaller
a mapping               the same; ``out`` or ``logits`` first, if it has them
======================  ============================================================================

Other outputs, such as the hidden states of MONAI's ViT, are not heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .errors import ConfigError

_FIRST = ("out", "logits")


def heads(output: object, image: Tensor) -> list[Tensor]:
    """Returns the outputs for the loss; the first one is used in evaluation."""
    if isinstance(output, Tensor):
        return list(output.unbind(1)) if output.ndim == image.ndim + 1 else [output]
    candidates = [t for t in _parts(output) if isinstance(t, Tensor)]
    if not candidates:
        what = f"The network returns {type(output).__name__} without a tensor of its own"
        raise ConfigError(f"{what}; it must return its logits, alone or first.")
    # Only a segmentation has heads that are as large as the image, or that many times smaller.
    main = candidates[0]
    if main.ndim != image.ndim or main.ndim < 3:
        return [main]
    return [main, *(t for t in candidates[1:] if _is_head(t, main))]


def last_counts(network: nn.Module) -> bool:
    """Returns whether of several outputs the last one, the deepest, counts in evaluation."""
    classes = type(getattr(network, "common", network)).__mro__  # common: of canonical models
    return any(c.__qualname__ == "BasicUNetPlusPlus" for c in classes)


def only_logits(network: nn.Module) -> nn.Module:
    """Lets a network answer the output alone that counts in evaluation, and returns it."""
    place = -1 if last_counts(network) else 0

    def first(_: nn.Module, inputs: Any, answer: Any) -> Tensor:
        return heads(answer, inputs[0])[place]

    network.register_forward_hook(first)
    return network


def extras(output: object, image: Tensor) -> int:
    """Returns how many other values a network returns in addition to its heads.

    Example:
        >>> import torch
        >>> extras((torch.ones(2, 3), [torch.ones(2, 16, 9)] * 4), torch.ones(2, 1, 8, 8))
        4
    """
    if isinstance(output, Tensor):
        return 0
    tensors = [t for part in _parts(output) for t in tensors_in(part)]
    return len(tensors) - len(heads(output, image))


def shares(count: int) -> list[float]:
    """Returns the weights of deep supervision: 1, 1/2, 1/4 and so on, which sum to 1.

    Source: F. Isensee et al., "nnU-Net", Nature Methods 2021.

    Example:
        >>> shares(3)
        [0.5714285714285714, 0.2857142857142857, 0.14285714285714285]
    """
    raw = [0.5**i for i in range(count)]
    return [weight / sum(raw) for weight in raw]


def resized(batch: Mapping[str, Tensor], head: Tensor) -> dict[str, Tensor]:
    """Returns a batch whose label has the size of a head, by nearest voxels.

    Example:
        >>> import torch
        >>> label = torch.tensor([[[[1.0, 1.0, 0.0, 0.0]]]])
        >>> resized({"label": label}, torch.ones(1, 2, 1, 2))["label"].tolist()
        [[[[1.0, 0.0]]]]
    """
    label = batch["label"]
    if label.shape[2:] == head.shape[2:]:
        return dict(batch)
    small = F.interpolate(label.to(head.dtype), size=head.shape[2:], mode="nearest-exact")
    return {**batch, "label": small.to(label.dtype)}


def _parts(output: object) -> Sequence[object]:
    if isinstance(output, Mapping):
        names = [*(n for n in _FIRST if n in output), *(n for n in output if n not in _FIRST)]
        return [output[n] for n in names]
    return list(output) if isinstance(output, list | tuple) else []


def _is_head(tensor: Tensor, main: Tensor) -> bool:
    alike = tensor.shape[:2] == main.shape[:2] and tensor.ndim == main.ndim
    return alike and all(a <= b for a, b in zip(tensor.shape, main.shape, strict=True))


def tensors_in(part: object) -> Iterator[Tensor]:
    """Yields the tensors of an output, at any depth."""
    if isinstance(part, Tensor):
        yield part
    else:
        for inner in _parts(part):
            yield from tensors_in(inner)
