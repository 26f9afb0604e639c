"""What a client costs where there are 100, 1,000 and 10,000: CPU time of a round, and memory.

Generated tables of 20 rows and 20 features (``data=mixture``), a tenth of the clients in each round
with 5 steps each, three rounds, all clients evaluated after the last one and tested. Whole runs as
``medfed train`` does them, each in a process of its own, so that the peak of its memory is its own;
``cohort.memory_gb=0`` puts the states of absent clients on disk. Times are CPU time: of a client's
training in a round with all that the round does (server, ledger, checkpoint); of one evaluation;
and of the whole run per client, reading, pictures and intervals included.

Run with ``python benchmarks/speed/scale.py``; ``--clients 100 1000`` takes fewer.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import multiprocessing
import resource
import tempfile
import time
import warnings
from typing import Any

METHODS = ("fedavg", "ditto", "scaffold", "ppfl")
ROUNDS, SHARE = 3, 0.1


def one(method: str, clients: int) -> dict[str, float]:
    """Measures one run in this process."""
    import pytorch_lightning as pl

    from medfed.config.compose import described
    from medfed.federation.lightning.module import FederatedModule
    from medfed.run.train import train

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    spent: dict[str, list[float]] = {"fit": [], "evaluate": []}
    fit, evaluate = pl.Trainer.fit, FederatedModule.evaluate_client

    def timed(function: Any, key: str) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            begin = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent[key].append(time.process_time() - begin)

        return wrapped

    pl.Trainer.fit = timed(fit, "fit")  # type: ignore[method-assign]
    FederatedModule.evaluate_client = timed(evaluate, "evaluate")  # type: ignore[method-assign]
    canonical = ["canonical.count=3"] if method == "ppfl" else ["canonical=none"]
    begun = _peak()
    with tempfile.TemporaryDirectory() as folder:
        config = described(
            [
                *("experiment=synthetic_ppfl", f"algorithm={method}", *canonical),
                *(f"rounds={ROUNDS}", f"evaluation.every={ROUNDS}", "local.steps=5"),
                *(f"data.clients={clients}", "data.samples=20", "data.features=20"),
                *(f"cohort.fraction={SHARE}", "cohort.memory_gb=0", "logger=none"),
                *("progress=false", f"folder={folder}/run"),
            ]
        )
        begin = time.process_time()
        with contextlib.redirect_stdout(None):
            train(config)
        whole = time.process_time() - begin
    in_fit = sum(spent["evaluate"][:clients])
    return {
        "round": 1000 * (spent["fit"][0] - in_fit) / (ROUNDS * max(1, round(SHARE * clients))),
        "evaluate": 1000 * sum(spent["evaluate"]) / len(spent["evaluate"]),
        "whole": 1000 * whole / clients,
        "peak": _peak(),
        "grown": 1000 * (_peak() - begun) / clients,
    }


def _peak() -> float:
    """Megabytes that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def main() -> None:
    """Prints a row per method and number of clients."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1000, 10000])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    given = parser.parse_args()
    context = multiprocessing.get_context("fork")
    print("ms of CPU: of a client in a round, of an evaluation, of a client in the whole run;")
    print("MB at most; kB per client beyond what was there before")
    heads = ("round", "evaluate", "whole", "peak", "kB")
    print(f"{'method':<10}{'clients':>7}" + "".join(f"{head:>12}" for head in heads))
    for method in given.methods:
        for clients in given.clients:
            with context.Pool(1) as pool:
                row = pool.apply(one, (method, clients))
            print(
                f"{method:<10}{clients:>7}{row['round']:>12.2f}{row['evaluate']:>12.2f}"
                f"{row['whole']:>12.1f}{row['peak']:>12.0f}{row['grown']:>12.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
