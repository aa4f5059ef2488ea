"""Prefix ids of a trace as the replay's cache keeps them: long runs instead of single blocks.

Ids that every request has together, in a row, live and die together: they become one run. Ids that
only one request has can never be found again and are left out; their blocks stay unnamed. Neither
changes what is found or the order in which blocks go.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.errors import TraceError
from trimtab.engine_bridge.trace import NO_SLICE, IntArray, LongArray, Trace


class Prefixes(NamedTuple):
    """Runs of prefix blocks, by request."""

    ids: IntArray
    """Run numbers, dense, shape (places,)."""
    offsets: LongArray
    """Where each request's runs begin in `ids`, shape (requests + 1,)."""
    blocks: IntArray
    """Engine blocks of each run, shape (runs,)."""

    def first_contents(self) -> LongArray:
        """Number of each run's first block among all named blocks, shape (runs,)."""
        return np.concatenate(([0], np.cumsum(self.blocks)))[:-1].astype(np.int64)

    def covered_blocks(self) -> LongArray:
        """Blocks that each request's runs cover, shape (requests,)."""
        ends = np.concatenate(([0], np.cumsum(self.blocks[self.ids])))
        return (ends[self.offsets[1:]] - ends[self.offsets[:-1]]).astype(np.int64)

    def makers(self, first_generated: LongArray) -> IntArray:
        """A request that generates each named block, -1 where prompts alone hold it.

        Args:
            first_generated: Block of each request in which its answer begins, shape (requests,).

        Returns:
            Row numbers, shape (contents,).
        """
        maker = np.full(int(self.blocks.sum()), -1, np.int32)
        size = self.blocks[self.ids].astype(np.int64)
        row = np.repeat(np.arange(len(first_generated)), np.diff(self.offsets))
        start = np.cumsum(size) - size
        start -= np.repeat(
            start[self.offsets[:-1][np.diff(self.offsets) > 0]],
            np.diff(self.offsets)[np.diff(self.offsets) > 0],
        )
        skip = np.clip(first_generated[row] - start, 0, size)
        first = self.first_contents()[self.ids]
        # Backwards, so that the earliest of several rows is the one that stays.
        for at in np.flatnonzero(skip < size)[::-1]:
            maker[first[at] + skip[at] : first[at] + size[at]] = row[at]
        return maker


def find_runs(trace: Trace, block_size: int) -> Prefixes:
    """The trace's prefix runs for blocks of `block_size` tokens.

    Raises:
        TraceError: ids and engine blocks do not line up.
    """
    ids, offsets, id_blocks = _whole_blocks(trace, block_size)
    if not len(ids):
        return Prefixes(np.zeros(0, np.int32), offsets, np.zeros(0, np.int32))
    row = np.repeat(np.arange(len(trace)), np.diff(offsets))
    seen = np.bincount(ids, minlength=len(id_blocks))
    heads = _heads(ids, row, seen, id_blocks)
    begins = heads[ids]
    # A run's ids lie side by side wherever it occurs, so a running count numbers the occurrences.
    size = np.bincount(np.cumsum(begins) - 1, weights=id_blocks[ids])
    blocks_at = np.zeros(len(ids), np.int32)
    blocks_at[begins] = size
    # Only what ends a row may be left out: places before a shared run must stay.
    place = np.arange(len(ids))
    last = np.full(len(trace), -1)
    shared = (seen[ids] > 1) | _with_slices(trace)[row]
    np.maximum.at(last, row, np.where(shared, place, -1))
    kept = begins & (place <= last[row])
    names, dense = np.unique(ids[kept], return_inverse=True)
    blocks = np.zeros(len(names), np.int32)
    blocks[dense] = blocks_at[kept]
    counts = np.bincount(row[kept], minlength=len(trace))
    return Prefixes(
        dense.astype(np.int32).reshape(-1), np.concatenate(([0], np.cumsum(counts))), blocks
    )


def _with_slices(trace: Trace) -> npt.NDArray[np.bool_]:
    """Requests whose slices find what only their ids name, shape (n,)."""
    found = np.zeros(len(trace), np.bool_)
    if trace.slice_of is not None:
        found[trace.slice_of[trace.slice_of != NO_SLICE]] = True
    return found


def _heads(
    ids: IntArray, row: LongArray, seen: LongArray, id_blocks: IntArray
) -> npt.NDArray[np.bool_]:
    """Which ids begin a run: all but those that always follow one and the same id."""
    none = -1
    before = np.full(len(ids), none, np.int64)
    same_row = row[1:] == row[:-1]
    before[1:][same_row] = ids[:-1][same_row]
    least = np.full(len(id_blocks), np.iinfo(np.int64).max)
    most = np.full(len(id_blocks), none)
    np.minimum.at(least, ids, before)
    np.maximum.at(most, ids, before)
    follows = (least == most) & (most != none)
    # Together in every request: the one before is nowhere without this one.
    follows &= seen[most] == seen
    return ~follows


def _whole_blocks(trace: Trace, block_size: int) -> tuple[IntArray, LongArray, IntArray]:
    """Ids in units of whole engine blocks, their offsets, and the blocks that each id covers.

    Ids finer than a block are thinned to the last id of each block, which stands for all before it.
    """
    tokens = trace.prefix_block_tokens
    lengths = np.diff(trace.prefix_offsets)
    for size in np.unique(tokens[lengths > 0]):
        if size <= 0 or (size % block_size and block_size % size):
            raise TraceError(
                "trace",
                key="prefix_block_tokens",
                value=int(size),
                bound=f"a multiple or a divisor of the engine's block of {block_size} tokens",
                remedy="choose another --block-size",
            )
    ids, offsets = trace.prefix_ids, trace.prefix_offsets
    step = np.where(tokens > 0, np.maximum(1, block_size // np.maximum(tokens, 1)), 1)
    if np.any(step != 1):
        counts = lengths // step
        offsets = np.concatenate(([0], np.cumsum(counts)))
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
        start = np.repeat(trace.prefix_offsets[:-1], counts)
        ids = ids[start + (within + 1) * np.repeat(step, counts) - 1]
    id_blocks = np.ones(int(ids.max()) + 1 if len(ids) else 0, np.int32)
    group = np.maximum(1, tokens // block_size)
    id_blocks[ids] = np.repeat(group, np.diff(offsets))
    return ids, offsets, id_blocks
