"""Several bundles: the mean of single predictions, computed here by hand, and how they differ."""

import csv
import itertools
import shutil
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from scipy.stats import entropy

from medfed.common.errors import MedfedError
from medfed.delivery.bundle.bundle import read_bundle, write_bundle
from tests.datamodules.volume_files import affine, write_volume
from tests.delivery.test_dicomseg import SHAPE, two_greys
from tests.delivery.test_predict_geometry import centred, run, threshold_bundle
from tests.sweeps import sweep

TO_MM = centred(affine((3.0, 3.2, 6.0), angle=0.2), SHAPE)
REGIONS = {"ball": [1, 2], "core": [2]}
ONE_FILE = {"kind": "volumes", "files": None, "file_channels": ["CT"]}
WINDOW = {"name": "window", "hu": [0, 200], "to": [0, 1]}  # body 0.2, ball 0.5


def regions(folder: Path, outputs, names=("ball", "core"), **facts) -> Path:
    source = {**ONE_FILE, "regions": {name: REGIONS.get(name, [9]) for name in names}}
    given = {"labels": list(names), "input": source, "normalization": WINDOW, **facts}
    return threshold_bundle(folder, outputs, **given)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """Three hospitals: of other thresholds, other preprocessing, and another order of regions."""
    root = tmp_path_factory.mktemp("three")
    coarse = {"resampled_to": [4.0] * 3, "crop_foreground": True}
    return [
        regions(root / "own", [(20.0, 0.35), (9.0, 0.75)]),
        regions(root / "near", [(3.0, 0.3), (4.0, 0.8)], **coarse),
        regions(root / "far", [(2.0, 0.6), (8.0, 0.55)], names=("core", "ball"), spatial_dims=2),
    ]


def named(bundles: list[Path]) -> str:
    return "[" + ",".join(f'"{b}"' for b in bundles) + "]"


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return [*csv.DictReader(file)]


@pytest.mark.parametrize("weights", ["null", "[2,1,0.5]"])
def test_masks_are_those_of_the_mean_of_single_predictions(weights, bundles, tmp_path):
    write_volume(tmp_path / "in" / "a.nii.gz", two_greys(TO_MM), TO_MM)
    single = []
    for n, bundle in enumerate(bundles):
        run(bundle, tmp_path / "in", tmp_path / f"{n}", probabilities="true")
        maps = np.asarray(nib.load(tmp_path / f"{n}" / "a_probabilities.nii.gz").dataobj)
        single.append(maps[..., ::-1] if n == 2 else maps)  # core comes first there
    keys = {"probabilities": "true", "uncertainty": "true", "weights": weights, "picture": "true"}
    run(named(bundles), tmp_path / "in", tmp_path / "out", **keys)
    shares = np.array([1, 1, 1] if weights == "null" else [2, 1, 0.5])
    parts = np.stack(single).astype(np.float64)
    mean = np.average(parts, axis=0, weights=shares)
    spread = np.sqrt(np.average((parts - mean) ** 2, axis=0, weights=shares))
    found = {
        p: nib.load(tmp_path / "out" / f"a{p}.nii.gz")
        for p in ("", "_probabilities", "_uncertainty")
    }
    np.testing.assert_allclose(found["_probabilities"].get_fdata(), mean, atol=1e-5)
    np.testing.assert_allclose(found["_uncertainty"].get_fdata(), spread, atol=1e-5)
    assert spread.max() > 0.05
    expected = np.where(mean[..., 1] > 0.5, 2, (mean[..., 0] > 0.5) * 1)
    np.testing.assert_array_equal(np.asarray(found[""].dataobj), expected)
    assert set(np.unique(expected)) >= {0, 1}
    (row,) = rows_of(tmp_path / "out" / "summary.csv")
    for n, name in enumerate(REGIONS):
        own = parts[..., n] > 0.5
        dice = [2 * (a & b).sum() / (a.sum() + b.sum()) for a, b in itertools.combinations(own, 2)]
        assert float(row[f"{name}_dice"]) == pytest.approx(np.mean(dice), abs=1e-6)
        assert float(row[f"{name}_spread"]) == pytest.approx(spread[own.any(0), n].mean(), abs=1e-5)
        volume = (mean[..., n] > 0.5).sum() * 3 * 3.2 * 6 / 1000
        assert float(row[f"{name}_ml"]) == pytest.approx(volume, rel=1e-6)
        highest = float(row[f"{name}_highest_probability"])
        assert highest == pytest.approx(mean[..., n].max(), abs=1e-5)
    assert 0 < float(row["ball_dice"]) < 1
    assert (tmp_path / "out" / "a.png").is_file()


