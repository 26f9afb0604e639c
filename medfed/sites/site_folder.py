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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from medfed.common import schemas, tensors, untrusted
from medfed.common.scores import Record, failures_count, undefined_in
from medfed.config.description import RunDescription
from medfed.federation.budget import Passes
from medfed.federation.lightning.callbacks import History, PersonalEvaluation
from medfed.federation.reference import Newcomer
from medfed.federation.wire.ledger import Direction, Ledger
from medfed.federation.wire.packet import Packet
from medfed.records.folder import RunFolder, save_tensors, with_nan
from medfed.run import federating, results
from medfed.run.cohort import cohort_record
from medfed.run.experiment import Experiment
from medfed.run.privacy import protections, record
from medfed.sites import masks, wire
from medfed.sites.agreement import Agreed, SiteFile
from medfed.sites.policy import COUNTED, SPENT, Counted, Meter, Spending
from medfed.sites.site import ConfiguredSite, Site
from medfed.sites.wire import START, Reply, Request
from medfed.standalone import errors, files

Keep = Callable[[Path], object]
"""Makes the bundle of a finished run's folder."""
# In the folder of all federations:
LOG, REFUSALS = "log.txt", "refusals.txt"
LARGEST_LOG = 1 << 28
"""Bytes from which a log grows no further until somebody moves it: two million lines."""
# The content of ``validation.json``: metrics by round, null if undefined.
_Validation = list[tuple[schemas.Count, dict[str, float | None]]]


def hospital(
    agreed: Agreed, file: SiteFile, keep_bundle: Keep, signer: masks.Signer | None = None
) -> Site:
    """Makes a site from the agreement and its file; each federation has a separate folder."""
    workplace = ConfiguredSite.of(agreed, file)
    name = re.sub(r"[^\w.-]", "_", str(workplace.config.name))[:40]
    counted = Counted(file.folder / COUNTED, agreed.digest)
    spending = Spending(file.policy.privacy, file.folder / SPENT)
    place = workplace, file.folder / name, signer, counted
    site = RecordingSite(*place, keep_bundle=keep_bundle, spending=spending)
    listen(file.site, file.folder)
    if file.approved is None:
        site.log.warning(file.approval(agreed))
    return site


