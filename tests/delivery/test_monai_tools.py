"""MONAI's commands on every kind of bundle: they compute what medfed does, or say that they cannot.

TensorRT is in no test environment; of `trt_export` what comes before it is run.
"""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import monai.bundle
import monai.bundle.scripts
import nibabel as nib
import numpy as np
import pytest
import torch
from monai.bundle import ConfigParser
from monai.networks.utils import copy_model_state
from PIL import Image
from torch import Tensor, nn

from medfed.config.compose import load
from medfed.config.description import checked
from medfed.config.spelling import with_plugins
from medfed.delivery.bundle.bundle import read_bundle, write_bundle
from medfed.delivery.export.client_model import choose_bits, quantise
from medfed.delivery.predict.prediction import predict
from medfed.records.bundles import MODEL, PACKED
from medfed.records.places import METADATA
from tests.datamodules.volume_files import affine, noise, write_series
from tests.delivery.hospitals import (
    EXPERIMENTS,
    Hospital,
    inside,
    make_hospital,
    run_by_monai,
    same_files,
)
from tests.delivery.test_mixtures import mixture_bundle
from tests.toys import assert_alike

CONFIG = "configs/inference.json"
OWN = """
import torch
from torch import nn


class Counts(nn.Module):
    '''Its answers depend on an integer buffer, and one of its tensors has two names.'''

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.last.weight = self.first.weight
        self.head = nn.Linear(64, outputs)
        self.register_buffer("order", torch.arange(64))

    def forward(self, image):
        hidden = self.first(image.flatten(1)[:, self.order]).relu()
        return self.head(self.last(hidden))
"""
KINDS = (*(name for name in EXPERIMENTS if name != "margins"), "mixture", "own")


@pytest.fixture(scope="module")
def bundles(hospital, tmp_path_factory):
    """Bundles by kind, and whether they are quantised, each made once."""
    made: dict[tuple[str, bool], Path] = {}
    root = tmp_path_factory.mktemp("bundles")

    def get(kind: str, quantised: bool) -> Path:
        if (kind, quantised) not in made:
            folder = root / f"{kind}_{quantised}"
            if kind == "mixture":
                mixture_bundle(hospital("slices"), folder, 3 if quantised else 32)
            else:
                plain = own(root) if kind == "own" else hospital(kind).bundle
                rewritten(plain, folder, quantised)
            made[kind, quantised] = folder
        return made[kind, quantised]

    return get


def own(root: Path) -> Path:
    """The bundle of a network that the user wrote, whose buffer is no longer as it was built."""
    (root / "own_counts.py").write_text(OWN)
    with_plugins([f"plugins={root}"])
    node = "{_target_: own_counts.Counts, outputs: 10}"
    bundle = root / "bundle_digits"
    if not bundle.is_dir():
        make_hospital("digits", root, "~model.network", f"+model.network={node}")
    read = read_bundle(bundle)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(5))
    write_bundle(bundle, read.facts, {**read.state, "order": order}, {})
    return bundle


def rewritten(source: Path, folder: Path, quantised: bool) -> None:
    """A bundle of the same model, with three bits per weight or as it is."""
    bundle, books = read_bundle(source), {}
    if quantised:
        books = quantise(bundle.state, choose_bits(bundle.network(), 3, {"*": 3}))
        assert books
    dense = {n: t for n, t in bundle.state.items() if n not in books}
    write_bundle(folder, bundle.facts, dense, books)


def network_def(bundle: Path) -> nn.Module:
    """The network that MONAI builds, with the weights that it draws."""
    config = ConfigParser.load_config_file(str(bundle / CONFIG))
    torch.manual_seed(99)
    return ConfigParser({"network_def": config["network_def"]}).get_parsed_content("network_def")


def image_for(bundle: Path) -> Tensor:
    """An input of the form that the metadata state."""
    image = json.loads((bundle / METADATA).read_text())["network_data_format"]["inputs"]["image"]
    sizes = [64 if size == "64*n" else size for size in image["spatial_shape"]]
    shape = (1, image["num_channels"], *sizes)
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def answer(network: nn.Module, image: Tensor) -> Tensor:
    return network.eval()(image)


def by_medfed(bundle: Path) -> Tensor:
    return answer(read_bundle(bundle).network(), image_for(bundle))


def paths(bundle: Path, filepath: Path) -> dict[str, Any]:
    """What MONAI's commands that convert a network are given."""
    return {
        "net_id": "network_def",
        "filepath": str(filepath),
        "ckpt_file": str(bundle / MODEL),
        "meta_file": str(bundle / METADATA),
        "config_file": str(bundle / CONFIG),
        "bundle_root": str(bundle),
    }


