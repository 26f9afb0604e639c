"""Where predictions are written: checked beforehand, whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medfed.common.errors import ConfigError
from medfed.common.files import csv_text, replacing, write_text, writing
from medfed.delivery.predict.options import PredictOptions

NIFTI = (".nii.gz", ".nii")


def check_folder(folder: Path, is_made: bool = False) -> None:
    """Refuses a folder that is not there.

    Args:
        folder: Where files will be written.
        is_made: Whether the folder itself is made where it is missing; then its parent must exist.

    Raises:
        ConfigError: Naming the folder.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"The output folder {folder} is a file; choose another output.")
    needed = folder.absolute().parent if is_made else folder
    if not needed.is_dir():
        raise ConfigError(f"The folder {needed} of the output does not exist; make it.")


def check_targets(targets: Iterable[Path], overwrite: bool, inputs: Iterable[Path]) -> None:
    """Refuses to write over an input, or over what is there.

    Args:
        targets: The files to be written.
        overwrite: Whether existing files may be replaced.
        inputs: Files that are never replaced.

    Raises:
        ConfigError: Naming the file and what to do.
    """
    kept = {path.resolve() for path in inputs}
    for target in targets:
        if target.resolve() in kept:
            raise ConfigError(f"The output {target} is an input; choose another output.")
        if target.exists() and not overwrite:
            raise ConfigError(f"{target} is there already; set overwrite=true to replace it.")


def table_path(options: PredictOptions) -> Path:
    """Returns the CSV file that will be written.

    Raises:
        ConfigError: If the output is another file, is there already, or cannot be made.

    Example:
        >>> table_path(PredictOptions("bundle", "patients.csv", "probabilities.csv")).name
        'probabilities.csv'
    """
    output = Path(options.output)
    if output.suffix.lower() != ".csv" or output.is_dir():
        raise ConfigError(f"output={output} must be a .csv file: this model writes a table.")
    check_folder(output.parent)
    inputs = [Path(path) for path in (options.input, options.candidates) if path is not None]
    check_targets([output], options.overwrite, inputs)
    return output


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Writes a CSV file, whole or not at all; numbers with eight digits.

    Args:
        path: Where to.
        header: Column names.
        rows: One sequence of cells per row.

    Raises:
        DataError: If the file cannot be written.
    """
    written = ([f"{c:.8g}" if isinstance(c, float) else c for c in row] for row in rows)
    with writing(path, "choose another output"):
        write_text(path, csv_text(header, written))


def suffix_of(path: Path) -> str:
    """Returns ``.nii.gz`` or ``.nii``, or an empty string for other files.

    Example:
        >>> suffix_of(Path("a.b.nii.gz")), suffix_of(Path("a.mhd"))
        ('.nii.gz', '')
    """
    return next((suffix for suffix in NIFTI if path.name.lower().endswith(suffix)), "")


def stem_of(path: Path) -> str:
    """Returns the name of a NIfTI file without its suffix.

    Example:
        >>> stem_of(Path("a.b.nii.gz"))
        'a.b'
    """
    return path.name[: -len(suffix_of(path))]


def beside(mask: Path, postfix: str) -> Path:
    """Names a file after a mask.

    Example:
        >>> beside(Path("out/mask.nii.gz"), "_probabilities.nii.gz").as_posix()
        'out/mask_probabilities.nii.gz'
    """
    return mask.with_name(stem_of(mask) + postfix)


def save_like(array: NDArray[Any], source: Path, target: Path, note: str = "") -> None:
    """Writes an array in RAS as NIfTI with a scan's own axes, affine and header.

    Args:
        array: ``(H, W, D)`` or ``(H, W, D, n)``, as `readers.volumes.read_volume` turns the scan.
        source: The scan, ``.nii`` or ``.nii.gz``.
        target: The file to write; whole, or not at all.
        note: The header's description, 79 characters at most.

    Raises:
        DataError: If the file cannot be written.
    """
    import nibabel as nib  # tables need none of it
    from nibabel import orientations

    scan = nib.load(source)
    own = orientations.io_orientation(scan.affine)
    turn = orientations.ornt_transform(orientations.axcodes2ornt("RAS"), own)
    turned = np.ascontiguousarray(orientations.apply_orientation(array, turn))
    header = scan.header.copy()
    header.set_data_dtype(turned.dtype)
    header["descrip"] = note.encode("ascii", "replace")[:79]
    header["cal_min"] = header["cal_max"] = 0  # a viewer's window for the scan, not for a mask
    image = type(scan)(turned, scan.affine, header)
    with writing(target, "choose another output"), replacing(target) as partial:
        nib.save(image, partial)
