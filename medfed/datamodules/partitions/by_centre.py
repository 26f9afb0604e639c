"""Partitions that follow the hospitals in the data: one client each, or several.

`ByCentre` gives every hospital a client. `CentreSplit` makes groups of similar clients. `Auto` does
not leave out, duplicate or change any data.
"""

from __future__ import annotations

from medfed.datamodules.extending import *
from medfed.datamodules.partitions.base import Partition, RoundRobin, Traits, in_order


@dataclass(frozen=True)
class ByCentre(Partition):
    """Every centre of the data becomes a client with the centre's name."""

    # Names of the centres to keep, in this order; None keeps all, sorted.
    centres: Sequence[str] | None = None
    # The least and the largest number of patients of the centres to keep; None keeps all sizes.
    patients: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.patients is not None and not (
            len(self.patients) == 2 and 1 <= self.patients[0] <= self.patients[1]
        ):
            what = f"partition.patients={list(self.patients)} must be [LEAST, MOST]"
            raise ConfigError(f"{what}, the numbers of patients that a hospital may have.")

    @property
    def traits(self) -> Traits:
        """Patients may be left out if centres are chosen."""
        all_ = self.centres is None and self.patients is None
        return Traits(frozenset({"centre"}), keeps_all=all_, seeded=False, natural=True)

    def assign(self, patients: Sequence[Patient], seed: int) -> dict[str, list[str]]:
        """See `Partition.assign`; no random choice is made."""
        if lost := next((patient for patient in patients if patient.centre is None), None):
            mend = "name each one's centre in the data, as docs/data.md says, or set partition=auto"
            raise ConfigError(f"Patient {lost.id} has no centre; {mend}.")
        known = sorted({str(p.centre) for p in patients})
        names = known if self.centres is None else check_names("centre", self.centres, known)
        assigned: dict[str, list[str]] = {name: [] for name in names}
        for patient in patients:
            if patient.centre in assigned:
                assigned[patient.centre].append(patient.id)
        if self.patients is None:
            return assigned
        least, most = self.patients
        chosen = {name: ids for name, ids in assigned.items() if least <= len(ids) <= most}
        if not chosen:
            sizes = sorted(map(len, assigned.values()))
            what = f"partition.patients={[least, most]}: no hospital has so many patients"
            raise ConfigError(f"{what}; they have {sizes[0]} to {sizes[-1]}.")
        return chosen

    def remark(self, patients: Sequence[Patient]) -> str:
        """See `Partition.remark`."""
        if self.patients is None:
            return ""
        centres, every = self.assign(patients, 0), {p.centre for p in patients}
        count = f"{sum(map(len, centres.values())):,} of {len(patients):,} patients"
        who = f"{len(centres)} of {len(every)} hospitals, with {count}"
        return f"{who}, take part (partition.patients={[*self.patients]})."


@dataclass(frozen=True)
class CentreSplit(Partition):
    """Divides the patients of every centre evenly among several clients."""

    # Clients per centre: one number for all, or numbers by centre, 1 for those not named.
    parts: int | Mapping[str, int] = 2

    def __post_init__(self) -> None:
        counts = self.parts.values() if isinstance(self.parts, Mapping) else [self.parts]
        if not all(isinstance(n, int) and n >= 1 for n in counts):
            what = f"partition.parts={self.parts} must be a number of at least 1"
            raise ConfigError(f"{what}, or one per centre, such as {{drive: 3, chase: 2}}.")

    @property
    def traits(self) -> Traits:
        """The assignment within a centre is random."""
        return Traits(frozenset({"centre"}))

    def assign(self, patients: Sequence[Patient], seed: int) -> dict[str, list[str]]:
        """See `Partition.assign`."""
        centres = ByCentre().assign(in_order(patients), seed)
        named = self.parts if isinstance(self.parts, Mapping) else {}
        for name in named:
            if name not in centres:
                parts, hint = ", ".join(f"{c}: 1" for c in centres), did_you_mean(name, centres)
                raise ConfigError(
                    f"partition.parts names {name}, which is no centre{hint}; the centres are "
                    f"{', '.join(centres)}: set 'partition.parts={{{parts}}}', or partition=auto."
                )
        assigned: dict[str, list[str]] = {}
        for centre, ids in centres.items():
            count = self.parts if isinstance(self.parts, int) else named.get(centre, 1)
            if count > len(ids):
                what = f"{centre} has {len(ids)} patients, too few for {count} clients"
                raise ConfigError(f"partition.parts: {what}.")
            # A random stream per centre: dividing one centre does not change the others' clients.
            order = numpy_rng(seed, "centre split", centre).permutation(len(ids))
            for n in range(count):
                name = f"{centre}_{n}" if count > 1 else centre
                assigned[name] = sorted(ids[i] for i in order[n::count])
        return assigned


CLIENTS, LEAST = 5, 3  # of equal parts, unless clients would get fewer than three patients


@dataclass(frozen=True)
class Auto(Partition):
    """A client per hospital if the data name one for every patient, else equal random parts."""

    # If hospitals are named, nothing is random.
    traits = Traits(seeded=False, natural=True)

    # How many equal parts; None makes 5, or fewer if a part would have fewer than 3 patients. If
    # hospitals are known, a number is refused.
    num_clients: int | None = None
    # The partition of the experiment's original cohort; it is not used for the user's data, only
    # named in the remark.
    protocol: str | None = None

    def assign(self, patients: Sequence[Patient], seed: int) -> dict[str, list[str]]:
        """See `Partition.assign`."""
        if not all(p.centre for p in patients):
            return RoundRobin(self._parts(len(patients))).assign(patients, seed)
        if self.num_clients is not None:
            known = f"{len({p.centre for p in patients})} known hospitals, which are the clients"
            mend = "leave it out, or divide the patients at random by partition=round_robin"
            what = f"partition.num_clients={self.num_clients} contradicts the data of {known}"
            raise ConfigError(f"{what}; {mend}.")
        return ByCentre().assign(patients, seed)

    def remark(self, patients: Sequence[Patient]) -> str:
        """See `Partition.remark`."""
        named = sum(p.centre is not None for p in patients)
        if named == len(patients):
            count = len({p.centre for p in patients})
            sentence = f"Each of the {count} hospitals in the data is a client"
        else:
            lack = f" for {len(patients) - named} of them" * bool(named)
            parts = self._parts(len(patients))
            among = f"{parts} client{'s' * (parts > 1)} at random"
            why = f"as the data name no hospitals{lack}"
            sentence = f"All {len(patients):,} patients are divided among {among}, {why}"
        if self.protocol in (None, "centre"):  # centre divides named hospitals alike
            return "" if named == len(patients) else f"{sentence} (partition=auto)."
        paper = "The paper of this experiment divides its own patients otherwise"
        repeat = f"only to repeat that, set partition={self.protocol}"
        return f"{sentence} (partition=auto). {paper}; {repeat}."

    def _parts(self, count: int) -> int:
        return self.num_clients or max(1, min(CLIENTS, count // LEAST))
