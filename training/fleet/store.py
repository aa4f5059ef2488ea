"""KV blocks that a fleet's engines share outside of their GPUs, and what loading them costs.

As LMCache's shared store: whoever has computed a prompt's blocks leaves them there, whoever is
asked for the same beginning may load them instead of computing them. Least recently used blocks
go first. It moves no bytes: it counts blocks and says how long a load takes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.trace import Trace
from trimtab.training.fleet.settings import Store

LongArray = npt.NDArray[np.int64]
_NEVER = -1
_KEPT_FRACTION = 0.95


class SharedStore:
    """The store of one run."""

    def __init__(
        self, settings: Store, trace: Trace, *, block_tokens: int, kv_bytes_per_token: int
    ) -> None:
        """Begin empty.

        Args:
            settings: Size and speed.
            trace: The traffic: its prefix ids name the content.
            block_tokens: Tokens of an engine's block.
            kv_bytes_per_token: KV cache of one token over all GPUs of an engine, bytes.
        """
        self._settings, self._trace = settings, trace
        self._block_tokens, self._token_bytes = block_tokens, kv_bytes_per_token
        contents = int(trace.prefix_ids.max(initial=-1)) + 1
        self._used = np.full(contents, _NEVER, np.int64)
        self._sizes = self._id_tokens(contents)
        self._room_tokens = settings.gib * 2**30 / kv_bytes_per_token
        self._held_tokens = 0
        self._clock = 0
        self.loaded_tokens = 0
        """Tokens that engines have loaded instead of computing them."""

    def _id_tokens(self, contents: int) -> LongArray:
        """Tokens that each prefix id covers."""
        sizes = np.zeros(contents, np.int64)
        counts = np.diff(self._trace.prefix_offsets)
        sizes[self._trace.prefix_ids] = np.repeat(self._trace.prefix_block_tokens, counts)
        return sizes

    def _ids(self, row: int) -> npt.NDArray[np.int32]:
        first, last = self._trace.prefix_offsets[row], self._trace.prefix_offsets[row + 1]
        return self._trace.prefix_ids[first:last]

    def held_tokens(self, row: int) -> int:
        """Leading tokens of a prompt that are in the store; whole blocks, one token left over."""
        ids = self._ids(row)
        missing = np.flatnonzero(self._used[ids] == _NEVER)
        whole = int(missing[0]) if len(missing) else len(ids)
        tokens = whole * int(self._trace.prefix_block_tokens[row])
        most = int(self._trace.prompt_tokens[row]) - 1
        return min(tokens, most) // self._block_tokens * self._block_tokens

    def load_s(self, row: int, cached_tokens: int) -> float:
        """How long it takes an engine that has `cached_tokens` to load the rest that is there.

        Returns:
            Seconds; 0 where loading is not worth while.
        """
        more = self.held_tokens(row) - cached_tokens
        if more < max(1, self._settings.least_tokens):
            return 0.0
        self.loaded_tokens += more
        moved_gib = more * self._token_bytes / 2**30
        return self._settings.latency_ms * 1e-3 + moved_gib / self._settings.gib_per_s

    def keep(self, row: int, tokens: int) -> None:
        """An engine has computed the leading `tokens` of a request: they are in the store now."""
        size = int(self._trace.prefix_block_tokens[row])
        if not size:
            return
        ids = self._ids(row)[: tokens // size]
        # The end of a prefix is of no use without its beginning: it goes first.
        self._clock += len(ids)
        new = np.unique(ids[self._used[ids] == _NEVER])
        self._used[ids] = self._clock - np.arange(len(ids))
        self._held_tokens += int(self._sizes[new].sum())
        if self._held_tokens > self._room_tokens:
            self._drop()

    def _drop(self) -> None:
        held = np.flatnonzero(self._used != _NEVER)
        oldest = held[np.argsort(self._used[held], kind="stable")]
        # A little more than must go, so that not every request sorts what is held.
        over = self._held_tokens - _KEPT_FRACTION * self._room_tokens
        gone = oldest[: int(np.searchsorted(np.cumsum(self._sizes[oldest]), over)) + 1]
        self._used[gone] = _NEVER
        self._held_tokens -= int(self._sizes[gone].sum())
