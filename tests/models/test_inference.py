"""Whole images of any size, which most networks accept in a margin only."""

import pytest
import torch
import torch.nn.functional as F
from monai.networks.nets import SwinUNETR

from medfed.models.networks.unet import basic_unet, unet
from medfed.standalone.inference import RegionInference


@pytest.mark.parametrize(
    ("build", "multiple"),
    [
        (unet, 16),
        (basic_unet, 1),  # it pads its features by itself
        (lambda *sizes: SwinUNETR(*sizes[1:], spatial_dims=2, feature_size=12), 32),
    ],
    ids=["unet", "basic_unet", "swin_unetr"],
)
def test_slices_of_any_size_get_the_least_margin(build, multiple):
    torch.manual_seed(0)
    network, inference = build(2, 1, 2).eval(), RegionInference()
    calls = []

    def counted(image):
        calls.append(tuple(image.shape[2:]))
        return network(image)

    with torch.no_grad():
        for image in torch.randn(2, 1, 1, 40, 72):
            wanted = [-(-side // multiple) * multiple for side in (40, 72)]
            above, left = [(n - side) // 2 for n, side in zip(wanted, (40, 72), strict=True)]
            whole = F.pad(image, (left, wanted[1] - 72 - left, above, wanted[0] - 40 - above))
            expected = network(whole)[..., above : above + 40, left : left + 72]
            assert torch.equal(inference.logits(counted, image), expected)
    assert calls[-2:] == [tuple(wanted)] * 2  # a second image of a size tries nothing else
    with torch.no_grad():
        fitting = torch.randn(1, 1, 32, 64)
        assert torch.equal(inference.logits(network, fitting), network(fitting))


def test_a_network_that_takes_no_size_says_its_first_reason():
    def refuses(image):
        raise RuntimeError(f"no images of {image.shape[2]}")

    with pytest.raises(RuntimeError, match="no images of 5"):
        RegionInference().logits(refuses, torch.zeros(1, 1, 5, 5))
