"""Checks of a composed configuration before any constructor, or any library, sees its values."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf

from medfed.common.checks import check_known
from medfed.common.errors import CheckpointError, ConfigError
from medfed.common.launched import Launched, launched
from medfed.config.signatures import check_exists, check_types
from medfed.config.targets import check_targets

# Keys outside of any constructor: the smallest whole number, and whether null will do.
WHOLE_NUMBERS = {
    "rounds": (1, False),
    "seed": (0, False),
    "threads": (1, False),
    "workers": (1, True),
    "evaluation.every": (1, False),
    "evaluation.patience": (1, True),
    "checkpoint.keep": (1, False),
    "checkpoint.every": (1, False),
    "onboard_steps": (1, False),
    "finetune_steps": (0, False),
}
# The largest ones, beyond which a machine breaks down instead of saying so. They are not this
# machine's cores, as the bits of a run are those of its number of threads, wherever it is read.
LARGEST = {"rounds": 10**6, "threads": 256, "workers": 64}
OURS = "medfed.federation.lightning.strategy.ClientSharding"
# Keys that name a folder which medfed has made, and the file by which it is known.
FOLDERS = {
    "run": ("config.yaml", "run folder"),
    "resume": ("config.yaml", "run folder"),
    "bundle": ("configs/metadata.json", "bundle"),
}
PICTURES = ("png", "pdf", "svg", "none")
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "64-true", "32", "bf16", "16", "64")


def check(config: DictConfig) -> None:
    """Checks all that can be told from the configuration alone.

    Args:
        config: What Hydra composed, of any command.

    Raises:
        ConfigError: If a value is missing, of another type or out of range; the key is named.
        DataError: If a file or folder that must be there is not.
        CheckpointError: If a run folder or bundle is none.
    """
    check_targets(OmegaConf.to_container(config))
    check_values(config)
    check_folders(config)
    check_runtime(config)
    check_types(config, paths=True)


def check_values(config: DictConfig) -> None:
    """Checks that nothing is left open, and the numbers that no constructor checks.

    Args:
        config: A composed configuration.
        numbers: Keys of whole numbers: the smallest one, and whether null will do.

    Raises:
        ConfigError: If a value is missing, or a number is not whole or too small, or the clients
            of a list are no list.

    Example:
        >>> check_values(OmegaConf.create({"rounds": 0}))
        Traceback (most recent call last):
        ...
        medfed.common.errors.ConfigError: rounds must be a whole number of at least 1, not 0.
    """
    if missing := next(_missing(config), None):
        source = config.get("source") if missing == "data.path" else None
        where = f" ({source})" if source else ""
        raise ConfigError(f"{missing} has no value yet; set it by {missing}=VALUE{where}.")
    for key, (least, optional) in WHOLE_NUMBERS.items():
        value = OmegaConf.select(config, key, default=least)
        if value is None and optional:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(
                f"{key} must be a whole number of at least {least}{' or null' * optional}, "
                f"not {value}."
            )
        if value > (most := LARGEST.get(key, value)):
            raise ConfigError(f"{key} must be a whole number of at most {most}, not {value}.")
    kind = OmegaConf.select(config, "pictures.format", default="png")
    check_known("pictures.format", kind, PICTURES)
    keep_out = config.get("keep_out", ListConfig([]))
    if not isinstance(keep_out, ListConfig):
        raise ConfigError(f"keep_out must be a list of clients; write keep_out=[{keep_out}].")


def _missing(node: DictConfig) -> Iterator[str]:
    """Yields the keys without a value; interpolations are left alone, as some need a run."""
    for key in node:
        if OmegaConf.is_missing(node, key):
            yield node._get_full_key(str(key))
        elif not OmegaConf.is_interpolation(node, str(key)):
            value = node[key]
            if isinstance(value, DictConfig):
                yield from _missing(value)


def check_folders(config: DictConfig) -> None:
    """Checks that run folders and bundles are such, before Hydra would make the folder.

    Raises:
        CheckpointError: If one is not; the key is named.

    Example:
        >>> check_folders(OmegaConf.create({"run": "/no/such/run"}))
        Traceback (most recent call last):
        ...
        medfed.common.errors.CheckpointError: run=/no/such/run is no run folder (it has no \
config.yaml).
    """
    for key, (file, kind) in FOLDERS.items():
        value = config.get(key)
        for one in value if isinstance(value, ListConfig) else [value]:
            if one is not None and not (Path(str(one)) / file).is_file():
                raise CheckpointError(f"{key}={one} is no {kind} (it has no {file}).")
    start = OmegaConf.select(config, "init.weights")
    if start is None and OmegaConf.select(config, "init.adopt"):
        raise ConfigError(
            "init.weights has no value yet, and init.adopt asks for its network or data; set it by "
            "init.weights=BUNDLE or RUN_FOLDER."
        )
    if start is not None and config.get("resume") is None:  # a run that goes on has its own copy
        check_exists("init.weights", str(start))
    runs = config.get("runs", ListConfig(["."]))
    names = list(runs) if isinstance(runs, ListConfig) else [runs]
    if not names or None in names:
        raise CheckpointError("runs names no folder; name one that holds finished runs.")
    for name in names:
        if not Path(str(name)).expanduser().is_dir():
            raise CheckpointError(f"runs={name} is no folder; name one that holds finished runs.")


def check_runtime(config: DictConfig) -> None:
    """Checks what Lightning would refuse late, or silently change.

    Raises:
        ConfigError: If the precision, the devices or the rounds of evaluation cannot be used.
    """
    if "trainer" in config:
        check_devices(config.trainer)
    precision = str(OmegaConf.select(config, "trainer.precision", default=PRECISIONS[0]))
    if precision not in PRECISIONS:
        raise ConfigError(
            f"trainer.precision={precision} is not supported, as weights stay in single or double "
            f"precision; choose {', '.join(PRECISIONS[:4])}."
        )
    if precision.startswith("16") and OmegaConf.select(config, "trainer.accelerator") == "cpu":
        raise ConfigError(
            f"trainer.precision={precision} is for GPUs; choose bf16-mixed on the CPU, or "
            "trainer=gpu."
        )
    if OmegaConf.select(config, "evaluation.every", default=0) > config.get("rounds", 0):
        raise ConfigError(
            f"evaluation.every={config.evaluation.every} is more than rounds={config.rounds}, so "
            "that no round could be selected; evaluate more often."
        )


def check_devices(trainer: DictConfig) -> None:
    """Checks that clients are dealt to devices by our own strategy.

    Args:
        trainer: The section of a composed configuration.

    Raises:
        ConfigError: If another strategy, or an unusable number of devices or machines is asked for.

    Example:
        >>> check_devices(OmegaConf.create({"devices": 2, "strategy": "ddp"}))
        Traceback (most recent call last):
        ...
        medfed.common.errors.ConfigError: trainer.strategy=ddp cannot be used, as it could mix the \