def test_regions_that_do_not_nest_have_a_mask_each(tmp_path):
    """Also of exclusive classes: the likeliest one on average."""
    write_volume(tmp_path / "in" / "a.nii.gz", two_greys(TO_MM), TO_MM)
    apart = ("ball", "other")
    two = [regions(tmp_path / f"b{n}", [(20.0, 0.35), (3.0, 0.1 + n)], names=apart) for n in (0, 1)]
    run(named(two), tmp_path / "in", tmp_path / "out")
    names = sorted(p.name for p in (tmp_path / "out").glob("*.nii.gz"))
    assert names == ["a_ball.nii.gz", "a_other.nii.gz"]
    soft = {"names": apart, "activation": "softmax"}
    # In the ball, 0.5, the first is surer of its other than the second of its ball.
    three = [[(0.0, 0.0), (20.0, 0.35), (30.0, place)] for place in (0.38, 0.6)]
    two = [regions(tmp_path / f"s{n}", outputs, **soft) for n, outputs in enumerate(three)]
    maps = []
    for bundle in two:
        out = tmp_path / f"of_{bundle.name}"
        run(bundle, tmp_path / "in", out, probabilities="true")
        maps.append(nib.load(out / "a_probabilities.nii.gz").get_fdata())
    run(named(two), tmp_path / "in", tmp_path / "soft")
    mean = np.mean(maps, axis=0)
    both = np.concatenate([1 - mean.sum(-1, keepdims=True), mean], -1).argmax(-1)
    found = np.asarray(nib.load(tmp_path / "soft" / "a.nii.gz").dataobj)
    np.testing.assert_array_equal(found, both)


def chances(row: dict[str, str]) -> list[float]:
    return [float(v) for k, v in row.items() if k.startswith("probability")]


def disturbed(bundle: Path, folder: Path, **facts) -> Path:
    """The same network with other weights."""
    read, generator = read_bundle(bundle), torch.Generator().manual_seed(1)
    state = {n: t + 0.3 * torch.randn(t.shape, generator=generator) for n, t in read.state.items()}
    write_bundle(folder, {**read.facts, **facts}, state, {})
    return folder


@pytest.mark.parametrize("name", ["table", "digits"])
def test_rows_have_the_mean_and_the_entropy_of_single_predictions(name, hospital, tmp_path):
    made = hospital(name)
    two = [made.bundle, disturbed(made.bundle, tmp_path / "other")]
    if name == "table":
        source = tmp_path / "in.csv"
        header, rows = ["id", *made.data.table.names], made.data.table.features[:9].tolist()
        with source.open("w", newline="") as file:
            csv.writer(file).writerows([header, *([f"p{n}", *r] for n, r in enumerate(rows))])
    else:
        source = tmp_path / "in.npz"
        np.savez(source, images=made.data.data.images[:9, 0])
    parts = []
    for n, bundle in enumerate(two):
        made.predict(bundle=bundle, input=source, output=tmp_path / f"{n}.csv")
        parts.append(
            [
                [float(v) for k, v in row.items() if k.startswith("probability")]
                for row in rows_of(tmp_path / f"{n}.csv")
            ]
        )
    made.predict(bundle=named(two), input=source, output=tmp_path / "out.csv", weights="[3,1]")
    found, p = rows_of(tmp_path / "out.csv"), np.array(parts)
    mean = 0.75 * p[0] + 0.25 * p[1]
    whole = entropy(mean, base=2, axis=1)
    within = 0.75 * entropy(p[0], base=2, axis=1) + 0.25 * entropy(p[1], base=2, axis=1)
    for n, row in enumerate(found):
        own = [float(v) for k, v in row.items() if k.startswith("probability")]
        np.testing.assert_allclose(own, mean[n], atol=1e-5)
        assert float(row["largest_difference"]) == pytest.approx(
            np.abs(p[0, n] - p[1, n]).max(), abs=1e-5
        )
        assert float(row["entropy_bits"]) == pytest.approx(whole[n], abs=1e-5)
        assert float(row["disagreement_bits"]) == pytest.approx(whole[n] - within[n], abs=1e-4)
    assert (whole - within).max() > 0.01
    if name == "table":
        assert [row["id"] for row in found] == [f"p{n}" for n in range(9)]


