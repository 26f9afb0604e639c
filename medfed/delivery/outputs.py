"""Where predictions are written: checked beforehand, whole or not at all."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from medfed.delivery.geometry import suffix_of
from medfed.errors import ConfigError, DataError
from medfed.run_folder import write_text


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


def check_targets(targets: Iterable[Path], overwrite: bool, inputs: Iterable[Path] = ()) -> None:
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


def mask_path(output: Path) -> Path:
    """Returns the path if it is one of a NIfTI file.

    Raises:
        ConfigError: If it has another suffix.

    Example:
        >>> mask_path(Path("mask.nii.gz")).name
        'mask.nii.gz'
    """
    if not suffix_of(output) or output.is_dir():
        raise ConfigError(
            f"output={output} must be a NIfTI file (.nii.gz, .nii) where the input is one scan."
        )
    return output


def beside(mask: Path, postfix: str) -> Path:
    """Names a file after a mask.

    Example:
        >>> beside(Path("out/mask.nii.gz"), "_probabilities.nii.gz").as_posix()
        'out/mask_probabilities.nii.gz'
    """
    return mask.with_name(mask.name[: -len(suffix_of(mask))] + postfix)


def csv_path(output: Path) -> Path:
    """Returns the path if it is one of a CSV file.

    Raises:
        ConfigError: If it has another suffix.

    Example:
        >>> csv_path(Path("probabilities.csv")).name
        'probabilities.csv'
    """
    if output.suffix.lower() != ".csv" or output.is_dir():
        raise ConfigError(f"output={output} must be a .csv file: this model writes a table.")
    return output


def probability_columns(labels: Sequence[str]) -> list[str]:
    """Names the columns of the probabilities.

    Example:
        >>> probability_columns(["benign", "malignant"])
        ['probability_benign', 'probability_malignant']
    """
    return [f"probability_{name}" for name in labels]


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Writes a CSV file, whole or not at all; numbers with eight digits.

    Args:
        path: Where to.
        header: Column names.
        rows: One sequence of cells per row.

    Raises:
        DataError: If the file cannot be written.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        writer.writerow([f"{c:.8g}" if isinstance(c, float) else c for c in row])
    try:
        write_text(path, text.getvalue())
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error}); choose another output.") from error
