"""The daemon's own metrics for Prometheus, made from the loops' states whenever somebody scrapes.

What the engine's tiers get is in the engine's own metrics (docs/metrics.md) and not repeated here.
Label sets are closed: engines of the settings, and every contact, mode and reason from the start.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from trimtab.agents.verdict import GuardMode, GuardReason
from trimtab.controller.daemon.state import Contact, LoopState
from trimtab.controller.web.view import age_now_s

PREFIX: Final = "trimtab_controller_"
ENGINE: Final = "engine"
"""Label of every metric but `build_info`: the engine's name in the settings. (In the engine's own
metrics it is the data-parallel rank.)"""
TICK_BUCKETS_S: Final = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip
"""Bucket bounds of a tick's time, seconds."""

_Value = Callable[[LoopState, float], float]


@dataclass(frozen=True)
class Metric:
    """One number an engine."""

    name: str
    """Without `trimtab_controller_`; a counter's without `_total`."""
    kind: Literal["gauge", "counter"]
    help: str
    value: _Value
    """From the state and the time now, seconds since 1970."""


def _exposure(state: LoopState, now_unix_s: float) -> float:
    return state.history[-1].exposure if state.history else 0.0


def _fallen_back(state: LoopState, now_unix_s: float) -> float:
    return bool(state.history and state.history[-1].fell_back)


def _last_tick(state: LoopState, now_unix_s: float) -> float:
    return state.history[-1].unix_s if state.history else 0.0


METRICS: Final = (
    Metric("ticks", "counter", "Ticks of the loop.", lambda s, _: s.ticks),
    Metric("late_ticks", "counter",
           "Ticks that began more than half an interval late, or were left out.",
           lambda s, _: s.late_ticks),
    Metric("last_tick_timestamp_seconds", "gauge",
           "When the last tick was, seconds since 1970; 0 before the first.", _last_tick),
    Metric("interval_seconds", "gauge", "The plan's control interval.",
           lambda s, _: s.plan.controller.interval_s),
    Metric("telemetry_age_seconds", "gauge",
           "Age of the telemetry now; +Inf without any. It grows when the loop hangs, too.",
           age_now_s),
    Metric("lease_left_seconds", "gauge",
           "Time after the last tick until the engine returns to its static plan by itself; "
           "0 without a lease.", lambda s, _: s.lease_left_s),
    Metric("exposure_ratio", "gauge",
           "Part of the policy's residual that is asked for, in [0, 1].", _exposure),
    Metric("fallen_back", "gauge",
           "1 while a reason, and not the mode, makes it the static plan.", _fallen_back),
    Metric("latched", "gauge",
           "1 while only an operator's release lets the policy act again.",
           lambda s, _: s.latched),
    Metric("judged_intervals", "counter", "Verdicts of the guard.", lambda s, _: s.tally.intervals),
    Metric("fell_back_intervals", "counter",
           "Verdicts that fell back to the static plan, cool-downs included.",
           lambda s, _: s.tally.fell_back),
    Metric("trips", "counter", "Times that the policy was sent into a cool-down.",
           lambda s, _: s.tally.trips),
    Metric("audit_lost", "counter", "Entries that the audit log could not keep.",
           lambda s, _: s.audit_lost),
    Metric("faults", "counter", "Ticks that failed by a fault of Trimtab itself.",
           lambda s, _: s.faults),
    Metric("bundle_refused", "gauge",
           "1 while the newest bundle on disk is not the one in use, because it was refused.",
           lambda s, _: bool(s.bundle_error)),
)  # fmt: skip
"""One number an engine. Beside them, see `DaemonMetrics`: `contact{contact}`, `mode{mode}` (1 for
the one in force), `contact_ticks_total{contact}`, `guard_reasons_total{reason}`, the histogram
`tick_seconds`, `plan_info{plan,digest}`, `policy_info{policy,bundle}`, `build_info{version}`, and
the process's own `process_*`."""


@dataclass
class _Ticks:
    """What is added up over an engine's ticks, because no state says it."""

    seen: int = 0
    """Number of the last tick that is in here."""
    buckets: list[int] = field(default_factory=lambda: [0] * (len(TICK_BUCKETS_S) + 1))
    sum_s: float = 0.0
    contacts: dict[Contact, int] = field(default_factory=lambda: dict.fromkeys(Contact, 0))

    def add(self, state: LoopState) -> None:
        """Add the ticks that came since; what fell out of the history before is not in it."""
        newest = state.history[-1].number if state.history else 0
        if newest < self.seen:
            self.seen = 0  # a loop in the place of another one counts from 1 again
        new = itertools.takewhile(lambda d: d.number > self.seen, reversed(state.history))
        for decision in new:
            tick_s = decision.tick_ms / 1e3
            self.buckets[bisect.bisect_left(TICK_BUCKETS_S, tick_s)] += 1
            self.sum_s += tick_s
            self.contacts[decision.contact] += 1
        self.seen = newest


