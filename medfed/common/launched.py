"""Who started this process, and as which of how many: torchrun, SLURM, or nobody but its user.

Known from the environment alone, before PyTorch is imported and before ranks have met.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple


class Launched(NamedTuple):
    """What a launcher outside of medfed says of the processes that it has started.

    Attributes:
        by: ``torchrun`` or ``srun``.
        rank: Which process this one is.
        ranks: Their number.
        machines: On how many machines.
    """

    by: str
    rank: int
    ranks: int
    machines: int

    @property
    def devices(self) -> int:
        """Processes per machine."""
        return self.ranks // self.machines


def launched(environ: Mapping[str, str] = os.environ) -> Launched | None:
    """Returns who has started this process as one of several, if a launcher has.

    The script of a SLURM job is no such process, though variables of SLURM are set there, too.

    Args:
        environ: The environment variables.

    Example:
        >>> told = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
        >>> launched({"TORCHELASTIC_RUN_ID": "none", **told})
        Launched(by='torchrun', rank=3, ranks=4, machines=2)
        >>> launched({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"})
    """

    def told(name: str, otherwise: int) -> int:
        return int(environ.get(name, otherwise))

    if "TORCHELASTIC_RUN_ID" in environ:
        ranks = told("WORLD_SIZE", 1)
        return Launched("torchrun", told("RANK", 0), ranks, ranks // told("LOCAL_WORLD_SIZE", 1))
    ranks = told("SLURM_STEP_NUM_TASKS", 1)  # of the step that srun has started
    if ranks > 1 and "SLURM_PROCID" in environ:
        machines = told("SLURM_STEP_NUM_NODES", told("SLURM_NNODES", 1))
        return Launched("srun", told("SLURM_PROCID", 0), ranks, machines)
    return None


def go_by_rank() -> None:
    """Has a process that srun started as one of several ranks go by its number from here on.

    Not all processes of srun are ranks: it may also start runs that have nothing to do with each
    other. So whoever knows that this run takes several devices says so.
    """
    if (found := launched()) is not None:
        os.environ["RANK"] = str(found.rank)


def number(environ: Mapping[str, str] = os.environ) -> int:
    """Returns what is 0 in the first process of a run alone: its rank, as far as that is known.

    Args:
        environ: The environment variables.

    Example:
        >>> number({"NODE_RANK": "1", "LOCAL_RANK": "0"}), number({})
        (1, 0)
    """
    told = [int(environ.get(name, "0")) for name in ("RANK", "NODE_RANK", "LOCAL_RANK")]
    return next(filter(None, told), 0)


def is_first_process() -> bool:
    """Returns whether this process writes for all: of the ranks of a run the first one does."""
    return number() == 0
