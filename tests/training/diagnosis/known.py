"""Synthetic runs whose trouble is known, because it was put there. It diagnoses nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trimtab.agents.registry import make_policy
from trimtab.engine_bridge.draft_spec import DraftSpec
from trimtab.engine_bridge.engine_spec import EngineSpec, get_engine_spec
from trimtab.engine_bridge.plan import Plan, load_plan
from trimtab.engine_bridge.replay.report import ReplayResult
from trimtab.engine_bridge.trace import NO_SESSION, Trace
from trimtab.training.diagnosis.remedies import changed_plan
from trimtab.training.whatif.drafting import with_draft_lengths
from trimtab.training.whatif.run import drive

TIERS = ("T0", "T1", "T2", "T3")
Columns = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Known:
    """A run and what is wrong with it."""

    trace: Trace
    plan: Plan
    spec: EngineSpec
    policy: str

    def run(self) -> ReplayResult:
        """Replay it."""
        policy = make_policy(self.policy)
        return drive(self.trace, policy, self.plan, self.spec, seed=0, drain_s=120.0)


def poisson(
    rng: np.random.Generator,
    tier: str,
    *,
    per_s: float,
    prompt: float,
    output: float,
    until_s: float,
    from_s: float = 0.0,
    spread: float = 0.5,
    tenants: int = 3,
) -> Columns:
    """Lone requests with log-normal lengths around a median."""
    count = int(rng.poisson(per_s * (until_s - from_s)))
    return {
        "arrival_s": np.sort(rng.uniform(from_s, until_s, count)),
        "tier": np.full(count, TIERS.index(tier)),
        "tenant": 10 * TIERS.index(tier) + rng.integers(0, tenants, count),
        "prompt_tokens": np.maximum(1, rng.lognormal(np.log(prompt), spread, count)).astype(int),
        "output_tokens": np.maximum(1, rng.lognormal(np.log(output), spread, count)).astype(int),
    }


def at_times(tier: str, times_s: np.ndarray, *, prompt: int, output: int) -> Columns:
    """Requests of one length at given times."""
    count = len(times_s)
    return {
        "arrival_s": np.asarray(times_s, np.float64),
        "tier": np.full(count, TIERS.index(tier)),
        "tenant": np.full(count, 10 * TIERS.index(tier) + 5),
        "prompt_tokens": np.full(count, prompt),
        "output_tokens": np.full(count, output),
    }


def joined(*parts: Columns) -> Trace:
    """One trace of several parts."""
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.argsort(whole["arrival_s"], kind="stable")
    columns: dict[str, Any] = {name: values[order] for name, values in whole.items()}
    columns["session"] = np.full(len(order), NO_SESSION, np.int32)
    names = tuple(f"tenant-{number}" for number in range(40))
    return Trace.build(**columns, tier_names=TIERS, tenant_names=names)


def chat(
    rng: np.random.Generator, load: float = 1.0, until_s: float = 240.0
) -> tuple[Columns, ...]:
    """Ordinary traffic of all four tiers, well below what the 8B engine can do."""
    until_s = 240.0
    return (
        poisson(rng, "T0", per_s=2.0 * load, prompt=600, output=150, until_s=until_s),
        poisson(rng, "T1", per_s=0.7 * load, prompt=2500, output=150, until_s=until_s),
        poisson(rng, "T2", per_s=0.5 * load, prompt=1800, output=120, until_s=until_s),
        poisson(rng, "T3", per_s=1.0 * load, prompt=250, output=80, until_s=until_s),
    )


ENGINE_8B = "h100:llama-3.1-8b-tp1"
ENGINE_70B = "h100:llama-3.1-70b-tp4"


def healthy(rng: np.random.Generator, policy: str, load: float, engine: str = ENGINE_8B) -> Known:
    """Nothing is wrong."""
    spec = get_engine_spec(engine)
    scale = load if engine == ENGINE_8B else 0.5 * load
    return Known(trace=joined(*chat(rng, scale)), plan=load_plan(), spec=spec, policy=policy)


def overload(rng: np.random.Generator, policy: str, load: float) -> Known:
    """More paid chat than the engine can serve."""
    parts = [*chat(rng)]
    parts[0] = poisson(rng, "T0", per_s=load * 22.0, prompt=900, output=250, until_s=150.0)
    return Known(
        trace=joined(*parts), plan=load_plan(), spec=get_engine_spec(ENGINE_8B), policy=policy
    )


def blocking(rng: np.random.Generator, policy: str, prompt: int, limit: int, engine: str) -> Known:
    """Batch prompts of tens of thousands of tokens in small chunks before the chats' prompts."""
    spec = get_engine_spec(engine).with_limits(max_num_batched_tokens=limit)
    times = np.arange(5.0, 230.0, 14.0) + rng.uniform(0, 3, 17)
    part = at_times("T2", np.sort(times), prompt=prompt, output=32)
    few = chat(rng, 0.5 if engine == ENGINE_8B else 0.2)
    return Known(trace=joined(*few, part), plan=load_plan(), spec=spec, policy=policy)


