"""Bundles as they are written: decoded without medfed, read again, run by MONAI, damaged."""

from __future__ import annotations

import ast
import csv
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

import monai.bundle
import nibabel as nib
import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from medfed import standalone
from medfed.config.compose import CONFIG_DIR, load
from medfed.delivery.bundle.bundle import (
    read_bundle,
    write_bundle,
    write_manifest,
)
from medfed.delivery.bundle.networks import MIXTURE, TARGETS, describe
from medfed.delivery.bundle.weights import kmeans, save_packed
from medfed.delivery.export.client_model import choose_bits, quantise
from medfed.federation.split import float_entries
from medfed.records.bundles import MODEL, PACKED
from medfed.records.places import MANIFEST, METADATA
from medfed.records.tasks import build_task
from medfed.standalone.errors import CheckpointError, DataError
from medfed.standalone.masks import label_map, map_codes
from tests import processes
from tests.delivery.hospitals import EXPERIMENTS, run_by_monai, same_files
from tests.toys import assert_alike

ANY = pytest.mark.filterwarnings("ignore")  # of MONAI's own making
ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("MEDFED_SHARED", ROOT.parent / "shared"))


def decoded(bundle: Path, name: str) -> dict[str, torch.Tensor]:
    """What the script inside the bundle makes of its weights."""
    spec = importlib.util.spec_from_file_location("decode", bundle / "scripts" / "decode.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.decode(bundle / name)


def quantised(made, folder: Path, bits: int) -> tuple[Path, dict[str, torch.Tensor]]:
    """A bundle of the hospital's model with few bits, and the weights that it stands for."""
    weights = {n: t.detach().clone() for n, t in float_entries(made.task.network).items()}
    books = quantise(weights, choose_bits(made.task.network, bits, {"*": bits}))
    dense = {n: t for n, t in weights.items() if n not in books}
    write_bundle(folder, read_bundle(made.bundle).facts, dense, books)
    return folder, {**dense, **{n: b.dense() for n, b in books.items()}}


def logits(network, weights, image):
    counters = {n: t for n, t in network.state_dict().items() if not t.is_floating_point()}
    before = {n: t.clone() for n, t in network.state_dict().items()}
    network.load_state_dict({**counters, **weights})
    with torch.no_grad():
        output = network.eval()(image)
    network.load_state_dict(before)
    return output


@pytest.mark.parametrize(("name", "bits"), [("slices", 2), ("candidates", 3), ("table", 1)])
def test_bundle_and_training_side_agree(hospital, tmp_path, name, bits):
    made = hospital(name)
    folder, weights = quantised(made, tmp_path / "bundle", bits)
    plain = torch.load(folder / MODEL, weights_only=True)
    assert [*plain] == [*made.task.network.state_dict()]
    for found in (decoded(folder, PACKED), decoded(folder, MODEL), plain):
        assert set(weights) <= set(found)
        for name_, tensor in weights.items():
            assert torch.equal(tensor, found[name_]), name_
    bundle = read_bundle(folder)
    assert set(bundle.state) == set(weights)
    assert set(bundle.facts["bits"].values()) == {bits}
    image = next(iter(made.data.clients[made.client].eval_batches("test")))["image"]
    with torch.no_grad():
        own = bundle.network()(image)
    assert not torch.allclose(own, logits(made.task.network, made_weights(made), image))
    assert_alike(own, logits(made.task.network, weights, image))


def made_weights(made):
    return float_entries(made.task.network)


def test_bundles_know_every_network_that_a_model_of_the_project_names():
    models = [yaml.safe_load(path.read_text()) for path in (CONFIG_DIR / "model").glob("*.yaml")]
    targets = {str(model["network"]["_target_"]) for model in models}
    assert {t for t in targets if t.startswith("medfed.")} == {*TARGETS.values()} - {
        TARGETS[MIXTURE]
    }


SCRIPTS = {path.name: path for path in Path(standalone.__path__[0]).glob("*.py")}


@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_scripts_need_torch_and_monai_alone(script):
    """And what MONAI reads files with; what is imported within functions or for types may lack."""
    known = {*sys.stdlib_module_names, "torch", "monai", "numpy", "nibabel", "PIL"}
    tree = ast.parse(SCRIPTS[script].read_text())
    for node in ast.walk(tree):
        names = [n.name for n in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or name.name for name in node.names]
            if node.level:
                assert node.level == 1
                assert {f"{name}.py" for name in names} <= {*SCRIPTS}
                continue
        tops = {name.partition(".")[0] for name in names}
        assert "medfed" not in tops
        assert tops <= known or node not in tree.body


def test_a_bundle_holds_the_modules_that_medfed_uses(hospital):
    scripts = hospital("table").bundle / "scripts"
    assert {path.name for path in scripts.glob("*")} == {*SCRIPTS}
    for name, path in SCRIPTS.items():
        assert (scripts / name).read_bytes() == path.read_bytes()


def test_monai_runs_a_segmentation_without_medfed(hospital, tmp_path):
    made = hospital("slices")
    bundle, scans, output = made.copy(tmp_path), tmp_path / "scans", tmp_path / "masks"
    scans.mkdir()
    patient = made.data.plans[made.client].patients["test"][0]
    shutil.copy(made.data.patients[patient].files["image"], scans / "a.nii.gz")
    lacking = "medfed,rich,msgspec,hydra,sklearn,lightning,pytorch_lightning,filelock"
    words = [lacking, "monai.bundle", "run", "--config_file", "configs/inference.json"]
    words += ["--dataset_dir", str(scans), "--output_dir", str(output)]
    done = processes.run(ROOT / "tests/delivery/alone.py", *words, cwd=bundle)
    assert done.returncode == 0, done.stderr[-2000:]
    mask = nib.load(output / "a.nii.gz")
    scan = nib.load(scans / "a.nii.gz")
    np.testing.assert_allclose(mask.affine, scan.affine)
    assert mask.get_data_dtype() == np.uint8
    batch = next(iter(made.data.clients[made.client].eval_batches("test")))
    expected = made.task.predict(batch)  # (S, R, H, W), RAS, slices with brain
    ras = np.asanyarray(nib.as_closest_canonical(mask).dataobj)  # (H, W, D)
    image = made.data.scans.read(made.data.patients[patient])["image"]
    filled = (image != 0).any(0).flatten(0, 1).any(0).nonzero().ravel()
    seen = torch.from_numpy(ras[:, :, filled.numpy()]).permute(2, 0, 1)
    facts = read_bundle(made.bundle).facts
    inside = dict(zip(facts["labels"], (expected > 0.5).unbind(1), strict=True))
    certain = ((expected - 0.5).abs() > 1e-5).all(1)
    assert torch.equal(seen[certain], label_map(inside, map_codes(facts))[certain])
    assert seen.any()
    assert not seen.all()


def table_by_monai(bundle: Path, source: Path, output: Path, monkeypatch) -> list[list[str]]:
    """Runs a bundle of a classification and returns its table without the header."""
    run_by_monai(bundle, source, output, monkeypatch)
    with (output / "predictions.csv").open(newline="") as file:
        return list(csv.reader(file))[1:]


def check_probabilities(made, rows, batch, first=1):
    found = torch.tensor([[float(cell) for cell in row[first:]] for row in rows])
    assert_alike(found, made.task.predict(batch))


@ANY
def test_monai_runs_a_classification_of_pictures(hospital, tmp_path, monkeypatch):
    made = hospital("digits")
    batch = {k: v[:5] for k, v in next(iter(first_batches(made))).items()}
    (tmp_path / "input").mkdir()
    for i, image in enumerate(batch["image"]):
        values = ((image[0] + 1) * made.data.data.peak / 2).round().numpy().astype(np.uint8)
        if i % 2:
            np.save(tmp_path / "input" / f"{i}.npy", values[None])
        else:
            Image.fromarray(values).save(tmp_path / "input" / f"{i}.png")
    rows = table_by_monai(made.bundle, tmp_path / "input", tmp_path / "out", monkeypatch)
    check_probabilities(made, rows, batch)
    made.predict(input=tmp_path / "input", output=tmp_path / "own")
    same_files(tmp_path / "out", tmp_path / "own")


@ANY
def test_monai_runs_a_table(hospital, tmp_path, monkeypatch):
    made = hospital("table")
    table, plan = made.data.table, made.data.plans[made.client]
    index, _ = made.data._choose(made.client, plan)["test"]
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", *table.names])
        writer.writerows([i, *table.features[i].tolist()] for i in index.tolist())
    rows = table_by_monai(made.bundle, tmp_path / "rows.csv", tmp_path / "out", monkeypatch)
    check_probabilities(made, rows, next(iter(first_batches(made))), first=3)
    made.predict(input=tmp_path / "rows.csv", output=tmp_path / "own/")
    same_files(tmp_path / "out", tmp_path / "own")


def first_batches(made):
    return made.data.clients[made.client].eval_batches("test")


MODELS = {
    "basic_unet": (
        *(12, "slices"),
        ["model=basic_unet", "in_channels=4", "out_channels=3", "regions=[whole,core,enhancing]"],
    ),
    "densenet121": (10, "candidates", ["model=densenet121", "in_channels=3", "out_channels=2"]),
}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_two_bits_take_a_tenth_of_the_bytes(name, hospital, tmp_path):
    factor, like, overrides = MODELS[name]
    config = load([*overrides, "spatial_dims=2"])
    network = build_task(config.model, None, config.seed).network
    weights = {n: t.detach() for n, t in float_entries(network).items()}
    books = quantise(weights, choose_bits(network, 2))
    dense = {n: t for n, t in weights.items() if n not in books}
    facts = {
        **read_bundle(hospital(like).bundle).facts,
        "network": describe(dict(config.model.network)),
    }
    sizes = write_bundle(tmp_path / "bundle", facts, dense, books)["sizes"]
    torch.save(weights, tmp_path / "fp32.pt")
    plain = (tmp_path / "fp32.pt").stat().st_size
    packed = (tmp_path / "bundle" / PACKED).stat().st_size
    assert packed * factor <= plain
    assert sizes["packed"] == packed
    assert abs(sizes["fp32"] - plain) < 1e-2 * plain
    with torch.no_grad():
        read_bundle(tmp_path / "bundle").network()


TENSOR = {
    "type": {"enum": ["image", "series", "tuples", "probabilities"]},
    "format": {
        "enum": [
            *("magnitude", "hounsfield", "kspace", "raw", "labels", "classes", "segmentation"),
            *("points", "normals", "indices", "sequence", "latent", "gradient"),
        ]
    },
    "modality": {"type": "string"},
    "num_channels": {"type": "integer", "minimum": 1},
    "spatial_shape": {
        "type": "array",
        "items": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}]},
    },
    "dtype": {"const": "float32"},
    "value_range": {"type": "array", "items": {"type": "number"}},
    "is_patch_data": {"type": "boolean"},
    "channel_def": {
        "type": "object",
        "patternProperties": {"^[0-9]+$": {"type": "string"}},
        "additionalProperties": False,
    },
}
TEXTS = (
    *("schema", "version", "monai_version", "pytorch_version", "numpy_version", "task"),
    *("description", "authors", "copyright", "intended_use"),
)
TENSORS = {
    "type": "object",
    "minProperties": 1,
    "additionalProperties": {"type": "object", "properties": TENSOR, "required": [*TENSOR]},
}
# The mandatory keys of MONAI's specification of bundles, and the values that it lists.
RULES = {
    "type": "object",
    "properties": {
        **{name: {"type": "string", "minLength": 1} for name in TEXTS},
        "required_packages_version": {
            "type": "object",
            "additionalProperties": {"type": "string", "minLength": 1},
        },
        "network_data_format": {
            "type": "object",
            "properties": {"inputs": TENSORS, "outputs": TENSORS},
            "required": ["inputs", "outputs"],
        },
    },
    "required": [*TEXTS, "required_packages_version", "network_data_format"],
}
SCHEMA = SHARED / "schema" / "meta_schema_20240725.json"