@dataclass(eq=False)
class RecordingSite(Site):
    """A site that keeps its results in its folder, and counts what leaves it, over all jobs."""

    workplace: ConfiguredSite
    keep_bundle: Keep = field(kw_only=True)
    spending: Spending = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ledger = Ledger()  # the bytes that this site has sent and received in finished rounds
        self.history: list[Record] = []  # its validation metrics
        self._of_round, self._turn, self._hospitals = Ledger(), (START, 0), 1

    def _folder_of(self, request: wire.Begin | wire.Onboard) -> Path:
        """Each federation has a folder; joining has another one than training."""
        joins = "-joined" * isinstance(request, wire.Onboard)
        return self._root.with_name(f"{self._root.name}-{request.job[:8]}{joins}")

    def begun(self, request: wire.Begin) -> None:
        """Opens the folder at the start of a session, or continues with its content."""
        run = RunFolder(self.folder)
        self._hospitals = len(request.clients)
        config = self._opened(run, str(run.folder) if run.config_yaml.is_file() else None)
        self.ledger, self.history = Ledger(federating.preprocessing(self.workplace.exchanged)), []
        self._turn, self._of_round = (START, 0), Ledger()
        if config.resume and run.ledger_csv.is_file():
            self.ledger = Ledger.from_csv(run.ledger_csv.read_text("utf-8"))
        if config.resume and run.validation_json.is_file():
            rows = untrusted.read_json(run.validation_json, _Validation)
            self.history = [Record(n, self.name, with_nan(metrics)) for n, metrics in rows]

    def _opened(self, run: RunFolder, resume: str | None) -> RunDescription:
        """Writes what is known before the first round; returns the configuration of the folder."""
        data = self.workplace.data
        config = self.workplace.config.replacing({"folder": str(run.folder), "resume": resume})
        cohort = {} if resume else cohort_record(data).record()
        run.open(config, data.splits(), {self.name: data.preprocessing(self.name)}, cohort)
        return config

    def guard(self) -> None:
        """Starts to count the noisy gradients of a new session, if they may be so many."""
        config, clients = self.workplace.config, self.workplace.data.clients
        if config.privacy.example is not None:
            taken = self.client.trainer.gradients
            for by in protections(config, clients, self.federation).values():
                place = self.spending, self.folder.name, by
                self.spending.check(self.folder.name, by)
                self.gate.meter = Meter(*place, lambda: taken.gradient_passes)

    def keep(self, request: Request, reply: Reply) -> None:
        """Records a request before its answer leaves."""
        if isinstance(request, wire.Hello | wire.Agree | wire.Begin):
            return
        run, number = RunFolder(self.folder), request.round
        if (number, request.attempt) != self._turn:
            self._turn, self._of_round = (number, request.attempt), Ledger()
        if isinstance(request, wire.Fit):
            ways: tuple[tuple[Direction, bytes], ...] = (("down", request.body), ("up", reply.body))
            for way, body in ways:
                packet = Packet.from_bytes(body, self.federation.most_elements)
                self._of_round.count(packet.sizes(), number, packet.phase, self.name, way)
        elif isinstance(request, wire.Commit):
            every = self.ledger.entries
            begun = [e for e in every if e.round < number or e.phase == "preprocessing"]
            self.ledger = Ledger([*begun, *self._of_round.entries])
            files.write_text(run.ledger_csv, self.ledger.to_csv())
        elif isinstance(request, wire.Evaluate) and request.split == "val":
            earlier = [r for r in self.history if r.round < number]
            metrics = dict(self.metrics)
            undefined = undefined_in(earlier[0].metrics) if earlier else None
            self.history = [*earlier, Record(number, self.name, failures_count(metrics, undefined))]
            files.write_json(run.validation_json, [(r.round, r.metrics) for r in self.history])
        elif isinstance(request, wire.Evaluate):
            self._finish(request)

    def joined(self, newcomer: Newcomer, model: tensors.Tensors, metrics: dict[str, float]) -> None:
        """Writes the folder of a site that has joined a trained federation."""
        run, federation, client = RunFolder(self.folder), self.federation, newcomer.client
        config = self._opened(run, None)
        save_tensors(run.files("models", [self.name])[self.name], model)
        before = federating.preprocessing(self.workplace.exchanged)
        federation.ledger = Ledger([*before, *newcomer.ledger.entries])
        self._hospitals = len(federation.ids) + 1
        self._report(self._experiment(config, metrics), None, (client.steps_done, client.passes))

    def _finish(self, request: wire.Evaluate) -> None:
        """Writes the model of the selected round, its metrics, and its bundle."""
        federation = self.federation
        packet = Packet.from_bytes(request.body, federation.most_elements)
        federation.ledger = Ledger([e for e in self.ledger.entries if e.phase != "deliver"])
        federation.ledger.count(packet.sizes(), request.round, "deliver", self.name, "down")
        config = self.workplace.config.replacing({"folder": str(self.folder)})
        experiment = self._experiment(config, dict(self.metrics))
        experiment.evaluation.history = History(self.history)
        experiment.module.next_round = request.round
        with self.arrived(packet):
            results.save_models(experiment)
            results.save_predictions(experiment)
        best = None if request.selected == START else request.selected
        # Steps count all rounds, not only those up to the selected one.
        last = self._read(max(rounds)) if (rounds := self.rounds()) else self._states[START]
        self._report(experiment, best, (last["steps"], Passes(*last["passes"])))

    def _experiment(self, config: RunDescription, metrics: dict[str, float]) -> Experiment:
        """Returns the run of this client alone, with its test metrics."""
        place, module = self.workplace, self.module
        evaluation = PersonalEvaluation(*place.task.selection)
        evaluation.test, evaluation.cases = {self.name: metrics}, dict(module.cases)
        evaluation.points = dict(module.points)
        parts = place.data, place.task, module, evaluation, module.trainer
        return Experiment(config, *parts, Path(config.folder))

    def _report(self, experiment: Experiment, best: int | None, spent: tuple[int, Passes]) -> None:
        """Writes tables, figures and the bundle of the model."""
        config, folder = experiment.config, experiment.folder
        module, evaluation = experiment.module, experiment.evaluation
        summary = results.summarise(config, module, evaluation, best, {self.name: spent})
        summary["hospitals"] = self._hospitals  # only this client: a mean over clients is its value
        results.write_tables(experiment, summary, best)
        if (meter := self.gate.meter) is not None:
            of = {self.name: meter.by}, {self.name: meter.taken()}
            recorded = record(config, module.federation, *of)
            files.write_json(RunFolder(folder).privacy_json, recorded)
        results.draw(experiment, best)
        self.log.info("The model and metrics of this site are in %s.", folder)
        try:
            self.keep_bundle(folder)
        except errors.MedfedError as error:  # the model and the other results exist without it
            self.log.warning("The bundle was not made: %s", error)


class _Log(logging.FileHandler):
    """A log that ends at a size, so that requests without end do not fill the disk."""

    def emit(self, record: logging.LogRecord) -> None:
        """See the base class."""
        if self.stream is None or self.stream.tell() < LARGEST_LOG:
            super().emit(record)


def listen(name: str, folder: Path) -> logging.Logger:
    """Writes the log of a site, and of no other in this process, to files."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # patients' ids are in it
    log = logging.getLogger(f"medfed.sites.site.{name}")
    log.setLevel(logging.INFO)
    for each, file in ((log, LOG), (log.getChild("refused"), REFUSALS)):
        for handler in list(each.handlers):
            each.removeHandler(handler)
            handler.close()
        handler = _Log(folder / file, encoding="utf-8", delay=True)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        each.addHandler(handler)
    return log
