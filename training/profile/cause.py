"""The most likely cause of a slow-down, as far as the traffic shows it: one sentence, its evidence.

The demand that was added since before is taken apart exactly: by sender, and by what changed (more
requests, longer prompts, less from the cache, longer answers). It is arithmetic, not proof: that
demand grew and the tier became slow at the same time is all that a log can show.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

import numpy as np

from trimtab.engine_bridge.pricing import OUTPUT_PRICE, REPEATED_PROMPT_PRICE
from trimtab.training.profile.figures import Compared, most_within
from trimtab.training.profile.logged import BoolArray, FloatArray, Logged
from trimtab.training.report import words

LEAST_GROWTH: Final = 0.15
"""Growth of the demand below which it explains nothing."""
LEAST_BEFORE_S: Final = 30.0
"""Shortest time before the window that it can be compared with, seconds."""
LEAST_REQUESTS: Final = 20
"""Fewest requests in that time."""
MOSTLY: Final = 0.7
"""Part of a change from which on it is one sender's, or one tier's."""
UNKNOWN_REQUESTS: Final = 0.2
"""Requests that are not in the log yet over those that are, from which on that matters."""
LONG: Final = 2.0
"""A sender's mean prompt over everybody's, from which on it is worth a word."""
BURST_S: Final = 10.0
"""Length of a burst, seconds."""
BURST_FACTOR: Final = 3.0
"""A burst is so many times what came in any stretch of that length before."""


class Kind(enum.StrEnum):
    """What has changed; a closed set."""

    MORE_REQUESTS = "more_requests"
    LONGER_PROMPTS = "longer_prompts"
    LESS_REUSE = "less_reuse"
    LONGER_ANSWERS = "longer_answers"
    BURST = "burst"
    """More requests, for seconds only."""
    NOT_THE_TRAFFIC = "not_the_traffic"
    """The traffic asks for what it asked for before."""
    UNKNOWN = "unknown"
    """There is nothing to compare with."""


_FACTORS: Final = (
    Kind.MORE_REQUESTS,
    Kind.LONGER_PROMPTS,
    Kind.LESS_REUSE,
    Kind.LONGER_ANSWERS,
)


@dataclass(frozen=True, kw_only=True)
class Cause:
    """The finding."""

    kind: Kind
    tenant: str | None
    """Whose change it is; None where it is not one tenant's."""
    tier: str | None
    share: float | None
    """Part of the added demand that it explains."""
    growth: float | None
    """Demand now over demand before."""
    sentence: str


def find_cause(logged: Logged, compared: Compared, *, unfinished: int = 0) -> Cause:
    """Name the most likely cause.

    Args:
        logged: The requests.
        compared: Their senders, now and before.
        unfinished: Requests that had not ended when the log was read, and so are not in it.
    """
    before = compared.before
    earlier = int(np.count_nonzero(~logged.in_window))
    if before is None or logged.before_s < LEAST_BEFORE_S or earlier < LEAST_REQUESTS:
        return _unknown(compared)
    parts = taken_apart(compared)
    added = {kind: float(parts[kind].sum()) for kind in _FACTORS}
    total = float(compared.now.demand.sum() - before.demand.sum())
    growth = float(compared.now.demand.sum()) / max(float(before.demand.sum()), 1e-12)
    if growth < 1.0 + LEAST_GROWTH:
        unknown = (
            unfinished if unfinished >= UNKNOWN_REQUESTS * (len(logged.trace) - earlier) else 0
        )
        return _burst(logged, compared, growth) or _elsewhere(growth, unknown)
    kind = max(_FACTORS, key=lambda kind: added[kind])
    whose = _whose(compared, parts[kind])
    share = min(1.0, float(parts[kind][whose.senders].sum()) / total)
    sentence = (
        f"Most likely cause: {_told(kind, compared, whose)}. That is {words.percent(share, 0)} of "
        f"the demand that was added; all demand together is {growth:.1f} times what it was before."
    )
    return Cause(
        kind=kind,
        tenant=whose.tenant,
        tier=whose.tier,
        share=share,
        growth=growth,
        sentence=sentence,
    )


