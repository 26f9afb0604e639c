"""A bundle's folder: checked before anything of it is used, written whole or not at all.

It holds::

    configs/metadata.json    what the model is, and what it expects of its input
    configs/inference.json   how MONAI runs it (``python -m monai.bundle run``)
    models/model.pt          its weights, see :mod:`medfed.delivery.bundle.weights`
    models/model.onnx        the same for ONNX Runtime, if it was asked for
    scripts/                 a few lines that unpack the weights without this package
    docs/README.md           the same for people

MONAI evaluates the expressions of ``inference.json``. The reader here executes nothing: it builds
the network from the plain data of ``metadata.json``, and only what
:data:`medfed.delivery.bundle.network_descriptions.TARGETS` lists.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medfed.common.errors import CheckpointError, DataError
from medfed.common.files import sha256
from medfed.delivery.bundle import scripts, weights
from medfed.delivery.bundle.inference_config import inference_config
from medfed.delivery.bundle.metadata import FORMAT_VERSION, METADATA, monai_metadata, readme
from medfed.delivery.bundle.network_descriptions import build_network
from medfed.delivery.bundle.onnx_file import ONNX, save_onnx, trace_shape
from medfed.delivery.bundle.scripts.decode import fill
from medfed.delivery.bundle.weights import MODEL, Codebook


@dataclass(frozen=True)
class Bundle:
    """A bundle whose hashes and versions agree.

    Attributes:
        folder: Where it lies.
        metadata: All of ``configs/metadata.json``.
        state: Weights and float buffers by name, dense.
    """

    folder: Path
    metadata: dict[str, Any]
    state: dict[str, Tensor]

    @property
    def facts(self) -> dict[str, Any]:
        """The part of the metadata under ``medfed``."""
        facts: dict[str, Any] = self.metadata["medfed"]
        return facts

    def network(self) -> nn.Module:
        """Builds the network with its weights, in evaluation mode.

        Returns:
            From images ``(B, C, *spatial)`` or features ``(B, F)`` to logits.

        Raises:
            CheckpointError: If network and weights do not fit together.
        """
        try:
            network = fill(build_network(self.facts["network"]), self.state)
        except RuntimeError as error:
            first = str(error).splitlines()[-1].strip()
            raise CheckpointError(
                f"The weights of {self.folder} do not fit its network ({first}); export it anew."
            ) from error
        return network.to(next(iter(self.state.values())).dtype)


def read_bundle(folder: Path) -> Bundle:
    """Reads a bundle.

    Args:
        folder: The bundle's folder.

    Returns:
        Its metadata and weights.

    Raises:
        CheckpointError: If it is no bundle, a file of it is missing or changed, or its format or
            version is another.
    """
    metadata = _read_metadata(folder)
    _check_hashes(folder, metadata["medfed"]["hashes"])
    return Bundle(folder, metadata, weights.load_weights(folder / MODEL))


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
        facts: The part ``medfed`` of the metadata, see :mod:`medfed.delivery.bundle.metadata`,
            without what is known only once weights are written.
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
    state = weights.with_codebooks(dense, books)
    try:
        with _replacing(folder) as made:
            weights.save_weights(made / MODEL, dense, books)
            sizes = {
                "fp32": _fp32_bytes(state),
                "packed": (made / MODEL).stat().st_size,
                "entropy_bound": weights.entropy_bound(dense, books),
            }
            if onnx:
                network = Bundle(made, {"medfed": facts}, state).network()
                save_onnx(made / ONNX, network, books, trace_shape(facts))
                sizes["onnx"] = (made / ONNX).stat().st_size
            whole = {**facts, "bits": {n: b.bits for n, b in books.items()}, "sizes": sizes}
            _write_json(made / "configs" / "inference.json", inference_config(whole))
            for script in Path(scripts.__path__[0]).glob("*.py"):
                shutil.copyfile(script, made / "scripts" / script.name)
            (made / "docs" / "README.md").write_text(readme(whole), encoding="utf-8")
            files = sorted(p for p in made.rglob("*") if p.is_file())
            whole["hashes"] = {p.relative_to(made).as_posix(): sha256(p) for p in files}
            _write_json(made / METADATA, monai_metadata(whole))
    except OSError as error:
        raise DataError(
            f"Cannot write {folder} ({error.strerror}); make room, or choose another out=FOLDER."
        ) from error
    return whole


def _read_metadata(folder: Path) -> dict[str, Any]:
    path = folder / METADATA
    try:
        metadata: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder} is no bundle (it has no {METADATA}).") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); copy the bundle again.") from error
    facts = metadata.get("medfed") if isinstance(metadata, dict) else None
    if not isinstance(facts, dict):
        raise CheckpointError(
            f"{folder} is a bundle of another origin; only those of scripts/export.py are read."
        )
    if facts.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} has version {facts.get('format_version')}, but this program reads version "
            f"{FORMAT_VERSION}; export the bundle anew, or update the program."
        )
    for key, kind in (("hashes", dict), ("network", dict), ("task", str)):
        if not isinstance(facts.get(key), kind):
            raise CheckpointError(f"{path} lacks {key}; export the bundle anew.")
    if MODEL not in facts["hashes"]:
        raise CheckpointError(f"{path} has no hash of {MODEL}; export the bundle anew.")
    return metadata


def _check_hashes(folder: Path, hashes: dict[str, Any]) -> None:
    for name, expected in hashes.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()) or not path.is_file():
            raise CheckpointError(f"{path} is missing; copy the bundle again.")
        if sha256(path) != expected:
            raise CheckpointError(
                f"{path} is not the file that was exported (its hash differs from {METADATA}); "
                "copy the bundle again."
            )


def _fp32_bytes(state: Mapping[str, Tensor]) -> int:
    """The size of a plain PyTorch file of the same weights in single precision."""
    with tempfile.TemporaryFile() as file:
        torch.save({n: t.float().clone() for n, t in state.items()}, file)
        return file.tell()


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """Gives a new folder, which takes its place once it is whole; until then the old one stays."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    old = folder.with_name(f".{folder.name}.old")
    try:
        made.chmod(0o755)
        for name in ("configs", "models", "scripts", "docs"):
            (made / name).mkdir()
        yield made
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        made.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(made, ignore_errors=True)
