"""MONAI bundles from elsewhere become bundles of medfed: the same logits, and no code is run."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
import yaml
from monai.bundle import ConfigParser
from monai.networks.nets import DenseNet121, UNet
from PIL import Image

from medfed.config.compose import load
from medfed.config.description import checked
from medfed.delivery.bundle.bundle import read_bundle
from medfed.delivery.main import open_bundle
from medfed.delivery.predict.prediction import predict
from medfed.delivery.start.adopting import adopt
from medfed.records.bundles import MODEL, manifest_hash
from medfed.records.places import METADATA
from medfed.standalone.errors import MedfedError
from medfed.studies.cohorts import Cohort, hospital_rows
from medfed.studies.plan import Bundle, Plan

CONFIG = "configs/inference.json"
UNETS = dict(  # noqa: C408
    spatial_dims=3, in_channels=1, out_channels=3, channels=[4, 8], strides=[2], norm="batch"
)
DENSE = dict(  # noqa: C408
    spatial_dims=2, in_channels=1, out_channels=2, init_features=8, growth_rate=4
) | {"block_config": [2, 2]}
RUN = {  # what MONAI's own bundles have beside the network
    "imports": ["$import os"],
    "bundle_root": ".",
    "device": "$torch.device('cpu')",
    "network": "$@network_def.to(@device)",
    "preprocessing": {"_target_": "Compose", "transforms": "$@made_by_code"},
}
KEYS = {
    "unet": ["task=segmentation", "normalize={window: [-175, 250]}"],
    "dense": ["task=classification", "normalize=unit"],
}


def port(names: list[str], **more: Any) -> dict[str, Any]:
    return {"num_channels": len(names), "channel_def": dict(enumerate(names)), **more}


def make(folder: Path, kind: str, spelling: str = "json") -> Path:
    """Writes a bundle as MONAI's model zoo has them, with weights from a seed."""
    torch.manual_seed(5)
    if kind == "unet":
        network = UNet(**UNETS)
        node = {"_target_": "UNet", "_desc_": "a UNet", **UNETS, "in_channels": "@inputs::0"}
        inputs, outputs = port(["CT"], spatial_shape=[8, 8, 8]), ["background", "organ", "lesion"]
    else:
        network = DenseNet121(**DENSE)
        node = {"_target_": "monai.networks.nets.DenseNet121", **DENSE, "block_config": "@blocks"}
        inputs, outputs = port(["grey"], spatial_shape=[32, 32]), ["healthy", "ill"]
    for tensor in network.buffers():  # as after a training
        if tensor.is_floating_point():
            tensor.add_(0.2 * torch.rand(tensor.shape))
    content = {**RUN, "inputs": [1], "blocks": [2, 2], "network_def": node}
    for name in ("configs", "models"):
        (folder / name).mkdir(parents=True)
    if spelling == "json":
        (folder / CONFIG).write_text(json.dumps(content))
    else:
        (folder / "configs" / "inference.yaml").write_text(yaml.safe_dump(content))
    said = {"inputs": {"image": inputs}, "outputs": {"pred": port(outputs)}}
    metadata = {"name": f"A {kind}", "version": "0.2", "network_data_format": said}
    (folder / METADATA).write_text(json.dumps(metadata))
    torch.save(network.state_dict(), folder / MODEL)
    return folder


def adopted(folder: Path, out: Path, *keys: str) -> Path:
    adopt(checked(load([f"bundle={folder}", f"out={out}", *keys], "adopt")))
    return out


def by_monai(folder: Path) -> torch.nn.Module:
    """The network that MONAI itself builds and loads."""
    parser = ConfigParser()
    parser.read_config([str(p) for p in folder.glob("configs/inference.*")])
    network: torch.nn.Module = parser.get_parsed_content("network_def")
    network.load_state_dict(torch.load(folder / MODEL, weights_only=True))
    return network.eval()


@pytest.mark.parametrize("spelling", ["json", "yaml"])
@pytest.mark.parametrize(("kind", "shape"), [("unet", (2, 1, 8, 8, 8)), ("dense", (2, 1, 32, 32))])
def test_the_logits_are_those_of_monai(kind, shape, spelling, tmp_path, capsys):
    folder = make(tmp_path / "theirs", kind, spelling)
    bundle = read_bundle(adopted(folder, tmp_path / "ours", *KEYS[kind]))
    image = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(bundle.network()(image), by_monai(folder)(image))
    printed = capsys.readouterr().out
    assert "the keys replace: preprocessing." in printed
    assert ", ".join(bundle.facts["labels"]) in printed
    manifest_hash(bundle.folder)  # by which a plan names it
    pages = "".join(p.read_text() for p in (bundle.folder / "docs").iterdir())
    assert pages.count(f"Adopted from A {kind} 0.2, which was trained elsewhere") == 2
    assert "federation" not in pages + bundle.metadata["description"]


