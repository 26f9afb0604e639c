"""What the functions of a method must return; one sentence names an author's mistake.

Else it would fail elsewhere, in the words of that place, or change nothing without a word.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any

from torch import Tensor

from medfed.common.tensors import State, Tensors
from medfed.federation.other_state import OTHER
from medfed.federation.wire.packet import Message
from medfed.standalone.errors import ConfigError, few

if TYPE_CHECKING:
    from medfed.federation.algorithm import Algorithm, ServerRound, Start

_STATE = "a dictionary of groups of tensors, {group: {name: tensor}}"
_ROUND = "it yields {client: Message} for each phase, and returns the server's new state"


def check_start(algorithm: Algorithm, start: Start) -> Start:
    """Returns the states of the server and of one client, which `init` has made."""
    if not (isinstance(start, tuple) and len(start) == 2):
        raise _wrong(algorithm, f"init must return two states, not {_kind(start)}")
    for state in start:
        check_state(algorithm, "init", state)
    return start


def check_state(algorithm: Algorithm, function: str, state: State) -> None:
    """Raises ConfigError if no checkpoint, rank or device could hold a state."""
    odd: Any = None
    if not isinstance(state, Mapping):
        raise _wrong(algorithm, f"{function} leaves {_kind(state)} as a state, which is {_STATE}")
    for group, named in state.items():
        if not isinstance(named, Mapping):
            odd = named
        else:
            odd = next((v for v in named.values() if not isinstance(v, Tensor)), None)
        if odd is not None:
            has = f"{function} leaves {_kind(odd)} in {group!r} of a state"
            raise _wrong(algorithm, f"{has}, which is {_STATE}; keep a number as torch.tensor")


def check_generator(algorithm: Algorithm, generator: ServerRound) -> ServerRound:
    """Returns the server's half of a round."""
    if not isinstance(generator, Generator):
        raise _wrong(algorithm, f"round returns {_kind(generator)}, but is a generator: {_ROUND}")
    return generator


def check_outbox(algorithm: Algorithm, outbox: Any) -> None:
    """Raises ConfigError if the server yields something else than messages to clients.

    It may be empty, if the clients have no part in this phase.
    """
    if not isinstance(outbox, Mapping):
        raise _wrong(algorithm, f"round yields {_kind(outbox)}; {_ROUND}")
    for client, message in outbox.items():
        check_message(algorithm, f"round yields for {client}", message)


def check_reply(algorithm: Algorithm, reply: Message, phase: str) -> None:
    """Raises an error if a client's answer is none, or holds what may not leave its client."""
    check_message(algorithm, "fit returns", reply)
    if reply.phase != phase:
        raise _wrong(algorithm, f"fit answers phase {phase!r} with phase {reply.phase!r}")
    if extra := set(reply.parts) - set(algorithm.parts_sent):
        raise _wrong(
            algorithm, f"fit sends {sorted(extra)}, which may not leave a client: see parts_sent"
        )


def check_model(
    algorithm: Algorithm, client: str, entries: Tensors, has_other: bool, model: Tensors
) -> None:
    """Raises ConfigError if a personal model is none, or lacks what the training has changed.

    It would be filled with the numbers at the start, without a word. `has_other`: whether training
    has changed what is no entry.
    """
    if not isinstance(model, Mapping):
        raise _wrong(algorithm, f"personal_model returns {_kind(model)}, not {{name: tensor}}")
    needed = [*entries]
    if has_other and not algorithm.trains_centrally:
        needed.append(OTHER)
    if lost := [name for name in needed if name not in model]:
        raise ConfigError(
            f"{type(algorithm).__name__}.personal_model lacks {few(lost, 3)}, which {client} "
            "has trained; keep what Client.train returns as a whole, or in two parts by "
            "client.split.split."
        )
    for name, entry in entries.items():
        if model[name].shape != entry.shape:
            shapes = f"{[*model[name].shape]}, and the network's is {[*entry.shape]}"
            raise _wrong(algorithm, f"personal_model returns {name} of shape {shapes}")
        if entry.is_floating_point() and not model[name].is_floating_point():
            raise _wrong(algorithm, f"personal_model returns {name} as {model[name].dtype}")


def check_training(start: Any, entries: Tensors, steps: Any) -> None:
    """Raises ConfigError if a method trains from no whole model, or takes no step."""
    if not isinstance(start, Mapping):
        raise ConfigError(f"Client.train starts from {{name: tensor}}, not from {_kind(start)}.")
    if lost := [name for name in entries if name not in start]:
        raise ConfigError(
            f"Client.train starts from a whole model, and this one lacks {few(lost, 3)}; put a "
            "part into one by overwrite(model, part)."
        )
    if not isinstance(steps, Integral) or steps < 1:
        raise ConfigError(f"Client.train takes steps=1 or more, not {steps}; see client.share.")


def check_message(algorithm: Algorithm, who: str, message: Any) -> None:
    """Raises ConfigError if what a function gives is no message of tensors."""
    if not isinstance(message, Message):
        raise _wrong(algorithm, f"{who} {_kind(message)}; it must be a Message")
    for part, named in message.parts.items():
        for name, tensor in named.items():
            if not isinstance(tensor, Tensor):
                raise _wrong(algorithm, f"{who} {_kind(tensor)} as {part}/{name}; send tensors")


def _kind(value: Any) -> str:
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _wrong(algorithm: Algorithm, what: str) -> ConfigError:
    return ConfigError(f"{type(algorithm).__name__}.{what}.")
