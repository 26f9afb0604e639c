"""Hands in a job and tells how it ended, in a process of its own: FLARE leaves sockets open.

``python -m tests.sites.hand_in KIT JOB``; ``none`` for the job only tells who is connected.
"""

import json
import sys
import time
from pathlib import Path

from medfed.sites.flare.console import Console


def main() -> None:
    kit, job = sys.argv[1:]
    with Console(Path(kit)) as console:
        if job == "none":
            print(json.dumps(sorted(console.connected())))
            return
        number, status = console.submit(Path(job)), ""
        while not status.startswith("FINISHED"):
            time.sleep(0.3)
            status = console.status(number)
        print(json.dumps([status, console.reason(number)]))


if __name__ == "__main__":
    main()
