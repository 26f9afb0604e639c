"""Running variances of BatchNorm over hospitals: of all patients together.

The mean of the hospitals' variances lacks the variance between their means. With v_k and m_k of
hospital k and weights p_k, the variance of all is Σ p_k (v_k + m_k²) − (Σ p_k m_k)², or with a
centre c that all know Σ p_k (v_k + (m_k − c)²) − (Σ p_k m_k − c)². A hospital sends
v_k + (m_k − c)² in the place of v_k, where c is the mean that it has received; so sums and masks
need no other message, and nothing cancels. Its displacement is sent as v_k − v + (m_k − c)².
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from medfed.common.tensors import Tensors
from medfed.federation.wire.message import Message


def _pairs(names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yields the names of a running variance and its mean."""
    for variance in [name for name in names if name.endswith("running_var")]:
        if f".{variance}".endswith(".running_var") and (mean := f"{variance[:-3]}mean") in names:
            yield variance, mean


def second_moments(reply: Message, received: Message, averaged: Collection[str]) -> Message:
    """Replaces variances that the server averages by second moments about what was received.

    `averaged`: the parts whose weights the server averages; displacements it always does.

    Example:
        >>> import torch
        >>> own = {"running_var": torch.tensor(1.0), "running_mean": torch.tensor(3.0)}
        >>> reply = Message(parts={"shared": own}, kinds={"shared": "update"})
        >>> second_moments(reply, Message(), ()).parts["shared"]["running_var"]
        tensor(10.)
    """
    changed: dict[str, Tensors] = {}
    for part, tensors in reply.parts.items():
        update = reply.kinds.get(part) == "update"
        start = {} if update or part not in averaged else received.parts.get(part, {})
        pairs = [pair for pair in _pairs(tensors) if update or pair[1] in start]
        if pairs:
            centred = [_from(tensors[mean], start.get(mean)) for _, mean in pairs]
            squares = torch._foreach_mul(centred, centred)
            moments = torch._foreach_add([tensors[variance] for variance, _ in pairs], squares)
            changed[part] = tensors | dict(zip((v for v, _ in pairs), moments, strict=True))
    return replace(reply, parts={**reply.parts, **changed}) if changed else reply


def pooled_variances(mean: Tensors, start: Mapping[str, Tensor] | None) -> Tensors:
    """Returns the mean of a part with the variances of all hospitals' patients together.

    `start`: the model that the replies started from; ``None`` if they are displacements from it.

    Example:
        >>> import torch
        >>> mean = {"running_var": torch.tensor(10.0), "running_mean": torch.tensor(0.0)}
        >>> pooled_variances(mean, None)["running_var"]
        tensor(10.)
    """
    variances = {
        variance: mean[variance] - _from(mean[of], (start or {}).get(of)).square()
        for variance, of in _pairs(mean)
        if start is None or of in start
    }
    return {**mean, **variances} if variances else mean


def _from(tensor: Tensor, centre: Tensor | None) -> Tensor:
    return tensor if centre is None else tensor - centre
