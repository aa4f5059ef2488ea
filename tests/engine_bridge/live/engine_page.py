"""An engine's real page of metrics, without the engine: a test says what it has done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import prometheus_client

from tests.engine_bridge.vllm.sample_telemetry import telemetry, tier
from trimtab.engine_bridge.live.scrape import parse
from trimtab.engine_bridge.live.snapshot import Snapshot
from trimtab.engine_bridge.plan import Plan, load_plan
from trimtab.engine_bridge.telemetry import TierTelemetry
from trimtab.engine_bridge.vllm.metrics import TierMetrics

PLAN = load_plan()
RAN_S = 1_700_000_000.0
"""Unix time of an engine's start."""


def served(number: int = 1, **fields: Any) -> TierTelemetry:
    """A tier in an interval in which so many requests came, and were served in time."""
    usual: dict[str, Any] = {
        "arrivals": number,
        "finished": number,
        "decode_tokens": 100 * number,
        "attainment": 1.0,
        "attainment_samples": number,
        "met_tokens": 300.0 * number,
        "service_ms": 12.5 * number,
    }
    return tier(**(usual | fields))


class EnginePage:
    """What `/metrics` of an engine shows; `restart` begins a new engine's, with counters at 0."""

    def __init__(
        self, plan: Plan = PLAN, *, rank: str = "0", start_id: float | None = None
    ) -> None:
        self.plan, self.rank, self.start_id = plan, rank, start_id
        self.time_s = 0.0
        self.unix_s = RAN_S
        self.restart()

    def restart(self) -> None:
        """The engine starts again; its folder of metrics was wiped."""
        self.registry = prometheus_client.CollectorRegistry()
        self.time_s = 0.0
        self._metrics = TierMetrics(
            self.plan,
            self.registry,
            engine=self.rank,
            start_id=self.start_id,
            wall_s=lambda: self.unix_s,
        )

    def interval(self, *tiers: TierTelemetry, interval_s: float = 2.0, **fields: Any) -> None:
        """An interval ends; tiers that are left out served nothing."""
        self.time_s += interval_s
        self.unix_s += interval_s
        every = (*tiers, *[served(0, attainment=float("nan"))] * len(self.plan.tiers))
        told = telemetry(
            self.plan,
            *every[: len(self.plan.tiers)],
            **({"time_s": self.time_s, "interval_s": interval_s} | fields),
        )
        self._metrics.observe_interval(told)

    @property
    def text(self) -> bytes:
        """The page."""
        page: bytes = prometheus_client.generate_latest(self.registry)
        return page

    def snapshot(self) -> Snapshot:
        """What a scrape of it gives."""
        return parse(self.text, self.rank)


class Pages:
    """A source that gives a page as it is, or what a test puts in its place."""

    place = "the page"

    def __init__(self, page: EnginePage) -> None:
        self.page = page
        self.error: Exception | None = None
        self.delay_s = 0.0
        self.reads = 0

    def read(self) -> Snapshot:
        self.reads += 1
        if self.error is not None:
            raise self.error
        found = self.page.snapshot()
        return Snapshot(values=found.values, delay_s=self.delay_s, names=found.names)

    def close(self) -> None:
        """Nothing."""


@contextmanager
def over_http(pages: Sequence[EnginePage]) -> Iterator[list[str]]:
    """Real HTTP servers of pages; their `host:port`."""
    servers = [
        prometheus_client.start_http_server(0, "127.0.0.1", page.registry)[0] for page in pages
    ]
    try:
        yield [f"127.0.0.1:{server.server_port}" for server in servers]
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
