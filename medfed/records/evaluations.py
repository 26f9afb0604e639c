"""Further evaluations of a finished run: newcomers, subsets of the channels, an audit."""

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


@dataclass(frozen=True)
class RowsFound:
    """Training rows that follow from the messages of a client, at one setting.

    Attributes:
        client: The client.
        own: Whether the setting is the run's, otherwise one step per round.
        batch: Rows of a batch.
        steps: Gradient steps of a round.
        used: Rows that the messages are computed from, over all rounds.
        found: How many of them the messages give away.
    """

    client: str
    own: bool
    batch: int
    steps: int
    used: int
    found: int


@dataclass(frozen=True)
class Guess:
    """How well an attack tells a client's training patients from others by a model.

    Attributes:
        model: ``shared model``, ``personal model``, or ``personal model, 4 bits``.
        client: The client, or ``all``.
        of_run: Whether the run's model is attacked, and its test patients are the others;
            otherwise models trained alike on halves of the training patients.
        patients: Training patients.
        others: Test patients of the run, otherwise 0.
        auc: The area under the ROC curve and its interval.
        hits: The share of members that are recognised at 1 % false positives, and its interval.
        allowed: How many false positives that is.
    """

    model: str
    client: str
    of_run: bool
    patients: int
    others: int
    auc: tuple[float, float, float]
    hits: tuple[float, float, float]
    allowed: int


@dataclass(frozen=True)
class Fingerprint:
    """How often a part of a client's messages points to the client.

    Attributes:
        part: ``sketch`` or ``membership``.
        clients: How many there are; 1 in so many is chance.
        pairs: Pairs of federations on complementary halves of the patients.
        rate: The share of the clients that are recognised, and its interval.
    """

    part: str
    clients: int
    pairs: int
    rate: tuple[float, float, float]


@dataclass(frozen=True)
class Audit:
    """What the messages and models of a run give away.

    Attributes:
        summary: Of the run, as ``summary.json`` holds it.
        rounds: How many first rounds were replayed.
        tolerance: The largest distance to a row, as a share of its norm.
        layer: The network's first layer.
        shadows: Federations trained on halves of the patients.
        rows: By setting and client; empty if the attack does not apply.
        guesses: By model and client.
        fingerprints: By part.
        notes: Sentences about what was not measured, and why.
    """

    summary: dict[str, Any]
    rounds: int
    tolerance: float
    layer: str
    shadows: int
    rows: tuple[RowsFound, ...]
    guesses: tuple[Guess, ...]
    fingerprints: tuple[Fingerprint, ...]
    notes: tuple[str, ...] = ()
