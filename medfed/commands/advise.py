"""Says which method to use, from a pilot on your own patients: ``medfed advise data=csv …``.

``without=each`` asks instead what each hospital brings the others. It takes the keys of ``medfed
train``, except those that choose a method, and never uses the test
patients of such a run. It does not repeat runs of the pilot that are finished.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medfed.commands.command_line import Command
from medfed.common.processes import loading
from medfed.config.allowed import method_yamls
from medfed.config.description import RunDescription
from medfed.config.sections import listed
from medfed.config.spelling import key_of
from medfed.standalone.errors import ConfigError, did_you_mean

PILOT_KEYS = ("methods", "without", "folds", "repeats", "pilot_rounds", "out", "workers")


def check(configs: Sequence[RunDescription], sweep: bool) -> None:
    """Checks the question before anything large is loaded."""
    if sweep:
        raise ConfigError(
            "-m runs a sweep, but medfed advise answers one question; leave out -m and name the "
            "methods to compare by methods=[A,B]."
        )
    for key in map(key_of, sys.argv[1:]):
        if key == "algorithm" or key.startswith("algorithm."):
            raise ConfigError(
                f"{key} chooses a method, but medfed advise compares methods; name those to "
                "compare by methods=[A,B]."
            )
        if key == "resume":
            raise ConfigError(
                "resume is a key of medfed train; medfed advise continues a stopped pilot by "
                "itself, so leave resume out."
            )
    for config in (each.values for each in configs):
        check_methods(_listed(config.methods), _listed(config.plugins))


def check_methods(methods: Sequence[str], plugins: Sequence[str] = ()) -> None:
    """Checks that a pilot can compare these methods.

    Example:
        >>> check_methods(["local", "ditto"])
        >>> check_methods(["local"])
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.ConfigError: methods must name at least one method other than \
local, with which all are compared.
    """
    known = list(method_yamls(plugins))
    for name in methods:
        if name not in known:
            raise ConfigError(
                f"Unknown method {name!r}{did_you_mean(name, known)}; medfed methods lists them."
            )
        if name == "pooled":
            raise ConfigError(
                "methods names pooled, which needs all patients in one place, but hospitals do not "
                "give them away; leave it out."
            )
    if not set(methods) - {"local"}:
        raise ConfigError(
            "methods must name at least one method other than local, with which all are compared."
        )


def _listed(value: Any) -> list[str]:
    return [str(each) for each in listed(value)]


@Command("advise", check, runs=True)
def main(config: RunDescription) -> None:
    """Runs the pilot, then writes and prints the advice."""
    with loading():
        from medfed.benchmark.absence import advise_without
        from medfed.benchmark.advice import advise

    keys = config.values
    overrides = [o for o in config.overrides or () if key_of(o) not in PILOT_KEYS]
    methods = list(dict.fromkeys(_listed(keys.methods)))
    pilot: dict[str, Any] = {"folds": keys.folds, "repeats": keys.repeats}
    pilot |= {"rounds": keys.pilot_rounds, "out": Path(str(keys.out))}
    pilot["workers"] = keys.workers or len(os.sched_getaffinity(0))
    if keys.without is None:
        advise(overrides, methods, **pilot)
    else:
        advise_without(overrides, methods[0], sets=keys.without == "sets", **pilot)
