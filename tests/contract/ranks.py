"""Runs algorithms on one rank of a process group and writes what the rank ended with.

Started as a process per rank by test_ranks.py; all algorithms share the one process group.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore", message=".*LeafSpec.*")

import torch  # noqa: E402

from medfed.federation.lightning import module as runtime  # noqa: E402
from medfed.federation.lightning.collect import rank  # noqa: E402
from medfed.federation.lightning.module import FederatedModule  # noqa: E402
from medfed.federation.lightning.strategy import ClientSharding, assign  # noqa: E402
from tests.contract.harness import half, lightning, lossy  # noqa: E402


def outcome(module: FederatedModule) -> dict[str, Any]:
    """What must not depend on the number of ranks: only this rank's clients are its own."""
    digests = module.federation.digests()
    own = {"server", *(f"client/{c}" for c in module.owned)}
    return {
        "digests": {k: v for k, v in digests.items() if k in own},
        "ledger": module.federation.ledger.to_csv(),
        "spent": {c: [steps, *passes] for c, (steps, passes) in module.spent().items()},
    }


def moving(
    work: Mapping[str, float], ranks: int, owners: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Deals every client to another rank than where it is."""
    if owners is None:
        return assign(work, ranks)
    return {client: (owners[client] + 1) % ranks for client in work}


def main(out: Path, ranks: int, half_of: list[str], all_of: list[str], coded: list[str]) -> None:
    """Runs methods with half cohorts, with all clients and resumed, and with lossy codecs."""
    torch.set_num_threads(1)
    results = {}

    def run(name: str, folder: str = "", **settings: Any) -> tuple[FederatedModule, Any]:
        strategy = ClientSharding(process_group_backend="gloo")
        where = out / name / folder if folder else None
        return lightning(name, where, trainer={"devices": ranks, "strategy": strategy}, **settings)

    def whole(module: FederatedModule, evaluation: Any) -> dict[str, Any]:
        return outcome(module) | {"history": evaluation.history, "losses": evaluation.losses}

    runtime.assign = moving  # type: ignore[attr-defined]
    for name in half_of:
        module, evaluation = run(name, cohort=half())
        first = assign(
            {c: local.expected_work for c, local in module.federation.clients.items()}, 2
        )
        assert module.owners != first, "no client has moved"
        results[f"{name}/half"] = whole(module, evaluation)
    runtime.assign = assign  # type: ignore[attr-defined]
    for name in all_of:
        results[f"{name}/all"] = whole(*run(name, "all", cohort=None))
        begun = out / name / "all" / "round_00001.ckpt"  # the last two are kept
        results[f"{name}/resumed"] = outcome(run(name, "resumed", resume=begun)[0])
    for name in coded:
        begun = out / name / "lossy" / "round_00000.ckpt"
        for label, resume in (("lossy", None), ("lossy resumed", begun)):
            settings = {"rounds": 2, "cohort": half(), "channel": lossy("stc")}
            module, _ = run(name, label, resume=resume, **settings)
            results[f"{name}/{label}"] = outcome(module)
    (out / f"rank{rank()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *(names.split() for names in sys.argv[3:]))
