"""What a site allows, independent of the coordinator: approved agreements, and a policy.

Both stand in the site's file, which a person of the hospital writes; no command writes there. Its
keys are the fields of :class:`Policy`; ``agreed`` is a line that ``medfed site check`` prints.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar, cast

import msgspec
import numpy as np
from filelock import FileLock

from medfed.common import floors, schemas, untrusted
from medfed.config.compose import build
from medfed.config.description import RunDescription
from medfed.functional.privacy import ORDERS, epsilon_of, renyi
from medfed.sites.words import VetoError, veto
from medfed.standalone import files

if TYPE_CHECKING:
    from medfed.datamodules.base import FederatedDataModule
    from medfed.datamodules.tables.datamodule import TabularDataModule
    from medfed.run.privacy import Protection

MESSAGE_KEYS = "local.steps and data.batch_size"
# In the folder of all federations:
SPENT, COUNTED, PATIENTS = "privacy.json", "answered.json", "patients.json"
NUMBERS = "numbers.json"
TESTS, POINTS = "test_metrics", "points"
"""Counters that `policy.test_metrics` limits."""
FEW = 5
"""Patients; a mean over fewer reveals something about each."""
Content = TypeVar("Content")
Item = tuple[str, str, int]
"""The key of a counter, what is added to it, and how many it may have."""
_Counters = dict[str, dict[str, list[str]]]
_Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Hash = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class Ceiling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The most privacy that all runs on a site's patients may spend together."""

    epsilon: Annotated[float, msgspec.Meta(gt=0)]
    delta: Annotated[float, msgspec.Meta(gt=0, lt=1)]


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits that a site sets for every study.

    Example:
        >>> Policy(least=20).check_split("training", 12)
        Traceback (most recent call last):
        ...
        medfed.sites.words.VetoError: There are 12 training patients, and policy.least of this \
site's file asks for 20; do not take part, or lower policy.least.
    """

    # The parts of messages that may leave, by the method's names; ``None``: all.
    parts: tuple[str, ...] | None = None
    # Patients of a split, a statistic or a message, below which nothing that is computed from them
    # leaves. Statistics have the floor of :mod:`medfed.common.floors` anyway.
    least: schemas.Count = 0
    least_per_message: schemas.Count | None = None  # of a message; ``None``: as `least`
    largest_share: _Share = 1.0  # share of a round's training samples that one site may have
    # Models of one agreement whose test metrics may leave; ``None``: any number.
    test_metrics: schemas.Count | None = None
    plugins: bool = True  # whether code from outside medfed may run here
    pictures: bool = True  # whether pictures of patients are drawn, which stay in the site's folder
    send_model: bool = False  # whether the personal model may leave, to be evaluated at other sites
    # Whether models of other sites, and bundles of a study, are evaluated here.
    evaluate_models: bool = False
    # The most that all runs may spend; studies without noise are then refused.
    privacy: Ceiling | None = None
    # How many times over a fifth of the pooled patients' worth of numbers may leave in studies of
    # statistics, of one data set.
    plans: schemas.Count = 3
    folders: schemas.Count = 100  # of runs, beyond which none begins that has no folder

    def check_parts(self, parts: Sequence[str]) -> None:
        """Refuses parts that may not leave."""
        others = [] if self.parts is None else [part for part in parts if part not in self.parts]
        if others:
            raise veto("parts", part=others[0])

    def check_statistics(self, statistics: Iterable[floors.Statistic]) -> None:
        """Refuses statistics of few patients, also where the file has no policy."""
        for statistic in statistics:
            if line := statistic.too_few(self.least):
                way = f"do not take part, or ask the coordinator to {statistic.remedy}"
                raise VetoError(f"{line[:-1]}; {way}.")

    def check_message(self, patients: int) -> None:
        """Refuses messages of few patients."""
        key = "least" if self.least_per_message is None else "least_per_message"
        least: int = getattr(self, key)
        if patients < least:
            words = {"behind": behind_a_message(patients), "key": key, "keys": MESSAGE_KEYS}
            raise veto("message", least=least, **words)

    def check_split(self, name: str, patients: int) -> None:
        """Refuses a split of few patients; an empty one reveals nothing."""
        if 0 < patients < self.least:
            raise veto("split", patients=patients, name=name, least=self.least)

    def check_across(self, sends: bool) -> None:
        """Refuses to send the personal model, or to evaluate another site's, unless allowed."""
        key = "send_model" if sends else "evaluate_models"
        if not getattr(self, key):
            raise veto(key)

    def check_folders(self, others: int) -> None:
        """Refuses a folder in addition to others, so that runs without end do not fill the disk."""
        if others >= self.folders:
            raise veto("folders", others=others, most=self.folders)

    def check_tests(self) -> None:
        """Refuses that test metrics leave, if none may."""
        if self.test_metrics == 0:
            raise veto("tests", model=1, most=0)

    def check_sizes(self, samples: Mapping[str, int]) -> None:
        """Refuses a round in which one site outweighs the others."""
        largest = max(samples, key=lambda site: samples[site])
        share = samples[largest] / sum(samples.values())
        if share > self.largest_share:
            shares = {"share": 100 * share, "most": 100 * self.largest_share}
            raise veto("share", site=largest, **shares)

    def check_study(self, config: RunDescription) -> None:
        """Refuses a study whose keys alone the site does not allow, before data are read."""
        self.check_parts(build(config.algorithm).parts_sent)
        self.check_noise(config)

    def check_noise(self, config: RunDescription) -> None:
        """Refuses a study without noise where the site's file asks for it."""
        keys = config.privacy.example
        if self.privacy is not None and (keys is None or keys.unit != "patient"):
            raise veto("noise")

    def check_data(
        self, config: RunDescription, data: FederatedDataModule, site: str, tells: bool, joins: int
    ) -> None:
        """Refuses a study of too few patients of the site, before anything of them leaves."""
        names = {"train": "training", "val": "validation"}
        for split, patients in data.plans[site].patients.items():
            self.check_split(names.get(split, split), len(patients))
        if self.privacy is None:  # otherwise it limits what the noise of all messages lets through
            self.check_message(patients_of_message(config, data, site, joins))
        if tells:
            self.check_parts(["preprocessing"])
            self.check_statistics(data.summaries(site))


