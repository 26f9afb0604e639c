"""Averages of networks with BatchNorm: stale statistics, frequent averages, averaged moments.

Each training is measured twice after its last round: with the statistics that it has gathered
(``kept``), and with statistics of 20 batches of each hospital's own training data
(``reestimated``). Nothing is selected by validation, so both are of the same weights. Metrics at
thresholds that validation chooses (``dice_case/point``) stand beside the others.

    python benchmarks/evidence/normalization.py retina_centres FOLDER --out RESULTS.json
    python benchmarks/evidence/normalization.py lgg FOLDER --out RESULTS.json
    python benchmarks/evidence/normalization.py stroke TABLE --out RESULTS.json
    python benchmarks/evidence/normalization.py drive LIST.csv --out RESULTS.json
    python benchmarks/evidence/normalization.py luna16 --out RESULTS.json     # generated; so brats

LIST.csv is ``images.csv`` of the retinas with the rows of DRIVE alone, dealt to three clinics, or
all of one clinic (``long``).

The settings are those of the suites, and the splits their folds. A training that RESULTS.json holds
is not repeated. ``benchmarks/evidence/evidence.py --collect-normalization`` makes the tables.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml  # type: ignore[import-untyped]

from medfed.config.compose import described
from medfed.federation import aggregation, algorithm
from medfed.run.experiment import build_experiment

ROOT = Path(__file__).resolve().parents[2]
FOLDS = 5
MEAN = "fedavg_mean_of_variances"  # as before medfed pooled the hospitals' variances
OFTEN = ("rounds=24", "local.steps=10")
KEPT = ("local.optimizer_state=kept",)
MOMENTS = ("local.optimizer_state=averaged",)
STROKES = ("rounds=64", "local.steps=2")  # by SGD without momentum, which remembers nothing
IMAGES = {
    "local": ("algorithm=local",),
    "fedavg": ("algorithm=fedavg",),
    "fedbn": ("algorithm=fedbn",),
    MEAN: ("algorithm=fedavg",),
    "fedavg_often": ("algorithm=fedavg", *OFTEN),
    "fedbn_often": ("algorithm=fedbn", *OFTEN),
    "fedavg_often_kept": ("algorithm=fedavg", *OFTEN, *KEPT),
    "fedavg_often_moments": ("algorithm=fedavg", *OFTEN, *MOMENTS),
    "fedbn_often_moments": ("algorithm=fedbn", *OFTEN, *MOMENTS),
}
TABLE = {
    "local": ("algorithm=local",),
    "fedavg": ("algorithm=fedavg",),
    "fedavg_often": ("algorithm=fedavg", *STROKES),
    "pfednet": ("algorithm=pfednet",),
}
DEALT = ("partition=round_robin", "partition.num_clients=3")
# A single clinic with enough steps, as those who compare networks on DRIVE train.
LONG = (
    *("algorithm=local", "partition=round_robin", "partition.num_clients=1", "rounds=50"),
    *("model.network.num_res_units=2", "augment=light", "scheduler=cosine", *KEPT),
)
DRIVE = {
    "local": ("algorithm=local", *DEALT),
    "fedavg": ("algorithm=fedavg", *DEALT),
    "long": LONG,
}
# What pooled variances change, wherever averaged statistics have them.
VARIANCES = {name: IMAGES[name] for name in ("fedavg", MEAN)}
AVERAGED = {name: (*case, "buffers=averaged") for name, case in VARIANCES.items()}
GENERATED = ("luna16", "brats")
UNSEEN = ("partition.patients=[51,119]",)  # hospitals that no suite has
CASES = {
    "retina_centres": IMAGES,
    "lgg": IMAGES,
    "stroke": TABLE,
    "drive": DRIVE,
    "luna16": VARIANCES,
    "brats": AVERAGED,
    "stroke_unseen": {
        name: (*case, *UNSEEN)
        for name, case in {**TABLE, "pfednet": ("algorithm=pfednet",)}.items()
    },
}


def overrides_of(suite: str, data: Path, split: int, more: tuple[str, ...]) -> list[str]:
    """The suite's settings on one fold."""
    name = {"drive": "retina_centres", "stroke_unseen": "stroke"}.get(suite, suite)
    read = yaml.safe_load((ROOT / f"configs/suites/{name}.yaml").read_text("utf-8"))
    again, part = divmod(split, FOLDS)
    fold = (f"data.seed={again}", f"data.fold=[{part},{FOLDS}]", f"data.path={data}")
    kept = [f"seed={split}", "logger=none", "progress=false", "pictures.format=none"]
    kept += [f"data.generated.sample={split + 1}"] if suite in GENERATED else fold
    return [f"experiment={read['experiment']}", *read["overrides"], *kept, *more]


@contextmanager
def mean_of_variances() -> Iterator[None]:
    """Averages running variances as any other entry."""
    with (
        patch.object(aggregation, "second_moments", lambda reply, *_: reply),
        patch.object(aggregation, "pooled_variances", lambda mean, _: mean),
        patch.object(algorithm, "pooled_variances", lambda mean, _: mean),
    ):
        yield


def measured(overrides: list[str]) -> dict[str, Any]:
    """Trains once, and measures every hospital's model of the last round, with both statistics."""
    with tempfile.TemporaryDirectory() as folder:
        config = described([*overrides, f"folder={folder}/run"])
        config = config.replacing({"evaluation.every": config.rounds})
        experiment = build_experiment(config)
        module = experiment.module
        experiment.trainer.fit(module)
        found: dict[str, Any] = {}
        module.eval()
        for statistics in ("kept", "reestimated"):
            module.local.normalization = statistics  # type: ignore[assignment]
            with torch.no_grad():
                found[statistics] = {
                    client: module.evaluate_client(client, "test", keep=True)
                    | module.decide(client)
                    for client in module.federation.ids
                }
    return found


def results(suite: str, data: Path, out: Path, splits: Sequence[int], cases: list[str]) -> None:
    """Adds what is missing to a file."""
    known = json.loads(out.read_text("utf-8")) if out.is_file() else {}
    for split in splits:
        for case in cases or CASES[suite]:
            name = f"{suite}/{case}/{split}"
            if name not in known:
                of_case = CASES[suite][case]
                with mean_of_variances() if case == MEAN else nullcontext():
                    known[name] = measured(overrides_of(suite, data, split, of_case))
                out.write_text(json.dumps(known, indent=1), "utf-8")
                print(name, flush=True)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", choices=CASES)
    parser.add_argument("data", type=Path, nargs="?", default=Path())
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--splits", type=int, nargs="*", default=range(FOLDS))
    parser.add_argument("--cases", nargs="*", default=[])
    options = parser.parse_args()
    results(options.suite, options.data, options.out, options.splits, options.cases)


if __name__ == "__main__":
    main()
