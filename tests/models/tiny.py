"""Tiny tasks and batches, one of each kind."""

from __future__ import annotations

import functools

import torch

from medfed.models.classification import ClassificationTask, RiskTask
from medfed.models.networks.densenet import densenet_bc
from medfed.models.networks.small import LinearRegression, LogisticRegression
from medfed.models.networks.unet import unet
from medfed.models.regression import RegressionTask
from medfed.models.segmentation import SegmentationTask
from medfed.models.task import TaskModule

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
STEP = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
KINDS = ("segmentation", "classes", "classification", "risk", "regression")


def make_task(kind: str, **options: object) -> TaskModule:
    torch.manual_seed(0)
    if kind == "segmentation":
        net = unet(2, 2, 2, channels=(4, 8), strides=(2,))
        options = {"regions": ["whole", "core"], "patch_size": [16, 16], **options}
        return SegmentationTask(net, SGD, STEP, **options)
    if kind == "classes":
        net = unet(2, 2, 3, channels=(4, 8), strides=(2,))
        options = {"regions": ["rim", "core"], "exclusive": True, "patch_size": [16, 16], **options}
        return SegmentationTask(net, SGD, STEP, **options)
    if kind == "classification":
        net = densenet_bc(2, 1, 2, growth_rate=2, block_config=(2, 2), stem="small")
        return ClassificationTask(net, SGD, STEP, **options)
    if kind == "regression":
        return RegressionTask(LinearRegression(5), SGD, STEP, **options)
    return RiskTask(LogisticRegression(5), SGD, STEP, **options)


def make_samples(kind: str, n: int = 32, size: int = 16) -> list[dict[str, torch.Tensor]]:
    """A learnable problem: bright squares, bright images, a positive or a large sum of features."""
    g = torch.Generator().manual_seed(1)
    samples = []
    for i in range(n):
        if kind in ("segmentation", "classes"):
            label = torch.zeros(2, size, size)
            label[0, 3 : 8 + i % 5, 4:11], label[1, 5:8, 6:9] = 1, 1
            if kind == "classes":  # no pixel is in two of them
                label[0] -= label[1]
            image = label + 0.2 * torch.randn(2, size, size, generator=g)
            samples.append({"image": image, "label": label, "case": torch.tensor(i // 4)})
            continue
        shape = (1, 8, 8) if kind == "classification" else (5,)
        image = torch.randn(shape, generator=g) + (i % 2) - 0.5
        label = image.sum() if kind == "regression" else torch.tensor(i % 2)
        samples.append({"image": image, "label": label})
    return samples


def make_batch(kind: str, n: int = 8, size: int = 16) -> dict[str, torch.Tensor]:
    return torch.utils.data.default_collate(make_samples(kind, n, size))