class DaemonMetrics:
    """All metrics of the daemon, in a registry of their own.

    Nothing is stored by label but what `_Ticks` adds up, so that a policy or bundle of yesterday
    shows nowhere. Whoever scrapes must do so more often than a history is long (half an hour at
    two seconds) for `tick_seconds` and `contact_ticks_total` to have every tick.
    """

    def __init__(
        self,
        states: Callable[[], Mapping[str, LoopState]],
        now_unix_s: Callable[[], float],
        *,
        version: str,
    ) -> None:
        """Register the metrics.

        Args:
            states: The loops' newest states by engine.
            now_unix_s: Seconds since 1970.
            version: Trimtab's, for `build_info`.
        """
        self._states, self._now_unix_s, self._version = states, now_unix_s, version
        self._ticks: dict[str, _Ticks] = {}
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def scrape(self, accept: str = "") -> tuple[bytes, str]:
        """All metrics now.

        Args:
            accept: The request's `Accept` header: OpenMetrics or Prometheus' text form.

        Returns:
            The text and its content type.
        """
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def collect(self) -> Iterator[Any]:
        """What prometheus_client asks of a collector: every family with its samples."""
        states, now_unix_s = self._states(), self._now_unix_s()
        for metric in METRICS:
            make = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
            family = make(PREFIX + metric.name, metric.help, labels=(ENGINE,))
            for engine, state in states.items():
                family.add_metric((engine,), float(metric.value(state, now_unix_s)))
            yield family
        yield from self._sets(states)
        yield from self._added_up(states)
        yield from self._infos(states)

    def _sets(self, states: Mapping[str, LoopState]) -> Iterator[Any]:
        """What is one of a closed set."""
        contact = _gauge("contact", "1 for how the loop stands with its engine.", "contact")
        mode = _gauge("mode", "1 for the guard's mode in force.", "mode")
        reasons = _counter("guard_reasons", "Verdicts of the guard by reason.", "reason")
        for engine, state in states.items():
            _one_of(contact, engine, Contact, state.contact)
            _one_of(mode, engine, GuardMode, state.mode)
            for reason in GuardReason:
                reasons.add_metric((engine, reason.value), state.tally.reasons.get(reason, 0))
        yield from (contact, mode, reasons)

    def _added_up(self, states: Mapping[str, LoopState]) -> Iterator[Any]:
        seconds = HistogramMetricFamily(
            f"{PREFIX}tick_seconds", "How long a tick took.", labels=(ENGINE,)
        )
        contacts = _counter(
            "contact_ticks", "Ticks by how the loop stood with its engine.", "contact"
        )
        for engine, state in states.items():
            ticks = self._ticks.setdefault(engine, _Ticks())
            ticks.add(state)
            bounds = [*(str(bound) for bound in TICK_BUCKETS_S), "+Inf"]
            counts = itertools.accumulate(ticks.buckets)
            seconds.add_metric(
                (engine,), list(zip(bounds, counts, strict=True)), sum_value=ticks.sum_s
            )
            for which, count in ticks.contacts.items():
                contacts.add_metric((engine, which.value), count)
        yield from (seconds, contacts)

    def _infos(self, states: Mapping[str, LoopState]) -> Iterator[Any]:
        plan = _gauge("plan_info", "The plan that the loop keeps to.", "plan", "digest")
        policy = _gauge("policy_info", "The policy in charge.", "policy", "bundle")
        for engine, state in states.items():
            plan.add_metric((engine, state.plan.name, state.plan.digest), 1)
            policy.add_metric((engine, state.policy, state.bundle_digest or ""), 1)
        build = GaugeMetricFamily(f"{PREFIX}build_info", "Trimtab's version.", labels=("version",))
        build.add_metric((self._version,), 1)
        yield from (plan, policy, build)


def _gauge(name: str, words: str, *labels: str) -> Any:
    return GaugeMetricFamily(PREFIX + name, words, labels=(ENGINE, *labels))


def _counter(name: str, words: str, *labels: str) -> Any:
    return CounterMetricFamily(PREFIX + name, words, labels=(ENGINE, *labels))


def _one_of(family: Any, engine: str, members: Iterable[Any], now: object) -> None:
    for member in members:
        family.add_metric((engine, member.value), member is now)
