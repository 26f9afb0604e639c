"""Trains one federation: ``medfed train experiment=brats_pfednet algorithm=fedavg``.

With ``-m`` every combination of several values: ``medfed train -m algorithm=fedavg,ditto``.
"""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

from medfed.commands.door import command, loading
from medfed.common.errors import ConfigError
from medfed.config.compose import build
from medfed.config.targets import check_targets


def check(configs: Sequence[DictConfig], sweep: bool) -> None:
    """Lets the algorithm and what surrounds it judge their values, before anything else is loaded.

    Raises:
        ConfigError: If a value is out of range, or a sweep would run on several ranks, each of
            which would start the whole sweep again.
    """
    for config in configs:
        ranks = config.trainer.devices
        if sweep and ranks not in (1, "1"):
            raise ConfigError(
                f"-m cannot be combined with trainer.devices={ranks}; sweep with one rank per run, "
                "or start the runs one by one."
            )
        check_targets(OmegaConf.to_container(config), found=True)  # before any of it is built
        for section in ("algorithm", "local", "cohort"):
            build(config[section])


@command("train", check)
def main(config: DictConfig) -> float | None:
    """Runs the composed configuration and returns the selection metric's mean on validation."""
    # Imported late, so that --help and mistakes in the configuration answer at once.
    with loading():
        from medfed.commands.folders import Watch
        from medfed.run.train import train

    _, experiment = train(config, Watch.seen)
    best = experiment.evaluation.best_round()
    return None if best is None else experiment.evaluation.score(best)


if __name__ == "__main__":
    main()
