"""What is compared: methods, what of them is tuned, and the ceilings beyond any federation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.utils import get_class
from omegaconf import DictConfig

from medfed.common.errors import ConfigError, did_you_mean
from medfed.config.compose import CONFIG_DIR
from medfed.federation.card import Card, Range

LR = "optimizer.lr"
CEILINGS = ("pooled", "pooled_finetuned")
"""All patients in one place: one model, and a copy of it that each hospital trains on."""
ALWAYS = ("local", "fedavg", *CEILINGS)
"""What every suite is measured beside."""


@dataclass(frozen=True)
class Method:
    """A method that is compared.

    Attributes:
        name: As ``methods=`` has it.
        algorithm: As ``algorithm=`` has it.
        finetuned: Whether every client then trains its own copy of the model.
    """

    name: str
    algorithm: str
    finetuned: bool = False

    @classmethod
    def of(cls, name: str) -> Method:
        """Returns the method of that name; whether there is one, the configuration says."""
        if name == "pooled_finetuned":
            return cls(name, "pooled", True)
        return cls(name, name)


def known_methods(folders: Sequence[str | Path] = ()) -> list[str]:
    """Returns the names of all methods.

    Args:
        folders: Further folders that hold ``configs/algorithm``.

    Example:
        >>> known_methods()[:3]
        ['adiana', 'apfl', 'binaryrelax']
    """
    places = (CONFIG_DIR, *(Path(folder) / "configs" for folder in folders))
    return sorted({p.stem for place in places for p in (place / "algorithm").glob("*.yaml")})


def chosen_methods(
    wanted: str | Sequence[str] | None, usual: str | Sequence[str], known: Sequence[str]
) -> list[Method]:
    """Returns the methods that are asked for, and those that they are measured beside.

    Args:
        wanted: Names, ``all``, or None for those of the suite.
        usual: Those of the suite, or ``all``.
        known: All that there are.

    Raises:
        ConfigError: If one is unknown.

    Example:
        >>> [m.name for m in chosen_methods(["ditto"], [], ["ditto", "local"])]
        ['local', 'fedavg', 'pooled', 'pooled_finetuned', 'ditto']
    """
    wanted = usual if wanted is None else wanted
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    names = list(known) if names == ["all"] else names
    for name in names:
        if name not in {*known, *ALWAYS}:
            raise ConfigError(
                f"Unknown method {name!r}{did_you_mean(name, known)}; medfed methods lists them."
            )
    return [Method.of(name) for name in dict.fromkeys([*ALWAYS, *names])]


def card_of(config: DictConfig) -> Card:
    """Returns what the method of a configuration tells of itself."""
    card: Card = get_class(config.algorithm._target_).card
    return card


def search_space(card: Card, lr: Range) -> dict[str, Range]:
    """Returns what is tuned, by key: first the learning rate, then what the card says.

    Args:
        card: Of the method.
        lr: The learning rates of the suite.

    Example:
        >>> list(search_space(Card(tune={"mu": Range(0.1, 1.0)}), Range(0.01, 0.1)))
        ['optimizer.lr', 'algorithm.mu']
    """
    return {LR: lr, **{f"algorithm.{name}": over for name, over in card.tune.items()}}


def points(space: dict[str, Range], trials: int) -> list[dict[str, float]]:
    """Returns the settings that are tried: the default, then the same quasi-random points for all.

    Their coordinates are those of one Halton sequence, the first of which is the learning rate's;
    so all methods try the same learning rates. Its first point, the middle, is left out, as it is
    where defaults are.

    Args:
        space: What is tuned.
        trials: How many settings; the first leaves all as it is.

    Source: J. H. Halton, "On the efficiency of certain quasi-random sequences of points",
    Numerische Mathematik, 1960; SciPy's ``qmc.Halton``.

    Example:
        >>> one = points({"lr": Range(0.01, 1.0)}, 3)
        >>> two = points({"lr": Range(0.01, 1.0), "mu": Range(0.1, 1.0)}, 3)
        >>> one, [p["lr"] for p in one[1:]] == [p["lr"] for p in two[1:]]
        ([{}, {'lr': 0.03162}, {'lr': 0.3162}], True)
    """
    from scipy.stats import qmc  # names are checked before anything large is loaded

    shares = qmc.Halton(len(space), scramble=False).fast_forward(2).random(trials - 1)
    return [{}] + [
        {key: over.at(float(u)) for (key, over), u in zip(space.items(), row, strict=True)}
        for row in shares
    ]
