"""The run folder: its content, written by the run and read by later commands."""

from __future__ import annotations

import math
import platform
import shlex
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict

import numpy as np
import yaml  # type: ignore[import-untyped]

from medfed.common.console import file_names
from medfed.common.schemas import Count, fit
from medfed.common.scores import Record, declare
from medfed.common.untrusted import read_json, read_rows, read_tensors, read_yaml, reading
from medfed.config.allowed import fingerprints
from medfed.config.compose import changed_keys
from medfed.config.description import RunDescription, as_yaml
from medfed.config.sections import Section, select
from medfed.federation.wire.ledger import Ledger
from medfed.records.places import Places, refusal
from medfed.standalone import errors
from medfed.standalone.files import atomic, digest, write_json, write_text

if TYPE_CHECKING:
    from torch import Tensor, nn

    from medfed.models.contours import Case

PACKAGES = (*("medfed", "torch", "pytorch-lightning", "monai", "numpy", "scikit-learn"),)
# What may differ between a run and its continuation: where and how it runs, not what it computes.
NOT_THE_EXPERIMENT = (
    *("resume", "folder", "trainer", "logger", "progress", "plugins", "pictures", "derived"),
    *("tuned", "by_method"),  # stand where they are used
    # change no bit
    *("data.workers", "data.memory_gb", "data.cache", "cohort.memory_gb"),
    *("local.resident_gib", "local.resident_states"),
)
_NO_METRIC = ("round", "client", "split")  # columns of metrics.csv
_Values = dict[str, float | None]  # null where NaN was written


class _Mean(TypedDict):
    mean: float | None
    sd: float | None
    worst: float | None


class _Bytes(TypedDict):
    up: Count
    down: Count


class _Config(TypedDict):
    """The keys of ``config.yaml`` that readers of a run use."""

    name: str
    seed: int
    rounds: Count
    algorithm: dict[str, Any]
    codec: dict[str, Any]
    cohort: dict[str, Any]
    data: dict[str, Any]
    local: dict[str, Any]
    model: dict[str, Any]
    optimizer: dict[str, Any]
    trainer: dict[str, Any]


class _Splits(TypedDict):
    """The content of ``splits.json``."""

    clients: dict[str, dict[str, list[str]]]
    files: dict[str, str]
    labels: NotRequired[str]


class _Constant(TypedDict):
    """The metrics of a constant prediction for all patients."""

    clients: dict[str, _Values]
    federation: dict[str, _Mean]


class _Intervals(TypedDict):
    """Both ends of each metric's interval."""

    clients: dict[str, dict[str, list[float | None]]]
    mean: dict[str, list[float | None]]
    pooled: dict[str, list[float | None]]


class _Contribution(TypedDict):
    """How unlike the others' a client's updates are, and their cosine in each round."""

    contribution: float | None
    cosines: list[float | None]


class _Summary(TypedDict):
    """The keys of ``summary.json`` that readers of a run use."""

    name: str
    algorithm: str
    selection: tuple[str, Literal["min", "max"]]
    selected_round: Count | None
    rounds: Count
    improving: NotRequired[bool]
    clients: dict[str, _Values]
    federation: dict[str, _Mean]
    bytes: _Bytes
    savings: TypedDict("_Savings", {"up": float, "down": float})  # type: ignore[valid-type]
    bytes_by_client: dict[str, _Bytes]
    steps: dict[str, Count]
    gradient_passes: dict[str, Count]
    forward_passes: dict[str, Count]
    constant: NotRequired[dict[str, _Constant]]
    intervals: NotRequired[_Intervals]
    epsilon: NotRequired[dict[str, float]]  # of each site, as it declares it
    contributions: NotRequired[dict[str, _Contribution]]  # of updates that the server saw
    memberships: NotRequired[dict[str, float | dict[str, Any] | None]]  # of canonical models


class _Protected(TypedDict):
    """The noise for a client's patients."""

    noise: float
    delta: float
    epsilon: float
    gradients: Count


class _Example(TypedDict):
    unit: str
    clients: dict[str, _Protected]


class _Privacy(TypedDict):
    """The keys of ``privacy.json`` that readers of a run use."""

    private: bool
    example: NotRequired[_Example]


