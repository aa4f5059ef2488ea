"""An abstract server under the fair queue: batches of requests, no engine, everything random.

It knows nothing of tokens or blocks: a place in the batch, true costs, wrong estimates, changing
weights. It watches what rule 3 bounds, at every event and by its own count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.compiled import compiled
from trimtab.engine_bridge.replay.layout import F8, I4, NONE
from trimtab.engine_bridge.replay.records import (
    ENGINE,
    LIST,
    REQUEST,
    TENANT,
    TIER,
    Records,
    records,
)
from trimtab.engine_bridge.rules import fair_queue

_SCAN = 8
_LONGEST_QUEUE = 4
_GROWTH = 1.0 + 1e-12


class Level(NamedTuple):
    """The fair queue's memory, in the order of its functions' arguments."""

    engine: Records
    tiers: Records
    tenants: Records
    req: Records
    lists: Records
    active: I4


class Watch(NamedTuple):
    """What is counted of each flow (tiers, or tenants), independently of the accounts."""

    normalised_ms: F8
    low: F8
    """(flows, flows): least difference of normalised service while both are backlogged; NaN."""
    high: F8
    gap: F8
    """(flows, flows): largest spread of such a difference over any interval."""
    in_flight: I4
    most_in_flight: I4
    largest_ms: F8
    """Largest estimate that a request was ever given."""
    overrun_ms: F8
    """Most that one request used beyond its first estimate."""
    least_weight: F8
    greatest_weight: F8


class Chances(NamedTuple):
    """Parameters of the random workload; probabilities are per step."""

    batch: int
    error: float
    """Estimates are the true costs times up to this factor, or over it."""
    tail: float
    """Pareto exponent of the true costs."""
    weights: float
    toggle: float
    hold: float
    cancel: float
    demote: float
    reestimate: float
    outlive: float
    feasible: int
    """Rule 14 on: pick within the window instead of by the least finish."""
    passes: float = 0.0
    """A tier's candidate passes what it has started, up to all of it."""


class Windows(NamedTuple):
    """How far the order may stray: rule 14 among tenants, ageing among tiers and among tenants."""

    feasible_ms: float = 0.0
    tiers_ms: float = 0.0
    tenants_ms: float = 0.0
    prefill_factor: float = np.inf
    """Of rule 14's order; infinite: by the prefill alone."""


PURE = Windows()
"""Pure fair queueing."""


@dataclass(frozen=True)
class Case:
    """A server before its first request, and what will be counted of it."""

    level: Level
    tiers: Watch
    tenants: Watch


def build_level(
    weights: list[float], shares: list[list[float]], requests: int, windows: Windows = PURE
) -> Level:
    """Memory for tiers of these weights, with tenants of these shares (one list a tier)."""
    accounts = sum(len(of_tier) for of_tier in shares)
    level = Level(
        engine=records(1, ENGINE),
        tiers=records(len(weights), TIER),
        tenants=records(accounts, TENANT),
        req=records(requests, REQUEST),
        lists=records(accounts, LIST),
        active=np.full(accounts, NONE, np.int32),
    )
    level.engine.window_ms[:] = windows.feasible_ms
    level.engine.prefill_factor[:] = windows.prefill_factor
    level.engine.age_tiers_ms[:] = windows.tiers_ms
    level.engine.age_tenants_ms[:] = windows.tenants_ms
    level.tiers.weight[:] = weights
    counts = [len(of_tier) for of_tier in shares]
    level.tiers.active_start[:] = np.concatenate(([0], np.cumsum(counts)[:-1]))
    level.tenants.tier[:] = np.repeat(np.arange(len(counts)), counts)
    level.tenants.share[:] = np.concatenate([np.array(of_tier) for of_tier in shares])
    level.tenants.active_slot[:] = NONE
    for column in ("head", "tail"):
        level.lists[column][:] = NONE
    for column in ("list", "next", "prev"):
        level.req[column][:] = NONE
    return level