NO_LIMITS = Policy()
"""What a site allows whose file has no policy."""


def patients_of_message(
    config: RunDescription, data: FederatedDataModule, site: str, joins: int = 0
) -> int:
    """Returns how many patients stand behind one message, at least.

    Steps take batches without replacement until an epoch ends, so the fewest patients are those
    with the most samples. Where noise protects patients, chance decides who is in a step; there may
    be nobody.
    """
    if config.privacy.example is not None:
        return 0
    if site in data.clients:
        units = data.clients[site].units("patient").tolist()
    elif (patches := config.data.get("patches_per_patient")) is not None:
        units = [n for n in data.plans[site].patients["train"] for _ in range(patches)]
    else:
        units = cast("TabularDataModule", data).train_patients[site].tolist()
    # Not that of the configuration, which a plan may decide; before that it is the least.
    count, batch, budget = len(units), data.batch_size, build(config.local)
    budget = replace(budget, steps=joins) if joins else budget
    steps = build(config.algorithm).least_steps(budget.of(count, batch))
    # A last batch of one sample is left out where BatchNorm needs more.
    epoch = count - (count > batch > 1 and count % batch == 1)
    taken = min(epoch, steps * batch * budget.accumulate)
    return fewest_patients(list(Counter(units).values()), taken)


def fewest_patients(samples: Sequence[int], taken: int) -> int:
    """Returns the fewest patients that so many different samples can be of.

    Example:
        >>> [fewest_patients([1, 6, 2], taken) for taken in (1, 6, 7, 9)]
        [1, 1, 2, 3]
    """
    most = accumulate(sorted(samples, reverse=True))
    return 1 + sum(together < taken for together in most)


def behind_a_message(patients: int) -> str:
    """Says how many patients stand behind one message."""
    return f"Patients behind one message ({MESSAGE_KEYS}): at least {patients}"


@contextmanager
def remembered(path: Path, kind: type[Content], keep: bool = True) -> Iterator[Content]:
    """Reads a file that all jobs of a site share, and writes what the caller has made of it.

    After an error, and if it is not to be kept, the file stays as it is. Jobs take turns.
    """
    if keep:
        path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")) if keep else nullcontext():
        content = _read(path, kind)
        yield content
        if keep:
            files.write_json(path, msgspec.to_builtins(content))


def _read(path: Path, kind: type[Content]) -> Content:
    advice = "restore it from a backup, as a site without it forgets what has left"
    return untrusted.read_json(path, kind, advice) if path.is_file() else kind()


class FullError(Exception):
    """A counter has reached its most."""


