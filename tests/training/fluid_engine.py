"""A test double with the replay's API: one fluid queue a run, no scheduler, no steps.

Tiers are served in the order that the rules name; good enough to give runs that differ.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.telemetry import Telemetry, TierTelemetry

NAN = float("nan")


@dataclass
class FluidResult:
    requests: dict[str, np.ndarray]
    telemetry: list[Telemetry]
    steps: int
    engine_busy_s: float
    end_s: float
    service_gap_ms: float = 120.0
    service_gap_bound_ms: float = 900.0
    drafts: tuple[()] = ()
    encode_ms: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def digest(self) -> str:
        sha = hashlib.sha256()
        for name in sorted(self.requests):
            sha.update(self.requests[name].tobytes())
        return sha.hexdigest()


@dataclass
class FluidEngine:
    trace: object
    plan: object
    spec: object
    rules: str = "fair"
    now_s: float = 0.0
    telemetry: list = field(default_factory=list)

    def __init__(self, trace, plan, spec, *, rules="fair", speed=1.0):
        self.trace, self.plan, self.spec, self.rules = trace, plan, spec, rules
        self.telemetry, self.now_s = [], 0.0
        self.allocation = Allocation.static(plan)
        self.applied_ttl_s: list[float | None] = []
        place = np.array([plan.tier_index(name) for name in trace.tier_names])
        self.tier = place[trace.tier]
        cost_s = (trace.prompt_tokens * 0.02 + trace.output_tokens * 0.5) / 1e3
        rank = {"fcfs": np.zeros(len(trace)), "priority": self.tier, "fair": self.tier * 0.7}[rules]
        start = np.empty(len(trace))
        free_s = 0.0
        for row in np.lexsort((trace.arrival_s + 60.0 * rank,)):
            free_s = max(free_s, trace.arrival_s[row])
            start[row] = free_s
            free_s += cost_s[row]
        self.cost_s = cost_s
        self.first_s = start + 0.05
        pace = (
            {"fcfs": 0.035, "priority": 0.03, "fair": 0.025}[rules]
            * plan.prefill.budget_tokens
            / 2900
        )
        self.last_s = self.first_s + pace * np.maximum(trace.output_tokens - 1, 0)
        self.end_s = float(self.last_s.max(initial=0.0))

    @property
    def due_s(self) -> float:
        return self.now_s

    @property
    def finished(self) -> bool:
        return self.now_s >= self.end_s

    def apply(self, allocation, *, ttl_s=None):
        self.allocation = allocation
        self.applied_ttl_s.append(ttl_s)
        return allocation

    def advance(self, interval_s: float) -> Telemetry:
        low, high = self.now_s, self.now_s + interval_s
        self.now_s = high
        tiers = tuple(self._tier(i, low, high) for i in range(len(self.plan.tiers)))
        telemetry = Telemetry(
            time_s=high,
            interval_s=interval_s,
            tiers=tiers,
            step_ms_mean=20.0,
            steps=int(interval_s * 50),
            batch_mean=8.0,
            kv_use_fraction=0.5,
            busy_fraction=0.9,
            applied=self.allocation,
            age_s=0.0,
        )
        self.telemetry.append(telemetry)
        return telemetry

    def _tier(self, index: int, low: float, high: float) -> TierTelemetry:
        mine = self.tier == index
        trace = self.trace
        arrived = mine & (trace.arrival_s >= low) & (trace.arrival_s < high)
        waiting = mine & (trace.arrival_s < high) & (self.first_s >= high)
        running = mine & (self.first_s < high) & (self.last_s >= high)
        done = mine & (self.last_s >= low) & (self.last_s < high)
        ttft = (self.first_s - trace.arrival_s)[done] * 1e3
        target = list(self.plan.tiers.values())[index].targets.ttft_ms or np.inf
        pool = self.plan.pool_of_tier[index]
        held = self.tier[running]
        of_pool = np.array(self.plan.pool_of_tier)[self.tier] == pool
        blocks = int(
            trace.prompt_tokens[of_pool & (self.first_s < high) & (self.last_s >= high)].sum() // 16
        )
        return TierTelemetry(
            arrivals=int(arrived.sum()),
            arrived_prompt_tokens=int(trace.prompt_tokens[arrived].sum()),
            queue_length=int(waiting.sum()),
            queued_prefill_tokens=int(trace.prompt_tokens[waiting].sum()),
            oldest_wait_s=0.0,
            running=len(held),
            kv_blocks_used=blocks,
            kv_blocks_guaranteed=int(
                list(self.plan.pools.values())[pool] * self.spec.num_gpu_blocks
            ),
            kv_blocks_lent=0,
            prefill_tokens=int(trace.prompt_tokens[done].sum()),
            decode_tokens=int(trace.output_tokens[done].sum()),
            cached_tokens=0,
            finished=int(done.sum()),
            refused=0,
            attainment=float(np.mean(ttft <= target)) if done.any() else NAN,
            attainment_samples=int(done.sum()),
            met_tokens=0.0,
            ttft_ms_p50=float(np.median(ttft)) if done.any() else NAN,
            ttft_ms_p99=float(ttft.max()) if done.any() else NAN,
            tpot_ms_p50=25.0 if done.any() else NAN,
            tpot_ms_p99=30.0 if done.any() else NAN,
            preemptions=0,
            recomputed_tokens=0,
            acceptance=NAN,
            vft_skew_flags=0,
            service_ms=float(self.cost_s[done].sum() * 1e3),
        )

    def result(self) -> FluidResult:
        trace = self.trace
        first = np.where(self.first_s < self.now_s, self.first_s, NAN)
        last = np.where(self.last_s < self.now_s, self.last_s, NAN)
        done = np.isfinite(last)
        zero = np.zeros(len(trace), np.int32)
        return FluidResult(
            encode_ms=np.zeros(len(trace)),
            requests={
                "arrival_s": trace.arrival_s,
                "tenant": trace.tenant,
                "tier": self.tier,
                "admitted_s": first,
                "first_token_s": first,
                "last_token_s": last,
                "prompt_tokens": trace.prompt_tokens,
                "cached_tokens": zero,
                "output_tokens": trace.output_tokens,
                "generated_tokens": np.where(done, trace.output_tokens, 0),
                "preemptions": zero,
                "recomputed_tokens": zero,
                "outcome": done.astype(np.int8),
                "vft_skew": np.zeros(len(trace)),
                "service_ms": np.where(done, self.cost_s * 1e3, 0.0),
            },
            telemetry=self.telemetry,
            steps=50,
            engine_busy_s=float(self.cost_s.sum()),
            end_s=min(self.now_s, self.end_s),
        )


def mixed_trace(seed: int = 0, *, hours: float = 0.25, rate_per_s: float = 4.0):
    """Four tiers, two tenants each, bursts in T3."""
    from trimtab.engine_bridge.trace import Trace

    rng = np.random.default_rng(seed)
    n = int(hours * 3600 * rate_per_s)
    arrival = np.sort(rng.uniform(0, hours * 3600, n) ** 1.0)
    tier = rng.choice(4, n, p=[0.5, 0.2, 0.1, 0.2])
    return Trace.build(
        arrival_s=arrival,
        prompt_tokens=rng.integers(20, 3000, n) * np.array([1, 2, 4, 1])[tier],
        output_tokens=rng.integers(1, 400, n),
        tier=tier,
        tenant=tier * 2 + rng.integers(0, 2, n),
        tier_names=("T0", "T1", "T2", "T3"),
        tenant_names=tuple(
            f"{t}-{who}" for t in ("chat", "agent", "batch", "free") for who in "ab"
        ),
    )