@dataclass(frozen=True)
class _Whose:
    """Those whose change it is: one tenant, one tier or all."""

    senders: BoolArray
    tenant: str | None
    tier: str | None

    def __str__(self) -> str:
        if self.tenant is not None:
            return f"of tenant {self.tenant} in {self.tier}"
        return f"of several tenants in {self.tier}" if self.tier is not None else "of all tenants"


def _whose(compared: Compared, change: FloatArray) -> _Whose:
    # Of the change as a whole: many tenants' ups and downs beside it cancel each other.
    enough = MOSTLY * float(change.sum())
    top = int(np.argmax(change))
    if change[top] >= enough:
        tenant, tier = compared.names[top]
        return _Whose(np.arange(len(change)) == top, tenant, tier)
    tiers = np.array([tier for _, tier in compared.names])
    for tier in dict.fromkeys(tiers.tolist()):
        if float(change[tiers == tier].sum()) >= enough:
            return _Whose(tiers == tier, None, tier)
    return _Whose(np.ones(len(change), np.bool_), None, None)


def taken_apart(compared: Compared) -> dict[Kind, FloatArray]:
    """Added demand by what changed and by sender, priced tokens a second, shape (senders,).

    The four add up to the change of a sender's demand exactly: each is changed with the ones
    before it changed already. Whoever sent nothing before, or nothing now, is all requests.
    """
    now, before = compared.now, compared.before
    assert before is not None
    stays = (now.per_s > 0) & (before.per_s > 0)
    kept = 1.0 - REPEATED_PROMPT_PRICE
    longer = (now.prompt_tokens - before.prompt_tokens) * (1.0 - kept * before.cached)
    fresher = now.prompt_tokens * kept * (before.cached - now.cached)
    answers = OUTPUT_PRICE * (now.output_tokens - before.output_tokens)
    requests = np.where(stays, (now.per_s - before.per_s) * before.work, now.demand - before.demand)
    return {
        Kind.MORE_REQUESTS: requests,
        Kind.LONGER_PROMPTS: np.where(stays, now.per_s * longer, 0.0),
        Kind.LESS_REUSE: np.where(stays, now.per_s * fresher, 0.0),
        Kind.LONGER_ANSWERS: np.where(stays, now.per_s * answers, 0.0),
    }


def _told(kind: Kind, compared: Compared, whose: _Whose) -> str:
    """What changed, in words: of one sender, one tier, or of all together."""
    now, before = compared.now, compared.before
    assert before is not None
    mine = whose.senders
    if kind is Kind.LESS_REUSE:
        return _reuse(compared, whose)
    if kind is Kind.MORE_REQUESTS:
        a, b = float(now.per_s[mine].sum()), float(before.per_s[mine].sum())
        rates = f"{words.figures(a)} a second against {words.figures(b) if b else 'none'} before"
        return f"more requests {whose}, {rates}{_times(a, b)}{_long(compared, whose)}"
    prompts = kind is Kind.LONGER_PROMPTS
    a, b = (
        _mean(side.prompt_tokens if prompts else side.output_tokens, side.per_s, mine)
        for side in (now, before)
    )
    return (
        f"longer {'prompts' if prompts else 'answers'} {whose}, {a:,.0f} tokens in the mean "
        f"against {b:,.0f} before{_times(a, b)}"
    )


