"""Admission inside vLLM's API server: judges before the engine, trues up from what it answers.

Whose a request is, the middleware has found out; the rules are `trimtab.engine_bridge.admission`'s.
This is the door: it reads the answer on its way out and lets every byte of it pass but the usage
that nobody asked for.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any, Final

from trimtab.engine_bridge.admission.asked import Asked, wants_stream
from trimtab.engine_bridge.admission.core import Admission
from trimtab.engine_bridge.admission.counting import EngineTokenCounter
from trimtab.engine_bridge.admission.metrics import AdmissionMetrics
from trimtab.engine_bridge.admission.outcome import Outcome, error_status, outcome_of
from trimtab.engine_bridge.admission.redis_ledger import open_limiter
from trimtab.engine_bridge.admission.refusal import Refusal
from trimtab.engine_bridge.admission.settings import load_admission
from trimtab.engine_bridge.admission.ticket import Ticket
from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.gateway.sse import EventStream, Usage
from trimtab.engine_bridge.plan import load_plan
from trimtab.engine_bridge.vllm.identity import Identity, IdentitySettings
from trimtab.engine_bridge.vllm.load_watch import LoadWatch

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_STREAMS: Final = frozenset(
    ("/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch")
)
"""Paths whose streams end with their usage only if they are asked to."""
_OPTIONS: Final = "stream_options"
_KEPT_KEYS: Final = (
    "asgi", "http_version", "scheme", "server", "client", "root_path", "app", "state", "extensions",
)  # fmt: skip
"""What a request made in the server itself has of the scope of one from outside."""
_SHOW_EVERY_S: Final = 1.0


class AdmissionDoor:
    """One API server's admission."""

    def __init__(
        self,
        app: App,
        admission: Admission,
        asks: InnerRequests,
        *,
        usage_always: bool = False,
        metrics: AdmissionMetrics | None = None,
    ) -> None:
        """Wrap an application; `of` makes one as the settings say.

        Args:
            app: What serves admitted requests.
            admission: What judges them.
            asks: How questions reach the application itself.
            usage_always: Whether streams end with their usage even if the client has not asked.
            metrics: Where levels are shown; None: nowhere.
        """
        self._app = app
        self._admission = admission
        self._asks = asks
        self._keeper: asyncio.Task[None] | None = None
        self._usage_always = usage_always
        self._metrics = metrics

    @classmethod
    def of(cls, settings: IdentitySettings, app: App) -> AdmissionDoor:
        """The door for these settings, which name an admission file.

        Raises:
            InputError: the file, the plan, the engine or the storage cannot be used.
        """
        assert settings.admission is not None
        plan = load_plan(settings.plan)
        rules = load_admission(Path(settings.admission), plan)
        asks = InnerRequests(app)
        metrics = AdmissionMetrics(plan.tiers)
        admission = Admission(
            rules,
            plan,
            limiter=open_limiter(
                rules.storage_url,
                time_out_s=rules.storage_time_out_s,
                monotonic_s=time.monotonic,
            ),
            monotonic_s=time.monotonic,
            counter=EngineTokenCounter(asks.post),
            load=None if settings.control is None else LoadWatch(settings.control),
            engine=None if settings.engine is None else get_engine_spec(settings.engine),
            observer=metrics,
        )
        return cls(app, admission, asks, usage_always=settings.usage_always, metrics=metrics)

    async def admit(
        self, path: str, identity: Identity, body: dict[str, Any], length: int, scope: Scope
    ) -> Admitted | Refusal:
        """Judge a request.

        Args:
            path: As the routes see it.
            identity: Whose it is.
            body: Its JSON object.
            length: Bytes of its JSON text in UTF-8.
            scope: Its own, for questions to the server itself.
        """
        self._keep()
        self._asks.scope = scope
        asked = Asked(identity=identity, path=path, body=body, body_bytes=length)
        judged = await self._admission.admit(asked)
        if isinstance(judged, Refusal):
            return judged
        body.update(judged.changes)
        strips = _ask_for_usage(path, body) and not self._usage_always
        return Admitted(judged, strips_usage=strips, streams=wants_stream(body))

    async def serve(self, admitted: Admitted, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve an admitted request and end its ticket, whatever happens."""

        async def heard() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect":
                admitted.client_left()
            return message

        async def seen(message: Message) -> None:
            passed = admitted.passed(message)
            if passed is not None:
                await send(passed)

        try:
            await self._app(scope, heard, seen)
        except asyncio.CancelledError:
            admitted.client_left()
            raise
        finally:
            await admitted.end()

    def _keep(self) -> None:
        """Have somebody renew places and show levels, once a loop runs."""
        if self._keeper is None or self._keeper.done():
            self._keeper = asyncio.get_running_loop().create_task(self._keep_on())

    async def _keep_on(self) -> None:
        admission = self._admission
        every = round(admission.renew_every_s / _SHOW_EVERY_S)
        number = 0
        while True:
            await asyncio.sleep(_SHOW_EVERY_S)
            number += 1
            if number % every == 0:
                await admission.renew()
            if self._metrics is not None:
                self._metrics.show(
                    open_requests=admission.open_tickets,
                    slowed_tenants=admission.slowed_tenants,
                    storage_failures=admission.storage_failures,
                )


class Admitted:
    """One admitted request and what its answer says on its way out."""

    def __init__(self, ticket: Ticket, *, strips_usage: bool, streams: bool) -> None:
        """Begin before the answer does.

        Args:
            ticket: What admission has given.
            strips_usage: Whether the client has not asked for the usage at the stream's end.
            streams: Whether it wants a stream.
        """
        self._ticket = ticket
        self._strips, self._streams = strips_usage, streams
        self._status = 0
        self._stream: EventStream | None = None
        self._pieces: list[bytes] = []
        self._ended = False
        self._left = False

    def client_left(self) -> None:
        """The client is gone; after the answer's end that means nothing."""
        self._left = self._left or not self._ended

    def passed(self, message: Message) -> Message | None:
        """A message of the answer as it goes on; None: nothing of it does."""
        if message["type"] == "http.response.start":
            self._status = int(message["status"])
            if _is_stream(message):
                self._stream = EventStream(strip_usage=self._strips)
            return message
        if message["type"] != "http.response.body":
            return message
        body, more = message.get("body", b""), message.get("more_body", False)
        self._ended = not more
        if self._stream is None:
            self._pieces.append(body)
            return message
        passed = self._stream.feed(body)
        if not more:
            passed += self._stream.rest()
        if not passed and more:
            return None
        return message if passed is body else {**message, "body": passed}

    async def end(self) -> None:
        """True the ticket up."""
        usage = self._usage()
        outcome = self._outcome()
        output = usage.output_tokens
        if output is None and self._stream is not None:
            output = self._stream.events
        elif output is None and self._streams and self._left:
            output = 0  # it left before the first token
        await self._ticket.finished(
            outcome=outcome,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=output,
        )

    def _outcome(self) -> Outcome:
        if self._left:
            return Outcome.CANCELLED
        if not self._ended:
            return Outcome.FAILED
        error = None if self._stream is None else self._stream.error
        return outcome_of(self._status if error is None else error_status(error))

    def _usage(self) -> Usage:
        if self._stream is not None:
            return self._stream.usage
        usage = Usage()
        if self._status < 400:
            usage.take(_usage_in(b"".join(self._pieces)))
        return usage


class InnerRequests:
    """Requests that the server makes to itself, past the middleware: they cost no quota."""

    def __init__(self, app: App) -> None:
        """Say which application answers."""
        self._app = app
        self.scope: Scope = {}
        """Of any request from outside."""

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer."""
        scope = {key: self.scope[key] for key in _KEPT_KEYS if key in self.scope}
        root = str(scope.get("root_path", ""))
        scope |= {"type": "http", "method": "POST", "path": root + path, "query_string": b""}
        scope["raw_path"] = scope["path"].encode()
        scope["headers"] = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
        ]
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        status, pieces = 0, []

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await asyncio.Event().wait()
            raise AssertionError("it waits until it is cancelled")

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = int(message["status"])
            else:
                pieces.append(message.get("body", b""))

        await self._app(scope, receive, send)
        return status, b"".join(pieces)


def _ask_for_usage(path: str, body: dict[str, Any]) -> bool:
    """Have a stream end with its usage; True if that was not the client's wish."""
    options = body.get(_OPTIONS)
    if path not in _STREAMS or not wants_stream(body) or not isinstance(options, dict | None):
        return False
    known = options or {}
    if known.get("include_usage") is True:
        return False
    body[_OPTIONS] = {**known, "include_usage": True}
    return True


def _is_stream(start: Message) -> bool:
    kinds = (value for name, value in start.get("headers", ()) if name.lower() == b"content-type")
    return next(kinds, b"").startswith(b"text/event-stream")


def _usage_in(body: bytes) -> object:
    """The last `usage` in an answer; the rest of it, which may be long, is not parsed."""
    at = body.rfind(b'"usage":')
    if at < 0:
        return None
    try:
        text = body[at + len(b'"usage":') :].decode()
        return json.JSONDecoder().raw_decode(text.lstrip())[0]
    except (ValueError, RecursionError):
        return None
