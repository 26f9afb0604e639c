"""What the functions of a method must return; one sentence names an author's mistake.

Else it would fail elsewhere, in the words of that place, or change nothing without a word.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from numbers import Integral
from typing import TYPE_CHECKING, Any

from torch import Tensor

from medfed.common.tensors import State, Tensors
from medfed.federation.other_state import OTHER
from medfed.federation.split import check_whole, lacks
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
            if any(isinstance(v, Tensor) and v.grad_fn is not None for v in named.values()):
                has = f"{function} leaves tensors that remember their computation in {group!r}"
                raise _wrong(algorithm, f"{has} of a state; keep tensor.detach()")
        if odd is not None:
            has = f"{function} leaves {_kind(odd)} in {group!r} of a state"
            raise _wrong(algorithm, f"{has}, which is {_STATE}; keep a number as torch.tensor")


def check_generator(algorithm: Algorithm, generator: ServerRound) -> ServerRound:
    """Returns the server's half of a round."""
    if not isinstance(generator, Generator):
        raise _wrong(algorithm, f"round returns {_kind(generator)}, but is a generator: {_ROUND}")
    return generator


def check_phases(algorithm: Algorithm, phases: Any) -> Sequence[str]:
    """Returns the phases that a method announces."""
    names = list(phases) if isinstance(phases, Sequence) and not isinstance(phases, str) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise _wrong(algorithm, f"phases returns {phases!r}; it is a tuple of names, ('fit',)")
    return names


def check_weights(algorithm: Algorithm, clients: Sequence[str], weights: Any) -> dict[str, float]:
    """Returns each client's weight in the means of a phase."""
    numbers = [float(w) for w in weights] if isinstance(weights, Sequence | Tensor) else []
    valid = len(numbers) == len(clients) and all(0 <= w < inf for w in numbers)
    if not valid or (clients and not any(numbers)):
        what = "one number from 0 for each client, not all 0"
        raise _wrong(algorithm, f"weights returns {weights!r} for {few(clients, 3)}; it is {what}")
    return dict(zip(clients, numbers, strict=True))


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
    who = f"{type(algorithm).__name__}.personal_model"
    check_whole(entries, model, who, f", which {client} has trained")
    if has_other and not algorithm.trains_centrally and OTHER not in model:
        raise lacks(who, [OTHER], f", which {client} has trained")
    for name, entry in entries.items():
        if entry.is_floating_point() and not model[name].is_floating_point():
            raise _wrong(algorithm, f"personal_model returns {name} as {model[name].dtype}")


def check_steps(steps: Any) -> None:
    """Raises ConfigError if a method takes no step."""
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


@contextmanager
def unchanged(algorithm: Algorithm, state: Mapping[str, Tensors], what: str) -> Iterator[None]:
    """Raises ConfigError if a function of a method changes tensors that it is given in place."""
    # By weak references: what the function replaces is not kept in memory.
    before = [(g, weakref.ref(t), t._version) for g, named in state.items() for t in named.values()]
    del state
    yield
    after = [(group, reference(), version) for group, reference, version in before]
    if changed := [g for g, t, version in after if t is not None and t._version != version]:
        raise ConfigError(
            f"{type(algorithm).__name__} changes the {what.format(changed[0])} in place, which "
            "others read later; make new tensors."
        )


def _kind(value: Any) -> str:
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _wrong(algorithm: Algorithm, what: str) -> ConfigError:
    return ConfigError(f"{type(algorithm).__name__}.{what}.")
