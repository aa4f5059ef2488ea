"""Follows a request through the gateway for OpenTelemetry: what began and ended when.

Here times and ids are noted, on the event loop; `span_export` makes spans of them in a thread of
its own. Nothing a client has written is noted, but the ids in its `traceparent`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from trimtab.engine_bridge.admission.outcome import Outcome
from trimtab.engine_bridge.gateway.settings import TraceSettings
from trimtab.engine_bridge.gateway.span_attributes import (
    OPERATIONS,
    broken_by,
    request_attributes,
    request_name,
)
from trimtab.engine_bridge.gateway.trace_context import CONTEXT, SAMPLED, client_context

if TYPE_CHECKING:
    from trimtab.engine_bridge.gateway.exchange import Exchange, Scope

ADMISSION: Final = "admission"
WAIT: Final = "wait"
ATTEMPT: Final = "attempt"
HASH_DIGITS: Final = 16
"""So much of a tenant's hash is said."""


@dataclass(slots=True)
class Child:
    """A part of a request: admission, a wait, or an attempt at an engine."""

    name: str
    span_id: int
    began_ns: int
    engine: str = ""
    """Of an attempt. Like `status` and `first_token_ns`."""
    ended_ns: int = 0
    fault: str = ""
    """What went wrong; empty: nothing."""
    status: int = 0
    """HTTP status of the engine's answer; 0: none came."""
    first_token_ns: int = 0


@dataclass(slots=True)
class FinishedRequest:
    """All that spans are made of. Times are nanoseconds since 1970."""

    trace_id: int
    span_id: int
    parent_id: int
    """The client's span; 0: there is none above."""
    link: tuple[int, int] | None
    """Trace and span of the client, where they are no more than linked."""
    began_ns: int
    ended_ns: int
    name: str
    attributes: dict[str, Any]
    failed: bool
    operation: str
    model: str
    children: list[Child] = field(default_factory=list)

    @property
    def number(self) -> int:
        """Spans that come of it."""
        return 1 + len(self.children)


class Unfollowed:
    """A request of which nothing is noted."""

    def __init__(self, heads: bytes = b"") -> None:
        """Say which headers engines get of it: whole lines."""
        self.heads = heads

    def start(self, name: str, engine: str = "") -> None:
        """A part begins, and the one before ends."""

    def stop(self, fault: str = "") -> None:
        """The part under way ends."""

    def answered(self, status: int) -> None:
        """The engine's answer has begun."""

    def first_token(self) -> None:
        """The first token of a stream goes out."""


UNFOLLOWED: Final = Unfollowed()


class Followed(Unfollowed):
    """A request of which spans are made."""

    def __init__(
        self,
        tracer: Tracer,
        *,
        trace_id: int,
        parent_id: int,
        link: tuple[int, int] | None,
        state: bytes,
    ) -> None:
        """Begin now; `state` is the line of the header `tracestate`."""
        super().__init__()
        self._ns, self._random_id = tracer.monotonic_ns, tracer.random_id
        self.trace_id, self.parent_id, self.link, self._state = trace_id, parent_id, link, state
        self.span_id = self._random_id(64)
        self.began_ns = self._ns()
        self.offset_ns = tracer.wall_ns() - self.began_ns
        self.children: list[Child] = []

    def start(self, name: str, engine: str = "") -> None:
        """A part begins, and the one before ends; `heads` names it as the engine's parent."""
        self.stop()
        child = Child(name, self._random_id(64), self._ns(), engine)
        self.children.append(child)
        if engine:
            ids = (self.trace_id, child.span_id, SAMPLED)
            self.heads = b"traceparent: 00-%032x-%016x-%02x\r\n" % ids + self._state

    def stop(self, fault: str = "") -> None:
        """The part under way ends, if one is."""
        if self.children and not self.children[-1].ended_ns:
            self.children[-1].ended_ns = self._ns()
            self.children[-1].fault = fault

    def answered(self, status: int) -> None:
        """The engine's answer has begun."""
        self.children[-1].status = status

    def first_token(self) -> None:
        """The first token of a stream goes out."""
        self.children[-1].first_token_ns = self._ns()

    @property
    def first_token_s(self) -> float | None:
        """From the request's head to its first token, seconds; None: there is none."""
        first_ns = self.children[-1].first_token_ns if self.children else 0
        return (first_ns - self.began_ns) / 1e9 if first_ns else None

    def finish(self, exchange: Exchange, attributes: dict[str, Any]) -> FinishedRequest:
        """End it, and put its times on the clock on the wall."""
        self.stop(exchange.code or broken_by(exchange))
        for child in self.children:
            child.began_ns += self.offset_ns
            child.ended_ns += self.offset_ns
            child.first_token_ns += self.offset_ns if child.first_token_ns else 0
        return FinishedRequest(
            trace_id=self.trace_id,
            span_id=self.span_id,
            parent_id=self.parent_id,
            link=self.link,
            began_ns=self.began_ns + self.offset_ns,
            ended_ns=self._ns() + self.offset_ns,
            name=request_name(attributes),
            attributes=attributes,
            failed="error.type" in attributes and exchange.outcome != Outcome.CANCELLED,
            operation=OPERATIONS.get(exchange.path, ""),
            model=attributes.get("gen_ai.request.model", ""),
            children=self.children,
        )


