"""What each client has, in numbers, after the data are read: patients, samples and labels."""

from __future__ import annotations

from torch import Tensor, arange

from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.client_data import ClientData
from medfed.datamodules.extending import *
from medfed.datamodules.plans import ClientPlan
from medfed.datamodules.readers.samples import is_survival
from medfed.datamodules.scanner import UNCHANGED, Scanner
from medfed.functional.survival import kaplan_meier

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
    return {name: _look(data, clients[name], plan, pools) for name, plan in data.plans.items()}


def _look(data: FederatedDataModule, client: ClientData, plan: ClientPlan, pools: Pools) -> Look:
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
        removed=[n for n, has in zip(data.plan_names, plan.channels, strict=True) if not has],
        before=shares(pool[1:]),
        after=after,
        missing={
            split: [n for n, c in zip(names, of[0], strict=True) if not c and n in outlined]
            for split, of in counts.items()
            if kind != "outcome" and of[0].any()
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