def test_a_bundle_that_cannot_read_a_scan_is_named(bundles, tmp_path):
    write_volume(tmp_path / "a.nii.gz", two_greys(TO_MM), TO_MM)
    strict = regions(tmp_path / "strict", [(20.0, 0.3)] * 2, spacing_range=[[1.0] * 3] * 2)
    with pytest.raises(MedfedError, match=r"trained on 1 × 1 × 1 mm; .* \(bundle .*strict\)\.$"):
        run(named([bundles[0], strict]), tmp_path / "a.nii.gz", tmp_path / "m.nii.gz")
    assert not (tmp_path / "m.nii.gz").exists()


def other(kind: str, folder: Path, hospital) -> Path:
    two = [(20.0, 0.3)] * 2
    made = {
        "classes": lambda: regions(folder, two, names=("ball", "lesion")),
        "exclusive": lambda: regions(folder, [*two, (1.0, 0.0)], activation="softmax"),
        "thresholds": lambda: regions(folder, two, threshold=0.3),
        "task": lambda: hospital("digits").bundle,
        "bundle": lambda: folder,
    }
    return made[kind]()


REFUSED = {
    "classes": "answers ball, lesion, but .*own ball, core; only bundles of the same classes",
    "exclusive": "are decided one by one, those of .* exclusive; their probabilities cannot",
    "thresholds": "decides at a probability of 0.5, .* at 0.3; set threshold for all",
    "task": "is a model of classification, but .*own is a model of segmentation; only bundles of",
    "bundle": "is no bundle",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_bundles_that_do_not_mean_the_same(kind, bundles, hospital, tmp_path):
    write_volume(tmp_path / "a.nii.gz", two_greys(TO_MM), TO_MM)
    bundle = other(kind, tmp_path / "other", hospital)
    with pytest.raises(MedfedError, match=REFUSED[kind]):
        run(named([bundles[0], bundle]), tmp_path / "a.nii.gz", tmp_path / "out" / "mask.nii.gz")
    assert not (tmp_path / "out").exists()


OPTIONS = [
    ({"weights": "[1,2,3]"}, "3 weights were given for 2 bundles; give one each"),
    ({"weights": "[0,0]"}, "must be numbers of 0 or more, with one above 0"),
    ({"weights": "[1,-2]"}, "must be numbers of 0 or more"),
    ({"weights": "[a,b]"}, "must be numbers of 0 or more"),
    ({"weights": "2"}, "weights must be null or a list, not 2"),
    ({"bundle": "[]"}, "bundle names no folder"),
    ({"bundle": "[x,x]"}, "bundle names x twice; give it more weight by weights"),
    ({"bundle": "x", "uncertainty": "true"}, "maps how far several bundles differ"),
]


@sweep(("keys", "sentence"), OPTIONS)
def test_options_of_several_bundles(keys, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "abx":  # what is known to be a bundle before its options are read
        (tmp_path / name / "configs").mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "configs" / "metadata.json").touch()
    with pytest.raises(MedfedError, match=sentence):
        run(keys.pop("bundle", "[a,b]"), tmp_path / "a.nii.gz", tmp_path / "m.nii.gz", **keys)


def test_equal_bundles_agree_wholly(bundles, tmp_path):
    write_volume(tmp_path / "in" / "a.nii.gz", two_greys(TO_MM), TO_MM)
    twin = Path(shutil.copytree(bundles[0], tmp_path / "twin"))
    run(named([bundles[0], twin]), tmp_path / "in", tmp_path / "out")
    run(bundles[0], tmp_path / "in", tmp_path / "one")
    (both,), (one,) = (rows_of(tmp_path / name / "summary.csv") for name in ("out", "one"))
    assert (float(both["ball_dice"]), float(both["ball_spread"])) == (1, pytest.approx(0, abs=1e-6))
    assert {k: both[k] for k in ("ball_ml", "core_ml")} == {
        k: one[k] for k in ("ball_ml", "core_ml")
    }
    assert "ball_dice" not in one
