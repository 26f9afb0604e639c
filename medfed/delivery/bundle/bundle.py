"""A bundle's folder: checked before anything of it is used, written whole or not at all.

It holds::

    configs/metadata.json    what the model is, and what it expects of its input
    configs/manifest.json    the hashes of all other files
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
import logging
import reprlib
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medfed.common.errors import CheckpointError, DataError
from medfed.common.files import writing
from medfed.common.replacing import replacing_folder, restore_folder
from medfed.common.strict_json import read_strict_json
from medfed.delivery.bundle import manifest, scripts, weights
from medfed.delivery.bundle.facts import check_facts
from medfed.delivery.bundle.inference_config import inference_config
from medfed.delivery.bundle.metadata import FORMAT_VERSION, METADATA, monai_metadata, readme
from medfed.delivery.bundle.network_descriptions import build_network, check_state
from medfed.delivery.bundle.onnx_file import ONNX, save_onnx, trace_shape
from medfed.delivery.bundle.scripts.decode import fill
from medfed.delivery.bundle.weights import MODEL, Codebook

_log = logging.getLogger(__name__)
_BEFORE_MANIFESTS = 1  # the version whose hashes are in the metadata


@dataclass(frozen=True)
class Bundle:
    """A bundle whose hashes and versions agree.

    Attributes:
        folder: Where it lies.
        metadata: All of ``configs/metadata.json``.
        state: Weights and float buffers by name, dense.
        hashes: SHA-256 of its files by name.
    """

    folder: Path
    metadata: dict[str, Any]
    state: dict[str, Tensor]
    hashes: Mapping[str, str]

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
        plain = self.facts["network"]
        try:
            if "count" in plain and plain["count"] not in range(1, len(self.state) + 1):
                raise RuntimeError(f"{reprlib.repr(plain['count'])} parts")
            with torch.device("meta"):  # takes no memory, whatever sizes it names
                check_state(build_network(plain), self.state)
            network = fill(build_network(plain), self.state)
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
    restore_folder(folder)
    metadata = _read_metadata(folder)
    facts = metadata["medfed"]
    if facts["format_version"] == _BEFORE_MANIFESTS:
        source, hashes = METADATA, manifest.checked_hashes(facts.get("hashes"), folder / METADATA)
    else:
        source, hashes = manifest.MANIFEST, manifest.read_hashes(folder / manifest.MANIFEST)
    for name in (MODEL, METADATA):
        if name not in hashes and name != source:
            raise CheckpointError(f"{folder / source} has no hash of {name}; export it anew.")
    manifest.check_files(folder, hashes, source)
    check_facts(facts, folder / METADATA)
    if source == METADATA:
        _log.warning(
            "%s is of an earlier version: no hash covers its metadata, so that a change of labels "
            "or thresholds would not be seen; export it anew.",
            folder,
        )
    return Bundle(folder, metadata, weights.load_weights(folder / MODEL), hashes)


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
        The facts with ``bits`` and ``sizes``, as they stand in the metadata.

    Raises:
        ConfigError: If the ONNX file cannot be made.
        DataError: If the folder cannot be written, or is no bundle and must not be replaced.
    """
    _check_place(folder)
    state = weights.with_codebooks(dense, books)
    with writing(folder, "choose another out=FOLDER"), replacing_folder(folder) as made:
        for name in manifest.FOLDERS:
            (made / name).mkdir()
        weights.save_weights(made / MODEL, dense, books)
        sizes = {
            "fp32": _fp32_bytes(state),
            "packed": (made / MODEL).stat().st_size,
            "entropy_bound": weights.entropy_bound(dense, books),
        }
        if onnx:
            network = Bundle(made, {"medfed": facts}, state, {}).network()
            save_onnx(made / ONNX, network, books, trace_shape(facts))
            sizes["onnx"] = (made / ONNX).stat().st_size
        whole = {**facts, "bits": {n: b.bits for n, b in books.items()}, "sizes": sizes}
        _write_json(made / "configs" / "inference.json", inference_config(whole))
        for script in Path(scripts.__path__[0]).glob("*.py"):
            shutil.copyfile(script, made / "scripts" / script.name)
        (made / "docs" / "README.md").write_text(readme(whole), encoding="utf-8")
        _write_json(made / METADATA, monai_metadata(whole))
        manifest.write_manifest(made)
    return whole


def _read_metadata(folder: Path) -> dict[str, Any]:
    path = folder / METADATA
    try:
        metadata: dict[str, Any] = read_strict_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder} is no bundle (it has no {METADATA}).") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); copy the bundle again.") from error
    facts = metadata.get("medfed") if isinstance(metadata, dict) else None
    if not isinstance(facts, dict):
        raise CheckpointError(
            f"{folder} is a bundle of another origin; only those of scripts/export.py are read."
        )
    version = facts.get("format_version")
    if version not in range(1, FORMAT_VERSION + 1) or isinstance(version, bool):
        raise CheckpointError(
            f"{folder} has version {reprlib.repr(version)}, but this program reads version "
            f"{FORMAT_VERSION} and earlier ones; export the bundle anew, or update the program."
        )
    return metadata


def _check_place(folder: Path) -> None:
    """Refuses to replace what is no bundle, or a bundle with something of the user's in it."""
    if folder.is_dir() and (folder / METADATA).is_file():
        if lost := manifest.foreign(folder):
            raise DataError(f"{folder / lost[0]} would be lost by the export; move it elsewhere.")
    elif folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise DataError(f"{folder} holds something else than a bundle; choose another out=FOLDER.")


def _fp32_bytes(state: Mapping[str, Tensor]) -> int:
    """The size of a plain PyTorch file of the same weights in single precision."""
    with tempfile.TemporaryFile() as file:
        torch.save({n: t.float().clone() for n, t in state.items()}, file)
        return file.tell()


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
