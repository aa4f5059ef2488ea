"""uvicorn's HTTP protocol with the bounds that it lacks: heads, slow senders, slow readers, crowds.

It answers what is no HTTP with OpenAI's form of an error. It serves nothing else. `bounded` makes
the class for given bounds, because uvicorn makes the instances.
"""

from __future__ import annotations

import asyncio
import select
from dataclasses import dataclass
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from trimtab.engine_bridge.admission.refusal import Refusal

ABORT: Final = "trimtab.abort"
"""Key in a scope's extensions: a function that breaks the connection off, so that a client does not
take half an answer for a whole one."""
_MOST_HEADERS: Final = 256
_LINGER_S: Final = 2.0
_LOOK_S: Final = 0.5
_GONE: Final = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
"""What a socket says of a client that is gone, however much lies unread in front of that."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Docs of `settings.Caps` and `settings.TimeOuts`."""

    head_bytes: int
    head_s: float
    stalled_client_s: float
    connections: int


class HeadTooLargeError(Exception):
    """Raised inside the parser: the request line and headers are longer than allowed."""


class UpgradeError(Exception):
    """Raised inside the parser: it would take the body behind this head for the next request."""


class BoundedProtocol(HttpToolsProtocol):
    """One client's connection."""

    bounds: Bounds
    _head_timer: asyncio.TimerHandle | None = None
    _abort_timer: asyncio.TimerHandle | None = None
    _look_timer: asyncio.TimerHandle | None = None
    _running: Any = None
    """The request that is being answered; `cycle` is the one that was read last."""
    _reads_head = True
    _raw_head_bytes = 0
    _parsed_head_bytes = 0
    _refused = False
    _upgrades = False

    def connection_made(self, transport: Any) -> None:
        """A client connects."""
        super().connection_made(transport)
        if len(self.connections) > self.bounds.connections:
            self._refuse(_CROWD)
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone; uvicorn tells the request that was read last alone."""
        self._stop_timers()
        super().connection_lost(exc)
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Bytes come."""
        if self._refused:
            return
        if self._reads_head:
            if self._head_timer is None:
                self._await_head()
            self._raw_head_bytes += len(data)
        super().data_received(data)
        if self._reads_head and self._raw_head_bytes > self.bounds.head_bytes:
            self._refuse(_HEAD)

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._parsed_head_bytes = 0

    def on_url(self, url: bytes) -> None:
        """A part of the request line came."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer behind the body."""
        self._count(len(name) + len(value) + 4)
        if len(self.headers) >= _MOST_HEADERS:
            raise HeadTooLargeError
        if self._reads_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole: a request begins to be served."""
        if self.parser.should_upgrade() and self._announces_body():
            self._upgrades = True
            raise UpgradeError
        self._reads_head = False
        self._raw_head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        self.scope["extensions"] = {ABORT: self.transport.abort}
        super().on_headers_complete()
        if self.pipeline and self._look_timer is None:
            self._look_timer = self.loop.call_later(_LOOK_S, self._look_whether_gone)

    def on_message_complete(self) -> None:
        """The request is whole; the next one may come."""
        super().on_message_complete()
        self._reads_head = True

    def on_response_complete(self) -> None:
        """The answer is written, though perhaps not yet read."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_timer = self.loop.call_later(
                self.bounds.stalled_client_s, self.transport.abort
            )

    def timeout_keep_alive_handler(self) -> None:
        """No further request came."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP, or too much of it."""
        too_large = self._parsed_head_bytes > self.bounds.head_bytes
        too_many = self.headers is not None and len(self.headers) >= _MOST_HEADERS
        plain = _UPGRADE if self._upgrades else _NO_HTTP
        self._refuse(_HEAD if too_large or too_many else plain)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _look_whether_gone(self) -> None:
        """While requests wait in line nothing is read, so nobody would hear of the client's end."""
        self._look_timer = None
        if self.transport.is_closing() or not self.pipeline:
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), _GONE)
        if poll.poll(0):
            self.transport.abort()
        else:
            self._look_timer = self.loop.call_later(_LOOK_S, self._look_whether_gone)

    def _announces_body(self) -> bool:
        return any(
            name == b"transfer-encoding" or (name == b"content-length" and value.strip() != b"0")
            for name, value in self.headers
        )

    def _count(self, length: int) -> None:
        self._parsed_head_bytes += length
        if self._parsed_head_bytes > self.bounds.head_bytes:
            raise HeadTooLargeError

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.bounds.head_s, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._is_busy():
            self._await_head()  # a stray byte behind a request must not end its answer
        elif self._raw_head_bytes:
            self._refuse(_LATE)
        else:
            self.transport.abort()  # it never said anything

    def _refuse(self, refusal: Refusal) -> None:
        """Answer, if nothing is being answered, and end the connection; once."""
        if self._refused:
            return
        self._refused = True
        if self._is_busy():
            self.transport.abort()
            return
        body = refusal.body()
        lines = [STATUS_LINE[refusal.status], b"content-length: %d\r\n" % len(body)]
        lines += [b"%b: %b\r\n" % header for header in refusal.headers()]
        lines.append(b"connection: close\r\n\r\n")
        self.transport.write(b"".join([*lines, body]))
        # A client that still sends would lose the answer if its connection were closed at once.
        self.transport.write_eof()
        self._abort_timer = self.loop.call_later(_LINGER_S, self.transport.abort)

    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _stop_timers(self) -> None:
        for timer in (self._head_timer, self._abort_timer, self._look_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._abort_timer = self._look_timer = None


_CROWD: Final = Refusal(
    status=503,
    code="gateway_full",
    message="the gateway has as many connections as it can; come again",
    retry_after_s=1.0,
)
_HEAD: Final = Refusal(
    status=431, code="head_too_large", message="the request line and headers are too long"
)
_LATE: Final = Refusal(
    status=408, code="head_too_slow", message="the headers did not arrive in time"
)
_UPGRADE: Final = Refusal(
    status=400,
    code="invalid_http",
    message="a request with a body must come without the header upgrade: HTTP/1.1 alone is served",
)
_NO_HTTP: Final = Refusal(status=400, code="invalid_http", message="this is no HTTP request")


def bounded(bounds: Bounds) -> type[BoundedProtocol]:
    """The protocol class with these bounds."""
    return type("BoundedProtocol", (BoundedProtocol,), {"bounds": bounds})
