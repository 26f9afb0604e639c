"""Reads what W&B has written without a network: its messages in LevelDB's format of logs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from wandb.proto import wandb_internal_pb2


class Written(NamedTuple):
    """The content of a record."""

    rows: list[dict[str, Any]]
    config: dict[str, Any]
    summary: dict[str, Any]
    axes: dict[str, str]
    exit_code: int | None

    def curve(self, name: str) -> dict[int, float]:
        """Returns the values of a curve by round; a round that is there twice is an error."""
        pairs = [(int(row["round"]), row[name]) for row in self.rows if name in row]
        assert len(pairs) == len(dict(pairs)), f"{name} has two values of a round"
        return dict(pairs)


def read(path: Path) -> Written:
    """Reads a record."""
    found, exit_code = Written([], {}, {}, {}, None), None
    for data in _messages(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        for item in (*record.run.config.update, *record.config.update):
            found.config[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
        for item in record.summary.update:
            found.summary[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
        if record.HasField("history"):
            pairs = [(i.key or ".".join(i.nested_key), i.value_json) for i in record.history.item]
            found.rows.append({key: json.loads(value) for key, value in pairs})
        if record.HasField("metric"):
            metric = record.metric
            found.axes[metric.name or metric.glob_name] = metric.step_metric
        if record.HasField("exit"):
            exit_code = record.exit.exit_code
    return found._replace(exit_code=exit_code)


def _messages(written: bytes) -> Iterator[bytes]:
    """Yields the messages of a log, whose blocks of 32 kB hold parts of them."""
    place, message = 7, b""  # after the file's header
    while place + 7 <= len(written):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        size, kind = int.from_bytes(written[place + 4 : place + 6], "little"), written[place + 6]
        message += written[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or its last part
            yield message
            message = b""


def records(folder: Path) -> list[Path]:
    """Returns the records below a run folder."""
    return sorted(folder.rglob("*.wandb"))
