"""The folder of a run: what it holds, written by the run and read by whatever comes after it.

A finished run, as its folder has it.
"""

from __future__ import annotations

import math
import platform
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import safetensors.torch
from torch import Tensor, nn

from medfed.common.console import file_names
from medfed.common.errors import CheckpointError, CodecError, ConfigError, did_you_mean, first_line
from medfed.common.files import atomic, write_json, write_text
from medfed.common.schemas import Count, fit
from medfed.common.scores import Record, declare
from medfed.common.untrusted import (
    read_json,
    read_rows,
    read_tensors,
    read_yaml,
    reading,
)
from medfed.config.allowed import fingerprints
from medfed.config.compose import changed_keys
from medfed.config.description import RunDescription, as_yaml
from medfed.config.sections import Section, optional, select
from medfed.federation.split import aliases, float_entries
from medfed.federation.wire.ledger import Ledger

PACKAGES = (*("medfed", "torch", "pytorch-lightning", "monai", "numpy", "scikit-learn"),)
# What may differ between a run and its continuation: where and how it runs, not what it computes.
NOT_THE_EXPERIMENT = (
    *("resume", "folder", "trainer", "logger", "progress", "plugins", "pictures"),
    "tuned",  # stands where it is used
    # change no bit
    *("data.workers", "data.memory_gb", "data.cache", "data.device_gb", "local.graphs"),
    *("cohort.memory_gb", "local.offload", "local.slots"),
)
_Values = dict[str, float | None]  # null where NaN was written


class _Mean(TypedDict):
    mean: float | None
    sd: float | None
    worst: float | None


class _Bytes(TypedDict):
    up: Count
    down: Count


class _Config(TypedDict):
    """What of ``config.yaml`` whoever reads a run relies on."""

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
    """What ``splits.json`` holds."""

    clients: dict[str, dict[str, list[str]]]
    files: dict[str, str]


class _Constant(TypedDict):
    """What predicting the same for every patient comes to."""

    clients: dict[str, _Values]
    federation: dict[str, _Mean]


class _Intervals(TypedDict):
    """Both ends of each metric's interval."""

    clients: dict[str, dict[str, list[float | None]]]
    mean: dict[str, list[float | None]]
    pooled: dict[str, list[float | None]]


class _Summary(TypedDict):
    """What of ``summary.json`` whoever reads a run relies on."""

    name: str
    algorithm: str
    selection: tuple[str, Literal["min", "max"]]
    selected_round: Count | None
    rounds: Count
    clients: dict[str, _Values]
    federation: dict[str, _Mean]
    bytes: _Bytes
    savings: TypedDict("_Savings", {"up": float, "down": float})  # type: ignore[valid-type]
    bytes_by_client: dict[str, _Bytes]
    steps: dict[str, Count]
    constant: NotRequired[dict[str, _Constant]]
    intervals: NotRequired[_Intervals]
    memberships: NotRequired[dict[str, float | dict[str, Any] | None]]  # of canonical models


