"""From a configuration to the objects that are trained: data, task, federation."""

from __future__ import annotations

import logging

import torch
from omegaconf import DictConfig, open_dict

from medfed.channels import build_channel
from medfed.config import build, first_line
from medfed.datamodules.base import FederatedDataModule
from medfed.errors import ConfigError
from medfed.federation.algorithm import ClientInfo
from medfed.federation.budget import learning_rates
from medfed.federation.collect import rank
from medfed.federation.federation import Federation
from medfed.federation.local_client import LocalClient
from medfed.federation.training import LocalTrainer
from medfed.models.task import TaskModule
from medfed.tasks import build_task, mixes_models

_log = logging.getLogger(__name__)


def prepare(config: DictConfig) -> tuple[FederatedDataModule, TaskModule]:
    """Reads the data and builds the task, whose channels and classes the data decide.

    Args:
        config: The configuration; facts of the data that are null are filled in.
    """
    torch.set_num_threads(config.threads)
    data: FederatedDataModule = build(config.data)
    data.keep_out = tuple(str(c) for c in config.get("newcomers") or ())
    data.setup()
    if rank() == 0:
        _log.info("%s", data.description)
        if data.newcomers:
            _log.info("Kept out of training: %s.", ", ".join(data.newcomers))
    spatial_dims = getattr(data, "spatial_dims", 2)
    facts = {
        "in_channels": data.in_channels,
        "out_channels": data.num_classes,
        "regions": list(data.class_names),
        "spatial_dims": spatial_dims,
        # Slices pass the network whole; volumes, whose depth rarely suits it, window by window.
        "patch_size": getattr(data, "size", None) if spatial_dims == 3 else None,
    }
    with open_dict(config):
        for key, value in facts.items():
            if config[key] is None:
                config[key] = list(value) if isinstance(value, tuple) else value
    task = build_task(config)
    if str(config.trainer.precision).startswith("64"):
        task.double()
    try_model(task, data)
    return data, task


def try_model(task: TaskModule, data: FederatedDataModule) -> None:
    """Computes one loss and one evaluation, so that a model which does not fit fails at once.

    Raises:
        ConfigError: If the model cannot take a training batch or an evaluation image.
    """
    client = next(iter(data.clients.values()))
    batch = next(iter(client.train_batches(0)))
    flags = {m: m.training for m in task.network.modules()}
    task.network.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            task.loss(batch)
            if getattr(task, "patch_size", ()) is None:  # whole images are segmented at once
                batch = next(iter(client.eval_batches("val")), batch)
                task.evaluate([{name: values[:1] for name, values in batch.items()}])
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        shapes = " and ".join(f"{k} {tuple(batch[k].shape)}" for k in ("image", "label"))
        raise ConfigError(
            f"The model cannot take the batches of these data ({shapes}): {first_line(error)}; "
            "choose another model or data.patch_size, or set patch_size for sliding windows."
        ) from error
    for module, training in flags.items():
        module.training = training


def federate(
    config: DictConfig, data: FederatedDataModule, task: TaskModule
) -> tuple[Federation, LocalTrainer]:
    """Builds the federation of all clients and their common training loop.

    Raises:
        ConfigError: If the algorithm does not fit the model, or the optimizer cannot be used.
    """
    algorithm = build(config.algorithm)
    if mixes_models(config) and not algorithm.mixes:
        raise ConfigError(
            f"{type(algorithm).__name__} would train the membership vectors of canonical models as "
            "if they were weights; choose canonical=none, or algorithm=ppfl or ifca."
        )
    split = algorithm.split(task.network, task.personal, config.buffers)
    algorithm = algorithm.adapted(split, task.network)
    optimizer, scheduler = build(config.optimizer), build(config.scheduler)
    try:
        learning_rates(optimizer, scheduler, config.rounds)
    except Exception as error:
        raise ConfigError(
            f"The optimizer or its scheduler cannot be used as it is: {first_line(error)}"
        ) from error
    local = LocalTrainer(
        task.network,
        task.loss,
        split,
        optimizer,
        scheduler,
        config.rounds,
        build(config.local),
        config.seed,
    )
    weights = local.initial()
    everyone = [ClientInfo(c.id, c.num_samples) for c in data.clients.values()]
    server, state = algorithm.init(weights, split, everyone)
    clients = {c.id: LocalClient(c, local, weights, state) for c in data.clients.values()}
    channel = build_channel(config, algorithm)
    cohort = build(config.cohort)
    cohort.of([c.id for c in everyone], config.seed, 0)  # an unknown client stops the run here
    return Federation(algorithm, server, clients, everyone, channel, cohort, config.seed), local
