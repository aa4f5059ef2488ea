"""A quiet tenant at 1 request a second beside one at 32: what becomes of its P99 TTFT.

    python benchmarks/noisy_neighbour.py [--quick] [--engine replay|vllm|live] [--json F]

On Llama-3.1-8B on one H100. Each row is one way to serve the same arrivals; its ratio is the quiet
tenant's P99 TTFT over that of the quiet tenant alone under stock vLLM, with a 95 % interval from a
bootstrap over minutes (the same minutes of both). What the row costs stands beside it: the noisy
tenant's own figures and the engine's. Workloads: the published one of InferGrid 0.1.1 (prompts of a
sentence, 64 tokens of answer, 1.14 with a token bucket and 29 without), and longer ones; `grid` has
more. `worst` splits the worst 1 % of the quiet tenant's times. `vllm` runs vLLM's own scheduler in
virtual time, on shorter traffic; `live` sends real requests to an emulated server in real time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from noisy_runs import Run, decompose, on_vllm, replay
from noisy_traffic import NOISY, QUIET, Floats, Lengths, Workload

from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.plan import load_plan, with_values
from trimtab.engine_bridge.replay.engine import RuleSet

ENGINE: Final = "h100:llama-3.1-8b-tp1"
SENTENCE: Final = Lengths(9, 17, 64)
"""The published prompts, as Llama's tokenizer counts them with its first token."""
CHAT: Final = Lengths(512, 512, 128)
MIXED: Final = Lengths(400, 1400, 128)
DOCUMENT: Final = Lengths(2048, 2048, 64)
GRID: Final = (
    *(Lengths(n, n, answer) for n in (64, 256, 512, 768, 896, 1024, 2048) for answer in (64, 128)),
    MIXED,
)
ISOLATION: Final = {"isolation.longest_step_ms": 16.0, "feasible.window_ms": 0}
"""The settings of docs/noisy-neighbour.md."""
FACTOR: Final = {"feasible.prefill_factor": 5.0}
A_SECOND: Final = {"requests_per_second": 10}
"""The published quota, 10 a second with a burst of 10."""
A_MINUTE: Final = {"requests_per_minute": 600}
AT_ONCE: Final = {"concurrent_requests": 16}
RESAMPLES: Final = 500
BLOCK_S: Final = 60.0
WORST: Final = 0.01
Serve = Callable[..., Run]
Table = list[dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """One way to serve the traffic."""

    name: str
    rules: RuleSet = "fair"
    plan: Mapping[str, object] = field(default_factory=dict)
    quota: Mapping[str, object] = field(default_factory=dict)


STOCK: Final = Row("stock FCFS", "fcfs")
ROWS: Final = (
    STOCK,
    Row("stock priority", "priority"),
    Row("shipped plan"),
    Row("prefill factor 5", plan=FACTOR),
    Row("window 0", plan={"feasible.window_ms": 0}),
    Row("window 0, budget 512", plan={"feasible.window_ms": 0, "prefill.budget_tokens": 512}),
    Row("isolation", plan=ISOLATION),
    Row("isolation, 12 ms", plan=ISOLATION | {"isolation.longest_step_ms": 12.0}),
    Row("isolation, 24 ms", plan=ISOLATION | {"isolation.longest_step_ms": 24.0}),
    Row("shipped, quota a minute", quota=A_MINUTE),
    Row("shipped, quota a second", quota=A_SECOND),
    Row("isolation, quota a second", plan=ISOLATION, quota=A_SECOND),
)
CONTRAST: Final = tuple(
    row for row in ROWS if row.name in (STOCK.name, "shipped plan", "prefill factor 5", "isolation")
)
AT_ONCE_ROW: Final = Row("shipped, 16 at once", quota=AT_ONCE)
"""Needs an engine that says when requests end; the replay gets its traffic beforehand."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is run."""

    minutes: float
    seeds: int
    grid_minutes: float = 0.0
    worst_minutes: float = 0.0
    grid: tuple[Lengths, ...] = ()


SIZES: Final = {
    ("replay", False): Size(
        minutes=30.0,
        seeds=3,
        grid_minutes=10.0,
        worst_minutes=10.0,
        grid=GRID,
    ),
    ("replay", True): Size(minutes=5.0, seeds=1, grid_minutes=5.0, worst_minutes=2.0, grid=(CHAT,)),
    ("vllm", False): Size(minutes=5.0, seeds=1),
    ("vllm", True): Size(minutes=1.0, seeds=1),
}


def bench(serve: Serve, workload: Workload, rows: tuple[Row, ...], size: Size) -> Table:
    """Every row on the same arrivals, and the quiet tenant alone under each."""
    alone = _runs(serve, workload, STOCK, size, solo=True)
    base = _quiet_blocks(alone)
    found = []
    for row in rows:
        own = _runs(serve, workload, row, size, solo=True) if row.rules == "fair" else alone
        runs = _runs(serve, workload, row, size)
        line = {"row": row.name, "workload": str(workload)} | summary(runs)
        line["solo_p99_ms"] = _p99(_quiet_blocks(own))
        line["ratio"], line["ratio_ci95"] = ratio(_quiet_blocks(runs), base)
        show(line)
        found.append(line)
    return found


def _runs(serve: Serve, load: Workload, row: Row, size: Size, *, solo: bool = False) -> list[Run]:
    plan, spec = with_values(load_plan(), row.plan), get_engine_spec(ENGINE)
    runs = []
    for seed in range(size.seeds):
        trace = load.trace(plan, seed=seed, minutes=size.minutes, solo=solo)
        runs.append(serve(trace, plan, spec, row.rules, {} if solo else row.quota))
    return runs


def _quiet_blocks(runs: list[Run]) -> list[Floats]:
    """The quiet tenant's times by minute of arrival, milliseconds."""
    blocks = []
    for run in runs:
        quiet = run.of(QUIET)
        number = (run.trace.arrival_s[quiet] // BLOCK_S).astype(int)
        times = run.ttft_ms[quiet]
        blocks += [times[number == n] for n in range(int(number.max()) + 1)]
    return blocks


def _p99(blocks: list[Floats]) -> float:
    return float(np.nanquantile(np.concatenate(blocks), 0.99))


def ratio(blocks: list[Floats], base: list[Floats]) -> tuple[float, list[float]]:
    """Of the P99s, and its 95 % interval: minutes are drawn again, the same of both."""
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(RESAMPLES):
        chosen = rng.integers(0, len(base), len(base))
        drawn.append(_p99([blocks[n] for n in chosen]) / _p99([base[n] for n in chosen]))
    low, high = np.quantile(drawn, [0.025, 0.975])
    return _p99(blocks) / _p99(base), [float(low), float(high)]


def summary(runs: list[Run]) -> dict[str, float]:
    """What both tenants and the engine had of it, over all runs."""

    def over(values: Callable[[Run], Floats], tenant: int) -> Floats:
        return np.concatenate([values(run)[run.of(tenant)] for run in runs])

    quiet, noisy = (over(lambda run: run.ttft_ms, tenant) for tenant in (QUIET, NOISY))
    last = over(lambda run: run.last_s, NOISY)
    answers = sum(float(r.trace.output_tokens[np.isfinite(r.last_s)].sum()) for r in runs)
    prompts = sum(float(r.trace.prompt_tokens[np.isfinite(r.last_s)].sum()) for r in runs)
    busy_s, end_s = sum(r.busy_s for r in runs), sum(r.end_s for r in runs)
    return {
        "quiet_requests": int(np.isfinite(quiet).sum()),
        "quiet_p50_ms": float(np.nanmedian(quiet)),
        "quiet_p99_ms": float(np.nanquantile(quiet, 0.99)),
        "noisy_served_fraction": float(np.isfinite(last).mean()),
        "noisy_p50_ms": float(np.nanmedian(noisy)),
        "noisy_p99_ms": float(np.nanquantile(noisy, 0.99)),
        "noisy_tpot_ms": float(np.nanmean(over(lambda run: run.tpot_ms, NOISY))),
        "tokens_per_s": (answers + prompts) / end_s,
        "utilization": busy_s / end_s,
        "tokens_per_busy_s": (answers + prompts) / busy_s,
        "end_s": end_s / len(runs),
    }


def show(line: Mapping[str, Any]) -> None:
    """Print a row."""
    low, high = line["ratio_ci95"]
    print(
        f"{line['row']:27}{line['ratio']:8.2f} ({low:.2f} to {high:.2f})"
        f"  quiet P99 {line['quiet_p99_ms']:8.1f} ms (alone {line['solo_p99_ms']:.1f})"
        f"  noisy served {line['noisy_served_fraction']:.0%} P99 {line['noisy_p99_ms']:.0f} ms"
        f"  {line['tokens_per_s']:.0f} tokens/s, busy {line['utilization']:.0%}",
        flush=True,
    )


def worst(workload: Workload, rows: tuple[Row, ...], minutes: float) -> Table:
    """Where the time of the quiet tenant's worst requests goes."""
    found = []
    spec = get_engine_spec(ENGINE)
    for row, solo in [(STOCK, True), *((row, False) for row in rows)]:
        plan = with_values(load_plan(), row.plan)
        trace = workload.trace(plan, seed=0, minutes=minutes, solo=solo)
        parts = decompose(trace, plan, spec, row.rules, worst=WORST)
        name = "alone" if solo else row.name
        found.append({"row": name, "workload": str(workload)} | parts)
        print(f"{name:27}" + "  ".join(f"{k} {v:.1f}" for k, v in parts.items()), flush=True)
    return found


def grid(size: Size) -> Table:
    """Ratios under stock rules, the shipped plan and isolation over more lengths of both."""
    short = Size(minutes=size.grid_minutes, seeds=1)
    found = []
    for lengths in size.grid:
        workload = Workload(lengths, lengths)
        print(f"-- {workload}", flush=True)
        found += bench(replay, workload, CONTRAST, short)
    return found


def on_engine(engine: str, size: Size) -> dict[str, Table]:
    """All tables of the replay, or of vLLM's own scheduler."""
    same = [Workload(SENTENCE, SENTENCE), Workload(CHAT, CHAT), Workload(SENTENCE, DOCUMENT)]
    tiers = Workload(CHAT, CHAT, noisy_tier="T3")
    serve, rows = (replay, ROWS) if engine == "replay" else (on_vllm, (*ROWS, AT_ONCE_ROW))
    if engine == "vllm":
        same, skipped = same[1:2], ("isolation, 12 ms", "isolation, 24 ms", "window 0")
        rows = tuple(row for row in rows if row.name not in skipped)
    found: dict[str, Table] = {"one_tier": [], "two_tiers": [], "worst": [], "grid": []}
    for workload in same:
        print(f"-- one tier: {workload}", flush=True)
        found["one_tier"] += bench(serve, workload, rows, size)
    print(f"-- two tiers, T0 and T3: {tiers}", flush=True)
    two = tuple(row for row in rows if row.rules != "fcfs" and not row.quota)
    found["two_tiers"] += bench(serve, tiers, two, size)
    if engine == "replay":
        print("-- the worst 1 % of the quiet tenant, mean ms by part", flush=True)
        for workload in same:
            print(f"-- {workload}", flush=True)
            found["worst"] += worst(workload, CONTRAST, size.worst_minutes)
        found["grid"] = grid(size)
    return found


def main(argv: list[str] | None = None) -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few minutes of traffic, one seed")
    parser.add_argument("--engine", choices=("replay", "vllm", "live"), default="replay")
    parser.add_argument("--minutes", type=float, help="of traffic in a run")
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args(argv)
    report: dict[str, Any] = {"schema": 1, "engine": ENGINE, "ran_on": flags.engine}
    if flags.engine == "live":
        from noisy_live import live

        report["live"] = live(ENGINE, Workload(SENTENCE, SENTENCE), ISOLATION, flags.minutes or 0.7)
    else:
        size = SIZES[flags.engine, flags.quick]
        if flags.minutes:
            size = Size(**(vars(size) | {"minutes": flags.minutes}))
        report |= {"minutes": size.minutes, "seeds": size.seeds}
        report |= on_engine(flags.engine, size)
    if flags.json is not None:
        flags.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
