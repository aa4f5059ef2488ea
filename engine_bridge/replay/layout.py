"""The replay's memory: record arrays that the compiled step loop works on.

What a record holds, `records` says. There is no behaviour here: the rules and the step loop do.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.replay.records import Records

F8 = npt.NDArray[np.float64]
I8 = npt.NDArray[np.int64]
I4 = npt.NDArray[np.int32]

# Status of a request.
FUTURE, WAITING, PREFILLING, DECODING, DONE = 0, 1, 2, 3, 4
# Outcome of a request, as in `ReplayResult.requests["outcome"]`.
UNFINISHED, FINISHED, REFUSED, SHED, CANCELLED = 0, 1, 2, 3, 4
# Which rules the engine runs.
FAIR, FCFS, PRIORITY = 0, 1, 2
# Kinds of timed events.
EVENT_ARRIVAL, EVENT_ELIGIBLE, EVENT_CANCEL = 0, 1, 2

NONE = -1
"""End of a list, or "no such row"."""

# Slots of `State.totals`, the running totals of the step that is being planned: prefill tokens,
# their chunks and query-key pairs, tokens of low tiers; the budget, the limit (ms), whether more
# may be added; tokens of spared prompts and of padding; of media items that the step encodes the
# tokens, the time (ms), and what they take of the budget.
TOKENS, CHUNKS, PAIRS, LOW, BUDGET, LIMIT, OPEN, SPARED, PADDED = 0, 1, 2, 3, 4, 5, 6, 7, 8
ENCODED, ENCODE_MS, WORK = 9, 10, 11
TOTALS = 12


class State(NamedTuple):
    """Everything the step loop reads and writes."""

    engine: Records
    """One record."""
    req: Records
    """(requests,)"""
    tiers: Records
    tenants: Records
    """(tenants x tiers,): a tenant's account in one tier."""
    pools: Records
    items: Records
    """(blocks + 1,)"""
    item_start: I8
    """(media items,): prompt tokens before it, see `encoding`."""
    item_end: I8
    """(media items,): and up to its last one."""
    item_ms: F8
    """(media items,): what encoding it takes."""
    item_content: I8
    """(media items,): its place in `encoded`."""
    encoded: Records
    """(contents of media items,)"""
    classes: Records
    lists: Records
    """(accounts + tiers,): one list an account, then each tier's resumed requests."""
    steps: Records
    """Heap of step events."""
    times: Records
    """Heap of timed events."""
    drafting: Records
    """(tiers,)"""
    draft_facts: F8
    """(2, 6): what the step carries beside drafts (see `rules.speculation`), and the last ones."""
    draft_cost: F8
    """(3,): see `rules.speculation.best_drafts`."""
    coef: F8
    arrival_s: F8
    open_rows: I8
    prefix_ids: I4
    """Runs of prefix blocks, see `prefixes`."""
    run_blocks: I4
    """(runs,): blocks of a whole run."""
    run_first: I8
    """(runs,): content number of a run's first block; the others follow."""
    first_item: I4
    """(contents,): the first named of the blocks with that content, -1 = none."""
    maker: I4
    """(contents,): a request that generates that content, -1 = none."""
    ghost_kind: I4
    """(contents,): retention class that it was in when it was evicted, -1 = it was not."""
    ghost_mark: I8
    """(contents,): `evicted_blocks` then."""
    tables: I4
    """(batch + 1, most named blocks): items that a running request holds, in order."""
    free_tables: I8
    due: I8
    """(batch + 1,): requests that end with this step."""
    pool_refs: I4
    """(items, pools)"""
    free_items: I8
    class_of: I8
    """(tiers, stop reasons, 2)"""
    running: I8
    """(batch,)"""
    prefilling: I8
    """(batch,)"""
    active: I8
    """(accounts,): accounts with waiting requests, grouped by tier."""
    grow: I8
    """(pools, block size): decodes that need a block at steps of that phase."""
    tier_grow: I8
    """(tiers, block size)"""
    gap_low: F8
    """(tiers, tiers): least difference of accounts while both wait; NaN = not both."""
    gap_high: F8
    first_log: I8
    done_log: I8
    totals: F8
    """(TOTALS,): running totals of the step that is being planned."""
    step_log: I8
    """(batch, 2): rows and tokens of the last step; empty unless steps are recorded."""
