"""Scans in NIfTI as hospitals have them: found in folders, checked, and read as in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch
from torch import Tensor

from medfed.datamodules.readers.brats_challenge import FILES
from medfed.datamodules.readers.folder import Pattern, find_file, is_visible_folder
from medfed.datamodules.readers.volumes import check_geometry, load_ras, read_header, zscore
from medfed.datamodules.spacing import ras_spacing
from medfed.datamodules.threads import one_thread
from medfed.delivery.geometry import check_spacing, suffix_of
from medfed.errors import DataError


@dataclass(frozen=True)
class ScanFiles:
    """One scan before it is read.

    Attributes:
        id: Its name, from which that of its mask is made.
        path: A 4-D file (or 3-D, of one channel), or a folder with a file per contrast.
    """

    id: str
    path: Path


def find_scans(
    path: Path, facts: Mapping[str, Any], apart_from: Path | None = None
) -> list[ScanFiles]:
    """Lists the scans that an input names.

    Args:
        path: A NIfTI file; a folder with one file per contrast; or a folder of such files or
            folders.
        facts: The bundle's, which name the files of a contrast.
        apart_from: A folder in it that is left out: the one for the masks.

    Returns:
        The scans, sorted by name.

    Raises:
        DataError: If there is none.
    """
    if path.is_dir():
        if _is_case(path, facts):
            return [ScanFiles(path.resolve().name, path)]
        inside = sorted(p for p in path.iterdir() if not p.name.startswith("."))
        files = [p for p in inside if p.is_file() and suffix_of(p)]
        folders = [
            p
            for p in inside
            if is_visible_folder(p) and p != apart_from and any(suffix_of(f) for f in p.iterdir())
        ]
        found = [ScanFiles(_stem(p), p) for p in files]
        found += [ScanFiles(p.name, p) for p in folders]
        if not found:
            raise DataError(
                f"{path} has no NIfTI files (.nii, .nii.gz) and no folders of them; name the "
                "folder with the scans in input."
            )
        return sorted(found, key=lambda scan: scan.id)
    if not path.exists():
        raise DataError(f"{path} does not exist; name a scan, or a folder of scans, in input.")
    if not suffix_of(path):
        raise DataError(f"{path} is no NIfTI file (.nii, .nii.gz); convert the scan.")
    return [ScanFiles(_stem(path), path)]


def read_scan(
    scan: ScanFiles, facts: Mapping[str, Any], tolerance: float | None
) -> tuple[Tensor, Tensor, Path]:
    """Reads one scan as the training data were read.

    Args:
        scan: From `find_scans`.
        facts: The bundle's.
        tolerance: See `geometry.check_spacing`.

    Returns:
        The image ``(C, H, W, D)`` float32 in RAS, z-scored, channels that the client lacks 0; where
        any channel is not zero, ``(H, W, D)`` bool; and a file with the scan's geometry.

    Raises:
        DataError: If the scan cannot be read or contradicts the metadata.
    """
    channels, present = list(facts["channels"]), list(facts["present"])
    if scan.path.is_dir():
        files = {c: find_file(scan.path, c, pattern) for c, pattern in _patterns(facts).items()}
        paths = list(files.values())
        check_geometry(paths)
    else:
        paths = [scan.path]
        read_header(scan.path)  # says what is wrong with it
    check_spacing(ras_spacing(paths[0]), facts, tolerance, scan.path)
    with one_thread():
        if scan.path.is_dir():
            loaded, names = torch.cat([_load(p, 1) for p in paths]), list(files)
        else:
            names = _file_channels(scan.path, facts)
            loaded = load_ras(scan.path)
        _check_finite(loaded, names, scan.path)
        brain = (loaded != 0).any(dim=0)
        if not brain.any():
            raise DataError(f"{scan.path} has only zero voxels; export the scan again.")
        normalised = zscore(loaded)
    image = torch.zeros(len(channels), *loaded.shape[1:])
    for name in present:
        image[channels.index(name)] = normalised[names.index(name)]
    return image, brain, paths[0]


def _is_case(folder: Path, facts: Mapping[str, Any]) -> bool:
    """Whether a folder holds the files of one scan: any contrast's pattern matches."""
    files = [p for p in folder.iterdir() if p.is_file() and not p.name.startswith(".")]
    patterns = [p for alternatives in _patterns(facts).values() for p in alternatives]
    return any(file.match(pattern) for file in files for pattern in patterns)


def _patterns(facts: Mapping[str, Any]) -> dict[str, Sequence[str]]:
    """File names of the contrasts that the client has: those of the training data, or the usual."""
    known: Mapping[str, Pattern] = facts["input"].get("files") or {}
    found: dict[str, Sequence[str]] = {}
    for name in facts["present"]:
        usual = (*FILES.get(name, ()), f"{name}.nii.gz", f"{name}.nii")
        given = known.get(name, usual)
        found[name] = [given] if isinstance(given, str) else list(given)
    return found


def _file_channels(path: Path, facts: Mapping[str, Any]) -> list[str]:
    """What the channels of a 4-D file are, by their number."""
    shape = nib.load(path).shape
    count = shape[3] if len(shape) == 4 else 1
    known = facts["input"].get("file_channels") or facts["channels"]
    # A file as in the training data, one of the network's channels, or of those the client has.
    for names in (known, facts["channels"], facts["present"]):
        if len(shape) in (3, 4) and count == len(names):
            return list(names)
    if len(shape) not in (3, 4):
        raise DataError(f"{path} has shape {shape}; a scan has three axes, or four with channels.")
    raise DataError(
        f"{path} has {count} channel{'s' * (count > 1)}, but the model needs {len(known)} "
        f"({', '.join(known)}) along the fourth axis; give it these, or a folder with a file per "
        "contrast."
    )


def _load(path: Path, count: int) -> Tensor:
    loaded = load_ras(path)
    if len(loaded) != count:
        raise DataError(f"{path} has {len(loaded)} channels, but a file per contrast has {count}.")
    return loaded


def _check_finite(image: Tensor, names: Sequence[str], path: Path) -> None:
    for name, voxels in zip(names, image, strict=True):
        if not np.isfinite(voxels.numpy().sum(dtype=np.float64)):
            raise DataError(f"{path}: channel {name} has NaN or infinite voxels; repair the scan.")


def _stem(path: Path) -> str:
    return path.name[: -len(suffix_of(path))]
