"""Configured runs from Python, safe in a notebook."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, ParamSpec

from torch import nn

from medfed.common.arguments import check_arguments, check_kind
from medfed.common.console import without_remarks
from medfed.common.processes import threads_as_before
from medfed.config.allowed import method_name
from medfed.config.check import several
from medfed.config.compose import build, load
from medfed.config.description import describe, written
from medfed.config.spelling import as_text
from medfed.federation.algorithm import Algorithm
from medfed.federation.inputs import check_network
from medfed.federation.other_state import copied
from medfed.federation.reference import Federated
from medfed.federation.reference import federate as _federate
from medfed.models.networks.canonical import Canonical, Mix
from medfed.models.networks.personal_part import default_personal
from medfed.records.folder import Run
from medfed.standalone.errors import ConfigError

_Others = ParamSpec("_Others")


def train(*overrides: str, folder: str | Path | None = None, **keys: Any) -> Run:
    """Trains one federation, as ``medfed train`` does, and returns its run.

    Args:
        overrides: As on the command line: ``"experiment=digits_pfednet"``, ``"local.steps=5"``.
        folder: The run folder; by default one of its own below ``outputs``.
        keys: Keys of the top level, such as ``rounds=2``; deeper ones with two underscores in
            place of the dot, such as ``local__steps=5``.

    Raises:
        MedfedError: If a key, the data or the folder cannot be used; the message says what to do.

    Example:
        >>> run = train("experiment=digits_pfednet", rounds=2)  # doctest: +SKIP
        >>> run.summary["federation"]["accuracy"]["mean"]  # doctest: +SKIP
    """
    from medfed.run.train import train as trained  # imported here: it loads Lightning

    check_kind("overrides", overrides, Sequence[str], " of its own, as in train(*LIST)")
    check_arguments(train, {"folder": folder})
    arguments = [*overrides, *(f"{k.replace('__', '.')}={as_text(v)}" for k, v in keys.items())]
    source = written(load(arguments))
    if folder is None:
        method = method_name(source["algorithm"])
        now = datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")
        folder = source["resume"] or Path("outputs") / source["name"] / method / now
    folder = Path(folder).expanduser().resolve()
    config = describe({**source, "folder": str(folder)})
    if several(config.trainer):
        raise ConfigError(
            f"trainer.devices={config.trainer.devices} starts further processes, which Python's "
            "train cannot; use the command: medfed train."
        )
    with threads_as_before(), without_remarks():
        trained(config)
    return Run(folder)


@functools.wraps(_federate)
def federate(algorithm: Algorithm | str, *others: Any, **keys: Any) -> Federated:
    """As `medfed.federation.reference.federate`; a method may be given by its name.

    Without a personal part, a known network has its default one. A list of networks are the models
    of a method that trains several; what they say is mixed, or added.
    """
    method: Any = algorithm
    if isinstance(algorithm, str):
        method = build(load([f"algorithm={as_text(algorithm)}"]).algorithm)
    check_kind("algorithm", method, Algorithm, " such as Ditto()")
    network = others[0] if others else keys.get("network")
    if isinstance(network, list | tuple):
        for one in network or [None]:
            check_network(one)
        if not (method.mixes or method.sums):
            raise ConfigError(
                f"{method.title} trains one network, of which each hospital gets its copy; give "
                "the network itself, no list."
            )
        mix: Mix = "sum" if method.sums else "outputs"
        several = Canonical([copied(one) for one in network], ["*"], mix, activation="identity")
        if method.sums:
            head = keys.get("personal") or default_personal(network[0])
            keys["personal"] = several.personal_part(head)
        keys.pop("network", None)
        return _federate(method, several, *others[1:], **keys)
    if isinstance(network, nn.Module):
        keys.setdefault("personal", default_personal(network))
    return _federate(method, *others, **keys)
