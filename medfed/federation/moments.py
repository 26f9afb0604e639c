"""The state of the clients' optimizers, averaged by the server beside the weights.

With ``local.optimizer_state=averaged`` each reply of a round also holds Adam's moments, or the
momentum, of the shared parameters; the server sends their mean back with the next model. The state
of personal parameters stays with the client.
"""

from __future__ import annotations

from dataclasses import replace

from medfed.common.tensors import Tensors
from medfed.federation.aggregation import Aggregation
from medfed.federation.algorithm import Algorithm
from medfed.federation.wire.channel import Channel
from medfed.federation.wire.message import Message
from medfed.standalone.errors import ConfigError

PART = "optimizer"


def with_moments(message: Message, moments: Tensors | None) -> Message:
    """Returns a message with the state of an optimizer, if there is any."""
    return replace(message, parts={**message.parts, PART: moments}) if moments else message


def check_averages_moments(algorithm: Algorithm, channel: Channel) -> None:
    """Checks that a server can average the optimizers' state."""
    links = channel.links.items()
    changed = [way for way, link in links if not (link.direct and link.codec.lossless)]
    # Its own declaration: a method that inherits from another may train in another way.
    if not vars(type(algorithm)).get("averages_moments") or algorithm.mask_aware:
        mask = " with algorithm.mask_aware=true" if algorithm.mask_aware else ""
        why = f"{algorithm.title}{mask} does not send the plain mean of one training"
    elif type(algorithm.aggregation) is not Aggregation:
        why = f"aggregation={type(algorithm.aggregation).__name__.lower()} compares weights"
    elif channel.sums is not None:
        why = "channel.secure=masks clips their numbers of steps"
    elif changed:
        why = f"codec.{changed[0]} and channel.{changed[0]} change what is sent"
    else:
        return
    raise cannot_average(why)


def cannot_average(why: str) -> ConfigError:
    """Returns the error of a run whose server cannot average the optimizers' state."""
    return ConfigError(
        f"local.optimizer_state=averaged does not go with this: {why}; choose "
        "local.optimizer_state=kept or fresh."
    )
