"""Augmentation of training samples: MONAI's random transforms, and channel dropout.

The seed alone determines all random choices, and `ClientData` derives one for every batch. Channel
dropout zeroes some of the hospital's channels, chosen for each sample. With ``chance=1``
and ``rescale=None`` it follows Wagner et al., "Feasibility of federated learning from client
databases with different brain diseases and MRI modalities" (FedUniBrain), WACV 2025: 0 to C - 1
channels of every sample become zero, and nothing is rescaled.
"""

from __future__ import annotations

from contextlib import contextmanager
from itertools import compress
from typing import Literal

import torch
from torch import Tensor

from medfed.common.streams import seeded
from medfed.common.tensors import onto
from medfed.datamodules.extending import *
from medfed.standalone.preparation import one_thread


@dataclass(frozen=True)
class ChannelDropout:
    """Zeroes channels of training samples."""

    # The chance that a sample may lose channels: 0 to P − 1 of its client's P channels. All numbers
    # are equally likely, and so are all sets of a number.
    chance: float = 0.0
    # ``sqrt`` multiplies the remaining channels by the root of P over their number, which keeps the
    # variance of their sum; ``None`` does not. The factor P over their number would double the
    # variance for two of four.
    rescale: Literal["sqrt"] | None = None
    # How many adjacent channels are one contrast, as with neighbouring slices; they are dropped
    # together.
    planes: int = 1

    def __call__(self, image: Tensor, present: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Returns a batch ``(B, C, ...)`` altered by the seed, and ``(B, C)``, what remains."""
        rng, there = torch_rng(seed, "channel_dropout"), present[..., :: self.planes]
        coins, counts = torch.rand(len(image), generator=rng), torch.rand(len(image), generator=rng)
        places = torch.rand(len(image), there.shape[-1], generator=rng)
        lost = (counts * there.sum(-1)).long() * (coins < self.chance)
        # Of the present channels those with the smallest random numbers are dropped.
        rank = torch.where(there, places, torch.inf).argsort(1).argsort(1)
        remaining = there & (rank >= lost[:, None])
        remaining = remaining.repeat_interleave(self.planes, 1)
        return self.only(image, remaining, present), remaining

    def only(self, image: Tensor, remaining: Tensor, present: Tensor) -> Tensor:
        """Returns images ``(B, C, ...)`` with the channels `remaining` ``(B, C)`` alone."""
        factor = remaining.to(image.dtype)
        if self.rescale == "sqrt":
            before = onto(present.sum(-1, keepdim=True), image.device)
            factor *= (before / remaining.sum(1, keepdim=True)).sqrt()
        return image * factor.view(*factor.shape, *[1] * (image.ndim - 2))


Sample = dict[str, Any]
Transform = Callable[[Sample], Sample]
Chance = Annotated[float, within("[0, 1]")]
Size = Annotated[float, within("[0, inf)")]


@dataclass(frozen=True)
class Augmentation:
    """A recipe for altering training images; a chance of 0 disables an alteration.

    Each happens with its own chance, in the order of the fields. Flips and affine maps move a
    segmentation's label, too.
    """

    # Chance of a flip, along each of the axes that the data allow (`data.flips`).
    flip_chance: Chance = 0.0
    # Chance of a turn by 90, 180 or 270 degrees in the plane of the first two axes (only by 180 if
    # their sides differ).
    quarter_chance: Chance = 0.0
    affine_chance: Chance = 0.0  # chance of a rotation, zoom and shift at once
    rotation: Size = 0.0  # the most degrees, in the plane of the first two axes
    tilt: Size = 0.0  # the most degrees around these two axes, for volumes; 0 if slices are thick
    # Largest relative change of size: 0.1 draws from 0.9 to 1.1.
    zoom: Annotated[float, within("[0, 0.9]")] = 0.0
    # Largest shift, as a share of the image's side.
    shift: Annotated[float, within("[0, 0.5]")] = 0.0
    noise_chance: Chance = 0.0  # chance of Gaussian noise
    noise: Size = 0.0  # its largest standard deviation
    blur_chance: Chance = 0.0  # chance of a Gaussian blur
    blur: Size = 0.0  # its largest standard deviation, in voxels
    scale_chance: Chance = 0.0  # chance that intensities are multiplied
    scale: Size = 0.0  # 0.25 draws the factor from 0.75 to 1.25
    offset_chance: Chance = 0.0  # chance that a number is added to the intensities
    offset: Size = 0.0  # the largest offset
    contrast_chance: Chance = 0.0  # chance that distances from the mean intensity are multiplied
    contrast: Size = 0.0  # as `scale`; what leaves the image's range is clipped
    resolution_chance: Chance = 0.0  # chance that the image is downsampled and upsampled again
    # The smallest intermediate size, as a share of the image's.
    resolution: Annotated[float, within("[0.1, 1]")] = 1.0
    gamma_chance: Chance = 0.0  # chance of a gamma curve between the least and greatest intensity
    # Largest exponent, drawn from 1 / gamma to gamma; mean and deviation are kept.
    gamma: Annotated[float, within("[1, 10]")] = 1.0
    # Chance that a sample may lose channels, as the last step; see
    # :class:`medfed.datamodules.augmentation.ChannelDropout`.
    channel_dropout: Chance = 0.0
    # Scaling of the remaining channels: ``None`` or ``sqrt``.
    rescale: Literal["sqrt"] | None = None

    def __post_init__(self) -> None:
        check_fields("augment", self)

    @cached_property
    def alters(self) -> bool:
        """Whether the recipe does more than channel dropout."""
        return any(getattr(self, f.name) for f in fields(self) if f.name.endswith("_chance"))

    def build(self, size: Sequence[int], flips: Sequence[int] = (), regions: bool = False) -> Chain:
        """Makes the transforms."""
        from monai import transforms as monai  # takes seconds to import

        sigma = (min(0.5, self.blur), self.blur)
        between = "bilinear" if len(size) == 2 else "trilinear"
        smooth = {"sigma_x": sigma, "sigma_y": sigma, "sigma_z": sigma}
        fixed_mean = {"factors": self.contrast, "preserve_range": True}
        coarse = {"zoom_range": (self.resolution, 1.0), "upsample_mode": between}
        gamma = {"gamma": (1 / self.gamma, self.gamma), "retain_stats": True}
        each = {"channel_wise": True}  # each contrast of a scanner drifts on its own
        listed: list[tuple[float, Any, dict[str, Any]]] = [
            (self.noise_chance, monai.RandGaussianNoised, {"std": self.noise}),
            (self.blur_chance, monai.RandGaussianSmoothd, smooth),
            (self.scale_chance, monai.RandScaleIntensityd, {"factors": self.scale, **each}),
            (self.offset_chance, monai.RandShiftIntensityd, {"offsets": self.offset, **each}),
            (self.contrast_chance, monai.RandScaleIntensityFixedMeand, fixed_mean),
            (self.resolution_chance, monai.RandSimulateLowResolutiond, coarse),
            (self.gamma_chance, monai.RandAdjustContrastd, gamma),
        ]
        axes = tuple(axis for axis in sorted({*flips}) if axis < len(size))
        made = [(make(["image"], prob=1.0, **more), p) for p, make, more in listed if p]
        return Chain(self, axes, made, regions)


@dataclass(eq=False)
class Chain:
    """A recipe's transforms of a batch, with one random stream.

    For small patches, `monai.transforms.Compose` takes longer than the transforms.
    """

    recipe: Augmentation
    flips: tuple[int, ...]  # the axes
    intensity: Sequence[tuple[Any, float]]  # the transforms of grey values, with their chances
    regions: bool  # whether labels are regions, which move with their image

    def __post_init__(self) -> None:
        flips, recipe = [self.recipe.flip_chance] * len(self.flips), self.recipe
        others = (chance for _, chance in self.intensity)
        self._chances = np.array([*flips, recipe.quarter_chance, recipe.affine_chance, *others])
        self._stream = np.random.RandomState()
        for transform, _ in self.intensity:
            transform.set_random_state(state=self._stream)

    def __call__(self, image: Tensor, label: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Alters images (B, C, *size) by the seed; regions and boxes (B, M, 7) move with them."""
        self._stream.seed(seed)
        coins = self._stream.rand(len(self._chances), len(image)) < self._chances[:, None]
        image, label = image.clone(), label.clone()
        moved = (image, label) if self.regions else (image,)
        for axis, coin in zip(self.flips, coins, strict=False):
            chosen = torch.from_numpy(np.flatnonzero(coin))
            for values in moved:
                values[chosen] = values[chosen].flip(axis + 2)
            if label.shape[-1] == 7 and label.ndim == 3:
                label[chosen] = _flipped_boxes(label[chosen], axis, image.shape[axis + 2])
        quarter, affine, *acting = coins[len(self.flips) :]
        if quarter.any():
            self._turn(moved, quarter)
        if affine.any():
            self._map(moved, affine)
        with _plain_tensors():
            for n, acts in enumerate(np.array(acting).T):
                if acts.any():
                    self._alter(image[n], acts)
        return image, label

    def _turn(self, moved: Sequence[Tensor], coin: NDArray[np.bool_]) -> None:
        """Turns some samples of image and label by quarters, in place."""
        square = moved[0].shape[2] == moved[0].shape[3]
        turns = self._stream.randint(1, 4, len(coin)) if square else np.full(len(coin), 2)
        for n in np.flatnonzero(coin).tolist():
            for values in moved:
                values[n] = torch.rot90(values[n], int(turns[n]), (1, 2))

    def _map(self, moved: Sequence[Tensor], coin: NDArray[np.bool_]) -> None:
        """Turns, zooms and shifts some samples of image and label in place."""
        from monai.networks.layers import AffineTransform
        from monai.transforms.utils import create_rotate, create_scale, create_translate

        size, draw = moved[0].shape[2:], self._stream.uniform
        dims, recipe = len(size), self.recipe
        degrees = np.array([recipe.tilt] * (dims - 2) * 2 + [recipe.rotation])
        maps = [
            create_rotate(dims, np.radians(draw(-degrees, degrees)).tolist())
            @ create_scale(dims, [1 / (1 + draw(-recipe.zoom, recipe.zoom))] * dims)
            @ create_translate(dims, (draw(-recipe.shift, recipe.shift, dims) * size).tolist())
            for _ in range(int(coin.sum()))
        ]
        chosen = torch.from_numpy(np.flatnonzero(coin))
        theta = torch.from_numpy(np.stack(maps)).float()
        for values, mode in zip(moved, ("bilinear", "nearest"), strict=False):
            how: dict[str, Any] = {"align_corners": False, "zero_centered": True}
            resample = AffineTransform(mode=mode, padding_mode="reflection", **how)
            values[chosen] = resample(values[chosen].float(), theta).to(values.dtype)

    def _alter(self, image: Tensor, acts: NDArray[np.bool_]) -> None:
        """Alters the intensities of one sample in place, by the transforms that act."""
        inside = (image != 0).any(dim=0) if self.regions else None
        sample: Sample = {"image": image}
        for transform, _ in compress(self.intensity, acts):
            sample = transform(sample)
        image.copy_(sample["image"] if inside is None else sample["image"] * inside)


def _flipped_boxes(label: Tensor, axis: int, side: int) -> Tensor:
    """Returns boxes (B, M, 7) in images of a given side that are flipped along an axis.

    Example:
        >>> _flipped_boxes(torch.tensor([[[1.0, 2, 3, 4, 5, 6, 1], [0, 0, 0, 0, 0, 0, 0]]]), 0, 8)
        tensor([[[4., 2., 3., 7., 5., 6., 1.],
                 [0., 0., 0., 0., 0., 0., 0.]]])
    """
    turned = label.clone()
    turned[..., axis], turned[..., axis + 3] = side - label[..., axis + 3], side - label[..., axis]
    return torch.where(label[..., -1:] != 0, turned, label)


Augment = Chain | Transform


def augmented(augment: Augment, image: Tensor, label: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Alters the samples of a batch; what is drawn depends on the seed alone."""
    with seeded(seed), one_thread():
        if isinstance(augment, Chain):
            return augment(image, label, seed)
        if callable(set_state := getattr(augment, "set_random_state", None)):
            set_state(seed=seed)
        done = [augment({"image": i, "label": y}) for i, y in zip(image, label, strict=True)]
    images = torch.stack([torch.as_tensor(d["image"]) for d in done]).as_subclass(Tensor)
    labels = torch.stack([torch.as_tensor(d["label"]) for d in done]).as_subclass(Tensor)
    return images.to(image.dtype), labels.to(label.dtype)


@contextmanager
def _plain_tensors() -> Iterator[None]:
    """Keeps MONAI from tracking positions, which takes three times as long as the transforms."""
    from monai.data.meta_obj import get_track_meta, set_track_meta

    tracks = get_track_meta()
    set_track_meta(False)
    try:
        yield
    finally:
        set_track_meta(tracks)
