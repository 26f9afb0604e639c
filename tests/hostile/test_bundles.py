"""Bundles from elsewhere: each damage is one sentence, before anything is predicted or run."""

from __future__ import annotations

import csv
import io
import json
import os
import resource
import shutil
import struct
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig

from medfed.common.scores import Record, metrics_csv
from medfed.config.compose import load
from medfed.config.description import resolved
from medfed.config.sections import Section
from medfed.delivery.bundle.bundle import read_bundle, write_bundle, write_manifest
from medfed.delivery.bundle.onnx_file import ONNX
from medfed.delivery.bundle.weights import save_packed
from medfed.delivery.export.run_record import RunRecord
from medfed.delivery.predict.prediction import predict
from medfed.federation.wire.ledger import Entry, Ledger
from medfed.records.bundles import MODEL, PACKED
from medfed.records.folder import RunFolder
from medfed.records.places import MANIFEST, METADATA
from medfed.standalone.csv_files import csv_rows, read_features
from medfed.standalone.errors import CheckpointError, MedfedError
from medfed.standalone.files import csv_text, original, write_text
from tests.delivery.hospitals import Hospital, make_hospital
from tests.sweeps import sweep

Damage = Callable[[Path], object]
_MEGABYTES = 400  # that all cases together may add to what the process ever held


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Hospital:
    """A model of features, whose bundle has an ONNX file, too."""
    root = tmp_path_factory.mktemp("table")
    made = make_hospital("table", root)
    bundle = read_bundle(made.bundle)
    write_bundle(made.bundle, bundle.facts, bundle.state, {}, onnx=True)
    names = bundle.facts["input"]["features"]
    rows = [",".join(names), ",".join("1" for _ in names)]
    (root / "patients.csv").write_text("\n".join(rows) + "\n")
    made.predict(input=root / "patients.csv", output=root / "out.csv")  # undamaged it predicts
    return made


@cache
def composed() -> DictConfig:
    return load([], "predict")


def refused(made: Hospital, tmp_path: Path, damage: Damage, backend: str = "torch") -> str:
    """The sentence about a damaged copy; nothing was written, and nothing of it was run."""
    folder = made.copy(tmp_path)
    damage(folder)
    before = sorted(tmp_path.rglob("*"))
    config = composed().copy()
    config.bundle, config.input = str(folder), str(made.bundle.parent / "patients.csv")
    config.output, config.backend = str(tmp_path / "out.csv"), backend
    with pytest.raises(MedfedError) as caught:
        predict(Section(resolved(config)))
    assert sorted(tmp_path.rglob("*")) == before
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert len(sentence) < 700
    return sentence


def sealed(folder: Path, name: str, content: bytes | str) -> None:
    """Another file, whose hash is right."""
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    write_manifest(folder)


def facts_of(folder: Path) -> dict:
    return json.loads((folder / METADATA).read_text())["medfed"]


def changed(**facts) -> Damage:
    """Other metadata, whose hash is right."""

    def damage(folder: Path) -> None:
        metadata = json.loads((folder / METADATA).read_text())
        metadata["medfed"].update(facts)
        sealed(folder, METADATA, json.dumps(metadata))

    return damage


def source(**entries) -> Damage:
    return lambda folder: changed(input={**facts_of(folder)["input"], **entries})(folder)


def scaled(**entries) -> Damage:
    return lambda folder: changed(normalization={**facts_of(folder)["normalization"], **entries})(
        folder
    )


def standard(**entries) -> dict[str, object]:
    kept = {"low": [0.0] * 30, "high": [1.0] * 30, "median": [0.0] * 30, "mean": [0.0] * 30}
    return {"name": "standard", **kept, "sd": [1.0] * 30, **entries}


def network(target: str = "scripts.small.LogisticRegression", **arguments) -> Damage:
    def damage(folder: Path) -> None:
        known = facts_of(folder)["network"]
        changed(network={**known, "_target_": target, **arguments})(folder)

    return damage


