"""Arms: further measurements of a method on a suite, each with something changed.

An arm asks why: the same method, at the settings that were tuned for it, on the same splits, with
other keys. Arms are no methods of the table, and no correction counts them; claims rest on them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf

from medfed.common.errors import ConfigError, did_you_mean

_NAME = re.compile(r"[A-Za-z0-9_.]+")


@dataclass(frozen=True)
class Arm:
    """A measurement of a method with something changed.

    Attributes:
        name: Its name.
        method: The method, as ``methods=`` has it.
        overrides: What is changed; of a key that was tuned too, this value holds.
        times: Whole numbers of the configuration that are multiplied, by key, at any size alike.
        variant: The task; empty: the one on which methods are tuned.
        tuned: Whether it has the settings that were tuned for the method, or its defaults.
        splits: Of how many splits, at most; None: of all.
        looks: Whether every split keeps memberships and pictures, rather than the first.
    """

    name: str
    method: str
    overrides: tuple[str, ...] = ()
    times: Mapping[str, float] = field(default_factory=dict)
    variant: str = ""
    tuned: bool = True
    splits: int | None = None
    looks: bool = False

    @property
    def own(self) -> set[str]:
        """The keys that it sets."""
        return {o.partition("=")[0].lstrip("+~") for o in self.overrides}

    def after(self, given: Sequence[str]) -> list[str]:
        """Returns its overrides after those of the suite, but for sections that it replaces.

        Example:
            >>> arm = Arm("groups", "ppfl", ("partition=site_groups",))
            >>> arm.after(["partition.delta=4", "rounds=9"])
            ['rounds=9', 'partition=site_groups']
        """
        replaced = {key for key in self.own if "." not in key}
        kept = [o for o in given if o.partition("=")[0].partition(".")[0] not in replaced]
        return [*kept, *self.overrides]

    def setting(self, tuned: Mapping[str, float]) -> dict[str, float]:
        """Returns what was tuned, but for what the arm sets itself.

        Example:
            >>> arm = Arm("apart", "pfednet", ("algorithm.strength=0",))
            >>> arm.setting({"optimizer.lr": 0.1, "algorithm.strength": 0.03})
            {'optimizer.lr': 0.1}
        """
        return {key: value for key, value in tuned.items() if key not in self.own}

    def scale(self, config: DictConfig) -> None:
        """Multiplies what `times` names.

        Raises:
            ConfigError: If it names no number of the configuration.
        """
        for key, factor in self.times.items():
            value = OmegaConf.select(config, key)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(f"arm {self.name}: times.{key} names no whole number.")
            OmegaConf.update(config, key, max(1, round(value * factor)))
        config.evaluation.every = min(config.evaluation.every, config.rounds)


def read_arms(content: Mapping[str, Any], variants: Collection[str]) -> dict[str, Arm]:
    """Reads the arms of a suite.

    Args:
        content: What its file has under ``arms``.
        variants: Its variants.

    Raises:
        ValueError: If one is none; it is named.
    """
    known = [n for n in Arm.__dataclass_fields__ if n != "name"]
    found = {}
    for name, given in content.items():
        own = dict(given or {})
        if not _NAME.fullmatch(name):
            raise ValueError(f"the arm {name!r} must be named by letters, digits, _ and .")
        if unknown := sorted(set(own) - set(known)):
            raise ValueError(
                f"the arm {name} has no key {unknown[0]!r}{did_you_mean(unknown[0], known)}; its "
                f"keys are {', '.join(known)}"
            )
        if "method" not in own:
            raise ValueError(f"the arm {name} lacks the key method")
        own["overrides"] = tuple(own.get("overrides", ()))
        arm = Arm(name, **own)
        if arm.variant and arm.variant not in variants:
            raise ValueError(
                f"the arm {name} is of variant={arm.variant}, which is none"
                f"{did_you_mean(arm.variant, variants)}"
            )
        if "algorithm" in arm.own:
            raise ValueError(f"the arm {name} sets algorithm; its key method is for that")
        if arm.splits is not None and arm.splits < 1:
            raise ValueError(f"the arm {name} needs at least 1 split")
        found[name] = arm
    return found


def chosen_arms(
    wanted: bool | str | Sequence[str],
    by_suite: Mapping[str, Mapping[str, Arm]],
    methods: Collection[str] = (),
) -> dict[str, list[Arm]]:
    """Returns the arms that are asked for, by suite.

    Args:
        wanted: True or ``all``; False; or names, which each some suite must have.
        by_suite: The arms of all suites that are run.
        methods: All that there are: no arm has the name of one.

    Raises:
        ConfigError: If one is unknown, or has a method's name.

    Example:
        >>> arms = {"digits": {"apart": Arm("apart", "pfednet")}, "heart": {}}
        >>> [[arm.name for arm in some] for some in chosen_arms(True, arms).values()]
        [['apart'], []]
    """
    for suite, arms in by_suite.items():
        if taken := sorted(set(arms) & set(methods)):
            raise ConfigError(f"suite={suite}: the arm {taken[0]} has the name of a method.")
    if wanted in (True, "all"):
        return {suite: list(arms.values()) for suite, arms in by_suite.items()}
    names = [] if not wanted else [wanted] if isinstance(wanted, str) else list(wanted)  # type: ignore[arg-type]
    known = list(dict.fromkeys(name for arms in by_suite.values() for name in arms))
    for name in names:
        if name not in known:
            raise ConfigError(
                f"arms={name} is none of suite={','.join(by_suite)}{did_you_mean(name, known)}; "
                + (f"they are {', '.join(known)}." if known else "there are none.")
            )
    return {suite: [a for n, a in arms.items() if n in names] for suite, arms in by_suite.items()}
