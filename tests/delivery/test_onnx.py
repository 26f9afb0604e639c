"""ONNX files: they agree with PyTorch, in bundles too."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from medfed.config.compose import load
from medfed.delivery.bundle.bundle import read_bundle, write_bundle
from medfed.delivery.bundle.onnx_file import (
    ONNX,
    NotTraceableError,
    OnnxNetwork,
    save_int8,
    save_onnx,
)
from medfed.delivery.export.client_model import choose_bits, quantise
from medfed.delivery.predict.options import PredictOptions
from medfed.delivery.predict.prediction import make_predictor
from medfed.federation.split import float_entries
from medfed.records.places import METADATA
from medfed.records.tasks import build_task
from medfed.standalone.errors import CheckpointError, ConfigError
from tests.sweeps import sweep
from tests.toys import assert_alike

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
SEGMENTS = ("in_channels=3", "out_channels=2", "regions=[whole,core]")
CLASSES = ("in_channels=3", "out_channels=2")
TABULAR = ("logistic", "mlp", "mlp_regression")
NETWORKS = {
    "basic_unet": (*SEGMENTS, "model.network.features=[4,4,8,8,8,4]"),
    "unet": (*SEGMENTS, "model.network.channels=[4,8,8]", "model.network.strides=[2,2]"),
    "densenet_bc": (*CLASSES, "model.network.block_config=[2,2]"),
    "small_cnn": (*CLASSES, "model.network.channels=[4,4,4]"),
    "logistic": CLASSES,
    "mlp": CLASSES,
    "mlp_regression": ("in_channels=3", "out_channels=1"),
}


def network_of(name: str, *overrides: str, dims: int = 2) -> torch.nn.Module:
    """A network in evaluation mode with other biases, norms and buffers than at the start."""
    sizes = [] if name in TABULAR else [f"spatial_dims={dims}"]
    config = load([f"model={name}", *sizes, *overrides])
    network = build_task(config.model, None, config.seed).network.eval()
    generator = torch.Generator().manual_seed(3)
    for tensor in network.state_dict().values():
        if tensor.is_floating_point() and tensor.ndim == 1:
            tensor.add_(0.1 * torch.rand(tensor.shape, generator=generator))
    return network


def quantised(network: torch.nn.Module, bits: int, **layers: int) -> None:
    """Quantises a network in place."""
    weights = {n: t.detach().clone() for n, t in float_entries(network).items()}
    books = quantise(weights, choose_bits(network, bits, layers))
    network.load_state_dict({n: b.dense() for n, b in books.items()}, strict=False)


@sweep(("name", "bits"), [*((name, 3) for name in sorted(NETWORKS)), ("small_cnn", 1)])
def test_pytorch_and_onnx_runtime_agree(tmp_path, name, bits):
    network = network_of(name, *NETWORKS[name])
    quantised(network, bits, **{"*": bits})
    size = () if name in TABULAR else (32, 32)
    save_onnx(tmp_path / "model.onnx", network, (3, *size))
    session = OnnxNetwork(tmp_path / "model.onnx")
    other = () if name in TABULAR else (48, 16)
    for batch, shape in ((1, size), (2, size), (3, size), (1, other)):
        image = torch.randn(batch, 3, *shape, generator=torch.Generator().manual_seed(batch))
        with torch.no_grad():
            expected = network(image)
        assert_alike(session(image), expected)
        assert 1e-4 < expected.abs().max() < 10


def test_volumes(tmp_path):
    network = network_of("basic_unet", *NETWORKS["basic_unet"], dims=3)
    quantised(network, 2)
    save_onnx(tmp_path / "model.onnx", network, (3, 16, 16, 16))
    image = torch.randn(2, 3, 16, 32, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = network(image)
    found = OnnxNetwork(tmp_path / "model.onnx")(image)
    assert_alike(found, expected)


class FixedAxis(torch.nn.Module):
    """Looks at one axis as an ``int``, which a trace keeps as it was."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis, self.weight = axis, torch.nn.Parameter(torch.ones(1))

    def forward(self, image):
        return self.weight * image * float(int(image.shape[self.axis]))


@pytest.mark.parametrize("axis", [2, 3, 4])
def test_a_size_that_the_trace_fixed_is_found_on_each_axis(axis, tmp_path):
    sizes = f"axis {axis} has 16 instead of 8"
    with pytest.raises(NotTraceableError, match=rf"differ at .*\({sizes}\)"):
        save_onnx(tmp_path / "model.onnx", FixedAxis(axis).eval(), (2, 8, 8, 8))
    save_onnx(tmp_path / "model.onnx", FixedAxis(axis).eval(), (2, 8, 8, 8), any_size=False)


@pytest.mark.parametrize("axis", [1, 2, 3, 4])
def test_a_fixed_axis_is_named_with_both_sizes(axis, tmp_path):
    network = FixedAxis(2).eval()
    save_onnx(tmp_path / "model.onnx", network, (2, 8, 8, 8), any_size=False)
    model = onnx.load(tmp_path / "model.onnx")
    for number, dim in enumerate(model.graph.input[0].type.tensor_type.shape.dim):
        if number > 1:
            dim.ClearField("dim_param")
            dim.dim_value = 8
    (tmp_path / "fixed.onnx").write_bytes(model.SerializeToString())
    shape = [1, 2, 8, 8, 8]
    wanted, shape[axis] = shape[axis], 12
    with pytest.raises(ValueError, match=rf"axis {axis} has 12 instead of {wanted}"):
        OnnxNetwork(tmp_path / "fixed.onnx")(torch.zeros(shape))


