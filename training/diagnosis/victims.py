"""Which requests were served badly, and what each of them was waiting for.

A *victim* is a request of a tier with targets that missed one of them, or whose first token came
far later than its tier's median although it could have come sooner. Refused at once is a rule, not
a fate: such requests are no victims. Each victim is laid at the door of one cause, the first that
holds:

- *beyond*: the idle engine itself would have missed the targets, with all cached that ever was;
- *overload*: so would an engine that served the tier and those above it and nobody else;
- *recompute*: preemption feeds itself in this run, and it gave way or waited mostly beside
  requests that did;
- *poison*: mostly while a prompt was computed that takes the engine for seconds;
- *prefill*: mostly while a much longer prompt than its own was computed;
- *crowd*: all tiers' work together was further behind than its target allows;
- *other*: none of these.

It names no signature and no remedy (`signatures`, `remedies`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

import numpy as np

from trimtab.engine_bridge.capacity import request_cost_ms
from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan
from trimtab.envs import score
from trimtab.training.diagnosis.alone import tpot_alone_ms, ttft_alone_ms
from trimtab.training.diagnosis.observed import BoolArray, FloatArray, IntArray, Observed
from trimtab.training.diagnosis.spans import Cover

TAIL_FACTOR: Final = 10.0
"""A first token is far later than its tier's median from this multiple of it on..."""
TAIL_S: Final = 1.0
"""...and from this many seconds of waiting beyond what an idle engine takes."""
LONG_FACTOR: Final = 8.0
"""A prompt is much longer than another if the idle engine takes this many times as long for it."""
LONG_MS: Final = 250.0
"""No prompt that the idle engine computes faster than this blocks anybody."""
POISON_FACTOR: Final = 8.0
"""A prompt is poison if the idle engine takes longer for it than this multiple of the strictest
TTFT target of the plan..."""
POISON_MS: Final = 5000.0
"""...and than this, milliseconds..."""
POISON_SHARE: Final = 0.02
"""...and if such prompts are at most this share of the requests: else they are the traffic."""
MOSTLY: Final = 0.5
"""Part of a wait from which on a cause explains it."""
CHURN: Final = 2
"""Preemptions from which on a request was preempted again and again."""
RECOMPUTED: Final = 0.02
"""Recomputed over computed prompt tokens from which on preemption is worth a name..."""
PREEMPTED: Final = 0.05
"""...or, where that is not known, the share of requests that were preempted."""


class Cause(enum.IntEnum):
    """What a victim waited for; NONE: it is no victim."""

    NONE = 0
    BEYOND = 1
    OVERLOAD = 2
    RECOMPUTE = 3
    POISON = 4
    PREFILL = 5
    CROWD = 6
    OTHER = 7


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Requests of a run, judged; arrays of shape (n,)."""

    cause: FloatArray
    """A `Cause` each."""
    missed: BoolArray
    """Missed a target or was not served; refused at once does not count."""
    tail: BoolArray
    """Its first token came far later than its tier's median, although it could have come sooner."""
    load: FloatArray
    """By tier: engine time asked for by it and the tiers above it, without poison, over time."""
    alone_ms: FloatArray
    """Time to first token on an idle engine, with what was found cached."""
    best_ms: FloatArray
    """The same with all cached that ever was."""
    pace_ms: FloatArray
    """Time per output token on an idle engine."""
    long: BoolArray
    """Computing it can block others."""
    poison: BoolArray
    prefill: Cover
    """When long prompts were computed, poison included."""


