"""One client's request and what has become of it so far.

It sends, and notes what it has sent; what to send is decided in `proxy` and `relay`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from trimtab.engine_bridge.admission.core import Outcome
from trimtab.engine_bridge.admission.refusal import Refusal
from trimtab.engine_bridge.gateway.protocol import ABORT
from trimtab.engine_bridge.gateway.sliced import Sliced
from trimtab.engine_bridge.gateway.sse import Usage
from trimtab.engine_bridge.gateway.tracing import UNFOLLOWED, Unfollowed
from trimtab.engine_bridge.gateway.upstream import Header
from trimtab.engine_bridge.vllm.identity import Identity

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Exchange:
    """A request from its first byte to the end of its answer."""

    def __init__(self, scope: Scope, send: Send, *, now_s: float) -> None:
        """Begin.

        Args:
            scope: ASGI's.
            send: The server's.
            now_s: The event loop's time.
        """
        self.scope, self._send = scope, send
        self.began_s = now_s
        self.path = str(scope["path"])
        self.identity: Identity | None = None
        self.body: dict[str, Any] = {}
        self.raw = b""
        """The body as engines get it."""
        self.model = ""
        self.streams = False
        self.strips_usage = False
        self.key = b""
        """What it shares with requests that should go to the same engine."""
        self.engine = ""
        """Name of the engine that answered, or was asked last."""
        self.retries = 0
        self.waited_s = 0.0
        """Time that it has waited for an engine that can be used."""
        self.status = 0
        """HTTP status that the client was sent; 0: none."""
        self.code = ""
        """Code of the refusal that it was sent; empty: none."""
        self.usage = Usage()
        self.sliced = Sliced()
        self.events = 0
        """Events of its stream that held a part of the answer."""
        self.first_token_s: float | None = None
        """The event loop's time."""
        self.outcome = Outcome.UNREACHABLE
        self.ended = False
        self.spans: Unfollowed = UNFOLLOWED
        """What is noted of it for a trace."""
        self.blocked_since_s = math.inf
        """Since when the server has not taken the last piece."""

    @property
    def tier(self) -> str:
        """Its tier; empty while it is not known."""
        return "" if self.identity is None else self.identity.tier

    @property
    def started(self) -> bool:
        """Whether the client was sent anything."""
        return self.status != 0

    async def start(self, status: int, headers: Iterable[Header]) -> None:
        """Send the head of the answer."""
        self.status = status
        # The answer before it on this connection may lie unread.
        self.blocked_since_s = asyncio.get_running_loop().time()
        await self._send(
            {"type": "http.response.start", "status": status, "headers": list(headers)}
        )
        self.blocked_since_s = math.inf

    async def write(self, data: bytes, now_s: float) -> None:
        """Send a piece of the answer; it waits while the client does not read."""
        self.blocked_since_s = now_s
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self.blocked_since_s = math.inf

    async def end(self, data: bytes, now_s: float) -> None:
        """Send the last piece."""
        self.blocked_since_s = now_s
        self.ended = True
        await self._send({"type": "http.response.body", "body": data, "more_body": False})
        self.blocked_since_s = math.inf

    async def refuse(self, refusal: Refusal, now_s: float, *, close: bool = False) -> None:
        """Send an error; `close`: end the connection, because the request was not read whole."""
        self.code = refusal.code
        body = refusal.body()
        headers = [*refusal.headers(), (b"content-length", b"%d" % len(body))]
        if close:
            headers.append((b"connection", b"close"))
        await self.start(refusal.status, headers)
        await self.end(body if self.scope["method"] != "HEAD" else b"", now_s)

    def break_off(self) -> None:
        """Break the connection, so that half an answer is not taken for a whole one."""
        self.ended = True
        self.hang_up()

    def hang_up(self) -> None:
        """Break the connection; what is under way ends as if the client had left."""
        abort = self.scope.get("extensions", {}).get(ABORT)
        if abort is not None:
            abort()

    def watch(self, receive: Callable[[], Awaitable[Any]]) -> asyncio.Task[None]:
        """Cancel the calling task as soon as the client leaves."""
        task = asyncio.current_task()
        assert task is not None
        return asyncio.get_running_loop().create_task(self._watch(receive, task))

    async def _watch(self, receive: Callable[[], Awaitable[Any]], task: asyncio.Task[Any]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self.ended:
            task.cancel()
