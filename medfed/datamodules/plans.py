"""The plan of every client: all decisions before its data are read.

Clients that join after training are planned here, too, with only a few of their patients.
"""

from __future__ import annotations

from itertools import combinations, compress

import torch
from torch import Tensor

from medfed.datamodules.client_data import ArrayRows, Block, ClientData, Rows, gather, label_counts
from medfed.datamodules.extending import *
from medfed.datamodules.partitions.base import Partition, answer
from medfed.datamodules.scanner import Scanner
from medfed.datamodules.splits import check_leakage, split_patients, warn_small
from medfed.standalone.errors import quoted

_ZEROS = re.compile(r"(?<!\d)(?<!\d\.)0+(?=\d)", re.ASCII)  # that lead a number, not decimals
_WORD = re.compile("[a-z\u00df-\u024f\u0370-\u04ff]{5,}")  # long enough for a slip
_FEW, _TENTH = 5, 0.1  # patients of a hospital whose name may be a slip of another


@dataclass(frozen=True)
class ClientPlan:
    """All decisions of the partition and the split about one client."""

    patients: Mapping[Split, list[str]]  # patient ids per split
    channels: Tensor  # (C,) bool, its channels
    shares: tuple[float, ...] | None = None  # (K,) target class proportions, or None
    scanner: Scanner | None = None  # its scanner, or None
    # (K,) its number for every class or region, or None for the order of the data.
    label_order: tuple[int, ...] | None = None
    # How many of its cases have a channel, and how many cases it has, for each of its channels that
    # some case lacks.
    partial: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    # The labels that its hospital annotates; None if every hospital annotates all.
    annotated: tuple[str, ...] | None = None

    @property
    def every(self) -> list[str]:
        """The patient ids of all splits."""
        return [i for split in SPLITS for i in self.patients[split]]

    def record(self, channel_names: Sequence[str]) -> dict[str, Any]:
        """Returns the facts for the record other than the patients, for JSON."""
        present = zip(channel_names, self.channels.tolist(), strict=True)
        return {
            "channels": [name for name, has in present if has],
            "class_shares": None if self.shares is None else list(self.shares),
            "site": None if self.scanner is None else self.scanner.record(),
            **({} if self.label_order is None else {"label_order": list(self.label_order)}),
            **self.gaps(),
        }

    def gaps(self) -> dict[str, Any]:
        """Returns `partial` (``channels_of_cases``) and `annotated` for records, where known."""
        gaps: dict[str, Any] = {"channels_of_cases": dict(self.partial)} if self.partial else {}
        return gaps if self.annotated is None else {**gaps, "annotated": list(self.annotated)}


Plans = Mapping[str, ClientPlan]
Cases = Mapping[str, Sequence[Patient]]  # of each patient


def by_id(patients: Sequence[Patient]) -> dict[str, Patient]:
    """Returns the patients by their ids."""
    patients_by_id = {p.id: p for p in patients}
    if len(patients_by_id) < len(patients):
        twice = Counter(p.id for p in patients).most_common(1)[0][0]
        raise DataError(f"Patient {twice} is listed twice; patient ids must be unique.")
    places = [str(next(iter(p.files.values()), f"patient {p.id}")) for p in patients]
    same([p.id for p in patients], "The patients' names", places.__getitem__)
    named = [n for n, p in enumerate(patients) if p.centre is not None and not p.invented]
    centres = [str(patients[n].centre) for n in named]
    same(centres, "The hospitals' names", lambda at: places[named[at]])
    return patients_by_id