def replaced(path: str, old: str, new: str) -> Damage:
    """A text changed by hand, whose hash is the old one."""

    def damage(folder: Path) -> None:
        text = (folder / path).read_text()
        assert old in text
        (folder / path).write_text(text.replace(old, new))

    return damage


def hashes(**entries) -> Damage:
    def damage(folder: Path) -> None:
        known = json.loads((folder / MANIFEST).read_text())["sha256"]
        (folder / MANIFEST).write_text(json.dumps({"sha256": {**known, **entries}}))

    return damage


def linked(name: str, target: str) -> Damage:
    def damage(folder: Path) -> None:
        outside = folder.parent / "outside"
        path = folder / name
        if path.is_dir():
            shutil.move(path, outside)
        elif path.is_file():
            path.rename(outside)
        path.symlink_to(target or outside)

    return damage


def mixture(**entries) -> Damage:
    """The network as a part of a mixture."""

    def damage(folder: Path) -> None:
        known = facts_of(folder)["network"]
        one = {"_target_": "scripts.networks.CanonicalMixture", "network": known}
        rest = {"places": [""], "count": 2, "activation": "softmax"}
        changed(network={**one, **rest, **entries})(folder)

    return damage


METADATA_TEXTS: dict[str, tuple[bytes | str, str]] = {
    "nested": ("[" * 100_000 + "]" * 100_000, "metadata.json cannot be read (it is nested too"),
    "nested objects": ('{"a":' * 100_000, "metadata.json cannot be read (it is nested too"),
    "list": ("[1, 2]", "is no bundle of medfed export"),
    "number": ("3.5", "is no bundle of medfed export"),
    "text": ('"medfed"', "is no bundle of medfed export"),
    "null": ("null", "is no bundle of medfed export"),
    "list within": ('{"medfed": []}', "is no bundle of medfed export"),
    "nan": ('{"medfed": {"threshold": NaN}}', "NaN is no finite number"),
    "infinity": ('{"medfed": {"threshold": -Infinity}}', "-Infinity is no finite number"),
    "too large": ('{"medfed": {"threshold": 1e999}}', "1e999 is no finite number"),
    "digits": ('{"medfed": ' + "9" * 5000 + "}", "metadata.json cannot be read"),
    "twice": ('{"medfed": {}, "medfed": {}}', "the key medfed occurs twice"),
    "half a character": ('{"medfed": {"client": "\\ud800"}}', "holds half a character"),
    "latin": ('{"medfed": "é"}'.encode("latin-1"), "metadata.json cannot be read (it is no UTF-8"),
    "empty": ("", "metadata.json cannot be read"),
    "torn": ('{"medfed": {"task"', "metadata.json cannot be read"),
}


@pytest.mark.parametrize("name", METADATA_TEXTS)
def test_metadata_that_are_no_such_thing(table, tmp_path, name):
    text, words = METADATA_TEXTS[name]
    assert words in refused(table, tmp_path, lambda folder: sealed(folder, METADATA, text))


def _write(name: str, text: str) -> Damage:
    return lambda folder: (folder / name).write_text(text)