class Counted(msgspec.Struct, frozen=True):
    """What a site has answered of an agreement, over all its jobs, processes and restarts."""

    path: Path  # the file that remembers it, of all federations of the site
    agreement: str = ""  # hash of the agreement

    def add(self, *items: Item) -> None:
        """Counts items, each once, or none if one of the counters is full."""
        with remembered(self.path, _Counters, bool(items)) as every:
            for key, item, most in items:
                known = every.setdefault(self.agreement, {}).setdefault(key, [])
                if item not in known:
                    known.append(item)
                    if len(known) > most and key in (TESTS, POINTS):
                        raise veto("tests", model=most + 1, most=most)
                    if len(known) > most:
                        raise FullError(key)

    def of(self, key: str) -> list[str]:
        """Returns what a counter has."""
        return _read(self.path, _Counters).get(self.agreement, {}).get(key, [])

    def add_patients(
        self, data: str, patients: Sequence[str], least: int = 0, keep: bool = True
    ) -> None:
        """Remembers the patients behind statistics, of all agreements, before these leave."""
        path, floor = self.path.with_name(PATIENTS), max(floors.LEAST, least)
        if not patients:
            return
        with remembered(path, dict[str, list[list[str]]], keep) as every:
            sets, new = every.setdefault(data, []), sorted(patients)
            if new in sets:
                return
            if sets and (fewest := fewest_in_combinations([*sets, new])) < floor:
                counts = {"count": len(new), "fewest": fewest, "floor": floor}
                raise veto("patients", path=path, **counts)
            sets.append(new)

    def numbers(self, data: str) -> int:
        """Returns how many numbers about some data have left for other agreements."""
        known = _read(self.path.with_name(NUMBERS), dict[str, dict[str, int]]).get(data, {})
        return sum(n for what, n in known.items() if what.partition("/")[0] != self.agreement)

    def add_numbers(self, data: str, what: str, count: int, most: int) -> None:
        """Remembers how many numbers about some data leave, of all agreements, before they do."""
        path = self.path.with_name(NUMBERS)
        with remembered(path, dict[str, dict[str, int]]) as every:
            known = every.setdefault(data, {})
            known[f"{self.agreement}/{what}"] = count
            if (total := sum(known.values())) > most:
                raise veto("plans", total=total, most=most, path=path)


def fewest_in_combinations(sets: Sequence[Sequence[str]]) -> float:
    """Returns the fewest patients on whom a combination of sums over sets of patients can rest.

    A combination gives each patient a weight. A patient whose share of all squared weights is h is
    one of 1/h; the largest share over all combinations is the leverage in the matrix of the sets.

    Example:
        >>> [fewest_in_combinations([["a", "b", "c"], other]) for other in (["a", "b"], ["d", "e"])]
        [1.0, 2.0]
    """
    everyone = sorted({patient for one in sets for patient in one})
    members = np.array([np.isin(everyone, one) for one in sets], dtype=float)
    _, sizes, axes = np.linalg.svd(members, full_matrices=False)
    return round(1 / float((axes[sizes > 1e-9 * sizes[0]] ** 2).sum(axis=0).max()), 6)


class _Spent(msgspec.Struct):
    """What one run has spent."""

    run: str
    rate: float
    noise: float
    draws: schemas.Count


class Spending(msgspec.Struct, frozen=True):
    """Adds up what all runs of a site's file have spent on its patients."""

    ceiling: Ceiling | None  # the most; ``None``: any amount, which is recorded
    path: Path  # the file that remembers it

    def draws(self, run: str) -> int:
        """Returns the draws of a run, including those of rounds that were repeated."""
        return sum(one.draws for one in self._entries() if one.run == run)

    def epsilon(self, delta: float, planned: Mapping[str, Protection] | None = None) -> float:
        """Returns what is spent; with runs that are planned, what they will have spent at least."""
        entries = self._entries()
        for run, one in (planned or {}).items():
            more = max(0, one.draws - self.draws(run))
            entries.append(_Spent(run, one.rate, one.noise_of_draw, more))
        total = sum((one.draws * renyi(one.rate, one.noise) for one in entries), 0 * ORDERS)
        return epsilon_of(total, delta)

    def check(self, run: str, planned: Protection) -> None:
        """Refuses a run that would spend too much."""
        if self.ceiling is None:
            return
        delta = self.ceiling.delta
        total = self.epsilon(delta, {run: planned})
        if total > self.ceiling.epsilon:
            budget = {"total": total, "so_far": self.epsilon(delta), "delta": delta}
            raise veto("privacy", most=self.ceiling.epsilon, **budget)

    def add(self, run: str, by: Protection, gradients: int) -> None:
        """Remembers noisy gradients before what is computed from them leaves."""
        kind, draws = (run, by.rate, by.noise_of_draw), math.ceil(gradients / by.uses)
        with remembered(self.path, list[_Spent]) as entries:
            if same := [e for e in entries if (e.run, e.rate, e.noise) == kind]:
                same[0].draws += draws
            else:
                entries.append(_Spent(*kind, draws))
        self.check(run, replace(by, draws=0))

    def _entries(self) -> list[_Spent]:
        return _read(self.path, list[_Spent])


@dataclass
class Meter:
    """Counts the noisy gradients of one run at a site before what they gave leaves."""

    spending: Spending
    run: str
    by: Protection
    gradients: Callable[[], int]  # of this session, also of rounds that came to nothing
    counted: int = 0

    def count(self) -> None:
        """Adds the gradients since the last answer."""
        new, self.counted = self.gradients() - self.counted, self.gradients()
        if new:
            self.spending.add(self.run, self.by, new)

    def taken(self) -> int:
        """Returns those of the run, in all sessions."""
        return self.by.uses * self.spending.draws(self.run)

    def epsilon(self) -> float:
        """Returns what the run has spent."""
        return self.by.epsilon(self.taken())
