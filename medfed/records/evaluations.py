"""Further evaluations of a finished run: hospitals that join it, and subsets of the channels."""

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
        k: How many training patients it should use.
        patients: How many it used.
        samples: Their training samples.
        rule: ``own``, the method's; ``fine_tuning`` of all received entries; ``local`` training.
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
        notes: Sentences about deviations from the request.
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
        split: The split.
        channels: The names of all channels.
        subsets: The requested subsets, in the order of tables.
        present: The channels of each client.
        metrics: By client and subset, without subsets with a channel that the client lacks.
    """

    summary: dict[str, Any]
    split: str
    channels: tuple[str, ...]
    subsets: tuple[Subset, ...]
    present: dict[str, Subset]
    metrics: dict[str, dict[Subset, dict[str, float]]]

    def values(self, metric: str) -> dict[str, list[float]]:
        """Returns a metric by client, a value per subset, NaN if there is none."""
        return {
            client: [by_subset.get(s, {}).get(metric, float("nan")) for s in self.subsets]
            for client, by_subset in self.metrics.items()
        }
