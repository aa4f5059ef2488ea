"""The gateway's door: judges a request, finds its engine, passes the answer on.

A pure ASGI application. A request is sent to another engine as long as nothing of its answer has
gone out, so that an engine's end loses only what was already being read.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final, Protocol

from trimtab.engine_bridge.admission.asked import Asked, utf8_bytes, wants_stream
from trimtab.engine_bridge.admission.core import Admission, Outcome, Ticket
from trimtab.engine_bridge.admission.refusal import Refusal, unknown_key
from trimtab.engine_bridge.gateway import openapi, refusals, wire
from trimtab.engine_bridge.gateway.exchange import Exchange, Scope, Send
from trimtab.engine_bridge.gateway.fleet import Engine, Fleet
from trimtab.engine_bridge.gateway.prompt_head import affinity_key
from trimtab.engine_bridge.gateway.relay import Relay
from trimtab.engine_bridge.gateway.request_body import (
    BodyRoom,
    GoneError,
    RefusedError,
    discard,
    for_engine,
    parse,
    read_body,
    wants_usage,
)
from trimtab.engine_bridge.gateway.settings import GatewaySettings
from trimtab.engine_bridge.gateway.slices import read_ahead, settle
from trimtab.engine_bridge.gateway.tracing import ADMISSION, ATTEMPT, WAIT, Tracer
from trimtab.engine_bridge.gateway.upstream import Fault, UpstreamError
from trimtab.engine_bridge.gateway.waiting import NoEngineError, WaitingRoom
from trimtab.engine_bridge.vllm.identity import Identifier, Identity, UnknownKeyError

_LOG: Final = logging.getLogger("trimtab.gateway")

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

COMPLETIONS: Final = frozenset(
    ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
)
"""Paths that generate."""
SERVED: Final = COMPLETIONS | {"/v1/embeddings"}
"""Paths whose body names a model and whose engines take labels."""
_USAGE_ON_WISH: Final = frozenset(("/v1/completions", "/v1/chat/completions"))
_MODELS: Final = "/v1/models"
_MOST_BROKEN: Final = 2
"""A request that two engines have died of is not sent to a third."""


class Setup(Protocol):
    """What one version of the settings has made."""

    settings: GatewaySettings
    identifier: Identifier
    fleet: Fleet
    admission: Admission | None
    slice_tokens: Mapping[str, int]


class Watcher(Protocol):
    """Who is told of each request: metrics and accounts."""

    def retried(self, engine: str, fault: str) -> None:
        """An engine failed before its first byte."""

    def done(self, exchange: Exchange, now_s: float) -> None:
        """A request has ended, however."""


class Proxy:
    """Serves clients."""

    def __init__(
        self, setup: Setup, waiting: WaitingRoom, watcher: Watcher, *, engine_key: str | None
    ) -> None:
        """Begin; `setup` may be replaced at any time and counts for new requests.

        Args:
            setup: What the settings have made.
            waiting: Where requests wait for an engine.
            watcher: Who is told.
            engine_key: API key that the engines ask for.
        """
        self.setup = setup
        self.open: set[Exchange] = set()
        """Requests under way."""
        self.bodies = BodyRoom(setup.settings.caps.bodies_mib << 20)
        """Memory for their bodies."""
        self.tracer: Tracer | None = None
        """Who follows requests for traces; None: nobody."""
        self._waiting, self._watcher, self._engine_key = waiting, watcher, engine_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        loop = asyncio.get_running_loop()
        exchange = Exchange(scope, send, now_s=loop.time())
        if self.tracer is not None:
            exchange.spans = self.tracer.begin(scope)
        self.open.add(exchange)
        try:
            await self._serve(exchange, receive)
        except GoneError:
            exchange.outcome = Outcome.CANCELLED
        except asyncio.CancelledError:
            # By the client's leaving, or by the end of the drain.
            exchange.outcome = Outcome.CANCELLED
            exchange.break_off()
        except Exception:
            _LOG.exception("a request failed by a fault of the gateway")
            exchange.outcome = Outcome.FAILED
            if exchange.started:
                exchange.break_off()
            else:
                await exchange.refuse(refusals.internal_error(), loop.time(), close=True)
        finally:
            self.open.discard(exchange)
            self._watcher.done(exchange, loop.time())

    def end_stalled(self, now_s: float) -> None:
        """Give up clients that have not read for too long."""
        longest_s = self.setup.settings.time_outs.stalled_client_s
        for exchange in list(self.open):
            if now_s - exchange.blocked_since_s > longest_s:
                exchange.hang_up()

    async def _serve(self, exchange: Exchange, receive: Receive) -> None:
        setup, scope = self.setup, exchange.scope
        now_s = asyncio.get_running_loop().time
        try:
            if exchange.path == openapi.PATH:
                _describe(exchange)
            exchange.identity = _identify(setup.identifier, scope["headers"])
            if exchange.path not in SERVED:
                self._models(exchange, setup)
            if scope["method"] != "POST":
                raise RefusedError(refusals.method_not_allowed("POST"))
            raw = await self._read(exchange, receive, setup)
        except RefusedError as error:
            if error.unread and (error.begun or not _waits_to_send(scope)):
                await discard(receive)
            await exchange.refuse(error.refusal, now_s(), close=error.unread and _has_body(scope))
            return
        except _AnsweredError as answered:
            # A body that nobody reads must not keep the connection, on which no clock runs then.
            await exchange.start(200, _json_headers(answered.body, close=_has_body(scope)))
            await exchange.end(answered.body, now_s())
            exchange.outcome = Outcome.FINISHED
            return
        try:
            await self._judge(exchange, receive, setup, raw)
        finally:
            self.bodies.give(len(raw))

    async def _read(self, exchange: Exchange, receive: Receive, setup: Setup) -> bytes:
        declared = wire.first(exchange.scope["headers"], b"content-length")
        return await read_body(
            receive,
            declared=int(declared) if declared is not None and declared.isdigit() else None,
            most_bytes=setup.settings.caps.body_mib << 20,
            time_out_s=setup.settings.time_outs.body_s,
            room=self.bodies,
        )

    async def _judge(self, exchange: Exchange, receive: Receive, setup: Setup, raw: bytes) -> None:
        """Admit the request and serve it; all that follows ends with the client."""
        now_s = asyncio.get_running_loop().time
        ticket: Ticket | None = None
        watch = exchange.watch(receive)
        try:
            self._understand(exchange, setup, raw)
            ticket = await self._admit(exchange, setup, utf8_bytes(raw))
            self._prepare(exchange, setup, ticket, raw)
            await self._relay(exchange)
        except RefusedError as error:
            await exchange.refuse(error.refusal, now_s())
        except asyncio.CancelledError:
            exchange.outcome = Outcome.CANCELLED
            raise
        finally:
            exchange.ended = True
            watch.cancel()
            if ticket is not None:
                await self._settle(exchange, ticket)

    def _understand(self, exchange: Exchange, setup: Setup, raw: bytes) -> None:
        body = exchange.body = parse(raw)
        model = body.get("model")
        exchange.model = model if isinstance(model, str) else ""
        identity = _known(exchange)
        routes = setup.fleet.routes
        if not routes.pool(exchange.model, identity.tenant, identity.tier).groups:
            raise RefusedError(refusals.model_not_found(exchange.model))

    async def _admit(self, exchange: Exchange, setup: Setup, length: int) -> Ticket | None:
        if setup.admission is None:
            return None
        exchange.spans.start(ADMISSION)
        judged = await setup.admission.admit(
            Asked(
                identity=_known(exchange),
                path=exchange.path,
                body=exchange.body,
                body_bytes=length,
            )
        )
        exchange.spans.stop(judged.code if isinstance(judged, Refusal) else "")
        if isinstance(judged, Refusal):
            raise RefusedError(judged)
        return judged

    def _prepare(self, exchange: Exchange, setup: Setup, ticket: Ticket | None, raw: bytes) -> None:
        body = exchange.body
        exchange.streams = wants_stream(body)
        exchange.strips_usage = (
            exchange.streams and exchange.path in _USAGE_ON_WISH and not wants_usage(body)
        )
        changes = {} if ticket is None else ticket.changes
        exchange.raw = for_engine(raw, body, changes, asks_usage=exchange.strips_usage)
        exchange.body = {**body, **changes}
        prefix_bytes = setup.settings.affinity.prefix_bytes
        exchange.key = affinity_key(_known(exchange).tenant, body, prefix_bytes)

    async def _relay(self, exchange: Exchange) -> None:
        """Send the request to engines until one answers."""
        tried: list[str] = []
        broken = 0
        for _ in range(self.setup.settings.caps.attempts):
            engine = await self._find(exchange, tried)
            exchange.engine = engine.name
            exchange.spans.start(ATTEMPT, engine.name)
            try:
                if await self._try(exchange, engine, tried):
                    return
                broken += 1
                fault = "status"
            except UpstreamError as error:
                fault = error.fault.value
                exchange.spans.stop(fault)
                self._failed(exchange, engine, error)
                broken += error.fault is not Fault.CONNECT
            exchange.spans.stop(fault)
            tried.append(engine.name)
            exchange.retries += 1
            self._watcher.retried(engine.name, fault)
            if broken >= _MOST_BROKEN:
                break
        exchange.outcome = Outcome.FAILED if broken else Outcome.UNREACHABLE
        raise RefusedError(refusals.engine_failed() if broken else _no_engine(self.setup))

    async def _find(self, exchange: Exchange, tried: list[str]) -> Engine:
        """The engine to ask, waited for where none can be used."""
        identity = _known(exchange)
        now_s = asyncio.get_running_loop().time
        while True:
            fleet = self.setup.fleet
            pool = fleet.routes.pool(exchange.model, identity.tenant, identity.tier)
            if not pool.groups:
                raise RefusedError(refusals.model_not_found(exchange.model))
            engine = fleet.pick(pool, exchange.key, tried)
            if engine is not None:
                exchange.spans.stop()
                return engine
            # Whoever has failed on all of them may try them again once one is back.
            tried = []
            began_s = now_s()
            left_s = self.setup.settings.time_outs.wait_s - exchange.waited_s
            exchange.spans.start(WAIT)
            try:
                await self._waiting.wait(identity.tier, began_s + left_s)
            except NoEngineError:
                exchange.outcome = Outcome.UNREACHABLE
                exchange.spans.stop("no_engine")
                raise RefusedError(_no_engine(self.setup)) from None
            finally:
                exchange.waited_s += now_s() - began_s

    async def _try(self, exchange: Exchange, engine: Engine, tried: list[str]) -> bool:
        """Ask one engine and pass its answer on; False: it failed, and another can be asked.

        Raises:
            UpstreamError: it failed before anything went out.
        """
        identity = _known(exchange)
        now_s = asyncio.get_running_loop().time
        head = wire.request_head(
            engine.client,
            b"POST",
            exchange.path.encode("ascii"),
            exchange.scope["headers"],
            key=self._engine_key,
            tenant=identity.tenant,
            tier=identity.tier,
            length=len(exchange.raw),
            trace=exchange.spans.heads,
        )
        engine.in_flight += 1
        trial = engine.health.begin()
        answer = None
        try:
            await read_ahead(
                exchange, engine, self.setup.slice_tokens, key=self._engine_key, now_s=now_s(),
                answered=lambda: self._answered(engine),
            )  # fmt: skip
            answer = await engine.client.send(head, exchange.raw, repeatable=_may_repeat(exchange))
            exchange.spans.answered(answer.status)
            relay = Relay(exchange, answer, now_s)
            await relay.hold()
            self._answered(engine)
            if relay.is_broken and self._another(exchange, [*tried, engine.name]):
                return False
            exchange.sliced.prompt = None  # no other engine will be asked, and it may be large
            await relay.go_on()
            settle(exchange, engine, now_s())
            return True
        finally:
            engine.in_flight -= 1
            engine.health.ended(trial)
            if answer is not None:
                answer.close()

    def _answered(self, engine: Engine) -> None:
        if engine.health.answered():
            self._waiting.wake()

    def _another(self, exchange: Exchange, tried: list[str]) -> bool:
        """Whether there is another engine, and the request may be sent to it."""
        identity, fleet = _known(exchange), self.setup.fleet
        pool = fleet.routes.pool(exchange.model, identity.tenant, identity.tier)
        return _may_repeat(exchange) and fleet.pick(pool, exchange.key, tried) is not None

    def _failed(self, exchange: Exchange, engine: Engine, error: UpstreamError) -> None:
        """Note an engine's failure.

        Raises:
            RefusedError: the request cannot be sent to another one.
        """
        _LOG.warning("engine %s: %s", engine.name, error)
        if error.fault is Fault.SLOW:
            exchange.outcome = Outcome.TIMED_OUT
            raise RefusedError(refusals.engine_too_slow()) from None
        engine.health.unanswered(asyncio.get_running_loop().time())
        if error.fault is not Fault.CONNECT and not _may_repeat(exchange):
            exchange.outcome = Outcome.FAILED
            raise RefusedError(refusals.engine_failed()) from None

    async def _settle(self, exchange: Exchange, ticket: Ticket) -> None:
        usage = exchange.usage
        output = usage.output_tokens
        if output is None and exchange.streams and (exchange.started or _has_left(exchange)):
            output = exchange.events
        await ticket.finished(
            # Who leaves before any engine was asked has cost nothing.
            outcome=exchange.outcome if exchange.engine else Outcome.UNREACHABLE,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=output,
        )

    def _models(self, exchange: Exchange, setup: Setup) -> None:
        """Answer what is about models, refuse the rest of what is not served."""
        path, identity = exchange.path, _known(exchange)
        if path != _MODELS and not path.startswith(f"{_MODELS}/"):
            raise RefusedError(refusals.not_served(path))
        if exchange.scope["method"] != "GET":
            raise RefusedError(refusals.method_not_allowed("GET"))
        names = setup.fleet.routes.models_of(identity.tenant, identity.tier)
        cards = [
            {"id": name, "object": "model", "created": 0, "owned_by": "trimtab"} for name in names
        ]
        if path == _MODELS:
            raise _AnsweredError(json.dumps({"object": "list", "data": cards}).encode())
        wanted = path.removeprefix(f"{_MODELS}/")
        if wanted not in names:
            raise RefusedError(refusals.model_not_found(wanted))
        raise _AnsweredError(json.dumps(cards[names.index(wanted)]).encode())


class _AnsweredError(Exception):
    """The gateway answers by itself."""

    def __init__(self, body: bytes) -> None:
        super().__init__()
        self.body = body


def _describe(exchange: Exchange) -> None:
    """Show the description: it names no tenant, no model and no engine, so nobody needs a key."""
    if exchange.scope["method"] != "GET":
        raise RefusedError(refusals.method_not_allowed("GET"))
    raise _AnsweredError(openapi.CLIENTS)


def _identify(identifier: Identifier, headers: list[tuple[bytes, bytes]]) -> Identity:
    try:
        return identifier.identify(key=wire.api_key(headers))
    except UnknownKeyError:
        raise RefusedError(unknown_key()) from None


def _known(exchange: Exchange) -> Identity:
    assert exchange.identity is not None
    return exchange.identity


def _has_left(exchange: Exchange) -> bool:
    """Whether the client is gone: what of a stream it was not sent by then was never made."""
    return exchange.outcome is Outcome.CANCELLED


def _may_repeat(exchange: Exchange) -> bool:
    """Whether an engine may have begun with it without harm: nothing is kept of it there."""
    return exchange.path != "/v1/responses" or exchange.body.get("store") is False


def _no_engine(setup: Setup) -> Refusal:
    return refusals.no_engine(setup.settings.probes.every_s)


def _json_headers(body: bytes, *, close: bool) -> list[tuple[bytes, bytes]]:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    return [*headers, (b"connection", b"close")] if close else headers


def _waits_to_send(scope: Scope) -> bool:
    """Whether the client sends its body only when it is told to: reading would tell it."""
    return (wire.first(scope["headers"], b"expect") or b"").lower() == b"100-continue"


def _has_body(scope: Scope) -> bool:
    names = {name for name, _ in scope["headers"]}
    length = wire.first(scope["headers"], b"content-length")
    return b"transfer-encoding" in names or length not in (None, b"0")
