"""The only thing that crosses the boundary between a client and the server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import safetensors.torch
from torch import Tensor

from medfed.federation.tensors import Tensors

Kind = Literal["state", "update"]
KINDS = ("state", "update")


@dataclass(frozen=True)
class Message:
    """Named parts, each a group of named tensors, and a few scalars.

    Attributes:
        phase: The phase of the round that the message belongs to.
        parts: Part name (``shared``, ``personal``, ``sketch`` ...) to its tensors.
        scalars: Numbers that travel beside the tensors.
        kinds: Per part ``state`` (weights) or ``update`` (gradient, displacement); a lossy
            codec codes an update as it is and a state as a difference. Default ``state``.

    Raises:
        ValueError: If a kind is unknown or names a part that is absent.

    Example:
        >>> import torch
        >>> m = Message("fit", {"shared": {"w": torch.ones(2)}}, kinds={"shared": "update"})
        >>> Message.from_bytes(m.to_bytes()).parts["shared"]["w"]
        tensor([1., 1.])
    """

    phase: str = "fit"
    parts: Mapping[str, Tensors] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    kinds: Mapping[str, Kind] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for part, kind in self.kinds.items():
            if kind not in KINDS or part not in self.parts:
                raise ValueError(
                    f"kinds={{{part!r}: {kind!r}}} needs a part sent and one of {KINDS}."
                )

    def kind(self, part: str) -> Kind:
        """Returns the declared kind of a part."""
        return self.kinds.get(part, "state")

    def to_bytes(self) -> bytes:
        """Returns the whole message as safetensors, losslessly."""
        tensors: dict[str, Tensor] = {}
        layout: dict[str, list[str]] = {}
        for part, named in self.parts.items():
            layout[part] = list(named)
            tensors |= {f"{part}\x1f{n}": t.detach().cpu().contiguous() for n, t in named.items()}
        header = {
            "phase": self.phase,
            "layout": layout,
            "scalars": dict(self.scalars),
            "kinds": dict(self.kinds),
        }
        data: bytes = safetensors.torch.save(
            {k: t.clone() for k, t in tensors.items()}, metadata={"message": json.dumps(header)}
        )
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> Message:
        """Reads what :meth:`to_bytes` wrote."""
        size = int.from_bytes(data[:8], "little")
        header = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["message"])
        tensors = safetensors.torch.load(data)
        parts = {
            part: {n: tensors[f"{part}\x1f{n}"] for n in names}
            for part, names in header["layout"].items()
        }
        return cls(header["phase"], parts, header["scalars"], header["kinds"])
