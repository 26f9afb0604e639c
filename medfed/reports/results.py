"""What a finished run reports: tables, files, pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from medfed.federation.callbacks.evaluation import Record, smaller_is_better
from medfed.federation.collect import gather_named, rank
from medfed.federation.module import FederatedModule
from medfed.models.pictures import slice_with_most
from medfed.models.task import TaskModule
from medfed.reports.membership_pictures import membership_figures
from medfed.reports.memberships import Memberships, membership_line
from medfed.reports.pictures import draw_run, save_figures
from medfed.run_folder import (
    federation_statistics,
    metrics_csv,
    save_centers,
    save_models,
    write_json,
    write_text,
)
from medfed.tracking import close, log_figures

if TYPE_CHECKING:
    from medfed.experiment import Experiment


def write_hashes(module: FederatedModule, folder: Path) -> dict[str, str]:
    """Writes the hashes of all states after the last round; a collective call."""
    own = module.federation.digests()
    raw = {k: v.encode() for k, v in own.items() if k.removeprefix("client/") in module.owned}
    hashes = {"server": own["server"]}
    gathered = gather_named(raw, module.device)
    hashes |= {f"client/{c}": gathered[f"client/{c}"].decode() for c in module.federation.ids}
    if rank() == 0:
        write_json(folder / "hashes.json", hashes)
    return hashes


def write(experiment: Experiment, memberships: Tensor | None = None) -> dict[str, Any]:
    """Writes models, metrics, ledger, summary and pictures; a collective call.

    Args:
        experiment: The finished run.
        memberships: (R + 1, N, K) memberships in canonical models over rounds, if there are any.

    Returns:
        The summary.
    """
    module, folder = experiment.module, experiment.folder
    federation = module.federation
    save_models(folder, {c: federation.personal_model(c) for c in module.owned})
    save_centers(folder, {c: federation.centers(c) for c in module.owned})
    save_predictions(module, experiment.task, folder)
    steps = module.gather_steps()
    experiment.trainer.strategy.barrier("results")
    best = experiment.evaluation.best_round()
    federation.count_delivery(module.next_round)
    summary = summarise(experiment, best, {c: steps[c] for c in federation.ids})
    if rank() == 0:
        test = [Record(best or 0, c, m) for c, m in experiment.evaluation.test.items()]
        write_text(folder / "metrics.csv", metrics_csv(experiment.evaluation.history, test))
        write_text(folder / "ledger.csv", federation.ledger.to_csv())
        figures = {}
        if memberships is not None:
            # The start stands before the rounds.
            selected = None if best is None else best + 1
            found = Memberships.of(experiment.data, memberships, selected)
            summary["memberships"] = found.summary()
            write_text(folder / "memberships.csv", found.to_csv())
            figures = membership_figures(found)
        write_json(folder / "summary.json", summary)
        pictures = draw_run(experiment) | save_figures(folder / "pictures", figures)
        log_figures(experiment.trainer.logger, pictures)
        close(experiment.trainer.logger)
        print_summary(summary, folder)
    return summary


def summarise(experiment: Experiment, best: int | None, steps: dict[str, int]) -> dict[str, Any]:
    """Returns what ``summary.json`` holds, in a form that survives JSON."""
    test = experiment.evaluation.test
    names = list(next(iter(test.values())))
    ledger = experiment.module.federation.ledger
    return {
        "name": experiment.config.name,
        "algorithm": type(experiment.module.federation.algorithm).__name__.lower(),
        "selection": list(experiment.task.selection),
        "selected_round": best,
        "rounds": experiment.module.next_round,
        "clients": dict(test),
        "federation": {
            n: federation_statistics([m[n] for m in test.values()], smaller_is_better(n))
            for n in names
        },
        "bytes": {d: ledger.total(direction=d) for d in ("up", "down")},
        "bytes_by_part": {
            f"{d}/{p}": b for (d, p), b in ledger.totals("direction", "part").items()
        },
        "savings": {
            **{d: ledger.savings(direction=d) for d in ("up", "down")},
            "both": ledger.savings(),
        },
        "savings_by_part": {
            f"{d}/{p}": ledger.savings(direction=d, part=p)
            for d, p in ledger.totals("direction", "part")
        },
        "bytes_by_client": {
            c: {d: ledger.total(client=c, direction=d) for d in ("up", "down")} for c in test
        },
        "steps": steps,
    }


def print_summary(summary: dict[str, Any], folder: Path, console: Console | None = None) -> None:
    """Prints the test metrics per client and for the federation, and what travelled."""
    console = console or wide_console()
    columns = [n for n in next(iter(summary["clients"].values())) if "/" not in n]
    table = Table(
        title=f"{summary['name']}, {summary['algorithm']}: {summary.get('split', 'test')} metrics "
        f"of round {(summary['selected_round'] or 0) + 1} of {summary['rounds']} "
        f"(selected by validation {summary['selection'][0]})"
    )
    for name in ("client", *columns, "steps", "up", "down"):
        table.add_column(name, justify="left" if name == "client" else "right")
    for client, metrics in summary["clients"].items():
        sent = summary["bytes_by_client"][client]
        table.add_row(
            client,
            *(f"{metrics[n]:.4f}" for n in columns),
            str(summary["steps"][client]),
            size(sent["up"]),
            size(sent["down"]),
        )
    table.add_section()
    for row in ("mean", "sd", "worst"):
        values = [f"{summary['federation'][n][row]:.4f}" for n in columns]
        total = [size(summary["bytes"][d]) for d in ("up", "down")] if row == "mean" else ["", ""]
        table.add_row(row, *values, "", *total)
    console.print(table)
    console.print(sent_line(summary), highlight=False)
    if "memberships" in summary:
        console.print(membership_line(summary["memberships"]), highlight=False)
    console.print(f"Results and pictures: {folder}", soft_wrap=True, highlight=False)


def sent_line(summary: dict[str, Any]) -> str:
    """Says what travelled, and how many times less that is than with fp32.

    Example:
        >>> sent = {"bytes": {"up": 1_000_000, "down": 0}, "savings": {"up": 31.96, "down": 1.0}}
        >>> sent_line(sent)
        'Sent up 1.0 MB (32.0x less than fp32), down 0 B.'
    """
    parts = []
    for direction, count in summary["bytes"].items():
        factor = summary["savings"][direction]
        note = f" ({factor:.1f}x less than fp32)" if round(factor, 1) != 1 else ""
        parts.append(f"{direction} {size(count)}{note}")
    return f"Sent {', '.join(parts)}."


def wide_console() -> Console:
    """Returns a console that does not squeeze tables where there is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def size(count: int) -> str:
    """Returns a number of bytes as people write it.

    Example:
        >>> size(512), size(2_500_000)
        ('512 B', '2.5 MB')
    """
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def save_predictions(module: FederatedModule, task: TaskModule, folder: Path) -> None:
    """Writes one test slice per client with its prediction, for pictures that compare methods.

    Only tasks that label every pixel have something to show.
    """
    for client in module.owned:
        module.local.load(module.federation.personal_model(client))
        batch = next(iter(module.federation.clients[client].data.eval_batches("test")))
        if batch["label"].ndim < 4:
            return
        image, label = batch["image"], batch["label"]
        if label.ndim == 5:  # volumes: their axial slices
            image, label = (t[0].permute(3, 0, 1, 2) for t in (image, label))
            volume = task.predict({k: v[:1] for k, v in batch.items()})
            index = slice_with_most(label)
            probability = volume[0].permute(3, 0, 1, 2)[index]
        else:
            index = slice_with_most(label)
            probability = task.predict({k: v[index : index + 1] for k, v in batch.items()})[0]
        path = folder / "predictions" / f"{client}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(
            path,
            image=image[index].cpu().numpy(),
            truth=label[index].to(torch.uint8).cpu().numpy(),
            probability=probability.float().cpu().numpy(),
        )


def load_summary(folder: Path) -> dict[str, Any]:
    """Reads the summary of a finished run."""
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary
