"""Makes the replay's memory from a trace, a plan and an engine's facts.

It fills arrays once, before the first step; what changes later is `settings` (allocations) and the
step loop.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.draft_spec import DraftSpec
from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.errors import TraceError, did_you_mean
from trimtab.engine_bridge.plan import Plan, Tier
from trimtab.engine_bridge.pricing import priced_prompt_tokens
from trimtab.engine_bridge.replay.layout import (
    FAIR,
    FCFS,
    I4,
    I8,
    NONE,
    PRIORITY,
    TOTALS,
    State,
)
from trimtab.engine_bridge.replay.prefixes import find_runs
from trimtab.engine_bridge.replay.records import (
    CLASS,
    CONTENT,
    DRAFTING,
    ENGINE,
    EVENT,
    ITEM,
    LIST,
    POOL,
    REQUEST,
    TENANT,
    TIER,
    Records,
    records,
)
from trimtab.engine_bridge.replay.slices import put_slices
from trimtab.engine_bridge.replay.verification import BY_TIER, NO_DRAFTS, ONE_LENGTH
from trimtab.engine_bridge.rules import draft_lengths, retention
from trimtab.engine_bridge.rules.cost import TYPICAL_DECODES
from trimtab.engine_bridge.rules.speculation import PREFILL_WORTH
from trimtab.engine_bridge.step_time import linear_ms
from trimtab.engine_bridge.trace import NO_SESSION, NO_SLICE, LongArray, Trace

MODES = {"fair": FAIR, "fcfs": FCFS, "priority": PRIORITY}
EVICTION = {
    "scaled_age": retention.SCALED_AGE,
    "lru": retention.LRU,
    "tier_order": retention.TIER_ORDER,
    "fixed_quota": retention.FIXED_QUOTA,
}
_SHED = {"never": 0, "refuse": 1, "demote": 2}
_NEVER_BLOCKED = -1


def build_state(
    trace: Trace,
    plan: Plan,
    spec: EngineSpec,
    *,
    rules: str,
    collapse: bool,
    speed: float,
    record_steps: bool = False,
) -> State:
    """The state before the first arrival.

    Raises:
        TraceError: a tier of the trace is not in the plan, or prefix ids do not fit the blocks.
    """
    tier_of = _plan_tiers(trace, plan)
    tenants, account = _accounts(trace, tier_of, plan)
    prefixes = find_runs(trace, spec.block_size)
    req, open_rows = _requests(trace, tier_of, account, prefixes.offsets)
    spec.with_limits(
        max_num_seqs=plan.engine.max_num_seqs,
        max_num_batched_tokens=plan.engine.max_num_batched_tokens,
    ).check_draft()
    req.acceptance[:] = draft_acceptance(trace, spec)
    if spec.enable_prefix_caching:
        req.named_total[:] = prefixes.covered_blocks()
    put_slices(req, trace)
    contents = int(prefixes.blocks.sum())
    # One block is vLLM's null block and never used.
    blocks = spec.num_gpu_blocks - 1
    batch = plan.engine.max_num_seqs or spec.max_num_seqs
    count = len(plan.tiers)
    classes = _classes(plan)
    tiers = _tiers(plan, tenants)
    lists = records(len(tenants) + count, LIST)
    lists.head[:] = NONE
    lists.tail[:] = NONE
    media = trace.media
    return State(
        engine=_engine(trace, plan, spec, blocks, batch, rules, collapse, speed),
        req=req,
        tiers=tiers,
        tenants=tenants,
        pools=records(len(plan.pools), POOL),
        items=records(blocks + 1, ITEM),
        item_start=media.start_tokens.astype(np.int64),
        item_end=media.start_tokens.astype(np.int64) + media.tokens,
        item_ms=np.zeros(len(media)) if spec.encoder is None else spec.encoder.items_ms(media),
        item_content=media.content.astype(np.int64),
        encoded=_contents(int(media.content.max(initial=-1)) + 1),
        classes=classes,
        lists=lists,
        steps=records(4 * batch + 64, EVENT),
        times=records(3 * len(trace) + 64, EVENT),
        drafting=_drafting(count),
        draft_facts=np.zeros((2, 6)),
        draft_cost=draft_cost(spec.draft),
        coef=spec.coef,
        arrival_s=np.ascontiguousarray(trace.arrival_s),
        open_rows=open_rows,
        prefix_ids=prefixes.ids,
        run_blocks=prefixes.blocks,
        run_first=prefixes.first_contents(),
        first_item=np.full(contents, NONE, np.int32),
        maker=prefixes.makers(trace.prompt_tokens.astype(np.int64) // spec.block_size),
        ghost_kind=np.full(contents, NONE, np.int32),
        ghost_mark=np.zeros(contents, np.int64),
        tables=np.zeros((batch + 1, int(req.named_total.max(initial=0))), np.int32),
        free_tables=np.arange(batch + 1),
        due=np.zeros(batch + 1, np.int64),
        pool_refs=np.zeros((blocks + 1, len(plan.pools)), np.int32),
        free_items=np.arange(blocks, -1, -1),
        class_of=_class_table(trace, plan),
        running=np.zeros(batch + 1, np.int64),
        prefilling=np.zeros(batch + 1, np.int64),
        active=np.full(len(tenants), NONE),
        grow=np.zeros((len(plan.pools), spec.block_size), np.int64),
        tier_grow=np.zeros((count, spec.block_size), np.int64),
        gap_low=np.full((count, count), np.nan),
        gap_high=np.full((count, count), np.nan),
        first_log=np.zeros(len(trace), np.int64),
        done_log=np.zeros(len(trace), np.int64),
        totals=np.zeros(TOTALS),
        step_log=np.zeros((batch if record_steps else 0, 2), np.int64),
    )


def _contents(count: int) -> Records:
    """So many contents of media items, none of them encoded."""
    encoded = records(count, CONTENT)
    for column in ("step", "row", "next", "prev"):
        encoded[column][:] = NONE
    return encoded


def _plan_tiers(trace: Trace, plan: Plan) -> I4:
    """The plan's tier number of each request."""
    numbers = []
    for name in trace.tier_names:
        if name not in plan.tiers:
            raise TraceError(
                "trace",
                key="tier",
                value=name,
                bound=f"a tier of plan {plan.name}: {', '.join(plan.tiers)}",
                remedy=did_you_mean(name, plan.tiers) or "add the tier to the plan",
            )
        numbers.append(plan.tier_index(name))
    return np.asarray(numbers, np.int32)[trace.tier]


