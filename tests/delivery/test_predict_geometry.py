"""Where a mask lies: a network that is a threshold on grey values finds a ball where it was put.

The ball is known in millimetres of space. Masks are read by SimpleITK, which gives each voxel's
place by itself.
"""

from __future__ import annotations

import json
import shutil
import traceback
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk
import torch

from medfed.config.compose import load
from medfed.config.description import checked
from medfed.delivery.bundle.bundle import read_bundle, write_bundle, write_manifest
from medfed.delivery.bundle.metadata import FORMAT_VERSION
from medfed.delivery.bundle.networks import build_network, describe
from medfed.delivery.predict.prediction import predict
from medfed.standalone.errors import CheckpointError, DataError
from medfed.standalone.volumes import read_geometry
from tests.datamodules.volume_files import affine, write_series, write_volume
from tests.delivery.hospitals import run_by_monai, same_files
from tests.sweeps import sweep

BALL, RADIUS = np.array([-8.0, 6.0, 12.0]), 11.0  # mm to the right, to the front, to the head
SHAPE = (34, 30, 20)
FLIPPED = affine((1.5, 1.5, 3.0)) @ np.diag([-1, 1, -1, 1])[:, [1, 2, 0, 3]]
GRIDS = {
    "upright": affine((1.5, 1.5, 3.0)),
    "oblique": affine((1.5, 1.8, 3.0), angle=0.3),
    "thick": affine((1.1, 1.3, 6.0)),
    "flipped": FLIPPED,
}


def centred(to_mm: np.ndarray, shape=SHAPE) -> np.ndarray:
    """The same axes, with the ball near the middle."""
    moved = to_mm.copy()
    moved[:3, 3] = BALL + 3 - moved[:3, :3] @ (np.array(shape) / 2)
    return moved


def scan(to_mm: np.ndarray, shape=SHAPE) -> np.ndarray:
    """A body of 40 in air of 0, and in it a ball of 100; rows of another grey show the axes."""
    place = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), -1)
    mm = place @ to_mm[:3, :3].T + to_mm[:3, 3]
    inside = np.linalg.norm(mm - BALL, axis=-1) <= RADIUS
    body = np.linalg.norm((mm - BALL) / [1.6, 1.5, 1.4], axis=-1) <= RADIUS
    return np.where(inside, 100, np.where(body, 40, 0)).astype(np.int16)


def threshold_network(
    dims: int, outputs: list[tuple[float, float]], inputs: int = 1, seen: int = 0
):
    """A BasicUNet of which each output is ``slope * (grey value - place)`` of one input."""
    node = {
        "_target_": "monai.networks.nets.BasicUNet",
        "spatial_dims": dims,
        "in_channels": inputs,
        "out_channels": len(outputs),
        "features": [2] * 6,
        "norm": None,
    }
    network = build_network(describe(node))
    state = {name: torch.zeros_like(value) for name, value in network.state_dict().items()}
    middle = (1,) * dims
    for block, source in (("conv_0", seen), ("upcat_1.convs", 0)):
        state[f"{block}.conv_0.conv.weight"][(0, source, *middle)] = 1.0
        state[f"{block}.conv_1.conv.weight"][(0, 0, *middle)] = 1.0
    for n, (slope, place) in enumerate(outputs):
        state["final_conv.weight"][n, 0] = slope
        state["final_conv.bias"][n] = -slope * place
    return describe(node), state


