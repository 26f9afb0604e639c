"""Train, validation and test, always by patient; and the guard against leakage."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Literal

from medfed.common.seeding import numpy_rng
from medfed.standalone.errors import ConfigError, DataError, few

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")
log = logging.getLogger(__name__)


def split_patients(
    patients: Sequence[str],
    val_fraction: float,
    test_fraction: float,
    seed: int,
    strata: Mapping[str, object] | None = None,
    fold: Sequence[int] | None = None,
    most: int | None = None,
) -> dict[Split, list[str]]:
    """Splits one client's patients; from three on, every split has at least one."""
    check_shares(val_fraction, test_fraction, fold)
    groups: dict[str, list[str]] = {}
    for patient in sorted(patients):
        groups.setdefault(str(strata[patient]) if strata else "", []).append(patient)
    parts: dict[Split, list[str]] = {split: [] for split in SPLITS}
    placed = 0  # continued over all labels, so that parts differ by at most one patient
    dealt: list[tuple[list[str], int]] = []
    for name, group in sorted(groups.items()):
        # A random stream per label: more patients of one label do not move the others.
        order = [group[i] for i in numpy_rng(seed, "split", name).permutation(len(group))]
        # For labels with few patients rounding may give none; `_fill_empty` fills empty splits.
        tested, count = order[: round(test_fraction * len(group))], len(group)
        if fold is not None:
            tested = [i for n, i in enumerate(order, placed) if n % fold[1] == fold[0]]
            placed, count = placed + len(order), len(order) - len(tested)
        chosen = set(tested)
        parts["test"] += tested
        dealt.append(([i for i in order if i not in chosen], round(val_fraction * count)))
    total = sum(len(rest) for rest, _ in dealt)
    share = min(1.0, most / total) if most is not None and total else 1.0
    end = 0  # as `placed`, so that as many are kept as `most` says
    for rest, val in dealt:
        begin, end = end, end + len(rest)
        part, val = round(end * share) - round(begin * share), round(val * share)
        parts["val"] += rest[: min(val, part)]
        parts["train"] += rest[min(val, part) : part]
    wanted: dict[Split, bool] = {"train": True, "test": test_fraction > 0, "val": val_fraction > 0}
    _fill_empty(parts, wanted)
    return {split: sorted(ids) for split, ids in parts.items()}


def check_shares(val: float, test: float, fold: Sequence[int] | None = None) -> None:
    """Checks the shares of validation and test patients, and the fold of test patients.

    Example:
        >>> check_shares(0.2, 0.2, [4, 5])
        >>> check_shares(0.2, 0.2, [5, 5])
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.ConfigError: data.fold=[5, 5] must be [k, K], the k-th of K \
parts: K at least 2, and k from 0 to K - 1.
    """
    if fold is not None and (len(fold) != 2 or fold[1] < 2 or not 0 <= fold[0] < fold[1]):
        what = f"data.fold={list(fold)} must be [k, K], the k-th of K parts"
        raise ConfigError(f"{what}: K at least 2, and k from 0 to K - 1.")
    if not (val >= 0 and test >= 0 and val + test < 1):
        what = f"data.val_fraction={val} and data.test_fraction={test}"
        raise ConfigError(f"{what} must be non-negative and leave a share for training.")


def check_measurable(clients: Mapping[str, Mapping[Split, Sequence[str]]]) -> None:
    """Refuses clients without any test patient; warns if no round can be selected.

    Example:
        >>> check_measurable({"a": {"train": ["p"], "val": [], "test": []}})
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.ConfigError: No client has a test patient, so there is nothing to \
evaluate; check what says whose a sample is, or give the clients more patients.
    """
    if not any(parts["test"] for parts in clients.values()):
        several = any(sum(map(len, parts.values())) > 1 for parts in clients.values())
        mend = "set data.test_fraction above 0" if several else "check what says whose a sample is"
        what = "No client has a test patient, so there is nothing to evaluate"
        raise ConfigError(f"{what}; {mend}, or give the clients more patients.")
    if not any(parts["val"] for parts in clients.values()):
        log.warning("No client has a validation patient: the run keeps the last round.")


def _fill_empty(parts: dict[Split, list[str]], wanted: Mapping[Split, bool]) -> None:
    """Moves single patients so that no wanted split is empty; train comes first, then test."""
    for split, want in wanted.items():
        largest = max(parts, key=lambda s: len(parts[s]))
        if want and not parts[split] and len(parts[largest]) > 1:
            parts[split].append(parts[largest].pop())


def warn_small(clients: Mapping[str, Mapping[Split, Sequence[str]]]) -> None:
    """Warns of clients with empty splits or a single training patient."""
    remarks = []
    for client, parts in clients.items():
        if empty := [split for split in SPLITS if not parts[split]]:
            what = f"no patient in: {', '.join(empty)}"
            remarks.append((client, f"has {what}", f"have {what}"))
        elif len(parts["train"]) == 1:
            remarks.append((client, "trains on a single patient", "train on a single patient"))
    warn_of_clients(remarks)


def warn_of_clients(problems: Sequence[tuple[str, str, str]]) -> None:
    """Logs what clients have in common, in one line each, however many they are."""
    alike: dict[tuple[str, str], list[str]] = {}
    for client, one, many in problems:
        alike.setdefault((one, many), []).append(client)
    for (one, many), names in alike.items():
        several = f"{len(names)} clients {many}: {few(names, 8)}."
        log.warning("%s", several if len(names) > 1 else f"Client {names[0]} {one}.")


def check_leakage(clients: Mapping[str, Mapping[Split, Sequence[str]]]) -> None:
    """Stops the run if a patient appears twice."""
    owners: dict[str, str] = {}
    for client, parts in clients.items():
        for split, patients in parts.items():
            for patient in patients:
                place = f"{split} of {client}"
                if patient in owners:
                    what = f"Patient {patient} is in {owners[patient]} and again in {place}"
                    raise DataError(f"{what}; every patient belongs to one split of one client.")
                owners[patient] = place