def _watch(weights: npt.NDArray[np.float64]) -> Watch:
    n = len(weights)
    zeros, none = np.zeros(n), np.full((n, n), np.nan)
    count = np.zeros(n, np.int32)
    return Watch(
        zeros.copy(),
        none.copy(),
        none.copy(),
        np.zeros((n, n)),
        count.copy(),
        count.copy(),
        zeros.copy(),
        zeros.copy(),
        weights.copy(),
        weights.copy(),
    )


def random_case(rng: np.random.Generator, *, requests: int, windows: Windows) -> Case:
    """Two to four tiers of random weights, each with one to four tenants of random shares.

    Half of the tenants are interactive; a request has the whole lead after up to 300 arrivals.
    """
    weights = [float(10.0 ** rng.uniform(-1, 2)) for _ in range(rng.integers(2, 5))]
    shares = [
        [float(10.0 ** rng.uniform(-1, 1)) for _ in range(rng.integers(1, 5))] for _ in weights
    ]
    level = build_level(weights, shares, requests, windows)
    level.tiers.ttft_s[:] = rng.uniform(0.0, 60.0)
    level.engine.lead_per_s[:] = 1.0 / rng.uniform(1.0, 300.0)
    level.tenants.bonus[:] = rng.random() * rng.integers(0, 2, len(level.tenants))
    return Case(level, _watch(level.tiers.weight), _watch(level.tenants.share))


@compiled
def enqueue(level: Level, row: int, account: int) -> None:
    """`fair_queue.enqueue` on a level."""
    engine, tiers, tenants, req, lists, active = level
    fair_queue.enqueue(engine, tiers, tenants, req, lists, active, row, account)


@compiled
def dispatch(level: Level, row: int, true_up: int = 1) -> None:
    """`fair_queue.dispatch` on a level."""
    engine, tiers, tenants, req, lists, active = level
    account = req[row].tenant
    fair_queue.dispatch(engine, tiers, tenants, req, lists, active, row, account, true_up)


@compiled
def withdraw(level: Level, row: int) -> None:
    """`fair_queue.withdraw` on a level."""
    _, tiers, tenants, req, lists, active = level
    fair_queue.withdraw(tiers, tenants, req, lists, active, row, req[row].tenant)


@compiled
def _observe(w: Watch, i: int, j: int, both: bool) -> None:
    """Follow the difference of two flows' normalised service; the interval ends when not `both`."""
    if not both:
        w.low[i, j] = np.nan
        return
    difference = w.normalised_ms[i] - w.normalised_ms[j]
    if np.isnan(w.low[i, j]):
        w.low[i, j] = w.high[i, j] = difference
    w.low[i, j] = min(w.low[i, j], difference)
    w.high[i, j] = max(w.high[i, j], difference)
    w.gap[i, j] = max(w.gap[i, j], w.high[i, j] - w.low[i, j])


@compiled
def _observe_all(level: Level, tiers: Watch, tenants: Watch, held: I4) -> None:
    for i in range(len(level.tiers)):
        for j in range(i):
            a, b = level.tiers[i], level.tiers[j]
            both = a.active_count > 0 and b.active_count > 0 and held[i] == 0 and held[j] == 0
            _observe(tiers, i, j, both)
    for i in range(len(level.tenants)):
        for j in range(i):
            x, y = level.tenants[i], level.tenants[j]
            if x.tier == y.tier:
                _observe(tenants, i, j, x.active_slot != NONE and y.active_slot != NONE)


@compiled
def _count(w: Watch, flow: int, change: int) -> None:
    w.in_flight[flow] += change
    w.most_in_flight[flow] = max(w.most_in_flight[flow], w.in_flight[flow])


@compiled
def pick(level: Level, feasible: int, held: I4) -> int:
    """The next request: least virtual finish among the tiers' own choices."""
    engine, tiers, tenants, req, lists, active = level
    best, best_finish = NONE, np.inf
    for t in range(len(tiers)):
        if held[t] == 1 or tiers[t].active_count == 0:
            continue
        if feasible == 1:
            row = fair_queue.next_by_feasibility(
                engine, tiers, tenants, req, lists, active, t, _SCAN
            )
        else:
            row = fair_queue.next_by_finish(engine, tiers, tenants, req, lists, active, t)
        finish = fair_queue.candidate_start_ms(tiers[t]) + req[row].estimate_ms / tiers[t].weight
        tenant, window_ms = tenants[req[row].tenant], engine[0].age_tiers_ms
        finish -= fair_queue.lead_ms(engine, tenant, req[row], window_ms)
        if finish < best_finish:
            best, best_finish = row, finish
    return best


