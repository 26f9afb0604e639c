"""A hospital that joins a finished run across sites; the coordinator's part, and its record.

What :func:`medfed.run.onboarding.onboard` does in a simulation, by the method's own rule and with
all of the newcomer's training patients: it alone knows them. Comparisons with other rules are its
own to make.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from medfed.common.console import say, size, wide_console
from medfed.common.errors import CheckpointError, ConfigError, SiteError
from medfed.common.files import csv_text, write_json, write_text
from medfed.common.names import shown
from medfed.common.scores import number
from medfed.common.untrusted import ANY, NUMBER, read_checkpoint, read_json
from medfed.config.plugins import check_plugins
from medfed.federation.algorithm import ClientInfo
from medfed.federation.federation import Federation
from medfed.federation.lightning.module import FederatedModule
from medfed.reports.scores import label_of
from medfed.run.assembly import build_task
from medfed.run.experiment import best_checkpoint, read_start
from medfed.run.federating import federation_of
from medfed.run.folder import finished, read_config
from medfed.sites.agreement import Agreed, fingerprints
from medfed.sites.calls import Caller, Terms, compare
from medfed.sites.joining import onboard
from medfed.sites.transport import Transport
from medfed.sites.wire import Facts, Greeting
from medfed.sites.withdrawal import SITES

AGREED, RECORD = "agreed.json", "onboarding.json"
_SITES = {"job": str, "clients": {ANY: {}}, "answers": [str], "greeting": {}}
_ROW = {"client": str, "samples": int, "rule": str, "steps": int, "up": int, "down": int}


@dataclass(frozen=True)
class Joined:
    """A hospital that has joined; fields as those of :class:`medfed.run.onboarding.Row`.

    Attributes:
        client: The hospital.
        samples: Its training samples.
        rule: ``own``, the method's.
        steps: Gradient steps that it was allowed.
        metrics: On its test patients.
        up: Bytes to the server, what it told of its columns among them.
        down: Bytes to the hospital.
    """

    client: str
    samples: int
    rule: str
    steps: int
    metrics: dict[str, float]
    up: int
    down: int


def agreed_for(folder: Path, site: str) -> Agreed:
    """Returns what a newcomer has to agree on: what the others have, itself being the last.

    Args:
        folder: Of a finished run across sites.
        site: The newcomer.

    Raises:
        CheckpointError: If the run has not finished.
        ConfigError: If it is a simulation, or the site has trained with the others.
    """
    finished(folder)
    _sites_of(folder, site)
    if not (folder / AGREED).is_file():
        raise CheckpointError(
            f"{folder} has no {AGREED}, which medfed deploy writes when it has finished a run; "
            "resume the run by medfed deploy, and onboard then."
        )
    found = Agreed.read(folder / AGREED)
    return Agreed((*found.sites, site), found.overrides, found.cut, found.medfed)


def join(
    config: DictConfig, transport: Transport, site: str, steps: int, terms: Terms | None = None
) -> Joined:
    """Onboards a hospital to the selected round of a finished run; the run stays as it is.

    The run folder gets ``onboarding.csv`` and ``onboarding.json``, with a row for each hospital
    that has joined; model, bundle and ledger are in the hospital's own folder.

    Args:
        config: As the run was begun with, without facts of the data; its folder is the run's.
        transport: Reaches the site.
        site: The newcomer.
        steps: Gradient steps that it may take.
        terms: How long to wait for it.

    Raises:
        MedfedError: If the run cannot be joined, or the site does not answer, or not as agreed.
    """
    folder = Path(config.folder)
    summary, kept, others = finished(folder), _sites_of(folder, site), _joined_before(folder)
    facts = {c: Facts.of(said) for c, said in kept["clients"].items()}
    like = next(iter(facts.values()))
    federation = _reopened(folder, facts)
    caller = Caller(transport, [site], terms or Terms())
    reply = caller.hello(caller.request("hello", site), caller.terms.hello)
    if isinstance(reply, str):
        raise SiteError(f"{shown(site)}: {reply}; see to it, and onboard it again.")
    said = Greeting(reply.content["agreed"], reply.content["data"])
    compare(Greeting(fingerprints(config), kept["greeting"]), said, "the run", site)
    answers = [answer.encode() for answer in kept["answers"]]
    samples, metrics, ledger = onboard(
        caller, federation, site, answers, steps, job=kept["job"], like=like
    )
    if odd := {*metrics} ^ {name for of in summary["clients"].values() for name in of}:
        raise SiteError(f"{shown(site)} has other metrics than the run: {shown(min(odd))}.")
    up, down = (ledger.total(direction=way) for way in ("up", "down"))
    joined = Joined(site, samples, "own", steps, metrics, up, down)
    rows = [row for row in others if row.client != site] + [joined]
    _write(folder, summary, rows)
    _print(folder, summary, joined)
    return joined


def _sites_of(folder: Path, site: str) -> dict[str, Any]:
    """Returns what the run keeps of its sites, of which the newcomer is none."""
    if not (folder / SITES).is_file():
        raise ConfigError(
            f"The run in {folder} is a simulation; onboard to it by medfed evaluate run={folder} "
            "onboard=..."
        )
    kept: dict[str, Any] = read_json(folder / SITES, _SITES)
    if site in kept["clients"]:
        raise ConfigError(
            f"onboard={site} was one of the sites of the run in {folder}, and has its model; name "
            "one that was not."
        )
    return kept


def _reopened(folder: Path, facts: Mapping[str, Facts]) -> Federation:
    """Returns the server's half as it was after the selected round."""
    config = read_config(folder)
    check_plugins(config, folder)
    config.resume = config.folder = str(folder)
    config.trainer.accelerator, config.trainer.devices = "cpu", 1
    start = read_start(config)
    task = build_task(config)
    if str(config.trainer.precision).startswith("64"):
        task.double()
    start.begin(config, task)
    everyone = [ClientInfo(c, said.num_samples) for c, said in facts.items()]
    shape = next(iter(facts.values())).data["shape"]
    federation, local = federation_of(config, task, [], everyone, shape)
    module = FederatedModule(task, federation, local)
    module.restore(read_checkpoint(best_checkpoint(folder)))
    return federation


