"""What ``medfed predict`` does: a hospital's own model on its scans, images or rows.

Nothing of the bundle is executed: the network is built from the plain data of its metadata, and
scans are read by the functions that read the training data. What training did to an input is done
again: to volumes by `scans.read_scan` and `Predictor.regions`, to pictures by `load_picture`, to CT
scans by `ct_scans.read_scan` and `Predictor.boxes`, to all others by `samples`.

A simulated scanner (``partition.scanners``) is part of the training data, not of this list.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from medfed.common.console import Terminal, say
from medfed.config.compose import build
from medfed.config.sections import Section
from medfed.delivery.bundle.bundle import Bundle, read_bundle
from medfed.delivery.bundle.onnx_file import ONNX, OnnxNetwork
from medfed.delivery.predict.options import PredictOptions, attempt, check_place, table_path
from medfed.standalone.errors import ConfigError
from medfed.standalone.predictor import Predictor
from medfed.standalone.samples import predict_table


def predict(config: Section, console: Console | None = None) -> None:
    """Predicts what the configuration asks for, and prints what was written."""
    options: PredictOptions = build(config)
    console = console or Terminal()
    check_place(options)
    bundle = read_bundle(Path(options.bundle))
    predictor = make_predictor(bundle, options)
    kind = predictor.facts["input"]["kind"]
    if options.candidates is not None and kind != "ct_patches":
        raise ConfigError("candidates is for models of CT patches; this one takes others.")
    if kind in ("pictures", "volumes"):
        from medfed.delivery.predict.cases import predict_cases
        from medfed.delivery.predict.masks import mask_cases

        predict_cases(*mask_cases(predictor, options), predictor, options, bundle, console)
        return
    for key in ("probabilities", "picture"):
        if getattr(options, key):
            raise ConfigError(f"{key}=true is for segmentation; this model writes a table.")
    if options.format is not None:
        raise ConfigError("format is for masks of scans; this model writes a table: leave it out.")
    if kind == "ct_scans":
        from medfed.delivery.predict.cases import box_cases, predict_cases
        from medfed.standalone.detections import save_detections

        finish = partial(save_detections, folder=Path(options.output))
        predict_cases(*box_cases(predictor, options), predictor, options, bundle, console, finish)
        return
    output = table_path(options)
    candidates = None if options.candidates is None else Path(options.candidates)
    tolerance = options.spacing_tolerance
    each = partial(attempt, name=lambda item: Path(item).name)
    predict_table(predictor, kind, Path(options.input), output, each, candidates, tolerance)
    predicts = bundle.facts["task"] in ("regression", "survival")
    what = "Predictions" if predicts else "Probabilities"
    say(console, f"{what}: {output}")


def network_of(bundle: Bundle, options: PredictOptions) -> nn.Module:
    """Builds what computes the logits of a bundle."""
    name = options.device
    if options.backend == "onnx":
        if name not in (None, "cpu"):
            raise ConfigError(f"backend=onnx runs on the CPU, not on device={name}; leave one out.")
        if ONNX not in bundle.hashes:
            raise ConfigError(
                f"{bundle.folder} holds no {ONNX}; export it with onnx=true, or choose "
                "backend=torch."
            )
        return OnnxNetwork(bundle.folder / ONNX, torch.get_num_threads())
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device={name} cannot be used on this machine; leave it out, or choose cpu."
        ) from error
    return bundle.network().to(device)


def make_predictor(bundle: Bundle, options: PredictOptions) -> Predictor:
    """Builds the network of a bundle, and what its logits mean."""
    if bundle.facts.get("activation") == "softmax" and options.threshold is not None:
        raise ConfigError(
            f"threshold={options.threshold} is for regions that may overlap; this model gives "
            "each voxel to its likeliest class: leave it out."
        )
    settings = options.threshold, options.batch_size, str(bundle.folder)
    return Predictor.of(network_of(bundle, options), bundle.facts, *settings)