@compiled
def _arrive(
    rng: np.random.Generator,
    level: Level,
    tiers: Watch,
    tenants: Watch,
    chances: Chances,
    cost: F8,
    row: int,
    account: int,
) -> None:
    r = level.req[row]
    r.tenant, r.tier = account, level.tenants[account].tier
    cost[row] = min(1e4, (1.0 - rng.random()) ** (-1.0 / chances.tail))
    r.estimate_ms = cost[row] * chances.error ** (2.0 * rng.random() - 1.0)
    r.prefill_estimate_ms = r.estimate_ms * rng.random()
    r.arrived_s = float(row)
    for w, flow in ((tiers, r.tier), (tenants, account)):
        w.largest_ms[flow] = max(w.largest_ms[flow], r.estimate_ms)
    enqueue(level, row, account)


@compiled
def _move(
    rng: np.random.Generator, level: Level, chances: Chances, held: I4, on: I4, tiers: Watch
) -> None:
    """Change weights, tenants' activity and who is held back."""
    for t in range(len(level.tiers)):
        if rng.random() < chances.weights:
            tier = level.tiers[t]
            tier.weight *= 4.0 ** (2.0 * rng.random() - 1.0)
            tier.weight = min(1e3, max(1e-2, tier.weight))
            tiers.least_weight[t] = min(tiers.least_weight[t], tier.weight)
            tiers.greatest_weight[t] = max(tiers.greatest_weight[t], tier.weight)
        if rng.random() < chances.hold:
            held[t] = 1 - held[t]
    for account in range(len(level.tenants)):
        if rng.random() < chances.toggle:
            on[account] = 1 - on[account]


@compiled
def _pass_some(rng: np.random.Generator, level: Level, chances: Chances) -> None:
    """Let the tiers' candidates pass some of what the tiers have started."""
    for t in range(len(level.tiers)):
        tier = level.tiers[t]
        passes = rng.random() < chances.passes
        tier.passed_ms = tier.outstanding_ms * rng.random() if passes else 0.0


@compiled
def _leave_waiting(
    rng: np.random.Generator, level: Level, chances: Chances, held: I4, tiers: Watch, tenants: Watch
) -> None:
    """Cancel or demote a waiting request of each tenant now and then."""
    for account in range(len(level.tenants)):
        if level.lists[account].count == 0:
            continue
        draw = rng.random()
        if draw > chances.cancel + chances.demote:
            continue
        row = level.lists[account].head
        for _ in range(rng.integers(0, level.lists[account].count)):
            row = level.req[row].next
        withdraw(level, row)
        _observe_all(level, tiers, tenants, held)
        if draw < chances.demote:
            enqueue(level, row, account)


@compiled
def _start(
    rng: np.random.Generator,
    level: Level,
    tiers: Watch,
    tenants: Watch,
    chances: Chances,
    row: int,
    first: F8,
) -> None:
    r = level.req[row]
    first[row] = r.estimate_ms
    if rng.random() < chances.reestimate:
        r.estimate_ms *= 2.0 ** (2.0 * rng.random() - 1.0)
    first[row] = min(first[row], r.estimate_ms)
    dispatch(level, row)
    for w, flow in ((tiers, r.tier), (tenants, r.tenant)):
        w.largest_ms[flow] = max(w.largest_ms[flow], r.estimate_ms)
        _count(w, flow, 1)


