"""From a configuration to what is trained: the data, and the task that they decide.

Whether a network fits the data and the task, found out before training, and what it keeps.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from omegaconf import DictConfig, open_dict
from torch import Tensor, nn

from medfed.common.console import shown
from medfed.common.errors import ConfigError, MedfedError, first_line
from medfed.common.seeding import derive_seed
from medfed.common.streams import own_stream, seeded
from medfed.config.compose import build
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.splits import check_measurable
from medfed.federation.lightning.collect import rank
from medfed.federation.split import (
    ParameterSplit,
    float_entries,
    listed,
    nothing_personal,
    proposal,
)
from medfed.models.networks.canonical import Canonical, Mix
from medfed.models.networks.outputs import extras, shares
from medfed.models.networks.personal_part import last_activation, nearest
from medfed.models.regression import RegressionTask
from medfed.models.segmentation import SegmentationTask, chosen_activation
from medfed.models.task import Batch, TaskModule

SLIVER = 0.01  # of a segmentation network; its decoder is what the papers keep


def try_model(task: TaskModule, data: FederatedDataModule) -> None:
    """Takes one loss and one evaluation of a network, so that one which does not fit fails at once.

    On a copy of it: of two samples in training, where networks give further heads, and of one in
    evaluation.

    Raises:
        ConfigError: If it cannot take a training batch or an evaluation image, gives logits of
            another shape, or ends in an activation that the loss repeats.
    """
    batch = _first_batch(data)
    task.check_parts(batch)
    trial = copy.copy(task)
    trial._modules = {**task._modules, "network": copy.deepcopy(task.network)}
    few = {name: values[:2] for name, values in batch.items()}
    with _explained(task, batch), seeded():
        trial.network.train()
        with torch.enable_grad():
            trial.loss(few)
            found = trial.outputs(trial.network, few["image"])
        _check_shape(task, found[0], few["image"])
        _check_activation(task, found)
        _say(found, extras(trial.network(few["image"]), few["image"]))
    if getattr(task, "patch_size", ()) is None:  # whole images are segmented at once
        batch = next(iter(next(iter(data.clients.values())).eval_batches("val")), batch)
    with _explained(task, batch), seeded(), torch.no_grad():
        trial.network.eval()
        if getattr(task, "patch_size", ()) is None:
            trial.evaluate([{name: values[:1] for name, values in batch.items()}])
        else:
            _check_shape(task, trial.forward(few["image"]), few["image"])


def _first_batch(data: FederatedDataModule) -> Batch:
    batch: Batch = next(iter(next(iter(data.clients.values())).train_batches(0)))
    return batch


@contextmanager
def _explained(task: TaskModule, batch: Batch) -> Iterator[None]:
    try:
        yield
    except MedfedError:
        raise
    except ImportError as error:
        found = re.search(r"No module named '?([\w.]+)", str(error))
        package = found[1] if found else error.name or first_line(error)
        raise ConfigError(
            f"{type(task.network).__name__} needs the package {package}, which is not installed: "
            f"pip install {package}, or pip install 'medfed[networks]'."
        ) from error
    except Exception as error:  # whatever a network of anybody's raises on what it cannot take
        shapes = " and ".join(f"{k} {tuple(batch[k].shape)}" for k in ("image", "label"))
        raise ConfigError(
            f"The model cannot take the batches of these data ({shapes}): {first_line(error)}; "
            "choose another model or data.patch_size, or set patch_size for sliding windows."
        ) from error


def _check_shape(task: TaskModule, logits: Tensor, image: Tensor) -> None:
    shape = task.output_shape(image)
    wanted = None if shape is None else (len(image), *shape)
    if wanted is not None and tuple(logits.shape) != wanted:
        raise ConfigError(
            f"{type(task.network).__name__} makes logits {tuple(logits.shape)} of images "
            f"{tuple(image.shape)}, but these data and this task need {wanted}; give it the data's "
            "numbers by ${in_channels}, ${out_channels} and ${spatial_dims}."
        )


def _check_activation(task: TaskModule, found: list[Tensor]) -> None:
    """Refuses probabilities where logits are expected: their loss would train, but badly."""
    if task.activation == "identity":
        return
    for output in found:
        if name := last_activation(output):
            raise ConfigError(
                f"{type(task.network).__name__} ends in {name}, but the loss takes logits and "
                f"makes probabilities of them by {task.activation}; build it without its last "
                "activation (an argument such as post_activation=null, act=null, softmax=false)."
            )


def _say(found: list[Tensor], more: int) -> None:
    if rank() == 0 and len(found) > 1:
        weights = ", ".join(f"{w:.2g}" for w in shares(len(found)))
        _log.info("Deep supervision: the losses of %d outputs count %s.", len(found), weights)
    if rank() == 0 and more:
        _log.info(
            "The network returns %d more tensor%s beside its logits; no loss is taken of %s.",
            *((more, "s", "them") if more > 1 else (more, "", "it")),
        )


def next_to_outputs(task: TaskModule, data: FederatedDataModule) -> tuple[str, ...]:
    """Returns patterns of the layers next to the outputs that a loss is of; see :func:`nearest`."""
    return nearest(task.network, task.outputs, _first_batch(data)["image"][:2])


def settle_personal(config: DictConfig, task: TaskModule, data: FederatedDataModule) -> None:
    """Finds the personal part of a network that nobody has described, if the method asks for one.

    It is written into the configuration, so that the run folder knows it and resuming finds it.

    Args:
        config: The configuration; ``model.personal`` is set if it was null.
        task: The task, whose ``personal`` is set; without canonical parts.
        data: Whose first batch goes through the network.

    Raises:
        ConfigError: If nothing is found, or of a segmentation network less than a hundredth.
    """
    if task.personal or not _asks(config):
        return
    network, method = task.network, type(build(config.algorithm)).__name__
    found = next_to_outputs(task, data)
    if not found:
        raise nothing_personal(network, method)
    own, share = _share(network, found)
    if isinstance(task, SegmentationTask) and share < SLIVER:
        raise ConfigError(
            f"{method} keeps a part of the model at each client, and what stands next to the "
            f"output of this {type(network).__name__}, {', '.join(found)}, is {own:,} parameters "
            f"or {share:.2%}, too little to personalise a segmentation; set for example "
            f"{proposal(network, 0.05)}; its blocks and their parameters are {listed(network)}."
        )
    if rank() == 0:
        _log.info(
            "Personal is what stands next to the output: %s (%s parameters, %.2g %%); "
            "model.personal=[...] says otherwise.",
            ", ".join(found),
            f"{own:,}",
            100 * share,
        )
    task.personal = found
    with open_dict(config):
        config.model.personal = list(found)


def _asks(config: DictConfig) -> bool:
    """Whether what the model calls personal is used: by the method, or as the canonical part."""
    canonical = config.get("canonical") or {}
    if "_target_" in canonical:
        return canonical.get("parts") is None
    return build(config.algorithm).personal in ("task", "body")


def _share(network: nn.Module, patterns: tuple[str, ...]) -> tuple[int, float]:
    """The parameters that patterns match, and their share of all."""
    sizes = {n: t.numel() for n, t in float_entries(network).items()}
    split = ParameterSplit.of(network, patterns)
    own, whole = (sum(sizes[n] for n in split.parameters(part)) for part in ("personal", "all"))
    return own, own / whole


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
    with own_stream(derive_seed(config.seed, "initial weights")):
        task: TaskModule = build(config.model)
    return task


def mixed(config: DictConfig, task: TaskModule) -> TaskModule:
    """Gives a task canonical parts; see :func:`build_task`."""
    chosen: CanonicalParts = build(config.canonical)
    networks = [task.network]
    for k in range(1, chosen.count):
        with own_stream(derive_seed(config.seed, "initial weights", k)):
            further: nn.Module = build(config.model.network, _convert_="all")
        networks.append(further)
    patterns = task.personal if chosen.parts is None else chosen.parts
    task.network = Canonical(networks, patterns, chosen.mix, task.activation)
    task.personal = Canonical.personal
    return task
