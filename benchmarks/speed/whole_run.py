"""Where the CPU time of one whole run goes, part by part, imports and pictures included.

The run is one of the demo's (``make demo``): pFedNet, twelve rounds of five hospitals with 20 steps
each; the data are generated or read once beforehand. Overrides as of ``medfed train`` follow, among
them other experiments:

    python benchmarks/speed/whole_run.py
    python benchmarks/speed/whole_run.py experiment=clinical_pfednet

A timer interrupts the process after every 2 ms of its CPU time. What it has used since the last
interruption counts for the part of which the innermost function on its stack is one. "Beside
training" is what no training needs: evaluation, checkpoints, files, pictures.
"""

from __future__ import annotations

import argparse
import io
import logging
import signal
import tempfile
import time
import warnings
from collections import defaultdict
from contextlib import redirect_stdout
from types import FrameType

EVERY = 0.002
# Parts by the ends of files, and of functions in them where the file does several things. The
# first that fits a frame counts, and frames are asked from the innermost.
PARTS = (
    (
        "imports",
        ("importlib._bootstrap>", "importlib._bootstrap_external>", "commands/command_line"),
    ),
    ("pictures", ("run/pictures", "common/figures", "matplotlib/", "models/contours")),
    ("evaluation", ("models/meters", "models/inference", "functional/scores", "evaluate_client")),
    ("evaluation", ("models/segmentation_meter", "run/intervals", "evaluated", "run/results")),
    ("checkpoints", ("lightning/checkpoint", "connectors/checkpoint_connector")),
    ("files", ("records/", "common/files", "loggers/csv_logs", "wire/ledger", "run/printed")),
    ("gradient steps", ("federation/engine/",)),
    ("data", ("medfed/datamodules/",)),
    ("messages and server", ("federation/wire/", "medfed/personalize/", "medfed/functional/")),
    ("messages and server", ("federation/federation", "federation/aggregation", "local_client")),
    ("configuration", ("medfed/config/", "/hydra/", "/omegaconf/")),
    ("Lightning", ("/pytorch_lightning/", "/lightning_fabric/", "federation/lightning/")),
    ("building, and all else", ("medfed/run/", "medfed/commands/", "whole_run")),
)
BESIDE = ("evaluation", "checkpoints", "files", "pictures")


class Sampler:
    """Adds the CPU time of this process to the part that it is in."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.mark = time.process_time()
        signal.signal(signal.SIGPROF, self.sample)

    def start(self) -> None:
        """Counts from here on."""
        self.mark = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, EVERY, EVERY)

    def stop(self) -> None:
        """Counts no more."""
        signal.setitimer(signal.ITIMER_PROF, 0)

    def sample(self, _: int, frame: FrameType | None) -> None:
        """Handles the signal."""
        now = time.process_time()
        self.seconds[part_of(frame)] += now - self.mark
        self.mark = now


def part_of(frame: FrameType | None) -> str:
    """Returns the part of the innermost function that belongs to one."""
    while frame is not None:
        place = frame.f_code.co_filename.removesuffix(".py").replace("<frozen ", "")
        for part, ends in PARTS:
            for end in ends:
                if end in place if "/" in end or ">" in end else frame.f_code.co_name == end:
                    return part
        frame = frame.f_back
    return "building, and all else"


def main() -> None:
    """Runs, and prints the CPU seconds of every part."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("overrides", nargs="*", default=[], help="as of medfed train")
    given = parser.parse_args().overrides
    warnings.simplefilter("ignore")
    sampler = Sampler()
    sampler.start()
    from medfed.commands.command_line import loading

    with loading():
        from medfed.config import compose
        from medfed.run import assembly, train

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        if not any(override.startswith("experiment=") for override in given):
            given = ["experiment=brats_pfednet", f"data.root={folder}", *given]
        overrides = [*given, "progress=false", f"folder={folder}/run"]
        sampler.stop()
        with redirect_stdout(io.StringIO()):
            assembly.read_data(compose.described(overrides))
            sampler.start()
            train.train(compose.described(overrides))
            sampler.stop()
    report(sampler.seconds)


def report(seconds: dict[str, float]) -> None:
    """Prints every part's share of the whole."""
    whole = sum(seconds.values())
    for part, spent in sorted(seconds.items(), key=lambda row: -row[1]):
        print(f"{part:<30}{spent:8.2f} s{spent / whole:8.1%}")
    beside = sum(seconds[part] for part in BESIDE)
    without = whole - seconds["imports"]
    print(f"{'whole':<30}{whole:8.2f} s")
    print(
        f"beside training ({', '.join(BESIDE)}): {beside:.2f} s,\n"
        f"{beside / whole:.1%} of the whole, {beside / without:.1%} of the whole without imports"
    )


if __name__ == "__main__":
    main()
