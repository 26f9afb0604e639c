"""Where the CPU time of one whole run goes, part by part, imports and pictures included.

The run is one of the demo's (``make demo``): pFedNet, twelve rounds of five hospitals with 20 steps
each, on scans generated beforehand. Clocks of the process' CPU time stand around the functions that
make a part; what is called within is deducted, so that the parts add up to the whole. "Beside
training" is what no training needs: evaluation, intervals, checkpoints, ledger and files, pictures.

Run with ``python benchmarks/whole_run.py``; overrides as of ``medfed train`` follow, among them other
experiments.
"""

from __future__ import annotations

import argparse
import builtins
import functools
import importlib
import io
import logging
import tempfile
import time
import warnings
from collections import defaultdict
from contextlib import redirect_stdout
from typing import Any

RUN = "medfed.run."
LIGHTNING = "medfed.federation.lightning."
PARTS = {
    "configuration": ("medfed.config.compose:load", f"{RUN}experiment:check"),
    "data": (f"{RUN}assembly:read_data", f"{RUN}experiment:cohort_record"),
    "model and first try": (f"{RUN}assembly:task_for", f"{RUN}experiment:federate"),
    "gradient steps": ("medfed.federation.engine.loop:LocalTrainer.run",),
    "messages and server": (
        "medfed.federation.federation:Round.fit",
        "medfed.federation.federation:Round.exchange",
        "medfed.federation.federation:Federation.open",
    ),
    "evaluation": (
        f"{LIGHTNING}module:FederatedModule.evaluate_client",
        f"{LIGHTNING}callbacks:PersonalEvaluation.on_validation_epoch_end",
        f"{LIGHTNING}callbacks:PersonalEvaluation.on_test_epoch_end",
        f"{RUN}train:test_selected",
    ),
    "intervals": (f"{RUN}results:findings",),
    "checkpoints": (
        f"{LIGHTNING}checkpoint:RoundCheckpoint.on_train_epoch_end",
        f"{LIGHTNING}checkpoint:check_federation",
        f"{LIGHTNING}module:FederatedModule.on_load_checkpoint",
        f"{LIGHTNING}checkpoint:is_whole",
    ),
    "ledger and files": (
        f"{LIGHTNING}callbacks:CommunicationLogger.on_train_epoch_end",
        "pytorch_lightning.loggers:CSVLogger.log_metrics",
        "pytorch_lightning.loggers:CSVLogger.save",
        f"{RUN}experiment:RunFolder.open",
        f"{RUN}train:results.write_hashes",
        f"{RUN}train:results.write",
        f"{RUN}results:print_summary",
    ),
    "pictures": (
        f"{RUN}results:save_predictions",
        f"{RUN}pictures:draw_run",
        f"{RUN}results:save_figures",
    ),
}
BESIDE = ("evaluation", "intervals", "checkpoints", "ledger and files", "pictures")
seconds: defaultdict[str, float] = defaultdict(float)
inner = [0.0]


def timed(owner: Any, name: str, part: str) -> None:
    """Puts a clock around a function of a module or class."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        begin = time.process_time()
        inner.append(0.0)
        try:
            return function(*args, **kwargs)
        finally:
            spent = time.process_time() - begin
            seconds[part] += spent - inner.pop()
            inner[-1] += spent

    setattr(owner, name, wrapped)


def clocks() -> None:
    """Puts a clock around every function of PARTS."""
    for part, functions in PARTS.items():
        for where in functions:
            module, _, path = where.partition(":")
            owner: Any = importlib.import_module(module)
            *holders, name = path.split(".")
            for holder in holders:
                owner = getattr(owner, holder)
            timed(owner, name, part)


def main() -> None:
    """Runs, and prints the CPU seconds of every part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("overrides", nargs="*", default=[], help="as of medfed train")
    given = parser.parse_args().overrides
    warnings.simplefilter("ignore")
    timed(builtins, "__import__", "imports")
    timed(importlib, "import_module", "imports")
    from medfed.commands.command_line import loading

    with loading():
        from medfed.config import compose
        from medfed.run import assembly, train

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        chosen = (
            [] if any(o.startswith("experiment=") for o in given) else ["experiment=brats_pfednet"]
        )
        overrides = [*chosen, f"data.root={folder}", "progress=false", *given]
        overrides.append(f"folder={folder}/run")
        # Scans are generated once for all runs of a demo, so that it is no part of this one.
        mark, imported = time.process_time(), seconds["imports"]
        with redirect_stdout(io.StringIO()):
            assembly.read_data(compose.described(overrides))
        generated = time.process_time() - mark - (seconds["imports"] - imported)
        clocks()
        with redirect_stdout(io.StringIO()):
            train.train(compose.described(overrides))
    report(time.process_time() - generated)


def report(whole: float) -> None:
    """Prints every part's share of the whole, what no clock saw among them."""
    seconds["all else (Lightning's loop, building)"] = whole - sum(seconds.values())
    for part, spent in sorted(seconds.items(), key=lambda row: -row[1]):
        print(f"{part:<40}{spent:8.2f} s{spent / whole:8.1%}")
    beside = sum(seconds[part] for part in BESIDE)
    without = whole - seconds["imports"]
    print(f"{'whole':<40}{whole:8.2f} s")
    print(
        f"beside training ({', '.join(BESIDE)}): {beside:.2f} s,\n"
        f"{beside / whole:.1%} of the whole, {beside / without:.1%} of the whole without imports"
    )


if __name__ == "__main__":
    main()
