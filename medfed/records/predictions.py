"""One predicted slice of every client, kept by runs for pictures that compare methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
