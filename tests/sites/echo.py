"""What an echo job of the tests names."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nvflare.collab import collab

from medfed.sites.flare.components import CollabTransport
from medfed.sites.wire import Silent
from medfed.standalone.files import write_json


class Server:
    """Calls all sites at once, one that is slow, and one that there is not."""

    def __init__(self, out):
        self.out = Path(out)

    @collab.main
    def run(self):
        transport = CollabTransport(collab.clients)
        data = {site: bytes([i]) * (3_000_000 * i) for i, site in enumerate(transport.sites)}
        with ThreadPoolExecutor(8) as pool:
            calls = {c: pool.submit(transport.call, c, d, 60) for c, d in data.items()}
            equal = all(call.result() == data[c] for c, call in calls.items())
        start = time.monotonic()
        found = {"sites": sorted(transport.sites), "equal": equal}
        for name, site in (("slow", transport.sites[0]), ("absent", "nobody")):
            try:
                transport.call(site, b"slow", 1)
            except Silent:
                found[name] = "silent"
        found["seconds"] = time.monotonic() - start
        write_json(self.out, found)


class Site:
    """Sends back what it gets."""

    @collab.publish
    def answer(self, request: bytes) -> bytes:
        if request == b"slow":
            time.sleep(15)  # longer than the call waits, however busy the machine
        return request
