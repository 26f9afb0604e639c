"""Compares methods on a suite of tasks: ``medfed benchmark suite=digits methods=[ditto,fedrep]``.

The benchmark tunes every method alike on validation patients. Then it compares the method on fresh
splits with local training, FedAvg, and training on all patients in one place. It does not repeat
finished cells.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medfed.commands.command_line import Command
from medfed.common.processes import loading
from medfed.config.sections import Section, listed
from medfed.standalone.errors import ConfigError


def check(configs: Sequence[Section], sweep: bool) -> None:
    """Checks all names and folders before anything large is loaded."""
    from medfed.benchmark.suite import check_paths, check_shard, suites, wanted_of

    for config in configs:
        keys = _settings(config)
        check_shard(keys["shard"])
        folders, paths = keys["plugins"], keys["paths"]
        if not isinstance(paths, dict):
            raise ConfigError(f"paths={paths} names no suite; write paths.SUITE={paths}.")
        check_paths(paths, suites(folders).values())
        of = keys["suite"], keys["methods"], keys["size"], keys["arms"], folders, keys["published"]
        for suite in wanted_of(*of)[0]:
            if not suite.path or paths.get(suite.name) is not None:
                suite.chosen(keys["variants"])


def _settings(config: Section) -> dict[str, Any]:
    """The keys of the command as arguments of `benchmark`."""
    keys = config.plain()
    shard = keys["shard"]
    return keys | {
        "plugins": [str(Path(f).expanduser().resolve()) for f in listed(keys["plugins"])],
        "shard": None if shard is None else str(shard),
        "out": Path(str(keys["out"])).expanduser(),
        "data_root": str(keys["data_root"]),
        "workers": keys["workers"] or len(os.sched_getaffinity(0)),
    }


@Command("benchmark", check)
def _main(config: Section) -> None:
    """Runs the missing cells, then writes and prints the report."""
    with loading():
        from medfed.benchmark.main import benchmark

    benchmark(**_settings(config))


@functools.wraps(_main)
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command; ``paths.NAME`` may name a suite of a plugin folder."""
    words = sys.argv[1:] if arguments is None else arguments
    _main([f"++{a}" if a.startswith("paths.") else a for a in words])
