"""A method's card: its state, its messages, and the cost of a step.

Sizes are multiples of vectors, whose lengths :meth:`medfed.federation.algorithm.Algorithm.vectors`
gives for a network; ``tests/contract/test_cards.py`` checks every method against its card.

| vector | is |
|---|---|
| ``shared`` | the averaged entries: shared parameters, and statistics by the run's policy |
| ``weights`` | only the shared parameters, as in a gradient or a control variate |
| ``personal`` | the personal part |
| ``parameters`` | all parameters |
| ``model`` | all parameters and statistics |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from inspect import get_annotations
from typing import Literal, get_args, get_type_hints

Family = Literal[
    "baseline",
    "one model",
    "personal part",
    "second model",
    "several models",
    "similar clients",
    "quantised model",
]
# How patients influence a method's messages, other than by the numbers of patients.
Touches = Literal["gradients", "losses", "outputs", "several", "statistics", "pooled"]
# Why noise in gradients alone cannot protect the patients of a method.
UNPROTECTED: Mapping[Touches | None, str] = {
    None: "does not declare that patients influence it by gradients only (card.privacy_exposure)",
    "losses": "compares losses of patients, which get no noise",
    "outputs": "takes steps that see the network's outputs or the labels of whole batches",
    "several": "asks for gradients of one draw at several points, or for a random number of them, "
    "which is not accounted for",
    "statistics": "keeps statistics of normalisation, which get no noise",
    "pooled": "trains on the patients of all clients in one place",
}
# Multiples by vector. A text is a product of numbers and names, or a sum of such: ``2 N + K``. N is
# the number of clients; other names are hyper-parameters of the method.
Sizes = Mapping[str, float | str]

REFERENCES = ("local", "fedavg")  # what methods are compared with
# All patients in one place: one model, and a copy of it that each hospital trains on.
CEILINGS = ("pooled", "pooled_finetuned")


@dataclass(frozen=True)
class Range:
    """The range of a hyper-parameter when all methods are tuned in the same way.

    It stands in the annotation of the hyper-parameter, which :func:`tuned` reads.
    """

    low: float  # the smallest value
    high: float  # the largest value
    log: bool = True  # whether values are spread evenly over the logarithm, else over the numbers

    def at(self, share: float) -> float:
        """Returns the value at a share of the way, of four digits.

        `share`: in [0, 1].

        Example:
            >>> Range(0.01, 1.0).at(0.5), Range(0.0, 1.0, log=False).at(0.25)
            (0.1, 0.25)
        """
        if self.log:
            value = self.low * (self.high / self.low) ** share
        else:
            value = self.low + (self.high - self.low) * share
        return float(f"{value:.4g}")


@dataclass(frozen=True)
class Card:
    """Facts for choosing a method; derived facts are not declared.

    Attributes:
        paper: Authors and year, or a short description if there is no paper.
        family: Its group of similar methods.
        keeps: The personal part, in words.
        down: What a client receives in a round with messages, after the first round.
        up: What a client sends in such a round.
        at_most: Whether some clients receive and send less than that.
        passes: Gradient passes per local step.
        extra_passes: Passes in addition to those of the steps, in words; empty: none.
        server: What the server keeps, for all clients.
        client: What each client keeps, without common entries and single numbers.
        tasks: The tasks that it supports, in words.
        note: What a person should know before choosing it, in words; empty: nothing.
        full_cohort: Whether it needs all clients in every round; a run with fewer is refused.
        privacy_exposure: How patients influence what leaves a client and its model: only by
            ``gradients`` of the batches that ``Algorithm.max_batches_drawn`` counts, so that noise
            can protect them; or also by ``losses``, by ``outputs`` or labels of whole batches, by
            ``several`` gradients of one draw or a random number of them, by ``statistics`` of
            normalisation, or ``pooled``. ``None``: undeclared.
    """

    paper: str = "–"
    family: Family = "one model"
    keeps: str = "nothing"
    down: Sizes = field(default_factory=lambda: {"shared": 1})
    up: Sizes = field(default_factory=lambda: {"shared": 1})
    at_most: bool = False
    passes: float = 1
    extra_passes: str = ""
    server: Sizes = field(default_factory=lambda: {"shared": 1})
    client: Sizes = field(default_factory=lambda: {"personal": 1})
    tasks: str = "all"
    note: str = ""
    full_cohort: bool = False
    privacy_exposure: Touches | None = None


# The card of a method whose patients influence it by gradients only, see `Card.privacy_exposure`.
gradients_only = partial(Card, privacy_exposure="gradients")


def tuned(method: type) -> dict[str, Range]:
    """Returns the hyper-parameters that a comparison tunes, its own first, and their ranges.

    Example:
        >>> from medfed.personalize.fedprox import FedProx
        >>> tuned(FedProx)
        {'mu': Range(low=0.001, high=10.0, log=True)}
    """
    hints = get_type_hints(method, include_extras=True)
    names = dict.fromkeys(n for kind in method.__mro__ for n in get_annotations(kind))
    ranges = ((name, over) for name in names for over in get_args(hints[name])[1:])
    return {name: over for name, over in ranges if isinstance(over, Range)}


def elements(sizes: Sizes, vectors: Mapping[str, int], names: Mapping[str, float]) -> float:
    """Returns the total count of numbers; dense fp32 takes four bytes each.

    Example:
        >>> elements({"shared": "2 N + 1", "personal": 3}, {"shared": 10, "personal": 1}, {"N": 4})
        93
    """
    return sum(multiple(m, names) * vectors[v] for v, m in sizes.items())


def multiple(text: float | str, names: Mapping[str, float]) -> float:
    """Returns the value of a multiple.

    Example:
        >>> multiple("2 N N + K", {"N": 3, "K": 1})
        19
    """
    if not isinstance(text, str):
        return text
    return sum(
        math.prod(names[w] if w in names else int(w) for w in term.split())
        for term in text.split("+")
    )


def in_words(sizes: Sizes) -> str:
    """Returns sizes as a table shows them.

    Example:
        >>> in_words({"shared": 1, "weights": 2, "personal": "N + 1"}), in_words({})
        ('shared + 2 weights + (N + 1) personal', '–')
    """
    terms = []
    for vector, count in sizes.items():
        text = f"({count})" if "+" in str(count) else str(count)
        terms.append(vector if count == 1 else f"{text} {vector}")
    return " + ".join(terms) or "–"
