"""One planned step is run: its time passes and is booked to its requests, and tokens come out.

Steps that only decode and that nothing can change go by in a tight inner loop (`run_decodes`): the
same additions in the same order as one at a time, so the results are equal bit for bit. What a step
carries is planned elsewhere (`plan_fair`, `plan_stock`); drafts are `drafted_step`'s.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from trimtab.engine_bridge.compiled import inlined
from trimtab.engine_bridge.replay.encoding import pass_items
from trimtab.engine_bridge.replay.heaps import drop_first
from trimtab.engine_bridge.replay.item_limits import owe
from trimtab.engine_bridge.replay.kv_cache import take_growth
from trimtab.engine_bridge.replay.layout import DECODING, FAIR, FINISHED, State
from trimtab.engine_bridge.replay.lifecycle import end, outlive, start_decoding, use
from trimtab.engine_bridge.replay.timers import next_event_s
from trimtab.engine_bridge.replay.victims import growth_blocks
from trimtab.engine_bridge.step_time import (
    decode_attention_ms,
    linear_ms,
    mixed_attention_ms,
    prefill_attention_ms,
)

_SHARE_RATE: Final = 0.01
SCALE_RATE: Final = 0.05
"""Weight of one step in what is believed of the engine's drift."""


@inlined
def run_decodes(s: State, until_s: float) -> None:
    """Run steps that only decode, until something may change what a step carries."""
    e = s.engine[0]
    coef = s.coef
    count = e.decoding
    linear = linear_ms(coef, float(count), float(count)) * e.speed
    share = linear / count
    stop_step = s.steps[0].key if e.step_events > 0 else np.inf
    # The stock rules try the waiting queue's head at every step that has a free place.
    single = (
        e.collapse == 0
        or e.drafting > 0
        or (e.mode != FAIR and e.waiting > 0 and e.running < e.max_seqs)
    )
    # A plan that took a victim and let nobody join looks again in the next step.
    single = single or (e.mode == FAIR and e.waiting > 0 and e.blocked_epoch != e.epoch)
    event_s = next_event_s(s)
    epoch = e.epoch
    while True:
        e.began_s = e.now_s
        read = decode_attention_ms(coef, float(count), float(e.read_tokens)) * e.speed
        per_token = read / e.read_tokens
        e.now_s += (linear + read) * 1e-3
        e.busy_ms += linear + read
        e.token_ms += share
        e.read_ms += per_token
        e.read_step_ms += per_token * e.step
        e.decode_share_ms += _SHARE_RATE * (share - e.decode_share_ms)
        e.scale += SCALE_RATE * (e.speed - e.scale)
        e.read_tokens += count
        e.step += 1
        e.interval_steps += 1
        e.interval_batch += count
        seen_s = e.began_s if e.lagging == 1 else e.now_s
        if single or e.step >= stop_step or e.now_s >= until_s or seen_s >= event_s:
            return
        if growth_blocks(s) > e.empty_blocks + e.cached_blocks:
            return
        # As the plan of the step that may come now would, before it looks at the queues.
        take_growth(s)
        if e.mode == FAIR and e.epoch != epoch:
            return


@inlined
def book_mixed(s: State, tokens: int) -> None:
    """Run one step with prefill chunks beside the decodes, and book its time to its requests.

    Who gets a token from it, `advance_prefills` and `due_decodes` tell.
    """
    e = s.engine[0]
    coef = s.coef
    e.began_s = e.now_s
    chunks, pairs = 0, 0.0
    for at in range(e.prefilling):
        r = s.req[s.prefilling[at]]
        if r.grant > 0:
            chunks += 1
            pairs += r.grant * (r.computed + 0.5 * r.grant)
    decodes = e.decoding
    total = tokens + decodes
    linear = linear_ms(coef, float(total), float(decodes + chunks)) * e.speed
    attention = prefill_attention_ms(coef, float(chunks), float(tokens), pairs) * e.speed
    read = decode_attention_ms(coef, float(decodes), float(e.read_tokens))
    read += mixed_attention_ms(coef, float(tokens), float(decodes), float(e.read_tokens))
    read *= e.speed
    share, encode = linear / total, 0.0
    for at in range(e.prefilling):
        row = s.prefilling[at]
        r = s.req[row]
        if r.grant > 0:
            part = r.grant * (r.computed + 0.5 * r.grant) / pairs
            encode += r.encode_ms * e.speed
            use(s, row, share * r.grant + attention * part + r.encode_ms * e.speed)
            s.tiers[r.tier].prefill_tokens += r.grant
    if decodes > 0:
        per_token = read / e.read_tokens
        e.token_ms += share
        e.read_ms += per_token
        e.read_step_ms += per_token * e.step
        e.decode_share_ms += _SHARE_RATE * (share - e.decode_share_ms)
    e.now_s += (linear + attention + read + encode) * 1e-3
    e.busy_ms += linear + attention + read + encode
    e.scale += SCALE_RATE * (e.speed - e.scale)
    e.read_tokens += decodes
    e.step += 1
    e.interval_steps += 1
    e.interval_batch += decodes + chunks
    if encode > 0.0:
        owe(s, linear + attention + read + encode, encode)


@inlined
def advance_prefills(s: State, ending: int) -> int:
    """Count the chunks as computed; prompts that are complete give a token.

    Lines those up that end with it, behind `ending` others in `due`; how many end in all.
    """
    e = s.engine[0]
    at = 0
    while at < e.prefilling:
        row = s.prefilling[at]
        r = s.req[row]
        # What vLLM pads a prompt's last token with (`padding`) is computed for nothing.
        r.computed = min(r.computed + r.grant, r.target)
        r.grant = 0
        if e.encoding == 1:
            pass_items(s, row)
        if r.computed < r.target:
            at += 1
            continue
        r.generated += 1
        if r.generated == 1:
            r.first_s = e.now_s
            s.first_log[e.firsts] = row
            e.firsts += 1
        s.tiers[r.tier].decode_tokens += 1
        if r.generated == r.output and e.drafting == 0:
            s.due[ending] = row
            ending += 1
            at += 1
        else:
            start_decoding(s, row)
    return ending


@inlined
def due_decodes(s: State) -> int:
    """Handle the step events that are due: outlived predictions, and last tokens into `due`."""
    e = s.engine[0]
    ending = 0
    while e.step_events > 0 and s.steps[0].key <= e.step:
        row, version = s.steps[0].row, s.steps[0].tag
        drop_first(s.steps, e.step_events)
        e.step_events -= 1
        r = s.req[row]
        if r.version != version or r.status != DECODING:
            continue
        if r.generated + e.step - r.sync_step < r.output:
            outlive(s, row)
            continue
        s.due[ending] = row
        ending += 1
    return ending


@inlined
def end_in_order(s: State, count: int) -> None:
    """End the requests in `due` in the order in which they joined the batch, as vLLM does.

    Their blocks become idle in that order.
    """
    for after in range(1, count):
        row, at = s.due[after], after
        while at > 0 and s.req[s.due[at - 1]].admission > s.req[row].admission:
            s.due[at] = s.due[at - 1]
            at -= 1
        s.due[at] = row
    for at in range(count):
        end(s, s.due[at], FINISHED)
