"""What the cases share: the engine that they name, traces from rows, and runs of the replay.

The workloads themselves are in the tests, each beside the figures that it must show.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.engine_spec import EngineSpec, get_engine_spec
from trimtab.engine_bridge.plan import Plan, load_plan
from trimtab.engine_bridge.replay.engine import ReplayEngine, RuleSet
from trimtab.engine_bridge.replay.report import ReplayResult
from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.engine_bridge.trace import Trace

TIERS = ("T0", "T1", "T2", "T3")
T0, T1, T2, T3 = range(4)
FINISHED, REFUSED, SHED, CANCELLED = 1, 2, 3, 4
BLOCK_TOKENS = 16

Floats = npt.NDArray[np.float64]
Columns = Mapping[str, Any]


class Served(Protocol):
    """What a case looks at after a run; the replay's result is one."""

    @property
    def requests(self) -> Columns:
        """By name, one value a request."""

    @property
    def end_s(self) -> float:
        """When the last step ended."""

    @property
    def engine_busy_s(self) -> float:
        """How long the engine was in steps."""


class Serve(Protocol):
    """Runs a trace to its end: `replay`, or the real engine in virtual time."""

    def __call__(self, trace: Trace, spec: EngineSpec, rules: RuleSet = "fair") -> Served:
        """Serve all requests of the trace."""


class Row(NamedTuple):
    """One request that arrives by the clock."""

    arrival_s: float
    tier: int
    prompt_tokens: int
    output_tokens: int
    tenant: int = 0
    cancel_after_s: float = np.inf


def engine_spec(**limits: Any) -> EngineSpec:
    """Llama-3.1-8B on one H100 with blocks of 16 tokens, 26,000 of them unless said."""
    limits.setdefault("num_gpu_blocks", 26_000)
    return get_engine_spec("h100:llama-3.1-8b-tp1").with_limits(**limits)


def trace_of(rows: Iterable[Row], *, tenant_names: tuple[str, ...] = ("one",)) -> Trace:
    """A trace of requests that arrive by the clock, in any order of rows."""
    ordered = sorted(rows, key=lambda row: row.arrival_s)
    columns = {name: np.array([getattr(row, name) for row in ordered]) for name in Row._fields}
    return Trace.build(**columns, tier_names=TIERS, tenant_names=tenant_names)


def replay(
    trace: Trace,
    spec: EngineSpec,
    rules: RuleSet = "fair",
    *,
    plan: Plan | None = None,
    interval_s: float = 1.0,
    until_s: float = 1e5,
) -> ReplayResult:
    """Run a trace to its end, or to `until_s`."""
    engine = ReplayEngine(trace, plan or load_plan(), spec, rules=rules)
    while not engine.finished and engine.due_s < until_s:
        engine.advance(min(interval_s, until_s - engine.due_s))
    return engine.result()


def one_step(engine: ReplayEngine) -> Telemetry:
    """Run the engine to the end of the step that runs next; telemetry without one if it idles."""
    return engine.advance(engine.now_s - engine.due_s + 1e-9)


def steps_of(engine: ReplayEngine, trace: Trace, until_s: float) -> Iterator[Telemetry]:
    """Run the engine one step at a time; telemetry of each step, none of idle pauses."""
    while not engine.finished and engine.now_s < until_s:
        telemetry = one_step(engine)
        if telemetry.steps:
            yield telemetry
            continue
        later = trace.arrival_s[trace.arrival_s > engine.now_s]
        engine.advance(float(later[0]) - engine.due_s if len(later) else 1e-3)


def ttft_s(q: Columns) -> Floats:
    """Time to first token of each request, seconds; NaN without one."""
    wait: Floats = q["first_token_s"] - q["arrival_s"]
    return wait


def tpot_s(q: Columns) -> Floats:
    """Mean time per output token after the first, seconds."""
    each: Floats = (q["last_token_s"] - q["first_token_s"]) / np.maximum(1, q["output_tokens"] - 1)
    return each