@pytest.mark.parametrize("quantised", [False, True], ids=["fp32", "quantised"])
@pytest.mark.parametrize("kind", KINDS)
def test_model_pt_is_the_state_dict_of_network_def(bundles, kind, quantised, monkeypatch):
    bundle = bundles(kind, quantised)
    assert (bundle / PACKED).is_file() == quantised
    expected, image = by_medfed(bundle), image_for(bundle)
    with inside(bundle, monkeypatch):
        state = torch.load(bundle / MODEL, weights_only=True)
        assert all(isinstance(value, Tensor) for value in state.values())
        network = network_def(bundle)
        assert not torch.allclose(answer(network, image), expected)
        network.load_state_dict(state, strict=True)
        assert torch.equal(answer(network, image), expected)
        _, updated, left = copy_model_state(network_def(bundle), state)
        assert updated
        assert not left


@pytest.mark.parametrize("quantised", [False, True], ids=["fp32", "quantised"])
@pytest.mark.parametrize("kind", KINDS)
def test_monai_loads_the_trained_network(bundles, kind, quantised, monkeypatch):
    bundle = bundles(kind, quantised)
    with inside(bundle, monkeypatch):
        network = monai.bundle.load(
            name=bundle.name, bundle_dir=bundle.parent, workflow_type="inference", device="cpu"
        )
        assert torch.equal(answer(network, image_for(bundle)), by_medfed(bundle))


@pytest.mark.parametrize("kind", KINDS)
def test_monai_verifies_what_goes_in_and_out(bundles, kind, monkeypatch):
    bundle = bundles(kind, False)
    with inside(bundle, monkeypatch):
        monai.bundle.verify_net_in_out(
            net_id="network_def", meta_file=METADATA, config_file=CONFIG, device="cpu"
        )


