"""medfed: personalized federated learning for medical imaging.

``medfed.train("experiment=digits_pfednet", rounds=2)`` runs what ``medfed train`` runs, and
``medfed.federate(...)`` federates an algorithm over clients and a network of your own.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medfed.api import federate, train
    from medfed.federation.reference import ArrayClient, Federated, Hospital
    from medfed.records.folder import Run

__version__ = "0.2.0"
__all__ = ["ArrayClient", "Federated", "Hospital", "Run", "federate", "train"]
# Found when they are asked for, so that `import medfed` loads no library.
_HOMES = {
    "ArrayClient": "medfed.federation.reference",
    "Federated": "medfed.federation.reference",
    "Hospital": "medfed.federation.reference",
    "Run": "medfed.records.folder",
    "federate": "medfed.api",
    "train": "medfed.api",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        with warnings.catch_warnings():
            # In a notebook without ipywidgets, tqdm warns of a bar that is never shown.
            warnings.filterwarnings("ignore", message="IProgress not found")
            return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'medfed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