def judge(seen: Observed, plan: Plan, spec: EngineSpec) -> Judged:
    """Find the victims and what each waited for."""
    to = score.targets(plan)
    latencies = score.latencies(
        arrival_s=seen.arrival_s,
        first_token_s=seen.first_token_s,
        last_token_s=seen.last_token_s,
        generated_tokens=seen.generated_tokens,
    )
    met = score.judge(tier=seen.tier, outcome=seen.outcome, seen=latencies, to=to)
    alone_ms, pace_ms = ttft_alone_ms(seen, spec), tpot_alone_ms(seen, spec)
    best_ms = ttft_alone_ms(seen, spec, seen.new_tokens)
    poison = _poison(alone_ms, to)
    long = alone_ms >= LONG_MS
    missed = ~met.every & (seen.outcome != score.REFUSED)
    tail = _tail(seen, latencies.ttft_ms, alone_ms, plan) & ~poison
    victim = (_promised(seen, plan) & missed & ~poison) | tail
    asked = _Asked(seen, plan, spec, ~poison)
    cause = np.zeros(len(seen))
    prefill = _Blocked(seen, alone_ms, long)
    holds = (
        (Cause.BEYOND, lambda: _beyond(seen, best_ms, pace_ms, to)),
        (Cause.OVERLOAD, lambda: asked.too_much(to)),
        (Cause.RECOMPUTE, lambda: _beside_churn(seen)),
        (Cause.POISON, lambda: _Blocked(seen, alone_ms, poison).mostly(victim)),
        (Cause.PREFILL, lambda: prefill.mostly(victim)),
        (Cause.CROWD, lambda: asked.crowded(to)),
        (Cause.OTHER, lambda: np.ones(len(seen), np.bool_)),
    )
    for what, test in holds:
        left = victim & (cause == Cause.NONE)
        if left.any():
            cause[left & test()] = what
    return Judged(
        cause=cause,
        missed=missed,
        tail=tail,
        load=asked.load,
        alone_ms=alone_ms,
        best_ms=best_ms,
        pace_ms=pace_ms,
        long=long,
        poison=poison,
        prefill=prefill.cover,
    )


def _poison(alone_ms: FloatArray, to: score.Targets) -> BoolArray:
    strictest_ms = float(to.ttft_ms.min()) if np.isfinite(to.ttft_ms).any() else 0.0
    poison = alone_ms > max(POISON_FACTOR * strictest_ms, POISON_MS)
    return poison if poison.mean() <= POISON_SHARE else np.zeros(len(alone_ms), np.bool_)


def _promised(seen: Observed, plan: Plan) -> BoolArray:
    promised = np.array([not tier.targets.best_effort for tier in plan.tiers.values()])
    return np.asarray(promised[seen.tier])


def _tail(seen: Observed, ttft_ms: FloatArray, alone_ms: FloatArray, plan: Plan) -> BoolArray:
    tail = np.zeros(len(seen), np.bool_)
    waited = ttft_ms - alone_ms > TAIL_S * 1e3
    for number, tier in enumerate(plan.tiers.values()):
        known = (seen.tier == number) & np.isfinite(ttft_ms)
        if tier.targets.ttft_ms is not None and not tier.targets.best_effort and known.any():
            median_ms = float(np.median(ttft_ms[known]))
            tail |= known & waited & (ttft_ms > TAIL_FACTOR * median_ms)
    return tail


def _beyond(
    seen: Observed, alone_ms: FloatArray, pace_ms: FloatArray, to: score.Targets
) -> BoolArray:
    whole_ms = alone_ms + pace_ms * np.maximum(seen.generated_tokens - 1, 0)
    slow_pace = (seen.generated_tokens > 1) & (pace_ms > to.tpot_ms[seen.tier])
    beyond: BoolArray = (
        (alone_ms > to.ttft_ms[seen.tier]) | slow_pace | (whole_ms > to.e2e_ms[seen.tier])
    )
    return beyond


