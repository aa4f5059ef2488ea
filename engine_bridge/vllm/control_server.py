"""The control server in the engine's process: sockets in, the store's answers out.

One daemon thread serves every connection without ever waiting for one of them. What clients can
cost the engine is bounded: connections, length of a line, idle and unfinished time, requests a
second; garbage costs more than sense. It decides nothing about allocations (`control_store` does).
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Self

from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.engine_bridge.vllm.control_connection import Bucket, Connection
from trimtab.engine_bridge.vllm.control_errors import (
    ControlSocketError,
    ProposalError,
    RequestError,
    UnauthorizedError,
)
from trimtab.engine_bridge.vllm.control_protocol import (
    MOST_REQUEST_BYTES,
    Answers,
    parse,
    refusal,
    success,
)
from trimtab.engine_bridge.vllm.control_socket import (
    listen_tcp,
    listen_unix,
    rank_path,
    remove,
    split_address,
)
from trimtab.engine_bridge.vllm.control_store import AllocationStore
from trimtab.engine_bridge.vllm.settings import CONTROL_TOKEN

SHORTEST_TOKEN: Final = 16
"""Least length of the token, characters."""
SWITCH_INTERVAL_S: Final = 0.0005
"""Python's switch interval in an engine with a control server, seconds."""
MOST_CONNECTIONS: Final = 16
"""Most connections at once."""
_LOG: Final = logging.getLogger("trimtab.control")
_REFUSAL_COST: Final = 20.0
_ACCEPTS_PER_S: Final = 50.0
_ACCEPT_BURST: Final = 32.0
_EVICTABLE_S: Final = 10.0
_READ_BYTES: Final = 65_536
_MOST_OUT_BYTES: Final = 262_144
_LINES_A_TURN: Final = 8
_TICK_S: Final = 0.5


