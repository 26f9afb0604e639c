"""Sites in this process; every message crosses as bytes."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from medfed.sites.wire import Answers, Silent


class Direct:
    """Passes requests on; implements :class:`medfed.sites.wire.Transport`.

    Args:
        sites: The sites by name; one may be replaced or removed.
    """

    def __init__(self, sites: Mapping[str, Answers]) -> None:
        self.sites = dict(sites)
        self._lock = threading.Lock()  # one site at a time

    def call(self, site: str, request: bytes, timeout: float) -> bytes:
        """Sends a request; it does not wait."""
        if site not in self.sites:
            raise Silent
        with self._lock:
            return bytes(self.sites[site].answer(bytes(request)))
