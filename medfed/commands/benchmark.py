"""Compares methods on a suite of tasks: ``medfed benchmark suite=digits methods=[ditto,fedrep]``.

Every method is tuned alike on validation patients, then measured on fresh splits beside local
training, FedAvg, and training on all patients in one place. What was finished is not run again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from medfed.commands.door import command, loading


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if isinstance(value, DictConfig | ListConfig) else value


def check(configs: Sequence[DictConfig], sweep: bool) -> None:
    """Looks for the suites and the size before anything large is loaded.

    Raises:
        ConfigError: If there is none of that name.
    """
    from medfed.common.checks import check_known
    from medfed.run.benchmark.suite import SIZES, check_shard, chosen_suites

    for config in configs:
        check_known("size", config.size, SIZES)
        check_shard(config.shard)
        chosen_suites(_plain(config.suite), _folders(config))


def _folders(config: DictConfig) -> list[str]:
    plugins = _plain(config.plugins)
    return [plugins] if isinstance(plugins, str) else list(plugins or ())


@command("benchmark", check)
def main(config: DictConfig) -> None:
    """Runs the cells that are missing, and writes and prints the report."""
    with loading():
        from medfed.reports.benchmark.report import benchmark

    folders = [str(Path(f).expanduser().resolve()) for f in _folders(config)]
    benchmark(
        _plain(config.suite),
        _plain(config.methods),
        size=config.size,
        variants=_plain(config.variants),
        arms=_plain(config.arms),
        out=Path(str(config.out)).expanduser(),
        workers=config.workers or len(os.sched_getaffinity(0)),
        shard=config.shard,
        report_only=config.report_only,
        figures=config.figures,
        data_root=str(config.data_root),
        paths=_plain(config.paths),
        plugins=folders,
    )


if __name__ == "__main__":
    main()