def test_images_are_predicted_from_black_and_white_as_stated(tmp_path):
    """An image of 8 bits goes into the network in 0 to 1, or in -1 to 1."""
    folder = make(tmp_path / "theirs", "dense")
    pixels = np.random.default_rng(2).integers(0, 256, (32, 32), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    for normalize, black in (("unit", 0), ("symmetric", -1)):
        out = tmp_path / normalize
        adopted(folder, out, "task=classification", f"normalize={normalize}")
        table = tmp_path / f"{normalize}.csv"
        keys = [f"bundle={out}", f"input={tmp_path / 'image.png'}", f"output={table}"]
        predict(checked(load([*keys, "device=cpu"], "predict")))
        (row,) = csv.DictReader(table.read_text().splitlines())
        seen = torch.from_numpy(pixels / 255).float() * (1 - black) + black
        with torch.no_grad():
            wanted = by_monai(folder)(seen[None, None]).softmax(1)[0]
        found = [float(row["probability_healthy"]), float(row["probability_ill"])]
        np.testing.assert_allclose(found, wanted.numpy(), atol=1e-5)


def test_a_scan_is_segmented_as_by_monai(tmp_path):
    """A scan of the window's size: no blending, so the mask is that of the largest logit."""
    folder = make(tmp_path / "theirs", "unet")
    voxels = np.random.default_rng(1).uniform(-400, 400, (8, 8, 8)).astype(np.float32)
    nib.save(nib.Nifti1Image(voxels, np.eye(4)), tmp_path / "scan.nii.gz")
    out = adopted(folder, tmp_path / "ours", *KEYS["unet"])
    keys = [f"bundle={out}", f"input={tmp_path / 'scan.nii.gz'}"]
    keys += [f"output={tmp_path / 'mask.nii.gz'}", "device=cpu"]
    predict(checked(load(keys, "predict")))
    seen = torch.from_numpy((voxels.clip(-175, 250) + 175) / 425)
    with torch.no_grad():
        wanted = by_monai(folder)(seen[None, None]).argmax(1)[0].numpy()
    mask = np.asarray(nib.load(tmp_path / "mask.nii.gz").dataobj)
    assert {*np.unique(wanted)} == {0, 1, 2}
    assert (mask == wanted).mean() > 0.99


def test_a_study_judges_it(hospital, tmp_path):
    made = hospital("classes")
    out = adopted(make(tmp_path / "theirs", "unet"), tmp_path / "ours", *KEYS["unet"])
    plan = Plan(bundles=[Bundle("new")]).completed()
    rows = hospital_rows(made.data, plan)[made.client]
    cohort = Cohort(made.data, made.client, plan)
    judged = cohort.with_predictions(rows, {"new": open_bundle(out)})
    dice = [column for name, column in judged.columns.items() if "Dice of" in name]
    assert len(dice) == 2
    assert all(((each >= 0) & (each <= 1)).all() for each in dice)
    assert np.stack(dice).max() > 0


def edit(folder: Path, **changes: Any) -> None:
    """Changes the network of a bundle."""
    content = json.loads((folder / CONFIG).read_text())
    content["network_def"] |= changes
    (folder / CONFIG).write_text(json.dumps(content))


class Trap:
    """Unpickling it leaves a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def pickled(folder: Path) -> None:
    torch.save({"state_dict": Trap(folder / "ran")}, folder / MODEL)


def weights(folder: Path, change: Any) -> None:
    state = torch.load(folder / MODEL, weights_only=True)
    change(state)
    torch.save(state, folder / MODEL)


def rewrite(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(json.dumps(content))


CODE = "$__import__('os').mkdir('ran')"
REFUSED = {
    "code": (lambda f: edit(f, strides=CODE), "network_def.strides=$__import"),
    "code_inside": (lambda f: edit(f, strides=[CODE]), "network_def.strides[0]=$__import"),
    "code_as_class": (lambda f: edit(f, _target_=CODE), "network_def._target_=$__import"),
    "code_referred_to": (
        lambda f: edit(f, norm="@device"),
        "network_def.norm=@device cannot go into",
    ),
    "no_reference": (lambda f: edit(f, norm="@nothing::0"), "norm=@nothing::0 cannot go into"),
    "component": (lambda f: edit(f, norm="@preprocessing"), "norm=@preprocessing cannot go into"),
    "circle": (lambda f: edit(f, norm="@network_def"), "norm=@network_def cannot go into"),
    "macro": (lambda f: edit(f, norm="%other.json::a"), "norm=%other.json::a cannot go into"),
    "requires": (lambda f: edit(f, _requires_=CODE), "network_def has _requires_, which"),
    "mode": (lambda f: edit(f, _mode_="callable"), "network_def has _mode_, which"),
    "script": (lambda f: edit(f, _target_="scripts.net.Net"), "scripts.net.Net is no network"),
    "function": (lambda f: edit(f, _target_="os.system"), "os.system is no network of MONAI"),
    "unknown_class": (lambda f: edit(f, _target_="UNett"), "monai.networks.nets.UNett cannot"),
    "fetching": (
        lambda f: edit(f, _target_="DenseNet121", pretrained=True),
        "would fetch or load trained weights; set its pretrained to false",
    ),
    "argument": (lambda f: edit(f, depth=3), "cannot be built of its arguments"),
    "no_network": (lambda f: rewrite(f, CONFIG, RUN), "network='network_def' is unknown"),
    "no_config": (lambda f: (f / CONFIG).unlink(), "inference.json is missing"),
    "no_metadata": (lambda f: (f / METADATA).unlink(), "metadata.json is missing"),
    "odd_metadata": (lambda f: rewrite(f, METADATA, {"name": "x"}), "metadata.json cannot be"),
    "no_names": (
        lambda f: rewrite(
            f, METADATA, {"network_data_format": {"inputs": {"a": {}}, "outputs": {"b": {}}}}
        ),
        "names no channels or no labels",
    ),
    "ours": (lambda f: rewrite(f, METADATA, {"medfed": {}}), "is a bundle of medfed already"),
    "no_weights": (lambda f: (f / MODEL).unlink(), "model.pt cannot be read as weights"),
    "pickle": (pickled, "holds more than weights"),
    "other_shapes": (lambda f: edit(f, channels=[6, 8]), "do not fit its network"),
    "weight_missing": (
        lambda f: weights(f, lambda s: s.pop(next(iter(s)))),
        "do not fit its network",
    ),
    "not_finite": (
        lambda f: weights(f, lambda s: next(iter(s.values())).fill_(float("nan"))),
        "has NaN or infinity",
    ),
}


@pytest.mark.parametrize(("spoil", "words"), REFUSED.values(), ids=[*REFUSED])
def test_what_is_refused_is_one_sentence_and_leaves_nothing(spoil, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = make(tmp_path / "theirs", "unet")
    spoil(folder)
    with pytest.raises(MedfedError) as refused:
        adopted(folder, tmp_path / "ours", *KEYS["unet"])
    assert words in str(refused.value)
    assert str(folder) in str(refused.value) or words.startswith(("network=", "cannot"))
    assert "\n" not in str(refused.value)
    assert [p.name for p in tmp_path.iterdir()] == ["theirs"]
    assert not (folder / "ran").exists()


WRONG = {
    "labels=[a,b,c,d]": "3 outputs have 4 labels",
    "channels=[a,b]": "1 inputs have 2 channels",
    "normalize=zscor": "normalize=zscor must be",
    "spacing=[1]": "spacing=[1",
    "task=classification": "is unknown; choose unit or symmetric",
    "weights=models/other.pt": "models/other.pt cannot be read",
}


@pytest.mark.parametrize(("key", "words"), WRONG.items(), ids=[*WRONG])
def test_a_key_that_does_not_fit_is_named(key, words, tmp_path):
    folder = make(tmp_path / "theirs", "unet")
    with pytest.raises(MedfedError) as refused:
        adopted(folder, tmp_path / "ours", *KEYS["unet"], key)
    assert words in str(refused.value)
    assert "data." not in str(refused.value)
    assert not (tmp_path / "ours").exists()


def test_the_bundle_of_others_is_never_replaced(tmp_path):
    folder = make(tmp_path / "theirs", "unet")
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    with pytest.raises(MedfedError, match="holds something else than a bundle"):
        adopted(folder, folder, *KEYS["unet"])
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
