"""The encoder cache: which media items a running request holds encoded, and which a step encodes.

As vLLM V1's `EncoderCacheManager` and `_try_schedule_encoder_inputs` (0.33). An item is encoded
whole in the step whose chunk first overlaps it, unless its content is in the cache already, and is
held until the request has computed past its end. What nobody holds stays, oldest evicted first,
until room is needed. A chunk that reaches an item for which the step's encoder budget or the cache
has no room ends before it. What more the fair rules ask of an item, `item_limits` says.

A request's items from `media_next` to `media_held` are held, in a row: chunks hold them in their
order, and let go of them in their order. With `engine.external` the cache is another engine's
(vLLM's): whoever drives the plan puts the true `cached`, `refs`, `encoder_free` and
`encoder_freeable` into the state before each plan, and here is only counted what the plan adds.
"""

from __future__ import annotations

import numpy as np

from trimtab.engine_bridge.compiled import compiled, inlined
from trimtab.engine_bridge.replay.layout import ENCODE_MS, ENCODED, FAIR, NONE, WORK, State


@inlined
def first_open(s: State, row: int, computed: int) -> int:
    """A request's first item that ends beyond so many computed tokens."""
    r = s.req[row]
    at, last = int(r.media_first), int(r.media_first + r.media_count)
    while at < last and s.item_end[at] <= computed:
        at += 1
    return at


@inlined
def open_items(s: State, row: int, computed: int) -> None:
    """A request joins the batch with that many tokens computed; it holds no item yet."""
    r = s.req[row]
    r.media_next = r.media_held = first_open(s, row, computed)


@inlined
def shown(s: State, first: int, last: int, item: int) -> bool:
    """Whether one of the items from `first` up to, not with, `last` has the same content."""
    at, content = first, s.item_content[item]
    while at < last and s.item_content[at] != content:
        at += 1
    return bool(at < last)


@inlined
def found_tokens(s: State, first: int, item: int) -> int:
    """Tokens of the cache that can no longer be evicted once a request holds what an item shows.

    Returns:
        -1 if it is not in the cache; 0 if somebody holds it, or one of the request's own from
        `first` on shows it already.
    """
    if shown(s, first, item, item):
        return 0
    c = s.encoded[s.item_content[item]]
    if c.cached == 0:
        return -1
    return int(c.tokens) if c.refs == 0 else 0


@inlined
def item_work(s: State, item: int) -> int:
    """Tokens of the prefill budget that encoding an item takes (rule 4)."""
    e = s.engine[0]
    return int(np.ceil(s.item_ms[item] / e.prefill_share_ms)) if e.rule_budget == 1 else 0


@inlined
def _unlink(s: State, content: int) -> None:
    """Take a content out of the list of those that nobody holds."""
    e, c = s.engine[0], s.encoded[content]
    if c.prev == NONE:
        e.encoder_first = c.next
    else:
        s.encoded[c.prev].next = c.next
    if c.next == NONE:
        e.encoder_last = c.prev
    else:
        s.encoded[c.next].prev = c.prev
    c.next = c.prev = NONE


@inlined
def _append(s: State, content: int) -> None:
    """Nobody holds a content any more: it may be evicted, after all those that may be now."""
    e, c = s.engine[0], s.encoded[content]
    e.encoder_freeable += c.tokens
    if e.external == 1:
        return
    c.next, c.prev = NONE, e.encoder_last
    if e.encoder_last == NONE:
        e.encoder_first = content
    else:
        s.encoded[e.encoder_last].next = content
    e.encoder_last = content


@inlined
def _hold(s: State, content: int) -> bool:
    """One more request holds a content that is in the cache; False if the plan needs its room."""
    e, c = s.engine[0], s.encoded[content]
    if c.refs == 0:
        if c.tokens > e.encoder_freeable:
            return False
        e.encoder_freeable -= c.tokens
        if e.external == 0:
            _unlink(s, content)
    c.refs += 1
    return True


@inlined
def evict(s: State, tokens: int) -> None:
    """Make room in the cache for so many tokens: what nobody holds goes, the oldest first.

    Under the fair rules once the step is planned: what a later request of the plan shows stays.
    """
    e = s.engine[0]
    while tokens > e.encoder_free:
        oldest = e.encoder_first
        _unlink(s, oldest)
        s.encoded[oldest].cached = 0
        e.encoder_free += s.encoded[oldest].tokens


