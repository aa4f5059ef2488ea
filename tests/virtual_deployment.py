"""An engine in virtual time behind the interfaces that a controller sees: no sockets, no threads.

Its steps are the replay's, its allocation is held by the engine's real store, and what it reports
comes through the real tables of metrics. Links to it fail on demand. Who controls it, and when what
fails, is the test's business.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import prometheus_client

from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.engine_spec import EngineSpec, get_engine_spec
from trimtab.engine_bridge.live.scrape import parse
from trimtab.engine_bridge.live.snapshot import Snapshot, TelemetryUnavailableError, Unavailable
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.replay.engine import ReplayEngine
from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.engine_bridge.trace import Trace
from trimtab.engine_bridge.vllm.control_errors import (
    ControlRefusedError,
    ControlUnavailableError,
    ProposalError,
)
from trimtab.engine_bridge.vllm.control_protocol import KEY, PROTOCOL, Answers
from trimtab.engine_bridge.vllm.control_protocol import parse as parse_line
from trimtab.engine_bridge.vllm.control_store import AllocationStore
from trimtab.engine_bridge.vllm.control_values import entry_names
from trimtab.engine_bridge.vllm.metric_families import (
    ALLOCATION_FIELDS,
    ENGINE_FIELDS,
    TIER_FIELDS,
)
from trimtab.engine_bridge.vllm.metrics import TierMetrics

SPEC: Final = get_engine_spec("h100:llama-3.1-8b-tp1")
HANGS_S: Final = 1.0
"""What a link that hangs costs, virtual seconds: the client's time-out."""
START_UNIX_S: Final = 1.8e9
Observe = Callable[[Allocation, Allocation], None]


@dataclass
class VirtualClock:
    """Time that only moves when it is told to."""

    now_s: float = 0.0
    wall_off_s: float = 0.0
    """By how much the wall clock was set wrong, seconds."""

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_s(self) -> float:
        return START_UNIX_S + self.now_s + self.wall_off_s


class VirtualEngine:
    """One engine on a trace that begins anew when it is over."""

    def __init__(
        self,
        plan: Plan,
        trace: Trace,
        clock: VirtualClock,
        *,
        observe: Observe = lambda before, after: None,
        spec: EngineSpec = SPEC,
        page: bool = False,
    ) -> None:
        """Begin at the clock's time.

        Args:
            plan: The plan.
            trace: What arrives, again and again.
            clock: Virtual time.
            observe: Is told of every change of what holds: before and after.
            spec: Step times.
            page: Report by a real page of metrics, which takes more time than its figures.
        """
        self.plan, self.clock, self._trace, self._spec = plan, clock, trace, spec
        self._observe, self._page = observe, page
        self.static = Allocation.static(plan)
        self.restarts = -1
        self.restart()

    def restart(self) -> None:
        """Begin as a new process does: time 0, counters 0, the static plan."""
        self.restarts += 1
        self.store = AllocationStore(
            self.plan, capacity_max_num_seqs=self._spec.max_num_seqs, clock=self.clock.monotonic_s
        )
        self.answers = Answers(self.store)
        self.holds = self.store.allocation
        self.figures = _Page(self.plan, self.clock) if self._page else _Figures(self.plan)
        self._began_s = self.clock.now_s
        self._lap_s = 0.0
        self._replay = self._new_lap()

    @property
    def time_s(self) -> float:
        """Since its start, seconds."""
        return self.clock.now_s - self._began_s

    def look(self) -> None:
        """Tell the observer if something else holds than at the last look."""
        holds = self.store.allocation
        if holds is not self.holds:
            before, self.holds = self.holds, holds
            self._observe(before, holds)

    def step(self, length_s: float) -> None:
        """Work until the clock's time, which has moved by so many seconds, and report it."""
        self.look()
        self.store.take(self.clock.now_s)
        self.look()
        self._put(self.holds)
        done = self._replay.advance(length_s)
        told = replace(done, time_s=self.time_s, interval_s=length_s, applied=self.holds, age_s=0.0)
        self.figures.observe(told, self.clock.unix_s())
        if self._replay.finished:
            self._replay = self._new_lap()

    def _new_lap(self) -> ReplayEngine:
        return ReplayEngine(self._trace, self.plan, self._spec)

    def _put(self, wish: Allocation) -> None:
        # What was lawful in several proposals may be too far for one.
        for _ in range(64):
            if self._replay.allocation == wish:
                return
            self._replay.apply(wish, ttl_s=math.inf)