def _accounts(trace: Trace, tier_of: I4, plan: Plan) -> tuple[Records, I4]:
    """One account a pair of tier and tenant, grouped by tier; each request's account."""
    pairs = tier_of.astype(np.int64) * len(trace.tenant_names) + trace.tenant
    known, account = np.unique(pairs, return_inverse=True)
    tenants = records(len(known), TENANT)
    tenants.tier[:] = known // len(trace.tenant_names)
    names = known % len(trace.tenant_names)
    tenants.share[:] = [plan.tenant_share(trace.tenant_names[n]) for n in names]
    tenants.bonus[:] = [
        plan.tenant_bonus(trace.tenant_names[n], int(tier))
        for n, tier in zip(names, tenants.tier, strict=True)
    ]
    tenants.predicted_output[:] = plan.prediction.initial_output_tokens
    tenants.active_slot[:] = NONE
    return tenants, account.astype(np.int32).reshape(-1)


def _requests(trace: Trace, tier_of: I4, account: I4, offsets: LongArray) -> tuple[Records, I8]:
    """Records of the requests and the rows that arrive by the clock."""
    n = len(trace)
    req = records(n, REQUEST)
    req.think_s[:] = trace.think_s
    req.cancel_after_s[:] = trace.cancel_after_s
    req.prefix_start[:] = offsets[:-1]
    req.prefix_count[:] = np.diff(offsets)
    req.tier[:] = tier_of
    req.tenant[:] = account
    req.prompt[:] = trace.prompt_tokens
    req.output[:] = trace.output_tokens
    req.prompt_worth[:] = priced_prompt_tokens(trace)
    req.stop[:] = trace.stop_reason
    req.joined_step[:] = NONE
    req.media_first[:] = trace.media.offsets[:-1]
    req.media_count[:] = np.diff(trace.media.offsets)
    for column in ("own_item", "list", "next", "prev", "tier_next", "tier_prev", "successor"):
        req[column][:] = NONE
    req.slice[:] = NONE
    for column in ("arrived_s", "admitted_s", "first_s", "last_s"):
        req[column][:] = np.nan
    later = _link_sessions(trace, req)
    return req, np.flatnonzero(~later)


