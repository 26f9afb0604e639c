"""The files of a bundle of which a prediction is made, and how they travel: nothing else does."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from medfed.common.schemas import parse_json
from medfed.common.untrusted import reading
from medfed.records.places import MANIFEST, METADATA, refusal
from medfed.standalone.errors import CheckpointError, ConfigError, DataError
from medfed.standalone.files import replacing_folder

MODEL, PACKED = "models/model.pt", "models/packed.pt"


class Manifest(TypedDict):
    """``configs/manifest.json``: SHA-256 by name."""

    sha256: dict[str, str]


def manifest_hash(folder: Path) -> str:
    """Returns the hash that names a bundle: that of its manifest, which has those of all files."""
    if not (folder / MANIFEST).is_file():
        raise ConfigError(refusal(folder, MANIFEST))
    return sha256((folder / MANIFEST).read_bytes()).hexdigest()


def remembers_cases(folder: Path) -> bool:
    """Returns whether the model of a bundle holds cases of its training, as its card records."""
    with reading(folder / METADATA, "copy the bundle again"):
        facts: dict[str, Any] = parse_json(folder / METADATA)["medfed"]
        return bool((facts.get("card") or {}).get("remembered"))


def packed(folder: Path) -> bytes:
    """Returns manifest, metadata and weights as they travel; no code of the bundle does."""
    manifest_hash(folder)
    weights = PACKED if (folder / PACKED).is_file() else MODEL
    try:
        files = {name: (folder / name).read_bytes() for name in (MANIFEST, METADATA, weights)}
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename} is missing; copy the bundle again.") from error
    return msgspec.msgpack.encode(files)


def unpacked(content: bytes, manifest: str, folder: Path) -> None:
    """Writes what :func:`packed` returned, once every hash was compared."""
    try:
        files = msgspec.msgpack.decode(content, type=dict[str, bytes])
        if sha256(files[MANIFEST]).hexdigest() != manifest:
            raise ValueError("its manifest has another hash than the plan names")
        known = parse_json(files[MANIFEST], Manifest)["sha256"]
        if not {MANIFEST, METADATA} < files.keys() <= {MANIFEST, METADATA, MODEL, PACKED}:
            raise ValueError("it holds other files than a prediction needs")
        for name in files.keys() - {MANIFEST}:
            if sha256(files[name]).hexdigest() != known.get(name):
                raise ValueError(f"{name} has another hash than its manifest")
    except (ValueError, KeyError, msgspec.MsgspecError) as error:
        raise DataError(f"The bundle that arrived is not the agreed one: {error}.") from error
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replacing_folder(folder) as made:
        for name, data in files.items():
            (made / name).parent.mkdir(exist_ok=True)
            (made / name).write_bytes(data)
