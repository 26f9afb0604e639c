"""A whole run across sites: greets them, runs the rounds, tests once, and writes the results.

It runs under one Lightning Trainer: an epoch is a round, with one task in it.

So the coordinator's run has the loggers, checkpoints, selection and early stopping of any other
run.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytorch_lightning as pl
from torch import Tensor

from medfed.common import scores, tensors, untrusted
from medfed.common.console import short, size
from medfed.common.figures import save_figures
from medfed.config.description import RunDescription
from medfed.datamodules.one_site import Claims
from medfed.federation import algorithm, budget
from medfed.federation.engine.loop import LocalTrainer
from medfed.federation.federation import Federation
from medfed.federation.lightning.callbacks import History, PersonalEvaluation
from medfed.federation.lightning.checkpoint import last_whole
from medfed.federation.lightning.evaluating import TaskLike
from medfed.federation.lightning.module import FederatedModule
from medfed.federation.lightning.strategy import ranks_end_together
from medfed.federation.wire.ledger import Ledger
from medfed.records.folder import RunFolder
from medfed.run import assembly, claim, federating, loggers, results
from medfed.run.evaluation import show_across
from medfed.run.experiment import callbacks_of, read_start, trainer_of
from medfed.run.finished import best_checkpoint
from medfed.run.memberships import Memberships
from medfed.sites import agreement, calls
from medfed.sites.attendance import Attendance, SitesProgress
from medfed.sites.coordinator import Coordinator, Metrics
from medfed.sites.site import FACTS, versions_here
from medfed.sites.status import Status, ended, keep
from medfed.sites.wire import Facts, Greeting, Transport
from medfed.sites.withdrawal import SitesRecord, replayed, withdrawn_of
from medfed.sites.words import in_words
from medfed.standalone.errors import CheckpointError, ConfigError, SiteError
from medfed.standalone.files import write_json, write_text


class SitesEvaluation(PersonalEvaluation):
    """Selects a round although some sites may lack metrics after some rounds.

    A mean over the present sites would rise if a weak site is missing. So a missing site counts
    with its metrics of the evaluation before, or if there is none, of its first one: two rounds
    then differ only by the gains of sites present in both. The record, and so ``metrics.csv``,
    holds only measured values.
    """

    @property
    def compared(self) -> History:
        """The record with a row for each site after every evaluation."""
        latest, filled = dict[str, dict[str, float]](), list[scores.Record]()
        for record in self.history:
            latest.setdefault(record.client, record.metrics)
        for number in sorted({r.round for r in self.history}):
            latest |= {r.client: r.metrics for r in self.history if r.round == number}
            filled += [scores.Record(number, c, metrics) for c, metrics in latest.items()]
        return History(filled, self.history.samples)


class SitesModule(FederatedModule):
    """Lets a coordinator run the rounds, each as one task."""

    needs_rounds = False

    def __init__(
        self, task: TaskLike, federation: Federation, local: LocalTrainer, coordinator: Coordinator
    ) -> None:
        super().__init__(task, federation, local)
        self.coordinator = coordinator
        self.measured: Metrics = {}
        self.selected: int | None = None

    @property
    def owned(self) -> list[str]:
        """There are no clients in this process."""
        return []

    def training_step(self, batch: str, batch_idx: int) -> None:
        """Runs the round, its evaluation and its commit."""
        every = self.trainer.check_val_every_n_epoch or 1
        evaluated = (self.trainer.current_epoch + 1) % every == 0
        self.measured = self.coordinator.round(self.next_round, evaluated)
        self.losses = dict(self.coordinator.losses)
        self.next_round += 1

    def validation_step(self, batch: str, batch_idx: int) -> None:
        """Passes on the sites' metrics."""
        self.evaluations = dict(self.measured)

    def test_step(self, batch: str, batch_idx: int) -> None:
        """Lets the sites evaluate the selected round on their test data."""
        self.evaluations = self.coordinator.test(self.next_round, self.selected)
        self.points = dict(self.coordinator.requests.points)

    def diverged(self, metrics: Mapping[str, Mapping[str, float]]) -> list[str]:
        """Returns the sites that say so: they know all digits of their losses."""
        return [c for c in metrics if c in self.coordinator.requests.diverged]

    def spent(self) -> dict[str, tuple[int, budget.Passes]]:
        """Returns every client's gradient steps and passes so far, as the sites report them."""
        return self.coordinator.progress.spent

    def _gather_states(self, names: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
        return {c: {} for c in self.federation.ids}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves the server, the ledger and the sites' progress; sites save their states."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["sites"] = self.coordinator.progress.state_dict()

    def restore(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Restores the server."""
        if "sites" not in checkpoint:
            raise CheckpointError("This checkpoint is of a simulation, not of a run across sites.")
        return super().restore(checkpoint)


_log = logging.getLogger(__name__)
Before = tuple[str, SitesProgress | None, Path | None]


def coordinate(
    config: RunDescription,
    transport: Transport,
    sites: Sequence[str],
    terms: calls.Terms | None = None,
    logs: bool = False,
) -> dict[str, Any]:
    """Runs or resumes an experiment across sites, and leaves an ordinary run folder."""
    if config.adapters is not None:
        raise ConfigError("adapters are not for runs across sites yet; set adapters=none.")
    with claim.locked_run_folder(config, logs):
        gone = [*withdrawn_of(Path(config.folder))] if config.resume is not None else []
        there = [c for c in sites if c not in gone]
        with calls.Caller(transport, there, terms or calls.Terms()) as caller:
            return _coordinate(config, caller, sites, gone)


def _coordinate(
    config: RunDescription, caller: calls.Caller, sites: Sequence[str], gone: Sequence[str]
) -> dict[str, Any]:
    folder = Path(config.folder)
    run = RunFolder(folder)
    agreed = agreement.fingerprints(config.values)
    start, config = read_start(config)
    job, progress, checkpoint = before_of(config, sites)
    if config.resume is not None:
        caller.traffic.read(run.traffic_csv)
    greetings = calls.greet(caller, some=checkpoint is not None)
    greeting = next(iter(greetings.values()))
    for line in calls.other_versions(versions_here(str(config.trainer.accelerator)), greetings):
        _log.warning("%s", line)
    calls.compare(Greeting(agreed, greeting.data), greeting, "the coordinator", caller.sites[0])
    claims = Claims(caller.sites)
    merging = assembly.unread_data(config).merging(greeting.data, claims)
    if gone:
        _log.warning("Withdrawn, so not in any round: %s.", ", ".join(map(short, gone)))
    if caller.lacking:
        _log.warning("Not answering yet: %s.", calls.sentence(caller.lacking))
    if gone or caller.lacking:
        merging = replayed(SitesRecord.read(folder).answers)
    facts, answers, exchanged = calls.agree_on_data(caller, merging, claims)
    for line in claims.remarks:
        _log.warning("%s", line)
    if config.resume is not None:
        facts = as_before(folder, facts, caller)
    first = facts[sites[0]]
    config = take_facts(config, first.data)
    names = {key: first.data[key] for key in ("channels", "labels")}
    everyone = [algorithm.ClientInfo(c, facts[c].num_samples) for c in sites]
    half = federating.server_half(config, start, everyone, first.data["shape"], names)
    task, begun, account, federation, local = half
    here = Facts(1, tensors.digest(begun), first.data)
    calls.compare_models(here, first, "the coordinator", sites[0])
    federation.ledger = Ledger(federating.preprocessing(exchanged))
    if config.resume is None:
        start.write(folder, begun, account)
    evaluation = SitesEvaluation(*task.selection)
    status = Status(config.rounds, remarks=claims.remarks)

    def tell(*news: Any) -> None:
        status.change(*news)
        for site, epsilon in attendance.progress.epsilons.items():
            status.sites[site].epsilon = epsilon
        keep(status, caller.traffic, run)

    progress = progress or SitesProgress.new(sites)
    attendance = Attendance(caller, federation, facts, answers, job, progress, gone, tell)
    coordinator = Coordinator(attendance, evaluation.best_round)
    attendance.begin()
    module = SitesModule(task, federation, local, coordinator)
    if config.checkpoint.every > 1:
        _log.info("Across sites every round writes a checkpoint; checkpoint.every has no effect.")
    callbacks = callbacks_of(config.replacing({"checkpoint.every": 1}), evaluation)
    recorded = pl.callbacks.LambdaCallback(
        on_train_epoch_end=lambda *_: write_absences(run, coordinator.progress)
    )
    trainer = trainer_of(config, [*callbacks, recorded])
    run.open(config, {"clients": {c: {} for c in sites}, "files": {}}, {}, {})
    words = [answer.decode() for answer in answers]
    installed = {c: dict(there.versions) for c, there in greetings.items()}
    record = SitesRecord(job, dict(greeting.data), {c: facts[c] for c in sites}, words, installed)
    write_json(run.sites_json, msgspec.to_builtins(record))
    ends = ended(status, caller.traffic, run)
    with ends, loggers.marked_as_failed(trainer.logger), ranks_end_together(trainer):
        trainer.fit(module, ckpt_path=checkpoint, weights_only=True)
        write_json(run.hashes_json, coordinator.digests(module.next_round))
        memberships = federation.memberships()  # of all rounds, as in medfed train
        evaluation.check_selected()
        module.selected = evaluation.best_round()
        trainer.test(module, ckpt_path=best_checkpoint(folder), weights_only=True, verbose=False)
        values = coordinator.across(module.next_round) if caller.terms.across else {}
        summary = write(config, module, evaluation, memberships)
        if values:
            show_across(values, folder, "test")
        return summary


def as_before(folder: Path, facts: Mapping[str, Facts], caller: calls.Caller) -> dict[str, Facts]:
    """Compares the sites' facts with those at the start of the run."""
    before = SitesRecord.read(folder).clients
    for site, now in facts.items():
        calls.compare_models(before[site], now, "when the run began", site)
        if why := calls.other_samples(before[site], now):
            caller.lacking[site] = why
            _log.warning("The run continues without %s.", calls.sentence({site: why}))
    return before


def take_facts(config: RunDescription, data: Mapping[str, Any]) -> RunDescription:
    """Takes from the sites the facts that a simulation takes from the data."""
    if lacking := {*FACTS, "personal", "shape", "channels", "labels"} - set(data):
        raise SiteError(f"Sites do not report {min(lacking)}; install one version at all ends.")
    for key, value in vars(config.facts).items():
        if value is not None and value != data[key] and key != "patch_size":
            raise ConfigError(f"{key} is {value}, but in the data {data[key]}; leave it at null.")
    resolved = {key: data[key] for key in FACTS}
    if data["personal"] is not None:
        resolved["model.personal"] = data["personal"]
    return config.completed(resolved)


def before_of(config: RunDescription, sites: Sequence[str]) -> Before:
    """Returns the federation's name, the sites' progress, and the checkpoint to continue from."""
    if config.resume is None:
        return secrets.token_hex(16), None, None
    folder = Path(config.resume)
    record = SitesRecord.read(folder)
    if list(record.clients) != list(sites):
        sites_then = ", ".join(map(short, record.clients))
        raise ConfigError(in_words("other_sites", folder=folder, sites=sites_then))
    checkpoint = last_whole(RunFolder(folder).checkpoints)
    if checkpoint is None:
        return record.job, None, None
    saved = untrusted.read_checkpoint(checkpoint)
    if "sites" not in saved:
        raise ConfigError(f"The run in {folder} is a simulation; resume it by medfed train.")
    return record.job, SitesProgress.of(saved["sites"]), checkpoint


def write_absences(run: RunFolder, progress: SitesProgress) -> None:
    """Writes which sites were absent from which round, and why; nothing if none was."""
    if progress.left_out or progress.absent:
        absent = json.dumps([*progress.absent.items()], separators=(",", ":"))
        content = {
            "absent": {str(n): names for n, names in progress.absent.items()},
            "simulation": f"cohort.absent={absent}",  # an override
            "left_out": [{"round": n, "site": c, "why": why} for n, c, why in progress.left_out],
        }
        write_json(run.absences_json, content)


def write(
    config: RunDescription, module: SitesModule, evaluation: SitesEvaluation, members: Tensor | None
) -> dict[str, Any]:
    """Writes metrics, ledger, summary and pictures of a finished run; models are at the sites."""
    from medfed.run.pictures import bytes_per_client, membership_figures, metric_curves  # late

    run, federation = RunFolder(Path(config.folder)), module.federation
    if not (tested := list(evaluation.test)):
        raise SiteError("No site answered the test; resume the run when they are back.")
    best = evaluation.best_round()
    federation.count_delivery(module.next_round, tested)
    coordinator, known = module.coordinator, module.spent()
    spent = {c: known[c] for c in tested}
    summary = results.summarise(config, module, evaluation, best, spent)
    few_patients = (c for c in tested if coordinator.requests.small.get(c))
    summary["small"] = dict.fromkeys(few_patients, scores.FEW_CASES)
    if missing := [c for c in federation.ids if c not in tested]:
        summary["not_tested"] = missing
        away = coordinator.attendance.away
        why = {c: away.get(c, calls.SILENT) for c in missing}
        _log.warning("Not tested: %s.", calls.sentence(why))
    test = [scores.Record(best or 0, c, m) for c, m in evaluation.test.items()]
    write_text(run.metrics_csv, scores.metrics_csv(evaluation.history, test, evaluation.losses))
    write_text(run.ledger_csv, federation.ledger.to_csv())
    down, up = coordinator.caller.traffic.total()
    summary["wire"] = {"up": up, "down": down}
    if absent := coordinator.progress.absent:
        summary["left_out"] = {str(n): names for n, names in absent.items()}
        counts = Counter(site for names in absent.values() for site in names)
        lost = ", ".join(f"{short(site)} missed {count}" for site, count in counts.items())
        _log.info("Not all sites took part in all rounds: %s; absences.json says why.", lost)
    if (epsilons := coordinator.progress.epsilons) and config.privacy.example is not None:
        summary["epsilon"] = epsilons
        each = ", ".join(f"{short(site)} {epsilon:.3g}" for site, epsilon in epsilons.items())
        delta = config.privacy.example.delta
        _log.info("Epsilon, as the sites declare it, at delta %g: %s.", delta, each)
    figures = {"bytes": bytes_per_client(federation.ledger)} | dict(federation.pictures())
    if members is not None:
        table = Memberships.of(federation.ids, members, best)
        summary["memberships"] = table.summary()
        write_text(run.memberships_csv, table.to_csv())
        figures |= membership_figures(table)
    write_json(run.summary_json, summary)
    if evaluation.history:
        metric = evaluation.metric
        figures[f"val_{metric}"] = metric_curves(evaluation.history, metric, best)
    pictures = save_figures(run.pictures_folder, figures, config.pictures)
    loggers.end_logging(module.trainer.logger, pictures, summary)
    results.print_summary(summary, run.folder)
    text = "With heads, evaluations and starts, %s went to the sites and %s came from them; "
    _log.info(f"{text}traffic.csv counts each kind.", size(down), size(up))
    return summary