def poison(rng: np.random.Generator, policy: str, prompt: int, limit: int) -> Known:
    """An agent that sends its whole archive now and then."""
    spec = get_engine_spec(ENGINE_8B).with_limits(max_num_batched_tokens=limit)
    part = at_times(
        "T1", np.array([30.0, 95.0, 160.0]) + rng.uniform(0, 5, 3), prompt=prompt, output=64
    )
    return Known(trace=joined(*chat(rng, 0.7), part), plan=load_plan(), spec=spec, policy=policy)


def avalanche(rng: np.random.Generator, policy: str, blocks: int, per_s: float) -> Known:
    """A wave of batch with long answers on an engine with little KV memory."""
    spec = get_engine_spec(ENGINE_8B).with_limits(num_gpu_blocks=blocks)
    wave = poisson(
        rng, "T2", per_s=per_s, prompt=900, output=1400, from_s=20.0, until_s=90.0, spread=0.3
    )
    chats = poisson(rng, "T0", per_s=0.5, prompt=6000, output=120, until_s=180.0)
    return Known(trace=joined(chats, wave), plan=load_plan(), spec=spec, policy=policy)


def infeasible(rng: np.random.Generator, policy: str, target: str, ms: float, prompt: int) -> Known:
    """A target that no engine of this kind can meet."""
    plan = changed_plan(load_plan(), {("tiers", "T0", "targets", target): ms})
    parts = [*chat(rng, 0.4)]
    parts[0] = poisson(rng, "T0", per_s=0.8, prompt=prompt, output=100, until_s=240.0)
    return Known(trace=joined(*parts), plan=plan, spec=get_engine_spec(ENGINE_8B), policy=policy)


def drafting(rng: np.random.Generator, policy: str, tokens: int) -> Known:
    """A draft model that is right of chat and wrong of a big batch."""
    acceptance = (("T0", 0.8), ("T1", 0.8), ("T2", 0.15), ("T3", 0.15))
    spec = replace(
        get_engine_spec(ENGINE_8B),
        draft=DraftSpec(tokens=tokens, us_per_token=20.0, acceptance=acceptance),
    )
    batch = poisson(rng, "T2", per_s=11.0, prompt=300, output=500, until_s=120.0, spread=0.3)
    chats = poisson(rng, "T0", per_s=0.5, prompt=400, output=100, until_s=120.0)
    plan = with_draft_lengths(load_plan(), spec)
    return Known(trace=joined(chats, batch), plan=plan, spec=spec, policy=policy)


Maker = Callable[[np.random.Generator], Known]
RUNS: tuple[tuple[str, Maker], ...] = (
    ("healthy", lambda rng: healthy(rng, "static", 1.0)),
    ("healthy", lambda rng: healthy(rng, "stock-fcfs", 0.6)),
    ("healthy", lambda rng: healthy(rng, "static", 0.7, ENGINE_70B)),
    ("overload", lambda rng: overload(rng, "static", 1.0)),
    ("overload", lambda rng: overload(rng, "stock-fcfs", 1.2)),
    ("overload", lambda rng: overload(rng, "stock-priority", 1.5)),
    ("prefill_blocking", lambda rng: blocking(rng, "stock-fcfs", 32_000, 512, ENGINE_8B)),
    ("prefill_blocking", lambda rng: blocking(rng, "stock-fcfs", 45_000, 1024, ENGINE_8B)),
    ("prefill_blocking", lambda rng: blocking(rng, "stock-priority", 32_000, 512, ENGINE_8B)),
    ("prefill_blocking", lambda rng: blocking(rng, "stock-fcfs", 20_000, 512, ENGINE_70B)),
    ("poison_prompt", lambda rng: poison(rng, "stock-fcfs", 200_000, 8192)),
    ("poison_prompt", lambda rng: poison(rng, "stock-fcfs", 150_000, 2048)),
    ("poison_prompt", lambda rng: poison(rng, "stock-priority", 180_000, 2048)),
    ("kv_avalanche", lambda rng: avalanche(rng, "stock-fcfs", 3000, 3.0)),
    ("kv_avalanche", lambda rng: avalanche(rng, "stock-fcfs", 4000, 4.0)),
    ("kv_avalanche", lambda rng: avalanche(rng, "stock-priority", 2500, 2.5)),
    ("draft_mismatch", lambda rng: drafting(rng, "stock-fcfs", 6)),
    ("draft_mismatch", lambda rng: drafting(rng, "stock-priority", 4)),
    ("healthy", lambda rng: drafting(rng, "static", 6)),
    ("infeasible_plan", lambda rng: infeasible(rng, "static", "ttft_ms", 60.0, 6000)),
    ("infeasible_plan", lambda rng: infeasible(rng, "stock-fcfs", "tpot_ms", 4.0, 600)),
    ("infeasible_plan", lambda rng: infeasible(rng, "static", "ttft_ms", 300.0, 16_000)),
)
"""What is wrong, and the run; drawn from the generator that is given."""
