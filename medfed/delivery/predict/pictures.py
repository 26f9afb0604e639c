"""Masks of pictures: read as in training, segmented, written as PNG of the picture's own size."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from medfed.common.errors import ConfigError
from medfed.datamodules.readers import pictures
from medfed.delivery.bundle.bundle import Bundle
from medfed.delivery.bundle.scripts.masks import (
    picture_beside,
    picture_files,
    save_picture,
    save_picture_masks,
)
from medfed.delivery.bundle.scripts.predictor import PictureRegions, Predictor, regions_of_picture
from medfed.delivery.bundle.scripts.scans import find_pictures, stem_below
from medfed.delivery.predict.cases import Case, segment_cases
from medfed.delivery.predict.committee import Committee, segmented
from medfed.delivery.predict.options import PredictOptions

log = logging.getLogger(__name__)


def segment_pictures(committee: Committee, bundles: Sequence[Bundle], console: Console) -> None:
    """Segments a picture, or every picture of a folder, one at a time.

    Args:
        committee: Segmentation models of pictures; the options' ``output`` is a PNG file for one
            picture, or a folder.
        bundles: Theirs.
        console: Where the table of shares is printed.

    Raises:
        MedfedError: If nothing can be done, or some pictures could not be segmented.
    """
    if committee.options.format is not None:
        raise ConfigError("format is for masks of scans; those of pictures are PNG: leave it out.")

    def one(case: Case) -> Mapping[str, float]:
        return _segment(committee, case.source, case.base)

    segment_cases(_cases(committee), one, committee, bundles, "percent", "pictures", console)


def _segment(committee: Committee, file: Path, target: Path) -> dict[str, float]:
    """Writes what was asked for; returns the share of every region and more."""
    first, options = committee.first, committee.options
    width, height, color = pictures.picture_header(file)
    seen: list[PictureRegions] = []

    def answer(member: Predictor) -> Tensor:
        if (color, member.facts["input"]["color"]) == ("grey", "rgb"):
            log.warning("%s is grey, but the model was trained on colours.", file)
        seen.append(regions_of_picture(member, file))
        return committee.in_order(member, seen[-1].full, 0)

    decided = segmented(committee, committee.ask(answer))
    target.parent.mkdir(parents=True, exist_ok=True)
    save_picture_masks(first.facts, decided.masks, target)
    maps = {"probability": decided.probabilities} if options.probabilities else {}
    if options.uncertainty and decided.spread is not None:
        maps["uncertainty"] = decided.spread
    for what, shares in maps.items():
        for name, share in zip(first.labels, shares.numpy(), strict=True):
            save_picture(share, picture_beside(target, f"{name}_{what}", ".tif"))
    if options.picture:
        image, small, _ = seen[0]
        if committee.several:
            size = image.shape[2], image.shape[1]
            mean = pictures.upright(pictures.resized(decided.probabilities.numpy(), size))
            small = torch.from_numpy(mean)
        _draw(first, file.stem, image, small, picture_beside(target, "contours"))
    return decided.measured("percent", 100 / (width * height))


def _draw(
    predictor: Predictor, name: str, image: Tensor, probabilities: Tensor, path: Path
) -> None:
    """The contours on every colour, at the size that the network saw."""
    # Imported on first use: most predictions are without pictures.
    from medfed.common.figures import save_figures
    from medfed.models.contours import prediction_row

    figure = prediction_row(
        image[predictor.present],
        predictor.of_regions.outlines(probabilities),
        [c for c in predictor.facts["channels"] if c in predictor.facts["present"]],
        predictor.labels,
        title=name,
        threshold=predictor.of_regions.level,
    )
    save_figures(path.parent, {path.stem: figure})


def _cases(committee: Committee) -> list[Case]:
    """The pictures with all files that are written: the output itself, or in it, by their names."""
    options, first = committee.options, committee.first
    source, output = Path(options.input), Path(options.output)
    files = find_pictures(source, output)
    if not options.into_folder and (source.is_dir() or output.suffix.lower() != ".png"):
        raise ConfigError(
            f"output={output} must be a folder (a name without a suffix), or a .png file where "
            "input is one picture."
        )
    root = source if source.is_dir() else source.parent
    return [_case(first, file, stem_below(file, root, file.stem), options) for file in files]


def _case(first: Predictor, file: Path, name: str, options: PredictOptions) -> Case:
    output = Path(options.output)
    target = output / f"{name}.png" if options.into_folder else output
    maps = [
        picture_beside(target, f"{label}_{what}", ".tif")
        for what in ["probability"] * options.probabilities + ["uncertainty"] * options.uncertainty
        for label in first.labels
    ]
    contours = [picture_beside(target, "contours")] * options.picture
    return Case(
        name, file, lambda: [file], target, (*picture_files(first.facts, target), *maps, *contours)
    )
