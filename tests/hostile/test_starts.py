"""Weights from elsewhere to start from: each damage is one sentence, and no code of it runs."""

from __future__ import annotations

import io
import os
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from medfed.config.compose import described
from medfed.delivery.start.pretrained import Pretrained
from medfed.run.start import adopt, fit
from medfed.standalone.errors import CheckpointError, MedfedError
from tests.sweeps import sweep

RAN = Path("/tmp") / f"medfed_start_ran_{os.getpid()}"


class Runs:
    """What a pickle of it would do to whoever reads it."""

    def __reduce__(self):
        return os.system, (f"touch {RAN}",)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def state() -> dict[str, Tensor]:
    return {n: t.clone() for n, t in network().state_dict().items()}


def saved(content: object, **how: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **how)
    return buffer.getvalue()


def traced() -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.trace(network(), torch.ones(1, 3)), buffer)
    return buffer.getvalue()


def zipped(files: dict[str, bytes], compress: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compress) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def compressed() -> bytes:
    """A file of PyTorch's whose zeros were compressed: few bytes that would fill the memory."""
    with zipfile.ZipFile(io.BytesIO(saved({"weight": torch.zeros(2_000_000)}))) as archive:
        files = {n: archive.read(n) for n in archive.namelist()}
    return zipped(files, zipfile.ZIP_DEFLATED)


CASES: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "code": ("a.pt", lambda: saved({"weight": Runs()}), "to read it would run code"),
    "module": ("a.pth", lambda: saved(network()), "to read it would run code"),
    "old-code": (
        "a.pt",
        lambda: saved({"weight": Runs()}, _use_new_zipfile_serialization=False),
        "to read it would run code",
    ),
    "program": ("a.ts", traced, "TorchScript"),
    "cut": ("a.pt", lambda: saved(state())[:-40], "cannot be read as weights"),
    "nothing": ("a.pt", lambda: b"", "cannot be read as weights"),
    "text": ("a.pt", lambda: b"weights\n", "cannot be read as weights"),
    "empty": ("a.pt", lambda: saved({}), "holds no weights"),
    "list": ("a.pt", lambda: saved([torch.ones(1)]), "holds no weights"),
    "ours": ("a.ckpt", lambda: saved({"federation": {"server": {}}}), "name the run folder"),
    "nan": ("a.pt", lambda: saved({**state(), "bias": torch.full((2,), torch.nan)}), "NaN or inf"),
    "overflow": (
        "a.pt",
        lambda: saved({"bias": torch.full((2,), 1e300, dtype=torch.float64)}),
        "NaN or infinity in bias",
    ),
    "whole-numbers": ("a.pt", lambda: saved({"bias": torch.ones(2).long()}), "bias as int64"),
    "complex": ("a.pt", lambda: saved({"bias": torch.ones(2) * 1j}), "bias as complex64"),
    "sparse": ("a.pt", lambda: saved({"weight": torch.eye(3)[:2].to_sparse()}), "no weights"),
    "larger": (
        "a.pt",
        lambda: saved({"weight": torch.zeros(1).expand(10**6, 10**6)}),
        "larger than its part of the file",
    ),
    "compressed": ("a.pt", compressed, "it is compressed"),
    "safetensors-cut": ("a.safetensors", lambda: b"\x08\0\0\0\0\0\0\0{}", "cannot be read"),
    "safetensors-none": ("a.safetensors", lambda: b"\x02\0\0\0\0\0\0\0{}", "holds no weights"),
    "zip": ("a.zip", lambda: zipped({"readme.txt": b"hello"}), "cannot be read as weights"),
}


@sweep(("name", "content", "sentence"), CASES.values())
def test_bad_weights_are_one_sentence(name, content, sentence, tmp_path):
    path = tmp_path / name
    path.write_bytes(content())
    target = network()
    with pytest.raises(MedfedError) as caught:
        fit(target, Pretrained(weights=str(path)).read())
    assert not RAN.exists()
    told = str(caught.value)
    assert sentence in told
    assert "\n" not in told
    assert len(told) < 500
    assert sorted(tmp_path.iterdir()) == [path]


@sweep(
    ("option", "sentence"),
    [
        ({"spread": 0.0}, "init.spread must be a positive number"),
        ({"part": []}, "init.part is empty"),
        ({"rename": ["a"]}, "init.rename must map"),
        ({"client": "a"}, "init.client=a is for run folders"),
    ],
)
def test_bad_options(option, sentence, tmp_path):
    torch.save(state(), tmp_path / "a.pt")
    with pytest.raises(MedfedError, match=sentence):
        Pretrained(weights=str(tmp_path / "a.pt"), **option).read()


@sweep(
    "adopted",
    [
        {"trainer.devices": 8},
        {"data.spacing": "${oc.env:HOME}"},
        {"model.network": {"_target_": "torch.nn.Linear", "in_features": "${oc.env:HOME}"}},
        {"model.network": {"_target_": "a.B", "inner": {"width": "${in_channels}${seed}"}}},
        {"model.network": "${oc.env:HOME}"},
    ],
)
def test_the_record_of_a_run_sets_only_what_a_source_says(adopted):
    config = described(["data.path=."])
    with pytest.raises(CheckpointError, match="which medfed does not"):
        adopt(config, adopted)
