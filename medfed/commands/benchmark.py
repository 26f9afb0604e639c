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

from medfed.commands.command_line import command, loading
from medfed.common.errors import ConfigError
from medfed.config.sections import Section


def _plain(value: Any) -> Any:
    return value.plain() if isinstance(value, Section) else value


def check(configs: Sequence[Section], sweep: bool) -> None:
    """Checks all names and folders before anything large is loaded.

    Raises:
        ConfigError: If a suite, method or folder does not exist.
    """
    from medfed.benchmark.suite import (
        SIZES,
        check_paths,
        check_shard,
        chosen_arms,
        chosen_methods,
        chosen_suites,
        known_methods,
        suites,
    )
    from medfed.common.checks import check_known

    for config in configs:
        check_known("size", config.size, SIZES)
        check_shard(_shard(config))
        if not isinstance(config.report_only, bool):
            raise ConfigError(f"report_only must be true or false, not {config.report_only}.")
        folders = _folders(config)
        chosen, known = chosen_suites(_plain(config.suite), folders), known_methods(folders)
        paths = _plain(config.paths)
        if not isinstance(paths, dict):
            raise ConfigError(f"paths={paths} names no suite; write paths.SUITE={paths}.")
        check_paths(paths, suites(folders).values())
        for suite in chosen:
            if not suite.path or paths.get(suite.name) is not None:
                suite.chosen(_plain(config.variants))
            usual = suite.sized(config.size).methods or suite.methods
            chosen_methods(_plain(config.methods), usual, known)
        chosen_arms(_plain(config.arms), {s.name: s.arms for s in chosen}, known)


def _shard(config: Section) -> str | None:
    return None if config.shard is None else str(config.shard)


def _folders(config: Section) -> list[str]:
    plugins = _plain(config.plugins)
    return [plugins] if isinstance(plugins, str) else list(plugins or ())


@command("benchmark", check)
def _main(config: Section) -> None:
    """Runs the missing cells, then writes and prints the report."""
    with loading():
        from medfed.benchmark.main import benchmark

    folders = [str(Path(f).expanduser().resolve()) for f in _folders(config)]
    benchmark(
        _plain(config.suite),
        _plain(config.methods),
        size=config.size,
        variants=_plain(config.variants),
        arms=_plain(config.arms),
        out=Path(str(config.out)).expanduser(),
        workers=config.workers or len(os.sched_getaffinity(0)),
        shard=_shard(config),
        report_only=config.report_only,
        figures=config.figures,
        data_root=str(config.data_root),
        paths=_plain(config.paths),
        plugins=folders,
    )


@functools.wraps(_main)
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command; ``paths.NAME`` may name a suite of a plugin folder."""
    given = sys.argv[1:] if arguments is None else arguments
    _main([f"++{a}" if a.startswith("paths.") else a for a in given])


if __name__ == "__main__":
    main()