@compiled
def _serve(
    rng: np.random.Generator,
    level: Level,
    tiers: Watch,
    tenants: Watch,
    chances: Chances,
    cost: F8,
    first: F8,
    row: int,
) -> bool:
    """One request's part of a step; whether it ended."""
    r = level.req[row]
    ms = min(cost[row] - r.service_ms, 0.05 * cost[row] + rng.random() * 2.0)
    tiers.normalised_ms[r.tier] += ms / level.tiers[r.tier].weight
    tenants.normalised_ms[r.tenant] += ms / level.tenants[r.tenant].share
    fair_queue.use(level.tiers, level.tenants, level.req, row, r.tenant, ms, 1)
    over = r.service_ms - first[row]
    ended = r.service_ms * _GROWTH >= cost[row] or rng.random() < 0.1 * chances.cancel
    if not ended and r.service_ms > r.estimate_ms and rng.random() < chances.outlive:
        fair_queue.expect(level.tiers, level.tenants, level.req, row, r.tenant, r.service_ms, 1)
    for w, flow in ((tiers, r.tier), (tenants, r.tenant)):
        w.overrun_ms[flow] = max(w.overrun_ms[flow], over)
        w.largest_ms[flow] = max(w.largest_ms[flow], r.estimate_ms)
        if ended:
            _count(w, flow, -1)
    if ended:
        fair_queue.settle(level.tiers, level.tenants, level.req, row, r.tenant, 1)
    return ended


@compiled
def run(
    rng: np.random.Generator, level: Level, tiers: Watch, tenants: Watch, chances: Chances
) -> int:
    """Serve until the rows are used up; returns the number of dispatches."""
    rows, accounts = len(level.req), len(level.tenants)
    cost, first = np.zeros(rows), np.zeros(rows)
    running = np.zeros(chances.batch, np.int32)
    held = np.zeros(len(level.tiers), np.int32)
    on = np.ones(accounts, np.int32)
    count, used, started = 0, 0, 0
    while used < rows:
        level.engine[0].now_s = float(used)
        _move(rng, level, chances, held, on, tiers)
        for account in range(accounts):
            while (
                used < rows
                and on[account] == 1
                and level.lists[account].count < _LONGEST_QUEUE
                and rng.random() < 0.7
            ):
                _arrive(rng, level, tiers, tenants, chances, cost, used, account)
                used += 1
                _observe_all(level, tiers, tenants, held)
        _leave_waiting(rng, level, chances, held, tiers, tenants)
        while count < chances.batch:
            _pass_some(rng, level, chances)
            row = pick(level, chances.feasible, held)
            if row == NONE:
                break
            _start(rng, level, tiers, tenants, chances, row, first)
            running[count] = row
            count += 1
            started += 1
            _observe_all(level, tiers, tenants, held)
        for t in range(len(held)):
            if held[t] == 1:
                tier = level.tiers[t]
                behind_ms = tier.largest_estimate_ms / tier.weight
                fair_queue.lift_tier(level.engine, level.tiers, t, behind_ms)
        place = 0
        while place < count:
            if _serve(rng, level, tiers, tenants, chances, cost, first, running[place]):
                count -= 1
                running[place] = running[count]
            else:
                place += 1
            _observe_all(level, tiers, tenants, held)
    return started


def constant_ms(
    w: Watch, aging_ms: float, feasible_ms: float | None = None, *, passing: bool = False
) -> npt.NDArray[Any]:
    """The constant of docs/fairness.md for every two flows, from single requests' sizes.

    Args:
        w: What was counted of the flows.
        aging_ms: Window of ageing at their level.
        feasible_ms: Window of rule 14, which acts between tenants; None: the least finish less
            lead is picked.
        passing: Whether candidates pass what their flow has started.
    """
    largest = w.largest_ms / w.least_weight
    swing = 1.0 / w.least_weight - 1.0 / w.greatest_weight
    past_tag = w.overrun_ms / w.least_weight + w.largest_ms * swing
    own = w.most_in_flight * (largest + past_tag + passing * largest)
    window_ms = 2.0 * aging_ms
    if feasible_ms is not None:
        window_ms = 4.0 * max(feasible_ms, aging_ms)
    head = window_ms + 2.0 * (largest[:, None] + largest)
    return head + own[:, None] + own
