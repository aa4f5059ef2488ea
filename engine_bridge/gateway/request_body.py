"""A request's body on its way in: read within its bounds, parsed, and made fit for the engine.

What it asks for is admission's business.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

from trimtab.engine_bridge.admission.asked import MOST_LEVELS, is_too_deep
from trimtab.engine_bridge.admission.refusal import Refusal
from trimtab.engine_bridge.gateway import refusals

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

_DISCARD_S: Final = 2.0
_RETRY_S: Final = 1.0
CLAIMS: Final = frozenset(
    (
        "priority",
        "cache_salt",
        "vllm_xargs",
        "request_id",
        "kv_transfer_params",
        "tenant",
        "tier",
    )
)
"""Fields by which a client could say who it is or whose blocks it wants; engines never see them."""
_OPTIONS: Final = "stream_options"
_ASK_USAGE: Final = b',"stream_options":{"include_usage":true}}'


class RefusedError(Exception):
    """The request is not served; it holds what its client is told."""

    def __init__(self, refusal: Refusal) -> None:
        """Hold the refusal."""
        super().__init__(refusal.code)
        self.refusal = refusal
        self.unread = True
        """Whether some of its body may still come; not looked at once the body was read."""
        self.begun = False
        """Whether its body was asked for."""


class GoneError(Exception):
    """The client has left."""


class BodyRoom:
    """Memory for the bodies of all requests together."""

    def __init__(self, most_bytes: int) -> None:
        """Begin empty."""
        self.most_bytes = most_bytes
        self.held_bytes = 0

    def take(self, length: int) -> None:
        """Take room.

        Raises:
            RefusedError: there is none.
        """
        if self.held_bytes + length > self.most_bytes:
            raise RefusedError(refusals.gateway_full(_RETRY_S))
        self.held_bytes += length

    def give(self, length: int) -> None:
        """Give room back."""
        self.held_bytes -= length


async def read_body(
    receive: Receive, *, declared: int | None, most_bytes: int, time_out_s: float, room: BodyRoom
) -> bytes:
    """The whole body; its room is the caller's to give back.

    Args:
        receive: The server's.
        declared: What `content-length` says; None: nothing.
        most_bytes: Longest body.
        time_out_s: For all of it, seconds.
        room: Memory that it takes.

    Raises:
        RefusedError: it is too long or too slow, or there is no room; nothing is taken then.
        GoneError: the client has left.
    """
    if declared is not None and declared > most_bytes:
        raise RefusedError(refusals.body_too_large(most_bytes))
    pieces: list[bytes] = []
    taken, more = 0, True
    try:
        async with asyncio.timeout(time_out_s):
            while more:
                message = await _message(receive)
                piece, more = message.get("body", b""), message.get("more_body", False)
                room.take(len(piece))
                pieces.append(piece)
                taken += len(piece)
                if taken > most_bytes:
                    raise RefusedError(refusals.body_too_large(most_bytes))
    except BaseException as error:
        room.give(taken)
        if isinstance(error, TimeoutError):
            late = RefusedError(refusals.body_too_slow())
            late.begun = True
            raise late from None
        if isinstance(error, RefusedError):
            error.unread, error.begun = more, True
        raise
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def discard(receive: Receive) -> None:
    """Read on for a moment: a client that still sends would not see an answer."""
    try:
        async with asyncio.timeout(_DISCARD_S):
            while (await _message(receive)).get("more_body", False):
                pass
    except (TimeoutError, GoneError):
        return


async def _message(receive: Receive) -> MutableMapping[str, Any]:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise GoneError
    return message


def parse(raw: bytes) -> dict[str, Any]:
    """The JSON object in a body.

    Raises:
        RefusedError: it holds none.
    """
    try:
        body = json.loads(raw.decode())
    except (ValueError, RecursionError):
        raise RefusedError(refusals.invalid_json("the body is not JSON")) from None
    if not isinstance(body, dict):
        raise RefusedError(refusals.invalid_json("the body must be a JSON object"))
    if is_too_deep(raw, body):
        text = f"the body must have at most {MOST_LEVELS} levels of lists and objects"
        raise RefusedError(refusals.invalid_json(text))
    return body


def for_engine(
    raw: bytes, body: dict[str, Any], changes: Mapping[str, object], *, asks_usage: bool
) -> bytes:
    """The body as the engine gets it: without the client's claims, with admission's changes.

    Args:
        raw: As it came.
        body: The object in it.
        changes: Fields to set.
        asks_usage: Whether to have a stream end with its usage.
    """
    if CLAIMS.isdisjoint(body) and not changes:
        if not asks_usage:
            return raw
        text = raw.rstrip()
        if _OPTIONS not in body and text.endswith(b"}") and body:
            # Most bodies are long prompts: none is written anew for one more field.
            return text[:-1] + _ASK_USAGE
    changed = {**body, **changes}
    for field in CLAIMS:
        changed.pop(field, None)
    if asks_usage:
        options = changed.get(_OPTIONS)
        known = options if isinstance(options, dict) else {}
        changed[_OPTIONS] = {**known, "include_usage": True}
    return json.dumps(changed).encode()


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Whether the client itself has asked for a stream's usage."""
    options = body.get(_OPTIONS)
    return isinstance(options, dict) and options.get("include_usage") is True
