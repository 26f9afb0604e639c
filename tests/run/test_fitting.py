"""Whether a network fits is said before training, in one sentence; deep supervision by hand."""

from __future__ import annotations

import logging
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from monai.networks import nets
from monai.utils import optional_import
from omegaconf import open_dict
from torch import Tensor, nn

from medfed.config.compose import described, load
from medfed.config.description import describe
from medfed.models.classification import ClassificationTask
from medfed.models.segmentation import SegmentationTask, dice_bce_loss
from medfed.models.task import TaskModule
from medfed.run.assembly import read_data, task_for
from medfed.run.federating import federate
from medfed.standalone.errors import ConfigError, MedfedError
from medfed.standalone.outputs import heads
from tests.federation.test_tied_weights import dynunet
from tests.integration.runs import IMAGING, data_and_task
from tests.registered import register

SGD = partial(torch.optim.SGD, lr=0.1)
DIGITS = ("experiment=digits_pfednet", "folder=none", "logger=none", "progress=false")
HEART = tuple(o for o in IMAGING if "channels" not in o and "strides" not in o)


class Body(nn.Module):
    """A body whose layers no table knows, and a head; ``last`` is what the head ends in."""

    def __init__(
        self, in_channels: int, out_channels: int, last: str = "Identity", width: int = 8,
        more: int = 0, drop: int = 0, bare: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(in_channels, width, 3, padding=1), nn.BatchNorm2d(width)
        )
        self.wide = nn.Conv2d(width, width, 3, padding=1)
        self.head = nn.Conv2d(width, out_channels - drop, 1)
        self.last = nn.Softmax(1) if last == "Softmax" else getattr(nn, last)()
        self.more, self.bare = more, bare

    def forward(self, image: Tensor) -> Any:
        deep = self.wide(self.body(image).relu())
        if self.bare:
            return {"features": [deep]}
        logits = self.last(self.head(deep).mean((2, 3)))
        return (logits, [deep] * self.more) if self.more else logits


class BodyOfRegions(Body):
    """The same for segmentation."""

    def forward(self, image: Tensor) -> Any:
        """All places, and not their mean."""
        return self.last(self.head(self.wide(self.body(image).relu())))


register(__name__)


@pytest.fixture(scope="module")
def digits():
    return read_data(described(DIGITS))


@pytest.fixture(scope="module")
def heads_of_brats(tmp_path_factory):
    root = tmp_path_factory.mktemp("brats")
    small = (
        f"data.root={root}", "data.generated.hospitals=2", "data.generated.patients=4",
        "data.generated.shape=[32,32,8]", "folder=none",
    )  # fmt: skip
    return (*HEART, *small), read_data(described([*HEART, *small]))


def fitted(config: Any, data: Any, target: str, **network: Any) -> TaskModule:
    """The task around another network, as a plugin's yaml would have it."""
    with open_dict(config):
        shared = {k: f"${{{k}}}" for k in ("in_channels", "out_channels")}
        config.model.network = {"_target_": target, **shared, **network}
        config.model.personal = None
    return task_for(describe(config), data)[1]


def own(data: Any, **network: Any) -> TaskModule:
    return fitted(load(DIGITS), data, f"{__name__}.Body", **network)


@pytest.mark.parametrize("last", ["Softmax", "Sigmoid", "Tanh", "ReLU"])
def test_probabilities_in_place_of_logits_are_refused(digits, last):
    with pytest.raises(ConfigError, match=f"Body ends in {last.capitalize()[:4]}.*post_activation"):
        own(digits, last=last)


def test_monais_vit_ends_in_tanh_unless_it_is_told(digits, caplog):
    size = {"img_size": [8, 8], "patch_size": [4, 4], "hidden_size": 12, "mlp_dim": 12,
            "num_layers": 2, "num_heads": 2, "classification": True, "spatial_dims": 2}  # fmt: skip
    config = load(DIGITS)
    with open_dict(config):
        config.model.personal = None
        config.model.network = {
            "_target_": "monai.networks.nets.ViT", "in_channels": "${in_channels}",
            "num_classes": "${out_channels}", **size,
        }  # fmt: skip
    with pytest.raises(ConfigError, match=r"ViT ends in Tanh, .*post_activation=null"):
        task_for(describe(config), digits)
    with open_dict(config):
        config.model.network.post_activation = None
    with caplog.at_level(logging.INFO):
        settled, task = task_for(describe(config), digits)
    assert "returns 2 more tensors in addition to its logits; the loss ignores them" in caplog.text
    assert task.personal == ("classification_head.*",)
    federate(settled, digits, task)


def test_a_head_that_nobody_named_is_found_said_and_written_down(digits, caplog):
    network = {"_target_": f"{__name__}.Body", "in_channels": "${in_channels}"}
    network |= {"out_channels": "${out_channels}", "more": 3}
    config = described(DIGITS).replacing({"model.network": network, "model.personal": None})
    with caplog.at_level(logging.INFO):
        config, task = task_for(config, digits)
    size = sum(p.numel() for p in task.network.parameters())
    share = f"{100 * 90 / size:.2g}"
    assert (
        f"next to the output are personal: head.* (90 parameters, {share} %); model" in caplog.text
    )
    assert list(config.model.personal) == list(task.personal) == ["head.*"]
    federation, _ = federate(config, digits, task)
    assert federation.clients[federation.ids[0]].split.personal == ("head.weight", "head.bias")
    _, again = task_for(config, digits)  # as a resumed run does
    assert again.personal == task.personal


