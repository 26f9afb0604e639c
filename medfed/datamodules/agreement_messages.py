"""Messages by which clients with tables agree: JSON, read as if anybody had written it."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeGuard

from medfed.common.errors import DataError
from medfed.common.strict_json import parse_strict_json
from medfed.datamodules.base import Exchanged

Merging = Generator[bytes, Sequence[bytes], None]
_HUGE = 1e300  # beyond what cells of a table add up to, as they are below 1e30


def converse(
    server: Merging, clients: Sequence[str], step: Callable[[str, bytes | None], bytes | None]
) -> tuple[list[bytes], list[Exchanged]]:
    """Passes messages between clients and the server's half until both have ended.

    Args:
        server: Its half.
        clients: In the order of the federation, in which sums are taken.
        step: Hands an answer to a client, at first None, and returns what it tells, at last None.

    Returns:
        The answers, which are all that somebody who comes later needs, and what travelled.
    """
    answers: list[bytes] = []
    exchanged: list[Exchanged] = []
    told = [step(client, None) for client in clients]
    next(server, None)
    while all(content is not None for content in told):
        contents = [content for content in told if content is not None]
        exchanged += [(c, "up", len(t)) for c, t in zip(clients, contents, strict=True)]
        try:
            answers.append(server.send(contents))
        except StopIteration:
            break
        exchanged += [(c, "down", len(answers[-1])) for c in clients]
        told = [step(client, answers[-1]) for client in clients]
    if any(content is not None for content in told):
        odd = clients[next(at for at, content in enumerate(told) if content is not None)]
        raise DataError(
            f"{odd} has more to agree on about its data than the others; read them alike."
        )
    return answers, exchanged


def packed(content: Mapping[str, Any]) -> bytes:
    """Returns a message as it travels.

    Raises:
        DataError: If a number is not finite.
    """
    try:
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    except ValueError as error:
        raise DataError(
            "What clients tell of their columns adds up to no finite number; look for cells that "
            "are no measurements."
        ) from error


def unpacked(content: bytes, form: Mapping[str, Any]) -> dict[str, Any]:
    """Reads a message that somebody else may have written.

    Args:
        content: The message.
        form: By key: how many numbers there are, or a list of the texts that may be named, or a
            mapping whose every key has texts.

    Raises:
        DataError: If it has another form.

    Example:
        >>> unpacked(b'{"count":[3]}', {"count": 1})
        {'count': [3]}
        >>> unpacked(b'{"count":["x"]}', {"count": 1})
        Traceback (most recent call last):
        ...
        medfed.common.errors.DataError: A message about the columns of a table is none of ours: \
its count is not as asked for.
    """
    try:
        found = parse_strict_json(content)
        if not isinstance(found, dict) or found.keys() != form.keys():
            raise ValueError(f"it must hold {', '.join(form)}")
        if odd := [name for name, wanted in form.items() if not _is_like(found[name], wanted)]:
            raise ValueError(f"its {odd[0]} is not as asked for")
    except ValueError as error:
        raise DataError(
            f"A message about the columns of a table is none of ours: {error}."
        ) from error
    return found


def _is_like(value: object, wanted: int | Sequence[str] | Mapping[str, Any]) -> bool:
    if isinstance(wanted, Mapping):
        listed = value if isinstance(value, dict) and value.keys() == wanted.keys() else {"": 0}
        return all(_are_texts(texts) for texts in listed.values())
    if isinstance(wanted, int):
        return (
            isinstance(value, list)
            and len(value) == wanted
            and all(type(x) in (int, float) and abs(x) < _HUGE for x in value)
        )
    return _are_texts(value) and set(value) <= set(wanted)


def _are_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)
