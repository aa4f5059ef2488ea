"""Record types of the replay's memory: engine, request, tier, tenant, pool, cached item and so on.

It says which fields there are, and nothing of what they are for the rules (`layout.State` holds
arrays of them).
"""

from __future__ import annotations

from typing import Any

import numpy as np

Records = Any
"""A `numpy.recarray`: its fields are known to the compiler, not to the type checker."""

ENGINE = np.dtype(
    [
        ("now_s", "f8"),
        ("began_s", "f8"),  # start of the last step
        ("seen_s", "f8"),  # what happened until then is known to the plan
        ("busy_ms", "f8"),
        ("speed", "f8"),  # true step time over the model's: the engine's drift
        ("scale", "f8"),  # what the scheduler believes `speed` to be (rule 13's online refit)
        ("token_ms", "f8"),  # cumulative linear cost of one decode token
        ("read_ms", "f8"),  # cumulative decode-attention cost of one KV token
        ("read_step_ms", "f8"),  # the same, each step's term times the step's number
        ("decode_share_ms", "f8"),  # running mean of a decode token's linear cost
        ("prefill_share_ms", "f8"),  # linear cost of a prefill token in a full step
        ("tier_v", "f8"),  # virtual time of the tier level, normalised ms
        ("slack_fraction", "f8"),
        ("tpot_fraction", "f8"),
        ("low_share", "f8"),
        ("longest_step_ms", "f8"),  # rule 16; infinite: off
        ("spared_fraction", "f8"),
        ("window_ms", "f8"),
        ("prefill_factor", "f8"),  # rule 14's order; infinite: by prefill alone
        ("age_tiers_ms", "f8"),  # ageing: the greatest lead between tiers, normalised
        ("age_tenants_ms", "f8"),  # and between the tenants of one
        ("lead_per_s", "f8"),  # part of them that a second of waiting gives
        ("backoff_step_s", "f8"),
        ("backoff_max_s", "f8"),
        ("skew_fraction", "f8"),
        ("quantile", "f8"),
        ("gap_ms", "f8"),  # largest normalised service gap between two tiers
        ("step", "i8"),
        ("read_tokens", "i8"),  # KV tokens that one decode step reads
        ("sequence", "i8"),  # ever-growing number that orders cached items
        ("admissions", "i8"),  # ever-growing number that orders the batch
        ("evicted_blocks", "i8"),
        ("epoch", "i8"),  # grows whenever a blocked queue is worth another look
        ("blocked_epoch", "i8"),
        ("interval_steps", "i8"),
        ("interval_batch", "i8"),
        ("left", "i8"),  # requests not done yet
        ("mode", "i4"),
        ("collapse", "i4"),
        ("lagging", "i4"),  # steps are scheduled while the one before still runs
        ("next_open", "i8"),
        ("running", "i8"),
        ("prefilling", "i8"),
        ("decoding", "i4"),
        ("waiting", "i4"),
        ("empty_blocks", "i8"),  # hold nothing
        ("cached_blocks", "i8"),  # hold reusable content of no running request
        ("total_blocks", "i4"),
        ("block_size", "i8"),
        ("max_seqs", "i4"),
        ("max_tokens", "i4"),
        ("budget", "i4"),
        ("min_chunk", "i4"),
        ("caching", "i4"),
        ("learn_reuse", "i4"),
        ("due_every", "i4"),  # ageing under rule 14: one start in so many is for who is due
        ("eviction", "i8"),
        ("free_items", "i8"),
        ("free_tables", "i8"),
        ("step_events", "i8"),
        ("time_events", "i8"),
        ("firsts", "i8"),
        ("dones", "i8"),
        ("step_rows", "i8"),  # filled rows of `step_log`
        ("claimed_blocks", "i4"),
        # Where the plan of a step stands, see `plan_fair`.
        ("stage", "i4"),
        ("first_pass", "i4"),
        ("fresh", "i4"),
        ("mark", "i8"),
        ("seen_epoch", "i8"),
        ("grown_step", "i8"),  # step for which the decodes' new blocks are taken
        ("plan_tier", "i8"),
        ("op_row", "i8"),
        ("op_tokens", "i8"),
        ("need_blocks", "i8"),
        ("goal_blocks", "i8"),
        ("room_way", "i4"),
        ("victims", "i4"),
        # Drafts (rule 9): 0 none, 1 one length for all, 2 by tier.
        ("drafting", "i8"),
        ("draft_steps", "i8"),  # steps that lengths were chosen for
        ("draft_most", "i8"),
        ("draft_kept", "f8"),  # part of the acceptance that is left at the next place
        ("ahead", "i8"),  # draft tokens of the step that is planned
        ("longest", "i8"),  # most of them of one request
        ("external", "i4"),  # blocks are another engine's: see `kv_cache`
        ("headroom_blocks", "i4"),
        ("rule_budget", "i4"),
        ("rule_shares", "i4"),
        ("rule_pools", "i4"),
        ("rule_backoff", "i4"),
        ("rule_slack", "i4"),
        ("rule_feasible", "i4"),
        ("rule_chunks", "i4"),
        ("rule_shedding", "i4"),
        ("rule_cap", "i4"),
        ("rule_true_up", "i8"),
        # Encoders, see `encoding` and `item_limits`: 1 if there is one and anything to encode.
        ("encoding", "i8"),
        ("encoder_budget", "i8"),  # tokens of items that a step may encode
        ("encoder_cache", "i8"),  # tokens that the encoder cache holds
        ("encoder_free", "i8"),  # of them empty
        ("encoder_freeable", "i8"),  # empty, or encoded and of no running request's
        ("encoder_first", "i8"),  # content that is evicted first
        ("encoder_last", "i8"),
        ("item_held", "i8"),  # this step: somebody waits for an item's turn
        ("encode_debt_ms", "f8"),  # what items let steps run over their limits, unpaid
        ("debt_step", "i8"),  # paid for until this step
        ("debt_busy_ms", "f8"),
    ],
    align=True,
)