def test_8_bit_integers(tmp_path):
    network = network_of("basic_unet", *NETWORKS["basic_unet"])
    path = tmp_path / "model.onnx"
    images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    save_onnx(path, network, (3, 32, 32))
    save_int8(path, images)
    with torch.no_grad():
        expected = network(images)
    apart = (OnnxNetwork(path)(images) - expected).abs().max() / expected.abs().max()
    assert 1e-4 < float(apart) < 0.2
    with pytest.raises(ConfigError, match="onnx=int8 is slower for 3-D images"):
        save_int8(path, images[..., None])


def test_a_file_tells_nothing_of_its_machine(tmp_path):
    network = network_of("small_cnn", *NETWORKS["small_cnn"])
    save_onnx(tmp_path / "model.onnx", network, (3, 16, 16))
    content = (tmp_path / "model.onnx").read_bytes()
    assert str(Path(__file__).parents[2]).encode() not in content
    assert b"site-packages" not in content


def with_onnx(made, folder: Path, bits: int) -> Path:
    """A hospital's bundle, quantised and with an ONNX file."""
    bundle = read_bundle(made.bundle)
    books = quantise(bundle.state, choose_bits(bundle.network(), bits, {"*": bits}))
    dense = {n: t for n, t in bundle.state.items() if n not in books}
    facts = write_bundle(folder, bundle.facts, dense, books, onnx=True)
    assert facts["sizes"]["onnx"] == (folder / ONNX).stat().st_size
    return folder


def wanted(**options) -> PredictOptions:
    return PredictOptions("a", "b", "c", **options)


TASKS = {
    "slices": "2-D, several regions that overlap",
    "windows": "3-D, one region",
    "classes": "3-D, exclusive classes",
    "candidates": "patches of a CT",
    "digits": "images",
    "table": "rows",
}


@pytest.mark.parametrize("name", TASKS)
def test_bundle_and_its_onnx_file_predict_alike(hospital, tmp_path, name):
    made = hospital(name)
    bundle = read_bundle(with_onnx(made, tmp_path / "bundle", 4))
    image = next(iter(made.data.clients[made.client].eval_batches("test")))["image"][:3]
    own = make_predictor(bundle, wanted(backend="torch")).answer(image, "test")
    assert_alike(make_predictor(bundle, wanted(backend="onnx")).answer(image, "test"), own)
    assert own.std() > 0


def test_a_size_that_needs_a_margin_prints_no_error(hospital, tmp_path, capfd):
    made = hospital("margins")
    plan = made.data.plans[made.client]
    file = made.data.patients[plan.patients["test"][0]].files["image"]
    folder = with_onnx(made, tmp_path / "bundle", 32)
    made.predict(bundle=folder, input=file, output=tmp_path / "a.nii.gz", backend="onnx")
    assert "onnxruntime" not in capfd.readouterr().err
    made.predict(input=file, output=tmp_path / "b.nii.gz")
    assert (tmp_path / "a.nii.gz").read_bytes() == (tmp_path / "b.nii.gz").read_bytes()


def test_the_script_predicts_by_onnx_runtime(hospital, tmp_path):
    made = hospital("digits")
    folder = with_onnx(made, tmp_path / "bundle", 2)
    (tmp_path / "images").mkdir()
    for i in range(3):
        values = np.random.default_rng(i).integers(0, 17, (1, 8, 8), dtype=np.uint8)
        np.save(tmp_path / "images" / f"{i}.npy", values)
    found = {}
    for runtime in ("torch", "onnx"):
        output = tmp_path / f"{runtime}.csv"
        made.predict(bundle=folder, input=tmp_path / "images", output=output, backend=runtime)
        rows = output.read_text().splitlines()[1:]
        found[runtime] = np.array([[float(c) for c in r.split(",")[1:11]] for r in rows])
    np.testing.assert_allclose(found["onnx"], found["torch"], atol=1e-5)


def test_refusals(hospital, tmp_path):
    made = hospital("table")
    bundle = read_bundle(made.bundle)
    with pytest.raises(ConfigError, match=r"holds no models/model.onnx; export it with onnx=true"):
        make_predictor(bundle, wanted(backend="onnx"))
    with pytest.raises(ConfigError, match=r"backend.*tensorrt"):
        wanted(backend="tensorrt")
    folder = with_onnx(made, tmp_path / "bundle", 2)
    with pytest.raises(ConfigError, match="runs on the CPU, not on device=cuda"):
        make_predictor(read_bundle(folder), wanted(device="cuda", backend="onnx"))
    with pytest.raises(ValueError, match="of the ONNX file axis 1 has 99 instead of"):
        OnnxNetwork(folder / ONNX)(torch.zeros(1, 99))
    (folder / ONNX).write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="cannot be loaded by ONNX Runtime"):
        OnnxNetwork(folder / ONNX)
    with pytest.raises(CheckpointError, match=r"model\.onnx is not the file that was exported"):
        read_bundle(folder)
    (folder / ONNX).unlink()
    with pytest.raises(CheckpointError, match=r"model\.onnx is missing"):
        read_bundle(folder)


@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_the_extra_is_named(hospital, tmp_path, monkeypatch, package):
    assert importlib.util.find_spec(package)
    made = hospital("table")
    folder = with_onnx(made, tmp_path / "bundle", 2)
    monkeypatch.setitem(sys.modules, package, None)
    before = sorted(tmp_path.rglob("*"))
    other, bundle = tmp_path / "other", read_bundle(folder)
    needs = {
        "onnx": lambda: with_onnx(made, other, 2),
        "onnxruntime": lambda: make_predictor(bundle, wanted(backend="onnx")),
    }
    with pytest.raises(ConfigError, match=rf"pip install {package}"):
        needs[package]()
    assert sorted(tmp_path.rglob("*")) == before
    assert (folder / METADATA).is_file()
