"""Messages: the only objects that cross the boundary between a client and the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from medfed.common.tensors import Tensors

Kind = Literal["state", "update"]
KINDS: tuple[Kind, ...] = ("state", "update")


@dataclass(frozen=True)
class Message:
    """Named parts, each a group of named tensors, and a few scalars.

    Attributes:
        phase: The phase of the round that the message belongs to.
        parts: Part name (``shared``, ``personal``, ``sketch`` ...) to its tensors.
        scalars: Numbers that travel with the tensors.
        kinds: Per part ``state`` (weights) or ``update`` (gradient, displacement); a lossy codec
            encodes an update directly and a state as a difference. The default is ``state``.
            Sending checks the kinds.

    Example:
        >>> import torch
        >>> m = Message("fit", {"shared": {"w": torch.ones(2)}}, kinds={"shared": "update"})
        >>> m.kind("shared")
        'update'
    """

    phase: str = "fit"
    parts: Mapping[str, Tensors] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    kinds: Mapping[str, Kind] = field(default_factory=dict)

    def kind(self, part: str) -> Kind:
        """Returns the declared kind of a part."""
        return self.kinds.get(part, "state")