REQUEST = np.dtype(
    [
        # The traffic, read only.
        ("think_s", "f8"),
        ("cancel_after_s", "f8"),
        ("prefix_start", "i8"),
        ("prefix_count", "i8"),
        ("tier", "i8"),
        ("tenant", "i8"),
        ("prompt", "i4"),
        ("output", "i4"),
        ("prompt_worth", "f8"),  # priced tokens of the prompt; NaN: its cached ones are repeated
        ("stop", "i8"),
        ("successor", "i8"),  # row of the session's next turn, or of the request's next slice
        ("slice", "i8"),  # of a slice, the first one that reads the same; else NONE
        ("read", "i4"),  # of that one: the gateway believes that the engine has it cached
        # What the engine knows.
        ("status", "i4"),
        ("outcome", "i4"),
        ("computed", "i8"),  # tokens whose KV is held (decoding: at the last sync)
        ("generated", "i4"),  # likewise
        ("target", "i8"),  # tokens to compute before the next token comes out
        ("blocks", "i8"),  # blocks held, shared ones included
        ("named_blocks", "i8"),  # of them, leading ones that can be found by their content
        ("named_total", "i8"),  # blocks that its prefix runs cover
        ("groups", "i8"),  # leading prefix runs that `named_blocks` reaches into
        ("span_blocks", "i8"),  # blocks that these runs cover
        ("table", "i8"),  # row of `tables` while it runs
        ("own_item", "i8"),  # cached item of its own unnamed blocks after a preemption
        ("slot", "i8"),  # place in the batch
        ("grant", "i4"),  # this step's chunk
        ("joined_step", "i8"),
        ("acceptance", "f8"),  # of its first draft in a step; NaN: it is not drafted for
        ("ahead", "i4"),  # drafts that it verifies in the step that is planned
        ("drafted", "i4"),  # drafts that it verified in the step run last, and the right ones
        ("accepted", "i4"),
        # What the last look-up found: blocks in all, those of its own run among them, and how many
        # of these are idle.
        ("found_blocks", "i8"),
        ("found_own", "i8"),
        ("found_idle", "i8"),
        ("phase", "i8"),  # decoding: place among `grow`'s steps at which it takes a block
        ("version", "i8"),  # grows whenever a pending step event goes stale
        ("preemptions", "i4"),
        ("recomputed", "i4"),
        ("cached", "i4"),  # prompt tokens found in the cache at first admission
        ("lost", "i4"),  # tokens computed before the last preemption
        ("predicted", "i4"),  # output tokens expected
        ("judged", "i4"),
        ("demoted", "i4"),
        ("spared", "i4"),  # rule 16: its tenant had little of the work when it queued
        ("mark", "i4"),  # pass of the plan that has looked at it
        ("admission", "i8"),
        ("sync_step", "i8"),
        ("sync_token_ms", "f8"),
        ("sync_read_ms", "f8"),
        ("sync_read_step_ms", "f8"),
        ("arrived_s", "f8"),
        ("admitted_s", "f8"),
        ("first_s", "f8"),
        ("last_s", "f8"),  # when it was over, well or badly
        ("due_base_s", "f8"),  # see `decode.slack_s`
        ("service_ms", "f8"),
        ("estimate_ms", "f8"),  # raised when the output runs over the prediction
        ("first_estimate_ms", "f8"),
        ("prefill_estimate_ms", "f8"),
        ("position_ms", "f8"),  # place in its tenant's queue, raw ms of estimates
        ("width_ms", "f8"),  # its part of that queue: the estimate when it queued
        ("finish_tag_ms", "f8"),  # virtual finish at the tier level
        ("tenant_finish_ms", "f8"),  # and among its tier's tenants
        ("eligible_s", "f8"),
        # Links of the waiting lists.
        ("list", "i8"),
        ("next", "i8"),
        ("prev", "i8"),
        ("tier_next", "i8"),
        ("tier_prev", "i8"),
        # Its media items, see `encoding`.
        ("media_first", "i8"),
        ("media_count", "i8"),
        ("media_next", "i8"),  # first item whose end is beyond `computed`
        ("media_held", "i8"),  # first item from there on that it does not hold encoded
        ("encode_ms", "f8"),  # what is encoded for it in the step that is planned takes
        ("encoded_ms", "f8"),  # and what was in all steps before
        ("held_mark", "i8"),  # pass of the plan in which an item held it back
    ],
    align=True,
)

