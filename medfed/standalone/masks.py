"""Masks in files: which label values they have, and on which grid and axes they lie."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .errors import CheckpointError, ConfigError
from .files import replacing, writing
from .volume_files import stem_of, suffix_of
from .volumes import Geometry, as_stored

Facts = Mapping[str, Any]  # what the training data say of a model
NIFTI = (".nii.gz", ".nii")
SEG = ".dcm"


def label_codes(regions: Mapping[str, Sequence[int]]) -> dict[str, int] | None:
    """Chooses the label value of every region, where the regions nest or are exclusive.

    Where what each region has beyond those within it was one value of the training masks, it keeps
    that value; otherwise they are numbered, from outside to inside where they nest.
    """
    values = {name: set(codes) for name, codes in regions.items()}
    exclusive = sum(map(len, values.values())) == len(set().union(*values.values()))
    names = list(regions)
    if not exclusive:
        names.sort(key=lambda name: -len(values[name]))
    inner = [set() if exclusive else values[name] for name in names[1:]] + [set()]
    if any(not within < values[name] for name, within in zip(names, inner, strict=True)):
        return None
    zones = {n: sorted(values[n] - within) for n, within in zip(names, inner, strict=True)}
    if all(len(zone) == 1 for zone in zones.values()):
        return {name: int(zone[0]) for name, zone in zones.items()}
    return {name: number for number, name in enumerate(names, start=1)}


def map_codes(facts: Facts) -> dict[str, int] | None:
    """Chooses the label values of the one map that a segmentation is written as.

    None if regions were decided one by one and may lie in each other, which one map would lose.

    Example:
        >>> regions = {"liver": [1], "tumour": [2]}
        >>> facts = {"labels": list(regions), "input": {"regions": regions}}
        >>> map_codes({**facts, "activation": "softmax"}), map_codes(facts)
        ({'liver': 1, 'tumour': 2}, None)
    """
    channels = facts["input"].get("regions") or {}
    regions = {name: channels.get(name, [1]) for name in facts["labels"]}
    codes = label_codes(regions)
    if facts.get("activation") == "softmax":
        return codes or {name: number for number, name in enumerate(regions, start=1)}
    shared = sum(map(len, regions.values())) > len(set().union(*regions.values()))
    return codes if shared or len(regions) == 1 else None


def label_map(masks: Mapping[str, Tensor], codes: Mapping[str, int]) -> Tensor:
    """Writes regions into one map, the innermost last; an outer one is then the union of both."""
    dtype = torch.uint8 if all(0 <= code < 256 for code in codes.values()) else torch.int32
    labels = torch.zeros(next(iter(masks.values())).shape, dtype=dtype)
    for name, code in codes.items():
        labels[masks[name]] = code
    return labels


def largest_part(mask: Tensor) -> Tensor:
    """Returns the largest connected part of a mask (H, W, D), of equal ones the first."""
    from scipy.ndimage import label  # few bundles need the package

    parts, count = label(mask.numpy(), structure=np.ones((3,) * mask.ndim))
    if count < 2:
        return mask
    sizes = np.bincount(parts.ravel())
    sizes[0] = 0
    return torch.from_numpy(parts == sizes.argmax())


def named_after(mask: Path, postfix: str, suffix: str | None = None) -> Path:
    """Names a file after a mask.

    Example:
        >>> named_after(Path("out/mask.nii.gz"), "_probabilities").as_posix()
        'out/mask_probabilities.nii.gz'
        >>> named_after(Path("out/mask.dcm"), "_probabilities").name
        'mask_probabilities.nii.gz'
    """
    if re.search(r"[/\\\x00-\x1f]", postfix):
        what = f"The bundle's label {postfix[1:]!r} cannot be part of a file's name"
        raise CheckpointError(f"{what}; export it anew.")
    stem = stem_of(mask) if suffix_of(mask) else mask.stem
    ending = ".nii.gz" if mask.suffix.lower() == SEG else mask.name[len(stem) :]
    return mask.with_name(stem + postfix + (suffix or ending))


def header_text(text: str, most: int) -> str:
    r"""Returns a text for a header of DICOM or NIfTI, where a backslash parts values.

    Example:
        >>> header_text("a\\b\n c" + "d" * 9, 8)
        'a/b cddd'
    """
    printed = "".join(c if c.isprintable() else " " for c in text.replace("\\", "/"))
    return " ".join(printed.split())[:most].strip()


_GRID = ("qform_", "sform_", "quatern_", "qoffset_", "srow_", "xyzt_")
"""Fields that go on from the header of a scan to that of its mask, beside the sizes of voxels."""


def save_like(
    array: NDArray[Any], geometry: Geometry, source: Path, target: Path, note: str = ""
) -> None:
    """Writes an array (H, W, D[, n]) in RAS as NIfTI, on a scan's own axes and grid.

    Of a NIfTI's header the grid alone goes on, as other fields may hold a name.
    """
    import nibabel as nib  # tables need none of it

    turned = as_stored(array, geometry)
    if suffix_of(source) in NIFTI:
        scan = nib.load(source)
        header = type(scan.header)()
        header.set_data_dtype(turned.dtype)
        header["pixdim"][:4] = scan.header["pixdim"][:4]
        for name in (n for n in header if n.startswith(_GRID)):
            header[name] = scan.header[name]
        image = type(scan)(turned, scan.affine, header)
    else:
        image = nib.Nifti1Image(turned, geometry.stored)
        image.header.set_xyzt_units("mm")
        image.set_qform(geometry.stored, code="scanner")
        image.set_sform(geometry.stored, code="scanner")
    image.header["descrip"] = header_text(note, 79).encode()[:79].decode(errors="ignore").encode()
    with writing(target, "choose another output"), replacing(target) as partial:
        nib.save(image, partial)


def mask_files(facts: Facts, target: Path) -> dict[Path, dict[str, int]]:
    """Names the files of masks with their label values: one, or one for each region."""
    codes = map_codes(facts)
    if codes is not None:
        return {target: codes}
    return {named_after(target, f"_{name}"): {name: 1} for name in facts["labels"]}


def save_picture(values: NDArray[Any], target: Path) -> None:
    """Writes ``(height, width)`` values as PNG or TIFF, whole or not at all."""
    from PIL import Image

    kind = "TIFF" if target.suffix == ".tif" else "PNG"
    with writing(target, "choose another output"), replacing(target) as partial:
        Image.fromarray(np.ascontiguousarray(values)).save(partial, format=kind)


def check_apart(cases: Iterable[tuple[str, Iterable[Path]]], what: str) -> None:
    """Refuses cases of which one would be written over another's files."""
    owners: dict[Path, tuple[int, str]] = {}
    every = ((n, name, file) for n, (name, files) in enumerate(cases) for file in files)
    for number, name, file in every:
        other, twin = owners.setdefault(file, (number, name))
        if other != number and twin == name:
            raise ConfigError(f"There are two {what} of the name {name}; rename one.")
        if other != number:
            both = f"{what.capitalize()} {twin} and {name} would share {file}"
            raise ConfigError(f"{both}; rename one.")