FILES: dict[str, tuple[Damage, str]] = {
    "labels": (
        replaced(METADATA, '"labels": [\n', '"labels":  [\n'),
        "metadata.json is not the file that was exported",
    ),
    "task": (
        replaced(METADATA, '"task": "risk"', '"task": "classification"'),
        "metadata.json is not the file that was exported",
    ),
    "preprocessing": (
        replaced(METADATA, '"minimum": [', '"minimum": [ '),
        "metadata.json is not the file that was exported",
    ),
    "expressions": (
        replaced("configs/inference.json", '"device"', '"Device"'),
        "inference.json is not the file that was exported",
    ),
    "page": (_write("docs/README.md", "For diagnosis."), "README.md is not the file that was"),
    "script": (_write("scripts/decode.py", "1"), "decode.py is not the file that was exported"),
    "no metadata": (lambda f: (f / METADATA).unlink(), "is no bundle (it has no configs/metadata"),
    "no weights": (lambda f: (f / MODEL).unlink(), "model.pt is missing"),
    "no script": (lambda f: (f / "scripts/networks.py").unlink(), "networks.py is missing"),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), "manifest.json is missing"),
    "one more model": (_write("models/other.pt", "x"), "other.pt is no part of the bundle"),
    "one more script": (_write("scripts/torch.py", "x"), "torch.py is no part of the"),
    "one more at the top": (_write("monai.py", "x"), "monai.py is no part of the bundle"),
    "manifest nested": (_write(MANIFEST, "[" * 100_000), "manifest.json cannot be read"),
    "manifest a list": (_write(MANIFEST, "[]"), "cannot be read (it: expected object, got array)"),
    "manifest a number": (_write(MANIFEST, "1"), "cannot be read (it: expected object, got int)"),
    "manifest of NaN": (_write(MANIFEST, '{"sha256": NaN}'), "NaN is no finite number"),
    "manifest empty": (_write(MANIFEST, '{"sha256": {}}'), "has no hash of models/model.pt"),
    "a hash is a number": (
        hashes(**{MODEL: 3}),
        "(sha256[...]: expected str, got int)",
    ),
    "a file outside": (hashes(**{"../outside": "0"}), "../outside is missing"),
    "an absolute file": (hashes(**{"/etc/passwd": "0"}), "/etc/passwd is missing"),
    "a folder outside": (hashes(**{"models/../../x/model.pt": "0"}), "x/model.pt is missing"),
    "metadata not covered": (
        lambda f: _write(MANIFEST, json.dumps({"sha256": {MODEL: read_bundle(f).hashes[MODEL]}}))(
            f
        ),
        "has no hash of configs/metadata.json",
    ),
    "weights linked": (linked(MODEL, ""), "model.pt is a link or no plain file"),
    "folder linked": (linked("scripts", ""), "scripts is a link or no plain file"),
    "endless": (linked("models/zero", "/dev/zero"), "zero is a link or no plain file"),
    "dangling": (linked("docs/more.md", "/nowhere"), "more.md is a link or no plain file"),
    "packed weights linked": (linked("models/packed.pt", "/dev/zero"), "is a link or no plain fi"),
    "pipe": (lambda f: os.mkfifo(f / "models/pipe"), "pipe is a link or no plain file"),
    "an earlier version": (changed(format_version=1), "has version 1, but this program reads"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_differ_from_the_export(table, tmp_path, name):
    damage, words = FILES[name]
    assert words in refused(table, tmp_path, damage)


_UNET = {
    "_target_": "scripts.unet.unet",
    "spatial_dims": 2,
    "in_channels": 60,
    "out_channels": 2,
    "channels": [4, 4],
    "strides": [2],
}
ENTRIES: dict[str, tuple[Damage, str]] = {
    "task": (changed(task=7), "task: expected str, got int"),
    "another task": (changed(task="diagnosis"), "task: invalid enum value 'diagnosis'"),
    "task of volumes": (changed(task="segmentation"), "a model of segmentation does not take"),
    "client": (changed(client=["a"]), "client: expected str | null, got array"),
    "method": (changed(method={}), "method: expected str | null, got object"),
    "network": (changed(network=["LogisticRegression"]), "network: expected object, got array"),
    "no network": (changed(network=None), "network: expected object, got null"),
    "spatial_dims": (changed(spatial_dims=4), "spatial_dims: invalid enum value 4"),
    "slices": (changed(slices="no"), "slices: expected bool | null, got str"),
    "channels": (changed(channels="age"), "channels: expected array, got str"),
    "no channels": (changed(channels=[]), "channels: expected array of length >= 1"),
    "channels twice": (changed(channels=["a", "a"]), "channels names something twice"),
    "nested channels": (changed(channels=[["a"]]), "channels[0]: expected str, got array"),
    "fewer channels": (changed(channels=["a"], present=["a"]), "60 columns have 1 channels"),
    "present": (changed(present=["elsewhere"]), "present names what channels does not"),
    "labels": (changed(labels=[0, 1]), "labels[0]: expected str, got int"),
    "no labels": (changed(labels=[]), "labels: expected array of length >= 1"),
    "one label too many": (changed(labels=["a", "b", "c"]), "2 outputs have 3 labels"),
    "labels twice": (changed(labels=["a", "a"]), "labels names something twice"),
    "normalization": (
        changed(normalization=[]),
        "normalization: expected object | null, got array",
    ),
    "no minimum": (
        changed(normalization={"maximum": [1]}),
        "normalization or resampled_to is not as",
    ),
    "short minimum": (scaled(minimum=[1.0]), "normalization or resampled_to is not as"),
    "minimum of texts": (scaled(minimum="0" * 13), "normalization or resampled_to is not as"),
    "minimum above": (scaled(minimum=[1e9] * 13), "normalization or resampled_to is not as"),
    "input": (changed(input=["table"]), "input: expected object, got array"),
    "kind": (source(kind="audio"), "input.kind: invalid value 'audio'"),
    "kind of images": (source(kind="images"), "input.size is missing"),
    "a list of kinds": (source(kind=["table"]), "input.kind: expected str, got list"),
    "features": (source(features=13), "input.features: expected array, got int"),
    "feature": (source(features=[None]), "input.features[0]: expected str, got null"),
    "other features": (source(features=["a"]), "input.indicators names what features does not"),
    "no indicators": (source(indicators=[]), "columns have"),
    "categories": (
        source(categories={"mean radius": "ab"}),
        "input.categories[...]: expected array, got str",
    ),
    "other categories": (source(categories={"x": ["a"]}), "input.categories names what features"),
    "a category twice": (
        source(categories={"mean radius": ["a", "a"]}),
        "input.categories names a category twice",
    ),
    "indicators": (source(indicators=[1]), "input.indicators[0]: expected str, got int"),
    "a range of texts": (
        source(lowest=["a"] * 30),
        "input.lowest[0]: expected float | null, got str",
    ),
    "a short range": (source(highest=[1.0]), "input.highest must be 30 numbers"),
    "another scaling": (
        changed(normalization={"name": "standard"}),
        "normalization or resampled_to is not as",
    ),
    "a deviation of nothing": (
        changed(normalization=standard(sd=[0.0] * 30)),
        "normalization or resampled_to is not as",
    ),
    "limits that cross": (
        changed(normalization=standard(low=[9.0] * 30)),
        "normalization or resampled_to is not as",
    ),
    "spacing": (changed(spacing=[1, 1]), "spacing: expected array of length 3, got 2"),
    "spacing_range": (
        changed(spacing_range=[[2] * 3, [1] * 3]),
        "spacing_range has its greatest lengths first",
    ),
    "patch_size": (changed(patch_size=[10**9] * 3), "patch_size[0]: expected int <= 1048576"),
    "overlap": (changed(overlap=1), "overlap: expected float < 1.0"),
    "window_batch": (changed(window_batch=0), "window_batch: expected int >= 1"),
    "threshold": (changed(threshold=1.5), "threshold: expected float < 1.0"),
    "a true threshold": (
        changed(threshold=True),
        "threshold: expected float | array | null, got bool",
    ),
    "an outcome's scale": (
        changed(outcome_scale=[1, 0]),
        "outcome_scale[1]: expected float > 0.0",
    ),
    "a scale of classes": (changed(outcome_scale=[0, 1]), "a model of risk has no outcome_scale"),
    "format_version": (changed(format_version="2"), "has version '2', but this program reads"),
    "a true version": (changed(format_version=True), "has version True, but this program"),
    "a list of versions": (changed(format_version=[[]] * 99), "has version [[], [],"),
    "os.system": (network("os.system"), "names the network os.system, which is not among"),
    "a list of networks": (network(["os.system"]), "names the network ['os.system'], which"),
    "beside the networks": (network("scripts.networks.copy.deepcopy"), "which is not among"),
    "another argument": (network(command="true"), "cannot be built of its arguments"),
    "gigantic": (network(in_channels=10**18), "inputs have"),
    "inputs of text": (network(in_channels="13"), "inputs have"),
    "a gigantic mixture": (mixture(count=10**9), "do not fit its network (1000000000 parts)"),
    "a mixture of none": (mixture(count=0), "do not fit its network (0 parts)"),
    "a mixture of texts": (mixture(count="2"), "do not fit its network ('2' parts)"),
    "a mixture of nothing": (mixture(places=["head"]), "cannot be built of its arguments"),
    "weights of no mixture": (mixture(), "do not fit its network ("),
    "endless units": (
        network(
            "monai.networks.nets.UNet",
            spatial_dims=2,
            channels=[4, 4],
            strides=[2],
            num_res_units=10**9,
        ),
        "has an argument beyond all measure",
    ),
    "very many units": (
        changed(network={**_UNET, "num_res_units": 10**5}),
        "its network is far larger than its weights",
    ),
    "very wide": (
        changed(network={**_UNET, "channels": [4, 1 << 20]}),
        "its network is far larger than its weights",
    ),
    "a billion dimensions": (
        network("monai.networks.nets.UNet", spatial_dims=10**9),
        "has an argument beyond all measure",
    ),
    "another network": (
        network("scripts.small.SmallCNN", spatial_dims=2, channels=[4], strides=[1], norm=None),
        "cannot be built of its arguments",
    ),
}


@sweep("name", ENTRIES)
def test_metadata_of_other_types(table, tmp_path, name):
    damage, words = ENTRIES[name]
    assert words in refused(table, tmp_path, damage)


class Runs:
    """What a pickle runs when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def weights(change: Callable[[dict, Path], object], name: str = MODEL) -> Damage:
    """Another weight file, whose hash is right."""

    def damage(folder: Path) -> None:
        if name == PACKED:
            save_packed(folder / PACKED, read_bundle(folder).state, {})
        content = torch.load(folder / name, weights_only=True)
        change(content[0] if name == PACKED else content, folder)
        torch.save(content, folder / name)
        write_manifest(folder)

    return damage


def dense(tensor: object, name: str = "linear.bias") -> Damage:
    return weights(lambda content, _: content["dense"].update({name: tensor}), PACKED)


def plain(tensor: object, name: object = "linear.bias") -> Damage:
    return weights(lambda content, _: content.update({name: tensor}))


def packed(**entries) -> Damage:
    """The bias packed: one element of two centres."""
    one = {"planes": torch.zeros(1, 1, dtype=torch.uint8), "centers": torch.arange(2.0)}

    def change(content: dict, _: Path) -> None:
        del content["dense"]["linear.bias"]
        content["packed"]["linear.bias"] = {**one, "shape": [1], **entries}

    return weights(change, PACKED)


def saved(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def bomb(folder: Path) -> None:
    """The same weights in an archive that is compressed, with a file of 10^7 zeros."""
    with zipfile.ZipFile(folder / MODEL) as archive:
        inside = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(folder / MODEL, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {**inside, "model/data/9": bytes(10**7)}.items():
            archive.writestr(name, content)
    write_manifest(folder)


WEIGHTS: dict[str, tuple[Damage, str]] = {
    "text": (lambda f: sealed(f, MODEL, "weights"), "cannot be read"),
    "truncated": (
        lambda f: sealed(f, MODEL, (f / MODEL).read_bytes()[:-100]),
        "cannot be read",
    ),
    "compressed": (bomb, "cannot be read (it is compressed)"),
    "code": (weights(lambda c, f: c.update(x=Runs(f / "ran"))), "cannot be read"),
    "packed code": (weights(lambda c, f: c.update(x=Runs(f / "ran")), PACKED), "cannot be read"),
    "version": (weights(lambda c, _: c.update(version=torch.ones(2)), PACKED), "has version tens"),
    "no dense": (weights(lambda c, _: c.pop("dense"), PACKED), "cannot be read"),
    "dense a list": (weights(lambda c, _: c.update(dense=[1]), PACKED), "cannot be read"),
    "no tensor": (dense([1.0]), "dense[...]: expected Tensor, got list"),
    "a list": (lambda f: sealed(f, MODEL, saved([1])), "model.pt is no weight file of a bundle"),
    "no tensor alone": (plain([1.0]), "[...]: expected Tensor, got list"),
    "expanded alone": (plain(torch.zeros(1).expand(10**12)), "its tensors are larger than the fi"),
    "sparse alone": (plain(torch.zeros(1).to_sparse()), "model.pt cannot be read ("),
    "meta alone": (plain(torch.empty(10**12, device="meta")), "a tensor is no dense one"),
    "complex": (plain(torch.zeros(1, dtype=torch.cfloat)), "linear.bias is not of finite numbers"),
    "counters alone": (
        plain(torch.zeros(1, dtype=torch.int64)),
        "linear.bias is (1,) in the network and (1,) torch.int64 in the file",
    ),
    "nan alone": (plain(torch.full((1,), torch.nan)), "linear.bias is not of finite numbers"),
    "another shape alone": (plain(torch.zeros(2)), "do not fit its network (linear.bias is (1,)"),
    "one more alone": (plain(torch.zeros(1), "more"), "do not fit its network (more is None in"),
    "one less": (
        weights(lambda c, _: c.pop("linear.bias")),
        "do not fit its network (linear.bias is (1,) in the network and None in the file)",
    ),
    "no name alone": (plain(torch.ones(1), 3), "expected str, got int"),
    "none": (weights(lambda c, _: c.clear()), "do not fit its network (linear.weight is"),
    "expanded": (dense(torch.zeros(1).expand(10**12)), "its tensors are larger than the file"),
    "sparse": (dense(torch.zeros(1).to_sparse()), "a tensor is no dense one"),
    "meta": (dense(torch.empty(10**12, device="meta")), "a tensor is no dense one"),
    "whole numbers": (
        dense(torch.zeros(1, dtype=torch.int64)),
        "linear.bias is (1,) in the network and (1,) torch.int64 in the file",
    ),
    "nan": (dense(torch.full((1,), torch.nan)), "linear.bias is not of finite numbers"),
    "another shape": (dense(torch.zeros(2)), "do not fit its network (linear.bias is (1,) in"),
    "one more": (dense(torch.zeros(1), "more"), "do not fit its network (more is None in"),
    "no name": (
        weights(lambda c, _: c["dense"].update({3: torch.ones(1)}), PACKED),
        "dense: expected str, got int",
    ),
    "negative shape": (packed(shape=[-1]), "shape[0]: expected int >= 1"),
    "negative twice": (packed(shape=[-1, -1]), "shape[0]: expected int >= 1"),
    "gigantic shape": (packed(shape=[2**62, 4]), "linear.bias has the shape [4611686018427387904"),
    "shape beyond integers": (packed(shape=[10**30]), "linear.bias has the shape [1000"),
    "shape of texts": (packed(shape=["1"]), "shape[0]: expected int, got str"),
    "longer planes": (
        packed(planes=torch.zeros(1, 2, dtype=torch.uint8)),
        "linear.bias has the shape [1]",
    ),
    "no planes": (packed(planes=torch.zeros(0, 1, dtype=torch.uint8)), "linear.bias has planes"),
    "a billion empty planes": (
        packed(planes=torch.zeros(10**9, 0, dtype=torch.uint8)),
        "linear.bias has planes (1000000000, 0)",
    ),
    "planes of floats": (packed(planes=torch.zeros(1, 1)), "Planes of 1 integers are"),
    "beyond the centres": (
        packed(planes=torch.ones(1, 1, dtype=torch.uint8), centers=torch.zeros(1)),
        "an index of 1 for 1 centres",
    ),
    "centres of NaN": (packed(centers=torch.full((2,), torch.nan)), "is not of finite numbers"),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_that_are_others(table, tmp_path, name):
    damage, words = WEIGHTS[name]
    assert words in refused(table, tmp_path, damage)
    assert not (tmp_path / "bundle" / "ran").exists()


def _other_onnx(folder: Path) -> None:
    """A file that answers one output more than there are labels."""
    onnx = pytest.importorskip("onnx")
    node = onnx.helper.make_node("Concat", ["image", "image"], ["logits"], axis=1)
    value = onnx.helper.make_tensor_value_info
    ends = ([value(n, onnx.TensorProto.FLOAT, ["b", None])] for n in ("image", "logits"))
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "g", *ends),
        opset_imports=[onnx.helper.make_opsetid("", 18)],
        ir_version=9,
    )
    sealed(folder, ONNX, model.SerializeToString())


ONNX_FILES: dict[str, tuple[Damage, str]] = {
    "text": (lambda f: sealed(f, ONNX, "onnx"), "model.onnx cannot be loaded by ONNX Runtime"),
    "empty": (lambda f: sealed(f, ONNX, ""), "model.onnx cannot be loaded by ONNX Runtime"),
    "truncated": (
        lambda f: sealed(f, ONNX, (f / ONNX).read_bytes()[:-40]),
        "model.onnx cannot be loaded by ONNX Runtime",
    ),
    "other outputs": (_other_onnx, "outputs, but the metadata have 2 labels"),
}


@pytest.mark.parametrize("name", ONNX_FILES)
def test_onnx_files_that_are_others(table, tmp_path, name):
    damage, words = ONNX_FILES[name]
    assert words in refused(table, tmp_path, damage, backend="onnx")


SAFETENSORS = {
    "header of 10^18 bytes": lambda whole: struct.pack("<Q", 10**18) + whole[8:],
    "header of 10^8 bytes": lambda whole: struct.pack("<Q", 10**8) + whole[8:],
    "truncated": lambda whole: whole[:-3],
    "text": lambda _: b"weights",
    "empty": lambda _: b"",
    "nested": lambda _: struct.pack("<Q", 200_000) + b"[" * 200_000,
    "gigantic": lambda _: _header({"shape": [10**12], "data_offsets": [0, 4 * 10**12]}),
    "negative": lambda _: _header({"shape": [-1], "data_offsets": [0, 4]}),
}


def _header(entry: dict) -> bytes:
    header = json.dumps({"linear.bias": {"dtype": "F32", **entry}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4)


@pytest.mark.parametrize("name", SAFETENSORS)
def test_models_of_a_run_that_cannot_be_exported(table, tmp_path, name):
    from safetensors.torch import save

    path = tmp_path / "models" / "a.safetensors"
    path.parent.mkdir()
    path.write_bytes(SAFETENSORS[name](save({"linear.bias": torch.zeros(1)})))
    run = RunRecord(tmp_path)
    vars(run).update(config=table.config, summary={"clients": {"a": {}}})
    with pytest.raises(CheckpointError, match=r"a\.safetensors cannot be read") as caught:
        run.client_model("a")
    assert "\n" not in str(caught.value)


def test_scripts_of_a_bundle_are_never_run(table, tmp_path, monkeypatch):
    """Changed with a right hash, which anybody can write: a prediction does not need them."""
    folder, marker = table.copy(tmp_path), tmp_path / "ran"
    for script in (folder / "scripts").glob("*.py"):
        script.write_text(f"import os\nos.mkdir({str(marker)!r})\n")
    write_manifest(folder)
    monkeypatch.chdir(folder)
    patients = table.bundle.parent / "patients.csv"
    table.predict(bundle=folder, input=patients, output=tmp_path / "out.csv")
    assert not marker.exists()
    assert (tmp_path / "out.csv").read_bytes() == (patients.parent / "out.csv").read_bytes()


def test_what_monai_leaves_in_a_bundle_is_no_damage_and_not_lost(table, tmp_path):
    folder = table.copy(tmp_path)
    for name in ("eval/a.nii.gz", "scripts/__pycache__/decode.pyc", "docs/.DS_Store"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
    bundle = read_bundle(folder)
    with pytest.raises(MedfedError, match=r"a.nii.gz would be lost by the export; move it"):
        write_bundle(folder, bundle.facts, bundle.state, {})
    shutil.rmtree(folder / "eval")
    write_bundle(folder, bundle.facts, bundle.state, {})
    read_bundle(folder)


def test_two_exports_are_the_same_bytes(table, tmp_path):
    bundle = read_bundle(table.bundle)
    for name in ("a", "b"):
        write_bundle(tmp_path / name, bundle.facts, bundle.state, {}, onnx=True)
    first, second = (
        {p.relative_to(tmp_path / n): p.read_bytes() for p in (tmp_path / n).rglob("*.*")}
        for n in ("a", "b")
    )
    assert first == second
    assert Path(MANIFEST) in first


FORMULAS = [
    "=1+1",
    "+a",
    "-a",
    "@SUM(A1)",
    "\tx",
    "\rx",
    "a\rb",
    "'=1",
    "''",
    "'a",
    "-0.5",
    'é,"\n',
]


def test_names_are_no_formulas_and_are_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(RunFolder, "summary", {"clients": {}})
    ledger = Ledger([Entry(0, "fit", name, "up", "shared", 1, 4) for name in FORMULAS])
    assert Ledger.from_csv(ledger.to_csv()).entries == ledger.entries
    text = csv_text(FORMULAS, [FORMULAS, range(12)])
    header, *_ = csv.reader(io.StringIO(text, newline=""))
    assert [original(cell) for cell in header] == FORMULAS
    (tmp_path / "a.csv").write_bytes(text.encode())
    assert next(csv_rows(tmp_path / "a.csv")) == FORMULAS
    cells = next(csv.reader(io.StringIO(text, newline="")))
    assert [c for c in cells if c[0] in "=+-@\t\r"] == ["-0.5"]
    write_text(tmp_path / "metrics.csv", metrics_csv([Record(0, "=a", {"loss": -0.5})], []))
    assert RunFolder(tmp_path).history() == [Record(0, "=a", {"loss": -0.5})]


def test_formulas_of_a_table_do_not_reach_the_predictions(table, tmp_path):
    names = facts_of(table.bundle)["input"]["features"]
    with (tmp_path / "in.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [["=id", *names], ["@SUM(A1)", *[-0.5] * len(names)], ["-1", *["1"] * len(names)]]
        )
    table.predict(input=tmp_path / "in.csv", output=tmp_path / "out.csv")
    header, first, second = (tmp_path / "out.csv").read_text().splitlines()
    assert header.startswith("row,'=id,warning,probability_")
    assert first.startswith("1,'@SUM(A1),")
    assert second.startswith("2,-1,")
    assert read_features(tmp_path / "in.csv", names)[1] == {"=id": ["@SUM(A1)", "-1"]}


def test_memory(before):
    """Last of the module: none of the cases above took what it announced."""
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 < before + _MEGABYTES


@pytest.fixture(scope="module", autouse=True)
def before() -> float:
    """Megabytes that tests of other modules have taken in this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