def _joined_before(folder: Path) -> list[Joined]:
    """Returns who has joined earlier."""
    if not (folder / RECORD).is_file():
        return []
    shape = {"rows": [{**_ROW, "metrics": {ANY: (*NUMBER, type(None))}}]}
    rows = read_json(folder / RECORD, shape)["rows"]
    undefined = float("nan")  # is null in JSON
    return [
        Joined(
            **{key: row[key] for key in _ROW},
            metrics={n: undefined if v is None else float(v) for n, v in row["metrics"].items()},
        )
        for row in rows
    ]


def _write(folder: Path, summary: Mapping[str, Any], rows: list[Joined]) -> None:
    names = list(dict.fromkeys(n for row in rows for n in row.metrics))
    lines = ([*(getattr(r, f) for f in _ROW), *(r.metrics.get(n, "") for n in names)] for r in rows)
    write_text(folder / "onboarding.csv", csv_text([*_ROW, *names], lines))
    kept = ("name", "algorithm", "selection", "selected_round")
    record = {name: summary[name] for name in kept}
    write_json(folder / RECORD, record | {"rows": [asdict(row) for row in rows]})


def _print(folder: Path, summary: Mapping[str, Any], joined: Joined) -> None:
    metric = summary["selection"][0]
    mean = number(summary["federation"][metric]["mean"])
    say(
        wide_console(),
        f"{shown(joined.client)} has joined by the own rule of {summary['algorithm']}: test "
        f"{label_of(metric)} {number(joined.metrics[metric])} (mean of the run's "
        f"hospitals {mean}), up to {joined.steps} gradient steps, {size(joined.down)} down, "
        f"{size(joined.up)} up.",
        f"Its model is at the site. Written: {folder}/onboarding.csv and {RECORD}",
    )
