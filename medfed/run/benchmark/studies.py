"""The trials of tuning as Optuna studies, for its dashboard and its importances."""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from omegaconf import OmegaConf

from medfed.common.files import replacing
from medfed.federation.card import Range
from medfed.run.benchmark.methods import search_space
from medfed.run.benchmark.runner import Progress

log = logging.getLogger(__name__)


def write_studies(path: Path, progress: Sequence[Progress]) -> bool:
    """Writes a study for each method on each suite into one journal, anew from the cells.

    The cells are what counts; a journal that is lost or edited changes nothing.

    Args:
        path: The journal: ``optuna-dashboard FILE`` opens it.
        progress: What there is.

    Returns:
        Whether it was written: only where Optuna is installed (the extra ``benchmark``).
    """
    if importlib.util.find_spec("optuna") is None:
        return False
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    failed = optuna.trial.TrialState.FAIL
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with replacing(path) as partial:
        storage = JournalStorage(JournalFileBackend(str(partial)))
        for own in progress:
            if not own.tuning:
                continue
            space = search_space(own.group.card, own.group.suite.lr)
            kinds = {
                key: optuna.distributions.FloatDistribution(over.low, over.high, log=over.log)
                for key, over in space.items()
            }
            study = optuna.create_study(
                storage=storage, study_name=own.group.name, direction="maximize"
            )
            for number, result in sorted(own.tuning.items()):
                setting = {**_defaults(own, space), **own.group.settings[number]}
                score = result.get("score")
                whole = score is not None and math.isfinite(score)
                study.add_trial(
                    optuna.trial.create_trial(
                        state=optuna.trial.TrialState.COMPLETE if whole else failed,
                        value=score if whole else None,
                        params=setting,
                        distributions={key: kinds[key] for key in setting},
                        user_attrs={"trial": number, "default": not own.group.settings[number]},
                    )
                )
        if not partial.exists():
            partial.touch()
    return True


def _defaults(own: Progress, space: Mapping[str, Range]) -> dict[str, float]:
    """A method's own values of what is tuned, those that lie in the range."""
    config = own.group.config(own.group.suite.base)
    found = {key: OmegaConf.select(config, key) for key in space}
    numbers = {key: float(v) for key, v in found.items() if isinstance(v, int | float)}
    return {k: v for k, v in numbers.items() if space[k].low <= v <= space[k].high}
