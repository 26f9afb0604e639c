"""Augmentation against what it must leave alone, and against SciPy and NumPy where it acts."""

import re
from dataclasses import replace

import pytest
import torch
from monai.transforms import Compose, RandFlipd, RandGaussianNoised
from scipy.ndimage import affine_transform, center_of_mass

from medfed.common.seeding import torch_rng
from medfed.config.allowed import CONFIG_DIR
from medfed.config.compose import build
from medfed.datamodules.augmentation import Augmentation, augmented
from medfed.datamodules.client_data import ClientData
from medfed.standalone.errors import ConfigError
from tests.contract.names import data_yamls, load
from tests.sweeps import sweep

RECIPES = sorted(path.stem for path in (CONFIG_DIR / "augment").glob("*.yaml"))
SIZES = {2: (24, 24), 3: (16, 16, 12)}
ON_IMAGES = [p.stem for p in data_yamls() if "augment: ${augment}" in p.read_text()]
MEASURED = ("brats_pfednet", "brats_ppfl", "cer_stc", "cer_stc_brats", "digits_conflict_ppfl")
MEASURED += ("digits_pfednet", "digits_ppfl", "luna16_pfednet", "luna16_ppfl", "medmnist_pfednet")
MEASURED += ("qupel_brats", "qupel_digits", "qupel_luna16", "retina_pfednet")
CHANCES = [f for f in vars(Augmentation()) if f.endswith("_chance")]


def recipe(name):
    return build(load([f"augment={name}"]).augment)


def strong(**chances):
    """A recipe whose strengths are those of the shipped one, and whose chances are given."""
    shipped = vars(recipe("nnunet"))
    return Augmentation(
        **{**shipped, "offset": 0.1, "tilt": 0.0, **dict.fromkeys(CHANCES, 0.0), **chances}
    )


def heads(count, dims, channels=3, regions=2):
    """Blobs of noise in air, with labels inside; the last channel is absent."""
    generator = torch.Generator().manual_seed(0)
    image = 1 + torch.rand(count, channels, *SIZES[dims], generator=generator)
    axes = torch.meshgrid(*[torch.linspace(-1, 1, n) for n in SIZES[dims]], indexing="ij")
    radius = sum(a**2 for a in axes).sqrt()
    image = image * (radius < 0.7)
    image[:, -1] = 0
    label = torch.stack([(radius < r).float() for r in (0.5, 0.25)[:regions]])
    return image, label.expand(count, *label.shape).clone()


def client(name, dims):
    image, label = heads(32, dims)
    return ClientData(
        id="clinic",
        train={"image": image, "label": label, "case": torch.arange(32)},
        evaluation={},
        channels=torch.tensor([True, True, False]),
        label_counts=torch.ones(3),
        patients={},
        batch_size=32,
        augment=recipe(name).build(SIZES[dims], (0, 1, 2), regions=True),
    )


@sweep("dims", [2, 3])
@sweep("name", RECIPES)
def test_air_absent_channels_and_labels_stay_what_they_are(name, dims):
    data = client(name, dims)
    image, label = heads(32, dims)
    (batch,) = data.train_batches(seed=1)
    assert torch.equal(data.train["image"], image)  # nothing in place
    assert torch.equal(data.train["label"], label)
    new, moved = batch["image"], batch["label"]
    assert new.shape == image.shape
    assert new.dtype == moved.dtype == torch.float32
    assert torch.isfinite(new).all()
    assert not new[:, 2].any()
    assert set(moved.unique().tolist()) == {0.0, 1.0}
    assert (new[:, 0][moved[:, 0] > 0] != 0).all()  # the label lies in the head
    order = torch.randperm(32, generator=torch_rng(1, "order"))
    assert torch.equal(new, image[order]) == (name == "none")
    still = replace(recipe(name), flip_chance=0.0, affine_chance=0.0)
    noisy, _ = augmented(still.build(SIZES[dims], (), True), image, label, seed=1)
    assert not noisy[:, 0][image[:, 0] == 0].any()  # air, in spite of noise and offsets


@sweep("dims", [2, 3])
@sweep("name", RECIPES)
def test_images_of_a_class_keep_their_label(name, dims):
    image, label = heads(8, dims)[0], torch.arange(8)
    new, same = augmented(recipe(name).build(SIZES[dims], (0, 1)), image, label, seed=1)
    assert new.shape == image.shape
    assert torch.isfinite(new).all()
    assert torch.equal(same, label)


def test_every_data_set_of_images_takes_every_recipe():
    assert len(ON_IMAGES) >= 7
    for name in ON_IMAGES:
        assert load([f"data={name}"]).data.augment.affine_chance > 0  # light, unless it is said
    for option in RECIPES:
        node = load([f"data={ON_IMAGES[0]}", f"augment={option}"]).data.augment
        assert isinstance(build(node), Augmentation)


def test_experiments_that_were_measured_without_are_not_augmented():
    for name in MEASURED:
        text = (CONFIG_DIR / "experiment" / f"{name}.yaml").read_text()
        assert "override /augment: none" in text, name
        masks = re.search(r"override /data: (\w+)", text)[1] in ("brats", "image_masks")
        assert masks == ("patches: fixed" in text), name
    assert build(load(["experiment=luna16_pfednet"]).augment).quarter_chance == 0.5


