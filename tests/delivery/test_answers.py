"""Of a network that answers several things a bundle takes what was trained and evaluated."""

from __future__ import annotations

import torch
from monai.networks.nets import BasicUNetPlusPlus
from torch import Tensor, nn

from medfed.models.classification import ClassificationTask
from medfed.models.segmentation import SegmentationTask
from medfed.standalone.outputs import only_logits


class Named(nn.Module):
    """Its logits come second, but have a name."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Returns features and logits."""
        return {"features": x, "logits": self.head(x)}


@torch.no_grad()
def test_a_mapping_answers_its_logits():
    network, x = Named(), torch.randn(4, 3)
    trained = ClassificationTask(network, torch.optim.SGD).forward(x)
    assert torch.equal(trained, network.head(x))
    assert torch.equal(only_logits(network)(x), trained)


@torch.no_grad()
def test_of_the_heads_the_one_that_counts_answers():
    network = BasicUNetPlusPlus(2, 1, 2, (4,) * 6, deep_supervision=True).eval()
    image = torch.randn(1, 1, 32, 32)
    task = SegmentationTask(network, torch.optim.SGD, regions=["a", "b"], exclusive=False)
    trained = task.forward(image)
    assert torch.equal(trained, network(image)[-1])
    assert torch.equal(only_logits(network)(image), trained)
