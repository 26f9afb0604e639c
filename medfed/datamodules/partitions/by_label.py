"""Partitions by label: clients with different label ratios, label sets or sizes.

- `LabelImbalance`: the ratio δ = negatives / positives, mirrored over the clients.
- `Dirichlet`: for each class k, p_k ~ Dir_N(alpha), and client n gets the share p_kn of the samples
  of class k. Sources: M. Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural
  Networks", ICML 2019, section 4; Q. Li et al., "Federated Learning on Non-IID Data Silos", ICDE
  2022. The idea is from T.-M. H. Hsu et al., arXiv:1909.06335, who instead draw one distribution
  over classes per client; there all clients have one size, here sizes differ.
- `Shards`: sort by label, cut into equal shards, give each client a few. Source: B. McMahan et al.,
  "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
  section 3.
- `QuantitySkew`: hospitals of very different sizes with otherwise similar patients.

Largest remainders (Hamilton's method) turn shares into whole numbers: the counts sum to the
required size, and each differs from its share by less than one. For two classes this is rounding
half up.
"""

from __future__ import annotations

from bisect import bisect_left

from numpy.typing import ArrayLike

from medfed.datamodules.extending import *
from medfed.datamodules.partitions import base
from medfed.datamodules.partitions.base import Ids, Owners, Shares

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def apportion(size: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Divides a whole number in proportions; of equal remainders, the later class is rounded up."""
    _check_shares(shares)
    quotas = np.round(size * np.asarray(shares, dtype=np.float64), 9)  # 0.07 * 100 is above 7
    counts = np.floor(quotas).astype(np.int64)
    order = np.lexsort((np.arange(len(counts)), quotas - counts))  # ascending, ties by class
    counts[order[::-1][: size - int(counts.sum())]] += 1
    return tuple(int(count) for count in counts)


def largest_fit(available: Sequence[int], shares: Sequence[float]) -> tuple[int, ...]:
    """Finds the largest samples per class in given proportions; zeros if there are none."""
    _check_shares(shares)
    bounds = [(n + 1) / s for n, s in zip(available, shares, strict=True) if s > 0]
    # No count is a whole unit below its quota, so no larger size fits. Fitting is not
    # monotone in the size (a larger sum can round one class down), hence the search from above.
    for size in range(min(sum(available), int(min(bounds) + 1e-6)), 0, -1):
        counts = apportion(size, shares)
        if all(c <= n for c, n in zip(counts, available, strict=True)):
            return counts
    return tuple(0 for _ in shares)


def thin(labels: ArrayLike, shares: Sequence[float], seed: int) -> Ints:
    """(m,) indices of the largest subset of (n,) samples that has the class proportions (K,)."""
    values = np.asarray(labels)
    strange = (values < 0) | (values >= len(shares))
    if strange.any():
        what = f"Label {values[strange][0]} has no class share"
        known = f"{len(shares)} shares stand for the classes 0 to {len(shares) - 1}"
        raise ConfigError(f"{what}; {known}.")
    members = [np.flatnonzero(values == k) for k in range(len(shares))]
    counts = largest_fit([len(m) for m in members], shares)
    pairs = enumerate(zip(members, counts, strict=True))
    remaining = [numpy_rng(seed, "thin", k).permutation(of)[:count] for k, (of, count) in pairs]
    return np.sort(np.concatenate(remaining)).astype(np.int64)


def deal_whole(counts: Ints, targets: Floats, seed: int, spare: bool = True) -> Ints:
    """Assigns whole patients (P, K) to clients so that samples per class approach targets (N, K).

    Greedy: the most one-sided patients come first, and each goes where it reduces the squared
    distance to the targets most; classes are scaled by their totals, so that rare ones count.
    """
    wanted = targets.sum(axis=0)
    weight = np.divide(1.0, wanted, out=np.zeros_like(wanted), where=wanted > 0)
    order = numpy_rng(seed, "deal").permutation(len(counts))
    size = counts * weight
    one_sided = np.linalg.norm(size - size.mean(axis=1, keepdims=True), axis=1)
    order = order[np.lexsort((-size.sum(axis=1)[order], -one_sided[order]))]
    open_need = targets.astype(np.float64)
    owner = np.full(len(counts), -1)
    for patient in order:
        score = (open_need * weight**2) @ counts[patient]
        if not spare:
            helps = ((open_need > 0) & (counts[patient] > 0)).any(axis=1)
            score = np.where(helps, score, -np.inf)
        best = int(score.argmax())
        if score[best] > -np.inf:
            owner[patient] = best
            open_need[best] -= counts[patient]
    return owner


def _check_shares(shares: Sequence[float]) -> None:
    """Checks that numbers are proportions.

    Example:
        >>> _check_shares((0.8, 0.4))
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.ConfigError: Shares must be non-negative and sum to 1; got: \
0.8, 0.4.
    """
    if not all(s >= 0 for s in shares) or not abs(sum(shares) - 1) < 1e-6:
        got = ", ".join(f"{s:g}" for s in shares) or "none"
        raise ConfigError(f"Shares must be non-negative and sum to 1; got: {got}.")


@dataclass(frozen=True)
class LabelImbalance(base.Dealt):
    """Equal-sized clients, half of which (rounded up) are δ:1, the others mirrored 1:δ.

    Samples that do not fit the ratios are not used, and splits are stratified. Patients with
    several samples stay whole; then every split is thinned to the ratio (`class_shares`).
    """

    traits = base.Traits(frozenset({"label"}), keeps_all=False)
    least = 0

    # δ = negatives per positive of the first half of the clients.
    delta: Annotated[float, check_positive] = 4.0
    # Share of positives per client, in place of `delta`.
    positive_fractions: Sequence[float] | None = None
    # Samples per client; None uses as many as the rarer label allows. If patients stay whole, each
    # client has at least this many samples in its ratio before splitting.
    samples_per_client: Annotated[int | None, check_optional_count] = None

    def fractions(self) -> list[float]:
        """Share of positives per client."""
        if self.positive_fractions is not None:
            shares = [float(f) for f in self.positive_fractions]
            if len(shares) != self.num_clients or not all(0 <= f <= 1 for f in shares):
                what = f"must be {self.num_clients} numbers in [0, 1], one per client"
                raise ConfigError(f"partition.positive_fractions={shares} {what}.")
            return shares
        low = 1 / (1 + self.delta)
        half = (self.num_clients + 1) // 2
        return [low] * half + [1 - low] * (self.num_clients - half)

    def deal(self, patients: Sequence[Patient], seed: int) -> Owners:
        """See `Dealt.deal`.

        Example:
            >>> patients = [Patient(str(i), label=i % 2) for i in range(10)]
            >>> LabelImbalance(2, 3.0, samples_per_client=4).deal(patients, seed=0)
            array([-1,  1,  0,  1,  0,  0,  1, -1,  0,  1])
        """
        wishes = np.array([(1 - f, f) for f in self.fractions()])
        counts = _two_classes(patients)
        whole = any(p.counts is not None for p in patients)
        attempt = partial(_deal_patients if whole else _deal_samples, counts, wishes, seed)
        sizes = range(1, int(counts.sum()) + 1)
        size = self.samples_per_client or bisect_left(sizes, True, key=lambda n: attempt(n) is None)
        if size == 0 or (owner := attempt(size)) is None:
            negatives, positives = counts.sum(axis=0)
            raise ConfigError(
                f"{negatives} negatives and {positives} positives are too few for "
                f"{self.num_clients} clients of {size or 1} samples with these label ratios; use "
                "fewer clients, a smaller delta or fewer samples_per_client."
            )
        return owner

    def class_shares(self, clients: Ids, num_classes: int, seed: int) -> dict[str, Shares]:
        """See `Partition.class_shares`; clients are in the order of `assign`."""
        if num_classes != 2:
            what = f"needs 2 classes, but the data have {num_classes}"
            raise ConfigError(f"partition=label_imbalance {what}; use partition=dirichlet.")
        return {c: (1 - f, f) for c, f in zip(clients, self.fractions(), strict=True)}


def _two_classes(patients: Sequence[Patient]) -> Ints:
    """(P, 2) samples of every patient; refuses further classes."""
    counts = base.count_classes(patients)
    beyond = counts[:, 2:].any(axis=1)
    if beyond.any():
        what = f"Patient {patients[int(beyond.argmax())].id} has samples beyond classes 0 and 1"
        raise ConfigError(f"{what}; partition=label_imbalance needs 2 classes.")
    return np.pad(counts[:, :2], ((0, 0), (0, max(2 - counts.shape[1], 0))))


def _deal_samples(counts: Ints, wishes: Floats, seed: int, size: int) -> Owners | None:
    """Deals patients of one sample: `size` to each client, in its ratio; None if they are few."""
    positives = np.floor(size * wishes[:, 1] + 0.5).astype(int)  # half up, for either label
    needed = np.stack([size - positives, positives], axis=1)
    if (needed.sum(axis=0) > counts.sum(axis=0)).any():
        return None
    owner = np.full(len(counts), -1)
    for k, of_clients in enumerate(needed.T):
        members = numpy_rng(seed, "label_imbalance", k).permutation(np.flatnonzero(counts[:, k]))
        owner[members[::-1][: of_clients.sum()]] = np.repeat(np.arange(len(wishes)), of_clients)
    return owner


def _deal_patients(counts: Ints, wishes: Floats, seed: int, size: int) -> Owners | None:
    """Deals whole patients, so that each client can be thinned to `size`; None if they are few."""
    owner = deal_whole(counts, wishes * size, derive_seed(seed, "label_imbalance"), spare=False)
    have = [counts[owner == n].sum(axis=0) for n in range(len(wishes))]
    return owner if (have >= wishes * size - 1e-6).all() else None


@dataclass(frozen=True)
class Shards(base.Dealt):
    """Cuts the patients, sorted by label, into shards and assigns the shards at random.

    A client sees about as many labels as shards. Patients with several samples are sorted by their
    most frequent class and, within it, by their mean class.
    """

    traits = base.Traits(frozenset({"label"}))

    shards_per_client: Annotated[int, check_count] = 2  # s, 2 in the paper

    @property
    def least(self) -> int:
        """See `Dealt.least`."""
        return self.shards_per_client

    def deal(self, patients: Sequence[Patient], seed: int) -> Owners:
        """See `Dealt.deal`.

        Example:
            >>> patients = [Patient(str(i), label=i // 2) for i in range(8)]
            >>> Shards(2).deal(patients, seed=3)
            array([1, 1, 0, 0, 0, 0, 1, 1])
        """
        counts = base.count_classes(patients)
        rng = numpy_rng(seed, "shards")
        mean = counts @ np.arange(counts.shape[1]) / counts.sum(axis=1).clip(min=1)
        order = np.lexsort((rng.permutation(len(patients)), mean, counts.argmax(axis=1)))
        shards = np.array_split(order, self.num_clients * self.shards_per_client)
        hands = rng.permutation(len(shards)) // self.shards_per_client
        owner = np.empty(len(patients), dtype=np.int64)
        for shard, client in zip(shards, hands, strict=True):
            owner[shard] = client
        return owner


_ATTEMPTS = 1000


@dataclass(frozen=True)
class Dirichlet(base.Dealt):
    """p_k ~ Dir_N(alpha) for every class k; every patient is used exactly once, and whole."""

    traits = base.Traits(frozenset({"label"}))

    # Concentration: small is skewed, large is even.
    alpha: Annotated[float, within("(0, inf)")] = 0.5
    # The proportions are redrawn until every client has this many patients.
    min_patients: Annotated[int, check_count] = 3

    @property
    def least(self) -> int:
        """See `Dealt.least`."""
        return self.min_patients

    def deal(self, patients: Sequence[Patient], seed: int) -> Owners:
        """See `Dealt.deal`.

        Example:
            >>> patients = [Patient(str(i), label=i % 2) for i in range(8)]
            >>> Dirichlet(2, alpha=0.5, min_patients=2).deal(patients, seed=0)
            array([1, 1, 1, 0, 1, 1, 1, 0])
        """
        counts = base.count_classes(patients)
        for attempt in range(_ATTEMPTS):
            owner = self._owners(counts, derive_seed(seed, "dirichlet", attempt))
            if np.bincount(owner, minlength=self.num_clients).min() >= self.min_patients:
                return owner
        what = f"In {_ATTEMPTS} draws with partition.alpha={self.alpha}, all {self.num_clients}"
        never = f"clients never got {self.min_patients} of the {len(patients)} patients"
        mend = "use a larger alpha, fewer clients or a smaller min_patients"
        raise ConfigError(f"{what} {never}; {mend}.")

    def _owners(self, counts: base.Counts, seed: int) -> NDArray[np.int64]:
        """The client of every patient, (P,), in one draw of the proportions."""
        # A class's proportions do not depend on the other classes.
        streams = [numpy_rng(seed, "proportions", k) for k in range(counts.shape[1])]
        shares = np.stack([rng.dirichlet([self.alpha] * self.num_clients) for rng in streams])
        if (counts.sum(axis=1) != 1).any():
            return deal_whole(counts, shares.T * counts.sum(axis=0), seed)
        owner = np.empty(len(counts), dtype=np.int64)
        for k, share in enumerate(shares):
            members = numpy_rng(seed, "members", k).permutation(np.flatnonzero(counts[:, k]))
            sizes = apportion(len(members), share.tolist())
            owner[members] = np.repeat(np.arange(self.num_clients), sizes)
        return owner


@dataclass(frozen=True)
class QuantitySkew(base.Dealt):
    """Shuffles the patients and cuts them by size; every patient is used exactly once."""

    # Client n (from 1) has a share in proportion to n^-exponent; 0 makes all equal.
    exponent: Annotated[float, within("[0, inf)")] = 1.0

    def deal(self, patients: Sequence[Patient], seed: int) -> Owners:
        """See `Dealt.deal`.

        Example:
            >>> np.bincount(QuantitySkew(3).deal([Patient(str(i)) for i in range(11)], seed=0))
            array([6, 3, 2])
        """
        shares = np.exp(-self.exponent * np.log(np.arange(1, self.num_clients + 1)))
        sizes = list(apportion(len(patients), (shares / shares.sum()).tolist()))
        while 0 in sizes:  # the largest client gives one patient to each client without any
            giver, taker = sizes.index(max(sizes)), sizes.index(0)
            sizes[giver], sizes[taker] = sizes[giver] - 1, 1
        owner = np.repeat(np.arange(self.num_clients), sizes)
        return numpy_rng(seed, "quantity_skew").permutation(owner)
