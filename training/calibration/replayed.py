"""Replays measured requests under stock vLLM's rules and compares the latencies.

It adds to the replay what an engine process has around its steps: asynchronous scheduling, several
engines behind one address, the host's time for a prompt. It reads no files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize

from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan, load_plan
from trimtab.engine_bridge.replay.engine import ReplayEngine
from trimtab.engine_bridge.step_time import CoefArray
from trimtab.engine_bridge.trace import Trace
from trimtab.training.calibration.isolated import moved
from trimtab.training.calibration.measured import Measured
from trimtab.training.calibration.table import FloatArray

_PASSES: Final = 4
_PASSES_OF_MANY: Final = 2
_MANY: Final = 3000
_INTERVAL_S: Final = 60.0
_ONE_STEP_S: Final = 1e-9
_QUANTITIES: Final = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How the engine that served the requests was run."""

    spec: EngineSpec
    asynchronous: bool = False
    """Whether step k + 1 is scheduled while step k runs."""
    engines: int = 1
    """Engines that share the requests, in turn."""
    host_s: float = 0.0
    """Before the engine: from the measured arrival to the engine's queue."""
    reply_s: float = 0.0
    """After it: from the engine's token to the measured one."""
    from_queue: bool = False
    """Whether latencies start when the engine takes a request in, between two steps."""


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What the replay says of each request, seconds, shape (n,)."""

    ttft_s: FloatArray
    e2e_s: FloatArray
    tpot_s: FloatArray
    """NaN with one token."""
    preemptions: int
    steps: int


def trace_of(requests: Measured, prefixes: Sequence[Sequence[int]] = ()) -> Trace:
    """The requests as a trace.

    Args:
        requests: n requests in the order of their arrival.
        prefixes: ids of the full 16-token blocks of each prompt; empty: nothing is shared.
    """
    ids = [list(blocks) for blocks in prefixes] or [[] for _ in range(len(requests))]
    offsets = np.concatenate(([0], np.cumsum([len(blocks) for blocks in ids]))).astype(np.int64)
    flat = np.array([block for blocks in ids for block in blocks], np.int64)
    dense = np.unique(flat, return_inverse=True)[1].reshape(-1).astype(np.int32)
    return Trace.build(
        arrival_s=requests.start_s,
        prompt_tokens=requests.prompt_tokens,
        output_tokens=requests.output_tokens,
        prefix_offsets=offsets,
        prefix_ids=dense,
        prefix_block_tokens=np.full(len(requests), 16, np.int32),
    )


def predict(trace: Trace, setting: Setting) -> Predicted:
    """Replay a trace under first come, first served; latencies as the measured ones are defined."""
    n = len(trace)
    ttft, e2e, tpot = np.empty(n), np.empty(n), np.empty(n)
    preemptions = steps = 0
    for engine in range(setting.engines):
        rows = np.arange(engine, n, setting.engines)
        part = trace.take(rows)
        came, requests, count = _run(part, setting)
        first, last = requests["first_token_s"], requests["last_token_s"]
        later = np.maximum(part.output_tokens - 1, 1)
        ttft[rows] = first - came + setting.reply_s
        e2e[rows] = last - came + setting.reply_s
        tpot[rows] = np.where(part.output_tokens > 1, (last - first) / later, np.nan)
        preemptions += int(requests["preemptions"].sum())
        steps += count
    return Predicted(ttft_s=ttft, e2e_s=e2e, tpot_s=tpot, preemptions=preemptions, steps=steps)


def _run(trace: Trace, setting: Setting) -> tuple[FloatArray, dict[str, Any], int]:
    """When each request's latency starts, the requests' fate, and the steps."""
    arrival = trace.arrival_s + setting.host_s
    plan = _plan()
    if not setting.asynchronous:
        engine = _engine(trace, arrival, plan, setting.spec)
        came = trace.arrival_s
        if setting.from_queue:
            came = _taken_in(engine, arrival)[0]
        engine.run(interval_s=_INTERVAL_S)
        result = engine.result()
        return came, dict(result.requests), result.steps
    delivered = arrival
    for _ in range(_PASSES if len(trace) < _MANY else _PASSES_OF_MANY):
        engine = _engine(trace, delivered, plan, setting.spec)
        taken, busy = _taken_in(engine, arrival)
        # The step after the one that a request arrives in is scheduled already: it joins the next.
        delivered = np.maximum.accumulate(np.where(busy, taken + _ONE_STEP_S * 10, arrival))
    result = engine.result()
    return (taken if setting.from_queue else trace.arrival_s), dict(result.requests), result.steps


def _engine(trace: Trace, arrival: FloatArray, plan: Plan, spec: EngineSpec) -> ReplayEngine:
    return ReplayEngine(replace(trace, arrival_s=arrival), plan, spec, rules="fcfs")


def _taken_in(
    engine: ReplayEngine, arrival: FloatArray
) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """Run the engine to its end; each arrival's next step boundary, and whether a step was running.

    Args:
        engine: an engine at its start.
        arrival: times to look up, seconds, not falling.
    """
    starts, ends = [], []
    while not engine.finished:
        start_s = engine.now_s
        if engine.advance(start_s - engine.due_s + _ONE_STEP_S).steps:
            starts.append(start_s)
            ends.append(engine.now_s)
            continue
        # Idle: go to the next arrival at once.
        later = arrival[np.searchsorted(arrival, engine.now_s, side="right") :]
        next_s = float(later[0]) if len(later) else engine.now_s + 1.0
        engine.advance(max(next_s - engine.due_s, _ONE_STEP_S))
    begin, end = np.array(starts), np.array(ends)
    place = np.minimum(np.searchsorted(end, arrival, side="left"), len(end) - 1)
    busy = (begin[place] < arrival) & (arrival <= end[place])
    return np.where(busy, end[place], arrival), busy


_PLANS: list[Plan] = []


def _plan() -> Plan:
    if not _PLANS:
        _PLANS.append(load_plan(None))
    return _PLANS[0]


def comparison(
    requests: Measured,
    predicted: Predicted,
    rows: npt.NDArray[np.int64],
    *,
    means_only: bool = False,
) -> dict[str, dict[str, float]]:
    """Relative errors of the prediction over some requests, as fractions.

    Args:
        requests: what was measured.
        predicted: what the replay says of the same requests.
        rows: the requests to judge.
        means_only: the requests carry only the run's means.

    Returns:
        For `ttft`, `tpot` and `e2e`: `mean`, `p50` and `p99` are those of the prediction over the
        measured ones, less 1; `per_request` is the mean of the absolute relative errors;
        `measured_mean_s` the scale.
    """
    report = {}
    for name in _QUANTITIES:
        true = getattr(requests, f"{name}_s")[rows]
        told = getattr(predicted, f"{name}_s")[rows]
        good = np.isfinite(true) & np.isfinite(told) & (true > 0)
        if good.any():
            report[name] = _errors(told[good], true[good])
            if means_only:
                for statistic in ("p50", "p99", "per_request"):
                    del report[name][statistic]
    return report


def _errors(told: FloatArray, true: FloatArray) -> dict[str, float]:
    def over(statistic: Callable[[FloatArray], Any]) -> float:
        return float(statistic(told) / statistic(true) - 1.0)

    return {
        "requests": float(len(true)),
        "measured_mean_s": float(np.mean(true)),
        "mean": over(np.mean),
        "p50": over(np.median),
        "p99": over(lambda values: np.quantile(values, 0.99)),
        "per_request": float(np.mean(np.abs(told / true - 1.0))),
    }


def fit_replayed(
    base: CoefArray, runs: Sequence[tuple[Trace, Measured]], setting: Setting
) -> tuple[CoefArray, float]:
    """Move an engine to the level of lightly loaded runs, by replaying them.

    For data in which no request ran alone. Two factors, of a weight pass and of a token's
    multiplications, and the time that a client's first token takes outside the engine are found by
    simplex search on the medians of TTFT and TPOT of each run.

    Args:
        base: coefficients to start from.
        runs: the runs with the lowest loads; they must not be judged afterwards.
        setting: how the engine was run; its `spec` gives the limits.

    Returns:
        New coefficients, and the time outside the engine, seconds.
    """

    def misses(x: FloatArray) -> float:
        coef = moved(base, np.array([x[0], x[1], 0.0, 0.0]))
        spec = replace(setting.spec, coefficients=tuple(coef.tolist()))
        total = 0.0
        for trace, requests in runs:
            told = predict(trace, replace(setting, spec=spec, reply_s=abs(float(x[2]))))
            for quantity, steadied in (("tpot", 1.0), ("ttft", 1.0)):
                true = getattr(requests, f"{quantity}_s")
                pairs = np.log(getattr(told, f"{quantity}_s") / true)
                low, mid, high = np.nanquantile(pairs, (0.25, 0.5, 0.75))
                total += steadied * float(abs(mid) + 0.25 * (abs(low) + abs(high)))
        return total + 0.5 * float(x[2] / 0.05) ** 2 * 0.02

    start = np.array([0.0, 0.0, 0.01])
    simplex = np.array([start, [0.2, 0, 0.01], [0, 0.2, 0.01], [0, 0, 0.03]])
    found = minimize(
        misses,
        start,
        method="Nelder-Mead",
        options={"maxfev": 120, "xatol": 1e-3, "fatol": 1e-4, "initial_simplex": simplex},
    )
    coef = moved(base, np.array([found.x[0], found.x[1], 0.0, 0.0]))
    return coef, abs(float(found.x[2]))
