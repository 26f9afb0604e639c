"""Duplicate samples: the same image, scan or row in two splits or at two clients.

Ids cannot show this: a copy has another name. A hash of the content is compared: decoded pixels
of images, voxels of CT patches, the bytes of files of volumes, all features of a table's row.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

from medfed.datamodules.extending import *

_FEW = 3  # groups that a sentence names
_CHANCE = 0.01  # equal rows are duplicates if chance would give at most this many pairs


class Sample(NamedTuple):
    """One sample by its content."""

    patient: str
    name: str  # its name, such as a file
    content: object  # a hash, equal for equal samples
    label: int | None = None  # its class, if it has one


class SampleUse(NamedTuple):
    """Where a sample is used."""

    client: str
    split: Split
    sample: Sample

    def __str__(self) -> str:
        return f"{self.sample.name} ({self.split} of {self.client})"


@dataclass(frozen=True)
class Duplicates:
    """Groups of equal samples, each in at least two splits, at two clients or of two classes."""

    what: str  # the kind of samples, such as ``images``
    # The places of equal samples, in the order of clients and splits.
    groups: Sequence[Sequence[SampleUse]] = ()

    def record(self) -> dict[str, Any]:
        """Returns the counts and all groups, for JSON."""
        of = ([(p.client, p.split, p.sample.name) for p in group] for group in self.groups)
        groups = [[dict(zip(("client", "split", "id"), p, strict=True)) for p in g] for g in of]
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
        """Describes the duplicates and names the first few; empty if there are none.

        Example:
            >>> used = [("train", "x"), ("test", "y")]
            >>> group = [SampleUse("a", split, Sample(i, i, 1)) for split, i in used]
            >>> Duplicates("images", [group]).sentence()
            '2 of the images are in 1 group of equal ones (1 over two splits, 0 over two clients): \
x (train of a) = y (test of a). A test sample is then in the training data: remove the copies.'
        """
        if not self.groups:
            return ""
        n = self.counts()
        count, samples = n["equal"], sum(map(len, self.groups))
        differ = n["labelled_differently"]
        other = f", {differ} with different labels" * bool(differ)
        named = "; ".join(" = ".join(map(str, group[:_FEW])) for group in self.groups[:_FEW])
        more = f"; and {count - _FEW} more" * (count > _FEW)
        over = f"{n['over_splits']} over two splits, {n['over_clients']} over two clients{other}"
        groups = f"{count:,} group{'s' * (count > 1)} of equal ones ({over}): {named}{more}"
        what = f"{samples:,} of the {self.what} are in {groups}"
        return f"{what}. {self._harm()}: remove the copies."

    def _harm(self) -> str:
        """Says what harm the copies do."""
        over = [{p.split for p in group} for group in self.groups]
        for split, what in (("test", "A test sample"), ("val", "A sample that selects the round")):
            if any({"train", split} <= splits for splits in over):
                return f"{what} is then in the training data"
        return "They then count more than once"


def find_duplicates(
    what: str, clients: Mapping[str, Mapping[Split, Sequence[str]]], samples: Iterable[Sample]
) -> Duplicates:
    """Finds equal samples that are in more than one split of one client, or of two classes."""
    order = {(c, s): n for n, (c, s) in enumerate((c, s) for c in clients for s in clients[c])}
    place = {i: (c, s) for c, parts in clients.items() for s, ids in parts.items() for i in ids}
    places: dict[object, list[SampleUse]] = {}
    for sample in samples:
        if sample.patient in place:
            places.setdefault(sample.content, []).append(SampleUse(*place[sample.patient], sample))
    repeated = (g for g in places.values() if len({(*p[:2], p.sample.label) for p in g}) > 1)
    groups = [sorted(group, key=lambda p: order[p.client, p.split]) for group in repeated]
    return Duplicates(what, groups)


def one_patient_each(samples: Iterable[Sample]) -> dict[str, str]:
    """Joins patients who share samples, directly or through other patients.

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
    """Hashes an image; an image of one value, such as air, has no hash: all of them are equal.

    Example:
        >>> content(np.zeros((2, 2))) is None, content(np.eye(2)) == content(np.eye(2))
        (True, True)
    """
    if array.size == 0 or (array == array.flat[0]).all():
        return None
    shape = str(array.shape).encode()[:16]
    return blake2b(array.tobytes(), digest_size=16, person=shape).digest()


def rows_mean_something(features: NDArray[np.float64]) -> bool:
    """Says whether equal rows of (N, F) are unlikely by chance, if columns are independent.

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
