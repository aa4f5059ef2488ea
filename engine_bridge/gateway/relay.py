"""Passes one engine's answer on to the client.

Nothing of it goes out before its first token is there (the whole of it, where it is no stream):
until then another engine can take over unseen. From then on bytes go as they come, no faster than
the client reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from trimtab.engine_bridge.admission.core import Outcome
from trimtab.engine_bridge.gateway.exchange import Exchange
from trimtab.engine_bridge.gateway.sliced import own_cached, take_own
from trimtab.engine_bridge.gateway.sse import EventStream, holds_token
from trimtab.engine_bridge.gateway.upstream import Answer, Fault, UpstreamError
from trimtab.engine_bridge.gateway.wire import answer_headers

MOST_HELD_BYTES: Final = 8 << 20
"""A longer answer that is no stream is passed on while it comes."""
_EVENTS: Final = b"text/event-stream"
_TOO_LATE: Final = 503
_BROKEN: Final = (500, 502, 504)
_ENDS: Final = (b"\n\n", b"\r\n\r\n")
_BROKEN_OFF: Final = json.dumps(
    {
        "error": {
            "message": "the engine broke off",
            "type": "server_error",
            "param": None,
            "code": "engine_failed",
        }
    }
).encode()


class Relay:
    """One attempt's answer on its way."""

    def __init__(self, exchange: Exchange, answer: Answer, now_s: Callable[[], float]) -> None:
        """Take an answer whose head has come."""
        self._exchange, self._answer, self._now_s = exchange, answer, now_s
        self._is_stream = answer.header(b"content-type").startswith(_EVENTS)
        exchange.streams = exchange.streams or self._is_stream
        self._stream = EventStream(strip_usage=exchange.strips_usage)
        self._cached_before = exchange.sliced.on(exchange.engine).cached_before
        self._held = b""
        self._whole = False

    async def hold(self) -> None:
        """Wait for the first token, or for the whole of what is no stream.

        Raises:
            UpstreamError: the answer broke off before.
        """
        if self._is_stream:
            await self._hold_stream()
        else:
            await self._hold_body()

    @property
    def is_broken(self) -> bool:
        """Whether another engine should be asked: this one has failed, not refused."""
        if self._answer.status in _BROKEN:
            return True
        error = self._stream.error
        return error is not None and _status(error) in _BROKEN

    async def go_on(self) -> None:
        """Send what is held and the rest."""
        exchange, answer = self._exchange, self._answer
        if self._whole and not self._is_stream:
            self._read_body()
        headers = answer_headers(answer.headers, keep_length=not (self._is_stream or self._whole))
        if self._whole:
            headers.append((b"content-length", b"%d" % len(self._held)))
        exchange.first_token_s = self._now_s()
        if self._is_stream and self._stream.error is None:
            exchange.spans.first_token()
        await exchange.start(answer.status, headers)
        if self._whole:
            self._note()
            await exchange.end(self._held, self._now_s())
            return
        try:
            try:
                await self._pass_on()
            finally:
                self._note()
        except UpstreamError as error:
            await self._broke_off(error)
            return
        await exchange.end(self._stream.rest(), self._now_s())

    async def _hold_stream(self) -> None:
        looked = 0
        while True:
            data = await self._answer.read()
            if not data:
                self._held += self._stream.rest()
                self._whole = True
                return
            self._held += self._fed(data)
            if self._stream.error is not None:
                return
            while (end := _event_end(self._held, looked)) is not None:
                if holds_token(self._held[looked:end]):
                    return
                looked = end

    async def _hold_body(self) -> None:
        pieces, length = [], 0
        while length <= MOST_HELD_BYTES:
            data = await self._answer.read()
            if not data:
                self._whole = True
                break
            pieces.append(data)
            length += len(data)
        self._held = b"".join(pieces)

    async def _pass_on(self) -> None:
        exchange, now_s = self._exchange, self._now_s
        if self._held:
            await exchange.write(self._held, now_s())
            self._held = b""
        read = self._answer.read
        if not self._is_stream:
            while data := await read():
                await exchange.write(data, now_s())
            return
        feed = self._stream.feed if self._cached_before is None else self._fed
        while data := await read():
            data = feed(data)
            if data:
                await exchange.write(data, now_s())

    async def _broke_off(self, error: UpstreamError) -> None:
        """Tell the client of a stream in the stream's own way; any other one by the connection."""
        exchange = self._exchange
        slow = error.fault is Fault.SLOW
        exchange.outcome = Outcome.TIMED_OUT if slow else Outcome.FAILED
        if not self._is_stream:
            exchange.break_off()
            return
        event = b"event: error\n" if exchange.path.endswith("/messages") else b""
        event += b"data: %b\n\n" % _BROKEN_OFF
        await exchange.end(event, self._now_s())

    def _fed(self, data: bytes) -> bytes:
        """What goes on of a piece of a stream."""
        data = self._stream.feed(data)
        return data if self._cached_before is None else own_cached(data, self._cached_before)

    def _read_body(self) -> None:
        if b'"usage"' not in self._held:
            return
        try:
            content = json.loads(self._held.decode())
        except (ValueError, RecursionError):
            return
        if isinstance(content, dict):
            self._exchange.usage.take(content.get("usage"))
        if self._cached_before is not None:
            self._held = own_cached(self._held, self._cached_before)

    def _note(self) -> None:
        """What the answer says of itself, into the exchange."""
        exchange, status = self._exchange, self._answer.status
        if self._is_stream:
            exchange.usage, exchange.events = self._stream.usage, self._stream.events
        if self._cached_before is not None and exchange.usage.prompt_tokens is not None:
            take_own(exchange)
        error = self._stream.error
        if error is not None:
            status = _status(error)
        if status < 400:
            exchange.outcome = Outcome.FINISHED
        elif status in (429, _TOO_LATE):
            exchange.outcome = Outcome.REFUSED
        else:
            exchange.outcome = Outcome.INVALID if status < 500 else Outcome.FAILED
        if exchange.outcome is Outcome.INVALID and exchange.usage.prompt_tokens is None:
            # The mistake is the client's, and its slices were read.
            exchange.usage = exchange.sliced.on(exchange.engine).usage


def _status(error: dict[str, Any]) -> int:
    """HTTP status that an error inside a stream stands for; 500 if it says none."""
    code = error.get("code")
    if isinstance(code, str) and code.isdigit():
        code = int(code)
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def _event_end(held: bytes, start: int) -> int | None:
    """Where the event that begins at `start` ends; None: it is not whole."""
    ends = [at + len(end) for end in _ENDS if (at := held.find(end, start)) >= 0]
    return min(ends, default=None)
