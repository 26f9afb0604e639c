"""What absent clients keep, in files that are mapped into memory: ten thousand take no more of it.

A file has no name from the moment it is mapped, so that the system frees it with the last tensor or
with the process, however that ends. The numbers are the same to the bit, and loaded when they are
read.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medfed.common.errors import CheckpointError
from medfed.common.tensors import State, map_state

Groups = dict[str, State]


def on_disk(groups: Mapping[str, State], folder: Path) -> Groups:
    """Returns states whose tensors lie in a file without a name.

    Args:
        groups: States by name.
        folder: Where there is room; made where it is not there.

    Returns:
        The same, mapped; or as it was where a tensor is on another device, or there is none.

    Raises:
        CheckpointError: If the file cannot be written.

    Example:
        >>> kept = {"state": {"personal": {"w": torch.arange(3.0)}}}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found = on_disk(kept, Path(folder))
        ...     found["state"]["personal"]["w"], list(Path(folder).iterdir())
        (tensor([0., 1., 2.]), [])
    """
    tensors = [t for state in groups.values() for named in state.values() for t in named.values()]
    if not tensors or any(t.device.type != "cpu" for t in tensors):
        return dict(groups)
    copies = {group: map_state(state, _alone) for group, state in groups.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".states-") as file:
            torch.save(copies, file)
            file.flush()
            found: Groups = torch.load(file.name, mmap=True, weights_only=True, map_location="cpu")
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"What a client keeps cannot be written to {folder} ({error}); make room there, or "
            "raise cohort.memory_gb to keep it in memory."
        ) from error
    return found


def kept_bytes(tensors: Any) -> int:
    """Returns the bytes of tensors.

    Example:
        >>> kept_bytes([torch.zeros(3), torch.zeros(2, dtype=torch.float64)])
        28
    """
    return sum(t.numel() * t.element_size() for t in tensors)


def _alone(tensor: Tensor) -> Tensor:
    """A view into something larger would take that with it."""
    tensor = tensor.detach()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()