def threshold_bundle(folder: Path, outputs: list[tuple[float, float]], **facts) -> Path:
    dims = facts.get("spatial_dims", 3)
    network, state = threshold_network(dims, outputs, facts.pop("inputs", 1), facts.pop("seen", 0))
    one_file = {"kind": "volumes", "files": None, "file_channels": ["CT"]}
    known = {
        "format_version": FORMAT_VERSION,
        "task": "segmentation",
        "client": "a",
        "method": "fedavg",
        "network": network,
        "spatial_dims": dims,
        "slices": dims == 2,
        "channels": ["CT"],
        "present": ["CT"],
        "labels": ["ball"],
        "normalization": {"name": "zscore", "nonzero": True, "channel_wise": True},
        "input": {**one_file, "regions": {"ball": [1]}},
        "patch_size": [16] * dims,
        "overlap": 0.25,
        "window_batch": 4,
        "threshold": 0.5,
        "activation": "sigmoid",
        **dict.fromkeys(("site", "orientation", "spacing", "spacing_range")),
        **{key: {} for key in ("test_metrics", "run_test_metrics", "versions")},
        "commit": "unknown",
        "data_hash": "0" * 64,
        "training_config": {},
    }
    write_bundle(folder, {**known, **facts}, state, {})
    return folder


@pytest.fixture(scope="module")
def finds_ball(tmp_path_factory):
    """Z-scored, the body is below 0.5 and the ball above."""
    return threshold_bundle(tmp_path_factory.mktemp("ball") / "bundle", [(20.0, 0.5)])


def run(bundle: Path, source: Path, target: Path, **keys) -> None:
    named = {"bundle": bundle, "input": source, "output": target, **keys}
    texts = {k: f'"{v}"' if isinstance(v, Path) else v for k, v in named.items()}
    predict(checked(load([f"{key}={value}" for key, value in texts.items()], "predict")))


def distances(mask: sitk.Image) -> tuple[np.ndarray, np.ndarray]:
    """Of each voxel: its value, and how far from the ball's middle SimpleITK says that it is."""
    place = mask.GetSize(), mask.GetOrigin(), mask.GetSpacing(), mask.GetDirection()
    points = sitk.GetArrayFromImage(sitk.PhysicalPointSource(sitk.sitkVectorFloat64, *place))
    apart = np.linalg.norm(points * [-1, -1, 1] - BALL, axis=-1)
    return sitk.GetArrayFromImage(mask).ravel(), apart.ravel()


@pytest.mark.parametrize("grid", GRIDS)
def test_the_ball_is_found_where_it_lies(grid, finds_ball, tmp_path):
    to_mm = centred(GRIDS[grid])
    write_volume(tmp_path / "scan.nrrd", scan(to_mm), to_mm)
    run(finds_ball, tmp_path / "scan.nrrd", tmp_path / "mask.nii.gz")
    values, apart = distances(sitk.ReadImage(str(tmp_path / "mask.nii.gz")))
    assert 20 < values.sum() < 0.2 * values.size
    np.testing.assert_array_equal(values > 0, apart <= RADIUS)


NAMES = ("a.nii.gz", "a.nii", "a.nrrd", "a.mha", "a.mhd", "a")


@pytest.mark.parametrize("name", NAMES)
def test_every_format_gets_a_mask_on_its_own_grid(name, finds_ball, tmp_path, monkeypatch):
    to_mm = centred(affine((1.5, 1.8, 3.0), angle=0.2))
    write_volume(tmp_path / "in" / name, scan(to_mm), to_mm)
    run(finds_ball, tmp_path / "in", tmp_path / "out", probabilities="true")
    mask = tmp_path / "out" / "a.nii.gz"
    assert mask.is_file()
    found, known = read_geometry(mask), read_geometry(tmp_path / "in" / name)
    np.testing.assert_allclose(found.stored, known.stored, atol=1e-4)
    values, apart = distances(sitk.ReadImage(str(mask)))
    np.testing.assert_array_equal(values > 0, apart <= RADIUS)
    assert read_geometry(tmp_path / "out" / "a_probabilities.nii.gz").channels == 1
    run_by_monai(finds_ball, tmp_path / "in", tmp_path / "monai", monkeypatch)
    assert same_files(tmp_path / "monai", tmp_path / "out") == [mask.name]


PREPARED = {
    "resampled": {"resampled_to": [2.0, 2.0, 2.0]},
    "cropped": {"crop_foreground": True},
    "both": {"resampled_to": [2.0, 1.4, 4.0], "crop_foreground": True},
    "slices": {"spatial_dims": 2, "resampled_to": [2.0, 1.3], "crop_foreground": True},
    "neighbours": {"spatial_dims": 2, "adjacent": 3},
}