class _Asked:
    """The engine time that requests ask for, at the speed of the saturated engine (`capacity`)."""

    def __init__(self, seen: Observed, plan: Plan, spec: EngineSpec, counts: BoolArray) -> None:
        cost_ms = request_cost_ms(
            spec, seen.uncached_tokens, seen.prompt_tokens, np.maximum(seen.generated_tokens, 1)
        )
        self._seen = seen
        counts = counts & (seen.outcome != score.REFUSED)
        self._cost_s = np.where(counts, 1e-3 * cost_ms, 0.0)
        weights = np.array([tier.weight for tier in plan.tiers.values()])
        self._order = order = np.argsort(seen.arrival_s, kind="stable")
        self._counted = [order[weights[seen.tier[order]] >= weight] for weight in weights]
        span_s = max(float(np.ptp(seen.arrival_s)), 1e-9)
        self.load = np.array([float(self._cost_s[c].sum()) / span_s for c in self._counted])

    def too_much(self, to: score.Targets) -> BoolArray:
        """Who is late even where only its tier and those above it are served.

        Who finds more of their work than its target allows is late under any scheduler that serves
        its tier in order.
        """
        late = np.zeros(len(self._seen), np.bool_)
        for number, counted in enumerate(self._counted):
            mine = self._seen.tier[counted] == number
            allowed_s = 1e-3 * min(to.ttft_ms[number], to.e2e_ms[number])
            late[counted[mine]] = self._backlog_s(counted)[mine] > allowed_s
        return late

    def crowded(self, to: score.Targets) -> BoolArray:
        """Who is late where everybody is served in order of arrival."""
        late, counted = np.zeros(len(self._seen), np.bool_), self._order
        allowed_s = 1e-3 * np.minimum(to.ttft_ms, to.e2e_ms)[self._seen.tier[counted]]
        late[counted] = self._backlog_s(counted) > allowed_s
        return late

    def _backlog_s(self, counted: IntArray) -> FloatArray:
        """Work that each request finds in a fluid engine, by Lindley's recursion, seconds."""
        before_s = np.cumsum(self._cost_s[counted]) - self._cost_s[counted]
        ahead_s = before_s - self._seen.arrival_s[counted]
        found_s: FloatArray = ahead_s - np.minimum.accumulate(ahead_s)
        return found_s


def _beside_churn(seen: Observed) -> BoolArray:
    """Who gave way, or waited mostly beside requests that did, where that feeds itself."""
    gave_way = seen.preemptions > 0
    if not (_feeds_itself(seen) and (seen.preemptions >= CHURN).any()):
        return np.zeros(len(seen), np.bool_)
    ends_s = np.where(np.isfinite(seen.last_token_s), seen.last_token_s, seen.end_s)
    cover = Cover(seen.arrival_s[gave_way], ends_s[gave_way])
    waited_s = seen.waited_until_s - seen.arrival_s
    beside = cover.of(seen.arrival_s, seen.waited_until_s) >= MOSTLY * waited_s
    return gave_way | (beside & (waited_s > 0))


def _feeds_itself(seen: Observed) -> bool:
    computed = float(seen.uncached_tokens[np.isfinite(seen.first_token_s)].sum())
    recomputed = float(seen.recomputed_tokens.sum())
    if np.isfinite(recomputed):
        return recomputed >= RECOMPUTED * computed > 0.0
    return float((seen.preemptions > 0).mean()) >= PREEMPTED


class _Blocked:
    """When some of the prompts were computed, and whose wait that covers."""

    def __init__(self, seen: Observed, alone_ms: FloatArray, blocking: BoolArray) -> None:
        self._seen, self._alone_ms, self._blocking = seen, alone_ms, blocking
        begun_s, done_s = _computed(seen, alone_ms)
        self.cover = Cover(begun_s[blocking], done_s[blocking])
        self._begun_s, self._done_s = begun_s, done_s

    def mostly(self, victims: BoolArray) -> BoolArray:
        """Victims whose wait is mostly covered by prompts much longer than their own."""
        seen, found = self._seen, np.zeros(len(self._seen), np.bool_)
        waited_s = seen.waited_until_s - seen.arrival_s
        # A few classes of length instead of a cover for each victim.
        rank = np.floor(np.log2(np.maximum(self._alone_ms, 1e-3)))
        for of in np.unique(rank[victims]):
            mine = victims & (rank == of)
            longer = self._blocking & (self._alone_ms >= LONG_FACTOR * 2.0**of)
            if longer.any():
                cover = Cover(self._begun_s[longer], self._done_s[longer])
                covered_s = cover.of(seen.arrival_s, seen.waited_until_s)
                found |= mine & (covered_s >= MOSTLY * waited_s)
        return found


def _computed(seen: Observed, alone_ms: FloatArray) -> tuple[FloatArray, FloatArray]:
    """When each prompt's computing began and was done, seconds.

    Where the beginning is not known: as long before the first token as an engine takes that gives
    it half of its time.
    """
    guessed_s = np.maximum(seen.arrival_s, seen.first_token_s - 2e-3 * alone_ms)
    begun_s = np.where(np.isfinite(seen.admitted_s), seen.admitted_s, guessed_s)
    done_s = np.where(np.isfinite(seen.admitted_s), seen.waited_until_s, seen.first_token_s)
    return np.nan_to_num(begun_s, nan=np.inf), np.nan_to_num(done_s, nan=-np.inf)
