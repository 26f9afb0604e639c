"""Pictures through the network: read, made as small as in training, and written as PNG masks."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn


@torch.no_grad()
def segment_pictures(
    inputs: Sequence[Mapping[str, str]],
    network: nn.Module,
    inferer: Callable[[Tensor, nn.Module], Tensor],
    present: Sequence[int],
    labels: Sequence[str],
    how: Mapping[str, Any],
    output: str,
) -> None:
    """Segments pictures and writes PNG masks of their own sizes.

    A region has one, 0 and 255; exclusive classes share one, with the label values of training. The
    network saw pictures with the first axis to the right and the second upwards.
    """
    device = next(network.parameters()).device
    mask = torch.tensor(present, device=device).reshape(1, -1, 1, 1)
    os.makedirs(output, exist_ok=True)
    for item in inputs:
        with Image.open(item["image"]) as opened:
            picture = ImageOps.exif_transpose(opened)
            pixels, white = _pixels(picture, how["color"])
        small = _resized(pixels, [max(1, round(n * how["scale"])) for n in picture.size])
        if how["normalization"] == "zscore":
            mean, sd = (f(small, axis=(1, 2), keepdims=True) for f in (np.mean, np.std))
            small = (small - mean) / np.where(sd == 0, 1, sd)
        else:
            small = small / white
        image = torch.from_numpy(np.rot90(small, -1, (1, 2)).astype(np.float32).copy())[None]
        logits = inferer(image.to(device) * mask, network)
        scores = logits.sigmoid() if how["codes"] is None else logits.softmax(dim=1)
        found = np.rot90(scores[0].cpu().numpy(), 1, (1, 2))
        stem = os.path.splitext(item["name"])[0].replace(os.sep, "_")
        if how["codes"] is not None:  # exclusive classes, the first is the background
            values = np.array([0, *how["codes"]])[_resized(found, picture.size).argmax(axis=0)]
            kind = np.uint8 if values.max() < 256 else np.uint16
            Image.fromarray(values.astype(kind)).save(os.path.join(output, f"{stem}_pred.png"))
            continue
        for label, values in zip(labels, _resized(found, picture.size), strict=True):
            inside = (values > how["threshold"]).astype(np.uint8) * 255
            Image.fromarray(inside).save(os.path.join(output, f"{stem}_{label}.png"))


def _pixels(picture: Image.Image, color: str) -> tuple[np.ndarray, int]:
    """(C, height, width) values of a picture, and the value of white."""
    if picture.mode.startswith("I") or picture.mode == "F":
        grey = np.asarray(picture).astype(np.float32)
        return np.stack([grey] * (1 if color == "grey" else 3)), 65535
    plain = np.asarray(picture.convert("L" if color == "grey" else "RGB"), dtype=np.float32)
    return np.moveaxis(np.atleast_3d(plain), -1, 0), 255


def _resized(pixels: np.ndarray, size: Sequence[int]) -> np.ndarray:
    """Channels (C, height, width) at another width and height, bilinear and antialiased."""
    parts = (Image.fromarray(np.ascontiguousarray(p, dtype=np.float32)) for p in pixels)
    width, height = size
    bilinear = Image.Resampling.BILINEAR
    return np.stack([np.asarray(p.resize((width, height), bilinear)) for p in parts])
