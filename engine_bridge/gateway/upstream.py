"""An HTTP/1.1 client for one engine, made for passing answers on.

Bytes go from the engine's socket to the reader with one wake-up, whatever they hold. What is not
read stops the socket after 256 KiB, so that a slow client slows the engine's sender down. It knows
no retries across engines, no redirects, no proxies, no compression.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from enum import StrEnum
from typing import Any, Final
from urllib.parse import urlsplit

import httptools

Header = tuple[bytes, bytes]

MOST_HEAD_BYTES: Final = 65_536
"""Longest head of an answer, bytes."""
HIGH_WATER_BYTES: Final = 262_144
"""Unread bytes of an answer at which its socket is not read any more."""
MOST_IDLE: Final = 256
"""Most connections that are kept without a request."""
KEEP_S: Final = 3.0
"""A connection is used again for so long, seconds; uvicorn closes its own after 5."""
_STALE_S: Final = 0.05
"""A kept connection that is closed so soon after a request was most likely closed before it."""
_SWEEPS_PER_TIME_OUT: Final = 4
_LONGEST_SWEEP_S: Final = 1.0


class Fault(StrEnum):
    """Why there is no answer, or no whole one."""

    CONNECT = "connect"
    """There was no connection: the engine has seen nothing of the request."""
    CLOSED = "closed"
    """The engine closed the connection."""
    GARBAGE = "garbage"
    """What came is no HTTP."""
    SLOW = "slow"
    """Nothing came for too long."""


class UpstreamError(Exception):
    """The engine did not answer, or not to the end."""

    def __init__(self, fault: Fault, text: str) -> None:
        """Say why."""
        super().__init__(text)
        self.fault = fault


class _Link(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._loop = client.loop
        self._pieces: list[bytes] = []
        # A stream has a piece a token: the parser appends by itself, without a call of ours.
        self.on_body = self._pieces.append
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._buffered = 0
        self._paused = False
        self._head_bytes = 0
        self.idle_since_s = 0.0
        self.open = True
        self.reset()

    def reset(self) -> None:
        """Forget the answer before."""
        self.headers: list[Header] = []
        self.status = 0
        self.got_bytes = self.head_done = self.complete = self._keeps = False
        self.fault: UpstreamError | None = None
        self.deadline_s = 0.0
        self._head_bytes = self._buffered = 0

    # What the event loop calls.

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self not in self._client.active:
            self._transport.abort()  # nobody has asked
            return
        self.got_bytes = True
        self.deadline_s = self._loop.time() + self._client.idle_s
        if not self.head_done:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            # It may come after the end of the answer, which is whole all the same.
            self._fail(Fault.GARBAGE, f"no HTTP: {type(error).__name__}")
        if not self.head_done:
            if self._head_bytes > MOST_HEAD_BYTES:
                self._fail(Fault.GARBAGE, f"a head of more than {MOST_HEAD_BYTES} bytes")
        else:
            self._buffered += len(data)
            if self._buffered > HIGH_WATER_BYTES and self.open and not self._paused:
                self._paused = True
                self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        if not self.complete and self.fault is None:
            if error is None and self.head_done and self._ends_with_connection():
                self.complete = True
            else:
                self.fault = UpstreamError(Fault.CLOSED, "it closed the connection")
        self._client.forget(self)
        self._wake()

    # What the parser calls.

    def on_message_begin(self) -> None:
        if self.complete:
            raise ValueError("a second answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            return
        if status > 599:
            raise ValueError("no status of HTTP")
        self.status, self.head_done = status, True

    def on_message_complete(self) -> None:
        if self.head_done:
            self.complete = True
            # The parser forgets it with the end of the message.
            self._keeps = self._parser.should_keep_alive()
        else:
            self.headers.clear()  # 100 Continue and its like

    # What the answer calls.

    def send(self, head: bytes, body: bytes) -> None:
        self.deadline_s = self._loop.time() + self._client.first_byte_s
        if body:
            self._transport.writelines((head, body))
        else:
            self._transport.write(head)

    async def wait_for_head(self) -> None:
        while not self.head_done:
            if self.fault is not None:
                raise self.fault
            await self._wait()

    async def read(self) -> bytes:
        """What has come since; empty at the end of the answer."""
        while not self._pieces:
            if self.complete:
                return b""
            if self.fault is not None:
                raise self.fault
            await self._wait()
        pieces = self._pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._buffered = 0
        if self._paused:
            self._paused = False
            self.deadline_s = self._loop.time() + self._client.idle_s
            if self.open:
                self._transport.resume_reading()
        return data

    def reusable(self) -> bool:
        whole = self.complete and self.fault is None and not self._pieces and self.open
        return (
            whole
            and self._keeps
            and not self._transport.is_closing()
            and not self._transport.get_write_buffer_size()
        )

    def close(self) -> None:
        """End it at once: the engine sees that nobody reads any more."""
        self._pieces.clear()
        self._transport.abort()

    def late(self, now_s: float) -> None:
        """End it if the engine has been silent for too long, and not because we do not read."""
        if now_s > self.deadline_s and not self._pieces and not self.complete:
            self._fail(Fault.SLOW, "nothing came for too long")
            self._wake()

    def _ends_with_connection(self) -> bool:
        return not any(
            name in (b"content-length", b"transfer-encoding") for name, _ in self.headers
        )

    def _fail(self, fault: Fault, text: str) -> None:
        if self.fault is None and not self.complete:
            self.fault = UpstreamError(fault, text)
        self.open = False
        self._transport.abort()

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Answer:
    """An engine's answer whose head has come; `close` it in any case."""

    def __init__(self, client: Client, link: _Link) -> None:
        """Take over a connection."""
        self._client = client
        self._link: _Link | None = link
        self.status: Final = link.status
        """HTTP status."""
        self.headers: Final = link.headers
        """Headers, names in lower case."""
        self.read: Final = link.read
        """Coroutine: what has come since the last call, empty at the end. It raises
        `UpstreamError` where the answer breaks off."""

    def header(self, name: bytes) -> bytes:
        """The first header of a name; empty if there is none."""
        return next((value for key, value in self.headers if key == name), b"")

    async def read_all(self, most_bytes: int) -> bytes:
        """The whole body.

        Raises:
            UpstreamError: it broke off, or is longer than `most_bytes`.
        """
        pieces, length = [], 0
        while piece := await self.read():
            pieces.append(piece)
            length += len(piece)
            if length > most_bytes:
                raise UpstreamError(Fault.GARBAGE, f"an answer of more than {most_bytes} bytes")
        return b"".join(pieces)

    def close(self) -> None:
        """Keep the connection for another request, or end it if the answer is not whole."""
        if self._link is not None:
            self._client.release(self._link)
            self._link = None