TIER = np.dtype(
    [
        ("weight", "f8"),
        ("prefill_share", "f8"),
        ("shed_at", "f8"),
        ("shed_target_s", "f8"),  # the target that shedding looks at
        ("ttft_s", "f8"),
        ("tpot_s", "f8"),
        ("e2e_s", "f8"),
        ("account_ms", "f8"),  # normalised ms: service, lifted over idle times
        ("outstanding_ms", "f8"),  # estimates of dispatched requests not used up yet
        ("tenant_v", "f8"),  # virtual time of its tenants' level
        ("service_ms", "f8"),  # true service
        ("normalised_ms", "f8"),  # true service over weight
        ("tag_ms", "f8"),  # virtual finish of its last dispatch, or V if it was lifted since
        ("largest_estimate_ms", "f8"),
        ("peak_outstanding_ms", "f8"),  # normalised; with the next two, what rule 3's bound needs
        ("peak_estimate_ms", "f8"),
        ("peak_past_tag_ms", "f8"),  # how far `account_ms` has run past `tag_ms`
        ("candidate_finish_ms", "f8"),
        ("passed_ms", "f8"),  # what is left of the running prefills that its candidate passes
        ("since_due", "i8"),  # starts since one with the whole lead
        ("candidate", "i8"),  # this step's next request of the tier
        ("pool", "i8"),
        ("max_running", "i4"),
        ("shed_mode", "i4"),
        ("protected", "i4"),
        ("low", "i4"),
        ("backoff", "i4"),
        ("running", "i8"),
        ("decoding", "i4"),
        ("blocked", "i4"),  # this step: its head is not admissible
        ("lapsed", "i4"),  # since the last sample: nothing waited, or its own limits held it
        ("granted", "i4"),  # this step's prefill tokens
        ("waiting", "i4"),
        ("first", "i8"),  # longest waiting request, by arrival
        ("last", "i8"),
        ("active_start", "i8"),  # its part of `active`
        ("active_count", "i8"),
        ("waiting_tokens", "i8"),
        # Counters of one telemetry interval.
        ("arrivals", "i8"),
        ("arrived_tokens", "i8"),
        ("prefill_tokens", "i8"),
        ("decode_tokens", "i8"),
        ("finished", "i8"),
        ("refused", "i8"),
        ("judged", "i8"),
        ("met", "i8"),
        ("met_tokens", "f8"),
        ("preemptions", "i8"),
        ("recomputed", "i8"),
        ("skewed", "i8"),
        ("cached", "i8"),
    ],
    align=True,
)

