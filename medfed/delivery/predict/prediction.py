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

A simulated scanner (``partition.scanners``) is part of the training data, not of this list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from medfed.common.console import say
from medfed.common.errors import ConfigError
from medfed.config.compose import build
from medfed.config.sections import Section
from medfed.delivery.bundle.bundle import read_bundle
from medfed.delivery.bundle.scripts.samples import predict_table
from medfed.delivery.predict.options import PredictOptions, attempt, check_place, table_path


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
        from medfed.delivery.predict.masks import mask_cases

        segment_cases(*mask_cases(committee), committee, bundles, console)
        return
    for key in ("probabilities", "picture", "uncertainty"):
        if getattr(options, key):
            raise ConfigError(f"{key}=true is for segmentation; this model writes a table.")
    if options.format is not None:
        raise ConfigError("format is for masks of scans; this model writes a table: leave it out.")
    output = table_path(options)
    candidates = None if options.candidates is None else Path(options.candidates)
    tolerance = options.spacing_tolerance
    predict_table(committee, kind, Path(options.input), output, _each, candidates, tolerance)
    predicts = bundles[0].facts["task"] in ("regression", "survival")
    what = "Predictions" if predicts else "Probabilities"
    say(console, f"{what}: {output}")


def _each(
    items: Sequence[Any], work: Callable[[Any], None], what: str, save: Callable[[], None]
) -> None:
    attempt(items, work, lambda item: Path(item).name, what, save)