def _reuse(compared: Compared, whose: _Whose) -> str:
    now, before = compared.now, compared.before
    assert before is not None
    w_now, w_before = now.per_s * now.prompt_tokens, before.per_s * before.prompt_tokens
    mine = whose.senders
    cached = _mean(now.cached, w_now, mine), _mean(before.cached, w_before, mine)
    repeated = (
        _mean(compared.repeated_now, w_now, mine),
        _mean(compared.repeated_before, w_before, mine),
    )
    told = (
        f"lost prefix reuse {whose}, {words.percent(cached[0], 0)} of the prompt tokens came from "
        f"the cache against {words.percent(cached[1], 0)} before"
    )
    shares = f"({words.percent(repeated[0], 0)} against {words.percent(repeated[1], 0)})"
    if repeated[1] - repeated[0] >= 0.5 * (cached[1] - cached[0]):
        return (
            f"{told}, because the prompts themselves repeat less {shares}: something near their "
            "beginning has changed"
        )
    return f"{told}, although the prompts repeat as before {shares}: the cache no longer keeps them"


def _long(compared: Compared, whose: _Whose) -> str:
    """How long one sender's prompts are, where they are far from the usual."""
    before = compared.before
    if whose.tenant is None or before is None:
        return ""
    mine = _mean(compared.now.prompt_tokens, compared.now.per_s, whose.senders)
    usual = _mean(before.prompt_tokens, before.per_s, np.ones(len(before.per_s), np.bool_))
    return f", with prompts of {mine:,.0f} tokens in the mean" if mine > LONG * usual else ""


def _mean(values: FloatArray, weights: FloatArray, mine: BoolArray) -> float:
    return float((values * weights)[mine].sum() / max(float(weights[mine].sum()), 1e-12))


def _times(now: float, before: float) -> str:
    return f" ({now / before:.1f} times)" if before > 0 else ""


def _burst(logged: Logged, compared: Compared, growth: float) -> Cause | None:
    """One tenant's requests of a few seconds, where the mean has hardly grown."""
    trace, now = logged.trace, logged.in_window
    found: tuple[float, int, int, int] | None = None
    for sender, (tenant, tier) in enumerate(compared.names):
        mine = (trace.tenant == trace.tenant_names.index(tenant)) & (
            trace.tier == trace.tier_names.index(tier)
        )
        peak = most_within(trace.arrival_s[mine & now], BURST_S)
        usual = most_within(trace.arrival_s[mine & ~now], BURST_S)
        if peak < max(LEAST_REQUESTS, BURST_FACTOR * usual):
            continue
        weight = (peak - usual) * float(compared.now.work[sender])
        if found is None or weight > found[0]:
            found = weight, sender, peak, usual
    if found is None:
        return None
    _, sender, peak, usual = found
    tenant, tier = compared.names[sender]
    sentence = (
        f"Most likely cause: a burst of tenant {tenant} in {tier}, {peak} requests within "
        f"{BURST_S:g} seconds against {usual} at most before; over the whole window all demand is "
        f"{growth:.1f} times what it was before."
    )
    return Cause(
        kind=Kind.BURST, tenant=tenant, tier=tier, share=None, growth=growth, sentence=sentence
    )


def _elsewhere(growth: float, unknown: int) -> Cause:
    found = f"the requests in the log ask for {growth:.1f} times what they asked for before"
    if unknown:
        sentence = (
            f"The log does not explain it: {found}, but {unknown:,} requests had not ended when it "
            "was read and are not in it. Profile the same time again when they have."
        )
    else:
        sentence = (
            f"The traffic does not explain it: {found}, and no tenant sent a burst. Look at the "
            "engine (step time, KV use, preemptions) and at the allocation."
        )
    return Cause(
        kind=Kind.NOT_THE_TRAFFIC,
        tenant=None,
        tier=None,
        share=None,
        growth=growth,
        sentence=sentence,
    )


def _unknown(compared: Compared) -> Cause:
    demand = compared.now.demand
    sender = int(np.argmax(demand))
    share = float(demand[sender] / max(float(demand.sum()), 1e-12))
    tenant, tier = compared.names[sender]
    sentence = (
        "The log does not reach back far enough to say what has changed; the largest part of the "
        f"demand in the window is tenant {tenant}'s in {tier}, {words.percent(share, 0)} of it."
    )
    return Cause(
        kind=Kind.UNKNOWN, tenant=tenant, tier=tier, share=share, growth=None, sentence=sentence
    )