gradients of clients; leave it at auto, which deals the clients to the devices.
    """
    strategy, devices = trainer.get("strategy", "auto"), trainer.get("devices", 1)
    target = strategy.get("_target_") if isinstance(strategy, DictConfig) else strategy
    if target not in ("auto", OURS):
        raise ConfigError(
            f"trainer.strategy={target} cannot be used, as it could mix the gradients of clients; "
            "leave it at auto, which deals the clients to the devices."
        )
    check_machines(trainer)
    named = isinstance(devices, ListConfig)
    numbers = list(devices) if named else [devices]
    whole = all(type(n) is int and n >= (0 if named else 1) for n in numbers)
    if whole and numbers and len(set(numbers)) == len(numbers):
        if not (named and trainer.get("accelerator") == "cpu"):
            return
    elif devices in ("auto", -1) and trainer.get("accelerator") != "cpu":
        return
    raise ConfigError(
        f"trainer.devices={devices} cannot be used; give a number of at least 1, or on GPUs auto "
        "for all, or a list such as [0,1]."
    )


def check_machines(trainer: DictConfig, found: Launched | None = None) -> None:
    """Checks that whoever has started this process started as many as the run takes.

    Args:
        trainer: The section of a composed configuration.
        found: Who has; as the environment says where it is ``None``.

    Raises:
        ConfigError: If the numbers differ, or nobody starts the processes of other machines.

    Example:
        >>> two = Launched("torchrun", rank=0, ranks=4, machines=2)
        >>> check_machines(OmegaConf.create({"devices": 2, "num_nodes": 2}), two)
        >>> check_machines(OmegaConf.create({"devices": 4}), two)
        Traceback (most recent call last):
        ...
        medfed.common.errors.ConfigError: torchrun has started 4 processes on 2 machines, but the \
run takes trainer.devices=4 trainer.num_nodes=1; set trainer.devices=2 trainer.num_nodes=2.
    """
    nodes, devices = trainer.get("num_nodes", 1), trainer.get("devices", 1)
    if type(nodes) is not int or nodes < 1:
        raise ConfigError(
            f"trainer.num_nodes={nodes} cannot be used; give the number of machines, at least 1."
        )
    found = found or launched()
    if found is not None and (found.by == "torchrun" or several(trainer)):
        count = len(devices) if isinstance(devices, ListConfig) else devices
        count = count * _sharing(trainer) if type(count) is int else count
        if nodes != found.machines or (type(count) is int and count != found.devices):
            raise ConfigError(
                f"{found.by} has started {found.ranks} processes on {found.machines} machines, but "
                f"the run takes trainer.devices={devices} trainer.num_nodes={nodes}; set "
                f"trainer.devices={found.devices} trainer.num_nodes={found.machines}."
            )
    elif nodes > 1 and "MASTER_ADDR" not in os.environ:
        raise ConfigError(
            f"trainer.num_nodes={nodes} needs somebody who starts the run on every machine: "
            "torchrun, srun, or you, with MASTER_ADDR, MASTER_PORT and NODE_RANK set there."
        )


def _sharing(trainer: DictConfig) -> int:
    """How many ranks share a device."""
    return int(OmegaConf.select(trainer, "strategy.ranks_per_device", default=1))


def several(trainer: DictConfig) -> bool:
    """Returns whether a run may take more than one process: one per device, or more.

    Args:
        trainer: The section of a checked configuration.

    Example:
        >>> several(OmegaConf.create({"devices": "auto"}))
        True
    """
    devices = trainer.get("devices", 1)
    if trainer.get("num_nodes", 1) != 1 or _sharing(trainer) != 1:
        return True
    return devices != 1 and not (isinstance(devices, ListConfig) and len(devices) == 1)
