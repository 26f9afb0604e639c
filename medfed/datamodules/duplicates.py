"""Samples that are found twice: the same image, scan or row in two splits or at two clients.

Ids do not tell: a copy has another name. What is compared is the content, by a hash: decoded pixels
of images, voxels of CT patches, the bytes of files of volumes, all features of a table's row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from medfed.datamodules.splits import Split

_FEW = 3  # groups that a sentence names
_CHANCE = 0.01  # pairs of equal rows, expected by chance, up to which equal rows mean something


class Sample(NamedTuple):
    """One sample by its content.

    Attributes:
        patient: Whose it is.
        name: What it is called, such as a file.
        content: A hash, equal for equal samples.
        label: Its class, where it has one.
    """

    patient: str
    name: str
    content: object
    label: int | None = None


class Place(NamedTuple):
    """Where a sample is used."""

    client: str
    split: Split
    sample: Sample

    def __str__(self) -> str:
        return f"{self.sample.name} ({self.split} of {self.client})"


@dataclass(frozen=True)
class Duplicates:
    """Groups of equal samples, each in two splits or at two clients at least.

    Attributes:
        what: What was compared, such as ``images``.
        groups: The places of equal samples, in the order of clients and splits.
    """

    what: str
    groups: Sequence[Sequence[Place]] = ()

    def record(self) -> dict[str, Any]:
        """Returns the counts and all groups, for JSON."""
        groups = [
            [{"client": p.client, "split": p.split, "id": p.sample.name} for p in group]
            for group in self.groups
        ]
        return {"compared": self.what, **self.counts(), "groups": groups}

    def counts(self) -> dict[str, int]:
        """Returns how many groups there are, and how many of which kind."""
        return {
            "equal": len(self.groups),
            "over_splits": sum(len({p.split for p in g}) > 1 for g in self.groups),
            "over_clients": sum(len({p.client for p in g}) > 1 for g in self.groups),
            "labelled_differently": sum(len({p.sample.label for p in g}) > 1 for g in self.groups),
        }

    def sentence(self) -> str:
        """Says what was found, with the first few; empty where nothing was.

        Example:
            >>> group = [Place("a", s, Sample(i, i, 1)) for s, i in [("train", "x"), ("test", "y")]]
            >>> Duplicates("images", [group]).sentence()
            '1 of the images is there more than once (1 over two splits, 0 over two clients): \
x (train of a) = y (test of a). What is tested was trained on then: remove the copies.'
        """
        if not self.groups:
            return ""
        n = self.counts()
        count, verb = n["equal"], "is" if n["equal"] == 1 else "are"
        differ = n["labelled_differently"]
        other = f", {differ} with different labels" * bool(differ)
        named = "; ".join(" = ".join(map(str, group[:_FEW])) for group in self.groups[:_FEW])
        more = f"; and {count - _FEW} more" * (count > _FEW)
        return (
            f"{count} of the {self.what} {verb} there more than once ({n['over_splits']} over two "
            f"splits, {n['over_clients']} over two clients{other}): {named}{more}. "
            f"{self._harm()}: remove the copies."
        )

    def _harm(self) -> str:
        """Says what is wrong with copies, which need not lie in training splits."""
        over = [{p.split for p in group} for group in self.groups]
        trained = [splits for splits in over if "train" in splits]
        if any("test" in splits for splits in trained):
            return "What is tested was trained on then"
        if any("val" in splits for splits in trained):
            return "What selects the round was trained on then"
        return "They count more than once then"


def find_duplicates(
    what: str, clients: Mapping[str, Mapping[Split, Sequence[str]]], samples: Iterable[Sample]
) -> Duplicates:
    """Finds samples of equal content that are used in more than one split of one client.

    Args:
        what: What they are, in the plural.
        clients: Patient ids per client and split.
        samples: The samples of these patients, and perhaps of others, which are passed over.

    Returns:
        The groups. Copies within one split of one client, or of one patient, are none.

    Example:
        >>> clients = {"a": {"train": ["p", "q"], "test": ["r"]}}
        >>> within = [Sample("p", "1.png", b"x"), Sample("q", "2.png", b"x")]
        >>> find_duplicates("images", clients, within).groups
        []
        >>> over = [*within, Sample("r", "3.png", b"x")]
        >>> [str(place) for place in find_duplicates("images", clients, over).groups[0]]
        ['1.png (train of a)', '2.png (train of a)', '3.png (test of a)']
    """
    order = {(c, s): n for n, (c, s) in enumerate((c, s) for c in clients for s in clients[c])}
    place = {i: (c, s) for c, parts in clients.items() for s, ids in parts.items() for i in ids}
    places: dict[object, list[Place]] = {}
    for sample in samples:
        if sample.patient in place:
            places.setdefault(sample.content, []).append(Place(*place[sample.patient], sample))
    groups = [
        sorted(group, key=lambda p: order[p.client, p.split])
        for group in places.values()
        if len({(p.client, p.split) for p in group}) > 1
    ]
    return Duplicates(what, groups)


def one_patient_each(samples: Iterable[Sample]) -> dict[str, str]:
    """Joins patients who share a sample, and those who share one with them, and so on.

    Args:
        samples: All samples.

    Returns:
        By patient, the first of those who are one; patients without a copy are left out.

    Example:
        >>> one_patient_each([Sample("a", "1", 7), Sample("b", "2", 7), Sample("c", "3", 8)])
        {'b': 'a'}
    """
    first: dict[object, str] = {}
    parent: dict[str, str] = {}

    def root(patient: str) -> str:
        while patient in parent:
            patient = parent[patient]
        return patient

    # Union by the first sample seen: a is b and b is c make all three one patient.
    for sample in samples:
        known, new = root(first.setdefault(sample.content, sample.patient)), root(sample.patient)
        if known != new:
            parent[new] = known
    return {patient: root(patient) for patient in parent}


def content(array: NDArray[Any]) -> bytes | None:
    """Hashes an image; one of a single value, such as air, is like any other and has no hash.

    Example:
        >>> content(np.zeros((2, 2))) is None, content(np.eye(2)) == content(np.eye(2))
        (True, True)
    """
    if array.size == 0 or (array == array.flat[0]).all():
        return None
    shape = str(array.shape).encode()[:16]
    return blake2b(array.tobytes(), digest_size=16, person=shape).digest()


def rows_mean_something(features: NDArray[np.float64]) -> bool:
    """Says whether two equal rows are hardly chance: below 0.01 pairs would be expected.

    That many there would be were columns independent: in each, the share of pairs that agree is
    counted, a missing cell as a value.

    Args:
        features: (N, F).

    Example:
        >>> rows_mean_something(np.random.default_rng(0).normal(size=(50, 3)))
        True
        >>> rows_mean_something(np.random.default_rng(0).integers(0, 2, size=(50, 3)) * 1.0)
        False
    """
    pairs = len(features) * (len(features) - 1) / 2
    expected = pairs
    for column in features.T:
        _, occurs = np.unique(column, return_counts=True)  # NaNs count as equal
        expected *= float((occurs * (occurs - 1) / 2).sum()) / max(pairs, 1.0)
    return expected < _CHANCE
