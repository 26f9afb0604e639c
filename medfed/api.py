"""The Python door to a configured run, safe in a notebook."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from omegaconf import DictConfig
from torch import nn

from medfed.common.console import without_remarks
from medfed.common.errors import ConfigError, did_you_mean
from medfed.config.check import check
from medfed.config.compose import load
from medfed.federation.wire.ledger import Ledger
from medfed.run.assembly import build_task
from medfed.run.folder import finished, read_config
from medfed.run.train import train as trained


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

    @property
    def config(self) -> DictConfig:
        """The resolved configuration, facts of the data filled in."""
        return read_config(self.folder)

    @property
    def summary(self) -> dict[str, Any]:
        """Selected round, test metrics by client and over clients, bytes, steps."""
        return finished(self.folder)

    @property
    def clients(self) -> tuple[str, ...]:
        """The clients, in order."""
        return tuple(self.summary["clients"])

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A row per round, client and split, with a number per metric."""
        with (self.folder / "metrics.csv").open(newline="") as file:
            return [dict(_typed(row)) for row in csv.DictReader(file)]

    @property
    def ledger(self) -> Ledger:
        """Every byte that travelled."""
        return Ledger.from_csv((self.folder / "ledger.csv").read_text())

    @property
    def pictures(self) -> dict[str, Path]:
        """The pictures' files by name."""
        return {p.stem: p for p in sorted((self.folder / "pictures").glob("*.png"))}

    def model(self, client: str) -> nn.Module:
        """Returns a client's personal network, in evaluation mode.

        Raises:
            ConfigError: If there is no such client.
        """
        if client not in self.clients:
            raise ConfigError(
                f"The run in {self.folder} has no client {client}"
                f"{did_you_mean(client, self.clients)}; it has {', '.join(self.clients)}."
            )
        weights = safetensors.torch.load_file(self.folder / "models" / f"{client}.safetensors")
        with torch.random.fork_rng(devices=[]):
            network: nn.Module = build_task(self.config).network
        network.load_state_dict(weights, strict=False)
        return network.eval()


def train(*overrides: str, folder: str | Path | None = None, **keys: Any) -> Run:
    """Trains one federation, as ``medfed train`` does, and returns its run.

    Args:
        overrides: As on the command line: ``"experiment=digits_pfednet"``, ``"local.steps=5"``.
        folder: The run folder; by default one of its own below ``outputs``.
        keys: Keys of the top level, such as ``rounds=2``; deeper ones with two underscores in
            place of the dot, such as ``local__steps=5``.

    Raises:
        MedfedError: If a key, the data or the folder cannot be used; the message says what to do.

    Example:
        >>> run = train("experiment=digits_pfednet", rounds=2)  # doctest: +SKIP
        >>> run.summary["federation"]["accuracy"]["mean"]  # doctest: +SKIP
    """
    given = [*overrides, *(f"{k.replace('__', '.')}={_written(v)}" for k, v in keys.items())]
    config = load(given)
    if folder is None:
        method = config.algorithm["_target_"].rpartition(".")[2].lower()
        now = datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")
        folder = config.resume or Path("outputs") / config.name / method / now
    folder = Path(folder).expanduser().resolve()
    if config.resume is None and folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"folder={folder} is not empty; name one that is, or resume=FOLDER.")
    config.folder = str(folder)
    check(config)
    with _threads_as_they_were(), without_remarks():
        trained(config)
    return Run(folder)


def _written(value: Any) -> str:
    """Writes a Python value as an override has it.

    Example:
        >>> _written(None), _written([1, "a"]), _written(0.5), _written(True)
        ('null', '[1,a]', '0.5', 'true')
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(_written(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_written(v)}" for k, v in value.items()) + "}"
    return str(value)


def _typed(row: dict[str, str]) -> Iterator[tuple[str, Any]]:
    for name, text in row.items():
        if name in ("client", "split"):
            yield name, text
        elif text not in ("", "''"):
            yield name, int(text) if name == "round" else float(text)


@contextmanager
def _threads_as_they_were() -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