def draft_acceptance(trace: Trace, spec: EngineSpec) -> npt.NDArray[np.float64]:
    """Each request's acceptance of a first draft: by tier as the draft model has it, or its own."""
    own = np.array(trace.acceptance, np.float64)
    for name, share in spec.draft.acceptance if spec.draft is not None else ():
        if name in trace.tier_names:
            own[trace.tier == trace.tier_names.index(name)] = share
    return own


def _drafting(tiers: int) -> Records:
    drafting = records(tiers, DRAFTING)
    draft_lengths.begin(drafting)
    return drafting


def draft_cost(draft: DraftSpec | None) -> npt.NDArray[np.float64]:
    """What `rules.speculation.best_drafts` reckons with, shape (3,)."""
    us, pass_ms = (0.0, 0.0) if draft is None else (draft.us_per_token, draft.pass_ms)
    return np.array([us, pass_ms, PREFILL_WORTH])


def _link_sessions(trace: Trace, req: Records) -> npt.NDArray[np.bool_]:
    """Set each turn's successor; marks the rows that wait for another one."""
    later = np.zeros(len(trace), np.bool_)
    rows = np.flatnonzero(trace.session != NO_SESSION)
    order = rows[np.lexsort((trace.turn[rows], trace.session[rows]))]
    if len(order) > 1:
        same = trace.session[order[1:]] == trace.session[order[:-1]]
        req.successor[order[:-1][same]] = order[1:][same]
        later[order[1:][same]] = True
    return later


def _tiers(plan: Plan, tenants: Records) -> Records:
    tiers = records(len(plan.tiers), TIER)
    for number, tier in enumerate(plan.tiers.values()):
        t = tiers[number]
        t.pool = plan.pool_of_tier[number]
        t.protected, t.low, t.backoff = tier.protected, tier.low, tier.backoff
        t.ttft_s, t.tpot_s, t.e2e_s = target_seconds(tier)
        t.shed_mode = _SHED[tier.shed.mode]
        t.shed_target_s = t.ttft_s if np.isfinite(t.ttft_s) else t.e2e_s
        t.first, t.last, t.candidate = NONE, NONE, NONE
        t.lapsed = 1
    of_tier = np.bincount(tenants.tier, minlength=len(tiers))
    tiers.active_start[:] = np.concatenate(([0], np.cumsum(of_tier)[:-1]))
    return tiers


def target_seconds(tier: Tier) -> tuple[float, float, float]:
    """A tier's TTFT, TPOT and end-to-end targets in seconds; infinity = none."""
    t = tier.targets
    ttft, tpot, e2e = (np.inf if v is None else v * 1e-3 for v in (t.ttft_ms, t.tpot_ms, t.e2e_ms))
    return ttft, tpot, e2e


def class_order(plan: Plan) -> tuple[list[int], list[int]]:
    """Of each retention class its tier, and its place in a strict order of tiers (0 goes first).

    The order follows the plan's static weights, then its order of tiers.
    """
    weights = np.array([tier.weight for tier in plan.tiers.values()])
    rank = np.argsort(np.argsort(weights, kind="stable"), kind="stable")
    sections = plan.retention.classes.values()
    tiers = [plan.tier_index(section.tier) for section in sections] or range(len(plan.tiers))
    return list(tiers), [int(rank[tier]) for tier in tiers]


def _classes(plan: Plan) -> Records:
    classes = records(len(plan.retention_names), CLASS)
    classes.head[:] = NONE
    classes.tail[:] = NONE
    classes.tier[:], classes.rank[:] = class_order(plan)
    return classes


