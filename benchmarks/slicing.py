"""What reading long prompts in slices does to others: P99 with and without, on agent sessions.

    python benchmarks/slicing.py [--quick] [--json F] [--traces FOLDER] [--seeds N] [--minutes M]
        [--engines TP8,TP4] [--slices 4096,8192,...] [--long-load L] [--plan F]
        [--vllm]

Sessions of agents that come with 100,000 to 500,000 tokens of context (a session resumed on another
engine, or after its blocks are gone) run beside chat (T0) and agents of common size, in the replay:
under Trimtab's scheduler and under both of vLLM's own. The long sessions are synthetic; with
`--traces` they are recorded ones (kv-cache-tester) from their first request over 100,000 tokens on.
`--vllm` has vLLM's real scheduler serve one such mix in virtual time, also with vLLM's own remedy,
`--long-prefill-token-threshold`.

Ratios are paired: the same traffic with and without slices, their geometric mean over the seeds
with a 95 % interval (Student's t of the logarithms). Each slice arrives later by what sending it
takes (`training.whatif.slicing`). But in `shipped` nobody is shed, so that all figures are of the
same requests.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from trimtab.agents.registry import make_policy
from trimtab.engine_bridge.admission.prefill import prefill_ms
from trimtab.engine_bridge.capacity import offered_load
from trimtab.engine_bridge.engine_spec import EngineSpec, get_engine_spec
from trimtab.engine_bridge.plan import Plan, load_plan, with_values
from trimtab.engine_bridge.pricing import repeated_prompt_tokens
from trimtab.engine_bridge.trace import Trace
from trimtab.training.traces.agent_sessions import read_agent_sessions
from trimtab.training.traces.generate import AGENTS
from trimtab.training.traces.merge import merge, with_tier
from trimtab.training.traces.options import Label, ReadOptions
from trimtab.training.traces.traffic import (
    Lognormal,
    SingleKind,
    sessions,
    single_requests,
)
from trimtab.training.whatif.run import drive
from trimtab.training.whatif.slicing import in_slices

ENGINES = {"TP8": "h100:llama-3.1-70b-tp8", "TP4": "h100:llama-3.1-70b-tp4"}
LONG_TOKENS = 100_000
LONGEST_TOKENS = 500_000
CHAT_LOAD, LONG_LOAD = 0.3, 0.1
"""Share of the engine's time that chat asks for, and that reading the long prompts once takes."""
AGENTS_PER_S = 0.006
SCHEDULERS = ("shipped", "static", "stock-fcfs", "stock-priority")
"""`shipped` is `static` with the plan's late shedding, which the others run without."""
THRESHOLDS = (2048, 512)
"""vLLM's own remedy: tokens of a long prompt in a step."""
SLICES = (2048, 4096, 8192, 16_384, 32_768)
CHAT = SingleKind(
    tenants=12,
    prompt=Lognormal(median=800, sigma=0.9, low=32, high=12_000),
    output=Lognormal(median=170, sigma=0.8, low=4, high=1600),
)
LONG = replace(
    AGENTS,
    system=Lognormal(median=14_000, sigma=0.15, low=8000, high=20_000),
    first=Lognormal(median=170_000, sigma=0.5, low=LONG_TOKENS, high=400_000),
    turns_mean=6.0,
    most_turns=20,
    max_context_tokens=LONGEST_TOKENS,
)
_USED = ("arrival_s", "first_token_s", "last_token_s", "generated_tokens", "outcome")
_FINISHED = 1
_AGENT_TTFT_MS = 4000.0
_DRAIN_S = 1200.0
_DRAWN = 400


@dataclass(frozen=True)
class Case:
    """One engine, one traffic."""

    spec: EngineSpec
    trace: Trace
    long: np.ndarray
    """Rows of the long sessions, shape (n,)."""
    cold: np.ndarray
    """Of them, those of which much is read anew."""


