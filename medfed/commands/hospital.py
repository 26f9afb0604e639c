"""What runs at a hospital: a site of a federation, in the process that NVIDIA FLARE starts there.

It is here as it joins two wings: the site, and the bundle of the model that it has in the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from nvflare.collab import collab

from medfed.delivery.main import keep_bundle
from medfed.sites import actions


class Hospital:
    """The component that a job names for each site; its file is ``local/medfed.yaml`` of its kit.

    Args:
        agreed: What all sites have agreed on, encoded by :mod:`medfed.sites.flare_processes`.
    """

    def __init__(self, agreed: str) -> None:
        self.agreed = agreed
        self._lock = threading.Lock()
        self._answer: Callable[[bytes], bytes] | None = None

    @collab.publish
    def answer(self, request: bytes) -> bytes:
        """Answers as :class:`medfed.sites.site.Site` does.

        Of an exception FLARE would send text and traceback to the server, so none may pass.
        """
        with self._lock:
            if self._answer is None:
                kit = Path(collab.workspace.get_site_config_dir())
                site = actions.start_site(kit, self.agreed, collab.site_name, keep_bundle)
                self._answer = site.answer
        return self._answer(request)
