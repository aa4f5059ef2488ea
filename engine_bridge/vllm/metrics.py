"""An engine's telemetry as Prometheus metrics, which appear in vLLM's own /metrics.

vLLM's engine process serves no HTTP: with PROMETHEUS_MULTIPROC_DIR set, prometheus_client writes to
files there and vLLM's API server reads them. It measures nothing: the scheduler tells it.
Label sets are closed: tiers, pools, classes and outcomes of the plan, at most so many tenants as
the plan asks for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trimtab.engine_bridge.allocation import UNLIMITED, Allocation
from trimtab.engine_bridge.media import MEDIA_KINDS
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.engine_bridge.vllm.control_values import entry_names
from trimtab.engine_bridge.vllm.metric_families import (
    ALLOCATION_FIELDS,
    BATCH_BUCKETS,
    ENGINE_FIELDS,
    OUTCOMES,
    PROMISE,
    START_ID,
    STEP_BUCKETS_S,
    TIER_FIELDS,
    WAIT_BUCKETS_S,
    WISH,
    Families,
    Field,
    latency_buckets,
)
from trimtab.engine_bridge.vllm.metric_tenants import TopTenants

Put = Callable[[float], None]


class TierMetrics:
    """The metrics of one engine; every child is resolved at the start, so that a call is cheap."""

    def __init__(
        self,
        plan: Plan,
        registry: Any = None,
        *,
        engine: str = "0",
        start_id: int | None = None,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        """Register the metrics; the static plan shows until an interval is reported.

        Args:
            plan: Names of tiers, pools and classes, targets, and how many tenants to name.
            registry: A `prometheus_client.CollectorRegistry`; None: the process's own.
            engine: Label of every metric, the data-parallel rank as vLLM's own metrics have it.
            start_id: Number of this start, as the control socket says it; None: not shown.
            wall_s: Seconds since 1970.

        Raises:
            MetricsError: prometheus_client is missing, or its folder is.
        """
        self._plan, self._engine, self._wall_s = plan, engine, wall_s
        families = Families(registry)
        self._tiers = self._tier_puts(families)
        self._fields = [
            (spec.field, spec.scale, self._put(families, spec)()) for spec in ENGINE_FIELDS
        ]
        self._attained = self._by_tier(
            families.counter("attained", "Requests that met their targets.", ("tier",)), "inc"
        )
        self._knobs = self._knob_puts(families)
        self._scalars(families)
        if start_id is not None:
            shown = families.gauge(START_ID, "Number of this start of the engine, by chance.")
            self._child(shown).set(start_id)
        self._latencies(families)
        self._targets(families)
        most = plan.metrics.top_tenants
        self._top = TopTenants(families, plan, engine, most) if most else None
        self._applied: Allocation | None = None
        self._show(Allocation.static(plan))
        self.observe_lease(None)

    def observe_interval(self, telemetry: Telemetry) -> None:
        """Report one control interval: counts are added, levels and quantiles replaced."""
        for tier, puts, attained in zip(telemetry.tiers, self._tiers, self._attained, strict=True):
            for field, scale, put in puts:
                put(getattr(tier, field) * scale)
            if tier.has_attainment:
                attained(round(tier.attainment * tier.attainment_samples))
        for field, scale, put in self._fields:
            put(getattr(telemetry, field) * scale)
        self._reported(self._wall_s() - telemetry.age_s)
        self._show(telemetry.applied)

    def observe_finished(
        self,
        tier: int | str,
        ttft_s: float | None,
        tpot_s: float | None,
        e2e_s: float | None,
        queue_s: float | None,
        outcome: str,
    ) -> None:
        """Report one request at its end; None and NaN stand for "it never came to that".

        Args:
            tier: The plan's number or name of its tier.
            ttft_s: Time to first token, seconds.
            tpot_s: Time per output token after the first, seconds.
            e2e_s: Time from arrival to the end, seconds.
            queue_s: Time from arrival to the first admission, seconds.
            outcome: One of `OUTCOMES`; anything else counts as `other`.
        """
        number = tier if isinstance(tier, int) else self._plan.tier_names.index(tier)
        for observe, value in zip(
            self._latency_puts[number], (ttft_s, tpot_s, e2e_s, queue_s), strict=True
        ):
            if value is not None and value == value:
                observe(value)
        by_outcome = self._outcomes[number]
        by_outcome.get(outcome, by_outcome["other"])()

    def observe_step(self, step_s: float, batch: int) -> None:
        """Report one step: its time, seconds, and the requests in it."""
        self._step(step_s)
        self._batch(batch)

    def observe_encoded(self, counts: Sequence[int]) -> None:
        """Report what a step encoded: items and their tokens, by kind, as the step log has them."""
        for put, count in zip(self._encoded, counts, strict=True):
            if count:
                put(count)

    @property
    def top_tenants(self) -> int:
        """How many tenants the plan wants to see by name; 0: `observe_tenants` does nothing."""
        return self._plan.metrics.top_tenants

    def observe_tenants(self, service_ms: Mapping[tuple[int, str], float]) -> None:
        """Report the tenants' service of the last interval.

        Args:
            service_ms: Engine time by the plan's number of the tier and the tenant's name.
        """
        if self._top is not None:
            self._top.observe(service_ms)

    def observe_lease(self, left_s: float | None) -> None:
        """Report the lease: seconds left, None or infinity for the static plan."""
        leased = left_s is not None and math.isfinite(left_s)
        self._leased(1 if leased else 0)
        self._lease_left(left_s if left_s is not None and leased else math.nan)

    def _show(self, allocation: Allocation) -> None:
        if allocation is self._applied:
            return
        self._applied = allocation
        for knob, puts in self._knobs:
            value = getattr(allocation, knob)
            for put, entry in zip(
                puts, value if isinstance(value, tuple) else (value,), strict=True
            ):
                put(math.inf if entry == UNLIMITED else entry)
        self._version(allocation.version)

    def _child(self, family: Any, *labels: str) -> Any:
        return family.labels(self._engine, *labels)

    def _by_tier(self, family: Any, action: str) -> list[Put]:
        return [getattr(self._child(family, name), action) for name in self._plan.tier_names]

    def _put(self, families: Families, spec: Field, *labels: str) -> Callable[..., Put]:
        """What makes the put of a field's child, given the values of the labels."""
        make = families.gauge if spec.kind == "gauge" else families.counter
        family = make(spec.name, spec.help, labels)
        action = "set" if spec.kind == "gauge" else "inc"
        return lambda *values: getattr(self._child(family, *values), action)

    def _tier_puts(self, families: Families) -> list[list[tuple[str, float, Put]]]:
        makers = [(spec, self._put(families, spec, "tier")) for spec in TIER_FIELDS]
        return [
            [(spec.field, spec.scale, put_of(name)) for spec, put_of in makers]
            for name in self._plan.tier_names
        ]

    def _knob_puts(self, families: Families) -> list[tuple[str, list[Put]]]:
        found = []
        for knob, name, label, words in ALLOCATION_FIELDS:
            family = families.gauge(name, words, () if label is None else (label,))
            entries = entry_names(knob, self._plan)
            children = [self._child(family, e) for e in entries] or [self._child(family)]
            found.append((knob, [child.set for child in children]))
        return found

    def _scalars(self, families: Families) -> None:
        def gauge(name: str, words: str) -> Put:
            put: Put = self._child(families.gauge(name, words)).set
            return put

        self._version = gauge("allocation_version", "Version of the applied allocation.")
        self._leased = gauge("allocation_leased", "1: a controller's lease; 0: the static plan.")
        self._lease_left = gauge("lease_left_seconds", "Time to live of the lease; NaN: none.")
        self._reported = gauge(
            "telemetry_timestamp_seconds",
            "When the last interval's figures were true, since 1970; time() minus it is their age.",
        )
        plan = families.gauge("plan_info", "1 for the plan in use.", ("plan", "digest"))
        self._child(plan, self._plan.name, self._plan.digest[:16]).set(1)
        step = families.histogram("step_seconds", "Time of a step.", STEP_BUCKETS_S)
        batch = families.histogram("step_batch_requests", "Requests in a step.", BATCH_BUCKETS)
        self._step: Put = self._child(step).observe
        self._batch: Put = self._child(batch).observe
        items = families.counter("encoded_items", "Media items that were encoded.", ("kind",))
        tokens = families.counter("encoded_tokens", "Prompt tokens of those items.", ("kind",))
        self._encoded: list[Put] = [
            self._child(family, kind).inc for kind in MEDIA_KINDS for family in (items, tokens)
        ]

    def _targets(self, families: Families) -> None:
        """What the plan promises, so that alerts and dashboards need no copy of it."""
        attainment = families.gauge(
            "target_attainment_ratio",
            "Share of the tier's requests that must meet its targets, by the plan.",
            ("tier", "kind"),
        )
        seconds = families.gauge(
            "target_seconds", "The tier's latency targets, by the plan.", ("tier", "latency")
        )
        for name, tier in self._plan.tiers.items():
            targets = tier.targets
            kind = WISH if targets.best_effort else PROMISE
            self._child(attainment, name, kind).set(targets.attainment)
            for latency in ("ttft", "tpot", "e2e"):
                target_ms = getattr(targets, f"{latency}_ms")
                if target_ms is not None:
                    self._child(seconds, name, latency).set(target_ms * 1e-3)

    def _latencies(self, families: Families) -> None:
        plan, labels = self._plan, ("tier",)
        kinds = [
            families.histogram(name, words, buckets, labels)
            for name, words, buckets in (
                ("ttft_seconds", "Time to first token.", latency_buckets(plan, "ttft_ms")),
                ("tpot_seconds", "Time per output token.", latency_buckets(plan, "tpot_ms")),
                ("e2e_seconds", "Time from arrival to the end.", latency_buckets(plan, "e2e_ms")),
                ("queue_wait_seconds", "Time from arrival to admission.", WAIT_BUCKETS_S),
            )
        ]
        self._latency_puts: list[list[Put]] = [
            [self._child(kind, name).observe for kind in kinds] for name in plan.tier_names
        ]
        requests = families.counter("requests", "Requests by what became of them.",
                                    ("tier", "outcome"))  # fmt: skip
        self._outcomes: list[Mapping[str, Callable[[], None]]] = [
            {outcome: self._child(requests, name, outcome).inc for outcome in OUTCOMES}
            for name in plan.tier_names
        ]