def poisson(rate_per_s: float, span_s: float, rng: np.random.Generator) -> np.ndarray:
    """Arrivals in [0, span)."""
    return np.sort(rng.uniform(0.0, span_s, rng.poisson(rate_per_s * span_s)))


def resumed(trace: Trace, span_s: float, seconds: float, spec: EngineSpec, seed: int) -> Trace:
    """As many sessions, from their first long prompt on, as keep the engine busy for `seconds`."""
    rng = np.random.default_rng([seed, 73])
    pieces, left_s = [], seconds
    for number in rng.permutation(int(trace.session.max()) + 1):
        rows = np.flatnonzero(trace.session == number)
        over = np.flatnonzero(trace.prompt_tokens[rows] >= LONG_TOKENS)
        if not len(over) or left_s <= 0:
            continue
        piece = trace.take(rows[over[0] :])
        left_s -= prefill_ms(spec, int(piece.prompt_tokens[0])) / 1e3
        shift_s = rng.uniform(0.0, span_s) - piece.arrival_s[0]
        think = np.where(np.arange(len(piece)) == 0, 0.0, piece.think_s)
        turn = np.arange(len(piece), dtype=np.int32)
        piece = replace(piece, arrival_s=piece.arrival_s + shift_s, think_s=think, turn=turn)
        pieces.append(piece.take(np.flatnonzero(piece.arrival_s < span_s)))
    return merge(pieces)


def long_sessions(
    spec: EngineSpec, seed: int, span_s: float, load: float, folder: Path | None
) -> Trace:
    """Sessions of agents that come with a long context."""
    longest = min(LONGEST_TOKENS, spec.kv_tokens - 16_384)
    rng = np.random.default_rng([seed, 71])
    if folder is None:
        kind = replace(LONG, max_context_tokens=longest)
        trace = sessions("T1", np.zeros(_DRAWN), kind, rng, span_s=span_s)
    else:
        options = ReadOptions(max_context_tokens=longest)
        trace = read_agent_sessions(folder, rng, Label(tier="T1", tenant="long"), options)
    return resumed(trace, span_s, load * span_s, spec, seed)


def at_load(draw: Callable[[float], Trace], load: float, spec: EngineSpec) -> Trace:
    """Traffic of about that offered load."""
    return draw(load / offered_load(draw(1.0), spec))


