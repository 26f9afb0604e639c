"""What ``medfed predict`` does: a hospital's own model on its scans, images or rows.

Nothing of the bundle is executed: the network is built from the plain data of its metadata, and
scans are read by the functions that read the training data. What training does to an input, and
where it is done here:

==========  ==============================================================  ======================
Kind        What happens between the file and the network                   Read by
==========  ==============================================================  ======================
volumes     Axes towards right, anterior, superior (``read_volume``). Cropped   `scans.read_scan`,
            to the body, normalised channel by channel and resampled where  `Predictor.regions`
            training did so (`datamodules.preparation`); z-scored over
            voxels that are not zero by default. Channels that the client
            lacks are zero. A 2-D model sees the axial slices with any
            voxel that is not zero, whole or by windows, with their
            neighbours as channels where training did so; a 3-D model sees
            windows of the training patches' size, blended by a Gaussian,
            and a smaller volume is padded with zeros. Logits are
            interpolated back to the scan's own grid.
pictures    Resampled by the scale of training, each channel normalised     `load_picture`
            by itself over the whole picture; windows of the training       `load_picture`
            patches' size; probabilities resampled to the picture's size.
ct_patches  Axes right to left, front to back, foot to head; a patch whose  `samples`
            centre is the candidate's voxel, air beyond the border,
            resampled where training was; HU clipped to the window and
            scaled to [-1, 1].
images      Resized and converted where training did so; 0 to white         `samples`
            becomes -1 to 1.
table       Features by name; the training rows' minimum and maximum        `samples`
            become -1 and 1, beyond them values are clipped; missing cells
            become 0, with indicators where training had them.
==========  ==============================================================  ======================

A simulated scanner (``partition=site_effect``) is part of the training data, not of this list.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from medfed.common.console import say
from medfed.common.errors import ConfigError
from medfed.config.compose import build
from medfed.config.sections import Section
from medfed.delivery.bundle.bundle import read_bundle
from medfed.delivery.bundle.scripts.samples import (
    ScanCandidates,
    read_rows,
    rows_of_image,
    save_images,
    save_rows,
)
from medfed.delivery.bundle.scripts.scans import find_images
from medfed.delivery.predict.options import PredictOptions, attempt, check_place, table_path

if TYPE_CHECKING:
    from medfed.delivery.predict.committee import Committee


def predict(config: Section, console: Console | None = None) -> None:
    """Predicts what the configuration asks for, and prints what was written.

    Args:
        config: The composed ``configs/predict.yaml``.
        console: Where to print; standard output by default.

    Raises:
        MedfedError: If a value, the bundle or an input cannot be used.
    """
    for key in ("bundle", "input", "output"):
        if config[key] == "???":
            raise ConfigError(
                f"{key} is not set: medfed predict bundle=DIR input=FILE output=FILE."
            )
    options: PredictOptions = build(config)
    console = console or Console()
    check_place(options)
    bundles = [read_bundle(folder) for folder in options.bundles]
    # Imported here, so that errors in options or bundles are reported at once.
    from medfed.delivery.predict.committee import make_committee

    committee = make_committee(bundles, options)
    kind = committee.first.facts["input"]["kind"]
    if options.candidates is not None and kind != "ct_patches":
        raise ConfigError("candidates is for models of CT patches; this one takes others.")
    if kind in ("pictures", "volumes"):
        from medfed.delivery.predict.cases import segment_cases
        from medfed.delivery.predict.masks import picture_cases, scan_cases

        if kind == "pictures":
            cases, unit, what = picture_cases(committee), "percent", "pictures"
        else:
            cases, unit, what = scan_cases(committee), "ml", "scans"
        segment_cases(cases, committee, bundles, unit, what, console)
        return
    for key in ("probabilities", "picture", "uncertainty"):
        if getattr(options, key):
            raise ConfigError(f"{key}=true is for segmentation; this model writes a table.")
    if options.format is not None:
        raise ConfigError("format is for masks of scans; this model writes a table: leave it out.")
    kinds = {"ct_patches": predict_candidates, "images": predict_images, "table": predict_table}
    written = kinds[kind](committee)
    what = "Predictions" if bundles[0].facts["task"] == "regression" else "Probabilities"
    say(console, f"{what}: {written}")


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