def plan_clients(
    partition: Partition,
    patients: Mapping[str, Patient],
    names: tuple[Sequence[str], Sequence[str]],
    seed: int,
    fractions: tuple[float, float],
    fold: Sequence[int] | None = None,
    most: int | None = None,
    stratify: bool = True,
) -> dict[str, ClientPlan]:
    """Assigns patients to clients; splits them as the partition, the data, or the seed says."""
    assigned = _assigned(partition, patients, seed)
    clients = list(assigned)
    fixed = answer(partition, "splits", clients)
    official = {p.split for p in patients.values()}
    shares = {s: 0.0 if s in official else f for s, f in zip(SPLITS[1:], fractions, strict=True)}
    splits: dict[str, dict[Split, list[str]]] = {}
    # The seed depends on its name: a client has the same split at its site as in a simulation.
    seeds = {client: derive_seed(seed, client) for client in clients}
    for client, ids in assigned.items():
        if not ids:
            raise DataError(f"Client {client} has no patients; set another partition.")
        # A client in `fixed` is already split; the data may have official splits for others.
        parts = fixed.get(client) or {s: [i for i in ids if patients[i].split == s] for s in SPLITS}
        if client in fixed and {i for part in parts.values() for i in part} != {*ids}:
            what = f"The partition's splits must divide the patients of {client}"
            raise ConfigError(f"{what}, all {len(ids)} and no others, among train, val and test.")
        if client not in fixed and (open_ids := [i for i in ids if patients[i].split is None]):
            labels = {i: patients[i].label for i in ids} if stratify else None
            ends = shares["val"], shares["test"]
            part = None if "test" in official else fold
            new = split_patients(open_ids, *ends, seeds[client], labels, part, most)
            for split in SPLITS:
                parts[split] = sorted(parts[split] + new[split])
        splits[client] = parts
    warn_small(splits)
    check_leakage(splits)
    channels, k = names[0], len(names[1])
    present = answer(partition, "availability", clients, channels, seed, size=len(channels))
    classes_of = answer(partition, "class_shares", clients, k, seed, size=k)
    scanners = answer(partition, "scanners_of", clients, seed)
    orders = answer(partition, "label_orders", clients, k, seed, size=k)
    return {
        c: ClientPlan(splits[c], present[c], classes_of.get(c), scanners.get(c), orders.get(c))
        for c in clients
    }


def _assigned(
    partition: Partition, patients: Mapping[str, Patient], seed: int
) -> dict[str, list[str]]:
    """Returns each client's patients."""
    assignment: Any = partition.assign(list(patients.values()), seed)
    who = f"{type(partition).__name__}.assign"
    if not isinstance(assignment, Mapping) or not assignment:
        raise ConfigError(f"{who} returns {assignment!r:.60}; it must return {{client: [ids]}}.")
    lists = {c: [*ids] if isinstance(ids, Iterable) else [ids] for c, ids in assignment.items()}
    for client, ids in lists.items():
        if odd := [i for i in ids if not (isinstance(i, str) and i in patients)]:
            what = f"{who} gives {client} {odd[0]!r:.60}, which is no patient's id"
            raise ConfigError(f"{what}{did_you_mean(str(odd[0]), patients)}.")
    return {client: [*map(str, ids)] for client, ids in lists.items()}


def match_files(
    plans: Plans, cases: Cases, channels: Names, missing: Missing
) -> dict[str, ClientPlan]:
    """Removes the channels of which a client's training cases have no file.

    Example:
        >>> case = Patient("p", lacks={"T1": "p/T1.nii.gz is missing."})
        >>> plans = {"a": ClientPlan({"train": ["p"]}, torch.tensor([True, True]))}
        >>> match_files(plans, {"p": [case]}, ["FLAIR", "T1"], "zero")["a"].channels.tolist()
        [True, False]
    """
    matched = {}
    for client, plan in plans.items():
        of = {split: [c for i in ids for c in cases[i]] for split, ids in plan.patients.items()}
        every = [case for some in of.values() for case in some]
        lacking = [(c, n) for c in every for n in compress(channels, plan.channels) if n in c.lacks]
        if lacking and missing == "error":
            case, name = lacking[0]
            mend = f"If {client} has no {name} of some cases, set data.reader.missing=zero."
            raise DataError(f"{case.lacks[name]} {mend}")
        present = plan.channels.clone()
        if lacking and of["train"]:
            present &= torch.stack([has_channels(case, channels) for case in of["train"]]).any(0)
        for case in every:
            if not (has_channels(case, channels) & present).any():
                names = ", ".join(compress(channels, present)) or "none"
                what = f"Case {case.id} of client {client} has none of the channels that the client"
                mend = "leave the case out, or give it to another client"
                raise DataError(f"{what} trains with ({names}); {mend}.")
        with_file = {n: sum(n not in c.lacks for c in every) for n in compress(channels, present)}
        partial = {n: (has, len(every)) for n, has in with_file.items() if has < len(every)}
        matched[client] = replace(plan, channels=present, partial=partial)
    return matched


