"""The loops' states as JSON: a line for every engine, everything about the one that is looked at.

It only lays out; what the figures mean in words is `words`' business. NaN and infinity are null:
"no data" is never zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from trimtab.agents.verdict import GuardMode
from trimtab.controller.daemon.state import Decision, LoopState
from trimtab.controller.web import words
from trimtab.controller.web.view import age_now_s, since_tick_s
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.telemetry import Telemetry, TierTelemetry
from trimtab.engine_bridge.vllm.control_values import allocation_by_names

RECENT_S: Final = 300.0
"""What "lately" means for attainment, seconds."""
DRAWN_KNOBS: Final = (
    "weights",
    "kv_fractions",
    "prefill_shares",
    "prefill_budget_tokens",
    "slack_fraction",
    "low_tier_chunk_share",
    "shed_at",
)
"""What the guard lets a policy move, and so what a decision carries over the wire."""
_TIER_LEVELS: Final = (
    "queue_length",
    "oldest_wait_s",
    "running",
    "kv_blocks_used",
    "kv_blocks_guaranteed",
    "kv_blocks_lent",
    "preemptions",
    "refused",
    "ttft_ms_p50",
    "ttft_ms_p99",
    "tpot_ms_p50",
    "tpot_ms_p99",
)
"""Fields of a tier's telemetry that are shown as they are."""

Json = dict[str, Any]


def overview(states: Mapping[str, LoopState], now_unix_s: float, version: str) -> Json:
    """A few figures and one sentence for every engine.

    Args:
        states: By engine.
        now_unix_s: Seconds since 1970.
        version: Trimtab's.
    """
    return plain(
        {
            "now_unix_s": now_unix_s,
            "version": version,
            "words": {
                "reasons": dict(words.REASONS),
                "contacts": dict(words.CONTACTS),
                "modes": dict(words.MODES),
            },
            "engines": [_line(state, now_unix_s) for state in states.values()],
        }
    )


def detail(state: LoopState, now_unix_s: float, *, since: int = 0) -> Json:
    """Everything about one engine.

    Args:
        state: Its newest state.
        now_unix_s: Seconds since 1970.
        since: Only decisions with a greater number are in it; 0 for all that there are.
    """
    return plain(
        _line(state, now_unix_s)
        | {
            "plan": {
                "name": state.plan.name,
                "description": state.plan.description,
                "digest": state.plan.digest,
            },
            "bundle_digest": state.bundle_digest,
            "bundle_error": state.bundle_error,
            "detail": state.detail,
            "holder": state.holder,
            "lease_left_s": state.lease_left_s,
            "tally": _tally(state),
            "late_ticks": state.late_ticks,
            "audit_lost": state.audit_lost,
            "faults": state.faults,
            "profile": state.profile,
            "static": allocation_by_names(Allocation.static(state.plan), state.plan),
            "applied": _applied(state),
            "engine_figures": _engine(state.telemetry),
            "tiers": _tiers(state),
            "pools": list(state.plan.pool_names),
            "decisions": _decisions(state, since),
        }
    )