class Client:
    """Connections to one engine."""

    def __init__(self, url: str, *, connect_s: float, first_byte_s: float, idle_s: float) -> None:
        """Say where the engine is; call it inside the event loop.

        Args:
            url: Its address, perhaps with a path in front of all paths.
            connect_s: Longest wait for a connection, seconds.
            first_byte_s: For the answer's first byte.
            idle_s: For each next one.
        """
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        secure = parts.scheme == "https"
        self._port = parts.port or (443 if secure else 80)
        self._tls = ssl.create_default_context() if secure else None
        self.host_header: Final = parts.netloc.encode("ascii", "ignore")
        """What goes into the header `host`."""
        self.prefix: Final = parts.path.rstrip("/").encode()
        """Path in front of all paths."""
        self.loop: Final = asyncio.get_running_loop()
        """The event loop that it lives in."""
        self.connect_s, self.first_byte_s, self.idle_s = connect_s, first_byte_s, idle_s
        self.active: set[_Link] = set()
        """Connections with a request on them."""
        self._idle: list[_Link] = []
        shortest_s = min(first_byte_s, idle_s) / _SWEEPS_PER_TIME_OUT
        self._sweep_s = min(_LONGEST_SWEEP_S, shortest_s)
        self._closed = False
        self._sweeps = True
        self.loop.call_later(self._sweep_s, self._sweep)

    async def send(self, head: bytes, body: bytes = b"", *, repeatable: bool = True) -> Answer:
        """Send a request and wait for the head of its answer.

        Args:
            head: Request line and headers, with the empty line.
            body: Its body.
            repeatable: Whether to send it once more where a kept connection is closed at once: the
                engine has most likely closed it before. False: it gets a connection of its own.

        Raises:
            UpstreamError: there is no answer. After a fault other than `CONNECT` the engine may
                have seen the request.
        """
        link = self._kept() if repeatable else None
        if link is not None:
            began_s = self.loop.time()
            try:
                return await self._send_on(link, head, body)
            except UpstreamError as error:
                late = self.loop.time() - began_s > _STALE_S
                if late or link.got_bytes or error.fault is not Fault.CLOSED:
                    raise
        return await self._send_on(await self._connect(), head, body)

    async def _send_on(self, link: _Link, head: bytes, body: bytes) -> Answer:
        self.active.add(link)
        if not self._sweeps:
            # It was closed while this one connected.
            self._sweeps = True
            self.loop.call_later(self._sweep_s, self._sweep)
        try:
            link.send(head, body)
            await link.wait_for_head()
        except BaseException:
            self.release(link)
            raise
        return Answer(self, link)

    def release(self, link: _Link) -> None:
        """Take a connection back."""
        if link not in self.active:
            return
        self.active.discard(link)
        if not self._closed and link.reusable() and len(self._idle) < MOST_IDLE:
            link.reset()
            link.idle_since_s = self.loop.time()
            self._idle.append(link)
        else:
            link.close()

    def forget(self, link: _Link) -> None:
        """A connection is closed."""
        with contextlib.suppress(ValueError):
            self._idle.remove(link)

    def close(self) -> None:
        """End what is idle; what is active ends with its answers."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    def _kept(self) -> _Link | None:
        now_s = self.loop.time()
        while self._idle:
            link = self._idle.pop()
            if link.open and now_s - link.idle_since_s < KEEP_S:
                return link
            link.close()
        return None

    async def _connect(self) -> _Link:
        try:
            async with asyncio.timeout(self.connect_s):
                _, link = await self.loop.create_connection(
                    lambda: _Link(self), self._host, self._port, ssl=self._tls
                )
        except TimeoutError:
            raise UpstreamError(Fault.CONNECT, "no connection in time") from None
        except (OSError, UnicodeError) as error:
            # UnicodeError: a name that no resolver can be asked for.
            text = getattr(error, "strerror", None) or str(error)
            raise UpstreamError(Fault.CONNECT, f"no connection: {text}") from None
        return link

    def _sweep(self) -> None:
        now_s = self.loop.time()
        for link in list(self.active):
            link.late(now_s)
        for link in [one for one in self._idle if now_s - one.idle_since_s >= KEEP_S]:
            self._idle.remove(link)
            link.close()
        if self._closed and not self.active:
            self._sweeps = False
            return
        self.loop.call_later(self._sweep_s, self._sweep)
