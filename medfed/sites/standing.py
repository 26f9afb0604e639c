"""Where the sites of a run stand, which its coordinator must know to go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from medfed.federation.budget import Passes
from medfed.sites.wire import START


@dataclass
class Standing:
    """What the coordinator must know of the sites to go on; kept in its checkpoints.

    Attributes:
        at: The last round that each site took part in.
        spent: Steps and passes of each.
        absent: Who was left out of which round.
        rounds: ``at`` after the last rounds and the best one, to which sites may have to go back.
        left_out: Round, site and reason, each time that a site was left out.
    """

    at: dict[str, int]
    spent: dict[str, tuple[int, Passes]]
    absent: dict[int, list[str]] = field(default_factory=dict)
    rounds: dict[int, dict[str, int]] = field(default_factory=dict)
    left_out: list[tuple[int, str, str]] = field(default_factory=list)

    @classmethod
    def new(cls, sites: Sequence[str]) -> Standing:
        """Returns where everybody stands before the first round."""
        return cls(dict.fromkeys(sites, START), dict.fromkeys(sites, (0, Passes())))

    def state_dict(self) -> dict[str, Any]:
        """Returns it in a form that ``weights_only=True`` loads."""
        return {
            "at": dict(self.at),
            "spent": {c: (steps, *passes) for c, (steps, passes) in self.spent.items()},
            "absent": {n: list(names) for n, names in self.absent.items()},
            "rounds": {n: dict(at) for n, at in self.rounds.items()},
            "left_out": list(self.left_out),
        }

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Standing:
        """Reads what :meth:`state_dict` returned."""
        spent = {c: (row[0], Passes(*row[1:])) for c, row in saved["spent"].items()}
        left_out = list(saved["left_out"])
        return cls(dict(saved["at"]), spent, dict(saved["absent"]), dict(saved["rounds"]), left_out)