@ANY
@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("source", ["specification", "schema"])
def test_monai_verifies_the_metadata(hospital, tmp_path, name, source):
    """By MONAI's own schema where it lies in the shared folder, and by what is specified."""
    pytest.importorskip("jsonschema")
    if source == "schema" and not SCHEMA.is_file():
        pytest.skip(f"{SCHEMA} is not there; MONAI downloads it")
    schema = tmp_path / "schema.json"  # MONAI downloads none where there is one
    schema.write_text(json.dumps(RULES) if source == "specification" else SCHEMA.read_text())
    bundle = hospital(name).bundle
    monai.bundle.verify_metadata(meta_file=str(bundle / METADATA), filepath=str(schema))
    metadata = json.loads((bundle / METADATA).read_text())
    facts, tensors = metadata["medfed"], metadata["network_data_format"]
    assert [*tensors["inputs"]["image"]["channel_def"].values()] == network_channels(facts)
    outputs = tensors["outputs"]["pred"]
    if facts["task"] != "detection":
        assert [*outputs["channel_def"].values()][-len(facts["labels"]) :] == facts["labels"]
    assert outputs["num_channels"] == len(outputs["channel_def"])
    assert "/" not in json.dumps(facts["training_config"]["data"])


def network_channels(facts):
    """What the network reads: of several slices as channels each channel so many times."""
    slices = facts["input"].get("adjacent_slices") or 1
    if slices == 1:
        return facts["channels"]
    return [
        f"{name}, slice {n - slices // 2:+d}" for name in facts["channels"] for n in range(slices)
    ]


