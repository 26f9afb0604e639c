"""Four hospitals and a server on this machine, with faults: does it equal the simulation?

Each is a process of its own, by a kit of NVIDIA FLARE with its own certificate, and talks over
mutual TLS; pFedNet trains across them by ``medfed deploy``. After two rounds a hospital is killed
and started again, and two rounds after the run has gone on, the server. Then the same experiment
runs as a simulation, in one process and without faults, and both must have left the same bytes.

``--data FOLDER`` with the four files of UCI Heart Disease gives each hospital its own file and
nothing else; otherwise the patients are scikit-learn's, cut into four. ``make federation`` installs
what is needed and runs it. Everything lies in ``--out``; ports are chosen among free ones, and all
processes are ended, whatever happens.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from local_federation import SERVER, LocalFederation  # type: ignore[import-not-found]  # next to it

from medfed.common.processes import ended_by_signals
from medfed.common.scores import rounded
from medfed.sites.agreement import Agreed
from medfed.sites.deploying import Deployment, Follower
from medfed.standalone.errors import MedfedError

ROOT = Path(__file__).resolve().parents[1]
HEART = ("cleveland", "hungarian", "switzerland", "va")
CUT = tuple(f"hospital_{number}" for number in range(4))
EQUAL = ("hashes.json", "metrics.csv", "ledger.csv")
KILLED = 2  # rounds of a job after which the next one is killed


@dataclass
class Faults:
    """Listens to the run, and kills: a hospital, and when the run goes on, the server.

    Attributes:
        federation: The processes.
        hospital: Who is killed first.
        killed: Who was killed so far.
        rounds: Of the present job.
    """

    federation: LocalFederation
    hospital: str
    killed: list[str] = field(default_factory=list)
    rounds: int = 0

    def __call__(self, line: str) -> None:
        """Shows a line of the run, and acts on it."""
        say(f"  {line}")
        if line.startswith("FLARE's job has ended"):
            self.rounds = 0
        self.rounds += line.startswith("round ")
        left = [name for name in (self.hospital, SERVER) if name not in self.killed]
        if left and self.rounds == KILLED:
            self.rounds += 1  # one in each job
            self.killed.append(left[0])
            self.federation.kill(left[0])
            say(f"* {left[0]} and its part of the job are killed, and started again.")
            self.federation.start(left[0])


def say(line: str) -> None:
    """Prints a line at once."""
    print(line, flush=True)


def overrides(data: Path | None, rounds: int) -> list[str]:
    """What is agreed: the experiment, as ``medfed train`` takes it."""
    if data is not None:
        return ["experiment=heart_pfednet", "data.scaling=client", f"rounds={rounds}"]
    return ["experiment=clinical_pfednet", "partition.num_clients=4", f"rounds={rounds}"]


def across(out: Path, sites: Sequence[str], data: Path | None, typed: Sequence[str]) -> list[str]:
    """Runs across the sites; returns who was killed on the way."""
    with LocalFederation(out / "kits", sites) as federation:
        for site in sites:
            own = {}
            if data is not None:
                place = out / "hospitals" / site
                place.mkdir(parents=True)
                shutil.copy(data / f"processed.{site}.data", place)
                own = {"data": {"path": str(place), "reader": {"centres": [site]}}}
            federation.write_site(site, **own)
        agreed, _, _ = Agreed.of(typed, sites, cut=data is None)
        deployment = Deployment("federation", agreed.record(), str((out / "federation").resolve()))
        faults = Faults(federation, sites[1])
        Follower(deployment, federation.admin, look=3.0, say=faults).run()
        return faults.killed


def simulate(out: Path, data: Path | None, typed: Sequence[str]) -> None:
    """Runs the same experiment in one process."""
    more = [f"data.path={data}"] if data is not None else []
    command = [*typed, *more, f"hydra.run.dir={out / 'simulation'}", "progress=false"]
    subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "train.py"), *command],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def differing(out: Path) -> list[str]:
    """Names what the two runs have not left alike, but for what stays with each site."""
    one, other = out / "federation", out / "simulation"
    return [name for name in EQUAL if _shared(one / name) != _shared(other / name)]


def _shared(path: Path) -> list[bytes]:
    """Returns the lines of a file without the last digits of metrics."""
    lines = path.read_bytes().splitlines()
    if path.name != "metrics.csv":
        return lines
    cells = [line.split(b",") for line in lines]
    return [b"%r" % [*c[:3], *(_digits(value) for value in c[3:])] for c in cells]


def _digits(value: bytes) -> object:
    try:
        return rounded(float(value))
    except ValueError:  # a name, or undefined
        return value


def demonstrate(out: Path, data: Path | None, rounds: int) -> bool:
    """Runs both, compares them, and says what came of it."""
    sites, typed = (CUT if data is None else HEART), overrides(data, rounds)
    patients = (
        "scikit-learn's breast cancer, cut into four" if data is None else "UCI heart disease"
    )
    say(f"A server and {', '.join(sites)}, each a process with its own kit; {patients}.")
    start = time.monotonic()
    killed = across(out, sites, data, typed)
    say(f"Finished over mutual TLS after {time.monotonic() - start:.0f} s. Now the simulation.")
    simulate(out, data, typed)
    wrong = differing(out)
    if len(killed) < 2:
        say(f"VERDICT: nothing is shown, as only {killed} was killed; take more --rounds.")
        return False
    if wrong:
        say(f"VERDICT: different from the simulation in {', '.join(wrong)}; see {out}.")
        return False
    say(
        f"VERDICT: the same. {killed[0]} and the server were killed on the way, and {rounds} "
        f"rounds across four hospitals left the very {', '.join(EQUAL)} of the simulation; metrics "
        "to the four digits that leave a hospital."
    )
    return True


def main() -> None:
    """Runs the demonstration; the exit status is the verdict."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="the folder of UCI Heart Disease")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("outputs/federation"))
    options = parser.parse_args()
    if options.data and (
        lacking := [s for s in HEART if not (options.data / f"processed.{s}.data").is_file()]
    ):
        parser.error(f"{options.data} lacks processed.{lacking[0]}.data")
    shutil.rmtree(options.out, ignore_errors=True)
    with ended_by_signals():
        try:
            same = demonstrate(options.out.resolve(), options.data, options.rounds)
        except (MedfedError, subprocess.CalledProcessError) as error:
            say(f"VERDICT: it could not be carried out: {error}")
            same = False
    sys.exit(not same)


if __name__ == "__main__":
    main()
