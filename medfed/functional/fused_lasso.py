"""The 1-D fused lasso of CER: what is sent, drawn together along its length.

Source: pFedNet, the communication-efficient regulariser (CER), corrected. The printed minimisation
over models, ``argmin_y <g, y> + gamma ||Lambda (y - y_t)||_1 + ||y - y_t||^2 / (2 eta)``, becomes
with ``w = (y_t - y) / eta`` the proximal map below, from which eta and y_t have gone. It is solved
exactly, in linear time, by Johnson's dynamic programme (Johnson 2013), not by the printed ADMM,
which ``benchmarks/fused_lasso.py`` has for comparison.

======  ==================================================================
symbol  here
======  ==================================================================
g       ``g``, a gradient, a displacement or any other vector to be sent
Lambda  differences of neighbours; its last row is w_d alone (w_{d+1} = 0)
w       the result
======  ==================================================================
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def fused_lasso(g: Tensor, gamma: float) -> Tensor:
    """Minimises ``||w - g||^2 / 2 + gamma (sum_{i<d} |w_i - w_{i+1}| + |w_d|)`` over w.

    The result is exact up to rounding and piecewise constant: where neighbours are fused they are
    the same float, bit by bit, in float32 too. A NumPy array goes in by ``torch.from_numpy``,
    which copies nothing.

    Args:
        g: ``(d,)`` float32 or float64 tensor on any device; d may be 0. Sums are kept in float64.
        gamma: 0 returns g; infinity, and anything above ``max_i |g_1 + ... + g_i|``, returns zeros.

    Returns:
        ``(d,)`` tensor in the dtype and on the device of ``g``, sharing no memory with it.

    Raises:
        ConfigError: If ``g`` is no such tensor, or gamma is negative or NaN.
        ValueError: If ``g`` holds NaN or infinity, or numbers whose sum overflows.

    Example:
        >>> fused_lasso(torch.tensor([4.0, 1.0, 2.0]), gamma=0.5).tolist()
        [3.5, 1.5, 1.5]
        >>> fused_lasso(torch.tensor([4.0, 1.0, 2.0]), gamma=float("inf")).tolist()
        [0.0, 0.0, 0.0]
    """
    source = g.detach().cpu().contiguous()
    total = _magnitude(source)
    if gamma == 0:
        return g.detach().clone()
    if gamma >= total:
        return torch.zeros_like(g, memory_format=torch.contiguous_format)
    # Imported on first use: compiled code has no business in `import medfed`.
    from medfed.functional.kernels import solve_chain

    out = torch.empty(g.shape, dtype=g.dtype)
    solve_chain(source.numpy(), gamma, out.numpy())
    return out.to(g.device)


def _magnitude(g: Tensor) -> float:
    """The sum of magnitudes in float64, a bound on every sum in the dynamic programme."""
    with np.errstate(over="ignore"):
        total = float(np.abs(g.numpy()).sum(dtype=np.float64))
    # Four times, because a line's height may reach twice gamma plus the sum.
    if 4 * total < float("inf"):
        return total
    bad = (~torch.isfinite(g)).nonzero().flatten().tolist()
    if bad:
        raise ValueError(f"g[{bad[0]}] is {float(g[bad[0]])}, but it must be finite.")
    raise ValueError("g holds numbers so large that their sum overflows; scale it down.")