@ANY
def test_metadata_without_an_entry_are_no_metadata(hospital, tmp_path):
    pytest.importorskip("jsonschema")
    (tmp_path / "schema.json").write_text(json.dumps(RULES))
    metadata = json.loads((hospital("table").bundle / METADATA).read_text())
    metadata["network_data_format"]["outputs"]["pred"]["format"] = "numbers"
    (tmp_path / "metadata.json").write_text(json.dumps(metadata))
    paths = {
        n: str(tmp_path / f"{f}.json")
        for n, f in (("meta_file", "metadata"), ("filepath", "schema"))
    }
    with pytest.raises(ValueError, match="'numbers' is not one of"):
        monai.bundle.verify_metadata(**paths)


def change(folder: Path, **facts) -> None:
    """Other metadata, whose hash is right."""
    path = folder / METADATA
    metadata = json.loads(path.read_text())
    metadata["medfed"].update(facts)
    path.write_text(json.dumps(metadata))
    write_manifest(folder)


def change_hashes(folder: Path, **hashes) -> None:
    path = folder / MANIFEST
    known = json.loads(path.read_text())["sha256"] if hashes else {}
    path.write_text(json.dumps({"sha256": known | hashes}))


def replace_weights(folder: Path, content) -> None:
    """Another weight file, whose hash is right."""
    if isinstance(content, bytes):
        (folder / MODEL).write_bytes(content)
    else:
        torch.save(content, folder / MODEL)
    write_manifest(folder)