def test_what_is_drawn_depends_on_the_seed_alone():
    image, label = heads(16, 2)
    chain, other = (recipe("nnunet").build(SIZES[2], (0,), True) for _ in range(2))
    expected = augmented(chain, image, label, seed=5)
    for seed in (1, 2, 3):  # a history of its own
        augmented(other, image[:seed], label[:seed], seed)
    state = torch.get_rng_state()
    again = augmented(other, image, label, seed=5)
    assert all(torch.equal(a, b) for a, b in zip(expected, again, strict=True))
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(again[0], augmented(other, image, label, seed=6)[0])


@sweep("chance", CHANCES)
def test_each_happens_as_often_as_it_should(chance):
    image, label = heads(600, 2)
    chain = strong(**{chance: 0.3}).build(SIZES[2], (0,), regions=True)
    new, moved = augmented(chain, image, label, seed=0)
    altered = (new != image).flatten(1).any(dim=1)
    assert 0.24 < altered.float().mean() < 0.36  # 0.3 with a deviation of 0.019
    inside = (moved != label).flatten(1).any(dim=1)
    assert not inside[~altered].any()
    moves = chance in ("flip_chance", "quarter_chance", "affine_chance")
    assert moves or not inside.any()


def test_flips_and_quarter_turns_are_those_of_numpy():
    image = torch.arange(2 * 3 * 4 * 4.0).reshape(2, 3, 4, 4)
    flipped, label = augmented(
        Augmentation(flip_chance=1.0).build((4, 4), (1,), True), image, image[:, :1], seed=0
    )
    assert (flipped.numpy() == image.numpy()[..., ::-1]).all()
    assert torch.equal(label, flipped[:, :1])
    chain = Augmentation(quarter_chance=1.0).build((4, 4))
    seen = set()
    for seed in range(20):
        turned = augmented(chain, image, torch.zeros(2), seed)[0]
        for one, before in zip(turned, image, strict=True):
            turns = [k for k in (1, 2, 3) if torch.equal(one, before.rot90(k, (1, 2)))]
            assert len(turns) == 1
            seen |= {*turns}
    assert seen == {1, 2, 3}
    oblong = image[:, :, :2]
    turned = augmented(Augmentation(quarter_chance=1.0).build((2, 4)), oblong, torch.zeros(2), 0)[0]
    assert torch.equal(turned, oblong.flip((2, 3)))


def test_affine_maps_are_those_of_scipy(monkeypatch):
    from monai.transforms import utils

    made = []
    create = utils.create_rotate
    monkeypatch.setattr(utils, "create_rotate", lambda d, r: made.append(r) or create(d, r))
    image, label = heads(1, 2)
    chain = Augmentation(affine_chance=1.0, rotation=30.0).build(SIZES[2], (), True)
    new, moved = augmented(chain, image, label, seed=3)
    matrix = create(2, made[0])[:2, :2]
    centre = (torch.tensor(SIZES[2]).numpy() - 1) / 2
    offset = centre - matrix @ centre
    for values, ours, order in ((image[0, 0], new[0, 0], 1), (label[0, 1], moved[0, 1], 0)):
        expected = affine_transform(values.numpy(), matrix, offset, order=order, mode="mirror")
        assert abs(expected - ours.numpy()).mean() < 1e-3
    assert 0.5 < abs(made[0][0]) * 57.3 <= 30


def test_image_and_label_move_together():
    axes = torch.meshgrid(torch.arange(24.0), torch.arange(24.0), indexing="ij")
    blob = (((axes[0] - 8) ** 2 + (axes[1] - 13) ** 2) < 16).float()[None, None].repeat(40, 1, 1, 1)
    chain = strong(flip_chance=0.5, affine_chance=1.0).build((24, 24), (0, 1), True)
    image, label = augmented(chain, blob, blob, seed=0)
    for one, other in zip(image[:, 0].numpy(), label[:, 0].numpy(), strict=True):
        gap = [a - b for a, b in zip(center_of_mass(one), center_of_mass(other), strict=True)]
        assert max(map(abs, gap)) < 0.4
    areas = label.sum(dim=(1, 2, 3)) / blob[0].sum()
    assert 0.4 < areas.min() < 0.8  # 0.7 to 1.3 along both axes
    assert 1.2 < areas.max() < 1.8


def test_a_transform_of_ones_own_is_reseeded_for_every_batch():
    image, label = heads(4, 2)
    own = Compose([RandFlipd(["image", "label"], 0.5, 0), RandGaussianNoised(["image"], 1.0)])
    first = augmented(own, image, label, seed=1)
    augmented(own, image, label, seed=2)
    again = augmented(own, image, label, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert type(first[0]) is torch.Tensor

    def unseeded(sample):
        return {**sample, "image": sample["image"] + torch.rand(())}

    one, other = (augmented(unseeded, image, label, seed=1)[0] for _ in range(2))
    assert torch.equal(one, other)


@sweep(
    ("settings", "says"),
    [
        ({"flip_chance": 1.5}, r"augment.flip_chance must be in \[0, 1\], not 1.5"),
        ({"resolution": 0.0}, r"augment.resolution must be in \[0.1, 1\], not 0"),
        ({"gamma": 0.5}, r"augment.gamma must be in \[1, 10\], not 0.5"),
        ({"noise": float("nan")}, r"augment.noise must be in \[0, inf\), not nan"),
    ],
)
def test_a_strength_without_meaning_is_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        Augmentation(**settings)