@compiled
def _encode(s: State, row: int, item: int) -> bool:
    """Let the planned step encode an item for a request; False if there is no room for it."""
    e, r, totals = s.engine[0], s.req[row], s.totals
    tokens = s.item_end[item] - s.item_start[item]
    if tokens > e.encoder_budget - totals[ENCODED] or tokens > e.encoder_freeable:
        return False
    if e.mode != FAIR:
        evict(s, tokens)
    c = s.encoded[s.item_content[item]]
    c.cached, c.refs, c.tokens = 1, 1, tokens
    c.step, c.row = e.step, row
    e.encoder_free -= tokens
    e.encoder_freeable -= tokens
    totals[ENCODED] += tokens
    totals[ENCODE_MS] += s.item_ms[item]
    totals[WORK] += item_work(s, item)
    r.encode_ms += s.item_ms[item]
    return True


@compiled
def hold_items(s: State, row: int, position: int, tokens: int) -> int:
    """Hold encoded what a request's next chunk shows; how far the chunk gets.

    Args:
        s: The memory.
        row: A request whose items are open (`open_items`).
        position: Prompt tokens before the chunk.
        tokens: Its length.

    Returns:
        `tokens`, or fewer: those before the first item that there is no room for.
    """
    r = s.req[row]
    last = r.media_first + r.media_count
    while r.media_held < last and s.item_start[r.media_held] < position + tokens:
        item = int(r.media_held)
        if not shown(s, r.media_next, item, item):
            content = int(s.item_content[item])
            cached = s.encoded[content].cached == 1
            held = _hold(s, content) if cached else _encode(s, row, item)
            if not held:
                return max(0, int(s.item_start[item]) - position)
        r.media_held += 1
    return tokens


@inlined
def _release_next(s: State, row: int) -> None:
    """A request lets go of the first item that it holds, unless it shows the same again later."""
    r = s.req[row]
    item = int(r.media_next)
    r.media_next += 1
    if shown(s, r.media_next, r.media_held, item):
        return
    content = int(s.item_content[item])
    c = s.encoded[content]
    c.refs -= 1
    if c.refs == 0 and c.cached == 1:
        _append(s, content)


@inlined
def pass_items(s: State, row: int) -> None:
    """The planned step has run: let go of the items that the request has computed past."""
    r = s.req[row]
    r.encoded_ms += r.encode_ms
    r.encode_ms = 0.0
    while r.media_next < r.media_held and s.item_end[r.media_next] <= r.computed:
        _release_next(s, row)


@compiled
def _pass_on(s: State, row: int, item: int) -> bool:
    """Another request that shows what the planned step was to encode for `row` has it encoded."""
    e, content = s.engine[0], s.item_content[item]
    for at in range(e.prefilling):
        other = s.prefilling[at]
        o = s.req[other]
        if other == row or not shown(s, o.media_next, o.media_held, item):
            continue
        s.encoded[content].row = other
        o.encode_ms += s.item_ms[item]
        return True
    return False


@compiled
def _take_back(s: State, row: int, item: int) -> None:
    """An item of the planned step is not encoded for `row` after all."""
    e, totals = s.engine[0], s.totals
    c = s.encoded[s.item_content[item]]
    if c.refs > 1 and _pass_on(s, row, item):
        return
    c.cached = 0
    c.step = NONE
    e.encoder_free += c.tokens
    e.encoder_freeable += c.tokens
    totals[ENCODE_MS] -= s.item_ms[item]
    totals[WORK] -= item_work(s, item)


@compiled
def drop_items(s: State, row: int, unmade: bool) -> None:
    """A request that stops lets go of all its items.

    Those that the planned step was to encode for it leave room in the step's budget. `unmade` says
    that they are forgotten as well; vLLM, when it preempts, takes them for encoded.
    """
    e, r = s.engine[0], s.req[row]
    while r.media_next < r.media_held:
        item = int(r.media_next)
        c = s.encoded[s.item_content[item]]
        planned = c.cached == 1 and c.step == e.step and c.row == row
        if planned and not shown(s, item + 1, r.media_held, item):
            if unmade:
                _take_back(s, row, item)
            if c.row == row:
                s.totals[ENCODED] -= c.tokens
        _release_next(s, row)
    r.encode_ms = 0.0
