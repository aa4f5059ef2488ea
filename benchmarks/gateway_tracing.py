"""What following requests for traces adds to the gateway's CPU time for a request.

    python benchmarks/gateway_tracing.py [--requests N] [--json F]

The gateway's door in one process, without sockets: an engine in memory answers at once, so that
what is left is the gateway's own work. Variants take turns: without the section `traces`, and with
shares of 0, 0.01 and 1 of the requests followed; the sending of spans to a collector in another
process counts, and so does the garbage they make. Each figure is the median over batches of the CPU
time of a request, and what is added is the median of the differences within a turn. `again` is
`without` once more: what it adds is noise. Answers are `whole`, of a kilobyte, and `stream`, of 100
events.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trimtab.engine_bridge.admission.core import Admission
from trimtab.engine_bridge.admission.redis_ledger import open_limiter
from trimtab.engine_bridge.admission.settings import AdmissionSettings
from trimtab.engine_bridge.gateway.exchange import Exchange
from trimtab.engine_bridge.gateway.fleet import Fleet
from trimtab.engine_bridge.gateway.proxy import Proxy
from trimtab.engine_bridge.gateway.settings import TraceSettings, settings_from
from trimtab.engine_bridge.gateway.span_export import SpanExport
from trimtab.engine_bridge.gateway.tracing import Tracer
from trimtab.engine_bridge.gateway.waiting import WaitingRoom
from trimtab.engine_bridge.plan import load_plan
from trimtab.engine_bridge.vllm.identity import Identifier, IdentitySettings

Message = MutableMapping[str, Any]
PATH = "/v1/chat/completions"
BATCHES = 15
EVENTS = 100
MANY = 2_000_000_000
LIMITS = {
    "requests_per_minute": MANY,
    "prompt_tokens_per_minute": MANY,
    "output_tokens_per_minute": MANY,
    "concurrent_requests": 1000,
}
TEXT = "The quick brown fox jumps over the lazy dog. " * 20
EVENT = b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'
LAST = b'data: {"choices":[],"usage":{"prompt_tokens":400,"completion_tokens":100}}\n\n'
WHOLE = json.dumps(
    {"choices": [{"message": {"content": "word " * 200}}], "usage": {"prompt_tokens": 400}}
).encode()
SHARES = {"share 0": 0.0, "share 0.01": 0.01, "share 1": 1.0}
COLLECTOR = """
import http.server
class Takes(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *args):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Takes)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


class InstantEngine:
    """Answers at once; in place of a `Client`."""

    host_header, prefix = b"engine", b""

    def __init__(self, *, stream: bool) -> None:
        """Say which answer it gives."""
        kind = b"text/event-stream" if stream else b"application/json"
        self._headers = [(b"content-type", kind)]
        last = LAST + b"data: [DONE]\n\n"
        self._pieces = [*[EVENT] * EVENTS, last] if stream else [WHOLE]

    async def send(self, head: bytes, body: bytes, *, repeatable: bool) -> Any:
        """The answer."""
        left = iter([*self._pieces, b""])

        async def read() -> bytes:
            return next(left)

        return SimpleNamespace(
            status=200, headers=self._headers, read=read, close=lambda: None,
            header=lambda name: self._headers[0][1],
        )  # fmt: skip


class Watcher:
    """Ends what is followed, as the gateway does."""

    def __init__(self, tracer: Tracer | None) -> None:
        """Say who follows requests."""
        self._tracer = tracer

    def retried(self, engine: str, fault: str) -> None:
        """Nothing is."""

    def done(self, exchange: Exchange, now_s: float) -> None:
        """A request has ended."""
        if self._tracer is not None:
            self._tracer.end(exchange)


