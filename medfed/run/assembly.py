"""From a configuration to what is trained: the data, and the task that they decide.

Whether a network fits the data and the task, found out before training, and what it keeps.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from medfed.common.console import shown
from medfed.common.errors import ConfigError, MedfedError, first_line
from medfed.common.streams import seeded
from medfed.config.compose import build
from medfed.config.description import RunDescription
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
from medfed.models.networks.outputs import extras, shares
from medfed.models.networks.personal_part import last_activation, nearest
from medfed.models.regression import RegressionTask
from medfed.models.segmentation import SegmentationTask, chosen_activation
from medfed.models.task import Batch, TaskModule
from medfed.records.tasks import mixed, plain_task

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
            outputs = trial.outputs(trial.network, few["image"])
        _check_shape(task, outputs[0], few["image"])
        _check_activation(task, outputs)
        _say(outputs, extras(trial.network(few["image"]), few["image"]))
    # Whole images are segmented at once where there is no window.
    whole = isinstance(task, SegmentationTask) and task.inference.patch_size is None
    if whole:
        batch = next(iter(next(iter(data.clients.values())).eval_batches("val")), batch)
    with _explained(task, batch), seeded(), torch.no_grad():
        trial.network.eval()
        if whole:
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
        missing = re.search(r"No module named '?([\w.]+)", str(error))
        package = missing[1] if missing else error.name or first_line(error)
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


def _check_activation(task: TaskModule, outputs: list[Tensor]) -> None:
    """Refuses probabilities where logits are expected: their loss would train, but badly."""
    if task.activation == "identity":
        return
    for output in outputs:
        if name := last_activation(output):
            raise ConfigError(
                f"{type(task.network).__name__} ends in {name}, but the loss takes logits and "
                f"makes probabilities of them by {task.activation}; build it without its last "
                "activation (an argument such as post_activation=null, act=null, softmax=false)."
            )


def _say(outputs: list[Tensor], more: int) -> None:
    if rank() == 0 and len(outputs) > 1:
        weights = ", ".join(f"{w:.2g}" for w in shares(len(outputs)))
        _log.info("Deep supervision: the losses of %d outputs count %s.", len(outputs), weights)
    if rank() == 0 and more:
        _log.info(
            "The network returns %d more tensor%s beside its logits; no loss is taken of %s.",
            *((more, "s", "them") if more > 1 else (more, "", "it")),
        )


def next_to_outputs(task: TaskModule, data: FederatedDataModule) -> tuple[str, ...]:
    """Returns patterns of the layers next to the outputs that a loss is of; see :func:`nearest`."""
    return nearest(task.network, task.outputs, _first_batch(data)["image"][:2])


def personal_part(
    config: RunDescription, task: TaskModule, data: FederatedDataModule
) -> tuple[str, ...]:
    """Finds the personal part of a network that nobody has described, if the method asks for one.

    Args:
        config: What the run is to do.
        task: The task, without canonical parts.
        data: Whose first batch goes through the network.

    Returns:
        Patterns of parameter names; empty where the task has some, or nobody asks.

    Raises:
        ConfigError: If nothing is found, or of a segmentation network less than a hundredth.
    """
    if task.personal or not _asks(config):
        return ()
    network, method = task.network, type(build(config.algorithm)).__name__
    patterns = next_to_outputs(task, data)
    if not patterns:
        raise nothing_personal(network, method)
    kept, share = _share(network, patterns)
    if isinstance(task, SegmentationTask) and share < SLIVER:
        raise ConfigError(
            f"{method} keeps a part of the model at each client, and what stands next to the "
            f"output of this {type(network).__name__}, {', '.join(patterns)}, is {kept:,} "
            f"parameters or {share:.2%}, too little to personalise a segmentation; set for example "
            f"{proposal(network, 0.05)}; its blocks and their parameters are {listed(network)}."
        )
    if rank() == 0:
        _log.info(
            "Personal is what stands next to the output: %s (%s parameters, %.2g %%); "
            "model.personal=[...] says otherwise.",
            ", ".join(patterns),
            f"{kept:,}",
            100 * share,
        )
    return patterns


def _asks(config: RunDescription) -> bool:
    """Whether what the model calls personal is used: by the method, or as the canonical part."""
    if config.canonical is not None:
        return bool(config.canonical.get("parts") is None)
    return bool(build(config.algorithm).personal in ("task", "body"))


def _share(network: nn.Module, patterns: tuple[str, ...]) -> tuple[int, float]:
    """The parameters that patterns match, and their share of all."""
    sizes = {n: t.numel() for n, t in float_entries(network).items()}
    split = ParameterSplit.of(network, patterns)
    matched, whole = (sum(sizes[n] for n in split.parameters(part)) for part in ("personal", "all"))
    return matched, matched / whole


_log = logging.getLogger(__name__)


def data_and_task(config: RunDescription) -> tuple[FederatedDataModule, TaskModule]:
    """Reads the data and builds the task, whose channels and classes the data decide.

    Args:
        config: What the run is to do.
    """
    data = read_data(config)
    return data, task_for(config, data)[1]


def read_data(config: RunDescription) -> FederatedDataModule:
    """Reads the data, and says what they are.

    Args:
        config: What the run is to do.
    """
    data = unread_data(config)
    data.setup()
    say_data(data)
    return data


def unread_data(config: RunDescription) -> FederatedDataModule:
    """Builds the data module, which has read nothing yet.

    Args:
        config: What the run is to do.
    """
    torch.set_num_threads(config.threads)
    data: FederatedDataModule = build(config.data)
    data.keep_out = config.keep_out
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


def task_for(
    config: RunDescription, data: FederatedDataModule
) -> tuple[RunDescription, TaskModule]:
    """Builds the task of data that are read, and tries it on them.

    Args:
        config: What the run is to do.
        data: The data.

    Returns:
        The same with what the data, and the network, decide; and the task.
    """
    config = settled(config, data)
    task = plain_task(config.model, config.seed)
    if isinstance(task, RegressionTask) and task.deviation != 1 and rank() == 0:
        _log.info(
            "The outcome %s is learnt in standard units: its mean in training is %.4g, its "
            "deviation %.4g. Predictions and metrics are in its own unit.",
            *(data.class_names[0], task.mean, task.deviation),
        )
    try_model(task, data)
    if found := personal_part(config, task, data):
        task.personal = found
        # Into the run folder, so that resuming finds it.
        config = config.replacing({"model.personal": list(found)})
    task = mixed(task, config.model, config.canonical, config.seed)
    if str(config.trainer.precision).startswith("64"):
        task.double()
    return config, task


def settled(config: RunDescription, data: FederatedDataModule) -> RunDescription:
    """Fills in the facts of the data; one that is set must be the same, or nothing fits.

    How large windows are is no fact, but only segmentation has windows.

    Raises:
        ConfigError: If one is set to something else.
    """
    said: dict[str, Any] = {
        "in_channels": data.in_channels,
        "regions": list(data.class_names),
        "exclusive": getattr(data, "exclusive", None),
        "millimetres": getattr(data, "millimetres", False),
        "outcome_scale": getattr(data, "agreed_outcome_scale", None),
        "spatial_dims": getattr(data, "spatial_dims", 2),
        "patch_size": getattr(data, "window", None),
    }
    said = {key: list(v) if isinstance(v, tuple) else v for key, v in said.items()}
    given = {key: v for key, v in vars(config.facts).items() if v is not None}
    facts = {**said, **given}
    background = has_background(config.model, facts)
    said["out_channels"] = data.num_classes + background
    facts = {**said, **given}
    for key, value in given.items():
        if key != "patch_size" and value != said[key]:
            raise ConfigError(f"{key} is {value}, but the data say {said[key]}; leave it at null.")
    if (window := given.get("patch_size")) is not None:
        if "patch_size" not in config.model:
            raise ConfigError("patch_size is for segmentation by windows; leave it at null.")
        if len(window) != facts["spatial_dims"] or min(window) < 1:
            raise ConfigError(
                f"patch_size={window} must be {facts['spatial_dims']} positive numbers, or null."
            )
    return config.replacing(facts)


def has_background(model: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    """Says whether the network has an output for the background: of exclusive regions.

    Args:
        model: The section.
        facts: Of the data: ``regions`` and ``exclusive``.

    Raises:
        ConfigError: If exclusive classes are asked for where regions overlap.
    """
    wanted = model.get("activation")
    if "regions" not in model or wanted is None:
        return False
    return chosen_activation(wanted, len(facts["regions"]), facts["exclusive"]) == "softmax"
