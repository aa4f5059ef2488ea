"""Names of the replayed KV cache's blocks: which of them hold a content, the first named first.

As vLLM's map from hashes to blocks. Who takes blocks and gives them back, `kv_cache` tells; which
cached ones are emptied, `cached_items`.
"""

from __future__ import annotations

from trimtab.engine_bridge.compiled import compiled, inlined
from trimtab.engine_bridge.replay.layout import DECODING, NONE, State


@inlined
def new_item(s: State, prefix: int, blocks: int, pool: int) -> int:
    """A new item of a content, or of a request's own blocks (`prefix` -1 - row), held by nobody."""
    e = s.engine[0]
    e.free_items -= 1
    number = s.free_items[e.free_items]
    item = s.items[number]
    item.prefix = prefix
    item.blocks = blocks
    item.refs = 0
    item.charge = pool
    item.reused = 0
    item.next = NONE
    item.prev = NONE
    item.same = NONE
    if prefix >= 0:
        # Equal content may exist twice; the copy that was named first is found, as in vLLM.
        if s.first_item[prefix] == NONE:
            s.first_item[prefix] = number
        else:
            last = int(s.first_item[prefix])
            while s.items[last].same != NONE:
                last = s.items[last].same
            s.items[last].same = number
    return number


@inlined
def drop_item(s: State, number: int) -> None:
    """Forget an item that is in no list any more; its content is not found by it again."""
    e, item = s.engine[0], s.items[number]
    if item.prefix >= 0:
        if s.first_item[item.prefix] == number:
            s.first_item[item.prefix] = item.same
        else:
            before = int(s.first_item[item.prefix])
            while s.items[before].same != number:
                before = s.items[before].same
            s.items[before].same = item.same
    elif s.req[-1 - item.prefix].own_item == number:
        s.req[-1 - item.prefix].own_item = NONE
    s.free_items[e.free_items] = number
    e.free_items += 1


@inlined
def content_of(s: State, row: int, block: int) -> int:
    """Content number of one of a request's named blocks; asked for in ascending order."""
    r = s.req[row]
    while block >= r.span_blocks:
        r.span_blocks += s.run_blocks[s.prefix_ids[r.prefix_start + r.groups]]
        r.groups += 1
    run = int(s.prefix_ids[r.prefix_start + r.groups - 1])
    return int(s.run_first[run]) + block - (r.span_blocks - int(s.run_blocks[run]))


@inlined
def _name_next(s: State, row: int, content: int) -> None:
    """Make a request's next unnamed block findable by its content."""
    r = s.req[row]
    pool = s.tiers[r.tier].pool
    number = new_item(s, content, 1, pool)
    s.items[number].refs = 1
    s.pool_refs[number, pool] = 1
    s.tables[r.table, r.named_blocks] = number
    r.named_blocks += 1


@compiled
def name_answer(s: State, content: int, ahead: int) -> None:
    """Name what a running answer has filled, if it is one that makes this content.

    Decodes name their blocks only when they stop, or here: before anybody else's block gets the
    name, and when it matters whether there is one. `ahead` is 1 if the answer's token of the step
    that is being planned counts.
    """
    row = int(s.maker[content])
    if row == NONE or s.req[row].status != DECODING:
        return
    r = s.req[row]
    tokens = r.computed + s.engine[0].step - r.sync_step + ahead
    full = min(tokens // s.engine[0].block_size, r.named_total)
    while r.named_blocks < full:
        _name_next(s, row, content_of(s, row, r.named_blocks))


@inlined
def name_blocks(s: State, row: int, tokens: int, planned: bool) -> None:
    """Make the full blocks of the first `tokens` tokens findable by their content.

    `planned` says that the batch's decodes have been scheduled for this step, in the order in which
    they joined, and have named what its token fills.
    """
    e, r = s.engine[0], s.req[row]
    if e.external == 1:
        return
    full = min(tokens // e.block_size, r.named_total)
    while r.named_blocks < full:
        content = content_of(s, row, r.named_blocks)
        maker = int(s.maker[content])
        if maker != NONE and maker != row:
            ahead = planned and s.req[maker].admission < r.admission
            name_answer(s, content, 1 if ahead else 0)
        _name_next(s, row, content)
