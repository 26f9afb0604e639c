"""Scanners against NumPy: shading, resolution, grey scale, noise."""

import itertools

import numpy as np
import pytest
import torch

from medfed.datamodules.partitions.by_group import ChannelMissing, SiteGroups
from medfed.datamodules.scanner import UNCHANGED, Scanner
from medfed.standalone.errors import ConfigError
from tests.sweeps import sweep


def patch(*shape, seed=0):
    """An image on the fixed scale [-1, 1]."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def volume(*shape, seed=0):
    """A z-scored image with a background of zeros around an ellipsoid."""
    grid = np.meshgrid(*(np.linspace(-1, 1, n) for n in shape[1:]), indexing="ij")
    inside = torch.from_numpy(sum(g**2 for g in grid) < 0.9)
    image = patch(*shape, seed=seed) + torch.arange(shape[0]).view(-1, *[1] * len(grid)) * 0.1 + 3
    values = image[:, inside]
    z = (values - values.mean(1, keepdim=True)) / values.std(1, keepdim=True, correction=0)
    image.zero_()[:, inside] = z
    return image


SHAPES = [(1, 32, 24), (3, 32, 24), (1, 16, 16, 8), (2, 16, 12, 9)]
SETTINGS = [
    {"bias_field": 0.3},
    {"resolution": 0.5},
    {"gamma": 1.4},
    {"noise": 0.2},
    {"bias_field": 0.2, "resolution": 0.7, "gamma": 0.7, "noise": 0.1},
]


@sweep("shape", SHAPES)
@sweep("make", [patch, volume])
@sweep("settings", SETTINGS)
def test_contract(shape, make, settings):
    image = make(*shape)
    before, scanner = image.clone(), Scanner("a", 3, **settings)
    shown = scanner.apply(image, "patient", 4)
    assert type(shown) is torch.Tensor
    assert shown.shape == image.shape
    assert shown.dtype == torch.float32
    assert torch.equal(image, before)
    assert (shown - image).abs().max() > 0.05
    assert torch.equal(shown, scanner.apply(image, "patient", 4))
    if make is patch:
        assert shown.abs().max() <= 1
        return
    assert (shown[image == 0] == 0).all()
    for channel, old in zip(shown, image, strict=True):
        values = channel[old != 0].double()
        assert (values != 0).all()
        assert values.mean().item() == pytest.approx(0, abs=1e-5)
        assert values.std(correction=0).item() == pytest.approx(1, abs=1e-5)


@sweep("shape", SHAPES)
@sweep("make", [patch, volume])
def test_a_scanner_that_changes_nothing(shape, make):
    image = make(*shape)
    torch.testing.assert_close(Scanner("a", 0).apply(image, "p"), image, atol=2e-6, rtol=0)


@pytest.mark.parametrize("settings", [{"bias_field": 0.3}, {"noise": 0.2}])
def test_chance_depends_on_seed_client_and_key_alone(settings):
    image = patch(1, 16, 16)
    shown = [
        Scanner(client, seed, **settings).apply(image, *key)
        for client, seed, key in [("a", 0, ("p",)), ("b", 0, ("p",)), ("a", 1, ("p",))]
    ]
    shown += [Scanner("a", 0, **settings).apply(image, *key) for key in [("q",), ("p", 1), ()]]
    assert all((x - y).abs().max() > 0.01 for x, y in itertools.combinations(shown, 2))


def test_the_global_streams_are_neither_read_nor_moved():
    image, scanner = patch(1, 16, 16), Scanner("a", 0, bias_field=0.2, noise=0.1)
    torch.manual_seed(0)
    np.random.seed(0)
    first, after = scanner.apply(image, "p"), (torch.rand(1), np.random.rand())
    torch.manual_seed(0)
    np.random.seed(0)
    assert (torch.rand(1), np.random.rand()) == after
    assert torch.equal(scanner.apply(image, "p"), first)


@pytest.mark.parametrize("shape", [(2, 20, 30), (2, 14, 12, 10)])
def test_the_field_is_one_smooth_cubic_for_all_channels(shape):
    image = -0.9 + 0.2 * torch.rand(shape, generator=torch.Generator().manual_seed(1))
    shown = Scanner("a", 0, bias_field=0.1).apply(image, "p")
    log = torch.log((shown + 1) / (image + 1)).double().numpy()
    assert np.allclose(log[0], log[1], atol=1e-5)
    grid = np.meshgrid(*(np.linspace(-1, 1, n) for n in shape[1:]), indexing="ij")
    powers = list(itertools.product(range(4), repeat=len(grid)))  # up to cubic along each axis
    terms = [np.prod([g**e for g, e in zip(grid, p, strict=True)], axis=0) for p in powers]
    basis = np.stack([term.ravel() for term in terms], axis=1)
    fitted = basis @ np.linalg.lstsq(basis, log[0].ravel(), rcond=None)[0]
    assert np.abs(fitted - log[0].ravel()).max() < 1e-4
    assert 0.02 < log[0].std() < 0.1 * 20


def halved(values):
    """Means of pairs, then straight lines between their centres, along one axis."""
    pairs = values.reshape(*values.shape[:-1], -1, 2).mean(-1)
    at = (np.arange(values.shape[-1]) + 0.5) / 2 - 0.5
    return np.apply_along_axis(lambda row: np.interp(at, np.arange(len(row)), row), -1, pairs)


@pytest.mark.parametrize("shape", [(2, 16, 20), (1, 8, 12, 6)])
def test_half_resolution_is_block_means_drawn_apart(shape):
    image = patch(*shape)
    expected = image.double().numpy()
    for axis in range(1, len(shape)):
        expected = np.swapaxes(halved(np.swapaxes(expected, axis, -1)), axis, -1)
    shown = Scanner("a", 0, resolution=0.5).apply(image, "p")
    assert np.allclose(shown.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("gamma", [0.5, 1.3, 2.0])
def test_gamma_is_the_same_for_every_patch(gamma):
    image = patch(1, 12, 12) * 0.5
    shown = Scanner("a", 0, gamma=gamma).apply(image, "p")
    expected = ((image.double().numpy() + 1) / 2) ** gamma * 2 - 1
    assert np.allclose(shown.numpy(), expected, atol=1e-6)
    part = Scanner("a", 0, gamma=gamma).apply(image[:, :5, :5], "p")
    torch.testing.assert_close(part, shown[:, :5, :5])


def test_noise_is_white_gaussian_of_the_written_strength():
    image = torch.zeros(1, 128, 128)
    noise = Scanner("a", 0, noise=0.1).apply(image, "p").double().numpy()[0]
    assert noise.std() == pytest.approx(0.1, rel=0.03)
    assert abs(noise.mean()) < 4 * 0.1 / 128
    assert abs((noise[1:] * noise[:-1]).mean()) < 4 * 0.01 / 128
    assert np.mean(np.abs(noise) < 0.1) == pytest.approx(0.6827, abs=0.02)


def test_a_missing_channel_stays_empty():
    image = volume(2, 16, 16)
    image[1] = 0
    shown = Scanner("a", 0, bias_field=0.2, resolution=0.6, gamma=1.3, noise=0.1).apply(image, "p")
    assert (shown[1] == 0).all()
    assert shown.isfinite().all()


def test_tables_are_refused():
    with pytest.raises(ConfigError, match=r"not values of shape \(13,\); partition.scanners needs"):
        Scanner("a", 0).apply(torch.rand(13), "p")


@sweep(
    ("settings", "message"),
    [
        ({"noise": -1}, r"scanner of group_0_hospital_0: partition\.noise must be in \[0, inf\)"),
        ({"gamma": 0}, r"gamma must be in \(0, inf\), not 0"),
        ({"resolution": 2}, r"resolution must be in \(0, 1\], not 2"),
        ({"nois": 1}, r"Unknown setting of a scanner nois; .*did you mean noise"),
        ({"noise": "x"}, "noise of group_0_hospital_0 is no number: x"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        SiteGroups(2, scanners=[settings, {}])


def test_in_a_federation(make_brats):
    """The images change, and nothing else; what a hospital lacks stays zero."""
    everywhere = [{"bias_field": 0.2, "resolution": 0.7, "gamma": 1.4, "noise": 0.1}] * 2
    plain = make_brats(partition=SiteGroups(2))
    scanned = make_brats(partition=ChannelMissing(SiteGroups(2, scanners=everywhere), "rotate"))
    plain.setup()
    scanned.setup()
    assert scanned.splits()["clients"] == plain.splits()["clients"]
    for n, (name, client) in enumerate(scanned.clients.items()):
        old = plain.clients[name]
        index = torch.arange(client.num_samples)
        new, before = client.samples(index), old.samples(index)
        assert torch.equal(new["label"], before["label"])
        assert (new["image"][:, n] == 0).all()  # rotate
        kept = [c for c in range(4) if c != n]
        assert (new["image"] - before["image"])[:, kept].abs().max() > 0.1
        assert (new["image"][before["image"] == 0] == 0).all()
        record = scanned.splits()["partition"][name]["site"]
        assert record["client"] == name
        assert set(UNCHANGED) < set(record)
