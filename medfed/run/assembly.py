"""Builds what a run trains: the data, and the task whose channels and classes the data decide.

It also checks before training that the network fits the data and the task, and decides which of its
parts are personal.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from medfed.common.console import brief, shown
from medfed.common.processes import set_threads
from medfed.common.streams import seeded
from medfed.config.compose import build
from medfed.config.description import RunDescription
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.splits import check_measurable
from medfed.federation import split
from medfed.federation.algorithm import Algorithm
from medfed.federation.inputs import CheckedLoss
from medfed.federation.lightning.collect import inform, warn
from medfed.federation.other_state import copied
from medfed.federation.split import divide, numbered
from medfed.models.networks.personal_part import last_activation, nearest
from medfed.models.regression import RegressionTask
from medfed.models.segmentation import SegmentationTask, chosen_activation
from medfed.models.task import Batch, TaskModule
from medfed.records.tasks import mixed, plain_task
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
    algorithm: Algorithm = build(config.algorithm)
    asks = algorithm.personal in ("task", "body")
    if config.canonical is not None:
        asks = config.canonical.get("parts") is None
    if not asks:
        return ()
    network, method = task.network, algorithm.title
    if task.personal:
        trial = copy.deepcopy(network)  # where single entries are personal, it is divided
        try:
            divided = split.ParameterSplit.of(trial, divide(trial, task.personal))
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


def read_data(config: RunDescription) -> FederatedDataModule:
    """Reads the data and logs which clients are kept out."""
    data = unread_data(config)
    data.setup()
    say_data(data)
    return data


def unread_data(config: RunDescription) -> FederatedDataModule:
    """Builds the data module, which reads nothing yet."""
    set_threads(config.threads)
    if config.data.get("scaling") == "fedrdn" and config.channel.get("secure"):
        raise ConfigError(
            "data.scaling=fedrdn shows each client's channel means and deviations to all, which "
            "channel.secure=masks would hide; set data.scaling=client, or channel.secure=null."
        )
    data: FederatedDataModule = build(config.data)
    data.keep_out = config.keep_out
    data.balanced = config.model.get("class_weights") == "balanced"
    return data


def say_data(data: FederatedDataModule) -> None:
    """Checks data that have been read, and logs which clients are kept out."""
    check_measurable({c: data.plans[c].patients for c in data.clients})
    inform(data.description)
    if data.kept_out:
        inform(f"Kept out of training: {', '.join(map(shown, data.kept_out))}.")


def task_for(
    config: RunDescription, data: FederatedDataModule
) -> tuple[RunDescription, TaskModule]:
    """Builds the task for data that have been read, and tries it on them."""
    config = numbered_inputs(resolve_facts(config, data), data)
    task = plain_task(config.model, config.seed)
    if isinstance(task, RegressionTask) and task.deviation != 1:
        inform(
            f"The model learns the outcome {data.class_names[0]} in standard units: its training "
            f"mean is {task.mean:.4g}, its standard deviation {task.deviation:.4g}. Predictions "
            "and metrics keep the unit of the data."
        )
    try_model(task, data)
    if patterns := personal_part(config, task, data):
        task.personal = patterns
        # Written to the run folder, so that a resumed run has it.
        config = config.completed({"model.personal": list(patterns)})
    task = mixed(task, config.model, config.canonical, config.seed)
    precision = str(config.trainer.precision)
    if precision.startswith("64"):
        task.double()
    if precision.startswith("bf16") and config.trainer.accelerator == "cpu":
        from medfed.run.doctor import units  # imported here, as few runs need it

        if not {"bf16", "AMX"} & {*units()}:
            warn(
                f"trainer.precision={precision} is slower than 32-true here, as this CPU has no "
                "instructions for bfloat16."
            )
    return config, task


def numbered_inputs(config: RunDescription, data: FederatedDataModule) -> RunDescription:
    """Replaces names of the data's inputs in the personal part by their numbers."""
    values = {"model.personal": config.model.get("personal")}
    values["algorithm.personal"] = config.algorithm.get("personal")
    lists = {key: value for key, value in values.items() if isinstance(value, list)}
    new = {key: [numbered(p, data.channel_names) for p in value] for key, value in lists.items()}
    return config if new == lists else config.completed(new)


def resolve_facts(config: RunDescription, data: FederatedDataModule) -> RunDescription:
    """Fills in the facts of the data; a fact that the user set must agree with the data."""
    from_data: dict[str, Any] = {
        "in_channels": data.in_channels,
        "regions": list(data.class_names),
        "exclusive": getattr(data, "exclusive", None),
        "millimetres": getattr(data, "millimetres", False),
        "outcome_scale": getattr(data, "agreed_outcome_scale", None),
        "spatial_dims": getattr(data, "spatial_dims", 2),
        "patch_size": getattr(data, "window", None),
        "plan": plan.record() if (plan := getattr(data.agreed, "plan", None)) else None,
    }
    from_data = {key: list(v) if isinstance(v, tuple) else v for key, v in from_data.items()}
    from_user = {key: v for key, v in vars(config.facts).items() if v is not None}
    facts = {**from_data, **from_user}
    if getattr(data, "findings", False) != ("findings" in config.model):
        raise ConfigError(
            "model=findings and pictures of several findings need each other; set both, of a CSV "
            "by data.reader.findings=[...]."
        )
    if getattr(data, "survival", False) != ("cuts" in config.model):
        raise ConfigError("model=survival and data.outcome=survival need each other; set both.")
    if getattr(data, "boxes", False) != ("anchors" in config.model):
        raise ConfigError("model=detector and data=luna16_scans need each other; set both.")
    from_data["out_channels"] = data.num_classes
    activation = config.model.get("activation")
    if "regions" in config.model and activation is not None:
        # Exclusive regions need an output for the background.
        chosen = chosen_activation(activation, len(facts["regions"]), facts["exclusive"])
        from_data["out_channels"] += chosen == "softmax"
    loss = config.model.get("loss")
    if loss in ("cox", "cox_batches"):
        from_data["out_channels"] = 1
        largest = max(client.num_samples for client in data.clients.values())
        if loss == "cox" and data.batch_size < largest:
            raise ConfigError(
                "model.loss=cox compares all patients of a hospital in each step; set "
                f"data.batch_size={largest} or more, or model.loss=hazard."
            )
    facts = {**from_data, **from_user}
    for key, value in from_user.items():
        if key != "patch_size" and value != from_data[key]:
            raise ConfigError(
                f"{key} is {value}, but the data have {from_data[key]}; leave it at null."
            )
    if (window := from_user.get("patch_size")) is not None:
        if "patch_size" not in config.model:
            raise ConfigError("patch_size is for segmentation by windows; leave it at null.")
        if len(window) != facts["spatial_dims"] or min(window) < 1:
            raise ConfigError(
                f"patch_size={window} must be {facts['spatial_dims']} positive numbers, or null."
            )
    return config.completed(facts)
