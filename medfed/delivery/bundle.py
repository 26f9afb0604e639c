"""Reading a bundle: checked before anything of it is used, and nothing in it is ever executed.

A bundle is a folder::

    configs/metadata.json    what the model is, and what it expects of its input
    configs/inference.json   how MONAI runs it (``python -m monai.bundle run``)
    models/model.pt          its weights, see :mod:`medfed.delivery.weights`
    models/model.onnx        the same for ONNX Runtime, if it was asked for
    scripts/                 a few lines that unpack the weights without this package
    docs/README.md           the same for people

MONAI evaluates the expressions of ``inference.json``; this reader builds the network from the plain
data of ``metadata.json`` instead, and only what :data:`medfed.delivery.networks.TARGETS` lists.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from medfed.delivery.networks import build_network
from medfed.delivery.weights import load_weights
from medfed.errors import CheckpointError

FORMAT_VERSION = 1
MODEL = "models/model.pt"
ONNX = "models/model.onnx"
METADATA = "configs/metadata.json"


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
        network = build_network(self.facts["network"])
        counters = {n: t for n, t in network.state_dict().items() if not t.is_floating_point()}
        try:
            network.load_state_dict({**counters, **self.state})
        except RuntimeError as error:
            first = str(error).splitlines()[-1].strip()
            raise CheckpointError(
                f"The weights of {self.folder} do not fit its network ({first}); export it anew."
            ) from error
        return network.to(next(iter(self.state.values())).dtype).eval()


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
    dense, books = load_weights(folder / MODEL)
    return Bundle(folder, metadata, {**dense, **{n: b.dense() for n, b in books.items()}})


def sha256_file(path: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_metadata(folder: Path) -> dict[str, Any]:
    path = folder / METADATA
    try:
        metadata: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder} is no bundle (it has no {METADATA}).") from None
    except (OSError, ValueError) as error:
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
        if sha256_file(path) != expected:
            raise CheckpointError(
                f"{path} is not the file that was exported (its hash differs from {METADATA}); "
                "copy the bundle again."
            )
