"""Probabilities of images, rows of tables and candidates of CT scans: a row each of a CSV file."""

from __future__ import annotations

from pathlib import Path

from medfed.common.errors import ConfigError
from medfed.delivery.bundle.scripts.samples import (
    ScanCandidates,
    read_rows,
    rows_of_image,
    save_images,
    save_rows,
)
from medfed.delivery.bundle.scripts.scans import find_images
from medfed.delivery.predict.committee import Committee
from medfed.delivery.predict.options import attempt, table_path


def predict_candidates(committee: Committee) -> Path:
    """Classifies the candidates of one scan, or of all scans in a folder, into one CSV file.

    The rows are those of the candidates' CSV, in its order, without those of scans that are not
    given or could not be used.

    Args:
        committee: Models of CT patches; their options name the ``candidates``.

    Returns:
        The CSV file.

    Raises:
        MedfedError: If nothing can be done, or some scans could not be used; a candidate outside of
            its scan makes the scan one of these, because then the coordinates are of another frame.
    """
    options = committee.options
    output, given = table_path(options), Path(options.input)
    if options.candidates is None:
        raise ConfigError(
            "This model classifies candidates; name them in candidates=FILE.csv, with the columns "
            "seriesuid, coordX, coordY, coordZ."
        )
    points = ScanCandidates(
        given, Path(options.candidates), committee.columns, options.spacing_tolerance
    )

    def one(series: str) -> None:
        points.classify(series, committee.classify)

    attempt(points.series, one, str, "scans", lambda: points.save(output))
    return output


def predict_table(committee: Committee) -> Path:
    """Classifies the rows of a CSV file, or predicts their outcome.

    Cells that training has not seen the like of are named, a line each, and in the row's
    ``warning``: a value outside of the range in training, a category that was not there, a missing
    cell where none was missing.

    Args:
        committee: Models of features.

    Returns:
        The CSV file: ``row``, counted from 1, the cells of all columns that are no features,
        ``warning``, and a probability per class, or of a regression ``prediction`` in the outcome's
        unit.

    Raises:
        MedfedError: If a column is missing, a cell is no number, or nothing can be written.
    """
    output, source = table_path(committee.options), Path(committee.options.input)
    read = committee.ask(lambda member: read_rows(member, source))
    tensors = {id(m): r.tensor for m, r in zip(committee.members, read, strict=True)}
    answers = committee.classify(lambda member: tensors[id(member)], source)
    save_rows(read, answers, committee.columns, source, output)
    return output


def predict_images(committee: Committee) -> Path:
    """Classifies an image, or all images of a folder and its subfolders, into one CSV file.

    Args:
        committee: Models of images.

    Returns:
        The CSV file: ``image``, the path below the input (of an ``.npz`` file with the array's name
        and the image's number from 0), and a probability per class; see `Committee.classify` for
        what several models add. Labels of ``.npz`` files are copied into ``label``, and nothing is
        made of them.

    Raises:
        MedfedError: If nothing can be done, or some images could not be used.
    """
    output, source = table_path(committee.options), Path(committee.options.input)
    root = source if source.is_dir() else source.parent
    rows: list[list[object]] = []

    def one(file: Path) -> None:
        rows.extend(rows_of_image(file, root, committee.classify))

    def save() -> None:
        save_images(rows, committee.columns, output)

    attempt(find_images(source), one, lambda file: file.name, "images", save)
    return output