def git_commit(folder: Path) -> str:
    """Returns the commit of a clone, marked where it has been changed; elsewhere ``unknown``."""
    if not (folder / ".git").exists():
        return "unknown"  # an installed package may lie within a repository of the user's
    # Not describe, which writes the index: stopped by a full disk, it would leave its lock.
    looks = ("--no-optional-locks", "status", "--porcelain=v2", "--branch", "--untracked-files=no")
    try:
        done = subprocess.run(
            ["git", *looks],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    head, *rest = done.stdout.splitlines()
    commit, changed = head.split()[-1], any(not line.startswith("#") for line in rest)
    if commit == "(initial)":
        return "unknown"
    return f"{commit}-dirty" if changed else commit


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that a result depends on."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def open_folder(
    config: RunDescription,
    splits: Mapping[str, Any],
    preprocessing: Mapping[str, Any],
    cohort: Mapping[str, Any],
) -> None:
    """Writes what is known before the first round, or checks it against a run to be continued.

    Args:
        config: What the run is to do, facts of the data filled in.
        splits: The data's splits.
        preprocessing: What becomes of each client's scans before its network sees them.
        cohort: What each client has, and what is found twice.

    Raises:
        CheckpointError: If the run to resume does not exist or has another configuration.
    """
    folder = Path(config.folder)
    if config.resume is not None:
        changed = changed_keys(read_config(folder), config.values, NOT_THE_EXPERIMENT)
        if changed:
            raise CheckpointError(
                f"The run in {folder} has another configuration ({'; '.join(changed[:5])}); "
                "resume with the same overrides or start a new run."
            )
        return
    code = {
        "commit": git_commit(Path(__file__).parents[2]),
        "plugins": fingerprints(config.plugins),
    }
    write_json(folder / "versions.json", {**versions(), **code})
    write_json(folder / "splits.json", splits)
    write_json(folder / "preprocessing.json", preprocessing)
    write_json(folder / "cohort.json", cohort)
    if config.overrides is not None:  # what was typed, for whoever resumes the run
        write_text(folder / "overrides.yaml", as_yaml(list(config.overrides)))
    # The last one: by it a run folder is known.
    write_text(folder / "config.yaml", config.yaml())


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors as safetensors, whole or not at all."""
    copies = {n: t.detach().cpu().clone().contiguous() for n, t in tensors.items()}
    with atomic(path, sync=False) as file:  # safetensors' own writer hides what goes wrong
        file.write(safetensors.torch.save(copies))


def read_config(folder: Path) -> Section:
    """Reads the configuration of a run.

    Raises:
        CheckpointError: If it is no run folder, or the file is torn, or not as a run writes it.
    """
    path = _config_file(folder)
    _check_version(folder)
    plain = read_yaml(path, _Config)
    # A run writes values; what stands for one could read the environment of whoever opens the run.
    if "${" in repr(plain):
        raise CheckpointError(
            f"{path} holds an interpolation (${{...}}), which no run writes; write its value."
        )
    for name, own in (select(plain, "model.metrics") or {}).items():
        declare(str(name), str(own.get("direction")), own.get("worst"))
    return Section(plain)


def _check_version(folder: Path) -> None:
    """Refuses a run of an earlier minor version, whose classes and keys may have other names."""
    if not (folder / "versions.json").is_file():
        return
    made, ours = str(read_json(folder / "versions.json").get("medfed")), versions()["medfed"]
    # A clone that is not installed has no version to compare.
    comparable = made[:1].isdigit() and ours[:1].isdigit()
    if comparable and made.rpartition(".")[0] != ours.rpartition(".")[0]:
        raise CheckpointError(
            f"medfed {made} made the run in {folder}, and this is medfed {ours}; open it with that "
            "version, or repeat the run."
        )


def _config_file(folder: Path) -> Path:
    path = folder / "config.yaml"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} is no run folder (it has no config.yaml); name one that a run has printed."
        )
    return path


def read_splits(folder: Path) -> dict[str, Any]:
    """Reads a run's splits.

    Raises:
        CheckpointError: If they are missing or torn, or of other clients than the run's.
    """
    path = folder / "splits.json"
    splits: dict[str, Any] = {**read_json(path, _Splits)}
    with reading(path):
        if lacking := set(finished(folder)["clients"]) - set(splits["clients"]):
            raise ValueError(f"it lacks the client {min(lacking)} of summary.json")
    return splits


def finished(folder: Path) -> dict[str, Any]:
    """Returns the summary of a finished run.

    Args:
        folder: The run folder.

    Raises:
        CheckpointError: If there is no run, it has not finished, or its summary is torn.
    """
    _config_file(folder)
    path = folder / "summary.json"
    if not path.is_file():
        raise CheckpointError(
            f"The run in {folder} has not finished (it has no summary.json); finish it with the "
            f"overrides that started it and resume={folder}."
        )
    summary = read_json(path)
    with reading(path):
        fit(summary, _Summary)
    for key in {"constant", "intervals"} & summary.keys():
        summary[key] = _with_nan(summary[key])
    for of in ("clients", "federation"):  # JSON has no NaN
        summary[of] = {
            name: {n: math.nan if v is None else v for n, v in values.items()}
            for name, values in summary[of].items()
        }
    clients = summary["clients"]
    with reading(path):
        metrics = set(summary["federation"])
        if not clients or any(not metrics <= set(own) for own in clients.values()):
            raise ValueError("its clients do not have the same metrics")
        if any(set(summary[key]) != set(clients) for key in ("steps", "bytes_by_client")):
            raise ValueError("steps and bytes are not of its clients")
        if summary["selection"][0] not in metrics:
            raise ValueError("the metric that selected its round is not among its metrics")
    return summary


def _with_nan(content: Any) -> Any:
    """Puts NaN back where JSON has null."""
    if isinstance(content, dict):
        return {key: _with_nan(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_with_nan(value) for value in content]
    return math.nan if content is None else content


def read_metrics(folder: Path) -> list[dict[str, str]]:
    """Returns the rows of ``metrics.csv``.

    Raises:
        CheckpointError: If it is missing or torn; it ends with the test metrics of all clients.
    """
    path = folder / "metrics.csv"
    rows = read_rows(path, ("round", "client", "split"))
    with reading(path):
        tested = {row["client"] for row in rows if row["split"] == "test"}
        if lacking := set(finished(folder)["clients"]) - tested:
            raise ValueError(f"it ends before the test metrics of {min(lacking)}")
    return rows


def read_history(folder: Path) -> list[Record]:
    """Returns the validation metrics of every evaluated round.

    Raises:
        CheckpointError: If ``metrics.csv`` is missing or torn.
    """
    fixed = ("round", "client", "split")
    rows = read_metrics(folder)
    with reading(folder / "metrics.csv"):
        return [
            Record(
                int(row["round"]),
                row["client"],
                {n: math.nan if v == "" else float(v) for n, v in row.items() if n not in fixed},
            )
            for row in rows
            if row["split"] == "val"
        ]


def read_ledger(folder: Path) -> Ledger:
    """Reads what a run sent.

    Raises:
        CheckpointError: If ``ledger.csv`` is missing, has other columns, or does not add up to what
            the summary says.
    """
    path = folder / "ledger.csv"
    with reading(path):
        try:
            ledger = Ledger.from_csv(path.read_bytes().decode())
        except CodecError as error:
            raise ValueError(first_line(error)) from error
        sent = {way: ledger.total(direction=way) for way in ("up", "down")}
        if sent != (told := finished(folder)["bytes"]):
            raise ValueError(f"it adds up to {sent} bytes, but summary.json says {told}")
    return ledger


@dataclass(frozen=True)
class Run:
    """A finished run, as its folder has it.

    Attributes:
        folder: The run folder.

    Raises:
        CheckpointError: If the folder holds no finished run.
    """

    folder: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))
        finished(self.folder)

    @cached_property
    def config(self) -> Section:
        """The resolved configuration, facts of the data filled in."""
        return read_config(self.folder)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Selected round, test metrics by client and over clients, bytes, steps."""
        return finished(self.folder)

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.config.seed)

    @property
    def clients(self) -> tuple[str, ...]:
        """The clients, in order."""
        return tuple(self.summary["clients"])

    @cached_property
    def patients(self) -> dict[str, dict[str, list[str]]]:
        """Patient ids per client and split."""
        splits: dict[str, dict[str, list[str]]] = read_splits(self.folder)["clients"]
        return splits

    def history(self) -> list[Record]:
        """Returns the validation metrics of every evaluated round."""
        return read_history(self.folder)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A row per round, client and split, with a number per metric."""
        rows = read_metrics(self.folder)
        with reading(self.folder / "metrics.csv"):
            return [dict(_typed(row)) for row in rows]

    @property
    def ledger(self) -> Ledger:
        """Every byte that travelled."""
        return read_ledger(self.folder)

    @property
    def pictures(self) -> dict[str, Path]:
        """The pictures' files by name."""
        return {p.stem: p for p in sorted((self.folder / "pictures").glob("*.png"))}

    def model(self, client: str) -> nn.Module:
        """Returns a client's personal network, in evaluation mode.

        Raises:
            ConfigError: If there is no such client.
            CheckpointError: If its file is missing or torn, or of another network.
        """
        from medfed.records.tasks import build_task  # the other questions need no network

        if client not in self.clients:
            raise ConfigError(
                f"The run in {self.folder} has no client {client}"
                f"{did_you_mean(client, self.clients)}; it has {', '.join(self.clients)}."
            )
        path = self.folder / "models" / f"{file_names(self.clients)[client]}.safetensors"
        weights = read_tensors(path)
        config, mixes = self.config, optional(self.config, "canonical")
        network: nn.Module = build_task(config.model, mixes, self.seed).network
        with reading(path):
            if not set(float_entries(network)) <= set(weights) <= set(aliases(network)):
                raise ValueError("its entries are not those of the run's network")
            network.load_state_dict(weights, strict=False)  # integer counters are not in it
        return network.eval()


def _typed(row: dict[str, str]) -> Iterator[tuple[str, Any]]:
    for name, text in row.items():
        if name in ("client", "split"):
            yield name, text
        elif text not in ("", "''"):
            yield name, int(text) if name == "round" else float(text)
