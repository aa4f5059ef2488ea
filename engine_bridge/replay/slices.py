"""Slices of long prompts among the rows of a replay, and what their gateway believes to be read.

A slice reads the beginning of its request's prompt and generates one token; its rows lie right
before the request's own. Which of them go to the engine is decided when the request arrives, as in
`gateway.slices`. Where prompts are cut and how the rows are put together again is
`training.whatif.slicing`'s business.
"""

from __future__ import annotations

import numpy as np

from trimtab.engine_bridge.compiled import compiled, inlined
from trimtab.engine_bridge.pricing import REPEATED_PROMPT_PRICE, repeated_prompt_tokens
from trimtab.engine_bridge.replay.layout import FINISHED, NONE, State
from trimtab.engine_bridge.replay.records import Records
from trimtab.engine_bridge.trace import NO_SLICE, LongArray, Trace


def first_alike(trace: Trace) -> LongArray:
    """Of each slice the first one of the trace that reads the same, shape (n,); `NO_SLICE` else.

    As the gateway's marks: the same tenant, and the same tokens. What lies beyond a prompt's prefix
    ids is like nothing else.
    """
    found = np.full(len(trace), NO_SLICE, np.int64)
    if trace.slice_of is None:
        return found
    rows = np.flatnonzero(trace.slice_of != NO_SLICE)
    own = trace.slice_of[rows]
    end = trace.prompt_tokens[rows].astype(np.int64)
    place = (end - 1) // np.maximum(1, trace.prefix_block_tokens[own])
    have = trace.prefix_offsets[own + 1] - trace.prefix_offsets[own]
    name = -1 - rows
    known = place < have
    name[known] = trace.prefix_ids[trace.prefix_offsets[own][known] + place[known]]
    keys = np.stack((trace.tenant[rows], end, name), axis=1)
    _, first, same = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    found[rows] = rows[first[same.reshape(-1)]]
    return found


def put_slices(req: Records, trace: Trace) -> None:
    """Make the records of a trace's slices: content, price and kin.

    Args:
        req: The records; everything of the requests themselves is there already.
        trace: The traffic.
    """
    if trace.slice_of is None:
        return
    own = np.where(trace.slice_of == NO_SLICE, np.arange(len(trace)), trace.slice_of)
    for name in ("prefix_start", "prefix_count", "named_total"):
        req[name][:] = req[name][own]
    req.slice[:] = first_alike(trace)
    prompt = trace.prompt_tokens.astype(np.float64)
    before = np.zeros(len(trace))
    before[1:] = np.where(own[1:] == own[:-1], prompt[:-1], 0.0)
    repeated = np.maximum(before, np.minimum(repeated_prompt_tokens(trace)[own], prompt))
    req.prompt_worth[:] = prompt - (1.0 - REPEATED_PROMPT_PRICE) * repeated


@inlined
def unread(s: State, row: int) -> int:
    """The row to begin with of a request that arrives: its first slice that is not known as read.

    Slices after the first that is sent go in any case.
    """
    if s.engine[0].external == 1 or (row > 0 and s.req[row - 1].slice != NONE):
        return row
    while s.req[row].slice != NONE and s.req[s.req[row].slice].read == 1:
        row = s.req[row].successor
    return row


@inlined
def following(s: State, row: int) -> int:
    """Who comes after a row has ended: after a slice that was not read the request itself."""
    r = s.req[row]
    later = r.successor
    if r.slice != NONE and r.outcome != FINISHED:
        while later != NONE and s.req[later].slice != NONE:
            later = s.req[later].successor
    return later


@compiled
def believe_read(s: State, row: int) -> None:
    """Learn from a row that has finished what the engine has cached of its prompt.

    A slice has been read. A request tells which of its slices were cached no more: those that end a
    slice or more beyond what it has found.
    """
    if s.engine[0].external == 1:
        return
    r = s.req[row]
    if r.slice != NONE:
        s.req[r.slice].read = 1
        return
    first = row
    while first > 0 and s.req[first - 1].slice != NONE:
        first -= 1
    for at in range(first, row):
        if s.req[at].prompt - r.cached >= s.req[first].prompt:
            s.req[s.req[at].slice].read = 0
