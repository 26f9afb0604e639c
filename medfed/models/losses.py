"""Losses that MONAI and PyTorch do not offer in the form needed, as pure functions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from monai.losses import DiceLoss
from torch import Tensor, nn

_DICE = DiceLoss(sigmoid=True, batch=True)


def focal_loss(
    logits: Tensor, target: Tensor, *, gamma: float = 2.0, weight: Tensor | None = None
) -> Tensor:
    """Focal loss on class indices: the mean over samples of ``-w_y (1 - p_y)^gamma log p_y``.

    MONAI's ``FocalLoss(use_softmax=True)`` also divides by the number of classes, which ties the
    learning rate to it; otherwise the two are equal.

    Source: T.-Y. Lin et al., "Focal Loss for Dense Object Detection", ICCV 2017, equation 5.

    Args:
        logits: ``(B, K)``.
        target: ``(B,)`` class indices.
        gamma: How strongly well-classified samples are discounted; 0 gives cross-entropy.
        weight: ``(K,)`` weight of each class, or None.

    Returns:
        A scalar.

    Example:
        >>> logits, target = torch.tensor([[0.0, 0.0]]), torch.tensor([1])
        >>> round(focal_loss(logits, target, gamma=2.0).item(), 4)  # 0.5 ** 2 * log(2)
        0.1733
    """
    log_p = -F.cross_entropy(logits, target, reduction="none")
    per_sample = -((1 - log_p.exp()) ** gamma) * log_p
    if weight is not None:
        per_sample = per_sample * weight[target]
    return per_sample.mean()


def dice_bce_loss(
    logits: Tensor, target: Tensor, *, dice_weight: float = 1.0, bce_weight: float = 1.0
) -> Tensor:
    """Soft Dice plus binary cross-entropy for regions that may overlap (sigmoid outputs).

    MONAI's ``DiceCELoss`` takes a softmax cross-entropy as soon as there are two channels, which
    contradicts nested regions; so its ``DiceLoss`` is joined with the binary cross-entropy. The
    Dice is pooled over the batch, lest a patch without a region decide its loss alone.

    Source: F. Milletari et al., "V-Net", 3DV 2016.

    Args:
        logits: ``(B, R, *spatial)``.
        target: ``(B, R, *spatial)`` with values 0 and 1.
        dice_weight: Factor of ``1 - Dice``, averaged over regions.
        bce_weight: Factor of the cross-entropy, averaged over voxels and regions.

    Returns:
        A scalar.

    Example:
        >>> logits, target = torch.full((1, 1, 2, 2), 20.0), torch.ones(1, 1, 2, 2)
        >>> round(dice_bce_loss(logits, target).item(), 6)
        0.0
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()  # sums over a patch exceed what half precision can count
    target = target.to(logits.dtype)
    bce = F.binary_cross_entropy_with_logits(logits, target)
    dice: Tensor = _DICE(logits, target)
    return dice_weight * dice + bce_weight * bce


def l2_penalty(network: nn.Module, l2: float) -> Tensor:
    """Half of ``l2`` times the squared norm of all parameters except biases and memberships.

    Args:
        network: The network; the memberships of a canonical model are mixing proportions.
        l2: The strength, 0 or more.

    Returns:
        A scalar.

    Example:
        >>> network = nn.Linear(2, 1)
        >>> _ = nn.init.constant_(network.weight, 3.0)
        >>> l2_penalty(network, 0.5).item()
        4.5
    """
    weights = [
        weight
        for name, weight in network.named_parameters()
        if not name.endswith(("bias", "membership"))
    ]
    return l2 / 2 * torch.stack([weight.square().sum() for weight in weights]).sum()