def _class_table(trace: Trace, plan: Plan) -> I8:
    """Retention class by tier, stop reason and reuse, shape (tiers, stop reasons, 2)."""
    table = np.zeros((len(plan.tiers), len(trace.stop_names), 2), np.int64)
    for tier in range(len(plan.tiers)):
        for stop, reason in enumerate(trace.stop_names):
            for reused in (0, 1):
                table[tier, stop, reused] = plan.retention_class(tier, reason, bool(reused))
    return table


def _engine(
    trace: Trace,
    plan: Plan,
    spec: EngineSpec,
    blocks: int,
    batch: int,
    rules: str,
    collapse: bool,
    speed: float,
) -> Records:
    engine = records(1, ENGINE)
    e = engine[0]
    e.speed, e.scale = speed, 1.0
    e.mode, e.collapse = MODES[rules], collapse
    e.left = len(trace)
    if trace.slice_of is not None:
        e.left = int(np.sum(trace.slice_of == NO_SLICE))
    e.lagging = spec.async_scheduling
    e.blocked_epoch = _NEVER_BLOCKED
    e.grown_step = NONE
    e.total_blocks = e.empty_blocks = blocks
    e.free_items = blocks + 1
    e.free_tables = batch + 1
    e.block_size = spec.block_size
    e.max_tokens = plan.engine.max_num_batched_tokens or spec.max_num_batched_tokens
    e.caching = spec.enable_prefix_caching
    e.eviction = EVICTION[plan.retention.eviction] if rules == "fair" else retention.LRU
    e.headroom_blocks = 1
    e.learn_reuse = plan.retention.learn_reuse and rules == "fair"
    e.min_chunk = plan.prefill.min_chunk_tokens
    e.tpot_fraction = plan.slack.tpot_fraction
    e.window_ms, e.rule_chunks = plan.feasible.window_ms, plan.feasible.chunks
    factor = plan.feasible.prefill_factor
    e.prefill_factor = np.inf if factor is None else factor
    e.age_tiers_ms, e.age_tenants_ms = plan.aging.tier_window_ms, plan.aging.tenant_window_ms
    e.lead_per_s, e.due_every = 1.0 / plan.aging.full_after_s, plan.aging.due_every
    e.backoff_step_s = plan.backoff.per_waiting_ms * 1e-3
    e.backoff_max_s = plan.backoff.max_ms * 1e-3
    e.skew_fraction = plan.vft_skew_fraction
    e.quantile = plan.prediction.output_quantile
    full = float(min(plan.prefill.budget_tokens, e.max_tokens))
    e.prefill_share_ms = linear_ms(spec.coef, full, 1.0) / full
    e.decode_share_ms = linear_ms(spec.coef, TYPICAL_DECODES, TYPICAL_DECODES) / TYPICAL_DECODES
    e.drafting, e.draft_kept = NO_DRAFTS, 1.0
    if spec.draft is not None:
        e.drafting = BY_TIER if rules == "fair" else ONE_LENGTH
        e.draft_most, e.draft_kept = spec.draft.tokens, spec.draft.kept
    e.encoder_first = e.encoder_last = NONE
    if spec.encoder is not None and len(trace.media):
        e.encoding = 1
        largest = int(trace.media.tokens.max())
        e.encoder_budget, e.encoder_cache = spec.encoder.limits(int(e.max_tokens), largest)
        e.encoder_free = e.encoder_freeable = e.encoder_cache
    switches = plan.rules
    e.rule_budget, e.rule_shares = switches.prefill_budget, switches.prefill_shares
    e.rule_pools, e.rule_backoff = switches.kv_pools, switches.backoff
    e.rule_slack, e.rule_feasible = switches.slack_chunk, switches.feasible_first
    e.rule_shedding, e.rule_cap = switches.late_shedding, switches.cap_preemption
    e.rule_true_up = switches.true_up
    e.longest_step_ms = plan.isolation.longest_step_ms or np.inf
    e.spared_fraction = plan.isolation.spared_fraction
    return engine