class _Figures:
    """The figures of a page of metrics, without the page."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._counters = {
            spec.name: dict.fromkeys(plan.tier_names, 0.0)
            for spec in TIER_FIELDS
            if spec.kind == "counter"
        } | {"attained": dict.fromkeys(plan.tier_names, 0.0), "steps": {"": 0.0}}
        self._last: Telemetry | None = None
        self._unix_s = 0.0

    def observe(self, told: Telemetry, unix_s: float) -> None:
        for name, tier in zip(self._plan.tier_names, told.tiers, strict=True):
            for spec in TIER_FIELDS:
                if spec.kind == "counter":
                    self._counters[spec.name][name] += getattr(tier, spec.field) * spec.scale
            if tier.has_attainment:
                met = round(tier.attainment * tier.attainment_samples)
                self._counters["attained"][name] += met
        self._counters["steps"][""] += told.steps
        self._last, self._unix_s = told, unix_s

    def snapshot(self) -> Snapshot:
        values = {f"{name}_total": dict(entries) for name, entries in self._counters.items()}
        told = self._last
        if told is None:
            return Snapshot(values=values, delay_s=0.0)
        for spec in TIER_FIELDS:
            if spec.kind == "gauge":
                pairs = zip(self._plan.tier_names, told.tiers, strict=True)
                values[spec.name] = {n: getattr(t, spec.field) * spec.scale for n, t in pairs}
        for spec in ENGINE_FIELDS:
            if spec.kind == "gauge":
                values[spec.name] = {"": getattr(told, spec.field) * spec.scale}
        for knob, name, _, _ in ALLOCATION_FIELDS:
            value = getattr(told.applied, knob)
            entries = entry_names(knob, self._plan) or ("",)
            knobs = value if isinstance(value, tuple) else (value,)
            values[name] = dict(zip(entries, map(float, knobs), strict=True))
        values["allocation_version"] = {"": float(told.applied.version)}
        values["telemetry_timestamp_seconds"] = {"": self._unix_s}
        return Snapshot(values=values, delay_s=0.0, names=frozenset(values))


class _Page:
    """A real page of metrics."""

    def __init__(self, plan: Plan, clock: VirtualClock) -> None:
        self._registry = prometheus_client.CollectorRegistry()
        self._metrics = TierMetrics(plan, self._registry, wall_s=clock.unix_s)

    def observe(self, told: Telemetry, unix_s: float) -> None:
        self._metrics.observe_interval(told)

    def snapshot(self) -> Snapshot:
        return parse(prometheus_client.generate_latest(self._registry), "0")


@dataclass
class Page:
    """Reads the engine's figures; a `MetricSource` that fails as it is told."""

    engine: VirtualEngine
    fault: Unavailable | None = None
    spoil: Callable[[dict[str, dict[str, float]]], None] | None = None
    """Changes the figures before they are given."""
    frozen: bool = False
    """Give the same figures again and again."""
    delay_s: float = 0.0
    place: str = "the virtual page"
    _kept: Snapshot | None = field(default=None, repr=False)

    def read(self) -> Snapshot:
        if self.fault is not None:
            if self.fault is Unavailable.TIMEOUT:
                self.engine.clock.now_s += HANGS_S
            raise TelemetryUnavailableError(self.fault, f"{self.place}: {self.fault}")
        if not self.frozen or self._kept is None:
            self._kept = self.engine.figures.snapshot()
        values = {name: dict(entries) for name, entries in self._kept.values.items()}
        if self.spoil is not None:
            self.spoil(values)
        return replace(self._kept, values=values, delay_s=self.delay_s)

    def close(self) -> None:
        pass


class Port:
    """Speaks to the engine's store in the protocol's own lines; a `ControlPort`."""

    def __init__(self, engine: VirtualEngine) -> None:
        self._engine = engine
        self.fault = ""
        """`down`, `hung`, `garbage`, `refused`, or `unheard`: carried out, but not answered."""
        self.set_s = -math.inf
        """When a `set` was carried out last, virtual seconds."""
        self.stall_s = 0.0
        """The next `set` is sent so much later, as by a process that was stopped, seconds."""
        self.found_free_s = -math.inf
        """When a `set` found last that nobody held the engine, virtual seconds."""

    def get(self) -> Mapping[str, Any]:
        return self._ask({"op": "get"})

    def set(
        self,
        values: Mapping[str, object],
        *,
        holder: str,
        ttl_s: float | None = None,
        expected_version: int | None = None,
    ) -> Mapping[str, Any]:
        self._engine.clock.now_s += self.stall_s
        self.stall_s = 0.0
        owner = self._engine.store.describe().holder
        # A lease that has ended and what is set after it are two changes.
        self._engine.look()
        if owner is None:
            self.found_free_s = self._engine.clock.now_s
        return self._ask({"op": "set", "values": values, "holder": holder, "ttl_s": ttl_s})

    def release(self, holder: str) -> Mapping[str, Any]:
        return self._ask({"op": "release", "holder": holder})

    def health(self) -> Mapping[str, Any]:
        return self._ask({"op": "health"})

    def close(self) -> None:
        pass

    def _ask(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.fault in ("down", "hung"):
            self._engine.clock.now_s += HANGS_S if self.fault == "hung" else 0.0
            raise ControlUnavailableError(f"control: {self.fault}")
        if self.fault == "garbage":
            return {"ok": True, "allocation": {"weights": "many"}, "version": None}
        if self.fault == "refused":
            raise ControlRefusedError("bad_request", "control: not today")
        line = json.dumps({KEY: PROTOCOL, **{k: v for k, v in request.items() if v is not None}})
        try:
            answer = self._engine.answers.answer(parse_line(line.encode()))
            if request["op"] == "set":
                self.set_s = self._engine.clock.now_s
        except ProposalError as error:
            raise ControlRefusedError(error.code, str(error)) from None
        finally:
            self._engine.look()
        if self.fault == "unheard":
            self._engine.clock.now_s += HANGS_S
            raise ControlUnavailableError("control: no answer within 1 s")
        return dict(json.loads(json.dumps(answer)))
