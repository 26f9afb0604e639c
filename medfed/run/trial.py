"""Tries a model on the data: whether it fits them, and which of its layers are personal."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from medfed.common.console import brief
from medfed.common.streams import seeded
from medfed.config.compose import part_of
from medfed.config.description import RunDescription
from medfed.datamodules.base import FederatedDataModule
from medfed.federation import split
from medfed.federation.algorithm import Algorithm
from medfed.federation.inputs import CheckedLoss
from medfed.federation.lightning.collect import inform
from medfed.federation.other_state import copied
from medfed.models.networks.personal_part import last_activation, nearest
from medfed.models.segmentation import SegmentationTask
from medfed.models.task import Batch, TaskModule
from medfed.standalone.errors import ConfigError, MachineError, MedfedError, first_line
from medfed.standalone.outputs import extras, shares

DIVERGED = 1000.0  # times the loss of an untrained model, or 1; no training that goes well is there
SLIVER = 0.01  # share of a segmentation network's parameters; the papers keep its whole decoder


def try_model(task: TaskModule, data: FederatedDataModule) -> None:
    """Computes a loss and an evaluation with a copy of a network, so that what does not fit fails.

    Training takes two samples, as networks may return further heads in it, and evaluation one.
    """
    batch = first_batch(data)
    task.check_parts(batch)
    trial = copy.copy(task)
    trial._modules = {**task._modules, "network": copied(task.network)}
    few = {name: values[:2] for name, values in batch.items()}
    with _explained(task, batch), seeded():
        trial.network.train()
        with torch.enable_grad():
            start = abs(float(CheckedLoss(trial.loss, trial.network)(few).detach()))
            outputs = trial.outputs(trial.network, few["image"])
        _check_shape(task, outputs[0], few["image"])
        _check_activation(task, outputs)
        task.highest_loss = DIVERGED * max(1.0, start)
        if (count := len(outputs)) > 1:
            weights = ", ".join(f"{w:.2g}" for w in shares(count))
            inform(f"Deep supervision: the losses of {count} outputs weigh {weights}.")
        if more := extras(trial.network(few["image"]), few["image"]):
            ending, them = ("s", "them") if more > 1 else ("", "it")
            tensors = f"{more} more tensor{ending} in addition to its logits"
            inform(f"The network returns {tensors}; the loss ignores {them}.")
    # Without a window, whole images are segmented at once.
    whole = isinstance(task, SegmentationTask) and task.inference.patch_size is None
    if whole:
        batch = next(iter(next(iter(data.clients.values())).eval_batches("val")), batch)
    with _explained(task, batch), seeded(), torch.no_grad():
        trial.network.eval()
        if whole:
            trial.evaluate([{name: values[:1] for name, values in batch.items()}])
        else:
            _check_shape(task, trial.forward(few["image"]), few["image"])


def first_batch(data: FederatedDataModule) -> Batch:
    """Returns a training batch of the first client."""
    return next(next(iter(data.clients.values())).train_batches(0))


@contextmanager
def _explained(task: TaskModule, batch: Batch) -> Iterator[None]:
    try:
        yield
    except MedfedError:
        raise
    except ImportError as error:
        missing = re.search(r"No module named '?([\w.]+)", str(error))
        package = missing[1] if missing else error.name or first_line(error)
        raise MachineError(
            f"{type(task.network).__name__} needs the package {package}, which is not installed: "
            f"pip install {package}."
        ) from error
    except Exception as error:  # a network may raise anything
        if (sentence := split.of_one_sample(error)) is not None:
            raise ConfigError(
                f"With data.batch_size={len(batch['image'])} the model {sentence}."
            ) from error
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
            f"{type(task.network).__name__} turns images {tuple(image.shape)} into logits "
            f"{tuple(logits.shape)}, but these data and this task need {wanted}; give it "
            "the data's numbers by ${in_channels}, ${out_channels} and ${spatial_dims}."
        )


def _check_activation(task: TaskModule, outputs: list[Tensor]) -> None:
    """Refuses probabilities in place of logits: training on them works, but badly."""
    if task.activation == "identity":
        return
    for output in outputs:
        if name := last_activation(output):
            raise ConfigError(
                f"{type(task.network).__name__} ends in {name}, but the loss takes logits and "
                f"applies {task.activation} to them; build it without its last "
                "activation (an argument such as post_activation=null, act=null, softmax=false)."
            )


def next_to_outputs(task: TaskModule, data: FederatedDataModule) -> tuple[str, ...]:
    """Returns patterns of the layers next to the outputs in the loss; see :func:`nearest`."""
    return nearest(task.network, task.outputs, first_batch(data)["image"][:2])


def personal_part(
    config: RunDescription, task: TaskModule, data: FederatedDataModule
) -> tuple[str, ...]:
    """Finds the personal part of a network if the method needs one and ``model.personal`` is empty.

    Returns patterns of parameter names; empty if the task has patterns or the method needs none.
    """
    algorithm: Algorithm = part_of(config, "algorithm")
    asks = algorithm.personal in ("task", "body")
    if config.canonical is not None:
        asks = config.canonical.get("parts") is None
    if not asks:
        return ()
    network, method = task.network, algorithm.title
    if task.personal:
        trial = copy.deepcopy(network)  # where single entries are personal, it is divided
        try:
            divided = split.ParameterSplit.of(trial, split.divide(trial, task.personal))
            shared = divided.parameters("shared")
        except ConfigError:  # patterns that match nothing are refused where clients are made
            return ()
        if "*" not in task.personal and not shared:  # "*" says that it means the whole network
            raise ConfigError(
                f"model.personal=[{', '.join(task.personal)}] matches every parameter of this "
                f"{type(network).__name__}, so {method} would share nothing (a pattern matches a "
                "tensor by any of its names); name fewer, or set algorithm=local."
            )
        return ()
    patterns = next_to_outputs(task, data)
    if not patterns:
        raise split.nothing_personal(network, method)
    count, share = _share(network, patterns)
    if isinstance(task, SegmentationTask) and share < SLIVER:
        raise ConfigError(
            f"{method} keeps a part of the model at each client. The layers next to the output of "
            f"this {type(network).__name__}, {', '.join(patterns)}, have {count:,} parameters "
            f"({share:.2%}), too few to personalise a segmentation; set for example "
            f"{split.proposal(network, 0.05)}. The blocks and their parameters are "
            f"{split.listed(network)}."
        )
    inform(
        f"The layers next to the output are personal: {', '.join(patterns)} ({count:,} parameters, "
        f"{brief(100 * share)} %); model.personal=[...] chooses others."
    )
    return patterns


def _share(network: nn.Module, patterns: tuple[str, ...]) -> tuple[int, float]:
    """The parameters that patterns match, and their share of all."""
    sizes = {n: t.numel() for n, t in split.float_entries(network).items()}
    divided = split.ParameterSplit.of(network, patterns)
    matched, whole = (
        sum(sizes[n] for n in divided.parameters(part)) for part in ("personal", "all")
    )
    return matched, matched / whole
