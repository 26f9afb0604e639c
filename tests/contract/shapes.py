"""Methods by the shape of what they keep and send, so that what depends on it runs once for each.

Checkpoints, ranks, codecs and onboarding see of a method no more than its state, its messages and
its phases. They are tested with the first method, by name, of every shape. shapes.json remembers
the shapes, since finding them takes two rounds of each method; a test compares. A method that it
does not know is tested with everything, as are plugins' methods, and all with ``--every-method``.

    python -m tests.contract.shapes    # finds all shapes anew
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Hashable
from pathlib import Path
from typing import NamedTuple

from medfed.config.compose import CONFIG_DIR
from medfed.federation.federation import Federation
from medfed.federation.onboarding import OnboardingRules, rules_of
from medfed.federation.other_state import OTHER
from medfed.federation.split import ParameterSplit
from tests.contract.harness import NAMES, ROUNDS, recorded
from tests.contract.names import EVERY_METHOD, algorithm_yamls


class Shape(NamedTuple):
    """What is alike in all methods of a shape.

    Attributes:
        server: Which vectors the server keeps.
        clients: Which vectors clients keep.
        messages: Direction, kind and vector of each part that travels.
        personal: Whether none, a part or all of the model is personal.
        phases: How many phases each round has.
        engine: What the method declares that training depends on.
        onboarding: The functions of its own by which clients are onboarded.
    """

    server: frozenset[str]
    clients: frozenset[str]
    messages: frozenset[tuple[str, str, str]]
    personal: str
    phases: tuple[int, ...]
    engine: tuple[bool, ...]
    onboarding: tuple[Hashable, ...]


@functools.cache
def shape(name: str) -> Shape:
    """A run says what a method keeps and sends."""
    fed, local, messages = recorded(name)
    method, split, rules = fed.algorithm, local.split, rules_of(fed.algorithm)
    return Shape(
        frozenset(vector(named, fed, split) for named in fed.server.values()),
        frozenset(vector(n, fed, split) for c in fed.clients.values() for n in c.state.values()),
        frozenset(
            (direction, message.kind(part), vector(named, fed, split))
            for direction, message in messages
            for part, named in message.parts.items()
        ),
        "none" if not split.personal else "part" if split.shared else "all",
        tuple(len(method.phases(number)) for number in range(ROUNDS)),
        (method.mixes, method.trains_centrally, method.fresh_optimizer),
        tuple(
            getattr(type(rules), rule).__qualname__
            for rule, function in vars(OnboardingRules).items()
            if callable(function)
        ),
    )


def vector(named, fed: Federation, split: ParameterSplit) -> str:
    """Returns which part of a model has these names, or whether there is one entry per client."""
    for what, names in {
        "model": split.names("all"),
        "shared": split.shared,
        "personal": split.personal,
        "parameters": split.parameters("all"),
        "weights": split.parameters("shared"),
        "clients": fed.ids,
    }.items():
        if set(named) - {OTHER} == set(names):
            return what
    return "other"


def marks(name: str) -> dict[str, str]:
    """Returns a short hash of each field of a method's shape."""
    return {field: _mark(value) for field, value in shape(name)._asdict().items()}


def _mark(value: Hashable) -> str:
    parts = sorted(map(repr, value)) if isinstance(value, frozenset) else [repr(value)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


RECORD = Path(__file__).with_name("shapes.json")
KNOWN: dict[str, dict[str, str]] = json.loads(RECORD.read_text())


def one_of_each(*fields: str) -> list[str]:
    """Returns the first method of every shape, as far as these fields tell shapes apart."""
    if os.environ.get(EVERY_METHOD):
        return NAMES
    inside = [name for name, path in algorithm_yamls().items() if CONFIG_DIR in path.parents]
    first: dict[Hashable, str] = {}
    for name in sorted(inside):
        known = KNOWN.get(name)
        first.setdefault(tuple(known[field] for field in fields) if known else name, name)
    return [name for name in NAMES if name not in inside or name in first.values()]


STATES = one_of_each("clients", "personal", "phases", "engine")
MESSAGES = one_of_each("messages", "personal", "phases", "engine")
PARTS = one_of_each("messages")  # what codecs remember
ENGINES = one_of_each("personal", "phases", "engine")  # what training does
ONBOARDINGS = one_of_each("clients", "personal", "onboarding")

if __name__ == "__main__":
    lines = [f"{json.dumps(name)}: {json.dumps(marks(name))}" for name in NAMES]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