def git_commit(folder: Path) -> str:
    """Returns the commit of a clone, marked if it has changes; otherwise ``unknown``."""
    if not (folder / ".git").exists():
        return "unknown"  # an installed package may lie within a repository of the user's
    # Not `git describe`, which writes the index: on a full disk it would leave its lock.
    looks = ("--no-optional-locks", "status", "--porcelain=v2", "--branch", "--untracked-files=no")
    try:
        done = subprocess.run(
            ["git", *looks], cwd=folder, capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    head, *rest = done.stdout.splitlines()
    commit, changed = head.split()[-1], any(not line.startswith("#") for line in rest)
    if commit == "(initial)":
        return "unknown"
    return f"{commit}-dirty" if changed else commit


def commit_here() -> str:
    """Returns the commit of this clone of medfed."""
    return git_commit(Path(__file__).parents[2])


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that a result depends on."""
    installed = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            installed[package] = "not installed"
    return installed


def _some(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)[:5]) or "a copy"


@dataclass(frozen=True)
class RunFolder(Places):
    """The files of a run: each file's path and content."""

    # The first access to a file's content reads and checks it; a missing, damaged or invalid
    # file raises a ``CheckpointError`` that names it.

    folder: Path  # the run folder

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str | Path):
            raise errors.ConfigError(f"folder must be a text or a path, not {self.folder!r}.")
        object.__setattr__(self, "folder", Path(self.folder))

    def evaluation_json(self, split: str) -> Path:
        """Returns the path of the results of ``medfed evaluate`` on a split."""
        return self.folder / f"evaluation_{split}.json"

    def subsets_csv(self, split: str) -> Path:
        """Returns the path of its results on subsets of the channels."""
        return self.folder / f"subsets_{split}.csv"

    def files(
        self, kind: Literal["models", "centers", "predictions"], clients: Iterable[str]
    ) -> dict[str, Path]:
        """Returns the file of each client."""
        if kind != "predictions":
            self._check_models()
        ending = "npz" if kind == "predictions" else "safetensors"
        names = file_names(clients)
        return {c: self.folder / kind / f"{name}.{ending}" for c, name in names.items()}

    @property
    def rounds(self) -> list[Path]:
        """The checkpoints of rounds, oldest first."""
        return sorted(self.checkpoints.glob("round_*.ckpt"))

    def open(
        self,
        config: RunDescription,
        splits: Mapping[str, Any],
        preprocessing: Mapping[str, Any],
        cohort: Mapping[str, Any],
    ) -> None:
        """Writes the facts before the first round, or checks them against a run to continue."""
        if config.resume is not None:
            recorded = read_json(self.splits_json, _Splits)["files"]
            if any(recorded.get(file, value) != value for file, value in splits["files"].items()):
                self.check_data(splits)  # as what follows from the data may also have changed
            self.check_keys(changed_keys(self.config, config.values, NOT_THE_EXPERIMENT))
            self.check_data(splits)
            self.compare_plugins(config.plugins)
            return
        code = {"commit": commit_here(), "plugins": fingerprints(config.plugins)}
        facts: dict[Path, Mapping[str, Any]] = {
            self.versions_json: {**versions(), **code},
            self.splits_json: splits,
            self.preprocessing_json: preprocessing,
            self.cohort_json: cohort,
        }
        if (plan := config.facts.plan) is not None:
            facts[self.plan_json] = {"sha256": digest(plan), "plan": plan}
        for path, content in facts.items():
            write_json(path, content)
        if config.overrides is not None:  # what was typed, for whoever resumes the run
            write_text(self.overrides_yaml, as_yaml(list(config.overrides)))
        # The last one: by it a run folder is known.
        write_text(self.config_yaml, config.yaml())

    def check_typed(self, config: RunDescription) -> None:
        """Compares what no data fill in with the run to continue, before any data are read."""
        filled = ("model", "algorithm")  # may name inputs, for which the run has their numbers
        changed = changed_keys(self.config, config.values, [*NOT_THE_EXPERIMENT, *filled])
        self.check_keys([change for change in changed if "None" not in change.rpartition("->")[2]])

    def check_keys(self, changed: list[str]) -> None:
        """Refuses to continue a run with another configuration."""
        if changed:
            changed.sort(key=lambda change: change.partition(":")[0].count("."))
            words = shlex.join(["medfed", "train", *self.overrides, f"resume={self.folder}"])
            how = f"by {words}" if self.overrides else "with the same overrides."
            raise errors.CheckpointError(
                f"{self.other_commit()}The run in {self.folder} has another configuration "
                f"({'; '.join(changed[:5])}); start a new run, or resume {how}"
            )

    def compare_plugins(self, folders: Sequence[str] | None) -> None:
        """Warns if the files of plugin folders are not those that made the run."""
        # imported here: the other questions need no PyTorch
        from medfed.federation.lightning.collect import warn

        made, now = self.versions.get("plugins", {}), fingerprints(folders or ())
        if changed := [f for f, content in now.items() if content not in made.values()]:
            warn(
                f"Files in {', '.join(changed)} have changed since the run in {self.folder} began; "
                "if its code is among them, restore it, or start a new run."
            )

    def check_data(self, splits: Mapping[str, Any]) -> None:
        """Compares the data with those of the run, wherever its record is opened again."""
        recorded, record, why = read_json(self.splits_json, _Splits), self.splits_json, ""
        then, now = recorded["files"], splits["files"]
        before, after = recorded["clients"], splits["clients"]
        if sorted(then.values()) != sorted(now.values()):  # the files may have moved
            known = {*then.values()} & {*now.values()}
            odd = {Path(file).name for file, value in {**then, **now}.items() if value not in known}
            why = f"The data files are not those that {record} records: {_some(odd)} changed"
        elif recorded.get("labels", "") not in ("", splits.get("labels", "")):
            why = f"The labels of the patients are not those that {record} records"
        elif odd := {c for c in {**before, **after} if before.get(c) != after.get(c)}:
            why = f"The data do not give the splits that {record} records for {_some(odd)}"
        if why:
            raise errors.CheckpointError(f"{why}; restore the data of the run, or start a new run.")

    @cached_property
    def config(self) -> Section:
        """The resolved configuration, facts of the data filled in."""
        self._check_opened()
        self._check_version()
        plain = read_yaml(self.config_yaml, _Config)
        # A run writes values; what stands for one could read the environment of the reader.
        if "${" in repr(plain):
            raise errors.CheckpointError(
                f"{self.config_yaml} holds an interpolation (${{...}}), which no run writes; "
                "replace it by its value."
            )
        for name, metric in (select(plain, "model.metrics") or {}).items():
            declare(str(name), str(metric.get("direction")), metric.get("worst"))
        return Section(plain)

    def _check_opened(self) -> None:
        if not self.config_yaml.is_file():
            raise errors.CheckpointError(refusal(self.folder))

    def _check_version(self) -> None:
        """Refuses a run of an earlier minor version, whose classes and keys may be named else."""
        if not self.versions_json.is_file():
            return
        made, ours = str(self.versions.get("medfed")), versions()["medfed"]
        # A clone that is not installed has no version to compare.
        comparable = made[:1].isdigit() and ours[:1].isdigit()
        if comparable and made.rpartition(".")[0] != ours.rpartition(".")[0]:
            raise errors.CheckpointError(
                f"medfed {made} made the run in {self.folder}, and this is medfed {ours}; open it "
                "with that version, or repeat the run."
            )

    def other_commit(self) -> str:
        """Says which commit of medfed made the run, if another one opens it; else nothing."""
        made = str(self.versions.get("commit", "")) if self.versions_json.is_file() else ""
        commits = [commit.partition("-")[0][:10] for commit in (made, commit_here())]
        if commits[0] == commits[1] or {"", "unknown"} & {*commits}:
            return ""
        return (
            f"Commit {commits[0]} of medfed made the run, and this is commit {commits[1]}; open it "
            "with that one, or repeat the run. "
        )

    @cached_property
    def versions(self) -> dict[str, Any]:
        """The versions of the packages that made it, the commit, the plugins' hashes."""
        read: dict[str, Any] = read_json(self.versions_json)
        return read

    @cached_property
    def overrides(self) -> list[str]:
        """What was typed; empty where a run was not started from a command line."""
        if not self.overrides_yaml.is_file():
            return []
        with reading(self.overrides_yaml):
            typed = yaml.safe_load(self.overrides_yaml.read_text(encoding="utf-8"))
            if not isinstance(typed, list) or not all(isinstance(word, str) for word in typed):
                raise ValueError("it is no list of overrides")
        return typed

    @cached_property
    def splits(self) -> dict[str, Any]:
        """``clients``: patient ids per client and split; ``files``: hashes of the data."""
        splits: dict[str, Any] = {**read_json(self.splits_json, _Splits)}
        with reading(self.splits_json):
            if lacking := set(self.summary["clients"]) - set(splits["clients"]):
                raise ValueError(f"it lacks the client {min(lacking)} of summary.json")
        return splits

    @property
    def patients(self) -> dict[str, dict[str, list[str]]]:
        """Patient ids per client and split; a coordinator of sites knows none."""
        clients: dict[str, dict[str, list[str]]] = self.splits["clients"]
        return {c: parts or {"train": [], "val": [], "test": []} for c, parts in clients.items()}

    def protection(self, client: str) -> dict[str, Any] | None:
        """Returns the noise for a client's patients, its unit, and whether nobody can repeat it."""
        if not self.privacy_json.is_file():
            return None
        recorded = read_json(self.privacy_json, _Privacy)
        if "example" not in recorded or client not in recorded["example"]["clients"]:
            return None
        unit, private = recorded["example"]["unit"], recorded["private"]
        return {**recorded["example"]["clients"][client], "unit": unit, "private": private}

    @cached_property
    def preprocessing(self) -> dict[str, dict[str, Any]]:
        """What becomes of each client's scans before its network sees them."""
        self._check_models()
        steps = read_json(self.preprocessing_json, dict[str, dict[str, Any]])
        with reading(self.preprocessing_json):
            if lacking := set(self.summary["clients"]) - set(steps):
                raise ValueError(f"it has no client {min(lacking)}")
        return steps

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Selected round, test metrics by client and over clients, bytes, steps."""
        self._check_opened()
        path = self.summary_json
        if not path.is_file():
            raise errors.CheckpointError(
                f"The run in {self.folder} has not finished (it has no summary.json); finish it "
                f"with the overrides that started it and resume={self.folder}."
            )
        summary: dict[str, Any] = read_json(path)
        with reading(path):
            fit(summary, _Summary)
        for key in {"constant", "intervals"} & summary.keys():
            summary[key] = with_nan(summary[key])
        for of in ("clients", "federation"):
            summary[of] = {name: with_nan(values) for name, values in summary[of].items()}
        clients = summary["clients"]
        with reading(path):
            metrics = set(summary["federation"])
            if not clients or any(not metrics <= set(values) for values in clients.values()):
                raise ValueError("its clients do not have the same metrics")
            if any(
                set(summary[key]) != set(clients)
                for key in ("steps", "gradient_passes", "forward_passes", "bytes_by_client")
            ):
                raise ValueError("steps and bytes are not those of its clients")
            if summary["selection"][0] not in metrics:
                raise ValueError("the metric that selected its round is not among its metrics")
        return summary

    def about(self) -> dict[str, Any]:
        """Returns of which model of which run a later record speaks."""
        keys = ("name", "algorithm", "selection", "selected_round")
        return {key: self.summary[key] for key in keys}

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.config.seed)

    @property
    def clients(self) -> tuple[str, ...]:
        """The clients, in order."""
        return tuple(self.summary["clients"])

    @cached_property
    def _rows(self) -> list[dict[str, str]]:
        """The rows of ``metrics.csv``; a whole one ends with the test metrics of all clients."""
        rows = read_rows(self.metrics_csv, _NO_METRIC)
        with reading(self.metrics_csv):
            tested = {row["client"] for row in rows if row["split"] == "test"}
            if lacking := set(self.summary["clients"]) - tested:
                raise ValueError(f"it ends before the test metrics of {min(lacking)}")
        return rows

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A row per round, client and split, with a number per metric."""
        with reading(self.metrics_csv):
            return [dict(_typed(row)) for row in self._rows]

    def cases(self) -> list[dict[str, str]]:
        """Reads the rows of ``cases.csv``: a client, a patient and what the model said."""
        return read_rows(self.cases_csv, ("client", "patient"))

    def history(self) -> list[Record]:
        """Returns the validation metrics of every evaluated round."""
        names = [name for name in self._rows[0] if name not in _NO_METRIC]
        rows = (row for row in self.metrics if row["split"] == "val")
        return [
            Record(row["round"], row["client"], {n: row.get(n, math.nan) for n in names})
            for row in rows
        ]

    @cached_property
    def ledger(self) -> Ledger:
        """Every byte that travelled; it adds up to what the summary says."""
        with reading(self.ledger_csv):
            try:
                ledger = Ledger.from_csv(self.ledger_csv.read_bytes().decode())
            except errors.CodecError as error:
                raise ValueError(errors.first_line(error)) from error
            sent = {way: ledger.total(direction=way) for way in ("up", "down")}
            if sent != (summed := self.summary["bytes"]):
                raise ValueError(f"it adds up to {sent} bytes, but summary.json says {summed}")
        return ledger

    @property
    def pictures(self) -> dict[str, Path]:
        """The pictures' files by name."""
        return {p.stem: p for p in sorted(self.pictures_folder.glob("*.png"))}

    def check_client(self, client: str) -> None:
        """Refuses the name of a client that the run does not have."""
        if client not in self.clients:
            raise errors.ConfigError(
                f"The run in {self.folder} has no client {client}"
                f"{errors.did_you_mean(client, self.clients)}; "
                f"it has {errors.few(errors.quoted(self.clients))}."
            )

    def check_simulation(self, what: str) -> None:
        """Refuses the folder of a run across hospitals, or of a site."""
        if self.sites_json.is_file() or self.job_json.is_file():
            raise errors.ConfigError(f"The run in {self.folder} was across sites, {what}.")

    def _check_models(self) -> None:
        """Refuses the folder of a coordinator."""
        if self.sites_json.is_file():
            raise errors.ConfigError(
                f"The run in {self.folder} was across sites, and this is the coordinator's folder, "
                "which holds no model: the log of each hospital names the folder with its model "
                "and bundle; medfed export run=SITE_FOLDER there makes others."
            )

    def model(self, client: str) -> nn.Module:
        """Returns a client's personal network, in evaluation mode."""
        # imported here: the other questions need no PyTorch
        from medfed.federation.other_state import filled
        from medfed.federation.split import float_entries
        from medfed.records.tasks import build_task

        self.check_client(client)
        path = self.files("models", self.clients)[client]
        weights = read_tensors(path)
        config, mixes = self.config, self.config.chosen("canonical")
        with reading(path):
            network = filled(build_task(config.model, mixes, self.seed).network, weights)
            if not set(float_entries(network)) <= set(weights):
                raise ValueError("its entries are not those of the run's network")
            return network.eval()


