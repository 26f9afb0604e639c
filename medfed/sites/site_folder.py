"""A site's folder: its model and bundle, its metrics, ledger, figures, and a log.

The folder has the form of a run folder with one client: ``config.yaml``, ``splits.json``,
``cohort.json`` and ``preprocessing.json`` before the first round; ``ledger.csv`` and
``validation.json`` after each; ``models``, ``bundle``, ``metrics.csv``, ``cases.csv``,
``summary.json`` and ``pictures`` once the selected round was tested, which equal those of a
simulation's client. ``log.txt``, next to the folders of a site's federations, begins with the
site's process and holds refusals and errors, with texts that never leave the site;
``refusals.txt`` holds the refusals alone.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from medfed.common import schemas, untrusted
from medfed.common.scores import Record, failures_count, undefined_in
from medfed.common.tensors import Tensors, digest
from medfed.config.description import RunDescription
from medfed.datamodules.base import Exchanged
from medfed.federation.budget import Passes
from medfed.federation.lightning.callbacks import PersonalEvaluation
from medfed.federation.reference import Newcomer
from medfed.federation.wire.ledger import Direction, Ledger
from medfed.federation.wire.packet import Packet
from medfed.records.folder import RunFolder, save_tensors, with_nan
from medfed.run import results
from medfed.run.cohort import cohort_record
from medfed.run.experiment import Experiment
from medfed.run.federating import preprocessing
from medfed.run.privacy import Protection, protections, record
from medfed.sites import wire
from medfed.sites.agreement import Agreed, SiteFile
from medfed.sites.masks import Signer
from medfed.sites.policy import COUNTED, SPENT, Counted, Spending
from medfed.sites.site import ConfiguredSite, Site
from medfed.sites.wire import START, Reply, Request
from medfed.standalone import errors, files

Metrics = dict[str, float]
Spent = tuple[int, Passes]
# In the folder of all federations:
LOG, REFUSALS = "log.txt", "refusals.txt"


@dataclass(frozen=True)
class _Spent:
    """The costs of the rounds."""

    steps: schemas.Count
    passes: Passes


@dataclass(frozen=True)
class _Validation:
    """The content of ``validation.json``: metrics by round, null if undefined."""

    metrics: Sequence[tuple[schemas.Count, Mapping[str, float | None]]]
    spent: _Spent


def hospital(
    agreed: Agreed,
    file: SiteFile,
    keep_bundle: Callable[[Path], object],
    signer: Signer | None = None,
) -> Site:
    """Makes a site from the agreement and its file; each federation has a separate folder."""
    workplace = ConfiguredSite.of(agreed, file)
    name = re.sub(r"[^\w.-]", "_", str(workplace.config.name))[:40]
    counted = Counted(file.folder / COUNTED, agreed.digest)
    spending = Spending(file.policy.privacy, file.folder / SPENT)
    keeper = SiteFolder(workplace, keep_bundle, counted, spending)
    site = Site(workplace, file.folder / name, keeper, signer, counted)
    listen(file.site, file.folder)
    if file.approved is None:
        site.log.warning(file.approval(agreed))
    return site


@dataclass(eq=False)
class SiteFolder:
    """Keeps a site's results, and counts what leaves it, over all jobs."""

    workplace: ConfiguredSite
    keep_bundle: Callable[[Path], object]
    counted: Counted
    spending: Spending

    def __post_init__(self) -> None:
        self._protection: Protection | None = None
        self._gradients = 0  # of this session, also of rounds that came to nothing
        self.name = self.workplace.name
        self.ledger = Ledger()  # the bytes that this site has sent and received in finished rounds
        self.history: list[Record] = []  # its validation metrics
        self._of_round = Ledger()
        self._turn = (START, 0)
        self._spent: tuple[int, Passes] = (0, Passes())
        self._hospitals = 1

    def begin(self, site: Site, asked: wire.Begin) -> None:
        """Opens the folder at the start of a session, or continues with its content."""
        run = RunFolder(site.folder)
        self._hospitals = len(asked.clients)
        config = self._opened(run, str(run.folder) if run.config_yaml.is_file() else None)
        self.ledger = Ledger(preprocessing(self._exchanged()))
        self.history, self._spent = [], (0, Passes())
        self.guard(site)
        if self._protection is not None:
            self.spending.check(run.folder.name, self._protection)
        self._turn, self._of_round = (START, 0), Ledger()
        if config.resume and run.ledger_csv.is_file():
            self.ledger = Ledger.from_csv(run.ledger_csv.read_text("utf-8"))
        if config.resume and run.validation_json.is_file():
            kept = untrusted.read_json(run.validation_json, _Validation)
            self.history = [Record(n, self.name, with_nan(m)) for n, m in kept.metrics]
            self._spent = kept.spent.steps, kept.spent.passes

    def _opened(self, run: RunFolder, resume: str | None) -> RunDescription:
        """Writes what is known before the first round; returns the configuration of the folder."""
        data = self.workplace.data
        config = self.workplace.config.replacing({"folder": str(run.folder), "resume": resume})
        cohort = {} if resume else cohort_record(data).record()
        run.open(config, data.splits(), {self.name: data.preprocessing(self.name)}, cohort)
        return config

    def guard(self, site: Site) -> None:
        """Starts to count the noisy gradients of a new session."""
        self._protection, self._gradients = None, 0
        config, clients = self.workplace.config, self.workplace.data.clients
        if config.privacy.example is not None:
            self._protection = protections(config, clients, site.federation)[self.name]

    def after(self, site: Site, asked: Request, reply: Reply) -> None:
        """Records a request before its answer leaves; an error that it raises is the answer."""
        if isinstance(asked, wire.Hello | wire.Agree | wire.Begin):
            return
        self._spend(site)
        run, number = RunFolder(site.folder), asked.round
        if (number, asked.attempt) != self._turn:
            self._turn, self._of_round = (number, asked.attempt), Ledger()
        if isinstance(asked, wire.Fit):
            ways: tuple[tuple[Direction, bytes], ...] = (("down", asked.body), ("up", reply.body))
            for way, body in ways:
                packet = Packet.from_bytes(body, site.federation.most_elements)
                self._of_round.count(packet.sizes(), number, packet.phase, self.name, way)
        elif isinstance(asked, wire.Commit):
            every = self.ledger.entries
            begun = [e for e in every if e.round < number or e.phase == "preprocessing"]
            self.ledger = Ledger([*begun, *self._of_round.entries])
            files.write_text(run.ledger_csv, self.ledger.to_csv())
            self._spent = site.client.steps_done, site.client.passes
            self._keep(run)
        elif isinstance(asked, wire.Evaluate) and asked.split == "val":
            earlier = [r for r in self.history if r.round < number]
            metrics = dict(site.metrics)
            undefined = undefined_in(earlier[0].metrics) if earlier else None
            self.history = [*earlier, Record(number, self.name, failures_count(metrics, undefined))]
            self._keep(run)
        elif isinstance(asked, wire.Evaluate):
            self._finish(site, asked, dict(site.metrics))
            self._test(asked.body)  # last: the model is kept where its metrics may not leave
        elif isinstance(asked, wire.Across) and asked.of != self.name:
            self._test(asked.body)

    def _test(self, model: bytes) -> None:
        self.counted.add_test(model, self.workplace.policy.test_metrics)

    def _spend(self, site: Site) -> None:
        """Counts the noisy gradients since the last request, before what they gave leaves."""
        if self._protection is not None:
            taken = site.client.trainer.gradients.gradient_passes
            new, self._gradients = taken - self._gradients, taken
            if new:
                self.spending.add(site.folder.name, self._protection, new)

    def joined(self, site: Site, newcomer: Newcomer, model: Tensors, metrics: Metrics) -> None:
        """Writes the folder of a site that has joined a trained federation."""
        run, federation, client = RunFolder(site.folder), site.federation, newcomer.client
        config = self._opened(run, None)
        save_tensors(run.files("models", [self.name])[self.name], model)
        federation.ledger = Ledger([*preprocessing(self._exchanged()), *newcomer.ledger.entries])
        self._hospitals = len(federation.ids) + 1
        experiment = self._experiment(site, config, metrics)
        self._report(site, experiment, None, (client.steps_done, client.passes))
        self._test(digest(model).encode())

    def epsilon(self, site: Site) -> float | None:
        """Returns what the run has spent so far, unless ``policy.parts`` does not name it."""
        parts = self.workplace.policy.parts
        if self._protection is None or not (parts is None or "epsilon" in parts):
            return None
        return self._protection.epsilon(self._taken(site.folder))

    def _taken(self, folder: Path) -> int:
        """The noisy gradients of the run of a folder."""
        return self._protection.uses * self.spending.draws(folder.name) if self._protection else 0

    def _exchanged(self) -> list[Exchanged]:
        statements, answers = self.workplace.exchanged
        pairs = zip(statements, answers, strict=True)
        return [(self.name, way, len(b)) for t, a in pairs for way, b in (("up", t), ("down", a))]  # type: ignore[misc]

    def _keep(self, run: RunFolder) -> None:
        steps, passes = self._spent
        metrics = [(r.round, r.metrics) for r in self.history]
        kept = _Validation(metrics, _Spent(steps, passes))
        files.write_json(run.validation_json, asdict(kept))

    def _finish(self, site: Site, asked: wire.Evaluate, metrics: Metrics) -> None:
        """Writes the model of the selected round, its metrics, and its bundle."""
        federation = site.federation
        packet = Packet.from_bytes(asked.body, federation.most_elements)
        federation.ledger = Ledger([e for e in self.ledger.entries if e.phase != "deliver"])
        federation.ledger.count(packet.sizes(), asked.round, "deliver", self.name, "down")
        config = self.workplace.config.replacing({"folder": str(site.folder)})
        experiment = self._experiment(site, config, metrics)
        experiment.evaluation.history, experiment.module.next_round = self.history, asked.round
        with site.arrived(packet):
            results.save_models(experiment)
            results.save_predictions(experiment)
        best = None if asked.selected == START else asked.selected
        # Steps count all rounds, not only those up to the selected one.
        self._report(site, experiment, best, self._spent)

    def _experiment(self, site: Site, config: RunDescription, metrics: Metrics) -> Experiment:
        """Returns the run of this client alone, with its test metrics."""
        place, module = self.workplace, site.module
        assert module is not None
        evaluation = PersonalEvaluation(*place.task.selection)
        evaluation.test, evaluation.cases = {self.name: metrics}, dict(module.cases)
        evaluation.points = dict(module.points)
        parts = place.data, place.task, module, evaluation, module.trainer
        return Experiment(config, *parts, Path(config.folder))

    def _report(self, site: Site, experiment: Experiment, best: int | None, spent: Spent) -> None:
        """Writes tables, figures and the bundle of the model."""
        config, folder = experiment.config, experiment.folder
        module, evaluation = experiment.module, experiment.evaluation
        used = {self.name: spent}
        summary = results.summarise(config, module, evaluation, best, used)
        summary["hospitals"] = self._hospitals  # only this client: a mean over clients is its value
        results.write_tables(experiment, summary, best)
        if (by := self._protection) is not None:
            taken = {self.name: self._taken(folder)}
            kept = record(config, module.federation, {self.name: by}, taken)
            files.write_json(RunFolder(folder).privacy_json, kept)
        results.draw(experiment, best)
        try:
            self.keep_bundle(folder)
        except errors.MedfedError as error:  # the model and the other results exist without it
            site.log.warning("The bundle was not made: %s", error)


def listen(name: str, folder: Path) -> logging.Logger:
    """Writes the log of a site, and of no other in this process, to files."""
    folder.mkdir(parents=True, exist_ok=True)
    log = logging.getLogger(f"medfed.sites.site.{name}")
    log.setLevel(logging.INFO)
    for each, file in ((log, LOG), (log.getChild("refused"), REFUSALS)):
        for handler in list(each.handlers):
            each.removeHandler(handler)
            handler.close()
        handler = logging.FileHandler(folder / file, encoding="utf-8", delay=True)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        each.addHandler(handler)
    return log