class Variant:
    """A gateway's door, and what it took."""

    def __init__(self, share: float | None, collector: str, *, stream: bool) -> None:
        """Make it; `share` None: no tracing."""
        self.export: SpanExport | None = None
        tracer = None
        if share is not None:
            settings = TraceSettings(endpoint=collector, sampled_fraction=share)
            self.export = SpanExport.of(settings, {})
            tracer = Tracer(
                settings, self.export.keep, generator=random.Random(1),
                monotonic_ns=time.perf_counter_ns, wall_ns=time.time_ns,
            )  # fmt: skip
        plan, engines = load_plan(), {"a": {"url": "http://127.0.0.1:9", "models": ["m"]}}
        gateway = settings_from({"engines": engines}, where="benchmark")
        fleet = Fleet(gateway, plan, monotonic_s=time.monotonic)
        fleet.engines["a"].health.looked(True, time.monotonic())
        fleet.engines["a"].client = InstantEngine(stream=stream)  # type: ignore[assignment]
        rules = AdmissionSettings.model_validate({"tiers": {"T3": LIMITS}})
        limiter = open_limiter("memory://", time_out_s=1.0, monotonic_s=time.monotonic)
        setup = SimpleNamespace(
            settings=gateway,
            identifier=Identifier(IdentitySettings(), plan),
            fleet=fleet,
            admission=Admission(rules, plan, limiter=limiter, monotonic_s=time.monotonic),
        )
        room = WaitingRoom(1, monotonic_s=time.monotonic)
        self.proxy = Proxy(setup, room, Watcher(tracer), engine_key=None)
        self.proxy.tracer = tracer
        self.batches: list[float] = []

    async def batch(self, requests: int, *, stream: bool) -> float:
        """Microseconds of a request; all spans have been sent by its end."""
        body = {"model": "m", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 256}
        raw = json.dumps({**body, "stream": stream}).encode()
        message = {"type": "http.request", "body": raw, "more_body": False}
        headers = [
            (b"host", b"gateway"), (b"accept", b"*/*"), (b"user-agent", b"openai/1"),
            (b"authorization", b"Bearer sk-1"), (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(raw)),
        ]  # fmt: skip
        began_s = time.process_time()
        for _ in range(requests):
            asked = iter([message])
            gone = asyncio.Event()

            async def receive(asked: Iterator[Message] = asked, gone: Any = gone) -> Message:
                for one in asked:
                    return one
                await gone.wait()
                return {"type": "http.disconnect"}

            scope = {"type": "http", "method": "POST", "path": PATH, "headers": headers}
            await self.proxy(scope, receive, sent)
        while self.export is not None and self.export.send_some():
            pass
        return (time.process_time() - began_s) * 1e6 / requests


async def sent(message: Message) -> None:
    """Takes an answer and drops it."""


async def compare(collector: str, requests: int, *, stream: bool) -> dict[str, dict[str, float]]:
    """CPU time of a request by variant, and what each adds, microseconds."""
    shares: dict[str, float | None] = {"without": None, "again": None, **SHARES}
    variants = {name: Variant(share, collector, stream=stream) for name, share in shares.items()}
    for number in range(BATCHES + 1):
        for variant in variants.values():
            took_us = await variant.batch(requests, stream=stream)
            if number:  # the first ones warm up
                variant.batches.append(took_us)
    base = variants["without"].batches
    return {
        name: {
            "cpu_us": statistics.median(variant.batches),
            "added_us": statistics.median(
                one - other for one, other in zip(variant.batches, base, strict=True)
            ),
        }
        for name, variant in variants.items()
    }


@contextlib.contextmanager
def collector() -> Iterator[str]:
    """A collector in a process of its own, which takes all and keeps nothing."""
    command = [sys.executable, "-c", COLLECTOR]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=200, help="requests in a batch")
    parser.add_argument("--json", type=Path, help="write the figures here")
    given = parser.parse_args()
    found = {}
    with collector() as url:
        for kind in ("whole", "stream"):
            found[kind] = asyncio.run(compare(url, given.requests, stream=kind == "stream"))
    print(f"{'':8}{'':12}{'CPU':>9}{'added':>9}  us a request")
    for kind, rows in found.items():
        for name, row in rows.items():
            print(f"{kind:8}{name:12}{row['cpu_us']:9.1f}{row['added_us']:9.1f}")
    if given.json is not None:
        given.json.write_text(json.dumps({"schema": 1, "microseconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
