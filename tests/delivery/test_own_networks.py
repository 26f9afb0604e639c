"""Networks that the project does not build: MONAI's own, and source of the user's."""

from __future__ import annotations

import importlib.util
import textwrap
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

from medfed.config import allowed
from medfed.config.spelling import with_plugins
from medfed.delivery.bundle.bundle import read_bundle, write_bundle
from medfed.delivery.bundle.networks import (
    bounded,
    build_network,
    describe,
)
from medfed.delivery.bundle.onnx_file import ONNX, NotTraceableError, OnnxNetwork, save_onnx
from medfed.delivery.export.client_model import choose_bits, quantise
from medfed.federation.split import float_entries
from medfed.standalone.errors import CheckpointError, ConfigError
from medfed.standalone.outputs import only_logits
from tests.delivery.hospitals import Hospital, make_hospital, run_by_monai
from tests.toys import assert_alike

onnx = pytest.importorskip("onnx")
NETS = "monai.networks.nets"
VOLUMES = "spatial_dims: 3, in_channels: 4, out_channels: 1"
NETWORKS = {
    "segresnet": ("windows", f"_target_: {NETS}.SegResNet, {VOLUMES}, init_filters: 8"),
    # Every tensor has two names; heads of deep supervision answer in training alone.
    "dynunet": (
        "windows",
        f"_target_: {NETS}.DynUNet, {VOLUMES}, kernel_size: [3, 3, 3], strides: [1, 2, 2], "
        "upsample_kernel_size: [2, 2], filters: [4, 8, 8], deep_supervision: true, "
        "deep_supr_num: 1, norm_name: [INSTANCE, {affine: true}]",
    ),
    "resnet": (
        "digits",
        f"_target_: {NETS}.ResNet, block: basic, layers: [1, 1, 1, 1], spatial_dims: 2, "
        "n_input_channels: 1, num_classes: 10, "
        "conv1_t_size: 3, conv1_t_stride: 1, no_max_pool: true, block_inplanes: [4, 4, 4, 8]",
    ),
    "tied": ("digits", "_target_: own_network.Tied, outputs: 10, act: {_target_: torch.nn.GELU}"),
}
SOURCE = {
    "own_network.py": """
        import torch
        from own_parts.scale import half
        from torch import nn

        class Tied(nn.Module):
            def __init__(self, outputs, act):
                super().__init__()
                self.act = act
                self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
                self.last.weight = self.first.weight
                self.head = nn.Linear(64, outputs)
                self.register_buffer("order", torch.arange(64).flip(0))

            def forward(self, image):
                hidden = self.act(self.first(image.flatten(1)[:, self.order]))
                return self.head(half(self.last(hidden)))
    """,
    "own_parts/scale.py": """
        from .numbers_ import HALF

        def half(x):
            return HALF * x
    """,
    "own_parts/numbers_.py": "HALF = 0.5",
    "unused.py": "raise SystemExit",
}


@pytest.fixture(scope="module")
def plugins(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("plugins")
    for name, text in SOURCE.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
    with_plugins([f"plugins={folder}"])
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory, plugins):
    known: dict[str, Hospital] = {}

    def get(name: str) -> Hospital:
        if name not in known:
            like, node = NETWORKS[name]
            folder = tmp_path_factory.mktemp(name)
            known[name] = make_hospital(
                like, folder, "~model.network", f"+model.network={{{node}}}"
            )
        return known[name]

    return get


def example(hospital: Hospital) -> torch.Tensor:
    return next(iter(hospital.data.clients[hospital.client].eval_batches("test")))["image"][:2]


