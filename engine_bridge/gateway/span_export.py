"""Sends spans of followed requests to a collector, over OTLP/HTTP, from a thread of its own.

Nothing waits for the collector: what it does not take in time is counted and dropped. What is
noted of a request is `tracing`'s business. This module alone imports OpenTelemetry.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from trimtab.engine_bridge.gateway.settings import TraceSettings
from trimtab.engine_bridge.gateway.tracing import ATTEMPT, Child, FinishedRequest

_LOG: Final = logging.getLogger("trimtab.gateway")
_THEIR_LOG: Final = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
MOST_QUEUED: Final = 2048
"""Requests that wait for the collector at most; of more the spans are dropped."""
BATCH: Final = 64
"""Requests sent at once: few, because whoever encodes them keeps the event loop waiting."""
EVERY_S: Final = 5.0
"""Longest time that a request waits for others, seconds."""
LAST_S: Final = 3.0
"""So long the last ones may take when the gateway stops, seconds."""
_SCOPE: Final = InstrumentationScope("trimtab.gateway")
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_UNSET: Final = Status(StatusCode.UNSET)
_FAILED: Final = Status(StatusCode.ERROR)


class Exporter(Protocol):
    """What this module needs of OpenTelemetry's exporters."""

    def export(self, spans: Any, /) -> SpanExportResult:
        """Send spans; it may take long, and does not raise."""

    def shutdown(self) -> None:
        """Give up what is under way."""


class SpanExport:
    """Spans of one gateway on their way out."""

    def __init__(self, exporter: Exporter, resource: Resource) -> None:
        """Begin with nothing; `start` starts the thread.

        Args:
            exporter: Sends them.
            resource: What they say of the gateway as a whole.
        """
        self._exporter, self._resource = exporter, resource
        self._queue: deque[FinishedRequest] = deque()
        self._wake, self._stopping = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="trimtab-spans", daemon=True)
        self._refused = _FirstOfMany()
        logging.getLogger(_THEIR_LOG).addFilter(self._refused)
        self._exported = self._overflowed = self._failed = 0

    @classmethod
    def of(cls, settings: TraceSettings, headers: Mapping[str, str]) -> SpanExport:
        """For the collector that the settings name; `headers` go with all that is sent."""
        exporter = OTLPSpanExporter(
            endpoint=settings.traces_url, headers=dict(headers), timeout=settings.time_out_s
        )
        return cls(exporter, Resource.create({"service.name": settings.service_name}))

    def counts(self) -> Mapping[str, int]:
        """Spans since the start, by what became of them."""
        return {
            "exported": self._exported,
            "queue_full": self._overflowed,
            "failed": self._failed,
        }

    def start(self) -> None:
        """Send from now on."""
        self._thread.start()

    def keep(self, request: FinishedRequest) -> None:
        """Take a request; it returns at once."""
        queue = self._queue
        if len(queue) >= MOST_QUEUED:
            self._overflowed += request.number
            return
        queue.append(request)
        if len(queue) == BATCH:
            self._wake.set()

    def send_some(self) -> bool:
        """Send the oldest ones that wait; False: none did."""
        queue = self._queue
        taken = [queue.popleft() for _ in range(min(BATCH, len(queue)))]
        if not taken:
            return False
        made = [span for request in taken for span in spans(request, self._resource)]
        try:
            took = self._exporter.export(made) is SpanExportResult.SUCCESS
        except Exception:
            # The next ones are sent all the same.
            _LOG.exception("traces: the exporter failed")
            took = False
        if took:
            self._exported += len(made)
            if self._refused.reset():
                _LOG.info("traces: the collector takes spans again")
        else:
            self._failed += len(made)
        return True

    def close(self) -> None:
        """Send what is left, for a few seconds; it blocks."""
        self._stopping = True
        self._wake.set()
        self._thread.join(LAST_S)
        self._exporter.shutdown()
        self._failed += sum(request.number for request in list(self._queue))
        self._queue.clear()
        logging.getLogger(_THEIR_LOG).removeFilter(self._refused)

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(EVERY_S)
            self._wake.clear()
            while self.send_some():
                pass
        while self.send_some():
            pass


class _FirstOfMany(logging.Filter):
    """Lets one line through of a collector that is away, not one every few seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._told = False

    def filter(self, record: logging.LogRecord) -> bool:
        if self._told or record.levelno < logging.ERROR:
            return False
        self._told = True
        return True

    def reset(self) -> bool:
        """All is well; True: it has not been."""
        told, self._told = self._told, False
        return told


def spans(request: FinishedRequest, resource: Resource) -> Iterator[ReadableSpan]:
    """The spans of a request: its own, and those of its parts.

    Names are those of OpenTelemetry's conventions for HTTP and for generative AI; what these do
    not know begins with `trimtab.`.
    """
    own = _context(request.trace_id, request.span_id)
    above = request.parent_id and _context(request.trace_id, request.parent_id, is_remote=True)
    link = request.link
    yield ReadableSpan(
        request.name,
        context=own,
        parent=above or None,
        resource=resource,
        attributes=request.attributes,
        links=() if link is None else (Link(_context(*link, is_remote=True)),),
        kind=SpanKind.SERVER,
        status=_FAILED if request.failed else _UNSET,
        start_time=request.began_ns,
        end_time=request.ended_ns,
        instrumentation_scope=_SCOPE,
    )
    attempts = 0
    for child in request.children:
        attributes: dict[str, Any] = {}
        name = child.name
        if name == ATTEMPT:
            name = f"{request.operation} {request.model}"
            attributes = _attempt(child, request, attempts)
            attempts += 1
        if child.fault:
            attributes["error.type"] = child.fault
        yield ReadableSpan(
            name,
            context=_context(request.trace_id, child.span_id),
            parent=own,
            resource=resource,
            attributes=attributes,
            events=_events(child),
            kind=SpanKind.CLIENT if child.engine else SpanKind.INTERNAL,
            status=_FAILED if _failed(child) else _UNSET,
            start_time=child.began_ns,
            end_time=child.ended_ns,
            instrumentation_scope=_SCOPE,
        )


def _attempt(child: Child, request: FinishedRequest, before: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "trimtab.engine": child.engine,
        "gen_ai.operation.name": request.operation,
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": request.model,
    }
    if child.status:
        found["http.response.status_code"] = child.status
        if child.status >= 400:
            found["error.type"] = str(child.status)
    if before:
        found["http.request.resend_count"] = before
    return found


def _failed(child: Child) -> bool:
    """Whether a part is an error by the conventions: a refusal and a client's leaving are none."""
    return (
        bool(child.engine)
        and child.fault != "cancelled"
        and bool(child.fault or child.status >= 400)
    )


def _events(child: Child) -> tuple[Event, ...]:
    return (Event("first_token", timestamp=child.first_token_ns),) if child.first_token_ns else ()


def _context(trace_id: int, span_id: int, *, is_remote: bool = False) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote, _SAMPLED)
