"""What a finished run was evaluated on again: hospitals that join it, subsets of the channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Rule = Literal["own", "fine_tuning", "local"]
RULES: tuple[Rule, ...] = ("own", "fine_tuning", "local")


@dataclass(frozen=True)
class Row:
    """One onboarded client under one rule with its first patients.

    Attributes:
        client: The onboarded client.
        k: How many training patients it was to use.
        patients: How many it used.
        samples: Their training samples.
        rule: ``own``, the method's; ``fine_tuning`` of all that arrived; ``local`` training.
        metrics: On its test patients.
        seconds: CPU time of this process for both halves, without the evaluation.
        up: Bytes to the server.
        down: Bytes to the onboarded client.
    """

    client: str
    k: int
    patients: int
    samples: int
    rule: Rule
    metrics: dict[str, float]
    seconds: float
    up: int
    down: int


@dataclass(frozen=True)
class Onboarding:
    """What was measured.

    Attributes:
        summary: Of the run, as ``summary.json`` holds it.
        steps: Gradient steps that each rule may take.
        rows: In the order of onboarded clients, k and rules.
        notes: Sentences on what was not as asked for.
    """

    summary: dict[str, Any]
    steps: int
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()


Subset = tuple[str, ...]


@dataclass(frozen=True)
class Subsets:
    """What was measured.

    Attributes:
        summary: Of the run, as ``summary.json`` holds it.
        split: On which split.
        channels: The names of all channels.
        subsets: Those that were asked for, in the order of tables.
        present: The channels of each client.
        metrics: By client and subset; a subset that a client lacks a channel of is not there.
    """

    summary: dict[str, Any]
    split: str
    channels: tuple[str, ...]
    subsets: tuple[Subset, ...]
    present: dict[str, Subset]
    metrics: dict[str, dict[Subset, dict[str, float]]]

    def values(self, metric: str) -> dict[str, list[float]]:
        """Returns a metric by client, a value per subset, NaN where there is none."""
        return {
            client: [found.get(s, {}).get(metric, float("nan")) for s in self.subsets]
            for client, found in self.metrics.items()
        }
