"""Counts what every client has before training, and which samples occur twice.

``medfed train``, ``medfed prepare show=true`` and ``medfed site check`` print the table. A run
folder has it as ``cohort.json``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor, arange

from medfed.common.console import Table, say, short, wide_console
from medfed.common.scores import span
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.client_data import ClientData
from medfed.datamodules.duplicates import Duplicates, find_duplicates
from medfed.datamodules.plans import ClientPlan
from medfed.datamodules.readers.base import Account, Patient
from medfed.datamodules.readers.samples import is_survival
from medfed.datamodules.scanner import UNCHANGED, Scanner
from medfed.datamodules.splits import SPLITS, Split
from medfed.functional.survival import kaplan_meier
from medfed.records.places import Places
from medfed.standalone.errors import DataError, few
from medfed.standalone.files import digest

_COUNTS = ("patients", "train / val / test", "samples")
_COLUMNS = 6  # classes with a column each; more share one column
FILE = str(Places.cohort_json)
_log = logging.getLogger(__name__)
_LINES = 12  # clients with a line each


Floats = NDArray[np.float64]
Pools = Mapping[str | None, Floats]


@dataclass(frozen=True)
class Look:
    """What one client has."""

    patients: int  # number of patients that it uses
    # Number of patients to choose from: those of the hospitals that its patients come from, or all
    # if a hospital is not known.
    of: int
    samples: int | None  # samples that it uses (rows, images, patches); None for volumes
    samples_of: int | None  # number of samples of its patients, if known before reading
    splits: dict[str, int]  # patients per split
    removed: list[str]  # channels that the data have but it lacks
    # Share of each class among the samples of the patients to choose from, in the order of the
    # data; empty without classes.
    before: list[float]
    # The same among the samples that it uses. For segmentations: share of each region among the
    # voxels of training patches. For findings: among the known. For outcomes: mean. For boxes:
    # lesions per scan.
    after: list[float]
    missing: dict[str, list[str]]  # classes without a sample, per split that has any sample
    notes: list[str]  # other differences from the original data
    # The labels that it annotates; None if every client annotates all.
    annotated: list[str] | None = None


def kind_of(client: ClientData) -> str:
    """What its labels are: classes, findings, regions, boxes, an outcome or survival."""
    label = client.train["label"]
    if len(label.shape) > 2:
        return "boxes" if len(label.shape) == 3 else "regions"
    labels = _array(label)
    if labels.ndim == 2:
        return "survival" if is_survival(labels) else "findings"
    return "outcome" if labels.dtype.kind == "f" else "classes"


def names_of(data: FederatedDataModule, kind: str) -> Sequence[str]:
    """The names that the shares of patients are of."""
    return ("no event", "event") if kind == "survival" else data.class_names


def _array(label: Any) -> NDArray[Any]:
    """Labels of a block, which are read if they are not in memory."""
    read: Tensor = label if isinstance(label, Tensor) else label.take(arange(label.shape[0]))
    return read.numpy()


def _by_class(labels: NDArray[Any], kind: str, classes: int) -> Floats:
    """(N, K) labels: 1, 0 or NaN where it is not known; the number itself of an outcome."""
    if kind == "findings":
        return labels.astype(np.float64)
    if kind == "outcome":
        return labels[:, None].astype(np.float64)
    one_hot: Floats = np.eye(classes)[(labels[:, 1] if kind == "survival" else labels).astype(int)]
    return one_hot


def sums(patients: Sequence[Patient], classes: int) -> Floats:
    """(1 + K) patients, and their samples of each class; NaN if a label is not known.

    Example:
        >>> sums([Patient("a", label=1), Patient("b", counts=(2, 1))], 2).tolist()
        [2.0, 2.0, 2.0]
    """
    if any(p.label is None and p.counts is None for p in patients):
        return np.array([len(patients), *[np.nan] * classes])
    counts = [p.class_counts(classes) for p in patients]
    return np.array([len(patients), *np.sum([[0] * classes, *counts], axis=0)], dtype=np.float64)


def shares(counts: Floats) -> list[float]:
    """Divides the counts of classes by their sum; nothing if there is none, or one is unknown."""
    total = counts.sum()
    return (counts / total).tolist() if total > 0 else []


def looked(data: FederatedDataModule, clients: Mapping[str, ClientData]) -> dict[str, Look]:
    """Counts what every client has; `clients` are all, also those that are kept out."""
    by_centre: dict[str | None, list[Patient]] = {}
    for patient in data.patients.values():
        by_centre.setdefault(patient.centre, []).append(patient)
    count = len(names_of(data, kind_of(next(iter(clients.values())))))
    pools = {centre: sums(of, count) for centre, of in by_centre.items()}
    inputs, plans = data.plan_names, data.plans.items()
    return {name: _look(data, inputs, clients[name], plan, pools) for name, plan in plans}


def _look(
    data: FederatedDataModule,
    inputs: Sequence[str],
    client: ClientData,
    plan: ClientPlan,
    pools: Pools,
) -> Look:
    """What one client has; ``pools`` are the `sums` of each centre."""
    kind = kind_of(client)
    names = names_of(data, kind)
    every = [data.patients[i] for ids in plan.patients.values() for i in ids]
    centres = {p.centre for p in every}
    pool = np.sum([pools[c] for c in (pools if None in centres else centres)], axis=0)
    chosen, outlined = sums(every, len(names)), plan.annotated or names
    counts = {s: _counts(client, s, kind, len(names)) for s in SPLITS}
    if plan.label_order is not None:  # back to the order of the data
        counts = {s: of[:, list(plan.label_order)] for s, of in counts.items()}
    have, known = counts["train"] if kind == "regions" else np.sum([*counts.values()], axis=0)
    whole, after = kind not in ("regions", "boxes"), (have / np.maximum(known, 1)).tolist()
    after = [float(chosen[1:].sum() / len(every))] if kind == "boxes" else after
    return Look(
        patients=len(every),
        of=int(pool[0]),
        samples=sum(len(_labels(client, s)) for s in SPLITS) if whole else None,
        samples_of=int(np.nan_to_num(chosen[1:].sum())) or None,
        splits={split: len(plan.patients[split]) for split in SPLITS},
        removed=[n for n, has in zip(inputs, plan.channels, strict=True) if not has],
        before=shares(pool[1:]),
        after=after,
        missing={
            split: [n for n, c in zip(names, of[0], strict=True) if not c and n in outlined]
            for split, of in counts.items()
            if kind != "outcome" and of.any()
        },
        notes=list(_notes(data, client, plan, kind)),
        annotated=None if plan.annotated is None else list(plan.annotated),
    )


def _labels(client: ClientData, split: Split) -> NDArray[Any]:
    """All labels of a split, other than regions and boxes."""
    blocks = [client.train] if split == "train" else client.evaluation[split]
    first = _array(client.train["label"])[:0]
    return np.concatenate([first, *(_array(block["label"]) for block in blocks)])


def _counts(client: ClientData, split: Split, kind: str, classes: int) -> Floats:
    """(2, K) samples of each class, or voxels of each region, and of how many that are known."""
    counts = np.zeros((2, classes))
    if kind == "regions" and split == "train":
        counts[0], shape = client.label_counts[1:], client.train["label"].shape
        counts[1] = np.prod([shape[0], *shape[2:]])
    elif kind == "regions" and isinstance(read := client.evaluation[split], list):
        for block in read:  # blocks on demand would have to be read
            counts[0] += block["label"].bool().transpose(0, 1).flatten(1).sum(1).numpy()
    elif kind not in ("regions", "boxes"):
        labels = _by_class(_labels(client, split), kind, classes)
        counts[:] = np.nansum(labels, axis=0), (~np.isnan(labels)).sum(axis=0)
    return counts


def changes_text(scanner: Scanner | None) -> str:
    """Lists the settings of a scanner that change images.

    Example:
        >>> changes_text(Scanner("a", 0, gamma=1.3, noise=0.125)), changes_text(None)
        ('gamma 1.3, noise 0.12', '')
    """
    settings = {} if scanner is None else scanner.record()
    changes = {k: v for k, v in settings.items() if v != UNCHANGED.get(k, v)}
    return ", ".join(f"{name} {value:.2g}" for name, value in changes.items())


def _notes(
    data: FederatedDataModule, client: ClientData, plan: ClientPlan, kind: str
) -> Iterator[str]:
    if client.id in data.kept_out:
        yield "joins after training"
    if kind == "survival":
        time, event = np.concatenate([_labels(client, split) for split in SPLITS]).T
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
    if (plan := getattr(data.agreed, "plan", None)) is None:
        return
    module = cast(Any, data)
    sizes = " × ".join(map(str, plan.patch_size)), " × ".join(f"{mm:.3g}" for mm in plan.spacing)
    say(
        wide_console(),
        f"By nnU-Net's rules the clients agreed on {plan.configuration}"
        + f", ResEnc {plan.residual}" * bool(plan.residual)
        + f": {len(plan.features)} stages, patches of {sizes[0]} voxels of {sizes[1]} mm, batches "
        f"of {plan.batch_size}, {', '.join(rule.name for rule in module.preparation.rules)}. "
        f"{Places.plan_json} has all of it (hash {digest(plan.record())[:12]}).",
    )
    chosen = {**module.fixed, **({"normalize": module.normalize} if module.normalize else {})}
    set_by_user = [f"data.{name}={value}" for name, value in chosen.items()]
    if network not in ("PlannedUNet", "ResidualEncoderUNet"):
        set_by_user.append(f"the network {network}")
    if set_by_user:
        say(wide_console(), f"Set by you, not planned: {', '.join(set_by_user)}.")


def _table(cohort: CohortRecord) -> Table:
    title, share = _prevalence(cohort)
    names = dict(zip(cohort.clients, map(short, cohort.clients), strict=True))
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
        title = "lesions per scan" if kind == "boxes" else f"mean {short(names[0])}"
        return title, lambda _, after: f"{after[0]:.4g}" if after else ""
    if kind != "regions" and len(names) > _COLUMNS:
        return kind, lambda before, after: f"{np.count_nonzero(after or before)} of {len(names)}"
    two = kind in ("classes", "survival") and len(names) == 2
    chosen = slice(1, None) if two else slice(None)

    def share(before: list[float], after: list[float]) -> str:
        texts = [" / ".join(f"{100 * x:.1f}" for x in part[chosen]) for part in (before, after)]
        return " → ".join(dict.fromkeys(f"{text} %" for text in texts if text))

    title = "share of voxels in patches:" if kind == "regions" else "share of"
    return f"{title} {' / '.join(map(short, names[chosen]))}", share


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
    if notes := [f"{short(name)} ({'; '.join(what)})" for name, what in odd.items() if what]:
        yield f"{len(notes)} lack channels, classes or patients, or have a note: {few(notes, 5)}."
    yield f"{FILE} lists every client."
