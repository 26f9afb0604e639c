"""What ``medfed site check`` does at a hospital, before it takes part.

What would leave a site, in bytes and in words, computed before anything does.

Two rounds are tried with a step each, by this site's own data and network: what a message holds
depends on the method, the model and the codecs, and hardly on what was learnt. All other sites are
played by this one, whose reply counts as theirs.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from medfed.common.console import say, size, wide_console
from medfed.common.errors import ConfigError
from medfed.config.description import RunDescription
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.one_site import OwnData, setup_alone
from medfed.datamodules.readers.base import few
from medfed.datamodules.tables.agreement import converse
from medfed.datamodules.tables.datamodule import TabularDataModule
from medfed.federation.algorithm import Cohort
from medfed.federation.federation import Federation
from medfed.federation.wire.ledger import Direction, Ledger
from medfed.models.task import TaskModule
from medfed.run.assembly import task_for, unread_data
from medfed.run.experiment import read_start
from medfed.run.federating import federate
from medfed.run.overview.table import cohort_record, print_clients, print_cohort, summarise_clients
from medfed.sites.agreement import Agreed, SiteFile, fingerprints
from medfed.sites.policy import check_data, check_study

WORDS = {
    "shared": "what is averaged of the model: weights, or how far they moved",
    "personal": "gradients of the personal part, or how far it moved",
    "model": "the model as it was trained here, or how far it moved",
    "common": "what all instances of the model have in common, or how far it moved",
    "canonical": "instances of the model's canonical part, or how far they moved",
    "gradient": "gradients of the loss, averaged over training samples",
    "difference": "by how much gradients have changed",
    "shift": "what compression has left out so far",
    "control": "a correction as large as what is averaged of the model",
    "statistics": "means and variances within normalisation layers",
    "membership": "how much each canonical model counts here",
    "sketch": "a few rows that sum up the training data; of few patients they are nearly theirs",
    "scalars": "single numbers, such as a loss or a step size",
    "preprocessing": "of each column counts, limits, sums and names of categories",
}
OTHER = "a part of the method's own, see its page"
_FEW = 5  # patients below which a mean over them tells of each


@dataclass(frozen=True)
class Traffic:
    """What one part of the messages of one direction comes to.

    Attributes:
        direction: ``up`` leaves the site.
        part: Its name.
        first: Bytes in the first round, with what stands before it.
        further: Bytes in the second, as in every further one, about.
    """

    direction: Direction
    part: str
    first: int
    further: int

    @property
    def meaning(self) -> str:
        """What it is, in words."""
        return WORDS.get(self.part, OTHER)

    def total(self, rounds: int) -> int:
        """Bytes of all rounds, about."""
        return self.first + self.further * (rounds - 1)


def try_rounds(
    config: RunDescription, data: FederatedDataModule, task: TaskModule, sites: Sequence[str]
) -> Federation:
    """Carries out two short rounds at one site, which answers for all others, too.

    Args:
        config: The site's, facts of the data filled in.
        data: Its own, read.
        task: Built for them; it is trained, so give it away afterwards.
        sites: Names of all.

    Raises:
        ConfigError: If the method is none for sites.

    Returns:
        The federation, in whose ledger everything is counted.
    """
    (client,) = data.clients.values()
    together = copy.copy(data)
    together.clients = {name: replace(client, id=name) for name in sites}
    short = config.replacing({"local.steps": 1})
    federation, _ = federate(short, together, task)
    if federation.algorithm.pools:
        raise ConfigError(
            f"{type(federation.algorithm).__name__} trains on the data of all clients in one "
            "place, which sites do not give away; agree on another algorithm."
        )
    federation.cohort = Cohort()  # this site may not be drawn
    for number in range(2):
        current, is_open = federation.open(number), True
        while is_open:
            asked = sorted(current.recipients, key=lambda name: name != client.id)
            reply = [current.fit(name) for name in asked[:1]] * len(asked)
            is_open = current.exchange(dict(zip(asked, reply, strict=True)))
    return federation


def traffic_of(ledger: Ledger, site: str) -> list[Traffic]:
    """Sums up the entries of one site.

    Args:
        ledger: Of two rounds.
        site: Its name.

    Returns:
        By direction and part, what leaves first.

    Example:
        >>> from medfed.federation.wire.ledger import Entry
        >>> entries = [Entry(n, "fit", "a", "up", "shared", 10 + n, 40) for n in (0, 1)]
        >>> traffic_of(Ledger(entries), "a")
        [Traffic(direction='up', part='shared', first=10, further=11)]
    """
    entries = [entry for entry in ledger.entries if entry.client == site]
    ways: tuple[Direction, ...] = ("up", "down")
    parts = dict.fromkeys((way, e.part) for way in ways for e in entries if e.direction == way)
    return [
        Traffic(
            way,
            part,
            *(
                sum(
                    e.bytes
                    for e in entries
                    if (e.direction, e.part) == (way, part) and counted(e.round)
                )
                for counted in (lambda number: number < 1, lambda number: number >= 1)
            ),
        )
        for way, part in parts
    ]


def print_traffic(traffic: Sequence[Traffic], rounds: int, console: Console) -> None:
    """Prints a line for each part, and the sums."""
    titles = {
        "up": "What would leave this site",
        "down": "What would come in, beside models to evaluate",
    }
    for way, title in titles.items():
        rows = [t for t in traffic if t.direction == way]
        table = Table(title=title, title_justify="left")
        table.add_column("part")
        for column in ("first round", "each further one", f"{rounds} rounds, about"):
            table.add_column(column, justify="right")
        table.add_column("what it is")
        for t in rows:
            sizes = (size(count) for count in (t.first, t.further, t.total(rounds)))
            table.add_row(t.part, *sizes, t.meaning)
        if len(rows) > 1:
            sums = (sum(t.first for t in rows), sum(t.further for t in rows))
            total = sum(t.total(rounds) for t in rows)
            table.add_section()
            table.add_row("all", *map(size, (*sums, total)), "")
        console.print(table) if rows else say(console, f"{title}: nothing in the rounds.")


def sentences(
    config: RunDescription, data: FederatedDataModule, federation: Federation, site: str
) -> list[str]:
    """Says what else leaves a site, and what never does.

    Args:
        config: The site's.
        data: Its own, read.
        federation: From `try_rounds`.
        site: Its name.
    """
    plan = data.plans[site].patients
    counts = {split: len(plan[split]) for split in ("val", "test")}
    metric = config.model.selection[0]
    samples = data.clients[site].num_samples
    every = config.evaluation.every
    when = "each round" if every == 1 else f"every {every} rounds"
    channels, classes = (few(list(n), 8) for n in (data.plan_names, data.class_names))
    lines = [
        f"Also leaves before the first round: that there are {samples:,} training samples; the "
        f"names of channels or columns ({channels}) and of classes or regions ({classes}); hashes "
        "of the agreed keys and of the initial weights.",
        f"Also leaves after {when}: the metrics, such as {metric}, over {counts['val']} validation "
        "patients, and the number of gradient steps; at the end the metrics over "
        f"{counts['test']} test patients.",
        "Also leaves when something fails: the type of the error, never its text.",
    ]
    small = [f"{count} {split}" for split, count in counts.items() if 0 < count < _FEW]
    if small:
        lines.append(
            f"With {' and '.join(small)} patients a metric tells something of each of them; set "
            "data.val_fraction and data.test_fraction higher if that is too much."
        )
    if isinstance(data, TabularDataModule) and data.scaling == "pooled":
        ends = (
            "the smallest and largest value of each column"
            if data.normalization == "minmax"
            else "of each column the number of values, the median, the limits of what is far out, "
            "and sums and sums of squares"
        )
        lines.append(f"Pooled scaling tells the server {ends}, of this site by itself.")
    lines.append(
        "Never leaves: images, rows, names or numbers of patients, files and their names, which "
        "patients train and which test, predictions, pictures, logs, the text of errors, and of "
        f"the model what the table does not name ({type(federation.algorithm).__name__} keeps: "
        f"{federation.algorithm.card.keeps})."
    )
    lines.append(
        "Weights and gradients are no patients' data, but data leave traces in them: nothing here "
        "adds noise, and whoever holds the server sees what this site sends."
    )
    return lines


_log = logging.getLogger(__name__)


def check_site(terms: Agreed, file: SiteFile, config: RunDescription) -> list[Traffic]:
    """Reads a site's data, and says what would leave.

    Nothing is sent, and nothing is kept but what reading leaves in the site's own cache.

    Args:
        terms: What all sites have agreed on.
        file: The site's own file.
        config: The configuration of both.

    Returns:
        What was tried, part by part.

    Raises:
        MedfedError: If anything does not fit; nobody else need know.
    """
    check_study(file.policy, config)
    start, config = read_start(config)
    hashes = fingerprints(config.values)
    data = unread_data(config)
    if not terms.cut:
        data.partition = OwnData(data.partition, file.site, terms.sites)
    read_by_itself(data, file.site)
    check_data(file.policy, data, file.site, tells=bool(data.exchanged))
    console = wide_console()
    say(console, f"Site {file.site}, one of {len(terms.sites)}: {', '.join(terms.sites)}.")
    say(console, f"Agreed: {' '.join(terms.overrides) or 'the defaults'} ({len(hashes)} keys).")
    say(console, f"Kept in {file.folder}.", data.description)
    cohort = cohort_record(data)
    # Who has the other patients of a common data set, the other sites know.
    print_cohort(replace(cohort, patients=cohort.used) if terms.cut else cohort, console)
    print_clients(summarise_clients(data), data.class_names, console)
    config, task = task_for(config, data)
    start.begin(config, task, {"channels": data.channel_names, "labels": data.class_names})
    federation = try_rounds(config, data, task, terms.sites)
    traffic = traffic_of(federation.ledger, file.site)
    print_traffic(traffic, config.rounds, console)
    say(console, *sentences(config, data, federation, file.site))
    say(console, file.approval(terms), f"Site {file.site} is ready.")
    return traffic


def read_by_itself(data: FederatedDataModule, site: str) -> None:
    """Reads a site's data as if it were the only one, and counts what it would tell.

    Args:
        data: A data module that has read nothing.
        site: Its name.
    """
    half = setup_alone(data, site)
    first = next(half, None)

    def step(_: str, answer: bytes | None) -> bytes | None:
        if answer is None:
            return first
        try:
            return half.send(answer)
        except StopIteration:
            return None

    answers, data.exchanged = converse(data.merging(data.facts()), [site], step)
    if answers:
        _log.info("What the sites tell each other of their columns is here this site's alone.")
