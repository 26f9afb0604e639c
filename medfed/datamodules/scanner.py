"""A scanner's effects on an image: shading, coarser voxels, another grey scale, noise."""

from __future__ import annotations

import torch
from torch import Tensor

from medfed.datamodules.extending import *
from medfed.standalone.preparation import bounding_box

UNCHANGED = {"bias_field": 0.0, "resolution": 1.0, "gamma": 1.0, "noise": 0.0}
_UPSAMPLE = {2: "bilinear", 3: "trilinear"}


@dataclass(frozen=True)
class Scanner:
    """The scanner of one client, applied to normalised images.

    A smooth field multiplies intensities in [0, 1], voxels grow, y becomes y^gamma, and noise is
    added in units of the normalised image. Of z-scored volumes (give whole ones), which have a
    value beyond 1, the non-zero voxels of a channel are stretched over [0, 1], changed, and
    z-scored again. Images all within [-1, 1] have no background, are clipped there, and are not
    normalised again.
    """

    client: str
    seed: int  # seed of fields and noise, which differ for every key
    # b >= 0; the logarithm of the field is cubic along every axis, with Legendre coefficients from
    # U(-b, b).
    bias_field: Annotated[float, within("[0, inf)")] = 0.0
    # In (0, 1], the factor by which every axis is sampled more coarsely, before the image is
    # brought back to its grid.
    resolution: Annotated[float, within("(0, 1]")] = 1.0
    gamma: Annotated[float, within("(0, inf)")] = 1.0  # exponent, positive; above 1 darkens
    # Standard deviation of Gaussian noise in units of the normalised image.
    noise: Annotated[float, within("[0, inf)")] = 0.0

    def __post_init__(self) -> None:
        check_fields(f"The scanner of {self.client}: partition", self)

    def apply(self, image: Tensor, *key: object) -> Tensor:
        """Returns an image (C, *spatial) as this scanner would record it."""
        if image.ndim not in (3, 4):
            raise ConfigError(
                f"A scanner changes images (C, H, W) or (C, H, W, D), not values of shape "
                f"{tuple(image.shape)}; partition.scanners needs images."
            )
        image = image.as_subclass(Tensor).float()
        least, greatest = image.aminmax()
        if least >= -1 - 1e-5 and greatest <= 1 + 1e-5:
            scanned = self._intensities((image + 1) / 2, key) * 2 - 1
            return self._noisy(scanned, key).clamp(-1, 1)
        scanned = image.clone()
        box = (slice(None), *bounding_box((image != 0).any(dim=0).numpy()))
        scanned[box] = self._body(image[box], key)
        return scanned

    def record(self) -> dict[str, Any]:
        """Returns the parameters, from which the same scanner can be made again."""
        return asdict(self)

    def _body(self, image: Tensor, key: Sequence[object]) -> Tensor:
        """The same for the part of a z-scored image that has more than background."""
        from monai.transforms import NormalizeIntensity  # imported here, as it takes seconds

        inside = image != 0
        low, high = _extent(image, inside)
        unit = ((image - low) / (high - low)).where(inside, 0.0)
        scanned = self._noisy(self._intensities(unit, key) * (high - low) + low, key)
        normalize = NormalizeIntensity(nonzero=True, channel_wise=True)
        return torch.as_tensor(normalize(scanned.where(inside, 0.0))).as_subclass(Tensor)

    def _intensities(self, unit: Tensor, key: Sequence[object]) -> Tensor:
        """Shading, resolution and gamma of (C, *spatial) intensities in [0, 1]."""
        if self.bias_field > 0:
            from monai.transforms import RandBiasField

            draw = RandBiasField(prob=1.0, coeff_range=(-self.bias_field, self.bias_field))
            draw.set_random_state(seed=self._seed("bias_field", key))
            # One field for all channels; MONAI would compute it once for each.
            unit = unit * torch.as_tensor(draw(torch.ones_like(unit[:1]))).as_subclass(Tensor)
        if self.resolution < 1:
            from monai.transforms import RandSimulateLowResolution

            smooth, share = _UPSAMPLE[unit.ndim - 1], (self.resolution, self.resolution)
            coarsen = RandSimulateLowResolution(1.0, "area", smooth, share)
            unit = torch.as_tensor(coarsen(unit)).as_subclass(Tensor)
        # Not AdjustContrast: it stretches by each image's extremes, so equal grey values would
        # differ between two patches.
        return unit if self.gamma == 1 else unit.clamp(min=0).pow(self.gamma)

    def _noisy(self, image: Tensor, key: Sequence[object]) -> Tensor:
        if self.noise == 0:
            return image
        from monai.transforms import RandGaussianNoise

        draw = RandGaussianNoise(prob=1.0, std=self.noise, sample_std=False)
        draw.set_random_state(seed=self._seed("noise", key))
        return torch.as_tensor(draw(image)).as_subclass(Tensor)

    def _seed(self, purpose: str, key: Sequence[object]) -> int:
        return derive_seed(self.seed, "scanner", self.client, purpose, *key)


def scanners_from(table: Mapping[str, Mapping[str, float]], seed: int) -> dict[str, Scanner]:
    """Makes the scanners that a configuration lists.

    Example:
        >>> scanners_from({"a": {"gamma": 2.0}}, seed=0)["a"].gamma
        2.0
    """
    for client, values in table.items():
        check_names("setting of a scanner", list(values), list(UNCHANGED))
        for name, value in values.items():
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise ConfigError(f"partition.scanners: {name} of {client} is no number: {value}.")
    lower = {c: {n.lower(): float(v) for n, v in of.items()} for c, of in table.items()}
    return {client: Scanner(client, seed, **values) for client, values in lower.items()}


def _extent(image: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    """Least and greatest value of every channel over its voxels inside, (C, 1, ...) each."""
    axes = tuple(range(1, image.ndim))
    low = image.where(inside, torch.inf).amin(axes, keepdim=True)
    high = image.where(inside, -torch.inf).amax(axes, keepdim=True)
    flat = ~(high > low)  # an empty channel, or one of a single value
    return low.where(~flat, 0.0), high.where(~flat, 1.0)
