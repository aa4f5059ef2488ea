"""Put media items into prompts: one after another at the head, or carried along a conversation.

It draws nothing and reads no files.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.media import MediaItems
from trimtab.training.traces.assemble import offsets_of

LongArray = npt.NDArray[np.int64]


def at_the_head(counts: LongArray, kind: LongArray, tokens: LongArray) -> MediaItems:
    """Items one after another from the head of their prompts, each showing something of its own.

    Args:
        counts: Items of each request, shape (n,).
        kind: Index into `MEDIA_KINDS` of each item, in the order of the requests, shape (m,).
        tokens: Tokens of each item, shape (m,).
    """
    offsets = offsets_of(counts)
    before = np.cumsum(tokens) - tokens
    first = np.repeat(offsets[:-1], counts)
    return MediaItems(
        offsets=offsets,
        kind=kind.astype(np.int32),
        start_tokens=(before - before[first]).astype(np.int32),
        tokens=tokens.astype(np.int32),
        content=np.arange(len(tokens), dtype=np.int32),
    )


def carried(
    counts: LongArray, first_turn: LongArray, start: LongArray, kind: LongArray, tokens: LongArray
) -> MediaItems:
    """Items that every later turn of a conversation repeats at the same place.

    Args:
        counts: Items that each turn brings, turns in a row by conversation, shape (n,).
        first_turn: The row of each turn's conversation's first turn, shape (n,).
        start: Place of each new item in the prompt, tokens, shape (m,).
        kind: Index into `MEDIA_KINDS` of each new item, shape (m,).
        tokens: Tokens of each new item, shape (m,).

    Returns:
        The items of each turn, those of the turns before it included.
    """
    until = np.cumsum(counts)
    begin = (until - counts)[first_turn]
    held = until - begin
    offsets = offsets_of(held)
    index = np.repeat(begin - offsets[:-1], held) + np.arange(offsets[-1])
    return MediaItems(
        offsets=offsets,
        kind=kind[index].astype(np.int32),
        start_tokens=start[index].astype(np.int32),
        tokens=tokens[index].astype(np.int32),
        content=index.astype(np.int32),
    )