class ControlServer:
    """Serves one engine's allocation over a Unix socket, TCP or both."""

    def __init__(
        self,
        store: AllocationStore,
        *,
        path: Path | str | None = None,
        tcp: str | None = None,
        token: str | None = None,
        rank: int = 0,
        telemetry: Callable[[], Telemetry | None] | None = None,
        health: Callable[[], Mapping[str, object]] | None = None,
        flush: Callable[[], Mapping[str, int]] | None = None,
        switch_interval_s: float | None = SWITCH_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Say what to serve; `start` opens the sockets.

        Args:
            store: Holds the allocation.
            path: Unix socket; other data-parallel ranks than 0 listen beside it (`rank_path`).
            tcp: `host:port`; rank r listens on port + r. Port 0: any.
            token: What TCP clients must show; None: the value of TRIMTAB_CONTROL_TOKEN.
            rank: Data-parallel rank of this engine.
            telemetry: Gives the last interval; called in the server's thread, must not wait.
            health: Gives further facts, JSON values by name; called likewise.
            flush: Has the traffic log written out; called likewise. None: there is none.
            switch_interval_s: Longest that a thread of this process keeps Python's lock from
                another one, set when the server starts if it is longer; None: leave it.
            clock: Seconds that never go back.

        Raises:
            ControlSocketError: `tcp` is no address, or there is no token of enough characters.
        """
        self._path = None if path is None else rank_path(path, rank)
        self._tcp = None if tcp is None else split_address(tcp)
        self._rank, self._clock = rank, clock
        self._switch_interval_s = switch_interval_s
        self._answers = Answers(store, telemetry=telemetry, health=health, flush=flush)
        self._token = b"" if tcp is None else _token(token)
        self._selector = selectors.DefaultSelector()
        self._listeners: list[socket.socket] = []
        self._listening = False
        self._links: dict[int, Connection] = {}
        self._accepts = Bucket(_ACCEPTS_PER_S, _ACCEPT_BURST, clock())
        self._inode = 0
        self._closing = False
        self._wake, self._waker = socket.socketpair()
        self._thread: threading.Thread | None = None

    @property
    def path(self) -> Path | None:
        """The Unix socket, with the rank in its name."""
        return self._path

    @property
    def tcp_address(self) -> tuple[str, int] | None:
        """Host and port that are really listened on, once started."""
        for listener in self._listeners:
            if listener.family != socket.AF_UNIX:
                host, port = listener.getsockname()[:2]
                return host, port
        return None

    def start(self) -> Self:
        """Open the sockets and begin to serve.

        Raises:
            ControlSocketError: a socket cannot be opened; nothing is left open.
        """
        try:
            if self._path is not None:
                self._listeners.append(listen_unix(self._path))
                self._inode = self._path.lstat().st_ino
            if self._tcp is not None:
                host, port = self._tcp
                self._listeners.append(listen_tcp(host, port + self._rank if port else 0))
        except ControlSocketError:
            self._tidy()
            raise
        if self._switch_interval_s is not None:
            # With Python's own 5 ms a busy scheduler would keep a request waiting for so long.
            sys.setswitchinterval(min(sys.getswitchinterval(), self._switch_interval_s))
        self._wake.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="trimtab-control", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop serving, close every connection and remove the socket."""
        self._closing = True
        if self._thread is not None:
            self._waker.send(b"x")
            self._thread.join(timeout=5.0)
            self._thread = None
        self._tidy()

    def __enter__(self) -> Self:
        """Start."""
        return self.start()

    def __exit__(self, *error: object) -> None:
        """Close."""
        self.close()

    def _tidy(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners = []
        for connection in list(self._links.values()):
            connection.link.close()
        self._links.clear()
        self._selector.close()
        self._wake.close()
        self._waker.close()
        if self._path is not None and self._inode:
            remove(self._path, self._inode)
            self._inode = 0

    def _serve(self) -> None:
        while not self._closing:
            try:
                self._turn()
            except Exception:
                # A fault here must cost neither the engine nor the other clients.
                _LOG.exception("the control server goes on after a fault")
                time.sleep(_TICK_S)

    def _turn(self) -> None:
        wait_s = self._prepare(self._clock())
        ready = self._selector.select(wait_s)
        now_s = self._clock()
        for key, events in ready:
            if key.fileobj in self._listeners:
                self._accept(key.fileobj, now_s)
            elif key.fd in self._links:
                self._attend(self._links[key.fd], events, now_s)
        for connection in list(self._links.values()):
            if now_s >= connection.deadline_s():
                self._drop(connection)

    def _prepare(self, now_s: float) -> float:
        """Set what each socket is watched for; answers how long nothing else is due, seconds."""
        wait_s = _TICK_S
        accept_s = self._accepts.wait_s(now_s)
        self._listen(accept_s == 0.0)
        if accept_s > 0:
            wait_s = min(wait_s, accept_s)
        for connection in list(self._links.values()):
            if b"\n" in connection.inbox and not connection.ending:
                # Lines that came too fast, or too many at once, are answered now.
                self._work(connection, now_s)
            if connection.link.fileno() == -1:
                continue
            mute_s = connection.bucket.wait_s(now_s)
            pending = b"\n" in connection.inbox and not connection.ending
            if pending or mute_s > 0:
                wait_s = min(wait_s, mute_s)
            self._watch(connection, reading=not pending and mute_s == 0.0)
        return wait_s

    def _listen(self, wanted: bool) -> None:
        if wanted != self._listening:
            for listener in self._listeners:
                if wanted:
                    self._selector.register(listener, selectors.EVENT_READ)
                else:
                    self._selector.unregister(listener)
            self._listening = wanted

    def _watch(self, connection: Connection, *, reading: bool) -> None:
        mask = selectors.EVENT_WRITE if connection.outbox else 0
        if reading and not connection.ending and len(connection.outbox) < _MOST_OUT_BYTES:
            mask |= selectors.EVENT_READ
        if mask != connection.mask:
            if not mask:
                self._selector.unregister(connection.link)
            elif not connection.mask:
                self._selector.register(connection.link, mask)
            else:
                self._selector.modify(connection.link, mask)
            connection.mask = mask

    def _accept(self, listener: socket.socket, now_s: float) -> None:
        try:
            link, _ = listener.accept()
        except OSError:
            return
        self._accepts.spend(1.0, now_s)
        link.setblocking(False)
        if len(self._links) >= MOST_CONNECTIONS and not self._evict(now_s):
            busy = RequestError("control", remedy=f"{MOST_CONNECTIONS} connections are open")
            with contextlib.suppress(OSError):
                link.send(refusal(busy))
            link.close()
            return
        unix = link.family == socket.AF_UNIX
        if not unix:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._links[link.fileno()] = Connection(link, authorized=unix, now_s=now_s)
        self._selector.register(link, selectors.EVENT_READ)

    def _evict(self, now_s: float) -> bool:
        """Make room by closing the connection that has been silent longest."""
        idlest = min(self._links.values(), key=lambda connection: connection.active_s)
        if now_s - idlest.active_s < _EVICTABLE_S:
            return False
        self._drop(idlest)
        return True

    def _attend(self, connection: Connection, events: int, now_s: float) -> None:
        try:
            if events & selectors.EVENT_READ:
                data = connection.link.recv(_READ_BYTES)
                if not data:
                    self._drop(connection)
                    return
                if not connection.inbox:
                    connection.unfinished_s = now_s
                connection.inbox += data
                self._work(connection, now_s)
            elif events & selectors.EVENT_WRITE:
                self._send(connection)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._drop(connection)

    def _work(self, connection: Connection, now_s: float) -> None:
        """Answer the lines that have come, a few at a time and not faster than is allowed."""
        for _ in range(_LINES_A_TURN):
            end = connection.inbox.find(b"\n")
            if end < 0 or connection.ending or connection.bucket.wait_s(now_s) > 0:
                break
            line = bytes(connection.inbox[:end])
            del connection.inbox[: end + 1]
            connection.active_s = connection.unfinished_s = now_s
            if line.strip():
                self._answer(connection, line, now_s)
        end = connection.inbox.find(b"\n")
        if (len(connection.inbox) if end < 0 else end) > MOST_REQUEST_BYTES:
            long = RequestError("control", bound=f"a line of at most {MOST_REQUEST_BYTES} bytes")
            self._end(connection, long)
        try:
            self._send(connection)
        except OSError:
            self._drop(connection)

    def _answer(self, connection: Connection, line: bytes, now_s: float) -> None:
        request: dict[str, Any] | None = None
        try:
            request = parse(line)
            if request["op"] == "auth" or not connection.authorized:
                self._authorize(connection, request)
                reply: Mapping[str, Any] = {}
            else:
                reply = self._answers.answer(request)
            connection.bucket.spend(1.0, now_s)
            connection.outbox += success(request, reply)
        except UnauthorizedError as error:
            self._end(connection, error)
        except ProposalError as error:
            connection.bucket.spend(_REFUSAL_COST, now_s)
            connection.outbox += refusal(error, request)
            if request is None and not line.lstrip().startswith(b"{"):
                # Another protocol, or noise: there is nothing to be gained by listening on.
                connection.ending = True
        except Exception:
            _LOG.exception("a control request failed")
            connection.bucket.spend(_REFUSAL_COST, now_s)
            fault = RequestError("control", remedy="the engine could not answer; see its log")
            connection.outbox += refusal(fault, request)

    def _authorize(self, connection: Connection, request: Mapping[str, Any]) -> None:
        if connection.authorized:
            return
        shown = request.get("token") if request["op"] == "auth" else None
        given = shown.encode("utf-8", "surrogatepass") if isinstance(shown, str) else b""
        if not hmac.compare_digest(given, self._token):
            _LOG.warning("a control connection over TCP showed no right token")
            raise UnauthorizedError(
                "control", key="token", remedy='send {"op": "auth", "token": ...} first'
            )
        connection.authorized = True

    def _end(self, connection: Connection, error: ProposalError) -> None:
        if not connection.ending:
            connection.outbox += refusal(error)
            connection.ending = True

    def _send(self, connection: Connection) -> None:
        if connection.outbox:
            try:
                sent = connection.link.send(connection.outbox)
            except (BlockingIOError, InterruptedError):
                return
            del connection.outbox[:sent]
        if connection.ending and not connection.outbox:
            self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        number = connection.link.fileno()
        if number == -1:
            return
        if connection.mask:
            self._selector.unregister(connection.link)
        self._links.pop(number, None)
        connection.link.close()


def _token(given: str | None) -> bytes:
    token = os.environ.get(CONTROL_TOKEN, "") if given is None else given
    if len(token) < SHORTEST_TOKEN:
        raise ControlSocketError(
            CONTROL_TOKEN,
            value=f"{len(token)} characters",
            bound=f"at least {SHORTEST_TOKEN} characters for the control socket over TCP",
            remedy="set it for the engine and its controller, or use control_socket alone",
        )
    return token.encode()
