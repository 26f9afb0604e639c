"""``medfed site check``: what a hospital runs before it takes part.

It computes what would leave the site, in bytes and in words, before anything leaves.

It tries two rounds of one step each with this site's data and network: the content of a message
depends on the method, the model and the codecs, and hardly on the training. This site's reply also
counts as that of all other sites.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from medfed.common import floors, tables
from medfed.common.console import say, size, wide_console
from medfed.config.description import RunDescription
from medfed.datamodules.base import FederatedDataModule, converse_here
from medfed.datamodules.one_site import Merging
from medfed.datamodules.tables.datamodule import TabularDataModule
from medfed.federation.algorithm import Cohort
from medfed.federation.federation import Federation
from medfed.federation.round import Round
from medfed.federation.wire.fixed_point import FEWEST
from medfed.federation.wire.ledger import Direction, Ledger
from medfed.models.task import TaskModule
from medfed.reports.look import write_look
from medfed.run import assembly, experiment, federating, privacy
from medfed.run.chooser import chooser_of
from medfed.run.cohort import cohort_record, print_cohort
from medfed.sites import installed, policy, studying
from medfed.sites.agreement import Agreed, SiteFile, fingerprints
from medfed.sites.site import own_data
from medfed.sites.words import VetoError, words_for
from medfed.standalone import errors, files
from medfed.studies.described import described
from medfed.studies.parts import Separate, numbers_in
from medfed.studies.simulation import answered, whole_numbers

OTHER = "a part specific to the method, see its page"


class Traffic(NamedTuple):
    """The bytes of one part of the messages in one direction."""

    direction: Direction  # ``up`` leaves the site
    part: str  # its name
    first: int  # bytes in the first round, including those before it
    further: int  # bytes in the second round; about the same in every later one


def try_rounds(
    config: RunDescription, data: FederatedDataModule, task: TaskModule, sites: Sequence[str]
) -> Federation:
    """Runs two short rounds at one site, which also answers for all others."""
    (client,) = data.clients.values()
    together = copy.copy(data)
    together.clients = {name: replace(client, id=name) for name in sites}
    short = config.replacing({"local.steps": 1})
    federating.method_of(short, len(sites), are_sites=True)
    federation, _ = federating.federate(short, together, task)
    federation.cohort = Cohort()  # this site may not be in the cohort
    for number in range(2):
        current, is_open = Round(federation, number), True
        while is_open:
            order = sorted(current.recipients, key=lambda name: name != client.id)
            reply = [current.fit(name) for name in order[:1]] * len(order)
            for name, packet in zip(order, reply, strict=True):
                current.receive(name, packet)
            is_open = current.close_phase()
    return federation


def traffic_of(ledger: Ledger, site: str) -> list[Traffic]:
    """Sums up the entries of one site.

    Example:
        >>> from medfed.federation.wire.ledger import Entry
        >>> entries = [Entry(n, "fit", "a", "up", "shared", 10 + n, 40) for n in (0, 1)]
        >>> traffic_of(Ledger(entries), "a")
        [Traffic(direction='up', part='shared', first=10, further=11)]
    """
    entries = [entry for entry in ledger.entries if entry.client == site]
    ways: tuple[Direction, ...] = ("up", "down")
    parts = dict.fromkeys((way, e.part) for way in ways for e in entries if e.direction == way)
    first, further = (
        Counter(Ledger(e for e in entries if (e.round < 1) == early).totals("direction", "part"))
        for early in (True, False)
    )
    return [Traffic(way, part, first[way, part], further[way, part]) for way, part in parts]


def print_traffic(traffic: Sequence[Traffic], rounds: int, console: Console) -> None:
    """Prints a line for each part, and the sums."""
    head = ("part", "first round", "each further one", f"{rounds} rounds, about", "what it is")
    come_in = "What would come in, in addition to models to evaluate"
    for way, title in (("up", "What would leave this site"), ("down", come_in)):
        rows = [t for t in traffic if t.direction == way]
        counts = [(t.first, t.further, t.first + t.further * (rounds - 1)) for t in rows]
        words = (words_for("parts").get(t.part, OTHER) for t in rows)
        each = zip(rows, counts, words, strict=True)
        lines = [[t.part, *map(size, n), meaning] for t, n, meaning in each]
        if len(rows) > 1:
            lines.append(["all", *(size(sum(column)) for column in zip(*counts, strict=True)), ""])
        table = tables.Table.of(head, lines, prose=(0, 4)).printed(title)
        console.print(table) if rows else say(console, f"{title}: nothing in the rounds.")


def sentences(file: SiteFile, task: TaskModule, federation: Federation, **words: Any) -> list[str]:
    """Says what else leaves a site, and what never leaves it."""
    config, data = words["config"], words["data"]
    words |= {"file": file, "site": file.site, "federation": federation, "few": errors.few}
    words["planned"] = privacy.protections(config, data.clients, federation).get(file.site)
    words["exact"], words["chooser"] = privacy.exact(config), chooser_of(config, task)
    words["table"] = data if isinstance(data, TabularDataModule) else None
    return files.filled(installed.TEMPLATES / "leaves.txt", **words).strip().split("\n")


def warnings(
    config: RunDescription, data: FederatedDataModule, file: SiteFile, joins: int
) -> list[str]:
    """Says what else could single out a patient."""
    plan, lines = data.plans[file.site].patients, list[str]()
    patients = policy.patients_of_message(config, data, file.site, joins)
    noise = config.privacy.example
    if noise is None and patients < policy.FEW:
        lines.append(f"{policy.behind_a_message(patients)}; gradients of so few can be undone.")
    counts = {split: len(plan[split]) for split in ("val", "test")}
    if small := [f"{count} {split}" for split, count in counts.items() if 0 < count < policy.FEW]:
        lines.append(
            f"With {' and '.join(small)} patients a metric reveals something about each of them; "
            "set data.val_fraction and data.test_fraction higher if that is too much."
        )
    return lines


_log = logging.getLogger(__name__)


def check_site(terms: Agreed, file: SiteFile, config: RunDescription) -> None:
    """Reads a site's data, and reports what would leave.

    Nothing is sent, and nothing is kept except the site's data cache. `config`: the configuration
    of both.
    """
    if terms.plan is not None:
        check_plan(terms, file)
        return
    file.policy.check_study(config)
    start, config = experiment.read_start(config)
    hashes = fingerprints(config.values)
    data = _data_of(terms, file, config)
    read_by_itself(data, file.site)
    assembly.say_data(data)
    console = wide_console()
    say(console, f"Site {file.site}, one of {len(terms.sites)}: {', '.join(terms.sites)}.")
    say(console, f"Agreed: {' '.join(terms.overrides) or 'the defaults'} ({len(hashes)} keys).")
    say(console, f"Kept in {file.folder}.")
    cohort = cohort_record(data)
    # The other sites know which of them has the other patients of a common data set.
    print_cohort(replace(cohort, patients=cohort.used) if terms.cut else cohort, console)
    config, task = assembly.task_for(config, data)
    start.begin(config, task, {"channels": data.channel_names, "labels": data.class_names})
    federation = try_rounds(config, data, task, terms.sites)
    print_traffic(traffic_of(federation.ledger, file.site), config.rounds, console)
    say(console, *sentences(file, task, federation, config=config, data=data))
    statistics = federating.statistics_of(federation.algorithm, data)
    few_behind = [line for one in statistics if (line := one.too_few(file.policy.least))]
    say(console, *few_behind, *warnings(config, data, file, terms.joins), style="red")
    file.policy.check_data(config, data, file.site, bool(data.exchanged), terms.joins)
    file.policy.check_statistics(statistics)
    if statistics:
        _keep_patients(file, data, str(config.data.get("path")), keep=False)
    spending = policy.Spending(file.policy.privacy, file.folder / policy.SPENT)
    for planned in privacy.protections(config, data.clients, federation).values():
        spending.check("this study", planned)
    say(console, file.approval(terms), f"Site {file.site} is ready.")


def check_plan(terms: Agreed, file: SiteFile) -> None:
    """Reads a site's data, and says what each part of a study would send, of how many patients."""
    place = studying.StudyPlace.of(terms, file)
    data, patients = place.patients_behind()
    console = wide_console()
    if place.plan.bundles:
        file.policy.check_across(False)
    say(console, f"Site {file.site}, one of {len(terms.sites)}: {', '.join(terms.sites)}.")
    say(console, "A study of statistics: nothing is trained, and no row leaves.")
    opened = (
        f"The model {one.name} would arrive, and is opened if its manifest has the hash "
        f"{one.manifest}; no code of it runs, and it counts for policy.test_metrics."
        for one in place.plan.bundles
    )
    say(console, *opened)
    lines, remarks = list[list[object]](), list[str]()
    counted = policy.Counted(file.folder / policy.COUNTED, terms.digest)
    total = counted.numbers(data)
    rows = place.cohort.with_examples(place.rows, [bundle.name for bundle in place.plan.bundles])
    for part in place.parts:
        if isinstance(part, Separate):
            count = numbers_in(part.estimate(rows))
            lines.append([part.name, count, len(patients), "", "in four digits"])
        elif len(terms.sites) < FEWEST:
            lines.append([part.name, count := 0, "", "", f"left out: a sum needs {FEWEST} sites"])
        else:
            sums, is_repeated = part.ask(rows, next(part.talk())), len(next(part.talk())) > 0
            how, count = "under masks" + ", in each step" * is_repeated, len(sums.whole)
            lines.append([part.name, count, sums.patients, floors.TIMES * count, how])
            here = [] if is_repeated else answered(part, lambda *_, of=sums.whole: of)
            remarks += [line for one in here for line in one.remarks]
        total += count
    head = ["part", "numbers", "patients behind them", "needed of all sites", "how"]
    texts = [[*map(str, line)] for line in lines]
    console.print(tables.Table.of(head, texts, prose=(0, 4)).printed("What would leave"))
    if not (plans := file.policy.plans):
        raise VetoError("policy.plans of this site's file is 0: no number may leave.")
    say(console, *dict.fromkeys([*remarks, *whole_numbers(place.plan, [rows])]), style="yellow")
    least = -(-total * floors.TIMES // plans)
    what = f"{total} numbers of these patients would then have left (of a regression, in each step)"
    say(console, f"{what}; policy.plans lets so many leave from {least} patients of all sites on.")
    counted.add_patients(data, patients, file.policy.least, keep=False)
    say(console, file.approval(terms), f"Site {file.site} is ready.")


def describe_site(terms: Agreed, file: SiteFile, config: RunDescription, folder: Path) -> None:
    """Writes what a site has, without numbers of fewer patients than its policy and all allow."""
    file.policy.check_study(config)
    data = _data_of(terms, file, experiment.read_start(config)[1])
    data.plan()
    _keep_patients(file, data, str(config.data.get("path")), keep=True)
    write_look([described(data, file.site, max(floors.LEAST, file.policy.least))], folder)


def _keep_patients(file: SiteFile, data: FederatedDataModule, where: str, keep: bool) -> None:
    """Refuses statistics that would show few patients together with those that left before."""
    patients = data.plans[file.site].patients["train"]
    counted = policy.Counted(file.folder / policy.COUNTED)
    counted.add_patients(where, patients, file.policy.least, keep)


def _data_of(terms: Agreed, file: SiteFile, config: RunDescription) -> FederatedDataModule:
    return own_data(config, file.site, None if terms.cut else terms.sites)


def read_by_itself(data: FederatedDataModule, site: str) -> None:
    """Reads a site's data as if it were the only site, and counts its messages."""

    def server() -> Merging:
        yield from data.merging(data.facts())  # which are known once the half has begun

    _, data.exchanged = converse_here(server(), {site: data.setup_alone(site)})
    if data.exchanged:
        _log.info("The facts about columns that sites share come here from this site only.")