DAMAGES = {
    "is no bundle": lambda f: (f / METADATA).unlink(),
    r"metadata\.json cannot be read": lambda f: (f / METADATA).write_text("{"),
    "no bundle of medfed export": lambda f: (f / METADATA).write_text("{}"),
    "has version 8, but this program reads version 7": lambda f: change(f, format_version=8),
    "network: expected object, got null": lambda f: change(f, network=None),
    "has no hash of models/model.pt": lambda f: change_hashes(f),
    "model.pt is missing": lambda f: (f / MODEL).unlink(),
    "is not the file that was exported": lambda f: (f / MODEL).write_bytes(b"x"),
    "decode.py is not the file": lambda f: (f / "scripts" / "decode.py").write_text("1"),
    r"\.\./outside is missing": lambda f: change_hashes(f, **{"../outside": ""}),
    r"model\.pt cannot be read \(.*\); copy": lambda f: replace_weights(
        f, (f / MODEL).read_bytes()[:-100]
    ),
    "is no weight file of a bundle": lambda f: replace_weights(f, [1]),
    r"model\.pt cannot be read \(\[\.\.\.\]: expected Tensor": lambda f: replace_weights(
        f, {"a": 1}
    ),
    "has version 7": lambda f: replace_weights(f, [{"format": "medfed-bundle", "version": 7}]),
    r"model\.pt cannot be read \(.*\); export": lambda f: replace_weights(
        f, [{"format": "medfed-bundle", "version": 1, "dense": {"a": 1}, "packed": {}}]
    ),
}


@pytest.mark.parametrize("message", sorted(DAMAGES))
def test_damages_are_told_in_one_sentence(hospital, tmp_path, message):
    folder = hospital("table").copy(tmp_path)
    (tmp_path / "outside").write_text("")
    DAMAGES[message](folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_bundle(folder)
    assert "\n" not in str(caught.value)


def test_an_index_beyond_the_centres(tmp_path, hospital):
    folder = hospital("table").copy(tmp_path)
    book = kmeans(torch.tensor([0.0, 1.0, 2.0]), 2)
    save_packed(tmp_path / "model.pt", {}, {"w": book})
    (content,) = torch.load(tmp_path / "model.pt", weights_only=True)
    content["packed"]["w"]["centers"] = content["packed"]["w"]["centers"][:2]
    replace_weights(folder, [content])
    with pytest.raises(CheckpointError, match="an index of 2 for 2 centres"):
        read_bundle(folder)


def test_weights_of_another_network(hospital, tmp_path):
    folder = hospital("table").copy(tmp_path)
    facts = read_bundle(folder).facts
    names = [f"x{i}" for i in range(3)]
    change(
        folder,
        network={**facts["network"], "in_channels": 3},
        input={"kind": "table", "features": names},
        channels=names,
        present=names,
        normalization=None,
    )
    with pytest.raises(CheckpointError, match="do not fit its network"):
        read_bundle(folder).network()


def test_nothing_half_written_is_left(hospital, tmp_path, monkeypatch):
    folder = hospital("table").copy(tmp_path)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("medfed.delivery.bundle.weights.save", full)
    bundle = read_bundle(folder)
    with pytest.raises(DataError, match="No space left on device"):
        write_bundle(folder, bundle.facts, bundle.state, {})
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_a_folder_of_something_else_is_not_replaced(hospital, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    facts = read_bundle(hospital("table").bundle).facts
    with pytest.raises(DataError, match="holds something else than a bundle"):
        write_bundle(tmp_path, facts, {"w": torch.zeros(1)}, {})
    assert (tmp_path / "notes.txt").read_text() == "mine"