TENANT = np.dtype(
    [
        ("share", "f8"),
        ("account_ms", "f8"),
        ("outstanding_ms", "f8"),
        ("bypassed_ms", "f8"),  # estimates dispatched ahead of the queue's head
        ("tail_ms", "f8"),  # position of the next arrival
        ("predicted_output", "f8"),
        ("bonus", "f8"),  # part of the ageing windows that its requests have at once
        ("service_ms", "f8"),
        ("samples", "i8"),
        ("tier", "i8"),
        ("active_slot", "i8"),
        ("held_mark", "i8"),  # pass of the plan in which an item held its next request back
    ],
    align=True,
)

DRAFTING = np.dtype(
    [
        # Rule 9 for one tier, see `rules.draft_lengths`.
        ("most", "i8"),
        ("length", "i8"),
        ("since", "i8"),  # steps since the length changed
        ("decoding", "i8"),  # requests that are drafted for
        ("decodes", "f8"),  # the same, mean over the last steps
        ("step_tokens", "f8"),  # tokens that a decode is expected to give in a step
        ("known_verified", "f8"),
        ("known_accepted", "f8"),
        ("verified", "f8"),  # in the step run last
        ("accepted", "f8"),
        # Counts of one telemetry interval, and of the whole run.
        ("interval_drafts", "i8"),
        ("interval_accepted", "i8"),
        ("drafts", "i8"),
        ("right", "i8"),
        ("steps", "i8"),  # decodes of its requests
    ],
    align=True,
)

POOL = np.dtype([("fraction", "f8"), ("guaranteed", "i8"), ("held", "i8")], align=True)

ITEM = np.dtype(
    [
        ("idle_s", "f8"),
        ("sequence", "i8"),
        ("prefix", "i4"),  # content of one block, or -1 - row for a request's unnamed run
        ("blocks", "i4"),
        ("refs", "i4"),
        ("charge", "i4"),  # pool that the blocks count in while held
        ("kind", "i4"),  # retention class while idle
        ("reused", "i4"),
        ("next", "i4"),
        ("prev", "i4"),
        ("same", "i4"),  # next block of the same content, later named
    ],
    align=True,
)

CONTENT = np.dtype(
    [
        # The encoder's output for one content, see `encoding`.
        ("refs", "i8"),  # running requests that still need it
        ("cached", "i8"),
        ("tokens", "i8"),
        ("step", "i8"),  # step that encodes it, and the request that it does so for
        ("row", "i8"),
        ("next", "i8"),
        ("prev", "i8"),
    ],
    align=True,
)

CLASS = np.dtype(
    [
        ("factor", "f8"),
        ("woken", "f8"),  # idle blocks that were asked for again, fading
        ("lost", "f8"),  # idle blocks that were evicted and not asked for since, fading
        ("blocks", "i8"),
        ("head", "i8"),
        ("tail", "i8"),
        ("tier", "i8"),
        ("rank", "i8"),  # 0 = first to go under a strict tier order
    ],
    align=True,
)

LIST = np.dtype([("head", "i8"), ("tail", "i8"), ("count", "i4")], align=True)
EVENT = np.dtype(
    [
        ("key", "f8"),  # step number, or seconds
        ("row", "i8"),
        ("tag", "i8"),  # of a step event the request's version, of a timed one its kind
    ],
    align=True,
)


def records(count: int, dtype: np.dtype[Any]) -> Records:
    """Zeroed records whose fields read as attributes, with and without the compiler."""
    return np.zeros(count, dtype).view(np.recarray)
