"""Builds what a run trains: the data, and the task whose channels and classes the data decide."""

from __future__ import annotations

from typing import Any

from medfed.common.console import short
from medfed.common.processes import set_threads
from medfed.config.compose import build
from medfed.config.description import RunDescription
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.splits import check_measurable
from medfed.federation.lightning.collect import inform, warn
from medfed.federation.split import numbered
from medfed.models.regression import RegressionTask
from medfed.models.segmentation import chosen_activation
from medfed.models.task import TaskModule
from medfed.records.tasks import mixed, plain_task
from medfed.run.trial import personal_part, try_model
from medfed.standalone.errors import ConfigError


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
        inform(f"Kept out of training: {', '.join(map(short, data.kept_out))}.")


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
    precision = str(config.trainer["precision"])
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