def plain(value: Any) -> Any:
    """A value that JSON can say: what is no finite number becomes null, however deep it is."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def _line(state: LoopState, now_unix_s: float) -> Json:
    stands = words.standing(state, now_unix_s)
    last = state.history[-1] if state.history else None
    return {
        "engine": state.engine,
        "level": stands.level,
        "headline": stands.headline,
        "hint": stands.hint,
        "age_s": age_now_s(state, now_unix_s),
        "contact": state.contact,
        "mode": state.mode,
        "policy": state.policy,
        "latched": state.latched,
        "exposure": last.exposure if last else 0.0,
        "fell_back": bool(last and last.fell_back),
        "ticks": state.ticks,
        "last_tick_unix_s": last.unix_s if last else None,
        "since_tick_s": since_tick_s(state, now_unix_s),
        "interval_s": state.plan.controller.interval_s,
    }


def _tally(state: LoopState) -> Json:
    tally = state.tally
    return {
        "intervals": tally.intervals,
        "fell_back": tally.fell_back,
        "trips": tally.trips,
        "reasons": {reason.value: count for reason, count in tally.reasons.items()},
    }


def _applied(state: LoopState) -> Json | None:
    """What the engine keeps to, as it said last."""
    for decision in reversed(state.history):
        if decision.applied is not None:
            return allocation_by_names(decision.applied, state.plan)
    if state.telemetry is None:
        return None
    return allocation_by_names(state.telemetry.applied, state.plan)


def _engine(telemetry: Telemetry | None) -> Json | None:
    if telemetry is None:
        return None
    return {
        "busy_fraction": telemetry.busy_fraction,
        "kv_use_fraction": telemetry.kv_use_fraction,
        "batch_mean": telemetry.batch_mean,
        "step_ms_mean": telemetry.step_ms_mean,
    }


def _tiers(state: LoopState) -> list[Json]:
    lately = _recent(state)
    telemetry = state.telemetry
    figures: Sequence[TierTelemetry | None] = (
        telemetry.tiers if telemetry else [None] * len(state.plan.tiers)
    )
    return [
        {
            "tier": name,
            "description": tier.description,
            "pool": tier.pool,
            "best_effort": tier.targets.best_effort,
            "targets": {
                "ttft_ms": tier.targets.ttft_ms,
                "tpot_ms": tier.targets.tpot_ms,
                "e2e_ms": tier.targets.e2e_ms,
                "attainment": tier.targets.attainment,
            },
            "met": met,
            "judged": judged,
            "recent_s": RECENT_S,
            "now": _tier_now(figure, telemetry) if figure and telemetry else None,
        }
        for (name, tier), figure, (met, judged) in zip(
            state.plan.tiers.items(), figures, lately, strict=True
        )
    ]


def _tier_now(figure: TierTelemetry, telemetry: Telemetry) -> Json:
    """What a tier got in the last interval."""
    span_s = telemetry.interval_s if telemetry.interval_s > 0 else math.nan
    service_ms = sum(tier.service_ms for tier in telemetry.tiers)
    return {
        **{name: getattr(figure, name) for name in _TIER_LEVELS},
        "attainment": figure.attainment if figure.has_attainment else None,
        "arrivals_per_s": figure.arrivals / span_s,
        "prefill_tokens_per_s": figure.prefill_tokens / span_s,
        "decode_tokens_per_s": figure.decode_tokens / span_s,
        "service_fraction": figure.service_ms / service_ms if service_ms > 0 else None,
    }


def _recent(state: LoopState) -> list[tuple[int, int]]:
    """By tier, requests that met their targets lately, and requests judged."""
    totals = [(0, 0)] * len(state.plan.tiers)
    if not state.history:
        return totals
    from_s = state.history[-1].unix_s - RECENT_S
    for before, decision in _pairs(state.history):
        if decision.unix_s > from_s and decision.samples and not _repeats(before, decision):
            totals = [
                (met + _met(share, judged), all_judged + judged)
                for (met, all_judged), share, judged in zip(
                    totals, decision.attainment, decision.samples, strict=True
                )
            ]
    return totals


def _decisions(state: LoopState, since: int) -> list[Json]:
    return [
        _decision(before, decision)
        for before, decision in _pairs(state.history)
        if decision.number > since
    ]


def _decision(before: Decision | None, decision: Decision) -> Json:
    repeated = _repeats(before, decision)
    applied = decision.applied
    return {
        "number": decision.number,
        "unix_s": decision.unix_s,
        "contact": decision.contact,
        "mode": decision.mode,
        "reasons": list(decision.reasons),
        "exposure": decision.exposure,
        "fell_back": decision.fell_back,
        "age_s": decision.age_s,
        "tick_ms": decision.tick_ms,
        "judged": None if repeated else list(decision.samples),
        "met": None if repeated else list(map(_met, decision.attainment, decision.samples)),
        "ttft_ms_p99": None if repeated else list(decision.ttft_ms_p99),
        "queue_length": list(decision.queue_length),
        "applied": {knob: getattr(applied, knob) for knob in DRAWN_KNOBS} if applied else None,
    }


def _pairs(history: Sequence[Decision]) -> zip[tuple[Decision | None, Decision]]:
    return zip((None, *history), history, strict=False)


def _repeats(before: Decision | None, decision: Decision) -> bool:
    """Whether a decision carries the figures of the one before again, because none came."""
    return (
        before is not None
        and decision.age_s > before.age_s
        and decision.samples == before.samples
        and decision.queue_length == before.queue_length
        and repr(decision.attainment) == repr(before.attainment)
        and repr(decision.ttft_ms_p99) == repr(before.ttft_ms_p99)
    )


def _met(share: float, judged: int) -> int:
    return round(share * judged) if judged > 0 and math.isfinite(share) else 0


def modes_to_order() -> tuple[GuardMode, ...]:
    """Modes that can be ordered; a hold is an order of its own."""
    return tuple(mode for mode in GuardMode if mode is not GuardMode.HOLD)