def test_a_sliver_of_a_segmentation_asks_for_a_pattern(heads_of_brats):
    overrides, data = heads_of_brats
    target = f"{__name__}.BodyOfRegions"
    with pytest.raises(ConfigError) as caught:
        fitted(load(overrides), data, target, width=32)
    text = str(caught.value)
    assert "PFedNet keeps a part" in text
    assert "head.*, have 33 parameters (0.31%)" in text
    assert '\'model.personal=["wide.*","head.*"]\'' in text
    assert "body.* (1,248), wide.* (9,248), head.* (33)" in text
    plain = load([*overrides, "algorithm=fedavg"])
    assert fitted(plain, data, target, width=32).personal == ()
    share = fitted(load(overrides), data, target, width=2)  # 3 of 98 parameters
    assert share.personal == ("head.*",)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ({"drop": 1}, r"Body turns images \(2, 1, 8, 8\) into logits \(2, 9\).* need \(2, 10\)"),
        ({"bare": True}, "returns dict without a tensor of its own"),
        ({"in_channels": 3}, r"cannot take the batches of these data \(image \(32, 1, 8, 8\)"),
    ],
)
def test_what_does_not_fit_is_one_sentence(digits, network, message):
    with pytest.raises(MedfedError, match=message) as caught:
        own(digits, **network)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("side", "message"),
    [(32, "Expected more than 1 spatial element"), (48, "must be divisible by 2")],
)
def test_patches_that_a_swin_unetr_cannot_take(heads_of_brats, side, message):
    overrides, _ = heads_of_brats
    sizes = ("data.generated.shape=[64,64,8]", f"data.patch_size=[{side},{side}]")
    swin = ("model=swin_unetr", "model.network.norm_name=instance")
    config = load([*overrides, *sizes, *swin])
    with pytest.raises(ConfigError, match=f"cannot take the batches.*{message}.*patch_size"):
        data_and_task(describe(config))


def test_a_package_that_is_missing_is_named(heads_of_brats, monkeypatch):
    overrides, _ = heads_of_brats
    missing, _ = optional_import("einops_that_is_not", name="rearrange")
    swin: ModuleType = __import__("monai.networks.nets.swin_unetr", fromlist=["swin_unetr"])
    monkeypatch.setattr(swin, "rearrange", missing)
    sizes = ("data.generated.shape=[64,64,8]", "data.patch_size=[32,32]", "model=swin_unetr")
    config = load([*overrides, *sizes])
    with pytest.raises(ConfigError, match=r"SwinUNETR needs the package einops_that_is_not"):
        data_and_task(describe(config))


SMALLER = {
    "dynunet": dynunet,
    "segresnet_ds": lambda: nets.SegResNetDS(2, 8, 1, 2, blocks_down=(1, 1, 1), dsdepth=2),
    "unet_pp": lambda: nets.BasicUNetPlusPlus(2, 1, 2, (4,) * 6, deep_supervision=True),
}


@pytest.mark.parametrize("name", SMALLER)
def test_deep_supervision_against_a_loop(name):
    torch.manual_seed(0)
    network = SMALLER[name]().train()
    task = SegmentationTask(network, SGD, regions=["whole", "core"], exclusive=False)
    image = torch.randn(2, 1, 32, 32)
    label = (torch.rand(2, 2, 32, 32) > 0.6).float()
    found = heads(network(image), image)
    found = found[::-1] if name == "unet_pp" else found
    assert len(found) == {"dynunet": 2, "segresnet_ds": 2, "unet_pp": 4}[name]
    expected, total = 0.0, 0.0
    for k, head in enumerate(found):
        step = 32 // head.shape[-1]  # the nearest voxel is that in the middle, rounded up
        small = label[:, :, step // 2 :: step, step // 2 :: step]
        expected = expected + dice_bce_loss(head, small) / 2**k
        total += 1 / 2**k
    torch.testing.assert_close(task.loss({"image": image, "label": label}), expected / total)
    network.eval()
    main = heads(network(image), image)[-1 if name == "unet_pp" else 0]
    assert torch.equal(task.forward(image), main)
    assert task.forward(image).shape == (2, 2, 32, 32)


def test_a_trial_leaves_no_trace(digits):
    config = load(DIGITS)
    task = fitted(config, digits, f"{__name__}.Body")
    assert isinstance(task, ClassificationTask)
    assert task.network.body[1].num_batches_tracked == 0
    assert torch.equal(task.network.body[1].running_mean, torch.zeros(8))
    assert all(p.grad is None for p in task.network.parameters())
    again = fitted(load(DIGITS), digits, f"{__name__}.Body")
    for a, b in zip(task.network.parameters(), again.network.parameters(), strict=True):
        assert torch.equal(a, b)
