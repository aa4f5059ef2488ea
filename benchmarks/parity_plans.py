"""Random plans and allocations for the workloads of `parity.py`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.plan import Plan, load_plan
from trimtab.engine_bridge.plan.load import with_values
from trimtab.engine_bridge.plan.schema import Rules

TIERS = ("T0", "T1", "T2", "T3")
SWITCHES = tuple(f"rules.{name}" for name in Rules.model_fields)


def random_plan(rng: np.random.Generator) -> Plan:
    """The shipped plan, or one with other switches, pools, targets and eviction."""
    plan = load_plan(None)
    if rng.random() < 0.3:
        return plan
    changes: dict[str, object] = {name: bool(rng.random() < 0.85) for name in SWITCHES}
    changes["retention.eviction"] = str(
        rng.choice(["scaled_age", "scaled_age", "lru", "tier_order", "fixed_quota"])
    )
    changes["retention.learn_reuse"] = bool(rng.random() < 0.5)
    if rng.random() < 0.5:
        changes["retention.classes"] = {}
    changes["backoff.per_waiting_ms"] = float(rng.uniform(0.0, 30.0))
    changes["feasible.window_ms"] = float(rng.choice([0.0, 300.0, 1500.0]))
    changes["prefill.budget_tokens"] = int(rng.integers(256, 2000))
    changes["prediction.initial_output_tokens"] = int(rng.integers(16, 400))
    for name in TIERS:
        changes[f"tiers.{name}.weight"] = float(rng.choice([1.0, 4.0, 4.0, 60.0, 3000.0]))
        changes[f"tiers.{name}.pool"] = str(rng.choice(list(plan.pools)))
        changes[f"tiers.{name}.backoff"] = bool(rng.random() < 0.5)
        changes[f"tiers.{name}.max_running"] = (
            int(rng.integers(1, 12)) if rng.random() < 0.2 else None
        )
        changes[f"tiers.{name}.targets.ttft_ms"] = float(rng.uniform(100.0, 4000.0))
        changes[f"tiers.{name}.shed.mode"] = str(rng.choice(["never", "refuse", "demote"]))
    for name, pool in zip(TIERS, plan.pools, strict=False):
        # Each pool belongs to a tier.
        changes[f"tiers.{name}.pool"] = pool
    if rng.random() < 0.3:
        changes["isolation.longest_step_ms"] = float(rng.uniform(6.0, 40.0))
    return with_values(plan, changes)


def aged(plan: Plan, seed: int) -> Plan:
    """The plan with random ageing: windows, interactive tiers, a tenant that is an exception."""
    rng = np.random.default_rng([seed, 6])
    changes: dict[str, object] = {
        "aging.tier_window_ms": float(rng.choice([0.0, 20.0, 1500.0])),
        "aging.tenant_window_ms": float(rng.choice([0.0, 300.0, 3000.0])),
        "aging.interactive_bonus": float(rng.uniform(0.0, 1.0)),
        "aging.full_after_s": float(rng.choice([0.3, 3.0, 20.0])),
        "aging.due_every": int(rng.choice([1, 2, 8])),
        "tenants.a": {"tier": TIERS[0], "interactive": bool(rng.random() < 0.5)},
    }
    for name in TIERS:
        changes[f"tiers.{name}.interactive"] = bool(rng.random() < 0.5)
    return with_values(plan, changes)


def chunked(plan: Plan, seed: int) -> Plan:
    """The plan with rule 14 for running prefills too, and a random order."""
    rng = np.random.default_rng([seed, 8])
    factor = float(rng.choice([0.0, 1.0, 5.0])) if rng.random() < 0.8 else None
    return with_values(plan, {"feasible.chunks": True, "feasible.prefill_factor": factor})


def random_allocation(rng: np.random.Generator, before: Allocation, plan: Plan) -> Allocation:
    """A wish for other weights, fractions, budgets and caps; the engines hold it to the bounds."""
    fractions = np.array(before.kv_fractions) * rng.uniform(0.7, 1.4, len(before.kv_fractions))
    shares = np.array(before.prefill_shares) * rng.uniform(0.7, 1.4, len(before.prefill_shares))
    return replace(
        before,
        weights=tuple(float(w * rng.uniform(0.5, 2.0)) for w in before.weights),
        kv_fractions=tuple(map(float, fractions / fractions.sum())),
        prefill_shares=tuple(map(float, shares / shares.sum())),
        prefill_budget_tokens=int(before.prefill_budget_tokens * rng.uniform(0.6, 1.6)),
        retention=tuple(float(f * rng.uniform(0.5, 2.0)) for f in before.retention),
        shed_at=tuple(float(f * rng.uniform(0.9, 1.1)) for f in before.shed_at),
        slack_fraction=float(rng.random()),
        low_tier_chunk_share=float(rng.random()),
        max_num_seqs=int(rng.integers(4, 65)),
        version=before.version + 1,
    )
