"""What each number of an observation is: its name and its one documented transform.

The transforms name no figure of a plan, only parts of it ("the tier's TTFT target"), so a policy
knows any plan with the same tiers, pools and open knobs. It computes nothing: see `observation`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from trimtab.engine_bridge.plan import Plan
from trimtab.envs.residual import RESIDUALS, open_entries


class Log(NamedTuple):
    """log1p(x / unit) / log1p(most / unit), clipped to [0, 1]."""

    unit: float
    """Where the transform turns from linear to logarithmic."""
    most: float
    """What becomes 1."""


class Feature(NamedTuple):
    """One number of the observation."""

    name: str
    """Whose figure it is and which, for instance `T0.queue_length`."""
    transform: str
    """How it is computed, clipped to [-1, 1]."""


FAST_S: Final = 10.0
"""Time constant of the fast averages, seconds."""
SLOW_S: Final = 60.0
"""Time constant of the slow averages, seconds."""
TREND_FACTOR: Final = 4.0
"""A fast average of so many times the slow one becomes 1."""
LATENCY_FACTOR: Final = 10.0
"""A latency of so many times its target becomes 1."""
LEAST_SAMPLES: Final = 0.1
"""Fewer samples in memory are none."""
USUAL_BATCH: Final = 256
"""Batch that counts as full where the plan states no `engine.max_num_seqs`."""
USUAL_TARGET_MS: Final = 60_000.0
"""Stands for the target on a wait where a tier has neither a TTFT nor an E2E target."""
USUAL_TPOT_MS: Final = 50.0
"""Stands for the tightest TPOT target where no tier has one."""

TIER_LOGS: Final[dict[str, tuple[Log, str]]] = {
    "arrivals_10s": (Log(0.1, 100.0), "requests/s, average over 10 s"),
    "arrivals_60s": (Log(0.1, 100.0), "requests/s, average over 60 s"),
    "prompt_10s": (Log(0.02, 40.0), "prompt tokens/s over the static budget, average over 10 s"),
    "prompt_60s": (Log(0.02, 40.0), "prompt tokens/s over the static budget, average over 60 s"),
    "decode": (Log(10.0, 30_000.0), "tokens/s"),
    "preemptions": (Log(0.1, 100.0), "preemptions/s"),
    "recomputed": (Log(0.02, 40.0), "recomputed tokens/s over the static budget"),
    "refused": (Log(0.1, 100.0), "refused requests/s"),
    "queue_length": (Log(1.0, 1000.0), "requests"),
    "queued_prefill": (Log(0.1, 200.0), "queued prompt tokens over the static budget"),
    "oldest_wait": (Log(0.1, 10.0), "oldest wait over the TTFT (else E2E) target"),
    "running": (Log(1.0, 1024.0), "requests"),
}
"""The logarithmic figures of a tier: transform, and what x is. The static budget is the plan's
prefill budget of a step, tokens."""
TIER_OTHERS: Final[dict[str, str]] = {
    "arrivals_trend": "ln((arrivals_10s + 0.1) / (arrivals_60s + 0.1)) / ln 4",
    "prompt_trend": "ln((prompt_10s + 0.02) / (prompt_60s + 0.02)) / ln 4",
    "attainment": "(target - attainment) * n / (n + 4), n samples of the interval; 0 without any",
    "attainment_60s": "the same of the last 60 s: sums that forget by exp(-t / 60 s)",
    "ttft_p99": "ln(P99 TTFT / target) / ln 10; 0 without data or target",
    "tpot_p99": "ln(P99 TPOT / target) / ln 10; 0 without data or target",
    "acceptance": "share of draft tokens accepted; 0 without data",
    "attainment_known": "1 with samples, else 0",
    "attainment_60s_known": "1 with a sum of at least 0.1 samples, else 0",
    "ttft_p99_known": "1 with data and a target, else 0",
    "tpot_p99_known": "1 with data and a target, else 0",
    "acceptance_known": "1 with data, else 0",
}
"""The other figures of a tier."""
POOL_SHARES: Final[dict[str, str]] = {
    "kv_used": "blocks held over all pools' guaranteed blocks",
    "kv_guaranteed": "blocks guaranteed over all pools'",
    "kv_lent": "guaranteed blocks that others hold over all pools' guaranteed blocks",
}
"""The figures of a pool."""
ENGINE_FIGURES: Final[dict[str, str]] = {
    "kv_use": "part of all KV blocks that running requests hold",
    "batch_fill": "mean batch over the plan's max_num_seqs, else over 256; 0 without a step",
    "busy": "part of the interval in which a step ran",
    "age": "age of the data over the lease",
    "known": "part of the tiers' counts that are numbers",
    "step_time": "ln(mean step / tightest TPOT target) / ln 10; 0 without a step",
    "step_time_known": "1 with a step, else 0",
}
"""The figures of the engine as a whole."""


@dataclass(frozen=True)
class ObservationSchema:
    """The layout of an observation."""

    features: tuple[Feature, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """One name an entry."""
        return tuple(feature.name for feature in self.features)

    @property
    def size(self) -> int:
        """Number of entries."""
        return len(self.features)

    @cached_property
    def digest(self) -> str:
        """SHA-256 in hex: equal digests, equal meaning of every entry."""
        return hashlib.sha256(json.dumps(self.features).encode()).hexdigest()


def observation_schema(plan: Plan) -> ObservationSchema:
    """The layout for a plan: its tiers, its pools, the engine, then its open knobs."""
    tier = [
        Feature(name, f"log1p(x / {log.unit:g}) / log1p({log.most:g} / {log.unit:g}), x = {what}")
        for name, (log, what) in TIER_LOGS.items()
    ] + [Feature(*other) for other in TIER_OTHERS.items()]
    pool = [Feature(*share) for share in POOL_SHARES.items()]
    engine = [Feature(*figure) for figure in ENGINE_FIGURES.items()]
    owned = [(f"{name}.", tier) for name in plan.tier_names]
    owned += [(f"pool.{name}.", pool) for name in plan.pool_names]
    owned.append(("engine.", engine))
    features = [Feature(owner + f.name, f.transform) for owner, of in owned for f in of]
    for knob, names in open_entries(plan).items():
        features += [Feature(f"applied.{name}", RESIDUALS[knob]) for name in names]
    return ObservationSchema(tuple(features))
