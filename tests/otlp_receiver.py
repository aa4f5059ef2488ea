"""A collector for tests: takes OTLP over HTTP on a real socket and keeps what it was sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Span:
    """One span as it was sent."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: str
    """SERVER, CLIENT or INTERNAL."""
    failed: bool
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    events: dict[str, int]
    links: list[tuple[str, str]]


@dataclass
class Receiver:
    """What has come."""

    url: str
    spans: list[Span] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    status: int = 200
    """What it answers."""
    goes_on: threading.Event = field(default_factory=threading.Event)
    """Cleared: it takes what comes and does not answer."""

    def named(self, name: str) -> list[Span]:
        """The spans of a name."""
        return [span for span in self.spans if span.name == name]

    def below(self, parent: Span) -> list[Span]:
        """The spans right below one, in the order of their beginning."""
        found = [one for one in self.spans if one.parent_id == parent.span_id]
        assert all(one.trace_id == parent.trace_id for one in found)
        return sorted(found, key=lambda one: one.began_ns)


@contextmanager
def otlp_receiver() -> Iterator[Receiver]:
    """A collector that listens."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.goes_on.wait()
            if receiver.status == 200:
                receiver.headers.append({k.lower(): v for k, v in self.headers.items()})
                receiver.spans.extend(_spans(body))
            self.send_response(receiver.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    receiver = Receiver(f"http://127.0.0.1:{server.server_address[1]}")
    receiver.goes_on.set()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield receiver
    finally:
        receiver.goes_on.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _spans(body: bytes) -> Iterator[Span]:
    request = ExportTraceServiceRequest.FromString(body)
    for of_resource in request.resource_spans:
        service = _attributes(of_resource.resource.attributes).get("service.name", "")
        for of_scope in of_resource.scope_spans:
            for one in of_scope.spans:
                yield Span(
                    name=one.name,
                    service=str(service),
                    trace_id=one.trace_id.hex(),
                    span_id=one.span_id.hex(),
                    parent_id=one.parent_span_id.hex(),
                    kind=type(one).SpanKind.Name(one.kind).removeprefix("SPAN_KIND_"),
                    failed=one.status.code == 2,
                    began_ns=one.start_time_unix_nano,
                    ended_ns=one.end_time_unix_nano,
                    attributes=_attributes(one.attributes),
                    events={event.name: event.time_unix_nano for event in one.events},
                    links=[(link.trace_id.hex(), link.span_id.hex()) for link in one.links],
                )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