def labels_of_clients(
    plans: Plans, cases: Cases, labels: Names, labels_by_client: Mapping[str, Names]
) -> dict[str, tuple[str, ...]]:
    """Returns the labels that each client annotates.

    Example:
        >>> of = {name: {"train": [name], "val": [], "test": []} for name in "ab"}
        >>> plans = {name: ClientPlan(of[name], torch.tensor([True])) for name in of}
        >>> cases = {"a": [Patient("a", annotated=("liver",))], "b": [Patient("b")]}
        >>> labels_of_clients(plans, cases, ["liver", "spleen"], {})
        {'a': ('liver',), 'b': ('liver', 'spleen')}
    """
    of: dict[str, tuple[str, ...]] = {}
    for client, plan in plans.items():
        if client in labels_by_client:
            named = check_names("label", labels_by_client[client], labels)
            of[client] = tuple(name for name in labels if name in named)
            continue
        every = [case for i in plan.every for case in cases[i]]
        by_labels = {case.annotated or tuple(labels): case.id for case in every}
        if len(by_labels) > 1:
            (one, case), (other, another), *_ = by_labels.items()
            what = f"Client {client} has cases that annotate different labels"
            which = f"{case} {few(one)}, {another} {few(other)}"
            mend = f"or write data.annotated={{{client}: [{', '.join(one)}]}}"
            raise DataError(f"{what}: {which}; give them to different clients, {mend}.")
        (of[client],) = by_labels
    return of


def has_channels(case: Patient, channels: Sequence[str]) -> Tensor:
    """Returns which of the channels a case has, (C,) bool.

    Example:
        >>> has_channels(Patient("p", lacks={"T1": "p/T1.nii.gz is missing."}), ["FLAIR", "T1"])
        tensor([ True, False])
    """
    return torch.tensor([name not in case.lacks for name in channels])


def remarks(partition: Partition, patients: Sequence[Patient]) -> list[str]:
    """Returns remarks about unusual ways in which patients are assigned to clients.

    Example:
        >>> from medfed.datamodules.partitions.by_centre import ByCentre
        >>> remarks(ByCentre(), [Patient("a", centre="x"), Patient("b", centre="y", invented=True)])
        ['The hospitals of 1 of 2 patients are invented: the data name none, and \
data.reader.hospitals cuts the sorted list into blocks.']
    """
    sentences = [sentence] if (sentence := partition.remark(patients)) else []
    if count := sum(p.invented for p in patients):
        what = f"The hospitals of {count} of {len(patients)} patients are invented"
        why = "the data name none, and data.reader.hospitals cuts the sorted list into blocks"
        sentences.append(f"{what}: {why}.")
    return [*sentences, *name_remarks(patients)]


def name_remarks(patients: Sequence[Patient]) -> list[str]:
    """Remarks on names that may be two spellings of one patient, or of one hospital.

    Example:
        >>> name_remarks([Patient("P7", centre="Basel"), Patient("P07", centre="Bassel")])
        ['Patients whose ids differ only in leading zeros count as two: P7 and P07. If they are \
one, write one id.', 'Hospitals whose names differ only in a sign, a leading zero or a letter \
count as two: Basel (1 patient) and Bassel (1). If they are one, write one name.']
    """
    size = Counter(str(p.centre) for p in patients if p.centre is not None and not p.invented)
    ids = [f"{one} and {other}" for one, other in _pairs([p.id for p in patients], _unpadded)]
    hospitals = [
        f"{one} ({size[one]} patient{'s' * (size[one] > 1)}) and {other} ({size[other]})"
        for one, other in _pairs([name for name, _ in size.most_common()], _spellings)
        if _without_signs(one) == _without_signs(other)
        or size[other] <= max(_FEW, _TENTH * size[one])
    ]
    who = ("Patients whose ids differ only in leading zeros", "id", ids)
    where = "Hospitals whose names differ only in a sign, a leading zero or a letter"
    kinds = (who, (where, "name", hospitals))
    text = "{} count as two: {}. If they are one, write one {}."
    return [text.format(what, few(names, 4), word) for what, word, names in kinds if names]


