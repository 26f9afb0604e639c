"""A hospital that joins after the others have trained.

The two halves of :mod:`medfed.federation.reference` run in two processes: here the server's, in
:mod:`medfed.sites.site` the newcomer's. It receives the start of the method's rule, trains on its
patients, evaluates its test patients, and keeps the model. The federation does not change.

The result is that of :func:`medfed.run.onboarding.onboard` in a simulation, by the method's rule
and with all training patients of the newcomer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from medfed.common import scores, untrusted
from medfed.common.console import say, short, size, wide_console
from medfed.config.allowed import check_plugins
from medfed.config.description import RunDescription
from medfed.federation import algorithm, reference
from medfed.federation.aggregation import AbsentPartError
from medfed.federation.federation import Federation
from medfed.federation.lightning.module import FederatedModule
from medfed.federation.wire.ledger import Ledger
from medfed.federation.wire.packet import Packet
from medfed.functional.conformal import for_newcomer
from medfed.functional.points import Point
from medfed.records.folder import Run, RunFolder, with_nan
from medfed.run.experiment import read_start
from medfed.run.federating import preprocessing, server_half
from medfed.run.finished import best_checkpoint, reopened
from medfed.run.onboarding import add_rows, earlier_rows
from medfed.sites import coordinator, wire
from medfed.sites.agreement import Agreed, fingerprints
from medfed.sites.calls import Caller, Terms, catch_up, compare, compare_models
from medfed.sites.wire import Facts, Greeting, Transport
from medfed.sites.withdrawal import SitesRecord
from medfed.sites.words import in_words
from medfed.standalone.errors import CheckpointError, CodecError, ConfigError, SiteError


def onboard(
    caller: Caller, federation: Federation, site: str, run: SitesRecord, point: Point | None = None
) -> tuple[int, dict[str, float], Ledger]:
    """Onboards a newcomer by the method's rule; the coordinator's half."""
    if site in federation.ids:
        raise SiteError(f"Site {short(site)} has already trained with the others: it cannot join.")
    answers = [answer.encode() for answer in run.answers]
    facts, exchanged = catch_up(caller, site, answers)
    if isinstance(facts, str):
        raise SiteError(f"{short(site)}: {facts}.")
    for like in run.clients.values():
        compare_models(like, facts, "the run", site)
    info, ledger = algorithm.ClientInfo(site, facts.num_samples), Ledger(preprocessing(exchanged))
    sizes = federation.server.get("num_samples", {})
    clients = [wire.Client(c, int(sizes[c]) if c in sizes else 1) for c in federation.ids]
    facts_of_run = {"clients": clients, "job": run.job, "point": point}
    packets, metrics = list[Packet](), dict[str, float]()

    def send(packet: Packet, last: bool = False) -> Packet:
        at = {"phase": len(packets), "body": packet.to_bytes()}
        request = caller.request(wire.Onboard, site, **at, **facts_of_run, last=last)
        reply = caller.one(request, caller.terms.timeout)
        if isinstance(reply, str):
            raise SiteError(f"{short(site)}: {reply}.")
        metrics.update(reply.metrics)
        if not last:
            packets.append(Packet.from_bytes(reply.body, federation.most_elements))
        return packets[-1] if packets else packet

    try:
        send(reference.question(federation, info, send, ledger), last=True)
    except (KeyError, AbsentPartError) as error:
        name = error.part if isinstance(error, AbsentPartError) else error.args[0]
        if not packets or name in {*packets[-1].parts, *packets[-1].scalars}:
            raise
        raise SiteError(f"{short(site)}: its message has no {name!s:.60}.") from error
    except (CodecError, ValueError) as error:
        why = f"its message cannot be used: {str(error).rstrip('.')}"
        raise SiteError(f"{short(site)}: {why}.") from error
    return info.num_samples, metrics, ledger


@dataclass(frozen=True)
class Joined:
    """A hospital that has joined; fields as those of :class:`medfed.run.onboarding.Row`."""

    client: str  # the hospital
    samples: int  # its training samples
    rule: str  # ``own``, the method's
    steps: int  # gradient steps that it was allowed
    metrics: Mapping[str, float | None]  # on its test patients
    up: int  # bytes to the server, what it said of its columns among them
    down: int  # bytes to the hospital


def agreed_for(folder: Path, site: str, steps: int) -> Agreed:
    """Returns the agreement for a newcomer: that of the others, with it as the last site."""
    run = Run(folder)
    _sites_of(run, site)
    if not run.agreed_json.is_file():
        raise CheckpointError(in_words("no_agreement", folder=folder))
    agreed = Agreed.read(run.agreed_json)
    return Agreed((*agreed.sites, site), agreed.overrides, agreed.cut, agreed.medfed, steps)


def join(
    config: RunDescription, transport: Transport, site: str, steps: int, terms: Terms | None = None
) -> Joined:
    """Onboards a hospital to the selected round of a finished run; the run does not change.

    The run folder gets ``onboarding.csv`` and ``onboarding.json``, with a row for each hospital
    that has joined; model, bundle and ledger are in the hospital's folder.
    """
    run = Run(Path(config.folder))
    sites, earlier = _sites_of(run, site), earlier_rows(run, Joined)
    federation = _reopened(run, sites.clients)
    caller = Caller(transport, [site], terms or Terms())
    reply = caller.hello(caller.request(wire.Hello, site), caller.terms.hello)
    if isinstance(reply, str):
        raise SiteError(f"{short(site)}: {reply}; check the site, and onboard it again.")
    agreed = Greeting(fingerprints(config.values), sites.greeting)
    compare(agreed, reply.greeting, "the run", site)
    point = for_newcomer(run.summary.get("points", {}))
    samples, metrics, ledger = onboard(caller, federation, site, sites, point)
    names = frozenset(name for of in run.summary["clients"].values() for name in of)
    if wrong := coordinator.impossible(metrics, names):
        raise SiteError(f"{short(site)}: {wrong}.")
    up, down = (ledger.total(direction=way) for way in ("up", "down"))
    joined = Joined(site, samples, "own", steps, metrics, up, down)
    add_rows(run, earlier, [joined])
    _print(run, joined)
    return joined


def _sites_of(run: RunFolder, site: str) -> SitesRecord:
    """Returns the run's record of its sites, without the newcomer."""
    if not run.sites_json.is_file():
        raise ConfigError(in_words("simulation", folder=run.folder))
    record = SitesRecord.read(run.folder)
    if site in record.clients:
        known = f"was a site of the run in {run.folder} and has its model"
        raise ConfigError(f"onboard={site} {known}; name another site.")
    if run.config.privacy.example is not None:
        raise ConfigError(in_words("noise_of_others", folder=run.folder))
    return record


