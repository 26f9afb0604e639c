"""What ``scripts/predict.py`` does: a hospital's own model on its scans, images or rows.

Nothing of the bundle is executed: the network is built from the plain data of its metadata, and
scans are read by the functions that read the training data. What training does to an input, and
where it is done here:

==========  ==============================================================  ======================
Kind        What happens between the file and the network                   Read by
==========  ==============================================================  ======================
volumes     Axes towards right, anterior, superior (``load_ras``; nothing   `scans.read_scan`,
            is resampled or cropped). Each channel z-scored over its        `Predictor.regions`
            voxels that are not zero; zero stays zero. Channels that the
            client lacks are zero. A 2-D model sees the axial slices with
            any voxel that is not zero, whole and without padding; a 3-D
            model sees windows of the training patches' size, blended by a
            Gaussian, and a smaller volume is padded with zeros.
ct_patches  Axes right to left, front to back, foot to head; a patch whose  `candidates`
            centre is the candidate's voxel, air beyond the border,
            resampled where training was; HU clipped to the window and
            scaled to [-1, 1].
images      Resized and converted where training did so; 0 to white         `samples.read_pixels`
            becomes -1 to 1.
table       Features by name; the training rows' minimum and maximum        `samples.predict_table`
            become -1 and 1, beyond them values are clipped; missing cells
            become 0, with indicators where training had them.
==========  ==============================================================  ======================

A simulated scanner (``partition=site_effect``) is part of the training data, not of this list.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from medfed.config import build
from medfed.delivery.bundle import read_bundle
from medfed.delivery.candidates import predict_candidates
from medfed.delivery.predictor import Predictor, make_predictor
from medfed.delivery.request import Request
from medfed.delivery.samples import predict_images, predict_table
from medfed.delivery.segmenting import segment_all
from medfed.errors import CheckpointError, ConfigError

_OF_SEGMENTATION = ("probabilities", "picture")


def predict(config: DictConfig, console: Console | None = None) -> None:
    """Predicts what the configuration asks for, and prints what was written.

    Args:
        config: The composed ``configs/predict.yaml``.
        console: Where to print; standard output by default.

    Raises:
        MedfedError: If a value, the bundle or an input cannot be used.
    """
    for key in ("bundle", "input", "output"):
        if OmegaConf.is_missing(config, key):
            raise ConfigError(
                f"{key} is not set: python scripts/predict.py bundle=DIR input=FILE output=FILE."
            )
    request: Request = build(config)
    console = console or Console()
    bundle = read_bundle(Path(request.bundle))
    size, device = request.batch_size, request.device
    predictor = make_predictor(bundle, request.threshold, size, device, request.runtime)
    if request.candidates is not None and predictor.kind != "ct_patches":
        raise ConfigError("candidates is for models of CT patches; this one takes others.")
    if predictor.kind == "volumes":
        segment_all(predictor, request, console)
        return
    for key in _OF_SEGMENTATION:
        if getattr(request, key):
            raise ConfigError(f"{key}=true is for segmentation; this model writes a table.")
    written = _classify(predictor, request)
    what = "Predictions" if bundle.facts["task"] == "regression" else "Probabilities"
    console.print(f"{what}: {written}", highlight=False, soft_wrap=True)


def _classify(predictor: Predictor, request: Request) -> Path:
    if predictor.kind == "ct_patches":
        return predict_candidates(predictor, request)
    if predictor.kind == "images":
        return predict_images(predictor, request)
    if predictor.kind == "table":
        return predict_table(predictor, request)
    raise CheckpointError(
        f"The bundle takes inputs of the kind {predictor.kind}, which this program does not know; "
        "update it."
    )
