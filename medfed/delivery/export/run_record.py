"""A finished run as its folder has it: models, and the facts about them; no patient data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from medfed.common.untrusted import read_json, read_tensors, reading
from medfed.config.allowed import check_plugins, check_targets, is_plugin
from medfed.config.compose import build, class_of
from medfed.config.sections import Section, without_places
from medfed.config.spelling import names_in
from medfed.delivery.bundle.metadata import FORMAT_VERSION
from medfed.delivery.bundle.networks import describe, ordinary, packages_of
from medfed.delivery.bundle.weights import Codebook, from_centers
from medfed.delivery.export.client_model import ClientModel, checked, from_canonical
from medfed.models.networks.canonical import Canonical
from medfed.models.networks.personal_part import part_roots
from medfed.models.segmentation import chosen_activation
from medfed.models.task import TaskModule
from medfed.records.folder import RunFolder
from medfed.records.tasks import build_task
from medfed.run.start import StartRecord
from medfed.standalone.errors import ConfigError
from medfed.standalone.files import digest, sha256

_NAMES = ("segmentation", "classification", "findings", "regression", "survival", "detection")
_TASKS = {f"medfed.models.{name}.{name.capitalize()}Task": name for name in _NAMES}
_TASKS |= {"medfed.models.classification.RiskTask": "risk"}


def task_of(model: Section) -> str:
    """Returns what a bundle calls the task of a model whose ``_target_`` was checked."""
    target = class_of(model)
    bases = {f"{of.__module__}.{of.__qualname__}": of for of in target.__mro__}
    known = next((name for name in bases if name in _TASKS), None)
    if known is None or target.probabilities is not bases[known].probabilities:
        raise ConfigError(
            f"A bundle cannot predict by model._target_={model['_target_']}, whose probabilities "
            "are its own; take the weights from models in the run folder."
        )
    if (task := _TASKS[known]) == "survival" and model["loss"] != "hazard":
        raise ConfigError(
            "A bundle predicts survival, for which model.loss=cox learns no baseline hazard; train "
            "with model.loss=hazard, or take the weights from models in the run folder."
        )
    return task


class RunRecord(RunFolder):
    """A finished run, of which bundles are made."""

    @classmethod
    def read(cls, folder: Path) -> RunRecord:
        """Reads a run folder."""
        run = cls(folder)
        for content in ("summary", "config", "splits", "versions", "preprocessing"):
            getattr(run, content)
        check_plugins(run.config, folder)
        run.compare_plugins(run.config.plugins)
        check_targets(run.config.plain(), exists=True)
        return run

    def chosen(self, wanted: str | Sequence[str]) -> list[str]:
        """Returns the chosen clients: ``all``, a name, several names, or names joined by commas."""
        if wanted == "all":
            return list(self.clients)
        names = names_in(wanted, self.clients) if isinstance(wanted, str) else wanted
        for name in names:
            self.check_client(name)
        return list(dict.fromkeys(names))

    def task(self) -> TaskModule:
        """Builds the task around the ordinary network, in single precision."""
        task: TaskModule = build(self.config.model)
        return task

    def client_model(self, client: str) -> ClientModel:
        """Returns a client's model in the form that a bundle holds."""
        loaded = read_tensors(self.files("models", self.clients)[client])
        plain, source = describe(self.config.model.network), f"{client} in {self.folder}"
        mixes = self.config.chosen("canonical")
        if mixes is None:
            return checked(plain, loaded, source)
        network, task = build_task(self.config.model, mixes, self.config.seed).network, self.task()
        assert isinstance(network, Canonical)
        parts = mixes.parts
        places = part_roots(task.network, task.personal if parts is None else parts)
        return from_canonical(network, plain, places, loaded, source)

    def learned(self, client: str, weights: Mapping[str, Tensor]) -> dict[str, Codebook]:
        """Returns the codebooks of the parameters whose centres were learned; empty without."""
        path = self.files("centers", self.clients)[client]
        if not path.is_file():
            return {}
        with reading(path):
            return {n: from_centers(weights[n], c.float()) for n, c in read_tensors(path).items()}

    def facts(self, client: str, network: Mapping[str, Any]) -> dict[str, Any]:
        """Gathers what is known of a client's model."""
        config = self.config.plain()
        model, metrics = config["model"], finite(self.summary["clients"][client])
        task = task_of(self.config.model)
        kind = self.preprocessing[client]["input"]["kind"]
        dims = ordinary(network).get("spatial_dims") or config.get("spatial_dims")
        dims = None if kind == "table" else dims
        segments, detects = task == "segmentation", task == "detection"
        chosen = None
        if segments:  # older runs did not write it down
            wanted, exclusive = model.get("activation", "auto"), model.get("exclusive")
            chosen = chosen_activation(wanted, len(model["regions"]), exclusive)
        point = self.summary.get("points", {}).get(client, {})
        level = model.get("threshold") if segments or detects else point.get("threshold")
        if segments:
            by_region = [point.get(f"threshold/{region}", level) for region in model["regions"]]
            level = by_region[0] if len({*by_region}) == 1 else by_region
        inference = ("patch_size", "overlap", "window_batch")
        return {
            "format_version": FORMAT_VERSION,
            "task": task,
            "client": client,
            "method": self.summary["algorithm"],
            "network": dict(network),
            "packages": packages_of(network),
            "spatial_dims": dims,
            "slices": segments and dims == 2,
            **self.preprocessing[client],
            # The simulated scanner of the hospital's training data, or None.
            "site": self.splits.get("partition", {}).get(client, {}).get("site"),
            **{key: model[key] if segments or detects else None for key in inference},
            "threshold": level,
            **({key: model[key] for key in ("anchors", "boxes")} if detects else {}),
            "calibration": [point["slope"], point["shift"]] if "slope" in point else None,
            "coverage": covering(point),
            "activation": chosen,
            "outcome_scale": model.get("scale") if task == "regression" else None,
            # Of the hashes of the data files and the hospital's patients.
            "data_hash": data_hash(self.splits, client),
            # Of this bundle's weights, and as trained; quantising changes the former.
            "test_metrics": metrics,
            "run_test_metrics": metrics,
            "card": self.card(client),
            "training_config": without_places(config),
            "commit": self.versions.get("commit", "unknown"),
            "versions": {k: v for k, v in self.versions.items() if k not in ("commit", "platform")},
        }

    def card(self, client: str) -> dict[str, Any]:
        """Gathers the facts that only the model card states; it names no patient."""
        summary, counted = self.summary, self.cohort_json
        cohort: dict[str, Any] = read_json(counted) if counted.is_file() else {"clients": {}}
        had = cohort["clients"].get(client, {})
        splits, chosen = self.splits["clients"][client], summary.get("selected_round")
        known = summary.get("intervals") or {"clients": {}}
        ends = known["clients"].get(client, {})
        intervals = {
            "level": known.get("level"),
            "resamples": known.get("resamples"),
            "patients": known.get("patients", {}).get(client),
            "metrics": {n: [*finite(dict(enumerate(e))).values()] for n, e in ends.items()},  # type: ignore[arg-type]
        }
        hospitals = summary.get("hospitals", len(summary["clients"]))
        # The folder of a site knows no others, and so no mean over them.
        whole = summary.get("federation", {}) if hospitals == len(summary["clients"]) else {}
        means = {n: over["mean"] for n, over in whole.items()}
        method = class_of(self.config.algorithm)
        known = "card" in vars(method) or not is_plugin(self.config.algorithm["_target_"])
        return {
            "round": None if chosen is None else chosen + 1,
            "rounds": summary.get("rounds"),
            "hospitals": hospitals,
            "keeps": method.card.keeps if known else None,
            "seed": self.config.get("seed"),
            "patients": {split: len(splits[split]) for split in splits},
            "samples": had.get("samples"),
            "missing": had.get("missing", {}).get("train", []),
            "notes": had.get("notes", []),
            "intervals": intervals if ends else None,
            "means": finite(means),
            "privacy": self.protection(client),
            "hashes": self._hashes(client),
        }

    def _hashes(self, client: str) -> dict[str, str]:
        """Of the run's files, and of those that it started from."""
        files = {"Trained weights": self.files("models", self.clients)[client]}
        files |= {path.name: path for path in (self.splits_json, self.config_yaml)}
        hashes = {name: sha256(path) for name, path in files.items() if path.is_file()}
        account = self.start_json
        if account.is_file():
            began = read_json(account, StartRecord).files
            hashes |= {f"Start, {Path(file).name}": sha for file, sha in began.items()}
        return hashes


