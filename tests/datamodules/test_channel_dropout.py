"""Channel dropout: what is lost, how often, and what it is keyed by."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from medfed.config.compose import build, load
from medfed.datamodules.augmentation import Augmentation, ChannelDropout
from medfed.datamodules.client_data import ClientData
from medfed.standalone.errors import ConfigError

PRESENT = torch.tensor([True, False, True, True])


def images(count: int, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(count, 4, 3, 3) * PRESENT.view(1, 4, 1, 1)


def test_every_number_and_every_set_is_as_likely():
    """0, 1 or 2 of three channels: a third each, and a ninth for each set of one and of two."""
    count = 18_000
    _, kept = ChannelDropout(1.0)(images(count), PRESENT, seed=5)
    sets = Counter(map(tuple, kept[:, PRESENT].tolist()))
    assert not kept[:, 1].any()
    assert len(sets) == 7
    for subset, times in sets.items():
        expected = count / (3 if all(subset) else 9)
        assert abs(times - expected) < 5 * expected**0.5  # five standard deviations and more


@pytest.mark.parametrize("chance", [0.0, 0.3])
def test_the_chance_that_a_sample_may_lose_some(chance):
    count = 9_000
    image, kept = ChannelDropout(chance)(images(count), PRESENT, seed=1)
    lost = (kept.sum(1) < 3).float().mean()
    assert abs(lost - chance * 2 / 3) < 0.02
    assert chance or torch.equal(image, images(count))


def test_what_is_lost_is_zero_and_the_rest_is_as_it_was():
    image = images(64)
    before = image.clone()
    found, kept = ChannelDropout(1.0)(image, PRESENT, seed=2)
    assert torch.equal(image, before)
    for n in range(64):
        for c in range(4):
            expected = image[n, c] if kept[n, c] else torch.zeros(3, 3)
            assert torch.equal(found[n, c], expected)
    scaled, again = ChannelDropout(1.0, "sqrt")(image, PRESENT, seed=2)
    assert torch.equal(kept, again)
    factor = (3 / kept.sum(1)).sqrt().view(-1, 1, 1, 1)
    torch.testing.assert_close(scaled, found * factor)


def test_the_root_keeps_the_variance_of_a_sum_over_channels():
    torch.manual_seed(0)
    image, all_there = torch.randn(40_000, 4, 1), torch.ones(4, dtype=torch.bool)
    kept = torch.tensor([True, True, False, False]).expand(40_000, 4)
    plain = ChannelDropout().only(image, kept, all_there).sum(1)
    rooted = ChannelDropout(rescale="sqrt").only(image, kept, all_there).sum(1)
    assert plain.var().item() / 4 == pytest.approx(0.5, abs=0.02)
    assert rooted.var().item() / 4 == pytest.approx(1.0, abs=0.04)


def test_the_slices_of_a_contrast_are_lost_together():
    three = torch.randn(32, 4, 3, 2, 2) * PRESENT.view(1, 4, 1, 1, 1)
    whole, kept = ChannelDropout(1.0)(three, PRESENT, seed=3)
    planes = ChannelDropout(1.0, planes=3)
    flat, each = planes(three.flatten(1, 2), PRESENT.repeat_interleave(3), seed=3)
    assert torch.equal(each, kept.repeat_interleave(3, 1))
    assert torch.equal(flat, whole.flatten(1, 2))


def client(dropout: ChannelDropout | None) -> ClientData:
    image = images(10)
    block = {"image": image, "label": torch.zeros(10).long(), "case": torch.arange(10)}
    return ClientData(
        id="clinic",
        train=block,
        evaluation={"val": [block], "test": []},
        channels=PRESENT,
        label_counts=torch.tensor([10.0]),
        patients={"train": ["p"], "val": ["q"], "test": []},
        batch_size=4,
        channel_dropout=dropout,
    )


def test_batches_depend_on_the_epochs_seed_alone_and_keep_their_order():
    plain, dropping = client(None), client(ChannelDropout(1.0))
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first, again = list(dropping.train_batches(7)), list(dropping.train_batches(7))
    assert torch.equal(state, torch.get_rng_state())
    other = list(dropping.train_batches(8))
    masks = [torch.cat([b["channels"] for b in epoch]) for epoch in (first, again, other)]
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])
    assert len({tuple(b["channels"].flatten().tolist()) for b in first[:2]}) == 2
    for whole, part, same in zip(plain.train_batches(7), first, again, strict=True):
        assert torch.equal(part["image"], same["image"])
        mask = part["channels"].view(*part["channels"].shape, 1, 1)
        assert torch.equal(part["image"], whole["image"] * mask)
        assert torch.equal(part["label"], whole["label"])


def test_evaluation_loses_nothing():
    for dropping, plain in zip(
        client(ChannelDropout(1.0)).eval_batches("val"), client(None).eval_batches("val"),
        strict=True,
    ):  # fmt: skip
        assert torch.equal(dropping["image"], plain["image"])
        assert torch.equal(dropping["channels"], plain["channels"])


def test_what_the_configuration_gives():
    assert not Augmentation(channel_dropout=1.0, rescale="sqrt").alters
    assert Augmentation(channel_dropout=1.0, flip_chance=0.5).alters
    for key, wrong in (("channel_dropout", 2.0), ("channel_dropout", -0.1), ("rescale", "full")):
        with pytest.raises(ConfigError, match=rf"augment\.{key}"):
            Augmentation(**{key: wrong})
    keys = (*("augment=none", "augment.channel_dropout=0.5", "augment.rescale=sqrt"),)
    built = build(load(["experiment=brats_pfednet", *keys]).augment)
    assert (built.channel_dropout, built.rescale) == (0.5, "sqrt")


def test_a_client_whose_networks_see_neighbouring_slices_loses_whole_contrasts(tmp_path):
    keys = ["data.generated.shape=[16,16,8]", "data.generated.patients=8", "data.slices=3"]
    keys += ["data.generated.hospitals=2", "data.patch_size=[8,8]", "data.patches_per_patient=8"]
    keys += ["augment=none", "augment.channel_dropout=1.0", f"data.root={tmp_path}"]
    data = build(load(["experiment=brats_pfednet", *keys]).data)
    data.setup()
    for name, client in data.clients.items():
        there = data.plans[name].channels
        assert client.channels.tolist() == [has for has in there.tolist() for _ in range(3)]
        (batch, *_) = client.train_batches(0)
        contrasts = batch["channels"].unflatten(1, (4, 3))
        assert torch.equal(contrasts.any(2), contrasts.all(2))
        assert batch["image"].shape[1] == 12
        assert not batch["image"][~batch["channels"]].any()