def _pairs(
    names: Iterable[str], spellings: Callable[[str], Collection[str]]
) -> list[tuple[str, str]]:
    """The pairs of different names that have a spelling in common."""
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        for spelled in spellings(name):
            groups.setdefault(spelled, []).append(name)
    return sorted({pair for group in groups.values() for pair in combinations(group, 2)})


def _unpadded(name: str) -> set[str]:
    return {_ZEROS.sub("", name.casefold())}


def _without_signs(name: str) -> str:
    """A name without signs, spaces and leading zeros; of numbers alone the signs stay."""
    (number,) = _unpadded(name)
    bare = re.sub(r"[\W_]+", "", number)
    return number if bare.isdigit() else bare


def _spellings(hospital: str) -> set[str]:
    """How a name may be misspelt: also less a letter of a word, but the last, as in site A, B."""
    key = hospital.casefold()
    places = [at for word in _WORD.finditer(key) for at in range(word.start(), word.end() - 1)]
    return {key, _without_signs(hospital), *(key[:at] + key[at + 1 :] for at in places)}


def check_keep_out(keep_out: Sequence[str], clients: Sequence[str]) -> None:
    """Checks the clients that are kept out of training.

    Example:
        >>> check_keep_out(["b"], ["a", "b"])
        >>> check_keep_out(["a", "b"], ["a", "b"])
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.ConfigError: keep_out names all 2 clients, so no client is left \
to train; name fewer.
    """
    for name in keep_out:
        if name not in clients:
            what = f"keep_out names {name!r}, which is no client{did_you_mean(name, clients)}"
            raise ConfigError(f"{what}; the clients are {few(quoted(clients))}.")
    if len(set(keep_out)) < len(keep_out):
        raise ConfigError(f"keep_out names a client twice: {', '.join(keep_out)}.")
    if keep_out and len(keep_out) == len(clients):
        what = f"keep_out names all {len(clients)} clients, so no client is left to train"
        raise ConfigError(f"{what}; name fewer.")


def first_patients(client: ClientData, count: int, seed: int) -> ClientData:
    """Keeps a client's first training patients with a sample, in a random order of the seed."""
    if count < 1:
        raise ConfigError(f"A client keeps 1 training patient or more, not {count}.")
    with_samples = trained_patients(client)
    order = torch.randperm(len(with_samples), generator=torch_rng(seed, "newcomer", client.id))
    return with_patients(client, with_samples[order[:count]])


def client_images(
    plan: ClientPlan,
    source: NDArray[Any] | Path,
    index: NDArray[np.int64],
    convert: Callable[..., NDArray[Any]],
    keys: Iterable[Sequence[object]],
) -> Tensor | ArrayRows:
    """Returns a client's images, on demand unless its scanner changes each by its key."""
    present = plan.channels.numpy()
    if plan.scanner is None:
        return ArrayRows(source, index, partial(convert, present=present))
    every = ArrayRows(source, index, partial(convert, present=np.ones_like(present)))
    images = every.take(torch.arange(len(index)))
    for n, key in enumerate(keys):
        images[n] = plan.scanner.apply(images[n], *key)
    images[:, ~plan.channels] = 0  # after the scanner, whose noise would fill these channels
    return images


def trained_patients(client: ClientData) -> Tensor:
    """Returns the positions of the training patients who have a training sample, in order."""
    patients: Tensor = _dense(client.train["case"]).unique()
    return patients


def with_patients(client: ClientData, chosen: Tensor) -> ClientData:
    """Keeps some of a client's training patients; the other splits do not change."""
    case, chosen = _dense(client.train["case"]), chosen.sort().values
    index = torch.isin(case, chosen).nonzero().flatten()
    block: Block = {name: _some(values, index) for name, values in client.train.items()}
    patients = [client.patients["train"][i] for i in chosen.tolist()]
    return replace(
        client,
        train={**block, "case": torch.searchsorted(chosen, case[index])},
        label_counts=label_counts(_dense(block["label"]), len(client.label_counts)),
        patients={**client.patients, "train": patients},
        fresh=None if client.fresh is None else client.fresh.some(chosen.tolist()),
    )


def _dense(values: Tensor | Rows) -> Tensor:
    return gather(values, torch.arange(values.shape[0]))


def _some(values: Tensor | Rows, index: Tensor) -> Tensor | Rows:
    return gather(values, index) if isinstance(values, Tensor) else values.some(index)
