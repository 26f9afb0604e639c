"""What a site can do to the others, by each aggregation: a table of test AUROC.

FedAvg on breast cancer at ``--sites`` hospitals in a simulation, which sites equal to the bit. A
site multiplies its updates, sends 1e30, or claims a million times its samples; the table gives the
mean AUROC of the *other* sites after the last round, so that the selection of a round hides
nothing.

Run with ``python benchmarks/trust/attacks.py``.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import tempfile
from pathlib import Path
from typing import Any

import torch

from medfed.config.compose import described
from medfed.federation.reference import run_reference
from medfed.federation.wire.channel import MessageContext
from medfed.federation.wire.packet import Message
from medfed.run.experiment import build_experiment
from medfed.standalone.errors import MedfedError

ATTACKS = {
    "none": (0, 1.0, 1),
    "updates × −5": (1, -5.0, 1),
    "updates × −20": (1, -20.0, 1),
    "all values 1e30": (1, None, 1),
    "updates × −1, a million times its samples": (1, -1.0, 10**6),
    "two sites: updates × −20": (2, -20.0, 1),
}
"""How many sites attack, the factor of their updates (``None``: they are 1e30), and of samples."""
AGGREGATIONS = {
    "mean": (),
    "clip": ("aggregation=clip",),
    "trimmed": ("aggregation=trimmed",),
    "median": ("aggregation=median",),
    "krum": ("aggregation=krum",),
    "clip, uniform": ("aggregation=clip", "algorithm.weighting=uniform"),
}


def attacked(folder: Path, sites: int, rounds: int, keys: tuple[str, ...], attack: str) -> float:
    """Returns the mean test AUROC of the sites that do not attack."""
    overrides = [
        *("experiment=clinical_pfednet", "algorithm=fedavg", f"partition.num_clients={sites}"),
        *("progress=false", "logger=none", f"rounds={rounds}", f"folder={folder}", *keys),
    ]
    experiment = build_experiment(described(overrides))
    federation, module = experiment.module.federation, experiment.module
    count, factor, samples = ATTACKS[attack]
    bad, known = federation.ids[:count], federation.server["num_samples"]
    federation.server["num_samples"] = {**known, **{c: known[c] * samples for c in bad}}
    encode = federation.channel.encode

    def attacking(message: Message, direction: Any, place: MessageContext, memory: Any) -> Any:
        if direction == "up" and place.client in bad:
            parts = {
                part: {
                    name: torch.full_like(t, 1e30) if factor is None else factor * t
                    for name, t in named.items()
                }
                for part, named in message.parts.items()
            }
            message = dataclasses.replace(message, parts=parts)
        return encode(message, direction, place, memory)

    federation.channel.encode = attacking  # type: ignore[method-assign,assignment]
    run_reference(federation, rounds)
    scores = [module.evaluate_client(c, "test")["auroc"] for c in federation.ids if c not in bad]
    return sum(scores) / len(scores)


def main() -> None:
    """Prints the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--aggregations", nargs="+", choices=AGGREGATIONS, default=[*AGGREGATIONS])
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    print(f"| one of {options.sites} sites sends | {' | '.join(options.aggregations)} |")
    print("|---" * (1 + len(options.aggregations)) + "|")
    for attack in ATTACKS:
        cells = []
        for keys in map(AGGREGATIONS.__getitem__, options.aggregations):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    score = attacked(Path(folder), options.sites, options.rounds, keys, attack)
                    cells.append(f"{score:.2f}")
                except MedfedError as error:
                    cells.append("refused" if "aggregation" in str(error) else "stops")
        print(f"| {attack} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
