"""Says which method to use, by a pilot on your own patients: ``medfed advise data=csv …``.

It takes the keys of ``medfed train`` but for a method, and never looks at the patients that such a
run would test. What was finished of a pilot is not run again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medfed.commands.command_line import command, loading
from medfed.common.errors import ConfigError, did_you_mean
from medfed.config.compose import CONFIG_DIR
from medfed.config.description import RunDescription

OWN = ("methods", "folds", "repeats", "pilot_rounds", "out", "workers")
LARGEST = 1000  # of what is counted; beyond it nobody's pilot ends


def check(configs: Sequence[RunDescription], sweep: bool) -> None:
    """Looks at the question before anything large is loaded.

    Raises:
        ConfigError: If a value is out of range, or a method is chosen or unknown.
    """
    if sweep:
        raise ConfigError("-m sweeps; advice is on one question, with methods=[A,B] to compare.")
    for key in (a.partition("=")[0].lstrip("+~") for a in sys.argv[1:]):
        if key == "algorithm" or key.startswith("algorithm."):
            raise ConfigError(
                f"{key} chooses among methods, which is what advice is asked for; name those to be "
                "compared by methods=[A,B]."
            )
        if key == "resume":
            raise ConfigError("resume is for medfed train; a pilot goes on by itself.")
    for config in (each.values for each in configs):
        _check_whole("folds", config.folds, 2, LARGEST)
        _check_whole("repeats", config.repeats, 1, LARGEST)
        if config.pilot_rounds is not None:
            _check_whole("pilot_rounds", config.pilot_rounds, 1, 10**6)
        check_methods(_listed(config.methods), _listed(config.plugins))


def _check_whole(key: str, value: Any, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(f"{key} must be a whole number from {least} to {most}, not {value}.")


def check_methods(methods: Sequence[str], plugins: Sequence[str] = ()) -> None:
    """Checks that methods can be asked about.

    Args:
        methods: Their names.
        plugins: Folders of methods of a user's own.

    Raises:
        ConfigError: If one is unknown or none for a federation, or nothing is left beside `local`.

    Example:
        >>> check_methods(["local", "ditto"])
        >>> check_methods(["local"])
        Traceback (most recent call last):
        ...
        medfed.common.errors.ConfigError: methods must name one beside local, with which all are \
compared.
    """
    folders = (CONFIG_DIR, *(Path(f) / "configs" for f in plugins))
    known = sorted(p.stem for f in folders for p in (f / "algorithm").glob("*.yaml"))
    for name in methods:
        if name not in known:
            raise ConfigError(
                f"Unknown method {name!r}{did_you_mean(name, known)}; medfed methods lists them."
            )
        if name == "pooled":
            raise ConfigError(
                "methods names pooled, which has all patients in one place, and hospitals do not "
                "give them away; leave it out."
            )
    if not set(methods) - {"local"}:
        raise ConfigError("methods must name one beside local, with which all are compared.")


def _listed(value: Any) -> list[str]:
    if isinstance(value, list):
        return [str(v) for v in value]
    return [] if value is None else [str(value)]


@command("advise", check, runs=True)
def main(config: RunDescription) -> None:
    """Runs the pilot, and writes and prints what it says."""
    with loading():
        from medfed.benchmark.main import advise

    asked = config.values
    advise(
        [o for o in config.overrides or () if o.partition("=")[0].lstrip("+~") not in OWN],
        list(dict.fromkeys(_listed(asked.methods))),
        folds=asked.folds,
        repeats=asked.repeats,
        rounds=asked.pilot_rounds,
        out=Path(str(asked.out)),
        workers=asked.workers or len(os.sched_getaffinity(0)),
    )


if __name__ == "__main__":
    main()
