"""The gateway's metrics, on a registry of its own.

Label sets are closed: tiers come from the plan, engines from the settings, codes and outcomes from
the code. No tenant is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily

from trimtab.engine_bridge.gateway.exchange import Exchange
from trimtab.engine_bridge.gateway.fleet import Fleet
from trimtab.engine_bridge.gateway.health import HealthState

_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_PREFIX: Final = "trimtab_gateway"


class GatewayMetrics:
    """Counts what passes; meets `proxy.Watcher`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Make the metrics.

        Args:
            registry: Where they are shown.
        """
        self._registry = registry
        self._children: dict[tuple[object, ...], Any] = {}
        self._requests = Counter(
            f"{_PREFIX}_requests", "Requests that ended.", ["tier", "outcome"], registry=registry
        )
        self._refusals = Counter(
            f"{_PREFIX}_refusals", "Requests refused.", ["tier", "code"], registry=registry
        )
        self._tokens = Counter(
            f"{_PREFIX}_tokens", "Tokens, as the engines count.", ["tier", "kind"],
            registry=registry,
        )  # fmt: skip
        self._first = Histogram(
            f"{_PREFIX}_first_token_seconds", "From the request's head to its first token.",
            ["tier"], buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self._whole = Histogram(
            f"{_PREFIX}_request_seconds", "From the request's head to the answer's end.",
            ["tier"], buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self._retries = Counter(
            f"{_PREFIX}_retries", "Requests that an engine failed before its first byte.",
            ["engine", "fault"], registry=registry,
        )  # fmt: skip
        self._slices = Counter(
            f"{_PREFIX}_slices",
            "Prefixes of long prompts; failed: the rest went whole; missed: they were not found.",
            ["tier", "result"], registry=registry,
        )  # fmt: skip
        self._in_flight = Gauge(
            f"{_PREFIX}_in_flight", "Requests on an engine.", ["engine"], registry=registry
        )
        self._state = Gauge(
            f"{_PREFIX}_engine_state", "1 for the state that an engine is in.",
            ["engine", "state"], registry=registry,
        )  # fmt: skip
        self._ejections = Gauge(
            f"{_PREFIX}_engine_ejections", "How often an engine went out since the start.",
            ["engine"], registry=registry,
        )  # fmt: skip
        self._waiting = Gauge(
            f"{_PREFIX}_waiting", "Requests that wait for an engine.", ["tier"], registry=registry
        )
        self._open = Gauge(f"{_PREFIX}_open_requests", "Requests under way.", registry=registry)
        self._held = Gauge(f"{_PREFIX}_held_bytes", "Bodies in memory.", registry=registry)
        self._lost = Gauge(
            f"{_PREFIX}_lost_account_rows", "Accounts lost since the start.", registry=registry
        )

    def retried(self, engine: str, fault: str) -> None:
        """An engine failed before its first byte."""
        self._retries.labels(engine, fault).inc()

    def done(self, exchange: Exchange, now_s: float) -> None:
        """A request has ended."""
        tier, code, usage = exchange.tier, exchange.code, exchange.usage
        self._child(self._requests, tier, "refused" if code else exchange.outcome.value).inc()
        if exchange.sliced.engines:
            self._child(self._slices, tier, "read").inc(exchange.sliced.read)
            self._child(self._slices, tier, "failed").inc(exchange.sliced.failed)
            self._child(self._slices, tier, "missed").inc(exchange.sliced.missed)
        if code:
            self._child(self._refusals, tier, code).inc()
            return
        if usage.prompt_tokens:
            self._child(self._tokens, tier, "prompt").inc(usage.prompt_tokens)
            self._child(self._tokens, tier, "cached").inc(usage.cached_tokens)
        if usage.output_tokens:
            self._child(self._tokens, tier, "output").inc(usage.output_tokens)
        if exchange.first_token_s is not None:
            self._child(self._first, tier).observe(exchange.first_token_s - exchange.began_s)
            self._child(self._whole, tier).observe(now_s - exchange.began_s)

    def _child(self, metric: Any, *labels: str) -> Any:
        """`metric.labels(...)`, which takes longer than all that is done with it."""
        key = (metric, *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(*labels)
        return child

    def show_with(
        self,
        fleet: Callable[[], Fleet],
        *,
        waiting: Callable[[], Mapping[str, int]],
        open_requests: Callable[[], int],
        held_bytes: Callable[[], int],
        lost_rows: Callable[[], int],
    ) -> None:
        """Say where the gauges' values come from when somebody looks."""
        self._fleet, self._lengths = fleet, waiting
        self._open.set_function(open_requests)
        self._held.set_function(held_bytes)
        self._lost.set_function(lost_rows)

    def show_spans(self, counts: Callable[[], Mapping[str, int]]) -> None:
        """Say where the numbers of spans come from, by what became of them."""
        self._registry.register(_Spans(counts))

    def refresh(self) -> None:
        """Bring the engines' gauges up to date."""
        for gauge in (self._in_flight, self._state, self._ejections):
            gauge.clear()  # of engines that a reload has taken out
        for name, engine in self._fleet().engines.items():
            self._in_flight.labels(name).set(engine.in_flight)
            self._ejections.labels(name).set(engine.health.ejections)
            for state in HealthState:
                self._state.labels(name, state.value).set(engine.health.state is state)
        for tier, length in self._lengths().items():
            self._waiting.labels(tier).set(length)


class _Spans:
    """The spans that were sent and those that were dropped, for the registry."""

    def __init__(self, counts: Callable[[], Mapping[str, int]]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[CounterMetricFamily]:
        text = "Spans for traces, by what became of them."
        family = CounterMetricFamily(f"{_PREFIX}_spans", text, labels=["outcome"])
        for outcome, number in self._counts().items():
            family.add_metric([outcome], number)
        yield family