class Tracer:
    """Decides which requests are followed, and hands them on once they have ended."""

    def __init__(
        self,
        settings: TraceSettings,
        keep: Callable[[FinishedRequest], None],
        *,
        generator: random.Random,
        monotonic_ns: Callable[[], int],
        wall_ns: Callable[[], int],
    ) -> None:
        """Begin.

        Args:
            settings: How many are followed, and what is said of them.
            keep: Takes a request that has ended; it must return at once.
            generator: Where ids come from, and the choice.
            monotonic_ns: Nanoseconds that only grow.
            wall_ns: Nanoseconds since 1970.
        """
        self._settings, self._keep, self._generator = settings, keep, generator
        self.monotonic_ns, self.wall_ns = monotonic_ns, wall_ns
        self._hashes: dict[str, str] = {}

    def begin(self, scope: Scope) -> Unfollowed:
        """Choose; the client's own context is taken out of the headers, which engines may get."""
        context = self._settings.client_context
        headers = scope["headers"]
        parent, state = None, b""
        if any(name == b"traceparent" or name == b"tracestate" for name, _ in headers):
            parent, state = client_context(headers)
            scope["headers"] = [one for one in headers if one[0] not in CONTEXT]
        if parent is None or context == "ignore":
            parent, state = None, b""
        joins = parent is not None and context == "parent"
        state = b"tracestate: %b\r\n" % state if state and joins else b""
        if parent is not None and joins:
            trace_id, parent_id, sampled = parent
        else:
            trace_id, parent_id = self.random_id(128), 0
            sampled = self._generator.random() < self._settings.sampled_fraction
        if not sampled:
            # The engine is told, or it would follow the request on its own.
            above = parent_id or self.random_id(64)
            return Unfollowed(b"traceparent: 00-%032x-%016x-00\r\n" % (trace_id, above) + state)
        link = None if parent is None or joins else parent[:2]
        return Followed(self, trace_id=trace_id, parent_id=parent_id, link=link, state=state)

    def end(self, exchange: Exchange) -> None:
        """A request has ended, however."""
        if isinstance(exchange.spans, Followed):
            attributes = request_attributes(exchange, exchange.spans.first_token_s)
            if exchange.identity is not None and self._settings.tenants != "none":
                attributes["trimtab.tenant"] = self._tenant(exchange.identity.tenant)
            self._keep(exchange.spans.finish(exchange, attributes))

    def random_id(self, bits: int) -> int:
        """An id: any number but 0."""
        return self._generator.getrandbits(bits) or 1

    def _tenant(self, tenant: str) -> str:
        if self._settings.tenants == "named":
            return tenant
        known = self._hashes.get(tenant)
        if known is None:
            digest = hashlib.sha256(tenant.encode()).hexdigest()
            known = self._hashes[tenant] = digest[:HASH_DIGITS]
        return known