def make_case(spec: EngineSpec, seed: int, span_s: float, load: float, folder: Path | None) -> Case:
    """The traffic of one seed for one engine."""

    def chat(rate_per_s: float) -> Trace:
        rng = np.random.default_rng([seed, 74])
        return single_requests("T0", poisson(rate_per_s, span_s, rng), CHAT, rng)

    rng = np.random.default_rng([seed, 75])
    starts = np.sort(rng.uniform(0.0, span_s, max(2, round(AGENTS_PER_S * span_s))))
    agents = sessions("T1", starts, AGENTS, rng, span_s=span_s)
    long = with_tier(long_sessions(spec, seed, span_s, load, folder), "T9")
    trace = merge([at_load(chat, CHAT_LOAD, spec), agents, long])
    is_long = trace.tier == trace.tier_names.index("T9")
    tier = np.where(is_long, trace.tier_names.index("T1"), trace.tier).astype(np.int32)
    trace = replace(trace, tier=tier, tier_names=trace.tier_names[:-1])
    fresh = trace.prompt_tokens - repeated_prompt_tokens(trace)
    return Case(spec, trace, is_long, is_long & (fresh >= LONG_TOKENS // 2))


def measure(case: Case, plan: Plan, scheduler: str) -> dict[str, float]:
    """One run's figures, ms."""
    result = drive(
        case.trace, make_policy(scheduler), plan, case.spec, seed=0, drain_s=_DRAIN_S
    ).requests
    return figures(case, {name: np.asarray(result[name], np.float64) for name in _USED})


def figures(case: Case, rows: dict[str, np.ndarray]) -> dict[str, float]:
    """P99 of chat, of the other agents, and what the long sessions themselves live through."""
    ttft = (rows["first_token_s"] - rows["arrival_s"]) * 1e3
    e2e = (rows["last_token_s"] - rows["arrival_s"]) * 1e3
    spread = np.maximum(1.0, rows["generated_tokens"] - 1.0)
    tpot = (rows["last_token_s"] - rows["first_token_s"]) * 1e3 / spread
    t0 = case.trace.tier == case.trace.tier_names.index("T0")
    agents = ~t0 & ~case.long
    done = rows["outcome"] == _FINISHED

    def quantile(values: np.ndarray, of: np.ndarray, q: float) -> float:
        known = values[of & np.isfinite(values)]
        return float(np.quantile(known, q)) if len(known) else float("nan")

    return {
        "t0_ttft_p99_ms": quantile(ttft, t0, 0.99),
        "t0_tpot_p99_ms": quantile(tpot, t0, 0.99),
        "agents_ttft_p99_ms": quantile(ttft, agents, 0.99),
        "long_ttft_p50_ms": quantile(ttft, case.cold, 0.5),
        "long_e2e_p50_ms": quantile(e2e, case.cold, 0.5),
        "long_e2e_p99_ms": quantile(e2e, case.cold, 0.99),
        "agents_met": float((done & (ttft <= _AGENT_TTFT_MS))[agents].mean()),
        "long_finished": float(done[case.long].mean()),
    }


def measure_vllm(case: Case, plan: Plan, threshold: int) -> dict[str, float]:
    """The same figures of vLLM's own scheduler, first come first served."""
    # It takes half a minute to import.
    from trimtab.engine_bridge.vllm.virtual_time import VirtualVllm

    sliced = in_slices(case.trace, plan, case.spec)
    times = np.full((3, len(sliced.trace)), np.inf)

    class Watched(VirtualVllm):
        """Notes when requests arrive, and their first and latest token."""

        def _arrive(self, row: int, at_s: float) -> None:
            times[0, row] = at_s
            super()._arrive(row, at_s)

        def _sample(self, name: str, drafts: int) -> list[int]:
            tokens = super()._sample(name, drafts)
            if tokens:
                row = int(name)
                times[1, row] = min(times[1, row], self.now_s)
                times[2, row] = self.now_s
            return tokens

    def prepare(scheduler: Any, now_s: Callable[[], float]) -> None:
        scheduler.scheduler_config.long_prefill_token_threshold = threshold

    engine = Watched(sliced.trace, plan, case.spec, prepare=prepare)
    while engine.step() is not None:
        pass
    arrival, first, last = times
    ended = np.isfinite(last[sliced.last]).astype(np.float64)
    tokens = case.trace.output_tokens.astype(np.float64)
    arrival = np.minimum.reduceat(arrival, sliced.first)
    columns = (arrival, first[sliced.last], last[sliced.last], tokens, ended)
    return figures(case, dict(zip(_USED, columns, strict=True)))


def compared(runs: list[dict[str, float]], base: list[dict[str, float]]) -> dict[str, Any]:
    """Means over the seeds, and ratios to the runs without slices, with their intervals."""
    row: dict[str, Any] = {}
    for name in runs[0]:
        values = np.array([run[name] for run in runs])
        row[name] = float(np.exp(np.log(values).mean())) if name.endswith("ms") else values.mean()
        if runs is not base and name.endswith("ms"):
            logs = np.log(values / [run[name] for run in base])
            half = 0.0
            if len(logs) > 1:
                spread = logs.std(ddof=1) / math.sqrt(len(logs))
                half = float(stats.t.ppf(0.975, len(logs) - 1)) * spread
            row[f"{name}_ratio"] = [math.exp(logs.mean() + x) for x in (0.0, -half, half)]
    return row


def show(row: dict[str, Any]) -> None:
    """One line of the table."""
    parts = [f"{row['engine']:4} {row['scheduler']:15} {row['variant']:16}"]
    for name, value in row.items():
        if name.endswith("_ms"):
            ratio = row.get(f"{name}_ratio")
            more = "" if ratio is None else " x{:.2f} [{:.2f}, {:.2f}]".format(*ratio)
            parts.append(f"{name.removesuffix('_ms')} {value:,.0f}{more}")
    shares = f"agents met {row['agents_met']:.3f}, long finished {row['long_finished']:.3f}"
    print("; ".join([*parts, shares]), flush=True)


Measure = Callable[[Case], dict[str, float]]


def table(cases: list[Case], engine: str, scheduler: str, variants: dict[str, Measure]) -> list:
    """Every variant on every seed's traffic; the first one is what the others are compared to."""
    rows: list[dict[str, Any]] = []
    base: list[dict[str, float]] = []
    for name, of in variants.items():
        runs = [of(case) for case in cases]
        base = base or runs
        row = {"engine": engine, "scheduler": scheduler, "variant": name, **compared(runs, base)}
        show(row)
        rows.append(row)
    return rows


def plans_of(plan: Plan, lengths: list[int]) -> dict[str, Plan]:
    """The plan without slices for T1, and with slices of each length."""
    return {"whole": plan} | {
        f"slices {tokens:,}": with_values(plan, {"tiers.T1.slice_tokens": tokens})
        for tokens in lengths
    }


def in_the_replay(scheduler: str, plans: dict[str, Plan]) -> dict[str, Measure]:
    """The variants of one scheduler."""
    return {
        name: (lambda case, plan=plan: measure(case, plan, scheduler))
        for name, plan in plans.items()
    }


def known(value: Any) -> Any:
    """The same for JSON: null where there is no figure."""
    if isinstance(value, dict):
        return {name: known(one) for name, one in value.items()}
    if isinstance(value, list):
        return [known(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main() -> None:
    """Run the tables and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one engine, 5 minutes, two seeds")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--traces", type=Path, help="folder of kv-cache-tester's sessions")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--slices", default=",".join(map(str, SLICES)))
    parser.add_argument("--long-load", type=float, default=LONG_LOAD)
    parser.add_argument("--plan", default="default", help="instead of the shipped one")
    parser.add_argument("--vllm", action="store_true", help="vLLM's real scheduler as well")
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.minutes, args.engines, args.slices = 2, 5.0, "TP8", "8192"
    lengths = [int(tokens) for tokens in args.slices.split(",")]
    shipped = load_plan(args.plan)
    whole = with_values(shipped, {"rules.late_shedding": False})
    plans = plans_of(whole, lengths)
    rows: list[dict[str, Any]] = []
    for engine in args.engines.split(","):
        spec = get_engine_spec(ENGINES[engine])
        cases = [
            make_case(spec, seed, 60.0 * args.minutes, args.long_load, args.traces)
            for seed in range(1, args.seeds + 1)
        ]
        longest = [int(case.trace.prompt_tokens[case.long].max()) for case in cases]
        reads = sum(int(case.cold.sum()) for case in cases)
        print(f"{engine}: {reads} long prompts read anew, the longest {max(longest):,} tokens")
        for scheduler in SCHEDULERS:
            policy = "static" if scheduler == "shipped" else scheduler
            used = plans_of(shipped, lengths) if scheduler == "shipped" else plans
            rows += table(cases, engine, scheduler, in_the_replay(policy, used))
        if args.vllm:
            variants: dict[str, Measure] = {
                name: (lambda case, plan=plan: measure_vllm(case, plan, 0))
                for name, plan in plans.items()
            }
            for tokens in THRESHOLDS:
                variants[f"threshold {tokens:,}"] = lambda case, t=tokens: measure_vllm(
                    case, whole, t
                )
            rows += table(cases, engine, "vllm-fcfs", variants)
    if args.json:
        args.json.write_text(json.dumps({"rows": known(rows)}, indent=2) + "\n")


if __name__ == "__main__":
    main()
