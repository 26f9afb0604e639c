"""A hospital's part of a federation, in the process that NVIDIA FLARE starts at that hospital.

It uses two packages that do not know each other: ``sites`` to train, ``delivery`` for bundles.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from nvflare.collab import collab

from medfed.delivery.main import keep_bundle, open_bundle
from medfed.sites import actions


class Hospital:
    """The component that a job names for each site; its file is ``local/medfed.yaml`` in a kit."""

    def __init__(self, agreed: str) -> None:
        self.agreed = agreed
        self._lock = threading.Lock()
        self._answer: Callable[[bytes], bytes] | None = None

    @collab.publish
    def answer(self, request: bytes) -> bytes:
        """Answers like :class:`medfed.sites.site.Site`.

        No exception may leave this function: FLARE would send its text and traceback to the server.
        """
        with self._lock:
            if self._answer is None:
                kit = Path(collab.workspace.get_site_config_dir())
                makers = keep_bundle, open_bundle
                site = actions.start_site(kit, self.agreed, collab.site_name, *makers)
                self._answer = site.answer
        return self._answer(request)
