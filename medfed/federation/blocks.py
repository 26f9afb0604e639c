"""The blocks of a network: what a person needs to see to say which of them stay with a client."""

from __future__ import annotations

import json
from collections.abc import Container
from typing import NamedTuple

from torch import nn

from medfed.common.errors import ConfigError
from medfed.federation.split import float_entries

_LISTED = 12


class Block(NamedTuple):
    """A part of a network.

    Attributes:
        name: Of the module, or of a parameter that is in none.
        pattern: What matches its entries and no others.
        parameters: Numbers in its parameters, tied ones counted once.
        personal: How many of them stay with the client.
    """

    name: str
    pattern: str
    parameters: int
    personal: int = 0


def blocks(network: nn.Module, personal: Container[str] = (), within: str = "") -> list[Block]:
    """Returns the modules of one level, in the order in which they were added.

    Args:
        network: Any module.
        personal: Names of the parameters that stay with the client.
        within: The module to look into; the whole network by default.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> for block in blocks(net, ["2.weight"]):
        ...     print(block)
        Block(name='0', pattern='0.*', parameters=9, personal=0)
        Block(name='2', pattern='2.*', parameters=4, personal=3)
    """
    prefix = f"{within}." if within else ""
    found: dict[str, Block] = {}
    for name, tensor in float_entries(network).items():
        if not isinstance(tensor, nn.Parameter) or not name.startswith(prefix):
            continue
        head, inner, _ = name[len(prefix) :].partition(".")
        old = found.get(head, Block(prefix + head, f"{prefix}{head}{'.*' if inner else ''}", 0))
        own = tensor.numel() if name in personal else 0
        found[head] = old._replace(
            parameters=old.parameters + tensor.numel(), personal=old.personal + own
        )
    return list(found.values())


def main_blocks(network: nn.Module) -> list[Block]:
    """Returns the blocks of the first level that has several.

    Example:
        >>> net = nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
        >>> [block.pattern for block in main_blocks(net)]
        ['0.0.*', '0.1.*']
    """
    found = blocks(network)
    while len(found) == 1 and (inner := blocks(network, within=found[0].name)):
        found = inner
    return found


def proposal(network: nn.Module, least: float = 0.0) -> str:
    """Returns an override that makes the last blocks personal, to paste into a shell.

    Args:
        network: Any module.
        least: Share of the parameters that they have at least, if not all blocks are needed.

    Example:
        >>> net = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, 1))
        >>> print(proposal(net), proposal(net, 0.3))
        'model.personal=["2.*"]' 'model.personal=["1.*","2.*"]'
    """
    found = main_blocks(network)
    total, chosen = sum(b.parameters for b in found), found[-1:]
    while sum(b.parameters for b in chosen) < least * total and len(chosen) + 1 < len(found):
        chosen = found[-len(chosen) - 1 :]
    return f"'model.personal={json.dumps([b.pattern for b in chosen], separators=(',', ':'))}'"


def listed(network: nn.Module) -> str:
    """Returns the blocks with their numbers of parameters, in words.

    Example:
        >>> listed(nn.Sequential(nn.Linear(99, 30), nn.Linear(30, 1)))
        '0.* (3,000), 1.* (31)'
    """
    found = [f"{b.pattern} ({b.parameters:,})" for b in main_blocks(network)]
    if len(found) > _LISTED:
        half = _LISTED // 2
        found = [*found[:half], f"{len(found) - _LISTED} more", *found[-half:]]
    return ", ".join(found)


def nothing_personal(network: nn.Module, method: str) -> ConfigError:
    """Returns the error of a method that keeps a part at the client, and finds none.

    Args:
        network: The model.
        method: What asks for it, such as ``FedPer``.
    """
    return ConfigError(
        f"{method} keeps a part of the model at each client, and nothing says which of this "
        f"{type(network).__name__}: set for example {proposal(network)}; its blocks and their "
        f"parameters are {listed(network)}."
    )


def nothing_to_train(part: str) -> ConfigError:
    """Returns the error of a method that takes steps on a part of the model which is empty.

    Args:
        part: ``shared``, ``personal`` or ``all``.
    """
    return ConfigError(
        f"The model has no {part} part, which the algorithm trains; choose a model of several "
        "layers, or another algorithm.personal."
    )
