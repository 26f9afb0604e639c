"""Seconds per round over mutual TLS, memory of an idle site, against the same rounds in simulation.

*echo*: a server and ``--sites`` sites as processes of this machine by provisioned FLARE kits. A
round sends as many MB to all sites at once and gets them back, over the transport of real runs;
the median of ``--rounds`` after a first one. The same through FLARE's simulator with
``--simulator``. *memory*: resident MB of a site's processes, when idle and during the job.

Needs ``pip install ".[sites]"``. Run with ``python benchmarks/speed/sites.py``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nvflare.collab import collab

from medfed.sites.flare import PREFIXES, write_job
from medfed.sites.flare.components import CollabTransport
from medfed.sites.flare.console import Console
from medfed.standalone.files import write_json
from scripts.local_federation import LocalFederation

OURS = "benchmarks.speed.sites"


class EchoServer:
    """What runs at the server: rounds of so many MB to all sites at once."""

    def __init__(self, out: str, megabytes: list[float], rounds: int) -> None:
        self.out, self.megabytes, self.rounds = out, megabytes, rounds

    @collab.main
    def run(self) -> None:
        """Measures, and writes what it has measured."""
        transport = CollabTransport(collab.clients)
        found: dict[str, Any] = {}
        with ThreadPoolExecutor(len(transport.sites)) as pool:
            for size in self.megabytes:
                data = bytes(round(size * 1e6))
                seconds = []
                for _ in range(1 + self.rounds):
                    start = time.perf_counter()
                    calls = [pool.submit(transport.call, s, data, 600) for s in transport.sites]
                    assert all(len(call.result()) == len(data) for call in calls)
                    seconds.append(time.perf_counter() - start)
                found[f"{size:g}"] = seconds[1:]
        Path(self.out).write_text(json.dumps(found))


class EchoSite:
    """What runs at a site."""

    @collab.publish
    def answer(self, request: bytes) -> bytes:
        """Sends back what it gets."""
        return request


def echo_job(folder: Path, sites: list[str], out: Path, options: argparse.Namespace) -> Path:
    arguments = {"out": str(out), "megabytes": options.megabytes, "rounds": options.rounds}
    write_job(folder, sites, (f"{OURS}.EchoServer", arguments), (f"{OURS}.EchoSite", {}))
    return folder


def report(title: str, out: Path) -> None:
    for size, seconds in json.loads(out.read_text()).items():
        print(f"{title}, {size} MB: {statistics.median(seconds):.2f} s per round", flush=True)


def memory(federation: LocalFederation, site: str) -> str:
    """Resident MB of a site's processes: its own, then those of its jobs."""
    return " + ".join(f"{p.memory_info().rss / 1e6:.0f}" for p in federation.processes(site))


def provisioned(folder: Path, sites: list[str], options: argparse.Namespace) -> None:
    out = folder / "echo.json"
    with LocalFederation(folder / "kits", sites, (*PREFIXES, OURS)) as federation:
        time.sleep(10)
        print(f"an idle site: {memory(federation, sites[0])} MB", flush=True)
        job = echo_job(folder / "echo", sites, out, options)
        status, during = "", ""
        start = time.perf_counter()
        with Console(federation.admin) as console:
            number = console.submit(job)
            while not status.startswith("FINISHED"):
                if (now := console.status(number)) != status:
                    print(f"after {time.perf_counter() - start:.0f} s: {now}", flush=True)
                status, during = now, max(during, memory(federation, sites[0]), key=len)
                time.sleep(1)
        print(f"a site during its job: {during} MB", flush=True)
    report("over mutual TLS", out)


def simulated(folder: Path, sites: list[str], options: argparse.Namespace) -> None:
    out = folder / "simulated.json"
    job = echo_job(folder / "simulated", sites, out, options)
    allowed = {"class_allow_list": [*PREFIXES, OURS]}
    write_json(folder / "simulator" / "local" / "resources.json", allowed)
    command = ["-m", "nvflare.private.fed.app.simulator.simulator", str(job), "-w"]
    more = [str(folder / "simulator"), "-c", ",".join(sites), "-t", str(len(sites))]
    subprocess.run([sys.executable, *command, *more], check=True, capture_output=True)
    report("in FLARE's simulator", out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", type=int, default=5)
    parser.add_argument("--megabytes", type=float, nargs="*", default=[0, 27, 200])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--simulator", action="store_true")
    options = parser.parse_args()
    sites = [f"hospital_{number + 1}" for number in range(options.sites)]
    with tempfile.TemporaryDirectory() as folder:
        provisioned(Path(folder), sites, options)
        if options.simulator:
            simulated(Path(folder), sites, options)


if __name__ == "__main__":
    main()
