"""Counts what every client has before training, and which samples occur twice.

``medfed train``, ``medfed prepare show=true`` and ``medfed site check`` print the table. A run
folder has it as ``cohort.json``; ``medfed prepare`` also writes it as CSV.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from medfed.common.console import Table, brief, say, shown, wide_console
from medfed.common.errors import DataError, few
from medfed.common.files import csv_text, digest
from medfed.common.scores import mean_of_known, span
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.client_data import Block, ClientData
from medfed.datamodules.duplicates import Duplicates, find_duplicates
from medfed.datamodules.plans import ClientPlan
from medfed.datamodules.readers.account import Account
from medfed.datamodules.readers.base import Patient
from medfed.datamodules.readers.samples import is_survival
from medfed.datamodules.scanner import UNCHANGED, Scanner
from medfed.datamodules.splits import SPLITS, Split
from medfed.functional.survival import kaplan_meier
from medfed.records.places import Places

_EVENTS = ("no event", "event")
_COLUMNS = 6  # classes with a column each; more share one column


def label_of(block: Block) -> Tensor:
    """Returns the labels of a block; reads them if they are not in memory."""
    label = block["label"]
    return label if isinstance(label, Tensor) else label.take(torch.arange(label.shape[0]))


def changes_text(scanner: Scanner | None) -> str:
    """Lists the settings of a scanner that change images.

    Example:
        >>> changes_text(Scanner("a", 0, gamma=1.3, noise=0.125)), changes_text(None)
        ('gamma 1.3, noise 0.12', '')
    """
    settings = {} if scanner is None else scanner.record()
    changes = {k: v for k, v in settings.items() if v != UNCHANGED.get(k, v)}
    return ", ".join(f"{name} {brief(value)}" for name, value in changes.items())


FILE = str(Places.cohort_json)
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Had:
    """What one client has.

    Attributes:
        patients: Number of patients that it uses.
        of: Number of patients to choose from: those of the hospitals that its patients come from,
            or all if a hospital is not known.
        samples: Samples that it uses (rows, images, patches); None for volumes.
        samples_of: Number of samples of its patients, if known before reading.
        splits: Patients per split.
        removed: Channels that the data have but it lacks.
        before: Share of each class among the samples of the patients to choose from, in the order
            of the data; empty without classes.
        after: The same among the samples that it uses. For segmentations: share of each region
            among the voxels of training patches. For findings: among the known. For outcomes: mean.
            For boxes: lesions per scan.
        missing: Classes without a sample, per split that has any sample.
        notes: Other differences from the original data.
        annotated: The labels that it annotates; None if every client annotates all.
    """

    patients: int
    of: int
    samples: int | None
    samples_of: int | None
    splits: dict[str, int]
    removed: list[str]
    before: list[float]
    after: list[float]
    missing: dict[str, list[str]]
    notes: list[str]
    annotated: list[str] | None = None


@dataclass(frozen=True)
class CohortRecord:
    """What all clients have, and which samples occur twice.

    Attributes:
        clients: Per client, including those that are kept out.
        kind: What `Had.after` counts: ``classes``, ``findings``, ``regions``, ``boxes``,
            ``outcome`` or ``survival``.
        names: Names of the classes or regions, or of the outcome.
        whole: Share of each class among all samples of the data; empty if it is not known.
        used: Number of patients that some client uses.
        patients: Number of all patients.
        remarks: Sentences about how the partition made the clients.
        duplicates: Samples with equal content in two splits or at two clients.
        accounts: What the reader took of files, rows and cells, and left out.
    """

    clients: dict[str, Had]
    kind: str
    names: list[str]
    whole: list[float]
    used: int
    patients: int
    remarks: list[str]
    duplicates: Duplicates
    accounts: Sequence[Account] = ()

    def record(self) -> dict[str, Any]:
        """Returns the content of ``cohort.json``."""
        return {
            "patients": {"used": self.used, "of": self.patients},
            "shares": {"of": self.kind, "names": self.names, "before": self.whole},
            "clients": {name: asdict(had) for name, had in self.clients.items()},
            "remarks": self.remarks,
            "duplicates": self.duplicates.record(),
            "read": [account.record() for account in self.accounts],
        }


def to_csv(cohort: CohortRecord) -> str:
    """Returns a line per client: patients and samples, shares of classes or regions, and notes."""
    what = {"outcome": "mean", "boxes": "per scan"}.get(cohort.kind, "share")
    head = ["client", "patients", "of", *SPLITS, "samples", *(f"{what} {n}" for n in cohort.names)]
    rows = []
    for name, had in cohort.clients.items():
        shares: Sequence[object] = had.after or [""] * len(cohort.names)
        counts = [had.patients, had.of, *(had.splits[s] for s in SPLITS), had.samples]
        notes = "; ".join([*_missing(had), *had.notes])
        annotated = cohort.names if had.annotated is None else had.annotated
        rows.append([name, *counts, *shares, " ".join(had.removed), notes, " ".join(annotated)])
    return csv_text([*head, "channels removed", "notes", "annotated"], rows)


def cohort_record(data: FederatedDataModule) -> CohortRecord:
    """Counts what every client has, and looks for samples that occur twice.

    Args:
        data: A data module, after `setup`. Labels are counted and images hashed; for volumes, the
            hashes of the files are compared.

    Raises:
        DataError: If there are duplicates and ``data.duplicates=error``.
    """
    clients = {**data.clients, **data.kept_out}
    kind = _kind(next(iter(clients.values())))
    names = _EVENTS if kind == "survival" else data.class_names
    of: dict[str | None, list[Patient]] = {}
    for patient in data.patients.values():
        of.setdefault(patient.centre, []).append(patient)
    classes = len(names)
    had = {
        name: _had(data, clients[name], plan, kind, of, names) for name, plan in data.plans.items()
    }
    what, samples = data.contents()
    duplicates = find_duplicates(what, {n: p.patients for n, p in data.plans.items()}, samples)
    if duplicates.groups and getattr(data, "duplicates", "warn") == "error":
        raise DataError(f"{duplicates.sentence()} The run stops because data.duplicates=error.")
    return CohortRecord(
        clients=had,
        kind=kind,
        names=list(names),
        whole=_shares(_counted(list(data.patients.values()), classes)),
        used=sum(h.patients for h in had.values()),
        patients=len(data.patients),
        remarks=list(data.remarks),
        duplicates=duplicates,
        accounts=data.accounts,
    )


def _kind(client: ClientData) -> str:
    if len(shape := client.train["label"].shape) > 1:
        if len(shape) == 2:
            return "survival" if is_survival(label_of(client.train).numpy()) else "findings"
        return "boxes" if len(shape) == 3 else "regions"
    return "outcome" if label_of(client.train).is_floating_point() else "classes"


def _had(
    data: FederatedDataModule,
    client: ClientData,
    plan: ClientPlan,
    kind: str,
    of: Mapping[str | None, Sequence[Patient]],
    names: Sequence[str],
) -> Had:
    """What one client has; ``of`` are the patients of each centre."""
    every, classes = [data.patients[i] for ids in plan.patients.values() for i in ids], len(names)
    centres = {p.centre for p in every}
    known = data.patients.values() if None in centres else [p for c in centres for p in of[c]]
    pool, outlined = list(known), plan.annotated or names
    labels, counts = _labels(client, kind, classes)
    if plan.label_order is not None:  # back to the order of the data
        counts = {s: of[list(plan.label_order)] for s, of in counts.items() if len(of)}
    return Had(
        patients=len(every),
        of=len(pool),
        samples=None if labels is None else len(labels),
        samples_of=int(sum(_counted(every, classes))) or None,
        splits={split: len(plan.patients[split]) for split in SPLITS},
        removed=[n for n, has in zip(data.plan_names, plan.channels, strict=True) if not has],
        before=_shares(_counted(pool, classes)),
        after=_after(client, kind, every, labels, counts),
        missing={
            split: [n for n, c in zip(names, some, strict=True) if not c and n in outlined]
            for split, some in counts.items()
            if kind != "outcome" and some.any()
        },
        notes=list(_notes(data, client, plan, labels if kind == "survival" else None)),
        annotated=None if plan.annotated is None else list(plan.annotated),
    )


def _labels(client: ClientData, kind: str, classes: int) -> tuple[Floats | None, dict[str, Floats]]:
    """All labels of a client, and of each split the samples per class, or voxels per region.

    Volumes have no labels here, and no counts where that needed reading them.
    """
    blocks: dict[Split, Iterable[Block]] = {"train": [client.train], **client.evaluation}
    counts: dict[str, Floats] = dict.fromkeys(SPLITS, np.empty(0))
    if kind == "regions":
        counts["train"] = client.label_counts[1:].numpy().astype(np.float64)
        for split in SPLITS[1:]:
            if isinstance(block := blocks[split], list):
                sums = [label_of(b).bool().transpose(0, 1).flatten(1).sum(1) for b in block]
                counts[split] = np.sum([np.zeros(classes), *(of.numpy() for of in sums)], axis=0)
    if kind in ("regions", "boxes"):
        return None, counts
    labels = {s: [label_of(b).numpy() for b in blocks[s]] for s in SPLITS}
    joined = {s: np.concatenate(of) for s, of in labels.items() if of}
    for split, of in joined.items():
        if kind == "findings":
            count = (of == 1).sum(0)
        elif kind == "outcome":
            count = np.array([len(of)])
        else:
            column = of[:, 1] if kind == "survival" else of
            count = np.bincount(column.astype(int), minlength=classes)
        counts[split] = count.astype(np.float64)
    return np.concatenate(list(joined.values())), counts


def _after(
    client: ClientData,
    kind: str,
    patients: Sequence[Patient],
    labels: Floats | None,
    counts: Mapping[str, Floats],
) -> list[float]:
    """See `Had.after`."""
    if kind == "boxes":
        return [float(np.mean([sum(p.counts or ()) for p in patients]))]
    if labels is None:
        shape = client.train["label"].shape
        return [*map(float, counts["train"] / float(np.prod([shape[0], *shape[2:]])))]
    if kind == "findings":
        return [*map(float, np.nan_to_num(mean_of_known(labels, 0)))]
    if kind == "outcome":
        return [float(np.mean(labels))]
    return _shares(np.sum([of for of in counts.values() if len(of)], axis=0))


def _counted(patients: Sequence[Patient], num_classes: int) -> Floats:
    """(K,) samples per class in the original data; zeros if a label is not known."""
    if any(p.label is None and p.counts is None for p in patients):
        return np.zeros(num_classes)
    total: Floats = np.sum([p.class_counts(num_classes) for p in patients], axis=0, dtype=float)
    return total


def _shares(counts: Floats) -> list[float]:
    total = counts.sum()
    return (counts / total).tolist() if total else []


def _notes(
    data: FederatedDataModule, client: ClientData, plan: ClientPlan, survival: Floats | None
) -> Iterator[str]:
    if client.id in data.kept_out:
        yield "joins after training"
    if survival is not None:
        time, event = survival.T
        times, _, curve = kaplan_meier(time, event, np.ones((1, len(time))), of_censoring=True)
        median = times[curve[0] <= 0.5]
        often = f"{median[0]:.4g}" if len(median) else f"above {time.max():.4g}"
        yield f"{int(event.sum())} events, median follow-up {often}"
    if len(plan.patients["train"]) == 1:
        yield "trains on one patient"
    if changes := changes_text(plan.scanner):
        yield f"scanner: {changes}"
    if plan.label_order is not None:
        yield "labels renamed"
    yield from (f"{name} in {has} of {of} cases" for name, (has, of) in plan.partial.items())


_log = logging.getLogger(__name__)
_LINES = 12  # clients with a line each


def print_cohort(cohort: CohortRecord, console: Console | None = None, lines: int = _LINES) -> None:
    """Prints a line per client (for many clients, their range) and warnings.

    Args:
        cohort: What the clients have.
        lines: How many clients have a line each, at most.
        console: The console; None is the terminal.
    """
    console = console or wide_console()
    had = cohort.clients
    if len(had) <= lines:
        console.print(_table(cohort))
    else:
        say(console, *_ranges(cohort))
    if lines_below := [*(account.sentence() for account in cohort.accounts), *cohort.remarks]:
        say(console, *lines_below)
    if cohort.used < cohort.patients:
        left = cohort.patients - cohort.used
        left_out = f"{left:,} of the {cohort.patients:,} patients"
        say(console, f"{left_out} belong to no client and are not used.")
    if sentence := cohort.duplicates.sentence():
        _log.warning("%s %s lists all of them.", sentence, FILE)


def print_plan(data: FederatedDataModule, network: str) -> None:
    """Prints the plan on which the clients of segmentation agreed, if they did.

    Args:
        data: After `setup`.
        network: The name of the network's class.
    """
    if (agreed := getattr(data, "agreed", None)) is None:
        return
    console, plan = wide_console(), agreed.plan
    rows = {
        "configuration": plan.configuration + f", ResEnc {plan.residual}" * bool(plan.residual),
        "spacing": " × ".join(f"{mm:.3g}" for mm in plan.spacing) + " mm",
        "patch": " × ".join(map(str, plan.patch_size)),
        "batch": str(plan.batch_size),
        "strides": ", ".join("×".join(map(str, one)) for one in plan.strides),
        "kernels": ", ".join("×".join(map(str, one)) for one in plan.kernel_sizes),
        "features": ", ".join(map(str, plan.features)),
        "grey values": ", ".join(rule.name for rule in data.preparation.rules),  # type: ignore[attr-defined]
        "hash": digest(plan.record())[:12],
    }
    table = Table("plan", "on which the clients agreed", title="nnU-Net's rules")
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    set_by_user = [f"data.{name}={value}" for name, value in data.given.items()]  # type: ignore[attr-defined]
    if data.normalize is not None:  # type: ignore[attr-defined]
        set_by_user.append(f"data.normalize={data.normalize}")  # type: ignore[attr-defined]
    if network not in ("PlannedUNet", "ResidualEncoderUNet"):
        set_by_user.append(f"the network {network}")
    if set_by_user:
        say(console, f"Set by you, not planned: {', '.join(set_by_user)}.")


def _table(cohort: CohortRecord) -> Table:
    title, share = _prevalence(cohort)
    rows = {
        name: {
            "client": shown(name),
            "patients": f"{h.patients:,} of {h.of:,}",
            "train / val / test": " / ".join(f"{n:,}" for n in h.splits.values()),
            "samples": _thinned(h),
            "channels removed": ", ".join(h.removed),
            "annotated": ", ".join(h.annotated or []),
            title: share(h.before, h.after),
            "note": "; ".join([*_missing(h), *h.notes]),
        }
        for name, h in cohort.clients.items()
    }
    splits = [sum(h.splits[s] for h in cohort.clients.values()) for s in SPLITS]
    whole = {
        "client": "all",
        "patients": f"{cohort.used:,} of {cohort.patients:,}",
        "train / val / test": " / ".join(f"{n:,}" for n in splits),
        title: share(cohort.whole, []),
    }
    # Empty columns are left out.
    columns = [c for c in next(iter(rows.values())) if any(row[c] for row in rows.values())]
    table = Table(title="Before training")
    for column in columns:
        right = column in ("patients", "train / val / test", "samples")
        table.add_column(column, justify="right" if right else "left", no_wrap=right)
    for row in rows.values():
        table.add_row(*(row[c] for c in columns))
    table.add_section()
    table.add_row(*(whole.get(c, "") for c in columns))
    return table


def _prevalence(cohort: CohortRecord) -> tuple[str, Callable[[list[float], list[float]], str]]:
    """The title of the column, and a function that writes the shares before and after."""
    names, kind = cohort.names, cohort.kind
    if kind == "boxes":
        return "lesions per scan", lambda _, after: brief(after[0]) if after else ""
    if kind == "outcome":
        return f"mean {shown(names[0])}", lambda _, after: f"{after[0]:.4g}" if after else ""
    if kind != "regions" and len(names) > _COLUMNS:
        return kind, lambda before, after: f"{np.count_nonzero(after or before)} of {len(names)}"
    two = kind in ("classes", "survival") and len(names) == 2
    chosen = slice(1, None) if two else slice(None)

    def share(before: list[float], after: list[float]) -> str:
        texts = [" / ".join(f"{100 * x:.1f}" for x in part[chosen]) for part in (before, after)]
        return " → ".join(dict.fromkeys(f"{text} %" for text in texts if text))

    title = "share of voxels in patches:" if kind == "regions" else "share of"
    return f"{title} {' / '.join(map(shown, names[chosen]))}", share


def _thinned(had: Had) -> str:
    if had.samples is None or had.samples_of is None or had.samples == had.samples_of:
        return ""
    return f"{had.samples:,} of {had.samples_of:,}"


def _missing(had: Had) -> Iterator[str]:
    """What a client lacks in all splits, and in single ones."""
    empty = [split for split in SPLITS if not had.splits[split]]
    if empty:
        yield f"no patient in {', '.join(empty)}"
    gaps = list(had.missing.values())
    nowhere = [name for name in (gaps[0] if gaps else []) if all(name in m for m in gaps)]
    if nowhere:
        yield f"no {few(nowhere, 3)}"
    for split, names in had.missing.items():
        if here := [name for name in names if name not in nowhere]:
            yield f"{split}: no {few(here, 3)}"


def _ranges(cohort: CohortRecord) -> Iterator[str]:
    """The content of the table in sentences, for many clients."""
    had = list(cohort.clients.values())
    counts = {"each": [h.patients for h in had]}
    counts |= {f"in {s}": [h.splits[s] for h in had] for s in SPLITS}
    ranges = ", ".join(f"{span(of)} {where}" for where, of in counts.items())
    yield f"{len(had)} clients have {cohort.used:,} of {cohort.patients:,} patients, {ranges}."
    title, shown = _prevalence(cohort)
    if all(h.after for h in had):
        order = sorted((h.after for h in had), key=lambda after: after[-1])
        low, high, whole = (shown([], of) for of in (order[0], order[-1], cohort.whole))
        yield f"{title}: from {low} to {high}; in the whole data: {whole}."
    for what, has in (
        ("lack channels", lambda h: h.removed),
        ("have simulated scanners, renamed labels or another note", lambda h: h.notes),
        ("lack a class or all patients in some split", lambda h: list(_missing(h))),
    ):
        if names := [name for name, h in cohort.clients.items() if has(h)]:
            yield f"{len(names)} {what}: {few(names, 5)}."
    yield f"{FILE} lists every client."
