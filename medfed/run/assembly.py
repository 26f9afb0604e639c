"""From a configuration to what is trained: the data, and the task that they decide."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from omegaconf import DictConfig, open_dict
from torch import nn

from medfed.common.errors import ConfigError
from medfed.common.names import shown
from medfed.common.seeding import derive_seed
from medfed.config.compose import build
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.splits import check_measurable
from medfed.federation.lightning.collect import rank
from medfed.models.networks.canonical import Canonical, Mix
from medfed.models.regression import RegressionTask
from medfed.models.segmentation import chosen_activation
from medfed.models.task import TaskModule
from medfed.run.fitting import settle_personal, try_model

_log = logging.getLogger(__name__)


def data_and_task(config: DictConfig) -> tuple[FederatedDataModule, TaskModule]:
    """Reads the data and builds the task, whose channels and classes the data decide.

    Args:
        config: The configuration; facts of the data that are null are filled in.
    """
    data = read_data(config)
    return data, task_for(config, data)


def read_data(config: DictConfig) -> FederatedDataModule:
    """Reads the data, and says what they are.

    Args:
        config: The configuration.
    """
    data = unread_data(config)
    data.setup()
    say_data(data)
    return data


def unread_data(config: DictConfig) -> FederatedDataModule:
    """Builds the data module, which has read nothing yet.

    Args:
        config: The configuration.
    """
    torch.set_num_threads(config.threads)
    data: FederatedDataModule = build(config.data)
    data.keep_out = tuple(str(c) for c in config.get("keep_out") or ())
    data.balanced = config.model.get("class_weights") == "balanced"
    return data


def say_data(data: FederatedDataModule) -> None:
    """Says what data are that have been read.

    Raises:
        DataError: If nothing could be measured on them.
    """
    check_measurable({c: data.plans[c].patients for c in data.clients})
    if rank() == 0:
        _log.info("%s", data.description)
        if data.kept_out:
            _log.info("Kept out of training: %s.", ", ".join(map(shown, data.kept_out)))


def task_for(config: DictConfig, data: FederatedDataModule) -> TaskModule:
    """Builds the task of data that are read, and tries it on them.

    Args:
        config: The configuration; facts of the data that are null are filled in.
        data: The data.
    """
    spatial_dims = getattr(data, "spatial_dims", 2)
    facts = {
        "in_channels": data.in_channels,
        "regions": list(data.class_names),
        "exclusive": getattr(data, "exclusive", None),
        "millimetres": getattr(data, "millimetres", False),
        "outcome_scale": getattr(data, "agreed_outcome_scale", None),
        "spatial_dims": spatial_dims,
        "patch_size": getattr(data, "window", None),
    }
    with open_dict(config):
        for key, value in facts.items():
            _settle(config, key, list(value) if isinstance(value, tuple) else value)
        _settle(config, "out_channels", data.num_classes + has_background(config))
    task = plain_task(config)
    if isinstance(task, RegressionTask) and task.deviation != 1 and rank() == 0:
        _log.info(
            "The outcome %s is learnt in standard units: its mean in training is %.4g, its "
            "deviation %.4g. Predictions and metrics are in its own unit.",
            *(data.class_names[0], task.mean, task.deviation),
        )
    try_model(task, data)
    settle_personal(config, task, data)
    if mixes_models(config):
        task = mixed(config, task)
    if str(config.trainer.precision).startswith("64"):
        task.double()
    return task


def _settle(config: DictConfig, key: str, fact: object) -> None:
    """Takes a fact from the data; one that is set must be the same, or the network is another's.

    How large windows are is no fact, but only segmentation has windows.
    """
    given = config.get(key)
    if given is None:
        config[key] = fact
    elif key == "patch_size":
        if "patch_size" not in config.model:
            raise ConfigError("patch_size is for segmentation by windows; leave it at null.")
        if len(given) != config.spatial_dims or min(given) < 1:
            raise ConfigError(
                f"patch_size={list(given)} must be {config.spatial_dims} positive numbers, or null."
            )
    elif given != fact:
        raise ConfigError(f"{key} is {given}, but the data say {fact}; leave it at null.")


def has_background(config: DictConfig) -> bool:
    """Says whether the network has an output for the background: of exclusive regions.

    Args:
        config: The configuration, ``regions`` and ``exclusive`` filled in.

    Raises:
        ConfigError: If exclusive classes are asked for where regions overlap.
    """
    wanted = config.model.get("activation")
    if "regions" not in config.model or wanted is None:
        return False
    return chosen_activation(wanted, len(config.regions), config.exclusive) == "softmax"


@dataclass(frozen=True)
class CanonicalParts:
    """What of a network is canonical, and how its instances are mixed.

    Attributes:
        count: K, the instances.
        mix: ``outputs`` or ``parameters``.
        parts: Patterns of parameter names; ``None``: what the model calls personal, its head.

    Raises:
        ConfigError: If the count is below 1.
    """

    count: int = 4
    mix: Mix = "outputs"
    parts: list[str] | None = None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"canonical.count must be 1 or more, not {self.count}.")


def mixes_models(config: DictConfig) -> bool:
    """Says whether a run has canonical parts.

    With another algorithm, what an experiment says about their number has no section to change and
    means nothing.

    Example:
        >>> from omegaconf import OmegaConf
        >>> mixes_models(OmegaConf.create({"canonical": {"count": 2}}))
        False
    """
    return "_target_" in (config.get("canonical") or {})


def build_task(config: DictConfig) -> TaskModule:
    """Builds the task of a run from initial weights that depend on the seed alone.

    With ``canonical=...`` the network is built anew for each further instance, under a seed of its
    own; the first one, and all that is common, is the network of a run without canonical parts.

    Args:
        config: The configuration, facts of the data filled in.

    Raises:
        ConfigError: If the model has no such part, or its instances would be equal.
    """
    task = plain_task(config)
    return mixed(config, task) if mixes_models(config) else task


def plain_task(config: DictConfig) -> TaskModule:
    """Builds the task without canonical parts; see :func:`build_task`."""
    torch.manual_seed(derive_seed(config.seed, "initial weights"))
    task: TaskModule = build(config.model)
    return task


def mixed(config: DictConfig, task: TaskModule) -> TaskModule:
    """Gives a task canonical parts; see :func:`build_task`."""
    chosen: CanonicalParts = build(config.canonical)
    networks = [task.network]
    for k in range(1, chosen.count):
        torch.manual_seed(derive_seed(config.seed, "initial weights", k))
        further: nn.Module = build(config.model.network, _convert_="all")
        networks.append(further)
    patterns = task.personal if chosen.parts is None else chosen.parts
    task.network = Canonical(networks, patterns, chosen.mix, task.activation)
    task.personal = Canonical.personal
    return task
