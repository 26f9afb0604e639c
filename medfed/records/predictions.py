"""One predicted slice of every client, kept by runs and cells for pictures that compare methods."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from medfed.common.files import atomic
from medfed.common.untrusted import reading
from medfed.records.folder import RunFolder

if TYPE_CHECKING:
    from torch import Tensor

    from medfed.models.contours import Case

SIDE = 128  # pixels of a slice that a cell keeps
Bytes = NDArray[np.uint8]


def save_prediction(
    path: Path, image: Tensor, truth: Tensor, prob: Tensor, channels: Sequence[str]
) -> None:
    """Writes one slice of a client with its prediction, for pictures that compare methods."""
    import torch

    with atomic(path, sync=False) as file:
        np.savez_compressed(
            file,
            image=image.cpu().numpy(),
            truth=truth.to(torch.uint8).cpu().numpy(),
            probability=prob.float().cpu().numpy(),
            channels=np.array(channels, dtype=str),
        )


def read_predictions(folders: Mapping[str, Path], clients: Sequence[str]) -> dict[str, Case]:
    """Reads the predictions of several runs on the same slices.

    Args:
        folders: Method to run folder.
        clients: All clients of the runs.

    Returns:
        Per client the image, its truth, each method's probabilities, and the channels' names.
    """
    saved_slices = [
        (method, client, path)
        for method, folder in folders.items()
        for client, path in sorted(
            RunFolder(folder).files("predictions", clients).items(), key=lambda item: item[1].stem
        )
        if path.is_file()
    ]
    if not saved_slices:
        return {}
    import torch  # late, as Matplotlib: tables of finished runs need neither

    from medfed.models.contours import Case

    cases: dict[str, Case] = {}
    for method, client, path in saved_slices:
        with reading(path), np.load(path, allow_pickle=False) as saved:
            keys = ("image", "truth", "probability")
            image, truth, prob = (torch.from_numpy(saved[k]).float() for k in keys)
            names = tuple(saved["channels"].tolist() if "channels" in saved else ())
        known = cases.get(client, Case(image, truth, {}, names))
        if torch.equal(known.truth, truth):
            probabilities = {**known.probabilities, method: prob}
            cases[client] = known._replace(probabilities=probabilities)
    return cases


def packed(case: Case) -> dict[str, Any]:
    """Returns a slice as a cell keeps it: one channel around the truth, a byte for each value.

    Args:
        case: A slice with one prediction, called ``own``.
    """
    truth = case.truth.numpy()
    window = _window(np.asarray(truth.any(0)))
    channels = [c for c in case.image.numpy() if c.max() > c.min()] or [case.image.numpy()[0]]
    low, high = np.percentile(channels[0], (1, 99.5))
    grey = np.clip((channels[0] - low) / max(high - low, 1e-6), 0, 1)[window]
    inside = (slice(None), *window)
    return {
        "image": _text((255 * grey)[None]),
        "truth": _text(255 * truth[inside]),
        "probability": _text(255 * case.probabilities["own"].numpy()[inside]),
        "shape": list(grey.shape),
    }


def _window(inside: NDArray[np.bool_]) -> tuple[slice, ...]:
    """At most ``SIDE`` pixels each way, around the middle of what is inside."""
    places = np.argwhere(inside)
    middle = places.mean(0) if len(places) else np.array(inside.shape) / 2
    slices = []
    for size, centre in zip(inside.shape, middle, strict=True):
        start = int(np.clip(round(centre) - SIDE // 2, 0, max(0, size - SIDE)))
        slices.append(slice(start, start + SIDE))
    return tuple(slices)


def _text(values: NDArray[Any]) -> str:
    raw: Bytes = np.rint(values).astype(np.uint8)
    return base64.b64encode(zlib.compress(raw.tobytes(), 9)).decode()


def unpacked(slices: Mapping[str, Mapping[str, Any]], method: str) -> dict[str, Case]:
    """Returns the slices that a cell has kept.

    Args:
        slices: ``clients`` of what :func:`packed` has made.
        method: Whose they are.

    Returns:
        Per client what :func:`medfed.models.contours.contour_grid` draws.
    """
    import torch

    from medfed.models.contours import Case

    def back(text: str, shape: list[int]) -> Tensor:
        raw = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=np.uint8)
        return torch.from_numpy(raw.reshape(-1, *shape).astype(np.float32) / 255)

    return {
        client: Case(
            back(kept["image"], kept["shape"]),
            back(kept["truth"], kept["shape"]),
            {method: back(kept["probability"], kept["shape"])},
        )
        for client, kept in slices.items()
    }
