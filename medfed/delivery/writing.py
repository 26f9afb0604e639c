"""Writing a bundle's folder: whole or not at all."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medfed.delivery import bundle_scripts
from medfed.delivery.bundle import METADATA, MODEL, ONNX, Bundle, sha256_file
from medfed.delivery.codebook import Codebook
from medfed.delivery.inference import inference_config
from medfed.delivery.metadata import monai_metadata
from medfed.delivery.onnx_export import save_onnx, trace_shape
from medfed.delivery.readme import readme
from medfed.delivery.weights import entropy_bound, save_weights
from medfed.errors import DataError

SCRIPTS = ("__init__.py", "decode.py", "inference.py", "networks.py")


def write_bundle(
    folder: Path,
    facts: Mapping[str, Any],
    dense: Mapping[str, Tensor],
    books: Mapping[str, Codebook],
    onnx: bool = False,
) -> dict[str, Any]:
    """Writes a bundle in the place of one that is there already.

    Args:
        folder: Where to.
        facts: See :func:`medfed.delivery.metadata.collect_facts`.
        dense: Tensors that stay as they are, by name.
        books: Quantised tensors, by name.
        onnx: Whether it holds an ONNX file, too.

    Returns:
        The facts with ``bits``, ``sizes`` and ``hashes``, as they stand in the metadata.

    Raises:
        ConfigError: If the ONNX file cannot be made.
        DataError: If the folder cannot be written, or is no bundle and must not be replaced.
    """
    if folder.exists() and not (folder / METADATA).is_file() and any(folder.iterdir()):
        raise DataError(f"{folder} holds something else than a bundle; choose another out=FOLDER.")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            made.chmod(0o755)
            written = _fill(made, facts, dense, books, onnx)
            _replace(made, folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"Cannot write {folder} ({error.strerror}); make room, or choose another out=FOLDER."
        ) from error
    return written


def fp32_bytes(dense: Mapping[str, Tensor], books: Mapping[str, Codebook]) -> int:
    """Returns the size of a plain PyTorch file of the same weights in single precision."""
    whole = {**dense, **{n: b.dense() for n, b in books.items()}}
    with tempfile.TemporaryFile() as file:
        torch.save({n: t.float().clone() for n, t in whole.items()}, file)
        return file.tell()


def _fill(
    folder: Path,
    facts: Mapping[str, Any],
    dense: Mapping[str, Tensor],
    books: Mapping[str, Codebook],
    onnx: bool,
) -> dict[str, Any]:
    for name in ("configs", "models", "scripts", "docs"):
        (folder / name).mkdir()
    save_weights(folder / MODEL, dense, books)
    sizes = {
        "fp32": fp32_bytes(dense, books),
        "packed": (folder / MODEL).stat().st_size,
        "entropy_bound": entropy_bound(dense, books),
    }
    if onnx:
        _save_onnx(folder, facts, dense, books)
        sizes["onnx"] = (folder / ONNX).stat().st_size
    whole = {**facts, "bits": {n: b.bits for n, b in books.items()}, "sizes": sizes}
    _write_json(folder / "configs" / "inference.json", inference_config(whole))
    for name in SCRIPTS:
        shutil.copyfile(Path(bundle_scripts.__path__[0]) / name, folder / "scripts" / name)
    (folder / "docs" / "README.md").write_text(readme(whole), encoding="utf-8")
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    whole["hashes"] = {p.relative_to(folder).as_posix(): sha256_file(p) for p in files}
    _write_json(folder / METADATA, monai_metadata(whole))
    return whole


def _save_onnx(
    folder: Path,
    facts: Mapping[str, Any],
    dense: Mapping[str, Tensor],
    books: Mapping[str, Codebook],
) -> None:
    state = {**dense, **{n: b.dense() for n, b in books.items()}}
    network = Bundle(folder, {"medfed": dict(facts)}, state).network()
    save_onnx(folder / ONNX, network, books, trace_shape(facts))


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _replace(made: Path, folder: Path) -> None:
    """Puts the finished folder in place; an old bundle is gone only when the new one is whole."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    made.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
