"""What must hold of the replay's memory between any two steps."""

from __future__ import annotations

from collections import Counter

import numpy as np

from trimtab.engine_bridge.replay.layout import DECODING, DONE, NONE, PREFILLING, WAITING, State


def check_invariants(s: State) -> None:
    """Recount everything from the requests and compare with the running counts."""
    e = s.engine[0]
    _check_blocks(s)
    _check_encoder(s)
    req = s.req
    running = s.running[: e.running]
    assert len(set(running.tolist())) == e.running <= len(s.running)
    assert set(running.tolist()) == set(
        np.flatnonzero((req.status == PREFILLING) | (req.status == DECODING)).tolist()
    )
    assert e.decoding == np.sum(req.status == DECODING)
    assert e.prefilling == np.sum(req.status == PREFILLING)
    assert e.waiting == np.sum(req.status == WAITING) == sum(lst.count for lst in s.lists)
    assert e.left == np.sum(req.status != DONE)
    decoding = np.flatnonzero(req.status == DECODING)
    computed = req.computed[decoding] + e.step - req.sync_step[decoding]
    assert e.read_tokens == computed.sum()
    assert e.ahead == req.ahead.sum() == req.ahead[decoding].sum()
    grow, phase = np.zeros_like(s.grow), e.step % e.block_size
    for row, tokens in zip(decoding, computed, strict=True):
        pool = s.tiers[req.tier[row]].pool
        if e.drafting == 0:
            grow[pool, (e.step - tokens) % e.block_size] += 1
        elif tokens + 1 + req.ahead[row] > req.blocks[row] * e.block_size:
            # Its blocks are counted anew after each step: only the next one must be right.
            grow[pool, phase] += 1
    if e.drafting == 0:
        assert np.array_equal(grow, s.grow)
    else:
        assert np.array_equal(grow[:, phase], s.grow[:, phase])
        assert s.grow.sum() == len(decoding)
    for number, tier in enumerate(s.tiers):
        mine = req.tier == number
        assert tier.waiting == np.sum(mine & (req.status == WAITING))
        assert tier.running == np.sum(
            mine & ((req.status == PREFILLING) | (req.status == DECODING))
        )
        assert tier.outstanding_ms >= -1e-6


def _check_encoder(s: State) -> None:
    e, encoded = s.engine[0], s.encoded
    cached = encoded.cached == 1
    assert 0 <= e.encoder_free == e.encoder_cache - encoded.tokens[cached].sum()
    unheld = cached & (encoded.refs == 0)
    assert e.encoder_freeable == e.encoder_free + encoded.tokens[unheld].sum()
    listed, content = [], e.encoder_first
    while content != NONE:
        listed.append(content)
        content = encoded[content].next
    assert sorted(listed) == np.flatnonzero(unheld).tolist()
    refs = np.zeros(len(encoded), np.int64)
    for row in s.running[: e.running]:
        r = s.req[row]
        assert r.media_first <= r.media_next <= r.media_held <= r.media_first + r.media_count
        refs[list(set(s.item_content[r.media_next : r.media_held].tolist()))] += 1
    assert np.array_equal(refs, encoded.refs)


def _check_blocks(s: State) -> None:
    e = s.engine[0]
    assert e.empty_blocks >= 0
    assert e.cached_blocks == s.classes.blocks.sum() >= 0
    assert e.empty_blocks + e.cached_blocks + s.pools.held.sum() == e.total_blocks
    held = np.zeros(len(s.pools), np.int64)
    items: Counter[int] = Counter()
    for slot in range(e.running):
        row = s.running[slot]
        r = s.req[row]
        grown = r.blocks
        if r.status == DECODING:
            tokens = r.computed + e.step - r.sync_step
            grown = max(grown, -(-int(tokens) // int(e.block_size)))
        held[s.tiers[r.tier].pool] += grown - r.named_blocks
        for block in range(r.named_blocks):
            items[int(s.tables[r.table, block])] += 1
    for number, refs in items.items():
        item = s.items[number]
        assert item.refs == refs == s.pool_refs[number].sum()
        assert s.pool_refs[number, item.charge] > 0
        assert item.blocks == 1
        held[item.charge] += 1
    assert np.array_equal(held, s.pools.held)
    for number, at in enumerate(s.classes):
        row, blocks = at.head, 0
        while row != NONE:
            item = s.items[row]
            assert item.kind == number
            assert item.refs == 0
            assert item.blocks > 0
            blocks += item.blocks
            row = item.next
        assert blocks == at.blocks