def _reopened(run: RunFolder, facts: Mapping[str, Facts]) -> Federation:
    """Returns the server's half at the end of the selected round."""
    check_plugins(run.config, run.folder)
    start, described = read_start(reopened(run.config, run.folder, accelerator="cpu"))
    everyone = [algorithm.ClientInfo(c, fact.num_samples) for c, fact in facts.items()]
    shape = next(iter(facts.values())).data["shape"]
    task, _, _, federation, local = server_half(described, start, everyone, shape)
    module = FederatedModule(task, federation, local)
    module.restore(untrusted.read_checkpoint(best_checkpoint(run.folder)))
    return federation


def _print(run: RunFolder, joined: Joined) -> None:
    summary = run.summary
    metric = summary["selection"][0]
    mean = scores.number(summary["federation"][metric]["mean"])
    say(
        wide_console(),
        f"{short(joined.client)} has joined by the rule of {summary['algorithm']}: test "
        f"{scores.label_of(metric)} {scores.number(with_nan(joined.metrics)[metric])} (mean of the "
        f"run's hospitals {mean}), up to {joined.steps} gradient steps, {size(joined.down)} down, "
        f"{size(joined.up)} up.",
        f"Its model is at the site. Written: {run.onboarding_csv} and {run.onboarding_json.name}",
    )
