"""What ``medfed site check`` does at a hospital, before it takes part."""

from __future__ import annotations

import logging
from dataclasses import replace

from omegaconf import DictConfig

from medfed.common.console import say, wide_console
from medfed.config.check import check
from medfed.datamodules.agreement_messages import converse
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.one_site import OwnData, setup_alone
from medfed.run.assembly import task_for, unread_data
from medfed.run.cohort import cohort_record
from medfed.run.cohort_overview import print_cohort
from medfed.run.cohort_table import print_clients, summarise_clients
from medfed.run.experiment import check_device
from medfed.run.start import Start
from medfed.sites.agreement import Agreed, fingerprints
from medfed.sites.leaving import Traffic, print_traffic, sentences, traffic_of, try_rounds
from medfed.sites.own_file import SiteFile

_log = logging.getLogger(__name__)


def check_site(terms: Agreed, own: SiteFile, config: DictConfig) -> list[Traffic]:
    """Reads a site's data, and says what would leave.

    Nothing is sent, and nothing is kept but what reading leaves in the site's own cache.

    Args:
        terms: What all sites have agreed on.
        own: The site's own file.
        config: The configuration of both.

    Returns:
        What was tried, part by part.

    Raises:
        MedfedError: If anything does not fit; nobody else need know.
    """
    check_device(config)
    start = Start.read(config)
    check(config)
    hashes = fingerprints(config)
    data = unread_data(config)
    if not terms.cut:
        data.partition = OwnData(data.partition, own.site, terms.sites)
    read_by_itself(data, own.site)
    console = wide_console()
    say(console, f"Site {own.site}, one of {len(terms.sites)}: {', '.join(terms.sites)}.")
    say(console, f"Agreed: {' '.join(terms.overrides) or 'the defaults'} ({len(hashes)} keys).")
    say(console, f"Kept in {own.folder}.", data.description)
    cohort = cohort_record(data)
    # Who has the other patients of a common data set, the other sites know.
    print_cohort(replace(cohort, patients=cohort.used) if terms.cut else cohort, console)
    print_clients(summarise_clients(data), data.class_names, console)
    task = task_for(config, data)
    start.begin(config, task, {"channels": data.channel_names, "labels": data.class_names})
    federation = try_rounds(config, data, task, terms.sites)
    traffic = traffic_of(federation.ledger, own.site)
    print_traffic(traffic, config.rounds, console)
    say(console, *sentences(config, data, federation, own.site))
    say(console, f"Site {own.site} is ready.")
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