def answer(hospital: Hospital, image: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return hospital.task.network.eval()(image)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_bundle_and_its_onnx_file_answer_as_the_run_does(made, tmp_path, name):
    hospital = made(name)
    bundle = read_bundle(hospital.bundle)
    image = example(hospital)
    image = image[..., :16, :16, :8] if image.ndim == 5 else image
    expected = answer(hospital, image)
    with torch.no_grad():
        found = bundle.network()(image)
    assert_alike(found, expected, 1e-6)
    assert {*float_entries(hospital.task.network)} <= {*bundle.state}
    books = quantise(bundle.state, choose_bits(hospital.task.network, 4, {"*": 4}))
    dense = {n: t for n, t in bundle.state.items() if n not in books}
    write_bundle(tmp_path / "b", bundle.facts, dense, books, onnx=True)
    few = read_bundle(tmp_path / "b")
    with torch.no_grad():
        expected = few.network()(image)
    assert not torch.allclose(expected, found)
    assert_alike(OnnxNetwork(few.folder / ONNX)(image), expected)


@pytest.mark.filterwarnings("ignore")  # of MONAI's own making
def test_monai_runs_a_network_of_two_names_for_each_tensor(made, tmp_path, monkeypatch):
    hospital = made("dynunet")
    (tmp_path / "in").mkdir()
    patient = hospital.data.plans[hospital.client].patients["test"][0]
    files = hospital.data.patients[patient].files
    scan = nib.load(files["image"])
    nib.save(scan, tmp_path / "in" / "a.nii.gz")
    run_by_monai(hospital.bundle, tmp_path / "in", tmp_path / "out", monkeypatch)
    hospital.predict(input=tmp_path / "in" / "a.nii.gz", output=tmp_path / "own.nii.gz")
    assert np.asanyarray(nib.load(tmp_path / "own.nii.gz").dataobj).any()
    assert (tmp_path / "out" / "a.nii.gz").read_bytes() == (tmp_path / "own.nii.gz").read_bytes()


@pytest.mark.filterwarnings("ignore")
def test_source_runs_by_monai_as_it_did_in_training(made, tmp_path, monkeypatch):
    """With the folder of the source among those that Python knows, as by PYTHONPATH."""
    hospital = made("tied")
    images = example(hospital)
    (tmp_path / "in").mkdir()
    for i, image in enumerate(images):
        values = ((image + 1) * hospital.data.data.peak / 2).round().numpy().astype(np.uint8)
        np.save(tmp_path / "in" / f"{i}.npy", values)
    run_by_monai(hospital.bundle, tmp_path / "in", tmp_path / "out", monkeypatch)
    rows = (tmp_path / "out" / "predictions.csv").read_text().splitlines()[1:]
    found = torch.tensor([[float(cell) for cell in row.split(",")[1:]] for row in rows])
    assert_alike(found, answer(hospital, images).softmax(1))


def test_source_is_run_only_if_its_folder_is_named(made, plugins, tmp_path, monkeypatch):
    hospital = made("tied")
    monkeypatch.setattr(allowed, "_active", [])
    folder = read_bundle(hospital.bundle).folder
    assert "plugins=FOLDER" in (folder / "docs" / "README.md").read_text()
    assert not [path for path in folder.rglob("*") if path.name in SOURCE]
    np.save(tmp_path / "a.npy", np.zeros((1, 8, 8), np.uint8))
    paths = {"input": tmp_path / "a.npy", "output": tmp_path / "out.csv"}
    sentence = "names the network own_network.Tied, which is not .* that you add by plugins=FOLDER"
    for other in (None, tmp_path):
        with pytest.raises(CheckpointError, match=sentence):
            hospital.predict(**paths, plugins=other)
    hospital.predict(**paths, plugins=plugins)
    assert (tmp_path / "out.csv").is_file()


REFUSED = {
    "os.system": ({"_target_": "os.system"}, "not among those that are built"),
    "inner": (
        {"_target_": f"{NETS}.SegResNet", "act": {"_target_": "os.system", "command": "true"}},
        "names the network os.system, which is not among",
    ),
    "loader": ({"_target_": "torch.nn.modules.torch.load", "f": "x"}, "cannot be built"),
    "fetched": ({"_target_": f"{NETS}.resnet18", "pretrained": True}, "would fetch or load"),
    "huge": ({"_target_": f"{NETS}.SegResNet", "init_filters": 1 << 30}, "beyond all measure"),
    "long": ({"_target_": f"{NETS}.SegResNet", "blocks_down": [1] * 999}, "beyond all measure"),
    "arguments": ({"_target_": f"{NETS}.SegResNet", "depth": 3}, "cannot be built of its arg"),
    "source": ({"_target_": "mine.Net"}, "which is not among .* that you add by plugins=FOLDER"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_descriptions_that_are_refused(case):
    plain, sentence = REFUSED[case]
    with pytest.raises(CheckpointError, match=sentence):
        build_network(plain)


def test_a_network_far_larger_than_its_weights_is_not_built():
    plain = {"_target_": f"{NETS}.SegResNet", "init_filters": 2048}
    with bounded(80, 400_000), pytest.raises(CheckpointError, match="far larger than its weights"):
        build_network(plain)


DESCRIBED = {
    "expression": ({"_target_": "torch.nn.Linear", "in_features": "$1"}, "MONAI would evaluate it"),
    "unnamed": ({"_target_": "torch.nn.Sequential", "_args_": [1, 2]}, "have no names"),
    "object": ({"_target_": "torch.nn.Linear", "in_features": {1}}, "is a set"),
}


@pytest.mark.parametrize("case", DESCRIBED)
def test_what_a_bundle_cannot_say(case):
    node, sentence = DESCRIBED[case]
    with pytest.raises(ConfigError, match=sentence):
        describe(node)


def test_a_partial_stays_one():
    node = {"_target_": "torch.nn.TransformerDecoderLayer", "d_model": 4, "nhead": 2}
    plain = describe({**node, "activation": {"_target_": "torch.nn.GELU", "_partial_": True}})
    assert plain["activation"] == {"_target_": "torch.nn.GELU", "_mode_": "callable"}
    layer = build_network(plain)
    assert layer.activation.func is torch.nn.GELU


class Batches(torch.nn.Module):
    """Its answers depend on the number of images, which a trace takes for a constant."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x) * float(len(x))


def test_a_trace_that_answers_otherwise_is_no_onnx_file(tmp_path):
    pytest.importorskip("onnxruntime")
    with pytest.raises(NotTraceableError, match=r"ONNX Runtime and PyTorch differ at .*\(1, 4\)"):
        save_onnx(tmp_path / "model.onnx", Batches().eval(), (4,))


def test_a_bundle_goes_without_what_cannot_be_traced(made, tmp_path, monkeypatch, caplog):
    bundle = read_bundle(made("resnet").bundle)

    def refuses(*_, **__):
        raise RuntimeError("no such operator\nsecond line")

    monkeypatch.setattr(torch.onnx, "export", refuses)
    with caplog.at_level("WARNING"):
        facts = write_bundle(tmp_path / "b", bundle.facts, bundle.state, {}, onnx=True)
    assert "onnx" not in facts["sizes"]
    assert [r.getMessage() for r in caplog.records] == [
        f"No ONNX file of {facts['client']}: its network cannot be traced (no such "
        "operator); models/model.pt has the weights."
    ]
    assert not (tmp_path / "b" / ONNX).exists()
    assert read_bundle(tmp_path / "b").state


class Several(torch.nn.Module):
    def forward(self, x, how):
        return {"tuple": (x, [x, x]), "dict": {"out": x, "aux": 0}, "list": [x, [x]]}[how]


@pytest.mark.parametrize("how", ["tuple", "dict", "list"])
def test_the_first_of_several_answers_counts(how):
    assert torch.equal(only_logits(Several())(torch.ones(2), how), torch.ones(2))


@pytest.mark.skipif(not importlib.util.find_spec("einops"), reason="SwinUNETR needs einops")
def test_a_transformer_that_needs_another_package():
    node = {"_target_": f"{NETS}.SwinUNETR", "in_channels": 1, "out_channels": 2}
    network = build_network(describe({**node, "feature_size": 12, "spatial_dims": 2}))
    assert network(torch.zeros(1, 1, 64, 64)).shape == (1, 2, 64, 64)
