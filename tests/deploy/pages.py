"""The real pages that Prometheus scrapes: an engine's metrics and the controller's, by the parts
that make them, served over HTTP and moving with each scrape."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry, generate_latest

from tests.controller.web.states import state
from tests.engine_bridge.vllm.sample_telemetry import telemetry, tier
from trimtab.controller.web.metrics import DaemonMetrics
from trimtab.engine_bridge.plan import load_plan, with_values
from trimtab.engine_bridge.vllm.metrics import TierMetrics

PLAN = with_values(load_plan(), {"metrics.top_tenants": 2})


class Engine:
    """An engine's page."""

    def __init__(self) -> None:
        """Nothing is reported yet."""
        self._registry = CollectorRegistry()
        self._metrics = TierMetrics(PLAN, self._registry)
        self._turn = 0

    def page(self) -> str:
        """One more interval, some requests, and the page."""
        self._turn += 1
        busy = tier(
            arrivals=9, arrived_prompt_tokens=900, queue_length=3, queued_prefill_tokens=300,
            oldest_wait_s=0.5, running=4, kv_blocks_used=40, kv_blocks_guaranteed=50,
            kv_blocks_lent=1, prefill_tokens=800, decode_tokens=90, cached_tokens=100, finished=5,
            refused=1, attainment=1.0, attainment_samples=5, met_tokens=100.0, ttft_ms_p50=200.0,
            ttft_ms_p99=400.0, tpot_ms_p50=20.0, tpot_ms_p99=30.0, preemptions=1,
            recomputed_tokens=50, acceptance=0.7, vft_skew_flags=1, service_ms=100.0,
        )  # fmt: skip
        interval = telemetry(PLAN, *(busy for _ in PLAN.tiers), time_s=2.0 * self._turn)
        self._metrics.observe_interval(interval)
        self._metrics.observe_lease(9.0)
        self._metrics.observe_tenants({(0, "acme"): 80.0})
        self._metrics.observe_step(0.01, 4)
        for number in range(len(PLAN.tiers)):
            for outcome in ("finished", "shed"):
                self._metrics.observe_finished(number, 0.3, 0.02, 2.0, 0.1, outcome)
        return generate_latest(self._registry).decode()


class Controller:
    """The controller's page."""

    def __init__(self) -> None:
        """No tick yet."""
        self._turn = 0
        self._metrics = DaemonMetrics(self._states, time.time, version="0")

    def _states(self) -> dict[str, object]:
        ticked = state(last={"unix_s": time.time(), "number": 100 + self._turn})
        tally = replace(
            ticked.tally,
            intervals=100 + self._turn,
            fell_back=self._turn,
            reasons={reason: self._turn for reason in ticked.tally.reasons},
        )
        late = {"tally": tally, "ticks": 100 + self._turn, "late_ticks": self._turn}
        return {"a": replace(ticked, **late, audit_lost=self._turn)}

    def page(self) -> str:
        """One more tick, and the page."""
        self._turn += 1
        return self._metrics.scrape()[0].decode()


@contextmanager
def served(page: object) -> Iterator[int]:
    """A page on a port of its own."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = page.page().encode()  # type: ignore[attr-defined]
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *words: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
