"""The in-memory form of recorded traffic: one column an attribute, one row a request.

Readers, composers and generators make it (`trimtab.training.traces`); engines replay it. It reads
no files and draws no random numbers.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, fields, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.errors import TraceError
from trimtab.engine_bridge.media import IMAGE, MediaItems

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]

NO_SESSION = -1
"""Value of `Trace.session` for a request that belongs to no session."""
NO_SLICE = -1
"""Value of `Trace.slice_of` for a request."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Recorded or synthetic traffic of n requests, sorted by arrival (then by row).

    Within a session the rows are in turn order. Turn 0 arrives at its `arrival_s`; every later turn
    arrives `think_s` after the last token of the turn before it (closed loop), and its `arrival_s`
    is only a hint for the sort order.
    """

    arrival_s: FloatArray
    """Arrival, seconds from the start of the trace, shape (n,), non-decreasing."""
    tier: IntArray
    """Index into `tier_names`, shape (n,)."""
    tenant: IntArray
    """Index into `tenant_names`, shape (n,)."""
    prompt_tokens: IntArray
    """Prompt length, tokens, at least 1, shape (n,)."""
    output_tokens: IntArray
    """Generated length, tokens, at least 1, shape (n,)."""
    tier_names: tuple[str, ...]
    tenant_names: tuple[str, ...]
    session: IntArray
    """Session number or `NO_SESSION`, shape (n,)."""
    turn: IntArray
    """Turn inside the session from 0, shape (n,); 0 without a session."""
    think_s: FloatArray
    """Pause before this turn after the previous turn's last token, seconds, shape (n,)."""
    prefix_offsets: LongArray
    """Row i's prefix ids lie between `prefix_offsets[i]` and the next offset, shape (n + 1,)."""
    prefix_ids: IntArray
    """Dense ids (0..m-1) of the full prefix blocks of each prompt, in order. Equal ids mean equal
    content with an equal prefix. Ids may cover tokens beyond the prompt (the answer, when the next
    turn repeats it): they name what the request leaves in the cache."""
    prefix_block_tokens: IntArray
    """Tokens that one prefix id of this row covers, shape (n,); 0 where the row has no ids."""
    cancel_after_s: FloatArray
    """The client gives up this long after arrival, seconds; infinity = never, shape (n,)."""
    stop_reason: IntArray
    """Index into `stop_names`, shape (n,)."""
    stop_names: tuple[str, ...] = ("",)
    """Stop reasons; index 0 is "unknown"."""
    media: MediaItems = field(default_factory=lambda: MediaItems.none(0))
    """Images, audio and videos inside the prompts; their tokens count in `prompt_tokens`."""
    slice_of: IntArray | None = None
    """Of a slice, a row that only reads the beginning of a prompt, the row of its request, which
    comes right after its slices and has the prefix ids of all; `NO_SLICE` of a request; shape (n,).
    None: no row is a slice. Files of traces never have any."""
    acceptance: FloatArray = field(default_factory=lambda: np.zeros(0))
    """Per-token acceptance of a draft model in [0, 1], NaN = unknown, shape (n,)."""
    notes: tuple[str, ...] = ()
    """What a reader changed or left out, for people: one sentence each."""

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.arrival_s)

    @property
    def duration_s(self) -> float:
        """Arrival of the last open-loop request, seconds from the start."""
        return float(self.arrival_s[-1]) if len(self) else 0.0

    @property
    def image_tokens(self) -> IntArray:
        """Tokens of the prompt that come from images, shape (n,)."""
        return self.media.tokens_of(IMAGE)

    @property
    def closed_loop(self) -> bool:
        """Whether any turn waits for another one's answer."""
        return bool(np.any(self.turn > 0))

    @classmethod
    def build(
        cls,
        *,
        arrival_s: npt.ArrayLike,
        prompt_tokens: npt.ArrayLike,
        output_tokens: npt.ArrayLike,
        tier: npt.ArrayLike = 0,
        tenant: npt.ArrayLike = 0,
        tier_names: tuple[str, ...] = ("T0",),
        tenant_names: tuple[str, ...] = ("default",),
        **optional: object,
    ) -> Self:
        """Make a trace from the columns at hand; absent ones get their "not known" value.

        Raises:
            TraceError: a column has the wrong length or a value out of bounds.
        """
        arrival = np.asarray(arrival_s, np.float64)
        n = len(arrival)

        def ints(values: npt.ArrayLike) -> IntArray:
            return np.ascontiguousarray(np.broadcast_to(np.asarray(values, np.int32), (n,)))

        columns: dict[str, object] = {
            "session": np.full(n, NO_SESSION, np.int32),
            "turn": np.zeros(n, np.int32),
            "think_s": np.zeros(n),
            "prefix_offsets": np.zeros(n + 1, np.int64),
            "prefix_ids": np.zeros(0, np.int32),
            "prefix_block_tokens": np.zeros(n, np.int32),
            "cancel_after_s": np.full(n, np.inf),
            "stop_reason": np.zeros(n, np.int32),
            "media": MediaItems.none(n),
            "acceptance": np.full(n, np.nan),
        }
        columns.update(optional)
        trace = cls(
            arrival_s=arrival,
            prompt_tokens=ints(prompt_tokens),
            output_tokens=ints(output_tokens),
            tier=ints(tier),
            tenant=ints(tenant),
            tier_names=tier_names,
            tenant_names=tenant_names,
            **columns,  # type: ignore[arg-type]
        )
        trace.check()
        return trace

    def check(self) -> None:
        """Refuse a trace whose columns contradict each other.

        Raises:
            TraceError: with the column, the first bad row, its value and the bound.
        """
        n = len(self)
        for f in fields(self):
            column = getattr(self, f.name)
            if f.name in ("prefix_ids", "prefix_offsets") or not isinstance(column, np.ndarray):
                continue
            if column.shape != (n,):
                raise TraceError(
                    "trace", key=f.name, value=f"{column.shape}", bound=f"shape ({n},)"
                )
        bounds: tuple[tuple[str, npt.NDArray[np.bool_], str], ...] = (
            (
                "arrival_s",
                ~(np.isfinite(self.arrival_s) & (self.arrival_s >= 0)),
                "finite and >= 0",
            ),
            ("prompt_tokens", self.prompt_tokens < 1, "at least 1"),
            ("output_tokens", self.output_tokens < 1, "at least 1"),
            ("tier", (self.tier < 0) | (self.tier >= len(self.tier_names)), "a known tier"),
            (
                "tenant",
                (self.tenant < 0) | (self.tenant >= len(self.tenant_names)),
                "a known tenant",
            ),
            ("think_s", ~(np.isfinite(self.think_s) & (self.think_s >= 0)), "finite and >= 0"),
            ("cancel_after_s", ~(self.cancel_after_s > 0), "above 0"),
        )
        for name, bad, bound in bounds:
            if bad.any():
                row = int(np.argmax(bad))
                raise TraceError(
                    f"trace row {row}", key=name, value=getattr(self, name)[row], bound=bound
                )
        self.media.check(self.prompt_tokens)
        if n > 1 and np.any(np.diff(self.arrival_s) < 0):
            row = int(np.argmax(np.diff(self.arrival_s) < 0)) + 1
            raise TraceError(
                f"trace row {row}",
                key="arrival_s",
                value=float(self.arrival_s[row]),
                bound="not before the row above",
                remedy="sort the rows by arrival_s",
            )

    def head(self, rows: int) -> Self:
        """The first `rows` requests (sessions may be cut short)."""
        return self.take(np.arange(min(rows, len(self))))

    def take(self, rows: npt.NDArray[np.int64]) -> Self:
        """The given rows, in the given order, with their prefix ids."""
        starts, ends = self.prefix_offsets[rows], self.prefix_offsets[rows + 1]
        lengths = ends - starts
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        index = np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])
        columns = {
            f.name: getattr(self, f.name)[rows]
            for f in fields(self)
            if isinstance(getattr(self, f.name), np.ndarray)
            and f.name not in ("prefix_ids", "prefix_offsets", "slice_of")
        }
        if self.slice_of is not None:
            place = np.full(len(self) + 1, NO_SLICE, np.int32)
            place[rows] = np.arange(len(rows))
            columns["slice_of"] = place[self.slice_of[rows]]
        return replace(
            self,
            **columns,
            prefix_offsets=offsets,
            prefix_ids=self.prefix_ids[index],
            media=self.media.take(rows),
        )

    def digest(self) -> str:
        """SHA-256 over every column and name, so that equal digests mean equal replays."""
        sha = hashlib.sha256()
        for f in fields(self):
            column = getattr(self, f.name)
            if f.name == "notes" or (f.name == "slice_of" and column is None):
                continue
            if isinstance(column, MediaItems):
                column.update_digest(sha)
                continue
            sha.update(f.name.encode())
            if isinstance(column, np.ndarray):
                sha.update(np.ascontiguousarray(column).tobytes())
            else:
                sha.update(repr(column).encode())
        return sha.hexdigest()