def covering(point: Mapping[str, float]) -> dict[str, Any] | None:
    """Returns what a bundle says of sets and intervals.

    Example:
        >>> covering({"level": 0.9, "quantile/whole": 0.7, "patients/whole": 120.0})
        {'level': 0.9, 'quantiles': {'whole': 0.7}, 'patients': {'whole': 120}}
    """
    chosen = {n.partition("/")[2]: v for n, v in point.items() if n.startswith("quantile")}
    counts = {n.partition("/")[2]: int(v) for n, v in point.items() if n.startswith("patients")}
    return {"level": point["level"], "quantiles": chosen, "patients": counts} if chosen else None


def data_hash(splits: Mapping[str, Any], client: str) -> str:
    """Hashes which data a client's model was trained on; paths do not count.

    Example:
        >>> splits = {"files": {"a.nii": "12"}, "clients": {"A": {"train": ["p"]}}}
        >>> data_hash(splits, "A")[:12]
        '30351274273d'
    """
    return digest([sorted(splits["files"].values()), splits["clients"][client]])


def finite(metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    """Replaces NaN, which JSON does not have, by None.

    Example:
        >>> finite({"dice": 0.5, "hd95": float("nan")})
        {'dice': 0.5, 'hd95': None}
    """
    return {n: float(v) if v is not None and math.isfinite(v) else None for n, v in metrics.items()}
