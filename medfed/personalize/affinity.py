"""How alike clients are: the weights W of PPFL's Laplacian, from what clients send or given.

Counts and sketches leave their client, so they travel in a message and their bytes are counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from medfed.errors import ConfigError, did_you_mean
from medfed.federation.client import Client
from medfed.federation.tensors import Tensors
from medfed.personalize.functional.membership import cosine_affinity, laplacian
from medfed.personalize.functional.sketches import data_sketch, label_sketch, sketch_vector

KINDS = ("label", "channel", "data", "given")


@dataclass(frozen=True)
class Affinity:
    """Where the weights w_ij between clients come from.

    Attributes:
        kind: Cosine similarity of ``label`` counts, of available ``channel`` s or of ``data``
            sketches (second moments of the inputs), all of training data; or ``given``.
        weights: Of ``given``: a row per client in the order of the clients, or the path of a CSV
            file with them.
        sketch_size: Rows of a data sketch.
        sketch_inputs: Training inputs that a data sketch summarises, at most.

    Raises:
        ConfigError: If the kind is unknown or the weights are missing.
    """

    kind: Literal["label", "channel", "data", "given"] = "label"
    weights: Sequence[Sequence[float]] | str | None = None
    sketch_size: int = 8
    sketch_inputs: int = 256

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(
                f"algorithm.affinity.kind={self.kind!r} is unknown"
                f"{did_you_mean(str(self.kind), KINDS)}; choose one of {', '.join(KINDS)}."
            )
        if (self.kind == "given") != (self.weights is not None):
            raise ConfigError("algorithm.affinity.weights goes with algorithm.affinity.kind=given.")

    @property
    def needs_sketches(self) -> bool:
        """Whether clients must describe themselves before there are weights."""
        return self.kind != "given"

    def describe(self, client: Client) -> Tensors:
        """Returns what a client sends about itself."""
        if self.kind == "label":
            return {"label": label_sketch(client.data.label_counts).float()}
        if self.kind == "channel":
            return {"channel": label_sketch(client.data.channels).float()}
        inputs = client.data.train_inputs(self.sketch_inputs)
        return {"data": data_sketch(inputs, self.sketch_size).to(torch.float32)}

    def laplacian(self, clients: Sequence[str], sketches: Mapping[str, Tensor]) -> Tensor:
        """Returns L = D - W, ``(N, N)`` in float64.

        Args:
            clients: All clients, in order.
            sketches: What clients have sent so far; nothing ties a client that has not.

        Raises:
            ConfigError: If given weights are negative, asymmetric or of another number of clients.
        """
        count = len(clients)
        if self.kind == "given":
            return self._given(count)
        weights = torch.zeros(count, count, dtype=torch.float64)
        known = [i for i, c in enumerate(clients) if c in sketches]
        if known:
            rows = torch.stack([sketch_vector(sketches[clients[i]].cpu()) for i in known])
            # A lossy codec may take a count of 0 below 0. Second moments have any sign.
            cosine = cosine_affinity(rows if self.kind == "data" else rows.clamp(min=0))
            weights[torch.tensor(known).unsqueeze(1), torch.tensor(known)] = cosine
        return laplacian(weights)

    def _given(self, count: int) -> Tensor:
        try:
            rows = (
                np.loadtxt(Path(self.weights), delimiter=",", ndmin=2)
                if isinstance(self.weights, str)
                else np.array(self.weights, dtype=np.float64)
            )
            found = laplacian(torch.as_tensor(rows))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"algorithm.affinity.weights cannot be used: {error}") from error
        if len(found) != count:
            raise ConfigError(
                f"algorithm.affinity.weights has {len(found)} rows for {count} clients; give a row "
                "and a column per client."
            )
        return found