@pytest.mark.filterwarnings("ignore:.torch.jit.load:DeprecationWarning")
@pytest.mark.parametrize("traced", [True, False], ids=["traced", "scripted"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_monai_exports_as_torchscript_is_the_trained_network(
    bundles, kind, traced, tmp_path, monkeypatch
):
    bundle = bundles(kind, True)
    expected, image = by_medfed(bundle), image_for(bundle)
    with inside(bundle, monkeypatch):
        try:
            monai.bundle.ckpt_export(
                **paths(bundle, tmp_path / "m.ts"), use_trace=traced, input_shape=[*image.shape]
            )
        except Exception:  # of TorchScript, which has no word for some networks
            assert not traced
            assert not (tmp_path / "m.ts").exists()
            return
    assert_alike(answer(torch.jit.load(tmp_path / "m.ts"), image), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_what_monai_exports_as_onnx_is_the_trained_network(bundles, kind, tmp_path, monkeypatch):
    runtime = pytest.importorskip("onnxruntime")
    bundle = bundles(kind, True)
    expected, image = by_medfed(bundle), image_for(bundle)
    with inside(bundle, monkeypatch):
        monai.bundle.onnx_export(
            **paths(bundle, tmp_path / "m.onnx"),
            use_trace=True,
            input_shape=[*image.shape],
            converter_kwargs={"dynamo": False},  # the other exporter needs the package onnxscript
        )
    session = runtime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: image.numpy()})
    assert_alike(torch.from_numpy(found), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_what_tensorrt_would_get_is_the_trained_network(bundles, kind, tmp_path, monkeypatch):
    bundle, given = bundles(kind, True), []

    def converter(model: nn.Module, **_: object) -> nn.Module:
        given.append(model)
        return torch.jit.trace(model.eval(), image_for(bundle))

    monkeypatch.setattr(monai.bundle.scripts, "convert_to_trt", converter)
    with inside(bundle, monkeypatch):
        monai.bundle.trt_export(**paths(bundle, tmp_path / "m.ts"))
        assert torch.equal(answer(given[0], image_for(bundle)), by_medfed(bundle))


@pytest.mark.parametrize("file", [MODEL, PACKED])
def test_weights_of_another_file_are_refused_loudly(bundles, file, tmp_path, monkeypatch):
    """The packed file is no state dict; MONAI must not go on with the weights that it drew."""
    bundle = bundles("table", True)
    given = paths(bundle, tmp_path / "m.ts") | {"ckpt_file": str(bundle / file)}
    if file == MODEL:
        given["ckpt_file"] = str(tmp_path / "absent.pt")
    with inside(bundle, monkeypatch), pytest.raises((FileNotFoundError, AttributeError)):
        monai.bundle.ckpt_export(**given)
    assert not (tmp_path / "m.ts").exists()


def rows_of(made: Hospital, count: int) -> list[dict[str, object]]:
    """The first rows of a hospital's table, categories as texts."""
    table, categories = made.data.table, read_bundle(made.bundle).facts["input"]["categories"] or {}
    rows = [dict(zip(table.names, row, strict=True)) for row in table.features[:count].tolist()]
    return [
        {n: categories[n][int(v)] if n in categories else v for n, v in row.items()} for row in rows
    ]


def inputs(made: Hospital | None, kind: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """What a hospital predicts with such a model, and further keys."""
    folder.mkdir()
    rng = np.random.default_rng(1)
    if kind in ("digits", "findings", "own"):
        size, white = (16, 255) if kind == "findings" else (8, 16)
        for n in range(3):
            grey = rng.integers(0, white, (size, size), np.uint8)
            Image.fromarray(grey).save(folder / f"{n}.png")
        return folder, {}
    if kind == "mixture":
        voxels = rng.normal(100, 30, (32, 32, 4, 3)).astype(np.float32)
        nib.save(nib.Nifti1Image(voxels, np.diag([8, 8, 18, 1])), folder / "a.nii.gz")
        return folder / "a.nii.gz", {}
    assert made is not None
    if kind in ("table", "outcome", "survival"):
        rows = rows_of(made, 5)
        with (folder / "rows.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        return folder / "rows.csv", {}
    if kind == "classes":
        shutil.copytree(made.bundle.parent / "classes" / "case_0", folder / "case_0")
        return folder / "case_0", {}
    if kind == "pictures":
        return made.bundle.parent / "pictures" / "centre_0" / "0L.png", {}
    patient = made.data.plans[made.client].patients["test"][0]
    files = made.data.patients[patient].files
    if kind != "candidates":
        return files["header" if kind == "lesions" else "image"], {}
    points = made.data.scans.candidates_of(patient).world.tolist()
    with (folder / "candidates.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["seriesuid", "coordX", "coordY", "coordZ"])
        writer.writerows([patient, *point] for point in points)
    return made.data.scans.path, {"candidates": folder / "candidates.csv"}


def predicted(bundle: Path, source: Path, output: Path, keys: Mapping[str, Any]) -> None:
    """By `medfed predict`."""
    values = {"bundle": bundle, "input": source, "output": output, **keys}
    texts = {k: f'"{v}"' if isinstance(v, Path) else v for k, v in values.items()}
    predict(checked(load([f"{k}={v}" for k, v in texts.items()], "predict")))


def same_results(monai: Path, medfed: Path) -> None:
    """Every result of MONAI's run is one of medfed's, to the byte."""
    for name in same_files(monai, medfed):
        assert (monai / name).stat().st_size


@pytest.mark.parametrize("form", ["fp32", "quantised", "packed alone"])
@pytest.mark.parametrize("kind", KINDS)
def test_monai_runs_what_medfed_predicts(hospital, bundles, kind, form, tmp_path, monkeypatch):
    bundle = Path(shutil.copytree(bundles(kind, form != "fp32"), tmp_path / "bundle"))
    if form == "packed alone":
        (bundle / MODEL).unlink()
    made = hospital(kind) if kind not in ("mixture", "own") else None
    source, keys = inputs(made, kind, tmp_path / "in")
    if window_batch := read_bundle(bundle).facts["window_batch"]:  # as MONAI's run has it
        keys["batch_size"] = window_batch
    predicted(bundle, source, tmp_path / "medfed/", keys)
    texts = {k: str(v) for k, v in keys.items() if k != "batch_size"}
    run_by_monai(bundle, source, tmp_path / "monai", monkeypatch, **texts)
    same_results(tmp_path / "monai", tmp_path / "medfed")


def test_monai_runs_on_a_dicom_series(bundles, tmp_path, monkeypatch):
    pytest.importorskip("SimpleITK")
    bundle, source = bundles("classes", True), tmp_path / "in" / "series"
    write_series(source, noise((20, 24, 10)), affine((3.0, 1.0, 1.0)))
    predicted(bundle, source, tmp_path / "medfed/", {})
    run_by_monai(bundle, source, tmp_path / "monai", monkeypatch)
    same_results(tmp_path / "monai", tmp_path / "medfed")
