"""Counts what every client has before training, and which samples occur twice.

``medfed train``, ``medfed prepare show=true`` and ``medfed site check`` print the table. A run
folder has it as ``cohort.json``; ``medfed prepare`` also writes it as CSV.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
from rich.console import Console

from medfed.common.console import Table, say, shown, wide_console
from medfed.common.scores import span
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.duplicates import Duplicates, find_duplicates
from medfed.datamodules.look import Look, kind_of, looked, names_of, shares, sums
from medfed.datamodules.readers.account import Account
from medfed.datamodules.splits import SPLITS
from medfed.records.places import Places
from medfed.standalone.errors import DataError, few
from medfed.standalone.files import digest

_COUNTS = ("patients", "train / val / test", "samples")
_COLUMNS = 6  # classes with a column each; more share one column
FILE = str(Places.cohort_json)
_log = logging.getLogger(__name__)
_LINES = 12  # clients with a line each


@dataclass(frozen=True)
class CohortRecord:
    """What all clients have, and which samples occur twice."""

    clients: dict[str, Look]  # per client, including those that are kept out
    # What `Look.after` counts: ``classes``, ``findings``, ``regions``, ``boxes``, ``outcome`` or
    # ``survival``.
    kind: str
    names: list[str]  # names of the classes or regions, or of the outcome
    # Share of each class among all samples of the data; empty if it is not known.
    whole: list[float]
    used: int  # number of patients that some client uses
    patients: int  # number of all patients
    remarks: list[str]  # sentences about how the partition made the clients
    duplicates: Duplicates  # samples with equal content in two splits or at two clients
    accounts: Sequence[Account] = ()  # what the reader took of files, rows and cells, and left out

    def record(self) -> dict[str, Any]:
        """Returns the content of ``cohort.json``."""
        return {
            "patients": {"used": self.used, "of": self.patients},
            "shares": {"of": self.kind, "names": self.names, "before": self.whole},
            "clients": {name: asdict(look) for name, look in self.clients.items()},
            "remarks": self.remarks,
            "duplicates": self.duplicates.record(),
            "read": [account.record() for account in self.accounts],
        }


def cohort_record(data: FederatedDataModule) -> CohortRecord:
    """Counts what every client has, after `setup`, and looks for samples that occur twice."""
    clients = {**data.clients, **data.kept_out}
    kind = kind_of(next(iter(clients.values())))
    names = names_of(data, kind)
    looks, whole = looked(data, clients), sums([*data.patients.values()], len(names))
    what, samples = data.contents()
    duplicates = find_duplicates(what, {n: p.patients for n, p in data.plans.items()}, samples)
    if duplicates.groups and getattr(data, "duplicates", "warn") == "error":
        raise DataError(f"{duplicates.sentence()} The run stops because data.duplicates=error.")
    return CohortRecord(
        clients=looks,
        kind=kind,
        names=list(names),
        whole=shares(whole[1:]),
        used=sum(look.patients for look in looks.values()),
        patients=len(data.patients),
        remarks=list(data.remarks),
        duplicates=duplicates,
        accounts=data.accounts,
    )


def print_cohort(cohort: CohortRecord, console: Console | None = None, lines: int = _LINES) -> None:
    """Prints a line per client (for many clients, their range) and warnings."""
    console = console or wide_console()
    if len(cohort.clients) <= lines:
        console.print(_table(cohort))
    else:
        say(console, *_ranges(cohort))
    if lines_below := [*(account.sentence() for account in cohort.accounts), *cohort.remarks]:
        say(console, *lines_below)
    if cohort.used < cohort.patients:
        left = cohort.patients - cohort.used
        left_out = f"{left:,} of the {cohort.patients:,} patients"
        say(console, f"{left_out} belong to no client and are not used.")
    regions = enumerate(cohort.names if cohort.kind == "regions" else [])
    shares_of = [look.after for look in cohort.clients.values()]
    if unseen := [name for k, name in regions if all(of and of[k] == 0 for of in shares_of)]:
        _log.warning("No training patch shows %s: check the masks, or data.reader.", few(unseen))
    if sentence := cohort.duplicates.sentence():
        _log.warning("%s %s lists all of them.", sentence, FILE)


def print_plan(data: FederatedDataModule, network: str) -> None:
    """Prints the plan on which the clients of segmentation agreed, if they did."""
    if (agreed := getattr(data, "agreed", None)) is None:
        return
    plan, module = agreed.plan, cast(Any, data)
    sizes = " × ".join(map(str, plan.patch_size)), " × ".join(f"{mm:.3g}" for mm in plan.spacing)
    say(
        wide_console(),
        f"By nnU-Net's rules the clients agreed on {plan.configuration}"
        + f", ResEnc {plan.residual}" * bool(plan.residual)
        + f": {len(plan.features)} stages, patches of {sizes[0]} voxels of {sizes[1]} mm, batches "
        f"of {plan.batch_size}, {', '.join(rule.name for rule in module.preparation.rules)}. "
        f"{Places.plan_json} has all of it (hash {digest(plan.record())[:12]}).",
    )
    chosen = {**module.given, **({"normalize": module.normalize} if module.normalize else {})}
    set_by_user = [f"data.{name}={value}" for name, value in chosen.items()]
    if network not in ("PlannedUNet", "ResidualEncoderUNet"):
        set_by_user.append(f"the network {network}")
    if set_by_user:
        say(wide_console(), f"Set by you, not planned: {', '.join(set_by_user)}.")


def _table(cohort: CohortRecord) -> Table:
    title, share = _prevalence(cohort)
    names = dict(zip(cohort.clients, map(shown, cohort.clients), strict=True))
    rows = {
        name: {
            "client": names[name],
            "patients": f"{h.patients:,} of {h.of:,}",
            "train / val / test": " / ".join(f"{n:,}" for n in h.splits.values()),
            "samples": f"{h.samples:,} of {h.samples_of:,}"
            if h.samples and h.samples_of not in (None, h.samples)
            else "",
            "channels removed": ", ".join(h.removed),
            "annotated": ", ".join(h.annotated or []),
            title: share(h.before, h.after),
            "note": "; ".join([*_missing(h), *h.notes]),
        }
        for name, h in cohort.clients.items()
    }
    splits = [sum(h.splits[s] for h in cohort.clients.values()) for s in SPLITS]
    patients = f"{cohort.used:,} of {cohort.patients:,}", " / ".join(f"{n:,}" for n in splits)
    whole = dict(zip(_COUNTS, patients, strict=False)) | {title: share(cohort.whole, [])}
    # Empty columns are left out.
    columns = [c for c in next(iter(rows.values())) if any(row[c] for row in rows.values())]
    table = Table(title="Before training")
    for column in columns:
        right = column in _COUNTS
        table.add_column(column, justify="right" if right else "left", no_wrap=right)
    for row in rows.values():
        table.add_row(*(row[c] for c in columns))
    table.add_section()
    table.add_row("all", *(whole.get(c, "") for c in columns[1:]))
    return table


def _prevalence(cohort: CohortRecord) -> tuple[str, Callable[[list[float], list[float]], str]]:
    """The title of the column, and a function that writes the shares before and after."""
    names, kind = cohort.names, cohort.kind
    if kind in ("boxes", "outcome"):
        title = "lesions per scan" if kind == "boxes" else f"mean {shown(names[0])}"
        return title, lambda _, after: f"{after[0]:.4g}" if after else ""
    if kind != "regions" and len(names) > _COLUMNS:
        return kind, lambda before, after: f"{np.count_nonzero(after or before)} of {len(names)}"
    two = kind in ("classes", "survival") and len(names) == 2
    chosen = slice(1, None) if two else slice(None)

    def share(before: list[float], after: list[float]) -> str:
        texts = [" / ".join(f"{100 * x:.1f}" for x in part[chosen]) for part in (before, after)]
        return " → ".join(dict.fromkeys(f"{text} %" for text in texts if text))

    title = "share of voxels in patches:" if kind == "regions" else "share of"
    return f"{title} {' / '.join(map(shown, names[chosen]))}", share


def _missing(look: Look) -> Iterator[str]:
    """What a client lacks in all splits, and in single ones."""
    empty = [split for split in SPLITS if not look.splits[split]]
    if empty:
        yield f"no patient in {', '.join(empty)}"
    gaps = list(look.missing.values())
    nowhere = [name for name in (gaps[0] if gaps else []) if all(name in m for m in gaps)]
    if nowhere:
        yield f"no {few(nowhere, 3)}"
    for split, names in look.missing.items():
        if here := [name for name in names if name not in nowhere]:
            yield f"{split}: no {few(here, 3)}"


def _ranges(cohort: CohortRecord) -> Iterator[str]:
    """The content of the table in sentences, for many clients."""
    looks = list(cohort.clients.values())
    counts = {"each": [look.patients for look in looks]}
    counts |= {f"in {s}": [look.splits[s] for look in looks] for s in SPLITS}
    ranges = ", ".join(f"{span(of)} {where}" for where, of in counts.items())
    yield f"{len(looks)} clients have {cohort.used:,} of {cohort.patients:,} patients, {ranges}."
    title, share = _prevalence(cohort)
    if all(look.after for look in looks):
        order = sorted((look.after for look in looks), key=lambda after: after[-1])
        low, high, whole = (share([], of) for of in (order[0], order[-1], cohort.whole))
        yield f"{title}: from {low} to {high}; in the whole data: {whole}."
    odd = {n: [*look.removed, *_missing(look), *look.notes] for n, look in cohort.clients.items()}
    if notes := [f"{shown(name)} ({'; '.join(what)})" for name, what in odd.items() if what]:
        yield f"{len(notes)} lack channels, classes or patients, or have a note: {few(notes, 5)}."
    yield f"{FILE} lists every client."
