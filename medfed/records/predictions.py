"""One predicted slice of every client, kept by runs for pictures that compare methods."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from medfed.common.files import atomic
from medfed.common.untrusted import reading
from medfed.records.folder import RunFolder

if TYPE_CHECKING:
    from torch import Tensor

    from medfed.models.contours import Case


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


def read_predictions(method: str, folder: Path, clients: Sequence[str]) -> dict[str, Case]:
    """Reads the predicted slices of a run.

    Args:
        method: The name of its method.
        folder: The run folder.
        clients: All clients of the run.

    Returns:
        Per client the image, its truth, the method's probabilities, and the channels' names.
    """
    files = RunFolder(folder).files("predictions", clients).items()
    saved_slices = sorted((path.stem, c, path) for c, path in files if path.is_file())
    if not saved_slices:
        return {}
    import torch  # late, as Matplotlib: tables of finished runs need neither

    from medfed.models.contours import Case

    cases: dict[str, Case] = {}
    for _, client, path in saved_slices:
        with reading(path), np.load(path, allow_pickle=False) as saved:
            keys = ("image", "truth", "probability")
            image, truth, prob = (torch.from_numpy(saved[k]).float() for k in keys)
            names = tuple(saved["channels"].tolist() if "channels" in saved else ())
        cases[client] = Case(image, truth, {method: prob}, names)
    return cases