class Run(RunFolder):
    """A finished run, as its folder has it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.summary


def with_nan(content: Any) -> Any:
    """Puts NaN back where JSON has null.

    Example:
        >>> with_nan({"loss": 0.5, "auroc": None, "ends": [None, 1]})
        {'loss': 0.5, 'auroc': nan, 'ends': [nan, 1]}
    """
    if isinstance(content, dict):
        return {key: with_nan(value) for key, value in content.items()}
    if isinstance(content, list):
        return [with_nan(value) for value in content]
    return math.nan if content is None else content


def _typed(row: dict[str, str]) -> Iterator[tuple[str, Any]]:
    for name, text in row.items():
        if name in ("client", "split"):
            yield name, text
        elif text not in ("", "''"):
            yield name, int(text) if name == "round" else float(text)


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors as safetensors, whole or not at all."""
    import safetensors.torch

    copies = {n: t.detach().cpu().clone().contiguous() for n, t in tensors.items()}
    with atomic(path, sync=False) as file:  # safetensors' own writer hides what goes wrong
        file.write(safetensors.torch.save(copies))


def save_prediction(
    path: Path, image: Tensor, truth: Tensor, prob: Tensor, channels: Sequence[str]
) -> None:
    """Writes one slice of a client with its prediction, for pictures that compare methods."""
    tensors = {"image": image, "truth": truth.byte(), "probability": prob.float()}
    arrays: dict[str, Any] = {name: t.cpu().numpy() for name, t in tensors.items()}
    with atomic(path, sync=False) as file:
        np.savez_compressed(file, **arrays, channels=np.array(channels, dtype=str))


def read_predictions(method: str, folder: Path, clients: Sequence[str]) -> dict[str, Case]:
    """Reads the predicted slices of a run."""
    files = RunFolder(folder).files("predictions", clients).items()
    saved_slices = sorted((path.stem, c, path) for c, path in files if path.is_file())
    if not saved_slices:
        return {}
    import torch  # late, as Matplotlib: tables of finished runs need neither

    from medfed.models.contours import Case

    cases: dict[str, Case] = {}
    for _, client, path in saved_slices:
        with reading(path), np.load(path, allow_pickle=False) as saved:
            keys = ("image", "truth", "probability")
            image, truth, prob = (torch.from_numpy(saved[k]).float() for k in keys)
            names = tuple(saved["channels"].tolist() if "channels" in saved else ())
        cases[client] = Case(image, truth, {method: prob}, names)
    return cases