@sweep("kind", PREPARED)
@sweep("grid", ["oblique", "flipped"])
def test_whatever_a_network_sees_the_mask_lies_on_the_scan(kind, grid, tmp_path, monkeypatch):
    """A window from 40 to 100 makes of the ball 1 and of the body 0; edges are interpolated."""
    facts = {**PREPARED[kind], "normalization": {"name": "window", "hu": [30, 110], "to": [0, 1]}}
    adjacent = facts.pop("adjacent", 1)
    source = {"kind": "volumes", "files": None, "file_channels": ["CT"], "regions": {"ball": [3]}}
    seen = {"inputs": adjacent, "seen": adjacent // 2}  # the slice itself is in the middle
    named = {"input": {**source, "adjacent_slices": adjacent}, **seen, **facts}
    # Not in the middle, where two ways of rounding would differ.
    bundle = threshold_bundle(tmp_path / "bundle", [(20.0, 0.47)], **named)
    to_mm = centred(GRIDS[grid])
    write_volume(tmp_path / "in" / "a.nii.gz", scan(to_mm), to_mm)
    run(bundle, tmp_path / "in" / "a.nii.gz", tmp_path / "mask.nii.gz")
    assert (
        read_geometry(tmp_path / "mask.nii.gz").shape
        == read_geometry(tmp_path / "in" / "a.nii.gz").shape
    )
    values, apart = distances(sitk.ReadImage(str(tmp_path / "mask.nii.gz")))
    exact = kind in ("cropped", "neighbours")
    edge = np.abs(apart - RADIUS) < (0 if exact else 3.0)  # a voxel
    assert set(values[~edge]) == {0, 3}
    np.testing.assert_array_equal(values[~edge] > 0, apart[~edge] <= RADIUS)
    assert abs((values > 0).sum() / (apart <= RADIUS).sum() - 1) < 0.1
    run_by_monai(bundle, tmp_path / "in", tmp_path / "monai", monkeypatch)
    run(bundle, tmp_path / "in", tmp_path / "own")
    same_files(tmp_path / "monai", tmp_path / "own")


def test_channels_may_be_normalised_each_in_its_way(tmp_path, monkeypatch):
    each = [
        {"name": "window", "hu": [30, 110], "to": [0, 1]},
        {"name": "zscore", "nonzero": True, "channel_wise": True},
    ]
    channels = {"channels": ["CT", "PET"], "present": ["PET"], "inputs": 2, "seen": 1}
    source = {"kind": "volumes", "files": None, "file_channels": ["CT", "PET"]}
    normalization = {"name": "by_channel", "channels": each}
    bundle = threshold_bundle(
        tmp_path / "bundle",
        [(20.0, 0.5)],
        **channels,
        input=source,
        normalization=normalization,
        crop_foreground=True,
    )
    to_mm = centred(affine((1.5, 1.5, 3.0)))
    both = np.stack([np.roll(scan(to_mm), 9, 0), scan(to_mm)], -1)
    (tmp_path / "in").mkdir()
    nib.save(nib.Nifti1Image(both, to_mm), tmp_path / "in" / "a.nii.gz")
    run(bundle, tmp_path / "in" / "a.nii.gz", tmp_path / "mask.nii.gz")
    run_by_monai(bundle, tmp_path / "in", tmp_path / "monai", monkeypatch)
    for mask in ("mask.nii.gz", "monai/a.nii.gz"):
        values, apart = distances(sitk.ReadImage(str(tmp_path / mask)))
        np.testing.assert_array_equal(values > 0, apart <= RADIUS)


def test_folders_of_series_are_scans_of_their_own(finds_ball, tmp_path):
    for n, case in enumerate(("p1", "p2", "p2.5")):
        to_mm = centred(affine((1.5, 1.5, 3.0 + n / 2)))
        write_series(tmp_path / "in" / case, scan(to_mm), to_mm)
    run(finds_ball, tmp_path / "in", tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").glob("p*.nii.gz")) == [
        "p1.nii.gz",
        "p2.5.nii.gz",
        "p2.nii.gz",
    ]
    run(finds_ball, tmp_path / "in" / "p2.5", tmp_path / "one.nii")  # a format of one's choice
    given = nib.load(tmp_path / "out" / "p2.5.nii.gz")
    values, apart = distances(sitk.ReadImage(str(tmp_path / "one.nii")))
    np.testing.assert_array_equal(values > 0, apart <= RADIUS)
    assert np.asarray(given.dataobj).sum() == values.sum()


def test_a_series_with_a_hole_is_one_sentence(finds_ball, tmp_path, monkeypatch):
    to_mm = centred(affine((1.5, 1.5, 3.0)))
    write_series(tmp_path / "in" / "p1", scan(to_mm), to_mm)
    (tmp_path / "in" / "p1" / "010.dcm").unlink()
    with pytest.raises(DataError, match=r"p1.*slice"):
        run(finds_ball, tmp_path / "in" / "p1", tmp_path / "mask.nii.gz")
    assert not (tmp_path / "mask.nii.gz").exists()
    with pytest.raises(RuntimeError) as caught:
        run_by_monai(finds_ball, tmp_path / "in", tmp_path / "monai", monkeypatch)
    told = "".join(traceback.format_exception(caught.value))
    assert "p1" in told
    assert "slice" in told


def test_a_contrast_may_be_a_series(tmp_path):
    names = {"CT": ["ct"], "PET": ["pet.nrrd"]}
    source = {"kind": "volumes", "files": names, "file_channels": list(names)}
    channels = {"channels": list(names), "present": list(names), "inputs": 2, "seen": 1}
    bundle = threshold_bundle(tmp_path / "bundle", [(20.0, 0.5)], input=source, **channels)
    to_mm = centred(affine((1.5, 1.5, 3.0)))
    write_series(tmp_path / "in" / "p1" / "ct", np.roll(scan(to_mm), 9, 0), to_mm)
    write_volume(tmp_path / "in" / "p1" / "pet.nrrd", scan(to_mm), to_mm)
    run(bundle, tmp_path / "in", tmp_path / "out")
    (mask,) = (tmp_path / "out").glob("*.nii.gz")
    values, apart = distances(sitk.ReadImage(str(mask)))
    np.testing.assert_array_equal(values > 0, apart <= RADIUS)
    shutil.rmtree(tmp_path / "out")
    run(bundle, tmp_path / "in" / "p1", tmp_path / "alone.nii.gz")


ONE = {"kind": "volumes", "files": None, "file_channels": ["CT"], "regions": {"ball": [1]}}


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({"resampled_to": [1.0]}, r"normalization or resampled_to is not as"),
        ({"resampled_to": [1.0, 0.0, 1.0]}, r"normalization or resampled_to is not as"),
        ({"crop_foreground": "yes"}, r"crop_foreground: expected bool"),
        ({"normalization": {"name": "magic"}}, r"normalization or resampled_to is not as"),
        (
            {"normalization": {"name": "window", "hu": [5, 1]}},
            r"normalization or resampled_to is not as",
        ),
        ({"activation": "relu"}, r"activation: invalid enum value"),
        ({"activation": "softmax"}, r"1 outputs have 1 labels"),
        ({"input": {**ONE, "adjacent_slices": 2}}, r"adjacent_slices must be an odd number"),
        ({"input": {**ONE, "adjacent_slices": 3}}, r"1 inputs have 3 channels"),
    ],
)
def test_metadata_of_volumes_that_cannot_be(facts, sentence, finds_ball, tmp_path):
    bundle = Path(shutil.copytree(finds_ball, tmp_path / "bundle"))
    path = bundle / "configs" / "metadata.json"
    metadata = json.loads(path.read_text())
    metadata["medfed"] |= facts
    path.write_text(json.dumps(metadata))
    write_manifest(bundle)
    with pytest.raises(CheckpointError, match=sentence):
        read_bundle(bundle)
